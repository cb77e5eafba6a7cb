/* xla.c – attention as handlers of XLA's foreign function interface, for attnmask.jax: called by XLA's
 * threads, without Python.
 *
 * What this binding has in common with those of Python is the description that either fills in: am_attn with
 * its am_mask. Here it is made of buffers and of one attribute, the int64 array `words`
 * (attnmask/_jax_call.py):
 *
 *     flags, the bits of the doubles scale, cap and dropout, the operand seed, and the mask in postfix order:
 *     for each term or operator its am_node_kind, and the operands of a term in the order of its reader below
 *
 * An operand is two words: NOTHING, 0; or INTEGER and its value; or ARRAY or WIDE_ARRAY and the index of a
 * buffer among those of the mask. Wide arrays are int64 as pairs of int32 along one axis more, as JAX has no
 * int64 by default.
 *
 * Arguments are query, key and value, bias and sinks if there are, the arrays of the mask, and for gradients
 * those of the result: dout, out, lse, and dlse if there is. Results are out, and lse if it is wanted; or the
 * gradients of query, key and value, and of bias and sinks where they are wanted.
 *
 * jax.vmap puts axes in front of all buffers, of length 1 where a buffer is the same for all calls. The calls
 * become rows of one larger batch; where that cannot be said by a stride, or rows have to be told apart,
 * there is one call after the other. */
#include "bind/xla_ffi.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bind/state.h"
#include "core/additive.h"
#include "core/arithmetic.h"
#include "core/attn.h"
#include "core/blocks.h"
#include "core/convert.h"

enum { NORMALIZE = 1, BIAS = 2, SINKS = 4, GRAD_BIAS = 8, GRAD_SINKS = 16, GRAD_LSE = 32 }; /* flags */
enum { NOTHING, INTEGER, ARRAY, WIDE_ARRAY };                                               /* operands */
enum { ALL_CALLS = -1, MOST_AXES = 4 };

static am_state *state; /* of the module that has given the handlers away; it stays */

typedef struct memory {
    struct memory *next;
    max_align_t bytes[];
} memory;

typedef struct {
    const am_xla_call_frame *frame;
    int64_t vmap_axes;
    const int64_t *vmap_shape;
    ptrdiff_t calls, call; /* call: of which the buffers are read, or ALL_CALLS */
    bool apart;            /* calls cannot be rows of one */
    const int64_t *words, *words_end;
    int64_t flags;
    int64_t first_array, arrays; /* of the mask, among the arguments */
    memory *kept;
    am_xla_code code;
    char message[240];
    am_run run;
    am_mask mask;
    am_attn attn;
} xla_call;

/* A buffer as one call, or all, see it. */
typedef struct {
    char *data;
    am_dtype type;
    int axes;
    ptrdiff_t shape[MOST_AXES]; /* 1 beyond the last axis */
} view;

typedef struct {
    int64_t kind, number;
    const am_xla_buffer *buffer;
} operand;

__attribute__((format(printf, 2, 3))) static bool fail(xla_call *c, const char *format, ...)
{
    va_list rest;
    va_start(rest, format);
    vsnprintf(c->message, sizeof c->message, format, rest);
    va_end(rest);
    c->code = AM_XLA_INVALID_ARGUMENT;
    return false;
}

static bool fail_with(xla_call *c, am_status status)
{
    if (status == AM_OK) return true;
    if (status == AM_FORKED) {
        fail(c, "this process was forked in the middle of a call, which the child cannot end");
        c->code = AM_XLA_ABORTED;
    } else {
        fail(c, "attention needs more memory than there is");
        c->code = AM_XLA_RESOURCE_EXHAUSTED;
    }
    return false;
}

/* Memory that is freed with the call. */
static void *keep(xla_call *c, ptrdiff_t count, size_t size)
{
    const ptrdiff_t bytes = am_product(count, (ptrdiff_t)size, 1);
    memory *kept = bytes > PTRDIFF_MAX / 2 ? NULL : calloc(1, sizeof *kept + (size_t)bytes);
    if (!kept) {
        fail_with(c, AM_NO_MEMORY);
        return NULL;
    }
    kept->next = c->kept;
    c->kept = kept;
    return kept->bytes;
}

static void release(xla_call *c)
{
    am_mask_release(&c->mask);
    c->mask = (am_mask){0};
    while (c->kept) {
        memory *next = c->kept->next;
        free(c->kept);
        c->kept = next;
    }
}

/* --- Buffers --- */

