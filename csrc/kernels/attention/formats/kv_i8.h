/* kv_i8.h – keys and values of int8, multiplied in float32. */
#ifndef AM_KERNELS_ATTENTION_FORMATS_KV_I8_H
#define AM_KERNELS_ATTENTION_FORMATS_KV_I8_H

#include "kernels/attention/flash_f32.h"

#define S int8_t
#define LOAD vf_load_i8
#define FMA vf_fma
#define TIMES vf_mul
#define FROM(name) name##_i8
#include "kernels/attention/product_of_tpl.h"
#define S int8_t
#define LOAD vf_load_i8
#define LOAD_PART vf_load_part_i8
#define FROM(name) name##_i8
#include "kernels/attention/formats/kv_format_tpl.h"

#endif
