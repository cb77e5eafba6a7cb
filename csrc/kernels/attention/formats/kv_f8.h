/* kv_f8.h – keys and values of float8, multiplied in float32. */
#ifndef AM_KERNELS_ATTENTION_FORMATS_KV_F8_H
#define AM_KERNELS_ATTENTION_FORMATS_KV_F8_H

#include "kernels/attention/flash_f16.h"

#ifdef V_F8
/* Rows of float8 as float16 of 2^-8 their value, which are converted in fewer steps. A row has room for
 * multiples of V_F8. */
static inline ptrdiff_t whole_f8(ptrdiff_t count) { return (count + V_F8 - 1) / V_F8 * V_F8; }
APART void widen_rows_f8(uint16_t *to, ptrdiff_t to_stride, const uint8_t *from, ptrdiff_t stride,
                         ptrdiff_t rows, ptrdiff_t count)
{
    v_bytes most = {0};
    for (ptrdiff_t r = 0; r < rows; r++) {
        uint16_t *dst = to + r * to_stride;
        const uint8_t *src = from + r * stride;
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
            if ((from[r * stride + i] & 0x7f) == 0x7f) to[r * to_stride + i] = 0x7e00;
        }
    }
}
#    define S uint16_t
#    define LOAD vf_load_f16
#    define LOAD_PART vf_load_part_f16
#    define FROM(name) name##_f16
#    include "kernels/attention/formats/pack_panel_tpl.h"
#    undef S
#    undef LOAD
#    undef LOAD_PART
#    undef FROM
#    define W uint16_t
#    define WIDE(name) name##_f16
#    define WIDEN widen_rows_f8
#    define UNIT 0x1p8f
#    define LOAD_WIDE vf_load_f16
#    define LOAD_PART_WIDE vf_load_part_f16
#else
#    define S uint8_t
#    define LOAD vf_load_f8
#    define FMA vf_fma
#    define TIMES vf_mul
#    define FROM(name) name##_f8
#    include "kernels/attention/product_of_tpl.h"
#endif
#define S uint8_t
#define LOAD vf_load_f8
#define LOAD_PART vf_load_part_f8
#define FROM(name) name##_f8
#include "kernels/attention/formats/kv_format_tpl.h"

#endif
