/* arrays.c – handlers as functions of NumPy's arrays, for runtimes that refuse them and for tests. */
#include "bind/python/arguments.h"
#include "bind/python/state.h"
#include "bind/xla/xla.h"

enum { AXES = 32 };

typedef struct {
    am_xla_buffer buffer;
    int64_t shape[AXES];
} dense;

typedef struct {
    dense *buffers[2]; /* of arguments and results */
    am_xla_buffer **pointers[2];
} held;

static void release(held *h)
{
    for (int side = 0; side < 2; side++) free(h->buffers[side]), free(h->pointers[side]);
}

static am_xla_dtype type_of(PyArrayObject *array)
{
    const am_dtype type = am_kv_dtype_of(PyArray_DESCR(array));
    int found = 1;
    while (found < 64 && am_xla_type_of((am_xla_dtype)found) != type) found++;
    return type == AM_OTHER || found == 64 ? 0 : (am_xla_dtype)found;
}

static int look_at(PyObject *object, bool written, dense *to)
{
    const int flags = written ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO;
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || !PyArray_CHKFLAGS(array, flags) || PyArray_NDIM(array) > AXES ||
        !type_of(array))
        return am_reject(PyExc_TypeError, written ? "results" : "arguments", "dense arrays", object);
    to->buffer = (am_xla_buffer){.struct_size = sizeof to->buffer,
                                 .dtype = type_of(array),
                                 .data = PyArray_SIZE(array) ? PyArray_DATA(array) : NULL,
                                 .rank = PyArray_NDIM(array),
                                 .shape = to->shape};
    for (int i = 0; i < PyArray_NDIM(array); i++) to->shape[i] = PyArray_DIM(array, i);
    return 0;
}

static int look_at_all(PyObject *arrays, am_xla_side side, held *h, am_xla_buffers *to)
{
    const Py_ssize_t count = PyTuple_Size(arrays);
    h->buffers[side] = am_new(dense, count), h->pointers[side] = am_new(am_xla_buffer *, count);
    if (!h->buffers[side] || !h->pointers[side]) return am_raise(AM_NO_MEMORY);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (look_at(PyTuple_GetItem(arrays, i), side == AM_XLA_RESULT, &h->buffers[side][i]) < 0) return -1;
        h->pointers[side][i] = &h->buffers[side][i].buffer;
    }
    *to = (am_xla_buffers){.struct_size = sizeof *to, .count = count, .buffers = h->pointers[side]};
    return 0;
}

/* Calls a handler, which writes to `results`. */
static PyObject *xla_call(PyObject *module, PyObject *args)
{
    am_scoped(release) held h = {0};
    const char *name;
    PyObject *words, *arguments, *results;
    dense attribute;
    am_xla_call_frame frame = {.struct_size = sizeof frame, .stage = AM_XLA_EXECUTE};
    if (!PyArg_ParseTuple(args, "sOO!O!:xla_call", &name, &words, &PyTuple_Type, &arguments, &PyTuple_Type,
                          &results) ||
        look_at(words, false, &attribute) < 0 ||
        look_at_all(arguments, AM_XLA_ARGUMENT, &h, &frame.arguments) < 0 ||
        look_at_all(results, AM_XLA_RESULT, &h, &frame.results) < 0)
        return NULL;
    am_xla_do *compute = am_xla_find(name);
    if (!compute) return PyErr_Format(PyExc_KeyError, "%s", name);
    am_xla_array array = {attribute.buffer.dtype, (size_t)PyArray_SIZE((PyArrayObject *)words),
                          attribute.buffer.data};
    am_xla_name called = {"words", 5};
    int type = AM_XLA_ARRAY;
    frame.attributes = (am_xla_attributes){.struct_size = sizeof frame.attributes,
                                           .count = 1,
                                           .types = &type,
                                           .names = (am_xla_name *[]){&called},
                                           .values = (void *[]){&array}};
    am_state *state = am_state_of(module);
    am_xla_call c = {.frame = &frame,
                     .context = {.kernels = atomic_load(&state->kernels), .threads = am_threads(state)}};
    bool done;
    Py_BEGIN_ALLOW_THREADS done = am_xla_run(&c, compute);
    Py_END_ALLOW_THREADS if (done) Py_RETURN_NONE;
    if (c.request.status != AM_OK) return am_raise(c.request.status), NULL;
    return PyErr_Format(PyExc_ValueError, "%s", am_request_words(&c.request));
}

PyMethodDef am_xla_array_methods[] = {
    {"xla_call", xla_call, METH_VARARGS,
     "xla_call($module, name, words, arguments, results, /)\n--\n\n"
     "Call a handler of XLA on dense arrays, which writes to `results`."},
    {.ml_name = NULL},
};
