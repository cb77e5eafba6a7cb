/* array.c – copies rows of numbers of any type and strides. */
#include "core/arrays/array.h"

#include <string.h>

#include "core/runtime/sizes.h"

/* Numbers of another type that lie apart take a detour, so many of them at a time. */
enum { DETOUR_BYTES = 1 << 13, DETOUR_COLUMNS = 256 };

/* Copies rows whose numbers alternate in memory, like those of a state: by the kernel for a few rows, or by
 * one that transposes. */
static bool turn(const am_kernels *k, am_direction way, const am_array *a, ptrdiff_t size, void *numbers,
                 ptrdiff_t stride)
{
    const ptrdiff_t rows = a->shape.token, columns = a->shape.channel, column = a->stride.channel;
    if (column == rows * size && rows <= AM_MOST_SPLIT && size > 1) {
        am_split *const split = size == 2   ? k->copy.split_16
                                : size == 4 ? k->copy.split_32
                                            : k->copy.split_64;
        am_join *const join = size == 2 ? k->copy.join_16 : size == 4 ? k->copy.join_32 : k->copy.join_64;
        if (way == AM_GATHER)
            split(numbers, stride, a->data, columns, rows);
        else
            join(a->data, numbers, stride, columns, rows);
        return true;
    }
    if (size < 4) return false;
    am_transpose *const transpose = size == 4 ? k->copy.transpose_32 : k->copy.transpose_64;
    if (way == AM_GATHER)
        transpose(numbers, stride, a->data, column / size, columns, rows);
    else
        transpose(a->data, column / size, numbers, stride, rows, columns);
    return true;
}

/* Copies numbers of the same type. */
static void move(const am_kernels *k, am_direction way, const am_array *a, char *numbers, ptrdiff_t stride)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(a->type), rows = a->shape.token, columns = a->shape.channel,
                    column = a->stride.channel;
    /* Columns of one row are not farther apart than rows. */
    const ptrdiff_t row = rows == 1 ? columns * column : a->stride.token;
    if (rows > 1 && row == size && turn(k, way, a, size, numbers, stride)) return;
    if (way == AM_GATHER)
        am_copy_2d(numbers, stride * size, size, a->data, row, column, rows, columns, (size_t)size);
    else
        am_copy_2d(a->data, row, column, numbers, stride * size, size, rows, columns, (size_t)size);
}

/* The rows of `way` from memory or to it, whose numbers are contiguous. */
static bool convert_rows(const am_kernels *k, am_direction way, const am_array *a, am_dtype type,
                         char *numbers, ptrdiff_t row)
{
    const ptrdiff_t columns = a->shape.channel, own_row = a->stride.token;
    const bool whole =
        own_row == columns * (ptrdiff_t)am_size_of(a->type) && row == columns * (ptrdiff_t)am_size_of(type);
    const ptrdiff_t rows = whole ? a->shape.token > 0 : a->shape.token,
                    count = whole ? a->shape.token * columns : columns;
    const bool gathers = way == AM_GATHER;
    const am_dtype from_type = gathers ? a->type : type, to_type = gathers ? type : a->type;
    const ptrdiff_t from_row = gathers ? own_row : row, to_row = gathers ? row : own_row;
    const char *from = gathers ? a->data : numbers;
    char *to = gathers ? numbers : a->data;
    /* Not `bool`: GCC keeps it on the stack as a byte, which it reads as four. Such a read waits until all
     * rows before it have been written to memory, 1.1 of the time of gradients in bfloat16. */
    int fits = true;
    am_convert_row *const convert = from_type == to_type ? NULL : am_converter(from_type, to_type);
    for (ptrdiff_t r = 0; r < rows; r++, from += from_row, to += to_row) {
        if (convert)
            fits &= convert(k, to, from, count);
        else
            memcpy(to, from, (size_t)count * am_size_of(type));
    }
    return fits;
}

/* Rows of numbers of another type that lie apart, piece by piece. */
static bool convert_apart(const am_kernels *k, am_direction way, const am_array *a, am_dtype type,
                          char *numbers, ptrdiff_t row)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(type), own = (ptrdiff_t)am_size_of(a->type),
                    most = DETOUR_BYTES / own, rows = a->shape.token;
    double detour[DETOUR_BYTES / sizeof(double)];
    bool fits = true;
    am_array part = *a, same = {.data = (char *)detour, .type = a->type, .stride.channel = own};
    for (ptrdiff_t c = 0, columns; c < a->shape.channel; c += columns) {
        part.shape.channel = columns = am_min(rows > 1 ? DETOUR_COLUMNS : most, a->shape.channel - c);
        for (ptrdiff_t r = 0; r < rows; r += part.shape.token) {
            part.shape.token = rows == 1 ? 1 : am_min(most / columns, rows - r);
            part.data = a->data + r * a->stride.token + c * a->stride.channel;
            same.shape = part.shape, same.stride.token = columns * own;
            if (way == AM_GATHER) move(k, way, &part, (char *)detour, columns);
            fits &= convert_rows(k, way, &same, type, numbers + r * row + c * size, row);
            if (way == AM_SCATTER) move(k, way, &part, (char *)detour, columns);
        }
    }
    return fits;
}

bool am_copy_rows(const am_kernels *k, am_direction way, const am_array *a, am_dtype type, void *numbers,
                  ptrdiff_t stride)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(type), own = (ptrdiff_t)am_size_of(a->type),
                    rest = way == AM_GATHER ? stride - a->shape.channel : 0;
    bool fits = true;
    if (a->stride.channel == own)
        fits = convert_rows(k, way, a, type, numbers, stride * size);
    else if (a->type == type)
        move(k, way, a, numbers, stride);
    else
        fits = convert_apart(k, way, a, type, numbers, stride * size);
    for (ptrdiff_t r = 0; rest > 0 && r < a->shape.token; r++)
        memset((char *)numbers + (r * stride + a->shape.channel) * size, 0, (size_t)(rest * size));
    return fits;
}
