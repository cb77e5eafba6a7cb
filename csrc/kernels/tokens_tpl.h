/* tokens_tpl.h – what prepare_* writes for every token, for the integer type T.
 *
 * Runs are short (documents of a hundred tokens), so their ends matter most: a run is written in whole
 * strides that may pass its end, as the next run overwrites them, except near `end`, where another thread's
 * tokens begin.
 */

enum {
    FN(STRIDE) = 64 / (int)sizeof(T),
    FN(PAIRS) = FN(STRIDE) / 2,
};

static void FN(fill_positions)(T *dst, const ptrdiff_t *starts, ptrdiff_t sequence, ptrdiff_t begin,
                               ptrdiff_t end)
{
    for (ptrdiff_t t = begin; t < end; sequence++) {
        ptrdiff_t stop = starts[sequence + 1] < end ? starts[sequence + 1] : end;
        T position = (T)(t - starts[sequence]);
        for (; t < stop && t + FN(STRIDE) <= end; t += FN(STRIDE), position += FN(STRIDE)) {
            for (int i = 0; i < FN(STRIDE); i++) dst[t - begin + i] = (T)(position + i);
        }
        for (; t < stop; t++, position++) dst[t - begin] = position;
        t = stop;
    }
}

static void FN(fill_sequences)(T *dst, const ptrdiff_t *starts, ptrdiff_t sequence, ptrdiff_t begin,
                               ptrdiff_t end)
{
    for (ptrdiff_t t = begin; t < end; sequence++) {
        ptrdiff_t stop = starts[sequence + 1] < end ? starts[sequence + 1] : end;
        for (; t < stop && t + FN(STRIDE) <= end; t += FN(STRIDE)) {
            for (int i = 0; i < FN(STRIDE); i++) dst[t - begin + i] = (T)sequence;
        }
        for (; t < stop; t++) dst[t - begin] = (T)sequence;
        t = stop;
    }
}

static void FN(fill_pairs)(T *dst, const ptrdiff_t *starts, ptrdiff_t sequence, ptrdiff_t begin,
                           ptrdiff_t end)
{
    for (ptrdiff_t t = begin; t < end; sequence++) {
        ptrdiff_t stop = starts[sequence + 1] < end ? starts[sequence + 1] : end;
        T position = (T)(t - starts[sequence]);
        for (; t < stop && t + FN(PAIRS) <= end; t += FN(PAIRS), position += FN(PAIRS)) {
            T *pair = dst + 2 * (t - begin);
            for (int i = 0; i < FN(PAIRS); i++) {
                pair[2 * i] = (T)sequence;
                pair[2 * i + 1] = (T)(position + i);
            }
        }
        for (; t < stop; t++, position++) {
            dst[2 * (t - begin)] = (T)sequence;
            dst[2 * (t - begin) + 1] = position;
        }
        t = stop;
    }
}

#undef T
#undef FN
