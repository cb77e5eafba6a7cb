/* memory.c – memory of results: NumPy allocates small ones, core/runtime/memory_blocks.c large ones. */
#include "bind/python/state.h"

#include <string.h>

#include "core/runtime/memory_blocks.h"

static void *large_malloc(void *context, size_t size)
{
    (void)context;
    return am_buffer_new(size);
}

static void *large_calloc(void *context, size_t count, size_t size)
{
    (void)context;
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) return NULL;
    void *memory = am_buffer_new(bytes);
    return memory ? memset(memory, 0, bytes) : NULL;
}

static void *large_realloc(void *context, void *memory, size_t size)
{
    (void)context;
    return am_buffer_resize(memory, size);
}

static void large_free(void *context, void *memory, size_t size)
{
    (void)context;
    am_buffer_free(memory, size);
}

static PyDataMem_Handler large_handler = {
    .name = "attnmask_large",
    .version = 1,
    .allocator = {.malloc = large_malloc,
                  .calloc = large_calloc,
                  .realloc = large_realloc,
                  .free = large_free},
};

PyArrayObject *am_of_memory(PyObject *array)
{
    if (!array && PyErr_ExceptionMatches(PyExc_ValueError)) PyErr_NoMemory();
    return (PyArrayObject *)array;
}

/* Steals a reference to the dtype, even if it fails. */
static PyArrayObject *new_of_numpy(int ndim, npy_intp const *shape, PyArray_Descr *dtype)
{
    return am_of_memory(PyArray_NewFromDescr(&PyArray_Type, dtype, ndim, shape, NULL, NULL, 0, NULL));
}

static int use_handler(PyObject *handler)
{
    PyObject *previous = PyDataMem_SetHandler(handler);
    Py_XDECREF(previous);
    return previous ? 0 : -1;
}

/* A new array in a block. */
static PyArrayObject *new_of_block(int ndim, npy_intp const *shape, PyArray_Descr *dtype)
{
    PyObject *handler = PyCapsule_New(&large_handler, "mem_handler", NULL);
    PyObject *usual = handler ? PyDataMem_GetHandler() : NULL;
    const bool used = usual && use_handler(handler) == 0;
    PyArrayObject *array = NULL;
    if (used)
        array = new_of_numpy(ndim, shape, dtype);
    else
        Py_DECREF(dtype);
    /* It may be in use although there was no memory to say so, and memory may be there at the next try. */
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (int tries = 0; usual && tries < 3 && use_handler(usual) < 0; tries++) Py_CLEAR(array);
    if (type) PyErr_Restore(type, value, traceback);
    Py_XDECREF(usual);
    Py_XDECREF(handler);
    return array;
}

PyArrayObject *am_new_array(int ndim, npy_intp const *shape, PyArray_Descr *dtype)
{
    npy_intp bytes = PyDataType_ELSIZE(dtype);
    for (int i = 0; i < ndim && 0 < bytes && bytes < AM_BUFFER_BYTES; i++)
        bytes = shape[i] > AM_BUFFER_BYTES ? AM_BUFFER_BYTES : bytes * shape[i];
    for (int i = 0; i < ndim; i++) bytes = shape[i] == 0 ? 0 : bytes;
    return bytes >= AM_BUFFER_BYTES ? new_of_block(ndim, shape, am_ref(dtype))
                                    : new_of_numpy(ndim, shape, am_ref(dtype));
}

PyArrayObject *am_new_array_of(int ndim, npy_intp const *shape, int type_num)
{
    PyArray_Descr *dtype = PyArray_DescrFromType(type_num);
    PyArrayObject *array = am_new_array(ndim, shape, dtype);
    Py_DECREF(dtype);
    return array;
}
