/* cumsum_tpl.h – running sums.
 *
 *     out[t] = scale * (carry + x[0] + … + x[t])
 *
 * `carry` is a double. Within a block of a few steps a sum starts from zero and is taken in V; `carry` then
 * adds the sum of the block. That costs one addition per step more than adding to a single sum, and needs no
 * compensation term. Infinities and NaN need no special care, since the carry itself follows IEEE rules.
 */
#if !defined V || !defined VOP || !defined LANES
#    error "cumsum_tpl.h needs V (vectors that are summed), VOP(op) (their operations) and LANES"
#endif
#if !defined T || !defined MEM || !defined FN
#    error "cumsum_tpl.h needs T (an element), MEM(op) (its loads and stores) and FN(name)"
#endif

enum {
    FN(LINE) = 64 / (int)sizeof(T), /* elements per cache line */
    FN(WIDEST) = 8,                 /* the most adjacent vectors whose sums fit the registers */
    FN(PREFETCH_DISTANCE) = 1024 / (int)sizeof(T), /* of scans */
};

/* What is summed; `carry` and both arrays begin with the same lane. Negative strides go backwards. */
typedef struct {
    T *dst;
    ptrdiff_t dst_stride;
    const T *src;
    ptrdiff_t src_stride;
    double *carry;
    V scale;
} FN(sums);

/* What is summed from another element on, or from another lane on. */
INLINE FN(sums) FN(sums_at)(FN(sums) x, ptrdiff_t at)
{
    x.dst += at, x.src += at;
    return x;
}
INLINE FN(sums) FN(sums_from)(FN(sums) x, ptrdiff_t lane)
{
    x.carry += lane;
    return FN(sums_at)(x, lane);
}

/* Adds up `steps` rows of `vectors` whole vectors; or if `part` is not 0, of one vector that has only `part`
 * lanes. */
INLINE void FN(cumsum_strip)(const FN(sums) x, const ptrdiff_t steps, const int vectors, const ptrdiff_t part,
                             const V *base, V *sums, const bool stream)
{
    V sum[FN(WIDEST)];
    for (int v = 0; v < vectors; v++) sum[v] = sums[v];
    for (ptrdiff_t t = 0; t < steps; t++) {
        for (int v = 0; v < vectors; v++) {
            const T *from = x.src + t * x.src_stride + v * LANES;
            if (stream && v * LANES % FN(LINE) == 0)
                __builtin_prefetch(from + 2 * AM_CUMSUM_BLOCK * x.src_stride);
            T *to = x.dst + t * x.dst_stride + v * LANES;
            sum[v] = VOP(add)(sum[v], part ? MEM(load_part)(from, part) : MEM(load)(from));
            V out = VOP(mul)(x.scale, VOP(add)(base[v], sum[v]));
            if (part)
                MEM(store_part)(to, out, part);
            else if (stream)
                MEM(stream)(to, out);
            else
                MEM(store)(to, out);
        }
    }
    for (int v = 0; v < vectors; v++) sums[v] = sum[v];
}

/* Adds up steps ≤ AM_CUMSUM_BLOCK, beginning with `carry`. */
INLINE void FN(cumsum_block)(const FN(sums) x, const ptrdiff_t steps, const int vectors, const ptrdiff_t part,
                             const bool stream)
{
    V base[FN(WIDEST)], sums[FN(WIDEST)];
    for (int v = 0; v < vectors; v++) {
        base[v] = VOP(carry_load)(x.carry + v * LANES);
        sums[v] = VOP(set1)(0);
    }
    FN(cumsum_strip)(x, steps, vectors, part, base, sums, stream);
    for (int v = 0; v < vectors; v++) VOP(carry_add)(x.carry + v * LANES, sums[v]);
}

