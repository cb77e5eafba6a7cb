/* masks.h – masks as arguments of bindings. */
#ifndef AM_BIND_PYTHON_MASKS_H
#define AM_BIND_PYTHON_MASKS_H

#include "bind/python/numpy.h"
#include "bind/request.h"

/* A request and the objects that its mask is read from. Initialize it to zero; am_free_mask releases it, also
 * after a failure. */
typedef struct {
    am_request request;
    PyObject *nodes;     /* owned */
    PyObject *converted; /* owned: a list of arrays, or NULL */
} am_mask_arg;

/* Reads the terms of a mask whose shape is set already; 0 or -1. */
int am_read_nodes(am_mask_arg *arg, PyObject *nodes);
/* Reads `nodes`, and joins further terms to them by "and"; `nodes` may be NULL if there are such terms. */
int am_read_nodes_and(am_mask_arg *arg, PyObject *nodes, const am_node *terms, int count);
void am_free_mask(am_mask_arg *arg);

/* Checks that `out` shares no memory with the arrays of the mask, which `name` names; 0 or -1. */
int am_check_apart_from_mask(PyArrayObject *out, const am_mask_arg *mask, const char *name);

#endif
