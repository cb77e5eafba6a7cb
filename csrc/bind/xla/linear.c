/* linear.c – linear attention and short convolutions, called by XLA. The bindings of Python check all that is
 * known when a function is traced.
 *
 * `words` (attnmask/jax/_faces.py) are VERSION, flags, the bits of the double scale, and the size of chunks.
 *
 * Attention takes query, key and value; decay, beta, starts of sequences and the initial state, each if its
 * flag is set; and for gradients the states that were kept, dout, and dstate if its flag is set. Results are
 * out, the state, and the states to keep; or the gradients of all that was given. Convolutions take x and
 * weight; bias, starts and the initial state; dout and dstate. The last arguments of a step are the state,
 * which the second result overwrites, and the indices.
 *
 * Tokens of a step are [B, 1, …], and channels of convolutions [B, T, C, 1], so that the first result has
 * four axes. */
#include <math.h>
#include <string.h>

#include "bind/request_linear.h"
#include "bind/xla/xla.h"
#include "core/arrays/convert.h"
#include "core/runtime/sizes.h"

enum { VERSION = 1 };
#define FLAGS(DO)                                                                                            \
    DO(DECAY, 1, "decay")                                                                                    \
    DO(BETA, 2, "beta")                                                                                      \
    DO(STATE, 4, "initial_state")                                                                            \
    DO(STARTS, 8, "cu_seqlens")                                                                              \
    DO(NORMALIZE, 16, "normalize_qk")                                                                        \
    DO(KEEP, 32, "kept")                                                                                     \
    DO(GRAD_STATE, 64, "dstate")                                                                             \
    DO(BIAS, 128, "bias")                                                                                    \
    DO(SILU, 256, "silu")                                                                                    \
    DO(INDICES, 512, "state_indices")
enum { FLAGS(AM_XLA_BIT) };
const am_xla_word am_xla_linear_words[] = {{"version", VERSION}, FLAGS(AM_XLA_WORD){NULL, 0}};

typedef struct {
    am_xla_call *c;
    double scale;
    int64_t chunk;
    ptrdiff_t batch, sequences;
    const ptrdiff_t *starts, *slots;

    am_view inputs[AM_LINEAR_INPUTS]; /* of attention */
    am_linear linear;

    am_view x, weight, bias, before; /* of a convolution; before: the last tokens before x, or the state */
    am_short_conv conv;
} problem;

static bool has(const problem *p, int64_t flag) { return (p->c->flags & flag) != 0; }

static bool begin(problem *p)
{
    am_xla_call *c = p->c;
    int64_t bits;
    if (!am_xla_read_flags(c, VERSION) || !am_xla_next_word(c, &bits) || !am_xla_next_word(c, &p->chunk))
        return false;
    memcpy(&p->scale, &bits, sizeof bits);
    if (isnan(p->scale) || p->chunk < 1 || p->chunk > AM_LINEAR_MOST_CHUNK || (p->chunk & (p->chunk - 1)))
        return am_xla_fail(c, "words: a number is out of its range");
    p->chunk = am_max(p->chunk, AM_LINEAR_LEAST_CHUNK);
    p->batch = p->sequences = c->request.mask.batch;
    /* Sequences and states by index are those of one call. */
    return !am_xla_one_by_one(c, has(p, STARTS | INDICES));
}

/* --- Buffers --- */

/* Looks at the next argument, if the flag says that there is one. */
static bool next_if(problem *p, int64_t flag, bool by_row, am_view *v)
{
    return !has(p, flag) || am_xla_next(p->c, AM_XLA_ARGUMENT, by_row, v);
}

