/* conv_f32.c – short convolutions in float32. */
#include "kernels/flash.h"

#define T float
#define V vf
#define VOP(op) vf_##op
#define FN(name) name##_f32
#define LANES VF_LANES
#define STRIP V_STRIP
#define GREATEST FLT_MAX
#define EPSILON FLT_EPSILON
#define MIN_POWER 126
#define ROUNDER (0x1.8p23 + MIN_POWER)
#include "kernels/flash_product_tpl.h"

static inline void add_to_doubles_f32(double *to, vf sum)
{
    vd_store(to, vd_add(vd_load(to), vf_widen_low(sum)));
    vd_store(to + VD_LANES, vd_add(vd_load(to + VD_LANES), vf_widen_high(sum)));
}
#include "kernels/conv_tpl.h"

const am_kernels TABLE(conv_f32) = {.conv_f32 = {conv_f32, silu_gradient_f32, conv_sums_f32}};
