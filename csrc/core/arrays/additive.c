/* additive.c – one pass over an array in the order of its memory, and a second one only to say where. */
#include "core/arrays/additive.h"

#include <string.h>

#include "core/runtime/sizes.h"

enum { PIECE = 1 << 15 }; /* numbers that a task looks at */

/* Axes that are followed, the last one from number to number. */
typedef struct {
    const am_numbers *numbers;
    int axes;
    ptrdiff_t shape[AM_ADDITIVE_AXES], strides[AM_ADDITIVE_AXES];
    ptrdiff_t row_pieces;
    atomic_ptrdiff_t first;  /* by these axes; PTRDIFF_MAX for none */
    atomic_bool any, graded; /* numbers other than 0; other than 0 and 1 */
} scan;

/* any: a number is not 0; graded: a number is neither 0 nor 1. */
typedef struct {
    bool any, graded;
} contents;

/* As unsigned integers, numbers from INFINITY on are NaN or negative, all but -0. */
#define T uint16_t
#define FN(name) name##_16
#include "core/arrays/additive_tpl.h"
#define T uint32_t
#define FN(name) name##_32
#include "core/arrays/additive_tpl.h"
#define T uint64_t
#define FN(name) name##_64
#include "core/arrays/additive_tpl.h"

static ptrdiff_t first_of(am_dtype type, const char *row, ptrdiff_t stride, ptrdiff_t count, contents *seen)
{
    switch (type) {
    case AM_FLOAT16: return first_additive_16(row, stride, count, 0x7c00, 0x3c00, seen);
    case AM_BFLOAT16: return first_additive_16(row, stride, count, 0x7f80, 0x3f80, seen);
    case AM_FLOAT32: return first_additive_32(row, stride, count, 0x7f800000, 0x3f800000, seen);
    default: return first_additive_64(row, stride, count, 0x7ff0000000000000, 0x3ff0000000000000, seen);
    }
}

static am_status scan_task(void *arg, ptrdiff_t index, am_team *team)
{
    scan *s = arg;
    const int last = s->axes - 1;
    const ptrdiff_t row = index / s->row_pieces, begin = index % s->row_pieces * PIECE;
    const ptrdiff_t count = am_min(PIECE, s->shape[last] - begin), stride = s->strides[last];
    if (atomic_load_explicit(&s->first, memory_order_relaxed) < row * s->shape[last] + begin) return AM_OK;
    const char *data = s->numbers->data + begin * stride;
    ptrdiff_t rest = row;
    for (int axis = last - 1; axis >= 0; rest /= s->shape[axis--])
        data += rest % s->shape[axis] * s->strides[axis];
    contents seen = {false, false};
    const ptrdiff_t found = first_of(s->numbers->type, data, stride, count, &seen);
    if (seen.any) atomic_store_explicit(&s->any, true, memory_order_relaxed);
    if (seen.graded) atomic_store_explicit(&s->graded, true, memory_order_relaxed);
    if (found >= 0) am_lower_to(&s->first, row * s->shape[last] + begin + found);
    return am_checkpoint(team);
}

/* Leaves out axes along which nothing changes, puts the others in order, and joins those that are one. */
static void choose_axes(scan *s, bool by_memory)
{
    s->axes = 0;
    for (int axis = 0; axis < s->numbers->axes; axis++) {
        const ptrdiff_t length = s->numbers->shape[axis], stride = s->numbers->strides[axis];
        if (length <= 1 || stride == 0) continue;
        int place = s->axes++;
        for (; by_memory && place > 0 && am_abs(s->strides[place - 1]) < am_abs(stride); place--) {
            s->shape[place] = s->shape[place - 1], s->strides[place] = s->strides[place - 1];
        }
        s->shape[place] = length, s->strides[place] = stride;
    }
    int kept = 0;
    for (int axis = 1; axis < s->axes; axis++) {
        if (s->strides[kept] == s->strides[axis] * s->shape[axis])
            s->shape[axis] *= s->shape[kept];
        else
            kept++;
        s->shape[kept] = s->shape[axis], s->strides[kept] = s->strides[axis];
    }
    if (s->axes == 0) s->shape[0] = 1, s->strides[0] = 0;
    s->axes = kept + 1;
}

static am_status look(const am_context *context, scan *s, bool by_memory)
{
    choose_axes(s, by_memory);
    ptrdiff_t rows = 1;
    for (int axis = 0; axis < s->axes - 1; axis++) rows *= s->shape[axis];
    const ptrdiff_t row = s->shape[s->axes - 1];
    s->row_pieces = am_ceil_div(row, PIECE);
    atomic_init(&s->first, PTRDIFF_MAX);
    return am_parallel(context, rows * s->row_pieces, am_max(1, PIECE / row), scan_task, s);
}

am_status am_find_additive(const am_context *context, const am_numbers *numbers, am_additive *found)
{
    *found = (am_additive){.index = -1};
    for (int axis = 0; axis < numbers->axes; axis++) {
        if (numbers->shape[axis] == 0) return AM_OK;
    }
    scan s = {.numbers = numbers};
    am_status status = look(context, &s, true);
    found->none_allowed = !atomic_load(&s.any);
    found->graded = atomic_load(&s.graded);
    if (status != AM_OK || atomic_load(&s.first) == PTRDIFF_MAX) return status;
    status = look(context, &s, false);
    if (status != AM_OK || atomic_load(&s.first) == PTRDIFF_MAX) return status; /* other threads may write */
    /* From a place among the axes that were followed to one among all. */
    ptrdiff_t rest = atomic_load(&s.first), stride = 1;
    found->index = 0;
    for (int axis = numbers->axes - 1; axis >= 0; stride *= numbers->shape[axis--]) {
        if (numbers->shape[axis] == 1 || numbers->strides[axis] == 0) continue;
        found->index += rest % numbers->shape[axis] * stride;
        rest /= numbers->shape[axis];
    }
    return AM_OK;
}
