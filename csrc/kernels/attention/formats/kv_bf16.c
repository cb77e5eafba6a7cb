/* kv_bf16.c – see kv_bf16.h. */
#include "kernels/attention/formats/kv_bf16.h"

#ifdef V_LINES
#    define KERNELS                                                                                          \
        {                                                                                                    \
            AM_KV_READ,     AM_QUERY_PACKED,  pack_queries_bf16,                                             \
            pack_keys_bf16, pack_values_bf16, step_unpacked_bf16,                                            \
            false}
#else
#    define KERNELS KV_KERNELS(bf16)
#endif

void SHARED(add_values_bf16)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t begin,
                             ptrdiff_t end, const uint16_t *values, prefetch_lines *prefetch)
{
    add_values_bf16(block, tile, begin, end, values, prefetch);
}

const am_kernels TABLE(kv_bf16) = {
    .flash_f32.kv[AM_BFLOAT16] = KERNELS,
};
