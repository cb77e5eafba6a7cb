/* short_convolution_rows.c – copies rows of tokens between arrays and buffers. */
#include "core/linear/short_convolution_rows.h"

#include <string.h>

#include "core/runtime/sizes.h"
#include "core/arrays/convert.h"

const am_conv_kernels *am_conv_kernels_of(const am_kernels *kernels, am_dtype type)
{
    return type == AM_FLOAT64 ? &kernels->conv_f64 : &kernels->conv_f32;
}

char *am_conv_at(const am_conv_place *p, const am_conv_array *array, ptrdiff_t token)
{
    if (array->packed) token += p->conv->starts[p->sequence];
    return array->data + p->sequence * array->sequence + token * array->token + p->channel * array->channel;
}

am_conv *am_conv_kernel(const am_conv_place *p)
{
    return am_conv_kernels_of(p->kernels, p->conv->type)->forward[p->type];
}

/* Rows of another type whose channels lie apart take a detour of some elements. */
enum { DETOUR = 256 };

/* Rows of memory, and rows that are contiguous; both are of elements of `size` bytes. */
typedef struct {
    char *data;
    ptrdiff_t row, column; /* strides in bytes */
    ptrdiff_t rows, columns, size;
} strided;

/* A few rows whose elements lie in turn, as those of a state do. */
static bool is_split(const strided *s)
{
    return s->row == s->size && s->column == s->rows * s->size && 0 < s->rows && s->rows <= AM_MOST_SPLIT;
}

static void gather(const am_kernels *k, void *to, ptrdiff_t step, const strided *s)
{
    am_split *const split = s->size == 2   ? k->copy.split_16
                            : s->size == 4 ? k->copy.split_32
                                           : k->copy.split_64;
    if (is_split(s))
        split(to, step, s->data, s->columns, s->rows);
    else if (s->row == s->size && s->column != s->size && s->size == 4)
        k->copy.transpose_32(to, step, s->data, s->column / s->size, s->columns, s->rows);
    else if (s->row == s->size && s->column != s->size && s->size == 8)
        k->copy.transpose_64(to, step, s->data, s->column / s->size, s->columns, s->rows);
    else
        am_copy_2d(to, step * s->size, s->size, s->data, s->row, s->column, s->rows, s->columns,
                   (size_t)s->size);
}

static void scatter(const am_kernels *k, const strided *s, const void *from, ptrdiff_t step)
{
    am_join *const join = s->size == 2 ? k->copy.join_16 : s->size == 4 ? k->copy.join_32 : k->copy.join_64;
    if (is_split(s))
        join(s->data, from, step, s->columns, s->rows);
    else if (s->row == s->size && s->column != s->size && s->size == 4)
        k->copy.transpose_32(s->data, s->column / s->size, from, step, s->rows, s->columns);
    else if (s->row == s->size && s->column != s->size && s->size == 8)
        k->copy.transpose_64(s->data, s->column / s->size, from, step, s->rows, s->columns);
    else
        am_copy_2d(s->data, s->row, s->column, from, step * s->size, s->size, s->rows, s->columns,
                   (size_t)s->size);
}

/* One row has no stride, and must not look as if columns lay farther apart than rows. */
static strided rows_of(const am_conv_place *p, const am_conv_array *array, ptrdiff_t token, ptrdiff_t rows)
{
    return (strided){
        .data = am_conv_at(p, array, token),
        .row = rows == 1 ? p->lanes * array->channel : array->token,
        .column = array->channel,
        .rows = rows,
        .columns = p->lanes,
        .size = (ptrdiff_t)am_size_of(array->type),
    };
}

/* A part of the rows that the detour has room for: all of a few, or one. */
static strided part_of(const strided *s, ptrdiff_t row, ptrdiff_t column)
{
    strided part = *s;
    part.data += row * s->row + column * s->column;
    part.rows = s->rows <= AM_MOST_SPLIT ? s->rows : 1;
    part.columns = am_min(DETOUR, s->columns - column);
    return part;
}

