/* request_cache.c – checks and arranges a call over a cache. */
#include "bind/request_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arrays/convert.h"
#include "core/cache/append.h"
#include "core/cache/formats.h"
#include "core/runtime/sizes.h"

static const char *const cache_names[] = {"k_cache", "v_cache"}, *const row_names[] = {"key", "value"},
                         *const scale_names[] = {"k_scale", "v_scale"};

void am_cached_free(am_cached *c) { am_kv_cache_free(&c->layout); }

static bool same_shape(const ptrdiff_t *a, const ptrdiff_t *b, size_t axes)
{
    return memcmp(a, b, axes * sizeof *a) == 0;
}

ptrdiff_t am_cached_channels(const am_view *cache) { return cache->shape[3] * am_numbers_of(cache->type); }

/* How tokens lie: packed in one row, or as batch rows. */
typedef struct {
    const char *by; /* the argument that packs them; NULL: they are batch rows */
    ptrdiff_t end;  /* where its last sequence ends, which must be behind all tokens; -1: it has none */
} packing;

static packing packing_of(const char *name, const ptrdiff_t *starts, ptrdiff_t sequences)
{
    return starts ? (packing){name, starts[sequences]} : (packing){0};
}

static bool check_tokens(am_request *r, const am_view *v, const char *name, const char *axes, packing packed)
{
    if (!am_is_floating(v->type))
        return am_refuse(r, AM_WRONG_TYPE, v, "%s must be of float16, bfloat16, float32 or float64", name);
    if (packed.by && v->axes != 3)
        return am_refuse(r, AM_WRONG_VALUE, v, "%s must be [total, %s] with %s", name, axes, packed.by);
    if (!packed.by && v->axes != 4)
        return am_refuse(r, AM_WRONG_VALUE, v, "%s must be [B, T, %s]", name, axes);
    if (!am_check_axes(r, v, name)) return false;
    return !packed.by || packed.end < 0 || packed.end == v->shape[0] ||
           am_refuse(r, AM_WRONG_VALUE, NULL, "%s must end at %td tokens of %s, got %td", packed.by,
                     v->shape[0], name, packed.end);
}

static bool check_caches(am_request *r, const am_cached *c)
{
    const am_view *k_cache = &c->caches[0], *v_cache = &c->caches[1];
    const ptrdiff_t *k = k_cache->shape;
    for (int i = 0; i < 2; i++) {
        const am_view *v = &c->caches[i];
        if (!am_kv_format_of(v->type)) {
            char names[AM_KV_NAMES];
            am_kv_format_names(names);
            return am_refuse(r, AM_WRONG_TYPE, v, "%s must be of %s", cache_names[i], names);
        }
        if (v->axes != 4)
            return am_refuse(r, AM_WRONG_VALUE, v,
                             "%s must be [B, Tmax, Hkv, D] or [pages, page_size, Hkv, D]", cache_names[i]);
        if (!am_check_axes(r, v, cache_names[i])) return false;
    }
    if (v_cache->type != k_cache->type)
        return am_refuse(r, AM_WRONG_TYPE, v_cache, "v_cache must be %s as k_cache",
                         am_dtype_name(k_cache->type));
    return same_shape(k, v_cache->shape, 3) ||
           am_refuse(r, AM_WRONG_VALUE, v_cache, "v_cache must be of shape (%td, %td, %td) and Dv as k_cache",
                     k[0], k[1], k[2]);
}

static bool check_query(am_request *r, const am_cached *c)
{
    const am_view *k_cache = &c->caches[0], *query = &c->query;
    const ptrdiff_t *q = am_cached_tokens(query), *k = k_cache->shape;
    if ((k_cache->type == AM_FLOAT64) != (query->type == AM_FLOAT64))
        return k_cache->type == AM_FLOAT64
                   ? am_refuse(r, AM_WRONG_TYPE, query, "query must be float64 as its cache")
                   : am_refuse(r, AM_WRONG_TYPE, query,
                               "query must be float32, float16 or bfloat16 with a cache of %s",
                               am_dtype_name(k_cache->type));
    if (am_cached_channels(k_cache) != q[2])
        return am_refuse(r, AM_WRONG_VALUE, query, "query must have D = %td as its cache%s",
                         am_cached_channels(k_cache),
                         am_numbers_of(k_cache->type) == 2 ? " of 2 channels per byte" : "");
    if (k[2] == 0 ? q[1] != 0 : q[1] % k[2] != 0)
        return am_refuse(r, AM_WRONG_VALUE, query, "query must have a multiple of its cache's %td heads",
                         k[2]);
    return true;
}

