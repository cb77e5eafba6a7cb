/* linear.c – linear attention and short convolutions, called by XLA. The bindings of Python check all that is
 * known when a function is traced.
 *
 * `words` (attnmask/jax/_linear.py) are VERSION, flags, the bits of the double scale, and the size of chunks.
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
enum { DECAY = 1, BETA = 2, STATE = 4, STARTS = 8, NORMALIZE = 16, KEEP = 32, GRAD_STATE = 64 }; /* flags */
enum { BIAS = 128, SILU = 256, INDICES = 512 };

const am_xla_word am_xla_linear_words[] = {
    {"version", VERSION},
    {"decay", DECAY},
    {"beta", BETA},
    {"initial_state", STATE},
    {"cu_seqlens", STARTS},
    {"kept", KEEP},
    {"bias", BIAS},
    {"normalize_qk", NORMALIZE},
    {"dstate", GRAD_STATE},
    {"silu", SILU},
    {"state_indices", INDICES},
    {NULL, 0},
};

typedef struct {
    am_xla_call *c;
    int64_t next_argument, next_result;
    double scale;
    int64_t chunk;
    ptrdiff_t batch, sequences;
    const ptrdiff_t *starts, *slots;
} problem;

static bool has(const problem *p, int64_t flag) { return (p->c->flags & flag) != 0; }

static bool begin(problem *p)
{
    am_xla_call *c = p->c;
    int64_t version, bits;
    if (!am_xla_next_word(c, &version) || !am_xla_next_word(c, &c->flags) || !am_xla_next_word(c, &bits) ||
        !am_xla_next_word(c, &p->chunk))
        return false;
    if (version != VERSION) return am_xla_fail(c, "words: another version of attnmask has made them");
    memcpy(&p->scale, &bits, sizeof bits);
    if (isnan(p->scale) || p->chunk < 16 || p->chunk > 256 || (p->chunk & (p->chunk - 1)))
        return am_xla_fail(c, "words: a number is out of its range");
    p->batch = p->sequences = c->request.mask.batch;
    /* Sequences and states by index are those of one call. */
    return !am_xla_one_by_one(c, has(p, STARTS | INDICES));
}

/* --- Buffers --- */

/* The next argument or result, which has these axes; -1 is any length. The first one, unless it is -1, may be
 * shared by all calls. */
static bool look(problem *p, bool result, const char *name, int axes, const ptrdiff_t *shape, am_view *v)
{
    am_xla_call *c = p->c;
    const am_xla_buffers *buffers = result ? &c->frame->results : &c->frame->arguments;
    int64_t *next = result ? &p->next_result : &p->next_argument;
    const bool by_row = shape[0] >= 0;
    if (*next >= buffers->count) return am_xla_fail(c, "there are too few arguments or results");
    if (!am_xla_look(c, buffers->buffers[(*next)++], by_row, v)) return false;
    if (by_row && !result && v->shape[0] == 1 && c->call == AM_XLA_ALL_CALLS && c->calls > 1)
        v->shape[0] = c->request.mask.batch, v->stride[0] = 0;
    bool fits = v->axes == axes;
    for (int i = 0; fits && i < axes; i++) fits = shape[i] < 0 || v->shape[i] == shape[i];
    return fits ? true : am_xla_fail(c, "%s has a shape that does not fit", name);
}

static bool check_type(problem *p, const char *name, am_dtype type, am_dtype wanted)
{
    if (type == wanted) return true;
    return am_xla_fail(p->c, "%s has a type that does not fit", name);
}

static bool read_starts(problem *p, ptrdiff_t tokens)
{
    am_operand starts = {.kind = AM_ARRAY};
    ptrdiff_t any[] = {-1};
    if (!has(p, STARTS)) return true;
    if (!look(p, false, "cu_seqlens", 1, any, &starts.view)) return false;
    if (p->batch != 1) return am_xla_fail(p->c, "cu_seqlens is for one batch row, got %td", p->batch);
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
    if (!look(p, false, "state_indices", 1, &p->batch, &indices)) return false;
    p->slots = am_read_slots(&p->c->request, &indices, p->batch, slots);
    return p->slots;
}

/* The next result is the memory of an argument. */
static bool look_at_written(problem *p, const am_view *state)
{
    am_view written;
    if (!look(p, true, "state", state->axes, state->shape, &written)) return false;
    return written.type == state->type &&
                   (written.data == state->data || am_product(state->shape[0], state->stride[0], 1) == 0)
               ? true
               : am_xla_fail(p->c, "state must be written to in place");
}

