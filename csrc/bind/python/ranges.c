/* ranges.c – bindings of the functions on ranges of tokens, which are passed as pairs [start0, end0, start1,
 * end1, …]. */
#include "bind/python/counts.h"
#include "bind/python/mask_arrays.h"
#include "core/arrays/convert.h"
#include "core/sequences/extents.h"
#include "core/sequences/ranges.h"

/* Starts and ends of any size and order. */
typedef struct {
    PyArrayObject *array;
    ptrdiff_t (*ranges)[2];
    npy_intp count;
    bool beyond; /* a number exceeds ptrdiff_t */
} pairs;

static void free_pairs(pairs *p)
{
    Py_CLEAR(p->array);
    free(p->ranges);
    p->ranges = NULL;
}

/* pairs *: a 1-D array with an even number of integers. One that exceeds ptrdiff_t becomes its largest
 * value. */
static int to_pairs(PyObject *object, const char *name, void *dst)
{
    static const char expected[] = "a 1-D array of integers, [start0, end0, start1, end1, ...]";
    pairs *p = dst;
    am_view entries;
    if (am_to_array(object, name, &p->array) < 0) return -1;
    bool integers = am_entries_of(p->array, &entries);
    npy_intp size = PyArray_SIZE(p->array);
    if (PyArray_NDIM(p->array) != 1) return am_reject(PyExc_ValueError, name, expected, p->array);
    if (!integers && size == 0 && !PyArray_Check(object)) { /* an empty list becomes float64 */
        Py_SETREF(p->array, am_new_array_of(1, &size, NPY_INT64));
        if (!p->array) return -1;
        integers = am_entries_of(p->array, &entries);
    }
    if (!integers) return am_reject(PyExc_TypeError, name, expected, p->array);
    if (size % 2 != 0) return am_reject(PyExc_ValueError, name, expected, p->array);
    p->count = size / 2;
    p->ranges = (void *)am_new(ptrdiff_t, size);
    if (!p->ranges) return am_raise(AM_NO_MEMORY);
    p->beyond = am_widen(&entries, *p->ranges) >= 0;
    return 0;
}

/* --- From masks to pairs --- */

