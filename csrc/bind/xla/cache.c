/* cache.c – attention over a cache of keys and values, called by XLA; cache.c is the binding of
 * Python, which checks all that is known when a function is traced.
 *
 * After the numbers of am_xla_read_numbers, `words` (attnmask/jax/_cache.py) are the operands low and high,
 * the limits of distances; cache_seqlens, block_table, cu_seqlens_q if PACKED, and alibi_slopes; and if
 * MASKED the number of keys of the mask, and the mask.
 *
 * Arguments are query, k_cache and v_cache; key and value if APPEND; k_scale, v_scale and sinks if there are;
 * and the arrays of the operands. Packed tokens are one batch row. Results are out; lse if LSE; and if APPEND
 * the caches and the scales of their tokens, which are the memory of the arguments. */
#include <stdio.h>

#include "bind/xla/xla.h"
#include "core/runtime/sizes.h"
#include "core/cache/append.h"
#include "core/cache/formats.h"
#include "core/cache/layout.h"

enum { LSE = 1, APPEND = 2, PACKED = 4, MASKED = 8, K_SCALE = 16, V_SCALE = 32, SINKS = 64 }; /* flags */

typedef struct {
    am_xla_call *c;
    am_view query, caches[2], rows[2], factors[2]; /* rows: new keys and values; factors: their scales */
    int64_t next_argument, next_result;
    ptrdiff_t capacity; /* of a sequence */
    am_kv_table table;  /* data: NULL if the cache is contiguous */
    am_kv_cache cache;
    am_kv_limits limits;
    am_pages pages;
    am_kv_scales scales[2];
} problem;

static bool has(const problem *p, int64_t flag) { return (p->c->flags & flag) != 0; }

/* --- Buffers --- */

/* The next argument. */
static bool look_at_next(problem *p, am_view *v)
{
    am_xla_call *c = p->c;
    if (p->next_argument >= c->frame->arguments.count) return am_xla_fail(c, "there are too few arguments");
    return am_xla_look(c, am_xla_argument(c, p->next_argument++), false, v);
}

static bool has_shape(const am_view *v, ptrdiff_t batch, ptrdiff_t tokens, ptrdiff_t heads,
                      ptrdiff_t head_dim)
{
    return v->axes == 4 && v->shape[0] == batch && v->shape[1] == tokens && v->shape[2] == heads &&
           v->shape[3] == head_dim;
}

static bool read_tokens(problem *p)
{
    am_xla_call *c = p->c;
    const am_view *q = &p->query, *k = p->caches, *v = p->caches + 1;
    if (!look_at_next(p, &p->query) || !look_at_next(p, p->caches) || !look_at_next(p, p->caches + 1))
        return false;
    if (!am_is_floating(q->type) || !am_kv_format_of(k->type) || v->type != k->type ||
        (q->type == AM_FLOAT64) != (k->type == AM_FLOAT64))
        return am_xla_fail(c, "query and caches have types that do not fit");
    if (q->axes != 4 || k->axes != 4 || k->shape[3] != q->shape[3] ||
        (k->shape[2] == 0 ? q->shape[2] != 0 : q->shape[2] % k->shape[2] != 0) ||
        !has_shape(v, k->shape[0], k->shape[1], k->shape[2], v->shape[3]) ||
        (has(p, PACKED) && q->shape[0] != 1))
        return am_xla_fail(c, "query and caches have shapes that do not fit");
    for (int side = 0; has(p, APPEND) && side < 2; side++) {
        am_view *rows = p->rows + side;
        const am_view *cache = p->caches + side;
        if (!look_at_next(p, rows)) return false;
        const ptrdiff_t tokens = has(p, PACKED) ? q->shape[1] : p->rows[0].shape[1];
        if (!am_is_floating(rows->type) ||
            !has_shape(rows, q->shape[0], tokens, cache->shape[2], cache->shape[3]))
            return am_xla_fail(c, "key and value have types or shapes that do not fit");
    }
    return true;
}

