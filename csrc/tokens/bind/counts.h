/* counts.h – integer results in the type that the caller wants. */
#ifndef AM_TOKENS_BIND_COUNTS_H
#define AM_TOKENS_BIND_COUNTS_H

#include "bind/python/arguments.h"

/* Checks that `value`, an entry of a result, fits `dtype`; 0, or -1 with OverflowError: "`name` must have
 * `what` that fits …". */
int am_check_fits(npy_intp value, PyArray_Descr *dtype, const char *name, const char *what);

/* Results are computed as int32 or int64: am_working_type is that type, and am_finish converts to the
 * caller's. */
int am_working_type(PyArray_Descr *dtype);
PyObject *am_finish(PyArrayObject *result, PyArray_Descr *dtype);

/* Returns counts as an array of the type of `dtype`. */
PyObject *am_counts_as(const ptrdiff_t *counts, npy_intp count, PyArray_Descr *dtype);

#endif
