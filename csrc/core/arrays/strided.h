/* strided.h – rows of numbers of any type and strides, to and from contiguous numbers of a type. */
#ifndef AM_CORE_ARRAYS_STRIDED_H
#define AM_CORE_ARRAYS_STRIDED_H

#include "core/arrays/convert.h"

/* Rows in memory; strides in bytes. */
typedef struct {
    char *data;
    am_dtype type;
    ptrdiff_t row, column;
    ptrdiff_t rows, columns;
} am_strided;

static inline am_strided am_strided_row(const void *data, am_dtype type, ptrdiff_t stride, ptrdiff_t count)
{
    return (am_strided){(char *)data, type, 0, stride, 1, count};
}

/* The functions below, from rows to numbers or back, for rows that lie in any way. */
typedef enum { AM_GATHER, AM_SCATTER } am_direction;
bool am_copy_strided(const am_kernels *kernels, am_direction way, const am_strided *rows, am_dtype type,
                     void *numbers, ptrdiff_t stride);

/* Copy them to rows of numbers of `type` that begin every `stride` numbers, or from there. Types are the
 * same, or have a converter; false if an integer does not fit. */
static inline bool am_gather(const am_kernels *kernels, am_dtype type, void *to, ptrdiff_t stride,
                             const am_strided *from)
{
    if (from->rows == 1 && from->column == (ptrdiff_t)am_size_of(from->type))
        return am_convert(kernels, type, to, from->type, from->data, from->columns);
    return am_copy_strided(kernels, AM_GATHER, from, type, to, stride);
}

static inline bool am_scatter(const am_kernels *kernels, const am_strided *to, am_dtype type,
                              const void *from, ptrdiff_t stride)
{
    if (to->rows == 1 && to->column == (ptrdiff_t)am_size_of(to->type))
        return am_convert(kernels, to->type, to->data, type, from, to->columns);
    return am_copy_strided(kernels, AM_SCATTER, to, type, (void *)from, stride);
}

/* Returns a row as numbers of `type`: where it lies if it is so already, else in `to`. */
static inline const void *am_gather_row(const am_kernels *kernels, am_dtype type, void *to,
                                        const am_strided *from)
{
    if (from->type == type && (from->columns == 1 || from->column == (ptrdiff_t)am_size_of(type)))
        return from->data;
    am_gather(kernels, type, to, from->columns, from);
    return to;
}

#endif
