/* formats.h – how numbers of keys and values lie in memory: one row of a table for each format. */
#ifndef AM_CORE_CACHE_FORMATS_H
#define AM_CORE_CACHE_FORMATS_H

#include <stdbool.h>
#include <stddef.h>

#include "core/attention/attention.h"

typedef enum {
    AM_SCALES_NONE,    /* floats are what they are */
    AM_SCALES_OF_ROWS, /* one for each token and head, or for each head and channel */
} am_kv_scale_layout;

/* Converts `count` numbers that lie side by side to the nearest of the format; beyond the largest to that. */
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
} am_kv_format;

/* NULL if keys and values cannot have this type. */
const am_kv_format *am_kv_format_of(am_dtype type);

/* The i-th format; NULL behind the last one. */
const am_kv_format *am_kv_format_at(int i);

/* Widens a row of numbers, which may lie apart. */
void am_kv_widen_row(am_widen_row *widen, const am_tokens *t, float *to, const char *from, ptrdiff_t count);

static inline bool am_kv_is_scaled(am_dtype type)
{
    const am_kv_format *format = am_kv_format_of(type);
    return format && format->scales != AM_SCALES_NONE;
}

/* Writes the names of all, "a, b or c", as far as there is room. */
enum { AM_KV_NAMES = 200 };
void am_kv_format_names(char names[AM_KV_NAMES]);

#endif
