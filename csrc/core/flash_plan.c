/* flash_plan.c – chooses blocks, tasks, splits and packing of attention forward. */
#include "core/flash_plan.h"

#include <math.h>
#include <stdlib.h>

enum {
    TILE = AM_FLASH_TILE,
    SHARED_QUERIES = 32, /* a block of up to so many queries takes several heads */
    ENOUGH_TASKS = 64,   /* that keep any number of threads busy */
    LEAST_SPLIT = 512,   /* the fewest keys that are worth a task */
    UNPACKED_TILES = 4,  /* the same for unpacked keys, as tiles: many heads read them in lockstep */
    FEW_TASKS = 4,    /* each thread keeps at least so many: tasks do not get more items than that allows */
    FEW_UNPACKED = 2, /* the same for unpacked keys, which are read up to 1.15 times as fast if the items
                       * of a task are all heads that lie side by side */
    /* Heads are packed a wave at a time. A wave has at least so many tasks, and more while they fit so many
     * bytes: then its memory stays in the cache, and few pages are touched for the first time. */
    WAVE_TASKS = 256,
    WAVE_BYTES = 4 << 20,
    /* Bytes of a panel of long vectors, whose products are so fast that packing is a large part of the time.
     * Transposed tiles would be 0.93 to 1.03 times as fast with AVX2. */
    LONG_PANEL = 128,
    FEW_ROWS = 16,           /* of a block that reads keys unpacked, unless they are of sixteen bits: those
                              * would be widened or interleaved again for every few rows */
    FEW_TILES = 2,           /* of a block for which copying its queries takes a large part of the time */
    L1_WAY = 4096,           /* bytes after which addresses map to the same sets of the first-level cache */
    SIDE_BY_SIDE = 4096,     /* bytes of neighbouring heads of a key that one task reads */
    SIDE_BYTES = 128 << 10,  /* of their queries and results: they stay in the second-level cache */
    GROUP_BYTES = 2 << 20,   /* the same for heads that share keys, which are packed once for all */
    LOCAL_BYTES = 320 << 10, /* of all local tiles of a task: they stay in the second-level cache */
    TASKS_EACH = 16,         /* the fewest of a thread if tasks have local tiles */
};

/* How many key heads lie side by side, up to those that one task reads. */
static ptrdiff_t side_by_side(const am_flash_plan *p)
{
    const am_flash *f = p->base.flash;
    const am_tokens *k = &f->k, *v = &f->v;
    if (!am_is_plain(k) || !am_is_plain(v)) return 1;
    if (p->bf16x2 && !(am_is_plain_bf16x2(k, f->depth) && am_is_plain_bf16x2(v, f->value_depth))) return 1;
    if (k->head <= 0 || v->head <= 0 || k->head >= k->token || v->head >= v->token) return 1;
    return SIDE_BY_SIDE / am_max(k->head, v->head);
}

/* How many items a task has. No result depends on it. */
static ptrdiff_t choose_task_items(const am_flash_plan *p)
{
    const bool share = p->head_blocks > 1;
    const ptrdiff_t row_bytes = am_max(1, (p->lanes + p->out_depth) * p->base.size),
                    rows = p->unpacked ? AM_FLASH_ROWS : (share ? GROUP_BYTES : SIDE_BYTES) / row_bytes,
                    few = p->unpacked ? FEW_UNPACKED : FEW_TASKS;
    ptrdiff_t most = am_min(share ? p->head_blocks : side_by_side(p), rows / p->most_rows);
    most = am_min(most, AM_MOST_ITEMS);
    most = am_max(1, am_min(most, p->blocks * p->splits / p->threads / few));
    return am_ceil_div(p->item_group, am_ceil_div(p->item_group, most));
}

/* Decides whether tasks have local tiles, and then how many items they have: so many that little is packed
 * more than once, and each thread still gets some tasks. No result depends on it. */
static void choose_local_packing(am_flash_plan *p)
{
    ptrdiff_t tiles = am_most_tiles(&p->base, &p->queries, &p->keys),
              blocks = am_min(AM_MOST_ITEMS, p->blocks / p->threads / TASKS_EACH);
    if (p->head_blocks > 1 ||
        tiles > am_min(AM_MOST_LOCAL_TILES, LOCAL_BYTES / am_max(p->k_bytes + p->v_bytes, 1)))
        return;
    if (blocks < 2 * tiles) return;
    p->local_count = tiles;
    p->task_items = blocks;
    p->shares_keys = false;
}

/* Whether a block's queries can be read where they lie: not if they are to be scaled, nor if all rows map to
 * the same cache lines. */
static bool can_read_directly(const am_flash_plan *p)
{
    const am_tokens *q = &p->base.flash->q;
    if (p->block_heads > 1 || p->q_factor != 1 || q->token % L1_WAY == 0) return false;
    if (p->bf16x2) return am_is_aligned_bf16x2(q, p->base.flash->depth);
    return q->type == p->base.type && am_is_plain(q);
}

