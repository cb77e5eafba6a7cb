/* kv_i16x2.c – see flash_i16x2_tpl.h. */
#include "kernels/flash_kv_i8.h"
#include "kernels/flash_i16x2_tpl.h"

const am_kernels TABLE(kv_i16x2) = {
    .flash_f32.kv[AM_INT8] =
        {
            .pack_queries = pack_queries_i16x2,
            .step_unpacked = step_i16x2,
            .rounds_queries = true,
        },
};
