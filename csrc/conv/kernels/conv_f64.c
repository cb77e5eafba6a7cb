/* conv_f64.c – short convolutions in float64. */
#include "kernels/attention/f64.h"
#include "kernels/attention/product_tpl.h"
#include "conv/kernels/conv_tpl.h"

#define S double
#define MEM(op) VOP(op)
#define FROM(name) name##_f64
#include "conv/kernels/conv_forward_tpl.h"

const am_kernels TABLE(conv_f64) = {
    .conv_f64 =
        {
            .forward = {[AM_FLOAT64] = conv_f64},
            .silu_gradient = silu_gradient_f64,
            .sums = conv_sums_f64,
        },
};
