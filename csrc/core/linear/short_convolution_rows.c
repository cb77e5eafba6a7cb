/* short_convolution_rows.c – copies rows of tokens between arrays and buffers. */
#include "core/linear/short_convolution_rows.h"

#include <string.h>

#include "core/arithmetic.h"
#include "core/convert.h"

const am_conv_kernels *am_conv_kernels_of(const am_kernels *kernels, am_dtype type)
{
    return type == AM_FLOAT64 ? &kernels->conv_f64 : &kernels->conv_f32;
}

char *am_conv_at(const am_conv_place *p, const am_conv_array *array, ptrdiff_t token)
{
    if (array->packed) token += p->conv->starts[p->sequence];
    return array->data + p->sequence * array->sequence + token * array->token + p->channel * array->channel;
}

/* Rows of another type, or whose channels lie apart, take a detour of some elements. */
enum { DETOUR = 256 };

/* Rows whose tokens lie side by side are transposed. */
static am_transpose *transpose_kernel(const am_conv_place *p, const am_conv_array *array, am_dtype type)
{
    if (array->type != type || array->token != p->size) return NULL;
    return p->size == 4 ? p->kernels->transpose_32 : p->kernels->transpose_64;
}

void am_conv_load(const am_conv_place *p, void *to, const am_conv_array *from, ptrdiff_t token,
                  ptrdiff_t rows)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(from->type), row_bytes = p->lanes * p->size;
    const char *src = am_conv_at(p, from, token);
    am_convert_row *convert = am_converter(from->type, p->conv->type);
    am_transpose *transpose = transpose_kernel(p, from, p->conv->type);
    if (from->channel != size && transpose) {
        transpose(to, p->lanes, src, from->channel / size, p->lanes, rows);
        return;
    }
    for (ptrdiff_t r = 0; r < rows; r++, src += from->token) {
        char *row = (char *)to + r * row_bytes;
        if (from->channel == size) {
            convert(p->kernels, row, src, p->lanes);
            continue;
        }
        for (ptrdiff_t i = 0; i < p->lanes; i += DETOUR) {
            double some[DETOUR];
            const ptrdiff_t count = am_min(DETOUR, p->lanes - i);
            am_copy_2d((char *)some, 0, size, src + i * from->channel, 0, from->channel, 1, count,
                       (size_t)size);
            convert(p->kernels, row + i * p->size, some, count);
        }
    }
}

void am_conv_store(const am_conv_place *p, am_dtype type, const am_conv_array *to, ptrdiff_t token,
                   const void *from, ptrdiff_t rows)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(to->type), own = (ptrdiff_t)am_size_of(type);
    char *dst = am_conv_at(p, to, token);
    am_convert_row *convert = am_converter(type, to->type);
    am_transpose *transpose = transpose_kernel(p, to, type);
    if (to->channel != size && transpose) {
        transpose(dst, to->channel / size, from, p->lanes, rows, p->lanes);
        return;
    }
    for (ptrdiff_t r = 0; r < rows; r++, dst += to->token) {
        const char *row = (const char *)from + r * p->lanes * own;
        if (to->channel == size) {
            convert(p->kernels, dst, row, p->lanes);
            continue;
        }
        for (ptrdiff_t i = 0; i < p->lanes; i += DETOUR) {
            double some[DETOUR];
            const ptrdiff_t count = am_min(DETOUR, p->lanes - i);
            convert(p->kernels, some, row + i * own, count);
            am_copy_2d(dst + i * to->channel, 0, to->channel, (const char *)some, 0, size, 1, count,
                       (size_t)size);
        }
    }
}

void am_conv_load_window(const am_conv_place *p, void *to, ptrdiff_t token, ptrdiff_t count)
{
    const am_short_conv *c = p->conv;
    const ptrdiff_t rows = count + c->width - 1, old = am_max(0, c->width - 1 - token);
    const ptrdiff_t before = am_min(old, rows), row_bytes = p->lanes * p->size;
    if (c->before.data)
        am_conv_load(p, to, &c->before, token, before);
    else
        memset(to, 0, (size_t)(before * row_bytes));
    am_conv_load(p, (char *)to + before * row_bytes, &c->x, token - (c->width - 1) + before, rows - before);
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
    const am_conv_place whole = {
        .conv = c, .kernels = p->kernels, .channel = p->channel, .lanes = p->lanes, .size = p->size};
    am_conv_load(&whole, to, &weight, 0, c->width);
    if (!c->bias.data || reversed) return;
    char *bias = (char *)to + c->width * p->lanes * p->size;
    am_conv_load(&whole, bias, &c->bias, 0, 1);
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
