/* chunks.c – reads the chunks of a sequence. */
#include "core/linear/chunks.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/arrays/packed.h"

/* More channels are refused as AM_NO_MEMORY. Up to here no length overflows. */
static const ptrdiff_t MOST_CHANNELS = 1 << 20;

static ptrdiff_t padded_to(ptrdiff_t count, ptrdiff_t pad) { return am_ceil_div(count, pad) * pad; }
static ptrdiff_t padded(ptrdiff_t count) { return padded_to(count, AM_LINEAR_PAD); }

am_dtype am_linear_type(const am_linear *linear) { return am_wide_type(linear->query.type); }

static ptrdiff_t length_of(const am_linear *linear, ptrdiff_t sequence)
{
    return linear->starts ? linear->starts[sequence + 1] - linear->starts[sequence] : linear->tokens;
}

/* The states that are kept of a sequence and head: before each chunk, and after the last. */
static ptrdiff_t states_of(const am_linear *linear, ptrdiff_t sequence)
{
    return am_ceil_div(length_of(linear, sequence), linear->chunk) + 1;
}

bool am_linear_kept(const am_linear *linear, ptrdiff_t *states, ptrdiff_t *numbers)
{
    ptrdiff_t count = 0;
    if (linear->key_dim > MOST_CHANNELS || linear->value_dim > MOST_CHANNELS) return false;
    for (ptrdiff_t s = 0; linear->starts && s < linear->sequences; s++) count += states_of(linear, s);
    if (!linear->starts) count = am_product(linear->sequences, states_of(linear, 0), 1);
    *states = am_product(count, linear->heads, 1);
    *numbers = linear->key_dim * padded(linear->value_dim);
    return count < PTRDIFF_MAX;
}

static ptrdiff_t longest_of(const am_linear *linear)
{
    ptrdiff_t longest = 1;
    for (ptrdiff_t s = 0; s < (linear->starts ? linear->sequences : 1); s++)
        longest = am_max(longest, length_of(linear, s));
    return longest;
}

const am_linear_kernels *const *am_linear_chosen(const am_kernels *kernels, const am_linear *linear,
                                                 am_linear_way way)
{
    const am_dtype type = linear->query.type;
    const bool alike = linear->key.type == type && linear->value.type == type;
    const am_arithmetic *chosen =
        am_arithmetic_for(kernels, alike && way != AM_LINEAR_STEP ? type : am_linear_type(linear));
    return way == AM_LINEAR_BACKWARD ? &chosen->linear_backward : &chosen->linear_forward;
}

/* What both kinds of kernels need. */
static void find_scratch(am_linear_base *base)
{
    const am_linear_scratch chunks = base->arithmetic->scratch(&base->shape);
    base->scratch = base->kernels->scratch(&base->shape);
    base->scratch.pairs = chunks.pairs, base->scratch.find = chunks.find;
    base->scratch.forward = am_max(base->scratch.forward, chunks.forward);
    base->scratch.backward = am_max(base->scratch.backward, chunks.backward);
}

am_status am_linear_begin(am_linear_base *base, const am_context *context, const am_linear *linear,
                          am_linear_way way)
{
    const am_dtype type = am_linear_type(linear);
    *base = (am_linear_base){
        .linear = linear,
        .all_kernels = context->kernels,
        .kernels = *am_linear_chosen(context->kernels, linear, AM_LINEAR_STEP),
        .arithmetic = *am_linear_chosen(context->kernels, linear, way),
        .type = type,
        .size = (ptrdiff_t)am_size_of(type),
    };
    if (am_max(linear->key_dim, linear->value_dim) > MOST_CHANNELS) return AM_NO_MEMORY;
    const ptrdiff_t tokens = am_min(linear->chunk, longest_of(linear));
    base->unscaled = way == AM_LINEAR_FORWARD && (!linear->by_channel || base->arithmetic->type != type);
    const ptrdiff_t pad = base->arithmetic->type == type ? AM_LINEAR_PAD : 2 * AM_LINEAR_PAD;
    base->shape = (am_linear_shape){
        .tokens = tokens,
        .key_dim = linear->key_dim,
        .value_dim = linear->value_dim,
        .token_stride = padded_to(tokens, pad),
        .key_stride = padded_to(linear->key_dim, pad),
        .value_stride = padded(linear->value_dim),
        .decay = linear->by_channel ? AM_DECAY_BY_CHANNEL : AM_DECAY_BY_TOKEN,
        .delta = linear->beta.data,
        .normalize = base->unscaled && linear->normalize,
        .scale = base->unscaled ? linear->scale : 1,
    };
    find_scratch(base);
    base->slices = 1;
    base->kept_stride = base->shape.value_stride;
    if (!linear->starts) return AM_OK;
    base->offsets = calloc((size_t)linear->sequences + 1, sizeof *base->offsets);
    if (!base->offsets) return AM_NO_MEMORY;
    for (ptrdiff_t s = 0; s < linear->sequences; s++)
        base->offsets[s + 1] = base->offsets[s] + states_of(linear, s);
    return AM_OK;
}

