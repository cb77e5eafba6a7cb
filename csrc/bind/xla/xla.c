/* xla.c – attention as handlers of XLA's foreign function interface, for attnmask.jax: called by XLA's
 * threads, without Python.
 *
 * What this binding has in common with those of Python is the description that either fills in: am_attn with
 * its am_mask. Here it is made of buffers and of one attribute, the int64 array `words`
 * (attnmask/jax/_call.py):
 *
 *     VERSION, flags, the bits of the doubles scale, cap and dropout; the operand seed;
 *     if PART the places of the first query and the first key in the larger problem;
 *     if RELATIVE the operands starts (if PACKED), offsets, slopes and low of am_relative;
 *     the mask in postfix order: of each term or operator its am_node_kind, and the operands of a term in the
 *     order of its reader
 *
 * An operand is two words: AM_XLA_NOTHING, 0; or AM_XLA_INTEGER and its value; or AM_XLA_NARROW or
 * AM_XLA_WIDE and the index of an array among those of the mask. Wide arrays have 64 bits, as pairs of int32
 * along one axis more, as by default JAX has no such types.
 *
 * Arguments are query, key and value; bias, sinks and relative bias if there are; the arrays of the mask; and
 * for gradients those of the result: dout, out, lse, and dlse if there is. Results are out, and lse if it is
 * wanted; or the gradients of query, key and value, and of bias, sinks and relative bias where they are
 * wanted.
 *
 * jax.vmap puts axes in front of all buffers, of length 1 where a buffer is the same for all calls. The calls
 * become rows of one larger batch; where that cannot be said by a stride, or rows have to be told apart,
 * there is one call after the other. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "bind/python/state.h"
#include "bind/xla/xla.h"
#include "core/runtime/sizes.h"
#include "core/attention/attention.h"
#include "core/runtime/memory_blocks.h"
#include "core/arrays/convert.h"

enum { VERSION = 1 }; /* of the words: programs are exported and kept */
enum { NORMALIZE = 1, BIAS = 2, SINKS = 4, GRAD_BIAS = 8, GRAD_SINKS = 16, GRAD_LSE = 32 }; /* flags */
enum { TABLE = 64, GRAD_TABLE = 128, RELATIVE = 256, PACKED = 512, PART = 1024 };           /* more of them */

static am_state *state; /* of the module that has given the handlers away; it stays */

/* One batch row may stand for those of all calls. */
static bool fits_batch(const am_xla_call *c, const am_view *v)
{
    return v->shape[0] == c->request.mask.batch ||
           (v->shape[0] == 1 && c->call == AM_XLA_ALL_CALLS && c->calls > 1);
}

/* The first length is the batch's. */
static bool has_shape(am_xla_call *c, const am_view *v, const char *name, int axes, const ptrdiff_t *shape)
{
    bool fits = v->axes == axes && fits_batch(c, v);
    for (int i = 1; fits && i < axes; i++) fits = v->shape[i] == shape[i];
    return fits ? true : am_xla_fail(c, "%s has a shape that does not fit", name);
}

/* Whether each axis is as long as that of the mask, or shared. */
static bool broadcasts(const am_xla_call *c, const am_view *v)
{
    const ptrdiff_t wanted[4] = {c->request.mask.batch, c->request.mask.heads, c->request.mask.queries,
                                 c->request.mask.keys};
    bool fits = v->axes == 4;
    for (int i = 0; fits && i < 4; i++) fits = v->shape[i] == 1 || v->shape[i] == wanted[i];
    return fits;
}

/* --- Attention --- */

