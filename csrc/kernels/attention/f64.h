/* f64.h – what templates of attention and linear attention take to compute in float64. It has no guard: a
 * file that undefines all may take another type. */
#include "kernels/attention/common.h"

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
