/* kv_f8.c – see flash_kv_f8.h. */
#include "kernels/flash_kv_f8.h"

const am_kernels TABLE(kv_f8) = {
    .flash_f32.kv[AM_FLOAT8] = KV_KERNELS(f8),
};
