/* linear.c – linear attention and short convolutions, called by XLA. The bindings of Python check all that is
 * known when a function is traced.
 *
 * `words` (attnmask/jax/_linear.py) are VERSION, flags, the bits of the double scale, and the size of chunks.
 *
 * Attention's arguments are query, key and value; decay, beta, starts of sequences and the initial state, of
 * which flags say what there is; and for gradients the states that were kept, dout, and dstate if there is.
 * Results are out, the state, and the states to be kept; or the gradients of all that was given. Convolutions
 * take x and weight; bias, starts and the initial state; dout and dstate. Of a step the last arguments are
 * the state, which the second result is the memory of, and indices.
 *
 * Tokens of a step are [B, 1, …], and channels of convolutions [B, T, C, 1], so that the first result has
 * four axes. */
#include <math.h>
#include <string.h>

#include "bind/xla/xla.h"
#include "core/linear/linear.h"
#include "core/linear/short_convolution.h"
#include "core/runtime/sizes.h"

enum { VERSION = 1 };
enum { DECAY = 1, BETA = 2, STATE = 4, STARTS = 8, NORMALIZE = 16, KEEP = 32, GRAD_STATE = 64 }; /* flags */
enum { BIAS = 128, SILU = 256, INDICES = 512 };

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
    c->apart = has(p, STARTS | INDICES) && c->call == AM_XLA_ALL_CALLS && c->calls > 1;
    return !c->apart;
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
    const bool shared = by_row && v->shape[0] == 1 && c->call == AM_XLA_ALL_CALLS && c->calls > 1;
    bool fits = v->axes == axes;
    for (int i = 0; fits && i < axes; i++)
        fits = shape[i] < 0 || v->shape[i] == shape[i] || (i == 0 && shared);
    return fits ? true : am_xla_fail(c, "%s has a shape that does not fit", name);
}

static bool check_type(problem *p, const char *name, am_dtype type, am_dtype one, am_dtype other)
{
    if (type == one || type == other) return true;
    return am_xla_fail(p->c, "%s has a type that does not fit", name);
}

