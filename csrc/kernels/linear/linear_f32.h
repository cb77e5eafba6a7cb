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

#include "kernels/attention/f32.h"
#include "kernels/attention/product_tpl.h"
#include "kernels/linear/product_tpl.h"

#endif
