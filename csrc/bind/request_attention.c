/* request_attention.c – the arguments of attention and of its gradients. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "bind/request.h"
#include "core/arrays/convert.h"
#include "core/runtime/sizes.h"

bool am_read_inputs(am_request *r, const am_view *query, const am_view *key, const am_view *value)
{
    am_attn *attn = &r->attn;
    const ptrdiff_t *q = query->shape, *k = key->shape, *v = value->shape;
    if (!am_is_floating(query->type) || key->type != query->type || value->type != query->type ||
        query->axes != 4 || key->axes != 4 || value->axes != 4)
        return am_refuse(r, AM_WRONG_VALUE, NULL,
                         "query, key and value must have four axes and one floating-point type");
    if (!am_check_axes(r, query, "query") || !am_check_axes(r, key, "key") ||
        !am_check_axes(r, value, "value"))
        return false;
    if (k[0] != q[0] || k[3] != q[3] || (k[2] == 0 ? q[2] != 0 : q[2] % k[2] != 0) || v[0] != k[0] ||
        v[1] != k[1] || v[2] != k[2])
        return am_refuse(r, AM_WRONG_VALUE, NULL, "query, key and value must have shapes that fit");
    r->mask.batch = attn->batch = q[0], r->mask.queries = attn->queries = q[1];
    r->mask.heads = attn->heads = q[2], r->mask.keys = attn->keys = k[1];
    attn->kv_heads = k[2], attn->head_dim = q[3], attn->value_dim = v[3];
    attn->q = am_tokens_of(query), attn->k = am_tokens_of(key), attn->v = am_tokens_of(value);
    attn->mask = &r->mask;
    return true;
}

bool am_check_numbers(am_request *r)
{
    const am_attn *attn = &r->attn;
    if (isnan(attn->scale) || !(attn->cap >= 0))
        return am_refuse(r, AM_WRONG_VALUE, NULL,
                         "softmax_scale and logits_soft_cap must be numbers, the cap not negative");
    if (!(attn->dropout >= 0 && attn->dropout < 1))
        return am_refuse(r, AM_WRONG_VALUE, NULL, "dropout_prob must be at least 0 and less than 1");
    if (attn->first_query < 0 || attn->first_query > AM_LONGEST || attn->first_key < 0 ||
        attn->first_key > AM_LONGEST)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "part must be two places from 0 to 2**56");
    return !am_has_dropout_of_too_many_keys(attn) ||
           am_refuse(r, AM_WRONG_VALUE, NULL,
                     "dropout_prob: dropout takes up to 2**32 keys, got %td; compute without it",
                     attn->first_key + attn->keys);
}

bool am_check_bias(am_request *r, const am_view *v, const char *name)
{
    const ptrdiff_t wanted[4] = {r->mask.batch, r->mask.heads, r->mask.queries, r->mask.keys};
    if (!am_is_floating(v->type))
        return am_refuse(r, AM_WRONG_TYPE, v, "%s must be of a floating-point dtype", name);
    bool fits = v->axes == 4;
    for (int i = 0; i < 4; i++) fits = fits && (v->shape[i] == 1 || v->shape[i] == wanted[i]);
    return fits || am_refuse(r, AM_WRONG_VALUE, v, "%s must be broadcastable to [B, H, Tq, Tk]", name);
}

bool am_read_bias(am_request *r, const am_view *v)
{
    am_attn *attn = &r->attn;
    if (!am_check_bias(r, v, "bias")) return false;
    attn->bias = v->data, attn->bias_type = v->type;
    attn->bias_batch = am_shared_stride(v, 0), attn->bias_head = am_shared_stride(v, 1);
    attn->bias_row = am_shared_stride(v, 2), attn->bias_column = am_shared_stride(v, 3);
    return true;
}

/* A copy of rows × columns numbers as doubles, of an array [rows, columns] or [columns]. */
static double *doubles(am_request *r, const am_view *v, const char *name, ptrdiff_t rows)
{
    if ((v->type != AM_FLOAT32 && v->type != AM_FLOAT64) || v->axes < 1 || v->axes > 2) {
        am_refuse(r, AM_WRONG_TYPE, v, "%s must be float32 or float64, of one or two axes", name);
        return NULL;
    }
    const ptrdiff_t columns = v->shape[v->axes - 1];
    double *numbers = am_keep(r, am_product(rows, columns, 1), sizeof *numbers);
    for (ptrdiff_t i = 0; numbers && i < rows * columns; i++) {
        const char *from = v->data + (v->axes == 2 ? i / columns * am_shared_stride(v, 0) : 0) +
                           i % columns * v->stride[v->axes - 1];
        if (v->type == AM_FLOAT64)
            memcpy(&numbers[i], from, sizeof numbers[i]);
        else
            numbers[i] = (double)*(const float *)from;
    }
    return numbers;
}

