/* kv_f8x2.c – keys and values of eight bits, multiplied as bf16x2; those of int8 only where rows are many. */
#include "kernels/attention/flash_bf16x2.h"
#include "kernels/attention/formats/widen_i4.h"

/* That of kv_f8.c. */
void SHARED(add_tile_f8)(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch);
#include "kernels/attention/formats/f8x2_tpl.h"

#define NUMBER uint8_t
#define LOAD_SOME vf_load_some_bf16x2_f8
#define FROM(name) name##_bf16x2_f8
#include "kernels/attention/formats/pack_8_tpl.h"
#define NUMBER int8_t
#define LOAD_SOME vf_load_some_bf16x2_i8
#define FROM(name) name##_bf16x2_i8
#include "kernels/attention/formats/pack_8_tpl.h"
const am_kernels TABLE(kv_f8x2) = {
    .flash_bf16x2 =
        {
            .kv = {[AM_INT8] = {.pack_keys = pack_keys_bf16x2_i8, .pack_values = pack_values_bf16x2_i8},
                   [AM_FLOAT8_E4M3] = {AM_KV_READ, AM_QUERY_PACKED, pack_queries_f8x2, pack_keys_bf16x2_f8,
                                       pack_values_bf16x2_f8, step_unpacked_f8x2, true},
                   [AM_INT4] = {.reading = AM_KV_ROWS, .queries = AM_QUERY_ROUNDED}},
            .widen[AM_INT4] = widen_i4_bf16,
        },
};
