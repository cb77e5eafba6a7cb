/* tiles.c – tiles of keys and values: packed for all tasks, packed for one, or read where they lie. */
#include "core/attention/tiles/tiles.h"

#include <stdlib.h>
#include <string.h>

#include "core/arrays/convert.h"
#include "core/sequences/packed.h"

enum { TILE = AM_FLASH_TILE };

/* The state of a shared tile. The first task that needs it packs it; a task that needs it meanwhile packs for
 * itself. */
typedef enum { NOT_PACKED, IN_WORK, PACKED, PACKED_FINITE } tile_state;

/* --- Rows --- */

am_kv_rows am_kv_rows_of(const am_tokens *t, const am_attn_place *at, am_range keys, ptrdiff_t head_dim)
{
    return (am_kv_rows){.data = am_token(t, at->b, at->kv_head, keys.begin),
                        .step = t->token,
                        .element = t->element,
                        .type = t->type,
                        .count = am_length(keys),
                        .head_dim = head_dim};
}

/* Where a key lies in a paged cache. */
typedef struct {
    ptrdiff_t sequence, token; /* the token-th of the sequence */
    const int32_t *page;       /* its entry of the table */
    ptrdiff_t inside;          /* its place in the page */
} page_place;

static page_place page_place_of(const am_pages *p, const am_attn_place *at, ptrdiff_t key)
{
    const ptrdiff_t s = p->starts ? am_sequence_of(p->starts, p->sequences, key) : at->b,
                    token = key - (p->starts ? p->starts[s] : 0);
    return (page_place){s, token, p->table + s * p->table_step + token / p->size, token % p->size};
}

/* Tokens of one sequence that lie one after the other, from some key on. */
typedef struct {
    const char *data; /* NULL: they are not to be read */
    ptrdiff_t count;
} key_run;

static key_run run_of(const am_attn *f, const am_tokens *t, const am_attn_place *at, am_range keys)
{
    const am_pages *p = &f->pages;
    const page_place first = page_place_of(p, at, keys.begin);
    const ptrdiff_t s = first.sequence,
                    all = (p->starts ? am_min(keys.end, p->starts[s + 1]) : keys.end) - keys.begin,
                    used = am_min(all, p->lengths[s] - first.token);
    if (used <= 0) return (key_run){NULL, all};
    if (first.token < p->used[s]) return (key_run){NULL, am_min(all, p->used[s] - first.token)};
    const int32_t *page = first.page;
    const char *data = t->data + *page * t->batch + at->kv_head * t->head + first.inside * t->token;
    ptrdiff_t count = p->size - first.inside;
    for (; count < used && t->batch == p->size * t->token && page[1] == page[0] + 1; page++) count += p->size;
    /* A page has memory behind the end of its sequence, which may be read as well. */
    return (key_run){data, count >= all ? all : am_min(count, used)};
}

/* Where the rows of a whole tile begin in each page, for kernels that read them there: runs of `*rows` each,
 * and behind them that of the next tile, to prefetch, or NULL if there is none. False if pages are too short
 * or too long, or the tile does not begin with one. */
static bool find_runs(const am_attn *f, const am_tokens *t, const am_attn_place *at, am_range keys,
                      const void *runs[AM_MOST_RUNS], ptrdiff_t *rows)
{
    const am_pages *p = &f->pages;
    const page_place begin = page_place_of(p, at, keys.begin);
    const ptrdiff_t s = begin.sequence, end = am_min(p->lengths[s], begin.token + am_length(keys));
    *rows = am_min(p->size, TILE);
    if (begin.token >= end || TILE % *rows != 0 || *rows % 2 != 0) return false;
    if (p->size > TILE ? begin.inside + TILE > p->size : begin.inside != 0) return false;
    if (p->starts && keys.end > p->starts[s + 1]) return false;
    const char *data = t->data + at->kv_head * t->head + begin.inside * t->token;
    const ptrdiff_t first = am_max(0, p->used[s] - begin.token) / *rows;
    if (first * *rows >= end - begin.token) return false;
    for (ptrdiff_t i = 0; i * *rows < TILE; i++) { /* rows that are not to be read are dead, and may be any */
        const bool there = i >= first && begin.token + i * *rows < end;
        runs[i] = data + begin.page[there ? i : first] * t->batch;
    }
    const ptrdiff_t next = begin.inside + TILE;
    runs[TILE / *rows] = begin.token + TILE < p->lengths[s] ? data + begin.page[next / p->size] * t->batch +
                                                                  (next % p->size - begin.inside) * t->token
                                                            : NULL;
    return true;
}

