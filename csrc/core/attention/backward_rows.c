/* backward_rows.c – what attention backward computes for each row before it visits keys. Kernels compute P
 * and dS from the statistics of a row. The gradient of the sinks follows from these statistics, too. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/attention/backward_plan.h"

enum {
    TILE = AM_FLASH_TILE,
    FAR = 1024, /* |lse| from which its rounding costs P more than ten binary digits */
};

/* Transposes what is packed like values, panel by panel. */
static void transpose_panels(const am_backward_plan *p, char *to, const char *panels, ptrdiff_t dim)
{
    const ptrdiff_t panel = p->base.arithmetic->panel, lanes = TILE / am_width(&p->base), size = p->base.size;
    for (ptrdiff_t i = 0; i < dim * lanes * size; i += panel * lanes * size)
        p->base.all_kernels->copy.transpose_32(to + i, lanes, panels + i, panel, lanes, panel);
}

/* Loads the rows of a block to rows `stride` apart; or where a lane holds two numbers side by side, and
 * packed like values, or by channel. */
static am_backward_operand load_block(const am_backward_plan *p, const am_array *block,
                                      am_backward_operand to, char *lanes, char *packed, char *scratch)
{
    const am_attn_base *base = &p->base;
    to.lanes = lanes, to.packed = packed;
    if (am_width(base) > 1) {
        const am_rows rows = am_copy_lanes(base, block, lanes);
        const bool by_channel = base->arithmetic->by_channel;
        char *panels = by_channel ? scratch : packed;
        to.finite = am_kv_own(base)->pack_values(panels, &rows, block->shape.token, to.dim, NULL);
        if (by_channel) transpose_panels(p, packed, panels, to.dim);
    } else {
        const am_rows rows = am_read_wide(base, block, scratch);
        to.finite = base->arithmetic->load_rows(lanes, to.stride, rows.data, rows.stride / base->size,
                                                block->shape.token, to.dim);
    }
    return to;
}

am_backward_rows am_begin_backward_rows(const am_backward_plan *p, const am_attn_place *at,
                                        const am_backward_workspace *s)
{
    const am_attn *f = p->base.attn;
    const am_backward_operand q = {.dim = f->head_dim, .stride = p->k.stride},
                              d_out = {.dim = f->value_dim, .stride = p->v.stride};
    const am_array q_rows = am_rows_of_block(&f->q, at),
                   d_out_rows = am_rows_of_block(&p->problem->d_out, at);
    return (am_backward_rows){
        .rows = at->rows,
        .q = load_block(p, &q_rows, q, s->q, s->q_rows, s->row),
        .d_out = load_block(p, &d_out_rows, d_out, s->d_out, s->d_out_rows, s->row),
        .base = am_row_stats_of(p, at, AM_ROW_BASE),
        .rest = am_row_stats_of(p, at, AM_ROW_REST),
        .add = am_row_stats_of(p, at, AM_ROW_ADD),
        .share = f->normalize ? NULL : am_row_stats_of(p, at, AM_ROW_SHARE),
        .d_q = {.sum = s->d_q},
        .p = s->p,
        .ds = s->ds,
        .scale = f->scale,
        .factor = f->scale * AM_LOG2_E / p->base.unit,
        .cap = am_cap_of(&p->base.terms),
        .unit = p->base.unit,
        .kept_factor = 1 / (1 - am_dropout_of(&p->base.terms)),
    };
}

am_backward_tangents am_begin_backward_tangents(const am_backward_plan *p, const am_attn_place *at,
                                                const am_backward_workspace *s)
{
    am_backward_tangents t = {
        .q = {.dim = p->base.attn->head_dim, .stride = p->k.stride},
        .lse = am_row_stats_of(p, at, AM_ROW_LSE),
        .moved = am_row_stats_of(p, at, AM_ROW_MOVED),
        .by_q = s->along.by_q,
        .by_k = s->along.by_k,
        .by_v = s->along.by_v,
    };
    if (!p->along->d_q.data) return t;
    const am_array rows = am_rows_of_block(&p->along->d_q, at);
    t.q = load_block(p, &rows, t.q, s->along.q, s->along.q, s->row);
    return t;
}

