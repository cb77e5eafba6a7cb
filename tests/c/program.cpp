// program.cpp – calls the C library from several threads at once in C++: all get the same bits, which are
// written to a file for test_programs.py.
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "attnmask.h"

namespace {

constexpr int64_t batch = 2, tokens = 150, heads = 4, channels = 32,
                  count = batch * tokens * heads * channels;

std::vector<float> numbers(int64_t seed)
{
    std::vector<float> x(count);
    for (int64_t i = 0; i < count; i++)
        x[i] = static_cast<float>(((seed * 7919 + i * 104729) % 2001 - 1000) / 500.0);
    return x;
}

attnmask_array array_of(const std::vector<float> &x)
{
    const int64_t shape[] = {batch, tokens, heads, channels};
    return attnmask_array_of(x.data(), ATTNMASK_FLOAT32, 4, shape);
}

attnmask_status attend(std::vector<float> &out, attnmask_message &message)
{
    const std::vector<float> q = numbers(1), k = numbers(2), v = numbers(3);
    attnmask_mask causal = {};
    causal.size = sizeof causal;
    causal.high = attnmask_number(0);
    attnmask_attention call = {};
    call.size = sizeof call;
    call.query = array_of(q);
    call.key = array_of(k);
    call.value = array_of(v);
    call.mask = &causal;
    call.out = array_of(out);
    return attnmask_forward(&call, &message);
}

} // namespace

int main(int given, char **arguments)
{
    constexpr int callers = 8;
    std::vector<std::vector<float>> out(callers, std::vector<float>(count));
    std::vector<attnmask_status> status(callers, ATTNMASK_INVALID);
    std::vector<attnmask_message> messages(callers);
    std::vector<std::thread> threads;
    for (int i = 0; i < callers; i++) {
        threads.emplace_back([&, i] {
            attnmask_set_threads(i % 3, nullptr);
            for (int repeat = 0; repeat < 5; repeat++) status[i] = attend(out[i], messages[i]);
        });
    }
    for (std::thread &thread : threads) thread.join();
    for (int i = 0; i < callers; i++) {
        if (status[i] != ATTNMASK_OK) return std::fprintf(stderr, "%s\n", messages[i].text), 1;
        if (out[i] != out[0]) return std::fprintf(stderr, "thread %d has other bits\n", i), 2;
    }
    std::FILE *results = given > 1 ? std::fopen(arguments[1], "wb") : nullptr;
    if (!results || std::fwrite(out[0].data(), sizeof(float), count, results) != count) return 3;
    return std::fclose(results);
}
