/* rows.h – rows of arrays of any type and stride, to and from those that kernels of linear attention see. */
#ifndef AM_LINEAR_ROWS_H
#define AM_LINEAR_ROWS_H

#include "core/arrays/strided.h"
#include "core/linear/linear.h"

/* The rows [tokens, last axis] at a batch row, a token and a head; their number is not set. */
am_strided am_linear_rows_at(const am_linear_array *array, ptrdiff_t batch, ptrdiff_t token, ptrdiff_t head);

/* Reads rows as numbers of `type`, and pads each with zeros up to `step`. */
void am_linear_read(const am_kernels *kernels, am_dtype type, void *to, ptrdiff_t step, am_strided from,
                    ptrdiff_t rows, ptrdiff_t columns);

/* Writes them; the array is writeable. */
void am_linear_write(const am_kernels *kernels, am_dtype type, am_strided to, const void *from,
                     ptrdiff_t step, ptrdiff_t rows, ptrdiff_t columns);

#endif
