/* masks.c – bindings of masks. A mask comes as its shape and a tuple of terms and operators in postfix order:
 *
 *     (batch, heads, queries, keys),
 *     (("equal", q_ids, k_ids, False), ("band", None, 0, 0), "and")
 *
 * The result of mask_prepare for another mask of the same shape may take the place of a term. That mask is
 * not read again, and its summaries are used again.
 */
#include "bind/python/masks.h"

#include <string.h>

#include "bind/python/arguments.h"
#include "bind/python/mask_arrays.h"

static const char PREPARED[] = "attnmask.mask";

typedef struct {
    am_mask_arg mask;
    PyArray_Descr *dtype;
    PyObject *live, *dead, *batch, *head; /* borrowed */
    npy_intp q_cell, k_cell;
    am_out out;
} arguments;

void am_free_mask(am_mask_arg *arg)
{
    am_request_free(&arg->request);
    Py_CLEAR(arg->nodes);
    Py_CLEAR(arg->converted);
}

/* Keeps an array that is not the caller's own. */
static int keep_array(am_mask_arg *arg, PyArrayObject *array)
{
    if (!arg->converted) arg->converted = PyList_New(0);
    const int status = arg->converted ? PyList_Append(arg->converted, (PyObject *)array) : -1;
    Py_DECREF(array);
    return status;
}

/* Reads None, an integer, or an array, which is kept with the mask if it is not the caller's. */
static int read_operand(am_mask_arg *arg, PyObject *object, am_operand *o)
{
    PyArrayObject *array = NULL;
    *o = (am_operand){0};
    if (object == Py_None) return 0;
    if (PyLong_Check(object)) {
        o->kind = AM_INTEGER;
        o->number = PyNumber_AsSsize_t(object, NULL); /* clips */
    } else if (PyArray_CheckExact(object) && PyArray_ISBEHAVED_RO((PyArrayObject *)object)) {
        *o = (am_operand){.kind = AM_ARRAY, .view = am_view_of((PyArrayObject *)object)};
    } else {
        o->kind = AM_ARRAY;
        if (am_to_readable(object, "attention_mask", &array) < 0 || keep_array(arg, array) < 0) return -1;
        o->view = am_view_of(array);
    }
    return 0;
}

static int read_term(am_mask_arg *arg, PyObject *term)
{
    am_operand operands[AM_MOST_OPERANDS];
    const Py_ssize_t size = PyTuple_Check(term) ? PyTuple_Size(term) : 0;
    const char *name = size && PyUnicode_Check(PyTuple_GetItem(term, 0))
                           ? PyUnicode_AsUTF8AndSize(PyTuple_GetItem(term, 0), NULL)
                           : NULL;
    const am_node_row *row = name ? am_node_row_named(name) : NULL;
    if (!row || !row->operands)
        return am_reject(PyExc_ValueError, "nodes", "terms that begin with their name", term);
    /* Python has added the offsets of sequences, which come last, to the limits. */
    const Py_ssize_t most = (Py_ssize_t)strlen(row->operands),
                     least = most - (row->kind == AM_TERM_SEQUENCES);
    if (size - 1 < least || size - 1 > most)
        return am_fail(PyExc_ValueError, "nodes: %s must have %zd operands, got %zd", name, least, size - 1);
    if (size - 1 < most) operands[most - 1] = (am_operand){0};
    for (Py_ssize_t i = 1; i < size; i++) {
        if (read_operand(arg, PyTuple_GetItem(term, i), &operands[i - 1]) < 0) return -1;
    }
    return am_raise_refused(&arg->request, am_mask_add(&arg->request, row, operands));
}

/* Reads a term, an operator or a prepared mask. */
static int read_node(am_mask_arg *arg, PyObject *object)
{
    am_request *r = &arg->request;
    if (PyCapsule_IsValid(object, PREPARED)) {
        const am_mask_arg *prepared = PyCapsule_GetPointer(object, PREPARED);
        return am_raise_refused(r, am_mask_include(r, &prepared->request.mask));
    }
    const char *name = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, NULL) : NULL;
    const am_node_row *row = name ? am_node_row_named(name) : NULL;
    return row && !row->operands ? am_raise_refused(r, am_mask_join(r, row->kind)) : read_term(arg, object);
}

/* The number of nodes that an object stands for. */
static ptrdiff_t count_nodes(PyObject *object)
{
    if (!PyCapsule_IsValid(object, PREPARED)) return 1;
    const am_mask_arg *prepared = PyCapsule_GetPointer(object, PREPARED);
    return prepared->request.mask.node_count;
}

