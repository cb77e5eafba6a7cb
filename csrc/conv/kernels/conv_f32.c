/* conv_f32.c – short convolutions in float32. */
#include "kernels/attention/f32.h"
#include "kernels/attention/product_tpl.h"
#include "conv/kernels/conv_tpl.h"

#define S float
#define MEM(op) VOP(op)
#define FROM(name) name##_f32
#include "conv/kernels/conv_forward_tpl.h"
#define S uint16_t
#define MEM(op) vf_##op##_f16
#define FROM(name) name##_f16
#include "conv/kernels/conv_forward_tpl.h"
#define S uint16_t
#define MEM(op) vf_##op##_bf16
#define FROM(name) name##_bf16
#include "conv/kernels/conv_forward_tpl.h"

const am_kernels TABLE(conv_f32) = {
    .conv_f32 =
        {
            .forward = {[AM_FLOAT16] = conv_f16, [AM_BFLOAT16] = conv_bf16, [AM_FLOAT32] = conv_f32},
            .silu_gradient = silu_gradient_f32,
            .sums = conv_sums_f32,
        },
};
