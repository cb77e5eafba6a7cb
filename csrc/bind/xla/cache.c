/* cache.c – attention over a cache of keys and values, and writes to it, called by XLA.
 *
 * After the numbers of am_xla_read_numbers, `words` (attnmask/jax/_cache.py) are the operands low and high,
 * the limits of distances, and the tokens of a chunk or none; cache_seqlens, block_table, cu_seqlens_q if
 * PACKED, and cu_seqlens_k_new if NEW_PACKED; if PREFIX the tokens that all sequences share; if MASKED or
 * BIASED the number of keys that mask and bias have; the terms of the logits; and if MASKED the mask.
 *
 * Arguments are query, k_cache and v_cache; key and value if APPEND; k_scale and v_scale if there are; and
 * the arrays of the operands. Packed tokens are one batch row. Results are out; lse if LSE; and if APPEND
 * the caches and the scales of their tokens, which are the memory of the arguments.
 *
 * Writes to given slots have no query and no `out`; their words are version, flags and the operand
 * slot_mapping. */
#include "bind/request_cache.h"
#include "bind/xla/xla.h"
#include "core/arrays/convert.h"
#include "core/cache/formats.h"
#include "core/runtime/sizes.h"

#define FLAGS(DO)                                                                                            \
    DO(LSE, 1, "return_lse")                                                                                 \
    DO(APPEND, 2, "key")                                                                                     \
    DO(PACKED, 4, "cu_seqlens_q")                                                                            \
    DO(MASKED, 8, "attention_mask")                                                                          \
    DO(K_SCALE, 16, "k_scale")                                                                               \
    DO(V_SCALE, 32, "v_scale")                                                                               \
    DO(BIASED, 64, "bias")                                                                                   \
    DO(NEW_PACKED, 128, "cu_seqlens_k_new")                                                                  \
    DO(PREFIX, 256, "prefix")
enum { FLAGS(AM_XLA_BIT) };
const am_xla_word am_xla_cache_words[] = {FLAGS(AM_XLA_WORD){NULL, 0}};

typedef struct {
    am_xla_call *c;
    am_cached cached;
} problem;

static bool has(const problem *p, int64_t flag) { return (p->c->flags & flag) != 0; }

/* --- Arguments --- */

static bool look_at_next(problem *p, am_view *v) { return am_xla_next(p->c, AM_XLA_ARGUMENT, false, v); }

/* Looks at the next tokens, which have a batch axis even if they are packed. */
static bool look_at_tokens(problem *p, am_view *v, bool packed)
{
    if (!look_at_next(p, v)) return false;
    if (!packed) return true;
    if (v->axes != 4 || v->shape[0] != 1) return am_xla_fail(p->c, "packed tokens must be one batch row");
    for (int i = 0; i < 3; i++) v->shape[i] = v->shape[i + 1], v->stride[i] = v->stride[i + 1];
    v->axes = 3, v->shape[3] = 1, v->stride[3] = 0;
    return true;
}

/* The caches, new tokens and scales. */
static bool look_at_caches(problem *p, bool packed)
{
    am_cached *cached = &p->cached;
    for (int side = 0; side < 2; side++) {
        if (!look_at_next(p, &cached->caches[side])) return false;
    }
    for (int side = 0; has(p, APPEND) && side < 2; side++) {
        if (!look_at_tokens(p, &cached->rows[side], packed)) return false;
    }
    for (int side = 0; side < 2; side++) {
        if (has(p, side ? V_SCALE : K_SCALE) && !look_at_next(p, &cached->scale_arrays[side])) return false;
    }
    return true;
}

/* Where packed tokens of sequences begin. */
static bool read_starts(problem *p, const char *name, const am_view *tokens, const ptrdiff_t **starts,
                        ptrdiff_t *sequences)
{
    am_operand operand;
    *sequences = -1;
    if (!am_xla_next_operand(p->c, false, AM_INT64, &operand)) return false;
    *starts = am_read_starts_of(&p->c->request, name, &operand, tokens->shape[0], sequences);
    return *starts;
}

/* The limits, each an integer or nothing. */
static bool read_limits(problem *p)
{
    const int64_t farthest = AM_FAR / 2;
    am_operand given[3]; /* low, high, chunk */
    for (int i = 0; i < 3; i++) {
        am_operand *o = &given[i];
        if (!am_xla_next_operand(p->c, false, AM_INT64, o)) return false;
        if (o->kind == AM_NOTHING) o->number = 0;
        if (o->kind == AM_ARRAY || o->number < (i == 2 ? 0 : -farthest) || o->number > farthest)
            return am_xla_fail(p->c, "words: a number is out of its range");
    }
    p->cached.limits = (am_kv_limits){.has_low = given[0].kind != AM_NOTHING,
                                      .has_high = given[1].kind != AM_NOTHING,
                                      .low = given[0].number,
                                      .high = given[1].number,
                                      .chunk = given[2].number};
    return true;
}