void am_conv_load(const am_conv_place *p, am_dtype type, void *to, const am_conv_array *from, ptrdiff_t token,
                  ptrdiff_t rows)
{
    const strided all = rows_of(p, from, token, rows);
    const ptrdiff_t size = (ptrdiff_t)am_size_of(type), row_bytes = p->lanes * size;
    if (type == from->type) {
        gather(p->kernels, to, p->lanes, &all);
        return;
    }
    am_convert_row *convert = am_converter(from->type, type);
    double detour[AM_MOST_SPLIT * DETOUR];
    strided part = {.rows = 1};
    for (ptrdiff_t r = 0; r < rows; r += part.rows) {
        char *row = (char *)to + r * row_bytes;
        if (all.column == all.size) {
            convert(p->kernels, row, all.data + r * all.row, p->lanes);
            continue;
        }
        for (ptrdiff_t i = 0; i < p->lanes; i += DETOUR) {
            part = part_of(&all, r, i);
            gather(p->kernels, detour, part.columns, &part);
            for (ptrdiff_t j = 0; j < part.rows; j++) {
                convert(p->kernels, row + j * row_bytes + i * size,
                        (char *)detour + j * part.columns * part.size, part.columns);
            }
        }
    }
}

void am_conv_store(const am_conv_place *p, am_dtype type, const am_conv_array *to, ptrdiff_t token,
                   const void *from, ptrdiff_t rows)
{
    const strided all = rows_of(p, to, token, rows);
    const ptrdiff_t size = (ptrdiff_t)am_size_of(type), row_bytes = p->lanes * size;
    if (type == to->type) {
        scatter(p->kernels, &all, from, p->lanes);
        return;
    }
    am_convert_row *convert = am_converter(type, to->type);
    double detour[AM_MOST_SPLIT * DETOUR];
    strided part = {.rows = 1};
    for (ptrdiff_t r = 0; r < rows; r += part.rows) {
        const char *row = (const char *)from + r * row_bytes;
        if (all.column == all.size) {
            convert(p->kernels, all.data + r * all.row, row, p->lanes);
            continue;
        }
        for (ptrdiff_t i = 0; i < p->lanes; i += DETOUR) {
            part = part_of(&all, r, i);
            for (ptrdiff_t j = 0; j < part.rows; j++) {
                convert(p->kernels, (char *)detour + j * part.columns * part.size,
                        row + j * row_bytes + i * size, part.columns);
            }
            scatter(p->kernels, &part, detour, part.columns);
        }
    }
}

void am_conv_load_window(const am_conv_place *p, void *to, ptrdiff_t token, ptrdiff_t count)
{
    const am_short_conv *c = p->conv;
    const ptrdiff_t rows = count + c->width - 1, old = am_max(0, c->width - 1 - token);
    const ptrdiff_t before = am_min(old, rows);
    if (c->before.data)
        am_conv_load(p, p->type, to, &c->before, token, before);
    else
        memset(to, 0, (size_t)(before * p->row));
    am_conv_load(p, p->type, (char *)to + before * p->row, &c->x, token - (c->width - 1) + before,
                 rows - before);
}

void am_conv_load_weights(am_conv_place *p, void *to, bool reversed)
{
    const am_short_conv *c = p->conv;
    am_conv_array weight = c->weight;
    if (reversed) {
        weight.data += (c->width - 1) * weight.token;
        weight.token = -weight.token;
    }
    p->weight = to;
    p->bias = NULL;
    am_conv_place whole = *p;
    whole.sequence = 0;
    am_conv_load(&whole, c->type, to, &weight, 0, c->width);
    if (!c->bias.data || reversed) return;
    char *bias = (char *)to + c->width * p->lanes * (ptrdiff_t)am_size_of(c->type);
    am_conv_load(&whole, c->type, bias, &c->bias, 0, 1);
    p->bias = bias;
}

void am_conv_part(am_conv_place *p, ptrdiff_t sequence, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t *first,
                  ptrdiff_t *last)
{
    const ptrdiff_t *starts = p->conv->starts + sequence;
    p->sequence = sequence;
    p->length = starts[1] - starts[0];
    *first = am_max(begin, starts[0]) - starts[0];
    *last = am_min(end, starts[1]) - starts[0];
}

ptrdiff_t am_conv_tokens(ptrdiff_t width) { return am_max(AM_CONV_TOKENS, width); }

ptrdiff_t am_conv_lanes(const am_short_conv *c, ptrdiff_t most)
{
    const ptrdiff_t fit = AM_CONV_LANES * 4 * AM_CONV_TOKENS / c->width;
    return am_min(c->channels, am_max(16, am_min(most, fit / 16 * 16)));
}