/* Reads cu_seqlens, if it is given. `name` is then packed: one batch row of `tokens` tokens. */
static bool read_starts(problem *p, const char *name, ptrdiff_t tokens)
{
    am_operand starts = {.kind = AM_ARRAY};
    if (!has(p, STARTS)) return true;
    if (!am_xla_next(p->c, AM_XLA_ARGUMENT, false, &starts.view)) return false;
    if (p->batch != 1)
        return am_xla_fail(p->c, "%s must have batch size 1 when cu_seqlens is given, got %td", name,
                           p->batch);
    p->sequences = -1;
    p->starts = am_read_starts_of(&p->c->request, "cu_seqlens", &starts, tokens, &p->sequences);
    return p->starts;
}

/* The slots of rows. */
static bool read_slots(problem *p, ptrdiff_t slots)
{
    am_view indices;
    if (!has(p, INDICES))
        return slots == p->batch || am_xla_fail(p->c, "state must have %td slots, got %td", p->batch, slots);
    if (!am_xla_next(p->c, AM_XLA_ARGUMENT, true, &indices)) return false;
    p->slots = am_read_slots(&p->c->request, &indices, p->batch, slots);
    return p->slots;
}

/* A step takes one token of each row. */
static bool check_step(problem *p, const char *name, ptrdiff_t tokens)
{
    return (tokens == 1 && !has(p, STARTS | STATE)) || am_xla_fail(p->c, "%s must have one token", name);
}

/* --- Attention --- */

static bool look_at_inputs(problem *p)
{
    am_xla_call *c = p->c;
    am_view *in = p->inputs;
    for (int i = AM_QUERY; i <= AM_VALUE; i++) {
        if (!am_xla_next(c, AM_XLA_ARGUMENT, true, &in[i])) return false;
    }
    const int64_t at = c->next[AM_XLA_ARGUMENT];
    const bool by_head = at < c->frame->arguments.count && am_xla_argument(c, at)->rank - c->vmap_axes == 1;
    return next_if(p, DECAY, !by_head, &in[AM_DECAY]) && next_if(p, BETA, true, &in[AM_BETA]);
}

static bool read_attention(problem *p)
{
    const am_view *query = &p->inputs[AM_QUERY];
    if (!begin(p) || !look_at_inputs(p) || !read_starts(p, "query", query->shape[1]) ||
        !next_if(p, STATE, true, &p->inputs[AM_STATE]))
        return false;
    if (query->shape[0] != p->batch) return am_xla_fail(p->c, "query must have the batch size of the result");
    p->linear = (am_linear){.normalize = has(p, NORMALIZE),
                            .scale = p->scale,
                            .chunk = p->chunk,
                            .starts = p->starts,
                            .sequences = p->sequences};
    return am_read_linear(&p->c->request, p->inputs, false, &p->linear);
}

/* The type and shape of the result. */
static am_view like_out(const problem *p)
{
    const am_linear *l = &p->linear;
    return (am_view){.type = p->inputs[AM_QUERY].type,
                     .axes = 4,
                     .shape = {p->batch, l->tokens, l->heads, l->value_dim, 1}};
}

/* The type and shape of `count` states. */
static am_view like_states(const problem *p, ptrdiff_t count)
{
    const am_linear *l = &p->linear;
    return (am_view){.type = am_wide_type(p->inputs[AM_QUERY].type),
                     .axes = 4,
                     .shape = {count, l->heads, l->key_dim, l->value_dim, 1}};
}

/* The states that gradients need: [B, at least so many, numbers]. Calls that share them cannot be
 * one larger batch: they come one after the other. */
static bool look_at_kept(problem *p, am_xla_side side, void **kept)
{
    am_xla_call *c = p->c;
    am_view v;
    ptrdiff_t states, numbers;
    if (!am_linear_kept(&p->linear, &states, &numbers)) return am_refuse_status(&c->request, AM_NO_MEMORY);
    if (!am_xla_next(c, side, true, &v) || am_xla_one_by_one(c, v.stride[0] == 0)) return false;
    *kept = v.data;
    return (v.type == am_wide_type(p->inputs[AM_QUERY].type) && v.axes == 3 && v.shape[0] == p->batch &&
            v.shape[2] == numbers && am_product(v.shape[0], v.shape[1], 1) >= states) ||
           am_xla_fail(c, "kept does not fit");
}

