/* segments.c – bindings of the functions on segment ids. */
#include "tokens/bind/counts.h"
#include "bind/python/mask_arrays.h"
#include "core/runtime/sizes.h"
#include "tokens/extents.h"
#include "tokens/equal_lines.h"
#include "tokens/segments.h"

#include <stdlib.h>
#include <string.h>

#define LONGEST_CHUNK ((npy_intp)1 << 60) /* holds every key, and every query at the furthest shift */

typedef struct {
    bool given;
    npy_intp value;
} limit;

typedef struct {
    PyArrayObject *mask, *array, *shifts, *ids[2]; /* ids: of queries and keys */
    PyArray_Descr *dtype;
    am_out out;
    PyObject *object; /* borrowed, called `name` */
    const char *name;
    bool per_head, strict, last;
    npy_intp pad_value, size;
    limit max_segments;
} arguments;

/* --- From masks to ids --- */

/* Axes along which the array repeats itself may be of any length. */
static int check_lengths(PyArrayObject *mask)
{
    for (int i = 1; i <= 2; i++) {
        const int axis = PyArray_NDIM(mask) - i;
        if (axis < 0) break; /* am_to_dense says what is wrong */
        if (PyArray_DIM(mask, axis) > AM_LONGEST_GROUPED && PyArray_STRIDE(mask, axis) != 0)
            return am_reject(PyExc_ValueError, "mask", "shorter than 2**31 along its last two axes", mask);
    }
    return 0;
}

static int reject_ungrouped(PyArrayObject *mask, const am_array *dense, const am_ungrouped *found)
{
    const ptrdiff_t *at = found->place;
    ptrdiff_t plane = PyArray_NDIM(mask) == 4 ? at[0] * PyArray_DIM(mask, 1) + at[1] : at[0];
    const ptrdiff_t index = (plane * dense->shape.token + at[2]) * dense->shape.channel + at[3];
    am_owned PyObject *where = am_position(mask, index);
    if (!where) return -1;
    return am_fail(PyExc_ValueError,
                   "mask must be what its segment ids give back (strict=True), got %d at index %S",
                   found->live, where);
}

static PyObject *group(PyObject *module, PyArrayObject *mask, bool per_head, bool strict)
{
    am_owned PyArrayObject *q_ids = NULL, *k_ids = NULL;
    am_array dense;
    if (check_lengths(mask) < 0 || am_to_dense(module, mask, "mask", 2, &dense) < 0) return NULL;
    if (!per_head && dense.shape.head == 0)
        return am_reject_array(PyExc_ValueError, "mask", "of one head or more, or per_head True", mask);
    int axes = PyArray_NDIM(mask) - 1 - (PyArray_NDIM(mask) == 4 && !per_head); /* batch, heads, tokens */
    npy_intp shape[3] = {dense.shape.batch, dense.shape.head};
    shape[axes - 1] = dense.shape.token;
    q_ids = am_new_array_of(axes, shape, NPY_INT32);
    shape[axes - 1] = dense.shape.channel;
    k_ids = q_ids ? am_new_array_of(axes, shape, NPY_INT32) : NULL;
    if (!k_ids) return NULL;
    am_array grouped = dense;
    if (!per_head) grouped.shape.head = 1;
    am_ungrouped found = {0};
    if (PyArray_SIZE(mask) > 0) {
        int32_t *const q = PyArray_DATA(q_ids), *const k = PyArray_DATA(k_ids);
        const npy_intp work = PyArray_SIZE(mask);
        if (!am_computed(module, work, am_group_tokens, &grouped, q, k) ||
            (strict &&
             !am_computed(module, work, am_find_ungrouped, &dense, grouped.shape.head, q, k, &found)))
            return NULL;
    } else { /* the mask has no pairs */
        PyArrayObject *const both[] = {q_ids, k_ids};
        for (int i = 0; i < 2; i++) {
            const npy_intp count = PyArray_SIZE(both[i]);
            if (!am_computed(module, count, am_mark_all_padding, PyArray_DATA(both[i]), count)) return NULL;
        }
    }
    if (found.any && reject_ungrouped(mask, &dense, &found) < 0) return NULL;
    return PyTuple_Pack(2, q_ids, k_ids);
}
AM_FUNCTION(mask_to_segment_ids, group(module, a->mask, a->per_head, a->strict), AM_ARG(mask, am_to_mask),
            AM_ARG(per_head, am_to_bool), AM_ARG(strict, am_to_bool))

