/* merge.c – bindings of merge_attention_states and its gradient. Outs and lses come as a tuple of arrays, or
 * as one array that stacks them along its first axis. */
#include "bind/python/arguments.h"
#include "core/attention/merge.h"

#include <stdio.h>
#include <string.h>

enum { NAME = 48 }; /* bytes, enough for "outs[123]" */

typedef struct {
    PyObject *outs, *lses, *dout, *dlse; /* borrowed; the last two NULL without gradients */
} arguments;

typedef struct {
    PyObject *arrays;     /* a list that owns the arrays */
    am_merge_part *parts; /* [count + 1]: the last one is the gradient */
    npy_intp count;
    int ndim; /* axes of one out: 4, or 3 without a batch axis; 0 until it is known */
    npy_intp dims[4];
    PyArray_Descr *dtype; /* of all outs */
} states;

static am_dtype type_of(const states *a) { return am_dtype_of(a->dtype); }

/* Adds an array to the list that `a` owns, and returns it borrowed; NULL with the exception set. */
static PyArrayObject *own(states *a, PyArrayObject *array)
{
    bool owned = array && PyList_Append(a->arrays, (PyObject *)array) == 0;
    Py_XDECREF((PyObject *)array);
    return owned ? array : NULL;
}

static PyArrayObject *read_array(states *a, PyObject *object, const char *name)
{
    PyArrayObject *array = NULL;
    if (am_to_array(object, name, &array) < 0) return NULL;
    array = own(a, array);
    if (!array || am_is_floating(am_dtype_of(PyArray_DESCR(array)))) return array;
    return am_reject_array(PyExc_TypeError, name, "a floating-point array", array);
}

static int check_out(states *a, PyArrayObject *out, const char *name)
{
    const int ndim = PyArray_NDIM(out);
    if (a->ndim == 0) {
        if (ndim != 3 && ndim != 4)
            return am_reject(PyExc_ValueError, name, "[B, T, H, D] or [T, H, D]", out);
        a->ndim = ndim;
        memcpy(a->dims, PyArray_DIMS(out), (size_t)ndim * sizeof *a->dims);
        a->dtype = am_ref(PyArray_DESCR(out));
        return 0;
    }
    bool alike = ndim == a->ndim && PyArray_CompareLists(PyArray_DIMS(out), a->dims, ndim);
    if (alike && am_dtype_of(PyArray_DESCR(out)) == type_of(a)) return 0;
    am_owned PyObject *what = am_describe(out), *shape = PyArray_IntTupleFromIntp(a->ndim, a->dims);
    if (!what || !shape) return -1;
    return am_fail(alike ? PyExc_TypeError : PyExc_ValueError,
                   "%s must be like outs[0], %S array of shape %R, got %U", name, a->dtype, shape, what);
}

static int read_out(states *a, PyObject *object, const char *name, npy_intp i)
{
    PyArrayObject *out = read_array(a, object, name);
    if (!out || check_out(a, out, name) < 0) return -1;
    a->parts[i].out = am_tokens_of_array(out);
    return 0;
}

/* The shape of an lse, [B, H, T] or [H, T], from that of its out, [B, T, H, D] or [T, H, D]. */
static void find_lse_shape(const states *a, npy_intp shape[3])
{
    const int axes = a->ndim - 1;
    memcpy(shape, a->dims, (size_t)axes * sizeof *shape);
    shape[axes - 2] = a->dims[axes - 1], shape[axes - 1] = a->dims[axes - 2];
}

/* Reads an lse, which is converted to the type of the sums: it is small compared with its out. */
static int read_lse(states *a, PyObject *object, const char *name, npy_intp i)
{
    PyArrayObject *lse = read_array(a, object, name);
    if (!lse) return -1;
    const int axes = a->ndim - 1;
    npy_intp shape[3];
    find_lse_shape(a, shape);
    if (PyArray_NDIM(lse) != axes || !PyArray_CompareLists(PyArray_DIMS(lse), shape, axes)) {
        am_owned PyObject *expected = PyArray_IntTupleFromIntp(axes, shape), *what = am_describe(lse);
        if (!expected || !what) return -1;
        return am_fail(PyExc_ValueError, "%s must be of shape %R as outs, got %U", name, expected, what);
    }
    PyArray_Descr *wide = PyArray_DescrFromType(type_of(a) == AM_FLOAT64 ? NPY_DOUBLE : NPY_FLOAT);
    lse = own(a, (PyArrayObject *)PyArray_FromArray(lse, wide, NPY_ARRAY_FORCECAST));
    if (!lse) return -1;
    const am_view v = am_view_of(lse);
    a->parts[i].lse = am_stats_of(&v);
    return 0;
}

typedef int reader(states *a, PyObject *object, const char *name, npy_intp i);

/* Reads the parts of a tuple or of a stack, whose views are made one at a time: there may be millions. */
static int read_each(states *a, PyObject *list, const char *name, reader *read)
{
    for (npy_intp i = 0; i < a->count; i++) {
        char part[NAME];
        snprintf(part, NAME, "%s[%td]", name, (ptrdiff_t)i);
        am_owned PyObject *object = PySequence_GetItem(list, i);
        if (!object || read(a, object, part, i) < 0) return -1;
        if (i % 1024 == 1023 && PyErr_CheckSignals() < 0) return -1;
    }
    return 0;
}

