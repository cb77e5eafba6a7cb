/* kv_f16.c – keys and values of float16, multiplied in float32. */
#include "kernels/attention/flash_f16.h"

#define S uint16_t
#define LOAD vf_load_f16
#define LOAD_PART vf_load_part_f16
#define FROM(name) name##_f16
#include "kernels/attention/formats/kv_format_tpl.h"

const am_kernels TABLE(kv_f16) = {
    .flash_f32.kv[AM_FLOAT16] = KV_KERNELS(f16),
};