/* The scales of keys, or of values; a step of 0 repeats them. */
static bool read_scales(problem *p, int side)
{
    static const char *const names[] = {"k_scale", "v_scale"};
    const am_view *cache = p->caches + side;
    am_view *v = p->factors + side;
    const bool given = has(p, side ? V_SCALE : K_SCALE);
    if (given != am_kv_is_scaled(cache->type))
        return am_xla_fail(p->c, "%s must be given for a cache of eight bits, and for no other", names[side]);
    if (!given) return true;
    if (!look_at_next(p, v)) return false;
    const bool by_channel = v->shape[0] == 1 && v->shape[1] == 1 &&
                            (cache->shape[0] != 1 || cache->shape[1] != 1 || v->shape[3] != 1);
    bool fits = v->type == AM_FLOAT32 && v->axes == 4 && (v->shape[3] == 1 || by_channel);
    for (int i = 0; i < 4; i++) fits = fits && (v->shape[i] == 1 || v->shape[i] == cache->shape[i]);
    if (has(p, APPEND) && !by_channel)
        fits = fits && has_shape(v, cache->shape[0], cache->shape[1], cache->shape[2], 1);
    if (!fits) return am_xla_fail(p->c, "%s has a type or a shape that does not fit", names[side]);
    p->scales[side] = (am_kv_scales){.data = v->data,
                                     .by_channel = by_channel,
                                     .batch = am_shared_stride(v, 0),
                                     .token = am_shared_stride(v, 1),
                                     .head = am_shared_stride(v, 2),
                                     .element = am_shared_stride(v, 3)};
    const float *wrong =
        by_channel ? am_kv_wrong_scale(&p->scales[side], cache->shape[2], cache->shape[3]) : NULL;
    return !wrong || am_xla_fail(p->c, "%s must be finite and positive for each channel, got %g", names[side],
                                 (double)*wrong);
}

/* --- Lengths and pages --- */

static bool read_lengths(problem *p, const am_operand *lengths)
{
    am_kv_cache *cache = &p->cache;
    const ptrdiff_t *numbers =
        am_read_integers(&p->c->request, lengths, cache->sequences, p->caches[0].shape[1]);
    for (ptrdiff_t s = 0; numbers && s < cache->sequences; s++) {
        if (numbers[s] < 0)
            return am_xla_fail(p->c, "cache_seqlens must be at least 0, got %td at index %td", numbers[s], s);
        cache->before[s] = numbers[s];
    }
    return numbers;
}

/* Where the tokens of sequences lie. */
static bool place_tokens(problem *p)
{
    am_xla_call *c = p->c;
    am_kv_cache *cache = &p->cache;
    am_operand low, high, lengths, table, given;
    const ptrdiff_t *starts = NULL, size = p->caches[0].shape[1];
    ptrdiff_t sequences = has(p, PACKED) ? -1 : p->query.shape[0];
    if (!am_xla_next_operand(c, false, AM_INT64, &low) || !am_xla_next_operand(c, false, AM_INT64, &high) ||
        !am_xla_next_operand(c, false, AM_INT64, &lengths) ||
        !am_xla_next_operand(c, false, AM_INT64, &table))
        return false;
    const am_view v = table.view;
    if (has(p, PACKED)) {
        if (!am_xla_next_operand(c, false, AM_INT64, &given)) return false;
        starts = am_read_starts_of(&c->request, "cu_seqlens_q", &given, p->query.shape[1], &sequences);
        if (!starts) return false;
    }
    if (v.data ? v.type != AM_INT32 || v.axes != 2 || v.shape[0] != sequences
               : p->caches[0].shape[0] != sequences)
        return am_xla_fail(c, "the cache must have a row for each of %td sequences, or block_table",
                           sequences);
    if (!am_refuse_status(&c->request, am_kv_cache_make(cache, sequences)) || !read_lengths(p, &lengths))
        return false;
    cache->q_starts = starts, cache->queries = p->query.shape[1];
    p->limits = (am_kv_limits){low.kind != AM_NOTHING, high.kind != AM_NOTHING, low.number, high.number};
    p->capacity = am_min(am_product(v.data ? v.shape[1] : 1, size, 1), AM_FAR);
    const ptrdiff_t more = has(p, APPEND) ? p->rows[0].shape[1] : 0,
                    wrong = am_kv_cache_place(cache, more, p->capacity, &p->limits);
    if (wrong >= 0) {
        const ptrdiff_t added = more && starts ? starts[wrong + 1] - starts[wrong] : more;
        char new_ones[48] = "";
        if (added) snprintf(new_ones, sizeof new_ones, " and %td new ones", added);
        return am_xla_fail(c,
                           "cache_seqlens must be tokens that the cache has room for, %td a sequence, got "
                           "%td%s at index %td",
                           p->capacity, cache->before[wrong], new_ones, wrong);
    }
    if (v.data)
        p->table =
            (am_kv_table){v.data, v.shape[1] * (ptrdiff_t)sizeof(int32_t), sizeof(int32_t), am_max(1, size)};
    return true;
}

