/* amx.c – attention kernels of bfloat16 for x86-64 processors with AMX tiles (Sapphire Rapids). */
#define V_AMX
#include "kernels/vec_avx512.h"
#pragma GCC diagnostic ignored "-Wunused-function" /* this file needs only some of the functions */
#include "kernels/level.h"

const am_flash_kernels am_kernels_amx = {
    .amx = true,
    .step = flash_step_amx,
    .backward = backward_bf16x2,
    .find_row_max = find_row_max_bf16x2,
};
