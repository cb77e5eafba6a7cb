/* pairs_tpl.h – attention of few rows to keys and values of eight bits, which become numbers of
 * sixteen bits as they are read. The processor's own dot products multiply them in pairs, which are
 * neighbours in head_dim in queries and keys, and neighbouring keys in P and values.
 *
 * Or they stay as they are, and JOINED of them are multiplied at once. Then a row of queries or of P has
 * HALVES: a row of high bytes and one of low bytes.
 *
 * The includer defines add_tile, which turns P times the scales of values into pairs, if it is not so yet,
 * and calls add_pairs. */
#if !defined T || !defined S || !defined FROM || !defined STEP || !defined FIND_P
#    error "pairs_tpl.h needs f32.h, S (an element), FROM(name), STEP(name), FIND_P (turn logits into P)"
#endif
#if !defined LOAD_WIDE || !defined LOAD_PART_WIDE || !defined FMA || !defined SUMS || !defined ROW_UNIT
#    error "pairs_tpl.h needs LOAD_WIDE, LOAD_PART_WIDE (pairs of a key), FMA (multiplies, adds), SUMS(name)"
#    error "(adds up lanes) and ROW_UNIT (by what the sums of a row are multiplied)"
#endif
#if !defined P_UNIT || !defined NUMBER_OF_SUM || !defined UNIT || !defined USUAL
#    error "pairs_tpl.h needs UNIT, NUMBER_OF_SUM (of values), P_UNIT (by what it is multiplied) and"
#    error "USUAL (a byte that takes no longer than others, for columns that are not there)"
#endif

#ifndef JOINED
#    define JOINED 2
#endif
#ifndef HALVES
#    define HALVES 1
#    define WHOLE_SUM(halves) (*(halves)[0])
#endif

/* Values begin … end - 1 of a tile, for the rows of a block. */
typedef struct {
    const am_flash_rows *block;
    const am_flash_tile *tile;
    ptrdiff_t begin, end;
} FROM(values);

static void FROM(add_tile)(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch);

/* O + P V of some rows and of one panel of columns or two. The sums of a tile stay in registers from run to
 * run, so that runs do not alter a bit. */
INLINE void FROM(add_panels)(const FROM(values) * values, ptrdiff_t row, const int rows, ptrdiff_t column,
                             const int panels, prefetch_lines *prefetch)
{
    const am_flash_rows *block = values->block;
    const am_flash_tile *tile = values->tile;
    ptrdiff_t begin = values->begin, end = values->end;
    const int vectors = 2 * panels, width = panels * PANEL_f32, halves = HALVES * rows,
              lines = JOINED * width < CACHE_LINE ? 1 : JOINED * width / CACHE_LINE;
    const float *p = (const float *)block->logits + row * AM_FLASH_TILE;
    const ptrdiff_t columns = tile->value_bytes - column; /* of a byte each */
    const bool copied = panels == 1 && columns < PANEL_f32, at_once = !copied && begin == 0;
    const row_runs runs = runs_behind(&tile->v, 0, JOINED, column);
    S panel[AM_FLASH_TILE * PANEL_f32];
    vf sums[V_STRIP][2];
    UNROLL(32)
    for (int i = 0; i < halves * panels; i++) sums[i][0] = sums[i][1] = vf_set1(0);
    for (ptrdiff_t next; begin < end; begin = next) {
        next = at_once ? end : end_of_run(&tile->v, begin, end);
        const S *v = (const S *)row_at(&tile->v, begin) + column,
                *last = (const S *)row_at(&tile->v, next - 1) + column;
        const ptrdiff_t rest = (next - begin) % JOINED;
        ptrdiff_t stride = tile->v.stride;
        if (copied) {
            for (ptrdiff_t i = 0; i < next - begin; i++)
                v_copy_some_8(panel + i * PANEL_f32, v + i * stride, columns, USUAL);
            v = panel, last = panel + (next - begin - 1) * PANEL_f32, stride = PANEL_f32;
        }
        const row_runs *in_runs = tile->v.run && next - begin > tile->v.run ? &runs : NULL;
        FROM(operands)
        x = FROM(by_rows)((next - begin) / JOINED, p + begin / JOINED, v, JOINED * stride, NULL, 0);
        x.a_row = AM_FLASH_TILE / HALVES;
        if (x.length > 0)
            FROM(add_to_sums)(
                halves, vectors, x,
                (FROM(reading)){.lines = lines, .prefetch = prefetch, .runs = true, .in_runs = in_runs},
                sums);
        if (rest == 0) continue;
        /* P is 0 for keys behind the last one, which may not be there. */
        S some[JOINED * 2 * PANEL_f32];
        for (ptrdiff_t i = 0; i < JOINED; i++)
            memcpy(some + i * width, last - (i < rest ? rest - 1 - i : 0) * stride, (size_t)width);
        x.a += x.length, x.b = some, x.b_row = JOINED * width, x.length = 1;
        FROM(add_to_sums)(halves, vectors, x, (FROM(reading)){.lines = 0}, sums);
    }
    UNROLL(16)
    for (int r = 0; r < rows; r++, p += AM_FLASH_TILE) {
        float *out = (float *)block->out + (row + r) * block->out_dim + column;
        const vf unit = vf_set1(P_UNIT(p));
        vf its[4];
        UNROLL(4)
        for (int i = 0; i < vectors; i++) {
            const int at = HALVES * r + i / 2 * halves;
            vf *const of_halves[] = {&sums[at][i % 2], &sums[at + HALVES - 1][i % 2]};
            its[i] = WHOLE_SUM(of_halves);
        }
        if (panels == 1)
            vf_straighten(its);
        else
            vf_straighten_wide(its);
        UNROLL(4)
        for (int i = 0; i < vectors; i++) {
            if (i > 0 && panels == 1 && VF_LANES >= block->out_dim - column) break;
            vf_store(out + i * VF_LANES, vf_fma(unit, NUMBER_OF_SUM(its[i]), vf_load(out + i * VF_LANES)));
        }
    }
}

