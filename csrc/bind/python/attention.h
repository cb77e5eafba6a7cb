/* attention.h – what calls of attention without Python's checks have in common. */
#ifndef AM_BIND_PYTHON_ATTENTION_H
#define AM_BIND_PYTHON_ATTENTION_H

#include "bind/python/numpy.h"
#include "bind/request.h"

/* About how many elements a call reads and multiplies, as am_enter asks. */
npy_intp am_attn_work(const am_attn *attn);

/* Whether heads seem to lie before tokens, which calls for a warning. */
bool am_heads_seem_first(const am_attn *attn);

/* Reads the scale, None or a float; false if it is unusual. */
bool am_usual_scale(PyObject *object, npy_intp head_dim, double *scale);

/* Reads where the diagonal is, which is 0 where no offset is given; false if it is unusual, or Python may
 * warn of it. */
bool am_usual_diagonal(PyObject *offset, bool causal, const am_attn *attn, npy_intp *diagonal);

#endif
