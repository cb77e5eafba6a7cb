/* conv_tpl.h – what short convolutions and their gradients share. */
#if !defined T || !defined EACH_ROWS
#    error "conv_tpl.h needs f32.h or f64.h (what it computes with), and product_tpl.h"
#endif

enum { FN(CONV_ROWS) = V_STRIP > 6 ? 8 : 4 }; /* results whose sums do not wait for one another */

/* Whole vectors, or one with `part` lanes. */
#define GET(p) (part ? VOP(load_part)((p), part) : VOP(load)(p))

/* The logistic function; NaN for NaN. */
INLINE void FN(sigmoid)(V *s, const V *z, const int count)
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
INLINE void FN(add_products)(double *sums, ptrdiff_t sums_stride, const T *dz, const T *src,
                             const am_conv_tile *tile, const ptrdiff_t part, const int count)
{
    V sum[4];
    UNROLL(16)
    for (int j = 0; j < count; j++) sum[j] = VOP(set1)(0);
    for (ptrdiff_t t = 0; t < tile->steps; t++) {
        const V d = GET(dz + t * tile->dst_stride);
        UNROLL(16)
        for (int j = 0; j < count; j++)
            sum[j] = src ? VOP(fma)(d, GET(src + (t + j) * tile->src_stride), sum[j]) : VOP(add)(sum[j], d);
    }
    UNROLL(16)
    for (int j = 0; j < count; j++) VOP(carry_add)(sums + j * sums_stride, sum[j]);
}

static void FN(conv_sums)(double *sums, const void *dz, const void *src, const am_conv_tile *tile)
{
    const ptrdiff_t stride = am_conv_sums_stride(tile->lanes);
    for (ptrdiff_t lane = 0; lane < tile->lanes; lane += LANES) {
        const ptrdiff_t part = tile->lanes - lane < LANES ? tile->lanes - lane : 0;
        const T *d = (const T *)dz + lane, *x = (const T *)src + lane;
        double *to = sums + lane;
        ptrdiff_t j = 0;
        for (; j + 4 <= tile->width; j += 4)
            FN(add_products)(to + j * stride, stride, d, x + j * tile->src_stride, tile, part, 4);
        for (; j < tile->width; j++)
            FN(add_products)(to + j * stride, stride, d, x + j * tile->src_stride, tile, part, 1);
        FN(add_products)(to + j * stride, stride, d, NULL, tile, part, 1);
    }
}
