/* state.c – crossing the border between Python and the core. */
#include "bind/state.h"

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
