/* native.c – yardsticks: what this machine's memory gives to plain C with the same number of threads.
 *
 * harness.py compiles it at run time with -O3 -march=native, and -fopenmp where the compiler has it.
 */
#include <stddef.h>
#include <stdint.h>
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

/* Reads all of it; the sum is there so that nobody can skip the work. */
uint64_t read_all(const void *src, size_t bytes, int threads)
{
    uint64_t total = 0;
    (void)threads;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        size_t begin, count = share(bytes, &begin);
        const uint64_t *words = (const uint64_t *)((const char *)src + begin);
        for (size_t i = 0; i < count / sizeof *words; i++) total += words[i];
    }
    return total;
}
