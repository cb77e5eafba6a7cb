/* quotients.c – divides integers by arrays of divisors and rounds up. */
#include "core/arrays/quotients.h"

static uint64_t ceil_unsigned(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }

/* Works on magnitudes, since -a and a + b - 1 may overflow. A magnitude of 2**63 fits int64 only after it is
 * negated. */
static int64_t ceil_signed(int64_t a, uint64_t b)
{
    return (int64_t)(a > 0 ? ceil_unsigned((uint64_t)a, b) : 0 - (0 - (uint64_t)a) / b);
}

/* a - 1/2 is never a multiple of b, and so far from one that rounding errors do not matter. The conversion
 * truncates: it rounds a negative quotient up, and a positive one down, so 1 is added to that. */
static bool divide_each_32(int32_t *dst, const int32_t *a, const int32_t *b, ptrdiff_t count)
{
    int32_t lowest = INT32_MAX;
    for (ptrdiff_t i = 0; i < count; i++) lowest = b[i] < lowest ? b[i] : lowest;
    if (lowest <= 0) return false;
    for (ptrdiff_t i = 0; i < count; i++) dst[i] = (int32_t)((a[i] - 0.5) / b[i]) + (a[i] > 0);
    return true;
}

static bool divide_each_64(int64_t *dst, const int64_t *a, const int64_t *b, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        int64_t divisor = b[i]; /* read once: other threads may write a zero */
        if (divisor <= 0) return false;
        dst[i] = a[i] / divisor + (a[i] % divisor > 0);
    }
    return true;
}

bool am_divide_each(am_dtype type, void *dst, const void *a, const void *b, ptrdiff_t count)
{
    return type == AM_INT32 ? divide_each_32(dst, a, b, count) : divide_each_64(dst, a, b, count);
}

void am_divide_wide(uint64_t *a, const uint64_t *b, bool is_signed, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++)
        a[i] = is_signed ? (uint64_t)ceil_signed((int64_t)a[i], b[i]) : ceil_unsigned(a[i], b[i]);
}
