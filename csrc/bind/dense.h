/* dense.h – masks that are arrays, as arguments and as results. */
#ifndef AM_BIND_DENSE_H
#define AM_BIND_DENSE_H

#include "bind/args.h"
#include "core/dense.h"

/* A mask of `low` to 4 axes: [Q, K], [B, Q, K] or [B, H, Q, K]. Borrows the array. 0 or -1. */
int am_to_dense(PyArrayObject *array, const char *name, int low, am_dense *dense);

/* Refuses floating-point numbers that no mask holds, but what is added to logits does; 0 or -1. */
int am_check_mask(PyObject *module, PyArrayObject *array, const char *name);

/* PyArray_Descr **: the type of a mask's elements. */
am_to am_to_mask_dtype;

/* The bytes of a number in this type, of up to 8; 0 or -1. True is the 1 of every type. */
int am_bytes_of(PyObject *number, PyArray_Descr *dtype, uint64_t *bytes);

#endif
