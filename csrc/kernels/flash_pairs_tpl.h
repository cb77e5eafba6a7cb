/* flash_pairs_tpl.h – attention of bfloat16 numbers by the processor's own products of them, where it has
 * some: two numbers to a lane, sums in float32. Queries and keys are pairs of neighbours in depth, weights
 * and values pairs of neighbours among keys. Weights are rounded to bfloat16, and for that never exceed 1,
 * which is exact. */

#define S float
#define LOAD vf_load
#define FMA vf_fma_pairs
#define FROM(name) name##_pairs
#include "kernels/flash_product_of_tpl.h"

/* Weights to pairs. */
static inline __attribute__((always_inline)) void put_pairs(float *weights, const vf *p, const int count)
{
#pragma GCC unroll 16
    for (int j = 0; j < count; j += 2) vf_store(weights + j / 2 * VF_LANES, vf_narrow_pairs(p[j], p[j + 1]));
}

/* Weights begin … end - 1 to pairs, from lane begin / 2 on. */
static void narrow_pairs(float *weights, ptrdiff_t begin, ptrdiff_t end)
{
    for (ptrdiff_t i = begin; i < end; i += 2 * VF_LANES) {
        vf p[] = {vf_load(weights + i), vf_load(weights + i + VF_LANES)};
        put_pairs(weights + i / 2, p, 2);
    }
}

/* Two rows of [rows][AM_FLASH_TILE] to one of pairs; `to` may be `from`. */
static const float *join_rows_pairs(float *to, const float *from, ptrdiff_t rows)
{
    for (ptrdiff_t r = 0; r < rows; r += 2, from += 2 * AM_FLASH_TILE) {
        for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += VF_LANES) {
            vf odd = r + 1 < rows ? vf_load(from + AM_FLASH_TILE + i) : vf_set1(0);
            vf_store(to + r / 2 * AM_FLASH_TILE + i, vf_join_pairs(vf_load(from + i), odd));
        }
    }
    return to;
}

/* As `add_live_rows`, where a and b are pairs: of each pair of b, what is dead for the row becomes 0. */
static void add_live_rows_pairs(ptrdiff_t rows, const uint64_t *live, const float *a, ptrdiff_t a_row,
                                ptrdiff_t a_column, const float *b, ptrdiff_t b_row, ptrdiff_t b_panel,
                                float *c, ptrdiff_t c_row, ptrdiff_t depth)
{
    static const uint32_t halves[] = {0, 0xffff, 0xffff0000, 0xffffffff};
    for (ptrdiff_t r = 0; r < rows; r++) {
        for (ptrdiff_t j = 0; j < depth; j += VF_LANES) {
            const float *panel = b + j / PANEL_f32 * b_panel + j % PANEL_f32;
            vf sum = vf_load(c + r * c_row + j);
            for (ptrdiff_t i = 0; i < AM_FLASH_TILE / 2; i++) {
                uint32_t bits = halves[live[r] >> 2 * i & 3];
                if (!bits) continue;
                vf x = vf_only_bits(vf_load(panel + i * b_row), bits);
                sum = vf_fma_pairs(vf_set1(a[r * a_row + i * a_column]), x, sum);
            }
            vf_store(c + r * c_row + j, sum);
        }
    }
}

static void add_live_pairs(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t column,
                           const float *panel)
{
    add_live_rows_pairs(block->rows, tile->live, block->logits, AM_FLASH_TILE, 1, panel, PANEL_f32, 0,
                        (float *)block->out + column, block->out_depth, PANEL_f32);
}

#define STEP(name) name##_pairs
#define WIDTH 2
#define EXP2_TERMS exp2_terms_pairs
#define SLACK 0
#include "kernels/flash_step_tpl.h"

static bool pack_values_pairs(void *to, const void *from, ptrdiff_t step, ptrdiff_t rows, ptrdiff_t depth)
{
    float *dst = to;
    const vf zero = vf_set1(0);
    vf nothing = zero; /* 0 × x is 0 for finite x, else NaN */
    for (ptrdiff_t column = 0; column < depth; column += PANEL_f32) {
        ptrdiff_t columns = depth - column < PANEL_f32 ? depth - column : PANEL_f32;
        for (ptrdiff_t r = 0; r < AM_FLASH_TILE; r += 2, dst += PANEL_f32) {
            const uint16_t *row[2];
            uint16_t room[2][PANEL_f32];
            for (ptrdiff_t i = 0; i < 2; i++) {
                const uint16_t *src = r + i < rows ? (const uint16_t *)from + (r + i) * step + column : NULL;
                row[i] = src && columns == PANEL_f32 ? src : room[i];
                if (row[i] == src) continue;
                memset(room[i], 0, sizeof room[i]);
                if (src) memcpy(room[i], src, (size_t)columns * sizeof *src);
            }
            for (ptrdiff_t i = 0; i < PANEL_f32; i += VF_LANES) {
                vf pairs = vf_load_pairs(row[0] + i, row[1] + i);
                vf_store(dst + i, pairs);
                nothing = vf_fma_pairs(pairs, zero, nothing);
            }
        }
    }
    return vf_total(nothing) == 0;
}
