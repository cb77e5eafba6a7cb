/* quantize.h – rows of numbers in a quantized format of keys and values, with scales that make them fit. */
#ifndef AM_CORE_CACHE_QUANTIZE_H
#define AM_CORE_CACHE_QUANTIZE_H

#include "core/cache/formats.h"
#include "core/runtime/threads.h"

/* A row of numbers that is quantized. */
typedef struct {
    const am_kernels *kernels;
    const am_kv_format *format;
    am_array from; /* one row */
    char *to;      /* its values */
    ptrdiff_t stride;
    am_team *team;  /* NULL: it is finished without a checkpoint */
    bool saturates; /* finite numbers beyond what the format, or float32, can hold become the nearest one;
                     * else their scale is not finite */
} am_quantized_row;

/* Quantize a row. The first finds its scale. The second finds a scale and an offset for each group, and
 * writes them from `at` on. The third takes a given scale for each channel; these lie `stride` bytes apart.
 */
am_status am_quantize_row(const am_quantized_row *row, float *scale);
am_status am_quantize_groups(const am_quantized_row *row, const am_kv_scales *groups, char *at);
am_status am_quantize_by_channel(const am_quantized_row *row, const char *scales, ptrdiff_t stride);

enum { AM_QUANTIZED_AXES = 64 };

/* An axis of an array; strides in bytes. */
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