/* Returns the extents of a mask, or NULL with the exception set. */
static am_extent *find_extents(PyObject *module, const am_dense *mask, am_head_rule rule, npy_intp work)
{
    am_extent *extents = am_new(am_extent, mask->batch);
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
static int to_token_mask(PyObject *module, PyArrayObject *array, const char *name, am_dense *mask)
{
    if (PyArray_NDIM(array) != 2) return am_reject(PyExc_ValueError, name, "[B, T]", array);
    if (am_to_dense(module, array, name, 2, mask) < 0) return -1;
    mask->batch = mask->queries, mask->batch_stride = mask->query_stride;
    mask->queries = 1, mask->query_stride = 0;
    return 0;
}

static PyObject *qkv_masks_to_cu_seqlens(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *kv_object = NULL;
    am_owned PyArrayObject *q_mask = NULL, *kv_mask = NULL;
    am_owned PyArray_Descr *dtype = NULL;
    am_freed am_extent *q = NULL, *k = NULL;
    am_dense queries, keys;
    const am_param params[] = {{"q_mask", am_to_mask, &q_mask},
                               {"kv_mask", am_to_object, &kv_object},
                               {"out_dtype", am_to_integer_dtype, &dtype}};
    if (am_parse("qkv_masks_to_cu_seqlens", args, nargs, params, 3) < 0) return NULL;
    if (to_token_mask(module, q_mask, "q_mask", &queries) < 0) return NULL;
    if (kv_object != Py_None) {
        if (am_to_mask(kv_object, "kv_mask", &kv_mask) < 0 ||
            to_token_mask(module, kv_mask, "kv_mask", &keys) < 0)
            return NULL;
        if (queries.batch != keys.batch)
            return PyErr_Format(PyExc_ValueError,
                                "q_mask and kv_mask must have the same batch, got %zd and %zd rows",
                                queries.batch, keys.batch);
    }
    q = find_extents(module, &queries, AM_ANY_HEAD, PyArray_SIZE(q_mask));
    if (!q) return NULL;
    if (kv_mask && !(k = find_extents(module, &keys, AM_ANY_HEAD, PyArray_SIZE(kv_mask)))) return NULL;
    return both_pairs(q, true, k ? k : q, queries.batch, dtype, "q_mask", k ? "kv_mask" : "q_mask");
}

typedef enum { ANY, ALL, FIRST } reduction;

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

static PyObject *attention_mask_to_qkv_cu_seqlens(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    static const char name[] = "attention_mask";
    am_owned PyArrayObject *array = NULL;
    am_owned PyArray_Descr *dtype = NULL;
    reduction heads;
    am_dense mask;
    const am_param params[] = {{name, am_to_mask, &array},
                               {"reduce_heads", to_reduction, &heads},
                               {"out_dtype", am_to_integer_dtype, &dtype}};
    if (am_parse("attention_mask_to_qkv_cu_seqlens", args, nargs, params, 3) < 0) return NULL;
    int ndim = PyArray_NDIM(array);
    if (ndim < 2 || ndim > 4)
        return am_reject_array(PyExc_ValueError, name, "[B, T], [B, Q, K] or [B, H, Q, K]", array);
    const int failed =
        ndim == 2 ? to_token_mask(module, array, name, &mask) : am_to_dense(module, array, name, 3, &mask);
    if (failed < 0) return NULL;
    if (heads == FIRST && mask.heads == 0)
        return am_reject_array(PyExc_ValueError, name, "of one head or more to reduce to the first", array);
    if (heads == FIRST) mask.heads = 1;
    am_freed am_extent *extents =
        find_extents(module, &mask, heads == ALL ? AM_ALL_HEADS : AM_ANY_HEAD, PyArray_SIZE(array));
    return extents ? both_pairs(extents, ndim == 2, extents, mask.batch, dtype, name, name) : NULL;
}

/* --- From pairs to masks --- */

/* The result is [B, keys], or [B, 1, queries, keys] if q.array is given. */
typedef struct {
    const char *names[2]; /* of `q` and `kv`, for messages */
    pairs q, kv;          /* q.array is NULL for a mask of tokens */
    npy_intp max_q, max_kv;
    PyArray_Descr *dtype;
    am_out out;
} box_arguments;

static void free_boxes(box_arguments *a)
{
    free_pairs(&a->q);
    free_pairs(&a->kv);
    Py_CLEAR(a->dtype);
    Py_CLEAR(a->out.array);
}

/* Fills and returns `out`, or a new array; NULL with the exception set. */
static PyObject *fill_boxes(PyObject *module, const box_arguments *a)
{
    npy_intp batch = a->kv.count, shape[4] = {batch, a->max_kv};
    int ndim = a->q.array ? 4 : 2;
    if (ndim == 4) shape[1] = 1, shape[2] = a->max_q, shape[3] = a->max_kv;
    PyArrayObject *const inputs[2] = {a->q.array, a->kv.array};
    for (int i = 0; a->out.given && i < 2; i++) {
        if (inputs[i] && am_check_apart(a->out.array, "out", inputs[i], a->names[i]) < 0) return NULL;
    }
    uint64_t live;
    am_owned PyArrayObject *out = am_target(&a->out, ndim, shape, a->dtype);
    if (!out || am_bytes_of(Py_True, a->dtype, &live) < 0) return NULL;
    am_freed am_extent *extents = am_new(am_extent, batch);
    if (!extents) return PyErr_NoMemory();
    for (npy_intp b = 0; b < batch; b++) {
        const ptrdiff_t of_tokens[2] = {0, 1}, *q = ndim == 4 ? a->q.ranges[b] : of_tokens;
        extents[b] = (am_extent){q[0], q[1], a->kv.ranges[b][0], a->kv.ranges[b][1]};
    }
    const am_boxes boxes = {.batch = batch,
                            .queries = ndim == 4 ? a->max_q : 1,
                            .keys = a->max_kv,
                            .live = live,
                            .boxes = extents,
                            .data = PyArray_BYTES(out),
                            .size = PyArray_ITEMSIZE(out),
                            .batch_stride = PyArray_STRIDE(out, 0),
                            .query_stride = ndim == 4 ? PyArray_STRIDE(out, 2) : 0,
                            .key_stride = PyArray_STRIDE(out, ndim - 1)};
    return am_computed(module, PyArray_SIZE(out), am_fill_boxes, &boxes) ? am_returned(&a->out, out) : NULL;
}

static PyObject *cu_seqlens_to_mask(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_scoped(free_boxes) box_arguments a = {.names = {NULL, "cu_seqlens"}};
    const am_param params[] = {{"cu_seqlens", to_pairs, &a.kv},
                               {"max_len", am_to_length, &a.max_kv},
                               {"dtype", am_to_mask_dtype, &a.dtype},
                               {"out", am_to_out, &a.out}};
    return am_parse("cu_seqlens_to_mask", args, nargs, params, 4) < 0 ? NULL : fill_boxes(module, &a);
}

static int check_batch(const box_arguments *a)
{
    if (a->q.count == a->kv.count) return 0;
    return am_fail(PyExc_ValueError,
                   "cu_seqlens_q and cu_seqlens_kv must have the same batch, got %zd and %zd pairs",
                   a->q.count, a->kv.count);
}

static PyObject *qkv_cu_seqlens_to_qkv_masks(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_scoped(free_boxes) box_arguments a = {.names = {"cu_seqlens_q", "cu_seqlens_kv"}};
    const am_param params[] = {{"cu_seqlens_q", to_pairs, &a.q},
                               {"max_q_len", am_to_length, &a.max_q},
                               {"cu_seqlens_kv", to_pairs, &a.kv},
                               {"max_kv_len", am_to_length, &a.max_kv},
                               {"dtype", am_to_mask_dtype, &a.dtype}};
    if (am_parse("qkv_cu_seqlens_to_qkv_masks", args, nargs, params, 5) < 0 || check_batch(&a) < 0)
        return NULL;
    const box_arguments q = {.kv = a.q, .max_kv = a.max_q, .dtype = a.dtype},
                        kv = {.kv = a.kv, .max_kv = a.max_kv, .dtype = a.dtype};
    am_owned PyObject *q_mask = fill_boxes(module, &q), *kv_mask = q_mask ? fill_boxes(module, &kv) : NULL;
    return kv_mask ? PyTuple_Pack(2, q_mask, kv_mask) : NULL;
}

static PyObject *qkv_cu_seqlens_to_attention_mask(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_scoped(free_boxes) box_arguments a = {.names = {"cu_seqlens_q", "cu_seqlens_kv"}};
    const am_param params[] = {{"cu_seqlens_q", to_pairs, &a.q},      {"max_q_len", am_to_length, &a.max_q},
                               {"cu_seqlens_kv", to_pairs, &a.kv},    {"max_kv_len", am_to_length, &a.max_kv},
                               {"dtype", am_to_mask_dtype, &a.dtype}, {"out", am_to_out, &a.out}};
    if (am_parse("qkv_cu_seqlens_to_attention_mask", args, nargs, params, 6) < 0 || check_batch(&a) < 0)
        return NULL;
    return fill_boxes(module, &a);
}

/* --- Between the two forms --- */

static PyObject *pairs_to_cu_seqlens(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    am_scoped(free_pairs) pairs p = {0};
    const am_param params[] = {{"pairs", to_pairs, &p}};
    if (am_parse("pairs_to_cu_seqlens", args, nargs, params, 1) < 0) return NULL;
    if (p.beyond) return am_reject_array(PyExc_OverflowError, "pairs", "below 2**63", p.array);
    am_freed ptrdiff_t *starts = am_new(ptrdiff_t, p.count + 1);
    if (!starts) return PyErr_NoMemory();
    for (npy_intp i = 0; i < p.count; i++) {
        ptrdiff_t begin = p.ranges[i][0] > 0 ? p.ranges[i][0] : 0, end = p.ranges[i][1];
        if (__builtin_add_overflow(starts[i], end > begin ? end - begin : 0, &starts[i + 1]))
            return PyErr_Format(PyExc_OverflowError,
                                "pairs must have a total length that fits int64, got more");
    }
    PyArray_Descr *dtype = PyArray_DESCR(p.array);
    if (am_check_fits(starts[p.count], dtype, "pairs", "a total length") < 0) return NULL;
    return am_counts_as(starts, p.count + 1, dtype);
}

static PyObject *cu_seqlens_to_pairs(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    am_scoped(am_free_starts) am_starts s = {0};
    const am_param params[] = {{"cu_seqlens", am_to_starts, &s}};
    if (am_parse("cu_seqlens_to_pairs", args, nargs, params, 1) < 0) return NULL;
    am_freed ptrdiff_t *ends = am_new(ptrdiff_t, 2 * s.sequences);
    if (!ends) return PyErr_NoMemory();
    for (ptrdiff_t i = 0; i < s.sequences; i++) {
        ends[2 * i] = s.starts[i];
        ends[2 * i + 1] = s.starts[i + 1];
    }
    return am_counts_as(ends, 2 * s.sequences, s.dtype);
}

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
