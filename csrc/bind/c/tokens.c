/* tokens.c – sums over time, segment ids and starts of sequences, from C. */
#include <math.h>
#include <stdlib.h>

#include "bind/c/call.h"
#include "core/arrays/convert.h"
#include "core/arrays/packed.h"
#include "tokens/cumsum.h"
#include "tokens/segments.h"

/* --- Sums --- */

static bool check_types(am_c_call *c, const am_view *x, const am_view *out)
{
    const bool fits = (am_is_integer(x->type) && am_is_integer(out->type)) || am_is_floating(out->type);
    if (!am_is_integer(x->type) && !am_is_floating(x->type))
        return am_refuse(&c->request, AM_WRONG_TYPE, x, "x must be of integers or floating-point numbers");
    if (!fits)
        return am_refuse(&c->request, AM_WRONG_TYPE, out, "out must be of %s",
                         am_is_integer(x->type) ? "integers or floating-point numbers"
                                                : "floating-point numbers as x");
    return true;
}

static bool sum(am_c_call *c, const attnmask_sums *from)
{
    am_request *r = &c->request;
    attnmask_sums given;
    am_view x, out;
    if (!am_c_read(c, &given, from, "sums") || !am_c_need(c, &given.x, "x", &x) ||
        !am_c_need(c, &given.out, "out", &out))
        return false;
    if (x.axes != 3 && x.axes != 4)
        return am_refuse(r, AM_WRONG_VALUE, &x, "x must be [B, T, H] or [B, T, H, S]");
    am_view like = x;
    like.type = out.type;
    if (!check_types(c, &x, &out) || !am_c_is_like(c, &out, "out", &like)) return false;
    if (given.chunk < 0 || (given.chunk & (given.chunk - 1)))
        return am_refuse(r, AM_WRONG_VALUE, NULL, "chunk must be a power of two, or 0, got %lld",
                         (long long)given.chunk);
    if (!isfinite(given.scale))
        return am_refuse(r, AM_WRONG_VALUE, NULL, "scale must be finite, got %g", given.scale);
    const ptrdiff_t whole[] = {0, x.shape[1]};
    am_cumsum job = {.src = am_array_of(&x, AM_TOKENS_FIRST),
                     .dst = am_array_of(&out, AM_TOKENS_FIRST),
                     .sequences = -1,
                     .chunk = given.chunk,
                     .reverse = given.reverse != 0,
                     .scaled = given.scale != 0,
                     .scale = given.scale};
    if (!am_c_read_starts(c, &given.cum_seqlens, "cum_seqlens", x.shape[1], &job.starts, &job.sequences))
        return false;
    if (job.starts && x.shape[0] != 1)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "x must have one batch row with cum_seqlens, got %td",
                         x.shape[0]);
    if (!job.starts) job.starts = whole, job.sequences = 1;
    return am_refuse_status(r, am_cumsum_compute(&c->context, &job));
}

attnmask_status attnmask_cumsum(const attnmask_sums *sums, attnmask_message *message)
{
    am_c_call c;
    return am_c_end(&c, am_c_begin(&c) && sum(&c, sums), message);
}

/* --- Segments --- */

/* Looks at a line of integers that is written. */
static bool look_at_line(am_c_call *c, const attnmask_array *array, const char *name, am_view *v)
{
    if (!array) return am_refuse(&c->request, AM_WRONG_VALUE, NULL, "%s must be given, got NULL", name);
    if (!am_c_need(c, array, name, v)) return false;
    if (v->type != AM_INT32 && v->type != AM_INT64)
        return am_refuse(&c->request, AM_WRONG_TYPE, v, "%s must be int32 or int64", name);
    return v->axes == 1 || am_refuse(&c->request, AM_WRONG_VALUE, v, "%s must have one axis", name);
}

static void write_integer(const am_view *v, ptrdiff_t i, int64_t number)
{
    char *to = v->data + i * v->stride[0];
    if (v->type == AM_INT64)
        *(int64_t *)to = number;
    else
        *(int32_t *)to = (int32_t)number;
}

