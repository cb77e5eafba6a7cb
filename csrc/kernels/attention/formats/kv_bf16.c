/* kv_bf16.c – see kv_bf16.h. */
#include "kernels/attention/formats/kv_bf16.h"

void SHARED(add_values_bf16)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t begin,
                             ptrdiff_t end, const uint16_t *values, prefetch_lines *prefetch)
{
    add_values_bf16(block, tile, begin, end, values, prefetch);
}

const am_kernels TABLE(kv_bf16) = {
#ifdef V_LINES
    .flash_f32.kv[AM_BFLOAT16] = KV_KERNELS(bf16, .queries = AM_QUERY_PACKED,
                                            .pack_queries = pack_queries_bf16),
#else
    .flash_f32.kv[AM_BFLOAT16] = KV_KERNELS(bf16),
#endif
};
