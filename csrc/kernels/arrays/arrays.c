/* arrays.c – the kernels of sums, conversions, masks and packed sequences. */
#include "kernels/level.h"

#define FN(name) name##_f16
#include "kernels/arrays/convert_rows_tpl.h"
#define FN(name) name##_bf16
#include "kernels/arrays/convert_rows_tpl.h"

#define V vf
#define VOP(op) vf_##op
#define LANES VF_LANES
#define T uint16_t
#define MEM(op) vf_##op##_f16
#define FN(name) name##_f16
#include "tokens/kernels/cumsum_tpl.h"
#define T uint16_t
#define MEM(op) vf_##op##_bf16
#define FN(name) name##_bf16
#include "tokens/kernels/cumsum_tpl.h"
#define T float
#define MEM(op) vf_##op
#define FN(name) name##_f32
#include "tokens/kernels/cumsum_tpl.h"
#define T float
#define FN(name) name##_32
#include "kernels/arrays/transpose_tpl.h"
#undef V
#undef VOP
#undef LANES

#define V vd
#define VOP(op) vd_##op
#define LANES VD_LANES
#define T double
#define MEM(op) vd_##op
#define FN(name) name##_f64
#include "tokens/kernels/cumsum_tpl.h"
#define T double
#define FN(name) name##_64
#include "kernels/arrays/transpose_tpl.h"
#undef V
#undef VOP
#undef LANES

#define T uint16_t
#define FN(name) name##_16
#include "kernels/arrays/interleave_tpl.h"
#define T uint32_t
#define FN(name) name##_32
#include "kernels/arrays/interleave_tpl.h"
#define T uint64_t
#define FN(name) name##_64
#include "kernels/arrays/interleave_tpl.h"

#define T int32_t
#define U uint32_t
#define FN(name) name##_32
#include "tokens/kernels/tokens_tpl.h"
#define T int64_t
#define U uint64_t
#define FN(name) name##_64
#include "tokens/kernels/tokens_tpl.h"

#include "tokens/kernels/divide.h"
#define T int32_t
#define UNSIGNED uint32_t
#define FN(name) name##_32
#include "tokens/kernels/sequences_tpl.h"
#define T int64_t
#define UNSIGNED uint64_t
#define FN(name) name##_64
#include "tokens/kernels/sequences_tpl.h"

#include "kernels/arrays/bits.h"
#include "kernels/arrays/words.h"

#define T uint8_t
#define MASK 0xff
#define BITS masked_bits_8
#define FN(name) name##_8
#include "kernels/arrays/mask_rows_tpl.h"
#define T uint16_t
#define MASK 0xffff
#define BITS masked_bits_16
#define FN(name) name##_16
#include "kernels/arrays/mask_rows_tpl.h"
#define T uint32_t
#define MASK 0xffffffff
#define BITS masked_bits_32
#define FN(name) name##_32
#include "kernels/arrays/mask_rows_tpl.h"
#define T uint64_t
#define MASK UINT64_MAX
#define BITS masked_bits_64
#define FN(name) name##_64
#include "kernels/arrays/mask_rows_tpl.h"
#define T uint16_t
#define MASK 0x7fff
#define BITS masked_bits_16
#define FN(name) name##_f16
#include "kernels/arrays/mask_rows_tpl.h"
#define T uint32_t
#define MASK 0x7fffffff
#define BITS masked_bits_32
#define FN(name) name##_f32
#include "kernels/arrays/mask_rows_tpl.h"
#define T uint64_t
#define MASK (UINT64_MAX >> 1)
#define BITS masked_bits_64
#define FN(name) name##_f64
#include "kernels/arrays/mask_rows_tpl.h"

#define EACH_LANE(name) {name##_8, name##_16, name##_32, name##_64, name##_f16, name##_f32, name##_f64}

#define EACH_TYPE(name)                                                                                      \
    {[AM_FLOAT16] = name##_f16,                                                                              \
     [AM_BFLOAT16] = name##_bf16,                                                                            \
     [AM_FLOAT32] = name##_f32,                                                                              \
     [AM_FLOAT64] = name##_f64}

#define KERNEL(name) .name = name

const am_kernels TABLE(arrays) = {
    .cumsum = {.rows = EACH_TYPE(cumsum_rows), .scan = EACH_TYPE(cumsum_scan)},
    .copy = {KERNEL(transpose_32), KERNEL(transpose_64), KERNEL(widen_f16), KERNEL(widen_bf16),
             KERNEL(narrow_f16), KERNEL(narrow_bf16), KERNEL(split_16), KERNEL(split_32), KERNEL(split_64),
             KERNEL(join_16), KERNEL(join_32), KERNEL(join_64)},
    .sequences = {KERNEL(fill_positions_32), KERNEL(fill_sequences_32), KERNEL(fill_pairs_32),
                  KERNEL(fill_positions_64), KERNEL(fill_sequences_64), KERNEL(fill_pairs_64),
                  KERNEL(lens_32), KERNEL(lens_64), KERNEL(chunk_offsets_32), KERNEL(chunk_offsets_64),
                  KERNEL(divide_32), KERNEL(divide_64)},
    .masks =
        {
            .nonzero = EACH_LANE(nonzero),
            .equal_bits = equal_bits,
            .nonzero_bits = EACH_LANE(nonzero_bits),
            .expand_bits = {expand_bits_8, expand_bits_16, expand_bits_32, expand_bits_64},
            .fill_bytes = fill_bytes,
            .pack = EACH_LANE(pack),
            .first = EACH_LANE(first),
            .last = EACH_LANE(last),
            .collect = EACH_LANE(collect),
            .transpose_bits = transpose_bits,
            .unlike_bits = unlike_bits,
            .keep_bits = keep_bits,
        },
};
