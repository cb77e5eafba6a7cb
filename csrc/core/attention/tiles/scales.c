/* scales.c – the scales of a tile's tokens, or of their groups, for kernels. */
#include "core/attention/tiles/scales.h"

#include <string.h>

#include "core/attention/tiles/pages.h"
#include "core/cache/formats.h"

/* Copies numbers that lie `stride` bytes apart; four are stored at once. */
static void gather(float *to, const char *from, ptrdiff_t stride, ptrdiff_t count)
{
    for (; count >= 4; count -= 4, to += 4, from += 4 * stride) {
        const float four[] = {*(const float *)from, *(const float *)(from + stride),
                              *(const float *)(from + 2 * stride), *(const float *)(from + 3 * stride)};
        memcpy(to, four, sizeof four);
    }
    for (; count > 0; count--, from += stride) *to++ = *(const float *)from;
}

/* Copies columns of some rows of float32, as rows of a tile. Those that lie side by side are transposed: at
 * the baseline at any level if they do not fill longer vectors than its own of four lanes. */
static void copy_columns(const am_attn_base *base, float *to, const char *from, ptrdiff_t row,
                         ptrdiff_t column, ptrdiff_t rows, ptrdiff_t columns)
{
    const ptrdiff_t size = sizeof(float), fours = column == size && row % size == 0 ? columns / 4 * 4 : 0;
    const bool fill = ((rows | fours) & (base->arithmetic->panel / 2 - 1)) == 0;
    const am_kernels *kernels = fill ? base->all_kernels : &AM_TOPIC(arrays, baseline);
    if (fours > 0) kernels->copy.transpose_32(to, AM_FLASH_TILE, from, row / size, rows, fours);
    for (ptrdiff_t i = fours; i < columns; i++) gather(to + i * AM_FLASH_TILE, from + i * column, row, rows);
}

/* Copies the scales and offsets of the groups of some tokens of a head. */
static void copy_groups(const am_attn_base *base, const am_kv_scales *s, float *to, const char *from,
                        ptrdiff_t tokens, ptrdiff_t columns)
{
    enum { MOST = 32 };
    float part[AM_FLASH_TILE * MOST];
    const bool halves = am_kv_has_pairs(s, AM_FLOAT16);
    for (ptrdiff_t i = 0, count; i < columns; i += count, to += count * AM_FLASH_TILE) {
        count = am_min(columns - i, MOST);
        const char *row = from + i / 2 * s->array.stride.channel;
        for (ptrdiff_t r = 0; r < tokens; r++, row += s->array.stride.token) {
            if (halves)
                base->all_kernels->copy.widen_f16(part + r * MOST, (const uint16_t *)row, count);
            else
                am_kv_read_groups(s, part + r * MOST, row, count / 2);
        }
        copy_columns(base, to, (const char *)part, sizeof(float) * MOST, sizeof(float), tokens, count);
    }
}

/* Copies the scales of a run of tokens for some heads, each of so many columns. */
static void copy_scales(const am_attn_base *base, const am_kv_scales *s, float *to, const char *from,
                        ptrdiff_t tokens, ptrdiff_t heads, ptrdiff_t columns)
{
    const am_by_axis *stride = &s->array.stride;
    if (!s->group) {
        copy_columns(base, to, from, stride->token, stride->head, tokens, heads);
        return;
    }
    if (stride->head == columns / 2 * stride->channel) columns *= heads, heads = 1; /* side by side */
    for (ptrdiff_t h = 0; h < heads; h++, from += stride->head, to += columns * AM_FLASH_TILE) {
        if (am_kv_has_pairs(s, AM_FLOAT32))
            copy_columns(base, to, from, stride->token, sizeof(float), tokens, columns);
        else
            copy_groups(base, s, to, from, tokens, columns);
    }
}

void am_read_scales(const am_attn_base *base, const am_kv_scales *scales, const am_attn_place *at,
                    am_range keys, ptrdiff_t heads, ptrdiff_t columns, float *to)
{
    const am_attn *f = base->attn;
    const am_by_axis *stride = &scales->array.stride;
    am_range next = {keys.end, am_min(keys.end + AM_FLASH_TILE, f->keys)};
    const ptrdiff_t some = 0 < stride->token && stride->token < AM_LINE ? AM_LINE / stride->token
                                                                        : 1, /* tokens in a line */
        count = am_length(keys), all = heads * columns,
                    bytes = scales->group && stride->head < stride->token ? heads * stride->head : 1;
    const bool in_few_runs = !f->pages.table || f->pages.size * AM_PREFETCH_RUNS >= AM_FLASH_TILE;
    for (ptrdiff_t i = 0; i < all && count < AM_FLASH_TILE; i++)
        memset(to + i * AM_FLASH_TILE + count, 0, (size_t)(AM_FLASH_TILE - count) * sizeof(float));
    am_key_run run;
    for (ptrdiff_t i = 0; i < count; i += run.count) {
        run = am_key_run_of(f, &scales->array, at, (am_range){keys.begin + i, keys.end});
        if (run.data) {
            copy_scales(base, scales, to + i, run.data, run.count, heads, columns);
            continue;
        }
        for (ptrdiff_t j = 0; j < all; j++)
            memset(to + j * AM_FLASH_TILE + i, 0, (size_t)run.count * sizeof(float));
    }
    if (scales->group && in_few_runs) return; /* kernels prefetch them */
    for (; next.begin < next.end; next.begin += run.count) {
        run = am_key_run_of(f, &scales->array, at, next);
        for (ptrdiff_t r = 0; run.data && r < run.count; r += some) {
            for (ptrdiff_t i = 0; i < bytes; i += AM_LINE)
                __builtin_prefetch(run.data + r * stride->token + i);
        }
    }
}