bool am_xla_linear_forward(am_xla_call *c)
{
    problem p = {.c = c};
    am_linear_results results = {0};
    if (!read_attention(&p)) return false;
    am_view out = like_out(&p), state = like_states(&p, p.sequences);
    if (!am_xla_next_like(c, AM_XLA_RESULT, true, &out, &out) ||
        !am_xla_next_like(c, AM_XLA_RESULT, true, &state, &state) ||
        (has(&p, KEEP) && !look_at_kept(&p, AM_XLA_RESULT, &results.kept)))
        return false;
    results.out = am_linear_array_of(out), results.state = am_linear_states_of(state);
    if (!am_has_numbers(&out) && !am_has_numbers(&state)) return true;
    return am_refuse_status(&c->request, am_linear_forward_all(&c->context, &p.linear, &results));
}

bool am_xla_linear_backward(am_xla_call *c)
{
    problem p = {.c = c};
    void *kept;
    if (!read_attention(&p) || !look_at_kept(&p, AM_XLA_ARGUMENT, &kept)) return false;
    const am_view states = like_states(&p, p.sequences);
    am_view d_out = like_out(&p), d_state = {0}, results[AM_LINEAR_INPUTS] = {0};
    if (!am_xla_next_like(c, AM_XLA_ARGUMENT, true, &d_out, &d_out) ||
        (has(&p, GRAD_STATE) && !am_xla_next_like(c, AM_XLA_ARGUMENT, true, &states, &d_state)))
        return false;
    for (int i = 0; i < AM_LINEAR_INPUTS; i++) {
        const am_view *of = &p.inputs[i];
        if (of->data && !am_xla_next_like(c, AM_XLA_RESULT, of->axes != 1, of, &results[i])) return false;
    }
    am_linear_back back = {
        .kept = kept, .d_out = am_linear_array_of(d_out), .d_state = am_linear_states_of(d_state)};
    return !am_set_linear_gradients(&back, results) ||
           am_refuse_status(&c->request, am_linear_backward_all(&c->context, &p.linear, &back));
}

bool am_xla_linear_step(am_xla_call *c)
{
    problem p = {.c = c};
    am_view state;
    if (!read_attention(&p) || !check_step(&p, "query", p.linear.tokens) ||
        !am_xla_next(c, AM_XLA_ARGUMENT, false, &state))
        return false;
    const am_view states = like_states(&p, state.shape[0]);
    am_view out = like_out(&p);
    if (!am_xla_is_like(c, &state, &states) || !read_slots(&p, state.shape[0]) ||
        !am_xla_next_like(c, AM_XLA_RESULT, true, &out, &out) || !am_xla_next_written(c, &state))
        return false;
    const am_linear_step step = {am_linear_array_of(out), am_linear_states_of(state), p.slots};
    return !am_has_numbers(&out) ||
           am_refuse_status(&c->request, am_linear_step_all(&c->context, &p.linear, &step));
}

/* --- Short convolutions --- */

/* Looks at the next array, which must be like x. Buffers are [B, T, C, 1]; `v` has no last axis. */
static bool next_like_x(problem *p, am_xla_side side, am_view *v)
{
    am_view like = p->x;
    like.axes = 4;
    const bool fits = am_xla_next_like(p->c, side, true, &like, v);
    v->axes = 3;
    return fits;
}

static bool read_weights(problem *p)
{
    am_xla_call *c = p->c;
    am_view *x = &p->x;
    if (!begin(p) || !am_xla_next(c, AM_XLA_ARGUMENT, true, x) ||
        !am_xla_next(c, AM_XLA_ARGUMENT, false, &p->weight) || !next_if(p, BIAS, false, &p->bias))
        return false;
    if (x->axes != 4 || x->shape[3] != 1 || x->shape[0] != p->batch)
        return am_xla_fail(c, "x has a shape that does not fit");
    x->axes = 3;
    p->conv.silu = has(p, SILU);
    return am_read_conv(&c->request, x, &p->weight, &p->bias, false, &p->conv);
}

