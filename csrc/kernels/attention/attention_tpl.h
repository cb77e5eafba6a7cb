/* attention_tpl.h – attention of a block of rows over a tile of keys, for one type of numbers. */

/* Turns products into logits: scale, bias and cap. */
static void FN(apply_logit_terms)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row,
                                  T *logits, ptrdiff_t begin, ptrdiff_t end)
{
    const T *bias = tile->bias ? (const T *)tile->bias + row * tile->bias_step : NULL;
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
static void FN(add_live_rows)(ptrdiff_t rows, const uint64_t *live, const T *a, ptrdiff_t a_row,
                              ptrdiff_t a_column, const T *b, ptrdiff_t b_row, ptrdiff_t b_panel, T *c,
                              ptrdiff_t c_row, ptrdiff_t head_dim)
{
    for (ptrdiff_t r = 0; r < rows; r++) {
        for (ptrdiff_t j = 0; j < head_dim; j += LANES) {
            const T *panel = b + j / FN(PANEL) * b_panel + j % FN(PANEL);
            V sum = VOP(load)(c + r * c_row + j);
            for (uint64_t left = live[r]; left; left &= left - 1) {
                ptrdiff_t i = __builtin_ctzll(left);
                sum = VOP(fma)(VOP(set1)(a[r * a_row + i * a_column]), VOP(load)(panel + i * b_row), sum);
            }
            VOP(store)(c + r * c_row + j, sum);
        }
    }
}

/* O + P V of only the live pairs, for one panel of columns. */
static void FN(add_live)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t column,
                         const T *panel)
{
    FN(add_live_rows)(block->rows, tile->live, block->logits, AM_FLASH_TILE, 1, panel, FN(PANEL), 0,
                      (T *)block->out + column, block->out_dim, columns_at(block, column, FN(PANEL)));
}

/* Adds some vectors of weights to `total`, lane by lane. */
static inline __attribute__((always_inline)) V FN(add_weights)(V total, const V *p, const int count)
{
    UNROLL(16)
    for (int j = 0; j < count; j++) total = VOP(add)(total, p[j]);
    return total;
}

/* P is what `add_product` takes. */
static inline void FN(narrow)(T *to, ptrdiff_t begin, ptrdiff_t end) { (void)to, (void)begin, (void)end; }
static inline __attribute__((always_inline)) void FN(store_p)(T *to, const V *p, const int count)
{
    UNROLL(16)
    for (int j = 0; j < count; j++) VOP(store)(to + j * LANES, p[j]);
}

/* O + P V of a strip, and of some columns of packed values, at most a panel. */
static void FN(add_packed)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t head_dim, const T *p, const T *panel,
                           T *c, ptrdiff_t c_step)
{
    FN(add_product)(rows, columns, head_dim, p, panel, FN(PANEL), c, c_step, NULL, NULL);
}

/* O + P V of some columns of unpacked values, at most a panel. */
static void FN(add_unpacked)(ptrdiff_t rows, ptrdiff_t columns, const T *p, const am_flash_tile *tile,
                             ptrdiff_t column, T *c, ptrdiff_t c_step, prefetch_lines *prefetch)
{
    const row_runs runs = runs_behind(&tile->v, 0, 1, column * (ptrdiff_t)sizeof(T));
    const T *v = (const T *)tile->v.data + column;
    FN(add_product)(rows, columns, AM_FLASH_TILE, p, v, tile->v.step / (ptrdiff_t)sizeof(T), c, c_step,
                    prefetch, tile->v.run ? &runs : NULL);
}

#define STEP(name) FN(name)
#define WIDTH 1
#define EXP2_TERMS FN(exp2_terms)
#include "kernels/attention/step_tpl.h"
