/* mask_arrays.h – dense masks as arguments and as results of bindings. */
#ifndef AM_BIND_PYTHON_MASK_ARRAYS_H
#define AM_BIND_PYTHON_MASK_ARRAYS_H

#include "bind/python/arguments.h"
#include "core/arrays/mask_rows.h"

/* Refuses an array that must be an additive bias rather than a mask: a floating one with a negative or
 * non-finite number, or with zeros alone; 0 or -1. */
int am_check_mask(PyObject *module, PyArrayObject *array, const char *name);

/* Describes a mask of `low` to 4 axes: [Q, K], [B, Q, K] or [B, H, Q, K], and checks the same. `dense`
 * borrows the array's memory. 0 or -1. */
int am_to_dense(PyObject *module, PyArrayObject *array, const char *name, int low, am_array *dense);

/* PyArray_Descr **: the dtype of a mask's elements; None is refused. */
am_to am_to_mask_dtype;

/* Finds the bytes of a number in a dtype of up to 8 bytes; 0 or -1. True becomes 1 in every dtype. */
int am_bytes_of(PyObject *number, PyArray_Descr *dtype, uint64_t *bytes);

#endif