/* Returns the number of arrays, or -1. A stack of them has `axes` axes, or one less. */
static npy_intp count_of(PyObject *list, const char *name, int axes, const char *layouts)
{
    if (PyTuple_Check(list)) return PyTuple_Size(list);
    const int ndim = PyArray_Check(list) ? PyArray_NDIM((PyArrayObject *)list) : -1;
    if (ndim == axes || ndim == axes - 1) return PyArray_DIM((PyArrayObject *)list, 0);
    if (ndim < 0) return am_reject(PyExc_TypeError, name, "a sequence of arrays", list);
    return am_reject(PyExc_ValueError, name, layouts, list);
}

/* Sequences of arrays as they are now: a tuple, or a view of a stack. Others are refused by count_of. */
static PyObject *fixed(PyObject *list)
{
    return PyArray_Check(list) ? PyArray_View((PyArrayObject *)list, NULL, &PyArray_Type) : Py_NewRef(list);
}

static int read_parts(states *a, PyObject *outs, PyObject *lses)
{
    am_owned PyObject *all = fixed(outs), *stats = all ? fixed(lses) : NULL;
    if (!stats) return -1;
    a->count = count_of(all, "outs", 5, "[N, B, T, H, D] or [N, T, H, D]");
    if (a->count < 0) return -1;
    if (a->count == 0) return am_fail(PyExc_ValueError, "outs must be one array or more, got none");
    const npy_intp others = count_of(stats, "lses", 4, "[N, B, H, T] or [N, H, T]");
    if (others < 0) return -1;
    if (others != a->count)
        return am_fail(PyExc_ValueError, "lses must be %zd arrays as outs, got %zd", a->count, others);
    a->arrays = PyList_New(0);
    a->parts = am_new(am_merge_part, a->count + 1); /* before the views of a stack, which take memory, too */
    if (!a->arrays) return -1;
    if (!a->parts) return am_raise(AM_NO_MEMORY);
    return read_each(a, all, "outs", read_out) < 0 ? -1 : read_each(a, stats, "lses", read_lse);
}

static void release(states *a)
{
    am_release(&a->arrays);
    am_release(&a->dtype);
    free(a->parts);
}

/* Calls the core, and returns a new out and lse; or backward, the gradients of all outs and of all lses. */
static PyObject *run_merge(PyObject *module, const states *a, bool backward)
{
    const int skip = !backward, axes = a->ndim - skip;
    npy_intp dims[5] = {a->count}, lse_dims[4] = {a->count};
    memcpy(dims + 1, a->dims, (size_t)a->ndim * sizeof *dims);
    find_lse_shape(a, lse_dims + 1);
    am_owned PyArrayObject *out = am_new_array(axes + 1, dims + skip, a->dtype), *lse = NULL;
    if (out) lse = am_new_array_of(axes, lse_dims + skip, type_of(a) == AM_FLOAT64 ? NPY_DOUBLE : NPY_FLOAT);
    if (!lse) return NULL;
    am_merge merge = {
        .type = type_of(a),
        .shape = {1, 1, 1, 1}, /* batch, tokens, heads, channels */
        .count = a->count,
        .parts = a->parts,
        .gradient = backward ? &a->parts[a->count] : NULL,
        .out = PyArray_BYTES(out),
        .lse = PyArray_BYTES(lse),
    };
    memcpy(merge.shape + 4 - a->ndim, a->dims, (size_t)a->ndim * sizeof *a->dims);
    npy_intp work = PyArray_SIZE(out) + PyArray_SIZE(lse); /* of one part; backward, of all parts */
    if (!backward) work = work > NPY_MAX_INTP / a->count ? NPY_MAX_INTP : work * a->count;
    return am_computed(module, work, am_merge_states, &merge) ? PyTuple_Pack(2, out, lse) : NULL;
}

static PyObject *merge(PyObject *module, const arguments *given, bool only_check)
{
    am_scoped(release) states a = {0};
    const bool backward = given->dout;
    if (read_parts(&a, given->outs, given->lses) < 0 ||
        (backward && read_out(&a, given->dout, "dout", a.count) < 0) ||
        (backward && given->dlse != Py_None && read_lse(&a, given->dlse, "dlse", a.count) < 0))
        return NULL;
    return only_check ? Py_NewRef(Py_None) : run_merge(module, &a, backward);
}
#define STATES AM_ARG(outs, am_to_object), AM_ARG(lses, am_to_object)
AM_FUNCTION(merge_attention_states, merge(module, a, false), STATES)
AM_FUNCTION(check_merge, merge(module, a, true), STATES)
AM_FUNCTION(merge_backward, merge(module, a, false), STATES, AM_ARG(dout, am_to_object),
            AM_ARG(dlse, am_to_object))

PyMethodDef am_merge_methods[] = {
    AM_METHOD(merge_attention_states, "outs, lses"),
    AM_ENTRY(check_merge),
    AM_METHOD(merge_backward, "outs, lses, dout, dlse"),
    {.ml_name = NULL},
};