/* Whether the values are some of the keys' channels, in the same memory. */
static bool is_latent(const am_view *k, const am_view *v)
{
    const ptrdiff_t stride = k->stride[3], offset = v->data - k->data;
    for (int i = 0; i < 3; i++) {
        if (k->shape[i] > 1 && k->stride[i] != v->stride[i]) return false;
    }
    if (v->shape[3] > k->shape[3] || (v->shape[3] > 1 && v->stride[3] != stride)) return false;
    if (stride == 0 || offset % stride != 0) return false;
    return offset / stride >= 0 && offset / stride <= k->shape[3] - v->shape[3];
}

/* Lets packed new tokens begin where queries do, unless they have starts of their own. */
static bool check_new_starts(am_request *r, am_cached *c)
{
    if (c->new_starts && !c->rows[0].data)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "key must be given with cu_seqlens_k_new, got %s",
                         am_words_of_door.none);
    if (c->new_starts && c->new_sequences != c->sequences)
        return am_refuse(r, AM_WRONG_VALUE, NULL,
                         "cu_seqlens_k_new must have %td entries for %td sequences of queries, got %td",
                         c->sequences + 1, c->sequences, c->new_sequences + 1);
    if (c->rows[0].data && !c->new_starts) c->new_starts = c->q_starts;
    return true;
}

static bool check_rows(am_request *r, const am_cached *c, packing packed)
{
    static const char *const axes[] = {"Hkv, D", "Hkv, Dv"};
    if (!c->rows[0].data && !c->rows[1].data) return true;
    if (c->latent && c->rows[0].data && c->rows[1].data)
        return am_refuse(r, AM_WRONG_VALUE, &c->rows[1],
                         "value must be %s with a latent cache, as key contains the values",
                         am_words_of_door.none);
    for (int side = 0; side < 2; side++) {
        if (!c->rows[side].data && !(c->latent && side == 1))
            return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be given with %s, got %s", row_names[side],
                             row_names[1 - side], am_words_of_door.none);
    }
    for (int side = 0; side < 2 && c->rows[side].data; side++) {
        const am_view *v = &c->rows[side];
        const ptrdiff_t *cache = c->caches[side].shape;
        if (!check_tokens(r, v, row_names[side], axes[side], packed)) return false;
        if (!packed.by && v->shape[0] != c->sequences)
            return am_refuse(r, AM_WRONG_VALUE, v, "%s must have batch size %td as query", row_names[side],
                             c->sequences);
        const ptrdiff_t wanted[] = {cache[2], am_cached_channels(&c->caches[side])};
        if (!same_shape(am_cached_tokens(v) + 1, wanted, 2))
            return am_refuse(r, AM_WRONG_VALUE, v, "%s must have %td heads of %td channels as its cache",
                             row_names[side], wanted[0], wanted[1]);
    }
    const ptrdiff_t tokens = *am_cached_tokens(&c->rows[0]);
    return c->latent || *am_cached_tokens(&c->rows[1]) == tokens ||
           am_refuse(r, AM_WRONG_VALUE, &c->rows[1], "value must have %td tokens as key", tokens);
}

