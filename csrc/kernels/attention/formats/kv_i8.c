/* kv_i8.c – see kv_i8.h. */
#include "kernels/attention/formats/kv_i8.h"
#include "kernels/attention/formats/widen_i4.h"

void SHARED(step_unpacked_i8)(const am_flash_rows *const *blocks, const am_flash_tile *tiles, ptrdiff_t heads)
{
    step_unpacked_i8(blocks, tiles, heads);
}
void SHARED(add_tile_i8)(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch)
{
    add_tile_i8(block, tile, prefetch);
}
const am_kernels TABLE(kv_i8) = {
    .flash_f32 = {.kv = {[AM_INT8] = KV_KERNELS(i8), [AM_INT4] = {.reading = AM_KV_WIDENED}},
                  .widen[AM_INT4] = widen_i4_f32},
};