/* The last tokens of so many sequences; -1: of any number. */
static bool next_tail(problem *p, am_xla_side side, ptrdiff_t count, am_view *v)
{
    if (!am_xla_next(p->c, side, count >= 0, v)) return false;
    return am_check_tail(&p->c->request, v, "state", &p->conv, count < 0 ? v->shape[0] : count, &p->x);
}

static bool read_convolution(problem *p)
{
    am_short_conv *conv = &p->conv;
    if (!read_weights(p) || !read_starts(p, "x", p->x.shape[1])) return false;
    if (has(p, STATE) && !next_tail(p, AM_XLA_ARGUMENT, p->sequences, &p->before)) return false;
    conv->sequences = p->sequences, conv->starts = p->starts, conv->tokens = p->x.shape[1];
    conv->x = am_conv_tokens_of(p->x);
    conv->before = am_conv_states_of(p->before);
    return true;
}

bool am_xla_convolution_forward(am_xla_call *c)
{
    problem p = {.c = c};
    am_view out, state;
    if (!read_convolution(&p) || !next_like_x(&p, AM_XLA_RESULT, &out) ||
        !next_tail(&p, AM_XLA_RESULT, p.sequences, &state))
        return false;
    p.conv.out = am_conv_tokens_of(out);
    p.conv.after = am_conv_states_of(state);
    return (!am_has_numbers(&out) && !am_has_numbers(&state)) ||
           am_refuse_status(&c->request, am_short_conv_forward(&c->context, &p.conv));
}

bool am_xla_convolution_backward(am_xla_call *c)
{
    problem p = {.c = c};
    am_view d_out, d_state = {0}, d_x, d_weight, d_bias = {0}, d_before = {0};
    if (!read_convolution(&p) || !next_like_x(&p, AM_XLA_ARGUMENT, &d_out) ||
        (has(&p, GRAD_STATE) && !next_tail(&p, AM_XLA_ARGUMENT, p.sequences, &d_state)) ||
        !next_like_x(&p, AM_XLA_RESULT, &d_x) ||
        !am_xla_next_like(c, AM_XLA_RESULT, false, &p.weight, &d_weight) ||
        (has(&p, BIAS) && !am_xla_next_like(c, AM_XLA_RESULT, false, &p.bias, &d_bias)) ||
        (has(&p, STATE) && !next_tail(&p, AM_XLA_RESULT, p.sequences, &d_before)))
        return false;
    p.conv.out = am_conv_tokens_of(d_out);
    p.conv.after = am_conv_states_of(d_state);
    const am_short_conv_gradients gradients = {
        .conv = p.conv,
        .d_x = am_conv_tokens_of(d_x),
        .d_weight = am_conv_weights_of(d_weight),
        .d_bias = am_conv_weights_of(d_bias),
        .d_before = am_conv_states_of(d_before),
    };
    return !am_has_numbers(&p.weight) ||
           am_refuse_status(&c->request, am_short_conv_backward(&c->context, &gradients));
}

bool am_xla_convolution_step(am_xla_call *c)
{
    problem p = {.c = c};
    am_view out;
    if (!read_weights(&p) || !check_step(&p, "x", p.x.shape[1]) ||
        !next_tail(&p, AM_XLA_ARGUMENT, -1, &p.before) || !read_slots(&p, p.before.shape[0]) ||
        !next_like_x(&p, AM_XLA_RESULT, &out) || !am_xla_next_written(c, &p.before))
        return false;
    p.conv.sequences = p.batch;
    p.conv.x = am_conv_tokens_of(p.x), p.conv.out = am_conv_tokens_of(out);
    p.conv.before = am_conv_states_of(p.before);
    return !am_has_numbers(&out) ||
           am_refuse_status(&c->request, am_short_conv_step(&c->context, &p.conv, p.slots));
}