/* Scales and offsets of groups of channels. */
static bool read_groups(am_request *r, am_cached *c, int side)
{
    const am_view *v = &c->scale_arrays[side], *cache = &c->caches[side];
    const char *name = scale_names[side];
    const ptrdiff_t *n = cache->shape, channels = am_cached_channels(cache), groups = v->shape[3],
                    group = groups > 0 ? channels / groups : 32;
    if (!v->data) {
        am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be given for a cache of uint8, got %s", name,
                  am_words_of_door.none);
        return am_hint(r, "; attnmask.quantize_kv(x, \"int4\") returns numbers and scales");
    }
    if (v->type != AM_FLOAT32 && v->type != AM_FLOAT16)
        return am_refuse(r, AM_WRONG_TYPE, v, "%s must be float32 or float16 for a cache of uint8", name);
    if (v->axes != 5 || !same_shape(v->shape, n, 3) || v->shape[4] != 2 || group * groups != channels ||
        !am_kv_is_group(group))
        return am_refuse(r, AM_WRONG_VALUE, v,
                         "%s must be of shape (%td, %td, %td, %td / group, 2) with a group of 32, 64 or 128 "
                         "for a cache of uint8",
                         name, n[0], n[1], n[2], channels);
    c->scales[side] =
        (am_kv_scales){.array = am_array_of(v, AM_TOKENS_FIRST), .offset = v->stride[4], .group = group};
    return true;
}

/* The scales of a cache, if it is quantized; a step of 0 repeats them. */
static bool read_scales(am_request *r, am_cached *c, int side)
{
    const am_view *v = &c->scale_arrays[side], *cache = &c->caches[side];
    const char *name = scale_names[side], *type = am_dtype_name(cache->type);
    const ptrdiff_t *n = cache->shape;
    const am_kv_scale_layout layout = am_kv_format_of(cache->type)->scales;
    if (layout == AM_SCALES_OF_GROUPS) return read_groups(r, c, side);
    if (layout == AM_SCALES_NONE)
        return !v->data || am_refuse(r, AM_WRONG_VALUE, v, "%s must be %s for a cache of %s", name,
                                     am_words_of_door.none, type);
    if (!v->data) {
        am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be given for a cache of %s, got %s", name, type,
                  am_words_of_door.none);
        return am_hint(r, "; write %s=np.ones((1, 1, %td, %td), np.float32) for scales of 1", name, n[2],
                       n[3]);
    }
    if (v->type != AM_FLOAT32) return am_refuse(r, AM_WRONG_TYPE, v, "%s must be float32", name);
    const bool by_channel =
        v->shape[0] == 1 && v->shape[1] == 1 && (n[0] != 1 || n[1] != 1 || v->shape[3] != 1);
    bool fits = v->axes == 4 && (v->shape[3] == 1 || by_channel);
    for (int i = 0; i < 4; i++) fits = fits && (v->shape[i] == 1 || v->shape[i] == n[i]);
    if (!fits)
        return am_refuse(r, AM_WRONG_VALUE, v, "%s must be of shape (%td, %td, %td, 1) or (1, 1, %td, %td)",
                         name, n[0], n[1], n[2], n[2], n[3]);
    if (c->rows[0].data && !by_channel && !same_shape(v->shape, n, 3))
        return am_refuse(r, AM_WRONG_VALUE, v, "%s must be of shape (%td, %td, %td, 1) to take new tokens",
                         name, n[0], n[1], n[2]);
    const am_view shared = am_shared(*v);
    c->scales[side] =
        (am_kv_scales){.array = am_array_of(&shared, AM_TOKENS_FIRST), .by_channel = by_channel};
    const float *wrong = by_channel ? am_kv_wrong_scale(&c->scales[side], n[2], n[3]) : NULL;
    return !wrong ||
           am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be finite and positive for each channel, got %g", name,
                     (double)*wrong);
}

static bool is_same_memory(const am_view *a, const am_view *b)
{
    return a->data == b->data && a->axes == b->axes && same_shape(a->shape, b->shape, AM_MOST_AXES) &&
           same_shape(a->stride, b->stride, AM_MOST_AXES);
}

/* Lets values that are channels of the keys have the scales of these. */
static bool share_scales(am_request *r, am_cached *c)
{
    const am_view *k_cache = &c->caches[0], *v_cache = &c->caches[1];
    const ptrdiff_t elements = (v_cache->data - k_cache->data) / k_cache->stride[3],
                    before = elements * am_numbers_of(k_cache->type), group = c->scales[0].group;
    if (group && (before % group || am_cached_channels(v_cache) % group))
        return am_refuse(
            r, AM_WRONG_VALUE, NULL,
            "v_cache must be whole groups of %td channels of k_cache, got %td from channel %td on", group,
            am_cached_channels(v_cache), before);
    c->scales[1] = c->scales[0];
    am_array *array = &c->scales[1].array;
    array->data += (group ? before / group : elements) * array->stride.channel;
    return true;
}