static PyObject *mark_padding(PyObject *module, PyArrayObject *mask)
{
    am_owned PyArrayObject *q_ids = NULL, *k_ids = NULL;
    am_array dense;
    if (am_to_dense(module, mask, "attention_mask", 2, &dense) < 0) return NULL;
    q_ids = am_new_array_of(2, (npy_intp[]){dense.shape.batch, dense.shape.token}, NPY_INT32);
    k_ids =
        q_ids ? am_new_array_of(2, (npy_intp[]){dense.shape.batch, dense.shape.channel}, NPY_INT32) : NULL;
    if (!k_ids) return NULL;
    const npy_intp work = am_max(PyArray_SIZE(mask), PyArray_SIZE(q_ids) + PyArray_SIZE(k_ids));
    return am_computed(module, work, am_mark_padding, &dense, PyArray_DATA(q_ids), PyArray_DATA(k_ids))
               ? PyTuple_Pack(2, q_ids, k_ids)
               : NULL;
}
AM_FUNCTION(padding_segment_ids, mark_padding(module, a->mask), AM_PARAM("attention_mask", am_to_mask, mask))

/* --- Ids --- */

/* Describes ids of `low` to `high` axes in place. */
static int read_ids(PyArrayObject *array, const char *name, int low, int high, am_array *ids)
{
    static const char *const layouts[4][4] = {
        [1] = {[3] = "an array of integers, [tokens], [batch, tokens] or [batch, heads, tokens]"},
        [2] = {[3] = "an array of integers, [batch, tokens] or [batch, heads, tokens]"},
    };
    int ndim = PyArray_NDIM(array);
    if (!am_is_integer(am_dtype_of(PyArray_DESCR(array))))
        return am_reject(PyExc_TypeError, name, layouts[low][high], array);
    if (ndim < low || ndim > high) return am_reject(PyExc_ValueError, name, layouts[low][high], array);
    const am_view v = am_view_of(array);
    *ids = am_array_of(
        &v, (am_by_axis){
                .batch = ndim > 1 ? 0 : -1, .head = ndim == 3 ? 1 : -1, .token = ndim - 1, .channel = -1});
    return 0;
}

/* Returns NULL with the exception set. `pad` is the position of padding. */
static PyArrayObject *new_int32(PyObject *module, PyArrayObject *array, const char *name, am_id_result what,
                                int32_t pad)
{
    am_array ids;
    if (read_ids(array, name, what == AM_TO_INTEGERS ? 1 : 2, 3, &ids) < 0) return NULL;
    am_owned PyArrayObject *result = am_new_array_of(PyArray_NDIM(array), PyArray_DIMS(array), NPY_INT32);
    if (!result) return NULL;
    int32_t *dst = PyArray_DATA(result);
    ptrdiff_t large;
    am_call call;
    const am_context *context = am_enter(&call, module, PyArray_SIZE(array));
    call.overflow = "a position does not fit int32";
    const am_status status = am_convert_ids(context, &ids, what, pad, dst, &large);
    if (am_leave(&call, status) < 0) return NULL;
    if (large < 0) return am_ref(result);
    am_reject_element(name, what == AM_TO_INTEGERS ? "fit int32" : "be below 2**31", array, large, "");
    return NULL;
}

/* Returns ids as terms of masks need them, int32 and C-contiguous: `ids` itself if it is so already. */
static PyObject *ids_of(PyObject *module, const arguments *a)
{
    am_owned PyArrayObject *array = NULL;
    if (am_to_array(a->object, a->name, &array) < 0) return NULL;
    PyArrayObject *given =
        PyArray_Check(a->object) ? (PyArrayObject *)a->object : array; /* the caller's array, not a copy */
    if (a->out.given && am_check_apart(a->out.array, "out", given, a->name) < 0) return NULL;
    am_array ids;
    if (read_ids(array, a->name, 2, 3, &ids) < 0) return NULL;
    return ids.type == AM_INT32 && PyArray_IS_C_CONTIGUOUS(array)
               ? (PyObject *)am_ref(array)
               : (PyObject *)new_int32(module, array, a->name, AM_TO_IDS, 0);
}
AM_FUNCTION(segment_ids, ids_of(module, a), AM_PARAM("ids", am_to_object, object), AM_ARG(name, am_to_text),
            AM_ARG(out, am_to_out))

