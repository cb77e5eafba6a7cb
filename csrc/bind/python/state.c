/* state.c – how a binding leaves Python for the core and comes back. */
#include "bind/python/state.h"

#include <pthread.h>

#include "core/runtime/openmp.h"

/* With fewer elements, waking a thread or releasing the GIL costs more than the work. */
static const npy_intp SMALL = 1 << 14;

int am_threads(am_state *state) { return am_openmp_threads(atomic_load(&state->threads)); }

/* The thread that handles signals. Only this one polls for them: Python handles them in no other. Were the
 * interpreter to end while another thread polls, that thread would end in the poll, and the threads of its
 * team would lose its stack. */
static atomic_ulong main_thread;

static void stay_main_thread(void) { atomic_store(&main_thread, PyThread_get_thread_ident()); }
static void watch_forks(void) { pthread_atfork(NULL, NULL, stay_main_thread); }

/* Each helper's name, and what it must return, as C reads that without another look. */
typedef enum { TEXT, ARRAY, TUPLE, TRUTH, NOTHING } answer;
static const struct {
    const char *name;
    answer answer;
} helper_rows[AM_HELPERS] = {
    [AM_DESCRIBE] = {"describe", TEXT},      [AM_AS_ARRAY] = {"as_array", ARRAY},
    [AM_MASK_ARRAY] = {"mask_array", ARRAY}, [AM_SHARE_MEMORY] = {"share_memory", TRUTH},
    [AM_TABLE] = {"table_of", ARRAY},        [AM_TOKENS_BEFORE] = {"tokens_before", ARRAY},
    [AM_OPTIONS] = {"options", TUPLE},       [AM_MASK_PROGRAM] = {"mask_program", TUPLE},
    [AM_HABIT] = {"habit", NOTHING},
};
static PyObject *helpers[AM_HELPERS]; /* kept for good, as the handlers of forks are */

PyObject *am_use(PyObject *module, PyObject *args, PyObject *keywords)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    PyObject *found[AM_HELPERS];
    unsigned long ident;
    (void)module;
    if (!PyArg_ParseTuple(args, "k:use", &ident)) return NULL;
    for (int i = 0; i < AM_HELPERS; i++) {
        found[i] = keywords ? PyDict_GetItemString(keywords, helper_rows[i].name) : NULL;
        if (!found[i]) return PyErr_Format(PyExc_TypeError, "use() needs %s=", helper_rows[i].name);
    }
    for (int i = 0; i < AM_HELPERS; i++) am_replace(&helpers[i], Py_NewRef(found[i]));
    atomic_store(&main_thread, ident);
    pthread_once(&once, watch_forks);
    Py_RETURN_NONE;
}

/* Returns the object if it is what the helper must return; else NULL with the exception set. */
static PyObject *checked(am_helper helper, PyObject *object)
{
    static const char *const words[] = {[TEXT] = "a string",
                                        [ARRAY] = "an array",
                                        [TUPLE] = "a tuple",
                                        [TRUTH] = "a bool",
                                        [NOTHING] = "None"};
    const answer expected = helper_rows[helper].answer;
    const bool right[] = {[TEXT] = PyUnicode_Check(object),
                          [ARRAY] = PyArray_Check(object),
                          [TUPLE] = PyTuple_Check(object),
                          [TRUTH] = PyBool_Check(object),
                          [NOTHING] = object == Py_None};
    if (right[expected]) return object;
    am_owned PyObject *type = PyType_GetName(Py_TYPE(object));
    if (type)
        am_fail(PyExc_TypeError, "%s() must return %s, got an object of type %U", helper_rows[helper].name,
                words[expected], type);
    Py_DECREF(object);
    return NULL;
}

static PyObject *ask(am_helper helper, const char *format, va_list values)
{
    am_owned PyObject *given = Py_VaBuildValue(format, values);
    if (!given) return NULL;
    /* While the package is being imported, an argument is at most a variable of the environment. */
    PyObject *object = helpers[helper] ? PyObject_CallObject(helpers[helper], given)
                                       : PyObject_Repr(PyTuple_GetItem(given, 0));
    return object ? checked(helper, object) : NULL;
}

PyObject *am_ask(am_helper helper, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    PyObject *found = ask(helper, format, values);
    va_end(values);
    return found;
}

int am_habit(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    am_owned PyObject *found = ask(AM_HABIT, format, values);
    va_end(values);
    return found ? 0 : -1;
}

/* Whether a signal handler, such as that of Ctrl-C, ends the call. Only the thread that owns the call's
 * thread state may ask. Handlers run in the caller's floating-point mode, whatever the call computes in, and
 * may change it. */
static bool interrupted(void *arg)
{
    am_call *call = arg;
    const am_float_mode computing = am_float_mode_get();
    am_float_mode_set(call->mode);
    PyEval_RestoreThread(call->python);
    bool stop = PyErr_CheckSignals() != 0;
    call->python = PyEval_SaveThread();
    call->mode = am_float_mode_get();
    am_float_mode_set(computing);
    return stop;
}

const am_context *am_enter(am_call *call, PyObject *module, npy_intp work)
{
    am_state *state = am_state_of(module);
    const am_float_mode mode = am_float_mode_get();
    *call = (am_call){.mode = mode, .context = {.kernels = atomic_load(&state->kernels), .threads = 1}};
    am_float_mode_set(am_float_mode_quiet(mode));
    if (work < SMALL) return &call->context;
    call->context.threads = am_threads(state);
    if (PyThread_get_thread_ident() == atomic_load(&main_thread)) call->context.stop = interrupted;
    call->context.stop_arg = call;
    call->python = PyEval_SaveThread();
    return &call->context;
}

int am_leave(am_call *call, am_status status)
{
    am_float_mode_set(call->mode);
    if (call->python) PyEval_RestoreThread(call->python);
    return status == AM_OVERFLOW ? am_fail(PyExc_OverflowError, "%s", call->overflow) : am_raise(status);
}

int am_raise(am_status status)
{
    if (status == AM_OK) return 0;
    if (status == AM_NO_MEMORY) PyErr_NoMemory();
    if (status == AM_FORKED)
        PyErr_SetString(PyExc_RuntimeError, "a signal handler forked this process in the middle of a call, "
                                            "which the child cannot end: its other threads are gone");
    return -1; /* interrupted: the signal handler's exception is set */
}

int am_fail(PyObject *exception, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    PyErr_FormatV(exception, format, values);
    va_end(values);
    return -1;
}
