/* chains.c – divides chains of chunks among threads. */
#include "core/linear/chains.h"

#include <stdlib.h>

#include "core/runtime/sizes.h"
#include "core/runtime/float_mode.h"

static ptrdiff_t lanes_of(const am_linear_base *base)
{
    return am_product(base->linear->sequences, base->linear->heads, 1);
}

bool am_linear_in_rounds(const am_context *context, const am_linear_base *base)
{
    return lanes_of(base) < context->threads;
}

static int uses_of(const am_linear_chains *chains)
{
    return AM_LINEAR_TAKE | (chains->backward ? AM_LINEAR_BACK : 0);
}

/* Reads a chunk and finds its pairs. */
static am_linear_chunk read_chunk(const am_linear_base *base, const am_linear_buffers *b,
                                  const am_linear_place *at, ptrdiff_t index, bool backward)
{
    const am_linear_chunk chunk = am_linear_load(base, b, at, am_linear_token(base, at, index));
    if (backward || chunk.tokens > AM_LINEAR_FEW) base->chunks->find_pairs(&chunk, b->pairs);
    return chunk;
}

static am_status take_chunk(const am_linear_chains *chains, am_linear_link *link, am_linear_chunk chunk,
                            am_team *team)
{
    am_status status = am_checkpoint(team);
    if (status != AM_OK) return status;
    am_linear_load_values(link->base, link->b, link->at, am_linear_token(link->base, link->at, link->index),
                          &chunk);
    return chains->take(chains->job, link, &chunk);
}

am_status am_linear_workspaces(am_workspaces *workspaces, const am_linear_base *base,
                               const am_context *context, int uses)
{
    am_linear_buffers b;
    return am_workspaces_make(workspaces, context->threads, am_linear_lay_out(base, &b, uses, NULL));
}

/* --- A task for each sequence and head --- */

typedef struct {
    const am_linear_base *base;
    const am_linear_chains *chains;
    am_workspaces workspaces;
} whole_job;

/* What is read after a chunk: the next one, or that of the next task. */
static am_linear_soon soon_after(const whole_job *job, ptrdiff_t task, ptrdiff_t index)
{
    const am_linear_base *base = job->base;
    const bool backward = job->chains->backward;
    am_linear_place at = am_linear_place_of(base, task);
    am_linear_soon soon = {.count = 0};
    index += backward ? -1 : 1;
    if (index < 0 || index >= am_linear_chunks(base, &at)) {
        if (++task == lanes_of(base)) return soon;
        at = am_linear_place_of(base, task);
        index = backward ? am_max(am_linear_chunks(base, &at), 1) - 1 : 0;
    }
    const ptrdiff_t token = am_linear_token(base, &at, index);
    am_linear_values_soon(base, &base->linear->value, &at, token, &soon);
    am_linear_keys_soon(base, &at, token, &soon);
    return soon;
}

static am_status take_lane(const whole_job *job, am_linear_buffers *b, ptrdiff_t task, am_team *team)
{
    const am_linear_place place = am_linear_place_of(job->base, task), *at = &place;
    const am_linear_chains *chains = job->chains;
    const ptrdiff_t count = am_linear_chunks(job->base, at);
    am_linear_link link = {.base = job->base, .at = at, .b = b, .from = b};
    chains->begin(chains->job, &link);
    for (ptrdiff_t i = 0; i < count; i++) {
        link.index = chains->backward ? count - 1 - i : i;
        am_linear_chunk chunk = read_chunk(job->base, b, at, link.index, chains->backward);
        am_linear_soon soon = soon_after(job, task, link.index);
        chunk.soon = &soon;
        am_status status = take_chunk(chains, &link, chunk, team);
        if (status != AM_OK) return status;
    }
    chains->end(chains->job, &link);
    return AM_OK;
}

static am_status lane_task(void *arg, ptrdiff_t index, am_team *team)
{
    const whole_job *job = arg;
    am_linear_buffers buffers;
    char *memory = am_workspace(&job->workspaces);
    am_linear_lay_out(job->base, &buffers, AM_LINEAR_READ | uses_of(job->chains), memory);
    const am_float_mode mode = am_float_mode_get();
    am_float_mode_set(am_float_mode_flushing(mode));
    am_status status = take_lane(job, &buffers, index, team);
    am_float_mode_set(mode);
    am_linear_release(&buffers);
    return status;
}

static am_status run_lanes(const am_context *context, const am_linear_base *base,
                           const am_linear_chains *chains)
{
    whole_job job = {.base = base, .chains = chains};
    am_status status = am_linear_workspaces(&job.workspaces, base, context, AM_LINEAR_READ | uses_of(chains));
    if (status == AM_OK) status = am_parallel(context, lanes_of(base), 1, lane_task, &job);
    am_workspaces_free(&job.workspaces);
    return status;
}

/* --- Rounds --- */

typedef struct {
    const am_linear_base *base;
    am_linear_base sliced;
    const am_linear_chains *chains;
    char *memory; /* of all buffers */
    ptrdiff_t bytes;
    am_linear_buffers *read;  /* [lanes * group] */
    am_linear_chunk *chunks;  /* likewise */
    am_linear_buffers *links; /* [lanes * slices] */
    ptrdiff_t lanes, group, round, last_round;
} rounds_job;