void am_linear_cut_channels(am_linear_base *base, const am_context *context)
{
    enum { NARROWEST = 32 };
    const ptrdiff_t tasks = am_product(base->linear->sequences, base->linear->heads, 1);
    if (tasks == 0 || tasks >= context->threads) return;
    const ptrdiff_t most = am_max(base->linear->value_dim / NARROWEST, 1);
    const ptrdiff_t slices = am_min(am_ceil_div(context->threads, tasks), most);
    base->shape.value_dim = base->shape.value_stride = padded(am_ceil_div(base->linear->value_dim, slices));
    base->slices = am_ceil_div(base->linear->value_dim, am_max(base->shape.value_dim, 1));
    find_scratch(base);
}

void am_linear_end(am_linear_base *base) { free(base->offsets); }

am_linear_place am_linear_place_of(const am_linear_base *base, ptrdiff_t task)
{
    const am_linear *linear = base->linear;
    const ptrdiff_t slice = task % base->slices, head = task / base->slices % linear->heads;
    am_linear_place at = {.base = base, .end = linear->tokens, .head = head};
    at.key_head = head / (linear->heads / linear->key_heads);
    at.sequence = task / base->slices / linear->heads;
    at.channel = slice * base->shape.value_dim;
    at.channels = am_min(linear->value_dim - at.channel, base->shape.value_dim);
    at.batch = linear->starts ? 0 : at.sequence;
    if (linear->starts) at.begin = linear->starts[at.sequence], at.end = linear->starts[at.sequence + 1];
    return at;
}

typedef struct {
    const am_linear_base *base;
    int uses;
} buffer_layout;

