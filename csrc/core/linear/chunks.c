/* chunks.c – reads the chunks of a sequence. */
#include "core/linear/chunks.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/attention/base.h"
#include "core/arrays/convert.h"
#include "core/sequences/packed.h"

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
    if (linear->rows > MOST_CHANNELS || linear->channels > MOST_CHANNELS) return false;
    for (ptrdiff_t s = 0; linear->starts && s < linear->sequences; s++) count += states_of(linear, s);
    if (!linear->starts) count = am_product(linear->sequences, states_of(linear, 0), 1);
    *states = am_product(count, linear->heads, 1);
    *numbers = linear->rows * padded(linear->channels);
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
    const am_linear_scratch chunks = base->chunks->scratch(&base->shape);
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
        .chunks = *am_linear_chosen(context->kernels, linear, way),
        .type = type,
        .size = (ptrdiff_t)am_size_of(type),
    };
    if (am_max(linear->rows, linear->channels) > MOST_CHANNELS) return AM_NO_MEMORY;
    const ptrdiff_t tokens = am_min(linear->chunk, longest_of(linear));
    base->unscaled = way == AM_LINEAR_FORWARD && (!linear->by_channel || base->chunks->rows != type);
    const ptrdiff_t pad = base->chunks->rows == type ? AM_LINEAR_PAD : 2 * AM_LINEAR_PAD;
    base->shape = (am_linear_shape){
        .tokens = tokens,
        .rows = linear->rows,
        .channels = linear->channels,
        .token_stride = padded_to(tokens, pad),
        .row_stride = padded_to(linear->rows, pad),
        .channel_stride = padded(linear->channels),
        .decay = linear->by_channel ? AM_DECAY_BY_CHANNEL : AM_DECAY_BY_TOKEN,
        .delta = linear->beta.data,
        .normalize = base->unscaled && linear->normalize,
        .scale = base->unscaled ? linear->scale : 1,
    };
    find_scratch(base);
    base->slices = 1;
    base->kept_stride = base->shape.channel_stride;
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
    const ptrdiff_t most = am_max(base->linear->channels / NARROWEST, 1);
    const ptrdiff_t slices = am_min(am_ceil_div(context->threads, tasks), most);
    base->shape.channels = base->shape.channel_stride = padded(am_ceil_div(base->linear->channels, slices));
    base->slices = am_ceil_div(base->linear->channels, am_max(base->shape.channels, 1));
    find_scratch(base);
}

void am_linear_end(am_linear_base *base) { free(base->offsets); }

am_linear_place am_linear_place_of(const am_linear_base *base, ptrdiff_t task)
{
    const am_linear *linear = base->linear;
    const ptrdiff_t slice = task % base->slices, head = task / base->slices % linear->heads;
    am_linear_place at = {.end = linear->tokens, .head = head};
    at.sequence = task / base->slices / linear->heads;
    at.channel = slice * base->shape.channels;
    at.channels = am_min(linear->channels - at.channel, base->shape.channels);
    at.batch = linear->starts ? 0 : at.sequence;
    if (linear->starts) at.begin = linear->starts[at.sequence], at.end = linear->starts[at.sequence + 1];
    return at;
}

am_array am_linear_values_at(const am_linear_array *array, const am_linear_place *at, ptrdiff_t token)
{
    am_array rows = am_linear_rows_at(array, at->batch, token, at->head);
    rows.data += at->channel * array->stride[3];
    return rows;
}

