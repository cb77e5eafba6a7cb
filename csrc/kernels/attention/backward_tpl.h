/* backward_tpl.h – attention backward of a block of rows over a tile of keys. */
#if !defined T || !defined EACH_ROWS
#    error "backward_tpl.h needs f32.h or f64.h (what it computes with), and product_tpl.h"
#endif

/* A product of the backward step, c = a bᵀ or sum += a b or aᵀ b: rows of a, `stride` from row to row of what
 * has `columns`, which is a in the first case, else the sum; of only the live pairs if `live` is not NULL. */
typedef struct {
    const T *a, *b;
    T *c;
    am_backward_sum sum;
    ptrdiff_t rows, stride, columns;
    const uint64_t *live;
} FN(backward_product);

/* A sum from a row and a column on. */
static inline am_backward_sum FN(sum_at)(const FN(backward_product) * p, ptrdiff_t row, ptrdiff_t column)
{
    am_backward_sum at = p->sum;
    at.sum = (T *)at.sum + row * p->stride + column;
    if (at.onto) at.onto = (T *)at.onto + row * at.onto_stride + column;
    return at;
}

/* Clears some rows of a sum that is fresh, and adds them where they are wanted. */
static void FN(clear_fresh)(const FN(backward_product) * p, ptrdiff_t row, ptrdiff_t rows)
{
    T *to = (T *)p->sum.sum + row * p->stride;
    for (ptrdiff_t r = 0; p->sum.fresh && r < rows; r++, to += p->stride)
        for (ptrdiff_t i = 0; i < p->columns; i += LANES) VOP(store)(to + i, VOP(set1)(0));
}
static void FN(add_onto)(const FN(backward_product) * p, ptrdiff_t row, ptrdiff_t rows)
{
    const am_backward_sum at = FN(sum_at)(p, row, 0);
    const T *from = at.sum;
    T *to = at.onto;
    for (ptrdiff_t r = 0; to && r < rows; r++, from += p->stride, to += at.onto_stride)
        for (ptrdiff_t i = 0; i < p->columns; i += LANES)
            VOP(store)(to + i, VOP(add)(VOP(load)(to + i), VOP(load)(from + i)));
}

/* The terms of the logits of a row. */
typedef struct {
    V scale;
    FN(soft_cap) cap;
    bool capped;
    const T *bias; /* or NULL */
} FN(logit_terms);

static inline FN(logit_terms)
    FN(logit_terms_of)(const am_backward_rows *block, const am_backward_tile *tile, ptrdiff_t row)
{
    return (FN(logit_terms)){
        .scale = VOP(set1)((T)block->factor),
        .cap = FN(soft_cap_of)(block->cap),
        .capped = block->cap > 0,
        .bias = tile->terms.bias ? (const T *)tile->terms.bias + row * tile->terms.bias_stride : NULL,
    };
}

/* The logits from column i on; `cap_slope` is the derivative of the cap. */
static inline V FN(logit_of)(const FN(logit_terms) * d, V product, ptrdiff_t i, V *cap_slope)
{
    V s = VOP(mul)(product, d->scale);
    if (d->bias) s = VOP(add)(s, VOP(load)(d->bias + i));
    if (!d->capped) return s;
    const V one = VOP(set1)(1);
    V bent;
    const V capped = FN(apply_cap)(&d->cap, s, &bent);
    *cap_slope = VOP(mul)(VOP(sub)(one, bent), VOP(add)(one, bent));
    return capped;
}

/* What P and dS of a row follow from, beside its products. */
typedef struct {
    const am_backward_rows *block;
    const am_backward_tile *tile;
    ptrdiff_t row;
    FN(logit_terms) logits;
    V unit, scale, base, rest, add, kept_factor;
} FN(gradient_terms);

INLINE FN(gradient_terms)
    FN(gradient_terms_of)(const am_backward_rows *block, const am_backward_tile *tile, ptrdiff_t row)
{
    return (FN(gradient_terms)){
        .block = block,
        .tile = tile,
        .row = row,
        .logits = FN(logit_terms_of)(block, tile, row),
        .unit = VOP(set1)((T)block->unit),
        .scale = VOP(set1)((T)block->scale),
        .base = VOP(set1)(((const T *)block->base)[row]),
        .rest = VOP(set1)(((const T *)block->rest)[row]),
        .add = VOP(set1)(((const T *)block->add)[row]),
        .kept_factor = VOP(set1)((T)block->kept_factor),
    };
}

/* Turns products of a row, from column i on, into P, as d_out is multiplied by it, and into dS. Dead ones
 * become 0, as do all unless `live`. */
INLINE void FN(p_and_ds_at)(const FN(gradient_terms) * of, ptrdiff_t i, bool live, V *p, V *ds)
{
    const am_backward_tile *tile = of->tile;
    const am_backward_rows *block = of->block;
    const ptrdiff_t row = of->row;
    const V zero = VOP(set1)(0);
    T *d_bias = tile->d_bias ? (T *)tile->d_bias + row * tile->d_bias_stride + i : NULL;
    if (!live) {
        *p = *ds = zero;
        if (d_bias) VOP(store)(d_bias, zero);
        return;
    }
    V cap_slope = zero, s = FN(logit_of)(&of->logits, *p, i, &cap_slope),
      power = FN(exp2)(VOP(fma)(VOP(sub)(s, of->base), of->unit, of->rest)), kept = power, d = *ds;
    if (tile->terms.kept) {
        d = VOP(select)(tile->terms.kept[row] >> i, VOP(mul)(d, of->kept_factor), zero);
        kept = VOP(select)(tile->terms.kept[row] >> i, VOP(mul)(power, of->kept_factor), zero);
    }
    d = VOP(mul)(power, VOP(add)(d, of->add));
    if (block->share) {
        V share = VOP(set1)(((const T *)block->share)[row]);
        d = VOP(sub)(d, VOP(pick_less)(s, of->base, zero, share));
    }
    if (of->logits.capped) d = VOP(mul)(d, cap_slope);
    if (tile->terms.live) {
        d = VOP(select)(tile->terms.live[row] >> i, d, zero);
        kept = VOP(select)(tile->terms.live[row] >> i, kept, zero);
    }
    if (d_bias) VOP(store)(d_bias, d);
    *p = kept, *ds = VOP(mul)(d, of->scale);
}