/* --- Attention --- */

typedef struct {
    problem common;
    am_linear linear;
    am_view inputs[AM_LINEAR_INPUTS];
} attention;

static am_dtype type_of(const attention *a) { return a->inputs[AM_QUERY].type; }

/* Looks at query, key and value, decay and beta. */
static bool look_at_inputs(attention *a)
{
    problem *p = &a->common;
    const ptrdiff_t any[] = {p->batch, -1, -1, -1}, by_head[] = {-1};
    am_view *in = a->inputs;
    if (!look(p, false, "query", 4, any, &in[AM_QUERY]) || !look(p, false, "key", 4, any, &in[AM_KEY]) ||
        !look(p, false, "value", 4, any, &in[AM_VALUE]))
        return false;
    if (has(p, DECAY)) {
        const int64_t at = p->next_argument, arguments = p->c->frame->arguments.count;
        const int64_t given = at < arguments ? am_xla_argument(p->c, at)->rank - p->c->vmap_axes : 0;
        const int axes = given == 1 || given == 4 ? (int)given : 3;
        if (!look(p, false, "decay", axes, axes == 1 ? by_head : any, &in[AM_DECAY])) return false;
    }
    return !has(p, BETA) || look(p, false, "beta", 3, any, &in[AM_BETA]);
}

static bool read_inputs(attention *a)
{
    problem *p = &a->common;
    a->linear.normalize = has(p, NORMALIZE), a->linear.scale = p->scale, a->linear.chunk = p->chunk;
    a->linear.starts = p->starts, a->linear.sequences = p->sequences;
    return am_read_linear(&p->c->request, a->inputs, false, &a->linear);
}

static bool look_at_state(attention *a, bool result, const char *name, ptrdiff_t count, am_view *v)
{
    const ptrdiff_t shape[4] = {count, a->linear.heads, a->linear.rows, a->linear.channels};
    const am_dtype wide = am_wide_type(type_of(a));
    return look(&a->common, result, name, 4, shape, v) && check_type(&a->common, name, v->type, wide);
}

static bool read_attention(attention *a)
{
    problem *p = &a->common;
    if (!begin(p) || !look_at_inputs(a) || !read_starts(p, a->inputs[AM_QUERY].shape[1])) return false;
    const ptrdiff_t states[] = {p->sequences, -1, -1, -1};
    if (has(p, STATE) && !look(p, false, "initial_state", 4, states, &a->inputs[AM_STATE])) return false;
    return read_inputs(a);
}

/* The states that gradients need: [B, at least so many, numbers]. Calls that share them cannot be
 * one larger batch: they come one after the other. */
static bool look_at_kept(attention *a, bool result, void **kept)
{
    am_xla_call *c = a->common.c;
    am_view v;
    ptrdiff_t states, numbers, shape[3] = {a->common.batch, -1, -1};
    if (!am_linear_kept(&a->linear, &states, &numbers)) return am_refuse_status(&c->request, AM_NO_MEMORY);
    if (!look(&a->common, result, "kept", 3, shape, &v)) return false;
    if (am_xla_one_by_one(c, v.stride[0] == 0)) return false;
    *kept = v.data;
    return v.type == am_wide_type(type_of(a)) && v.shape[0] == a->common.batch && v.shape[2] == numbers &&
                   am_product(v.shape[0], v.shape[1], 1) >= states
               ? true
               : am_xla_fail(c, "kept does not fit");
}

bool am_xla_linear(am_xla_call *c)
{
    attention a = {.common.c = c};
    am_view out, state = {0};
    am_linear_results results = {0};
    if (!read_attention(&a)) return false;
    const ptrdiff_t shape[4] = {a.common.batch, a.linear.tokens, a.linear.heads, a.linear.channels};
    if (!look(&a.common, true, "out", 4, shape, &out) ||
        !check_type(&a.common, "out", out.type, type_of(&a)) ||
        !look_at_state(&a, true, "state", a.common.sequences, &state))
        return false;
    if (has(&a.common, KEEP) && !look_at_kept(&a, true, &results.kept)) return false;
    results.out = am_linear_array_of(&out), results.state = am_linear_array_of(&state);
    if (!am_has_numbers(&out) && !am_has_numbers(&state)) return true;
    return am_refuse_status(&c->request, am_linear_forward_all(&c->context, &a.linear, &results));
}

