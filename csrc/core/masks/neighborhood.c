/* neighborhood.c – the term of points of a grid that see those near them. */
#include <string.h>

#include "core/masks/terms.h"

/* --- One axis. The points `dilation` apart from each other are its places 0, 1 … --- */

static ptrdiff_t quotient(ptrdiff_t i, ptrdiff_t by) { return by == 1 ? i : i / by; } /* divisions are slow */

/* The places that a place sees, of `places`. */
static am_range window_of(const am_grid_axis *a, ptrdiff_t place, ptrdiff_t places)
{
    const ptrdiff_t first = quotient(place, a->stride) * a->stride,
                    leader = am_min(first + (a->causal ? a->stride - 1 : a->stride / 2), places - 1);
    if (a->causal) return (am_range){am_max(leader - a->kernel + 1, 0), place + 1};
    const ptrdiff_t begin = am_min(am_max(leader - a->kernel / 2, 0), places - a->kernel);
    return (am_range){begin, begin + a->kernel};
}

/* The points that a point sees: from `begin` to before `end`, each `dilation` apart. */
static am_range points_seen(const am_grid_axis *a, ptrdiff_t point)
{
    const ptrdiff_t place = quotient(point, a->dilation), phase = point - place * a->dilation,
                    places = a->dilation == 1 ? a->length : am_ceil_div(a->length - phase, a->dilation);
    const am_range seen = window_of(a, place, places);
    return (am_range){seen.begin * a->dilation + phase, (seen.end - 1) * a->dilation + phase + 1};
}

/* A range of points within which all lie that any of `points` sees. */
static am_range any_sees(const am_grid_axis *a, am_range points)
{
    if (points.end - points.begin == 1) return points_seen(a, points.begin);
    const ptrdiff_t fewest = a->length / a->dilation, most = am_ceil_div(a->length, a->dilation);
    const am_range first = window_of(a, quotient(points.begin, a->dilation), fewest),
                   last = window_of(a, quotient(points.end - 1, a->dilation), most);
    return (am_range){first.begin * a->dilation, am_min(last.end * a->dilation, a->length)};
}

/* Whether each of `points` sees all of `keys`. */
static bool all_see(const am_grid_axis *a, am_range points, am_range keys)
{
    return a->dilation == 1 && points_seen(a, points.end - 1).begin <= keys.begin &&
           keys.end <= points_seen(a, points.begin).end;
}

/* --- All axes --- */

/* A range along each axis within which `count` tokens lie. */
static void span(const am_grid *grid, ptrdiff_t token, ptrdiff_t count, am_range points[AM_MOST_GRID_AXES])
{
    ptrdiff_t last = token + count - 1;
    bool one = true; /* along all axes before */
    for (int i = 0; i < grid->axes; i++) {
        const am_grid_axis *a = &grid->axis[i];
        const ptrdiff_t begin = quotient(token, a->step), end = quotient(last, a->step) + 1;
        token -= begin * a->step, last -= (end - 1) * a->step;
        points[i] = one ? (am_range){begin, end} : (am_range){0, a->length};
        one = one && end - begin == 1;
    }
}

static am_range neighborhood_keys(const am_mask *mask, const am_node *node, const am_region *p)
{
    const am_grid *grid = node->neighborhood.grid;
    am_range points[AM_MOST_GRID_AXES];
    ptrdiff_t begin = -node->neighborhood.k_shift[p->b], last = begin;
    span(grid, p->q + node->neighborhood.q_shift[p->b], p->rows, points);
    for (int i = 0; i < grid->axes; i++) {
        const am_range seen = any_sees(&grid->axis[i], points[i]);
        begin += seen.begin * grid->axis[i].step, last += (seen.end - 1) * grid->axis[i].step;
    }
    return (am_range){am_max(begin, 0), am_min(last + 1, mask->keys)};
}

