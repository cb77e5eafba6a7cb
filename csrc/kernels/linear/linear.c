/* linear.c – linear attention, in float32 and float64. */
#include "kernels/linear/linear_f32.h"
#include "kernels/linear/tokens_tpl.h"
#include "kernels/linear/pairs_tpl.h"
#include "kernels/linear/chunk_tpl.h"

#include "kernels/attention/f64.h"
#include "kernels/attention/product_tpl.h"
#include "kernels/linear/product_tpl.h"
#include "kernels/linear/tokens_tpl.h"
#include "kernels/linear/pairs_tpl.h"
#include "kernels/linear/chunk_tpl.h"

const am_kernels TABLE(linear) = {
    .flash_f32 = {.linear_forward = &kernels_f32, .linear_backward = &kernels_f32},
    .flash_f64 = {.linear_forward = &kernels_f64, .linear_backward = &kernels_f64},
};
