/* flash_tpl.h – attention of a block of rows to a tile of keys, for one type of numbers.
 *
 *     S = Q Kᵀ           rows × 64, one panel of keys after the other, so that the panel stays in cache
 *     P = e^(S - high)   row by row; `high` is raised only when a logit exceeds it by far
 *     O = O + P V        one panel of columns after the other
 *
 * Of a tile that is only partly live, each strip takes the columns from its first live one to its last.
 */

/* How far a logit may exceed `high`: P stays below e^8, and rows are seldom scaled. */
#define SLACK 8

/* Adds the bias and caps. */
static void FN(dress)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row, T *logits,
                      ptrdiff_t begin, ptrdiff_t end)
{
    const T *bias = tile->bias ? (const T *)tile->bias + row * AM_FLASH_TILE : NULL;
    V cap = VOP(set1)((T)block->cap), inverse = VOP(set1)((T)(1 / block->cap));
    for (ptrdiff_t i = begin; i < end; i += LANES) {
        V s = VOP(load)(logits + i);
        if (bias) s = VOP(add)(s, VOP(load)(bias + i));
        if (block->cap > 0) s = VOP(mul)(cap, FN(tanh)(VOP(mul)(s, inverse)));
        VOP(store)(logits + i, s);
    }
}

/* Logits of one row to weights; columns begin … end - 1, whole vectors. Returns whether `high` rose. */
static void FN(weigh)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row, ptrdiff_t begin,
                      ptrdiff_t end)
{
    T *logits = (T *)block->logits + row * AM_FLASH_TILE, *high = (T *)block->high + row,
      *sum = (T *)block->sum + row, *top = (T *)block->top + row;
    V unit = VOP(set1)((T)block->unit);
    if (tile->bias || block->cap > 0) FN(dress)(block, tile, row, logits, begin, end);
    V most = VOP(set1)(-(T)INFINITY);
    if (tile->live) {
        for (ptrdiff_t i = begin; i < end; i += LANES) {
            V s = VOP(select)(tile->live[row] >> i, VOP(load)(logits + i), VOP(set1)(-(T)INFINITY));
            VOP(store)(logits + i, s);
            most = VOP(max)(s, most);
        }
    } else {
        for (ptrdiff_t i = begin; i < end; i += LANES) most = VOP(max)(VOP(load)(logits + i), most);
    }
    T highest = VOP(highest)(most);
    if (highest > *top) *top = highest;
    if (highest > *high + SLACK) { /* also if it was -INFINITY */
        if (*high > -(T)INFINITY) {
            V factor = FN(exp2)(VOP(mul)(VOP(set1)(*high - highest), unit));
            T *out = (T *)block->out + row * block->out_depth;
            for (ptrdiff_t i = 0; i < block->out_depth; i += LANES)
                VOP(store)(out + i, VOP(mul)(factor, VOP(load)(out + i)));
            *sum *= VOP(first)(factor);
        }
        *high = highest;
    }
    V base = VOP(set1)(*high > -(T)INFINITY ? *high : 0), total = VOP(set1)(0);
    for (ptrdiff_t i = begin; i < end; i += LANES) {
        V p = FN(exp2)(VOP(mul)(VOP(sub)(VOP(load)(logits + i), base), unit));
        total = VOP(add)(total, p);
        if (tile->kept) p = VOP(select)(tile->kept[row] >> i, p, VOP(set1)(0));
        VOP(store)(logits + i, p);
    }
    *sum += VOP(total)(total);
}

/* c[r] += sum over live i of a[r][i] b[i], for a b among which are NaN or Inf: 0 × NaN would reach beyond
 * live pairs. The same sums in the same order as by `product`, so that garbage in dead pairs does not change
 * a bit. Panels of b lie `b_panel` apart. */