static bool read_all_scales(am_request *r, am_cached *c)
{
    const am_view *k = &c->scale_arrays[0], *v = &c->scale_arrays[1];
    if (!read_scales(r, c, 0)) return false;
    if (c->latent && k->data && (!v->data || is_same_memory(k, v))) return share_scales(r, c);
    if (c->latent && v->data && c->rows[0].data)
        return am_refuse(r, AM_WRONG_VALUE, v,
                         "v_scale must be %s or k_scale itself where v_cache is channels of k_cache",
                         am_words_of_door.none);
    return read_scales(r, c, 1);
}

static bool check_table(am_request *r, const am_cached *c)
{
    const am_view *table = &c->table, *k_cache = &c->caches[0];
    const ptrdiff_t rows = k_cache->shape[0];
    if (table->data && table->type != AM_INT32 && table->type != AM_INT64)
        return am_refuse(r, AM_WRONG_TYPE, table, "block_table must be int32 or int64");
    if (table->data)
        return (table->axes == 2 && table->shape[0] == c->sequences) ||
               am_refuse(r, AM_WRONG_VALUE, table, "block_table must be of shape (%td, max_pages)",
                         c->sequences);
    if (rows == c->sequences) return true;
    am_refuse(r, AM_WRONG_VALUE, k_cache, "k_cache must have %td rows, one per sequence", c->sequences);
    if (rows > c->sequences)
        snprintf(r->refusal->hint, sizeof r->refusal->hint, "; %s if they are pages", am_words_of_door.paged);
    return false;
}

static bool read_caches(am_request *r, am_cached *c)
{
    for (int side = 0; side < 2; side++) c->caches[side].type = am_kv_type_of(c->caches[side].type);
    if (!check_caches(r, c)) return false;
    c->latent = is_latent(&c->caches[0], &c->caches[1]);
    return true;
}

bool am_cached_check(am_request *r, am_cached *c)
{
    const packing packed = packing_of(am_words_of_door.q_starts, c->q_starts, c->sequences),
                  added = packing_of("cu_seqlens_k_new", c->new_starts, c->new_sequences);
    if (!check_tokens(r, &c->query, "query", "H, D", packed) || !read_caches(r, c) || !check_query(r, c) ||
        !read_all_scales(r, c))
        return false;
    if (!c->q_starts) c->sequences = c->query.shape[0];
    const ptrdiff_t *q = am_cached_tokens(&c->query);
    r->mask.batch = c->q_starts ? 1 : c->sequences, r->mask.heads = q[1], r->mask.queries = q[0];
    return am_refuse_status(r, am_kv_cache_make(&c->layout, c->sequences)) && check_new_starts(r, c) &&
           check_rows(r, c, added.by ? added : packed) && check_table(r, c);
}

/* --- Slots --- */

/* A slot, and the token that goes there. */
typedef struct {
    ptrdiff_t slot, token;
} placed;

static int compare_slots(const void *a, const void *b)
{
    const placed *x = a, *y = b;
    return x->slot != y->slot ? (x->slot > y->slot) - (x->slot < y->slot)
                              : (x->token > y->token) - (x->token < y->token);
}

static bool refuse_slot(am_request *r, const placed *first, const placed *second)
{
    return am_refuse(r, AM_WRONG_VALUE, NULL,
                     "slot_mapping must give each token a slot of its own, got %td at index %td and %td",
                     first->slot, first->token, second->token);
}