static am_dtype type_of(am_xla_dtype type)
{
    static const am_dtype types[] = {
        [AM_XLA_S8] = AM_INT8,     [AM_XLA_S16] = AM_INT16,   [AM_XLA_S32] = AM_INT32,
        [AM_XLA_S64] = AM_INT64,   [AM_XLA_U8] = AM_UINT8,    [AM_XLA_U16] = AM_UINT16,
        [AM_XLA_U32] = AM_UINT32,  [AM_XLA_U64] = AM_UINT64,  [AM_XLA_F16] = AM_FLOAT16,
        [AM_XLA_F32] = AM_FLOAT32, [AM_XLA_F64] = AM_FLOAT64, [AM_XLA_BF16] = AM_BFLOAT16,
        [AM_XLA_PRED] = AM_BOOL,
    };
    /* What is not named is AM_BOOL, too. */
    if ((size_t)type >= sizeof types / sizeof *types) return AM_OTHER;
    return types[type] != AM_BOOL || type == AM_XLA_PRED ? types[type] : AM_OTHER;
}

/* The first axis of what is `by_row` is the batch, or shared by all rows. */
static bool look(xla_call *c, const am_xla_buffer *buffer, bool by_row, view *v)
{
    const int64_t axes = buffer->rank - c->vmap_axes;
    *v = (view){
        .data = buffer->data, .type = type_of(buffer->dtype), .axes = (int)axes, .shape = {1, 1, 1, 1}};
    if (axes < 0 || axes > MOST_AXES || v->type == AM_OTHER)
        return fail(c, "a buffer has type %d and %lld axes", (int)buffer->dtype, (long long)buffer->rank);
    ptrdiff_t copies = 1, index = 0, rest = am_max(c->call, 0), count = 1;
    for (int64_t i = c->vmap_axes - 1; i >= 0; i--) {
        const int64_t length = buffer->shape[i], all = c->vmap_shape[i];
        if (length != 1 && length != all) return fail(c, "the axes of vmap differ in length");
        index += length == 1 ? 0 : rest % all * copies;
        copies *= length, rest /= all;
    }
    for (int i = 0; i < v->axes; i++) {
        v->shape[i] = buffer->shape[c->vmap_axes + i];
        count *= v->shape[i];
    }
    if (c->call != ALL_CALLS) {
        v->data += index * count * (ptrdiff_t)am_size_of(v->type);
        return true;
    }
    if (by_row && v->axes) {
        v->shape[0] *= copies;
        c->apart = c->calls > 1 && v->shape[0] != 1 && v->shape[0] != c->mask.batch;
    } else {
        c->apart = copies != 1;
    }
    return !c->apart;
}

/* In bytes; 0 along axes of length 1 if these are shared. */
static ptrdiff_t step_of(const view *v, int axis)
{
    ptrdiff_t step = (ptrdiff_t)am_size_of(v->type);
    for (int i = axis + 1; i < MOST_AXES; i++) step *= v->shape[i];
    return step;
}
static ptrdiff_t shared_step_of(const view *v, int axis)
{
    return v->shape[axis] == 1 ? 0 : step_of(v, axis);
}

/* One batch row may stand for those of all calls. */
static bool fits_batch(const xla_call *c, const view *v)
{
    return v->shape[0] == c->mask.batch || (v->shape[0] == 1 && c->call == ALL_CALLS && c->calls > 1);
}

/* The first length is the batch's. */
static bool has_shape(xla_call *c, const view *v, const char *name, int axes, const ptrdiff_t *shape)
{
    bool fits = v->axes == axes && fits_batch(c, v);
    for (int i = 1; fits && i < axes; i++) fits = v->shape[i] == shape[i];
    return fits ? true : fail(c, "%s has a shape that does not fit", name);
}

/* Whether each axis is as long as that of the mask, or shared. */
static bool broadcasts(const xla_call *c, const view *v)
{
    const ptrdiff_t wanted[4] = {c->mask.batch, c->mask.heads, c->mask.queries, c->mask.keys};
    bool fits = v->axes == 4;
    for (int i = 0; fits && i < 4; i++) fits = v->shape[i] == 1 || v->shape[i] == wanted[i];
    return fits;
}

static am_tokens tokens(const view *v)
{
    return (am_tokens){v->data, v->type, shared_step_of(v, 0), step_of(v, 1), step_of(v, 2), step_of(v, 3)};
}

/* --- The mask --- */

static bool next_word(xla_call *c, int64_t *word)
{
    *word = 0;
    if (c->words == c->words_end) return fail(c, "words: there are too few");
    *word = *c->words++;
    return true;
}

static bool next_operand(xla_call *c, operand *o)
{
    *o = (operand){0};
    if (!next_word(c, &o->kind) || !next_word(c, &o->number)) return false;
    if (o->kind == NOTHING || o->kind == INTEGER) return true;
    if ((o->kind != ARRAY && o->kind != WIDE_ARRAY) || o->number < 0 || o->number >= c->arrays)
        return fail(c, "words: there is no such operand");
    o->buffer = c->frame->arguments.buffers[c->first_array + o->number];
    return true;
}

