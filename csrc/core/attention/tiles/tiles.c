/* tiles.c – tiles of keys and values: packed for all tasks, packed for one, or read where they lie. */
#include "core/attention/tiles/tiles.h"

#include <stdlib.h>
#include <string.h>

#include "core/arrays/convert.h"
#include "core/attention/tiles/scales.h"
#include "core/cache/formats.h"

enum {
    TILE = AM_FLASH_TILE,
    AHEAD = 16, /* rows in pages of one token that are prefetched before they are copied */
};

/* The state of a shared tile. The first task that needs it packs it; a task that needs it meanwhile packs for
 * itself. */
typedef enum { NOT_PACKED, IN_WORK, PACKED, PACKED_FINITE } tile_state;

/* What there is of keys and of values: packed tiles, copies, scales, addresses of pages; of these also for
 * the next keys. */
typedef enum { OF_K, OF_V, OF_NEXT_K } side;

/* --- Shared tiles --- */

am_status am_shared_tiles_make(am_shared_tiles *tiles, const am_schedule *s, ptrdiff_t count)
{
    if (count == 0) return AM_OK;
    tiles->bytes = am_product(count, s->k_bytes + s->v_bytes, 1);
    tiles->packed = am_alloc_aligned(tiles->bytes);
    tiles->states = malloc((size_t)count * sizeof *tiles->states);
    return tiles->packed && tiles->states ? AM_OK : AM_NO_MEMORY;
}

