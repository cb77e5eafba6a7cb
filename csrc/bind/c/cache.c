/* cache.c – attention over caches of keys and values, and writes to them, from C. */
#include <string.h>

#include "bind/c/call.h"
#include "bind/request_cache.h"
#include "core/arrays/convert.h"
#include "core/attention/terms/terms.h"

static bool look_at_caches(am_c_call *c, am_cached *cached, const attnmask_array *const arrays[6])
{
    static const char *const names[] = {"k_cache", "v_cache", "k_scale", "v_scale", "key", "value"};
    am_view *const views[] = {&cached->caches[0],       &cached->caches[1], &cached->scale_arrays[0],
                              &cached->scale_arrays[1], &cached->rows[0],   &cached->rows[1]};
    for (int i = 0; i < 6; i++) {
        if (!(i < 2 ? am_c_need : am_c_look)(c, arrays[i], names[i], views[i])) return false;
    }
    return true;
}

/* The limits of distances, which one number each says for all sequences. */
static bool read_limits(am_c_call *c, const attnmask_cached_attention *call, const attnmask_mask *mask,
                        am_cached *cached)
{
    am_request *r = &c->request;
    const int64_t farthest = AM_FAR / 2;
    am_operand limits[2], *const low = limits, *const high = limits + 1;
    if (!am_c_operand(c, &mask->low, "low", low) || !am_c_operand(c, &mask->high, "high", high)) return false;
    if (mask->offset.given || mask->cum_seqlens_k.data)
        return am_refuse(r, AM_WRONG_VALUE, NULL,
                         "%s must not be given with a cache, whose last query is at its last key",
                         mask->offset.given ? "offset" : "cum_seqlens_k");
    for (const am_operand *o = limits; o < limits + 2; o++) {
        if (o->kind == AM_ARRAY)
            return am_refuse(r, AM_WRONG_VALUE, &o->view, "%s must be a number with a cache", o->name);
        if (o->kind == AM_INTEGER && (o->number < -farthest || o->number > farthest))
            return am_refuse(r, AM_WRONG_VALUE, NULL,
                             "%s must be from -2**59 to 2**59 with a cache, got %lld", o->name,
                             (long long)o->number);
    }
    if (call->chunk < 0)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "chunk must be at least 0, got %lld",
                         (long long)call->chunk);
    cached->limits = (am_kv_limits){.has_low = low->kind != AM_NOTHING,
                                    .has_high = high->kind != AM_NOTHING,
                                    .low = low->number,
                                    .high = high->number,
                                    .chunk = call->chunk < farthest ? call->chunk : farthest};
    return true;
}

static bool read_cache(am_c_call *c, const attnmask_cached_attention *call, const attnmask_mask *mask,
                       am_cached *cached)
{
    am_request *r = &c->request;
    am_operand lengths;
    const attnmask_array *const arrays[] = {&call->k_cache, &call->v_cache, &call->k_scale,
                                            &call->v_scale, &call->key,     &call->value};
    cached->sequences = cached->new_sequences = -1;
    if (!am_c_need(c, &call->query, "query", &cached->query) || !look_at_caches(c, cached, arrays) ||
        !am_c_look(c, &call->block_table, "block_table", &cached->table) ||
        !am_c_operand(c, &call->cache_seqlens, "cache_seqlens", &lengths) ||
        !read_limits(c, call, mask, cached) ||
        !am_c_read_starts(c, &mask->cum_seqlens_q, "cum_seqlens_q", cached->query.shape[0], &cached->q_starts,
                          &cached->sequences) ||
        !am_c_read_starts(c, &call->cu_seqlens_k_new, "cu_seqlens_k_new", cached->rows[0].shape[0],
                          &cached->new_starts, &cached->new_sequences))
        return false;
    if (call->prefix && (mask->node_count || mask->low.given || call->chunk))
        return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must not be given with prefix",
                         mask->node_count  ? "nodes"
                         : mask->low.given ? "low"
                                           : "chunk");
    if (!am_cached_check(r, cached) || !am_cached_read_lengths(r, cached, &lengths) ||
        (call->prefix && !am_cached_cut(r, cached, call->prefix)) || !am_cached_place(r, cached) ||
        !am_cached_check_prefix(r, cached) || !am_cached_limit(r, cached))
        return false;
    return !cached->rows[0].data || am_cached_check_pages(r, cached);
}

