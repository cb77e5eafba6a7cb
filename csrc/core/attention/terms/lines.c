/* lines.c – terms of the logits by distance or by key, and their gradients. */
#include "core/attention/terms/lines.h"

#include <stdlib.h>
#include <string.h>

#include "core/attention/terms/points.h"

enum { TILE = AM_FLASH_TILE };

am_span am_span_from(const am_attn_base *base, const am_attn_place *at, ptrdiff_t r)
{
    const am_places *places = &base->attn->terms.places;
    const ptrdiff_t query = am_query_of(at, r), row = am_row_of_query(places, at->b, query);
    const ptrdiff_t end = am_min(at->q + at->queries, places->starts ? places->starts[row + 1] : PTRDIFF_MAX);
    return (am_span){.rows = end - query,
                     .head = am_head_of(at, r),
                     .row = row,
                     .distance = 1 - end - am_offset_of_row(places, row)};
}

ptrdiff_t am_nearest_key(const am_attn_base *base, const am_attn_place *at)
{
    return -am_span_from(base, at, 0).distance;
}

/* How the rows of a tile follow from one line: `stride` numbers from row to row. */
typedef struct {
    am_acts acts;
    ptrdiff_t stride;
} line_form;
static const line_form by_distance = {AM_ADDS_BY_DISTANCE, -1}, by_key = {AM_ADDS_BY_KEY, 0};

/* The numbers of the line for a span and so many keys; row 0 of the span begins with the last `keys`. */
static ptrdiff_t line_length(const line_form *form, const am_span *span, ptrdiff_t keys)
{
    return form->stride * (1 - span->rows) + keys;
}

/* The line of a term for some keys of a span. */
static am_line line_of(const am_attn_base *base, const line_form *form, const am_logit_term *term,
                       const am_span *span, am_range keys)
{
    const ptrdiff_t at = keys.begin + (form->acts == AM_ADDS_BY_KEY ? 0 : span->distance);
    am_line line = am_line_of(base->attn, term, span->row, span->head, at);
    line.factor = AM_LOG2_E / base->unit;
    line.count = line_length(form, span, am_length(keys));
    return line;
}

am_range am_keys_of_span(const am_attn_base *base, const am_span *span, am_range keys)
{
    const am_range all = am_keys_of_row(base->attn, span->row);
    return (am_range){am_max(keys.begin, all.begin), am_min(keys.end, all.end)};
}

/* Fills in the window of a tile, in the unit of logits; returns whether any number is -INFINITY. */
static bool fill_window(const am_attn_base *base, const line_form *form, const am_span *span, ptrdiff_t k,
                        void *window)
{
    const am_terms *terms = &base->attn->terms;
    const am_range keys = am_keys_of_span(base, span, (am_range){k, k + TILE});
    const ptrdiff_t count = line_length(form, span, TILE);
    double sums[AM_TERM_WINDOW];
    memset(sums, 0, (size_t)count * sizeof *sums);
    for (const am_logit_term *term = terms->list; term < terms->list + terms->count; term++) {
        if (am_row_of_term(term)->acts != form->acts || keys.begin >= keys.end) continue;
        const am_line line = line_of(base, form, term, span, keys);
        am_row_of_term(term)->add(&line, sums + (keys.begin - k));
    }
    int any = 0;
    float *narrow = window;
    if (base->type == AM_FLOAT64)
        memcpy(window, sums, (size_t)count * sizeof *sums);
    else
        for (int i = 0; i < count; i++) narrow[i] = (float)sums[i];
    if (base->terms.small) return false;
    if (base->type == AM_FLOAT64)
        for (int i = 0; i < count; i++) any |= sums[i] == -INFINITY;
    else
        for (int i = 0; i < count; i++) any |= narrow[i] == -INFINITY;
    return any;
}

/* Adds the terms of one form; `alone`: nothing else is added to this tile, before or after. */
static bool add_form(const am_attn_base *base, const am_attn_place *at, const line_form *form, bool alone,
                     ptrdiff_t k, const am_logit_scratch *scratch, am_added *added)
{
    bool any = false;
    am_span span = am_span_from(base, at, 0);
    const bool direct = alone && span.rows == at->rows; /* rows are read from the window */
    char *window = direct ? scratch->bias : scratch->row, *first = window;
    for (ptrdiff_t r = 0; r < at->rows; r += span.rows) {
        if (r > 0) span = am_span_from(base, at, r);
        char *to = scratch->bias + r * TILE * base->size;
        const bool one = !added->rows && span.rows == 1; /* whose window is the row itself */
        first = one ? to : window;
        const bool infinite = fill_window(base, form, &span, k, first);
        first += form->stride * (1 - span.rows) * base->size;
        if (added->rows)
            base->arithmetic->add_rows(to, TILE, first, form->stride, span.rows, TILE);
        else if (!direct && !one)
            base->arithmetic->load_rows(to, TILE, first, form->stride, span.rows, TILE);
        if (infinite) any |= am_drop_infinite(base, first, form->stride, span.rows, scratch->live + r);
    }
    *added = direct ? (am_added){first, form->stride} : (am_added){scratch->bias, TILE};
    return any;
}

