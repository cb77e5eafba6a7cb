/* sequences_tpl.h – what prepare_* writes for every sequence, for the integer type T. */

static bool FN(lens)(T *lens, const T *starts, ptrdiff_t count)
{
    T signs = 0;
    for (ptrdiff_t i = 0; i < count; i++) {
        /* Where no start is negative a difference cannot overflow; where one is, the result is thrown away.
         */
        lens[i] = (T)((UNSIGNED)starts[i + 1] - (UNSIGNED)starts[i]);
        signs |= starts[i + 1] | lens[i];
    }
    return signs >= 0;
}

/* A block at a time, so that lengths and quotients stay in the first-level cache. */
static bool FN(chunk_offsets)(T *offsets, const T *starts, ptrdiff_t count, int64_t chunk)
{
    enum { BLOCK = 512 };
    T lens[BLOCK], counts[BLOCK];
    UNSIGNED sum = 0; /* may overflow where starts fall, and is thrown away */
    bool rise = true;
    offsets[0] = 0;
    for (ptrdiff_t begin = 0; begin < count; begin += BLOCK) {
        ptrdiff_t n = count - begin < BLOCK ? count - begin : BLOCK;
        rise &= FN(lens)(lens, starts + begin, n);
        FN(divide)(counts, lens, n, chunk);
        for (ptrdiff_t i = 0; i < n; i++) {
            sum += (UNSIGNED)counts[i];
            offsets[begin + i + 1] = (T)sum;
        }
    }
    return rise;
}

#undef T
#undef UNSIGNED
#undef FN
