/* kv_f8.c – see kv_f8.h. */
#include "kernels/attention/formats/kv_f8.h"

void SHARED(add_tile_f8)(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch)
{
    add_tile_f8(block, tile, prefetch);
}

const am_kernels TABLE(kv_f8) = {
    .flash_f32.kv[AM_FLOAT8_E4M3] = KV_KERNELS(f8),
};