static ptrdiff_t saturated(int64_t a, int64_t b)
{
    int64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) sum = a < 0 ? -AM_FAR : AM_FAR;
    return sum > AM_FAR ? AM_FAR : sum < -AM_FAR ? -AM_FAR : (ptrdiff_t)sum;
}

/* All numbers of an array, of one axis unless it is `wide`, as int64; `count` is -1 until it is known. */
static const int64_t *whole_numbers(xla_call *c, const view *v, bool wide, ptrdiff_t *count)
{
    am_convert_row *convert = am_is_integer(v->type) ? am_converter(v->type, AM_INT64) : NULL;
    const bool fits =
        wide ? v->axes == 2 && v->shape[1] == 2 && v->type == AM_INT32 : v->axes == 1 && convert;
    if (!fits || (*count >= 0 && v->shape[0] != 1 && v->shape[0] != *count)) {
        fail(c, "an array of integers has a type or a shape that does not fit");
        return NULL;
    }
    *count = v->shape[0];
    int64_t *numbers = keep(c, *count, sizeof *numbers);
    if (!numbers) return NULL;
    if (wide) {
        if (*count) memcpy(numbers, v->data, (size_t)*count * sizeof *numbers);
    } else if (!convert(c->run.kernels, numbers, v->data, *count)) {
        fail(c, "integers must be below 2**63");
        return NULL;
    }
    return numbers;
}

/* `count` integers within ±AM_FAR, of an operand that may be one for all. NULL after a failure. */
static ptrdiff_t *integers(xla_call *c, const operand *o, bool by_row, ptrdiff_t count, ptrdiff_t none)
{
    const int64_t *numbers = NULL;
    ptrdiff_t given = count;
    if (o->buffer) {
        view v;
        if (!look(c, o->buffer, by_row, &v)) return NULL;
        numbers = whole_numbers(c, &v, o->kind == WIDE_ARRAY, &given);
        if (!numbers) return NULL;
    }
    const ptrdiff_t one = o->kind == NOTHING ? none : saturated(o->number, 0);
    ptrdiff_t *values = keep(c, count, sizeof *values);
    for (ptrdiff_t i = 0; values && i < count; i++)
        values[i] = numbers ? saturated(numbers[given == 1 ? 0 : i], 0) : one;
    return values;
}

static ptrdiff_t *next_integers(xla_call *c, bool by_row, ptrdiff_t count)
{
    operand o;
    return next_operand(c, &o) ? integers(c, &o, by_row, count, 0) : NULL;
}

/* low, high and an offset that is added to either */
static bool read_limits(xla_call *c, bool by_row, ptrdiff_t count, const ptrdiff_t **low,
                        const ptrdiff_t **high)
{
    operand ends[2], moved;
    if (!next_operand(c, &ends[0]) || !next_operand(c, &ends[1]) || !next_operand(c, &moved)) return false;
    const ptrdiff_t *offset = integers(c, &moved, by_row, count, 0);
    for (int i = 0; offset && i < 2; i++) {
        ptrdiff_t *values = integers(c, &ends[i], by_row, count, i == 0 ? -AM_FAR : AM_FAR);
        if (!values) return false;
        for (ptrdiff_t b = 0; ends[i].kind != NOTHING && b < count; b++)
            values[b] = saturated(values[b], offset[b]);
        *(i == 0 ? low : high) = values;
    }
    return offset;
}

static bool read_band(xla_call *c, am_node *node)
{
    return read_limits(c, true, c->mask.batch, &node->band.low, &node->band.high);
}

/* shifts of the queries and of the keys, which may not lead further than said */
static bool read_shifts(xla_call *c, const ptrdiff_t slack[2], const ptrdiff_t **q_shift,
                        const ptrdiff_t **k_shift)
{
    for (int i = 0; i < 2; i++) {
        const ptrdiff_t *shift = next_integers(c, true, c->mask.batch);
        if (!shift) return false;
        for (ptrdiff_t b = 0; slack[i] >= 0 && b < c->mask.batch; b++) {
            if (shift[b] < 0 || shift[b] > slack[i]) return fail(c, "a shift leads out of the array");
        }
        *(i == 0 ? q_shift : k_shift) = shift;
    }
    return true;
}

/* size, q_shift, k_shift */
static bool read_chunk(xla_call *c, am_node *node)
{
    static const ptrdiff_t far[2] = {AM_FAR, AM_FAR};
    operand size;
    if (!next_operand(c, &size)) return false;
    if (size.kind != INTEGER || size.number < 1) return fail(c, "a chunk has no size");
    node->chunk.size = size.number;
    return read_shifts(c, far, &node->chunk.q_shift, &node->chunk.k_shift);
}

/* begin, end */
static bool read_keys(xla_call *c, am_node *node)
{
    node->keys.begin = next_integers(c, true, c->mask.batch);
    node->keys.end = node->keys.begin ? next_integers(c, true, c->mask.batch) : NULL;
    return node->keys.end;
}