/* The table is copied as it is checked: a buffer of XLA may be memory of a NumPy array. */
static bool read_table(problem *p)
{
    const ptrdiff_t pages = p->caches[0].shape[0];
    am_kv_entry wrong;
    if (!am_refuse_status(&p->c->request, am_kv_cache_read_table(&p->cache, &p->table, pages, &wrong)))
        return false;
    if (wrong.sequence < 0) return true;
    return pages == 0
               ? am_xla_fail(
                     p->c,
                     "block_table must name pages of k_cache, which has none, got %d at index (%td, %td)",
                     (int)wrong.page, wrong.sequence, wrong.index)
               : am_xla_fail(p->c, "block_table must be from 0 to %td, got %d at index (%td, %td)", pages - 1,
                             (int)wrong.page, wrong.sequence, wrong.index);
}

static bool read_pages(problem *p)
{
    if (p->table.data && !read_table(p)) return false;
    p->pages = am_kv_cache_pages(&p->cache, p->caches[0].shape[1]);
    if (!has(p, APPEND)) return true;
    am_kv_writers found;
    if (!am_refuse_status(&p->c->request, am_kv_find_writers(&p->pages, p->cache.before, &found)))
        return false;
    if (found.page < 0) return true;
    return found.sequence == found.other
               ? am_xla_fail(p->c,
                             "block_table must name a page once to write to it, got page %d twice for "
                             "sequence %d",
                             (int)found.page, (int)found.sequence)
               : am_xla_fail(p->c,
                             "block_table must give each sequence pages of its own to write to, got page %d "
                             "for sequences %d and %d",
                             (int)found.page, (int)found.sequence, (int)found.other);
}

/* --- The call --- */

/* What the queries see. A mask has keys for all tokens, and may have more, which nobody sees. */
static bool read_mask(problem *p)
{
    am_xla_call *c = p->c;
    am_mask *mask = &c->request.mask;
    int64_t keys;
    if (has(p, MASKED)) {
        if (!am_xla_next_word(c, &keys)) return false;
        if (keys > p->capacity || has(p, PACKED)) return am_xla_fail(c, "words: a mask that does not fit");
        if (p->cache.keys > keys)
            return am_xla_fail(
                c,
                "attention_mask must broadcast to [B, H, Tq, Tk] = (%td, %td, %td, %td), got %td "
                "keys",
                mask->batch, mask->heads, mask->queries, p->cache.keys, (ptrdiff_t)keys);
        p->cache.keys = keys;
    }
    mask->keys = p->cache.keys;
    am_node more[2];
    int count = am_kv_cache_terms(&p->cache, &p->limits, more);
    if (!has(p, MASKED) && count == 0) more[count++] = (am_node){.kind = AM_TERM_ALL};
    return am_xla_read_mask(c, more, count);
}

static bool read_attention(problem *p)
{
    am_xla_call *c = p->c;
    am_attn *attn = &c->attn;
    am_operand slopes;
    attn->q = am_xla_tokens(&p->query);
    attn->k = am_xla_tokens(p->caches), attn->v = am_xla_tokens(p->caches + 1);
    c->request.mask.batch = attn->batch = p->query.shape[0],
    c->request.mask.queries = attn->queries = p->query.shape[1];
    c->request.mask.heads = attn->heads = p->query.shape[2], attn->kv_heads = p->caches[0].shape[2];
    attn->head_dim = p->query.shape[3], attn->value_dim = p->caches[1].shape[3];
    attn->pages = p->pages, attn->k_scales = p->scales[0], attn->v_scales = p->scales[1];
    attn->normalize = true;
    if (has(p, SINKS) && !am_xla_read_sinks(c, am_xla_argument(c, p->next_argument))) return false;
    if (!am_xla_next_operand(c, false, AM_FLOAT64, &slopes) ||
        !am_xla_read_slopes(c, &slopes, p->cache.sequences))
        return false;
    attn->relative.offsets = p->cache.moved, attn->relative.offset_step = 1;
    attn->relative.q_starts = p->cache.q_starts;
    attn->relative.sequences = has(p, PACKED) ? p->cache.sequences : 0;
    if (!read_mask(p)) return false;
    attn->keys = c->request.mask.keys;
    return true;
}

