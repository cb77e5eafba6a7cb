/* tokens_tpl.h – writes what the prepare_* functions return for every token: the number of its sequence, its
 * position there, or both.
 *
 * Sequences are short (documents of a hundred tokens), so their ends matter most: one is written in whole
 * vectors, which may reach into the next one, since that is written afterwards. They never reach beyond
 * `end`, where the tokens of another thread begin.
 */
#if !defined T || !defined U || !defined FN
#    error "tokens_tpl.h needs T (the type of results), U (its unsigned type) and FN(name)"
#endif

INLINE void FN(fill)(T *dst, const ptrdiff_t *starts, ptrdiff_t sequence, ptrdiff_t begin, ptrdiff_t end,
                     bool sequences, bool positions)
{
    typedef U lanes __attribute__((vector_size(sizeof(vi))));
    enum { LANES = sizeof(lanes) / sizeof(U) };
    const int width = sequences + positions, tokens = LANES / width;
    lanes position_lanes = {0}, advance = {0}; /* position_lanes: all bits of the lanes that hold positions */
    for (int i = 0; i < LANES; i++) {
        position_lanes[i] = positions && i % width == sequences ? (U)-1 : 0;
        advance[i] = (U)(i / width);
    }
    advance &= position_lanes;
    const lanes step = position_lanes & (U)tokens;
    for (ptrdiff_t t = begin; t < end; sequence++) {
        ptrdiff_t stop = starts[sequence + 1] < end ? starts[sequence + 1] : end;
        ptrdiff_t position = t - starts[sequence];
        lanes value = (position_lanes & (U)position) + (~position_lanes & (U)sequence) + advance;
        for (; t < stop && t + tokens <= end; t += tokens, value += step) {
            memcpy(dst + (t - begin) * width, &value, sizeof value);
        }
        for (position = t - starts[sequence]; t < stop; t++, position++) {
            T *own = dst + (t - begin) * width;
            if (sequences) own[0] = (T)sequence;
            if (positions) own[width - 1] = (T)position;
        }
        t = stop;
    }
}

static void FN(fill_positions)(T *dst, const ptrdiff_t *starts, ptrdiff_t sequence, ptrdiff_t begin,
                               ptrdiff_t end)
{
    FN(fill)(dst, starts, sequence, begin, end, false, true);
}

static void FN(fill_sequences)(T *dst, const ptrdiff_t *starts, ptrdiff_t sequence, ptrdiff_t begin,
                               ptrdiff_t end)
{
    FN(fill)(dst, starts, sequence, begin, end, true, false);
}

static void FN(fill_pairs)(T *dst, const ptrdiff_t *starts, ptrdiff_t sequence, ptrdiff_t begin,
                           ptrdiff_t end)
{
    FN(fill)(dst, starts, sequence, begin, end, true, true);
}

#undef T
#undef U
#undef FN
