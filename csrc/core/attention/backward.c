/* backward.c – attention backward, from out and lse, with logits computed again.
 *
 * A task takes a few tiles of keys of one key head, or more tiles if each block sees few. It loops over the
 * blocks of 64 query rows that see them, and accumulates d_k and d_v on its own. Each block of d_q gets sums
 * from the tasks of all keys that its rows attend to. A sum covers a few tiles, and sums are added in the
 * order of the keys. Tasks begin in this order too, so a task waits only for one that is running. Tasks that
 * share a bias add to its gradient in order, too.
 *
 * If a section has too few keys and heads to keep many threads busy, the blocks that see a tile are divided
 * into splits. Each split is summed up from zero, and splits are added in order. So a task can take one
 * split, for many threads, or all of them.
 *
 * How many tiles a sum of d_q has, and how many blocks a split has, follows from the section alone. How tiles
 * and splits are dealt to tasks changes no sum. So the rest of a call changes no gradient. Nothing is as
 * large as queries times keys, unless the bias is. */
#include <stdlib.h>

#include "core/attention/backward_plan.h"
#include "core/runtime/float_mode.h"

enum {
    TILE = AM_FLASH_TILE,
};

static am_status compute(const am_context *context, am_backward_plan *p)
{
    const am_attn *f = p->base.attn;
    const ptrdiff_t blocks = p->sections.blocks.count * f->heads;
    am_status status = p->lone_blocks ? AM_OK : am_parallel(context, blocks, 1, am_row_stats_task, p);
    if (status == AM_OK) status = am_bias_gradient_begin(context, &p->bias);
    /* Batch rows that share the numbers of a term add to its gradient in order, too. */
    const ptrdiff_t of_bias = p->bias.sums ? p->bias.shape.batch : f->batch,
                    groups = p->lines.count > 0 ? 1 : of_bias, row_tasks = p->row_tasks * f->kv_heads;
    if (status == AM_OK && f->batch > 0)
        status = am_parallel_rows(context, groups, f->batch / groups * row_tasks, am_key_task_run, p);
    if (status == AM_OK && am_is_learned(p->base.terms.sinks)) status = am_sum_sink_gradients(context, p);
    if (status == AM_OK && p->splits.are_tasks)
        status = am_parallel(context, f->batch * row_tasks, 1, am_add_splits, p);
    if (status == AM_OK && p->d_q.data != p->problem->d_q.data)
        status = am_parallel(context, blocks, 1, am_finish_d_q, p);
    return status == AM_OK ? am_bias_gradient_end(context, &p->bias) : status;
}

/* `along`: NULL, or what the tangents of gradients are computed along. */
static am_status compute_gradients(const am_context *context, const am_attn_gradients *problem,
                                   const am_attn_tangents *along, bool by_mask)
{
    const am_attn *f = &problem->forward;
    am_backward_plan p = {.base = along ? am_attn_base_wide(context, f) : am_attn_base_of(context, f),
                          .problem = problem,
                          .along = along,
                          .threads = context->threads,
                          .d_q = problem->d_q};
    if (p.base.terms.sinks) p.base.unit = AM_LOG2_E; /* the unit of sinks, as a base may be one */
    am_status status = am_backward_plan_make(&p, by_mask);
    am_context own =
        *context; /* backward takes 2.5 times as long as forward, and as long again for tangents */
    const double times = along ? 5 : 2.5;
    if (status == AM_OK) own.threads = am_threads_for(context, times * am_time_alone(f, &p.sections));
    context = &own;
    ptrdiff_t rows = f->batch * f->heads * f->queries, size = p.base.size,
              d_q_bytes = am_product(rows, f->head_dim, size),
              stats_bytes = am_product(am_ceil_div(rows, AM_LINE / size), AM_LINE, AM_ROW_STATS);
    char *own_d_q = NULL;
    p.splits.bytes = p.task_tiles * (p.k.sums + p.v.sums);
    const ptrdiff_t splits = p.splits.slots * f->kv_heads, sums_bytes = am_product(splits, p.splits.bytes, 1);
    if (status == AM_OK)
        status = am_bias_gradient_make(&p.bias, &p.base, &p.sections, p.row_tasks, p.task_tiles);
    if (status == AM_OK) status = am_line_gradients_make(&p.lines, &p.base);
    if (status == AM_OK)
        status = am_workspaces_make(&p.workspaces, context->threads, am_backward_lay_out, &p,
                                    sizeof(am_backward_workspace));
    if (status == AM_OK) status = am_sum_sinks(context, &p.base, &p.sinks.of_heads);
    if (splits > 0) {
        p.splits.summed = calloc((size_t)splits, sizeof *p.splits.summed);
        p.splits.sums = am_alloc_aligned(sums_bytes);
        if (!(p.splits.summed && p.splits.sums)) status = AM_NO_MEMORY;
    }
    p.stats.bytes = stats_bytes / AM_ROW_STATS;
    p.stats.data = am_alloc_aligned(stats_bytes);
    if (p.d_q.type != p.base.type) {
        own_d_q = am_alloc_aligned(d_q_bytes);
        p.d_q = (am_array){
            .data = own_d_q,
            .type = p.base.type,
            .shape = {f->batch, f->queries, f->heads, f->head_dim},
            .stride = {.batch = f->heads * f->queries * f->head_dim * size,
                       .head = f->queries * f->head_dim * size,
                       .token = f->head_dim * size,
                       .channel = size},
        };
    }
    if (status == AM_OK && !(p.stats.data && p.d_q.data)) status = AM_NO_MEMORY;
    if (status == AM_OK) status = compute(context, &p);
    am_workspaces_free(&p.workspaces);
    am_backward_plan_free(&p);
    free(p.sinks.of_heads);
    free(p.splits.summed);
    am_free_aligned(p.splits.sums, sums_bytes);
    am_free_aligned(p.stats.data, stats_bytes);
    am_free_aligned(own_d_q, d_q_bytes);
    am_bias_gradient_free(&p.bias);
    am_line_gradients_free(&p.lines);
    return status;
}