/* O + P V of one row or more, and of one panel or two. */
#define ROWS_OF(n, panels)                                                                                   \
    case n:                                                                                                  \
        if (HALVES * n * panels <= V_STRIP) FROM(add_panels)(values, row, n, column, panels, prefetch);      \
        break;
#define ONE_PANEL(n) ROWS_OF(n, 1)
#define TWO_PANELS(n) ROWS_OF(n, 2)
#define ADD_PANELS(name, cases)                                                                              \
    APART void FROM(name)(const FROM(values) * values, ptrdiff_t row, ptrdiff_t rows, ptrdiff_t column,      \
                          prefetch_lines *prefetch)                                                          \
    {                                                                                                        \
        switch (rows) {                                                                                      \
            cases                                                                                            \
        }                                                                                                    \
    }
ADD_PANELS(add_one_panel, EACH_ROWS(ONE_PANEL))
ADD_PANELS(add_two_panels, EACH_FEW_ROWS(TWO_PANELS))
#undef ROWS_OF
#undef ONE_PANEL
#undef TWO_PANELS
#undef ADD_PANELS

/* O + P V of values begin … end - 1 of a tile; `begin` is a multiple of JOINED. */
static void FROM(add_pairs)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t begin,
                            ptrdiff_t end, prefetch_lines *prefetch)
{
    const ptrdiff_t rows = block->rows;
    const FROM(values) values = {.block = block, .tile = tile, .begin = begin, .end = end};
    prefetch_lines none = prefetch_nothing(tile->v.data);
    const int most = V_STRIP / HALVES;
    for (ptrdiff_t column = 0, width; column < block->out_dim; column += width) {
        const bool wide = (rows <= most / 2 || most < 8) && tile->value_bytes - column >= 2 * PANEL_f32;
        width = wide ? 2 * PANEL_f32 : PANEL_f32;
        /* Only the first strip prefetches, and only the first of panels whose joined rows share a line. */
        prefetch_lines *lines = JOINED * column % CACHE_LINE == 0 ? prefetch : &none;
        for (ptrdiff_t row = 0, count; row < rows; row += count, lines = &none) {
            count = strip_rows(rows - row, wide ? most / 2 : most);
            if (wide)
                FROM(add_two_panels)(&values, row, count, column, lines);
            else
                FROM(add_one_panel)(&values, row, count, column, lines);
        }
    }
}

#define W S
#define WIDE(name) FROM(name)
#define NUMBERS JOINED
#define QUERIES(block) ((const float *)(block)->q_packed)
#define QUERY_STEP(head_dim) (am_packed_query_lanes(head_dim) / HALVES)
#include "kernels/attention/formats/unpacked_tpl.h"

#undef JOINED
#undef WHOLE_SUM
#undef WIDE
#undef P_UNIT
#undef NUMBER_OF_SUM
#undef USUAL
