/* linear_f32.h – products of linear attention in float32. What it defines stays for the templates behind it,
 * the last of which undefines it. */
#ifndef AM_KERNELS_LINEAR_LINEAR_F32_H
#define AM_KERNELS_LINEAR_LINEAR_F32_H

#include "kernels/attention/common.h"
#include "kernels/linear/table.h"

/* Rows and vectors of a tile of a product, whose sums stay in registers. */
#define HEIGHT 6
#if defined __AVX512F__ || defined __aarch64__
#    define VECTORS 4
#else
#    define VECTORS 2
#endif

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
#include "kernels/attention/product_tpl.h"
#include "kernels/linear/product_tpl.h"

#endif
