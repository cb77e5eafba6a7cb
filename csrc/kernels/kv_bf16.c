/* kv_bf16.c – see flash_kv_bf16.h. */
#include "kernels/flash_kv_bf16.h"

#ifdef V_LINES
#    define KERNELS {pack_queries_bf16, pack_keys_bf16, pack_values_bf16, step_unpacked_bf16, false, false}
#else
#    define KERNELS KV_KERNELS(bf16)
#endif

const am_kernels TABLE(kv_bf16) = {
    .flash_f32.kv[AM_BFLOAT16] = KERNELS,
};