/* Query, key and value. */
static bool read_tokens(am_xla_call *c)
{
    am_attn *attn = &c->attn;
    am_view q, k, v;
    if (!am_xla_look(c, am_xla_argument(c, 0), true, &q) ||
        !am_xla_look(c, am_xla_argument(c, 1), true, &k) || !am_xla_look(c, am_xla_argument(c, 2), true, &v))
        return false;
    const bool same = am_is_floating(q.type) && k.type == q.type && v.type == q.type && q.axes == 4 &&
                      k.axes == 4 && v.axes == 4;
    if (!same) return am_xla_fail(c, "query, key and value must have four axes and one floating-point type");
    const bool fits = fits_batch(c, &q) && fits_batch(c, &k) && fits_batch(c, &v) &&
                      k.shape[3] == q.shape[3] &&
                      (k.shape[2] == 0 ? q.shape[2] == 0 : q.shape[2] % k.shape[2] == 0) &&
                      v.shape[1] == k.shape[1] && v.shape[2] == k.shape[2];
    if (!fits) return am_xla_fail(c, "query, key and value have shapes that do not fit");
    c->request.mask.heads = attn->heads = q.shape[2], attn->kv_heads = k.shape[2],
    attn->batch = c->request.mask.batch;
    c->request.mask.queries = attn->queries = q.shape[1], c->request.mask.keys = attn->keys = k.shape[1];
    attn->head_dim = q.shape[3], attn->value_dim = v.shape[3];
    attn->q = am_tokens_of(&q), attn->k = am_tokens_of(&k), attn->v = am_tokens_of(&v);
    return true;
}

static bool read_bias(am_xla_call *c, const am_xla_buffer *buffer)
{
    am_attn *attn = &c->attn;
    am_view v;
    if (!am_xla_look(c, buffer, true, &v)) return false;
    if (!am_is_floating(v.type) || !broadcasts(c, &v))
        return am_xla_fail(c, "bias has a type or a shape that does not fit");
    attn->bias = v.data, attn->bias_type = v.type;
    attn->bias_batch = am_shared_stride(&v, 0), attn->bias_head = am_shared_stride(&v, 1);
    attn->bias_row = am_shared_stride(&v, 2), attn->bias_column = am_shared_stride(&v, 3);
    return true;
}

/* All numbers as doubles. NULL after a failure. */
static double *doubles(am_xla_call *c, const am_view *v, const char *name)
{
    ptrdiff_t count = 1;
    if (v->type != AM_FLOAT32 && v->type != AM_FLOAT64) {
        am_xla_fail(c, "%s has a type that does not fit", name);
        return NULL;
    }
    for (int i = 0; i < v->axes; i++) count *= v->shape[i];
    double *numbers = am_keep(&c->request, count, sizeof *numbers);
    if (!numbers || count == 0) return numbers;
    if (v->type == AM_FLOAT64)
        memcpy(numbers, v->data, (size_t)count * sizeof *numbers);
    else
        for (ptrdiff_t i = 0; i < count; i++) numbers[i] = (double)((const float *)v->data)[i];
    return numbers;
}

bool am_xla_read_sinks(am_xla_call *c, const am_xla_buffer *buffer)
{
    am_view v;
    if (!am_xla_look(c, buffer, false, &v)) return false;
    const bool by_head = v.axes == 2;
    const ptrdiff_t heads = c->request.mask.heads, count = v.axes ? v.shape[v.axes - 1] : 0;
    if (v.axes < 1 || v.axes > 2 || (by_head && v.shape[0] != heads))
        return am_xla_fail(c, "softmax_aux has a shape that does not fit");
    const double greatest = c->attn.q.type == AM_FLOAT64 ? DBL_MAX : (double)FLT_MAX;
    const double *given = doubles(c, &v, "softmax_aux");
    double *sinks = given ? am_keep(&c->request, am_product(heads, count, 1), sizeof *sinks) : NULL;
    for (ptrdiff_t i = 0; sinks && i < heads * count; i++) {
        const double sink = given[by_head ? i : i % count];
        sinks[i] = isfinite(sink) ? fmax(-greatest, fmin(sink, greatest)) : sink;
    }
    c->attn.sinks = count ? sinks : NULL;
    c->attn.sink_count = count;
    return sinks;
}

