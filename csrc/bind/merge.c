/* merge.c – bindings of merge_attention_states and its gradient: outs and lses come as tuples of as many
 * arrays. */
#include "bind/args.h"
#include "core/merge.h"

#include <stdio.h>
#include <string.h>

enum { NAME = 48 }; /* room for "outs[123]" */

typedef struct {
    PyArrayObject **outs, **lses; /* owned; behind those of the parts there is room for the gradient's */
    am_merge_part *parts;
    npy_intp count; /* of parts */
    int ndim;       /* 4, or 3 without a batch axis */
    am_dtype type;
} arguments;

static int check_count(PyObject *outs, PyObject *lses)
{
    PyObject *const both[] = {outs, lses};
    for (int i = 0; i < 2; i++) {
        if (!PyTuple_Check(both[i]))
            return am_reject(PyExc_TypeError, i ? "lses" : "outs", "a tuple", both[i]);
    }
    if (PyTuple_GET_SIZE(outs) == 0) {
        PyErr_SetString(PyExc_ValueError, "outs must be one array or more, got none");
        return -1;
    }
    if (PyTuple_GET_SIZE(outs) != PyTuple_GET_SIZE(lses)) {
        PyErr_Format(PyExc_ValueError, "lses must be %zd arrays as outs, got %zd", PyTuple_GET_SIZE(outs),
                     PyTuple_GET_SIZE(lses));
        return -1;
    }
    return 0;
}

static void name_part(const arguments *a, npy_intp i, const char *what, char *name)
{
    if (i == a->count)
        snprintf(name, NAME, "d%s", what);
    else
        snprintf(name, NAME, "%ss[%td]", what, (ptrdiff_t)i);
}

/* Part i's out, like the first one. */
static int read_out(arguments *a, npy_intp i, PyObject *object)
{
    char name[NAME];
    name_part(a, i, "out", name);
    if (am_to_array(object, name, &a->outs[i]) < 0) return -1;
    PyArrayObject *out = a->outs[i], *first = a->outs[0];
    am_dtype type = am_dtype_of(PyArray_DESCR(out));
    if (!am_is_floating(type))
        return am_reject(PyExc_TypeError, name, "a floating-point array", (PyObject *)out);
    if (i == 0) {
        a->ndim = PyArray_NDIM(out);
        a->type = type;
        if (a->ndim == 3 || a->ndim == 4) return 0;
        return am_reject(PyExc_ValueError, name, "[B, T, H, D] or [T, H, D]", (PyObject *)out);
    }
    bool alike =
        PyArray_NDIM(out) == a->ndim && PyArray_CompareLists(PyArray_DIMS(out), PyArray_DIMS(first), a->ndim);
    if (alike && type == a->type) return 0;
    PyObject *what = am_describe((PyObject *)out), *expected = am_describe((PyObject *)first);
    if (what && expected)
        PyErr_Format(alike ? PyExc_TypeError : PyExc_ValueError, "%s must be like outs[0], %U, got %U", name,
                     expected, what);
    Py_XDECREF(what);
    Py_XDECREF(expected);
    return -1;
}

/* Part i's lse, in the precision that is computed in: these arrays are small beside the outs. */
static int read_lse(arguments *a, npy_intp i, PyObject *object)
{
    char name[NAME];
    name_part(a, i, "lse", name);
    PyArrayObject *lse = NULL;
    if (am_to_array(object, name, &lse) < 0) return -1;
    a->lses[i] = lse;
    if (!am_is_floating(am_dtype_of(PyArray_DESCR(lse))))
        return am_reject(PyExc_TypeError, name, "a floating-point array", (PyObject *)lse);
    const npy_intp *dims = PyArray_DIMS(a->outs[0]);
    const int heads = a->ndim - 2, tokens = a->ndim - 3;
    npy_intp const shapes[2][3] = {{dims[heads], dims[tokens]}, {dims[0], dims[heads], dims[tokens]}};
    const npy_intp *shape = shapes[a->ndim == 4];
    if (PyArray_NDIM(lse) != a->ndim - 1 || !PyArray_CompareLists(PyArray_DIMS(lse), shape, a->ndim - 1)) {
        PyObject *expected = PyArray_IntTupleFromIntp(a->ndim - 1, shape);
        PyObject *what = am_describe((PyObject *)lse);
        if (expected && what)
            PyErr_Format(PyExc_ValueError, "%s must be of shape %R as outs, got %U", name, expected, what);
        Py_XDECREF(expected);
        Py_XDECREF(what);
        return -1;
    }
    PyArray_Descr *wide = PyArray_DescrFromType(a->type == AM_FLOAT64 ? NPY_DOUBLE : NPY_FLOAT);
    a->lses[i] = (PyArrayObject *)PyArray_FromArray(lse, wide, NPY_ARRAY_FORCECAST);
    Py_DECREF(lse);
    return a->lses[i] ? 0 : -1;
}

static void describe_part(const arguments *a, npy_intp i)
{
    am_merge_part *part = &a->parts[i];
    part->out = PyArray_BYTES(a->outs[i]);
    for (int axis = 0; axis < a->ndim; axis++)
        part->out_stride[axis + 4 - a->ndim] = PyArray_STRIDE(a->outs[i], axis);
    if (!a->lses[i]) return;
    part->lse = PyArray_BYTES(a->lses[i]);
    for (int axis = 0; axis < a->ndim - 1; axis++)
        part->lse_stride[axis + 4 - a->ndim] = PyArray_STRIDE(a->lses[i], axis);
}