int am_read_nodes_and(am_mask_arg *arg, PyObject *nodes, const am_node *more, int more_count)
{
    am_request *r = &arg->request;
    if (nodes && !PyTuple_Check(nodes)) return am_reject(PyExc_TypeError, "nodes", "a tuple", nodes);
    const Py_ssize_t count = nodes ? PyTuple_Size(nodes) : 0;
    ptrdiff_t most = 2 * more_count;
    for (Py_ssize_t i = 0; i < count; i++) most += count_nodes(PyTuple_GetItem(nodes, i));
    arg->nodes = Py_XNewRef(nodes);
    if (!am_mask_begin(r, most)) return am_raise_refused(r, false);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_node(arg, PyTuple_GetItem(nodes, i)) < 0) return -1;
    }
    return am_raise_refused(r, am_mask_end(r, more, more_count));
}

int am_read_nodes(am_mask_arg *arg, PyObject *nodes) { return am_read_nodes_and(arg, nodes, NULL, 0); }

static int to_shape(PyObject *object, const char *name, void *dst)
{
    am_mask *mask = dst;
    ptrdiff_t *const lengths[4] = {&mask->batch, &mask->heads, &mask->queries, &mask->keys};
    if (!PyTuple_Check(object) || PyTuple_Size(object) != 4)
        return am_reject(PyExc_TypeError, name, "a tuple of four integers", object);
    for (int i = 0; i < 4; i++) {
        Py_ssize_t length = PyNumber_AsSsize_t(PyTuple_GetItem(object, i), NULL);
        if (length == -1 && PyErr_Occurred()) return -1;
        if (length < 0 || length > AM_LONGEST)
            return am_reject(PyExc_ValueError, name, "from 0 to 2**56 along each axis", object);
        *lengths[i] = length;
    }
    return 0;
}

/* am_mask_arg *: reads a mask whose shape is set. */
static int to_nodes(PyObject *object, const char *name, void *dst)
{
    (void)name;
    return am_read_nodes(dst, object);
}

static int check_apart_from(PyArrayObject *out, PyObject *nodes, const char *name)
{
    for (Py_ssize_t i = 0; nodes && i < PyTuple_Size(nodes); i++) {
        PyObject *node = PyTuple_GetItem(nodes, i);
        int bad = 0;
        if (PyCapsule_IsValid(node, PREPARED))
            bad = am_check_apart_from_mask(out, PyCapsule_GetPointer(node, PREPARED), name);
        else if (PyTuple_Check(node))
            bad = check_apart_from(out, node, name);
        else if (PyArray_Check(node))
            bad = am_check_apart(out, "out", (PyArrayObject *)node, name);
        if (bad) return -1;
    }
    return 0;
}

int am_check_apart_from_mask(PyArrayObject *out, const am_mask_arg *mask, const char *name)
{
    return check_apart_from(out, mask->nodes, name);
}

/* --- Methods: the number of pairs to compute is not known before, so that all count as large --- */

static void release_mask(void *mask) { am_free_mask(mask); }
#define MASK                                                                                                 \
    AM_PARAM("shape", to_shape, mask.request.mask),                                                          \
    {                                                                                                        \
        .name = "nodes", .convert = to_nodes, .at = offsetof(arguments, mask), .release = release_mask       \
    }

static PyObject *fill(PyObject *module, arguments *a)
{
    am_mask *m = &a->mask.request.mask;
    npy_intp const dims[4] = {m->batch, m->heads, m->queries, m->keys};
    if (!a->dtype) return PyErr_Format(PyExc_TypeError, "dtype must be a dtype, got None");
    am_mask_target target = {.size = PyDataType_ELSIZE(a->dtype)};
    if (am_bytes_of(a->live, a->dtype, &target.live) < 0 || am_bytes_of(a->dead, a->dtype, &target.dead) < 0)
        return NULL;
    am_owned PyArrayObject *out = am_target(&a->out, 4, dims, a->dtype);
    if (!out || (a->out.given && am_check_apart_from_mask(out, &a->mask, "the mask's arrays") < 0))
        return NULL;
    const am_view v = am_view_of(out);
    target.array = am_array_of(&v, AM_HEADS_FIRST);
    return am_computed(module, NPY_MAX_INTP, am_mask_fill, m, &target) ? am_returned(&a->out, out) : NULL;
}
AM_FUNCTION(mask_fill, fill(module, a), MASK, AM_ARG(dtype, am_to_dtype), AM_ARG(live, am_to_object),
            AM_ARG(dead, am_to_object), AM_ARG(out, am_to_out))

