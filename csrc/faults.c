/* faults.c – counts allocations, and lets those fail that a test names. The core's own have a site; those of
 * Python and NumPy come through their hooks, and count in the thread that calls am_faults_call. */
#undef Py_LIMITED_API /* which has no hooks of allocations */
#include "bind/python/numpy.h"

#include <errno.h>
#include <stdatomic.h>

#undef malloc
#undef calloc
#undef realloc
#undef posix_memalign
#undef free

#define EXPORTED __attribute__((visibility("default")))

/* Filled while am_faults_call runs. Allocations have numbers, from 1 on. */
EXPORTED struct {
    atomic_long first, last; /* those that fail; an empty range between calls */
    atomic_long count, failed;
    atomic_long blocks, objects;       /* that are allocated: by the core; by Python and NumPy */
    const am_fault_site *_Atomic site; /* of the last failure; NULL if it has none */
    am_fault_site *const *sites;       /* all */
    long site_count;
    int handler_changed; /* whether the call left NumPy with another one */
} am_faults = {.first = 1};

extern am_fault_site *const __start_am_fault_sites[], *const __stop_am_fault_sites[];
static atomic_bool counting;
static _Thread_local bool counting_objects;

static bool fails(const am_fault_site *site)
{
    if (!atomic_load(&counting)) return false;
    const long number = atomic_fetch_add(&am_faults.count, 1) + 1;
    if (number < am_faults.first || number > am_faults.last) return false;
    atomic_store(&am_faults.site, site);
    atomic_fetch_add(&am_faults.failed, 1);
    return true;
}

/* --- The core's own --- */

bool am_fault(am_fault_site *site)
{
    __atomic_fetch_add(&site->calls, 1, __ATOMIC_RELAXED);
    return fails(site);
}

static void *counted(void *block)
{
    if (block) atomic_fetch_add(&am_faults.blocks, 1);
    return block;
}

void *am_fault_malloc(am_fault_site *site, size_t size)
{
    return am_fault(site) ? NULL : counted(malloc(size));
}

void *am_fault_calloc(am_fault_site *site, size_t count, size_t size)
{
    return am_fault(site) ? NULL : counted(calloc(count, size));
}

void *am_fault_realloc(am_fault_site *site, void *memory, size_t size)
{
    if (am_fault(site)) return NULL;
    void *block = realloc(memory, size);
    return memory ? block : counted(block);
}

int am_fault_memalign(am_fault_site *site, void **memory, size_t alignment, size_t size)
{
    if (am_fault(site)) return ENOMEM;
    const int error = posix_memalign(memory, alignment, size);
    if (error == 0) counted(*memory);
    return error;
}

void am_fault_free(void *memory)
{
    if (memory) atomic_fetch_sub(&am_faults.blocks, 1);
    free(memory);
}

/* --- Those of Python and NumPy: `context` is the allocator that does the work --- */

static void *object(void *memory)
{
    if (memory) atomic_fetch_add(&am_faults.objects, 1);
    return memory;
}

static bool fails_here(void) { return counting_objects && fails(NULL); }

static void *object_malloc(void *context, size_t size)
{
    const PyMemAllocatorEx *own = context;
    return fails_here() ? NULL : object(own->malloc(own->ctx, size));
}

static void *object_calloc(void *context, size_t count, size_t size)
{
    const PyMemAllocatorEx *own = context;
    return fails_here() ? NULL : object(own->calloc(own->ctx, count, size));
}

static void *object_realloc(void *context, void *memory, size_t size)
{
    const PyMemAllocatorEx *own = context;
    if (fails_here()) return NULL;
    void *block = own->realloc(own->ctx, memory, size);
    return memory ? block : object(block);
}

static void object_free(void *context, void *memory)
{
    const PyMemAllocatorEx *own = context;
    if (memory) atomic_fetch_sub(&am_faults.objects, 1);
    own->free(own->ctx, memory);
}

static void hook_allocators(void)
{
    static PyMemAllocatorEx own[3];
    const PyMemAllocatorDomain domains[3] = {PYMEM_DOMAIN_RAW, PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ};
    if (own[0].malloc) return;
    for (int i = 0; i < 3; i++) {
        PyMem_GetAllocator(domains[i], &own[i]);
        PyMemAllocatorEx hook = {&own[i], object_malloc, object_calloc, object_realloc, object_free};
        PyMem_SetAllocator(domains[i], &hook);
    }
}

static void *system_malloc(void *context, size_t size) { return (void)context, malloc(size); }
static void *system_calloc(void *context, size_t n, size_t size) { return (void)context, calloc(n, size); }
static void *system_realloc(void *context, void *p, size_t size) { return (void)context, realloc(p, size); }
static void system_free(void *context, void *p) { (void)context, free(p); }
static PyMemAllocatorEx system_allocator = {NULL, system_malloc, system_calloc, system_realloc, system_free};

static void array_free(void *context, void *memory, size_t size)
{
    (void)size;
    object_free(context, memory);
}

static PyDataMem_Handler array_handler = {
    .name = "attnmask_faults",
    .version = 1,
    .allocator = {.ctx = &system_allocator,
                  .malloc = object_malloc,
                  .calloc = object_calloc,
                  .realloc = object_realloc,
                  .free = array_free},
};

/* Calls `function` while the allocations from `first` to `last` fail, with those of objects or without. */
EXPORTED PyObject *am_faults_call(PyObject *function, long first, long last, int with_objects)
{
    hook_allocators();
    am_faults.sites = __start_am_fault_sites;
    am_faults.site_count = __stop_am_fault_sites - __start_am_fault_sites;
    PyObject *handler = PyCapsule_New(&array_handler, "mem_handler", NULL);
    PyObject *previous = handler ? PyDataMem_SetHandler(handler) : NULL;
    if (!previous) return NULL;
    atomic_store(&am_faults.first, first), atomic_store(&am_faults.last, last);
    atomic_store(&am_faults.count, 0), atomic_store(&am_faults.failed, 0);
    atomic_store(&am_faults.site, NULL);
    counting_objects = with_objects;
    atomic_store(&counting, true);
    PyObject *result = PyObject_CallObject(function, NULL);
    atomic_store(&counting, false);
    counting_objects = false;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *left = PyDataMem_SetHandler(previous);
    am_faults.handler_changed = left != handler;
    Py_XDECREF(left);
    Py_DECREF(previous);
    Py_DECREF(handler);
    PyErr_Restore(type, value, traceback);
    return result;
}
