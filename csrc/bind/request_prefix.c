/* request_prefix.c – attention to a cache of sequences that begin with the same pages: to these once for all,
 * in the usual products of matrices, and to what is behind them sequence by sequence. */
#include <string.h>

#include "bind/request_cache.h"
#include "core/arrays/array.h"
#include "core/attention/merge.h"
#include "core/runtime/sizes.h"

/* --- The prefix of a table --- */

static bool check_lengths(am_request *r, const am_cached *c, ptrdiff_t prefix)
{
    for (ptrdiff_t s = 0; s < c->sequences; s++) {
        if (c->layout.before[s] < prefix)
            return am_refuse(r, AM_WRONG_VALUE, NULL,
                             "prefix must be tokens that all sequences have in the cache, up to %td for "
                             "sequence %td, got %td",
                             c->layout.before[s], s, prefix);
    }
    return true;
}

/* Copies the pages of the prefix as it checks that all sequences have them. */
static bool read_pages(am_request *r, am_cached *c, ptrdiff_t count)
{
    const am_view *table = &c->table;
    const ptrdiff_t size = am_max(1, c->caches[0].shape[1]);
    int32_t *pages = am_keep(r, count, sizeof *pages);
    int64_t *row = am_keep(r, count, sizeof *row);
    if (!pages || !row) return false;
    for (ptrdiff_t s = 0; s < c->sequences; s++) {
        am_view own = *table;
        own.data += s * table->stride[0];
        own.axes = 1, own.shape[0] = count, own.stride[0] = table->stride[1];
        am_widen(&own, row);
        for (ptrdiff_t i = 0; i < count; i++) {
            if (row[i] < 0 || row[i] >= c->caches[0].shape[0])
                return am_refuse(r, AM_WRONG_INDEX, NULL,
                                 "block_table must be from 0 to %td, got %lld at index (%td, %td)",
                                 c->caches[0].shape[0] - 1, (long long)row[i], s, i);
            if (s == 0) pages[i] = (int32_t)row[i];
            if (row[i] != pages[i])
                return am_refuse(r, AM_WRONG_VALUE, NULL,
                                 "prefix must be tokens whose pages all sequences share, up to %td for "
                                 "sequence %td, got %td",
                                 i * size, s, count * size);
        }
    }
    c->prefix_pages = pages;
    return true;
}

bool am_cached_cut(am_request *r, am_cached *c, ptrdiff_t prefix)
{
    const ptrdiff_t size = am_max(1, c->caches[0].shape[1]), count = prefix / size;
    if (!c->table.data)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "prefix must be 0 without block_table, got %td", prefix);
    if (prefix < 0 || prefix % size)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "prefix must be whole pages of %td tokens, got %td", size,
                         prefix);
    if (!check_lengths(r, c, prefix)) return false;
    if (count > c->table.shape[1])
        return am_refuse(r, AM_WRONG_VALUE, NULL,
                         "prefix must be tokens of the %td pages of block_table, got %td", c->table.shape[1],
                         prefix);
    if (!read_pages(r, c, count)) return false;
    for (ptrdiff_t s = 0; s < c->sequences; s++) c->layout.before[s] -= prefix;
    c->table.data += count * c->table.stride[1], c->table.shape[1] -= count;
    c->prefix = prefix;
    return true;
}

bool am_cached_check_prefix(am_request *r, const am_cached *c)
{
    for (ptrdiff_t s = 0; c->prefix && s < c->sequences; s++) {
        const ptrdiff_t queries = c->q_starts ? c->q_starts[s + 1] - c->q_starts[s] : c->layout.queries;
        if (c->layout.lengths[s] < queries)
            return am_refuse(r, AM_WRONG_VALUE, NULL,
                             "prefix must be tokens before the queries, up to %td for sequence %td, got %td",
                             c->prefix + c->layout.lengths[s] - queries, s, c->prefix);
    }
    return true;
}

/* --- Results of parts --- */

/* An array that is C-contiguous, [batch, tokens, heads, channels] of tokens, or [batch, heads, tokens]. */
static am_array of_results(char *data, am_dtype type, const am_by_axis *shape, bool of_rows)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(type),
                    token = of_rows ? size : shape->head * shape->channel * size,
                    head = of_rows ? shape->token * size : shape->channel * size;
    return (am_array){.data = data,
                      .type = type,
                      .shape = *shape,
                      .stride = {.batch = shape->token * shape->head * (of_rows ? 1 : shape->channel) * size,
                                 .head = head,
                                 .token = token,
                                 .channel = size}};
}

