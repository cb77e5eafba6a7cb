/* array.h – an array of numbers of any type and strides, as all engines take it, and how they read and write
 * its rows. */
#ifndef AM_CORE_ARRAYS_ARRAY_H
#define AM_CORE_ARRAYS_ARRAY_H

#include "core/arrays/convert.h"

/* A number for each axis. Axes are named by what they are in attention; of a mask or a bias, queries are
 * tokens and keys are channels, and of a state the channels of keys are tokens. */
typedef struct {
    ptrdiff_t batch, token, head, channel;
} am_by_axis;

/* Numbers in memory; strides in bytes. */
typedef struct {
    char *data; /* NULL: not given */
    am_dtype type;
    am_by_axis shape, stride; /* along an axis that is shared or missing, 1 and 0 */
} am_array;

/* The address of a token of one head. */
static inline char *am_token(const am_array *a, ptrdiff_t b, ptrdiff_t head, ptrdiff_t token)
{
    return a->data + b * a->stride.batch + head * a->stride.head + token * a->stride.token;
}

/* Rows: some tokens of a head, from one at an address on; or a single row, whose numbers lie `stride` bytes
 * apart. */
static inline am_array am_rows_from(const am_array *a, const char *first, ptrdiff_t tokens)
{
    return (am_array){.data = (char *)first,
                      .type = a->type,
                      .shape = {.token = tokens, .channel = a->shape.channel},
                      .stride = {.token = a->stride.token, .channel = a->stride.channel}};
}
static inline am_array am_one_row(const void *data, am_dtype type, ptrdiff_t stride, ptrdiff_t count)
{
    return (am_array){.data = (char *)data,
                      .type = type,
                      .shape = {.token = 1, .channel = count},
                      .stride = {.channel = stride}};
}

/* True if kernels can read rows in place, in lanes of `width` numbers: whole vectors of plain rows, and
 * single lanes of aligned ones. */
static inline bool am_is_plain(const am_array *a, ptrdiff_t width)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(a->type);
    return a->stride.channel == size && a->stride.token % (width * size) == 0 &&
           a->shape.channel % width == 0;
}
static inline bool am_is_aligned(const am_array *a, ptrdiff_t width)
{
    const uintptr_t rows = (uintptr_t)a->data | (uintptr_t)a->stride.batch | (uintptr_t)a->stride.head;
    return am_is_plain(a, width) && rows % ((uintptr_t)width * am_size_of(a->type)) == 0;
}

/* Rows to prefetch, none unless their numbers lie side by side. */
static inline am_prefetch_rows am_prefetch_rows_of(am_array rows)
{
    return (am_prefetch_rows){.at = rows.data,
                              .stride = rows.stride.token,
                              .length = rows.shape.channel * (ptrdiff_t)am_size_of(rows.type),
                              .rows = am_is_plain(&rows, 1) ? rows.shape.token : 0};
}

static inline bool am_is_contiguous_row(const am_array *a)
{
    return a->shape.token == 1 &&
           (a->shape.channel == 1 || a->stride.channel == (ptrdiff_t)am_size_of(a->type));
}

/* The functions below, from rows to numbers or back, for rows that lie in any way. */
typedef enum { AM_GATHER, AM_SCATTER } am_direction;
bool am_copy_rows(const am_kernels *kernels, am_direction way, const am_array *rows, am_dtype type,
                  void *numbers, ptrdiff_t stride);

/* Copy them to rows of numbers of `type` that begin every `stride` numbers, with zeros up to the next; or
 * from there. Types are the same, or have a converter; false if an integer does not fit. */
static inline bool am_gather(const am_kernels *kernels, am_dtype type, void *to, ptrdiff_t stride,
                             const am_array *from)
{
    const ptrdiff_t columns = from->shape.channel, size = (ptrdiff_t)am_size_of(type);
    if (!am_is_contiguous_row(from)) return am_copy_rows(kernels, AM_GATHER, from, type, to, stride);
    if (columns < stride) memset((char *)to + columns * size, 0, (size_t)((stride - columns) * size));
    return am_convert(kernels, type, to, from->type, from->data, columns);
}

static inline bool am_scatter(const am_kernels *kernels, const am_array *to, am_dtype type, const void *from,
                              ptrdiff_t stride)
{
    if (!am_is_contiguous_row(to)) return am_copy_rows(kernels, AM_SCATTER, to, type, (void *)from, stride);
    return am_convert(kernels, to->type, to->data, type, from, to->shape.channel);
}

/* Returns rows of `stride` numbers of `type`, in whole lanes of `width`: where they lie if they can be read
 * there, else copied to `scratch`, as am_gather does. */
static inline am_rows am_read_rows(const am_kernels *kernels, am_dtype type, ptrdiff_t width,
                                   const am_array *from, ptrdiff_t stride, void *scratch)
{
    if (from->type == type && from->shape.channel == stride && am_is_aligned(from, width))
        return (am_rows){.data = from->data, .stride = from->stride.token};
    am_gather(kernels, type, scratch, stride, from);
    return (am_rows){.data = scratch, .stride = stride * (ptrdiff_t)am_size_of(type)};
}

#endif
