/* native.c – yardsticks: what this machine's memory and arithmetic give to plain C with the same number of
 * threads.
 *
 * harness.py compiles it at run time with -O3 -march=native, and -fopenmp where the compiler has it.
 */
#include "../attnmask/bench/peak.c"

#include <string.h>
#ifdef _OPENMP
#    include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

/* The calling thread's share of `bytes`, in whole pages. */
static size_t share(size_t bytes, size_t *begin)
{
    size_t threads = (size_t)omp_get_num_threads(), thread = (size_t)omp_get_thread_num();
    size_t part = (bytes / threads + 4095) / 4096 * 4096;
    *begin = thread * part < bytes ? thread * part : bytes;
    return part < bytes - *begin ? part : bytes - *begin;
}

void copy(void *dst, const void *src, size_t bytes, int threads)
{
    (void)threads;
#pragma omp parallel num_threads(threads)
    {
        size_t begin, count = share(bytes, &begin);
        memcpy((char *)dst + begin, (const char *)src + begin, count);
    }
}

uint64_t read_all(const void *src, size_t bytes, int threads)
{
    uint64_t total = 0;
    (void)threads;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        size_t begin, count = share(bytes, &begin);
        total += read_words((const uint64_t *)((const char *)src + begin), count / sizeof(uint64_t));
    }
    return total;
}

/* Reads each piece, and then changes all of it, as a delta rule does with a state. */
uint64_t read_and_change(void *data, size_t bytes, size_t piece)
{
    uint64_t total = 0;
    for (size_t begin = 0; begin + piece <= bytes; begin += piece) {
        uint64_t *words = (uint64_t *)((char *)data + begin);
        for (size_t i = 0; i < piece / sizeof *words; i++) total += words[i];
        for (size_t i = 0; i < piece / sizeof *words; i++) words[i] = ~words[i];
    }
    return total;
}

/* Products and sums that wait for nobody. Each function gives the number of operations of all threads, or 0 where
 * the processor lacks the instruction. */
#define FMA(type)                                                                                            \
    double fma_##type(size_t steps, int threads)                                                             \
    {                                                                                                        \
        double done = 0;                                                                                     \
        (void)threads;                                                                                       \
        _Pragma("omp parallel num_threads(threads) reduction(+ : done)") done += peak_##type(steps);         \
        return done;                                                                                         \
    }

PEAK(peak_avx2, float, 32)
FMA(float32)
FMA(float64)
FMA(bfloat16)
FMA(avx2)
