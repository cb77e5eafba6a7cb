/* sizes.h – arithmetic on lengths and counts. */
#ifndef AM_CORE_RUNTIME_SIZES_H
#define AM_CORE_RUNTIME_SIZES_H

#include <stddef.h>
#include <stdint.h>

static inline ptrdiff_t am_min(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
static inline ptrdiff_t am_max(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }
static inline ptrdiff_t am_abs(ptrdiff_t a) { return a < 0 ? -a : a; }
/* Rounds up; a is not negative, b is positive. */
static inline ptrdiff_t am_ceil_div(ptrdiff_t a, ptrdiff_t b) { return a / b + (a % b != 0); }

/* How many of the ranges of n numbers, 0 to n - 1 and so on, hold one from `begin` to `end` - 1. */
static inline ptrdiff_t am_count_parts(ptrdiff_t begin, ptrdiff_t end, ptrdiff_t n)
{
    return begin < end ? (end - 1) / n - begin / n + 1 : 0;
}

/* The largest multiple of b, which is positive, that is not above a. */
static inline ptrdiff_t am_floor_to(ptrdiff_t a, ptrdiff_t b) { return a - a % b - (a % b < 0 ? b : 0); }

/* The last of `count` numbers that is not above x. They never decrease, begin at `first`, which is not above
 * x either, and lie `stride` bytes apart. */
static inline ptrdiff_t am_last_up_to(const ptrdiff_t *first, ptrdiff_t count, size_t stride, ptrdiff_t x)
{
    ptrdiff_t low = 0, high = count;
    while (high - low > 1) {
        const ptrdiff_t middle = low + (high - low) / 2;
        if (*(const ptrdiff_t *)((const char *)first + (size_t)middle * stride) <= x)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* a b c of numbers that are not negative, or PTRDIFF_MAX if it overflows: an allocation of that size
 * fails. */
static inline ptrdiff_t am_product(ptrdiff_t a, ptrdiff_t b, ptrdiff_t c)
{
    ptrdiff_t product;
    int fits = !__builtin_mul_overflow(a, b, &product) && !__builtin_mul_overflow(product, c, &product);
    return fits ? product : PTRDIFF_MAX;
}

/* Reads a number that other threads may write to at any time: what is checked is what is used. */
static inline int32_t am_read_once(const int32_t *number) { return *(const volatile int32_t *)number; }

#endif