/* Returns a copy of integers as int32, of one to three axes. */
static PyObject *copy(PyObject *module, PyObject *object, const char *name)
{
    am_owned PyArrayObject *array = NULL;
    if (am_to_array(object, name, &array) < 0) return NULL;
    return (PyObject *)new_int32(module, array, name, AM_TO_INTEGERS, 0);
}
AM_FUNCTION(int32_copy, copy(module, a->object, a->name), AM_PARAM("array", am_to_object, object),
            AM_ARG(name, am_to_text))

/* Refuses additive biases: see am_check_mask. */
static PyObject *check(PyObject *module, PyObject *object, const char *name)
{
    am_owned PyArrayObject *array = NULL;
    const bool fits = am_to_array(object, name, &array) == 0 && am_check_mask(module, array, name) == 0;
    return fits ? Py_NewRef(Py_None) : NULL;
}
AM_FUNCTION(check_mask, check(module, a->object, a->name), AM_PARAM("array", am_to_object, object),
            AM_ARG(name, am_to_text))

static int to_int32(PyObject *object, const char *name, void *dst)
{
    static const char expected[] = "an integer from -2**31 to 2**31 - 1";
    return am_to_integer(object, name, (am_range){INT32_MIN, INT32_MAX}, expected, dst);
}

AM_FUNCTION(positions_from_segment_ids,
            (PyObject *)new_int32(module, a->array, "segment_ids", AM_TO_POSITIONS, (int32_t)a->pad_value),
            AM_PARAM("segment_ids", am_to_array, array), AM_ARG(pad_value, to_int32))

/* Writes 1 where an id is valid and 0 where it is padding, for ids from segment_ids(). */
static PyObject *mark_valid(PyObject *module, PyArrayObject *ids, PyArray_Descr *dtype)
{
    uint64_t one;
    if (am_dtype_of(PyArray_DESCR(ids)) != AM_INT32 || !PyArray_IS_C_CONTIGUOUS(ids))
        return am_reject_array(PyExc_TypeError, "ids", "a C-contiguous array of int32", ids);
    if (am_bytes_of(Py_True, dtype, &one) < 0) return NULL;
    am_owned PyArrayObject *result = am_new_array(PyArray_NDIM(ids), PyArray_DIMS(ids), dtype);
    if (!result) return NULL;
    return am_computed(module, PyArray_SIZE(ids), am_mark_valid, PyArray_DATA(ids), PyArray_SIZE(ids),
                       PyArray_DATA(result), PyArray_ITEMSIZE(result), one)
               ? (PyObject *)am_ref(result)
               : NULL;
}
AM_FUNCTION(segment_ids_to_token_mask, mark_valid(module, a->array, a->dtype),
            AM_PARAM("ids", am_to_array, array), AM_ARG(dtype, am_to_mask_dtype))

/* --- Lengths --- */

/* Returns `entries` partial sums of counts, of which the first is 0; missing counts are 0. */
static PyObject *sums_of(const ptrdiff_t *counts, ptrdiff_t count, npy_intp entries, PyArray_Descr *dtype)
{
    am_freed ptrdiff_t *sums = am_new(ptrdiff_t, entries);
    if (!sums) return PyErr_NoMemory();
    for (npy_intp i = 1; i < entries; i++) sums[i] = sums[i - 1] + (i <= count ? counts[i - 1] : 0);
    if (am_check_fits(sums[entries - 1], dtype, "segment_ids", "a total length") < 0) return NULL;
    return am_counts_as(sums, entries, dtype);
}

