/* state.h – what the module remembers, and how a binding leaves Python for the core and comes back. */
#ifndef AM_STATE_H
#define AM_STATE_H

#include <stdatomic.h>

#include "bind/numpy.h"
#include "core/float_mode.h"
#include "core/threads.h"

typedef struct {
    _Atomic(const am_kernels *) kernels;
    atomic_int threads; /* 0: as many as OpenMP gives */
} am_state;

static inline am_state *am_state_of(PyObject *module) { return (am_state *)PyModule_GetState(module); }

/* That a large call from this thread may use. */
int am_threads(am_state *state);

/* Once, at import; 0 or -1. */
int am_find_main_thread(void);

/* Between am_enter and am_leave the GIL is released, unless `work` (elements touched) is too little to be
 * worth it, and floating-point exceptions do not trap; afterwards their flags are as before. */
typedef struct {
    am_run run;
    PyThreadState *python;
    am_float_mode mode; /* before */
} am_call;
void am_enter(am_call *call, PyObject *module, npy_intp work);
void am_leave(am_call *call);

/* Sets the exception for `status`; `overflow` says which result does not fit. Returns NULL. */
PyObject *am_raise(am_status status, const char *overflow);

/* A new C-contiguous array, or NULL with the exception set. Steals nothing. Large ones are backed by huge
 * pages, which are used again. */
PyArrayObject *am_new_array(int ndim, npy_intp const *shape, PyArray_Descr *dtype);
PyArrayObject *am_new_array_of(int ndim, npy_intp const *shape, int type_num);

/* The methods of each topic, and what its file adds to the module. */
extern PyMethodDef am_packed_methods[], am_cumsum_methods[], am_mask_methods[], am_segments_methods[],
    am_pairs_methods[], am_merge_methods[], am_flash_methods[], am_xla_methods[];

#endif
