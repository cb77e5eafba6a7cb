/* masks.h – masks as arguments of bindings. */
#ifndef AM_BIND_PYTHON_MASKS_H
#define AM_BIND_PYTHON_MASKS_H

#include "bind/python/numpy.h"
#include "core/masks/mask.h"

/* A list of memory and objects that are released with the mask. */
typedef struct am_kept {
    struct am_kept *next;
    void *memory;
    PyObject *object;
} am_kept;

/* The largest length of an axis: times the size of an element, or added to AM_FAR, it does not overflow. */
static const npy_intp AM_LONGEST = (npy_intp)1 << 56;

/* A mask and the memory that it points at. Initialize it to zero; am_free_mask releases it, also after a
 * failure. */
typedef struct {
    am_mask mask;
    am_kept *kept;
} am_mask_arg;

/* Reads the terms of a mask whose shape is set already; 0 or -1. */
int am_read_nodes(am_mask_arg *arg, PyObject *nodes);
/* The same where `nodes` may be NULL; further terms are joined to them by "and". */
int am_read_nodes_and(am_mask_arg *arg, PyObject *nodes, const am_node *terms, int count);
void am_free_mask(am_mask_arg *arg);

/* Checks that `out` shares no memory with the arrays of the mask, which `name` names; 0 or -1. */
int am_check_apart_from_mask(PyArrayObject *out, const am_mask_arg *mask, const char *name);

#endif