static am_tile neighborhood_tile(const am_mask *mask, const am_node *node, const am_region *p)
{
    (void)mask;
    const am_grid *grid = node->neighborhood.grid;
    am_range queries[AM_MOST_GRID_AXES], keys[AM_MOST_GRID_AXES];
    bool full = true;
    span(grid, p->q + node->neighborhood.q_shift[p->b], p->rows, queries);
    span(grid, p->k + node->neighborhood.k_shift[p->b], p->columns, keys);
    for (int i = 0; i < grid->axes; i++) {
        const am_range seen = any_sees(&grid->axis[i], queries[i]);
        if (seen.end <= keys[i].begin || keys[i].end <= seen.begin) return AM_DEAD;
        full = full && all_see(&grid->axis[i], queries[i], keys[i]);
    }
    return full ? AM_FULL : AM_MIXED;
}

/* Whether the points of a line see the line of `keys` by all axes but the last, along which lines lie. */
static bool line_sees(const am_grid *grid, ptrdiff_t line, ptrdiff_t keys)
{
    for (int i = grid->axes - 2; i >= 0; i--) {
        const am_grid_axis *a = &grid->axis[i];
        const ptrdiff_t next = quotient(line, a->length), next_keys = quotient(keys, a->length),
                        point = line - next * a->length, key = keys - next_keys * a->length;
        const am_range seen = points_seen(a, point);
        if (key < seen.begin || key >= seen.end) return false;
        if (a->dilation > 1 && (key - seen.begin) % a->dilation) return false;
        line = next, keys = next_keys;
    }
    return true;
}

/* The bits of what a point sees in a line of keys whose first one is in column `at`. */
static uint64_t bits_in_line(const am_grid_axis *a, ptrdiff_t point, ptrdiff_t at, const am_region *p)
{
    const am_range seen = points_seen(a, point);
    const ptrdiff_t step = a->dilation, end = am_min(at + seen.end, p->columns);
    ptrdiff_t i = at + seen.begin;
    if (step == 1) return am_live_bits((am_range){p->k + i, p->k + end}, p);
    if (i < 0) i += am_ceil_div(-i, step) * step;
    uint64_t bits = 0;
    for (; i < end; i += step) bits |= (uint64_t)1 << i;
    return bits;
}

static void neighborhood_bits(const am_mask *mask, const am_node *node, const am_region *p, uint64_t *bits)
{
    (void)mask;
    const am_grid *grid = node->neighborhood.grid;
    const am_grid_axis *a = &grid->axis[grid->axes - 1];
    const ptrdiff_t q = p->q + node->neighborhood.q_shift[p->b], k = p->k + node->neighborhood.k_shift[p->b];
    memset(bits, 0, (size_t)p->rows * sizeof *bits);
    for (ptrdiff_t rows, r = 0; r < p->rows; r += rows) {
        const ptrdiff_t line = (q + r) / a->length, point = (q + r) % a->length;
        rows = am_min(a->length - point, p->rows - r);
        ptrdiff_t keys = k / a->length;
        for (ptrdiff_t at = -(k % a->length); at < p->columns; at += a->length, keys++) {
            if (!line_sees(grid, line, keys)) continue;
            for (ptrdiff_t i = 0; i < rows; i++) bits[r + i] |= bits_in_line(a, point + i, at, p);
        }
    }
}

/* Where lines begin: points of one line see the same lines. */
static uint64_t neighborhood_boundaries(const am_node *node, ptrdiff_t b, am_side side, ptrdiff_t begin,
                                        ptrdiff_t count)
{
    const am_grid *grid = node->neighborhood.grid;
    const ptrdiff_t *shift = side == AM_QUERIES ? node->neighborhood.q_shift : node->neighborhood.k_shift;
    return grid->axes == 1 ? 0 : am_multiples(grid->axis[grid->axes - 1].length, begin + shift[b], count);
}

const am_term_kind am_neighborhood_term = {.keys = neighborhood_keys,
                                           .tile = neighborhood_tile,
                                           .bits = neighborhood_bits,
                                           .boundaries = neighborhood_boundaries};
