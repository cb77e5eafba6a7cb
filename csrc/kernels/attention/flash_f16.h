/* flash_f16.h – products of float32 and float16. */
#ifndef AM_KERNELS_ATTENTION_FLASH_F16_H
#define AM_KERNELS_ATTENTION_FLASH_F16_H

#include "kernels/attention/flash_f32.h"

#define S uint16_t
#define LOAD vf_load_f16
#define FMA vf_fma
#define TIMES vf_mul
#define FROM(name) name##_f16
#include "kernels/attention/product_of_tpl.h"

#endif
