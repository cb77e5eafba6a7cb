/* rows.h – rows of arrays of any type and stride, to and from those that kernels of linear attention see. */
#ifndef AM_LINEAR_ROWS_H
#define AM_LINEAR_ROWS_H

#include "core/arrays/strided.h"
#include "core/linear/linear.h"

/* The rows [tokens, last axis] at a batch row, a token and a head; their number is not set. */
static inline am_strided am_linear_rows_at(const am_linear_array *a, ptrdiff_t batch, ptrdiff_t token,
                                           ptrdiff_t head)
{
    char *data = (char *)a->data + batch * a->stride[0] + token * a->stride[1] + head * a->stride[2];
    return (am_strided){.data = data, .type = a->type, .row = a->stride[1], .column = a->stride[3]};
}

/* Reads rows as numbers of `type`, and pads each with zeros up to `stride`. */
static inline void am_linear_read(const am_kernels *kernels, am_dtype type, void *to, ptrdiff_t stride,
                                  am_strided from, ptrdiff_t rows, ptrdiff_t columns)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(type);
    from.rows = rows, from.columns = columns;
    am_gather(kernels, type, to, stride, &from);
    for (ptrdiff_t r = 0; r < rows && stride > columns; r++)
        memset((char *)to + (r * stride + columns) * size, 0, (size_t)((stride - columns) * size));
}

/* Writes them; the array is writeable. */
static inline void am_linear_write(const am_kernels *kernels, am_dtype type, am_strided to, const void *from,
                                   ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t columns)
{
    to.rows = rows, to.columns = columns;
    am_scatter(kernels, &to, type, from, stride);
}

#endif