/* An array that is int32 already, as it is. */
static const int32_t *small_numbers(xla_call *c, const view *v)
{
    if (v->type == AM_INT32) return (const int32_t *)v->data;
    view flat = {.data = v->data, .type = v->type, .axes = 1, .shape = {1}};
    for (int i = 0; i < v->axes; i++) flat.shape[0] *= v->shape[i];
    ptrdiff_t count = -1;
    const int64_t *numbers = whole_numbers(c, &flat, false, &count);
    int32_t *small = numbers ? keep(c, count, sizeof *small) : NULL;
    for (ptrdiff_t i = 0; small && i < count; i++) {
        if (numbers[i] > INT32_MAX) {
            fail(c, "segment ids must be below 2**31, got %lld", (long long)numbers[i]);
            return NULL;
        }
        small[i] = (int32_t)(numbers[i] < 0 ? -1 : numbers[i]);
    }
    return small;
}

static bool read_ids(xla_call *c, ptrdiff_t length, const int32_t **ids, ptrdiff_t *batch, ptrdiff_t *head)
{
    operand o;
    view v;
    if (!next_operand(c, &o)) return false;
    if (!o.buffer) return fail(c, "segment ids must be an array");
    if (!look(c, o.buffer, true, &v)) return false;
    const ptrdiff_t rows = v.shape[0], heads = v.axes == 3 ? v.shape[1] : 1;
    if ((v.axes != 2 && v.axes != 3) || v.shape[v.axes - 1] != length ||
        (rows != 1 && rows != c->mask.batch) || (heads != 1 && heads != c->mask.heads))
        return fail(c, "segment ids have a shape that does not fit");
    *batch = rows == 1 ? 0 : heads * length;
    *head = heads == 1 ? 0 : length;
    *ids = small_numbers(c, &v);
    return *ids;
}

/* q_ids, k_ids, exclude_zero */
static bool read_equal(xla_call *c, am_node *node)
{
    operand zero;
    if (!read_ids(c, c->mask.queries, &node->equal.q_ids, &node->equal.q_batch, &node->equal.q_head) ||
        !read_ids(c, c->mask.keys, &node->equal.k_ids, &node->equal.k_batch, &node->equal.k_head) ||
        !next_operand(c, &zero))
        return false;
    node->equal.exclude_zero = zero.number != 0;
    return true;
}

static const ptrdiff_t *read_starts(xla_call *c, const char *name, ptrdiff_t length, ptrdiff_t *count)
{
    operand o;
    view v;
    if (!next_operand(c, &o) || (o.buffer && !look(c, o.buffer, false, &v))) return NULL;
    if (o.buffer && *count < 0) *count = v.shape[0] - 1;
    const ptrdiff_t entries = *count + 1;
    if (!o.buffer || v.axes < 1 || v.shape[0] != entries || entries < 1) {
        fail(c, "%s has a shape that does not fit", name);
        return NULL;
    }
    const ptrdiff_t *starts = integers(c, &o, false, entries, 0);
    if (!starts) return NULL;
    if (starts[0] != 0) fail(c, "%s must start at 0, got %td at index 0", name, starts[0]);
    for (ptrdiff_t i = 0; starts[0] == 0 && i < *count; i++) {
        if (starts[i] <= starts[i + 1]) continue;
        fail(c, "%s must never decrease, got %td after %td at index %td", name, starts[i + 1], starts[i],
             i + 1);
        return NULL;
    }
    if (starts[0] == 0 && starts[*count] != length)
        fail(c, "%s must end at %td tokens, got %td at index %td", name, length, starts[*count], *count);
    return starts[0] == 0 && starts[*count] == length ? starts : NULL;
}

/* q_starts, k_starts, low, high, offset */
static bool read_sequences(xla_call *c, am_node *node)
{
    ptrdiff_t count = -1;
    node->sequences.q_starts = read_starts(c, "cum_seqlens_q", c->mask.queries, &count);
    if (!node->sequences.q_starts) return false;
    node->sequences.k_starts = read_starts(c, "cum_seqlens_k", c->mask.keys, &count);
    if (!node->sequences.k_starts) return false;
    node->sequences.count = count;
    return read_limits(c, false, count, &node->sequences.low, &node->sequences.high);
}

static bool check_additive(xla_call *c, const view *v)
{
    if (!am_is_floating(v->type)) return true;
    const ptrdiff_t strides[4] = {step_of(v, 0), step_of(v, 1), step_of(v, 2), step_of(v, 3)};
    const am_numbers numbers = {
        .data = v->data, .type = v->type, .axes = 4, .shape = v->shape, .strides = strides};
    ptrdiff_t index;
    if (!fail_with(c, am_find_additive(&c->run, &numbers, &index))) return false;
    return index < 0
               ? true
               : fail(c,
                      "attention_mask must be zero for what is masked out and positive for the rest; if it "
                      "is to be added to logits, pass it as `bias`");
}

