/* attention.h – what calls of attention without Python's checks have in common. */
#ifndef AM_BIND_PYTHON_ATTENTION_H
#define AM_BIND_PYTHON_ATTENTION_H

#include <stdbool.h>

#include "bind/python/numpy.h"

/* Whether these are shapes of a query, key and value that belong together: four lengths each. */
bool am_shapes_fit(const npy_intp *query, const npy_intp *key, const npy_intp *value);

/* Whether heads seem to lie before tokens, which calls for a warning. */
bool am_heads_seem_first(const npy_intp *query, const npy_intp *key);

/* Reads the scale, None or a float; false if it is unusual. */
bool am_usual_scale(PyObject *object, npy_intp head_dim, double *scale);

/* Reads where the diagonal is; false if the offset is unusual, or calls for a warning. */
bool am_usual_diagonal(PyObject *offset, bool causal, npy_intp queries, npy_intp keys, npy_intp *diagonal);

#endif