/* The gradient of an argument, of its type and shape. */
static bool look_at_gradient(problem *p, const char *name, const am_view *of, am_view *to)
{
    ptrdiff_t shape[4], by_head[] = {-1};
    if (!of->data) return true;
    memcpy(shape, of->shape, sizeof shape);
    if (!look(p, true, name, of->axes, of->axes == 1 ? by_head : shape, to)) return false;
    return to->axes == 1 && to->shape[0] != of->shape[0]
               ? am_xla_fail(p->c, "%s has a shape that does not fit", name)
               : check_type(p, name, to->type, of->type);
}

bool am_xla_linear_gradients(am_xla_call *c)
{
    attention a = {.common.c = c};
    am_view d_out, d_state = {0};
    am_linear_back back = {0};
    void *kept;
    if (!read_attention(&a)) return false;
    const ptrdiff_t shape[4] = {a.common.batch, a.linear.tokens, a.linear.heads, a.linear.channels};
    if (!look_at_kept(&a, false, &kept) || !look(&a.common, false, "dout", 4, shape, &d_out) ||
        !check_type(&a.common, "dout", d_out.type, type_of(&a)))
        return false;
    if (has(&a.common, GRAD_STATE) && !look_at_state(&a, false, "dstate", a.common.sequences, &d_state))
        return false;
    am_view results[AM_LINEAR_INPUTS] = {0};
    for (int i = 0; i < AM_LINEAR_INPUTS; i++) {
        if (!look_at_gradient(&a.common, "a gradient", &a.inputs[i], &results[i])) return false;
    }
    back.kept = kept, back.d_out = am_linear_array_of(&d_out);
    if (d_state.data) back.d_state = am_linear_array_of(&d_state);
    return !am_set_linear_gradients(&back, results) ||
           am_refuse_status(&c->request, am_linear_backward_all(&c->context, &a.linear, &back));
}

bool am_xla_linear_step(am_xla_call *c)
{
    attention a = {.common.c = c};
    problem *p = &a.common;
    am_view out, state;
    if (!begin(p) || !look_at_inputs(&a) || !read_inputs(&a) ||
        !look_at_state(&a, false, "state", -1, &state))
        return false;
    const ptrdiff_t shape[4] = {p->batch, 1, a.linear.heads, a.linear.channels};
    if (!read_slots(p, state.shape[0]) || !look(p, true, "out", 4, shape, &out) ||
        !check_type(p, "out", out.type, type_of(&a)) || !look_at_written(p, &state))
        return false;
    if (a.linear.tokens != 1) return am_xla_fail(c, "query must have one token");
    const am_linear_step step = {am_linear_array_of(&out), am_linear_array_of(&state), p->slots};
    return !am_has_numbers(&out) ||
           am_refuse_status(&c->request, am_linear_step_all(&c->context, &a.linear, &step));
}

/* --- Short convolutions --- */

typedef struct {
    problem common;
    am_short_conv conv;
    ptrdiff_t tokens;
    am_view x, weight, bias, state;
} convolution;

/* Looks at x or at what has its shape: [B, T, C, 1], without the last axis. */
static bool look_at_x(convolution *v, bool result, const char *name, const ptrdiff_t shape[4], am_view *to)
{
    if (!look(&v->common, result, name, 4, shape, to)) return false;
    to->axes = 3, to->stride[3] = 0;
    return true;
}

static bool look_at_weights(convolution *v)
{
    problem *p = &v->common;
    const ptrdiff_t x[] = {p->batch, -1, -1, 1}, any[] = {-1, -1};
    if (!look_at_x(v, false, "x", x, &v->x) || !look(p, false, "weight", 2, any, &v->weight) ||
        (has(p, BIAS) && !look(p, false, "bias", 1, any, &v->bias)))
        return false;
    v->tokens = v->x.shape[1], v->conv.silu = has(p, SILU);
    return am_read_conv(&p->c->request, &v->x, &v->weight, &v->bias, false, &v->conv);
}

static bool look_at_tail(convolution *v, bool result, const char *name, ptrdiff_t count, am_view *to)
{
    const ptrdiff_t any[] = {count, -1, -1};
    return look(&v->common, result, name, 3, any, to) &&
           am_check_tail(&v->common.c->request, to, name, &v->conv, to->shape[0], &v->x);
}