/* array, q_shift, k_shift */
static bool read_dense(xla_call *c, am_node *node)
{
    const am_mask *mask = &c->mask;
    const ptrdiff_t wanted[4] = {mask->batch, mask->heads, mask->queries, mask->keys};
    ptrdiff_t strides[4], slack[2] = {-1, -1}; /* an axis that is shared is never followed */
    operand o;
    view v;
    if (!next_operand(c, &o)) return false;
    if (!o.buffer) return fail(c, "attention_mask must be an array");
    if (!look(c, o.buffer, true, &v)) return false;
    for (int i = 0; i < 4; i++) {
        const bool fits =
            v.axes == 4 && (v.shape[i] == 1 || (i < 2 ? v.shape[i] == wanted[i] : v.shape[i] >= wanted[i]));
        if (!fits) return fail(c, "attention_mask has a shape that does not fit");
        strides[i] = shared_step_of(&v, i);
        if (i >= 2 && v.shape[i] != 1) slack[i - 2] = v.shape[i] - wanted[i];
    }
    if (!check_additive(c, &v)) return false;
    node->dense.data = v.data;
    node->dense.type = v.type;
    node->dense.batch = strides[0], node->dense.head = strides[1];
    node->dense.row = strides[2], node->dense.column = strides[3];
    return read_shifts(c, slack, &node->dense.q_shift, &node->dense.k_shift);
}

static bool read_all(xla_call *c, am_node *node)
{
    (void)c, (void)node;
    return true;
}

typedef bool read_term(xla_call *c, am_node *node);
static read_term *const terms[AM_TERM_KINDS] = {
    [AM_TERM_ALL] = read_all,     [AM_TERM_BAND] = read_band,   [AM_TERM_CHUNK] = read_chunk,
    [AM_TERM_KEYS] = read_keys,   [AM_TERM_EQUAL] = read_equal, [AM_TERM_SEQUENCES] = read_sequences,
    [AM_TERM_DENSE] = read_dense,
};

static bool read_mask(xla_call *c)
{
    int waiting = 0; /* operands of an operator */
    c->mask.nodes = keep(c, c->words_end - c->words, sizeof *c->mask.nodes);
    if (!c->mask.nodes) return false;
    while (c->words < c->words_end) {
        const int64_t kind = *c->words++;
        am_node *node = &c->mask.nodes[c->mask.node_count];
        const int taken = kind < AM_TERM_KINDS ? 0 : kind == AM_NOT ? 1 : 2;
        if (kind < 0 || kind > AM_XOR || waiting < taken || (taken == 0 && waiting == AM_MASK_DEPTH))
            return fail(c, "words: the mask is no expression");
        waiting += 1 - taken;
        node->kind = (am_node_kind)kind;
        if (taken == 0 && !terms[kind](c, node)) return false;
        c->mask.node_count++;
    }
    return waiting == 1 ? true : fail(c, "words: the mask is no expression");
}

/* --- Attention --- */

static const am_xla_buffer *argument(const xla_call *c, int64_t i) { return c->frame->arguments.buffers[i]; }
static const am_xla_buffer *result(const xla_call *c, int64_t i) { return c->frame->results.buffers[i]; }

/* Query, key and value. */
static bool read_tokens(xla_call *c)
{
    am_attn *attn = &c->attn;
    view q, k, v;
    if (!look(c, argument(c, 0), true, &q) || !look(c, argument(c, 1), true, &k) ||
        !look(c, argument(c, 2), true, &v))
        return false;
    const bool same = am_is_floating(q.type) && k.type == q.type && v.type == q.type && q.axes == 4 &&
                      k.axes == 4 && v.axes == 4;
    if (!same) return fail(c, "query, key and value must have four axes and one floating-point type");
    const bool fits = fits_batch(c, &q) && fits_batch(c, &k) && fits_batch(c, &v) &&
                      k.shape[3] == q.shape[3] &&
                      (k.shape[2] == 0 ? q.shape[2] == 0 : q.shape[2] % k.shape[2] == 0) &&
                      v.shape[1] == k.shape[1] && v.shape[2] == k.shape[2];
    if (!fits) return fail(c, "query, key and value have shapes that do not fit");
    c->mask.heads = attn->heads = q.shape[2], attn->kv_heads = k.shape[2], attn->batch = c->mask.batch;
    c->mask.queries = attn->queries = q.shape[1], c->mask.keys = attn->keys = k.shape[1];
    attn->depth = q.shape[3], attn->value_depth = v.shape[3];
    attn->q = tokens(&q), attn->k = tokens(&k), attn->v = tokens(&v);
    return true;
}

