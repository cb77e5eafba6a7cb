/* ranges.c – bindings of the functions on ranges of tokens, which are passed as pairs [start0, end0, start1,
 * end1, …]. */
#include "tokens/bind/counts.h"
#include "bind/python/mask_arrays.h"
#include "core/arrays/convert.h"
#include "tokens/extents.h"
#include "tokens/ranges.h"

typedef enum { ANY, ALL, FIRST } reduction;

/* Pairs are `starts` [sequences][2], of any size and order. */
typedef struct {
    PyArrayObject *mask; /* of all tokens or of queries */
    PyObject *kv_mask;   /* borrowed */
    reduction reduce_heads;
    am_starts cu_seqlens, pairs, q, kv; /* all but the first are pairs */
    npy_intp max_q_len, max_kv_len;
    PyArray_Descr *dtype;
    am_out out;
} arguments;

/* am_starts *: pairs, from a 1-D array with an even number of integers. */
static int to_pairs(PyObject *object, const char *name, void *dst)
{
    static const char expected[] = "a 1-D array of integers, [start0, end0, start1, end1, ...]";
    am_starts *p = dst;
    if (am_to_array(object, name, &p->array) < 0) return -1;
    bool integers = am_entries_of(p->array, &p->entries);
    npy_intp size = PyArray_SIZE(p->array);
    if (PyArray_NDIM(p->array) != 1) return am_reject(PyExc_ValueError, name, expected, p->array);
    if (!integers && size == 0 && !PyArray_Check(object)) { /* an empty list becomes float64 */
        am_replace(&p->array, am_new_array_of(1, &size, NPY_INT64));
        if (!p->array) return -1;
        integers = am_entries_of(p->array, &p->entries);
    }
    if (!integers) return am_reject(PyExc_TypeError, name, expected, p->array);
    if (size % 2 != 0) return am_reject(PyExc_ValueError, name, expected, p->array);
    p->sequences = size / 2;
    p->starts = am_new(ptrdiff_t, size);
    if (!p->starts) return am_raise(AM_NO_MEMORY);
    p->beyond = am_widen(&p->entries, p->starts);
    return 0;
}

/* --- From masks to pairs --- */

/* Returns the extents of a mask, or NULL with the exception set. */
static am_extent *find_extents(PyObject *module, const am_array *mask, am_head_rule rule, npy_intp work)
{
    am_extent *extents = am_new(am_extent, mask->shape.batch);
    if (!extents) return (am_extent *)PyErr_NoMemory();
    if (am_computed(module, work, am_find_extents, mask, rule, extents)) return extents;
    free(extents);
    return NULL;
}

static PyObject *pairs_of(const am_extent *extents, npy_intp batch, bool of_keys, PyArray_Descr *dtype,
                          const char *name)
{
    am_freed ptrdiff_t *ends = am_new(ptrdiff_t, 2 * batch);
    if (!ends) return PyErr_NoMemory();
    for (npy_intp b = 0; b < batch; b++) {
        ends[2 * b] = of_keys ? extents[b].k_begin : extents[b].q_begin;
        ends[2 * b + 1] = of_keys ? extents[b].k_end : extents[b].q_end;
        if (am_check_fits(ends[2 * b + 1], dtype, name, "an end") < 0) return NULL;
    }
    return am_counts_as(ends, 2 * batch, dtype);
}

/* Returns two new arrays: the ranges of the queries (or of the keys if `of_keys`) of `q`, and those of the
 * keys of `k`. */
static PyObject *both_pairs(const am_extent *q, bool of_keys, const am_extent *k, npy_intp batch,
                            PyArray_Descr *dtype, const char *q_name, const char *k_name)
{
    am_owned PyObject *q_pairs = pairs_of(q, batch, of_keys, dtype, q_name),
                      *k_pairs = q_pairs ? pairs_of(k, batch, true, dtype, k_name) : NULL;
    return k_pairs ? PyTuple_Pack(2, q_pairs, k_pairs) : NULL;
}

/* Describes a mask of tokens [B, T] as a mask of pairs with a single query. */
static int to_token_mask(PyObject *module, PyArrayObject *array, const char *name, am_array *mask)
{
    if (PyArray_NDIM(array) != 2) return am_reject(PyExc_ValueError, name, "[B, T]", array);
    if (am_to_dense(module, array, name, 2, mask) < 0) return -1;
    mask->shape.batch = mask->shape.token, mask->stride.batch = mask->stride.token;
    mask->shape.token = 1, mask->stride.token = 0;
    return 0;
}