static ptrdiff_t lay_out(const void *layout, char *memory, void *buffers)
{
    const am_linear_base *base = ((const buffer_layout *)layout)->base;
    const int uses = ((const buffer_layout *)layout)->uses;
    am_linear_buffers *b = buffers;
    const am_linear_shape *s = &base->shape;
    const ptrdiff_t keys = s->token_stride * s->key_stride * base->size;
    const ptrdiff_t values = s->token_stride * s->value_stride * base->size,
                    tokens = s->token_stride * base->size;
    const bool by_channel = base->linear->by_channel;
    const ptrdiff_t decays = by_channel ? keys : tokens, wide = sizeof(double);
    const ptrdiff_t state = s->key_stride * s->value_stride * base->size;
    ptrdiff_t scratch = uses & AM_LINEAR_FIND ? base->scratch.find : 0;
    if (uses & AM_LINEAR_TAKE) scratch = am_max(scratch, base->scratch.forward);
    if (uses & AM_LINEAR_BACK) scratch = am_max(scratch, base->scratch.backward);
    const struct {
        char **place;
        ptrdiff_t bytes;
        int use;
    } parts[] = {
        {&b->q, keys, AM_LINEAR_READ},
        {&b->k, keys, AM_LINEAR_READ},
        {&b->decay, decays, AM_LINEAR_READ},
        {&b->factor, decays, AM_LINEAR_READ},
        {&b->whole, by_channel ? s->key_stride * base->size : 0, AM_LINEAR_READ},
        {&b->exact, by_channel ? 0 : s->token_stride * wide, AM_LINEAR_READ},
        {&b->sums, (by_channel ? s->key_stride : AM_LINEAR_PAD) * wide, AM_LINEAR_READ},
        {&b->beta, tokens, AM_LINEAR_READ},
        {&b->q_inverse, tokens, base->linear->normalize ? AM_LINEAR_READ : 0},
        {&b->k_inverse, tokens, base->linear->normalize ? AM_LINEAR_READ : 0},
        {&b->pairs, base->scratch.pairs, AM_LINEAR_PAIRS},
        {&b->v, values, AM_LINEAR_TAKE},
        {&b->out, values, AM_LINEAR_TAKE},
        {&b->reset, decays, AM_LINEAR_TAKE},
        {&b->states[0], state, AM_LINEAR_TAKE},
        {&b->states[1], state, AM_LINEAR_TAKE},
        {&b->spare, values + state, AM_LINEAR_TAKE},
        {&b->wide, 2 * keys + values + tokens, base->arithmetic->type != base->type ? AM_LINEAR_TAKE : 0},
        {&b->scratch, scratch, AM_LINEAR_FIND | AM_LINEAR_TAKE},
        {&b->back.state, state, AM_LINEAR_BACK},
        {&b->back.d_out, values, AM_LINEAR_BACK},
        {&b->back.d_q, keys, AM_LINEAR_BACK},
        {&b->back.d_k, keys, AM_LINEAR_BACK},
        {&b->back.d_v, values, AM_LINEAR_BACK},
        {&b->back.d_decay, decays, AM_LINEAR_BACK},
        {&b->back.d_beta, tokens, AM_LINEAR_BACK},
        {&b->back.d_u, values, AM_LINEAR_BACK},
    };
    ptrdiff_t bytes = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!(uses & parts[i].use)) continue;
        *parts[i].place = memory ? memory + bytes : NULL;
        bytes += parts[i].bytes;
    }
    return bytes;
}

am_status am_linear_workspaces_make(am_workspaces *workspaces, const am_linear_base *base, ptrdiff_t count,
                                    int uses)
{
    const buffer_layout layout = {base, uses};
    return am_workspaces_make(workspaces, count, lay_out, &layout, sizeof(am_linear_buffers));
}

void am_linear_workspaces_free(am_workspaces *workspaces)
{
    for (ptrdiff_t i = 0; workspaces->memory && i < workspaces->count; i++)
        free(((am_linear_buffers *)am_workspace_at(workspaces, i))->back.token_scratch);
    am_workspaces_free(workspaces);
}

/* --- Rows of arrays --- */

static ptrdiff_t token_of(const am_linear_place *at)
{
    return at->begin + at->index * at->base->linear->chunk;
}
static ptrdiff_t tokens_of(const am_linear_place *at)
{
    return am_min(at->base->shape.tokens, at->end - token_of(at));
}

static inline am_array part_of(const am_linear_place *at, const am_array *a, am_linear_part part)
{
    const bool state = part == AM_LINEAR_STATE;
    const ptrdiff_t count = state ? at->base->shape.key_dim : tokens_of(at);
    const char *first = am_token(a, state ? at->sequence : at->batch,
                                 part == AM_LINEAR_KEYS ? at->key_head : at->head, state ? 0 : token_of(at));
    if (part == AM_LINEAR_NUMBERS) return am_one_row(first, a->type, a->stride.token, count);
    am_array rows = am_rows_from(a, first, count);
    if (state || part == AM_LINEAR_VALUES)
        rows.data += at->channel * rows.stride.channel, rows.shape.channel = at->channels;
    return rows;
}

void am_linear_read(const am_linear_place *at, const am_array *from, am_linear_part part, void *to,
                    ptrdiff_t stride)
{
    const am_array rows = part_of(at, from, part);
    am_gather(at->base->all_kernels, at->base->type, to, stride, &rows);
}

