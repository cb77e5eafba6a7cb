/* additive.h – tells an additive mask, which belongs to the logits, from a mask whose non-zero entries are
 * live. */
#ifndef AM_CORE_ARRAYS_ADDITIVE_H
#define AM_CORE_ARRAYS_ADDITIVE_H

#include "core/runtime/threads.h"

enum { AM_ADDITIVE_AXES = 64 };

/* Numbers of a floating-point type along any axes; strides in bytes, of any sign, or zero. */
typedef struct {
    const char *data;
    am_dtype type;
    int axes;
    const ptrdiff_t *shape, *strides;
} am_numbers;

/* The index in C order of the first number that is negative, infinite or NaN, or -1. */
am_status am_find_additive(const am_context *context, const am_numbers *numbers, ptrdiff_t *index);

#endif
