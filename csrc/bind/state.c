/* state.c – crossing the border between Python and the core. */
#include "bind/state.h"

#include <stdlib.h>
#ifdef __linux__
#    include <sys/mman.h>
#endif

/* Below this many elements waking a thread or handing over the GIL costs more than the work. */
static const npy_intp SMALL = 1 << 14;

int am_threads(am_state *state)
{
    int threads = atomic_load(&state->threads);
    return threads ? threads : am_default_threads();
}

/* Called by the thread that holds the Python thread state: may Ctrl-C end this? */
static bool interrupted(void *arg)
{
    am_call *call = arg;
    PyEval_RestoreThread(call->python);
    bool stop = PyErr_CheckSignals() != 0;
    call->python = PyEval_SaveThread();
    return stop;
}

void am_enter(am_call *call, PyObject *module, npy_intp work)
{
    am_state *state = am_state_of(module);
    *call = (am_call){.run = {.kernels = atomic_load(&state->kernels), .threads = 1}};
    if (work < SMALL) return;
    call->run.threads = am_threads(state);
    call->run.stop = interrupted;
    call->run.stop_arg = call;
    call->python = PyEval_SaveThread();
}

void am_leave(am_call *call)
{
    if (call->python) PyEval_RestoreThread(call->python);
}

PyObject *am_raise(am_status status, const char *overflow)
{
    if (status == AM_NO_MEMORY) return PyErr_NoMemory();
    if (status == AM_OVERFLOW) PyErr_SetString(PyExc_OverflowError, overflow);
    return NULL; /* interrupted: the signal handler's exception is set */
}

/* Memory for large results. The first touch of a 4 KB page costs four times what writing it does, that of a 2
 * MB page a seventh; NumPy asks for large pages from 4 MB on, and on any alignment. */
#ifdef __linux__
enum { LARGE_PAGE = 2 << 20, LARGE_RESULT = 1 << 20 };

static void *large_malloc(void *context, size_t size)
{
    (void)context;
    void *memory = NULL;
    if (size > PTRDIFF_MAX - LARGE_PAGE) return NULL;
    size = (size + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    if (posix_memalign(&memory, LARGE_PAGE, size) != 0) return NULL;
    madvise(memory, size, MADV_HUGEPAGE); /* a wish: it may be refused */
    return memory;
}

static void *large_calloc(void *context, size_t count, size_t size)
{
    (void)context;
    return calloc(count, size);
}

static void *large_realloc(void *context, void *memory, size_t size)
{
    (void)context;
    return realloc(memory, size);
}

static void large_free(void *context, void *memory, size_t size)
{
    (void)context;
    (void)size;
    free(memory);
}

static PyDataMem_Handler large_handler = {
    .name = "attnmask_large",
    .version = 1,
    .allocator = {.malloc = large_malloc,
                  .calloc = large_calloc,
                  .realloc = large_realloc,
                  .free = large_free},
};
#endif

PyArrayObject *am_new_array(int ndim, npy_intp const *shape, PyArray_Descr *dtype)
{
    Py_INCREF(dtype);
#ifdef __linux__
    npy_intp bytes = PyDataType_ELSIZE(dtype);
    for (int i = 0; i < ndim && bytes < LARGE_RESULT; i++)
        bytes = shape[i] > LARGE_RESULT ? LARGE_RESULT : bytes * shape[i];
    for (int i = 0; i < ndim; i++) bytes = shape[i] == 0 ? 0 : bytes;
    if (bytes >= LARGE_RESULT) {
        PyObject *handler = PyCapsule_New(&large_handler, "mem_handler", NULL);
        PyObject *previous = handler ? PyDataMem_SetHandler(handler) : NULL;
        if (!previous) {
            Py_XDECREF(handler);
            Py_DECREF(dtype);
            return NULL;
        }
        PyArrayObject *array =
            (PyArrayObject *)PyArray_NewFromDescr(&PyArray_Type, dtype, ndim, shape, NULL, NULL, 0, NULL);
        PyObject *ours = PyDataMem_SetHandler(previous);
        Py_XDECREF(ours);
        Py_DECREF(previous);
        Py_DECREF(handler);
        if (!ours) Py_CLEAR(array);
        return array;
    }
#endif
    return (PyArrayObject *)PyArray_NewFromDescr(&PyArray_Type, dtype, ndim, shape, NULL, NULL, 0, NULL);
}

PyArrayObject *am_new_array_of(int ndim, npy_intp const *shape, int type_num)
{
    PyArray_Descr *dtype = PyArray_DescrFromType(type_num);
    PyArrayObject *array = am_new_array(ndim, shape, dtype);
    Py_DECREF(dtype);
    return array;
}