void am_linear_write(const am_linear_place *at, const am_array *to, am_linear_part part, const void *from,
                     ptrdiff_t stride)
{
    const am_array rows = part_of(at, to, part);
    am_scatter(at->base->all_kernels, &rows, at->base->type, from, stride);
}

/* Reads rows as kernels for chunks take them, a lane of the type of sums at a time: where they lie if they
 * can be read there. */
static inline am_rows read_lanes(const am_linear_base *base, const am_array *rows, ptrdiff_t stride, void *to)
{
    const ptrdiff_t width = base->size / (ptrdiff_t)am_size_of(base->arithmetic->type);
    return am_read_rows(base->all_kernels, base->arithmetic->type, width, rows, stride, to);
}

/* --- Chunks --- */

static void read_channel_decay(const am_linear_place *at)
{
    am_linear_read(at, &at->base->linear->decay, AM_LINEAR_ROWS, at->b->decay, at->base->shape.key_stride);
}

static void read_factors_by_channel(const am_linear_place *at)
{
    const am_linear_base *base = at->base;
    const am_array decay = part_of(at, &base->linear->decay, AM_LINEAR_ROWS);
    const ptrdiff_t stride = base->shape.key_stride;
    const am_rows rows = am_read_rows(base->all_kernels, base->type, 1, &decay, stride, at->b->decay);
    double *sums = (double *)at->b->sums;
    base->kernels->factors(at->b->factor, sums, rows.data, rows.stride / base->size, decay.shape.token,
                           stride);
    base->kernels->exp_of_sums(at->b->whole, sums, stride);
}

static void read_factors(const am_linear_place *at)
{
    const am_linear_base *base = at->base;
    const am_linear_buffers *b = at->b;
    const ptrdiff_t stride = base->shape.token_stride;
    const bool wide = base->type == AM_FLOAT64;
    if (base->linear->decay.data)
        am_linear_read(at, &base->linear->decay, AM_LINEAR_NUMBERS, b->decay, stride);
    else
        memset(b->decay, 0, (size_t)(stride * base->size));
    double *exact = (double *)b->exact;
    for (ptrdiff_t i = 0; i < stride; i++)
        exact[i] = wide ? ((double *)b->decay)[i] : (double)((float *)b->decay)[i];
    am_arithmetic_for(base->all_kernels, AM_FLOAT64)
        ->linear_forward->factors(exact, (double *)b->sums, exact, AM_LINEAR_PAD, stride / AM_LINEAR_PAD,
                                  AM_LINEAR_PAD);
    for (ptrdiff_t i = 0; i < stride && !wide; i++) ((float *)b->factor)[i] = (float)exact[i];
    if (wide) memcpy(b->factor, exact, (size_t)stride * sizeof *exact);
}

static void read_decay(const am_linear_place *at)
{
    if (at->base->linear->by_channel)
        read_factors_by_channel(at);
    else
        read_factors(at);
}

static const void *read_beta(const am_linear_place *at)
{
    const am_linear_base *base = at->base;
    if (!base->shape.delta) return NULL;
    am_linear_read(at, &base->linear->beta, AM_LINEAR_NUMBERS, at->b->beta, base->shape.token_stride);
    return at->b->beta;
}

/* Queries or keys as they are in memory, and there if they lie as kernels need them: side by side. */
static const void *unscaled_keys(const am_linear_place *at, const am_array *from, void *to)
{
    const am_linear_base *base = at->base;
    const ptrdiff_t stride = base->shape.key_stride;
    const am_array rows = part_of(at, from, AM_LINEAR_KEYS);
    if (rows.stride.token == stride * rows.stride.channel) return read_lanes(base, &rows, stride, to).data;
    am_gather(base->all_kernels, base->arithmetic->type, to, stride, &rows);
    return to;
}