static bool read_bias(xla_call *c, const am_xla_buffer *buffer)
{
    am_attn *attn = &c->attn;
    view v;
    if (!look(c, buffer, true, &v)) return false;
    if (!am_is_floating(v.type) || !broadcasts(c, &v))
        return fail(c, "bias has a type or a shape that does not fit");
    attn->bias = v.data, attn->bias_type = v.type;
    attn->bias_batch = shared_step_of(&v, 0), attn->bias_head = shared_step_of(&v, 1);
    attn->bias_row = shared_step_of(&v, 2), attn->bias_column = shared_step_of(&v, 3);
    return true;
}

/* [S] or [H, S], as a row for each head, finite where they are. */
static bool read_sinks(xla_call *c, const am_xla_buffer *buffer)
{
    view v;
    if (!look(c, buffer, false, &v)) return false;
    const bool by_head = v.axes == 2;
    const ptrdiff_t heads = c->mask.heads, count = v.axes ? v.shape[v.axes - 1] : 0;
    if ((v.type != AM_FLOAT32 && v.type != AM_FLOAT64) || v.axes < 1 || v.axes > 2 ||
        (by_head && v.shape[0] != heads))
        return fail(c, "softmax_aux has a type or a shape that does not fit");
    const double greatest = c->attn.q.type == AM_FLOAT64 ? DBL_MAX : (double)FLT_MAX;
    double *sinks = keep(c, am_product(heads, count, 1), sizeof *sinks);
    for (ptrdiff_t i = 0; sinks && i < heads * count; i++) {
        const ptrdiff_t from = by_head ? i : i % count;
        const double sink =
            v.type == AM_FLOAT64 ? ((const double *)v.data)[from] : (double)((const float *)v.data)[from];
        sinks[i] = isfinite(sink) ? fmax(-greatest, fmin(sink, greatest)) : sink;
    }
    c->attn.sinks = count ? sinks : NULL;
    c->attn.sink_count = count;
    return sinks;
}

static bool next_double(xla_call *c, double *number)
{
    int64_t bits;
    const bool found = next_word(c, &bits);
    memcpy(number, &bits, sizeof bits);
    return found;
}

/* The arguments that say what attention is asked for, and the mask prepared. `own` of them are the
 * gradient's. */
static bool read_attention(xla_call *c, int own)
{
    am_attn *attn = &c->attn;
    operand seed;
    *attn = (am_attn){.mask = &c->mask};
    if (!next_word(c, &c->flags)) return false;
    if (!next_double(c, &attn->scale) || !next_double(c, &attn->cap) || !next_double(c, &attn->dropout))
        return false;
    if (isnan(attn->scale) || !(attn->cap >= 0) || !(attn->dropout >= 0 && attn->dropout < 1))
        return fail(c, "words: a number is out of its range");
    attn->normalize = (c->flags & NORMALIZE) != 0;
    if (own) own += (c->flags & GRAD_LSE) != 0;
    const bool bias = (c->flags & BIAS) != 0, sinks = (c->flags & SINKS) != 0;
    c->first_array = 3 + bias + sinks;
    c->arrays = c->frame->arguments.count - c->first_array - own;
    if (c->arrays < 0) return fail(c, "there are too few arguments");
    if (attn->dropout > 0 && c->calls > 1 &&
        c->call == ALL_CALLS) { /* each call has the places of the first row */
        c->apart = true;
        return false;
    }
    if (!read_tokens(c)) return false;
    if (bias && !read_bias(c, argument(c, 3))) return false;
    if (sinks && !read_sinks(c, argument(c, 3 + bias))) return false;
    if (!next_operand(c, &seed)) return false;
    attn->seed = (uint64_t)seed.number;
    if (seed.buffer) {
        ptrdiff_t one = 1;
        view v;
        if (!look(c, seed.buffer, false, &v)) return false;
        const int64_t *number = whole_numbers(c, &v, seed.kind == WIDE_ARRAY, &one);
        if (!number) return false;
        attn->seed = (uint64_t)*number;
    }
    return read_mask(c) && fail_with(c, am_mask_prepare(&c->run, &c->mask));
}

static bool look_at_tokens(xla_call *c, const am_xla_buffer *buffer, const char *name,
                           const ptrdiff_t shape[4], am_tokens *to)
{
    view v;
    if (!look(c, buffer, true, &v) || !has_shape(c, &v, name, 4, shape)) return false;
    *to = tokens(&v);
    return v.type == c->attn.q.type ? true : fail(c, "%s must have the type of query", name);
}

static bool look_at_rows(xla_call *c, const am_xla_buffer *buffer, const char *name, view *v)
{
    const ptrdiff_t shape[3] = {c->mask.batch, c->mask.heads, c->mask.queries};
    const am_dtype wide = c->attn.q.type == AM_FLOAT64 ? AM_FLOAT64 : AM_FLOAT32;
    if (!look(c, buffer, true, v) || !has_shape(c, v, name, 3, shape)) return false;
    return v->type == wide ? true : fail(c, "%s must be float32, or float64 for float64 inputs", name);
}

