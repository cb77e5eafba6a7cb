/* kv_i16x2.c – see i16x2_tpl.h and kv_i4.h. */
#include "kernels/attention/flash_f32.h"

/* Those of kv_i8.c. */
void SHARED(step_unpacked_i8)(const am_flash_rows *const *blocks, const am_flash_tile *tiles,
                              ptrdiff_t heads);
void SHARED(add_tile_i8)(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch);

#include "kernels/attention/formats/i16x2_tpl.h"
#include "kernels/attention/formats/kv_i4.h"

const am_kernels TABLE(kv_i16x2) = {
    .flash_f32.kv =
        {
            [AM_INT8] = {.reading = AM_KV_READ,
                         .queries = AM_QUERY_ROUNDED,
                         .pack_queries = pack_queries_i16x2,
                         .step_unpacked = step_i16x2},
            [AM_INT4] = {.reading = AM_KV_ROWS,
                         .queries = AM_QUERY_ROUNDED,
                         .pack_queries = pack_queries_i4,
                         .step_unpacked = step_i4},
        },
};
