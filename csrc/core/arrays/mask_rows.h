/* mask_rows.h – a mask that is an array, read as rows whose elements are contiguous in memory or at least
 * close together. */
#ifndef AM_CORE_ARRAYS_MASK_ROWS_H
#define AM_CORE_ARRAYS_MASK_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/arrays/array.h"

typedef struct {
    ptrdiff_t length; /* in the array */
    ptrdiff_t count;  /* 1 where the array repeats itself, else `length` */
    ptrdiff_t stride; /* positive */
    bool backwards;   /* index i of this axis is index count - 1 - i of the array */
} am_axis;

/* The planes of a mask, one per (b, h). The tokens of its array are queries, and the channels keys; a pair is
 * live if its element is not zero. Planes are transposed if that brings the elements of a row closer
 * together in memory. */
typedef struct {
    const am_kernels *kernels;
    const char *data;                    /* of batch row 0 and head 0 */
    ptrdiff_t batch, heads;              /* 1 where the array repeats itself */
    ptrdiff_t batch_stride, head_stride; /* in bytes */
    am_axis rows, columns;
    bool transposed; /* rows are keys, and columns queries */
    ptrdiff_t size;
    am_lane lane;
} am_mask_rows;

/* No axis of `mask` may be empty. */
am_mask_rows am_mask_rows_of(const am_kernels *kernels, const am_array *mask);

/* Row 0 of a plane. */
static inline const char *am_mask_plane(const am_mask_rows *mask_rows, ptrdiff_t b, ptrdiff_t h)
{
    return mask_rows->data + b * mask_rows->batch_stride + h * mask_rows->head_stride;
}

/* These functions take the address of column 0 as `row`. */

/* As am_pack_bits of kernels/table.h, from column `begin` on. */
void am_mask_rows_pack(const am_mask_rows *mask_rows, uint64_t *dst, const char *row, ptrdiff_t begin,
                       ptrdiff_t count);

/* The first live column in begin … end - 1, or `end`. */
ptrdiff_t am_mask_rows_first(const am_mask_rows *mask_rows, const char *row, ptrdiff_t begin, ptrdiff_t end);

/* One more than the last live column in begin … end - 1, or `begin`. */
ptrdiff_t am_mask_rows_last(const am_mask_rows *mask_rows, const char *row, ptrdiff_t begin, ptrdiff_t end);

/* As am_collect_nonzero, from column `begin` on. */
bool am_mask_rows_collect(const am_mask_rows *mask_rows, void *seen, const char *row, ptrdiff_t begin,
                          ptrdiff_t count);

#endif