/* Whether blocks and tiles by the mask are those of whole batch rows. */
static am_status find_whole_rows(const am_mask *mask, bool *whole)
{
    am_sections sections;
    const am_status status = am_sections_make(&sections, mask, true);
    *whole = true;
    for (ptrdiff_t g = 0; status == AM_OK && g < sections.count; g++) {
        const am_section *section = &sections.list[g];
        if (am_length(section->tiles) == 0) continue;
        *whole &= section->queries.begin == 0;
        for (ptrdiff_t i = section->blocks.begin; i < section->blocks.end; i++)
            *whole &= am_range_at(&sections.blocks, i).begin % TILE == 0;
        for (ptrdiff_t i = section->tiles.begin; i < section->tiles.end; i++)
            *whole &= am_range_at(&sections.tiles, i).begin % TILE == 0;
    }
    am_sections_free(&sections);
    return status;
}

static am_status backward(const am_context *context, const am_attn_gradients *problem,
                          const am_attn_tangents *along)
{
    const am_attn *f = &problem->forward;
    if (am_is_too_deep(f)) return AM_NO_MEMORY;
    if (f->heads == 0 && f->queries > 0) { /* queries that take no memory, of any number */
        am_mask mask = *f->mask;
        am_attn_gradients none = *problem;
        none.forward.queries = mask.queries = 0, none.forward.mask = &mask;
        return backward(context, &none, along);
    }
    if (context->kernels->plain)
        return along ? am_plain_backward_tangents(context, problem, along)
                     : am_plain_backward(context, problem);
    bool learned = false;
    for (int i = 0; i < f->terms.count; i++) learned |= am_is_learned(&f->terms.list[i]);
    if (f->head_dim == 0 && f->value_dim == 0 && !learned) return AM_OK;
    const am_logit_term *bias = am_find_terms(f).bias;
    if (!am_is_learned(bias) || bias->array.shape.batch == f->batch)
        return compute_gradients(context, problem, along, true);
    /* Batch rows that share a bias add to its gradient with equal blocks and tiles. If the mask has
     * sequences that begin elsewhere in some rows, a second pass computes the other gradients, with the bits
     * that they have without the gradient of the bias. */
    bool whole;
    am_status status = find_whole_rows(f->mask, &whole);
    if (status == AM_OK) status = compute_gradients(context, problem, along, false);
    if (status != AM_OK || whole) return status;
    am_attn_gradients others = *problem;
    for (int i = 0; i < f->terms.count; i++) others.forward.terms.list[i].gradient = NULL;
    return compute_gradients(context, &others, along, true);
}

/* Gradients of pairs that ALiBi makes unlikely are often denormal, and with such numbers processors of Intel
 * take 1.6 times as long in all. */
static am_status flushing(const am_context *context, const am_attn_gradients *problem,
                          const am_attn_tangents *along)
{
    const am_float_mode mode = am_float_mode_get();
    am_float_mode_set(am_float_mode_flushing(mode));
    am_status status = am_mask_prepare(context, problem->forward.mask);
    if (status == AM_OK && along && !context->kernels->plain) status = am_attn_prepared_jvp(context, along);
    if (status == AM_OK) status = backward(context, problem, along);
    am_float_mode_set(mode);
    return status;
}

am_status am_attn_backward(const am_context *context, const am_attn_gradients *problem)
{
    return flushing(context, problem, NULL);
}

am_status am_attn_backward_tangents(const am_context *context, const am_attn_gradients *problem,
                                    const am_attn_tangents *along)
{
    return flushing(context, problem, along);
}
