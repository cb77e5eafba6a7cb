/* kv_format_tpl.h – the kernels for keys and values of one type in memory, packed for many rows, and read
 * unpacked for few. Rows of some types are widened before they are read unpacked: then WIDEN writes the
 * numbers of some rows as W, each 1 / UNIT of what it is, and functions named by WIDE read them. */
#if !defined T || !defined S || !defined LOAD || !defined LOAD_PART || !defined FROM || !defined OWN
#    error "kv_format_tpl.h needs f32.h or f64.h, S (an element), LOAD, LOAD_PART (lanes of them), FROM(name)"
#    error "and OWN(name) (find_p and add_packed of this arithmetic)"
#endif
#if defined WIDE && !(defined W && defined LOAD_WIDE && defined LOAD_PART_WIDE && defined UNIT)
#    error "kv_format_tpl.h: WIDE(name) needs W, LOAD_WIDE, LOAD_PART_WIDE and UNIT"
#endif

#ifndef WIDE
#    define W S
#    define WIDE(name) FROM(name)
#    define LOAD_WIDE LOAD
#    define LOAD_PART_WIDE LOAD_PART
#    define UNIT 1
#endif

#include "kernels/attention/formats/pack_keys_tpl.h"
#include "kernels/attention/formats/pack_panel_tpl.h"

/* Multiplies packed values by the scales of their rows; adds 0 × the products to `nothing`. */
static V FROM(scale_packed)(T *dst, ptrdiff_t rows, ptrdiff_t head_dim, const T *scales, V nothing)
{
    for (ptrdiff_t i = 0; i < head_dim; i += FN(PANEL)) {
        T *row = dst + i * AM_FLASH_TILE;
        for (ptrdiff_t r = 0; r < rows; r++) {
            for (ptrdiff_t j = 0; j < FN(PANEL); j += LANES, row += LANES) {
                const V x = VOP(mul)(VOP(set1)(scales[r]), VOP(load)(row));
                VOP(store)(row, x);
                nothing = VOP(fma)(x, VOP(set1)(0), nothing);
            }
        }
    }
    return nothing;
}

/* Packs row by row, since rows may lie far apart. */
static bool FROM(pack_values)(void *to, const am_rows *from, ptrdiff_t rows, ptrdiff_t head_dim,
                              const void *scales)
{
    T *dst = to;
    V nothing = VOP(set1)(0);
    for (ptrdiff_t r = 0; r < rows; r++, dst += FN(PANEL)) {
        const S *src = row_at(from, r);
        for (ptrdiff_t i = 0; i < head_dim; i += FN(PANEL))
            nothing = FROM(pack_panel)(dst + i * AM_FLASH_TILE, src + i, 0, 1, head_dim - i, nothing);
    }
    for (ptrdiff_t i = 0; i < head_dim; i += FN(PANEL))
        memset(dst + i * AM_FLASH_TILE, 0,
               (size_t)((FN(whole_panels)(rows) - rows) * FN(PANEL)) * sizeof *dst);
    if (scales) nothing = FROM(scale_packed)(to, rows, head_dim, scales, nothing);
    return VOP(total)(nothing) == 0;
}

/* O + P V of values begin … end - 1 of an unpacked tile, whose value 0 would be at `values`. Prefetches as
 * many lines as it reads of values. */
static void FROM(add_values)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t begin,
                             ptrdiff_t end, const S *values, prefetch_lines *prefetch)
{
    enum {
        BYTES = FN(PANEL) * sizeof(S),
        LINES = BYTES > CACHE_LINE ? BYTES / CACHE_LINE : 1,
        WIDE_LINES = 2 * BYTES > CACHE_LINE ? 2 * BYTES / CACHE_LINE : 1,
    };
    prefetch_lines none = prefetch_nothing(tile->k.data);
    T *logits = (T *)block->logits + begin, panel[AM_FLASH_TILE * FN(PANEL)];
#ifdef WIDEN
    W widened[AM_FLASH_TILE * 2 * FN(PANEL)];
#endif
    const ptrdiff_t keys = end - begin, row_stride = tile->v.stride / (ptrdiff_t)sizeof(S);
    for (ptrdiff_t column = 0, width; column < block->out_dim; column += width) {
        const S *rows_of_v = values + begin * row_stride + column;
        const ptrdiff_t columns = tile->value_bytes / (ptrdiff_t)sizeof(S) - column;
        const row_runs runs = runs_behind(&tile->v, 0, 1, column * (ptrdiff_t)sizeof(S)),
                       *in_runs = tile->v.run && keys > tile->v.run ? &runs : NULL;
        T *out = (T *)block->out + column;
        const bool wide = block->rows <= STRIP / 2 && !tile->terms.live && columns >= 2 * FN(PANEL);
        width = wide ? 2 * FN(PANEL) : columns_at(block, column, FN(PANEL));
#ifdef WIDEN
        const ptrdiff_t v_stride = 2 * FN(PANEL);
        const W *v = widened + column % v_stride;
        if (column % v_stride == 0)
            WIDEN(widened, v_stride, rows_of_v, row_stride, keys, columns < v_stride ? columns : v_stride);
#else
        const W *v = rows_of_v;
        const ptrdiff_t v_stride = row_stride;
#endif
        FN(operands) of_panel = FN(by_rows)(keys, logits, panel, FN(PANEL), out, block->out_dim);
        const bool packed = tile->terms.live || width > columns;
        if (packed) {
            V nothing = WIDE(pack_panel)(panel, v, v_stride, keys, columns, VOP(set1)(0));
            if (tile->terms.live && VOP(total)(nothing) != 0) {
                uint64_t live[AM_FLASH_ROWS];
                for (ptrdiff_t r = 0; r < block->rows; r++)
                    live[r] = live_between(tile->terms.live[r], begin, end);
                FN(add_live_rows)(block->rows, width, live, &of_panel, 0);
                continue;
            }
        }
        /* Only the first strip prefetches, and only the first of the panels that share a line. */
        prefetch_lines *lines = column * sizeof(S) % CACHE_LINE == 0 ? prefetch : &none;
        for (ptrdiff_t r = 0, rows; r < block->rows; r += rows, lines = &none) {
            rows = strip_rows(block->rows - r, STRIP);
            const T *p = logits + r * AM_FLASH_TILE;
            T *to = out + r * block->out_dim;
            const WIDE(operands) x = WIDE(by_rows)(keys, p, v, v_stride, to, block->out_dim);
            if (packed) {
                of_panel.a = p, of_panel.c = to;
                OWN(add_packed)(rows, width, &of_panel);
            } else if (wide) {
                WIDE(accumulate_wide)(rows, &x, WIDE_LINES, lines, in_runs);
            } else if (width == FN(PANEL)) {
                WIDE(accumulate)(
                    rows, 2, x,
                    (WIDE(reading)){.lines = LINES, .prefetch = lines, .runs = true, .in_runs = in_runs});
            } else {
                WIDE(accumulate)(
                    rows, 1, x,
                    (WIDE(reading)){.lines = 1, .prefetch = lines, .runs = true, .in_runs = in_runs});
            }
        }
    }
}

#define FMA VOP(fma)
#ifdef WIDEN
#    define AT_ONCE(block, tile) false /* rows of a run are widened for themselves */
#else
#    define AT_ONCE(block, tile) ((block)->out_dim * (ptrdiff_t)sizeof(S) == (tile)->value_bytes)
#endif
#define FIND_P OWN(find_p)
#define STEP(name) FN(name)
#include "kernels/attention/formats/unpacked_tpl.h"

#undef WIDE
#undef LOAD