static am_linear_array array_of(const am_view *v)
{
    am_linear_array to = {.data = v->data, .type = v->type};
    if (v->axes == 1) {
        to.stride[2] = v->stride[0];
        return to;
    }
    to.stride[0] = am_shared_stride(v, 0);
    for (int i = 1; i < v->axes; i++) to.stride[i] = v->stride[i];
    return to;
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

/* The slots of rows, each of which is taken once. */
static bool read_slots(problem *p, ptrdiff_t slots)
{
    am_xla_call *c = p->c;
    am_operand indices = {.kind = AM_ARRAY};
    if (!has(p, INDICES))
        return slots == p->batch || am_xla_fail(c, "state must have %td slots, got %td", p->batch, slots);
    if (!look(p, false, "state_indices", 1, &p->batch, &indices.view)) return false;
    const ptrdiff_t *found = am_read_integers(&c->request, &indices, p->batch, 0);
    bool *taken = found ? am_keep(&c->request, slots, sizeof *taken) : NULL;
    if (!taken) return false;
    for (ptrdiff_t i = 0; i < p->batch; i++) {
        if (found[i] < -1 || found[i] >= slots)
            return am_xla_fail(c, "state_indices must be from -1 to %td, got %td at index %td", slots - 1,
                               found[i], i);
        if (found[i] < 0) continue;
        if (taken[found[i]])
            return am_xla_fail(c, "state_indices must name each slot once, got %td again at index %td",
                               found[i], i);
        taken[found[i]] = true;
    }
    p->slots = found;
    return true;
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
    am_view query, value, decay, beta, state;
} attention;

static am_dtype wide_type(const am_view *v) { return v->type == AM_FLOAT64 ? AM_FLOAT64 : AM_FLOAT32; }

static bool read_tokens(attention *a)
{
    problem *p = &a->common;
    am_linear *linear = &a->linear;
    am_view key, *q = &a->query, *v = &a->value;
    ptrdiff_t shape[4] = {p->batch, -1, -1, -1};
    if (!look(p, false, "query", 4, shape, q)) return false;
    memcpy(shape + 1, q->shape + 1, sizeof shape - sizeof *shape);
    if (!look(p, false, "key", 4, shape, &key)) return false;
    shape[2] = shape[3] = -1;
    if (!look(p, false, "value", 4, shape, v)) return false;
    const ptrdiff_t key_heads = q->shape[2], heads = v->shape[2];
    if (!am_is_floating(q->type) || key.type != q->type || v->type != q->type)
        return am_xla_fail(p->c, "query, key and value must have one floating-point type");
    if (key_heads == 0 ? heads != 0 : heads % key_heads != 0)
        return am_xla_fail(p->c, "value must have a multiple of the heads of key");
    *linear = (am_linear){
        .heads = heads,
        .key_heads = key_heads,
        .rows = q->shape[3],
        .channels = v->shape[3],
        .tokens = q->shape[1],
        .sequences = p->batch,
        .query = array_of(q),
        .key = array_of(&key),
        .value = array_of(v),
        .normalize = has(p, NORMALIZE),
        .scale = p->scale,
        .chunk = p->chunk,
    };
    return true;
}

/* decay and beta. */
static bool read_gates(attention *a)
{
    problem *p = &a->common;
    am_linear *linear = &a->linear;
    const ptrdiff_t shape[4] = {p->batch, linear->tokens, linear->heads, linear->rows};
    if (has(p, DECAY)) {
        const int64_t at = p->next_argument, arguments = p->c->frame->arguments.count;
        const int64_t axes = at < arguments ? am_xla_argument(p->c, at)->rank - p->c->vmap_axes : 0;
        const ptrdiff_t by_head[] = {-1};
        if (axes == 1 ? !look(p, false, "decay", 1, by_head, &a->decay)
                      : !look(p, false, "decay", axes == 4 ? 4 : 3, shape, &a->decay))
            return false;
        if (axes == 1 && a->decay.shape[0] != linear->heads)
            return am_xla_fail(p->c, "decay has a shape that does not fit");
        if (!check_type(p, "decay", a->decay.type, a->query.type, AM_FLOAT32)) return false;
        linear->decay = array_of(&a->decay), linear->by_channel = axes == 4;
    }
    if (!has(p, BETA)) return true;
    if (!look(p, false, "beta", 3, shape, &a->beta)) return false;
    linear->beta = array_of(&a->beta);
    return check_type(p, "beta", a->beta.type, a->query.type, AM_FLOAT32);
}

static bool look_at_state(attention *a, bool result, const char *name, ptrdiff_t count, am_view *v)
{
    const ptrdiff_t shape[4] = {count, a->linear.heads, a->linear.rows, a->linear.channels};
    const am_dtype wide = wide_type(&a->query);
    return look(&a->common, result, name, 4, shape, v) && check_type(&a->common, name, v->type, wide, wide);
}

static bool read_attention(attention *a)
{
    problem *p = &a->common;
    if (!begin(p) || !read_tokens(a) || !read_gates(a) || !read_starts(p, a->linear.tokens)) return false;
    a->linear.starts = p->starts, a->linear.sequences = p->sequences;
    if (!has(p, STATE)) return true;
    if (!look_at_state(a, false, "initial_state", p->sequences, &a->state)) return false;
    a->linear.state = array_of(&a->state);
    return true;
}

/* The states that gradients need: [B, at least so many, numbers]. */
static bool look_at_kept(attention *a, bool result, void **kept)
{
    am_view v;
    ptrdiff_t states, numbers, shape[3] = {a->common.batch, -1, -1};
    if (!am_linear_kept(&a->linear, &states, &numbers))
        return am_refuse_status(&a->common.c->request, AM_NO_MEMORY);
    if (!look(&a->common, result, "kept", 3, shape, &v)) return false;
    *kept = v.data;
    return v.type == wide_type(&a->query) && v.shape[0] == a->common.batch && v.shape[2] == numbers &&
                   am_product(v.shape[0], v.shape[1], 1) >= states
               ? true
               : am_xla_fail(a->common.c, "kept does not fit");
}

static bool has_numbers(const am_view *v)
{
    return v->data && v->shape[0] && v->shape[1] && v->shape[2] && v->shape[3];
}

bool am_xla_linear(am_xla_call *c)
{
    attention a = {.common.c = c};
    am_view out, state = {0};
    am_linear_results results = {0};
    if (!read_attention(&a)) return false;
    const ptrdiff_t shape[4] = {a.common.batch, a.linear.tokens, a.linear.heads, a.linear.channels};
    if (!look(&a.common, true, "out", 4, shape, &out) ||
        !check_type(&a.common, "out", out.type, a.query.type, a.query.type) ||
        !look_at_state(&a, true, "state", a.common.sequences, &state))
        return false;
    if (has(&a.common, KEEP) && !look_at_kept(&a, true, &results.kept)) return false;
    results.out = array_of(&out), results.state = array_of(&state);
    if (!has_numbers(&out) && !has_numbers(&state)) return true;
    return am_refuse_status(&c->request, am_linear_forward_all(&c->context, &a.linear, &results));
}

/* The gradient of an argument, of its type and shape. */
static bool look_at_gradient(problem *p, const char *name, const am_view *of, am_linear_array *to)
{
    am_view v;
    ptrdiff_t shape[4], by_head[] = {-1};
    if (!of->data) return true;
    memcpy(shape, of->shape, sizeof shape);
    if (of->axes > 1 && shape[0] == 1) shape[0] = p->batch; /* shared by all calls */
    if (!look(p, true, name, of->axes, of->axes == 1 ? by_head : shape, &v)) return false;
    *to = array_of(&v);
    return v.axes == 1 && v.shape[0] != of->shape[0]
               ? am_xla_fail(p->c, "%s has a shape that does not fit", name)
               : check_type(p, name, v.type, of->type, of->type);
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
        !check_type(&a.common, "dout", d_out.type, a.query.type, a.query.type))
        return false;
    if (has(&a.common, GRAD_STATE) && !look_at_state(&a, false, "dstate", a.common.sequences, &d_state))
        return false;
    if (!look_at_gradient(&a.common, "dquery", &a.query, &back.query) ||
        !look_at_gradient(&a.common, "dkey", &a.query, &back.key) ||
        !look_at_gradient(&a.common, "dvalue", &a.value, &back.value) ||
        !look_at_gradient(&a.common, "ddecay", &a.decay, &back.decay) ||
        !look_at_gradient(&a.common, "dbeta", &a.beta, &back.beta) ||
        !look_at_gradient(&a.common, "dinitial_state", &a.state, &back.state))
        return false;
    back.kept = kept, back.d_out = array_of(&d_out), back.decay_of_heads = a.decay.axes == 1;
    if (d_state.data) back.d_state = array_of(&d_state);
    const am_view *const given[] = {&a.query, &a.value, &a.decay, &a.beta, &a.state};
    bool any = false;
    for (int i = 0; i < 5; i++) any = any || has_numbers(given[i]);
    return !any || am_refuse_status(&c->request, am_linear_backward_all(&c->context, &a.linear, &back));
}

