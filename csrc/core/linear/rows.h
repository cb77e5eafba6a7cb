/* rows.h – rows of arrays of any type and stride, to and from those that kernels of linear attention see. */
#ifndef AM_LINEAR_ROWS_H
#define AM_LINEAR_ROWS_H

#include "core/linear/linear.h"

/* Rows of an array that lie `stride` bytes apart. */
typedef struct {
    const char *data;
    am_dtype type;
    ptrdiff_t stride, element;
} am_strided_rows;

/* The rows [tokens, last axis] at a batch row, a token and a head. */
am_strided_rows am_linear_rows_at(const am_linear_array *array, ptrdiff_t batch, ptrdiff_t token,
                                  ptrdiff_t head);

/* Reads rows as numbers of `type`, and pads each with zeros up to `step`. */
void am_linear_read(const am_kernels *kernels, am_dtype type, void *to, ptrdiff_t step, am_strided_rows from,
                    ptrdiff_t rows, ptrdiff_t columns);

/* Writes them; the array is writeable. */
void am_linear_write(const am_kernels *kernels, am_dtype type, am_strided_rows to, const void *from,
                     ptrdiff_t step, ptrdiff_t rows, ptrdiff_t columns);

#endif
