/* strided.c – copies rows of numbers of any type and strides. */
#include "core/arrays/strided.h"

#include <string.h>

#include "core/runtime/sizes.h"

/* Numbers of another type that lie apart take a detour, so many of them at a time. */
enum { DETOUR_BYTES = 1 << 13, DETOUR_COLUMNS = 256 };

/* Rows whose numbers lie in turn, as those of a state do: the kernel of a few rows, or one that transposes.
 */
static bool turn(const am_kernels *k, am_direction way, const am_strided *s, ptrdiff_t size, void *numbers,
                 ptrdiff_t stride)
{
    if (s->column == s->rows * size && s->rows <= AM_MOST_SPLIT && size > 1) {
        am_split *const split = size == 2   ? k->copy.split_16
                                : size == 4 ? k->copy.split_32
                                            : k->copy.split_64;
        am_join *const join = size == 2 ? k->copy.join_16 : size == 4 ? k->copy.join_32 : k->copy.join_64;
        if (way == AM_GATHER)
            split(numbers, stride, s->data, s->columns, s->rows);
        else
            join(s->data, numbers, stride, s->columns, s->rows);
        return true;
    }
    if (size < 4) return false;
    am_transpose *const transpose = size == 4 ? k->copy.transpose_32 : k->copy.transpose_64;
    if (way == AM_GATHER)
        transpose(numbers, stride, s->data, s->column / size, s->columns, s->rows);
    else
        transpose(s->data, s->column / size, numbers, stride, s->rows, s->columns);
    return true;
}

/* Copies numbers of the same type. */
static void move(const am_kernels *k, am_direction way, const am_strided *s, char *numbers, ptrdiff_t stride)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(s->type);
    /* Columns of one row are not farther apart than rows. */
    const ptrdiff_t row = s->rows == 1 ? s->columns * s->column : s->row;
    if (s->rows > 1 && row == size && turn(k, way, s, size, numbers, stride)) return;
    if (way == AM_GATHER)
        am_copy_2d(numbers, stride * size, size, s->data, row, s->column, s->rows, s->columns, (size_t)size);
    else
        am_copy_2d(s->data, row, s->column, numbers, stride * size, size, s->rows, s->columns, (size_t)size);
}

/* The rows of `way` from memory or to it, whose numbers are contiguous. */
static bool convert_rows(const am_kernels *k, am_direction way, const am_strided *s, am_dtype type,
                         char *numbers, ptrdiff_t row)
{
    const bool whole = s->row == s->columns * (ptrdiff_t)am_size_of(s->type) &&
                       row == s->columns * (ptrdiff_t)am_size_of(type);
    const ptrdiff_t rows = whole ? s->rows > 0 : s->rows, count = whole ? s->rows * s->columns : s->columns;
    const bool gathers = way == AM_GATHER;
    const am_dtype from_type = gathers ? s->type : type, to_type = gathers ? type : s->type;
    const ptrdiff_t from_row = gathers ? s->row : row, to_row = gathers ? row : s->row;
    const char *from = gathers ? s->data : numbers;
    char *to = gathers ? numbers : s->data;
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

bool am_copy_strided(const am_kernels *k, am_direction way, const am_strided *s, am_dtype type, void *numbers,
                     ptrdiff_t stride)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(type), own = (ptrdiff_t)am_size_of(s->type);
    if (s->column == own) return convert_rows(k, way, s, type, numbers, stride * size);
    if (s->type == type) {
        move(k, way, s, numbers, stride);
        return true;
    }
    double detour[DETOUR_BYTES / sizeof(double)];
    const ptrdiff_t most = DETOUR_BYTES / own;
    bool fits = true;
    am_strided part = *s;
    for (ptrdiff_t c = 0; c < s->columns; c += part.columns) {
        part.columns = am_min(s->rows > 1 ? DETOUR_COLUMNS : most, s->columns - c);
        for (ptrdiff_t r = 0; r < s->rows; r += part.rows) {
            char *const at = (char *)numbers + (r * stride + c) * size;
            part.rows = s->rows == 1 ? 1 : am_min(most / part.columns, s->rows - r);
            part.data = s->data + r * s->row + c * s->column;
            const am_strided same = {(char *)detour, s->type,     part.columns * own, own,
                                     part.rows,      part.columns};
            if (way == AM_GATHER) move(k, way, &part, (char *)detour, part.columns);
            fits &= convert_rows(k, way, &same, type, at, stride * size);
            if (way == AM_SCATTER) move(k, way, &part, (char *)detour, part.columns);
        }
    }
    return fits;
}
