/* amx.c – attention of bfloat16 for x86-64 processors that multiply tiles of it (Sapphire Rapids). */
#define V_AMX
#include "kernels/vec_avx512.h"
#pragma GCC diagnostic ignored "-Wunused-function" /* of all kernels these need some */
#include "kernels/level.h"

void am_flash_step_amx(const am_flash_rows *block, const am_flash_tile *tile) { flash_step_amx(block, tile); }
void am_flash_backward_amx(const am_backward_rows *block, const am_backward_tile *tile)
{
    backward_bf16x2(block, tile);
}
void am_flash_find_row_max_amx(const am_backward_rows *block, const am_backward_tile *tile)
{
    find_row_max_bf16x2(block, tile);
}