bool am_read_sinks(am_request *r, const am_view *v)
{
    const ptrdiff_t heads = r->mask.heads, count = v->axes ? v->shape[v->axes - 1] : 0;
    const double greatest = r->attn.q.type == AM_FLOAT64 ? DBL_MAX : (double)FLT_MAX;
    if (v->axes == 2 && v->shape[0] != heads)
        return am_refuse(r, AM_WRONG_VALUE, v, "softmax_aux must be [S] or [H, S]");
    double *sinks = doubles(r, v, "softmax_aux", heads);
    for (ptrdiff_t i = 0; sinks && i < heads * count; i++)
        if (isfinite(sinks[i])) sinks[i] = fmax(-greatest, fmin(sinks[i], greatest));
    r->attn.sinks = count ? sinks : NULL, r->attn.sink_count = count;
    return sinks;
}

bool am_read_slopes(am_request *r, const am_view *v, ptrdiff_t rows)
{
    const ptrdiff_t heads = r->mask.heads, given = v->shape[0];
    if (!v->data) return true;
    if (v->axes != 2 || (given != 1 && given != rows) || v->shape[1] != heads)
        return am_refuse(r, AM_WRONG_VALUE, v, "alibi_slopes must be [1, H], [B, H] or [sequences, H]");
    const double *slopes = doubles(r, v, "alibi_slopes", given);
    for (ptrdiff_t i = 0; slopes && i < given * heads; i++) {
        if (!isfinite(slopes[i]))
            return am_refuse(r, AM_WRONG_VALUE, NULL, "alibi_slopes must be finite, got %g", slopes[i]);
    }
    r->attn.relative.slopes = slopes, r->attn.relative.slope_step = given == 1 ? 0 : heads;
    return slopes;
}

bool am_read_relative(am_request *r, const am_relative_given *g)
{
    am_relative *relative = &r->attn.relative;
    const am_view *table = &g->table;
    ptrdiff_t rows = r->mask.batch;
    if (g->starts.kind == AM_ARRAY) {
        rows = -1;
        relative->q_starts = am_read_starts_of(r, "cum_seqlens_q", &g->starts, r->mask.queries, &rows);
        if (!relative->q_starts) return false;
        if (rows < 1 || r->mask.batch != 1)
            return am_refuse(r, AM_WRONG_VALUE, NULL, "sequences must be those of one batch row");
        relative->sequences = rows;
    }
    relative->low = am_max(-AM_FAR, am_min(g->low, AM_FAR));
    relative->offsets = am_read_integers(r, &g->offsets, rows, 0), relative->offset_step = 1;
    if (!relative->offsets || !am_read_slopes(r, &g->slopes, rows)) return false;
    if (!table->data) return true;
    if (table->axes != 2 || table->shape[0] != r->mask.heads || table->shape[1] < 1)
        return am_refuse(r, AM_WRONG_VALUE, table, "relative_bias must be [H, L] with L > 0");
    relative->table = doubles(r, table, "relative_bias", table->shape[0]);
    relative->length = table->shape[1];
    return relative->table;
}

/* --- Gradients --- */

am_dtype am_wide_type(const am_request *r) { return r->attn.q.type == AM_FLOAT64 ? AM_FLOAT64 : AM_FLOAT32; }

bool am_check_result(am_request *r, const am_view *v, const char *name, am_dtype type)
{
    const am_attn *attn = &r->attn;
    if (v->type != type) return am_refuse(r, AM_WRONG_TYPE, v, "%s must be %s", name, am_dtype_name(type));
    return (v->axes == 4 && v->shape[0] == attn->batch && v->shape[1] == attn->queries &&
            v->shape[2] == attn->heads && v->shape[3] == attn->value_dim) ||
           am_refuse(r, AM_WRONG_VALUE, v, "%s must be [B, Tq, H, Dv] like the result", name);
}

bool am_check_stats(am_request *r, const am_view *v, const char *name)
{
    const am_attn *attn = &r->attn;
    if (v->type != am_wide_type(r))
        return am_refuse(r, AM_WRONG_TYPE, v, "%s must be %s", name, am_dtype_name(am_wide_type(r)));
    return (v->axes == 3 && v->shape[0] == attn->batch && v->shape[1] == attn->heads &&
            v->shape[2] == attn->queries) ||
           am_refuse(r, AM_WRONG_VALUE, v, "%s must be [B, H, Tq]", name);
}

static am_row_stats stats_of(const am_view *v)
{
    return (am_row_stats){v->data, v->stride[0], v->stride[1], v->stride[2]};
}

bool am_read_gradients(am_request *r, const am_gradients_given *g, am_attn_gradients *to)
{
    const am_dtype type = r->attn.q.type, wide = am_wide_type(r);
    if (!am_check_result(r, &g->d_out, "dout", type) ||
        !am_check_result(r, &g->out, "out", g->out.type == wide ? wide : type) ||
        !am_check_stats(r, &g->lse, "lse") || (g->d_lse.data && !am_check_stats(r, &g->d_lse, "dlse")))
        return false;
    *to = (am_attn_gradients){.forward = r->attn,
                              .lse = stats_of(&g->lse),
                              .d_lse = stats_of(&g->d_lse),
                              .d_out = am_tokens_of(&g->d_out)};
    to->forward.out = am_tokens_of(&g->out);
    return true;
}
