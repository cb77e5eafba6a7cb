/* peak.c – what the processor itself can do: multiply-adds that wait for nothing, and reads of memory.
 *
 * `python -m attnmask.bench` compiles it for the processor that it runs on, and calls each function in as many
 * threads as it measures with. benchmarks/native.c includes it.
 */
#include <stddef.h>
#include <stdint.h>
#ifdef __AVX512BF16__
#    include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

enum { CHAINS = 12 }; /* enough for two units with a latency of six cycles */

#ifdef __AVX512F__
#    define WIDEST 64
#elif defined __AVX__
#    define WIDEST 32
#else
#    define WIDEST 16
#endif

/* Where chains start: what the compiler knows of none, it cannot derive one from another. */
volatile float chain_start[CHAINS] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8};

/* Each function returns its number of operations, or 0 where the processor lacks the instruction. */
#define PEAK(name, scalar, bytes)                                                                            \
    double name(size_t steps)                                                                                \
    {                                                                                                        \
        typedef scalar vector __attribute__((vector_size(bytes)));                                           \
        const vector zero = {0}, x = zero + (scalar)0.999, y = zero + (scalar)1e-3;                          \
        vector sum[CHAINS];                                                                                  \
        for (int i = 0; i < CHAINS; i++) sum[i] = zero + (scalar)chain_start[i];                             \
        for (size_t step = 0; step < steps; step++)                                                          \
            for (int i = 0; i < CHAINS; i++) sum[i] = sum[i] * x + y;                                        \
        volatile vector sink;                                                                                \
        for (int i = 0; i < CHAINS; i++) sink = sum[i];                                                      \
        (void)sink;                                                                                          \
        return 2.0 * CHAINS * (bytes / sizeof(scalar)) * (double)steps;                                      \
    }

PEAK(peak_float32, float, WIDEST)
PEAK(peak_float64, double, WIDEST)

#ifdef __AMX_BF16__
/* Four whole tiles accumulate products of two others, if Linux lends tiles to the process. */
static double peak_tiles(size_t steps)
{
    enum { REQUEST = 0x1023, TILES = 18, OPERATIONS = 4 * 2 * 16 * 16 * 32 };
    if (syscall(SYS_arch_prctl, REQUEST, TILES)) return 0;
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
    return (double)OPERATIONS * (double)steps;
}
#endif

double peak_bfloat16(size_t steps)
{
#ifdef __AMX_BF16__
    const double done = peak_tiles(steps);
    if (done) return done;
#endif
#ifdef __AVX512BF16__
    const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f00); /* 0.5 */
    __m512 sum[CHAINS];
    for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_set1_ps(chain_start[i]);
    for (size_t step = 0; step < steps; step++) {
        for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_dpbf16_ps(sum[i], x, x);
    }
    volatile __m512 sink;
    for (int i = 0; i < CHAINS; i++) sink = sum[i];
    (void)sink;
    return 64.0 * CHAINS * (double)steps;
#else
    (void)steps;
    return 0;
#endif
}

/* Reads all of it; the sum is there so that nobody can skip the work. */
uint64_t read_words(const uint64_t *words, size_t count)
{
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) total += words[i];
    return total;
}