/* Whether full tiles are transposed: if more than a few rows fill vectors, and logits are products but for a
 * factor. This must follow from shapes, not from threads, since transposed sums are rounded otherwise. */
static bool can_transpose(const am_flash_plan *p)
{
    const am_flash *f = p->base.flash;
    if (p->shares_keys || p->head_blocks > 1 || f->depth == 0) return false;
    if (p->seen <= FEW_TILES || p->most_rows <= AM_FEW_ROWS) return false;
    if (f->bias || f->cap > 0 || p->base.threshold || p->base.unit != 1) return false;
    if (p->bf16x2 && (p->factor <= 0 || p->base.kernels->bf16x2.amx)) return false;
    const ptrdiff_t panel = p->base.kernels->panel;
    const bool one_vector = f->k.type == p->base.type && p->most_rows <= panel / 2;
    const ptrdiff_t part = one_vector ? panel / 2 : panel, lanes = am_ceil_div(p->most_rows, part) * part;
    /* With more lanes empty it is 0.82 to 1.08 times as fast. */
    return panel * p->base.size >= LONG_PANEL && p->most_rows >= lanes * 7 / 8;
}

/* The tiles that any head of some ranges of queries sees. */
static am_range tiles_seen(const am_flash_plan *p, ptrdiff_t b, ptrdiff_t first, ptrdiff_t count)
{
    am_range all = {PTRDIFF_MAX, 0};
    for (ptrdiff_t block = first; block < first + count; block++) {
        const am_range queries = am_range_at(&p->queries, b, block);
        const am_flash_place at = {.b = b,
                                   .heads = p->base.flash->heads,
                                   .q = queries.begin,
                                   .queries = queries.end - queries.begin};
        const am_range seen = am_tiles_of(&p->base, &p->keys, &at);
        if (seen.begin < seen.end) all = (am_range){am_min(all.begin, seen.begin), am_max(all.end, seen.end)};
    }
    return all.end > 0 ? all : (am_range){0, 0};
}

/* Lists a row for each sequence with exclusive keys, or each batch row, not split yet. */
static am_status list_rows(am_flash_plan *p)
{
    const am_flash *f = p->base.flash;
    const ptrdiff_t parts = p->exclusive ? p->queries.count : 1,
                    count = p->exclusive ? am_count_ranges(&p->queries, f->batch) : f->batch;
    p->rows = malloc((size_t)am_product(count, sizeof *p->rows, 1));
    if (!p->rows) return AM_NO_MEMORY;
    for (ptrdiff_t i = 0; i < f->batch * parts; i++) {
        am_flash_row row = {.b = i / parts, .part = i % parts, .tiles = {0, p->keys.count}};
        if (p->exclusive) {
            const am_range queries = am_range_at(&p->queries, row.b, row.part);
            if (queries.begin == queries.end) continue; /* behind the last of its batch row */
            row.tiles = tiles_seen(p, row.b, row.part, 1);
        } else if (p->queries.list)
            row.tiles = tiles_seen(p, row.b, 0, p->queries.count);
        p->seen = am_max(p->seen, row.tiles.end - row.tiles.begin);
        p->rows[p->row_count++] = row;
    }
    return AM_OK;
}

static ptrdiff_t unpacked_splits(const am_flash_plan *p, ptrdiff_t tiles)
{
    return am_min(am_ceil_div(tiles, UNPACKED_TILES), am_max(1, ENOUGH_TASKS / am_max(1, p->row_blocks)));
}

/* Splits a row. If unpacked, its splits follow from the row itself, not from the longest one. */
static am_flash_row split_of(const am_flash_plan *p, am_flash_row row)
{
    const ptrdiff_t count = am_max(1, row.tiles.end - row.tiles.begin);
    row.split_tiles = p->unpacked ? am_ceil_div(count, unpacked_splits(p, count)) : p->split_tiles;
    row.splits = am_ceil_div(count, row.split_tiles);
    return row;
}

static am_status split_rows(am_flash_plan *p)
{
    ptrdiff_t count = 0;
    for (ptrdiff_t i = 0; i < p->row_count; i++) {
        p->rows[i] = split_of(p, p->rows[i]);
        count += p->rows[i].splits;
    }
    am_flash_row *rows = realloc(p->rows, (size_t)am_product(count, sizeof *rows, 1));
    if (!rows) return AM_NO_MEMORY;
    for (ptrdiff_t i = p->row_count - 1, to = count; i >= 0; i--) {
        am_flash_row row = rows[i];
        for (row.split = row.splits - 1; row.split >= 0; row.split--) rows[--to] = row;
    }
    p->rows = rows, p->row_count = count;
    return AM_OK;
}