static int read_parts(arguments *a, PyObject *outs, PyObject *lses)
{
    if (check_count(outs, lses) < 0) return -1;
    a->count = PyTuple_GET_SIZE(outs);
    size_t count = (size_t)a->count + 1;
    a->outs = PyMem_Calloc(count, sizeof(PyArrayObject *));
    a->lses = PyMem_Calloc(count, sizeof(PyArrayObject *));
    a->parts = PyMem_Calloc(count, sizeof *a->parts);
    if (!a->outs || !a->lses || !a->parts) {
        PyErr_NoMemory();
        return -1;
    }
    for (npy_intp i = 0; i < a->count; i++) {
        if (read_out(a, i, PyTuple_GET_ITEM(outs, i)) < 0) return -1;
    }
    for (npy_intp i = 0; i < a->count; i++) {
        if (read_lse(a, i, PyTuple_GET_ITEM(lses, i)) < 0) return -1;
        describe_part(a, i);
    }
    return 0;
}

static void release(arguments *a)
{
    for (npy_intp i = 0; i <= a->count; i++) {
        if (a->outs) Py_XDECREF(a->outs[i]);
        if (a->lses) Py_XDECREF(a->lses[i]);
    }
    PyMem_Free(a->outs);
    PyMem_Free(a->lses);
    PyMem_Free(a->parts);
}

typedef am_status merger(const am_run *run, const am_merge *merge);

/* Calls the core, and returns what it fills: an out and an lse, or those of the gradients of all parts.
 */
static PyObject *run_merge(PyObject *module, const arguments *a, merger *function, bool backward)
{
    npy_intp shape[5] = {a->count}, lse_shape[4] = {a->count};
    memcpy(shape + 1, PyArray_DIMS(a->outs[0]), (size_t)a->ndim * sizeof *shape);
    memcpy(lse_shape + 1, PyArray_DIMS(a->lses[0]), (size_t)(a->ndim - 1) * sizeof *shape);
    const int skip = !backward;
    PyObject *result = NULL;
    PyArrayObject *out = am_new_array(a->ndim + 1 - skip, shape + skip, PyArray_DESCR(a->outs[0]));
    PyArrayObject *lse = am_new_array(a->ndim - skip, lse_shape + skip, PyArray_DESCR(a->lses[0]));
    if (!out || !lse) goto fail;
    am_merge merge = {
        .type = a->type,
        .shape = {1, 1, 1, 1},
        .count = a->count,
        .parts = a->parts,
        .gradient = &a->parts[a->count],
        .out = PyArray_BYTES(out),
        .lse = PyArray_BYTES(lse),
    };
    for (int axis = 0; axis < a->ndim; axis++)
        merge.shape[axis + 4 - a->ndim] = PyArray_DIM(a->outs[0], axis);
    am_call call;
    npy_intp work = PyArray_SIZE(a->outs[0]) + PyArray_SIZE(a->lses[0]);
    am_enter(&call, module, work > NPY_MAX_INTP / a->count ? NPY_MAX_INTP : work * a->count);
    am_status status = function(&call.run, &merge);
    am_leave(&call);
    if (status == AM_OK)
        result = PyTuple_Pack(2, out, lse);
    else
        am_raise(status, NULL);
fail:
    Py_XDECREF(out);
    Py_XDECREF(lse);
    return result;
}

static PyObject *merge_attention_states(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    arguments a = {0};
    PyObject *outs, *lses, *result = NULL;
    const am_param params[] = {{"outs", am_to_object, &outs}, {"lses", am_to_object, &lses}};
    if (am_parse("merge_attention_states", args, nargs, params, 2) == 0 && read_parts(&a, outs, lses) == 0)
        result = run_merge(module, &a, am_merge_states, false);
    release(&a);
    return result;
}

static PyObject *merge_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    arguments a = {0};
    PyObject *outs, *lses, *dout, *dlse, *result = NULL;
    const am_param params[] = {
        {"outs", am_to_object, &outs},
        {"lses", am_to_object, &lses},
        {"dout", am_to_object, &dout},
        {"dlse", am_to_object, &dlse},
    };
    if (am_parse("merge_backward", args, nargs, params, 4) < 0 || read_parts(&a, outs, lses) < 0) goto fail;
    if (read_out(&a, a.count, dout) < 0) goto fail;
    if (dlse != Py_None && read_lse(&a, a.count, dlse) < 0) goto fail;
    describe_part(&a, a.count);
    result = run_merge(module, &a, am_merge_backward, true);
fail:
    release(&a);
    return result;
}

PyMethodDef am_merge_methods[] = {
    {"merge_attention_states", (PyCFunction)(void *)merge_attention_states, METH_FASTCALL,
     "merge_attention_states($module, outs, lses, /)\n--\n\n"},
    {"merge_backward", (PyCFunction)(void *)merge_backward, METH_FASTCALL,
     "merge_backward($module, outs, lses, dout, dlse, /)\n--\n\n"},
    {.ml_name = NULL},
};