static double given_row_stat(const am_backward_plan *p, const am_array *row_stats, const am_attn_place *at,
                             ptrdiff_t row)
{
    return am_number(&p->base, am_token(row_stats, at->b, at->head, at->q + row), 0);
}

/* Finds three numbers for each row, sinks included: AM_ROW_BASE is the greatest logit, AM_ROW_REST the sum of
 * powers relative to it, and AM_ROW_SHARE the number of logits equal to it. */
static am_status find_row_maxima(const am_backward_plan *p, const am_attn_place *at,
                                 const am_backward_workspace *s, am_range tiles, am_team *team)
{
    const am_attn *f = p->base.attn;
    am_backward_rows block = am_begin_backward_rows(p, at, s);
    block.share = am_row_stats_of(p, at, AM_ROW_SHARE);
    am_begin_logits(&p->base, at, &s->terms);
    const am_sink_sum sinks =
        p->sinks.of_heads ? p->sinks.of_heads[at->head] : (am_sink_sum){.highest = -INFINITY};
    for (ptrdiff_t r = 0; r < at->rows; r++) {
        am_set_number(&p->base, block.base, r, sinks.highest);
        am_set_number(&p->base, block.rest, r, sinks.sum);
        am_set_number(&p->base, block.share, r, sinks.count);
    }
    for (ptrdiff_t i = tiles.begin; i < tiles.end; i++) {
        const am_range keys = am_range_at(&p->sections.tiles, i);
        am_backward_tile tile = {.k_columns = s->k_columns, .columns = am_length(keys)};
        if (!am_find_logit_terms(&p->base, at, keys, &s->terms, &tile.terms)) continue;
        const am_array rows = am_rows_of_keys(&f->k, at, keys);
        const am_rows k = am_read_lanes(&p->base, &rows, s->row);
        p->base.kv->pack_keys(s->k_columns, &k, am_length(keys), am_lanes(&p->base, f->head_dim), 1, NULL);
        s->tiles[0].packed = false; /* if a task had packed it there */
        p->base.arithmetic->find_row_max(&block, &tile);
        am_status status = am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

/* Whether P is computed from the row's maximum, not from its lse. The rounding of the lse is the relative
 * error of P. */
static bool uses_row_max(const am_backward_plan *p, const am_attn_place *at, ptrdiff_t row)
{
    double size = fabs(given_row_stat(p, &p->problem->lse, at, row));
    return !p->base.attn->normalize || (size > FAR && size < INFINITY);
}

/* The statistics that tangents of gradients need in addition to those of gradients. */
static void find_tangent_stats(const am_backward_plan *p, const am_attn_place *at,
                               const am_backward_workspace *s)
{
    const am_attn *f = p->base.attn;
    char *other = s->row + am_row_scratch(TILE, am_max(f->head_dim, f->value_dim));
    const am_array moved_rows = am_rows_of_block(&p->along->d_out, at),
                   d_out_rows = am_rows_of_block(&p->problem->d_out, at);
    const am_rows moved = am_read_wide(&p->base, &moved_rows, s->row),
                  d_out = am_read_wide(&p->base, &d_out_rows, other);
    p->base.arithmetic->dot_rows(am_row_stats_of(p, at, AM_ROW_MOVED), d_out.data,
                                 d_out.stride / p->base.size, moved.data, moved.stride / p->base.size,
                                 at->rows, f->value_dim);
    for (ptrdiff_t r = 0; r < at->rows; r++)
        am_set_number(&p->base, am_row_stats_of(p, at, AM_ROW_LSE), r,
                      given_row_stat(p, &p->along->d_lse, at, r));
}

/* The statistics from which kernels compute P and dS of the rows, beside the logits. */
static void find_row_stats(const am_backward_plan *p, const am_attn_place *at, const am_backward_workspace *s)
{
    const am_attn *f = p->base.attn;
    char *other = s->row + am_row_scratch(TILE, am_max(f->head_dim, f->value_dim)),
         *base = am_row_stats_of(p, at, AM_ROW_BASE), *rest = am_row_stats_of(p, at, AM_ROW_REST),
         *add = am_row_stats_of(p, at, AM_ROW_ADD), *share = am_row_stats_of(p, at, AM_ROW_SHARE);
    const am_array out_rows = am_rows_of_block(&f->out, at),
                   d_out_rows = am_rows_of_block(&p->problem->d_out, at);
    const am_rows out = am_read_wide(&p->base, &out_rows, s->row),
                  d_out = am_read_wide(&p->base, &d_out_rows, other);
    p->base.arithmetic->dot_rows(add, d_out.data, d_out.stride / p->base.size, out.data,
                                 out.stride / p->base.size, at->rows, f->value_dim);
    for (ptrdiff_t r = 0; r < at->rows; r++) {
        double reference = given_row_stat(p, &p->problem->lse, at, r) * AM_LOG2_E / p->base.unit, power = 0;
        double d_lse = p->problem->d_lse.data ? given_row_stat(p, &p->problem->d_lse, at, r) : 0;
        double moved = am_number(&p->base, add, r); /* the effect of a common shift of the logits */
        if (uses_row_max(p, at, r)) {
            /* The sum over these keys, unless lse is of other keys too. */
            double row_max = am_number(&p->base, base, r), own = log2(am_number(&p->base, rest, r));
            double lse = (reference - row_max) * p->base.unit,
                   rounding =
                       4 * (p->base.size == 8 ? DBL_EPSILON : FLT_EPSILON) * fabs(reference * p->base.unit);
            power = fabs(lse - own) <= rounding || isnan(own) ? -own : -lse;
            reference = row_max;
        }
        if (!f->normalize) {
            am_set_number(&p->base, share, r, moved / fmax(am_number(&p->base, share, r), 1));
            moved = 0;
            if (reference > -INFINITY) d_lse *= exp2(power);
            power = 0;
        }
        am_set_number(&p->base, base, r, reference == -INFINITY ? 0 : reference);
        am_set_number(&p->base, rest, r, reference == -INFINITY ? 0 : power);
        am_set_number(&p->base, add, r, d_lse - moved);
    }
}

am_status am_begin_rows(const am_backward_plan *p, const am_attn_place *at, const am_backward_workspace *s,
                        am_team *team)
{
    const am_attn *f = p->base.attn;
    const am_range tiles = am_block_tiles(&p->base, &p->sections, at);
    am_rows_state *state = am_rows_state_of(p, at);
    state->first = am_sum_of_tile(p, at->section, tiles.begin);
    state->last = tiles.begin < tiles.end ? am_sum_of_tile(p, at->section, tiles.end - 1) : state->first - 1;
    atomic_init(&state->semaphore, state->first);

    bool uses_any_row_max = false;
    for (ptrdiff_t r = 0; r < at->rows; r++) uses_any_row_max |= uses_row_max(p, at, r);
    if (uses_any_row_max) {
        const am_status status = find_row_maxima(p, at, s, tiles, team);
        if (status != AM_OK) return status;
    }
    am_bias_begin_rows(&p->bias, at, &p->sections.tiles, tiles);
    find_row_stats(p, at, s);
    if (p->along) find_tangent_stats(p, at, s);
    const ptrdiff_t unseen = state->first > state->last ? at->rows : 0; /* rows that no task writes */
    for (ptrdiff_t r = 0; r < unseen; r++)
        memset(am_token(&p->d_q, at->b, at->head, at->q + r), 0, (size_t)(f->head_dim * p->base.size));
    return AM_OK;
}

/* Prefetches the rows of results and of their gradients that the task after this one reads: for short
 * sequences, whose rows of one head are few and lie far apart. */
static void prefetch_results(const am_backward_plan *p, ptrdiff_t index)
{
    if (index >= p->sections.blocks.count * p->base.attn->heads) return;
    const am_attn_place at = am_backward_block(p, index);
    const am_array *const arrays[] = {&p->base.attn->out, &p->problem->d_out};
    for (int i = 0; i < 2; i++) {
        const am_prefetch_rows rows = am_prefetch_block(arrays[i], &at, 1);
        for (ptrdiff_t r = 0; r < rows.rows; r++)
            for (ptrdiff_t byte = 0; byte < rows.length; byte += AM_LINE)
                __builtin_prefetch(rows.at + r * rows.stride + byte);
    }
}

am_status am_row_stats_task(void *arg, ptrdiff_t index, am_team *team)
{
    const am_backward_plan *p = arg;
    const am_attn_place at = am_backward_block(p, index);
    prefetch_results(p, index + 1);
    const am_status status = am_begin_rows(p, &at, am_workspace(&p->workspaces), team);
    return status == AM_OK ? am_checkpoint(team) : status;
}

/* The gradient of the sinks of one head, of a part of its blocks. A sink adds to the sum of powers as a key
 * without a value would; not normalized, it may also be the row's maximum, which moves all powers. */
static am_status sinks_task(void *arg, ptrdiff_t index, am_team *team)
{
    const am_backward_plan *p = arg;
    const am_attn *f = p->base.attn;
    const ptrdiff_t head = index / p->sinks.parts, part = index % p->sinks.parts,
                    blocks = p->sections.blocks.count, count = am_sink_count(&p->base.terms);
    double *d_sinks = p->sinks.gradients + index * count;
    am_status status = AM_OK;
    memset(d_sinks, 0, (size_t)count * sizeof *d_sinks);
    for (ptrdiff_t block = part * blocks / p->sinks.parts;
         status == AM_OK && block < (part + 1) * blocks / p->sinks.parts; block++) {
        const am_attn_place at = am_backward_block(p, block * f->heads + head);
        for (ptrdiff_t r = 0; status == AM_OK && r < at.rows; r++) {
            double base = am_number(&p->base, am_row_stats_of(p, &at, AM_ROW_BASE), r),
                   rest = am_number(&p->base, am_row_stats_of(p, &at, AM_ROW_REST), r),
                   add = am_number(&p->base, am_row_stats_of(p, &at, AM_ROW_ADD), r);
            for (ptrdiff_t i = 0; i < count; i++) {
                double logit = am_sink_logit(p->base.terms.sinks, p->base.type == AM_FLOAT64, head, i);
                if (logit == -INFINITY) continue;
                d_sinks[i] += exp2((logit - base) * p->base.unit + rest) * add;
                if (!f->normalize && logit == base)
                    d_sinks[i] -= am_number(&p->base, am_row_stats_of(p, &at, AM_ROW_SHARE), r);
            }
            status = am_checkpoint(team);
        }
    }
    return status;
}

/* The gradient of the sinks. How many parts a head has follows from the shape alone, and parts are added in
 * their order, so that the sums are the same for any number of threads. */
am_status am_sum_sink_gradients(const am_context *context, am_backward_plan *p)
{
    enum { MOST_PARTS = 64, PART = 1 << 16 }; /* rows times sinks that are worth a part: a millisecond */
    const ptrdiff_t heads = p->base.attn->heads, count = am_sink_count(&p->base.terms),
                    work = am_product(p->sections.blocks.count, TILE, count), sums = heads * count;
    double *to = p->base.terms.sinks->gradient;
    p->sinks.parts = am_max(1, am_min(am_min(work / PART, MOST_PARTS), p->sections.blocks.count));
    p->sinks.gradients =
        malloc((size_t)am_max(am_product(sums, p->sinks.parts, sizeof *p->sinks.gradients), 1));
    am_status status =
        p->sinks.gradients ? am_parallel(context, heads * p->sinks.parts, 1, sinks_task, p) : AM_NO_MEMORY;
    for (ptrdiff_t i = 0; status == AM_OK && i < sums; i++) {
        const double *from = p->sinks.gradients + i / count * p->sinks.parts * count + i % count;
        to[i] = 0;
        for (ptrdiff_t part = 0; part < p->sinks.parts; part++) to[i] += from[part * count];
    }
    free(p->sinks.gradients);
    return status;
}
