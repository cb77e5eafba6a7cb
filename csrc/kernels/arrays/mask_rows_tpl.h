/* mask_rows_tpl.h – scans rows of a mask. */
#if !defined T || !defined MASK || !defined BITS || !defined FN
#    error "mask_rows_tpl.h needs T (as wide as an element), MASK (its bits that count), FN(name) and"
#    error "BITS(src, count, MASK), which returns a bit for each of up to 64 elements"
#endif

enum { FN(STRETCH) = 512 / (int)sizeof(T) };

/* Counters are as wide as the elements, so that vectors of both have the same number of lanes. They are
 * emptied before they can overflow. */
static ptrdiff_t FN(nonzero)(const void *src, ptrdiff_t count)
{
    enum { WIDTH = 128 / sizeof(T), ROUNDS = 255 };
    const T *p = src;
    ptrdiff_t total = 0, i = 0;
    while (i + WIDTH <= count) {
        T counters[WIDTH] = {0};
        uint32_t sum = 0;
        ptrdiff_t rounds = (count - i) / WIDTH < ROUNDS ? (count - i) / WIDTH : ROUNDS;
        for (ptrdiff_t r = 0; r < rounds; r++, i += WIDTH) {
            for (int k = 0; k < (int)WIDTH; k++) counters[k] = (T)(counters[k] + ((p[i + k] & MASK) != 0));
        }
        for (int k = 0; k < (int)WIDTH; k++) sum += (uint32_t)counters[k];
        total += sum;
    }
    for (; i + 64 <= count; i += 64) total += __builtin_popcountll(BITS(p + i, 64, MASK));
    if (i == count) return total;
    /* The rest is read as the end of the last 64 elements, if there are 64. */
    uint64_t rest =
        count < 64 ? BITS(p + i, count - i, MASK) : BITS(p + count - 64, 64, MASK) >> (64 - (count - i));
    return total + __builtin_popcountll(rest);
}

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
        /* Hardware prefetches upwards better than downwards; prefetching here saves a third of the time. */
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