bool am_xla_read_slopes(am_xla_call *c, const am_operand *slopes, ptrdiff_t rows)
{
    am_relative *relative = &c->attn.relative;
    const am_view v = slopes->view;
    if (!v.data) return true;
    const double *numbers = doubles(c, &v, "alibi_slopes");
    if (!numbers) return false;
    if (v.axes != 2 || (v.shape[0] != 1 && v.shape[0] != rows) || v.shape[1] != c->request.mask.heads)
        return am_xla_fail(c, "alibi_slopes has a shape that does not fit");
    for (ptrdiff_t i = 0; i < v.shape[0] * v.shape[1]; i++) {
        if (!isfinite(numbers[i])) return am_xla_fail(c, "alibi_slopes must be finite, got %g", numbers[i]);
    }
    relative->slopes = numbers, relative->slope_step = v.shape[0] == 1 ? 0 : v.shape[1];
    return true;
}

/* The terms by distance; `table` is NULL where there is no relative bias. */
static bool read_relative(am_xla_call *c, const am_xla_buffer *table)
{
    am_relative *relative = &c->attn.relative;
    const bool packed = (c->flags & PACKED) != 0;
    ptrdiff_t rows = packed ? -1 : c->request.mask.batch;
    am_operand starts, offsets, slopes, low;
    am_view v;
    if (packed) {
        c->apart = c->call == AM_XLA_ALL_CALLS && c->calls > 1; /* sequences are those of one row */
        if (c->apart) return false;
        if (!am_xla_next_operand(c, false, AM_INT64, &starts)) return false;
        relative->q_starts =
            am_read_starts_of(&c->request, "cum_seqlens_q", &starts, c->request.mask.queries, &rows);
        if (!relative->q_starts) return false;
        if (rows < 1 || c->request.mask.batch != 1)
            return am_xla_fail(c, "sequences must be those of one batch row");
        relative->sequences = rows;
    }
    if (!am_xla_next_operand(c, !packed, AM_INT64, &offsets) ||
        !am_xla_next_operand(c, !packed, AM_FLOAT64, &slopes) ||
        !am_xla_next_operand(c, false, AM_INT64, &low))
        return false;
    relative->low = low.number;
    relative->offsets = am_read_integers(&c->request, &offsets, rows, 0);
    relative->offset_step = 1;
    if (!relative->offsets) return false;
    if (!am_xla_read_slopes(c, &slopes, rows)) return false;
    if (!table) return true;
    if (!am_xla_look(c, table, false, &v)) return false;
    if (v.axes != 2 || v.shape[0] != c->request.mask.heads || v.shape[1] < 1)
        return am_xla_fail(c, "relative_bias has a shape that does not fit");
    relative->table = doubles(c, &v, "relative_bias"), relative->length = v.shape[1];
    return relative->table;
}

static bool next_double(am_xla_call *c, double *number)
{
    int64_t bits;
    const bool found = am_xla_next_word(c, &bits);
    memcpy(number, &bits, sizeof bits);
    return found;
}

bool am_xla_read_numbers(am_xla_call *c)
{
    am_attn *attn = &c->attn;
    int64_t version;
    *attn = (am_attn){.mask = &c->request.mask};
    if (!am_xla_next_word(c, &version) || !am_xla_next_word(c, &c->flags)) return false;
    if (version != VERSION) return am_xla_fail(c, "words: another version of attnmask has made them");
    if (!next_double(c, &attn->scale) || !next_double(c, &attn->cap) || !next_double(c, &attn->dropout))
        return false;
    return isnan(attn->scale) || !(attn->cap >= 0) || !(attn->dropout >= 0 && attn->dropout < 1)
               ? am_xla_fail(c, "words: a number is out of its range")
               : true;
}

