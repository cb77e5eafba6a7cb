/* forward.c – linear attention, and one token of it. */
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/linear/chains.h"
#include "core/linear/plain.h"

/* Where the state number `i` of a chain is computed: where it is kept if it is whole. */
static char *state_of(const am_linear_results *to, const am_linear_place *at, ptrdiff_t i)
{
    const bool whole = to->kept && at->base->slices == 1;
    return whole ? am_linear_kept_state(at, to->kept, i) : at->b->states[i % 2];
}

static void keep_slice(const am_linear_results *to, const am_linear_place *at, ptrdiff_t i)
{
    if (to->kept && at->base->slices > 1) am_linear_keep(at, to->kept, i, state_of(to, at, i));
}

static void begin(void *results, const am_linear_place *at)
{
    am_linear_read_state(at, &at->base->linear->state, state_of(results, at, 0));
    keep_slice(results, at, 0);
}

static am_status take(void *results, const am_linear_place *at, am_linear_chunk *chunk)
{
    const am_linear_results *to = results;
    const am_linear_base *base = at->base;
    chunk->state = state_of(to, at, at->index);
    chunk->next = state_of(to, at, at->index + 1);
    const bool few = chunk->tokens <= AM_LINEAR_FEW;
    if (chunk->prefetch) am_linear_plan_values(at, &to->out, chunk->prefetch);
    if (few || !base->arithmetic->forward(chunk, at->pairs, at->b->scratch)) {
        if (!few) am_linear_put_aside(at, chunk->tokens, chunk->out, chunk->next);
        am_linear_load_tokens(at, chunk);
        base->kernels->forward_tokens(chunk, at->b->scratch);
        if (!few) am_linear_put_back(at, chunk->tokens, chunk->out, chunk->next);
    }
    keep_slice(to, at, at->index + 1);
    am_linear_write(at, &to->out, AM_LINEAR_VALUES, at->b->out, base->shape.value_stride);
    return AM_OK;
}

static void end(void *results, const am_linear_place *at)
{
    const am_linear_results *to = results;
    const char *state = state_of(to, at, am_linear_chunks(at));
    if (to->state.data) am_linear_write(at, &to->state, AM_LINEAR_STATE, state, at->base->shape.value_stride);
}

am_status am_linear_forward_all(const am_context *context, const am_linear *linear,
                                const am_linear_results *results)
{
    if (context->kernels->plain) return am_plain_linear(context, linear, results, NULL, NULL);
    am_linear_base base;
    am_status status = am_linear_begin(&base, context, linear, AM_LINEAR_FORWARD);
    const am_linear_chains chains = {
        .base = &base, .job = (void *)results, .begin = begin, .take = take, .end = end};
    if (status == AM_OK) status = am_linear_run_chains(context, &chains);
    am_linear_end(&base);
    return status;
}

/* --- One token --- */

typedef struct {
    am_linear_base base;
    const am_linear_step *step;
    am_workspaces workspaces;
    ptrdiff_t states, task_states; /* sequences and heads, of all and of a task */
} step_job;

static void take_step(const step_job *job, am_linear_place *at)
{
    const am_linear_base *base = &job->base;
    const am_linear_step *step = job->step;
    const am_linear_shape *s = &base->shape;
    if (step->slots) at->sequence = step->slots[at->sequence];
    if (at->sequence < 0) {
        memset(at->b->out, 0, (size_t)(s->value_stride * base->size));
    } else {
        am_linear_chunk chunk = am_linear_load(at);
        am_linear_load_values(at, &chunk);
        am_linear_load_tokens(at, &chunk);
        const am_by_axis *stride = &step->state.stride; /* in place: as kernels take states */
        const bool in_place = s->value_dim == s->value_stride && stride->channel == base->size &&
                              stride->token == s->value_stride * base->size;
        char *state = in_place ? am_token(&step->state, at->sequence, at->head, 0) : at->b->states[0];
        if (!in_place) am_linear_read_state(at, &step->state, state);
        chunk.state = chunk.next = state;
        base->kernels->forward_tokens(&chunk, at->b->scratch);
        if (!in_place) am_linear_write(at, &step->state, AM_LINEAR_STATE, state, s->value_stride);
    }
    am_linear_write(at, &step->out, AM_LINEAR_VALUES, at->b->out, s->value_stride);
}

static am_status step_task(void *arg, ptrdiff_t index, am_team *team)
{
    const step_job *job = arg;
    (void)team;
    for (ptrdiff_t i = index * job->task_states; i < am_min((index + 1) * job->task_states, job->states);
         i++) {
        am_linear_place at = am_linear_place_of(&job->base, i);
        at.b = am_workspace(&job->workspaces);
        take_step(job, &at);
    }
    return AM_OK;
}

am_status am_linear_step_all(const am_context *context, const am_linear *linear, const am_linear_step *step)
{
    enum { MOST_STATES = 16, TASKS_PER_THREAD = 4 };
    if (context->kernels->plain) return am_plain_linear(context, linear, NULL, NULL, step);
    step_job job = {.step = step, .states = am_product(linear->sequences, linear->heads, 1)};
    job.task_states =
        am_min(am_ceil_div(job.states, TASKS_PER_THREAD * (ptrdiff_t)context->threads), MOST_STATES);
    am_status status = am_linear_begin(&job.base, context, linear, AM_LINEAR_STEP);
    if (status == AM_OK)
        status = am_linear_workspaces_make(&job.workspaces, &job.base, context->threads,
                                           AM_LINEAR_READ | AM_LINEAR_TAKE);
    if (status == AM_OK)
        status =
            am_linear_parallel(context, am_ceil_div(job.states, am_max(job.task_states, 1)), step_task, &job);
    am_linear_workspaces_free(&job.workspaces);
    am_linear_end(&job.base);
    return status;
}