static bool read_arguments(problem *p)
{
    am_xla_call *c = p->c;
    am_cached *cached = &p->cached;
    am_request *r = &c->request;
    am_operand lengths, table;
    int64_t prefix = 0;
    if (has(p, PREFIX) && am_xla_one_by_one(c, true)) return false; /* sequences of one call share pages */
    if (!look_at_tokens(p, &cached->query, has(p, PACKED)) ||
        !look_at_caches(p, has(p, PACKED) || has(p, NEW_PACKED)) || !read_limits(p) ||
        !am_xla_next_operand(c, false, AM_INT64, &lengths) ||
        !am_xla_next_operand(c, false, AM_INT64, &table))
        return false;
    if (has(p, PACKED) &&
        !read_starts(p, "cu_seqlens_q", &cached->query, &cached->q_starts, &cached->sequences))
        return false;
    if (has(p, NEW_PACKED) &&
        !read_starts(p, "cu_seqlens_k_new", &cached->rows[0], &cached->new_starts, &cached->new_sequences))
        return false;
    if (has(p, PREFIX) && !am_xla_next_word(c, &prefix)) return false;
    cached->table = table.view;
    return am_cached_check(r, cached) && am_cached_read_lengths(r, cached, &lengths) &&
           (prefix == 0 || am_cached_cut(r, cached, prefix)) && am_cached_place(r, cached) &&
           am_cached_check_prefix(r, cached) && am_cached_limit(r, cached) &&
           (!has(p, APPEND) || am_cached_check_pages(r, cached));
}

/* --- The call --- */

/* True if packed queries are computed sequence by sequence: a mask counts the keys of each from 0. */
static bool is_one_by_one(const problem *p) { return has(p, PACKED) && has(p, MASKED); }

/* Mask and bias have keys for all tokens of a sequence, and may have more, which nobody sees. */
static bool read_keys(problem *p, int64_t *given)
{
    am_xla_call *c = p->c;
    am_mask *mask = &c->request.mask;
    const ptrdiff_t longest = p->cached.layout.longest;
    if (!has(p, MASKED) && !has(p, BIASED)) return true;
    if (!am_xla_next_word(c, given)) return false;
    const int64_t keys = *given;
    if (keys > p->cached.capacity) return am_xla_fail(c, "words: a mask that does not fit");
    if (longest > keys)
        return am_xla_fail(c, "%s must broadcast to [B, H, Tq, Tk] = (%td, %td, %td, %td), got %td keys",
                           has(p, MASKED) ? "attention_mask" : "bias", mask->batch, mask->heads,
                           mask->queries, longest, (ptrdiff_t)keys);
    if (!has(p, PACKED)) mask->keys = p->cached.layout.keys = keys; /* the terms say which there are */
    return true;
}

/* Reads the mask, and adds the terms for lengths, limits and chunks. */
static bool read_mask(problem *p, int64_t keys)
{
    am_node more[AM_KV_TERMS];
    if (is_one_by_one(p)) {
        p->c->request.mask.keys = keys;
        return am_xla_read_mask(p->c, NULL, 0);
    }
    return am_xla_read_mask(p->c, more, am_cached_terms(&p->cached, has(p, MASKED), more));
}

static bool read_attention(problem *p)
{
    am_xla_call *c = p->c;
    int64_t keys = 0;
    if (!read_keys(p, &keys)) return false;
    am_cached_describe(&c->request, &p->cached);
    return am_xla_read_terms(c) && read_mask(p, keys);
}

static bool look_at_all_written(problem *p)
{
    const am_cached *cached = &p->cached;
    for (int side = 0; has(p, APPEND) && side < 2; side++) {
        if (!am_xla_next_written(p->c, &cached->caches[side])) return false;
    }
    for (int side = 0; has(p, APPEND) && side < 2; side++) {
        const am_kv_scales *scales = &cached->scales[side];
        if (scales->array.data && !scales->by_channel &&
            !am_xla_next_written(p->c, &cached->scale_arrays[side]))
            return false;
    }
    return true;
}

static bool read_results(problem *p)
{
    am_attn *attn = &p->c->request.attn;
    am_view out = {.type = attn->q.type,
                   .axes = 4,
                   .shape = {attn->batch, attn->queries, attn->heads, attn->value_dim, 1}},
            lse = {.type = am_wide_type(out.type),
                   .axes = 3,
                   .shape = {attn->batch, attn->heads, attn->queries, 1, 1}};
    if (!am_xla_next_like(p->c, AM_XLA_RESULT, false, &out, &out) ||
        (has(p, LSE) && !am_xla_next_like(p->c, AM_XLA_RESULT, false, &lse, &lse)))
        return false;
    attn->out = am_tokens_of(&out);
    if (has(p, LSE)) attn->lse = am_stats_of(&lse);
    return look_at_all_written(p);
}

static bool compute(problem *p)
{
    am_xla_call *c = p->c;
    if (p->cached.prefix) return am_cached_attend_prefix(&c->context, &c->request, &p->cached) == AM_OK;
    return am_cached_attend(&c->context, &c->request, &p->cached, is_one_by_one(p)) == AM_OK;
}

bool am_xla_flash_kvcache(am_xla_call *c)
{
    problem p = {.c = c};
    if (!am_xla_read_numbers(c)) return false;
    c->first_array = 3 + 2 * has(&p, APPEND) + has(&p, K_SCALE) + has(&p, V_SCALE);
    c->arrays = c->frame->arguments.count - c->first_array;
    const bool done = read_arguments(&p) && read_attention(&p) && read_results(&p) && compute(&p);
    am_cached_free(&p.cached);
    return done;
}

bool am_xla_write_kvcache(am_xla_call *c)
{
    problem p = {.c = c};
    am_operand slots;
    if (!am_xla_read_flags(c, AM_XLA_VERSION)) return false;
    c->flags |= APPEND;
    c->first_array = 4 + has(&p, K_SCALE) + has(&p, V_SCALE);
    c->arrays = c->frame->arguments.count - c->first_array;
    return look_at_caches(&p, true) && am_xla_next_operand(c, false, AM_INT64, &slots) &&
           am_cached_check_slots(&c->request, &p.cached, &slots.view) && look_at_all_written(&p) &&
           am_refuse_status(&c->request, am_cached_append(&c->context, &p.cached));
}
