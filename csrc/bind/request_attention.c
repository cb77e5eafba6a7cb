/* request_attention.c – the arguments of attention and of its gradients. */
#include <math.h>

#include "bind/request.h"
#include "core/arrays/convert.h"
#include "core/runtime/sizes.h"

/* Too many channels are for the core to refuse, which says that they fit no memory. */
static bool check_tokens(am_request *r, const am_view *v, const char *name)
{
    am_view tokens = *v;
    tokens.axes = 3;
    return am_check_axes(r, &tokens, name) || am_check_axes(r, v, name); /* which describes all of it */
}

/* Whether a key or value is of the type of the query. */
static bool check_type(am_request *r, const am_view *v, const char *name, const char *axes, am_dtype type)
{
    if (v->type != type)
        return am_refuse(r, AM_WRONG_TYPE, v, "%s must be %s as query", name, am_dtype_name(type));
    return (v->axes == 4 || am_refuse(r, AM_WRONG_VALUE, v, "%s must be %s", name, axes)) &&
           check_tokens(r, v, name);
}

bool am_read_inputs(am_request *r, const am_view *query, const am_view *key, const am_view *value)
{
    am_attn *attn = &r->attn;
    const ptrdiff_t *q = query->shape, *k = key->shape, *v = value->shape;
    if (!am_is_floating(query->type))
        return am_refuse(r, AM_WRONG_TYPE, query, "query must be of float16, bfloat16, float32 or float64");
    if (!check_type(r, query, "query", "[B, Tq, H, D]", query->type) ||
        !check_type(r, key, "key", "[B, Tk, Hkv, D]", query->type) ||
        !check_type(r, value, "value", "[B, Tk, Hkv, Dv]", query->type))
        return false;
    if (k[0] != q[0] || k[3] != q[3])
        return am_refuse(r, AM_WRONG_VALUE, key, "key must have batch size %td and D = %td as query", q[0],
                         q[3]);
    if (k[2] == 0 ? q[2] != 0 : q[2] % k[2] != 0)
        return am_refuse(r, AM_WRONG_VALUE, key, "key must have a number of heads that divides query's %td",
                         q[2]);
    if (v[0] != k[0] || v[1] != k[1] || v[2] != k[2])
        return am_refuse(r, AM_WRONG_VALUE, value, "value must be of shape (%td, %td, %td, Dv) as key", k[0],
                         k[1], k[2]);
    r->mask.batch = attn->batch = q[0], r->mask.queries = attn->queries = q[1];
    r->mask.heads = attn->heads = q[2], r->mask.keys = attn->keys = k[1];
    attn->kv_heads = k[2], attn->head_dim = q[3], attn->value_dim = v[3];
    attn->q = am_tokens_of(query), attn->k = am_tokens_of(key), attn->v = am_tokens_of(value);
    attn->mask = &r->mask;
    return true;
}

bool am_check_numbers(am_request *r)
{
    const am_places *places = &r->attn.terms.places;
    if (isnan(r->attn.scale)) return am_refuse(r, AM_WRONG_VALUE, NULL, "softmax_scale must be a number");
    return (places->first_query >= 0 && places->first_query <= AM_LONGEST && places->first_key >= 0 &&
            places->first_key <= AM_LONGEST) ||
           am_refuse(r, AM_WRONG_VALUE, NULL, "part must be two places from 0 to 2**56");
}

/* --- Gradients --- */

static bool check_result(am_request *r, const am_view *v, const char *name, am_dtype type)
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
    if (v->type != am_wide_type(r->attn.q.type))
        return am_refuse(r, AM_WRONG_TYPE, v, "%s must be %s", name,
                         am_dtype_name(am_wide_type(r->attn.q.type)));
    return (v->axes == 3 && v->shape[0] == attn->batch && v->shape[1] == attn->heads &&
            v->shape[2] == attn->queries) ||
           am_refuse(r, AM_WRONG_VALUE, v, "%s must be [B, H, Tq]", name);
}

bool am_read_gradients(am_request *r, const am_gradients_given *g, am_attn_gradients *to)
{
    const am_dtype type = r->attn.q.type, wide = am_wide_type(type);
    if (!check_result(r, &g->d_out, "dout", type) ||
        !check_result(r, &g->out, "out", g->out.type == wide ? wide : type) ||
        !am_check_stats(r, &g->lse, "lse") || (g->d_lse.data && !am_check_stats(r, &g->d_lse, "dlse")))
        return false;
    *to = (am_attn_gradients){.forward = r->attn,
                              .lse = am_stats_of(&g->lse),
                              .d_lse = am_stats_of(&g->d_lse),
                              .d_out = am_tokens_of(&g->d_out)};
    to->forward.out = am_tokens_of(&g->out);
    return true;
}
