/* convert.h – strided elements of any type to and from contiguous int64, float32 or float64. */
#ifndef AM_CORE_ARRAYS_CONVERT_H
#define AM_CORE_ARRAYS_CONVERT_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "kernels/table.h"

/* The type of sums over floating-point numbers of a type. */
static inline am_dtype am_wide_type(am_dtype type) { return type == AM_FLOAT64 ? AM_FLOAT64 : AM_FLOAT32; }
static inline ptrdiff_t am_row_bytes(am_dtype type, ptrdiff_t numbers)
{
    return numbers * (ptrdiff_t)am_bits_of(type) / 8;
}
am_lane am_lane_of(am_dtype type);
am_lane am_lane_of_size(ptrdiff_t size);

/* The low `size` bytes of an element, again and again. */
uint64_t am_repeated(uint64_t element, ptrdiff_t size);

/* Converts `count` contiguous elements; false if an integer does not fit. */
typedef bool am_convert_row(const am_kernels *kernels, void *dst, const void *src, ptrdiff_t count);

/* Integers meet int64, floating types meet float32 and float64, and int64 meets float64 (which truncates
 * towards zero on its way back); every other pair is NULL. */
am_convert_row *am_converter(am_dtype from, am_dtype to);

/* The same for types that may be the same. */
static inline bool am_convert(const am_kernels *kernels, am_dtype to_type, void *to, am_dtype type,
                              const void *from, ptrdiff_t count)
{
    if (type != to_type) return am_converter(type, to_type)(kernels, to, from, count);
    memcpy(to, from, (size_t)count * am_size_of(type));
    return true;
}

/* Copies rows × columns elements of `size` bytes; one side is a small tile, the other is walked in its
 * memory's order. */
void am_copy_2d(char *dst, ptrdiff_t dst_row, ptrdiff_t dst_column, const char *src, ptrdiff_t src_row,
                ptrdiff_t src_column, ptrdiff_t rows, ptrdiff_t columns, size_t size);

#endif
