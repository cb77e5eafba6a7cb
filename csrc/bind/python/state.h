/* state.h – the state of the module, and how a binding leaves Python for the core and comes back. */
#ifndef AM_BIND_PYTHON_STATE_H
#define AM_BIND_PYTHON_STATE_H

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "bind/python/numpy.h"
#include "core/runtime/float_mode.h"
#include "core/runtime/threads.h"

/* Variables whose contents are released where their scope ends: by a function, as references to objects, or
 * by `free`. They must be initialized. */
#define am_scoped(release) __attribute__((cleanup(release)))
#define am_owned am_scoped(am_release)
#define am_freed am_scoped(am_free)
static inline void am_release(void *reference)
{
    PyObject *object; /* the variable may point to another type */
    memcpy(&object, reference, sizeof object);
    Py_XDECREF(object);
}
/* A variable takes over the reference `object`. */
static inline void am_replace(void *reference, void *object)
{
    void *before;
    memcpy(&before, reference, sizeof before);
    memcpy(reference, &object, sizeof object);
    am_release(&before);
}
static inline void am_free(void *pointer)
{
    void *memory;
    memcpy(&memory, pointer, sizeof memory);
    free(memory);
}

/* A new reference, of the type that the given one has. */
#define am_ref(object) ((__typeof__(object))Py_NewRef((PyObject *)(object)))

typedef struct {
    _Atomic(const am_kernels *) kernels;
    atomic_int threads; /* 0: as many as OpenMP gives */
} am_state;

static inline am_state *am_state_of(PyObject *module) { return (am_state *)PyModule_GetState(module); }

/* The number of threads that a large call from this thread may use. */
int am_threads(am_state *state);

/* Functions of the package's Python modules that C calls, for what is seldom given or needs many words. */
typedef enum {
    AM_DESCRIBE,
    AM_AS_ARRAY,
    AM_MASK_ARRAY,
    AM_SHARE_MEMORY,
    AM_TABLE,
    AM_TOKENS_BEFORE,
    AM_OPTIONS,
    AM_MASK_PROGRAM,
    AM_HABIT,
    AM_HELPERS,
} am_helper;

/* The method `use`, which attnmask/__init__.py calls once: takes the thread that handles signals, and all
 * helpers by their names. */
PyObject *am_use(PyObject *module, PyObject *args, PyObject *keywords);
/* Calls a helper with a tuple of arguments. What it returns is of the type that state.c's table says. */
PyObject *am_ask(am_helper helper, const char *format, ...);
/* Has Python look for habits of other libraries: 0, or -1 where one is an error. `format` is a tuple of a
 * kind of habits (attnmask/_faces/habits.py) and of what they look at. Ask where a cheap test finds it
 * possible. */
int am_habit(const char *format, ...);

/* Between am_enter and am_leave the GIL is released, unless `work`, a number of elements, is too little to be
 * worth it. Floating-point exceptions do not trap, and am_leave restores their flags. */
typedef struct {
    am_context context;
    PyThreadState *python;
    am_float_mode mode;   /* the caller's */
    const char *overflow; /* the message of AM_OVERFLOW; NULL until it is set */
} am_call;
const am_context *am_enter(am_call *call, PyObject *module, npy_intp work);
/* 0; or -1 with the exception for `status` set. */
int am_leave(am_call *call, am_status status);

/* Calls a function of the core, whose first argument is the context, between the two. False with the
 * exception set if it fails. */
#define am_computed(module, work, function, ...)                                                             \
    ({                                                                                                       \
        am_call away_;                                                                                       \
        const am_context *context_ = am_enter(&away_, module, work);                                         \
        am_leave(&away_, function(context_, __VA_ARGS__)) == 0;                                              \
    })

/* Set an exception: that for `status`, or the given one. Return -1. */
int am_raise(am_status status);
int am_fail(PyObject *exception, const char *format, ...);

/* Return a new C-contiguous array, or NULL with the exception set; they steal no reference. Large arrays lie
 * in blocks (core/runtime/memory_blocks.h). */
PyArrayObject *am_new_array(int ndim, npy_intp const *shape, PyArray_Descr *dtype);
PyArrayObject *am_new_array_of(int ndim, npy_intp const *shape, int type_num);

/* The array that NumPy has made. If it has not, because "array is too big", the exception becomes
 * MemoryError. */
PyArrayObject *am_of_memory(PyObject *array);

/* A function of positional arguments and, after their names, its documentation. */
#define AM_METHOD(name, parameters, ...)                                                                     \
    {#name, (PyCFunction)(void *)name, METH_FASTCALL,                                                        \
     #name "($module, " parameters ", /)\n--\n\n" __VA_ARGS__}

/* A function whose positional arguments are those of a row (attnmask/_faces/), in its order. */
#define AM_ENTRY(name)                                                                                       \
    {#name, (PyCFunction)(void *)name, METH_FASTCALL, #name "($module, /, *arguments)\n--\n\n"}

/* A function that calls another one with its own arguments and some more. */
#define AM_VARIANT(name, function, ...)                                                                      \
    static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t nargs)                         \
    {                                                                                                        \
        return function(module, args, nargs, __VA_ARGS__);                                                   \
    }

/* Functions that only tests call. Releases lack them (setup.py). */
#ifdef AM_FOR_TESTS
#    define AM_TOPICS_FOR_TESTS(DO) DO(kernel) DO(schedule)
#else
#    define AM_TOPICS_FOR_TESTS(DO)
#endif

/* The methods of each topic, which its file has. */
#define AM_EACH_TOPIC_OF_METHODS(DO)                                                                         \
    DO(packed)                                                                                               \
    DO(cumsum)                                                                                               \
    DO(mask)                                                                                                 \
    DO(segments)                                                                                             \
    DO(pairs)                                                                                                \
    DO(merge)                                                                                                \
    DO(flash)                                                                                                \
    DO(kvcache)                                                                                              \
    DO(quantize)                                                                                             \
    DO(xla)                                                                                                  \
    DO(xla_array)                                                                                            \
    DO(tensors)                                                                                              \
    DO(short_convolution)                                                                                    \
    DO(linear_attention)                                                                                     \
    AM_TOPICS_FOR_TESTS(DO)
#define AM_DECLARE_METHODS(topic) extern PyMethodDef am_##topic##_methods[];
AM_EACH_TOPIC_OF_METHODS(AM_DECLARE_METHODS)

#endif
