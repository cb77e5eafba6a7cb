/* short_convolution_rows.c – copies rows of tokens between arrays and buffers. */
#include "conv/short_convolution_rows.h"

#include <string.h>

#include "core/runtime/sizes.h"
#include "core/arrays/array.h"
#include "core/arrays/packed.h"

am_conv_place am_conv_place_of(const am_short_conv *conv, const am_kernels *kernels, ptrdiff_t channel,
                               ptrdiff_t lanes, am_dtype type)
{
    return (am_conv_place){.conv = conv,
                           .kernels = kernels,
                           .channel = channel,
                           .lanes = lanes,
                           .type = type,
                           .row = lanes * (ptrdiff_t)am_size_of(type)};
}

am_conv_tile am_conv_tile_of(const am_conv_place *p, ptrdiff_t steps)
{
    return (am_conv_tile){.steps = steps,
                          .lanes = p->lanes,
                          .width = p->conv->width,
                          .weight_stride = p->lanes,
                          .src_stride = p->lanes,
                          .dst_stride = p->lanes,
                          .weight = p->weight,
                          .bias = p->bias};
}

const am_conv_kernels *am_conv_kernels_of(const am_kernels *kernels, am_dtype type)
{
    return type == AM_FLOAT64 ? &kernels->conv_f64 : &kernels->conv_f32;
}

char *am_conv_at(const am_conv_place *p, const am_array *array, ptrdiff_t token)
{
    return am_token(array, p->sequence, 0, token) + p->channel * array->stride.channel;
}

am_conv *am_conv_kernel(const am_conv_place *p)
{
    return am_conv_kernels_of(p->kernels, p->conv->type)->forward[p->type];
}

ptrdiff_t am_conv_portion(const am_conv_tile *tile)
{
    enum { PRODUCTS = 1 << 22, ROWS = 8 }; /* ROWS: kernels compute up to so many at once */
    return am_max(PRODUCTS / ROWS / am_max(tile->width * tile->lanes, 1), 1) * ROWS;
}

am_status am_conv_results(const am_conv_place *p, void *to, const void *from, am_conv_tile tile,
                          am_team *team)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(p->type), all = tile.steps, most = am_conv_portion(&tile);
    am_status status = AM_OK;
    for (ptrdiff_t t = 0; t < all && status == AM_OK; t += most) {
        tile.steps = am_min(all - t, most);
        am_conv_kernel(p)((char *)to + t * tile.dst_stride * size,
                          (const char *)from + t * tile.src_stride * size, &tile);
        if (t + most < all) status = am_checkpoint(team);
    }
    return status;
}

static am_array rows_of(const am_conv_place *p, const am_array *array, ptrdiff_t token, ptrdiff_t rows)
{
    am_array found = am_rows_from(array, am_conv_at(p, array, token), rows);
    found.shape.channel = p->lanes;
    return found;
}

void am_conv_load(const am_conv_place *p, am_dtype type, void *to, const am_array *from, ptrdiff_t token,
                  ptrdiff_t rows)
{
    const am_array source = rows_of(p, from, token, rows);
    am_gather(p->kernels, type, to, p->lanes, &source);
}

void am_conv_store(const am_conv_place *p, am_dtype type, const am_array *to, ptrdiff_t token,
                   const void *from, ptrdiff_t rows)
{
    const am_array target = rows_of(p, to, token, rows);
    am_scatter(p->kernels, &target, type, from, p->lanes);
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
    am_conv_load(p, p->type, (char *)to + before * p->row, &c->x, p->first + token - (c->width - 1) + before,
                 rows - before);
}

void am_conv_load_weights(am_conv_place *p, void *to, bool reversed)
{
    const am_short_conv *c = p->conv;
    am_array weight = c->weight;
    if (reversed) {
        weight.data += (c->width - 1) * weight.stride.token;
        weight.stride.token = -weight.stride.token;
    }
    p->weight = to;
    p->bias = NULL;
    am_conv_load(p, c->type, to, &weight, 0, c->width);
    if (!c->bias.data || reversed) return;
    char *bias = (char *)to + c->width * p->lanes * (ptrdiff_t)am_size_of(c->type);
    am_conv_load(p, c->type, bias, &c->bias, 0, 1);
    p->bias = bias;
}

ptrdiff_t am_conv_start(const am_short_conv *c, ptrdiff_t n)
{
    return c->starts ? c->starts[n] : n * c->tokens;
}

ptrdiff_t am_conv_sequence_of(const am_short_conv *c, ptrdiff_t token)
{
    return c->starts ? am_sequence_of(c->starts, c->sequences, token) : token / c->tokens;
}

void am_conv_part(am_conv_place *p, ptrdiff_t sequence, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t *first,
                  ptrdiff_t *last)
{
    const ptrdiff_t start = am_conv_start(p->conv, sequence);
    p->sequence = sequence;
    p->first = p->conv->starts ? start : 0;
    p->length = am_conv_start(p->conv, sequence + 1) - start;
    *first = am_max(begin - start, 0);
    *last = am_min(end - start, p->length);
}

ptrdiff_t am_conv_tokens(ptrdiff_t width) { return am_max(AM_CONV_TOKENS, width); }

ptrdiff_t am_conv_lanes(const am_short_conv *c, ptrdiff_t most)
{
    const ptrdiff_t fit = AM_CONV_LANES * 4 * AM_CONV_TOKENS / c->width;
    return am_min(c->channels, am_max(16, am_min(most, fit / 16 * 16)));
}