/* Where a part of a larger problem begins. */
static bool read_part(am_xla_call *c)
{
    int64_t query, key;
    if (!am_xla_next_word(c, &query) || !am_xla_next_word(c, &key)) return false;
    if (query < 0 || query > AM_FAR || key < 0 || key > AM_FAR)
        return am_xla_fail(c, "words: a number is out of its range");
    c->attn.first_query = query, c->attn.first_key = key;
    return true;
}

/* The arguments that say what attention is asked for, and the mask prepared. `own` of them are the
 * gradient's. */
static bool read_attention(am_xla_call *c, int own)
{
    am_attn *attn = &c->attn;
    am_operand seed;
    if (!am_xla_read_numbers(c)) return false;
    attn->normalize = (c->flags & NORMALIZE) != 0;
    if (own) own += (c->flags & GRAD_LSE) != 0;
    const bool bias = (c->flags & BIAS) != 0, sinks = (c->flags & SINKS) != 0,
               table = (c->flags & TABLE) != 0;
    c->first_array = 3 + bias + sinks + table;
    c->arrays = c->frame->arguments.count - c->first_array - own;
    if (c->arrays < 0) return am_xla_fail(c, "there are too few arguments");
    if (attn->dropout > 0 && c->calls > 1 &&
        c->call == AM_XLA_ALL_CALLS) { /* each call has the places of the first row */
        c->apart = true;
        return false;
    }
    if (!read_tokens(c)) return false;
    if (bias && !read_bias(c, am_xla_argument(c, 3))) return false;
    if (sinks && !am_xla_read_sinks(c, am_xla_argument(c, 3 + bias))) return false;
    if (!am_xla_next_operand(c, false, AM_INT64, &seed)) return false;
    attn->seed = (uint64_t)seed.number;
    if (seed.view.data) {
        ptrdiff_t number;
        if (seed.view.axes > 1 || seed.view.shape[0] != 1 || !am_is_integer(seed.view.type) ||
            am_widen(&seed.view, &number) >= 0)
            return am_xla_fail(c, "dropout_seed must be an integer below 2**63");
        attn->seed = (uint64_t)number;
    }
    if ((c->flags & PART) && !read_part(c)) return false;
    const am_xla_buffer *relative_bias = table ? am_xla_argument(c, 3 + bias + sinks) : NULL;
    if ((c->flags & RELATIVE) && !read_relative(c, relative_bias)) return false;
    if (am_has_dropout_of_too_many_keys(attn)) return am_xla_fail(c, "dropout takes up to 2**32 keys");
    return am_xla_read_mask(c, NULL, 0) &&
           am_refuse_status(&c->request, am_mask_prepare(&c->context, &c->request.mask));
}

static bool look_at_tokens(am_xla_call *c, const am_xla_buffer *buffer, const char *name,
                           const ptrdiff_t shape[4], am_tokens *to)
{
    am_view v;
    if (!am_xla_look(c, buffer, true, &v) || !has_shape(c, &v, name, 4, shape)) return false;
    *to = am_tokens_of(&v);
    return v.type == c->attn.q.type ? true : am_xla_fail(c, "%s must have the type of query", name);
}

/* The type of the arithmetic. */
static am_dtype wide_type(const am_xla_call *c)
{
    return c->attn.q.type == AM_FLOAT64 ? AM_FLOAT64 : AM_FLOAT32;
}

/* The same of a result of a type. */
static bool look_at_wide(am_xla_call *c, const am_xla_buffer *buffer, const char *name, am_dtype type,
                         const ptrdiff_t shape[4], am_tokens *to)
{
    am_view v;
    if (!am_xla_look(c, buffer, true, &v) || !has_shape(c, &v, name, 4, shape)) return false;
    *to = am_tokens_of(&v);
    return v.type == type ? true : am_xla_fail(c, "%s has a type that does not fit", name);
}

/* The same of a result: that of a part, which will be added to others, has the type of the arithmetic. */
static bool look_at_result(am_xla_call *c, const am_xla_buffer *buffer, const char *name,
                           const ptrdiff_t shape[4], am_tokens *to)
{
    return look_at_wide(c, buffer, name, c->flags & PART ? wide_type(c) : c->attn.q.type, shape, to);
}