/* Checks that no two tokens go to one slot. */
static bool check_slots_differ(am_request *r, const ptrdiff_t *slots, ptrdiff_t count)
{
    bool ascending = true;
    for (ptrdiff_t i = 1; i < count; i++) ascending &= slots[i] > slots[i - 1];
    if (ascending) return true;
    placed *sorted = am_keep(r, count, sizeof *sorted);
    if (!sorted) return false;
    for (ptrdiff_t i = 0; i < count; i++) sorted[i] = (placed){slots[i], i};
    qsort(sorted, (size_t)count, sizeof *sorted, compare_slots);
    for (ptrdiff_t i = 1; i < count; i++) {
        if (sorted[i].slot >= 0 && sorted[i].slot == sorted[i - 1].slot)
            return refuse_slot(r, &sorted[i - 1], &sorted[i]);
    }
    return true;
}

/* The slots are copied as they are checked. */
static bool read_slots(am_request *r, am_cached *c, const am_view *v)
{
    const ptrdiff_t *cache = c->caches[0].shape, end = am_product(cache[0], cache[1], 1),
                    count = *am_cached_tokens(&c->rows[0]);
    if (!am_is_integer(v->type)) return am_refuse(r, AM_WRONG_TYPE, v, "slot_mapping must be integers");
    if (v->axes != 1 || v->shape[0] != count)
        return am_refuse(r, AM_WRONG_VALUE, v, "slot_mapping must be of shape (%td%s), a slot for each token",
                         count, am_words_of_door.comma);
    ptrdiff_t *slots = am_keep(r, count, sizeof *slots);
    if (!slots) return false;
    am_widen(v, slots);
    for (ptrdiff_t i = 0; i < count; i++) {
        if (slots[i] < -1 || slots[i] >= end)
            return am_refuse(r, AM_WRONG_INDEX, NULL,
                             "slot_mapping must be from -1 to %td, got %td at index %td", end - 1, slots[i],
                             i);
    }
    c->slots = slots;
    c->pages.size = am_max(1, cache[1]);
    return check_slots_differ(r, slots, count);
}

bool am_cached_check_slots(am_request *r, am_cached *c, const am_view *slots)
{
    return read_caches(r, c) && read_all_scales(r, c) && check_rows(r, c, (packing){"slot_mapping", -1}) &&
           read_slots(r, c, slots);
}

/* --- Lengths and pages --- */

bool am_cached_read_lengths(am_request *r, am_cached *c, const am_operand *given)
{
    if (c->table.data && given->kind == AM_NOTHING)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "cache_seqlens must be given with block_table, got %s",
                         am_words_of_door.none);
    ptrdiff_t *before = c->layout.before;
    if (!am_convert_integers(r, given, c->sequences, c->caches[0].shape[1], before)) return false;
    for (ptrdiff_t s = 0; s < c->sequences; s++) {
        if (before[s] < 0)
            return am_refuse(r, AM_WRONG_VALUE, NULL,
                             "cache_seqlens must be at least 0, got %td at index %td", before[s], s);
    }
    return true;
}

static bool refuse_length(am_request *r, const am_cached *c, ptrdiff_t more, ptrdiff_t s)
{
    const ptrdiff_t *starts = c->new_starts, added = starts ? starts[s + 1] - starts[s] : more;
    char new_ones[48] = "";
    if (added) snprintf(new_ones, sizeof new_ones, " and %td new ones", added);
    return am_refuse(
        r, AM_WRONG_VALUE, NULL,
        "cache_seqlens must be tokens that the cache has room for, %td per sequence, got %td%s at "
        "index %td",
        c->capacity + c->prefix, c->layout.before[s] + c->prefix, new_ones, s);
}

/* The table is copied as it is checked. */
static bool read_table(am_request *r, am_cached *c)
{
    const ptrdiff_t pages = c->caches[0].shape[0], size = c->caches[0].shape[1];
    const am_array table = am_array_of(&c->table, AM_TOKENS_FIRST);
    am_kv_entry wrong;
    if (!am_refuse_status(r, am_kv_cache_read_table(&c->layout, &table, am_max(1, size), pages, &wrong)))
        return false;
    if (wrong.sequence < 0) return true;
    char allowed[64] = "name pages of k_cache, which has none";
    if (pages) snprintf(allowed, sizeof allowed, "be from 0 to %td", pages - 1);
    return am_refuse(r, AM_WRONG_INDEX, NULL, "block_table must %s, got %lld at index (%td, %td)", allowed,
                     (long long)wrong.page, wrong.sequence, wrong.index + (c->prefix ? c->prefix / size : 0));
}