/* Rows of a paged cache where they lie, if they do so one after the other, or in runs if that is not NULL;
 * else gathered in `scratch`. */
static am_kv_rows rows_in_pages(const am_attn_base *base, const am_tokens *t, const am_attn_place *at,
                                am_range keys, ptrdiff_t head_dim, char *scratch, const void **runs)
{
    const am_attn *f = base->attn;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(t->type), row = head_dim * size;
    am_kv_rows rows = {.data = scratch,
                       .step = row,
                       .element = size,
                       .type = t->type,
                       .count = am_length(keys),
                       .head_dim = head_dim};
    key_run run = run_of(f, t, at, keys);
    if (run.data && run.count == rows.count) {
        rows.data = run.data, rows.step = t->token, rows.element = t->element;
        return rows;
    }
    const bool plain =
        base->bf16x2 ? am_is_plain(t) && t->token % (2 * size) == 0 && head_dim % 2 == 0 : am_is_plain(t);
    if (runs && plain && find_runs(f, t, at, keys, runs, &rows.run) && rows.run % AM_PACKED_RUN == 0) {
        rows.data = runs[0], rows.step = t->token, rows.runs = runs;
        return rows;
    }
    rows.run = 0;
    for (; keys.begin < keys.end; keys.begin += run.count, scratch += run.count * row) {
        run = run_of(f, t, at, keys);
        if (!run.data) {
            memset(scratch, 0, (size_t)(run.count * row));
        } else if (t->element == size) {
            for (ptrdiff_t r = 0; r < run.count; r++)
                memcpy(scratch + r * row, run.data + r * t->token, (size_t)row);
        } else {
            am_copy_2d(scratch, row, size, run.data, t->token, t->element, run.count, head_dim, (size_t)size);
        }
    }
    return rows;
}

/* Copies numbers that lie `step` bytes apart; four are stored at once. */
static void gather(float *to, const char *from, ptrdiff_t step, ptrdiff_t count)
{
    for (; count >= 4; count -= 4, to += 4, from += 4 * step) {
        const float four[] = {*(const float *)from, *(const float *)(from + step),
                              *(const float *)(from + 2 * step), *(const float *)(from + 3 * step)};
        memcpy(to, four, sizeof four);
    }
    for (; count > 0; count--, from += step) *to++ = *(const float *)from;
}

/* What there is of keys and of values: scales of a tile, addresses of its pages, also of the next keys. */
enum { OF_K, OF_V, OF_NEXT_K };

/* The scales of a tile's tokens for some heads: AM_FLASH_TILE of keys and of values for each. */
typedef float (*tile_scales)[2][AM_FLASH_TILE];

/* Copies the scales of a run of tokens for some heads. Heads that lie side by side are transposed at the
 * baseline at any level: its vectors have four lanes, and longer ones would often be too long. */
static void copy_scales(tile_scales to, ptrdiff_t which, ptrdiff_t token, const am_tokens *t,
                        const char *from, ptrdiff_t tokens, ptrdiff_t heads)
{
    const ptrdiff_t size = sizeof(float), fours = t->head == size && t->token % size == 0 ? heads / 4 * 4 : 0;
    if (fours > 0)
        AM_TOPIC(arrays, baseline)
            .transpose_32(&to[0][which][token], 2 * AM_FLASH_TILE, from, t->token / size, tokens, fours);
    for (ptrdiff_t h = fours; h < heads; h++)
        gather(&to[h][which][token], from + h * t->head, t->token, tokens);
}