static bool read_convolution(convolution *v)
{
    problem *p = &v->common;
    if (!begin(p) || !look_at_weights(v) || !read_starts(p, v->tokens)) return false;
    if (has(p, STATE) && !look_at_tail(v, false, "initial_state", p->sequences, &v->state)) return false;
    v->conv.sequences = p->sequences, v->conv.starts = p->starts;
    v->conv.x = am_conv_tokens_of(&v->x, has(p, STARTS)),
    v->conv.before = am_conv_array_of(&v->state, 0, 2, 1);
    if (!p->starts) v->conv.starts = am_starts_of_rows(&p->c->request, p->batch, v->tokens);
    return v->conv.starts;
}

/* Looks at what has the shape and type of x. */
static bool look_at_like_x(convolution *v, bool result, const char *name, am_view *to)
{
    const ptrdiff_t shape[] = {v->common.batch, v->tokens, v->conv.channels, 1};
    return look_at_x(v, result, name, shape, to) && check_type(&v->common, name, to->type, v->x.type);
}

bool am_xla_convolution(am_xla_call *c)
{
    convolution v = {.common.c = c};
    am_view out, state;
    if (!read_convolution(&v) || !look_at_like_x(&v, true, "out", &out) ||
        !look_at_tail(&v, true, "state", v.common.sequences, &state))
        return false;
    v.conv.out = am_conv_tokens_of(&out, has(&v.common, STARTS)),
    v.conv.after = am_conv_array_of(&state, 0, 2, 1);
    return (!am_has_numbers(&out) && !am_has_numbers(&state)) ||
           am_refuse_status(&c->request, am_short_conv_forward(&c->context, &v.conv));
}

bool am_xla_convolution_gradients(am_xla_call *c)
{
    convolution v = {.common.c = c};
    problem *p = &v.common;
    am_view d_out, d_state = {0}, d_x, d_weight, d_bias = {0}, d_before = {0};
    if (!read_convolution(&v) || !look_at_like_x(&v, false, "dout", &d_out)) return false;
    if (has(p, GRAD_STATE) && !look_at_tail(&v, false, "dstate", p->sequences, &d_state)) return false;
    const ptrdiff_t weight[] = {-1, v.conv.width}, bias[] = {-1};
    if (!look_at_like_x(&v, true, "dx", &d_x) || !look(p, true, "dweight", 2, weight, &d_weight))
        return false;
    if (has(p, BIAS) && !look(p, true, "dbias", 1, bias, &d_bias)) return false;
    if (has(p, STATE) && !look_at_tail(&v, true, "dinitial_state", p->sequences, &d_before)) return false;
    if (d_weight.shape[0] != v.conv.channels || d_weight.type != v.weight.type ||
        (d_bias.data && (d_bias.shape[0] != v.conv.channels || d_bias.type != v.bias.type)))
        return am_xla_fail(c, "dweight or dbias does not fit");
    v.conv.out = am_conv_tokens_of(&d_out, has(p, STARTS)),
    v.conv.after = am_conv_array_of(&d_state, 0, 2, 1);
    const am_short_conv_gradients gradients = {
        .conv = v.conv,
        .d_x = am_conv_tokens_of(&d_x, has(p, STARTS)),
        .d_weight = am_conv_array_of(&d_weight, -1, 1, 0),
        .d_bias = am_conv_array_of(&d_bias, -1, -1, 0),
        .d_before = am_conv_array_of(&d_before, 0, 2, 1),
    };
    return !am_has_numbers(&v.weight) ||
           am_refuse_status(&c->request, am_short_conv_backward(&c->context, &gradients));
}

bool am_xla_convolution_step(am_xla_call *c)
{
    convolution v = {.common.c = c};
    problem *p = &v.common;
    am_view out;
    if (!begin(p) || !look_at_weights(&v)) return false;
    if (!look_at_tail(&v, false, "state", -1, &v.state)) return false;
    if (v.tokens != 1) return am_xla_fail(c, "x must have one token");
    if (!read_slots(p, v.state.shape[0]) || !look_at_like_x(&v, true, "out", &out) ||
        !look_at_written(p, &v.state))
        return false;
    v.conv.sequences = p->batch;
    v.conv.x = am_conv_array_of(&v.x, 0, -1, 2), v.conv.out = am_conv_array_of(&out, 0, -1, 2);
    v.conv.before = am_conv_array_of(&v.state, 0, 2, 1);
    return !am_has_numbers(&out) ||
           am_refuse_status(&c->request, am_short_conv_step(&c->context, &v.conv, p->slots));
}