static PyObject *pairs_of_masks(PyObject *module, const arguments *a)
{
    am_owned PyArrayObject *kv_mask = NULL;
    am_freed am_extent *q = NULL, *k = NULL;
    am_array queries, keys;
    if (to_token_mask(module, a->mask, "q_mask", &queries) < 0) return NULL;
    if (a->kv_mask != Py_None) {
        if (am_to_mask(a->kv_mask, "kv_mask", &kv_mask) < 0 ||
            to_token_mask(module, kv_mask, "kv_mask", &keys) < 0)
            return NULL;
        if (queries.shape.batch != keys.shape.batch)
            return PyErr_Format(PyExc_ValueError,
                                "q_mask and kv_mask must have the same batch, got %zd and %zd rows",
                                queries.shape.batch, keys.shape.batch);
    }
    q = find_extents(module, &queries, AM_ANY_HEAD, PyArray_SIZE(a->mask));
    if (!q) return NULL;
    if (kv_mask && !(k = find_extents(module, &keys, AM_ANY_HEAD, PyArray_SIZE(kv_mask)))) return NULL;
    return both_pairs(q, true, k ? k : q, queries.shape.batch, a->dtype, "q_mask", k ? "kv_mask" : "q_mask");
}
AM_FUNCTION(qkv_masks_to_cu_seqlens, pairs_of_masks(module, a), AM_PARAM("q_mask", am_to_mask, mask),
            AM_ARG(kv_mask, am_to_object), AM_PARAM("out_dtype", am_to_integer_dtype, dtype))

static int to_reduction(PyObject *object, const char *name, void *dst)
{
    static const char *const names[] = {[ANY] = "any", [ALL] = "all", [FIRST] = "first"};
    for (int i = 0; PyUnicode_Check(object) && i < 3; i++) {
        if (PyUnicode_CompareWithASCIIString(object, names[i]) != 0) continue;
        *(reduction *)dst = (reduction)i;
        return 0;
    }
    return am_reject(PyExc_ValueError, name, "'any', 'all' or 'first'", object);
}

static PyObject *pairs_of_mask(PyObject *module, PyArrayObject *array, reduction heads, PyArray_Descr *dtype)
{
    static const char name[] = "attention_mask";
    am_array mask;
    int ndim = PyArray_NDIM(array);
    if (ndim < 2 || ndim > 4)
        return am_reject_array(PyExc_ValueError, name, "[B, T], [B, Q, K] or [B, H, Q, K]", array);
    const int failed =
        ndim == 2 ? to_token_mask(module, array, name, &mask) : am_to_dense(module, array, name, 3, &mask);
    if (failed < 0) return NULL;
    if (heads == FIRST && mask.shape.head == 0)
        return am_reject_array(PyExc_ValueError, name, "of one head or more to reduce to the first", array);
    if (heads == FIRST) mask.shape.head = 1;
    am_freed am_extent *extents =
        find_extents(module, &mask, heads == ALL ? AM_ALL_HEADS : AM_ANY_HEAD, PyArray_SIZE(array));
    return extents ? both_pairs(extents, ndim == 2, extents, mask.shape.batch, dtype, name, name) : NULL;
}
AM_FUNCTION(attention_mask_to_qkv_cu_seqlens, pairs_of_mask(module, a->mask, a->reduce_heads, a->dtype),
            AM_PARAM("attention_mask", am_to_mask, mask), AM_ARG(reduce_heads, to_reduction),
            AM_PARAM("out_dtype", am_to_integer_dtype, dtype))

/* --- From pairs to masks --- */

/* Fills and returns `out`, or a new array: [B, keys]; or [B, 1, queries, keys] unless `q`, the pairs of
 * queries, is NULL. NULL with the exception set. */
static PyObject *fill_boxes(PyObject *module, const arguments *a, const am_starts *q, const am_starts *kv,
                            npy_intp keys)
{
    npy_intp batch = kv->sequences, shape[4] = {batch, keys};
    int ndim = q ? 4 : 2;
    if (q) shape[1] = 1, shape[2] = a->max_q_len, shape[3] = keys;
    uint64_t live;
    am_owned PyArrayObject *out = am_target(&a->out, ndim, shape, a->dtype);
    if (!out || am_bytes_of(Py_True, a->dtype, &live) < 0) return NULL;
    am_freed am_extent *extents = am_new(am_extent, batch);
    if (!extents) return PyErr_NoMemory();
    for (npy_intp b = 0; b < batch; b++) {
        extents[b] = (am_extent){.q_begin = q ? q->starts[2 * b] : 0,
                                 .q_end = q ? q->starts[2 * b + 1] : 1,
                                 .k_begin = kv->starts[2 * b],
                                 .k_end = kv->starts[2 * b + 1]};
    }
    const am_boxes boxes = {.batch = batch,
                            .queries = q ? a->max_q_len : 1,
                            .keys = keys,
                            .live = live,
                            .boxes = extents,
                            .data = PyArray_BYTES(out),
                            .size = PyArray_ITEMSIZE(out),
                            .batch_stride = PyArray_STRIDE(out, 0),
                            .query_stride = q ? PyArray_STRIDE(out, 2) : 0,
                            .key_stride = PyArray_STRIDE(out, ndim - 1)};
    return am_computed(module, PyArray_SIZE(out), am_fill_boxes, &boxes) ? am_returned(&a->out, out) : NULL;
}
AM_FUNCTION(cu_seqlens_to_mask, fill_boxes(module, a, NULL, &a->kv, a->max_kv_len),
            AM_PARAM("cu_seqlens", to_pairs, kv), AM_PARAM("max_len", am_to_length, max_kv_len),
            AM_ARG(dtype, am_to_mask_dtype), AM_ARG(out, am_to_out))

