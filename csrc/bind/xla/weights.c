/* weights.c – the weights of attention, and what they tell, as a handler of XLA.
 *
 * Words and arguments are those of attention (xla.c), of values without channels. Behind them come the chosen
 * queries, and their lse if flags name it. Results are those that flags name, in this order, each with four
 * axes, and behind top_keys their weights. */
#include "bind/xla/xla.h"
#include "core/arrays/convert.h"
#include "core/runtime/sizes.h"

/* Beside those of attention. */
#define FLAGS(DO)                                                                                            \
    DO(BY_KEY_HEAD, 1 << 16, "by_key_head")                                                                  \
    DO(WEIGHTS, 1 << 17, "weights")                                                                          \
    DO(KEY_SUM, 1 << 18, "key_sum")                                                                          \
    DO(ENTROPY, 1 << 19, "entropy")                                                                          \
    DO(MAX_LOGIT, 1 << 20, "max_logit")                                                                      \
    DO(TOP_KEYS, 1 << 21, "top_keys")
enum { FLAGS(AM_XLA_BIT) };
const am_xla_word am_xla_weight_words[] = {FLAGS(AM_XLA_WORD){NULL, 0}};

/* The chosen queries, in rising order. */
static bool read_queries(am_xla_call *c, am_attn_weights *to)
{
    am_view v;
    if (!am_xla_next(c, AM_XLA_ARGUMENT, false, &v)) return false;
    if (v.axes != 1 || v.type != AM_INT32) return am_xla_fail(c, "queries must be int32 [n]");
    int64_t *queries = am_keep(&c->request, v.shape[0], sizeof *queries);
    if (!queries) return false;
    for (ptrdiff_t i = 0, least = 0; i < v.shape[0]; i++) {
        queries[i] = ((const int32_t *)v.data)[i];
        if (queries[i] < least || queries[i] >= to->attn.queries)
            return am_xla_fail(c, "queries must rise, and be below %td", to->attn.queries);
        least = queries[i] + 1;
    }
    to->queries = queries, to->count = to->rows = v.shape[0], to->sums = to->attn.keys;
    return true;
}

/* The logsumexp of chosen queries: the last argument, or memory for it. */
static bool read_their_lse(am_xla_call *c, am_attn_weights *to)
{
    const am_attn *attn = &to->attn;
    const am_dtype wide = am_wide_type(attn->q.type);
    const ptrdiff_t size = (ptrdiff_t)am_size_of(wide), n = to->count;
    am_view v = {.type = wide,
                 .axes = 3,
                 .shape = {attn->batch, attn->heads, n, 1, 1},
                 .stride = {attn->heads * n * size, n * size, size}};
    to->finds_lse = c->next[AM_XLA_ARGUMENT] == c->frame->arguments.count;
    if (to->finds_lse)
        v.data =
            am_keep(&c->request, am_product(am_product(attn->batch, attn->heads, 1), n, 1), (size_t)size);
    else if (!am_xla_next_like(c, AM_XLA_ARGUMENT, true, &v, &v))
        return false;
    to->lse = am_stats_of(&v);
    return v.data;
}

bool am_xla_flash_weights(am_xla_call *c)
{
    const am_attn *attn = &c->request.attn;
    void *top_keys = NULL; /* int32, as XLA has them */
    if (!am_xla_read_attention(c, 1)) return false;
    am_attn_weights to = {.attn = *attn, .by_key_head = (c->flags & BY_KEY_HEAD) != 0};
    if (!read_queries(c, &to) || !read_their_lse(c, &to)) return false;
    const am_xla_buffer *last = am_xla_result(c, c->frame->results.count - 1);
    if (c->flags & TOP_KEYS) {
        to.top = last->rank > 0 ? last->shape[last->rank - 1] : 0;
        if (to.top < 1) return am_xla_fail(c, "top_keys must be at least 1");
    }
    const am_dtype wide = am_wide_type(attn->q.type);
    const ptrdiff_t heads = attn->heads, n = to.count, keys = attn->keys,
                    of_sums = to.by_key_head ? attn->kv_heads : heads;
    const struct {
        int64_t flag;
        am_dtype type;
        ptrdiff_t shape[3];
        void **to;
    } made[] = {{WEIGHTS, wide, {heads, n, keys}, &to.weights},
                {KEY_SUM, wide, {of_sums, keys, 1}, &to.key_sum},
                {ENTROPY, wide, {heads, n, 1}, &to.entropy},
                {MAX_LOGIT, wide, {heads, n, 1}, &to.max_logit},
                {TOP_KEYS, AM_INT32, {heads, n, to.top}, &top_keys},
                {TOP_KEYS, wide, {heads, n, to.top}, &to.top_weights}};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
        const ptrdiff_t *s = made[i].shape;
        am_view v = {.type = made[i].type, .axes = 4, .shape = {attn->batch, s[0], s[1], s[2], 1}};
        if (!(c->flags & made[i].flag)) continue;
        if (!am_xla_next_like(c, AM_XLA_RESULT, true, &v, &v)) return false;
        *made[i].to = v.data;
    }
    const ptrdiff_t count = top_keys ? attn->batch * heads * n * to.top : 0;
    if (top_keys && keys > INT32_MAX) return am_xla_fail(c, "top_keys takes up to 2**31 - 1 keys");
    if (top_keys && !(to.top_keys = am_keep(&c->request, count, sizeof *to.top_keys))) return false;
    if (!am_refuse_status(&c->request, am_attn_weigh(&c->context, &to))) return false;
    for (ptrdiff_t i = 0; i < count; i++) ((int32_t *)top_keys)[i] = (int32_t)to.top_keys[i];
    return true;
}