void am_shared_tiles_free(const am_shared_tiles *tiles)
{
    am_free_aligned(tiles->packed, tiles->bytes);
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

/* --- The keys and values of a tile --- */

am_kv am_kv_of(const am_attn_base *base, const am_sections *sections, const am_schedule *schedule)
{
    const am_attn *f = base->attn;
    const am_kv_side k = {.array = &f->k, .scales = &f->k_scales, .count = f->head_dim},
                     v = {.array = &f->v, .scales = &f->v_scales, .count = f->value_dim};
    am_kv kv = {.base = base, .sections = sections, .schedule = schedule, .sides = {[OF_K] = k, [OF_V] = v}};
    kv.sides[OF_K].packed_bytes = schedule->k_bytes, kv.sides[OF_V].packed_bytes = schedule->v_bytes;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(base->widens ? base->arithmetic->factors : f->k.type);
    for (am_kv_side *s = kv.sides; s < kv.sides + 2; s++) {
        const ptrdiff_t group = s->scales->group;
        /* Rows that are widened are multiplied by the scales of groups. */
        s->scale_columns = group == 0 ? 1 : base->widens_rows ? 0 : 2 * s->count / group;
        am_take(NULL, &s->copy_bytes, TILE * (s->count + s->count % 2) * size);
    }
    return kv;
}

void am_kv_workspace_take(const am_kv *kv, char *memory, ptrdiff_t *used, am_kv_workspace *w)
{
    const am_attn *f = kv->base->attn;
    const am_schedule *s = kv->schedule;
    const ptrdiff_t heads = f->pages.table ? am_max(1, s->step_items) : 1,
                    scaled = f->k_scales.array.data ? am_max(1, s->step_items) : 0, number = sizeof(float);
    w->kv = kv;
    w->row = am_take(memory, used, am_row_scratch(TILE, am_max(f->head_dim, f->value_dim)));
    for (side i = OF_K; i <= OF_V; i++)
        w->packed[i] = am_take(memory, used, s->local_tiles * kv->sides[i].packed_bytes);
    w->copies = am_take(memory, used, heads * (kv->sides[OF_K].copy_bytes + kv->sides[OF_V].copy_bytes));
    w->runs = (const void *(*)[AM_MOST_RUNS])am_take(memory, used, f->pages.table ? 3 * sizeof *w->runs : 0);
    for (side i = OF_K; i <= OF_V; i++) /* kernels load up to a line behind them */
        w->scales[i] =
            (float *)am_take(memory, used, scaled * kv->sides[i].scale_columns * TILE * number + AM_LINE);
    for (int i = 0; i < AM_MOST_LOCAL_TILES; i++) w->local[i].tile = -1, w->local[i].finite = false;
}

/* Whether keys and values of the section are widened before kernels read them. */
static bool are_widened(const am_kv_workspace *w)
{
    const am_attn_base *base = w->kv->base;
    const am_shape *h = &w->section->shape;
    return h->strategy == AM_UNPACKED && !h->widens_rows ? base->widens_rows : base->widens;
}

/* The type of unpacked rows as kernels read them, and the numbers of a lane of these. */
static am_dtype row_type(const am_kv_workspace *w)
{
    return are_widened(w) ? w->kv->base->arithmetic->factors : w->kv->base->attn->k.type;
}
static ptrdiff_t row_width(const am_kv_workspace *w)
{
    return row_type(w) == w->kv->base->arithmetic->factors ? am_width(w->kv->base) : 1;
}

/* Whether kernels can read rows of keys or values where they lie, in lanes of `width` numbers. */
static bool is_plain(const am_kv_workspace *w, side which, ptrdiff_t width)
{
    return !are_widened(w) && am_is_plain(w->kv->sides[which].array, width);
}

/* Goes from run to run of keys or values and of the scales of their groups, if there are any. */
typedef struct {
    const am_attn *attn;
    const am_array *rows, *groups;
    const am_attn_place *at;
    am_range keys;
    const char *row, *scales; /* of the run; NULL: it is not to be read */
} run_walk;

/* The rows of the next run; 0: there is none. */
static ptrdiff_t next_run(run_walk *walk)
{
    if (walk->keys.begin >= walk->keys.end) return 0;
    const am_key_run run = am_key_run_of(walk->attn, walk->rows, walk->at, walk->keys),
                     own = walk->groups ? am_key_run_of(walk->attn, walk->groups, walk->at, walk->keys) : run;
    const ptrdiff_t count = am_min(run.count, own.count);
    walk->keys.begin += count;
    walk->row = run.data, walk->scales = walk->groups ? own.data : NULL;
    return count;
}

/* Keys or values of the tile as numbers that the arithmetic multiplies, whatever their format. Those of the
 * next tile are prefetched, since rows of one head may lie far apart. */
static am_rows widen_rows(const am_kv_workspace *w, const am_attn_place *at, side which, char *to)
{
    const am_attn_base *base = w->kv->base;
    const am_attn *f = base->attn;
    const am_array *t = w->kv->sides[which].array;
    const am_kv_scales *s = w->kv->sides[which].scales;
    const ptrdiff_t count = w->kv->sides[which].count;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(base->arithmetic->factors),
                    bytes = am_row_bytes(t->type, count), group_stride = s->group ? s->array.stride.token : 0;
    const am_kv_widening widening = am_kv_widening_of(base->widen, size, t, s);
    const am_rows rows = {.data = to, .stride = count * size};
    run_walk now = {f, t, s->group ? &s->array : NULL, at, w->keys, NULL, NULL}, ahead = now;
    ahead.keys = (am_range){w->keys.end, am_min(w->keys.end + TILE, f->keys)};
    for (ptrdiff_t left, later = 0; (left = next_run(&now)) > 0;) {
        for (ptrdiff_t r = 0; r < left; r++, to += rows.stride) {
            if (later == 0) later = next_run(&ahead);
            if (later > 0 && ahead.row) {
                for (ptrdiff_t i = 0; i < bytes; i += AM_LINE) __builtin_prefetch(ahead.row + i);
                __builtin_prefetch(ahead.scales);
                ahead.row += t->stride.token, ahead.scales += group_stride;
            }
            later -= later > 0;
            if (!now.row) {
                memset(to, 0, (size_t)rows.stride);
                continue;
            }
            am_kv_widen_row(&widening, to, now.row, now.scales, count);
            now.row += t->stride.token, now.scales += group_stride;
        }
    }
    return rows;
}

/* Prefetches a row of a page of one token: these may lie anywhere. With 2,048 of them, one query is 2.1
 * to 3.6 times as fast. */
static void prefetch_row(const am_attn *f, const am_array *t, const am_attn_place *at, ptrdiff_t key,
                         ptrdiff_t bytes)
{
    if (key >= f->keys) return;
    const char *row = am_key_run_of(f, t, at, (am_range){key, key + 1}).data;
    for (ptrdiff_t i = 0; row && i < bytes; i += AM_LINE) __builtin_prefetch(row + i);
}

/* Keys or values of the tile in whole lanes of `width` numbers. They are `direct`, where they lie, if they do
 * so one after the other, or in pages if `in_pages`; else copied. */
static am_rows read_rows(const am_kv_workspace *w, const am_attn_place *at, side which, ptrdiff_t width,
                         bool direct, bool in_pages, char *copy)
{
    const am_attn *f = w->kv->base->attn;
    if (are_widened(w)) return widen_rows(w, at, which, copy);
    const am_array *t = w->kv->sides[which].array;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(t->type),
                    stride = am_ceil_div(t->shape.channel, width) * width;
    am_range keys = w->keys;
    am_key_run run = am_key_run_of(f, t, at, keys);
    if (direct && run.data && run.count == am_length(keys))
        return (am_rows){.data = run.data, .stride = t->stride.token};
    am_rows rows = {.stride = t->stride.token};
    if (direct && in_pages && am_find_runs(f, t, at, keys, w->runs[which], &rows.run) &&
        rows.run % AM_PACKED_RUN == 0) {
        rows.data = *w->runs[which], rows.runs = w->runs[which];
        return rows;
    }
    rows = (am_rows){.data = copy, .stride = stride * size};
    for (; keys.begin < keys.end; keys.begin += run.count, copy += run.count * rows.stride) {
        run = am_key_run_of(f, t, at, keys);
        if (f->pages.table && f->pages.size == 1) prefetch_row(f, t, at, keys.begin + AHEAD, rows.stride);
        const am_array from = am_rows_from(t, run.data, run.count);
        if (run.data)
            am_gather(w->kv->base->all_kernels, t->type, copy, stride, &from);
        else
            memset(copy, 0, (size_t)(run.count * rows.stride));
    }
    return rows;
}

/* The memory for a copy. */
static char *copy_of(const am_kv_workspace *w, const am_attn_place *at, side which)
{
    const ptrdiff_t head = w->kv->base->attn->pages.table ? at->kv_head - w->head : 0,
                    k_bytes = w->kv->sides[OF_K].copy_bytes, v_bytes = w->kv->sides[OF_V].copy_bytes;
    return w->copies + head * (k_bytes + v_bytes) + (which == OF_V ? k_bytes : 0);
}

/* Finds the pages of the tile, if kernels can read rows there; returns whether they can. */
static bool find_pages(am_kv_workspace *w, const am_attn_place *at)
{
    const am_attn *f = w->kv->base->attn;
    const ptrdiff_t width = row_width(w);
    const bool found = f->pages.table && is_plain(w, OF_K, width) && is_plain(w, OF_V, width) &&
                       am_find_runs(f, &f->k, at, w->keys, w->runs[OF_K], &w->run) &&
                       am_find_runs(f, &f->v, at, w->keys, w->runs[OF_V], &w->run);
    if (!found) w->run = 0;
    return found;
}

/* Keys or values in these pages. */
static am_rows rows_in_pages(const am_kv_workspace *w, const am_attn_place *at, side which)
{
    const am_array *t = w->kv->sides[which].array;
    return (am_rows){.data = (const char *)*w->runs[which] + (at->kv_head - w->head) * t->stride.head,
                     .stride = t->stride.token,
                     .run = w->run,
                     .runs = w->runs[which]};
}

/* The scales of keys or values if tiles have them: of tokens, or of their groups if kernels read these. */
static const am_kv_scales *token_scales(const am_kv_workspace *w, side which)
{
    const am_kv_scales *scales = w->kv->sides[which].scales;
    return scales->array.data && !scales->by_channel && !(scales->group && are_widened(w)) ? scales : NULL;
}

static void read_token_scales(const am_kv_workspace *w, const am_attn_place *at, side which, ptrdiff_t heads)
{
    const am_kv_scales *scales = token_scales(w, which);
    if (scales)
        am_read_scales(w->kv->base, scales, at, w->keys, heads, w->kv->sides[which].scale_columns,
                       w->scales[which]);
}

/* Packs keys, scaled if queries are not, or values, and copies their scales behind them if steps multiply by
 * these. Returns whether values are finite. */
static bool pack(const am_kv_workspace *w, const am_attn_place *at, side which, char *to)
{
    const am_attn_base *base = w->kv->base;
    const am_schedule *s = w->kv->schedule;
    const ptrdiff_t width = which == OF_V ? 1 : am_width(base), rows = am_length(w->keys);
    const am_rows from = read_rows(w, at, which, width, is_plain(w, which, width), true, w->row);
    read_token_scales(w, at, which, 1);
    const void *scales = token_scales(w, which) ? w->scales[which] : NULL;
    if (s->scale_bytes && scales) {
        char *end = to + w->kv->sides[which].packed_bytes;
        memcpy(end - s->scale_bytes, scales, (size_t)s->scale_bytes);
        scales = NULL;
    }
    if (which == OF_V) return base->kv->pack_values(to, &from, rows, base->attn->value_dim, scales);
    base->kv->pack_keys(to, &from, rows, am_lanes(base, base->attn->head_dim),
                        w->section->shape.scales_keys ? s->factor : 1, scales);
    return true;
}

/* Points a packed tile at its keys and values, and at the scales behind them. */
static void point_at(const am_kv_workspace *w, const char *k, const char *v, am_flash_tile *tile)
{
    const am_schedule *s = w->kv->schedule;
    tile->k.data = k, tile->v.data = v;
    if (!s->scale_bytes) return;
    if (token_scales(w, OF_K)) tile->k_scales = k + s->k_bytes - s->scale_bytes;
    if (token_scales(w, OF_V)) tile->v_scales = v + s->v_bytes - s->scale_bytes;
}

/* --- Tiles, by how they are read --- */

/* Finds a shared tile, and packs it if no other task has begun to. False if tiles are not shared, or another
 * task is packing it. */
static bool find_shared(const am_kv_workspace *w, const am_attn_place *at, am_flash_tile *tile)
{
    atomic_uchar *state;
    char *shared = shared_tile(w->kv, w->section, at, w->index, &state), *v;
    if (!shared) return false;
    v = shared + w->kv->schedule->k_bytes;
    point_at(w, shared, v, tile);
    unsigned char found = atomic_load_explicit(state, memory_order_acquire);
    if (found == NOT_PACKED && atomic_compare_exchange_strong(state, &found, IN_WORK)) {
        pack(w, at, OF_K, shared);
        found = pack(w, at, OF_V, v) ? PACKED_FINITE : PACKED;
        atomic_store_explicit(state, found, memory_order_release);
    }
    tile->finite = found == PACKED_FINITE;
    return found >= PACKED;
}

static void tile_of_rows(const am_kv_workspace *w, const am_attn_place *at, am_flash_tile *tile)
{
    const am_attn_base *base = w->kv->base;
    const ptrdiff_t width = row_width(w);
    const void *scales[2];
    am_rows rows[2];
    for (side i = OF_K; i <= OF_V; i++) {
        rows[i] = w->run > 0 ? rows_in_pages(w, at, i)
                             : read_rows(w, at, i, width, is_plain(w, i, width), false, copy_of(w, at, i));
        const float *its = w->scales[i] + (at->kv_head - w->head) * w->kv->sides[i].scale_columns * TILE;
        scales[i] = token_scales(w, i) ? its : NULL;
    }
    const ptrdiff_t lanes = am_ceil_div(base->attn->value_dim, width);
    *tile = (am_flash_tile){.layout = AM_ROWS,
                            .k = rows[OF_K],
                            .v = rows[OF_V],
                            .value_bytes = am_row_bytes(row_type(w), lanes * width),
                            .k_scales = scales[OF_K],
                            .v_scales = scales[OF_V],
                            .k_group = base->attn->k_scales.group,
                            .v_group = base->attn->v_scales.group};
}

/* Keys of a transposed tile, of the arithmetic type; `direct`: kernels can read them where they lie. */
static am_rows keys_to_transpose(const am_kv_workspace *w, const am_attn_place *at, bool direct,
                                 char *converted)
{
    const am_attn_base *base = w->kv->base;
    const am_attn *f = base->attn;
    const am_rows k = read_rows(w, at, OF_K, am_width(base), direct, false, copy_of(w, at, OF_K));
    if (am_width(base) > 1 || f->k.type == base->type) return k;
    const am_array rows = {.data = (char *)k.data,
                           .type = f->k.type,
                           .shape = {.token = am_length(w->keys), .channel = f->head_dim},
                           .stride = {.token = k.stride, .channel = (ptrdiff_t)am_size_of(f->k.type)}};
    return am_read_wide(base, &rows, converted);
}

/* The place of a tile among the local ones. */
static ptrdiff_t local_place(const am_kv *kv, const am_scheduled *g, ptrdiff_t index)
{
    return g->shape.strategy >= AM_LOCAL_PACKING ? index % kv->schedule->local_tiles : 0;
}

/* The index of a tile among the tiles of all heads. */
static ptrdiff_t index_among_all(const am_kv *kv, const am_attn_place *at, ptrdiff_t index)
{
    return at->kv_head * kv->sections->tiles.count + index;
}

/* A tile that the task packs for itself, unless it still has it. */
static void own_tile(am_kv_workspace *w, const am_attn_place *at, am_flash_tile *tile)
{
    const am_schedule *s = w->kv->schedule;
    const ptrdiff_t among_all = index_among_all(w->kv, at, w->index),
                    place = local_place(w->kv, w->section, w->index);
    char *k = w->packed[OF_K] + place * s->k_bytes, *v = w->packed[OF_V] + place * s->v_bytes;
    if (w->local[place].tile != among_all) {
        pack(w, at, OF_K, k);
        w->local[place].finite = pack(w, at, OF_V, v);
        w->local[place].tile = among_all;
    }
    point_at(w, k, v, tile);
    tile->finite = w->local[place].finite;
}

/* A full tile of one block that is transposed, or whose values are rows. */
static void full_tile(am_kv_workspace *w, const am_attn_place *at, am_flash_tile *tile)
{
    const am_attn_base *base = w->kv->base;
    const am_attn *f = base->attn;
    const ptrdiff_t width = am_width(base);
    const bool transposed = am_is_transposed(tile->layout), value_rows = am_has_value_rows(tile->layout),
               direct = transposed && (width > 1 ? am_is_aligned(&f->k, width) : am_is_plain(&f->k, width));
    w->local[0].tile = -1;
    if (direct && value_rows && (width > 1 || f->k.type == base->type) && find_pages(w, at) &&
        w->run % AM_TRANSPOSED_KEYS == 0) {
        tile->k = rows_in_pages(w, at, OF_K), tile->v = rows_in_pages(w, at, OF_V);
        if (w->run == TILE) tile->k.run = tile->v.run = 0;
        return;
    }
    tile->k.data = w->packed[OF_K], tile->v.data = w->packed[OF_V];
    if (transposed)
        tile->k = keys_to_transpose(w, at, direct, w->packed[OF_K]);
    else
        pack(w, at, OF_K, w->packed[OF_K]);
    if (value_rows)
        tile->v = read_rows(w, at, OF_V, 1, is_plain(w, OF_V, 1), true, copy_of(w, at, OF_V));
    else
        tile->finite = pack(w, at, OF_V, w->packed[OF_V]);
}

void am_kv_begin_tile(am_kv_workspace *w, const am_attn_place *at, ptrdiff_t index)
{
    w->index = index, w->keys = am_range_at(&w->kv->sections->tiles, index);
    w->head = at->kv_head, w->run = 0;
    if (w->section->shape.strategy != AM_UNPACKED) return;
    const ptrdiff_t heads = am_min(am_lockstep(w->section), w->kv->base->attn->kv_heads - at->kv_head);
    find_pages(w, at);
    for (side i = OF_K; i <= OF_V; i++) read_token_scales(w, at, i, heads);
}

void am_kv_tile(am_kv_workspace *w, const am_attn_place *at, ptrdiff_t all_keys, am_flash_tile *tile)
{
    const am_shape *shape = &w->section->shape;
    if (shape->strategy == AM_UNPACKED) {
        tile_of_rows(w, at, tile);
        return;
    }
    const bool full = all_keys == TILE,
               in_one_tile = shape->one_tile && (all_keys > 0 || shape->one_mixed_tile),
               transposed = shape->strategy == AM_TRANSPOSED && (full || in_one_tile),
               fills_lanes = all_keys > 0 && all_keys % am_width(w->kv->base) == 0,
               value_rows = shape->values_unpacked && (transposed ? fills_lanes : full);
    *tile =
        (am_flash_tile){.layout = transposed ? (value_rows ? AM_TRANSPOSED_ROWS : AM_TRANSPOSED_PACKED_VALUES)
                                  : value_rows ? AM_PACKED_KEYS
                                               : AM_PACKED,
                        .keys = all_keys > 0 ? all_keys : am_length(w->keys)};
    if (tile->layout != AM_PACKED)
        full_tile(w, at, tile);
    else if (!find_shared(w, at, tile))
        own_tile(w, at, tile);
}

void am_kv_pack_keys(const am_kv_workspace *w, const am_attn_place *at, ptrdiff_t index, char *to)
{
    am_kv_workspace own = *w;
    own.index = index, own.keys = am_range_at(&w->kv->sections->tiles, index);
    own.head = at->kv_head, own.run = 0;
    pack(&own, at, OF_K, to);
}

/* --- Prefetching --- */

/* Tokens of some heads; of tokens in pages as many that lie one after the other. */
static void find_tokens(const am_attn *f, const am_array *t, const am_attn_place *at, ptrdiff_t heads,
                        am_range keys, am_prefetch_rows to[AM_PREFETCH_RUNS])
{
    memset(to, 0, AM_PREFETCH_RUNS * sizeof *to);
    for (ptrdiff_t i = 0; i < AM_PREFETCH_RUNS && keys.begin < keys.end; i++) {
        const am_key_run run = am_key_run_of(f, t, at, keys);
        am_array from = *t;
        from.data = (char *)run.data;
        to[i] = am_prefetch_tokens(&from, 0, 0, heads, 0, run.data ? run.count : 0);
        keys.begin += run.count;
    }
}

/* Scales of the groups of some tokens. Scales that lie side by side become one row. */
static void find_groups(const am_kv_workspace *w, const am_attn_place *at, ptrdiff_t heads, am_range keys,
                        side which, am_prefetch_rows to[AM_PREFETCH_RUNS])
{
    const am_kv_scales *s = w->kv->sides[which].scales;
    am_array t = s->array;
    if (t.stride.channel == 2 * s->offset) t.stride.channel = s->offset;
    t.shape.channel = w->kv->sides[which].scale_columns;
    find_tokens(w->kv->base->attn, &t, at, heads, keys, to);
    for (int i = 0; i < AM_PREFETCH_RUNS; i++) {
        am_prefetch_rows *rows = &to[i];
        if (rows->rows <= 0 || rows->stride != rows->length) continue;
        rows->stride = rows->length *= rows->rows;
        rows->rows = 1;
    }
}

/* Plans what step_unpacked prefetches. */
static void plan_unpacked(am_kv_workspace *w, const am_attn_place *at, ptrdiff_t heads, am_range keys,
                          am_prefetch_plan *plan)
{
    const am_attn *f = w->kv->base->attn;
    const void **runs = w->runs[OF_NEXT_K];
    am_prefetch_rows next[AM_PREFETCH_RUNS];
    ptrdiff_t run;
    if (are_widened(w)) return; /* prefetches them itself */
    if (f->pages.table && am_find_runs(f, &f->k, at, keys, runs, &run)) {
        am_array first = f->k;
        first.data = (char *)runs[0];
        *next = am_prefetch_tokens(&first, 0, 0, heads, 0, run);
        plan->runs = runs, plan->run_count = TILE / run + (runs[TILE / run] != NULL);
    } else {
        find_tokens(f, &f->k, at, heads, keys, next);
    }
    plan->rows[0] = *next, plan->count = 1;
    if (!f->k_scales.group) return;
    find_groups(w, at, heads, keys, OF_K, plan->rows + AM_PREFETCH_K_SCALES);
    find_groups(w, at, heads, keys, OF_V, plan->rows + AM_PREFETCH_V_SCALES);
    plan->count = AM_PREFETCH_V_SCALES + AM_PREFETCH_RUNS;
}

void am_kv_prefetch_keys(const am_kv_workspace *w, const am_attn_place *at, ptrdiff_t index,
                         am_prefetch_plan *plan)
{
    const am_attn *f = w->kv->base->attn;
    am_prefetch_rows rows[AM_PREFETCH_RUNS];
    find_tokens(f, &f->k, at, 1, am_range_at(&w->kv->sections->tiles, index), rows);
    for (int i = 0; i < AM_PREFETCH_RUNS; i++) am_plan_rows(plan, rows[i]);
}

void am_kv_prefetch(am_kv_workspace *w, const am_scheduled *g, const am_attn_place *at, ptrdiff_t index,
                    ptrdiff_t heads, am_prefetch_plan *plan)
{
    const am_kv *kv = w->kv;
    const am_attn *f = kv->base->attn;
    const am_range keys = am_range_at(&kv->sections->tiles, index);
    if (w->section->shape.strategy == AM_UNPACKED) {
        plan_unpacked(w, at, heads, keys, plan);
        return;
    }
    atomic_uchar *state;
    char *to = shared_tile(kv, g, at, index, &state);
    if (to ? atomic_load_explicit(state, memory_order_relaxed) >= PACKED
           : w->local[local_place(kv, g, index)].tile == index_among_all(kv, at, index))
        return;
    const ptrdiff_t bytes = kv->schedule->k_bytes + kv->schedule->v_bytes;
    am_prefetch_rows rows[2 * AM_PREFETCH_RUNS];
    find_tokens(f, &f->k, at, heads, keys, rows);
    find_tokens(f, &f->v, at, heads, keys, rows + AM_PREFETCH_RUNS);
    for (int i = 0; i < 2 * AM_PREFETCH_RUNS; i++) am_plan_rows(plan, rows[i]);
    if (to) am_plan_rows(plan, (am_prefetch_rows){.at = to, .stride = bytes, .length = bytes, .rows = 1});
}
