/* backward_tpl.h – attention backward of a block of rows over a tile of keys, for one type of numbers.
 */

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
        .bias = tile->bias ? (const T *)tile->bias + row * tile->bias_stride : NULL,
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

/* Turns products of one row into P and dS; columns begin … end - 1, whole vectors. All others are dead: 0. */
INLINE void FN(p_and_ds_of)(const am_backward_rows *block, const am_backward_tile *tile, ptrdiff_t row,
                            ptrdiff_t begin, ptrdiff_t end)
{
    T *p_row = (T *)block->p + row * AM_FLASH_TILE, *ds_row = (T *)block->ds + row * AM_FLASH_TILE;
    T *d_bias = tile->d_bias ? (T *)tile->d_bias + row * AM_FLASH_TILE : NULL;
    FN(logit_terms) d = FN(logit_terms_of)(block, tile, row);
    V zero = VOP(set1)(0), unit = VOP(set1)((T)block->unit), scale = VOP(set1)((T)block->scale);
    V base = VOP(set1)(((const T *)block->base)[row]), rest = VOP(set1)(((const T *)block->rest)[row]);
    V add = VOP(set1)(((const T *)block->add)[row]);
    V kept_factor = VOP(set1)((T)block->kept_factor), cap_slope = zero;
    for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
        if (i < begin || i >= end) {
            VOP(store)(p_row + i, zero);
            VOP(store)(ds_row + i, zero);
            if (d_bias) VOP(store)(d_bias + i, zero);
            continue;
        }
        V s = FN(logit_of)(&d, VOP(load)(p_row + i), i, &cap_slope);
        V p = FN(exp2)(VOP(fma)(VOP(sub)(s, base), unit, rest)), ds = VOP(load)(ds_row + i), kept = p;
        if (tile->kept) {
            ds = VOP(select)(tile->kept[row] >> i, VOP(mul)(ds, kept_factor), zero);
            kept = VOP(select)(tile->kept[row] >> i, VOP(mul)(p, kept_factor), zero);
        }
        ds = VOP(mul)(p, VOP(add)(ds, add));
        if (block->share) {
            V share = VOP(set1)(((const T *)block->share)[row]);
            ds = VOP(sub)(ds, VOP(pick_less)(s, base, zero, share));
        }
        if (d.capped) ds = VOP(mul)(ds, cap_slope);
        if (tile->live) {
            ds = VOP(select)(tile->live[row] >> i, ds, zero);
            kept = VOP(select)(tile->live[row] >> i, kept, zero);
        }
        if (d_bias) VOP(store)(d_bias + i, ds);
        VOP(store)(p_row + i, kept);
        VOP(store)(ds_row + i, VOP(mul)(ds, scale));
    }
}

/* The same, compiled once more for tiles whose logits are products: with fewer branches, more vectors are in
 * flight. */
static void FN(p_and_ds)(const am_backward_rows *block, const am_backward_tile *tile, ptrdiff_t row,
                         ptrdiff_t begin, ptrdiff_t end)
{
    if (tile->live || tile->kept || tile->bias || tile->d_bias || block->share || block->cap > 0) {
        FN(p_and_ds_of)(block, tile, row, begin, end);
        return;
    }
    const am_backward_tile nothing = {0};
    am_backward_rows plain = *block;
    plain.share = NULL, plain.cap = 0;
    FN(p_and_ds_of)(&plain, &nothing, row, 0, AM_FLASH_TILE);
}

/* Rows of P and dS are what `add_product_transposed` takes. */
static inline const T *FN(join_rows)(T *to, const T *from, ptrdiff_t rows)
{
    (void)to, (void)rows;
    return from;
}
