/* weights.h – statistics of the weights of attention, as arrays. */
#ifndef AM_BIND_PYTHON_WEIGHTS_H
#define AM_BIND_PYTHON_WEIGHTS_H

#include "bind/python/numpy.h"
#include "bind/request.h"

/* Which statistics a call asks for, and of which queries. */
typedef struct {
    PyArrayObject *lse;     /* of the chosen queries; NULL: it is found */
    const int64_t *queries; /* `count` of them, in rising order */
    npy_intp count, top;
    PyObject *wanted; /* a tuple of names of results; borrowed */
    bool by_key_head;
    npy_intp sequences, keys; /* of sums of keys */
} am_asked;

/* Computes what is asked. Returns false with an exception set if it cannot. */
typedef bool am_weigh_call(PyObject *module, void *arg, const am_attn_weights *problem);

/* Returns weights, key_sum, entropy, max_logit, top_keys and top_weights, each an array or None. */
PyObject *am_weights_of(PyObject *module, am_request *r, const am_asked *asked, am_weigh_call *call,
                        void *arg);

#endif