static PyObject *count(PyObject *module, am_mask *m)
{
    am_owned PyArrayObject *counts = am_new_array_of(2, (npy_intp[]){m->batch, m->heads}, NPY_INT64);
    if (!counts || !am_computed(module, NPY_MAX_INTP, am_mask_count, m, PyArray_DATA(counts))) return NULL;
    return (PyObject *)am_ref(counts);
}
AM_FUNCTION(mask_count, count(module, &a->mask.request.mask), MASK)

static PyObject *any(PyObject *module, am_mask *m)
{
    npy_intp const q_dims[3] = {m->batch, m->heads, m->queries}, k_dims[3] = {m->batch, m->heads, m->keys};
    am_owned PyArrayObject *queries = am_new_array_of(3, q_dims, NPY_BOOL),
                           *keys = queries ? am_new_array_of(3, k_dims, NPY_BOOL) : NULL;
    if (!keys) return NULL;
    const bool done =
        am_computed(module, NPY_MAX_INTP, am_mask_any, m, PyArray_DATA(queries), PyArray_DATA(keys));
    return done ? PyTuple_Pack(2, queries, keys) : NULL;
}
AM_FUNCTION(mask_any, any(module, &a->mask.request.mask), MASK)

/* Converts an index of the batch, or of the heads. */
static int to_index(PyObject *object, const char *name, ptrdiff_t count, ptrdiff_t *result)
{
    Py_ssize_t index = PyNumber_AsSsize_t(object, PyExc_IndexError);
    if (index == -1 && PyErr_Occurred()) return -1;
    if (index < 0 || index >= count)
        return am_fail(PyExc_IndexError, "%s must be from 0 to %zd, got %zd", name, count - 1, index);
    *result = index;
    return 0;
}

static PyObject *grid(PyObject *module, arguments *a)
{
    am_mask *m = &a->mask.request.mask;
    ptrdiff_t b = 0, h = 0;
    if (to_index(a->batch, "batch", m->batch, &b) < 0 || to_index(a->head, "head", m->heads, &h) < 0)
        return NULL;
    npy_intp const q_cell = a->q_cell < m->queries ? a->q_cell : m->queries + (m->queries == 0),
                   k_cell = a->k_cell < m->keys ? a->k_cell : m->keys + (m->keys == 0),
                   dims[2] = {(m->queries + q_cell - 1) / q_cell, (m->keys + k_cell - 1) / k_cell};
    PyArrayObject *counts = am_new_array_of(2, dims, NPY_INT64);
    if (!counts) return NULL;
    if (!am_computed(module, NPY_MAX_INTP, am_mask_grid, m, b, h, q_cell, k_cell, PyArray_DATA(counts)))
        Py_CLEAR(counts);
    return (PyObject *)counts;
}
AM_FUNCTION(mask_grid, grid(module, a), MASK, AM_ARG(batch, am_to_object), AM_ARG(head, am_to_object),
            AM_ARG(q_cell, am_to_count), AM_ARG(k_cell, am_to_count))

static void free_prepared(PyObject *capsule)
{
    am_mask_arg *prepared = PyCapsule_GetPointer(capsule, PREPARED);
    am_free_mask(prepared);
    free(prepared);
}

/* The mask is moved to the capsule: what its program points to stays where it is. */
static PyObject *prepare(PyObject *module, am_mask_arg *mask)
{
    if (!am_computed(module, NPY_MAX_INTP, am_mask_prepare, &mask->request.mask)) return NULL;
    am_mask_arg *moved = am_new(am_mask_arg, 1);
    PyObject *capsule = moved ? PyCapsule_New(moved, PREPARED, free_prepared) : PyErr_NoMemory();
    if (capsule) {
        *moved = *mask;
        *mask = (am_mask_arg){0};
    } else {
        free(moved);
    }
    return capsule;
}
AM_FUNCTION(mask_prepare, prepare(module, &a->mask), MASK)

static const char *node_name(ptrdiff_t i)
{
    const am_node_row *row = am_node_row_at(i);
    return row ? row->name : NULL;
}
static PyObject *mask_nodes(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return am_names(node_name);
}

PyMethodDef am_mask_methods[] = {
    {"mask_nodes", mask_nodes, METH_NOARGS,
     "mask_nodes($module, /)\n--\n\nThe names of terms and operators, in the order of their numbers."},
    AM_METHOD(mask_prepare, "shape, nodes",
              "Reads a mask once, so that it can be a term of other masks of the same shape."),
    AM_METHOD(mask_fill, "shape, nodes, dtype, live, dead, out"),
    AM_METHOD(mask_count, "shape, nodes"),
    AM_METHOD(mask_any, "shape, nodes"),
    AM_METHOD(mask_grid, "shape, nodes, batch, head, q_cell, k_cell"),
    {.ml_name = NULL},
};