/* What gradients take as the result: it, or the same in the type of the arithmetic. */
static bool look_at_kept(am_xla_call *c, const am_xla_buffer *buffer, const ptrdiff_t shape[4], am_tokens *to)
{
    const bool wide = am_xla_type_of(buffer->dtype) == wide_type(c);
    return look_at_wide(c, buffer, "out", wide ? wide_type(c) : c->attn.q.type, shape, to);
}

static bool look_at_rows(am_xla_call *c, const am_xla_buffer *buffer, const char *name, am_view *v)
{
    const ptrdiff_t shape[3] = {c->request.mask.batch, c->request.mask.heads, c->request.mask.queries};
    if (!am_xla_look(c, buffer, true, v) || !has_shape(c, v, name, 3, shape)) return false;
    return v->type == wide_type(c)
               ? true
               : am_xla_fail(c, "%s must be float32, or float64 for float64 inputs", name);
}

static bool forward(am_xla_call *c)
{
    am_attn *attn = &c->attn;
    am_view lse;
    if (!read_attention(c, 0)) return false;
    const ptrdiff_t shape[4] = {attn->batch, attn->queries, attn->heads, attn->value_dim};
    if (!look_at_result(c, am_xla_result(c, 0), "out", shape, &attn->out)) return false;
    if (c->frame->results.count > 1) {
        if (!look_at_rows(c, am_xla_result(c, 1), "lse", &lse)) return false;
        attn->lse = lse.data;
    }
    if (c->frame->results.count > 2 &&
        !look_at_wide(c, am_xla_result(c, 2), "wide out", wide_type(c), shape, &attn->wide_out))
        return false;
    return am_refuse_status(&c->request, am_attn_forward(&c->context, attn));
}

static am_row_stats row_stats(const am_view *v)
{
    return (am_row_stats){v->data, v->stride[0], v->stride[1], v->stride[2]};
}

/* From one of each head and number to what was given: a row for each head, or one for all. */
static void write_numbers(const am_xla_call *c, const double *numbers, ptrdiff_t count, const am_view *to)
{
    const ptrdiff_t heads = c->attn.heads;
    for (ptrdiff_t i = 0; i < (to->axes == 2 ? heads * count : count); i++) {
        double sum = to->axes == 2 ? numbers[i] : 0;
        for (ptrdiff_t h = 0; to->axes == 1 && h < heads; h++) sum += numbers[h * count + i];
        if (to->type == AM_FLOAT64)
            ((double *)to->data)[i] = sum;
        else
            ((float *)to->data)[i] = (float)sum;
    }
}

/* Where the gradients of such numbers go, and zeros to add them up in. */
static double *look_at_numbers(am_xla_call *c, const am_xla_buffer *buffer, const char *name, ptrdiff_t count,
                               am_view *to)
{
    if (!am_xla_look(c, buffer, false, to)) return NULL;
    const bool by_head = to->axes == 2 && to->shape[0] == c->attn.heads;
    if ((to->type != AM_FLOAT32 && to->type != AM_FLOAT64) || (!by_head && to->axes != 1) ||
        to->shape[to->axes - 1] != count) {
        am_xla_fail(c, "%s has a type or a shape that does not fit", name);
        return NULL;
    }
    return am_keep(&c->request, am_product(c->attn.heads, count, 1), sizeof(double));
}