/* Adds up many vectors, row by row, with the sums in memory. */
INLINE void FN(cumsum_wide)(const FN(sums) x, const ptrdiff_t steps, ptrdiff_t vectors, const bool stream)
{
    V base[AM_CUMSUM_LANES / LANES], sums[AM_CUMSUM_LANES / LANES];
    for (ptrdiff_t v = 0; v < vectors; v++) {
        base[v] = VOP(carry_load)(x.carry + v * LANES);
        sums[v] = VOP(set1)(0);
    }
    for (ptrdiff_t t = 0; t < steps; t++) {
        for (ptrdiff_t v = 0; v < vectors; v += FN(WIDEST)) {
            FN(sums) row = FN(sums_from)(x, v * LANES);
            row.dst += t * x.dst_stride, row.src += t * x.src_stride;
            FN(cumsum_strip)(row, 1, FN(WIDEST), 0, base + v, sums + v, stream);
        }
    }
    for (ptrdiff_t v = 0; v < vectors; v++) VOP(carry_add)(x.carry + v * LANES, sums[v]);
}

/* Hardware prefetches memory that is read in the order of addresses, so rows are read whole: in one strip if
 * their sums fit the registers. For wider rows the sums are kept in memory when steps go upwards, which saves
 * a quarter of the time; downwards it saves none. */
INLINE void FN(cumsum_band)(const FN(sums) x, const ptrdiff_t steps, ptrdiff_t lanes, const bool stream)
{
    enum { WIDE = FN(WIDEST) * LANES };
    ptrdiff_t lane = 0;
    if (lanes >= 2 * WIDE && x.dst_stride > 0) {
        lane = lanes / WIDE * WIDE;
        FN(cumsum_wide)(x, steps, lane / LANES, stream);
    }
    for (; lanes - lane >= WIDE; lane += WIDE)
        FN(cumsum_block)(FN(sums_from)(x, lane), steps, FN(WIDEST), 0, stream);
#define ONCE(vectors)                                                                                        \
    if (lanes - lane >= (vectors) * LANES) {                                                                 \
        FN(cumsum_block)(FN(sums_from)(x, lane), steps, vectors, 0, stream);                                 \
        lane += (vectors) * LANES;                                                                           \
    }
    ONCE(4)
    ONCE(2)
    ONCE(1)
#undef ONCE
    if (lane < lanes) FN(cumsum_block)(FN(sums_from)(x, lane), steps, 1, lanes - lane, false);
}

/* Adds up one segment, or a piece of one. */
static void FN(cumsum_rows_segment)(FN(sums) x, ptrdiff_t steps, ptrdiff_t lanes, bool stream)
{
    for (; steps >= AM_CUMSUM_BLOCK; steps -= AM_CUMSUM_BLOCK) {
        if (stream)
            FN(cumsum_band)(x, AM_CUMSUM_BLOCK, lanes, true);
        else
            FN(cumsum_band)(x, AM_CUMSUM_BLOCK, lanes, false);
        x.dst += AM_CUMSUM_BLOCK * x.dst_stride;
        x.src += AM_CUMSUM_BLOCK * x.src_stride;
    }
    if (steps) FN(cumsum_band)(x, steps, lanes, false);
}

/* Adds up `vectors` whole vectors along time, or one with `part` elements; from the last to the first if
 * `reverse`. */
INLINE void FN(cumsum_scan_group)(const FN(sums) x, const int vectors, const ptrdiff_t part,
                                  const bool reverse, const bool stream)
{
    const V base = VOP(set1)(*x.carry);
    V earlier = VOP(set1)(0); /* the sum of the earlier vectors, in every lane */
    for (int v = 0; v < vectors; v++) {
        ptrdiff_t at = (reverse ? vectors - 1 - v : v) * LANES;
        V y = part ? MEM(load_part)(x.src, part) : MEM(load)(x.src + at);
        V total, sum = reverse ? VOP(scan_back)(y, &total) : VOP(scan)(y, &total);
        V out = VOP(mul)(x.scale, VOP(add)(base, VOP(add)(earlier, sum)));
        if (part)
            MEM(store_part)(x.dst, out, part);
        else if (stream)
            MEM(stream)(x.dst + at, out);
        else
            MEM(store)(x.dst + at, out);
        earlier = VOP(add)(earlier, total);
    }
    *x.carry += (double)VOP(first)(earlier);
}

