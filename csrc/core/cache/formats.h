/* formats.h – how numbers of keys and values lie in memory: one row of a table for each format. */
#ifndef AM_CORE_CACHE_FORMATS_H
#define AM_CORE_CACHE_FORMATS_H

#include <stdbool.h>
#include <stddef.h>

#include "kernels/dtype.h"

typedef enum {
    AM_SCALES_NONE,    /* floats are what they are */
    AM_SCALES_OF_ROWS, /* one for each token and head, or for each head and channel */
} am_kv_scale_layout;

/* Converts `count` numbers that lie side by side; `from` of widen, and `to` of narrow, is of the format. */
typedef void am_kv_widen(float *to, const void *from, ptrdiff_t count);
/* To the nearest number; beyond the largest to that. */
typedef void am_kv_narrow(void *to, const float *from, ptrdiff_t count);

/* Kernels may read a format faster than these functions (`kv` of am_arithmetic). What no kernel of a level
 * reads is widened to float32. */
typedef struct {
    const char *name; /* of its dtype in NumPy, or in ml_dtypes */
    am_dtype type;
    am_kv_scale_layout scales;
    float largest; /* magnitude, to which new tokens are scaled */
    am_kv_widen *widen;
    am_kv_narrow *narrow;
} am_kv_format;

/* NULL if keys and values cannot have this type. */
const am_kv_format *am_kv_format_of(am_dtype type);

/* The i-th format; NULL behind the last one. */
const am_kv_format *am_kv_format_at(int i);

static inline bool am_kv_is_scaled(am_dtype type)
{
    const am_kv_format *format = am_kv_format_of(type);
    return format && format->scales != AM_SCALES_NONE;
}

/* Writes the names of all, "a, b or c", as far as there is room. */
enum { AM_KV_NAMES = 200 };
void am_kv_format_names(char names[AM_KV_NAMES]);

#endif
