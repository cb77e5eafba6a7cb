/* formats.h – how numbers of keys and values lie in memory: one row of a table for each format. */
#ifndef AM_CORE_CACHE_FORMATS_H
#define AM_CORE_CACHE_FORMATS_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "core/arrays/array.h"

typedef enum {
    AM_SCALES_NONE,      /* floats are what they are */
    AM_SCALES_OF_ROWS,   /* one for each token and head, or for each head and channel */
    AM_SCALES_OF_GROUPS, /* a scale and an offset for each few channels of a token and head */
} am_kv_scale_layout;

/* Channels of a group. */
enum { AM_KV_LEAST_GROUP = 32, AM_KV_MOST_GROUP = 128 };
static inline bool am_kv_is_group(ptrdiff_t channels)
{
    return channels == AM_KV_LEAST_GROUP || channels == 64 || channels == AM_KV_MOST_GROUP;
}

/* Converts `count` numbers that lie side by side to the nearest of the format. Larger numbers become the
 * largest. NaN may become anything, because its scale is NaN. */
typedef void am_kv_narrow(void *to, const float *from, ptrdiff_t count);

/* Kernels may read a format faster than these functions (`kv` of am_arithmetic). What no kernel of a level
 * reads is widened to float32. */
typedef struct {
    const char *name; /* of its dtype in NumPy, or in ml_dtypes */
    am_dtype type;
    am_kv_scale_layout scales;
    float largest;       /* magnitude, to which new tokens are scaled */
    am_widen_row *widen; /* to float32 */
    am_kv_narrow *narrow;
    int xla; /* the number of its type in XLA, if only caches have it */
} am_kv_format;

/* NULL if keys and values cannot have this type. */
const am_kv_format *am_kv_format_of(am_dtype type);

/* The i-th format; NULL behind the last one. */
const am_kv_format *am_kv_format_at(int i);

/* Scales of the numbers in memory, float32: one for each token and head; or for each head and channel, the
 * same for all tokens. Or a scale, and an offset that is added after it, for each `group` channels of a token
 * and head, float32 or float16. */
typedef struct {
    am_array array; /* without data: none */
    bool by_channel;
    ptrdiff_t group, offset; /* group 0: no groups; offset: bytes from a scale to its offset */
} am_kv_scales;

/* Whether the scale and the offset of each group lie side by side, as numbers of this type. */
static inline bool am_kv_has_pairs(const am_kv_scales *s, am_dtype type)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(type);
    return s->array.type == type && s->offset == size && s->array.stride.channel == 2 * size;
}

/* Rows that are widened; `plain` if they and the scales of their groups lie as `widen` takes them. */
typedef struct {
    am_widen_row *widen;
    ptrdiff_t size; /* bytes of a number that it makes */
    const am_array *rows;
    const am_kv_scales *scales;
    bool plain;
} am_kv_widening;
am_kv_widening am_kv_widening_of(am_widen_row *widen, ptrdiff_t size, const am_array *rows,
                                 const am_kv_scales *scales);

/* Widens a row of `count` numbers, whatever its strides. `groups`: its scales, if they are of groups. */
void am_kv_widen_row(const am_kv_widening *w, char *to, const char *from, const char *groups,
                     ptrdiff_t count);

/* Reads scales and offsets of some groups, and writes one of either. */
void am_kv_read_groups(const am_kv_scales *s, float *to, const char *from, ptrdiff_t groups);
float am_kv_write_scale(const am_kv_scales *s, char *to, float number);

/* The scale of numbers whose greatest magnitude is `most`: 1 where that is too small to have one. */
static inline float am_kv_scale_of(const am_kv_format *format, float most)
{
    const float scale = most / format->largest;
    return scale == 0 ? 1 : scale;
}

/* The lesser of two numbers, or either if one is NaN. Unlike fminf it is not a call. */
static inline float am_lesser(float a, float b) { return a < b ? a : b; }

/* Writes the scale and the offset of a group of numbers, and replaces each number by its place between the
 * least (0) and the greatest (15), not rounded. All become NaN if one of them is not finite. A scale or an
 * offset beyond its type becomes the nearest number of the type. With `saturates`, so does a span of more
 * than float32. So the sixteen numbers that a group can hold are finite. */
static inline void am_kv_scale_group(const am_kv_scales *s, char *at, float *numbers, bool saturates)
{
    enum { LANES = 8 }; /* side by side, as vectors take them */
    float low[LANES], high[LANES], nothing[LANES] = {0};
    for (int j = 0; j < LANES; j++) low[j] = high[j] = numbers[j];
    for (ptrdiff_t i = 0; i < s->group; i += LANES) {
        for (int j = 0; j < LANES; j++) {
            const float x = numbers[i + j];
            low[j] = x < low[j] ? x : low[j], high[j] = x > high[j] ? x : high[j];
            nothing[j] += 0 * x;
        }
    }
    for (int j = 1; j < LANES; j++) {
        low[0] = am_lesser(low[j], low[0]), high[0] = -am_lesser(-high[j], -high[0]);
        nothing[0] += nothing[j];
    }
    const bool half = s->array.type == AM_FLOAT16;
    const float greatest = saturates ? FLT_MAX * (1 - 0x1p-20f) : INFINITY, /* 15 scales may round up */
        most = half ? 65504 : greatest, widest = half ? 65504 : greatest / 15,
                least = -am_lesser(-am_lesser(low[0], most), most);
    const float width = am_lesser((am_lesser(high[0], greatest) - least) / 15, widest);
    float scale = am_kv_write_scale(s, at, (width > 0 ? width : 0) + nothing[0]);
    if (scale == 0) scale = am_kv_write_scale(s, at, 1);
    const float offset = am_kv_write_scale(s, at + s->offset, least + nothing[0]);
    for (ptrdiff_t i = 0; i < s->group; i++) numbers[i] = (numbers[i] - offset) / scale;
}

/* The format whose arrays have elements of this type: int4 lies in uint8. */
static inline am_dtype am_kv_type_of(am_dtype element) { return element == AM_UINT8 ? AM_INT4 : element; }

static inline bool am_kv_is_scaled(am_dtype type)
{
    const am_kv_format *format = am_kv_format_of(type);
    return format && format->scales != AM_SCALES_NONE;
}

/* Writes the names of all, "a, b or c", as far as there is room. */
enum { AM_KV_NAMES = 200 };
void am_kv_format_names(char names[AM_KV_NAMES]);

#endif