/* Copies the scales of a tile's tokens for `heads` heads from that of a place on, and prefetches those of the
 * next tile. What is not to be read has 0. */
static void read_scales(const am_attn *f, const am_kv_scales *scales, const am_attn_place *at, am_range keys,
                        ptrdiff_t heads, tile_scales to, ptrdiff_t which)
{
    const am_tokens t = {(char *)scales->data, AM_FLOAT32, scales->batch, scales->token, scales->head, 0};
    am_range next = {keys.end, am_min(keys.end + AM_FLASH_TILE, f->keys)};
    const ptrdiff_t some = 0 < t.token && t.token < AM_LINE ? AM_LINE / t.token : 1, /* tokens in a line */
        count = am_length(keys);
    for (ptrdiff_t h = 0; h < heads && count < AM_FLASH_TILE; h++)
        memset(&to[h][which][count], 0, (size_t)(AM_FLASH_TILE - count) * sizeof(float));
    key_run run;
    for (ptrdiff_t i = 0; i < count; i += run.count) {
        run = run_of(f, &t, at, (am_range){keys.begin + i, keys.end});
        if (run.data) {
            copy_scales(to, which, i, &t, run.data, run.count, heads);
            continue;
        }
        for (ptrdiff_t h = 0; h < heads; h++) memset(&to[h][which][i], 0, (size_t)run.count * sizeof(float));
    }
    for (; next.begin < next.end; next.begin += run.count) {
        run = run_of(f, &t, at, next);
        for (ptrdiff_t r = 0; run.data && r < run.count; r += some)
            __builtin_prefetch(run.data + r * t.token);
    }
}

/* Returns rows where they lie if kernels can read them, else copies them to `scratch`; and the steps from row
 * to row, in elements, or in `pairs` of these. */
static const char *read_rows(const am_kv_rows *rows, bool pairs, char *scratch, ptrdiff_t *step)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(rows->type);
    if (pairs)
        return am_read_pairs(rows->data, size, rows->step, rows->element, rows->count, rows->head_dim,
                             scratch, step);
    const bool plain = rows->element == size && rows->step % size == 0;
    *step = plain ? rows->step / size : rows->head_dim;
    if (plain) return rows->data;
    am_copy_2d(scratch, rows->head_dim * size, size, rows->data, rows->step, rows->element, rows->count,
               rows->head_dim, (size_t)size);
    return scratch;
}

/* The rows as kernels pack them: their steps in elements, or in `pairs` of these. */
static am_unpacked_rows unpacked_rows(const am_kv_rows *rows, bool pairs, char *scratch)
{
    am_unpacked_rows unpacked = {.data = rows->data, .run = rows->run, .runs = rows->runs};
    if (rows->run > 0)
        unpacked.step = rows->step / ((ptrdiff_t)am_size_of(rows->type) * (pairs ? 2 : 1));
    else
        unpacked.data = read_rows(rows, pairs, scratch, &unpacked.step);
    return unpacked;
}

void am_pack_keys(const am_attn_base *base, am_kv_rows rows, char *scratch, char *to, double factor)
{
    const am_unpacked_rows unpacked = unpacked_rows(&rows, base->bf16x2, scratch);
    base->kv->pack_keys(to, &unpacked, rows.count, am_lanes(base, rows.head_dim), factor,
                        base->bf16x2 ? NULL : rows.scales);
}

bool am_pack_values(const am_attn_base *base, am_kv_rows rows, char *scratch, char *to)
{
    const bool pairs = am_kv_is_bf16x2(base);
    am_unpacked_rows unpacked = unpacked_rows(&rows, pairs, scratch);
    if (pairs) unpacked.step *= 2;
    return base->kv->pack_values(to, &unpacked, rows.count, rows.head_dim, base->bf16x2 ? NULL : rows.scales);
}