/* Nodes count the keys of each sequence from 0: packed ones are then computed one by one. */
static bool read_mask(am_c_call *c, const attnmask_mask *mask, am_cached *cached, bool one_by_one)
{
    am_node more[AM_KV_TERMS];
    if (one_by_one) c->request.mask.keys = cached->layout.longest;
    const int count = one_by_one ? 0 : am_cached_terms(cached, mask->node_count, more);
    return am_mask_begin(&c->request, 2 * (mask->node_count + AM_KV_TERMS)) && am_c_add_nodes(c, mask) &&
           am_mask_end(&c->request, more, count);
}

static bool look_at_results(am_c_call *c, const attnmask_cached_attention *call, const am_cached *cached)
{
    am_attn *attn = &c->request.attn;
    am_view out, lse, like = cached->query, rows = {.type = am_wide_type(attn->q.type), .axes = 3};
    const bool packed = cached->q_starts;
    like.shape[like.axes - 1] = attn->value_dim;
    rows.axes = packed ? 2 : 3;
    const ptrdiff_t shape[] = {attn->batch, attn->heads, attn->queries};
    for (int i = 0; i < AM_MOST_AXES; i++) rows.shape[i] = i < rows.axes ? shape[i + packed] : 1;
    if (!am_c_need(c, &call->out, "out", &out) || !am_c_is_like(c, &out, "out", &like) ||
        !am_c_look(c, &call->lse, "lse", &lse) || (lse.data && !am_c_is_like(c, &lse, "lse", &rows)))
        return false;
    attn->out = am_tokens_of(&out);
    if (lse.data) attn->lse = am_stats_of(&lse);
    return true;
}

static bool attend(am_c_call *c, const attnmask_cached_attention *from, am_cached *cached)
{
    am_request *r = &c->request;
    attnmask_cached_attention call;
    attnmask_mask mask;
    if (!am_c_read(c, &call, from, "call") || !am_c_read_mask_struct(c, &mask, call.mask) ||
        !read_cache(c, &call, &mask, cached))
        return false;
    const bool one_by_one = cached->q_starts && mask.node_count;
    if (!read_mask(c, &mask, cached, one_by_one)) return false;
    am_cached_describe(r, cached);
    if (!am_c_scale(c, call.scale, r->attn.head_dim, &r->attn.scale) ||
        !am_c_read_terms(c, call.terms, call.term_count, false) || !look_at_results(c, &call, cached))
        return false;
    const am_terms_found found = am_find_terms(&r->attn);
    if (call.prefix && am_adds_to_products(&found))
        return am_refuse(r, AM_WRONG_VALUE, NULL, "terms must add nothing to logits with prefix");
    const am_status status = call.prefix ? am_cached_attend_prefix(&c->context, r, cached)
                                         : am_cached_attend(&c->context, r, cached, one_by_one);
    return status == AM_OK && !am_is_refused(r);
}

attnmask_status attnmask_cached_forward(const attnmask_cached_attention *call, attnmask_message *message)
{
    am_c_call c;
    am_cached cached = {0};
    const bool done = am_c_begin(&c) && attend(&c, call, &cached);
    am_cached_free(&cached);
    return am_c_end(&c, done, message);
}

static bool write(am_c_call *c, const attnmask_cache_rows *from, am_cached *cached)
{
    attnmask_cache_rows rows;
    am_view slots;
    if (!am_c_read(c, &rows, from, "rows")) return false;
    const attnmask_array *const arrays[] = {&rows.k_cache, &rows.v_cache, &rows.k_scale,
                                            &rows.v_scale, &rows.key,     &rows.value};
    return look_at_caches(c, cached, arrays) && am_c_need(c, &rows.key, "key", &cached->rows[0]) &&
           am_c_need(c, &rows.slot_mapping, "slot_mapping", &slots) &&
           am_cached_check_slots(&c->request, cached, &slots) &&
           am_refuse_status(&c->request, am_cached_append(&c->context, cached));
}

attnmask_status attnmask_write_cache(const attnmask_cache_rows *rows, attnmask_message *message)
{
    am_c_call c;
    am_cached cached = {0};
    const bool done = am_c_begin(&c) && write(&c, rows, &cached);
    am_cached_free(&cached);
    return am_c_end(&c, done, message);
}
