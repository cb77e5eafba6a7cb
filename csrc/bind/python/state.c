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

int am_find_main_thread(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *thread = threading ? PyObject_CallMethod(threading, "main_thread", NULL) : NULL;
    PyObject *ident = thread ? PyObject_GetAttrString(thread, "ident") : NULL;
    unsigned long number = ident ? PyLong_AsUnsignedLong(ident) : 0;
    Py_XDECREF(ident);
    Py_XDECREF(thread);
    Py_XDECREF(threading);
    if (PyErr_Occurred()) return -1;
    atomic_store(&main_thread, number);
    pthread_once(&once, watch_forks);
    return 0;
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

void am_enter(am_call *call, PyObject *module, npy_intp work)
{
    am_state *state = am_state_of(module);
    const am_float_mode mode = am_float_mode_get();
    *call = (am_call){.mode = mode, .context = {.kernels = atomic_load(&state->kernels), .threads = 1}};
    am_float_mode_set(am_float_mode_quiet(mode));
    if (work < SMALL) return;
    call->context.threads = am_threads(state);
    if (PyThread_get_thread_ident() == atomic_load(&main_thread)) call->context.stop = interrupted;
    call->context.stop_arg = call;
    call->python = PyEval_SaveThread();
}

void am_leave(am_call *call)
{
    am_float_mode_set(call->mode);
    if (call->python) PyEval_RestoreThread(call->python);
}

PyObject *am_raise(am_status status, const char *overflow)
{
    if (status == AM_NO_MEMORY) return PyErr_NoMemory();
    if (status == AM_OVERFLOW) PyErr_SetString(PyExc_OverflowError, overflow);
    if (status == AM_FORKED)
        PyErr_SetString(PyExc_RuntimeError, "a signal handler forked this process in the middle of a call, "
                                            "which the child cannot end: its other threads are gone");
    return NULL; /* interrupted: the signal handler's exception is set */
}
