/* counts.h – integers that were counted, in the type that the caller wants. */
#ifndef AM_COUNTS_H
#define AM_COUNTS_H

#include "bind/args.h"

/* 0, or -1 with OverflowError if `value`, which is to stand in a result of `dtype`, does not fit: the
 * argument `name` must have `what` that fits. */
int am_check_fits(npy_intp value, PyArray_Descr *dtype, const char *name, const char *what);

/* Results are computed as int32 or int64; this is the type to compute in, and what turns it into the
 * caller's. Steals the result. */
int am_working_type(PyArray_Descr *dtype);
PyObject *am_finish(PyArrayObject *result, PyArray_Descr *dtype);

/* Counts in ptrdiff_t as an array of the type of `dtype`. */
PyObject *am_counts_as(const ptrdiff_t *counts, npy_intp count, PyArray_Descr *dtype);

#endif
