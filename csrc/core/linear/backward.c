/* backward.c – gradients of linear attention: from the last chunk of each sequence and head to the first,
 * from the states that the forward pass kept. */
#include <stdlib.h>
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/linear/chains.h"
#include "core/linear/plain.h"

typedef struct {
    am_linear_base base;
    const am_linear_back *back;
    bool shared, by_head, in_rounds; /* queries and keys are shared by heads, decays by tokens */
    am_array query, key, decay;      /* of each value head and token, before they are summed */
    am_array d_u;                    /* of what is added for each key, where states come first */
    char *d_states;                  /* of the states that are kept, in the same order */
    ptrdiff_t states, numbers;       /* of each */
    am_workspaces workspaces;        /* for single chunks */
} backward_job;

static ptrdiff_t tokens_of(const am_linear *linear)
{
    return linear->starts ? linear->starts[linear->sequences] : linear->tokens;
}

static ptrdiff_t batch_of(const am_linear *linear) { return linear->starts ? 1 : linear->sequences; }

/* An array of the type of sums [batch, tokens, heads, columns]. */
static am_array take_array(const backward_job *job, ptrdiff_t columns, char *memory, ptrdiff_t *used)
{
    const am_linear *linear = job->base.linear;
    const ptrdiff_t batch = batch_of(linear), tokens = tokens_of(linear), heads = linear->heads,
                    size = job->base.size, head = columns * size, token = heads * head;
    return (am_array){
        .data = am_take(memory, used, am_product(am_product(batch, tokens, heads), columns, size)),
        .type = job->base.type,
        .shape = {batch, tokens, heads, columns},
        .stride = {tokens * token, token, head, size},
    };
}

/* Lays out what is kept beside the results; returns its bytes. */
static ptrdiff_t lay_out(backward_job *job, char *memory)
{
    const am_linear *linear = job->base.linear;
    ptrdiff_t used = 0;
    if (job->shared) job->query = take_array(job, linear->key_dim, memory, &used);
    if (job->shared) job->key = take_array(job, linear->key_dim, memory, &used);
    if (job->by_head) job->decay = take_array(job, 1, memory, &used);
    if (job->in_rounds) job->d_u = take_array(job, linear->value_dim, memory, &used);
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
static am_status take_chunk(const backward_job *job, const am_linear_place *at, am_linear_chunk *chunk,
                            const am_linear_gradients *g, am_linear_backward *kernel)
{
    const am_linear_base *base = at->base;
    am_linear_buffers *b = at->b;
    am_linear_read(at, &job->back->d_out, AM_LINEAR_VALUES, b->back.d_out, base->shape.value_stride);
    if (chunk->prefetch && at->index > 0) {
        am_linear_place next = *at;
        next.index--;
        am_linear_plan_values(&next, &job->back->d_out, chunk->prefetch);
    }
    if (kernel(chunk, g, at->pairs, b->scratch)) return AM_OK;
    if (!b->back.token_scratch) b->back.token_scratch = malloc((size_t)base->scratch.backward_tokens);
    if (!b->back.token_scratch) return AM_NO_MEMORY;
    am_linear_put_aside(at, 0, NULL, g->d_state);
    if (!chunk->state) { /* a slice of one, which is seldom asked for */
        am_linear_recall(at, job->back->kept, at->index, b->back.state);
        chunk->state = b->back.state;
    }
    am_linear_load_tokens(at, chunk);
    base->kernels->backward_tokens(chunk, g, b->back.token_scratch);
    am_linear_put_back(at, 0, NULL, g->d_state);
    return AM_OK;
}

/* Writes the gradients of a chunk where they are wanted. */
static void store(const backward_job *job, const am_linear_place *at, ptrdiff_t tokens)
{
    const am_linear_base *base = at->base;
    const am_linear_shape *s = &base->shape;
    const am_linear_buffers *b = at->b;
    const struct {
        const am_array *array;
        am_linear_part part;
        const char *from;
        ptrdiff_t stride;
    } parts[] = {
        {&job->query, AM_LINEAR_ROWS, b->back.d_q, s->key_stride},
        {&job->key, AM_LINEAR_ROWS, b->back.d_k, s->key_stride},
        {&job->back->value, AM_LINEAR_VALUES, b->back.d_v, s->value_stride},
        {&job->decay, base->linear->by_channel ? AM_LINEAR_ROWS : AM_LINEAR_NUMBERS, b->back.d_decay,
         s->key_stride},
        {&job->back->beta, AM_LINEAR_NUMBERS, b->back.d_beta, 0},
    };
    base->kernels->scale_rows_back(b->back.d_q, b->q, b->q_inverse, base->linear->scale, tokens,
                                   s->key_stride);
    if (base->linear->normalize)
        base->kernels->scale_rows_back(b->back.d_k, b->k, b->k_inverse, 1, tokens, s->key_stride);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (parts[i].array->data)
            am_linear_write(at, parts[i].array, parts[i].part, parts[i].from, parts[i].stride);
    }
}

/* --- Chunk after chunk --- */

static void begin(void *arg, const am_linear_place *at)
{
    const backward_job *job = arg;
    am_linear_read_state(at, &job->back->d_state, at->b->states[am_linear_chunks(at) % 2]);
}

