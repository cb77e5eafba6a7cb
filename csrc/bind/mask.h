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

/* Of an axis: so that lengths can be multiplied by the size of an element, and added to AM_FAR. */
static const npy_intp AM_LONGEST = (npy_intp)1 << 56;

/* A mask and what it points at. Starts from zero; am_free_mask releases it, also after a failure. */
typedef struct {
    am_mask mask;
    am_kept *kept;
} am_mask_arg;

/* Reads the terms of a mask whose shape is set. */
int am_read_nodes(am_mask_arg *arg, PyObject *nodes);
void am_free_mask(am_mask_arg *arg);

#endif
