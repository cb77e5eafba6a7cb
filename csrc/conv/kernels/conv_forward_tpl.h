/* conv_forward_tpl.h – short convolutions by channel; channels lie side by side in vectors. A result is the
 * sum of the same numbers, in the same order, wherever it lies in a tile. */
#if !defined GET || !defined S || !defined MEM || !defined FROM
#    error "conv_forward_tpl.h needs conv_tpl.h, S (an element), MEM(op) (loads and stores it) and FROM"
#endif

/* `rows` results of some vectors of channels, from `lane` on; a width of 0 is any. */
INLINE void FROM(conv_strip)(S *dst, const S *src, const am_conv_tile *tile, const ptrdiff_t lane,
                             const ptrdiff_t part, const int rows, const int vectors, const int width)
{
    const T *weight = (const T *)tile->weight + lane,
            *bias = tile->bias ? (const T *)tile->bias + lane : NULL;
    const ptrdiff_t all = width ? width : tile->width;
    const int count = rows * vectors, some = count < FN(IN_FLIGHT) ? count : FN(IN_FLIGHT);
    V sum[FN(CONV_ROWS)], s[FN(CONV_ROWS)];
    UNROLL(16)
    for (int i = 0; i < count; i++) sum[i] = bias ? GET(bias + i % vectors * LANES) : VOP(set1)(0);
    UNROLL(4)
    for (ptrdiff_t j = 0; j < all; j++) {
        UNROLL(16)
        for (int i = 0; i < count; i++) {
            const ptrdiff_t at = i % vectors * LANES;
            const S *from = src + (i / vectors + j) * tile->src_stride + lane + at;
            const V w = GET(weight + j * tile->weight_stride + at);
            sum[i] = VOP(fma)(w, part ? MEM(load_part)(from, part) : MEM(load)(from), sum[i]);
        }
    }
    if (tile->silu) {
        UNROLL(16)
        for (int i = 0; i < count; i += some) FN(sigmoid)(s + i, sum + i, some);
        UNROLL(16)
        for (int i = 0; i < count; i++) sum[i] = VOP(mul)(sum[i], s[i]);
    }
    UNROLL(16)
    for (int i = 0; i < count; i++) {
        S *to = dst + i / vectors * tile->dst_stride + lane + i % vectors * LANES;
        if (part)
            MEM(store_part)(to, sum[i], part);
        else if (tile->stream)
            MEM(stream)(to, sum[i]);
        else
            MEM(store)(to, sum[i]);
    }
}

INLINE void FROM(conv_rows)(S *dst, const S *src, const am_conv_tile *tile, const int rows, const int width)
{
    enum { SIDE_BY_SIDE = FN(CONV_ROWS) };
    ptrdiff_t lane = 0;
    if (rows == 1) {
        for (; lane + SIDE_BY_SIDE * LANES <= tile->lanes; lane += SIDE_BY_SIDE * LANES)
            FROM(conv_strip)(dst, src, tile, lane, 0, 1, SIDE_BY_SIDE, width);
    }
    for (; lane + LANES <= tile->lanes; lane += LANES)
        FROM(conv_strip)(dst, src, tile, lane, 0, rows, 1, width);
    if (lane < tile->lanes) FROM(conv_strip)(dst, src, tile, lane, tile->lanes - lane, rows, 1, width);
}

INLINE void FROM(conv_of)(S *dst, const S *src, const am_conv_tile *tile, const int width)
{
    ptrdiff_t t = 0;
    for (; t + FN(CONV_ROWS) <= tile->steps; t += FN(CONV_ROWS))
        FROM(conv_rows)(dst + t * tile->dst_stride, src + t * tile->src_stride, tile, FN(CONV_ROWS), width);
    for (; t < tile->steps; t++)
        FROM(conv_rows)(dst + t * tile->dst_stride, src + t * tile->src_stride, tile, 1, width);
}

static void FROM(conv)(void *dst, const void *src, const am_conv_tile *tile)
{
    if (tile->width == 4)
        FROM(conv_of)(dst, src, tile, 4);
    else
        FROM(conv_of)(dst, src, tile, 0);
    if (tile->stream) v_fence();
}

#undef S
#undef MEM
#undef FROM
