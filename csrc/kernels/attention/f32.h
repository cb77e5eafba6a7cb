/* f32.h – what templates of attention and linear attention take to compute in float32. It has no guard: a
 * file that undefines all may take another type. */
#include "kernels/attention/common.h"

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
