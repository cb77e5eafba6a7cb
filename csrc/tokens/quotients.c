/* quotients.c – divides integers by arrays of divisors and rounds up. */
#include "tokens/quotients.h"

#include "core/runtime/sizes.h"

enum { PIECE = 1 << 14 }; /* quotients per task */

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

typedef struct {
    const am_broadcast *arrays;
    ptrdiff_t count;
} divide_job;

static am_status divide_task(void *arg, ptrdiff_t index, am_team *team)
{
    const divide_job *job = arg;
    const am_broadcast *d = job->arrays;
    const int last = d->axes - 1;
    const ptrdiff_t end = am_min((index + 1) * PIECE, job->count);
    for (ptrdiff_t begin = index * PIECE, next; begin < end; begin = next) {
        const char *a = d->a, *b = d->b;
        ptrdiff_t rest = begin;
        for (int axis = last; axis >= 0; axis--) {
            ptrdiff_t place = rest % d->shape[axis];
            a += place * d->a_strides[axis], b += place * d->b_strides[axis];
            rest /= d->shape[axis];
        }
        const ptrdiff_t left =
            d->axes ? d->shape[last] - begin % d->shape[last] : 1; /* to the end of the row */
        next = begin + am_min(left, end - begin);
        for (ptrdiff_t i = begin; i < next; i++) {
            const uint64_t n = *(const uint64_t *)a, given = *(const uint64_t *)b;
            const uint64_t divisor = given ? given : 1; /* other threads may write a zero */
            d->quotients[i] =
                d->is_signed ? (uint64_t)ceil_signed((int64_t)n, divisor) : ceil_unsigned(n, divisor);
            if (d->axes) a += d->a_strides[last], b += d->b_strides[last];
        }
    }
    return am_checkpoint(team);
}

am_status am_divide_broadcast(const am_context *context, const am_broadcast *arrays)
{
    divide_job job = {arrays, 1};
    for (int axis = 0; axis < arrays->axes; axis++) job.count *= arrays->shape[axis];
    return am_parallel(context, am_ceil_div(job.count, PIECE), 1, divide_task, &job);
}