/* Returns keys of a whole tile where they lie, if the kernels can load each of their lanes by itself, else
 * copies them to `scratch`. */
static const char *read_lanes(const am_attn_base *base, const am_kv_rows *rows, bool aligned, char *scratch,
                              ptrdiff_t *step)
{
    if (!base->bf16x2)
        return am_read_rows(base, scratch, rows->data, rows->step, rows->element, rows->type, rows->count,
                            rows->head_dim, step);
    const ptrdiff_t size = (ptrdiff_t)am_size_of(rows->type);
    if (aligned)
        return am_read_pairs(rows->data, size, rows->step, rows->element, rows->count, rows->head_dim,
                             scratch, step);
    am_copy_pairs(scratch, rows->data, size, rows->step, rows->element, rows->count, rows->head_dim);
    *step = am_lanes(base, rows->head_dim);
    return scratch;
}

/* --- Shared tiles --- */

am_status am_shared_tiles_make(am_shared_tiles *tiles, const am_schedule *s, ptrdiff_t count)
{
    if (count == 0) return AM_OK;
    tiles->packed = am_alloc_aligned(am_product(count, s->k_bytes + s->v_bytes, 1));
    tiles->states = malloc((size_t)count * sizeof *tiles->states);
    return tiles->packed && tiles->states ? AM_OK : AM_NO_MEMORY;
}

void am_shared_tiles_free(am_shared_tiles *tiles, const am_schedule *s, ptrdiff_t count)
{
    am_free_aligned(tiles->packed, am_product(count, s->k_bytes + s->v_bytes, 1));
    free(tiles->states);
}

void am_shared_tiles_begin(am_shared_tiles *tiles, const am_wave *wave)
{
    tiles->first = wave->first_shared, tiles->count = wave->shared;
    for (ptrdiff_t i = 0; i < wave->shared; i++) atomic_init(&tiles->states[i], NOT_PACKED);
}

/* The memory of a shared tile; NULL if it is not of this wave. */
static char *shared_tile(const am_kv *kv, const am_scheduled *g, const am_attn_place *at, ptrdiff_t tile,
                         atomic_uchar **state)
{
    if (g->shape.strategy != AM_SHARED_PACKING) return NULL;
    const am_range tiles = g->section.tiles;
    const ptrdiff_t index =
        g->first_shared + at->kv_head * am_length(tiles) + tile - tiles.begin - kv->shared.first;
    if (index < 0 || index >= kv->shared.count) return NULL;
    *state = &kv->shared.states[index];
    return kv->shared.packed + index * (kv->schedule->k_bytes + kv->schedule->v_bytes);
}

/* A tile as one of the items in a step sees it. */
typedef struct {
    const am_kv *kv;
    const am_attn_place *at;
    am_range keys;
    char *gathered; /* memory for its keys and then its values */
    ptrdiff_t k_bytes;
    const void *(*runs)[AM_MOST_RUNS];
    tile_scales scales; /* of its key head, and behind them of others */
    ptrdiff_t heads;    /* for how many of these they are still to be read; 0: for none */
} tile_source;

/* The scales of its tokens; NULL if they have none. */
static const float *token_scales(const tile_source *s, const am_kv_scales *scales, ptrdiff_t which)
{
    if (!scales->data || scales->by_channel) return NULL;
    if (s->heads > 0) read_scales(s->kv->base->attn, scales, s->at, s->keys, s->heads, s->scales, which);
    return s->scales[0][which];
}