static int to_limit(PyObject *object, const char *name, void *dst)
{
    limit *l = dst;
    l->given = object != Py_None;
    return l->given ? am_to_length(object, name, &l->value) : 0;
}

static PyObject *starts_of(PyObject *module, const arguments *a)
{
    am_freed ptrdiff_t *counts = NULL;
    ptrdiff_t segments = 0, large;
    am_array ids;
    if (read_ids(a->array, "segment_ids", 1, 3, &ids) < 0) return NULL;
    const ptrdiff_t most = a->max_segments.given ? a->max_segments.value : PTRDIFF_MAX;
    if (!am_computed(module, PyArray_SIZE(a->array), am_count_segments, &ids, most, &counts, &segments,
                     &large))
        return NULL;
    if (large >= 0) {
        char expected[64] = "be below 2**63 - 1";
        if (a->max_segments.given)
            PyOS_snprintf(expected, sizeof expected, "be below max_segments = %zd", (Py_ssize_t)most);
        am_reject_element("segment_ids", expected, a->array, large, "");
        return NULL;
    }
    const npy_intp last = a->max_segments.given ? most : segments;
    return last < NPY_MAX_INTP ? sums_of(counts, segments, last + 1, a->dtype) : PyErr_NoMemory();
}
AM_FUNCTION(segment_ids_to_cu_seqlens, starts_of(module, a), AM_PARAM("segment_ids", am_to_array, array),
            AM_PARAM("out_dtype", am_to_integer_dtype, dtype), AM_ARG(max_segments, to_limit))

/* Returns the number of tokens of each segment up to the highest id, as int32, for ids from segment_ids(). */
static PyObject *lens_of(PyObject *module, PyArrayObject *array)
{
    am_owned PyArray_Descr *dtype = PyArray_DescrFromType(NPY_INT32);
    am_freed ptrdiff_t *counts = NULL;
    ptrdiff_t segments = 0, large;
    am_array ids;
    if (read_ids(array, "ids", 2, 3, &ids) < 0) return NULL;
    if (!am_computed(module, PyArray_SIZE(array), am_count_segments, &ids, PTRDIFF_MAX, &counts, &segments,
                     &large))
        return NULL;
    for (ptrdiff_t i = 0; i < segments; i++) {
        if (am_check_fits(counts[i], dtype, "ids", "a length") < 0) return NULL;
    }
    return am_counts_as(counts, segments, dtype);
}
AM_FUNCTION(segment_lens, lens_of(module, a->array), AM_PARAM("ids", am_to_array, array))

/* --- Numbers of tokens --- */

/* Describes int32 ids of the same rows: a side of length 1 along an axis is the same for all rows there. Keys
 * are none if `arrays[1]` is NULL. */
static int read_sides(PyArrayObject *const arrays[2], am_array ids[2])
{
    static const char *const names[] = {"q_ids", "kv_ids"};
    for (int side = 0; side < 2 && arrays[side]; side++) {
        if (read_ids(arrays[side], names[side], 2, 3, &ids[side]) < 0) return -1;
        if (ids[side].type != AM_INT32)
            return am_reject(PyExc_TypeError, names[side], "an array of int32", (PyObject *)arrays[side]);
    }
    if (!arrays[1]) ids[1] = ids[0], ids[1].shape.token = 0;
    for (int side = 0; side < 2; side++) {
        const am_by_axis *other = &ids[1 - side].shape;
        am_array *own = &ids[side];
        if (own->shape.batch == 1) own->shape.batch = other->batch, own->stride.batch = 0;
        if (own->shape.head == 1) own->shape.head = other->head, own->stride.head = 0;
    }
    if (ids[0].shape.batch == ids[1].shape.batch && ids[0].shape.head == ids[1].shape.head) return 0;
    return am_reject(PyExc_ValueError, "kv_ids", "of as many rows as q_ids", (PyObject *)arrays[1]);
}

