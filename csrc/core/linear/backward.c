/* backward.c – gradients of linear attention: from the last chunk of each sequence and head to the first,
 * from the states that the forward pass kept. */
#include <stdlib.h>
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/attention/base.h"
#include "core/linear/chains.h"
#include "core/linear/plain.h"

typedef struct {
    am_linear_base base;
    const am_linear_back *back;
    bool shared, by_head, in_rounds;   /* queries and keys are shared by heads, decays by tokens */
    am_linear_array query, key, decay; /* of each value head and token, before they are summed */
    am_linear_array d_u;               /* of what is added for each key, where states come first */
    char *d_states;                    /* of the states that are kept, in the same order */
    ptrdiff_t states, numbers;         /* of each */
    am_workspaces workspaces;          /* for single chunks */
} backward_job;

static ptrdiff_t tokens_of(const am_linear *linear)
{
    return linear->starts ? linear->starts[linear->sequences] : linear->tokens;
}

static ptrdiff_t batch_of(const am_linear *linear) { return linear->starts ? 1 : linear->sequences; }

/* An array of the type of sums [batch, tokens, heads, columns]. */
static am_linear_array take_array(const backward_job *job, ptrdiff_t columns, char *memory, ptrdiff_t *used)
{
    const am_linear *linear = job->base.linear;
    const ptrdiff_t tokens = tokens_of(linear), rows = am_product(batch_of(linear), tokens, linear->heads),
                    size = job->base.size, head = columns * size, token = linear->heads * head;
    const char *data = am_take(memory, used, am_product(rows, columns, size));
    return (am_linear_array){data, job->base.type, {tokens * token, token, head, size}};
}

/* Lays out what is kept beside the results; returns its bytes. */
static ptrdiff_t lay_out(backward_job *job, char *memory)
{
    const am_linear *linear = job->base.linear;
    ptrdiff_t used = 0;
    if (job->shared) job->query = take_array(job, linear->rows, memory, &used);
    if (job->shared) job->key = take_array(job, linear->rows, memory, &used);
    if (job->by_head) job->decay = take_array(job, 1, memory, &used);
    if (job->in_rounds) job->d_u = take_array(job, linear->channels, memory, &used);
    job->d_states = am_take(memory, &used, am_product(job->states, job->numbers, job->base.size));
    return used;
}

static am_linear_gradients gradients_of(const am_linear_buffers *b)
{
    return (am_linear_gradients){
        .d_out = b->back.d_out,
        .d_q = b->back.d_q,
        .d_k = b->back.d_k,
        .d_v = b->back.d_v,
        .d_decay = b->back.d_decay,
        .d_beta = b->back.d_beta,
        .d_u = b->back.d_u,
    };
}

/* The gradients of a chunk, by a kernel, or if some are not finite, token by token. */
static am_status take_chunk(const backward_job *job, const am_linear_link *l, am_linear_chunk *chunk,
                            const am_linear_gradients *g, am_linear_backward *kernel)
{
    const am_linear_base *base = l->base;
    am_linear_buffers *b = l->b;
    am_linear_read(base->all_kernels, base->type, b->back.d_out, base->shape.channel_stride,
                   am_linear_values_at(&job->back->d_out, l->at, am_linear_token(base, l->at, l->index)),
                   chunk->tokens, l->at->channels);
    if (chunk->soon && l->index > 0)
        am_linear_values_soon(base, &job->back->d_out, l->at, am_linear_token(base, l->at, l->index - 1),
                              chunk->soon);
    if (kernel(chunk, g, l->pairs, b->scratch)) return AM_OK;
    if (!b->back.token_scratch) b->back.token_scratch = malloc((size_t)base->scratch.backward_tokens);
    if (!b->back.token_scratch) return AM_NO_MEMORY;
    am_linear_put_aside(base, b, 0, NULL, g->d_state);
    if (!chunk->state) { /* a slice of one, which is seldom asked for */
        am_linear_recall(base, am_linear_kept_state(base, job->back->kept, l->at, l->index), l->at,
                         b->back.state);
        chunk->state = b->back.state;
    }
    am_linear_load_tokens(base, b, l->at, am_linear_token(base, l->at, l->index), chunk);
    base->kernels->backward_tokens(chunk, g, b->back.token_scratch);
    am_linear_put_back(base, b, 0, NULL, g->d_state);
    return AM_OK;
}