/* The gradients of a chunk, and where those of its states are: behind it, and before it. */
static am_linear_gradients gradients_at(const am_linear_place *at)
{
    am_linear_gradients g = gradients_of(at->b);
    g.d_next = at->b->states[(at->index + 1) % 2], g.d_state = at->b->states[at->index % 2];
    return g;
}

static void set_states(const backward_job *job, const am_linear_place *at, am_linear_chunk *chunk)
{
    chunk->state = am_linear_kept_state(at, job->back->kept, at->index);
    chunk->next = am_linear_kept_state(at, job->back->kept, at->index + 1);
}

static am_status take(void *arg, const am_linear_place *at, am_linear_chunk *chunk)
{
    const backward_job *job = arg;
    const am_linear_gradients g = gradients_at(at);
    set_states(job, at, chunk);
    am_status status = take_chunk(job, at, chunk, &g, at->base->arithmetic->backward);
    if (status == AM_OK) store(job, at, chunk->tokens);
    return status;
}

static void end(void *arg, const am_linear_place *at)
{
    const backward_job *job = arg;
    if (job->back->state.data)
        am_linear_write(at, &job->back->state, AM_LINEAR_STATE, at->b->states[0],
                        at->base->shape.value_stride);
}

/* --- States first --- */

static am_status take_state(void *arg, const am_linear_place *at, am_linear_chunk *chunk)
{
    const backward_job *job = arg;
    const am_linear_gradients g = gradients_at(at);
    am_linear_keep(at, job->d_states, at->index + 1, g.d_next);
    am_status status = take_chunk(job, at, chunk, &g, at->base->arithmetic->backward_state);
    am_linear_write(at, &job->d_u, AM_LINEAR_VALUES, at->b->back.d_u, at->base->shape.value_stride);
    return status;
}

/* All other gradients of a chunk. */
static am_status chunk_task(void *arg, ptrdiff_t index, am_team *team)
{
    (void)team;
    const backward_job *job = arg;
    const am_linear_base *base = &job->base;
    const ptrdiff_t heads = base->linear->heads, slot = index / heads,
                    sequence = am_linear_sequence_of(base, slot);
    am_linear_place at = am_linear_place_of(base, sequence * heads + index % heads);
    at.index = slot - am_linear_offset(base, sequence);
    if (at.index == am_linear_chunks(&at)) return AM_OK; /* the state behind the last chunk */
    at.b = am_workspace(&job->workspaces), at.pairs = at.b->pairs;
    am_linear_chunk chunk = am_linear_load(&at);
    base->arithmetic->find_pairs(&chunk, at.pairs, at.b->scratch);
    am_linear_load_values(&at, &chunk);
    set_states(job, &at, &chunk);
    am_linear_gradients g = gradients_of(at.b);
    g.d_next = am_linear_kept_state(&at, job->d_states, at.index + 1);
    g.d_state = at.b->states[0];
    g.known = true;
    am_linear_read(&at, &job->d_u, AM_LINEAR_VALUES, at.b->back.d_u, base->shape.value_stride);
    am_status status = take_chunk(job, &at, &chunk, &g, base->arithmetic->backward);
    if (status == AM_OK) store(job, &at, chunk.tokens);
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
    const am_array *from, *to;
    ptrdiff_t tokens; /* of a batch row */
} sum_job;

/* Some numbers of the row that begins at an address. */
static am_array piece_of(const am_array *a, const char *row, ptrdiff_t begin, ptrdiff_t count)
{
    return am_one_row(row + begin * a->stride.channel, a->type, a->stride.channel, count);
}

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
        for (ptrdiff_t begin = 0; begin < linear->key_dim; begin += PIECE) {
            const ptrdiff_t count = am_min(linear->key_dim - begin, PIECE);
            for (ptrdiff_t i = 0; i < shared; i++) {
                const am_array from =
                    piece_of(job->from, am_token(job->from, batch, h * shared + i, token), begin, count);
                am_gather(kernels, AM_FLOAT64, i ? piece : sums, count, &from);
                for (ptrdiff_t r = 0; i && r < count; r++) sums[r] += piece[r];
            }
            const am_array to = piece_of(job->to, am_token(job->to, batch, h, token), begin, count);
            am_scatter(kernels, &to, AM_FLOAT64, sums, count);
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
            const am_array from = piece_of(job->from, am_token(job->from, b, head, t), 0, 1);
            am_gather(base->all_kernels, AM_FLOAT64, &number, 1, &from);
            sum += number;
        }
    }
    const am_array to = piece_of(job->to, am_token(job->to, 0, head, 0), 0, 1);
    am_scatter(base->all_kernels, &to, AM_FLOAT64, &sum, 1);
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
    const sum_job sums[] = {{.base = &job.base, .from = &job.query, .to = &back->query, .tokens = tokens},
                            {.base = &job.base, .from = &job.key, .to = &back->key, .tokens = tokens},
                            {.base = &job.base, .from = &job.decay, .to = &back->decay, .tokens = tokens}};
    for (int i = 0; i < 2 && job.shared && status == AM_OK; i++)
        status = am_parallel(context, batch_of(linear) * tokens, 16, sum_heads, (void *)&sums[i]);
    if (job.by_head && status == AM_OK)
        status = am_parallel(context, linear->heads, 1, sum_tokens, (void *)&sums[2]);
    am_free_aligned(memory, bytes);
    am_linear_end(&job.base);
    return status;
}
