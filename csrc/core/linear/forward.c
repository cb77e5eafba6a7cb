/* forward.c – linear attention, and one token of it. */
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/linear/chains.h"
#include "core/linear/plain.h"

/* Where the state number `i` of a chain is computed: where it is kept if it is whole. */
static char *state_of(const am_linear_results *to, const am_linear_link *l, ptrdiff_t i)
{
    const bool whole = to->kept && l->base->slices == 1;
    return whole ? am_linear_kept_state(l->base, to->kept, l->at, i) : l->b->states[i % 2];
}

static void keep_slice(const am_linear_results *to, const am_linear_link *l, ptrdiff_t i)
{
    if (!to->kept || l->base->slices == 1) return;
    am_linear_keep(l->base, am_linear_kept_state(l->base, to->kept, l->at, i), l->at, state_of(to, l, i));
}

static void begin(void *results, const am_linear_link *l)
{
    am_linear_read_state(l->base, &l->base->linear->state, l->at, state_of(results, l, 0));
    keep_slice(results, l, 0);
}

static am_status take(void *results, const am_linear_link *l, am_linear_chunk *chunk)
{
    const am_linear_results *to = results;
    const am_linear_base *base = l->base;
    chunk->state = state_of(to, l, l->index);
    chunk->next = state_of(to, l, l->index + 1);
    const bool few = chunk->tokens <= AM_LINEAR_FEW;
    const ptrdiff_t token = am_linear_token(base, l->at, l->index);
    if (chunk->soon) am_linear_values_soon(base, &to->out, l->at, token, chunk->soon);
    if (few || !base->chunks->forward(chunk, l->pairs, l->b->scratch)) {
        if (!few) am_linear_put_aside(base, l->b, chunk->tokens, chunk->out, chunk->next);
        am_linear_load_tokens(base, l->b, l->at, token, chunk);
        base->kernels->forward_tokens(chunk, l->b->scratch);
        if (!few) am_linear_put_back(base, l->b, chunk->tokens, chunk->out, chunk->next);
    }
    keep_slice(to, l, l->index + 1);
    am_linear_write(base->all_kernels, base->type, am_linear_values_at(&to->out, l->at, token), l->b->out,
                    base->shape.channel_stride, chunk->tokens, l->at->channels);
    return AM_OK;
}

static void end(void *results, const am_linear_link *l)
{
    const am_linear_results *to = results;
    const char *state = state_of(to, l, am_linear_chunks(l->base, l->at));
    if (to->state.data) am_linear_write_state(l->base, &to->state, l->at, state);
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

/* Whether the kernels can take states where they lie. */
static bool is_in_place(const am_linear_base *base, const am_linear_array *state)
{
    const am_linear_shape *s = &base->shape;
    return s->channels == s->channel_stride && state->stride[3] == base->size &&
           state->stride[2] == s->channel_stride * base->size;
}

static void take_step(const step_job *job, const am_linear_buffers *b, const am_linear_place *at)
{
    const am_linear_base *base = &job->base;
    const am_linear_step *step = job->step;
    const am_array out = am_linear_values_at(&step->out, at, 0);
    am_linear_place slot = *at;
    slot.sequence = step->slots ? step->slots[at->sequence] : at->sequence;
    if (slot.sequence < 0) {
        memset(b->out, 0, (size_t)(base->shape.channel_stride * base->size));
    } else {
        am_linear_chunk chunk = am_linear_load(base, b, at, 0);
        am_linear_load_values(base, b, at, 0, &chunk);
        am_linear_load_tokens(base, b, at, 0, &chunk);
        const bool in_place = is_in_place(base, &step->state);
        char *state = in_place ? (char *)am_linear_rows_at(&step->state, slot.sequence, slot.head, 0).data
                               : b->states[0];
        if (!in_place) am_linear_read_state(base, &step->state, &slot, state);
        chunk.state = chunk.next = state;
        base->kernels->forward_tokens(&chunk, b->scratch);
        if (!in_place) am_linear_write_state(base, &step->state, &slot, state);
    }
    am_linear_write(base->all_kernels, base->type, out, b->out, base->shape.channel_stride, 1, at->channels);
}

static am_status step_task(void *arg, ptrdiff_t index, am_team *team)
{
    const step_job *job = arg;
    (void)team;
    for (ptrdiff_t i = index * job->task_states; i < am_min((index + 1) * job->task_states, job->states);
         i++) {
        const am_linear_place at = am_linear_place_of(&job->base, i);
        take_step(job, am_workspace(&job->workspaces), &at);
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