static void write_tokens(const backward_job *job, const am_linear_array *to, const am_linear_place *at,
                         ptrdiff_t token, const void *from, ptrdiff_t count)
{
    const am_linear_base *base = &job->base;
    if (!to->data) return;
    am_array rows = am_linear_rows_at(to, at->batch, token, at->head);
    rows.stride.channel = to->stride[1];
    am_linear_write(base->all_kernels, base->type, rows, from, 0, 1, count);
}

static void store(const backward_job *job, const am_linear_buffers *b, const am_linear_place *at,
                  ptrdiff_t token, ptrdiff_t count)
{
    const am_linear_base *base = &job->base;
    const am_linear_shape *s = &base->shape;
    const struct {
        const am_linear_array *array;
        const char *rows;
        ptrdiff_t stride, columns;
    } parts[] = {
        {&job->query, b->back.d_q, s->row_stride, s->rows},
        {&job->key, b->back.d_k, s->row_stride, s->rows},
        {&job->back->value, b->back.d_v, s->channel_stride, s->channels},
        {&job->decay, b->back.d_decay, s->row_stride, s->rows},
    };
    base->kernels->scale_rows_back(b->back.d_q, b->q, b->q_inverse, base->linear->scale, count,
                                   s->row_stride);
    if (base->linear->normalize)
        base->kernels->scale_rows_back(b->back.d_k, b->k, b->k_inverse, 1, count, s->row_stride);
    for (int i = 0; i < (base->linear->by_channel ? 4 : 3); i++) {
        if (parts[i].array->data)
            am_linear_write(base->all_kernels, base->type,
                            am_linear_rows_at(parts[i].array, at->batch, token, at->head), parts[i].rows,
                            parts[i].stride, count, parts[i].columns);
    }
    if (!base->linear->by_channel) write_tokens(job, &job->decay, at, token, b->back.d_decay, count);
    write_tokens(job, &job->back->beta, at, token, b->back.d_beta, count);
}

/* --- Chunk after chunk --- */

static void begin(void *arg, const am_linear_link *l)
{
    const backward_job *job = arg;
    const ptrdiff_t chunks = am_linear_chunks(l->base, l->at);
    am_linear_read_state(l->base, &job->back->d_state, l->at, l->b->states[chunks % 2]);
}

static am_status take(void *arg, const am_linear_link *l, am_linear_chunk *chunk)
{
    const backward_job *job = arg;
    am_linear_gradients g = gradients_of(l->b);
    chunk->state = am_linear_kept_state(l->base, job->back->kept, l->at, l->index);
    chunk->next = am_linear_kept_state(l->base, job->back->kept, l->at, l->index + 1);
    g.d_next = l->b->states[(l->index + 1) % 2], g.d_state = l->b->states[l->index % 2];
    am_status status = take_chunk(job, l, chunk, &g, l->base->chunks->backward);
    if (status == AM_OK) store(job, l->b, l->at, am_linear_token(l->base, l->at, l->index), chunk->tokens);
    return status;
}

static void end(void *arg, const am_linear_link *l)
{
    const backward_job *job = arg;
    if (job->back->state.data) am_linear_write_state(l->base, &job->back->state, l->at, l->b->states[0]);
}

/* --- States first --- */