/* Its keys or values; `in_runs`: they may lie in pages. */
static am_kv_rows key_rows(const tile_source *s, bool in_runs)
{
    const am_attn *f = s->kv->base->attn;
    if (!f->pages.table) return am_kv_rows_of(&f->k, s->at, s->keys, f->head_dim);
    am_kv_rows rows = rows_in_pages(s->kv->base, &f->k, s->at, s->keys, f->head_dim, s->gathered,
                                    in_runs ? s->runs[OF_K] : NULL);
    rows.scales = token_scales(s, &f->k_scales, OF_K);
    return rows;
}

static am_kv_rows value_rows(const tile_source *s, bool in_runs)
{
    const am_attn *f = s->kv->base->attn;
    if (!f->pages.table) return am_kv_rows_of(&f->v, s->at, s->keys, f->value_dim);
    am_kv_rows rows = rows_in_pages(s->kv->base, &f->v, s->at, s->keys, f->value_dim,
                                    s->gathered + s->k_bytes, in_runs ? s->runs[OF_V] : NULL);
    rows.scales = token_scales(s, &f->v_scales, OF_V);
    return rows;
}

/* Packs keys or values of a tile, and copies their scales behind them if steps multiply by these. */
static void keep_scales(const tile_source *s, const am_kv_rows *rows, char *end)
{
    const ptrdiff_t bytes = s->kv->schedule->scale_bytes;
    if (bytes && rows->scales) memcpy(end - bytes, rows->scales, (size_t)bytes);
}
static void pack_keys(const tile_source *s, char *scratch, char *to, double factor)
{
    const am_kv_rows rows = key_rows(s, true);
    am_pack_keys(s->kv->base, rows, scratch, to, factor);
    keep_scales(s, &rows, to + s->kv->schedule->k_bytes);
}
static bool pack_values(const tile_source *s, char *scratch, char *to)
{
    const am_kv_rows rows = value_rows(s, true);
    keep_scales(s, &rows, to + s->kv->schedule->v_bytes);
    return am_pack_values(s->kv->base, rows, scratch, to);
}

/* The scales behind packed keys and values. */
static void find_scales(const am_kv *kv, am_flash_tile *tile)
{
    const am_schedule *s = kv->schedule;
    const am_attn *f = kv->base->attn;
    if (!s->scale_bytes) return;
    if (!f->k_scales.by_channel) tile->k_scales = (const char *)tile->k + s->k_bytes - s->scale_bytes;
    if (!f->v_scales.by_channel) tile->v_scales = (const char *)tile->v + s->v_bytes - s->scale_bytes;
}

/* Finds a shared tile, and packs it if no other task has begun to. False if tiles are not shared, or another
 * task is packing it. */
static bool find_shared(const tile_source *source, const am_scheduled *g, ptrdiff_t index, char *scratch,
                        am_flash_tile *tile)
{
    const am_kv *kv = source->kv;
    atomic_uchar *state;
    char *shared = shared_tile(kv, g, source->at, index, &state);
    if (!shared) return false;
    tile->k = shared, tile->v = shared + kv->schedule->k_bytes;
    find_scales(kv, tile);
    unsigned char found = atomic_load_explicit(state, memory_order_acquire);
    if (found == NOT_PACKED && atomic_compare_exchange_strong(state, &found, IN_WORK)) {
        pack_keys(source, scratch, shared, 1);
        found = pack_values(source, scratch, shared + kv->schedule->k_bytes) ? PACKED_FINITE : PACKED;
        atomic_store_explicit(state, found, memory_order_release);
    }
    tile->finite = found == PACKED_FINITE;
    return found >= PACKED;
}

/* --- Tiles --- */

