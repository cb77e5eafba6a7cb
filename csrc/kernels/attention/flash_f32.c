/* flash_f32.c – attention in float32, forward and backward; keys and values are packed. */
#include "kernels/attention/flash_f32.h"
#include "kernels/attention/merge_tpl.h"

#define S T
#define MEM(op) VOP(op)
#define FROM(name) FN(name)
#include "kernels/attention/numbers_tpl.h"
#define S uint16_t
#define MEM(op) vf_##op##_f16
#define FROM(name) name##_f16
#include "kernels/attention/numbers_tpl.h"
#define S uint16_t
#define MEM(op) vf_##op##_bf16
#define FROM(name) name##_bf16
#include "kernels/attention/numbers_tpl.h"

#include "kernels/attention/backward_tpl.h"
#define STEP(name) FN(name)
#define WIDTH 1
#define HEIGHT STRIP
#include "kernels/attention/backward_step_tpl.h"
#include "kernels/attention/rows_tpl.h"
#include "kernels/attention/tangent_tpl.h"
#include "kernels/attention/backward_tangents_tpl.h"
#include "kernels/attention/weights_tpl.h"

void SHARED(find_p_f32)(const am_flash_rows *block, const am_flash_tile *tile) { find_p_f32(block, tile); }
void SHARED(add_packed_f32)(ptrdiff_t rows, ptrdiff_t columns, const operands_f32 *p)
{
    add_packed_f32(rows, columns, p);
}

const am_kernels TABLE(flash_f32) = {
    .flash_f32 =
        {
            .type = AM_FLOAT32,
            .factors = AM_FLOAT32,
            .width = 1,
            .panel = PANEL_f32,
            .queries = 1 << AM_FLOAT16 | 1 << AM_BFLOAT16 | 1 << AM_FLOAT32,
            .scaling = AM_SCALE_NUMBERS,
            .step = flash_step_f32,
            .merge = merge_f32,
            .numbers = {[AM_FLOAT32] = {read_bias_f32, write_f32},
                        [AM_FLOAT16] = {read_bias_f16, write_f16},
                        [AM_BFLOAT16] = {read_bias_bf16, write_bf16}},
            .backward = backward_f32,
            .find_row_max = find_row_max_f32,
            .find_infinite = find_infinite_f32,
            .tangent_step = tangent_step_f32,
            .backward_tangents = backward_tangents_f32,
            .find_weights = find_weights_f32,
            .sum_weights = sum_weights_f32,
            .rank_keys = rank_keys_f32,
            .load_rows = load_rows_f32,
            .add_rows = add_rows_f32,
            .dot_rows = dot_rows_f32,
        },
};
