/* flash_bf16x2.c – attention in bfloat16, forward and backward; keys and values are packed. */
#include "kernels/attention/flash_bf16x2.h"

#include "kernels/attention/backward_tpl.h"
#define STEP(name) name##_bf16x2
#define WIDTH 2
#define HEIGHT STRIP
#include "kernels/attention/backward_step_tpl.h"

void SHARED_BF16X2(find_p_bf16x2)(const am_flash_rows *block, const am_flash_tile *tile)
{
    find_p_bf16x2(block, tile);
}
void SHARED_BF16X2(add_packed_bf16x2)(ptrdiff_t rows, ptrdiff_t columns, const operands_bf16x2 *p)
{
    add_product_bf16x2(rows, columns, *p, NULL, NULL);
}

const am_kernels TABLE(flash_bf16x2) = {
    .flash_bf16x2 =
        {
            .type = AM_FLOAT32,
            .factors = AM_BFLOAT16,
            .width = 2,
            .panel = PANEL_f32,
            .queries = 1 << AM_BFLOAT16,
            .scaling = AM_SCALE_PRODUCTS,
            .step = flash_step_bf16x2,
            .backward = backward_bf16x2,
            .find_row_max = find_row_max_bf16x2,
        },
};