bool am_cached_place(am_request *r, am_cached *c)
{
    const ptrdiff_t *q = am_cached_tokens(&c->query), size = c->caches[0].shape[1],
                    more = c->rows[0].data ? *am_cached_tokens(&c->rows[0]) : 0,
                    columns = c->table.data ? c->table.shape[1] : 1;
    c->capacity = am_min(am_product(columns, size, 1), AM_LONGEST);
    c->layout.q_starts = c->q_starts, c->layout.new_starts = c->new_starts, c->layout.queries = q[0];
    const ptrdiff_t wrong = am_kv_cache_place(&c->layout, more, c->capacity);
    if (wrong >= 0) return refuse_length(r, c, more, wrong);
    r->mask.keys = c->layout.keys;
    return true;
}

bool am_cached_limit(am_request *r, am_cached *c)
{
    am_kv_cache_limit(&c->layout, &c->limits);
    if (c->table.data && !read_table(r, c)) return false;
    c->pages = am_kv_cache_pages(&c->layout, c->caches[0].shape[1]);
    return true;
}

bool am_cached_check_pages(am_request *r, const am_cached *c)
{
    am_kv_writers found;
    if (!am_refuse_status(r, am_kv_find_writers(&c->pages, c->layout.before, &found))) return false;
    if (found.page < 0) return true;
    if (found.sequence == found.other)
        return am_refuse(
            r, AM_WRONG_VALUE, NULL,
            "block_table must name a page once to write to it, got page %d twice for sequence %d",
            (int)found.page, (int)found.sequence);
    return am_refuse(r, AM_WRONG_VALUE, NULL,
                     "block_table must give each sequence pages of its own to write to, got page %d for "
                     "sequences %d and %d",
                     (int)found.page, (int)found.sequence, (int)found.other);
}

/* --- The call --- */

int am_cached_terms(const am_cached *c, bool has_others, am_node terms[AM_KV_TERMS])
{
    const int count = am_kv_cache_terms(&c->layout, &c->limits, terms);
    if (count || has_others) return count;
    terms[0] = (am_node){.kind = AM_TERM_ALL};
    return 1;
}

void am_cached_describe(am_request *r, const am_cached *c)
{
    am_attn *attn = &r->attn;
    const ptrdiff_t *q = am_cached_tokens(&c->query);
    attn->batch = r->mask.batch, attn->heads = q[1], attn->kv_heads = c->caches[0].shape[2];
    attn->queries = q[0], attn->keys = r->mask.keys;
    attn->head_dim = q[2], attn->value_dim = am_cached_channels(&c->caches[1]);
    attn->q = am_tokens_of(&c->query);
    attn->k = am_tokens_of(&c->caches[0]), attn->v = am_tokens_of(&c->caches[1]);
    attn->mask = &r->mask, attn->pages = c->pages;
    attn->k_scales = c->scales[0], attn->v_scales = c->scales[1];
    attn->normalize = true;
    attn->terms.places = (am_places){.offsets = c->layout.moved,
                                     .offset_stride = 1,
                                     .starts = c->q_starts,
                                     .sequences = c->q_starts ? c->sequences : 0};
}

/* One packed sequence of `all` as a call of its own, but for its mask. Writes terms as am_cached_terms
 * does, maybe none. */
static int one_of(const am_cached *c, const am_attn *all, ptrdiff_t s, am_attn *one,
                  am_node terms[AM_KV_TERMS])
{
    const am_kv_cache *cache = &c->layout;
    const ptrdiff_t begin = cache->q_starts[s];
    const am_kv_cache own = {.sequences = 1,
                             .keys = cache->lengths[s],
                             .lengths = cache->lengths + s,
                             .low = cache->low + s,
                             .high = cache->high + s,
                             .q_shift = cache->q_shift + s,
                             .k_shift = cache->k_shift + s};
    *one = *all;
    one->batch = 1, one->queries = cache->q_starts[s + 1] - begin, one->keys = own.keys;
    one->q.data = am_token(&one->q, 0, 0, begin), one->out.data = am_token(&one->out, 0, 0, begin);
    if (one->lse.data) one->lse.data = am_token(&one->lse, 0, 0, begin);
    one->pages.table += s * one->pages.table_stride, one->pages.used += s, one->pages.lengths += s;
    one->pages.starts = NULL, one->pages.sequences = 1;
    one->terms.places = (am_places){.offsets = cache->offsets + s};
    for (int i = 0; i < one->terms.count; i++) {
        am_array *array = &one->terms.list[i].array;
        array->data = am_token(array, s, 0, begin);
    }
    return am_kv_cache_terms(&own, &c->limits, terms);
}

