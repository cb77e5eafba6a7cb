/* kv_bf16.h – keys and values of bfloat16, multiplied in float32. */
#ifndef AM_KERNELS_ATTENTION_FORMATS_KV_BF16_H
#define AM_KERNELS_ATTENTION_FORMATS_KV_BF16_H

#include "kernels/attention/flash_f32.h"

#define S uint16_t
#ifdef V_LINES
#    define LOADS(b, b_row, vectors, to) vf_load_columns_bf16(b, (vectors) > 1, (to)[0], (to)[1])
#    define SPLIT vf_split_32
#    define JOIN vf_join_32
#else
#    define LOAD vf_load_bf16
#endif
#define FMA vf_fma
#define TIMES vf_mul
#define FROM(name) name##_bf16
#include "kernels/attention/product_of_tpl.h"
#ifdef V_LINES
/* In the order in which keys are loaded: those of a line, and a rest of at most a vector in order. */
static void pack_queries_bf16(void *dst, const void *q, ptrdiff_t q_stride, ptrdiff_t rows,
                              ptrdiff_t head_dim)
{
    const ptrdiff_t stride = am_packed_query_lanes(head_dim);
    float *to = dst;
    const float *from = q;
    for (ptrdiff_t r = 0; r < rows; r++, to += stride, from += q_stride) {
        for (ptrdiff_t i = 0; i < head_dim; i += 2 * VF_LANES) {
            vf first, second;
            load_two(from + i, head_dim - i, &first, &second);
            if (head_dim - i > VF_LANES) vf_split_32(&first, &second);
            vf_store(to + i, first);
            vf_store(to + i + VF_LANES, second);
        }
    }
}
#    define W S
#    define WIDE(name) FROM(name)
#    define UNIT 1
#    define LOAD_WIDE vf_load_line_bf16
#    define LOAD_PART_WIDE vf_load_part_line_bf16
#    define QUERIES(block) ((const float *)(block)->q_packed)
#    define QUERY_STEP am_packed_query_lanes
#    define PARTS 2
#    define PART_OF(line, part) ((part) == 0 ? vf_even_bf16(line) : vf_odd_bf16(line))
#endif
#define S uint16_t
#define LOAD vf_load_bf16
#define LOAD_PART vf_load_part_bf16
#define FROM(name) name##_bf16
#include "kernels/attention/formats/kv_format_tpl.h"

#endif