INLINE void FN(cumsum_scan_segment)(const FN(sums) x, ptrdiff_t steps, const bool reverse, const bool stream)
{
    enum { GROUPED = AM_CUMSUM_SCAN * LANES };
    ptrdiff_t low = 0, high = steps; /* the steps that are left */
    while (high - low >= GROUPED) {
        ptrdiff_t at = reverse ? high - GROUPED : low;
        for (int line = 0; stream && line < GROUPED / FN(LINE); line++) {
            __builtin_prefetch(x.src + at + (reverse ? -FN(PREFETCH_DISTANCE) : FN(PREFETCH_DISTANCE)) +
                               line * FN(LINE));
        }
        FN(cumsum_scan_group)(FN(sums_at)(x, at), AM_CUMSUM_SCAN, 0, reverse, stream);
        if (reverse)
            high -= GROUPED;
        else
            low += GROUPED;
    }
    while (high - low >= LANES) {
        ptrdiff_t at = reverse ? high - LANES : low;
        FN(cumsum_scan_group)(FN(sums_at)(x, at), 1, 0, reverse, stream);
        if (reverse)
            high -= LANES;
        else
            low += LANES;
    }
    if (low < high) FN(cumsum_scan_group)(FN(sums_at)(x, low), 1, high - low, reverse, false);
}

/* Returns where segment i of `count`, in the order of the sums, begins in memory, and sets *steps to its
 * length. */
static inline ptrdiff_t FN(segment_begin)(const am_cumsum_tile *tile, ptrdiff_t period, ptrdiff_t i,
                                          ptrdiff_t count, ptrdiff_t *steps)
{
    ptrdiff_t begin = (tile->reverse ? count - 1 - i : i) * period;
    *steps = tile->steps - begin < period ? tile->steps - begin : period;
    return begin;
}

static void FN(cumsum_rows)(void *to, const void *from, const am_cumsum_tile *tile, double *carry,
                            double scale)
{
    T *dst = to;
    const T *src = from;
    FN(sums) x = {.carry = carry, .scale = VOP(set1)(scale)};
    const ptrdiff_t period = tile->period ? tile->period : tile->steps,
                    count = (tile->steps - 1) / period + 1;
    const ptrdiff_t direction = tile->reverse ? -1 : 1;
    for (ptrdiff_t i = 0; i < count; i++) {
        ptrdiff_t steps, first = FN(segment_begin)(tile, period, i, count, &steps);
        if (tile->reverse) first += steps - 1;
        if (tile->period) memset(carry, 0, (size_t)(tile->lanes + AM_CUMSUM_PAD) * sizeof *carry);
        x.dst = dst + first * tile->dst_stride, x.dst_stride = direction * tile->dst_stride;
        x.src = src + first * tile->src_stride, x.src_stride = direction * tile->src_stride;
        FN(cumsum_rows_segment)(x, steps, tile->lanes, tile->stream);
    }
    if (tile->stream) v_fence();
}

static void FN(cumsum_scan)(void *to, const void *from, const am_cumsum_tile *tile, double *carry,
                            double scale)
{
    T *dst = to;
    const T *src = from;
    const V factor = VOP(set1)(scale);
    const ptrdiff_t period = tile->period ? tile->period : tile->steps,
                    count = (tile->steps - 1) / period + 1;
    for (ptrdiff_t i = 0; i < count; i++) {
        ptrdiff_t steps, begin = FN(segment_begin)(tile, period, i, count, &steps);
        double sum = tile->period ? 0 : *carry;
        const FN(sums) x = {.dst = dst + begin, .src = src + begin, .carry = &sum, .scale = factor};
        /* Whole vectors are stored from the end of a segment if reversed, else from its beginning; that must
         * be aligned. */
        bool stream = tile->stream &&
                      (uintptr_t)(dst + (tile->reverse ? begin + steps : begin)) % (LANES * sizeof(T)) == 0;
        if (stream && tile->reverse)
            FN(cumsum_scan_segment)(x, steps, true, true);
        else if (stream)
            FN(cumsum_scan_segment)(x, steps, false, true);
        else if (tile->reverse)
            FN(cumsum_scan_segment)(x, steps, true, false);
        else
            FN(cumsum_scan_segment)(x, steps, false, false);
        *carry = sum;
    }
    if (tile->stream) v_fence();
}

#undef T
#undef MEM
#undef FN