/* The next result is to have the type and shape of `v`. */
static bool look_at_result(problem *p, am_view *v)
{
    am_xla_call *c = p->c;
    am_view found;
    if (p->next_result >= c->frame->results.count) return am_xla_fail(c, "there are too few results");
    if (!am_xla_look(c, am_xla_result(c, p->next_result++), false, &found)) return false;
    bool fits = found.type == v->type && found.axes == v->axes;
    for (int i = 0; i < AM_MOST_AXES; i++) fits = fits && found.shape[i] == v->shape[i];
    *v = found;
    return fits ? true : am_xla_fail(c, "a result has a type or a shape that does not fit");
}

/* The next result, which is an argument that is written to. */
static bool look_at_written(problem *p, const am_view *v)
{
    am_view written = *v;
    if (!look_at_result(p, &written)) return false;
    const bool empty = am_product(v->stride[0], v->shape[0], 1) == 0;
    return empty || written.data == v->data ? true : am_xla_fail(p->c, "a cache must be written to in place");
}

static bool read_results(problem *p)
{
    am_attn *attn = &p->c->attn;
    am_view out = p->query, lse = {.axes = 3, .shape = {attn->batch, attn->heads, attn->queries, 1}};
    out.shape[3] = attn->value_dim;
    if (!look_at_result(p, &out)) return false;
    attn->out = am_xla_tokens(&out);
    lse.type = out.type == AM_FLOAT64 ? AM_FLOAT64 : AM_FLOAT32;
    if (has(p, LSE)) {
        if (!look_at_result(p, &lse)) return false;
        attn->lse = lse.data;
    }
    for (int side = 0; has(p, APPEND) && side < 2; side++) {
        if (!look_at_written(p, p->caches + side)) return false;
    }
    for (int side = 0; has(p, APPEND) && side < 2; side++) {
        const am_kv_scales *scales = p->scales + side;
        if (scales->data && !scales->by_channel && !look_at_written(p, p->factors + side)) return false;
    }
    return true;
}

static am_status append(const problem *p, int side)
{
    const am_attn *attn = &p->c->attn;
    const am_kv_append rows = {
        .cache = side ? attn->v : attn->k,
        .rows = am_xla_tokens(p->rows + side),
        .kv_heads = attn->kv_heads,
        .head_dim = side ? attn->value_dim : attn->head_dim,
        .pages = p->pages,
        .begins = p->cache.before,
        .starts = p->cache.q_starts,
        .scales = p->scales[side],
    };
    return am_kv_append_rows(&p->c->context, &rows);
}

static bool compute(problem *p)
{
    am_xla_call *c = p->c;
    for (int side = 0; has(p, APPEND) && side < 2; side++) {
        if (!am_refuse_status(&c->request, append(p, side))) return false;
    }
    return am_refuse_status(&c->request, am_mask_prepare(&c->context, &c->request.mask)) &&
           am_refuse_status(&c->request, am_attn_forward(&c->context, &c->attn));
}

bool am_xla_kvcache(am_xla_call *c)
{
    problem p = {.c = c};
    if (!am_xla_read_numbers(c)) return false;
    c->first_array = 3 + 2 * has(&p, APPEND) + has(&p, K_SCALE) + has(&p, V_SCALE) + has(&p, SINKS);
    c->arrays = c->frame->arguments.count - c->first_array;
    const bool done = read_tokens(&p) && read_scales(&p, 0) && read_scales(&p, 1) && place_tokens(&p) &&
                      read_pages(&p) && read_attention(&p) && read_results(&p) && compute(&p);
    am_kv_cache_free(&p.cache);
    return done;
}