bool am_add_lines(const am_attn_base *base, const am_attn_place *at, ptrdiff_t k,
                  const am_logit_scratch *scratch, am_added *added)
{
    const am_terms_found *found = &base->terms;
    const bool alone = !added->rows && found->by_distance != found->by_key;
    bool any = false;
    if (found->by_distance) any |= add_form(base, at, &by_distance, alone, k, scratch, added);
    if (found->by_key) any |= add_form(base, at, &by_key, alone, k, scratch, added);
    return any;
}

/* --- The gradients --- */

am_status am_line_gradients_make(am_line_gradients *g, const am_attn_base *base)
{
    const am_attn *f = base->attn;
    *g = (am_line_gradients){.base = base};
    for (int i = 0; i < f->terms.count; i++) {
        const am_logit_term *term = &f->terms.list[i];
        if (!term->gradient || !am_has_sums(term)) continue;
        memset(term->gradient, 0, (size_t)(f->heads * term->array.shape.channel) * sizeof(double));
        g->terms[g->count++] = term;
    }
    if (g->count == 0) return AM_OK;
    g->semaphores = calloc((size_t)am_max(f->kv_heads, 1), sizeof *g->semaphores);
    return g->semaphores ? AM_OK : AM_NO_MEMORY;
}

void am_line_gradients_free(const am_line_gradients *g) { free(g->semaphores); }

am_line_sums *am_line_sums_take(const am_line_gradients *g, char *memory, ptrdiff_t *used)
{
    const ptrdiff_t heads = g->base->heads_per_kv;
    am_line_sums *sums = (am_line_sums *)am_take(memory, used, am_product(g->count, heads, sizeof *sums));
    for (int i = 0; i < g->count; i++) {
        const ptrdiff_t length = g->terms[i]->array.shape.channel;
        double *numbers = (double *)am_take(memory, used, am_product(heads, length, sizeof *numbers));
        for (ptrdiff_t h = 0; memory && h < heads; h++)
            sums[i * heads + h] = (am_line_sums){.sums = numbers + h * length};
    }
    return sums;
}

/* Adds dS of a tile to the sums of one term. */
static void learn_term(const am_attn_base *base, const am_logit_term *term, const am_attn_place *at,
                       am_range tile, const char *d_s, char *window, am_line_sums *sums)
{
    const am_logit_row *row = am_row_of_term(term);
    const line_form *form = row->acts == AM_ADDS_BY_KEY ? &by_key : &by_distance;
    double d_numbers[AM_TERM_WINDOW];
    am_span span;
    for (ptrdiff_t r = 0; r < at->rows; r += span.rows) {
        span = am_span_from(base, at, r);
        const am_range keys = am_keys_of_span(base, &span, tile);
        if (keys.begin >= keys.end) continue;
        const am_line line = line_of(base, form, term, &span, keys);
        memset(window, 0, (size_t)(line.count * base->size));
        base->arithmetic->add_rows(window + form->stride * (1 - span.rows) * base->size, form->stride,
                                   d_s + (r * TILE + keys.begin - tile.begin) * base->size, TILE, span.rows,
                                   am_length(keys));
        for (ptrdiff_t i = 0; i < line.count; i++) d_numbers[i] = am_number(base, window, i);
        row->learn(&line, d_numbers, sums);
    }
}

void am_learn_lines(const am_line_gradients *g, const am_attn_place *at, am_range keys, const char *d_s,
                    char *window, am_line_sums *sums)
{
    const ptrdiff_t heads = g->base->heads_per_kv, head = at->head % heads;
    for (int i = 0; i < g->count; i++) {
        const bool by_point = am_row_of_term(g->terms[i])->acts == AM_ADDS_BY_POINT;
        (by_point ? am_learn_points : learn_term)(g->base, g->terms[i], at, keys, d_s, window,
                                                  &sums[i * heads + head]);
    }
}

am_status am_end_line_sums(const am_line_gradients *g, const am_attn_place *at, ptrdiff_t turn,
                           am_line_sums *sums, am_team *team)
{
    if (g->count == 0) return AM_OK;
    atomic_ptrdiff_t *semaphore = &g->semaphores[at->kv_head];
    am_status status = am_await(team, semaphore, turn);
    if (status != AM_OK) return status;
    const ptrdiff_t heads = g->base->heads_per_kv;
    for (int i = 0; i < g->count; i++) {
        const ptrdiff_t length = g->terms[i]->array.shape.channel;
        double *to = (double *)g->terms[i]->gradient + at->kv_head * heads * length;
        for (ptrdiff_t h = 0; h < heads; h++, sums++, to += length) {
            for (ptrdiff_t k = sums->filled.begin; k < sums->filled.end; k++) to[k] += sums->sums[k];
            sums->filled = (am_range){0, 0};
        }
    }
    atomic_store_explicit(semaphore, turn + 1, memory_order_release);
    return AM_OK;
}
