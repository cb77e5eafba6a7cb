/* sequences_tpl.h – computes what the prepare_* functions return for every sequence. */
#if !defined T || !defined UNSIGNED || !defined FN
#    error "sequences_tpl.h needs T (starts and results), UNSIGNED (its unsigned type) and FN(name)"
#endif

/* dst[i] = (length of sequence i + more) / 2^shift. Returns false if a start or a length is negative;
 * differences may then overflow, and dst is not used. */
INLINE bool FN(measure)(T *dst, const T *starts, ptrdiff_t count, UNSIGNED more, int shift)
{
    T signs = 0;
    for (ptrdiff_t i = 0; i < count; i++) {
        UNSIGNED len = (UNSIGNED)starts[i + 1] - (UNSIGNED)starts[i];
        dst[i] = (T)((len + more) >> shift);
        signs |= starts[i + 1] | (T)len;
    }
    return signs >= 0;
}

static bool FN(lens)(T *lens, const T *starts, ptrdiff_t count)
{
    return FN(measure)(lens, starts, count, 0, 0);
}

/* Works block by block, so that the counts of chunks stay in the first-level cache. */
static bool FN(chunk_offsets)(T *offsets, const T *starts, ptrdiff_t count, int64_t chunk)
{
    enum { BLOCK = 512 };
    const bool shifts = !(chunk & (chunk - 1)) && (uint64_t)chunk - 1 <= (UNSIGNED)-1 / 2;
    const UNSIGNED more = shifts ? (UNSIGNED)chunk - 1 : 0;
    const int shift = shifts ? __builtin_ctzll((uint64_t)chunk) : 0;
    T lens[BLOCK], counts[BLOCK];
    UNSIGNED sum = 0; /* may overflow if starts decrease, when it is not used */
    bool valid = true;
    offsets[0] = 0;
    for (ptrdiff_t begin = 0; begin < count; begin += BLOCK) {
        ptrdiff_t n = count - begin < BLOCK ? count - begin : BLOCK;
        valid &= FN(measure)(shifts ? counts : lens, starts + begin, n, more, shift);
        if (!shifts) FN(divide)(counts, lens, n, chunk);
#pragma GCC unroll 4
        for (ptrdiff_t i = 0; i < n; i++) {
            sum += (UNSIGNED)counts[i];
            offsets[begin + i + 1] = (T)sum;
        }
    }
    return valid;
}

#undef T
#undef UNSIGNED
#undef FN
