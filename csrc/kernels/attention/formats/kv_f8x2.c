/* kv_f8x2.c – keys and values of eight bits, multiplied as bf16x2; those of int8 only where rows are many.
 *
 * Few rows: keys and values of float8 become bfloat16 of 2^-8 of their value as they are read, which is
 * exact, and P is rounded to bfloat16. */
#include "kernels/attention/flash_bf16x2.h"
#include "kernels/attention/formats/widen_i4.h"

/* The function of kv_f8.c. */
void SHARED(add_tile_f8)(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch);

static void pack_queries_f8x2(void *dst, const void *q, ptrdiff_t q_stride, ptrdiff_t rows,
                              ptrdiff_t head_dim)
{
    float *to = dst;
    const float *from = q;
    for (ptrdiff_t r = 0; r < rows; r++, to += am_packed_query_lanes(head_dim), from += q_stride) {
        for (ptrdiff_t i = 0; i < head_dim; i += 2 * VF_LANES) {
            vf first, second;
            load_two(from + i, head_dim - i, &first, &second);
            vf_store(to + i / 2, vf_narrow_bf16x2(first, second));
        }
    }
}

#define S uint8_t
#define LOADS(b, b_row, vectors, to) vf_join_f8x2(b, (b) + (b_row) / 2, (to)[0], (to)[1])
#define LOADS_WIDE(b, b_row, to) vf_join_wide_f8x2(b, (b) + (b_row) / 2, (to)[0], (to)[1], (to)[2], (to)[3])
#define FMA vf_fma_bf16x2
#define TIMES(x, y) vf_fma_bf16x2(x, y, vf_set1(0))
#define FROM(name) name##_f8x2
#include "kernels/attention/product_of_tpl.h"

#define S uint8_t
#define UNIT 0x1p8f
#define SUMS(name) vf_##name
#define ROW_UNIT(block, r) (UNIT * (float)(block)->q_factor)
#define P_UNIT(row) UNIT
#define FIND_P SHARED_BF16X2(find_p_bf16x2)
#define STEP(name) name##_bf16x2
#define LOAD_WIDE vf_load_f8x2
#define LOAD_PART_WIDE vf_load_part_f8x2
#define FMA vf_fma_bf16x2
#define NUMBER_OF_SUM(sum) (sum)
#define USUAL USUAL_F8
#define FROM(name) name##_f8x2
#include "kernels/attention/formats/pairs_tpl.h"

/* Where some pairs are dead, values that are NaN must not reach beyond the others: then P becomes float32
 * again. */
static void add_tile_f8x2(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch)
{
    if (!tile->terms.live) {
        add_pairs_f8x2(block, tile, 0, AM_FLASH_TILE, prefetch);
        return;
    }
    float *row = block->logits;
    for (ptrdiff_t r = 0; r < block->rows; r++, row += AM_FLASH_TILE) {
        for (ptrdiff_t i = AM_FLASH_TILE - VF_LANES; i >= 0; i -= VF_LANES)
            vf_store(row + i, vf_mul(vf_set1(0x1p8f), vf_load_bf16((const uint16_t *)row + i)));
    }
    SHARED(add_tile_f8)(block, tile, prefetch);
}

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
                   [AM_FLOAT8_E4M3] = {.reading = AM_KV_READ,
                                       .queries = AM_QUERY_PACKED,
                                       .pack_queries = pack_queries_f8x2,
                                       .pack_keys = pack_keys_bf16x2_f8,
                                       .pack_values = pack_values_bf16x2_f8,
                                       .step_unpacked = step_unpacked_f8x2,
                                       .scales_products = true},
                   [AM_INT4] = {.reading = AM_KV_ROWS, .queries = AM_QUERY_ROUNDED}},
            .widen[AM_INT4] = widen_i4_bf16,
        },
};
