/* attn_kv.c – tiles of keys and values: packed for all tasks, packed for one, or read where they lie. */
#include "core/attn_kv.h"

#include <stdlib.h>

#include "core/convert.h"

enum { TILE = AM_FLASH_TILE };

/* The state of a shared tile. The first task that needs it packs it; a task that needs it meanwhile packs for
 * itself. */
typedef enum { NOT_PACKED, IN_WORK, PACKED, PACKED_FINITE } tile_state;

/* --- Rows --- */

am_kv_rows am_kv_rows_of(const am_tokens *t, const am_attn_place *at, am_range keys, ptrdiff_t depth)
{
    return (am_kv_rows){.data = am_token(t, at->b, at->kv_head, keys.begin),
                        .step = t->token,
                        .element = t->element,
                        .type = t->type,
                        .count = am_length(keys),
                        .depth = depth};
}

/* Returns rows where they lie if kernels can read them, else copies them to `scratch`; and the steps from row
 * to row, in elements, or in lanes of bf16x2. */
static const char *read_rows(const am_attn_base *base, const am_kv_rows *rows, char *scratch, ptrdiff_t *step)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(rows->type);
    if (base->bf16x2)
        return am_read_bf16x2(rows->data, rows->step, rows->element, rows->count, rows->depth, scratch, step);
    const bool plain = rows->element == size && rows->step % size == 0;
    *step = plain ? rows->step / size : rows->depth;
    if (plain) return rows->data;
    am_copy_2d(scratch, rows->depth * size, size, rows->data, rows->step, rows->element, rows->count,
               rows->depth, (size_t)size);
    return scratch;
}

void am_pack_keys(const am_attn_base *base, am_kv_rows rows, char *scratch, char *to, double factor)
{
    ptrdiff_t step;
    const char *src = read_rows(base, &rows, scratch, &step);
    base->kernels->kv[rows.type].pack_keys(to, src, step, rows.count, am_lanes(base, rows.depth), factor);
}

bool am_pack_values(const am_attn_base *base, am_kv_rows rows, char *scratch, char *to)
{
    ptrdiff_t step;
    const char *src = read_rows(base, &rows, scratch, &step);
    return base->kernels->kv[rows.type].pack_values(to, src, base->bf16x2 ? 2 * step : step, rows.count,
                                                    rows.depth);
}

/* Returns keys of a whole tile where they lie, if the kernels can load each of their lanes by itself, else
 * copies them to `scratch`. */
static const char *read_lanes(const am_attn_base *base, const am_kv_rows *rows, bool aligned, char *scratch,
                              ptrdiff_t *step)
{
    if (!base->bf16x2)
        return am_read_rows(base, scratch, rows->data, rows->step, rows->element, rows->type, rows->count,
                            rows->depth, step);
    if (aligned)
        return am_read_bf16x2(rows->data, rows->step, rows->element, rows->count, rows->depth, scratch, step);
    am_copy_bf16x2(scratch, rows->data, rows->step, rows->element, rows->count, rows->depth);
    *step = am_lanes(base, rows->depth);
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
    const am_range tiles = g->group.tiles;
    const ptrdiff_t index =
        g->first_shared + at->kv_head * am_length(tiles) + tile - tiles.begin - kv->shared.first;
    if (index < 0 || index >= kv->shared.count) return NULL;
    *state = &kv->shared.states[index];
    return kv->shared.packed + index * (kv->schedule->k_bytes + kv->schedule->v_bytes);
}

/* The keys and values of a tile. */
typedef struct {
    am_kv_rows k, v;
} tile_rows;

/* Finds a shared tile, and packs it if no other task has begun to. False if tiles are not shared, or another
 * task is packing it. */
