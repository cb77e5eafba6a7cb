/* quotients.h – divides integers and rounds up. */
#ifndef AM_TOKENS_QUOTIENTS_H
#define AM_TOKENS_QUOTIENTS_H

#include "core/runtime/threads.h"

/* dst[i] = a[i] / b[i], rounded up; `type` is AM_INT32 or AM_INT64. Returns false if a divisor is not
 * positive. */
bool am_divide_each(am_dtype type, void *dst, const void *a, const void *b, ptrdiff_t count);

/* Arrays that broadcast, both of int64 or both of uint64; divisors are positive. Strides are in bytes, and 0
 * along an axis where the array repeats itself. */
typedef struct {
    int axes;
    const ptrdiff_t *shape, *a_strides, *b_strides;
    const char *a, *b;
    bool is_signed;
    uint64_t *quotients; /* of the broadcast shape, in C order */
} am_broadcast;
am_status am_divide_broadcast(const am_context *context, const am_broadcast *job);

#endif