static am_status read_task(void *arg, ptrdiff_t task, am_team *team)
{
    rounds_job *job = arg;
    (void)team;
    const am_linear_place at = am_linear_place_of(job->base, task / job->group);
    const ptrdiff_t index = job->round * job->group + task % job->group;
    if (index >= am_linear_chunks(job->base, &at)) return AM_OK;
    const am_float_mode mode = am_float_mode_get();
    am_float_mode_set(am_float_mode_flushing(mode));
    job->chunks[task] = read_chunk(job->base, &job->read[task], &at, index, job->chains->backward);
    am_float_mode_set(mode);
    return AM_OK;
}

static am_status take_group(rounds_job *job, ptrdiff_t task, am_team *team)
{
    const am_linear_chains *chains = job->chains;
    const am_linear_place at = am_linear_place_of(&job->sliced, task);
    const ptrdiff_t lane = task / job->sliced.slices, first = job->round * job->group;
    const ptrdiff_t count = am_min(am_linear_chunks(job->base, &at) - first, job->group);
    am_linear_link link = {.base = &job->sliced, .at = &at, .b = &job->links[task]};
    if (job->round == (chains->backward ? job->last_round : 0)) chains->begin(chains->job, &link);
    for (ptrdiff_t i = 0; i < count; i++) {
        const ptrdiff_t j = chains->backward ? count - 1 - i : i;
        link.index = first + j;
        link.from = &job->read[lane * job->group + j];
        am_linear_chunk chunk = job->chunks[lane * job->group + j];
        am_linear_soon soon = {.count = 0};
        const ptrdiff_t next = am_linear_token(link.base, &at, link.index + (chains->backward ? -1 : 1));
        if (i + 1 < count) am_linear_values_soon(link.base, &link.base->linear->value, &at, next, &soon);
        chunk.soon = &soon;
        am_status status = take_chunk(chains, &link, chunk, team);
        if (status != AM_OK) return status;
    }
    if (job->round == (chains->backward ? 0 : job->last_round)) chains->end(chains->job, &link);
    return AM_OK;
}

static am_status group_task(void *job, ptrdiff_t task, am_team *team)
{
    const am_float_mode mode = am_float_mode_get();
    am_float_mode_set(am_float_mode_flushing(mode));
    am_status status = take_group(job, task, team);
    am_float_mode_set(mode);
    return status;
}

static am_status allocate(rounds_job *job)
{
    const ptrdiff_t links = job->lanes * job->sliced.slices, read = job->lanes * job->group;
    const int uses = uses_of(job->chains);
    am_linear_buffers b;
    const ptrdiff_t read_bytes = am_linear_lay_out(job->base, &b, AM_LINEAR_READ, NULL),
                    link_bytes = am_linear_lay_out(&job->sliced, &b, uses, NULL);
    job->bytes = read * read_bytes + links * link_bytes;
    job->memory = am_alloc_aligned(job->bytes);
    job->read = calloc((size_t)(read + links), sizeof *job->read);
    job->chunks = calloc((size_t)read, sizeof *job->chunks);
    if (!job->memory || !job->read || !job->chunks) return AM_NO_MEMORY;
    job->links = job->read + read;
    for (ptrdiff_t i = 0; i < read; i++)
        am_linear_lay_out(job->base, &job->read[i], AM_LINEAR_READ, job->memory + i * read_bytes);
    for (ptrdiff_t i = 0; i < links; i++)
        am_linear_lay_out(&job->sliced, &job->links[i], uses,
                          job->memory + read * read_bytes + i * link_bytes);
    return AM_OK;
}

static void release(rounds_job *job)
{
    for (ptrdiff_t i = 0; job->links && i < job->lanes * job->sliced.slices; i++)
        am_linear_release(&job->links[i]);
    if (job->memory) am_free_aligned(job->memory, job->bytes);
    free(job->read);
    free(job->chunks);
}

static am_status run_rounds(const am_context *context, rounds_job *job)
{
    const bool backward = job->chains->backward;
    const ptrdiff_t rounds = job->last_round + 1;
    am_status status = AM_OK;
    for (ptrdiff_t i = 0; i < rounds && status == AM_OK; i++) {
        job->round = backward ? rounds - 1 - i : i;
        status = am_parallel(context, job->lanes * job->group, 1, read_task, job);
        if (status == AM_OK)
            status = am_parallel(context, job->lanes * job->sliced.slices, 1, group_task, job);
    }
    return status;
}

am_status am_linear_run_chains(const am_context *context, const am_linear_base *base,
                               const am_linear_chains *chains)
{
    const ptrdiff_t lanes = lanes_of(base);
    if (!am_linear_in_rounds(context, base)) return run_lanes(context, base, chains);
    if (lanes == 0) return AM_OK;
    ptrdiff_t longest = 0;
    for (ptrdiff_t i = 0; i < lanes; i++) {
        const am_linear_place at = am_linear_place_of(base, i);
        longest = am_max(longest, am_linear_chunks(base, &at));
    }
    rounds_job job = {.base = base, .sliced = *base, .chains = chains, .lanes = lanes};
    am_linear_cut_channels(&job.sliced, context);
    job.group = am_min(am_ceil_div(8 * (ptrdiff_t)context->threads, lanes), am_max(longest, 1));
    job.last_round = am_max(am_ceil_div(longest, job.group), 1) - 1;
    am_status status = allocate(&job);
    if (status == AM_OK) status = run_rounds(context, &job);
    release(&job);
    return status;
}
