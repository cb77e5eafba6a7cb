/* native.c – yardsticks: what this machine's memory and arithmetic give to plain C with the same number of
 * threads.
 *
 * harness.py compiles it at run time with -O3 -march=native, and -fopenmp where the compiler has it.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#    include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#    include <sys/syscall.h>
#    include <unistd.h>
#endif
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

/* Products and sums that wait for nobody: enough chains for two units with a latency of six cycles. Each
 * function gives the number of operations of all threads, or 0 where the processor lacks the instruction. */
enum { CHAINS = 12 };

#ifdef __AVX512F__
#    define WIDEST 64
#elif defined __AVX__
#    define WIDEST 32
#else
#    define WIDEST 16
#endif

/* Where chains start: what the compiler knows of none, it cannot derive one from another. */
volatile float chain_start[CHAINS] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8};

#define FMA(name, scalar, bytes)                                                                             \
    double name(size_t steps, int threads)                                                                   \
    {                                                                                                        \
        typedef scalar vector __attribute__((vector_size(bytes)));                                           \
        int count = 0;                                                                                       \
        (void)threads;                                                                                       \
        _Pragma("omp parallel num_threads(threads) reduction(+ : count)")                                    \
        {                                                                                                    \
            const vector zero = {0}, x = zero + (scalar)0.999, y = zero + (scalar)1e-3;                      \
            vector sum[CHAINS];                                                                              \
            for (int i = 0; i < CHAINS; i++) sum[i] = zero + (scalar)chain_start[i];                         \
            for (size_t step = 0; step < steps; step++)                                                      \
                for (int i = 0; i < CHAINS; i++) sum[i] = sum[i] * x + y;                                    \
            volatile vector sink;                                                                            \
            for (int i = 0; i < CHAINS; i++) sink = sum[i];                                                  \
            (void)sink;                                                                                      \
            count++;                                                                                         \
        }                                                                                                    \
        return 2.0 * CHAINS * (bytes / sizeof(scalar)) * (double)steps * count;                              \
    }

FMA(fma_float32, float, WIDEST)
FMA(fma_float64, double, WIDEST)
FMA(fma_avx2, float, 32)

#ifdef __AMX_BF16__
/* Four whole tiles accumulate products of two others, if Linux lends tiles to the process. */
static double fma_tiles(size_t steps, int threads)
{
    enum { REQUEST = 0x1023, TILES = 18, OPERATIONS = 4 * 2 * 16 * 16 * 32 };
    int count = 0;
    if (syscall(SYS_arch_prctl, REQUEST, TILES)) return 0;
#    pragma omp parallel num_threads(threads) reduction(+ : count)
    {
        static const struct {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } whole = {1, 0, {0}, {64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16}};
        uint16_t halves[512];
        for (int i = 0; i < 512; i++) halves[i] = 0x3f00; /* 0.5 */
        __asm__ volatile("ldtilecfg %0" : : "m"(whole));
        __asm__ volatile("" : : "r"(halves) : "memory");
        _tile_loadd(4, halves, 64);
        _tile_loadd(5, halves, 64);
        for (size_t step = 0; step < steps; step++) {
            _tile_dpbf16ps(0, 4, 5);
            _tile_dpbf16ps(1, 4, 5);
            _tile_dpbf16ps(2, 4, 5);
            _tile_dpbf16ps(3, 4, 5);
        }
        _tile_release();
        count++;
    }
    return (double)OPERATIONS * (double)steps * count;
}
#endif

double fma_bfloat16(size_t steps, int threads)
{
#ifdef __AMX_BF16__
    const double done = fma_tiles(steps, threads);
    if (done) return done;
#endif
    int count = 0;
#ifdef __AVX512BF16__
#    pragma omp parallel num_threads(threads) reduction(+ : count)
    {
        const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f00); /* 0.5 */
        __m512 sum[CHAINS];
        for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_set1_ps(chain_start[i]);
        for (size_t step = 0; step < steps; step++) {
            for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_dpbf16_ps(sum[i], x, x);
        }
        volatile __m512 sink;
        for (int i = 0; i < CHAINS; i++) sink = sum[i];
        (void)sink;
        count++;
    }
#endif
    (void)threads;
    return 64.0 * CHAINS * (double)steps * count;
}
