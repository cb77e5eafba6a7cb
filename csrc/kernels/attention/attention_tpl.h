/* attention_tpl.h – attention of a block of rows over a tile of keys. */
#if !defined T || !defined EACH_ROWS
#    error "attention_tpl.h needs f32.h or f64.h (what it computes with), and product_tpl.h"
#endif

/* Turns products into logits: scale, bias and cap. */
static void FN(apply_logit_terms)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row,
                                  T *logits, ptrdiff_t begin, ptrdiff_t end)
{
    const T *bias = tile->terms.bias ? (const T *)tile->terms.bias + row * tile->terms.bias_stride : NULL;
    const FN(soft_cap) cap = FN(soft_cap_of)(block->cap);
    V factor = VOP(set1)((T)block->factor), bent;
    for (ptrdiff_t i = begin; i < end; i += LANES) {
        V s = VOP(mul)(factor, VOP(load)(logits + i));
        if (bias) s = VOP(add)(s, VOP(load)(bias + i));
        if (block->cap > 0) s = FN(apply_cap)(&cap, s, &bent);
        VOP(store)(logits + i, s);
    }
}

/* c[r] += sum over live i of a[r][i] b[i], for a b that holds NaN or Inf: 0 × NaN would reach beyond live
 * pairs. It sums in the same order as `add_product`, so that garbage in dead pairs does not change a bit.
 * Panels of b lie `b_panel` apart. */
static void FN(add_live_rows)(ptrdiff_t rows, ptrdiff_t columns, const uint64_t *live, const FN(operands) * p,
                              ptrdiff_t b_panel)
{
    for (ptrdiff_t r = 0; r < rows; r++) {
        for (ptrdiff_t j = 0; j < columns; j += LANES) {
            const T *panel = p->b + j / FN(PANEL) * b_panel + j % FN(PANEL);
            T *to = p->c + r * p->c_row + j;
            V sum = VOP(load)(to);
            for (uint64_t left = live[r]; left; left &= left - 1) {
                ptrdiff_t i = __builtin_ctzll(left);
                sum = VOP(fma)(VOP(set1)(p->a[r * p->a_row + i * p->a_column]),
                               VOP(load)(panel + i * p->b_row), sum);
            }
            VOP(store)(to, sum);
        }
    }
}

/* O + P V of only the live pairs, for one panel of columns. */
static void FN(add_live)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t column,
                         const T *panel)
{
    const FN(operands) x =
        FN(by_rows)(0, block->logits, panel, FN(PANEL), (T *)block->out + column, block->out_dim);
    FN(add_live_rows)(block->rows, columns_at(block, column, FN(PANEL)), tile->terms.live, &x, 0);
}

/* Adds some vectors of weights to `total`, lane by lane. */
INLINE V FN(add_weights)(V total, const V *p, const int count)
{
    UNROLL(16)
    for (int j = 0; j < count; j++) total = VOP(add)(total, p[j]);
    return total;
}

/* P is what `add_product` takes. */
static inline void FN(narrow)(T *to, ptrdiff_t begin, ptrdiff_t end) { (void)to, (void)begin, (void)end; }
INLINE void FN(store_p)(T *to, const V *p, const int count)
{
    UNROLL(16)
    for (int j = 0; j < count; j++) VOP(store)(to + j * LANES, p[j]);
}

/* O + P V of a strip, and of some columns of packed values, at most a panel. */
static void FN(add_packed)(ptrdiff_t rows, ptrdiff_t columns, const FN(operands) * p)
{
    FN(add_product)(rows, columns, *p, NULL, NULL);
}

/* O + P V of a strip, and of some columns of unpacked values, at most a panel. */
static void FN(add_unpacked)(const am_flash_rows *block, const am_flash_tile *tile, const FN(strip) * s,
                             ptrdiff_t column, prefetch_lines *prefetch)
{
    const row_runs runs = runs_behind(&tile->v, 0, 1, column * (ptrdiff_t)sizeof(T));
    const FN(operands) x =
        FN(by_rows)(AM_FLASH_TILE, (const T *)block->logits + s->row * AM_FLASH_TILE,
                    (const T *)tile->v.data + column, tile->v.stride / (ptrdiff_t)sizeof(T),
                    (T *)block->out + s->row * block->out_dim + column, block->out_dim);
    FN(add_product)(s->rows, columns_at(block, column, FN(PANEL)), x, prefetch, tile->v.run ? &runs : NULL);
}

#define STEP(name) FN(name)
#define WIDTH 1
#define EXP2_TERMS FN(exp2_terms)
#include "kernels/attention/step_tpl.h"
