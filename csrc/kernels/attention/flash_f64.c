/* flash_f64.c – attention in float64, forward and backward. */
#include "kernels/attention/f64.h"
#define OWN(name) FN(name)
#include "kernels/attention/product_tpl.h"
#include "kernels/attention/attention_tpl.h"
#include "kernels/attention/merge_tpl.h"

#define S T
#define MEM(op) VOP(op)
#define FROM(name) FN(name)
#include "kernels/attention/numbers_tpl.h"
#define S T
#define LOAD VOP(load)
#define LOAD_PART VOP(load_part)
#define FROM(name) FN(name)
#include "kernels/attention/formats/kv_format_tpl.h"

#include "kernels/attention/backward_tpl.h"
#define STEP(name) FN(name)
#define WIDTH 1
#define HEIGHT STRIP
#include "kernels/attention/backward_step_tpl.h"
#include "kernels/attention/rows_tpl.h"
#include "kernels/attention/tangent_tpl.h"
#include "kernels/attention/backward_tangents_tpl.h"
#include "kernels/attention/weights_tpl.h"

const am_kernels TABLE(flash_f64) = {
    .flash_f64 =
        {
            .type = AM_FLOAT64,
            .factors = AM_FLOAT64,
            .width = 1,
            .panel = PANEL_f64,
            .queries = 1 << AM_FLOAT64,
            .scaling = AM_SCALE_NUMBERS,
            .step = flash_step_f64,
            .merge = merge_f64,
            .kv = {[AM_FLOAT64] = KV_KERNELS(f64)},
            .numbers = {[AM_FLOAT64] = {read_bias_f64, write_f64}},
            .backward = backward_f64,
            .find_row_max = find_row_max_f64,
            .find_infinite = find_infinite_f64,
            .tangent_step = tangent_step_f64,
            .backward_tangents = backward_tangents_f64,
            .find_weights = find_weights_f64,
            .sum_weights = sum_weights_f64,
            .rank_keys = rank_keys_f64,
            .load_rows = load_rows_f64,
            .add_rows = add_rows_f64,
            .dot_rows = dot_rows_f64,
        },
};
