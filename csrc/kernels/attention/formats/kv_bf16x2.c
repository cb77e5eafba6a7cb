/* kv_bf16x2.c – keys and values of bfloat16, multiplied as bf16x2. */
#include "kernels/attention/flash_bf16x2.h"

/* That of kv_bf16.c. */
void SHARED(add_values_bf16)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t begin,
                             ptrdiff_t end, const uint16_t *values, prefetch_lines *prefetch);

#define S uint16_t
#define LOAD_SOME vf_load_some_bf16x2
#define FROM(name) name##_bf16x2
#include "kernels/attention/formats/pack_pairs_tpl.h"

/* --- Few rows: keys are read unpacked, and a few values at a time become bf16x2 --- */

/* O + P V of half a panel of columns of unpacked values. */
APART void add_half_panel_bf16x2(ptrdiff_t rows, const operands_interleaved *p, prefetch_lines *prefetch,
                                 const row_runs *in_runs)
{
    operands_interleaved x = *p;
    prefetch_lines none = prefetch_nothing(x.b);
    for (ptrdiff_t r = 0, some; r < rows; r += some) {
        some = strip_rows(rows - r, V_STRIP);
        x.a = p->a + r * AM_FLASH_TILE, x.c = p->c + r * p->c_row;
        accumulate_interleaved(
            some, 1, x,
            (reading_interleaved){
                .lines = 1, .prefetch = r == 0 ? prefetch : &none, .runs = true, .in_runs = in_runs});
    }
}

enum { LINES_BF16X2 = 2 }; /* of a panel of two unpacked rows */

/* O + P V of a whole strip and a panel of columns of unpacked values, which are stored as they were
 * interleaved for the strips after it. */
APART void add_first_strip_bf16x2(const operands_interleaved *p, prefetch_lines *prefetch,
                                  const row_runs *in_runs, float *interleaved)
{
    operands_interleaved x = *p;
    x.a_row = AM_FLASH_TILE, x.a_column = 1;
    const reading_interleaved how = {
        .lines = LINES_BF16X2, .prefetch = prefetch, .runs = true, .in_runs = in_runs, .loaded = interleaved};
    product_of_interleaved(V_STRIP, 2, x, how, true);
}

/* O + P V of values begin … end - 1 of an unpacked tile, whose value 0 would be at `values`. It prefetches as
 * many lines as it reads. */
