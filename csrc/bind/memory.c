/* memory.c – memory of results: NumPy allocates small ones, core/blocks.c large ones. */
#include "bind/state.h"

#include <string.h>

#include "core/blocks.h"

static void *large_malloc(void *context, size_t size)
{
    (void)context;
    return am_block_new(size);
}

static void *large_calloc(void *context, size_t count, size_t size)
{
    (void)context;
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) return NULL;
    void *memory = am_block_new(bytes);
    return memory ? memset(memory, 0, bytes) : NULL;
}

static void *large_realloc(void *context, void *memory, size_t size)
{
    (void)context;
    return am_block_resize(memory, size);
}

static void large_free(void *context, void *memory, size_t size)
{
    (void)context;
    am_block_free(memory, size);
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

PyArrayObject *am_new_array(int ndim, npy_intp const *shape, PyArray_Descr *dtype)
{
    Py_INCREF(dtype);
    npy_intp bytes = PyDataType_ELSIZE(dtype);
    for (int i = 0; i < ndim && 0 < bytes && bytes < AM_BLOCK_BYTES; i++)
        bytes = shape[i] > AM_BLOCK_BYTES ? AM_BLOCK_BYTES : bytes * shape[i];
    for (int i = 0; i < ndim; i++) bytes = shape[i] == 0 ? 0 : bytes;
    if (bytes >= AM_BLOCK_BYTES) {
        PyObject *handler = PyCapsule_New(&large_handler, "mem_handler", NULL);
        PyObject *previous = handler ? PyDataMem_SetHandler(handler) : NULL;
        if (!previous) {
            Py_XDECREF(handler);
            Py_DECREF(dtype);
            return NULL;
        }
        PyArrayObject *array = new_of_numpy(ndim, shape, dtype);
        PyObject *ours = PyDataMem_SetHandler(previous);
        Py_XDECREF(ours);
        Py_DECREF(previous);
        Py_DECREF(handler);
        if (!ours) Py_CLEAR(array);
        return array;
    }
    return new_of_numpy(ndim, shape, dtype);
}

PyArrayObject *am_new_array_of(int ndim, npy_intp const *shape, int type_num)
{
    PyArray_Descr *dtype = PyArray_DescrFromType(type_num);
    PyArrayObject *array = am_new_array(ndim, shape, dtype);
    Py_DECREF(dtype);
    return array;
}
