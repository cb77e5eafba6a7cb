/* divide.h – divides integers by one positive number and rounds up, with a multiplication instead of a
 * division.
 *
 * Let 2^(s - 1) < b <= 2^s, and m = 2^(N - 1 + s) / b rounded up, which is below 2^N. For all n from 0 to
 * 2^(N - 1)
 *
 *     floor(n / b) = floor(n m / 2^(N - 1 + s)) = q
 *
 * For a > 0 the result is q + 1 with n = a - 1; for a <= 0 it is -q with n = -a. Both are (q ^ flip) + 1,
 * where flip is 0 or all ones. Vectors multiply only numbers of N = 32 bits, in lanes of 64 bits.
 */

typedef struct {
    uint64_t m;
    int shift; /* N - 1 + s */
} reciprocal;

static reciprocal reciprocal_32(int64_t b)
{
    uint64_t divisor = b >> 32 ? UINT64_C(1) << 32 : (uint64_t)b; /* larger ones give the same results */
    int shift = divisor > 1 ? 95 - __builtin_clzll(divisor - 1) : 31;
    return (reciprocal){((UINT64_C(1) << shift) + divisor - 1) / divisor, shift};
}

static void divide_32(int32_t *restrict dst, const int32_t *restrict a, ptrdiff_t count, int64_t b)
{
    typedef uint32_t lanes __attribute__((vector_size(sizeof(vi))));
    typedef int32_t signed_lanes __attribute__((vector_size(sizeof(vi))));
    typedef uint64_t wide_lanes __attribute__((vector_size(sizeof(vi))));
    enum { LANES = sizeof(lanes) / sizeof(uint32_t) };
    const reciprocal r = reciprocal_32(b);
    const vi m = vi_set1(r.m);
    ptrdiff_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        lanes x;
        memcpy(&x, a + i, sizeof x);
        lanes flip = (lanes)((signed_lanes)x <= 0);
        wide_lanes n = (wide_lanes)((x - 1) ^ flip);
        wide_lanes low = (wide_lanes)vi_mul_32((vi)n, m) >> r.shift,
                   high = (wide_lanes)vi_mul_32((vi)(n >> 32), m) >> r.shift;
        x = ((lanes)(low | high << 32) ^ flip) + 1;
        memcpy(dst + i, &x, sizeof x);
    }
    for (; i < count; i++) {
        uint32_t flip = a[i] > 0 ? 0 : UINT32_MAX, n = ((uint32_t)a[i] - 1) ^ flip;
        dst[i] = (int32_t)(((uint32_t)(n * r.m >> r.shift) ^ flip) + 1);
    }
}

static void divide_wide(int64_t *restrict dst, const int64_t *restrict a, ptrdiff_t count, int64_t b)
{
    if (b == 1) {
        memcpy(dst, a, (size_t)count * sizeof *dst);
        return;
    }
    int s = 64 - __builtin_clzll((uint64_t)b - 1);
    uint64_t m = (uint64_t)((((unsigned __int128)1 << (63 + s)) + (uint64_t)b - 1) / (uint64_t)b);
    for (ptrdiff_t i = 0; i < count; i++) {
        uint64_t flip = a[i] > 0 ? 0 : UINT64_MAX, n = ((uint64_t)a[i] - 1) ^ flip;
        uint64_t high = (uint64_t)((unsigned __int128)n * m >> 64);
        dst[i] = (int64_t)(((high >> (s - 1)) ^ flip) + 1);
    }
}

/* Most numbers have at most 31 bits. A block that has a larger one is computed again by divide_wide. */
static void divide_64(int64_t *restrict dst, const int64_t *restrict a, ptrdiff_t count, int64_t b)
{
    typedef uint64_t lanes __attribute__((vector_size(sizeof(vi))));
    typedef int64_t signed_lanes __attribute__((vector_size(sizeof(vi))));
    enum { LANES = sizeof(lanes) / sizeof(uint64_t), BLOCK = 512 };
    const reciprocal r = reciprocal_32(b);
    const vi m = vi_set1(r.m);
    while (count >= LANES) {
        ptrdiff_t n = count < BLOCK ? count / LANES * LANES : BLOCK;
        lanes seen = (lanes)vi_set1(0);
        for (ptrdiff_t i = 0; i < n; i += LANES) {
            lanes x;
            memcpy(&x, a + i, sizeof x);
            lanes flip = (lanes)((signed_lanes)x <= 0);
            x = (x - 1) ^ flip;
            seen |= x;
            x = (((lanes)vi_mul_32((vi)x, m) >> r.shift) ^ flip) + 1;
            memcpy(dst + i, &x, sizeof x);
        }
        uint64_t high = 0;
        for (int i = 0; i < LANES; i++) high |= seen[i] >> 31;
        if (high) divide_wide(dst, a, n, b);
        dst += n, a += n, count -= n;
    }
    divide_wide(dst, a, count, b);
}
