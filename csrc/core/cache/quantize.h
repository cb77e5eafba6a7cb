/* quantize.h – rows of numbers in a quantized format of keys and values, with scales that make them fit. */
#ifndef AM_CORE_CACHE_QUANTIZE_H
#define AM_CORE_CACHE_QUANTIZE_H

#include "core/cache/formats.h"

enum { AM_QUANTIZED_AXES = 64 };

/* An axis of an array; steps in bytes. */
typedef struct {
    ptrdiff_t length, from, to, scale;
} am_quantized_axis;

typedef struct {
    const am_kv_format *format;
    am_dtype type; /* of the numbers, floating point */
    const char *from;
    char *to;
    char *scales;    /* float32, one of a row; of groups a scale and an offset for each, side by side */
    ptrdiff_t group; /* numbers that share a scale and an offset; divides a row; 0: there are no groups */
    int axes;        /* at least one; the last is along rows */
    am_quantized_axis axis[AM_QUANTIZED_AXES];
} am_quantization;

/* Where numbers are not all finite in float32, their scale is not finite, and their values may be any. */
am_status am_quantize(const am_context *context, const am_quantization *q);

#endif