static void add_values_bf16x2(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t begin,
                              ptrdiff_t end, const float *values, prefetch_lines *prefetch)
{
    if (block->float_weights) {
        SHARED(add_values_bf16)(block, tile, begin, end, (const uint16_t *)values, prefetch);
        return;
    }
    begin -= begin % 2;
    const ptrdiff_t rows = block->rows, keys = end - begin, lanes = (keys + 1) / 2,
                    stride = tile->v.stride / (ptrdiff_t)sizeof(uint16_t);
    const uint16_t *v = (const uint16_t *)values + begin * stride;
    const float *p = (const float *)block->logits + begin / 2;
    float panel[AM_FLASH_TILE / 2 * PANEL_f32];
    for (ptrdiff_t column = 0, width; column < block->out_dim; column += width) {
        const ptrdiff_t columns = tile->value_bytes / (ptrdiff_t)sizeof *v - column;
        const row_runs runs = runs_behind(&tile->v, 0, 2, column * (ptrdiff_t)sizeof *v),
                       *in_runs = tile->v.run && keys > tile->v.run ? &runs : NULL;
        const bool whole = !tile->terms.live && columns >= PANEL_f32, /* so the number of keys is even */
            wide = whole && rows <= V_STRIP / 2 && columns >= 2 * PANEL_f32;
        width = wide ? 2 * PANEL_f32 : PANEL_f32;
        float *out = (float *)block->out + column;
        const operands_interleaved x =
            by_rows_interleaved(lanes, p, v + column, 2 * stride, out, block->out_dim);
        operands_bf16x2 of_panel = by_rows_bf16x2(lanes, p, panel, PANEL_f32, out, block->out_dim);
        if (!tile->terms.live && columns == VF_LANES) {
            add_half_panel_bf16x2(rows, &x, prefetch, in_runs);
            continue;
        }
        if (whole) {
            if (wide) {
                accumulate_wide_interleaved(rows, &x, 2 * LINES_BF16X2, prefetch, in_runs);
                continue;
            }
            ptrdiff_t r = 0;
            if (rows > V_STRIP) {
                add_first_strip_bf16x2(&x, prefetch, in_runs, panel);
                r = V_STRIP;
            }
            prefetch_lines none = prefetch_nothing(v);
            for (ptrdiff_t some; r < rows; r += some) {
                some = strip_rows(rows - r, V_STRIP);
                if (rows <= V_STRIP) {
                    const operands_interleaved strip =
                        by_rows_interleaved(lanes, p + r * AM_FLASH_TILE, x.b, 2 * stride,
                                            out + r * block->out_dim, block->out_dim);
                    accumulate_interleaved(some, 2, strip,
                                           (reading_interleaved){.lines = LINES_BF16X2,
                                                                 .prefetch = r == 0 ? prefetch : &none,
                                                                 .runs = true,
                                                                 .in_runs = in_runs});
                } else {
                    of_panel.a = p + r * AM_FLASH_TILE, of_panel.c = out + r * block->out_dim;
                    SHARED_BF16X2(add_packed_bf16x2)(some, PANEL_f32, &of_panel);
                }
            }
            continue;
        }
        vf nothing[] = {vf_set1(0), vf_set1(0)};
        for (ptrdiff_t i = 0, some = in_runs ? tile->v.run : keys; i < keys; i += some) {
            const uint16_t *row = row_at(&tile->v, begin + i);
            pack_panel_bf16x2(panel + i / 2 * PANEL_f32, (some + 1) / 2, row + column, stride, some, columns,
                              tile->terms.live ? nothing : NULL, prefetch);
        }
        if (vf_total(vf_add(nothing[0], nothing[1])) != 0) {
            uint64_t live[AM_FLASH_ROWS];
            for (ptrdiff_t r = 0; r < rows; r++) live[r] = live_between(tile->terms.live[r], begin, end);
            add_live_rows_bf16x2(rows, columns_at(block, column, PANEL_f32), live, &of_panel, 0);
            continue;
        }
        for (ptrdiff_t r = 0, some; r < rows; r += some) {
            some = strip_rows(rows - r, V_STRIP);
            of_panel.a = p + r * AM_FLASH_TILE, of_panel.c = out + r * block->out_dim;
            SHARED_BF16X2(add_packed_bf16x2)(some, block->out_dim - column, &of_panel);
        }
    }
}

/* Turns products of unpacked keys into P, as bf16x2 or float32. */
static void find_weights_bf16x2(const am_flash_rows *block, const am_flash_tile *tile)
{
    if (!block->float_weights) {
        SHARED_BF16X2(find_p_bf16x2)(block, tile);
        return;
    }
    const vf factor = vf_set1((float)block->factor);
    float *logits = block->logits;
    for (ptrdiff_t i = 0; i < block->rows * AM_FLASH_TILE; i += VF_LANES)
        vf_store(logits + i, vf_mul(factor, vf_load(logits + i)));
    am_flash_rows scaled = *block;
    scaled.factor = 1;
    OWN(find_p)(&scaled, tile);
}

#define S float
#define W S
#define UNIT 1
#define LOAD_WIDE vf_load
#define LOAD_PART_WIDE vf_load_part
#define FMA vf_fma_bf16x2
#define AT_ONCE(block, tile)                                                                                 \
    (!(block)->float_weights || (block)->out_dim * (ptrdiff_t)sizeof(uint16_t) == (tile)->value_bytes)
#define FIND_P find_weights_bf16x2
#define STEP(name) name##_bf16x2
#define FROM(name) name##_bf16x2
#include "kernels/attention/formats/unpacked_tpl.h"

const am_kernels TABLE(kv_bf16x2) = {
    .flash_bf16x2.kv[AM_BFLOAT16] = {.reading = AM_KV_READ,
                                     .pack_values = pack_values_bf16x2,
                                     .step_unpacked = step_unpacked_bf16x2},
};