static bool backward(am_xla_call *c)
{
    const am_attn *attn = &c->attn;
    am_view lse, d_lse, d_bias, d_sinks, d_table;
    int64_t next_result = 3;
    if (!read_attention(c, 3)) return false;
    const bool want_bias = (c->flags & GRAD_BIAS) && attn->bias,
               want_sinks = (c->flags & GRAD_SINKS) && (c->flags & SINKS),
               want_table = (c->flags & GRAD_TABLE) && (c->flags & TABLE);
    if (c->frame->results.count != 3 + want_bias + want_sinks + want_table)
        return am_xla_fail(c, "there are too few results");
    const int64_t own = c->first_array + c->arrays;
    const ptrdiff_t out[4] = {attn->batch, attn->queries, attn->heads, attn->value_dim},
                    q[4] = {attn->batch, attn->queries, attn->heads, attn->head_dim},
                    k[4] = {attn->batch, attn->keys, attn->kv_heads, attn->head_dim},
                    v[4] = {attn->batch, attn->keys, attn->kv_heads, attn->value_dim};
    am_attn_gradients problem = {.forward = *attn};
    if (!look_at_tokens(c, am_xla_argument(c, own), "dout", out, &problem.d_out) ||
        !look_at_kept(c, am_xla_argument(c, own + 1), out, &problem.forward.out) ||
        !look_at_rows(c, am_xla_argument(c, own + 2), "lse", &lse) ||
        !look_at_result(c, am_xla_result(c, 0), "dquery", q, &problem.d_q) ||
        !look_at_result(c, am_xla_result(c, 1), "dkey", k, &problem.d_k) ||
        !look_at_result(c, am_xla_result(c, 2), "dvalue", v, &problem.d_v))
        return false;
    problem.lse = row_stats(&lse);
    if (c->flags & GRAD_LSE) {
        if (!look_at_rows(c, am_xla_argument(c, own + 3), "dlse", &d_lse)) return false;
        problem.d_lse = row_stats(&d_lse);
    }
    if (want_bias) {
        if (!am_xla_look(c, am_xla_result(c, next_result++), true, &d_bias)) return false;
        if (d_bias.type != attn->bias_type || !broadcasts(c, &d_bias))
            return am_xla_fail(c, "dbias does not fit");
        problem.d_bias = d_bias.data;
        memcpy(problem.bias_shape, d_bias.shape, sizeof problem.bias_shape);
    }
    double *sinks = NULL, *table = NULL;
    if (want_sinks) {
        sinks =
            look_at_numbers(c, am_xla_result(c, next_result++), "dsoftmax_aux", attn->sink_count, &d_sinks);
        if (!sinks) return false;
        problem.d_sinks = attn->sinks ? sinks : NULL;
    }
    if (want_table) {
        const am_xla_buffer *to = am_xla_result(c, next_result);
        const ptrdiff_t length = attn->relative.table ? attn->relative.length
                                 : to->rank > 0       ? to->shape[to->rank - 1]
                                                      : 0; /* which the next line refuses, of rank 0 */
        table = look_at_numbers(c, to, "drelative_bias", length, &d_table);
        if (!table) return false;
        problem.d_table = attn->relative.table ? table : NULL;
    }
    if (!am_refuse_status(&c->request, am_attn_backward(&c->context, &problem))) return false;
    if (sinks) write_numbers(c, sinks, attn->sink_count, &d_sinks);
    if (table) write_numbers(c, table, d_table.shape[d_table.axes - 1], &d_table);
    return true;
}

/* --- Calls --- */

static bool find_words(am_xla_call *c)
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
    return am_xla_fail(c, "there is no attribute `words` of int64");
}

/* The pages of a long result are mostly new, and cost more than what is written to them. */
static void advise_pages(const am_xla_buffer *buffer)
{
    size_t bytes = am_size_of(am_xla_type_of(buffer->dtype));
    for (int64_t i = 0; i < buffer->rank; i++) bytes *= (size_t)buffer->shape[i];
    if (bytes >= AM_BUFFER_BYTES) am_buffer_advise(buffer->data, bytes);
}

