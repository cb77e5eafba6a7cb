/* slots.h – the states that a step updates, as the argument state_indices names them. */
#ifndef AM_BIND_PYTHON_SLOTS_H
#define AM_BIND_PYTHON_SLOTS_H

#include <stddef.h>

#include "bind/python/numpy.h"

/* Reads the slot of each of `rows` batch rows: from -1, which leaves a row out, to slots - 1, each at most
 * once. Returns memory that the caller frees; NULL with the exception set. */
ptrdiff_t *am_read_slots(PyArrayObject *indices, npy_intp rows, npy_intp slots);

#endif
