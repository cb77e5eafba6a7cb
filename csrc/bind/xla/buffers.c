/* buffers.c – what a call brings, as it is needed. */
#include "bind/xla/buffers.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/arrays/convert.h"

struct am_xla_memory {
    am_xla_memory *next;
    max_align_t bytes[];
};

bool am_xla_fail(am_xla_call *c, const char *format, ...)
{
    va_list rest;
    va_start(rest, format);
    vsnprintf(c->message, sizeof c->message, format, rest);
    va_end(rest);
    c->code = AM_XLA_INVALID_ARGUMENT;
    return false;
}

bool am_xla_fail_status(am_xla_call *c, am_status status)
{
    if (status == AM_OK) return true;
    if (status == AM_FORKED) {
        am_xla_fail(c, "this process was forked in the middle of a call, which the child cannot end");
        c->code = AM_XLA_ABORTED;
    } else {
        am_xla_fail(c, "attention needs more memory than there is");
        c->code = AM_XLA_RESOURCE_EXHAUSTED;
    }
    return false;
}

void *am_xla_keep(am_xla_call *c, ptrdiff_t count, size_t size)
{
    const ptrdiff_t bytes = am_product(count, (ptrdiff_t)size, 1);
    am_xla_memory *kept = bytes > PTRDIFF_MAX / 2 ? NULL : calloc(1, sizeof *kept + (size_t)bytes);
    if (!kept) {
        am_xla_fail_status(c, AM_NO_MEMORY);
        return NULL;
    }
    kept->next = c->kept;
    c->kept = kept;
    return kept->bytes;
}

void am_xla_release(am_xla_call *c)
{
    am_mask_release(&c->mask);
    c->mask = (am_mask){0};
    while (c->kept) {
        am_xla_memory *next = c->kept->next;
        free(c->kept);
        c->kept = next;
    }
}

/* --- Buffers --- */

am_dtype am_xla_type_of(am_xla_dtype type)
{
    static const am_dtype types[] = {
        [AM_XLA_S8] = AM_INT8,     [AM_XLA_S16] = AM_INT16,       [AM_XLA_S32] = AM_INT32,
        [AM_XLA_S64] = AM_INT64,   [AM_XLA_U8] = AM_UINT8,        [AM_XLA_U16] = AM_UINT16,
        [AM_XLA_U32] = AM_UINT32,  [AM_XLA_U64] = AM_UINT64,      [AM_XLA_F16] = AM_FLOAT16,
        [AM_XLA_F32] = AM_FLOAT32, [AM_XLA_F64] = AM_FLOAT64,     [AM_XLA_BF16] = AM_BFLOAT16,
        [AM_XLA_PRED] = AM_BOOL,   [AM_XLA_F8E4M3FN] = AM_FLOAT8,
    };
    /* What is not named is AM_BOOL, too. */
    if ((size_t)type >= sizeof types / sizeof *types) return AM_OTHER;
    return types[type] != AM_BOOL || type == AM_XLA_PRED ? types[type] : AM_OTHER;
}

bool am_xla_look(am_xla_call *c, const am_xla_buffer *buffer, bool by_row, am_xla_view *v)
{
    static char nothing[1]; /* of empty buffers, which jaxlib 0.8 gives as NULL */
    const int64_t axes = buffer->rank - c->vmap_axes;
    *v = (am_xla_view){.data = buffer->data ? buffer->data : nothing,
                       .type = am_xla_type_of(buffer->dtype),
                       .axes = (int)axes,
                       .shape = {1, 1, 1, 1}};
    if (axes < 0 || axes > AM_XLA_MOST_AXES || v->type == AM_OTHER)
        return am_xla_fail(c, "a buffer has type %d and %lld axes", (int)buffer->dtype,
                           (long long)buffer->rank);
    ptrdiff_t copies = 1, index = 0, rest = am_max(c->call, 0), count = 1;
    for (int64_t i = c->vmap_axes - 1; i >= 0; i--) {
        const int64_t length = buffer->shape[i], all = c->vmap_shape[i];
        if (length != 1 && length != all) return am_xla_fail(c, "the axes of vmap differ in length");
        index += length == 1 ? 0 : rest % all * copies;
        copies *= length, rest /= all;
    }
    for (int i = 0; i < v->axes; i++) {
        v->shape[i] = buffer->shape[c->vmap_axes + i];
        count *= v->shape[i];
    }
    if (c->call != AM_XLA_ALL_CALLS) {
        v->data += index * count * (ptrdiff_t)am_size_of(v->type);
        return true;
    }
    if (by_row && v->axes) {
        v->shape[0] *= copies;
        c->apart = c->calls > 1 && v->shape[0] != 1 && v->shape[0] != c->mask.batch;
    } else {
        c->apart = copies != 1;
    }
    return !c->apart;
}

ptrdiff_t am_xla_step_of(const am_xla_view *v, int axis)
{
    ptrdiff_t step = (ptrdiff_t)am_size_of(v->type);
    for (int i = axis + 1; i < AM_XLA_MOST_AXES; i++) step *= v->shape[i];
    return step;
}

ptrdiff_t am_xla_shared_step_of(const am_xla_view *v, int axis)
{
    return v->shape[axis] == 1 ? 0 : am_xla_step_of(v, axis);
}

bool am_xla_next_word(am_xla_call *c, int64_t *word)
{
    *word = 0;
    if (c->words == c->words_end) return am_xla_fail(c, "words: there are too few");
    *word = *c->words++;
    return true;
}

bool am_xla_next_operand(am_xla_call *c, am_xla_operand *o)
{
    *o = (am_xla_operand){0};
    if (!am_xla_next_word(c, &o->kind) || !am_xla_next_word(c, &o->number)) return false;
    if (o->kind == AM_XLA_NOTHING || o->kind == AM_XLA_INTEGER) return true;
    if ((o->kind != AM_XLA_NARROW && o->kind != AM_XLA_WIDE) || o->number < 0 || o->number >= c->arrays)
        return am_xla_fail(c, "words: there is no such operand");
    o->buffer = c->frame->arguments.buffers[c->first_array + o->number];
    return true;
}

const int64_t *am_xla_whole_numbers(am_xla_call *c, const am_xla_view *v, bool wide, ptrdiff_t *count)
{
    am_convert_row *convert = am_is_integer(v->type) ? am_converter(v->type, AM_INT64) : NULL;
    const bool fits =
        wide ? v->axes == 2 && v->shape[1] == 2 && v->type == AM_INT32 : v->axes == 1 && convert;
    if (!fits || (*count >= 0 && v->shape[0] != 1 && v->shape[0] != *count)) {
        am_xla_fail(c, "an array of integers has a type or a shape that does not fit");
        return NULL;
    }
    *count = v->shape[0];
    int64_t *numbers = am_xla_keep(c, *count, sizeof *numbers);
    if (!numbers) return NULL;
    if (wide) {
        if (*count) memcpy(numbers, v->data, (size_t)*count * sizeof *numbers);
    } else if (!convert(c->context.kernels, numbers, v->data, *count)) {
        am_xla_fail(c, "integers must be below 2**63");
        return NULL;
    }
    return numbers;
}