static bool same_batch(const arguments *a)
{
    return a->q.sequences == a->kv.sequences ||
           am_fail(PyExc_ValueError,
                   "cu_seqlens_q and cu_seqlens_kv must have the same batch, got %zd and %zd pairs",
                   a->q.sequences, a->kv.sequences) == 0;
}

static PyObject *token_masks(PyObject *module, const arguments *a)
{
    am_owned PyObject *q_mask = same_batch(a) ? fill_boxes(module, a, NULL, &a->q, a->max_q_len) : NULL,
                      *kv_mask = q_mask ? fill_boxes(module, a, NULL, &a->kv, a->max_kv_len) : NULL;
    return kv_mask ? PyTuple_Pack(2, q_mask, kv_mask) : NULL;
}

#define BOTH_PAIRS                                                                                           \
    AM_PARAM("cu_seqlens_q", to_pairs, q), AM_ARG(max_q_len, am_to_length),                                  \
        AM_PARAM("cu_seqlens_kv", to_pairs, kv), AM_ARG(max_kv_len, am_to_length),                           \
        AM_ARG(dtype, am_to_mask_dtype)
AM_FUNCTION(qkv_cu_seqlens_to_qkv_masks, token_masks(module, a), BOTH_PAIRS)
AM_FUNCTION(qkv_cu_seqlens_to_attention_mask,
            same_batch(a) ? fill_boxes(module, a, &a->q, &a->kv, a->max_kv_len) : NULL, BOTH_PAIRS,
            AM_ARG(out, am_to_out))

/* --- Between the two forms --- */

static PyObject *starts_of_pairs(const am_starts *p)
{
    if (p->beyond >= 0) return am_reject_array(PyExc_OverflowError, "pairs", "below 2**63", p->array);
    am_freed ptrdiff_t *starts = am_new(ptrdiff_t, p->sequences + 1);
    if (!starts) return PyErr_NoMemory();
    for (npy_intp i = 0; i < p->sequences; i++) {
        ptrdiff_t begin = p->starts[2 * i] > 0 ? p->starts[2 * i] : 0, end = p->starts[2 * i + 1];
        if (__builtin_add_overflow(starts[i], end > begin ? end - begin : 0, &starts[i + 1]))
            return PyErr_Format(PyExc_OverflowError,
                                "pairs must have a total length that fits int64, got more");
    }
    PyArray_Descr *dtype = PyArray_DESCR(p->array);
    if (am_check_fits(starts[p->sequences], dtype, "pairs", "a total length") < 0) return NULL;
    return am_counts_as(starts, p->sequences + 1, dtype);
}
AM_FUNCTION(pairs_to_cu_seqlens, starts_of_pairs(&a->pairs), AM_ARG(pairs, to_pairs))

static PyObject *pairs_of_starts(const am_starts *s)
{
    am_freed ptrdiff_t *ends = am_new(ptrdiff_t, 2 * s->sequences);
    if (!ends) return PyErr_NoMemory();
    for (ptrdiff_t i = 0; i < s->sequences; i++) {
        ends[2 * i] = s->starts[i];
        ends[2 * i + 1] = s->starts[i + 1];
    }
    return am_counts_as(ends, 2 * s->sequences, s->dtype);
}
AM_FUNCTION(cu_seqlens_to_pairs, pairs_of_starts(&a->cu_seqlens), AM_ARG(cu_seqlens, am_to_starts))

PyMethodDef am_pairs_methods[] = {
    AM_METHOD(qkv_masks_to_cu_seqlens, "q_mask, kv_mask, out_dtype"),
    AM_METHOD(attention_mask_to_qkv_cu_seqlens, "attention_mask, reduce_heads, out_dtype"),
    AM_METHOD(cu_seqlens_to_mask, "cu_seqlens, max_len, dtype, out"),
    AM_METHOD(qkv_cu_seqlens_to_qkv_masks, "cu_seqlens_q, max_q_len, cu_seqlens_kv, max_kv_len, dtype"),
    AM_METHOD(qkv_cu_seqlens_to_attention_mask,
              "cu_seqlens_q, max_q_len, cu_seqlens_kv, max_kv_len, dtype, out"),
    AM_METHOD(pairs_to_cu_seqlens, "pairs"),
    AM_METHOD(cu_seqlens_to_pairs, "cu_seqlens"),
    {.ml_name = NULL},
};