static void choose(am_flash_plan *p)
{
    const am_flash *f = p->base.flash;
    p->block_rows = am_longest_range(&p->queries, f->batch);
    bool shared = p->base.group > 1 && p->block_rows <= SHARED_QUERIES;
    p->block_heads = shared ? am_min(p->base.group, AM_FLASH_ROWS / p->block_rows) : 1;
    p->most_rows = p->block_rows * p->block_heads;
    p->head_blocks = am_ceil_div(p->base.group, p->block_heads);
    p->q_blocks = p->exclusive ? 1 : p->queries.count;
    p->shares_keys = !p->exclusive && p->head_blocks * p->q_blocks > 1;
    p->row_blocks = f->kv_heads * p->head_blocks * p->q_blocks;
    p->item_group = p->exclusive && p->head_blocks > 1 ? p->head_blocks : p->row_blocks;
    p->bf16x2 = f->q.type == AM_BFLOAT16 && p->base.kernels->bf16x2.step;
    p->factor = f->scale * AM_LOG2_E / p->base.unit;
    if (p->bf16x2) p->factor = (float)p->factor; /* as kernels round it, which may be to 0 */
    p->transposed = can_transpose(p);
    p->unpacked = !p->shares_keys && !p->transposed &&
                  p->most_rows <= (f->k.type == p->base.type ? FEW_ROWS : AM_FEW_ROWS);
    p->lanes = p->bf16x2 ? am_ceil_div(f->depth, 2) : f->depth;
    const ptrdiff_t panel = p->base.kernels->panel, panels = am_ceil_div(f->value_depth, panel);
    p->out_depth = am_ceil_div(2 * f->value_depth, panel) * panel / 2;
    p->k_bytes = TILE * p->lanes * p->base.size;
    p->v_bytes = TILE * panels * panel * p->base.size / (p->bf16x2 ? 2 : 1);
    p->blocks = p->row_count * p->row_blocks;
    /* If each task packs few keys, for any number of threads, these are scaled instead of queries, unless the
     * factor could make one infinite. */
    const bool few = !p->shares_keys && !p->unpacked && p->seen <= FEW_TILES;
    const double factor = p->bf16x2 ? 1 : p->factor;
    const bool scales_keys = few && fabs(factor) <= 1;
    p->k_factor = scales_keys ? factor : 1;
    p->q_factor = scales_keys ? 1 : factor;
    p->queries_direct = few && can_read_directly(p);
    const ptrdiff_t tiles = am_max(p->seen, 1), seen = am_max(1, am_min(f->keys, tiles * TILE));
    p->splits = p->unpacked ? unpacked_splits(p, tiles)
                            : am_min(am_ceil_div(ENOUGH_TASKS, p->blocks), am_ceil_div(seen, LEAST_SPLIT));
    p->split_tiles = am_ceil_div(tiles, p->splits);
    p->task_items = p->lockstep = p->shares_keys ? 1 : choose_task_items(p);
    p->local_count = 1;
    /* Values are not worth packing if few strips of one block read them, and with long vectors never, unless
     * they would be interleaved for each strip. */
    const bool always = panel * p->base.size >= LONG_PANEL && !p->bf16x2;
    const ptrdiff_t few_for_values = always ? AM_FLASH_ROWS : panel * 3 / 2;
    p->values_unpacked = p->head_blocks * p->q_blocks == 1 && p->most_rows <= few_for_values &&
                         f->v.token > 0 && !(p->bf16x2 && p->base.kernels->bf16x2.amx) &&
                         f->value_depth % (p->bf16x2 ? panel : panel / 2) == 0 &&
                         (p->bf16x2 ? am_is_plain_bf16x2(&f->v, f->value_depth)
                                    : am_is_plain(&f->v) && f->v.type == p->base.type);
    if (p->shares_keys) choose_local_packing(p);
    p->group_tasks = am_ceil_div(p->item_group, p->task_items);
    ptrdiff_t heads = f->batch * f->kv_heads, tile_bytes = p->k_bytes + p->v_bytes;
    p->wave = am_max(am_ceil_div(WAVE_TASKS, p->head_blocks * p->q_blocks),
                     WAVE_BYTES / am_max(am_product(p->seen, tile_bytes, 1), 1));
    if (p->splits > 1 || p->wave > heads) p->wave = heads;
    p->partial_bytes = am_ceil_div(p->most_rows * (p->out_depth + 3) * p->base.size, AM_LINE) * AM_LINE;
}

am_status am_flash_plan_make(am_flash_plan *plan, const am_run *run, const am_flash *flash,
                             const am_ranges *queries, const am_ranges *keys, am_query_kind kind)
{
    *plan = (am_flash_plan){.base = am_flash_base_of(run, flash),
                            .exclusive = kind != AM_SHARED_KEYS,
                            .queries = *queries,
                            .keys = *keys,
                            .threads = run->threads};
    am_status status = list_rows(plan);
    if (status != AM_OK) return status;
    choose(plan);
    return split_rows(plan);
}

void am_flash_plan_free(am_flash_plan *plan) { free(plan->rows); }
