/* chains.c – divides chains of chunks among threads. */
#include "core/linear/chains.h"

#include "core/runtime/sizes.h"
#include "core/runtime/float_mode.h"

/* Of all sequences. */
static ptrdiff_t heads_of(const am_linear_base *base)
{
    return am_product(base->linear->sequences, base->linear->heads, 1);
}

bool am_linear_in_rounds(const am_context *context, const am_linear_base *base)
{
    return heads_of(base) < context->threads;
}

static int uses_of(const am_linear_chains *chains)
{
    return AM_LINEAR_READ | AM_LINEAR_TAKE | (chains->backward ? AM_LINEAR_BACK : 0);
}

/* Reads a chunk and finds its pairs. */
static am_linear_chunk read_chunk(const am_linear_place *at, bool backward, am_prefetch_plan *plan)
{
    am_linear_chunk chunk = am_linear_load(at);
    chunk.prefetch = plan;
    if (backward || chunk.tokens > AM_LINEAR_FEW)
        at->base->arithmetic->find_pairs(&chunk, at->pairs, at->b->scratch);
    return chunk;
}

static am_status take_chunk(const am_linear_chains *chains, const am_linear_place *at, am_linear_chunk chunk,
                            am_team *team)
{
    am_status status = am_checkpoint(team);
    if (status != AM_OK) return status;
    am_linear_load_values(at, &chunk);
    return chains->take(chains->job, at, &chunk);
}

am_status am_linear_parallel(const am_context *context, ptrdiff_t count, am_task task, void *job)
{
    const am_float_mode mode = am_float_mode_get();
    am_float_mode_set(am_float_mode_flushing(mode)); /* of the loop's other threads, too */
    am_status status = am_parallel(context, count, 1, task, job);
    am_float_mode_set(mode);
    return status;
}

/* --- A task for each sequence and head --- */

typedef struct {
    const am_linear_chains *chains;
    am_workspaces workspaces;
} whole_job;

static void plan_chunk(const am_linear_place *next, bool keys, am_prefetch_plan *plan)
{
    if (keys) am_linear_plan_keys(next, plan);
    am_linear_plan_values(next, &next->base->linear->value, plan);
}

/* Plans what is read after a chunk: the next one, or that of the next task. */
static void plan_next(const am_linear_chains *chains, ptrdiff_t task, const am_linear_place *at,
                      am_prefetch_plan *plan)
{
    am_linear_place next = *at;
    am_plan_begin(plan, 1);
    next.index += chains->backward ? -1 : 1;
    if (next.index < 0 || next.index >= am_linear_chunks(at)) {
        if (task + 1 == heads_of(at->base)) return;
        next = am_linear_place_of(at->base, task + 1);
        next.index = chains->backward ? am_max(am_linear_chunks(&next), 1) - 1 : 0;
    }
    plan_chunk(&next, true, plan);
}

static am_status head_task(void *arg, ptrdiff_t task, am_team *team)
{
    const whole_job *job = arg;
    const am_linear_chains *chains = job->chains;
    am_linear_place at = am_linear_place_of(chains->base, task);
    const ptrdiff_t count = am_linear_chunks(&at);
    at.b = am_workspace(&job->workspaces), at.pairs = at.b->pairs;
    chains->begin(chains->job, &at);
    for (ptrdiff_t i = 0; i < count; i++) {
        at.index = chains->backward ? count - 1 - i : i;
        am_linear_chunk chunk = read_chunk(&at, chains->backward, NULL);
        am_prefetch_plan plan;
        plan_next(chains, task, &at, &plan);
        chunk.prefetch = &plan;
        am_status status = take_chunk(chains, &at, chunk, team);
        if (status != AM_OK) return status;
    }
    chains->end(chains->job, &at);
    return AM_OK;
}

static am_status run_heads(const am_context *context, const am_linear_chains *chains)
{
    whole_job job = {.chains = chains};
    am_status status = am_linear_workspaces_make(&job.workspaces, chains->base, context->threads,
                                                 uses_of(chains) | AM_LINEAR_FIND | AM_LINEAR_PAIRS);
    if (status == AM_OK) status = am_linear_parallel(context, heads_of(chains->base), head_task, &job);
    am_linear_workspaces_free(&job.workspaces);
    return status;
}

/* --- Rounds --- */

typedef struct {
    const am_linear_base *base;
    am_linear_base sliced;
    const am_linear_chains *chains;
    am_workspaces finders, links; /* of threads that find pairs; of chains, [heads * slices] */
    char *pairs;                  /* [heads][round_chunks] */
    ptrdiff_t heads, round_chunks, round, last_round, threads;
} rounds_job;

/* Of a chunk of this round. */
static char *pairs_of(const rounds_job *job, ptrdiff_t head, ptrdiff_t chunk)
{
    return job->pairs + (head * job->round_chunks + chunk) * job->base->scratch.pairs;
}

