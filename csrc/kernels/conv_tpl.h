/* conv_tpl.h – short convolutions by channel, for one type of numbers; channels lie side by side in vectors.
 * A result is the same sum, in the same order, wherever it lies in a tile. */

enum { FN(CONV_ROWS) = V_STRIP > 6 ? 8 : 4 }; /* results whose sums do not wait for one another */

/* Whole vectors, or one with `part` lanes. */
#define GET(p) (part ? VOP(load_part)((p), part) : VOP(load)(p))

/* The logistic function; NaN for NaN. */
static inline __attribute__((always_inline)) void FN(sigmoid)(V *s, const V *z, const int count)
{
    const V zero = VOP(set1)(0), one = VOP(set1)(1), log2_e = VOP(set1)((T)1.4426950408889634);
    UNROLL(16)
    for (int i = 0; i < count; i++)
        s[i] = VOP(mul)(VOP(sub)(zero, VOP(max)(z[i], VOP(sub)(zero, z[i]))), log2_e);
    FN(exp2_each)(s, count, FN(exp2_terms), COUNT_OF(FN(exp2_terms)));
    UNROLL(16)
    for (int i = 0; i < count; i++)
        s[i] = VOP(div)(VOP(pick_less)(z[i], zero, s[i], one), VOP(add)(one, s[i]));
}

/* `rows` results of a vector of channels; a width of 0 is any. */
static inline __attribute__((always_inline)) void FN(conv_strip)(T *dst, const T *src,
                                                                 const am_conv_tile *tile,
                                                                 const ptrdiff_t lane, const ptrdiff_t part,
                                                                 const int rows, const int width)
{
    const T *weight = (const T *)tile->weight + lane;
    const ptrdiff_t all = width ? width : tile->width;
    const V first = tile->bias ? GET((const T *)tile->bias + lane) : VOP(set1)(0);
    V sum[FN(CONV_ROWS)], s[FN(CONV_ROWS)];
    UNROLL(16)
    for (int r = 0; r < rows; r++) sum[r] = first;
    UNROLL(4)
    for (ptrdiff_t j = 0; j < all; j++) {
        const V w = GET(weight + j * tile->weight_step);
        UNROLL(16)
        for (int r = 0; r < rows; r++)
            sum[r] = VOP(fma)(w, GET(src + (r + j) * tile->src_step + lane), sum[r]);
    }
    if (tile->silu) {
        const int some = rows < FN(IN_FLIGHT) ? rows : FN(IN_FLIGHT);
        UNROLL(16)
        for (int r = 0; r < rows; r += some) FN(sigmoid)(s + r, sum + r, some);
        UNROLL(16)
        for (int r = 0; r < rows; r++) sum[r] = VOP(mul)(sum[r], s[r]);
    }
    UNROLL(16)
    for (int r = 0; r < rows; r++) {
        T *to = dst + r * tile->dst_step + lane;
        if (part)
            VOP(store_part)(to, sum[r], part);
        else if (tile->stream)
            VOP(stream)(to, sum[r]);
        else
            VOP(store)(to, sum[r]);
    }
}

static inline __attribute__((always_inline)) void
FN(conv_rows)(T *dst, const T *src, const am_conv_tile *tile, const int rows, const int width)
{
    ptrdiff_t lane = 0;
    for (; lane + LANES <= tile->lanes; lane += LANES) FN(conv_strip)(dst, src, tile, lane, 0, rows, width);
    if (lane < tile->lanes) FN(conv_strip)(dst, src, tile, lane, tile->lanes - lane, rows, width);
}

static inline __attribute__((always_inline)) void FN(conv_of)(T *dst, const T *src, const am_conv_tile *tile,
                                                              const int width)
{
    ptrdiff_t t = 0;
    for (; t + FN(CONV_ROWS) <= tile->steps; t += FN(CONV_ROWS))
        FN(conv_rows)(dst + t * tile->dst_step, src + t * tile->src_step, tile, FN(CONV_ROWS), width);
    for (; t < tile->steps; t++)
        FN(conv_rows)(dst + t * tile->dst_step, src + t * tile->src_step, tile, 1, width);
}

static void FN(conv)(void *dst, const void *src, const am_conv_tile *tile)
{
    if (tile->width == 4)
        FN(conv_of)(dst, src, tile, 4);
    else
        FN(conv_of)(dst, src, tile, 0);
    if (tile->stream) v_fence();
}

/* d(z s) / dz = s (1 + z (1 - s)) with s the logistic function of z. */
static void FN(silu_gradient)(void *z, const void *dout, ptrdiff_t count)
{
    T *to = z;
    const T *from = dout;
    const V one = VOP(set1)(1);
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        const ptrdiff_t part = count - i < LANES ? count - i : 0;
        const V x = GET(to + i);
        V s;
        FN(sigmoid)(&s, &x, 1);
        const V slope = VOP(mul)(s, VOP(fma)(x, VOP(sub)(one, s), one)), dz = VOP(mul)(GET(from + i), slope);
        if (part)
            VOP(store_part)(to + i, dz, part);
        else
            VOP(store)(to + i, dz);
    }
}

/* The sums of `count` rows of weights, of which one may be those of the bias: src is NULL. */
static inline __attribute__((always_inline)) void FN(add_products)(double *sums, ptrdiff_t sums_step,
                                                                   const T *dz, const T *src,
                                                                   const am_conv_tile *tile,
                                                                   const ptrdiff_t part, const int count)
{
    V sum[4];
    UNROLL(16)
    for (int j = 0; j < count; j++) sum[j] = VOP(set1)(0);
    for (ptrdiff_t t = 0; t < tile->steps; t++) {
        const V d = GET(dz + t * tile->dst_step);
        UNROLL(16)
        for (int j = 0; j < count; j++)
            sum[j] = src ? VOP(fma)(d, GET(src + (t + j) * tile->src_step), sum[j]) : VOP(add)(sum[j], d);
    }
    UNROLL(16)
    for (int j = 0; j < count; j++) FN(add_to_doubles)(sums + j * sums_step, sum[j]);
}

static void FN(conv_sums)(double *sums, const void *dz, const void *src, const am_conv_tile *tile)
{
    const ptrdiff_t step = am_conv_sums_step(tile->lanes);
    for (ptrdiff_t lane = 0; lane < tile->lanes; lane += LANES) {
        const ptrdiff_t part = tile->lanes - lane < LANES ? tile->lanes - lane : 0;
        const T *d = (const T *)dz + lane, *x = (const T *)src + lane;
        double *to = sums + lane;
        ptrdiff_t j = 0;
        for (; j + 4 <= tile->width; j += 4)
            FN(add_products)(to + j * step, step, d, x + j * tile->src_step, tile, part, 4);
        for (; j < tile->width; j++)
            FN(add_products)(to + j * step, step, d, x + j * tile->src_step, tile, part, 1);
        FN(add_products)(to + j * step, step, d, NULL, tile, part, 1);
    }
}

#undef GET
