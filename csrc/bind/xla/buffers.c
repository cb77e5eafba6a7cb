/* buffers.c – what a call brings, as it is needed. */
#include "bind/xla/buffers.h"

#include <string.h>

#include "core/runtime/sizes.h"
#include "core/arrays/convert.h"
#include "core/cache/formats.h"

/* --- Buffers --- */

am_dtype am_xla_type_of(am_xla_dtype type)
{
    static const am_dtype types[] = {
        [AM_XLA_S8] = AM_INT8,     [AM_XLA_S16] = AM_INT16,   [AM_XLA_S32] = AM_INT32,
        [AM_XLA_S64] = AM_INT64,   [AM_XLA_U8] = AM_UINT8,    [AM_XLA_U16] = AM_UINT16,
        [AM_XLA_U32] = AM_UINT32,  [AM_XLA_U64] = AM_UINT64,  [AM_XLA_F16] = AM_FLOAT16,
        [AM_XLA_F32] = AM_FLOAT32, [AM_XLA_F64] = AM_FLOAT64, [AM_XLA_BF16] = AM_BFLOAT16,
        [AM_XLA_PRED] = AM_BOOL,
    };
    const am_kv_format *format;
    for (int i = 0; (format = am_kv_format_at(i)); i++) {
        if (format->xla == (int)type && type) return format->type;
    }
    /* What is not named is AM_BOOL, too. */
    if ((size_t)type >= sizeof types / sizeof *types) return AM_OTHER;
    return types[type] != AM_BOOL || type == AM_XLA_PRED ? types[type] : AM_OTHER;
}

bool am_xla_look(am_xla_call *c, const am_xla_buffer *buffer, bool by_row, am_view *v)
{
    static char nothing[1]; /* of empty buffers, which jaxlib 0.8 gives as NULL */
    const int64_t axes = buffer->rank - c->vmap_axes;
    *v = (am_view){.data = buffer->data ? buffer->data : nothing,
                   .type = am_xla_type_of(buffer->dtype),
                   .axes = (int)axes,
                   .shape = {1, 1, 1, 1, 1}};
    if (axes < 0 || axes > AM_MOST_AXES || v->type == AM_OTHER)
        return am_xla_fail(c, "a buffer has type %d and %lld axes", (int)buffer->dtype,
                           (long long)buffer->rank);
    ptrdiff_t copies = 1, index = 0, rest = am_max(c->call, 0), size = (ptrdiff_t)am_size_of(v->type);
    for (int64_t i = c->vmap_axes - 1; i >= 0; i--) {
        const int64_t length = buffer->shape[i], all = c->vmap_shape[i];
        if (length != 1 && length != all) return am_xla_fail(c, "the axes of vmap differ in length");
        index += length == 1 ? 0 : rest % all * copies;
        copies *= length, rest /= all;
    }
    for (int i = v->axes - 1; i >= 0; i--) {
        v->shape[i] = buffer->shape[c->vmap_axes + i], v->stride[i] = size;
        size *= v->shape[i];
    }
    if (c->call != AM_XLA_ALL_CALLS) {
        v->data += index * size;
        return true;
    }
    if (by_row && v->axes) {
        v->shape[0] *= copies;
        c->one_by_one = c->calls > 1 && v->shape[0] != 1 && v->shape[0] != c->request.mask.batch;
    } else {
        c->one_by_one = copies != 1;
    }
    return !c->one_by_one;
}

bool am_xla_next(am_xla_call *c, am_xla_side side, bool by_row, am_view *v)
{
    const am_xla_buffers *buffers = side == AM_XLA_RESULT ? &c->frame->results : &c->frame->arguments;
    if (c->next[side] >= buffers->count) return am_xla_fail(c, "there are too few arguments or results");
    if (!am_xla_look(c, buffers->buffers[c->next[side]++], by_row, v)) return false;
    if (by_row && side == AM_XLA_ARGUMENT && v->shape[0] == 1 && c->call == AM_XLA_ALL_CALLS && c->calls > 1)
        v->shape[0] = c->request.mask.batch, v->stride[0] = 0;
    return true;
}

bool am_xla_is_like(am_xla_call *c, const am_view *v, const am_view *like)
{
    return (am_kv_type_of(v->type) == am_kv_type_of(like->type) && v->axes == like->axes &&
            memcmp(v->shape, like->shape, sizeof v->shape) == 0) ||
           am_xla_fail(c, "an argument or a result has a type or a shape that does not fit");
}

bool am_xla_next_like(am_xla_call *c, am_xla_side side, bool by_row, const am_view *like, am_view *v)
{
    const am_view wanted = *like; /* which may be `v` */
    return am_xla_next(c, side, by_row, v) && am_xla_is_like(c, v, &wanted);
}

bool am_xla_next_written(am_xla_call *c, const am_view *argument)
{
    am_view v;
    if (!am_xla_next_like(c, AM_XLA_RESULT, false, argument, &v)) return false;
    return v.data == argument->data || am_product(argument->stride[0], argument->shape[0], 1) == 0 ||
           am_xla_fail(c, "what is updated must be written to in place");
}

bool am_xla_next_word(am_xla_call *c, int64_t *word)
{
    *word = 0;
    if (c->words == c->words_end) return am_xla_fail(c, "words: there are too few");
    *word = *c->words++;
    return true;
}

bool am_xla_next_operand(am_xla_call *c, bool by_row, am_dtype wide, am_operand *o)
{
    enum { NOTHING, INTEGER, NARROW, WIDE, ARGUMENT };
    int64_t kind;
    *o = (am_operand){0};
    if (!am_xla_next_word(c, &kind) || !am_xla_next_word(c, &o->number)) return false;
    o->kind = kind == NOTHING ? AM_NOTHING : kind == INTEGER ? AM_INTEGER : AM_ARRAY;
    if (o->kind != AM_ARRAY) return true;
    const int64_t first = kind == ARGUMENT ? 0 : c->first_array,
                  count = kind == ARGUMENT ? c->first_array : c->arrays;
    if (kind < NARROW || kind > ARGUMENT || o->number < 0 || o->number >= count)
        return am_xla_fail(c, "words: there is no such operand");
    am_view *v = &o->view;
    if (!am_xla_look(c, am_xla_argument(c, first + o->number), by_row, v)) return false;
    if (kind != WIDE) return true;
    if (v->type != AM_INT32 || v->axes < 1 || v->shape[v->axes - 1] != 2)
        return am_xla_fail(c, "an array of 64 bits must be pairs of int32");
    v->type = wide, v->axes--, v->shape[v->axes] = 1, v->stride[v->axes] = 0;
    return true;
}
