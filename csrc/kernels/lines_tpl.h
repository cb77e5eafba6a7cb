/* lines_tpl.h – lines of a mask whose elements are T, where the bits in MASK tell zero from non-zero and
 * BITS(src, count, MASK) looks at up to 64 elements. */

enum { FN(STRETCH) = 512 / (int)sizeof(T) };

static void FN(pack)(uint64_t *dst, const void *src, ptrdiff_t count)
{
    const T *p = src;
    for (; count >= 64; count -= 64, p += 64) *dst++ = BITS(p, 64, MASK);
    if (count) *dst = BITS(p, count, MASK);
}

static bool FN(stretch_is_zero)(const T *p)
{
    T any = 0;
    for (int i = 0; i < FN(STRETCH); i++) any |= p[i];
    return (any & MASK) == 0;
}

static ptrdiff_t FN(first)(const void *src, ptrdiff_t count)
{
    const T *p = src;
    ptrdiff_t begin = 0;
    while (count - begin >= FN(STRETCH) && FN(stretch_is_zero)(p + begin)) begin += FN(STRETCH);
    for (; begin < count; begin += 64) {
        uint64_t bits = BITS(p + begin, count - begin < 64 ? count - begin : 64, MASK);
        if (bits) return begin + __builtin_ctzll(bits);
    }
    return -1;
}

static ptrdiff_t FN(last)(const void *src, ptrdiff_t count)
{
    const T *p = src;
    ptrdiff_t end = count;
    while (end >= FN(STRETCH) && FN(stretch_is_zero)(p + end - FN(STRETCH))) {
        end -= FN(STRETCH);
        /* Hardware looks ahead upwards better than downwards: this saves a third of the time. */
        for (int line = 0; line < 8; line++)
            __builtin_prefetch(p + end - 4 * FN(STRETCH) + line * (FN(STRETCH) / 8));
    }
    while (end > 0) {
        ptrdiff_t begin = end < 64 ? 0 : end - 64;
        uint64_t bits = BITS(p + begin, end - begin, MASK);
        if (bits) return begin + 63 - __builtin_clzll(bits);
        end = begin;
    }
    return -1;
}

static bool FN(collect)(void *restrict seen, const void *restrict src, ptrdiff_t count)
{
    T *restrict to = seen, any = 0;
    const T *restrict from = src;
    for (ptrdiff_t i = 0; i < count; i++) {
        to[i] |= from[i];
        any |= from[i];
    }
    return (any & MASK) != 0;
}

#undef T
#undef MASK
#undef BITS
#undef FN