void am_kv_workspace_take(const am_schedule *s, const am_attn_base *base, char *memory, ptrdiff_t *used,
                          am_kv_workspace *w)
{
    const am_attn *f = base->attn;
    w->row = am_take(memory, used, am_row_scratch(TILE, am_max(f->head_dim, f->value_dim)));
    /* Tiles that are packed, or rows that kernels cannot read where they lie. */
    w->k = am_take(memory, used, am_max(s->local_tiles * s->k_bytes, am_row_scratch(TILE, f->head_dim)));
    w->v = am_take(memory, used, am_max(s->local_tiles * s->v_bytes, am_row_scratch(TILE, f->value_dim)));
    const ptrdiff_t size = f->pages.table ? (ptrdiff_t)am_size_of(f->k.type) : 0;
    w->k_bytes = am_ceil_div(TILE * f->head_dim * size, AM_LINE) * AM_LINE;
    w->v_bytes = am_ceil_div(TILE * f->value_dim * size, AM_LINE) * AM_LINE;
    w->gathered = am_take(memory, used, am_max(1, s->step_items) * (w->k_bytes + w->v_bytes));
    w->runs = (const void *(*)[AM_MOST_RUNS])am_take(memory, used, size ? 3 * sizeof *w->runs : 0);
    w->run = 0;
    const bool scaled = f->k_scales.data;
    w->scales = (tile_scales)am_take(memory, used,
                                     scaled ? am_max(1, s->step_items) * (ptrdiff_t)sizeof *w->scales : 0);
    w->head = 0;
    for (int i = 0; i < AM_MOST_LOCAL_TILES; i++) w->local[i].tile = -1, w->local[i].finite = false;
}

/* The place of a tile among the local ones. */
static ptrdiff_t local_place(const am_kv *kv, const am_scheduled *g, ptrdiff_t index)
{
    return g->shape.strategy == AM_LOCAL_PACKING ? index % kv->schedule->local_tiles : 0;
}

/* The index of a tile among those of all heads. */
static ptrdiff_t index_among_all(const am_kv *kv, const am_attn_place *at, ptrdiff_t index)
{
    return at->kv_head * kv->sections->tiles.count + index;
}

/* Whether kernels can read rows of keys and values where they lie. */
static bool can_read_runs(const am_attn_base *base)
{
    const am_attn *f = base->attn;
    return am_kv_is_bf16x2(base)
               ? am_is_plain_bf16x2(&f->k, f->head_dim) && am_is_plain_bf16x2(&f->v, f->value_dim)
               : am_is_plain(&f->k) && am_is_plain(&f->v);
}

/* Whether they can read keys there lane by lane, as if these are transposed. */
static bool can_read_lanes(const am_attn_base *base)
{
    const am_attn *f = base->attn;
    return base->bf16x2 ? am_is_aligned_bf16x2(&f->k, f->head_dim) : f->k.type == base->type;
}

/* Finds the pages of a tile, for all items of a step, if kernels can read rows there; returns whether they
 * can.
 */
static bool find_pages(const tile_source *source, am_kv_workspace *w)
{
    const am_attn *f = source->kv->base->attn;
    const bool found = f->pages.table && can_read_runs(source->kv->base) &&
                       find_runs(f, &f->k, source->at, source->keys, w->runs[OF_K], &w->run) &&
                       find_runs(f, &f->v, source->at, source->keys, w->runs[OF_V], &w->run);
    if (!found) w->run = 0;
    return found;
}

/* Lets a tile read rows in these pages. */
static void read_pages(const tile_source *source, const am_kv_workspace *w, am_flash_tile *tile)
{
    const am_attn_base *base = source->kv->base;
    const am_attn *f = base->attn;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(f->k.type) * (am_kv_is_bf16x2(base) ? 2 : 1),
                    heads = source->at->kv_head - w->head;
    tile->run = w->run;
    tile->k_runs = w->runs[OF_K], tile->k_step = f->k.token / size;
    tile->v_runs = w->runs[OF_V], tile->v_step = f->v.token / size;
    tile->k = (const char *)*tile->k_runs + heads * f->k.head;
    tile->v = (const char *)*tile->v_runs + heads * f->v.head;
}

