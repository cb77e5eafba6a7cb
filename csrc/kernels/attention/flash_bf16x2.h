/* flash_bf16x2.h – attention in bfloat16 by the processor's own dot products, where it has some. A
 * lane of float32 holds two bfloat16 (bf16x2), sums are float32. In queries and keys the two are neighbours
 * in head_dim, in P and values neighbouring keys. P is rounded to bfloat16, unless rows are so few that they
 * wait for memory.
 */
#ifndef AM_KERNELS_ATTENTION_FLASH_BF16X2_H
#define AM_KERNELS_ATTENTION_FLASH_BF16X2_H

#include "kernels/attention/flash_f32.h"

#ifdef V_SQUARES
#    define SQUARE vf_fma_square_bf16x2
#endif
#ifdef V_FMA_HALF_BF16X2
#    define FMA_HALF vf_fma_half_bf16x2
#endif
#define S float
#define LOAD vf_load
#define SUM_A_COLUMN (2 * AM_FLASH_TILE)
#define FMA vf_fma_one_bf16x2
#define TIMES(one, y) vf_fma_one_bf16x2(one, y, vf_set1(0))
#define FROM(name) name##_bf16x2
#include "kernels/attention/product_of_tpl.h"

/* Where numbers lie apart that are neighbours in the sum: two rows, half of b_row apart, are interleaved as
 * they are loaded. */
#define TWO_ROWS(bytes) (2 * (bytes) / (ptrdiff_t)sizeof(uint16_t))
#define S uint16_t
#define LOADS(b, b_row, vectors, to)                                                                         \
    if ((vectors) > 1)                                                                                       \
        vf_interleave_bf16x2(vf_load((const float *)(b)), vf_load((const float *)((b) + (b_row) / 2)),       \
                             (to)[0], (to)[1]);                                                              \
    else                                                                                                     \
        *(to)[0] = vf_load_interleaved_bf16x2(b, (b) + (b_row) / 2)
#define FMA vf_fma_one_bf16x2
#define TIMES(one, y) vf_fma_one_bf16x2(one, y, vf_set1(0))
#define FROM(name) name##_interleaved
#include "kernels/attention/product_of_tpl.h"
#undef SQUARE

/* Stores P as bf16x2. */
INLINE void store_p_bf16x2(float *to, const vf *p, const int count)
{
    UNROLL(16)
    for (int j = 0; j < count; j += 2) vf_store(to + j / 2 * VF_LANES, vf_narrow_bf16x2(p[j], p[j + 1]));
}

/* Adds both numbers of each lane to `total`. */
static inline vf add_both_bf16x2(vf total, vf bf16x2)
{
    return vf_fma_bf16x2(bf16x2, vf_set1(am_float_of_bits(0x3f803f80)), total);
}

/* Adds some vectors of weights as values are multiplied by them: rounded. Else a row of which one weight is
 * the most would be off by the rounding of that weight. */
INLINE vf add_weights_bf16x2(vf total, const vf *p, const int count)
{
    UNROLL(16)
    for (int j = 0; j < count; j += 2) total = add_both_bf16x2(total, vf_narrow_bf16x2(p[j], p[j + 1]));
    return total;
}

/* Narrows P begin … end - 1 to bf16x2, from lane begin / 2 on. */
static void narrow_bf16x2(float *to, ptrdiff_t begin, ptrdiff_t end)
{
    for (ptrdiff_t i = begin; i < end; i += 2 * VF_LANES) {
        vf p[] = {vf_load(to + i), vf_load(to + i + VF_LANES)};
        store_p_bf16x2(to + i / 2, p, 2);
    }
}

/* As `add_live_rows`, where a and b are bf16x2: of both numbers of a lane of b, dead ones become 0. */
static void add_live_rows_bf16x2(ptrdiff_t rows, ptrdiff_t columns, const uint64_t *live,
                                 const operands_bf16x2 *p, ptrdiff_t b_panel)
{
    static const uint32_t halves[] = {0, 0xffff, 0xffff0000, 0xffffffff};
    for (ptrdiff_t r = 0; r < rows; r++) {
        for (ptrdiff_t j = 0; j < columns; j += VF_LANES) {
            const float *panel = p->b + j / PANEL_f32 * b_panel + j % PANEL_f32;
            float *to = p->c + r * p->c_row + j;
            vf sum = vf_load(to);
            for (ptrdiff_t i = 0; i < AM_FLASH_TILE / 2; i++) {
                uint32_t bits = halves[live[r] >> 2 * i & 3];
                if (!bits) continue;
                vf x = vf_only_bits(vf_load(panel + i * p->b_row), bits);
                sum = vf_fma_bf16x2(vf_set1(p->a[r * p->a_row + i * p->a_column]), x, sum);
            }
            vf_store(to, sum);
        }
    }
}

#ifndef V_AMX
static void add_live_bf16x2(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t column,
                            const float *panel)
{
    const operands_bf16x2 x =
        by_rows_bf16x2(0, block->logits, panel, PANEL_f32, (float *)block->out + column, block->out_dim);
    add_live_rows_bf16x2(block->rows, columns_at(block, column, PANEL_f32), tile->terms.live, &x, 0);
}

/* O + P V of a strip, and of some columns of unpacked values, of which each two rows are interleaved. */
static void add_unpacked_bf16x2(const am_flash_rows *block, const am_flash_tile *tile, const strip_f32 *s,
                                ptrdiff_t column, prefetch_lines *prefetch)
{
    const row_runs runs = runs_behind(&tile->v, 0, 2, column * (ptrdiff_t)sizeof(uint16_t));
    const operands_interleaved x =
        by_rows_interleaved(AM_FLASH_TILE / 2, (const float *)block->logits + s->row * AM_FLASH_TILE,
                            (const uint16_t *)tile->v.data + column, TWO_ROWS(tile->v.stride),
                            (float *)block->out + s->row * block->out_dim + column, block->out_dim);
    add_product_interleaved(s->rows, columns_at(block, column, PANEL_f32), x, prefetch,
                            tile->v.run ? &runs : NULL);
}
#endif

#define STEP(name) name##_bf16x2
#define WIDTH 2
#define EXP2_TERMS exp2_terms_bf16x2
#include "kernels/attention/step_tpl.h"

/* Those of flash_bf16x2.c, which other topics call. */
void SHARED_BF16X2(find_p_bf16x2)(const am_flash_rows *block, const am_flash_tile *tile);
void SHARED_BF16X2(add_packed_bf16x2)(ptrdiff_t rows, ptrdiff_t columns, const operands_bf16x2 *p);

#endif
