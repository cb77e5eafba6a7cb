/* relative.c – ALiBi, the relative bias, and its gradient. */
#include "core/attention/terms/relative.h"

#include <stdlib.h>
#include <string.h>

#include "core/sequences/packed.h"

enum { TILE = AM_FLASH_TILE, WINDOW = AM_FLASH_ROWS + AM_FLASH_TILE };

/* Rows of a block for which one window serves: queries of one head and one sequence. */
typedef struct {
    ptrdiff_t rows, head;
    ptrdiff_t distance; /* from the last of these queries to key 0 */
    double slope;       /* 0: no ALiBi */
} row_run;

/* The run that begins with row r. */
static row_run run_from(const am_attn_base *base, const am_attn_place *at, ptrdiff_t r)
{
    const am_relative *x = &base->attn->relative;
    const ptrdiff_t query = am_query_of(at, r);
    ptrdiff_t end = at->q + at->queries, row = at->b;
    if (x->q_starts) {
        row = am_sequence_of(x->q_starts, x->sequences, query);
        end = am_min(end, x->q_starts[row + 1]);
    }
    const ptrdiff_t head = am_head_of(at, r);
    return (row_run){.rows = end - query,
                     .head = head,
                     .distance = 1 - end - x->offsets[row * x->offset_step],
                     .slope = x->slopes ? x->slopes[row * x->slope_step + head] : 0};
}

ptrdiff_t am_nearest_key(const am_attn_base *base, const am_attn_place *at)
{
    return -run_from(base, at, 0).distance;
}

/* The place of a distance in the table: its ends stand for all that is farther. */
static ptrdiff_t table_index(const am_relative *x, ptrdiff_t distance)
{
    return am_max(0, am_min(distance - x->low, x->length - 1));
}

static void add_table(const am_relative *x, const double *table, ptrdiff_t distance, ptrdiff_t count,
                      double *terms)
{
    const double *last = &table[x->length - 1];
    const ptrdiff_t begin = am_max(0, am_min(x->low - distance, count)),
                    end = am_max(begin, am_min(x->low + x->length - distance, count));
    for (ptrdiff_t i = 0; i < begin; i++) terms[i] += *table;
    for (ptrdiff_t i = begin; i < end; i++) terms[i] += table[distance - x->low + i];
    for (ptrdiff_t i = end; i < count; i++) terms[i] += *last;
}

/* Fills in the terms of `count` distances, in the unit of logits; returns whether any is -INFINITY. */
static bool fill_window(const am_attn_base *base, const row_run *run, ptrdiff_t distance, ptrdiff_t count,
                        void *window)
{
    const am_relative *x = &base->attn->relative;
    const double first = (double)distance, slope = run->slope * (AM_LOG2_E / base->unit);
    double terms[WINDOW];
    float *narrow = window;
    for (int i = 0; i < count; i++) terms[i] = -slope * fabs(first + i);
    if (x->table) add_table(x, x->table + run->head * x->length, distance, count, terms);
    if (base->type == AM_FLOAT64)
        memcpy(window, terms, (size_t)count * sizeof *terms);
    else
        for (int i = 0; i < count; i++) narrow[i] = (float)terms[i];
    if (!x->table)
        return am_number(base, window, 0) == -INFINITY || am_number(base, window, count - 1) == -INFINITY;
    int any = 0;
    if (base->type == AM_FLOAT64)
        for (int i = 0; i < count; i++) any |= terms[i] == -INFINITY;
    else
        for (int i = 0; i < count; i++) any |= narrow[i] == -INFINITY;
    return any;
}