static am_status find_task(void *arg, ptrdiff_t task, am_team *team)
{
    rounds_job *job = arg;
    const am_linear_base *base = job->base;
    (void)team;
    const ptrdiff_t i = task % job->round_chunks, next = i + job->threads;
    am_linear_place at = am_linear_place_of(base, task / job->round_chunks), then = at;
    am_prefetch_plan plan;
    am_plan_begin(&plan, 1);
    at.index = job->round * job->round_chunks + i;
    then.index = at.index + job->threads; /* which this thread takes next, if all take as long */
    if (at.index >= am_linear_chunks(&at)) return AM_OK;
    if (next < job->round_chunks) am_linear_plan_keys(&then, &plan);
    at.b = am_workspace(&job->finders), at.pairs = pairs_of(job, task / job->round_chunks, i);
    read_chunk(&at, job->chains->backward, &plan);
    return AM_OK;
}

static am_status round_task(void *arg, ptrdiff_t task, am_team *team)
{
    const rounds_job *job = arg;
    const am_linear_chains *chains = job->chains;
    am_linear_place at = am_linear_place_of(&job->sliced, task);
    const ptrdiff_t head = task / job->sliced.slices, first = job->round * job->round_chunks;
    const ptrdiff_t count = am_min(am_linear_chunks(&at) - first, job->round_chunks);
    at.b = am_workspace_at(&job->links, task);
    if (job->round == (chains->backward ? job->last_round : 0)) chains->begin(chains->job, &at);
    for (ptrdiff_t i = 0; i < count; i++) {
        const ptrdiff_t j = chains->backward ? count - 1 - i : i;
        at.index = first + j;
        at.pairs = pairs_of(job, head, j);
        am_linear_chunk chunk = am_linear_load_known(&at);
        am_prefetch_plan plan;
        am_plan_begin(&plan, 1);
        am_linear_place next = at;
        next.index += chains->backward ? -1 : 1;
        if (0 <= next.index && next.index < am_linear_chunks(&at))
            plan_chunk(&next, !at.base->linear->by_channel, &plan);
        chunk.prefetch = &plan;
        am_status status = take_chunk(chains, &at, chunk, team);
        if (status != AM_OK) return status;
    }
    if (job->round == (chains->backward ? 0 : job->last_round)) chains->end(chains->job, &at);
    return AM_OK;
}

static am_status run_rounds(const am_context *context, rounds_job *job)
{
    const bool backward = job->chains->backward;
    const ptrdiff_t rounds = job->last_round + 1, links = job->heads * job->sliced.slices,
                    pairs_bytes = job->heads * job->round_chunks * job->base->scratch.pairs;
    am_status status = am_linear_workspaces_make(&job->finders, job->base, context->threads,
                                                 AM_LINEAR_READ | AM_LINEAR_FIND);
    if (status == AM_OK)
        status = am_linear_workspaces_make(&job->links, &job->sliced, links, uses_of(job->chains));
    job->pairs = am_alloc_aligned(pairs_bytes);
    if (!job->pairs) status = AM_NO_MEMORY;
    for (ptrdiff_t i = 0; i < rounds && status == AM_OK; i++) {
        job->round = backward ? rounds - 1 - i : i;
        status = am_linear_parallel(context, job->heads * job->round_chunks, find_task, job);
        if (status == AM_OK) status = am_linear_parallel(context, links, round_task, job);
        if (status == AM_OK && i % 8 == 7) status = am_checkpoint_between_loops(context);
    }
    am_linear_workspaces_free(&job->finders);
    am_linear_workspaces_free(&job->links);
    am_free_aligned(job->pairs, pairs_bytes);
    return status;
}

am_status am_linear_run_chains(const am_context *context, const am_linear_chains *chains)
{
    const am_linear_base *base = chains->base;
    const ptrdiff_t heads = heads_of(base);
    const am_linear *linear = base->linear;
    const bool any_tokens = linear->starts || linear->tokens;
    if (!any_tokens && !(linear->key_dim && linear->value_dim)) return AM_OK; /* rows that take no memory */
    if (!am_linear_in_rounds(context, base)) return run_heads(context, chains);
    if (heads == 0) return AM_OK;
    ptrdiff_t longest = 0;
    for (ptrdiff_t i = 0; i < heads; i++) {
        const am_linear_place at = am_linear_place_of(base, i);
        longest = am_max(longest, am_linear_chunks(&at));
    }
    rounds_job job = {
        .base = base, .sliced = *base, .chains = chains, .heads = heads, .threads = context->threads};
    am_linear_cut_channels(&job.sliced, context);
    const ptrdiff_t most = base->linear->by_channel ? 8 : 16; /* a thread: pairs by channel are larger */
    job.round_chunks = am_min(am_ceil_div(most * context->threads, heads), am_max(longest, 1));
    job.last_round = am_max(am_ceil_div(longest, job.round_chunks), 1) - 1;
    return run_rounds(context, &job);
}