/* A state, of an array of states. */
static am_array state_at(const am_linear_array *states, const am_linear_place *at)
{
    am_array rows = am_linear_rows_at(states, at->sequence, at->head, 0);
    rows.data += at->channel * states->stride[3];
    rows.stride.token = states->stride[2];
    return rows;
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
    const ptrdiff_t keys = s->token_stride * s->row_stride * base->size;
    const ptrdiff_t values = s->token_stride * s->channel_stride * base->size,
                    tokens = s->token_stride * base->size;
    const bool by_channel = base->linear->by_channel;
    const ptrdiff_t decays = by_channel ? keys : tokens, wide = sizeof(double);
    const ptrdiff_t state = s->row_stride * s->channel_stride * base->size;
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
        {&b->whole, by_channel ? s->row_stride * base->size : 0, AM_LINEAR_READ},
        {&b->exact, by_channel ? 0 : s->token_stride * wide, AM_LINEAR_READ},
        {&b->sums, (by_channel ? s->row_stride : AM_LINEAR_PAD) * wide, AM_LINEAR_READ},
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
        {&b->wide, 2 * keys + values + tokens, base->chunks->rows != base->type ? AM_LINEAR_TAKE : 0},
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

/* A number for each token: of an axis of tokens, as if it were one of channels. */
static void read_tokens(const am_linear_base *base, const am_linear_array *array, const am_linear_place *at,
                        ptrdiff_t token, ptrdiff_t count, void *to)
{
    am_array rows = am_linear_rows_at(array, at->batch, token, at->head);
    rows.stride.channel = array->stride[1];
    am_linear_read(base->all_kernels, base->type, to, base->shape.token_stride, rows, 1, count);
}

/* Whether kernels can read rows of this type where they lie, a lane of 4 bytes at a time. */
static bool is_plain(const am_linear_base *base, const am_array *rows, am_dtype type)
{
    const uintptr_t places = (uintptr_t)rows->data | (uintptr_t)rows->stride.token;
    return rows->type == type && rows->stride.channel == (ptrdiff_t)am_size_of(type) &&
           places % (uintptr_t)base->size == 0;
}

static void read_channel_decay(const am_linear_base *base, const am_linear_buffers *b,
                               const am_linear_place *at, ptrdiff_t token, ptrdiff_t count)
{
    am_linear_read(base->all_kernels, base->type, b->decay, base->shape.row_stride,
                   am_linear_rows_at(&base->linear->decay, at->batch, token, at->head), count,
                   base->shape.rows);
}

static void read_factors_by_channel(const am_linear_base *base, const am_linear_buffers *b,
                                    const am_linear_place *at, ptrdiff_t token, ptrdiff_t count)
{
    const am_array from = am_linear_rows_at(&base->linear->decay, at->batch, token, at->head);
    const ptrdiff_t stride = base->shape.row_stride;
    const bool in_place = is_plain(base, &from, base->type) && base->shape.rows == stride;
    if (!in_place) read_channel_decay(base, b, at, token, count);
    double *sums = (double *)b->sums;
    base->kernels->factors(b->factor, sums, in_place ? from.data : b->decay,
                           in_place ? from.stride.token / base->size : stride, count, stride);
    base->kernels->exp_of_sums(b->whole, sums, stride);
}

static void read_factors(const am_linear_base *base, const am_linear_buffers *b, const am_linear_place *at,
                         ptrdiff_t token, ptrdiff_t count)
{
    const ptrdiff_t stride = base->shape.token_stride;
    const bool wide = base->type == AM_FLOAT64;
    if (base->linear->decay.data)
        read_tokens(base, &base->linear->decay, at, token, count, b->decay);
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

static void read_decay(const am_linear_base *base, const am_linear_buffers *b, const am_linear_place *at,
                       ptrdiff_t token, ptrdiff_t count)
{
    if (base->linear->by_channel)
        read_factors_by_channel(base, b, at, token, count);
    else
        read_factors(base, b, at, token, count);
}

/* Queries, or keys. */
static am_array keys_at(const am_linear_base *base, bool keys, const am_linear_place *at, ptrdiff_t token)
{
    const am_linear *linear = base->linear;
    return am_linear_rows_at(keys ? &linear->key : &linear->query, at->batch, token,
                             at->head / (linear->heads / linear->key_heads));
}

/* Queries and keys as they are in memory, and there if they lie as kernels need them. */
static const void *unscaled_keys(const am_linear_base *base, bool keys, const am_linear_place *at,
                                 ptrdiff_t token, void *to)
{
    const am_linear_shape *s = &base->shape;
    const am_array from = keys_at(base, keys, at, token);
    const am_dtype type = base->chunks->rows;
    if (is_plain(base, &from, type) && s->rows == s->row_stride &&
        from.stride.token == s->row_stride * from.stride.channel)
        return from.data;
    am_linear_read(base->all_kernels, type, to, s->row_stride, from, am_min(s->tokens, at->end - token),
                   s->rows);
    return to;
}

/* Queries and keys, scaled. */
static void read_keys(const am_linear_base *base, const am_linear_place *at, ptrdiff_t token, ptrdiff_t count,
                      char *const to[2], char *const inverses[2])
{
    const am_linear *linear = base->linear;
    for (int i = 0; i < 2; i++) {
        am_linear_read(base->all_kernels, base->type, to[i], base->shape.row_stride,
                       keys_at(base, i, at, token), count, base->shape.rows);
        if (i == 0 || linear->normalize)
            base->kernels->scale_rows(to[i], inverses[i], i ? 1 : linear->scale, count,
                                      base->shape.row_stride);
    }
}

am_linear_chunk am_linear_load(const am_linear_base *base, const am_linear_buffers *b,
                               const am_linear_place *at, ptrdiff_t token)
{
    const am_linear_shape *s = &base->shape;
    am_linear_chunk chunk = {.shape = s, .q = b->q, .k = b->k, .factor = b->factor};
    chunk.exact = (const double *)b->exact, chunk.whole = b->whole;
    chunk.tokens = am_min(s->tokens, at->end - token);
    if (base->unscaled) {
        chunk.q = unscaled_keys(base, false, at, token, b->q);
        chunk.k = unscaled_keys(base, true, at, token, b->k);
    } else {
        read_keys(base, at, token, chunk.tokens, (char *const[]){b->q, b->k},
                  (char *const[]){b->q_inverse, b->k_inverse});
    }
    read_decay(base, b, at, token, chunk.tokens);
    if (s->delta) read_tokens(base, &base->linear->beta, at, token, chunk.tokens, b->beta);
    chunk.beta = s->delta ? b->beta : NULL;
    return chunk;
}

am_linear_chunk am_linear_load_known(const am_linear_base *base, const am_linear_buffers *b,
                                     const am_linear_place *at, ptrdiff_t token)
{
    const am_linear_shape *s = &base->shape;
    if (!base->linear->by_channel) return am_linear_load(base, b, at, token);
    const ptrdiff_t count = am_min(s->tokens, at->end - token);
    if (s->delta) read_tokens(base, &base->linear->beta, at, token, count, b->beta);
    return (am_linear_chunk){.shape = s, .tokens = count, .beta = s->delta ? b->beta : NULL};
}

static void read_values(const am_linear_base *base, am_dtype type, const am_linear_place *at, ptrdiff_t token,
                        ptrdiff_t count, char *to)
{
    am_linear_read(base->all_kernels, type, to, base->shape.channel_stride,
                   am_linear_values_at(&base->linear->value, at, token), count, at->channels);
}

void am_linear_load_values(const am_linear_base *base, const am_linear_buffers *b, const am_linear_place *at,
                           ptrdiff_t token, am_linear_chunk *chunk)
{
    const am_linear_shape *s = &base->shape;
    const am_dtype type = base->chunks->rows;
    const am_array from = am_linear_values_at(&base->linear->value, at, token);
    const bool read_once = s->delta || type != base->type;
    chunk->shape = s;
    chunk->out = b->out;
    chunk->v = b->v, chunk->v_stride = s->channel_stride;
    if (read_once && is_plain(base, &from, type) && at->channels == s->channel_stride)
        chunk->v = from.data, chunk->v_stride = from.stride.token / from.stride.channel;
    else
        read_values(base, type, at, token, chunk->tokens, b->v);
}

static void add_soon(am_linear_soon *soon, am_array rows, ptrdiff_t count, ptrdiff_t columns)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(rows.type);
    if (rows.stride.channel == size && count > 0)
        soon->rows[soon->count++] = (am_prefetch_rows){rows.data, rows.stride.token, columns * size, count};
}

void am_linear_keys_soon(const am_linear_base *base, const am_linear_place *at, ptrdiff_t token,
                         am_linear_soon *soon)
{
    const am_linear *linear = base->linear;
    const ptrdiff_t count = am_min(base->shape.tokens, at->end - token);
    if (linear->by_channel)
        add_soon(soon, am_linear_rows_at(&linear->decay, at->batch, token, at->head), count, linear->rows);
    for (int i = 1; i >= 0; i--) add_soon(soon, keys_at(base, i, at, token), count, linear->rows);
}

void am_linear_values_soon(const am_linear_base *base, const am_linear_array *values,
                           const am_linear_place *at, ptrdiff_t token, am_linear_soon *soon)
{
    add_soon(soon, am_linear_values_at(values, at, token), am_min(base->shape.tokens, at->end - token),
             at->channels);
}

static void find_resets(const am_linear_base *base, const am_linear_buffers *b, am_linear_chunk *chunk)
{
    const ptrdiff_t count = chunk->tokens * (base->linear->by_channel ? chunk->shape->row_stride : 1);
    bool *reset = (bool *)b->reset, any = false;
    for (ptrdiff_t i = 0; i < count; i++) {
        const double decay =
            base->type == AM_FLOAT64 ? ((double *)b->decay)[i] : (double)((float *)b->decay)[i];
        reset[i] = decay == -INFINITY;
        any |= reset[i];
    }
    chunk->reset = any ? reset : NULL;
}

void am_linear_load_tokens(const am_linear_base *base, const am_linear_buffers *b, const am_linear_place *at,
                           ptrdiff_t token, am_linear_chunk *chunk)
{
    const am_linear_shape *s = &base->shape;
    char *q = b->q, *k = b->k, *inverse = b->q_inverse;
    if (b->wide) {
        q = b->wide, k = q + s->token_stride * s->row_stride * base->size;
        char *v = k + s->token_stride * s->row_stride * base->size;
        if (inverse) inverse = v + s->token_stride * s->channel_stride * base->size;
        read_values(base, base->type, at, token, chunk->tokens, v);
        chunk->v = v, chunk->v_stride = s->channel_stride;
    }
    if (base->unscaled || !chunk->q)
        read_keys(base, at, token, chunk->tokens, (char *const[]){q, k},
                  (char *const[]){inverse, b->wide ? inverse : b->k_inverse});
    if (!chunk->factor) read_decay(base, b, at, token, chunk->tokens);
    if (base->linear->by_channel) read_channel_decay(base, b, at, token, chunk->tokens);
    chunk->q = q, chunk->k = k, chunk->factor = b->factor;
    find_resets(base, b, chunk);
}

ptrdiff_t am_linear_chunks(const am_linear_base *base, const am_linear_place *at)
{
    return am_ceil_div(at->end - at->begin, base->linear->chunk);
}

ptrdiff_t am_linear_token(const am_linear_base *base, const am_linear_place *at, ptrdiff_t index)
{
    return at->begin + index * base->linear->chunk;
}

static ptrdiff_t spare_values(const am_linear_base *base)
{
    return base->shape.token_stride * base->shape.channel_stride * base->size;
}

void am_linear_put_aside(const am_linear_base *base, const am_linear_buffers *b, ptrdiff_t tokens,
                         const void *out, const void *state)
{
    const size_t row = (size_t)(base->shape.channel_stride * base->size), rows = (size_t)base->shape.rows;
    if (tokens > 0) memcpy(b->spare, out, (size_t)tokens * row);
    memcpy(b->spare + spare_values(base), state, rows * row);
}

void am_linear_put_back(const am_linear_base *base, const am_linear_buffers *b, ptrdiff_t tokens, void *out,
                        void *state)
{
    base->kernels->keep_finite(&base->shape, tokens, (void *const[]){out, state},
                               (const void *const[]){b->spare, b->spare + spare_values(base)});
}

void am_linear_read_state(const am_linear_base *base, const am_linear_array *states,
                          const am_linear_place *at, void *to)
{
    const am_linear_shape *s = &base->shape;
    if (!states->data) {
        memset(to, 0, (size_t)(s->rows * s->channel_stride * base->size));
        return;
    }
    am_linear_read(base->all_kernels, base->type, to, s->channel_stride, state_at(states, at), s->rows,
                   at->channels);
}

void am_linear_write_state(const am_linear_base *base, const am_linear_array *states,
                           const am_linear_place *at, const void *from)
{
    const am_linear_shape *s = &base->shape;
    am_linear_write(base->all_kernels, base->type, state_at(states, at), from, s->channel_stride, s->rows,
                    at->channels);
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

char *am_linear_kept_state(const am_linear_base *base, const void *kept, const am_linear_place *at,
                           ptrdiff_t index)
{
    const ptrdiff_t number = (am_linear_offset(base, at->sequence) + index) * base->linear->heads + at->head;
    return (char *)kept + (number * base->shape.rows * base->kept_stride + at->channel) * base->size;
}

/* Copies a slice of a state: the last one may be padded to more than what is kept. */
static void copy_slice(const am_linear_base *base, const am_linear_place *at, char *to, ptrdiff_t to_stride,
                       const char *from, ptrdiff_t from_stride)
{
    const ptrdiff_t channels = am_min(base->shape.channel_stride, base->kept_stride - at->channel);
    for (ptrdiff_t r = 0; r < base->shape.rows; r++)
        memcpy(to + r * to_stride * base->size, from + r * from_stride * base->size,
               (size_t)(channels * base->size));
}

void am_linear_keep(const am_linear_base *base, char *kept, const am_linear_place *at, const char *state)
{
    copy_slice(base, at, kept, base->kept_stride, state, base->shape.channel_stride);
}

void am_linear_recall(const am_linear_base *base, const char *kept, const am_linear_place *at, char *state)
{
    memset(state, 0, (size_t)(base->shape.rows * base->shape.channel_stride * base->size));
    copy_slice(base, at, state, base->shape.channel_stride, kept, base->kept_stride);
}