static am_status take_state(void *arg, const am_linear_link *l, am_linear_chunk *chunk)
{
    const backward_job *job = arg;
    const am_linear_base *base = l->base;
    am_linear_gradients g = gradients_of(l->b);
    g.d_next = l->b->states[(l->index + 1) % 2], g.d_state = l->b->states[l->index % 2];
    am_linear_keep(base, am_linear_kept_state(base, job->d_states, l->at, l->index + 1), l->at, g.d_next);
    am_status status = take_chunk(job, l, chunk, &g, base->chunks->backward_state);
    am_linear_write(base->all_kernels, base->type,
                    am_linear_values_at(&job->d_u, l->at, am_linear_token(base, l->at, l->index)),
                    l->b->back.d_u, base->shape.channel_stride, chunk->tokens, l->at->channels);
    return status;
}

/* All other gradients of a chunk. */
static am_status chunk_task(void *arg, ptrdiff_t index, am_team *team)
{
    (void)team;
    const backward_job *job = arg;
    const am_linear_base *base = &job->base;
    am_linear_buffers *b = am_workspace(&job->workspaces);
    const ptrdiff_t heads = base->linear->heads, slot = index / heads;
    const ptrdiff_t sequence = am_linear_sequence_of(base, slot);
    const am_linear_place at = am_linear_place_of(base, sequence * heads + index % heads);
    const ptrdiff_t i = slot - am_linear_offset(base, sequence), token = am_linear_token(base, &at, i);
    if (i == am_linear_chunks(base, &at)) return AM_OK; /* the state behind the last chunk */
    const am_linear_link link = {.base = base, .at = &at, .b = b, .pairs = b->pairs, .index = i};
    am_linear_chunk chunk = am_linear_load(base, b, &at, token);
    base->chunks->find_pairs(&chunk, b->pairs, b->scratch);
    am_linear_load_values(base, b, &at, token, &chunk);
    am_linear_gradients g = gradients_of(b);
    chunk.state = am_linear_kept_state(base, job->back->kept, &at, i);
    chunk.next = am_linear_kept_state(base, job->back->kept, &at, i + 1);
    g.d_next = am_linear_kept_state(base, job->d_states, &at, i + 1);
    g.d_state = b->states[0];
    g.known = true;
    am_linear_read(base->all_kernels, base->type, b->back.d_u, base->shape.channel_stride,
                   am_linear_values_at(&job->d_u, &at, token), chunk.tokens, at.channels);
    am_status status = take_chunk(job, &link, &chunk, &g, base->chunks->backward);
    if (status == AM_OK) store(job, b, &at, token, chunk.tokens);
    return status;
}

static am_status take_chunks(const am_context *context, backward_job *job, ptrdiff_t count)
{
    am_status status = am_linear_workspaces_make(&job->workspaces, &job->base, context->threads,
                                                 AM_LINEAR_READ | AM_LINEAR_FIND | AM_LINEAR_PAIRS |
                                                     AM_LINEAR_TAKE | AM_LINEAR_BACK);
    if (status == AM_OK) status = am_linear_parallel(context, count, chunk_task, job);
    am_linear_workspaces_free(&job->workspaces);
    return status;
}

static am_status find_gradients(const am_context *context, backward_job *job)
{
    const am_linear_chains chains = {.base = &job->base,
                                     .backward = true,
                                     .job = job,
                                     .begin = begin,
                                     .take = job->in_rounds ? take_state : take,
                                     .end = end};
    const am_status status = am_linear_run_chains(context, &chains);
    return status == AM_OK && job->in_rounds ? take_chunks(context, job, job->states) : status;
}

/* --- Sums over value heads that share a key head, and over tokens --- */

typedef struct {
    const am_linear_base *base;
    const am_linear_array *from, *to;
    ptrdiff_t tokens; /* of a batch row */
} sum_job;

