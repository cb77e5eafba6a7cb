/* amx.c – attention of bfloat16 for x86-64 processors that multiply tiles of it (Sapphire Rapids). */
#define V_AMX
#include "kernels/vec_avx512.h"
#pragma GCC diagnostic ignored "-Wunused-function" /* of all kernels these need some */
#include "kernels/level.h"

const am_flash_kernels am_kernels_amx = {
    .amx = true,
    .step = flash_step_amx,
    .backward = backward_bf16x2,
    .find_row_max = find_row_max_bf16x2,
};