bool am_relative_terms(const am_attn_base *base, const am_attn_place *at, ptrdiff_t k,
                       const am_logit_scratch *scratch, const void **bias, ptrdiff_t *bias_step)
{
    bool any = false;
    row_run run = run_from(base, at, 0);
    const bool direct = !*bias && run.rows == at->rows; /* rows are read from the window */
    char *window = direct ? scratch->bias : scratch->row, *first = window;
    for (ptrdiff_t r = 0; r < at->rows; r += run.rows) {
        if (r > 0) run = run_from(base, at, r);
        const bool infinite = fill_window(base, &run, run.distance + k, run.rows - 1 + TILE, window);
        char *to = scratch->bias + r * TILE * base->size;
        first = window + (run.rows - 1) * base->size;
        if (*bias)
            base->arithmetic->add_rows(to, TILE, first, -1, run.rows, TILE);
        else if (!direct)
            base->arithmetic->load_rows(to, TILE, first, -1, run.rows, TILE);
        for (ptrdiff_t i = 0; infinite && i < run.rows; i++) {
            for (ptrdiff_t c = 0; c < TILE; c++) {
                if (am_number(base, window, run.rows - 1 - i + c) == -INFINITY)
                    scratch->live[r + i] &= ~((uint64_t)1 << c);
            }
        }
        any |= infinite;
    }
    *bias = direct ? first : scratch->bias;
    *bias_step = direct ? -1 : TILE;
    return any;
}

/* --- The gradient of the table --- */

am_status am_table_gradient_make(am_table_gradient *g, const am_attn_base *base, double *result)
{
    *g = (am_table_gradient){.base = base, .result = result};
    if (!result) return AM_OK;
    memset(result, 0, (size_t)(base->attn->heads * base->attn->relative.length) * sizeof *result);
    g->serving = calloc((size_t)am_max(base->attn->kv_heads, 1), sizeof *g->serving);
    return g->serving ? AM_OK : AM_NO_MEMORY;
}

void am_table_gradient_free(const am_table_gradient *g) { free(g->serving); }

am_table_sums *am_table_sums_take(const am_table_gradient *g, char *memory, ptrdiff_t *used)
{
    if (!g->result) return NULL;
    const ptrdiff_t heads = g->base->heads_per_kv, length = g->base->attn->relative.length;
    am_table_sums *sums = (am_table_sums *)am_take(memory, used, heads * (ptrdiff_t)sizeof *sums);
    double *numbers = (double *)am_take(memory, used, am_product(heads, length, sizeof *numbers));
    for (ptrdiff_t h = 0; sums && h < heads; h++) sums[h] = (am_table_sums){.sums = numbers + h * length};
    return sums;
}

/* Sets what is not yet set of a range to zero. */
static void fill(am_table_sums *s, am_range wanted)
{
    if (am_length(s->filled) == 0) s->filled = (am_range){wanted.begin, wanted.begin};
    for (; s->filled.end < wanted.end; s->filled.end++) s->sums[s->filled.end] = 0;
    for (; s->filled.begin > wanted.begin; s->filled.begin--) s->sums[s->filled.begin - 1] = 0;
}

void am_table_add(const am_table_gradient *g, const am_attn_place *at, am_range keys, const char *d_s,
                  char *window, am_table_sums *sums)
{
    const am_attn_base *base = g->base;
    const am_relative *x = &base->attn->relative;
    am_table_sums *own = &sums[at->head % base->heads_per_kv];
    row_run run;
    for (ptrdiff_t r = 0; r < at->rows; r += run.rows) {
        run = run_from(base, at, r);
        const ptrdiff_t count = run.rows - 1 + am_length(keys), distance = run.distance + keys.begin;
        memset(window, 0, (size_t)(count * base->size));
        base->arithmetic->add_rows(window + (run.rows - 1) * base->size, -1, d_s + r * TILE * base->size,
                                   TILE, run.rows, am_length(keys));
        fill(own, (am_range){table_index(x, distance), table_index(x, distance + count - 1) + 1});
        for (ptrdiff_t i = 0; i < count; i++)
            own->sums[table_index(x, distance + i)] += am_number(base, window, i);
    }
}

am_status am_table_end_task(const am_table_gradient *g, const am_attn_place *at, ptrdiff_t ticket,
                            const am_table_sums *sums, am_team *team)
{
    if (!g->result) return AM_OK;
    atomic_ptrdiff_t *serving = &g->serving[at->kv_head];
    am_status status = am_await(team, serving, ticket);
    if (status != AM_OK) return status;
    for (ptrdiff_t h = 0; h < g->base->heads_per_kv; h++) {
        double *to = g->result + (at->kv_head * g->base->heads_per_kv + h) * g->base->attn->relative.length;
        for (ptrdiff_t i = sums[h].filled.begin; i < sums[h].filled.end; i++) to[i] += sums[h].sums[i];
    }
    atomic_store_explicit(serving, ticket + 1, memory_order_release);
    return AM_OK;
}