/* A token: sums of heads in order, in float64. */
static am_status sum_heads(void *arg, ptrdiff_t index, am_team *team)
{
    enum { PIECE = 128 };
    const sum_job *job = arg;
    const am_linear *linear = job->base->linear;
    const am_kernels *kernels = job->base->all_kernels;
    const ptrdiff_t batch = index / job->tokens, token = index % job->tokens;
    const ptrdiff_t shared = linear->heads / linear->key_heads;
    double sums[PIECE], piece[PIECE];
    (void)team;
    if (!shared) memset(sums, 0, sizeof sums);
    for (ptrdiff_t h = 0; h < linear->key_heads; h++) {
        for (ptrdiff_t begin = 0; begin < linear->rows; begin += PIECE) {
            const ptrdiff_t count = am_min(linear->rows - begin, PIECE);
            for (ptrdiff_t i = 0; i < shared; i++) {
                am_array from = am_linear_rows_at(job->from, batch, token, h * shared + i);
                from.data += begin * from.stride.channel;
                am_linear_read(kernels, AM_FLOAT64, i ? piece : sums, count, from, 1, count);
                for (ptrdiff_t r = 0; i && r < count; r++) sums[r] += piece[r];
            }
            am_array to = am_linear_rows_at(job->to, batch, token, h);
            to.data += begin * to.stride.channel;
            am_linear_write(kernels, AM_FLOAT64, to, sums, count, 1, count);
        }
    }
    return AM_OK;
}

/* A head: sums over all tokens. */
static am_status sum_tokens(void *arg, ptrdiff_t head, am_team *team)
{
    const sum_job *job = arg;
    const am_linear_base *base = job->base;
    double sum = 0;
    for (ptrdiff_t b = 0; job->tokens && b < batch_of(base->linear); b++) {
        for (ptrdiff_t t = 0; t < job->tokens; t++) {
            double number;
            if (t % 4096 == 0 && am_checkpoint(team) != AM_OK) return am_checkpoint(team);
            am_linear_read(base->all_kernels, AM_FLOAT64, &number, 1,
                           am_linear_rows_at(job->from, b, t, head), 1, 1);
            sum += number;
        }
    }
    am_linear_write(base->all_kernels, AM_FLOAT64, am_linear_rows_at(job->to, 0, 0, head), &sum, 1, 1, 1);
    return AM_OK;
}

am_status am_linear_backward_all(const am_context *context, const am_linear *linear,
                                 const am_linear_back *back)
{
    if (context->kernels->plain) return am_plain_linear(context, linear, NULL, back, NULL);
    backward_job job = {.back = back, .query = back->query, .key = back->key, .decay = back->decay};
    am_status status = am_linear_begin(&job.base, context, linear, AM_LINEAR_BACKWARD);
    const ptrdiff_t tokens = tokens_of(linear);
    job.shared = linear->heads != linear->key_heads;
    job.by_head = back->decay.data && back->decay_of_heads;
    job.in_rounds = am_linear_in_rounds(context, &job.base);
    if (job.in_rounds && !am_linear_kept(linear, &job.states, &job.numbers)) status = AM_NO_MEMORY;
    const ptrdiff_t bytes = status == AM_OK ? lay_out(&job, NULL) : 0;
    char *memory = NULL;
    if (status == AM_OK) {
        memory = am_alloc_aligned(bytes);
        lay_out(&job, memory);
        status = memory ? find_gradients(context, &job) : AM_NO_MEMORY;
    }
    const sum_job sums[] = {{&job.base, &job.query, &back->query, tokens},
                            {&job.base, &job.key, &back->key, tokens},
                            {&job.base, &job.decay, &back->decay, tokens}};
    for (int i = 0; i < 2 && job.shared && status == AM_OK; i++)
        status = am_parallel(context, batch_of(linear) * tokens, 16, sum_heads, (void *)&sums[i]);
    if (job.by_head && status == AM_OK)
        status = am_parallel(context, linear->heads, 1, sum_tokens, (void *)&sums[2]);
    am_free_aligned(memory, bytes);
    am_linear_end(&job.base);
    return status;
}