bool am_xla_linear_step(am_xla_call *c)
{
    attention a = {.common.c = c};
    problem *p = &a.common;
    am_view out;
    if (!begin(p) || !read_tokens(&a) || !read_gates(&a)) return false;
    if (!look_at_state(&a, false, "state", -1, &a.state)) return false;
    const ptrdiff_t shape[4] = {p->batch, 1, a.linear.heads, a.linear.channels};
    if (!read_slots(p, a.state.shape[0]) || !look(p, true, "out", 4, shape, &out) ||
        !check_type(p, "out", out.type, a.query.type, a.query.type) || !look_at_written(p, &a.state))
        return false;
    if (a.linear.tokens != 1) return am_xla_fail(c, "query must have one token");
    const am_linear_step step = {array_of(&out), array_of(&a.state), p->slots};
    return !has_numbers(&out) ||
           am_refuse_status(&c->request, am_linear_step_all(&c->context, &a.linear, &step));
}

/* --- Short convolutions --- */

typedef struct {
    problem common;
    am_short_conv conv;
    ptrdiff_t tokens;
    am_view x, weight, bias, state;
} convolution;

/* Axes of tokens and of channels; -1: there is none. */
static am_conv_array rows_of(const am_view *v, int sequence, int token, int channel)
{
    if (!v->data) return (am_conv_array){0};
    return (am_conv_array){
        .data = v->data,
        .type = v->type,
        .sequence = sequence < 0 ? 0 : am_shared_stride(v, sequence),
        .token = token < 0 ? 0 : v->stride[token],
        .channel = v->stride[channel],
    };
}

static am_conv_array tokens_of(const problem *p, const am_view *v)
{
    am_conv_array rows = rows_of(v, 0, 1, 2);
    rows.packed = p->starts != NULL;
    if (rows.packed) rows.sequence = 0;
    return rows;
}

static bool look_at_weights(convolution *v)
{
    problem *p = &v->common;
    const ptrdiff_t x[] = {p->batch, -1, -1, 1}, any[] = {-1, -1};
    if (!look(p, false, "x", 4, x, &v->x) || !look(p, false, "weight", 2, any, &v->weight)) return false;
    const ptrdiff_t channels = v->x.shape[2];
    if (!am_is_floating(v->x.type)) return am_xla_fail(p->c, "x must have a floating-point type");
    if (v->weight.shape[0] != channels || v->weight.shape[1] < 1)
        return am_xla_fail(p->c, "weight has a shape that does not fit");
    if (!check_type(p, "weight", v->weight.type, v->x.type, AM_FLOAT32)) return false;
    if (has(p, BIAS)) {
        if (!look(p, false, "bias", 1, any, &v->bias)) return false;
        if (v->bias.shape[0] != channels) return am_xla_fail(p->c, "bias has a shape that does not fit");
        if (!check_type(p, "bias", v->bias.type, v->x.type, AM_FLOAT32)) return false;
    }
    v->tokens = v->x.shape[1];
    v->conv = (am_short_conv){
        .type = wide_type(&v->x),
        .channels = channels,
        .width = v->weight.shape[1],
        .silu = has(p, SILU),
        .weight = rows_of(&v->weight, -1, 1, 0),
        .bias = rows_of(&v->bias, -1, -1, 0),
    };
    return true;
}