static void unpacked_tile(const tile_source *source, const am_kv_workspace *w, am_flash_tile *tile)
{
    const am_attn_base *base = source->kv->base;
    const am_attn *f = base->attn;
    const bool pairs = am_kv_is_bf16x2(base);
    if (w->run > 0) {
        read_pages(source, w, tile);
        tile->value_dim = pairs ? am_ceil_div(f->value_dim, 2) : f->value_dim;
        tile->k_scales = token_scales(source, &f->k_scales, OF_K);
        tile->v_scales = token_scales(source, &f->v_scales, OF_V);
        return;
    }
    const am_kv_rows k = key_rows(source, false), v = value_rows(source, false);
    tile->k = read_rows(&k, pairs, w->k, &tile->k_step);
    tile->v = read_rows(&v, pairs, w->v, &tile->v_step);
    tile->k_scales = k.scales, tile->v_scales = v.scales;
    tile->value_dim = pairs ? am_ceil_div(v.head_dim, 2) : v.head_dim;
}

/* Makes the tile of another head in the same pages, which differs from that of the first one by its place. */
static void place_beside(const am_flash_tile *first, const am_attn *f, ptrdiff_t heads,
                         const am_kv_workspace *w, am_flash_tile *tile)
{
    *tile = *first;
    tile->k = (const char *)first->k + heads * f->k.head;
    tile->v = (const char *)first->v + heads * f->v.head;
    if (first->k_scales) tile->k_scales = w->scales[heads][OF_K];
    if (first->v_scales) tile->v_scales = w->scales[heads][OF_V];
}

void am_kv_tile(const am_kv *kv, const am_scheduled *g, const am_attn_place *at, ptrdiff_t index, bool full,
                ptrdiff_t item, am_kv_workspace *w, am_flash_tile *tiles)
{
    const am_attn_base *base = kv->base;
    const am_attn *f = base->attn;
    const bool unpacked = g->shape.strategy == AM_UNPACKED;
    am_flash_tile *tile = &tiles[item];
    if (unpacked && item > 0 && w->run > 0) {
        place_beside(tiles, f, at->kv_head - w->head, w, tile);
        return;
    }
    *tile = (am_flash_tile){0};
    if (item == 0) w->head = at->kv_head;
    const tile_source source = {.kv = kv,
                                .at = at,
                                .keys = am_range_at(&kv->sections->tiles, index),
                                .gathered = w->gathered + item * (w->k_bytes + w->v_bytes),
                                .k_bytes = w->k_bytes,
                                .runs = w->runs,
                                .scales = w->scales + (at->kv_head - w->head),
                                .heads = item > 0   ? 0
                                         : unpacked ? am_min(am_lockstep(g), f->kv_heads - at->kv_head)
                                                    : 1};
    if (unpacked) {
        if (item == 0) find_pages(&source, w);
        unpacked_tile(&source, w, tile);
        return;
    }
    if (find_shared(&source, g, index, w->row, tile)) return;
    const ptrdiff_t among_all = index_among_all(kv, at, index), place = local_place(kv, g, index);
    char *k = w->k + place * kv->schedule->k_bytes, *v = w->v + place * kv->schedule->v_bytes;
    const bool in_place = g->shape.values_unpacked && full, known = w->local[place].tile == among_all;
    tile->transposed = g->shape.strategy == AM_TRANSPOSED && full && am_length(source.keys) == TILE;
    if (tile->transposed && in_place && can_read_lanes(base) && find_pages(&source, w) &&
        w->run % AM_TRANSPOSED_KEYS == 0) {
        read_pages(&source, w, tile);
        if (tile->run == TILE) tile->run = 0;
        w->local[place].tile = -1;
        return;
    }
    if (tile->transposed) {
        const am_kv_rows rows = key_rows(&source, false);
        tile->k = read_lanes(base, &rows, am_is_aligned_bf16x2(&f->k, f->head_dim), k, &tile->k_step);
    } else {
        if (!known) pack_keys(&source, w->row, k, g->shape.scales_keys ? kv->schedule->factor : 1);
        tile->k = k;
    }
    tile->v = v, tile->v_step = 0;
    if (in_place) {
        const am_kv_rows rows = value_rows(&source, !tile->transposed);
        tile->v = rows.data, tile->v_step = rows.step / base->size;
        tile->run = rows.run, tile->v_runs = rows.runs;
    } else if (!known) {
        w->local[place].finite = pack_values(&source, w->row, v);
    }
    find_scales(kv, tile);
    w->local[place].tile = in_place || tile->transposed ? -1 : among_all;
    tile->finite = w->local[place].finite;
}