/* The axes of vmap, from the first result, which has four axes without them. */
static bool find_calls(am_xla_call *c)
{
    const am_xla_call_frame *frame = c->frame;
    if (frame->arguments.count < 2 || frame->results.count < 1 || am_xla_result(c, 0)->rank < 4)
        return am_xla_fail(c, "there are too few arguments or results");
    c->vmap_axes = am_xla_result(c, 0)->rank - 4;
    c->vmap_shape = am_xla_result(c, 0)->shape;
    c->calls = 1;
    for (int64_t i = 0; i < c->vmap_axes; i++) c->calls *= c->vmap_shape[i];
    for (int64_t i = 0; i < frame->results.count; i++) advise_pages(am_xla_result(c, i));
    return true;
}

typedef bool do_call(am_xla_call *c);

/* The buffers of one call, or of all. */
static bool do_one(am_xla_call *c, do_call *compute, ptrdiff_t call)
{
    const int64_t *words = c->words;
    c->call = call;
    c->apart = false;
    c->request.mask.batch =
        am_xla_result(c, 0)->shape[c->vmap_axes] * (call == AM_XLA_ALL_CALLS ? c->calls : 1);
    const bool done = compute(c);
    am_request_free(&c->request);
    c->words = words;
    return done;
}

static bool do_all(am_xla_call *c, do_call *compute)
{
    if (!find_words(c) || !find_calls(c)) return false;
    if (do_one(c, compute, AM_XLA_ALL_CALLS) || !c->apart) return !am_is_refused(&c->request);
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
    am_xla_call c = {.frame = frame,
                     .context = {.kernels = atomic_load(&state->kernels), .threads = am_threads(state)}};
    am_float_mode_set(am_float_mode_quiet(mode));
    const bool done = do_all(&c, compute);
    am_float_mode_set(mode);
    if (done) return NULL;
    const am_status status = c.request.status;
    am_xla_error_args args = {.struct_size = sizeof args,
                              .message = am_request_words(&c.request),
                              .code = status == AM_OK       ? AM_XLA_INVALID_ARGUMENT
                                      : status == AM_FORKED ? AM_XLA_ABORTED
                                                            : AM_XLA_RESOURCE_EXHAUSTED};
    return frame->api->create_error(&args);
}

#define HANDLER(compute)                                                                                     \
    static am_xla_error *compute##_handler(am_xla_call_frame *frame) { return handle(frame, compute); }
HANDLER(forward)
HANDLER(backward)
HANDLER(am_xla_kvcache)
HANDLER(am_xla_linear)
HANDLER(am_xla_linear_gradients)
HANDLER(am_xla_linear_step)
HANDLER(am_xla_convolution)
HANDLER(am_xla_convolution_gradients)
HANDLER(am_xla_convolution_step)
#undef HANDLER

static PyObject *xla_handlers(PyObject *module, PyObject *unused)
{
    (void)unused;
    if (!state) {
        Py_INCREF(module); /* XLA keeps handlers for good */
        state = am_state_of(module);
    }
    am_xla_handler *const handlers[] = {
        forward_handler,
        backward_handler,
        am_xla_kvcache_handler,
        am_xla_linear_handler,
        am_xla_linear_gradients_handler,
        am_xla_linear_step_handler,
        am_xla_convolution_handler,
        am_xla_convolution_gradients_handler,
        am_xla_convolution_step_handler,
    };
    enum { COUNT = sizeof handlers / sizeof *handlers };
    PyObject *capsules = PyTuple_New(COUNT);
    for (int i = 0; capsules && i < COUNT; i++) {
        void *pointer;
        memcpy(&pointer, &handlers[i], sizeof pointer);
        PyObject *capsule = PyCapsule_New(pointer, NULL, NULL);
        if (capsule)
            PyTuple_SET_ITEM(capsules, i, capsule);
        else
            Py_CLEAR(capsules);
    }
    return capsules;
}

PyMethodDef am_xla_methods[] = {
    {"xla_handlers", xla_handlers, METH_NOARGS,
     "xla_handlers($module, /)\n--\n\nHandlers of XLA's foreign function interface, as capsules, in the "
     "order of attnmask.jax's names."},
    {.ml_name = NULL},
};