static bool look_at_tail(convolution *v, bool result, const char *name, ptrdiff_t count, am_view *to)
{
    const ptrdiff_t shape[] = {count, v->conv.channels, v->conv.width - 1};
    return look(&v->common, result, name, 3, shape, to) &&
           check_type(&v->common, name, to->type, v->x.type, v->x.type);
}

static bool read_convolution(convolution *v)
{
    problem *p = &v->common;
    if (!begin(p) || !look_at_weights(v) || !read_starts(p, v->tokens)) return false;
    if (has(p, STATE) && !look_at_tail(v, false, "initial_state", p->sequences, &v->state)) return false;
    v->conv.sequences = p->sequences, v->conv.starts = p->starts;
    v->conv.x = tokens_of(p, &v->x), v->conv.before = rows_of(&v->state, 0, 2, 1);
    if (p->starts) return true;
    ptrdiff_t *starts = am_keep(&p->c->request, p->batch + 1, sizeof *starts);
    for (ptrdiff_t i = 0; starts && i < p->batch; i++) starts[i + 1] = starts[i] + v->tokens;
    v->conv.starts = starts;
    return starts;
}

static bool look_at_x(convolution *v, bool result, const char *name, am_view *to)
{
    const ptrdiff_t shape[] = {v->common.batch, v->tokens, v->conv.channels, 1};
    return look(&v->common, result, name, 4, shape, to) &&
           check_type(&v->common, name, to->type, v->x.type, v->x.type);
}

bool am_xla_convolution(am_xla_call *c)
{
    convolution v = {.common.c = c};
    am_view out, state;
    if (!read_convolution(&v) || !look_at_x(&v, true, "out", &out) ||
        !look_at_tail(&v, true, "state", v.common.sequences, &state))
        return false;
    v.conv.out = tokens_of(&v.common, &out), v.conv.after = rows_of(&state, 0, 2, 1);
    return (!has_numbers(&out) && !has_numbers(&state)) ||
           am_refuse_status(&c->request, am_short_conv_forward(&c->context, &v.conv));
}

bool am_xla_convolution_gradients(am_xla_call *c)
{
    convolution v = {.common.c = c};
    problem *p = &v.common;
    am_view d_out, d_state = {0}, d_x, d_weight, d_bias = {0}, d_before = {0};
    if (!read_convolution(&v) || !look_at_x(&v, false, "dout", &d_out)) return false;
    if (has(p, GRAD_STATE) && !look_at_tail(&v, false, "dstate", p->sequences, &d_state)) return false;
    const ptrdiff_t weight[] = {-1, v.conv.width}, bias[] = {-1};
    if (!look_at_x(&v, true, "dx", &d_x) || !look(p, true, "dweight", 2, weight, &d_weight)) return false;
    if (has(p, BIAS) && !look(p, true, "dbias", 1, bias, &d_bias)) return false;
    if (has(p, STATE) && !look_at_tail(&v, true, "dinitial_state", p->sequences, &d_before)) return false;
    if (d_weight.shape[0] != v.conv.channels || d_weight.type != v.weight.type ||
        (d_bias.data && (d_bias.shape[0] != v.conv.channels || d_bias.type != v.bias.type)))
        return am_xla_fail(c, "dweight or dbias does not fit");
    v.conv.out = tokens_of(p, &d_out), v.conv.after = rows_of(&d_state, 0, 2, 1);
    const am_short_conv_gradients gradients = {
        .conv = v.conv,
        .d_x = tokens_of(p, &d_x),
        .d_weight = rows_of(&d_weight, -1, 1, 0),
        .d_bias = rows_of(&d_bias, -1, -1, 0),
        .d_before = rows_of(&d_before, 0, 2, 1),
    };
    return !has_numbers(&v.weight) ||
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
    if (!read_slots(p, v.state.shape[0]) || !look_at_x(&v, true, "out", &out) ||
        !look_at_written(p, &v.state))
        return false;
    v.conv.sequences = p->batch;
    v.conv.x = rows_of(&v.x, 0, -1, 2), v.conv.out = rows_of(&out, 0, -1, 2);
    v.conv.before = rows_of(&v.state, 0, 2, 1);
    return !has_numbers(&out) ||
           am_refuse_status(&c->request, am_short_conv_step(&c->context, &v.conv, p->slots));
}
