/* quotients.h – divides integers and rounds up. */
#ifndef AM_CORE_ARRAYS_QUOTIENTS_H
#define AM_CORE_ARRAYS_QUOTIENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/dtype.h"

/* dst[i] = a[i] / b[i], rounded up; `type` is AM_INT32 or AM_INT64. Returns false if a divisor is not
 * positive. */
bool am_divide_each(am_dtype type, void *dst, const void *a, const void *b, ptrdiff_t count);

/* Replaces each a by a / b, rounded up; `a` is int64 or uint64, and divisors of up to 64 bits are positive.
 */
void am_divide_wide(uint64_t *a, const uint64_t *b, bool is_signed, ptrdiff_t count);

#endif