/* Queries and keys, scaled. */
static void read_keys(const am_linear_place *at, char *const to[2], char *const inverses[2])
{
    const am_linear_base *base = at->base;
    const am_array *const from[] = {&base->linear->query, &base->linear->key};
    const ptrdiff_t stride = base->shape.key_stride;
    for (int i = 0; i < 2; i++) {
        am_linear_read(at, from[i], AM_LINEAR_KEYS, to[i], stride);
        if (i == 0 || base->linear->normalize)
            base->kernels->scale_rows(to[i], inverses[i], i ? 1 : base->linear->scale, tokens_of(at), stride);
    }
}

am_linear_chunk am_linear_load(const am_linear_place *at)
{
    const am_linear_base *base = at->base;
    const am_linear_buffers *b = at->b;
    am_linear_chunk chunk = {.shape = &base->shape, .q = b->q, .k = b->k, .factor = b->factor};
    chunk.exact = (const double *)b->exact, chunk.whole = b->whole;
    chunk.tokens = tokens_of(at);
    if (base->unscaled) {
        chunk.q = unscaled_keys(at, &base->linear->query, b->q);
        chunk.k = unscaled_keys(at, &base->linear->key, b->k);
    } else {
        read_keys(at, (char *const[]){b->q, b->k}, (char *const[]){b->q_inverse, b->k_inverse});
    }
    read_decay(at);
    chunk.beta = read_beta(at);
    return chunk;
}

am_linear_chunk am_linear_load_known(const am_linear_place *at)
{
    if (!at->base->linear->by_channel) return am_linear_load(at);
    return (am_linear_chunk){.shape = &at->base->shape, .tokens = tokens_of(at), .beta = read_beta(at)};
}

void am_linear_load_values(const am_linear_place *at, am_linear_chunk *chunk)
{
    const am_linear_base *base = at->base;
    const ptrdiff_t stride = base->shape.value_stride, size = (ptrdiff_t)am_size_of(base->arithmetic->type);
    const am_array from = part_of(at, &base->linear->value, AM_LINEAR_VALUES);
    am_rows v = {.data = at->b->v, .stride = stride * size};
    if (base->shape.delta || base->arithmetic->type != base->type) /* each row is read once */
        v = read_lanes(base, &from, stride, at->b->v);
    else
        am_gather(base->all_kernels, base->type, at->b->v, stride, &from);
    chunk->shape = &base->shape;
    chunk->out = at->b->out;
    chunk->v = v.data, chunk->v_stride = v.stride / size;
}

static void plan_part(const am_linear_place *at, const am_array *array, am_linear_part part,
                      am_prefetch_plan *plan)
{
    am_plan_rows(plan, am_prefetch_rows_of(part_of(at, array, part)));
}

void am_linear_plan_keys(const am_linear_place *at, am_prefetch_plan *plan)
{
    const am_linear *linear = at->base->linear;
    plan_part(at, &linear->query, AM_LINEAR_KEYS, plan);
    plan_part(at, &linear->key, AM_LINEAR_KEYS, plan);
    if (linear->by_channel) plan_part(at, &linear->decay, AM_LINEAR_ROWS, plan);
}

void am_linear_plan_values(const am_linear_place *at, const am_array *values, am_prefetch_plan *plan)
{
    plan_part(at, values, AM_LINEAR_VALUES, plan);
}

static void find_resets(const am_linear_place *at, am_linear_chunk *chunk)
{
    const am_linear_base *base = at->base;
    const ptrdiff_t count = chunk->tokens * (base->linear->by_channel ? chunk->shape->key_stride : 1);
    bool *reset = (bool *)at->b->reset, any = false;
    for (ptrdiff_t i = 0; i < count; i++) {
        const char *decay = at->b->decay + i * base->size;
        reset[i] = (base->type == AM_FLOAT64 ? *(double *)decay : (double)*(float *)decay) == -INFINITY;
        any |= reset[i];
    }
    chunk->reset = any ? reset : NULL;
}