static bool fits(am_c_call *c, const am_view *v, const char *name, int64_t number)
{
    return v->type == AM_INT64 || number <= INT32_MAX ||
           am_refuse(&c->request, AM_WRONG_TYPE, v, "%s must be int64 to hold %lld", name, (long long)number);
}

static bool count_segments(am_c_call *c, const attnmask_array *segment_ids, const attnmask_array *cum_seqlens)
{
    am_request *r = &c->request;
    am_view ids, starts;
    ptrdiff_t *counts = NULL, segments = 0, large = -1;
    if (!segment_ids) return am_refuse(r, AM_WRONG_VALUE, NULL, "segment_ids must be given, got NULL");
    if (!am_c_need(c, segment_ids, "segment_ids", &ids) ||
        !look_at_line(c, cum_seqlens, "cum_seqlens", &starts))
        return false;
    if (!am_is_integer(ids.type)) return am_refuse(r, AM_WRONG_TYPE, &ids, "segment_ids must be integers");
    if (ids.axes != 1 && ids.axes != 2)
        return am_refuse(r, AM_WRONG_VALUE, &ids, "segment_ids must be [B, T] or [T]");
    if (starts.shape[0] < 1)
        return am_refuse(r, AM_WRONG_VALUE, &starts, "cum_seqlens must have an entry more than segments");
    const ptrdiff_t most = starts.shape[0] - 1;
    const am_by_axis axes = ids.axes == 2 ? (am_by_axis){0, 1, -1, -1} : (am_by_axis){-1, 0, -1, -1};
    const am_array array = am_array_of(&ids, axes);
    if (!am_refuse_status(r, am_count_segments(&c->context, &array, most, &counts, &segments, &large)))
        return false;
    int64_t total = 0;
    for (ptrdiff_t i = 0; i < segments && large < 0; i++) total += counts[i];
    const bool done = large >= 0 ? am_refuse(r, AM_WRONG_VALUE, NULL,
                                             "segment_ids must be below %td, as cum_seqlens has %td entries, "
                                             "got a larger one at index %td",
                                             most, most + 1, large)
                                 : fits(c, &starts, "cum_seqlens", total);
    total = 0;
    for (ptrdiff_t i = 0; done && i <= most; i++) {
        write_integer(&starts, i, total);
        total += i < segments ? counts[i] : 0;
    }
    free(counts);
    return done;
}

attnmask_status attnmask_segment_ids_to_cu_seqlens(const attnmask_array *segment_ids,
                                                   const attnmask_array *cum_seqlens,
                                                   attnmask_message *message)
{
    am_c_call c;
    return am_c_end(&c, am_c_begin(&c) && count_segments(&c, segment_ids, cum_seqlens), message);
}

static bool number_tokens(am_c_call *c, const attnmask_array *cum_seqlens, const attnmask_array *segment_ids)
{
    am_view ids;
    const ptrdiff_t *starts;
    ptrdiff_t sequences = -1;
    if (!cum_seqlens)
        return am_refuse(&c->request, AM_WRONG_VALUE, NULL, "cum_seqlens must be given, got NULL");
    if (!look_at_line(c, segment_ids, "segment_ids", &ids) ||
        !am_c_read_starts(c, cum_seqlens, "cum_seqlens", ids.shape[0], &starts, &sequences))
        return false;
    if (!starts) return am_refuse(&c->request, AM_WRONG_VALUE, NULL, "cum_seqlens must be given, got NULL");
    if (!fits(c, &ids, "segment_ids", sequences)) return false;
    for (ptrdiff_t s = 0; s < sequences; s++) {
        for (ptrdiff_t t = starts[s]; t < starts[s + 1]; t++) write_integer(&ids, t, s);
    }
    return true;
}

attnmask_status attnmask_cu_seqlens_to_segment_ids(const attnmask_array *cum_seqlens,
                                                   const attnmask_array *segment_ids,
                                                   attnmask_message *message)
{
    am_c_call c;
    return am_c_end(&c, am_c_begin(&c) && number_tokens(&c, cum_seqlens, segment_ids), message);
}
