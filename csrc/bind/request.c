/* request.c – what is refused, what is kept, and integers. */
#include "bind/request.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arrays/convert.h"
#include "core/cache/formats.h"
#include "core/runtime/sizes.h"

struct am_kept {
    am_kept *next;
    max_align_t bytes[];
};

bool am_refuse(am_request *r, am_wrong wrong, const am_view *got, const char *format, ...)
{
    static _Thread_local am_refusal refusal; /* not in the request, which each short call clears */
    va_list rest;
    refusal = (am_refusal){.wrong = wrong};
    if (got) refusal.got = *got;
    va_start(rest, format);
    vsnprintf(refusal.words, sizeof refusal.words, format, rest);
    va_end(rest);
    r->refusal = &refusal;
    return false;
}

bool am_hint(am_request *r, const char *format, ...)
{
    va_list rest;
    va_start(rest, format);
    if (am_words_of_door.hints) vsnprintf(r->refusal->hint, sizeof r->refusal->hint, format, rest);
    va_end(rest);
    return false;
}

bool am_refuse_status(am_request *r, am_status status)
{
    r->status = status;
    return status == AM_OK;
}

const char *am_dtype_name(am_dtype type)
{
    static const char *const names[] = {
        [AM_BOOL] = "bool",       [AM_INT8] = "int8",         [AM_UINT8] = "uint8",
        [AM_INT16] = "int16",     [AM_UINT16] = "uint16",     [AM_INT32] = "int32",
        [AM_UINT32] = "uint32",   [AM_INT64] = "int64",       [AM_UINT64] = "uint64",
        [AM_FLOAT16] = "float16", [AM_BFLOAT16] = "bfloat16", [AM_FLOAT32] = "float32",
        [AM_FLOAT64] = "float64", [AM_OTHER] = "other",
    };
    return am_is_of_cache(type) ? am_kv_format_of(type)->name : names[type];
}

static void append(am_refusal *to, const char *format, ...)
{
    va_list rest;
    const size_t end = strlen(to->words);
    va_start(rest, format);
    vsnprintf(to->words + end, sizeof to->words - end, format, rest);
    va_end(rest);
}

const char *am_request_words(am_request *r)
{
    am_refusal *said = r->refusal;
    if (r->status == AM_FORKED)
        return "this process was forked in the middle of a call, which the child cannot end";
    if (r->status != AM_OK) return "attention needs more memory than there is";
    const am_view *got = &said->got;
    if (got->data) {
        append(said, ", got %s array of shape (", am_dtype_name(got->type));
        for (int i = 0; i < got->axes && i < AM_MOST_AXES; i++)
            append(said, i ? ", %td" : "%td", got->shape[i]);
        append(said, ")");
    }
    append(said, "%s", said->hint);
    return said->words;
}

bool am_check_axes(am_request *r, const am_view *v, const char *name)
{
    for (int i = 0; i < v->axes && i < AM_MOST_AXES; i++) {
        if (v->shape[i] > AM_LONGEST)
            return am_refuse(r, AM_WRONG_VALUE, v, "%s must be of at most 2**56 along each axis", name);
    }
    return true;
}

void *am_keep(am_request *r, ptrdiff_t count, size_t size)
{
    const ptrdiff_t bytes = am_product(count, (ptrdiff_t)size, 1);
    am_kept *kept = bytes > PTRDIFF_MAX / 2 ? NULL : calloc(1, sizeof *kept + (size_t)bytes);
    if (!kept) {
        am_refuse_status(r, AM_NO_MEMORY);
        return NULL;
    }
    kept->next = r->kept;
    r->kept = kept;
    return kept->bytes;
}

void am_request_free(am_request *r)
{
    am_mask_release(&r->mask);
    r->mask = (am_mask){0};
    while (r->kept) {
        am_kept *next = r->kept->next;
        free(r->kept);
        r->kept = next;
    }
}

ptrdiff_t am_widen(const am_view *v, ptrdiff_t *to)
{
    const ptrdiff_t count = v->axes ? v->shape[0] : 1, stride = v->stride[0];
    if (stride == (ptrdiff_t)am_size_of(v->type) && am_convert(NULL, AM_INT64, to, v->type, v->data, count))
        return -1;
    ptrdiff_t beyond = -1;
    for (ptrdiff_t i = count - 1; i >= 0; i--) {
        if (am_convert(NULL, AM_INT64, &to[i], v->type, v->data + i * stride, 1)) continue;
        to[i] = PTRDIFF_MAX;
        beyond = i;
    }
    return beyond;
}