void am_linear_load_tokens(const am_linear_place *at, am_linear_chunk *chunk)
{
    const am_linear_base *base = at->base;
    const am_linear_buffers *b = at->b;
    const am_linear_shape *s = &base->shape;
    char *q = b->q, *k = b->k, *inverse = b->q_inverse;
    if (b->wide) {
        q = b->wide, k = q + s->token_stride * s->key_stride * base->size;
        char *v = k + s->token_stride * s->key_stride * base->size;
        if (inverse) inverse = v + s->token_stride * s->value_stride * base->size;
        am_linear_read(at, &base->linear->value, AM_LINEAR_VALUES, v, s->value_stride);
        chunk->v = v, chunk->v_stride = s->value_stride;
    }
    if (base->unscaled || !chunk->q)
        read_keys(at, (char *const[]){q, k}, (char *const[]){inverse, b->wide ? inverse : b->k_inverse});
    if (!chunk->factor) read_decay(at);
    if (base->linear->by_channel) read_channel_decay(at);
    chunk->q = q, chunk->k = k, chunk->factor = b->factor;
    find_resets(at, chunk);
}

static char *spare_state(const am_linear_place *at)
{
    const am_linear_shape *s = &at->base->shape;
    return at->b->spare + s->token_stride * s->value_stride * at->base->size;
}

void am_linear_put_aside(const am_linear_place *at, ptrdiff_t tokens, const void *out, const void *state)
{
    const am_linear_shape *s = &at->base->shape;
    const size_t row = (size_t)(s->value_stride * at->base->size);
    if (tokens > 0) memcpy(at->b->spare, out, (size_t)tokens * row);
    memcpy(spare_state(at), state, (size_t)s->key_dim * row);
}

void am_linear_put_back(const am_linear_place *at, ptrdiff_t tokens, void *out, void *state)
{
    at->base->kernels->keep_finite(&at->base->shape, tokens, (void *const[]){out, state},
                                   (const void *const[]){at->b->spare, spare_state(at)});
}

/* --- States --- */

void am_linear_read_state(const am_linear_place *at, const am_array *states, void *to)
{
    const am_linear_shape *s = &at->base->shape;
    if (states->data)
        am_linear_read(at, states, AM_LINEAR_STATE, to, s->value_stride);
    else
        memset(to, 0, (size_t)(s->key_dim * s->value_stride * at->base->size));
}

ptrdiff_t am_linear_offset(const am_linear_base *base, ptrdiff_t sequence)
{
    return base->offsets ? base->offsets[sequence] : sequence * states_of(base->linear, 0);
}

ptrdiff_t am_linear_sequence_of(const am_linear_base *base, ptrdiff_t state)
{
    return base->offsets ? am_sequence_of(base->offsets, base->linear->sequences, state)
                         : state / states_of(base->linear, 0);
}

char *am_linear_kept_state(const am_linear_place *at, const void *kept, ptrdiff_t index)
{
    const am_linear_base *base = at->base;
    const ptrdiff_t number = (am_linear_offset(base, at->sequence) + index) * base->linear->heads + at->head;
    return (char *)kept + (number * base->shape.key_dim * base->kept_stride + at->channel) * base->size;
}

/* Copies a slice of a state: the last one may be padded to more than what is kept. */
static void copy_slice(const am_linear_place *at, char *to, ptrdiff_t to_stride, const char *from,
                       ptrdiff_t from_stride)
{
    const am_linear_base *base = at->base;
    const ptrdiff_t channels = am_min(base->shape.value_stride, base->kept_stride - at->channel);
    for (ptrdiff_t r = 0; r < base->shape.key_dim; r++)
        memcpy(to + r * to_stride * base->size, from + r * from_stride * base->size,
               (size_t)(channels * base->size));
}

void am_linear_keep(const am_linear_place *at, void *kept, ptrdiff_t index, const char *state)
{
    const am_linear_base *base = at->base;
    copy_slice(at, am_linear_kept_state(at, kept, index), base->kept_stride, state, base->shape.value_stride);
}

void am_linear_recall(const am_linear_place *at, const void *kept, ptrdiff_t index, char *state)
{
    const am_linear_base *base = at->base;
    memset(state, 0, (size_t)(base->shape.key_dim * base->shape.value_stride * base->size));
    copy_slice(at, state, base->shape.value_stride, am_linear_kept_state(at, kept, index), base->kept_stride);
}
