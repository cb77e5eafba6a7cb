/* flash_pairs_tpl.h – attention of few rows to keys and values of eight bits, S, which become numbers of
 * sixteen bits as they are read. The processor's own dot products multiply them in pairs, which are
 * neighbours in depth in queries and keys, and neighbouring keys in P and values.
 *
 * LOAD_WIDE and LOAD_PART_WIDE load lanes of such pairs of a key, and FMA multiplies and adds them. SUMS
 * names the functions that add up lanes, and ROW_UNIT is by what the sums of a row are multiplied; STRAIGHTEN
 * puts the lanes of two vectors of sums of values in order, and P_UNIT is by what those of a row of P are
 * multiplied. STEP names the functions that turn logits into P. The includer defines add_tile, which turns P
 * times the scales of values into pairs, if it is not so yet, and calls add_pairs. */

static inline const S *FROM(origin)(const am_flash_tile *tile, const void *first, const void *const *runs,
                                    ptrdiff_t step, ptrdiff_t i);
static inline ptrdiff_t FROM(end_of_run)(const am_flash_tile *tile, ptrdiff_t i, ptrdiff_t end);
static void FROM(add_tile)(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch);

/* sums + P V of values begin … end - 1 at v, of one panel of columns or two; the last of them is at `last`.
 */
static inline __attribute__((always_inline)) void
FROM(add_rows)(ptrdiff_t rows, const bool wide, ptrdiff_t begin, ptrdiff_t end, const float *p, const S *v,
               ptrdiff_t step, const row_runs *in_runs, const S *last, float *sums, prefetch_lines *prefetch)
{
    const ptrdiff_t pairs = (end - begin) / 2;
    p += begin / 2;
    if (wide)
        FROM(accumulate_wide)(rows, pairs, p, v, 2 * step, sums, 2 * PANEL_f32, 2, prefetch, in_runs);
    else
        FROM(accumulate)(rows, 2, pairs, p, v, 2 * step, sums, 2 * PANEL_f32, 2, prefetch, true, in_runs);
    if ((end - begin) % 2 == 0) return;
    /* P is 0 for the key behind the last one, which may not be there. */
    prefetch_lines none = prefetch_nothing(p);
    for (ptrdiff_t i = 0; i < (wide ? 2 : 1); i++)
        FROM(accumulate)(rows, 2, 1, p + pairs, last + i * PANEL_f32, 0, sums + i * PANEL_f32, 2 * PANEL_f32,
                         0, &none, false, NULL);
}

/* O + P V of some rows and of one or two panels of columns. A tile's sums are taken for themselves, so that
 * runs do not alter a bit. */
static inline __attribute__((always_inline)) void
FROM(add_panels)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row, ptrdiff_t rows,
                 ptrdiff_t begin, ptrdiff_t end, ptrdiff_t column, const bool wide, prefetch_lines *prefetch)
{
    const float *p = (const float *)block->logits + row * AM_FLASH_TILE;
    const ptrdiff_t columns = tile->value_depth - column, width = wide ? 2 * PANEL_f32 : PANEL_f32;
    float sums[V_STRIP * 2 * PANEL_f32];
    S panel[AM_FLASH_TILE * PANEL_f32];
    for (ptrdiff_t r = 0; r < rows; r++) {
        for (ptrdiff_t i = 0; i < width; i += VF_LANES) vf_store(sums + r * 2 * PANEL_f32 + i, vf_set1(0));
    }
    const bool copied = columns < PANEL_f32, at_once = !copied && begin == 0;
    const row_runs runs = runs_of_values(tile, 2, column * (ptrdiff_t)sizeof(S));
    for (ptrdiff_t next; begin < end; begin = next) {
        next = at_once ? end : FROM(end_of_run)(tile, begin, end);
        const S *v = FROM(origin)(tile, tile->v, tile->v_runs, tile->v_step, begin) + begin * tile->v_step +
                     column,
                *last = FROM(origin)(tile, tile->v, tile->v_runs, tile->v_step, next - 1) +
                        (next - 1) * tile->v_step + column;
        ptrdiff_t step = tile->v_step;
        if (copied) {
            memset(panel, 0, sizeof panel);
            for (ptrdiff_t i = 0; i < next - begin; i++)
                memcpy(panel + i * PANEL_f32, v + i * step, (size_t)columns);
            v = panel, last = panel + (next - begin - 1) * PANEL_f32, step = PANEL_f32;
        }
        const row_runs *in_runs = tile->run && next - begin > tile->run ? &runs : NULL;
        FROM(add_rows)(rows, wide, begin, next, p, v, step, in_runs, last, sums, prefetch);
    }
    const ptrdiff_t left = block->out_depth - column;
    for (ptrdiff_t r = 0; r < rows; r++, p += AM_FLASH_TILE) {
        float *out = (float *)block->out + (row + r) * block->out_depth + column;
        const vf unit = vf_set1(P_UNIT(p));
        for (ptrdiff_t i = 0; i < width; i += PANEL_f32) {
            vf first = vf_load(sums + r * 2 * PANEL_f32 + i),
               second = vf_load(sums + r * 2 * PANEL_f32 + i + VF_LANES);
            STRAIGHTEN(&first, &second);
            vf_store(out + i, vf_fma(unit, first, vf_load(out + i)));
            if (i + VF_LANES < left)
                vf_store(out + i + VF_LANES, vf_fma(unit, second, vf_load(out + i + VF_LANES)));
        }
    }
}

/* O + P V of values begin … end - 1 of a tile; `begin` is even. */
static void FROM(add_pairs)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t begin,
                            ptrdiff_t end, prefetch_lines *prefetch)
{
    const ptrdiff_t rows = block->rows;
    prefetch_lines none = prefetch_nothing(tile->v);
    for (ptrdiff_t column = 0, width; column < block->out_depth; column += width) {
        const bool wide = rows <= V_STRIP / 2 && tile->value_depth - column >= 2 * PANEL_f32;
        width = wide ? 2 * PANEL_f32 : PANEL_f32;
        if (wide) {
            FROM(add_panels)(block, tile, 0, rows, begin, end, column, true, prefetch);
            continue;
        }
        for (ptrdiff_t row = 0; row < rows; row += V_STRIP)
            FROM(add_panels)(block, tile, row, rows - row < V_STRIP ? rows - row : V_STRIP, begin, end,
                             column, false, row == 0 ? prefetch : &none);
    }
}

#define W S
#define WIDE(name) FROM(name)
#define NUMBERS 2
#define QUERIES(block) ((const float *)(block)->q_packed)
#define QUERY_STEP am_packed_query_lanes
#include "kernels/flash_unpacked_tpl.h"

#undef P_UNIT
#undef STRAIGHTEN
