/* rows.c – rows of arrays for linear attention. */
#include "core/linear/rows.h"

#include <string.h>

#include "core/arrays/convert.h"

enum { PIECE = 64 }; /* elements that are gathered at a time */

am_strided_rows am_linear_rows_at(const am_linear_array *a, ptrdiff_t batch, ptrdiff_t token, ptrdiff_t head)
{
    const char *data = a->data + batch * a->stride[0] + token * a->stride[1] + head * a->stride[2];
    return (am_strided_rows){data, a->type, a->stride[1], a->stride[3]};
}

/* Elements side by side, from or to places `stride` bytes apart. */
static void gather(char *to, const char *from, ptrdiff_t stride, size_t size, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) memcpy(to + (size_t)i * size, from + i * stride, size);
}
static void scatter(char *to, ptrdiff_t stride, const char *from, size_t size, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) memcpy(to + i * stride, from + (size_t)i * size, size);
}

void am_linear_read(const am_kernels *kernels, am_dtype type, void *to, ptrdiff_t step, am_strided_rows from,
                    ptrdiff_t rows, ptrdiff_t columns)
{
    const size_t size = am_size_of(type), from_size = am_size_of(from.type);
    am_convert_row *convert = am_converter(from.type, type);
    for (ptrdiff_t r = 0; r < rows; r++) {
        char *row = (char *)to + (size_t)(r * step) * size;
        const char *source = from.data + r * from.stride;
        if (from.element == (ptrdiff_t)from_size) {
            convert(kernels, row, source, columns);
        } else {
            char piece[PIECE * sizeof(double)];
            for (ptrdiff_t c = 0; c < columns; c += PIECE) {
                const ptrdiff_t count = columns - c < PIECE ? columns - c : PIECE;
                gather(piece, source + c * from.element, from.element, from_size, count);
                convert(kernels, row + (size_t)c * size, piece, count);
            }
        }
        if (step > columns) memset(row + (size_t)columns * size, 0, (size_t)(step - columns) * size);
    }
}

void am_linear_write(const am_kernels *kernels, am_dtype type, am_strided_rows to, const void *from,
                     ptrdiff_t step, ptrdiff_t rows, ptrdiff_t columns)
{
    const size_t size = am_size_of(type), to_size = am_size_of(to.type);
    am_convert_row *convert = am_converter(type, to.type);
    for (ptrdiff_t r = 0; r < rows; r++) {
        const char *row = (const char *)from + (size_t)(r * step) * size;
        char *target = (char *)to.data + r * to.stride;
        if (to.element == (ptrdiff_t)to_size) {
            convert(kernels, target, row, columns);
            continue;
        }
        char piece[PIECE * sizeof(double)];
        for (ptrdiff_t c = 0; c < columns; c += PIECE) {
            const ptrdiff_t count = columns - c < PIECE ? columns - c : PIECE;
            convert(kernels, piece, row + (size_t)c * size, count);
            scatter(target + c * to.element, to.element, piece, to_size, count);
        }
    }
}
