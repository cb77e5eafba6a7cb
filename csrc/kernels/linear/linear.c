/* linear.c – linear attention, in float32 and float64. */
#include "kernels/linear/linear_f32.h"
#include "kernels/linear/tokens_tpl.h"
#include "kernels/linear/pairs_tpl.h"
#include "kernels/linear/chunk_tpl.h"

#define T double
#define V vd
#define VOP(op) vd_##op
#define FN(name) name##_f64
#define LANES VD_LANES
#define STRIP V_STRIP
#define GREATEST DBL_MAX
#define EPSILON DBL_EPSILON
#define MIN_POWER 1022
#define ROUNDER (0x1.8p52 + MIN_POWER)
#include "kernels/attention/product_tpl.h"
#include "kernels/linear/product_tpl.h"
#include "kernels/linear/tokens_tpl.h"
#include "kernels/linear/pairs_tpl.h"
#include "kernels/linear/chunk_tpl.h"

const am_kernels TABLE(linear) = {.linear_f32 = &kernels_f32, .linear_f64 = &kernels_f64};