static bool forward(xla_call *c)
{
    am_attn *attn = &c->attn;
    view lse;
    if (!read_attention(c, 0)) return false;
    const ptrdiff_t shape[4] = {attn->batch, attn->queries, attn->heads, attn->value_depth};
    if (!look_at_tokens(c, result(c, 0), "out", shape, &attn->out)) return false;
    if (c->frame->results.count > 1) {
        if (!look_at_rows(c, result(c, 1), "lse", &lse)) return false;
        attn->lse = lse.data;
    }
    return fail_with(c, am_attn_forward(&c->run, attn));
}

static am_row_stats row_stats(const view *v)
{
    return (am_row_stats){v->data, step_of(v, 0), step_of(v, 1), step_of(v, 2)};
}

/* From one of each head and sink to what the sinks were given as. */
static void write_sinks(const xla_call *c, const double *d_sinks, const view *to)
{
    const ptrdiff_t count = c->attn.sink_count, heads = c->attn.heads;
    for (ptrdiff_t i = 0; i < (to->axes == 2 ? heads * count : count); i++) {
        double sum = to->axes == 2 ? d_sinks[i] : 0;
        for (ptrdiff_t h = 0; to->axes == 1 && h < heads; h++) sum += d_sinks[h * count + i];
        if (to->type == AM_FLOAT64)
            ((double *)to->data)[i] = sum;
        else
            ((float *)to->data)[i] = (float)sum;
    }
}

static bool backward(xla_call *c)
{
    const am_attn *attn = &c->attn;
    view lse, d_lse, d_bias, d_sinks;
    int64_t next_result = 3;
    if (!read_attention(c, 3)) return false;
    const bool want_bias = (c->flags & GRAD_BIAS) && attn->bias,
               want_sinks = (c->flags & GRAD_SINKS) && (c->flags & SINKS);
    if (c->frame->results.count != 3 + want_bias + want_sinks) return fail(c, "there are too few results");
    const int64_t own = c->first_array + c->arrays;
    const ptrdiff_t out[4] = {attn->batch, attn->queries, attn->heads, attn->value_depth},
                    q[4] = {attn->batch, attn->queries, attn->heads, attn->depth},
                    k[4] = {attn->batch, attn->keys, attn->kv_heads, attn->depth},
                    v[4] = {attn->batch, attn->keys, attn->kv_heads, attn->value_depth};
    am_attn_gradients problem = {.forward = *attn};
    if (!look_at_tokens(c, argument(c, own), "dout", out, &problem.d_out) ||
        !look_at_tokens(c, argument(c, own + 1), "out", out, &problem.forward.out) ||
        !look_at_rows(c, argument(c, own + 2), "lse", &lse) ||
        !look_at_tokens(c, result(c, 0), "dquery", q, &problem.d_q) ||
        !look_at_tokens(c, result(c, 1), "dkey", k, &problem.d_k) ||
        !look_at_tokens(c, result(c, 2), "dvalue", v, &problem.d_v))
        return false;
    problem.lse = row_stats(&lse);
    if (c->flags & GRAD_LSE) {
        if (!look_at_rows(c, argument(c, own + 3), "dlse", &d_lse)) return false;
        problem.d_lse = row_stats(&d_lse);
    }
    if (want_bias) {
        if (!look(c, result(c, next_result++), true, &d_bias)) return false;
        if (d_bias.type != attn->bias_type || !broadcasts(c, &d_bias)) return fail(c, "dbias does not fit");
        problem.d_bias = d_bias.data;
        memcpy(problem.bias_shape, d_bias.shape, sizeof problem.bias_shape);
    }
    if (want_sinks) {
        if (!look(c, result(c, next_result), false, &d_sinks)) return false;
        const bool by_head = d_sinks.axes == 2 && d_sinks.shape[0] == attn->heads;
        if ((d_sinks.type != AM_FLOAT32 && d_sinks.type != AM_FLOAT64) || (!by_head && d_sinks.axes != 1) ||
            d_sinks.shape[d_sinks.axes - 1] != attn->sink_count)
            return fail(c, "dsoftmax_aux has a type or a shape that does not fit");
        if (attn->sinks) {
            problem.d_sinks = keep(c, attn->heads * attn->sink_count, sizeof *problem.d_sinks);
            if (!problem.d_sinks) return false;
        }
    }
    if (!fail_with(c, am_attn_backward(&c->run, &problem))) return false;
    if (problem.d_sinks) write_sinks(c, problem.d_sinks, &d_sinks);
    return true;
}

/* --- Calls --- */

