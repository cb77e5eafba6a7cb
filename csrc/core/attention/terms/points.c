/* points.c – a term of the logits by points of a grid, and its gradient. */
#include "core/attention/terms/points.h"

#include <string.h>

#include "core/attention/terms/lines.h"

enum {
    TILE = AM_FLASH_TILE,
    WINDOW = AM_FLASH_ROWS + AM_FLASH_TILE,
    PIECE = AM_POINTS_SPARE, /* bytes that are copied at a time */
};

/* Queries of a span in one column of the grid: every `width`-th row from `row` on. */
typedef struct {
    ptrdiff_t row, rows;
    ptrdiff_t x, y; /* of the last of them */
} column;

static column column_of(const am_bias_grid *grid, const am_span *span, ptrdiff_t first_point, ptrdiff_t i)
{
    const ptrdiff_t rows = am_ceil_div(span->rows - i, grid->width), point = first_point + i;
    return (column){.row = i, .rows = rows, .x = point % grid->width, .y = point / grid->width + rows - 1};
}

/* The point of the first query of a span. Only where no query sees a key may it lie before the grid. */
static ptrdiff_t first_point(const am_attn_base *base, const am_attn_place *at, const am_span *span,
                             ptrdiff_t row)
{
    return am_max(0, am_point_of_query(base->attn, span->row, am_query_of(at, row)));
}

/* The numbers of a window that are in the table: those of runs of keys, each of a row of the grid. */
typedef struct {
    ptrdiff_t begin, end; /* in the window */
    ptrdiff_t count;      /* of the first run */
    ptrdiff_t index;      /* of the first number in the table */
} runs;

/* Those of a window of a column, whose first number is that of its last query and a key. */
static runs runs_of(const am_bias_grid *grid, const column *c, ptrdiff_t key_point, ptrdiff_t length)
{
    const ptrdiff_t width = grid->width, before = (grid->height - 1) * width,
                    from = key_point - c->y * width + before; /* counted from the table's first row on */
    runs r = {.begin = am_max(0, -from), .end = am_min(length, before + grid->height * width - from)};
    if (r.begin >= r.end) return (runs){0};
    const ptrdiff_t x = (from + r.begin) % width;
    r.count = am_min(width - x, r.end - r.begin);
    r.index = (from + r.begin) / width * grid->stride + x + width - 1 - c->x;
    return r;
}

/* Goes to the next run. Between two, the table has the numbers of keys that lie beyond the grid's sides. */
static void next_run(const am_bias_grid *grid, runs *r)
{
    r->index += r->count + grid->width - 1;
    r->begin += r->count;
    r->count = am_min(grid->width, r->end - r->begin);
}

/* Where the number behind the last run would be in the table. */
static ptrdiff_t end_of(const am_bias_grid *grid, runs r)
{
    while (r.begin + r.count < r.end) next_run(grid, &r);
    return r.index + r.count;
}

/* Fills in a window with numbers of a table, and others with 0. Up to PIECE bytes behind it are written. */
static void fill(const am_bias_grid *grid, runs r, ptrdiff_t size, const char *table, char *window,
                 ptrdiff_t length)
{
    memset(window, 0, (size_t)(am_min(r.begin, length) * size));
    for (; r.begin < r.end; next_run(grid, &r)) {
        const char *from = table + r.index * size;
        char *to = window + r.begin * size;
        for (ptrdiff_t i = 0; i < r.count * size; i += PIECE) memcpy(to + i, from + i, PIECE);
    }
    memset(window + r.end * size, 0, (size_t)((length - r.end) * size));
}

/* Adds the window of a column to the rows of its queries, or writes it there. */
static bool add_window(const am_attn_base *base, const column *c, ptrdiff_t width, const char *window,
                       const am_logit_scratch *scratch, bool added)
{
    bool any = false;
    for (ptrdiff_t i = 0; i < c->rows; i++) {
        const ptrdiff_t row = c->row + i * width;
        char *to = scratch->bias + row * TILE * base->size;
        const char *from = window + (c->rows - 1 - i) * width * base->size;
        if (base->arithmetic->numbers[base->type].read_bias(added ? NULL : to, from, 0, 1, TILE))
            any |= am_drop_infinite(base, from, 0, 1, scratch->live + row);
        if (added) base->arithmetic->add_rows(to, TILE, from, TILE, 1, TILE);
    }
    return any;
}

bool am_add_points(const am_attn_base *base, const am_attn_place *at, ptrdiff_t k,
                   const am_logit_scratch *scratch, bool added)
{
    const am_logit_term *term = base->terms.points;
    const am_bias_grid grid = am_bias_grid_of(term);
    char window[WINDOW * sizeof(double) + PIECE];
    bool any = false;
    am_span span;
    for (ptrdiff_t r = 0; r < at->rows; r += span.rows) {
        span = am_span_from(base, at, r);
        const ptrdiff_t first_key = am_first_key_of_row(base->attn, span.row),
                        point = first_point(base, at, &span, r);
        const char *table = am_token(&term->array, 0, span.head, 0);
        for (ptrdiff_t i = 0; i < am_min(grid.width, span.rows); i++) {
            column c = column_of(&grid, &span, point, i);
            const ptrdiff_t length = TILE + (c.rows - 1) * grid.width;
            fill(&grid, runs_of(&grid, &c, k - first_key, length), base->size, table, window, length);
            c.row += r;
            any |= add_window(base, &c, grid.width, window, scratch, added);
        }
    }
    return any;
}

/* --- The gradient --- */

/* Adds numbers of the arithmetic type to sums. */
static void add_run(const am_attn_base *base, double *to, const char *from, ptrdiff_t count)
{
    if (base->type == AM_FLOAT64)
        for (ptrdiff_t i = 0; i < count; i++) to[i] += ((const double *)from)[i];
    else
        for (ptrdiff_t i = 0; i < count; i++) to[i] += (double)((const float *)from)[i];
}

void am_learn_points(const am_attn_base *base, const am_logit_term *term, const am_attn_place *at,
                     am_range tile, const char *d_s, char *window, am_line_sums *sums)
{
    const am_bias_grid grid = am_bias_grid_of(term);
    const ptrdiff_t width = grid.width, size = base->size;
    am_span span;
    for (ptrdiff_t r = 0; r < at->rows; r += span.rows) {
        span = am_span_from(base, at, r);
        const am_range keys = am_keys_of_span(base, &span, tile);
        const ptrdiff_t first_key = am_first_key_of_row(base->attn, span.row), columns = am_length(keys),
                        point = first_point(base, at, &span, r);
        for (ptrdiff_t i = 0; columns > 0 && i < am_min(width, span.rows); i++) {
            const column c = column_of(&grid, &span, point, i);
            const ptrdiff_t length = columns + (c.rows - 1) * width;
            runs run = runs_of(&grid, &c, keys.begin - first_key, length);
            if (run.begin >= run.end) continue;
            memset(window, 0, (size_t)(length * size));
            base->arithmetic->add_rows(window + (c.rows - 1) * width * size, -width,
                                       d_s + ((r + c.row) * TILE + keys.begin - tile.begin) * size,
                                       width * TILE, c.rows, columns);
            double *to = am_line_sums_in(sums, (am_range){run.index, end_of(&grid, run)});
            for (; run.begin < run.end; next_run(&grid, &run))
                add_run(base, to + run.index, window + run.begin * size, run.count);
        }
    }
}