/* All queries as one batch row: where they lie, or copied. */
static bool in_one_row(const am_context *context, am_request *r, am_array *q)
{
    const ptrdiff_t tokens = q->shape.token, rows = q->shape.batch * tokens,
                    count = q->shape.head * q->shape.channel, size = (ptrdiff_t)am_size_of(q->type);
    if (tokens == 1) q->stride.token = q->stride.batch;
    if (q->shape.batch > 1 && q->stride.batch != tokens * q->stride.token) {
        char *to = am_keep(r, rows, (size_t)(count * size));
        if (!to) return false;
        const am_by_axis shape = {
            .batch = 1, .head = q->shape.head, .token = rows, .channel = q->shape.channel};
        const am_array copy = of_results(to, q->type, &shape, false);
        for (ptrdiff_t i = 0; i < rows; i++) {
            for (ptrdiff_t h = 0; h < shape.head; h++) {
                const am_array row = am_rows_from(q, am_token(q, i / tokens, h, i % tokens), 1);
                am_gather(context->kernels, q->type, am_token(&copy, 0, h, i), shape.channel, &row);
            }
        }
        *q = copy;
    }
    q->shape.batch = 1, q->shape.token = rows;
    return true;
}

/* The call over the prefix: the queries see all of it. Sinks belong to the other part. */
static bool prefix_of(const am_context *context, am_request *r, const am_cached *c, am_mask *mask,
                      am_attn *whole)
{
    static const ptrdiff_t zero = 0;
    am_terms *terms = &whole->terms;
    if (!in_one_row(context, r, &whole->q)) return false;
    whole->batch = 1, whole->queries = whole->q.shape.token, whole->keys = c->prefix, whole->alone = true;
    whole->pages = (am_pages){.table = c->prefix_pages,
                              .table_stride = c->prefix / c->pages.size,
                              .size = c->pages.size,
                              .used = &zero,
                              .lengths = &c->prefix,
                              .sequences = 1};
    terms->places = (am_places){0};
    for (int i = 0; i < terms->count;) {
        if (terms->list[i].kind == AM_LOGIT_SINKS)
            terms->list[i] = terms->list[--terms->count];
        else
            i++;
    }
    *mask = (am_mask){.batch = 1,
                      .heads = whole->heads,
                      .queries = whole->queries,
                      .keys = c->prefix,
                      .nodes = am_keep(r, 1, sizeof *mask->nodes),
                      .node_count = 1};
    whole->mask = mask;
    if (mask->nodes) mask->nodes->kind = AM_TERM_ALL;
    return mask->nodes;
}

am_status am_cached_attend_prefix(const am_context *context, am_request *r, const am_cached *c)
{
    const am_attn *f = &r->attn;
    const am_dtype type = f->q.type == AM_FLOAT64 ? AM_FLOAT64 : AM_FLOAT32;
    const am_by_axis shape = {
        .batch = f->batch, .head = f->heads, .token = f->queries, .channel = f->value_dim};
    const ptrdiff_t rows = f->batch * f->queries, count = rows * f->heads;
    const size_t size = am_size_of(type), bytes = (size_t)f->value_dim * size;
    char *outs[3], *lses[3]; /* of the prefix, of what is behind it, of both */
    for (int i = 0; i < 3; i++) {
        outs[i] = am_keep(r, count, am_max(bytes, size)), lses[i] = am_keep(r, count, size);
        if (!outs[i] || !lses[i]) return r->status;
    }
    const am_by_axis of_all = {.batch = 1, .head = f->heads, .token = rows, .channel = f->value_dim};
    am_attn parts[2] = {*f, *f};
    am_mask mask;
    if (!prefix_of(context, r, c, &mask, &parts[0])) return r->status;
    parts[0].out = of_results(outs[0], type, &of_all, false);
    parts[0].lse = of_results(lses[0], type, &of_all, true);
    parts[1].out = of_results(outs[1], type, &shape, false);
    parts[1].lse = of_results(lses[1], type, &shape, true);
    bool done = am_refuse_status(r, am_cached_append(context, c));
    for (int i = 0; done && i < 2; i++) done = am_refuse_status(r, am_attn_forward(context, &parts[i]));
    am_mask_release(&mask);
    if (!done) return r->status;
    am_merge_part both[2] = {{parts[0].out, parts[0].lse}, {parts[1].out, parts[1].lse}};
    both[0].out = of_results(outs[0], type, &shape, false); /* in the order of the rows of all */
    both[0].lse.stride.batch = f->queries * both[0].lse.stride.token;
    const am_merge merge = {.type = type,
                            .shape = {f->batch, f->queries, f->heads, f->value_dim},
                            .count = 2,
                            .parts = both,
                            .out = outs[2],
                            .lse = lses[2]};
    if (!am_refuse_status(r, am_merge_states(context, &merge))) return r->status;
    const am_array merged = of_results(outs[2], type, &shape, false),
                   lse = of_results(lses[2], type, &shape, true);
    for (ptrdiff_t i = 0; i < count; i++) {
        const ptrdiff_t b = i / f->heads / f->queries, t = i / f->heads % f->queries, h = i % f->heads;
        am_array to = am_rows_from(&f->out, am_token(&f->out, b, h, t), 1);
        am_scatter(context->kernels, &to, type, am_token(&merged, b, h, t), f->value_dim);
        if (f->lse.data) memcpy(am_token(&f->lse, b, h, t), am_token(&lse, b, h, t), size);
    }
    return AM_OK;
}
