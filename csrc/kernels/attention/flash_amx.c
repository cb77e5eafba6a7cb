/* flash_amx.c – attention in bfloat16 for x86-64 processors with AMX tiles (Sapphire Rapids). */
#define V_AMX
#include "kernels/attention/flash_bf16x2.h"
#include "kernels/attention/backward_tpl.h"
#include "kernels/attention/amx.h"

#define STEP(name) name##_bf16x2
#define WIDTH 2
#define AMX_PRODUCTS
#define HEIGHT AMX_ROWS
#include "kernels/attention/backward_step_tpl.h"

const am_kernels TABLE(flash_amx) = {
    .end_tiles = end_tiles,
    .flash_amx =
        {
            .queries = 1 << AM_BFLOAT16,
            .scaling = AM_SCALE_PRODUCTS,
            .packed_alone = true,
            .by_channel = true,
            .step = flash_step_amx,
            .steps = flash_steps_amx,
            .backward = backward_bf16x2,
            .find_row_max = find_row_max_bf16x2,
        },
};
