/* divide.h – integers divided by one positive number and rounded up, by a product instead of a division.
 *
 * With 2^(s - 1) < b <= 2^s and m = 2^(N - 1 + s) / b rounded up, which is below 2^N, for all n <= 2^(N - 1)
 *
 *     n / b = n m / 2^(N - 1 + s), both rounded down
 *
 * For n one below a that is one too few; for n = -a, where a is not positive, it is the negative of what is
 * wanted: q becomes (q ^ flip) + 1 in both. Vectors know products for N = 32 only, in lanes of 64 bits.
 */

typedef struct {
    uint64_t m;
    int shift; /* N - 1 + s, or with N = 64 as much less 64 */
} reciprocal;

static reciprocal reciprocal_32(int64_t b)
{
    uint64_t divisor = b >> 32 ? UINT64_C(1) << 32 : (uint64_t)b; /* a larger one makes no odds */
    int shift = divisor > 1 ? 95 - __builtin_clzll(divisor - 1) : 31;
    return (reciprocal){((UINT64_C(1) << shift) + divisor - 1) / divisor, shift};
}

static void divide_32(int32_t *restrict dst, const int32_t *restrict a, ptrdiff_t count, int64_t b)
{
    typedef uint32_t lanes __attribute__((vector_size(sizeof(vi))));
    typedef int32_t signed_lanes __attribute__((vector_size(sizeof(vi))));
    typedef uint64_t pairs __attribute__((vector_size(sizeof(vi))));
    enum { LANES = sizeof(lanes) / sizeof(uint32_t) };
    const reciprocal r = reciprocal_32(b);
    const vi m = vi_set1(r.m);
    ptrdiff_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        lanes x;
        memcpy(&x, a + i, sizeof x);
        lanes flip = (lanes)((signed_lanes)x <= 0);
        pairs n = (pairs)((x - 1) ^ flip);
        pairs low = (pairs)vi_mul_32((vi)n, m) >> r.shift,
              high = (pairs)vi_mul_32((vi)(n >> 32), m) >> r.shift;
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

/* Most numbers are small: where in a block one turns out not to be, the block is done again. */
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
