/* flash_tpl.h – attention of a block of rows over a tile of keys, for one type of numbers. */

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

/* O + P V of only the live pairs, for one panel of columns. */
static void FN(add_live)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t column,
                         const T *panel)
{
    FN(add_live_rows)(block->rows, tile->live, block->logits, AM_FLASH_TILE, 1, panel, FN(PANEL), 0,
                      (T *)block->out + column, block->out_depth, columns_at(block, column, FN(PANEL)));
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

/* O + P V of some columns of unpacked values, at most a panel. */
static void FN(add_unpacked)(ptrdiff_t rows, ptrdiff_t columns, const T *p, const am_flash_tile *tile,
                             ptrdiff_t column, T *c, ptrdiff_t c_step, prefetch_lines *prefetch)
{
    const row_runs runs = runs_of_values(tile, 1, column * (ptrdiff_t)sizeof(T));
    const T *v = (const T *)tile->v + column;
    if (tile->run)
        FN(add_product_in_runs)(rows, columns, AM_FLASH_TILE, p, v, tile->v_step, c, c_step, prefetch, &runs);
    else
        FN(add_product)(rows, columns, AM_FLASH_TILE, p, v, tile->v_step, c, c_step, prefetch);
}

#define STEP(name) FN(name)
#define WIDTH 1
#define EXP2_TERMS FN(exp2_terms)
#include "kernels/flash_step_tpl.h"

/* Stores the first of LANES numbers, which may be all. */
static inline void FN(store_first)(T *to, V v, ptrdiff_t count)
{
    T all[LANES];
    VOP(store)(all, v);
    memcpy(to, all, (size_t)count * sizeof *to);
}

/* LANES rows at a time: first their factors, then what these multiply. */
static void FN(merge)(const am_flash_rows *whole, const am_flash_rows *split)
{
    const V unit = VOP(set1)((T)whole->unit);
    T *ref_max = whole->ref_max, *const sums[] = {whole->sum, whole->exact_sum}, *row_max = whole->row_max,
      *out = whole->out;
    const T *other_max = split->ref_max, *const more[] = {split->sum, split->exact_sum},
            *most = split->row_max, *from = split->out;
    for (ptrdiff_t row = 0; row < whole->rows; row += LANES) {
        const ptrdiff_t count = whole->rows - row < LANES ? whole->rows - row : LANES;
        const V own = VOP(load_part)(ref_max + row, count), other = VOP(load_part)(other_max + row, count),
                both = VOP(max)(own, other), base = VOP(max)(both, VOP(set1)(-GREATEST)),
                own_factor = FN(exp2)(VOP(mul)(VOP(sub)(own, base), unit)),
                other_factor = FN(exp2)(VOP(mul)(VOP(sub)(other, base), unit));
        FN(store_first)(ref_max + row, both, count);
        for (int i = 0; i < 2; i++) {
            if (!sums[i]) continue;
            const V own_sum = VOP(mul)(own_factor, VOP(load_part)(sums[i] + row, count)),
                    other_sum = VOP(mul)(other_factor, VOP(load_part)(more[i] + row, count));
            FN(store_first)(sums[i] + row, VOP(add)(own_sum, other_sum), count);
        }
        for (ptrdiff_t r = row; row_max && r < row + count; r++)
            if (most[r] > row_max[r]) row_max[r] = most[r];
        T own_factors[LANES], other_factors[LANES];
        VOP(store)(own_factors, own_factor);
        VOP(store)(other_factors, other_factor);
        for (ptrdiff_t r = 0; r < count; r++, out += whole->out_depth, from += split->out_depth) {
            const V a = VOP(set1)(own_factors[r]), b = VOP(set1)(other_factors[r]);
            for (ptrdiff_t i = 0; i < whole->out_depth; i += LANES) {
                const V x = VOP(mul)(a, VOP(load)(out + i)), y = VOP(mul)(b, VOP(load)(from + i));
                VOP(store)(out + i, VOP(add)(x, y));
            }
        }
    }
}

#define S T
#define LOAD VOP(load)
#define LOAD_PART VOP(load_part)
#define STORE VOP(store)
#define STORE_PART VOP(store_part)
#define FROM(name) FN(name)
#include "kernels/flash_numbers_tpl.h"
#include "kernels/flash_kv_format_tpl.h"
#ifdef HALVES
#    define S uint16_t
#    define LOADS(b, b_row, vectors, left, right)                                                            \
        left = vf_load_f16(b), right = vf_load_f16((b) + ((vectors) > 1) * LANES)
#    define FMA vf_fma
#    define TIMES vf_mul
#    define FROM(name) name##_f16
#    include "kernels/flash_product_of_tpl.h"
#    define S uint16_t
#    define LOAD vf_load_f16
#    define LOAD_PART vf_load_part_f16
#    define STORE vf_store_f16
#    define STORE_PART vf_store_part_f16
#    define FROM(name) name##_f16
#    include "kernels/flash_numbers_tpl.h"
#    include "kernels/flash_kv_format_tpl.h"
#    define S uint16_t
#    ifdef V_LINES
#        define LOADS(b, b_row, vectors, left, right) vf_load_columns_bf16(b, (vectors) > 1, &left, &right)
#        define SPLIT vf_split_32
#        define JOIN vf_join_32
#    else
#        define LOADS(b, b_row, vectors, left, right)                                                        \
            left = vf_load_bf16(b), right = vf_load_bf16((b) + ((vectors) > 1) * LANES)
#    endif
#    define FMA vf_fma
#    define TIMES vf_mul
#    define FROM(name) name##_bf16
#    include "kernels/flash_product_of_tpl.h"
#    ifdef V_LINES
/* Loads up to two vectors; what is missing is zero. */
static inline void load_two(const float *from, ptrdiff_t count, vf *first, vf *second)
{
    *first = count >= VF_LANES ? vf_load(from) : vf_load_part(from, count);
    *second = count >= 2 * VF_LANES ? vf_load(from + VF_LANES)
              : count > VF_LANES    ? vf_load_part(from + VF_LANES, count - VF_LANES)
                                    : vf_set1(0);
}

/* In the order in which keys are loaded: those of a line, and a rest of at most a vector in order. */
static void pack_queries_bf16(void *dst, const void *q, ptrdiff_t q_step, ptrdiff_t rows, ptrdiff_t depth)
{
    const ptrdiff_t step = am_packed_query_lanes(depth);
    float *to = dst;
    const float *from = q;
    for (ptrdiff_t r = 0; r < rows; r++, to += step, from += q_step) {
        for (ptrdiff_t i = 0; i < depth; i += 2 * VF_LANES) {
            vf first, second;
            load_two(from + i, depth - i, &first, &second);
            if (depth - i > VF_LANES) vf_split_32(&first, &second);
            vf_store(to + i, first);
            vf_store(to + i + VF_LANES, second);
        }
    }
}
#        define W S
#        define WIDE(name) FROM(name)
#        define UNIT 1
#        define LOAD_WIDE vf_load_line_bf16
#        define LOAD_PART_WIDE vf_load_part_line_bf16
#        define QUERIES(block) ((const float *)(block)->q_packed)
#        define QUERY_STEP am_packed_query_lanes
#        define PARTS 2
#        define PART_OF(line, part) ((part) == 0 ? vf_even_bf16(line) : vf_odd_bf16(line))
#    endif
#    define S uint16_t
#    define LOAD vf_load_bf16
#    define LOAD_PART vf_load_part_bf16
#    define STORE vf_store_bf16
#    define STORE_PART vf_store_part_bf16
#    define FROM(name) name##_bf16
#    include "kernels/flash_numbers_tpl.h"
#    include "kernels/flash_kv_format_tpl.h"
#    define S int8_t
#    define LOADS(b, b_row, vectors, left, right)                                                            \
        left = vf_load_i8(b), right = vf_load_i8((b) + ((vectors) > 1) * LANES)
#    define FMA vf_fma
#    define TIMES vf_mul
#    define FROM(name) name##_i8
#    include "kernels/flash_product_of_tpl.h"
#    define S int8_t
#    define LOAD vf_load_i8
#    define LOAD_PART vf_load_part_i8
#    define FROM(name) name##_i8
#    include "kernels/flash_kv_format_tpl.h"
#    ifdef V_I16X2
#        include "kernels/flash_i16x2_tpl.h"
#    endif
#    ifdef V_F8
/* Rows of float8 as float16 of 2^-8 their value, which are converted in fewer steps. A row has room for
 * multiples of V_F8. */
static inline ptrdiff_t whole_f8(ptrdiff_t count) { return (count + V_F8 - 1) / V_F8 * V_F8; }
APART void widen_rows_f8(uint16_t *to, ptrdiff_t to_step, const uint8_t *from, ptrdiff_t step, ptrdiff_t rows,
                         ptrdiff_t count)
{
    v_bytes most = {0};
    for (ptrdiff_t r = 0; r < rows; r++) {
        uint16_t *dst = to + r * to_step;
        const uint8_t *src = from + r * step;
        ptrdiff_t i = 0;
        for (; i + V_F8 <= count; i += V_F8) v_f8_to_f16(dst + i, src + i, &most);
        if (i == count) continue;
        uint8_t rest[V_F8] = {0};
        memcpy(rest, src + i, (size_t)(count - i));
        v_f8_to_f16(dst + i, rest, &most);
    }
    if (!v_any_255(most)) return;
    for (ptrdiff_t r = 0; r < rows; r++) {
        for (ptrdiff_t i = 0; i < count; i++) {
            if ((from[r * step + i] & 0x7f) == 0x7f) to[r * to_step + i] = 0x7e00;
        }
    }
}
#        define W uint16_t
#        define WIDE(name) name##_f16
#        define WIDEN widen_rows_f8
#        define UNIT 0x1p8f
#        define LOAD_WIDE vf_load_f16
#        define LOAD_PART_WIDE vf_load_part_f16
#    else
#        define S uint8_t
#        define LOADS(b, b_row, vectors, left, right)                                                        \
            left = vf_load_f8(b), right = vf_load_f8((b) + ((vectors) > 1) * LANES)
#        define FMA vf_fma
#        define TIMES vf_mul
#        define FROM(name) name##_f8
#        include "kernels/flash_product_of_tpl.h"
#    endif
#    define S uint8_t
#    define LOAD vf_load_f8
#    define LOAD_PART vf_load_part_f8
#    define FROM(name) name##_f8
#    include "kernels/flash_kv_format_tpl.h"
#    ifdef V_BF16X2
#        include "kernels/flash_bf16x2_tpl.h"
#    endif
#    if defined V_F8X2 && !defined V_AMX
#        include "kernels/flash_f8x2_tpl.h"
#        define NUMBER uint8_t
#        define LOAD_SOME vf_load_some_bf16x2_f8
#        define FROM(name) name##_bf16x2_f8
#        include "kernels/flash_pack_8_tpl.h"
#        define NUMBER int8_t
#        define LOAD_SOME vf_load_some_bf16x2_i8
#        define FROM(name) name##_bf16x2_i8
#        include "kernels/flash_pack_8_tpl.h"
#    endif
#endif

#undef EACH_ROWS
#undef EACH_FEW_ROWS
