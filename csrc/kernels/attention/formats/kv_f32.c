/* kv_f32.c – keys and values of float32. */
#include "kernels/attention/flash_f32.h"

#define S T
#define LOAD VOP(load)
#define LOAD_PART VOP(load_part)
#define FROM(name) FN(name)
#include "kernels/attention/formats/kv_format_tpl.h"

const am_kernels TABLE(kv_f32) = {
    .flash_f32.kv[AM_FLOAT32] = KV_KERNELS(f32),
};