static void FN(add_live_rows)(ptrdiff_t rows, const uint64_t *live, const T *a, ptrdiff_t a_row,
                              ptrdiff_t a_column, const T *b, ptrdiff_t b_row, ptrdiff_t b_panel, T *c,
                              ptrdiff_t c_row, ptrdiff_t depth)
{
    for (ptrdiff_t r = 0; r < rows; r++) {
        for (ptrdiff_t j = 0; j < depth; j += LANES) {
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

/* O + P V of live pairs alone, for one panel of columns. */
static void FN(add_live)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t column,
                         const T *panel)
{
    FN(add_live_rows)(block->rows, tile->live, block->logits, AM_FLASH_TILE, 1, panel, FN(PANEL), 0,
                      (T *)block->out + column, block->out_depth, FN(PANEL));
}

/* A share of what is to come. */
static void FN(ask)(flash_ahead *next, ptrdiff_t share)
{
    for (ptrdiff_t i = 0; i < share; i++) flash_ask(next->rows > 0 ? next : next + 1);
}

static void FN(flash_step)(const am_flash_rows *block, const am_flash_tile *tile)
{
    FN(strip) strips[AM_FLASH_ROWS];
    ptrdiff_t count = FN(cut_strips)(strips, block->rows, tile->live, AM_FLASH_TILE);

    flash_ahead next[] = {flash_ahead_of(&tile->next_k, 64), flash_ahead_of(&tile->next_v, 64)};
    ptrdiff_t lines = next[0].pieces * next[0].rows + next[1].pieces * next[1].rows;
    ptrdiff_t share = lines * FN(PANEL) / (count * (AM_FLASH_TILE + block->out_depth)) + (lines > 0);

    T *logits = block->logits, *out = block->out;
    const T *q = block->q, *k = tile->k, *v = tile->v;
    for (ptrdiff_t column = 0; column < AM_FLASH_TILE; column += FN(PANEL), k += FN(PANEL) * block->depth) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (column >= s->end || column + FN(PANEL) <= s->begin) continue;
            FN(product)(s->rows, block->depth, q + s->row * block->depth, block->depth, k,
                        logits + s->row * AM_FLASH_TILE + column, AM_FLASH_TILE, false);
            FN(ask)(next, share);
        }
    }
    for (const FN(strip) *s = strips; s < strips + count; s++) {
        ptrdiff_t begin = s->begin / LANES * LANES, end = (s->end + LANES - 1) / LANES * LANES;
        for (ptrdiff_t r = s->row; begin < end && r < s->row + s->rows; r++)
            FN(weigh)(block, tile, r, begin, end);
    }
    for (ptrdiff_t column = 0; column < block->out_depth;
         column += FN(PANEL), v += AM_FLASH_TILE * FN(PANEL)) {
        if (tile->live && !tile->finite) {
            FN(add_live)(block, tile, column, v);
            continue;
        }
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (s->begin == s->end) continue;
            FN(product)(s->rows, s->end - s->begin, logits + s->row * AM_FLASH_TILE + s->begin, AM_FLASH_TILE,
                        v + s->begin * FN(PANEL), out + s->row * block->out_depth + column, block->out_depth,
                        true);
            FN(ask)(next, share);
        }
    }
}

static void FN(scale)(void *dst, const void *src, double factor, ptrdiff_t count, bool add)
{
    T *to = dst;
    const T *from = src;
    V scale = VOP(set1)((T)factor);
    ptrdiff_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        V x = VOP(mul)(scale, VOP(load)(from + i));
        VOP(store)(to + i, add ? VOP(add)(VOP(load)(to + i), x) : x);
    }
    if (i == count) return;
    V x = VOP(mul)(scale, VOP(load_part)(from + i, count - i));
    VOP(store_part)(to + i, add ? VOP(add)(VOP(load_part)(to + i, count - i), x) : x, count - i);
}

#define S T
#define LOAD VOP(load)
#define FROM(name) FN(name)
#include "kernels/flash_source_tpl.h"
#ifdef HALVES
#    define S uint16_t
#    define LOAD vf_load_f16
#    define FROM(name) name##_f16
#    include "kernels/flash_product_of_tpl.h"
#    define S uint16_t
#    define LOAD vf_load_f16
#    define FROM(name) name##_f16
#    include "kernels/flash_source_tpl.h"
#    define S uint16_t
#    define LOAD vf_load_bf16
#    define FROM(name) name##_bf16
#    include "kernels/flash_product_of_tpl.h"
#    define S uint16_t
#    define LOAD vf_load_bf16
#    define FROM(name) name##_bf16
#    include "kernels/flash_source_tpl.h"
#    undef HALVES
#endif

#undef MORE_ROWS
#undef EACH_ROWS
#undef SLACK