am_status am_cached_append(const am_context *context, const am_cached *c)
{
    am_status status = AM_OK;
    for (int side = 0; side < 2 && status == AM_OK && c->rows[side].data; side++) {
        const am_kv_append rows = {
            .cache = am_tokens_of(&c->caches[side]),
            .rows = am_tokens_of(&c->rows[side]),
            .pages = c->pages,
            .begins = c->layout.before,
            .starts = c->new_starts,
            .slots = c->slots,
            .scales = c->scales[side],
        };
        status = am_kv_append_rows(context, &rows);
    }
    return status;
}

/* Computes one sequence, the s-th, whose first query is the one at `begin` among all queries. */
typedef am_status compute_one(const am_context *context, const am_attn *attn, const void *arg, ptrdiff_t s,
                              ptrdiff_t begin);

/* Computes one sequence after the other. */
static bool compute_each(const am_context *context, am_request *r, const am_cached *c, compute_one *compute,
                         const void *arg)
{
    bool done = true;
    for (ptrdiff_t s = 0; done && s < c->sequences; s++) {
        am_attn one;
        am_node terms[AM_KV_TERMS];
        const int count = one_of(c, &r->attn, s, &one, terms);
        am_mask mask = {.batch = 1, .heads = one.heads, .queries = one.queries, .keys = one.keys};
        one.mask = &mask;
        done = am_mask_cut(r, c->q_starts[s], &mask, terms, count) &&
               am_refuse_status(r, compute(context, &one, arg, s, c->q_starts[s]));
        am_mask_release(&mask);
    }
    return done;
}

static am_status attend(const am_context *context, const am_attn *attn, const void *arg, ptrdiff_t s,
                        ptrdiff_t begin)
{
    (void)arg, (void)s, (void)begin;
    return am_attn_forward(context, attn);
}

/* Looks at the weights of a sequence: what belongs to its queries lies between that of others, and its sums
 * behind those of the one before. */
static am_status weigh(const am_context *context, const am_attn *attn, const void *arg, ptrdiff_t s,
                       ptrdiff_t begin)
{
    const am_attn_weights *all = arg;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(all->lse.type);
    am_attn_weights w = *all;
    w.attn = *attn, w.count = attn->queries;
    w.lse.data = am_token(&all->lse, 0, 0, begin);
    if (w.key_sum) w.key_sum = (char *)w.key_sum + am_weights_sums(all, s, 0) * size;
    if (w.entropy) w.entropy = (char *)w.entropy + begin * size;
    if (w.max_logit) w.max_logit = (char *)w.max_logit + begin * size;
    if (w.top_keys) w.top_keys += begin * w.top, w.top_weights = (char *)w.top_weights + begin * w.top * size;
    return am_attn_weigh(context, &w);
}

am_status am_cached_weigh(const am_context *context, am_request *r, const am_cached *c,
                          const am_attn_weights *weights, bool one_by_one)
{
    if (one_by_one)
        compute_each(context, r, c, weigh, weights);
    else
        am_refuse_status(r, am_attn_weigh(context, weights));
    return r->status;
}

am_status am_cached_attend(const am_context *context, am_request *r, const am_cached *c, bool one_by_one)
{
    const bool done = am_refuse_status(r, am_cached_append(context, c));
    if (done && !one_by_one) am_refuse_status(r, am_attn_forward(context, &r->attn));
    if (done && one_by_one) compute_each(context, r, c, attend, NULL);
    return r->status;
}