/* Some tokens to prefetch; of tokens in pages as many that lie one after the other. */
static void prefetch_tokens(const am_attn *f, const am_tokens *t, const am_attn_place *at, ptrdiff_t heads,
                            am_range keys, ptrdiff_t head_dim, am_prefetch_rows to[AM_PREFETCH_RUNS])
{
    if (!f->pages.table) {
        *to = am_prefetch_tokens(t, at->b, at->kv_head, heads, keys.begin, am_length(keys), head_dim);
        return;
    }
    for (ptrdiff_t i = 0; i < AM_PREFETCH_RUNS && keys.begin < keys.end; i++) {
        const key_run run = run_of(f, t, at, keys);
        am_tokens from = *t;
        from.data = (char *)run.data;
        to[i] = am_prefetch_tokens(&from, 0, 0, heads, 0, run.data ? run.count : 0, head_dim);
        keys.begin += run.count;
    }
}

void am_kv_prefetch(const am_kv *kv, const am_scheduled *g, const am_attn_place *at, ptrdiff_t index,
                    ptrdiff_t heads, ptrdiff_t part, ptrdiff_t parts, const am_kv_workspace *w,
                    am_prefetch_rows prefetch[AM_PREFETCH_KINDS])
{
    const am_attn *f = kv->base->attn;
    atomic_uchar *state;
    char *to = shared_tile(kv, g, at, index, &state);
    if (to ? atomic_load_explicit(state, memory_order_relaxed) >= PACKED
           : w->local[local_place(kv, g, index)].tile == index_among_all(kv, at, index))
        return;
    const am_range all = am_range_at(&kv->sections->tiles, index);
    const ptrdiff_t rows = am_length(all), bytes = kv->schedule->k_bytes + kv->schedule->v_bytes;
    const am_range keys = {all.begin + rows * part / parts, all.begin + rows * (part + 1) / parts};
    prefetch_tokens(f, &f->k, at, heads, keys, f->head_dim, &prefetch[AM_PREFETCH_K]);
    prefetch_tokens(f, &f->v, at, heads, keys, f->value_dim, &prefetch[AM_PREFETCH_V]);
    if (to)
        prefetch[AM_PREFETCH_PACKED] =
            (am_prefetch_rows){.at = to, .step = bytes, .length = bytes, .rows = 1};
}

void am_kv_prefetch_keys(const am_kv *kv, const am_attn_place *at, ptrdiff_t index, ptrdiff_t heads,
                         am_kv_workspace *w, am_flash_tile *tile)
{
    const am_attn *f = kv->base->attn;
    const am_range keys = am_range_at(&kv->sections->tiles, index);
    const void **runs = w->runs[OF_NEXT_K];
    ptrdiff_t run;
    if (!f->pages.table || !find_runs(f, &f->k, at, keys, runs, &run)) {
        am_prefetch_rows rows[AM_PREFETCH_RUNS] = {{0}};
        prefetch_tokens(f, &f->k, at, heads, keys, f->head_dim, rows);
        tile->next_keys = rows[0];
        return;
    }
    am_tokens first = f->k;
    first.data = (char *)runs[0];
    tile->next_keys = am_prefetch_tokens(&first, 0, 0, heads, 0, run, f->head_dim);
    tile->next_runs = runs, tile->next_run_count = TILE / run + (runs[TILE / run] != NULL);
}
