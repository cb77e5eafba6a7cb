/* base.c – what all of attention stands on. */
#include "core/attention/base.h"

#include <math.h>

enum { WIDEST = 8 }; /* bytes of a number; a bias may be wider than the arithmetic */

uint32_t am_threshold_of(double probability)
{
    double scaled = nearbyint(ldexp(probability, 32));
    return scaled >= 0x1p32 ? UINT32_MAX : scaled < 1 && probability > 0 ? 1 : (uint32_t)scaled;
}

/* The first that takes queries and keys of these types; the last takes all others. */
static const am_arithmetic *choose_arithmetic(const am_kernels *kernels, const am_attn *f)
{
    for (int i = 0; i + 1 < AM_ARITHMETICS; i++) {
        const am_arithmetic *a = am_arithmetic_at(kernels, i);
        const am_kv_kernels *kv = &a->kv[f->k.type];
        if (am_is_among(a->queries, f->q.type) && kv->reading != AM_KV_OTHER &&
            !am_rounds_too_much(kv, f->head_dim))
            return a;
    }
    return am_arithmetic_at(kernels, AM_ARITHMETICS - 1);
}

/* Whether step_unpacked reads queries that are packed. */
static bool packs_queries(const am_kv_kernels *kv, const am_attn *f)
{
    const bool narrow = f->q.type == AM_FLOAT16 || f->q.type == AM_BFLOAT16;
    return kv->queries == AM_QUERY_PACKED ||
           (kv->queries == AM_QUERY_ROUNDED && narrow && !am_rounds_too_much(kv, f->head_dim));
}

am_attn_base am_attn_base_of(const am_context *context, const am_attn *attn)
{
    return am_attn_base_in(context, attn, choose_arithmetic(context->kernels, attn));
}

am_attn_base am_attn_base_in(const am_context *context, const am_attn *attn, const am_arithmetic *arithmetic)
{
    const am_kernels *k = context->kernels;
    const am_dtype type = attn->k.type;
    const am_kv_kernels *own = &arithmetic->kv[type], *widened = &arithmetic->kv[arithmetic->factors];
    const am_kv_reading reading = own->reading;
    const bool widens = reading != AM_KV_READ,
               widens_rows = widens && !(reading == AM_KV_ROWS && packs_queries(own, attn));
    const am_kv_kernels *kv_rows = widens_rows ? widened : own;
    const am_terms_found terms = am_find_terms(attn);
    return (am_attn_base){
        .attn = attn,
        .all_kernels = k,
        .arithmetic = arithmetic,
        .kv = widens ? widened : own,
        .kv_rows = kv_rows,
        .widens = widens,
        .widens_rows = widens_rows,
        .widen = arithmetic->widen[type] ? arithmetic->widen[type] : am_kv_format_of(type)->widen,
        .packs_queries = packs_queries(kv_rows, attn),
        .type = arithmetic->type,
        .size = (ptrdiff_t)am_size_of(arithmetic->type),
        .heads_per_kv = attn->kv_heads ? attn->heads / attn->kv_heads : 0,
        .unit = terms.small ? 1 : AM_LOG2_E,
        .terms = terms,
        .threshold = terms.dropout ? am_threshold_of(terms.dropout->number) : 0,
    };
}

/* --- Numbers --- */

ptrdiff_t am_row_scratch(ptrdiff_t rows, ptrdiff_t count)
{
    return am_ceil_div(am_max(rows * count, AM_TERM_WINDOW) * WIDEST, AM_LINE) * AM_LINE;
}

am_prefetch_rows am_prefetch_tokens(const am_array *t, ptrdiff_t b, ptrdiff_t head, ptrdiff_t heads,
                                    ptrdiff_t token, ptrdiff_t rows)
{
    if (rows <= 0) return (am_prefetch_rows){0};
    am_prefetch_rows of_one = am_prefetch_rows_of(am_rows_from(t, am_token(t, b, head, token), rows));
    const ptrdiff_t all = (heads - 1) * t->stride.head + of_one.length;
    if (of_one.length < all && all <= t->stride.token) of_one.length = all; /* they lie side by side */
    return of_one;
}

void am_scale_channels(const am_kv_scales *scales, ptrdiff_t kv_head, float *rows, ptrdiff_t row_count,
                       ptrdiff_t count, ptrdiff_t stride)
{
    const char *head = am_token(&scales->array, 0, kv_head, 0);
    const ptrdiff_t channel = scales->array.stride.channel;
    for (ptrdiff_t r = 0; r < row_count; r++, rows += stride) {
        if (channel == sizeof(float)) { /* side by side: vectors */
            for (ptrdiff_t i = 0; i < count; i++) rows[i] *= ((const float *)head)[i];
        } else {
            for (ptrdiff_t i = 0; i < count; i++) rows[i] *= *(const float *)(head + i * channel);
        }
    }
}