static bool find_shared(const am_kv *kv, const am_scheduled *g, const am_attn_place *at, ptrdiff_t index,
                        const tile_rows *rows, char *scratch, am_flash_tile *tile)
{
    atomic_uchar *state;
    char *shared = shared_tile(kv, g, at, index, &state);
    if (!shared) return false;
    tile->k = shared, tile->v = shared + kv->schedule->k_bytes;
    unsigned char found = atomic_load_explicit(state, memory_order_acquire);
    if (found == NOT_PACKED && atomic_compare_exchange_strong(state, &found, IN_WORK)) {
        am_pack_keys(kv->base, rows->k, scratch, shared, 1);
        found = am_pack_values(kv->base, rows->v, scratch, shared + kv->schedule->k_bytes) ? PACKED_FINITE
                                                                                           : PACKED;
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
    w->row = am_take(memory, used, am_row_scratch(TILE, am_max(f->depth, f->value_depth)));
    /* Tiles that are packed, or rows that kernels cannot read where they lie. */
    w->k = am_take(memory, used, am_max(s->local_tiles * s->k_bytes, am_row_scratch(TILE, f->depth)));
    w->v = am_take(memory, used, am_max(s->local_tiles * s->v_bytes, am_row_scratch(TILE, f->value_depth)));
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
    return at->kv_head * kv->groups->tiles.count + index;
}

static am_flash_step_unpacked *unpacked_tile(const am_attn_base *base, const tile_rows *rows,
                                             am_kv_workspace *w, am_flash_tile *tile)
{
    tile->k = read_rows(base, &rows->k, w->k, &tile->k_step);
    tile->v = read_rows(base, &rows->v, w->v, &tile->v_step);
    tile->value_depth = am_lanes(base, rows->v.depth);
    return base->kernels->kv[rows->k.type].step_unpacked;
}

am_flash_step_unpacked *am_kv_tile(const am_kv *kv, const am_scheduled *g, const am_attn_place *at,
                                   ptrdiff_t index, bool full, am_kv_workspace *w, am_flash_tile *tile)
{
    const am_attn_base *base = kv->base;
    const am_attn *f = base->attn;
    const am_range keys = am_range_at(&kv->groups->tiles, index);
    const tile_rows rows = {am_kv_rows_of(&f->k, at, keys, f->depth),
                            am_kv_rows_of(&f->v, at, keys, f->value_depth)};
    if (g->shape.strategy == AM_UNPACKED) return unpacked_tile(base, &rows, w, tile);
    if (find_shared(kv, g, at, index, &rows, w->row, tile)) return NULL;
    const ptrdiff_t among_all = index_among_all(kv, at, index), place = local_place(kv, g, index);
    char *k = w->k + place * kv->schedule->k_bytes, *v = w->v + place * kv->schedule->v_bytes;
    const bool in_place = g->shape.values_unpacked && full, known = w->local[place].tile == among_all;
    tile->transposed = g->shape.strategy == AM_TRANSPOSED && full && rows.k.count == TILE;
    if (tile->transposed)
        tile->k = read_lanes(base, &rows.k, am_is_aligned_bf16x2(&f->k, f->depth), k, &tile->k_step);
    else if (!known)
        am_pack_keys(base, rows.k, w->row, k, g->shape.scales_keys ? kv->schedule->factor : 1);
    if (!known && !in_place) w->local[place].finite = am_pack_values(base, rows.v, w->row, v);
    w->local[place].tile = in_place || tile->transposed ? -1 : among_all;
    if (!tile->transposed) tile->k = k;
    tile->v = in_place ? rows.v.data : v;
    tile->v_step = in_place ? rows.v.step / base->size : 0;
    tile->finite = w->local[place].finite;
    return NULL;
}

/* The `part`-th of `parts` of some tokens, to prefetch. */
static am_prefetch_rows prefetch_part(const am_tokens *t, const am_attn_place *at, ptrdiff_t heads,
                                      am_range keys, ptrdiff_t depth, ptrdiff_t part, ptrdiff_t parts)
{
    const ptrdiff_t rows = am_length(keys), begin = rows * part / parts, end = rows * (part + 1) / parts;
    return am_prefetch_tokens(t, at->b, at->kv_head, heads, keys.begin + begin, end - begin, depth);
}

void am_kv_prefetch(const am_kv *kv, const am_scheduled *g, const am_attn_place *at, ptrdiff_t index,
                    ptrdiff_t heads, ptrdiff_t part, ptrdiff_t parts, const am_kv_workspace *w,
                    am_flash_tile *tile)
{
    const am_attn *f = kv->base->attn;
    atomic_uchar *state;
    char *to = shared_tile(kv, g, at, index, &state);
    if (to ? atomic_load_explicit(state, memory_order_relaxed) >= PACKED
           : w->local[local_place(kv, g, index)].tile == index_among_all(kv, at, index))
        return;
    const am_range keys = am_range_at(&kv->groups->tiles, index);
    const ptrdiff_t bytes = kv->schedule->k_bytes + kv->schedule->v_bytes;
    tile->prefetch[AM_PREFETCH_K] = prefetch_part(&f->k, at, heads, keys, f->depth, part, parts);
    tile->prefetch[AM_PREFETCH_V] = prefetch_part(&f->v, at, heads, keys, f->value_depth, part, parts);
    if (to) tile->prefetch[AM_PREFETCH_PACKED] = (am_prefetch_rows){to, bytes, bytes, 1};
}
