/* mask.h – masks as arguments. */
#ifndef AM_BIND_MASK_H
#define AM_BIND_MASK_H

#include "bind/numpy.h"
#include "core/mask.h"

typedef struct am_kept {
    struct am_kept *next;
    void *memory;
    PyObject *object;
} am_kept;

/* A mask and what it points at. Starts from zero; am_free_mask releases it, also after a failure. */
typedef struct {
    am_mask mask;
    am_kept *kept;
} am_mask_arg;

int am_read_mask(am_mask_arg *arg, PyObject *shape, PyObject *nodes);
void am_free_mask(am_mask_arg *arg);

/* `out` may overlap none of the arrays that the mask points at; 0 or -1. */
int am_check_apart_from_mask(PyArrayObject *out, const am_mask_arg *mask);

#endif