/* Reads by how much queries are shifted in each batch row, or in all. */
static int read_shifts(PyArrayObject *shifts, am_numbering *n)
{
    const npy_intp count = PyArray_NDIM(shifts) == 1 ? PyArray_DIM(shifts, 0) : -1;
    if (am_dtype_of(PyArray_DESCR(shifts)) != AM_INT64 || (count != 1 && count != n->ids[0].shape.batch))
        return am_reject(PyExc_ValueError, "shifts", "int64 of shape [1] or [batch]", shifts);
    n->shifts = PyArray_BYTES(shifts);
    n->shift_stride = count == 1 ? 0 : PyArray_STRIDE(shifts, 0);
    return 0;
}

/* Returns the numbers of queries; with chunks, a pair of these and of those of keys, which are one array if
 * there are no ids of keys; of queries among keys, None if all stay. */
static PyObject *number(PyObject *module, const arguments *a, am_token_number what)
{
    static const int64_t still = 0;
    am_numbering n = {.what = what, .size = am_min(a->size, LONGEST_CHUNK), .shifts = (const char *)&still};
    if (read_sides(a->ids, n.ids) < 0 || (a->shifts && read_shifts(a->shifts, &n) < 0)) return NULL;
    am_owned PyArrayObject *queries = NULL, *keys = NULL;
    PyArrayObject **const numbers[2] = {&queries, &keys};
    const int count = what == AM_CHUNKS && a->ids[1] ? 2 : 1;
    const bool heads = PyArray_NDIM(a->ids[0]) == 3 || (a->ids[1] && PyArray_NDIM(a->ids[1]) == 3);
    npy_intp tokens = PyArray_SIZE(a->ids[0]);
    for (int side = 0; side < count; side++) {
        npy_intp shape[3] = {n.ids[side].shape.batch, n.ids[side].shape.head};
        shape[1 + heads] = n.ids[side].shape.token;
        *numbers[side] = am_new_array_of(2 + heads, shape, NPY_INT32);
        if (!*numbers[side]) return NULL;
        n.dst[side] = PyArray_DATA(*numbers[side]);
        tokens += PyArray_SIZE(*numbers[side]);
    }
    am_call call;
    const am_context *context = am_enter(&call, module, tokens);
    call.overflow = "the number of a token does not fit int32";
    if (am_leave(&call, am_number_tokens(context, &n)) < 0) return NULL;
    if (what == AM_CHUNKS) return PyTuple_Pack(2, queries, keys ? keys : queries);
    return Py_NewRef(what == AM_EARLIER_TOKENS || n.moved ? (PyObject *)queries : Py_None);
}
#define Q_IDS AM_PARAM("q_ids", am_to_array, ids[0])
AM_FUNCTION(count_earlier_tokens, number(module, a, AM_EARLIER_TOKENS), Q_IDS)
/* Where queries lie among the keys if the first (or last) token of each segment is the same. */
AM_FUNCTION(queries_among_keys, number(module, a, a->last ? AM_SAME_LAST_TOKEN : AM_SAME_FIRST_TOKEN), Q_IDS,
            AM_PARAM("kv_ids", am_to_array, ids[1]), AM_ARG(last, am_to_bool))
AM_FUNCTION(chunks_of_segments, number(module, a, AM_CHUNKS), Q_IDS,
            AM_PARAM("kv_ids", am_to_array_or_none, ids[1]), AM_ARG(size, am_to_count),
            AM_ARG(shifts, am_to_array))

PyMethodDef am_segments_methods[] = {
    AM_METHOD(mask_to_segment_ids, "mask, per_head, strict"),
    AM_METHOD(padding_segment_ids, "attention_mask"),
    AM_METHOD(segment_ids, "ids, name, out"),
    AM_METHOD(int32_copy, "array, name"),
    AM_METHOD(check_mask, "array, name"),
    AM_METHOD(segment_ids_to_token_mask, "ids, dtype"),
    AM_METHOD(positions_from_segment_ids, "segment_ids, pad_value"),
    AM_METHOD(segment_lens, "ids"),
    AM_METHOD(count_earlier_tokens, "q_ids"),
    AM_METHOD(queries_among_keys, "q_ids, kv_ids, last"),
    AM_METHOD(chunks_of_segments, "q_ids, kv_ids, size, shifts"),
    AM_METHOD(segment_ids_to_cu_seqlens, "segment_ids, out_dtype, max_segments"),
    {.ml_name = NULL},
};