static bool find_words(xla_call *c)
{
    const am_xla_attributes *attributes = &c->frame->attributes;
    for (int64_t i = 0; i < attributes->count; i++) {
        const am_xla_name *name = attributes->names[i];
        const am_xla_array *array = attributes->values[i];
        if (attributes->types[i] != AM_XLA_ARRAY || name->length != 5 || memcmp(name->text, "words", 5) != 0)
            continue;
        if (array->dtype != AM_XLA_S64) break;
        c->words = array->data, c->words_end = c->words + array->size;
        return true;
    }
    return fail(c, "there is no attribute `words` of int64");
}

/* The pages of a long result are mostly new, and cost more than what is written to them. */
static void advise_pages(const am_xla_buffer *buffer)
{
    size_t bytes = am_size_of(type_of(buffer->dtype));
    for (int64_t i = 0; i < buffer->rank; i++) bytes *= (size_t)buffer->shape[i];
    if (bytes >= AM_BLOCK_BYTES) am_block_advise(buffer->data, bytes);
}

/* The axes of vmap, from the first result, which has four axes without them. */
static bool find_calls(xla_call *c)
{
    const am_xla_call_frame *frame = c->frame;
    if (frame->arguments.count < 3 || frame->results.count < 1 || result(c, 0)->rank < 4)
        return fail(c, "there are too few arguments or results");
    c->vmap_axes = result(c, 0)->rank - 4;
    c->vmap_shape = result(c, 0)->shape;
    c->calls = 1;
    for (int64_t i = 0; i < c->vmap_axes; i++) c->calls *= c->vmap_shape[i];
    for (int64_t i = 0; i < frame->results.count; i++) advise_pages(result(c, i));
    return true;
}

typedef bool do_call(xla_call *c);

/* The buffers of one call, or of all. */
static bool do_one(xla_call *c, do_call *compute, ptrdiff_t call)
{
    const int64_t *words = c->words;
    c->call = call;
    c->apart = false;
    c->mask.batch = result(c, 0)->shape[c->vmap_axes] * (call == ALL_CALLS ? c->calls : 1);
    const bool done = compute(c);
    release(c);
    c->words = words;
    return done;
}

static bool do_all(xla_call *c, do_call *compute)
{
    if (!find_words(c) || !find_calls(c)) return false;
    if (do_one(c, compute, ALL_CALLS) || !c->apart) return c->code == 0;
    for (ptrdiff_t call = 0; call < c->calls; call++) {
        if (!do_one(c, compute, call)) return false;
    }
    return true;
}

static bool answer_metadata(const am_xla_call_frame *frame)
{
    for (const am_xla_extension *e = frame->extensions; e; e = e->next) {
        if (e->type != AM_XLA_METADATA) continue;
        am_xla_metadata *metadata = ((const am_xla_metadata_extension *)e)->metadata;
        metadata->version.major = AM_XLA_MAJOR, metadata->version.minor = AM_XLA_MINOR;
        metadata->traits = 0;
        return true;
    }
    return false;
}

static am_xla_error *handle(const am_xla_call_frame *frame, do_call *compute)
{
    if (answer_metadata(frame) || frame->stage != AM_XLA_EXECUTE) return NULL;
    const am_float_mode mode = am_float_mode_get();
    xla_call c = {.frame = frame,
                  .run = {.kernels = atomic_load(&state->kernels), .threads = am_threads(state)}};
    am_float_mode_set(am_float_mode_quiet(mode));
    const bool done = do_all(&c, compute);
    am_float_mode_set(mode);
    if (done) return NULL;
    am_xla_error_args args = {.struct_size = sizeof args, .message = c.message, .code = c.code};
    return frame->api->create_error(&args);
}

static am_xla_error *forward_handler(am_xla_call_frame *frame) { return handle(frame, forward); }
static am_xla_error *backward_handler(am_xla_call_frame *frame) { return handle(frame, backward); }

static PyObject *xla_handlers(PyObject *module, PyObject *unused)
{
    (void)unused;
    if (!state) {
        Py_INCREF(module); /* XLA keeps handlers for good */
        state = am_state_of(module);
    }
    am_xla_handler *const handlers[2] = {forward_handler, backward_handler};
    PyObject *capsules[2] = {NULL};
    for (int i = 0; i < 2; i++) {
        void *pointer;
        memcpy(&pointer, &handlers[i], sizeof pointer);
        capsules[i] = PyCapsule_New(pointer, NULL, NULL);
        if (!capsules[i]) {
            Py_XDECREF(capsules[0]);
            return NULL;
        }
    }
    return Py_BuildValue("{s:N,s:N}", "attnmask_flash_forward", capsules[0], "attnmask_flash_backward",
                         capsules[1]);
}

PyMethodDef am_xla_methods[] = {
    {"xla_handlers", xla_handlers, METH_NOARGS,
     "xla_handlers($module, /)\n--\n\nHandlers of XLA's foreign function interface by their names, as "
     "capsules."},
    {.ml_name = NULL},
};
