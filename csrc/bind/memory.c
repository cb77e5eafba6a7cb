/* memory.c – memory for results. Small ones are NumPy's; large ones want large pages, and to be used again.
 *
 * The first touch of a 4 KB page costs four times what writing it does, that of a 2 MB page a seventh. NumPy
 * asks for large pages from 4 MB on, and on any alignment. The last few blocks that were freed are kept, as a
 * caller in a loop asks for the same size again: memory whose pages are there, and may still be in the cache.
 */
#include "bind/state.h"

#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#    include <sys/mman.h>

enum {
    LARGE_PAGE = 2 << 20,
    LARGE_RESULT = 1 << 20, /* bytes from which all this is done */
    LARGEST_KEPT = 16 << 20,
    KEPT = 4,
};

/* What a block holds while nobody uses it. */
typedef struct {
    size_t size;
} kept_block;

static _Atomic(kept_block *) kept[KEPT];
static atomic_uint next_kept;

static size_t whole_pages(size_t size) { return (size + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE; }

/* A kept block of just this size, or NULL. */
static void *take(size_t size)
{
    for (int i = 0; i < KEPT; i++) {
        kept_block *block = atomic_exchange(&kept[i], NULL), *empty = NULL;
        if (!block) continue;
        if (block->size == size) return block;
        if (!atomic_compare_exchange_strong(&kept[i], &empty, block)) free(block);
    }
    return NULL;
}

static void *large_malloc(void *context, size_t size)
{
    (void)context;
    if (size > PTRDIFF_MAX - LARGE_PAGE) return NULL;
    size = whole_pages(size ? size : 1);
    void *memory = take(size);
    if (memory) return memory;
    if (posix_memalign(&memory, LARGE_PAGE, size) != 0) return NULL;
    madvise(memory, size, MADV_HUGEPAGE); /* a wish: it may be refused */
    return memory;
}

static void *large_calloc(void *context, size_t count, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) return NULL;
    void *memory = large_malloc(context, bytes);
    return memory ? memset(memory, 0, bytes) : NULL;
}

static void *large_realloc(void *context, void *memory, size_t size)
{
    (void)context;
    return size > PTRDIFF_MAX - LARGE_PAGE ? NULL : realloc(memory, whole_pages(size ? size : 1));
}

static void large_free(void *context, void *memory, size_t size)
{
    (void)context;
    size = whole_pages(size ? size : 1);
    if (memory && size <= LARGEST_KEPT) {
        kept_block *block = memory;
        block->size = size;
        memory = atomic_exchange(&kept[atomic_fetch_add(&next_kept, 1) % KEPT], block);
    }
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
