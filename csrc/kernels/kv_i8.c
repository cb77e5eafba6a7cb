/* kv_i8.c – see flash_kv_i8.h. */
#include "kernels/flash_kv_i8.h"

const am_kernels TABLE(kv_i8) = {
    .flash_f32.kv[AM_INT8] = KV_KERNELS(i8),
};
