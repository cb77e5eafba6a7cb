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

typedef struct {
    ptrdiff_t index;   /* in C order, of the first number that is negative, infinite or NaN; -1 for none */
    bool none_allowed; /* there are numbers, and all are 0 */
    bool graded;       /* some are neither 0 nor 1 */
} am_additive;

/* Finds the signs that a floating-point mask is meant to be added to logits. */
am_status am_find_additive(const am_context *context, const am_numbers *numbers, am_additive *found);

#endif
