/* forward.c – attention forward: takes each block of query rows over its keys.
 *
 * A block is up to 64 query rows of one head. With few queries, it has rows of several heads that share keys.
 * It steps over tiles of up to 64 keys. The schedule says how tiles are read, and which blocks a task takes.
 * With few blocks, it splits the keys of each block, and the accumulators of the splits are merged. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "core/attention/epilogue.h"
#include "core/attention/forward.h"
#include "core/attention/tiles/tiles.h"
#include "core/attention/terms/lines.h"
#include "core/cache/formats.h"

enum { TILE = AM_FLASH_TILE };
_Static_assert(AM_MOST_ITEMS <= (int)AM_PREFETCH_BLOCKS, "each block may plan its bias");

typedef struct {
    am_attn_base base;
    am_sections sections;
    am_schedule schedule;
    am_kv kv;
    am_wave wave; /* whose tasks run */
    const am_weights_taker *taker;
    am_sink_sum *sinks; /* one for each head; NULL without sinks */
    char *partials;     /* accumulators of splits that are items of their own */
    am_workspaces workspaces;
} forward;

/* The memory of a thread. */
typedef struct {
    char *q, *q_packed, *logits, *accumulators;
    am_logit_scratch terms;
    am_kv_workspace kv;
} workspace;

/* An item of a task: a block, and its part of the memory. */
typedef struct {
    am_attn_place at;
    char *q, *q_packed;
    bool is_packed; /* queries are, for transposed tiles */
    am_logit_scratch terms;
    am_flash_rows rows, split; /* split: with accumulators for later splits of the item, if it has any */
} item;

/* Where a task is: at one split of the blocks from `at` on, which see some tiles. */
typedef struct {
    const am_scheduled *section;
    am_attn_place at;
    am_range tiles; /* of all splits */
    ptrdiff_t split;
} position;

/* The lanes of a row of queries before they are packed. */
static ptrdiff_t query_lanes(const forward *f, const am_scheduled *g)
{
    return g->shape.packs_queries ? f->base.attn->head_dim : f->schedule.lanes;
}

/* The bytes of a row of queries that it packs. */
static ptrdiff_t packed_query_bytes(const am_attn_base *base)
{
    return base->packs_queries ? am_packed_query_lanes(base->attn->head_dim) * (ptrdiff_t)sizeof(float) : 0;
}

static ptrdiff_t lay_out(const void *job, char *memory, void *parts)
{
    const forward *f = job;
    workspace *w = parts;
    const am_schedule *s = &f->schedule;
    const ptrdiff_t size = f->base.size, word = sizeof(uint64_t), tile = AM_FLASH_ROWS * TILE * size;
    const am_attn *attn = f->base.attn;
    ptrdiff_t used = 0;
    w->q = am_take(memory, &used, s->item_rows * attn->head_dim * size);
    w->q_packed = am_take(
        memory, &used, am_max(s->packed_queries * s->k_bytes, s->item_rows * packed_query_bytes(&f->base)));
    w->logits = am_take(memory, &used, am_max(tile, AM_STEP_ROWS * TILE * s->step_tiles * size));
    am_kv_workspace_take(&f->kv, memory, &used, &w->kv);
    w->accumulators = am_take(memory, &used, s->item_bytes);
    w->terms.row = w->kv.row;
    w->terms.bias = am_take(memory, &used, am_adds_to_products(&f->base.terms) ? tile : 0);
    w->terms.live = (uint64_t *)am_take(memory, &used, s->step_tiles * AM_FLASH_ROWS * word);
    w->terms.kept = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * word);
    w->terms.row_keys = (uint64_t *)am_take(memory, &used, s->item_rows * word);
    return used;
}

/* Where the accumulators of a block are: side by side. */
static void set_accumulators(const forward *f, const am_scheduled *g, am_flash_rows *rows, char *memory)
{
    const ptrdiff_t stat_bytes = g->shape.rows * f->base.size;
    char *stats = memory + f->schedule.out_dim * stat_bytes;
    rows->out = memory;
    rows->running_max = stats, rows->sum = stats + stat_bytes;
    rows->row_max = f->base.attn->normalize ? NULL : stats + 2 * stat_bytes;
    const am_arithmetic *a = f->base.arithmetic;
    const bool rounds = a->factors != a->type && !g->shape.float_weights;
    rows->exact_sum = rounds && f->base.attn->lse.data ? stats + 3 * stat_bytes : NULL;
}

/* Sets all of it but queries and logits, member by member: an item of a short sequence is begun so often that
 * a copy of the whole would take a thirtieth of its time. */
static void set_rows(const forward *f, const am_scheduled *g, char *memory, ptrdiff_t count,
                     am_flash_rows *rows)
{
    rows->rows = count;
    rows->head_dim = query_lanes(f, g);
    rows->out_dim = f->schedule.out_dim;
    rows->out_padding = f->schedule.out_dim - f->base.attn->value_dim;
    rows->cap = am_cap_of(&f->base.terms);
    rows->factor = am_scales_products(&f->base) && !g->shape.packs_queries ? f->schedule.factor : 1;
    rows->q_factor = f->schedule.factor;
    rows->float_weights = g->shape.float_weights;
    rows->unit = f->base.unit;
    set_accumulators(f, g, rows, memory);
}

/* The accumulators of one split of an item; accumulators of all its splits lie side by side. */
static char *partial_of(const forward *f, const am_scheduled *g, ptrdiff_t index, ptrdiff_t split)
{
    const ptrdiff_t bytes = am_accumulator_bytes(&f->schedule, &f->base, g->shape.rows);
    return f->partials + g->first_partial + (index * g->shape.splits + split) * bytes;
}

/* --- Items --- */

/* Makes the i-th item in lockstep. Unpacked, all items take one step together, and have at most the rows of
 * one full block. Otherwise they step one after the other, and each uses the whole memory for a tile. */
static void make_item(const forward *f, const am_scheduled *g, const workspace *w, am_task_items task,
                      ptrdiff_t i, item *it)
{
    const ptrdiff_t size = f->base.size, row = i * g->shape.rows, index = task.first + i,
                    bytes = am_accumulator_bytes(&f->schedule, &f->base, g->shape.rows),
                    tile_row = g->shape.strategy == AM_UNPACKED ? row : 0;
    it->at = am_item_place(&f->base, &f->sections, g, index);
    it->q = w->q + row * query_lanes(f, g) * size, it->q_packed = NULL, it->is_packed = false;
    it->terms = w->terms;
    if (g->shape.strategy == AM_TRANSPOSED) it->q_packed = w->q_packed + i * f->schedule.k_bytes;
    if (g->shape.packs_queries) it->q_packed = w->q_packed + row * packed_query_bytes(&f->base);
    if (am_adds_to_products(&f->base.terms)) it->terms.bias += tile_row * TILE * size;
    it->terms.live += tile_row, it->terms.kept += tile_row, it->terms.row_keys += row;
    char *own = am_splits_are_tasks(&f->schedule, g) ? partial_of(f, g, index, task.split)
                                                     : w->accumulators + i * bytes;
    set_rows(f, g, own, it->at.rows, &it->rows);
    it->rows.q = it->q, it->rows.q_stride = query_lanes(f, g);
    if (g->shape.queries_direct) {
        it->rows.q = am_token(&f->base.attn->q, it->at.b, it->at.head, it->at.q);
        it->rows.q_stride = f->base.attn->q.stride.token / size;
    }
    it->rows.q_packed = it->q_packed;
    it->rows.logits = w->logits + tile_row * TILE * size;
    if (g->shape.splits == 1) return;
    it->split = it->rows;
    if (!am_splits_are_tasks(&f->schedule, g))
        set_accumulators(f, g, &it->split, own + am_lockstep(g) * bytes);
}

/* Copies the queries of one head in whole lanes; scaled channels are rounded again. */
static void load_lanes(const am_attn_base *base, const item *it, const am_array *q, char *scratch, char *to)
{
    const am_kv_scales *scales = &base->attn->k_scales;
    const ptrdiff_t head_dim = base->attn->head_dim, count = it->at.queries,
                    row_bytes = am_lanes(base, head_dim) * base->size;
    if (!scales->by_channel) {
        am_copy_lanes(base, q, to);
        return;
    }
    am_read_wide(base, q, scratch); /* of another type, and so copied */
    float *rows = (float *)scratch;
    am_scale_channels(scales, it->at.kv_head, rows, count, head_dim, head_dim);
    if (head_dim % am_width(base)) memset(to, 0, (size_t)(count * row_bytes));
    for (ptrdiff_t r = 0; r < count; r++, rows += head_dim)
        base->arithmetic->numbers[q->type].write(to + r * row_bytes, rows, 1, head_dim);
}

/* Copies the queries of a block, scaled and packed as its strategy wants them. */
static void load_queries(const forward *f, const am_scheduled *g, const item *it, char *scratch)
{
    const am_attn_base *base = &f->base;
    const am_array *q = &base->attn->q;
    const ptrdiff_t head_dim = base->attn->head_dim, row_bytes = query_lanes(f, g) * base->size;
    const bool packs = g->shape.packs_queries, in_lanes = am_scales_products(base) && !packs,
               scaled = g->shape.scales_keys || (packs && base->kv_rows->scales_products);
    const double factor = scaled ? 1 : f->schedule.factor;
    char *to = it->q;
    for (ptrdiff_t h = 0; !g->shape.queries_direct && h < it->at.heads; h++) {
        const am_array of_head =
            am_rows_from(q, am_token(q, it->at.b, it->at.head + h, it->at.q), it->at.queries);
        if (in_lanes) {
            load_lanes(base, it, &of_head, scratch, to);
            to += it->at.queries * row_bytes;
            continue;
        }
        const am_rows rows = am_read_wide(base, &of_head, scratch);
        for (ptrdiff_t r = 0; r < it->at.queries; r++, to += row_bytes)
            base->arithmetic->numbers[base->type].write(to, (const char *)rows.data + r * rows.stride, factor,
                                                        head_dim);
    }
    if (base->attn->k_scales.by_channel && !in_lanes)
        am_scale_channels(&base->attn->k_scales, it->at.kv_head, (float *)it->q, it->at.rows, head_dim,
                          head_dim);
    if (packs) {
        base->kv_rows->pack_queries(it->q_packed, it->rows.q, it->rows.q_stride, it->at.rows, head_dim);
    }
}

/* Packs the queries of a block like keys, as transposed tiles take them. */
static void pack_queries(const forward *f, const am_scheduled *g, item *it)
{
    const am_rows rows = {.data = it->rows.q, .stride = it->rows.q_stride * f->base.size};
    const double factor = g->shape.scales_keys ? f->schedule.factor : 1;
    am_kv_own(&f->base)->pack_keys(it->q_packed, &rows, it->at.rows, f->schedule.lanes, factor, NULL);
    it->is_packed = true;
}

/* --- Tiles --- */

/* The tiles of a split in the order in which a block takes them. */
typedef struct {
    am_range tiles;
    ptrdiff_t first; /* then the tiles before it, backwards, and at last the tiles behind it */
} tile_order;

/* As they lie, or the nearest first. */
static tile_order tile_order_of(const forward *f, const position *where)
{
    const am_range tiles = am_split_tiles(where->section, where->tiles, where->split);
    tile_order order = {tiles, tiles.begin};
    if (!f->base.terms.nearest_first) return order;
    const ptrdiff_t key = am_nearest_key(&f->base, &where->at);
    while (order.first + 1 < tiles.end && am_range_at(&f->sections.tiles, order.first + 1).begin <= key)
        order.first++;
    return order;
}

static ptrdiff_t tile_at(const tile_order *order, ptrdiff_t i)
{
    const ptrdiff_t before = order->first - order->tiles.begin;
    return i <= before ? order->first - i : order->tiles.begin + i;
}

/* A tile of the blocks at a position. */
typedef struct {
    const position *of;
    ptrdiff_t index; /* -1: none */
} tile_place;

/* What follows the i-th tile: the next one of the same blocks, or after the last one the first of what is
 * next for this thread. */
static tile_place tile_after(const forward *f, const position *here, const position *next,
                             const tile_order *order, ptrdiff_t i)
{
    if (i + 1 < am_length(order->tiles)) return (tile_place){here, tile_at(order, i + 1)};
    const tile_order then = tile_order_of(f, next);
    return (tile_place){next, am_length(then.tiles) > 0 ? tile_at(&then, 0) : -1};
}

/* The key heads of some blocks in lockstep. */
static ptrdiff_t kv_heads_of(const position *here, ptrdiff_t count)
{
    return here->section->shape.head_blocks > 1 ? 1 : count;
}

/* Plans what the steps of some blocks over a tile prefetch: the tile after it, and what comes with that. The
 * bias of a block is added by its own step. */
static void plan_prefetch(const forward *f, const position *here, const position *next, tile_place after,
                          ptrdiff_t count, am_kv_workspace *kv, am_prefetch_plan *plan)
{
    const am_attn *attn = f->base.attn;
    const am_attn_place *at = &here->at, *then = &next->at;
    const ptrdiff_t kv_heads = kv_heads_of(here, count),
                    heads = am_min(count * here->section->shape.block_heads, kv_heads * f->base.heads_per_kv);
    am_plan_begin(plan, 1);
    if (after.index >= 0) am_kv_prefetch(kv, after.of->section, &after.of->at, after.index, kv_heads, plan);
    if (here->section->shape.strategy == AM_UNPACKED) return;
    plan->steps = count;
    if (after.of != next || am_splits_are_tasks(&f->schedule, here->section) ||
        (then->block == at->block && then->head == at->head))
        return;
    am_plan_rows(plan, am_prefetch_block(&attn->q, then, heads));
    am_plan_rows(plan, am_prefetch_block(&attn->out, at, heads));
    if (attn->wide_out.data) am_plan_rows(plan, am_prefetch_block(&attn->wide_out, at, heads));
}

/* Plans the bias of a block, or of the first one that follows, for the tile after this one. */
static void plan_bias(const forward *f, const item *it, const position *next, tile_place after,
                      am_prefetch_plan *plan)
{
    if (!f->base.terms.bias || after.index < 0) return;
    am_plan_rows(plan, am_prefetch_bias(&f->base, after.of == next ? &next->at : &it->at,
                                        am_range_at(&f->sections.tiles, after.index)));
}

/* Whether the same pairs of two items' rows are live in each tile, and no terms are added to them. */
static bool have_like_terms(const am_attn_base *base, const am_attn_place *a, const am_attn_place *b)
{
    return base->attn->mask->own_heads <= 1 && base->threshold == 0 && !am_adds_to_products(&base->terms) &&
           a->q == b->q && a->queries == b->queries && a->heads == b->heads;
}

/* Lets the weights of a step be taken: of the items from `it` on that see its tile. */
static __attribute__((noinline)) void take_weights(const am_weights_taker *taker, const item *it,
                                                   am_range keys, const am_flash_rows *const *rows,
                                                   const am_flash_tile *tiles, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; it++) {
        if (rows[i] != &it->rows && rows[i] != &it->split) continue;
        taker->take(taker->arg, &it->at, keys, rows[i], tiles[i].terms.live);
        i++;
    }
}

/* Takes items in lockstep over the keys of a split. */
static am_status advance_items(const forward *f, item *items, ptrdiff_t count, const position *here,
                               const position *next, am_kv_workspace *kv, am_team *team)
{
    const am_attn_base *base = &f->base;
    const bool unpacked = here->section->shape.strategy == AM_UNPACKED;
    const ptrdiff_t per_step = unpacked ? count : 1;
    const tile_order order = tile_order_of(f, here);
    for (ptrdiff_t i = 0; i < am_length(order.tiles); i++) {
        const ptrdiff_t index = tile_at(&order, i);
        const am_range keys = am_range_at(&f->sections.tiles, index);
        const tile_place after = tile_after(f, here, next, &order, i);
        am_prefetch_plan plan;
        bool planned = false;
        for (item *first = items; first < items + count; first += per_step) {
            const am_flash_rows *rows[AM_MOST_ITEMS];
            am_flash_tile some[AM_MOST_ITEMS];
            ptrdiff_t live = 0;
            am_logit_terms terms;
            bool is_live = false;
            for (item *it = first; it < first + per_step; it++) {
                if (it == first || !have_like_terms(base, &it->at, &it[-1].at))
                    is_live = am_find_logit_terms(base, &it->at, keys, &it->terms, &terms);
                if (!is_live) continue;
                am_flash_tile *tile = &some[live];
                if (live == 0) am_kv_begin_tile(kv, &it->at, index);
                am_kv_tile(kv, &it->at, terms.all_keys, tile);
                if (am_is_transposed(tile->layout) && !it->is_packed) pack_queries(f, here->section, it);
                tile->terms = terms, tile->prefetch = &plan;
                rows[live] = here->split > 0 ? &it->split : &it->rows;
                if (live++ > 0) continue;
                if (!planned) plan_prefetch(f, here, next, after, count, kv, &plan);
                planned = true;
                if (!unpacked) plan_bias(f, it, next, after, &plan);
            }
            if (live == 0) continue;
            if (unpacked)
                (here->section->shape.widens_rows ? base->kv : base->kv_rows)
                    ->step_unpacked(rows, some, live);
            else
                base->arithmetic->step(rows[0], some);
            if (f->taker) take_weights(f->taker, first, keys, rows, some, live);
            const am_status status = am_checkpoint(team);
            if (status != AM_OK) return status;
        }
    }
    return AM_OK;
}

/* Takes an item over the keys of a split, several tiles in a step. Which ones share a step follows from their
 * places in the section: tiles that the item does not see alter no sum. */
static am_status advance_in_steps(const forward *f, item *it, const position *here, const position *next,
                                  am_kv_workspace *kv, am_team *team)
{
    const am_attn_base *base = &f->base;
    const ptrdiff_t most = f->schedule.step_tiles, first = here->section->section.tiles.begin;
    const am_flash_rows *rows = here->split > 0 ? &it->split : &it->rows;
    const tile_order order = tile_order_of(f, here);
    am_prefetch_plan plans[AM_STEP_TILES];
    am_flash_tile tiles[AM_STEP_TILES];
    am_status status = AM_OK;
    ptrdiff_t count = 0;
    for (ptrdiff_t index = order.tiles.begin; status == AM_OK && index < order.tiles.end; index++) {
        am_logit_scratch scratch = it->terms;
        am_logit_terms terms;
        scratch.live += count * AM_FLASH_ROWS;
        if (am_find_logit_terms(base, &it->at, am_range_at(&f->sections.tiles, index), &scratch, &terms)) {
            am_kv_begin_tile(kv, &it->at, index);
            am_kv_tile(kv, &it->at, terms.all_keys, &tiles[count]);
            plan_prefetch(f, here, next,
                          tile_after(f, here, next, &order, index - order.tiles.begin + most - 1), 1, kv,
                          &plans[count]);
            plans[count].steps = am_ceil_div(rows->rows, AM_STEP_ROWS);
            tiles[count].terms = terms, tiles[count].prefetch = &plans[count];
            count++;
        }
        if (count == 0 || ((index + 1 - first) % most > 0 && index + 1 < order.tiles.end)) continue;
        base->arithmetic->steps(rows, tiles, count);
        count = 0;
        status = am_checkpoint(team);
    }
    return status;
}

/* Takes items in lockstep over their keys from a position on, and writes their results. `next`: what this
 * thread may begin after them. */
static am_status run_items(const forward *f, const workspace *w, am_task_items task, position here,
                           const position *next, am_kv_workspace *kv, am_team *team)
{
    const am_scheduled *g = here.section;
    const bool are_tasks = am_splits_are_tasks(&f->schedule, g);
    item items[AM_MOST_ITEMS];
    for (ptrdiff_t i = 0; i < task.count; i++) {
        make_item(f, g, w, task, i, &items[i]);
        load_queries(f, g, &items[i], kv->row);
        am_begin_logits(&f->base, &items[i].at, &items[i].terms);
    }
    const ptrdiff_t splits = am_splits_of(g, here.tiles),
                    end = are_tasks ? am_min(task.split + 1, splits) : splits;
    for (; here.split < end; here.split++) {
        position then = here;
        then.split++;
        for (item *it = items; it < items + task.count; it++) {
            const am_flash_rows *rows = here.split > 0 ? &it->split : &it->rows;
            am_clear_rows(&f->base, rows);
            if (f->taker) f->taker->begin(f->taker->arg, &it->at, rows);
        }
        const position *after = then.split < end ? &then : next;
        am_status status = am_takes_steps(&f->schedule, g)
                               ? advance_in_steps(f, items, &here, after, kv, team)
                               : advance_items(f, items, task.count, &here, after, kv, team);
        if (status != AM_OK) return status;
        for (item *it = items; !are_tasks && here.split > 0 && it < items + task.count; it++)
            f->base.arithmetic->merge(&it->rows, &it->split);
    }
    for (item *it = items; !are_tasks && it < items + task.count; it++)
        am_write_rows(&f->base, f->sinks, &it->at, &it->rows, kv->row);
    return AM_OK;
}

/* --- Tasks --- */

static position position_of(const forward *f, const am_scheduled *g, ptrdiff_t index, ptrdiff_t split)
{
    const am_attn_place at = am_item_place(&f->base, &f->sections, g, index);
    return (position){.section = g,
                      .at = at,
                      .tiles = am_item_tiles(&f->base, &f->sections, g, &at),
                      .split = am_splits_are_tasks(&f->schedule, g) ? split : 0};
}

/* The first block of a task. */
static position task_begin(const forward *f, ptrdiff_t task)
{
    const am_scheduled *g = am_scheduled_of(&f->schedule, task);
    const am_task_items items = am_items_of(g, task);
    return position_of(f, g, items.first, items.split);
}

static am_status blocks_task(void *arg, ptrdiff_t index, am_team *team)
{
    const forward *f = arg;
    index += f->wave.first_task;
    const ptrdiff_t task = am_task_at(&f->schedule, index);
    const am_scheduled *g = am_scheduled_of(&f->schedule, task);
    am_task_items some = am_items_of(g, task);
    const ptrdiff_t end = some.first + some.count, lockstep = am_lockstep(g);
    const workspace *w = am_workspace(&f->workspaces);
    am_kv_workspace kv = w->kv;
    kv.section = g;
    am_status status = AM_OK;
    position here = position_of(f, g, some.first, some.split);
    for (; status == AM_OK && some.first < end; some.first += lockstep) {
        some.count = am_min(lockstep, end - some.first);
        const ptrdiff_t then = some.first + some.count;
        const position next =
            then < end ? position_of(f, g, then, some.split)
                       : task_begin(f, am_task_at(&f->schedule, am_min(index + 1, f->schedule.tasks - 1)));
        status = run_items(f, w, some, here, &next, &kv, team);
        here = next;
    }
    return status;
}

/* Merges the splits of the items of a task into the first one, and writes their results. */
static am_status merge_task(void *arg, ptrdiff_t task, am_team *team)
{
    const forward *f = arg;
    const am_scheduled *g = am_scheduled_of(&f->schedule, task);
    const am_task_items some = am_items_of(g, task);
    if (!am_splits_are_tasks(&f->schedule, g) || some.split > 0) return AM_OK;
    const workspace *w = am_workspace(&f->workspaces);
    for (ptrdiff_t index = some.first; index < some.first + some.count; index++) {
        const am_attn_place at = am_item_place(&f->base, &f->sections, g, index);
        am_flash_rows whole = {0}, other = {0};
        set_rows(f, g, partial_of(f, g, index, 0), at.rows, &whole);
        const ptrdiff_t splits = am_splits_of(g, am_item_tiles(&f->base, &f->sections, g, &at));
        for (ptrdiff_t split = 1; split < splits; split++) {
            set_rows(f, g, partial_of(f, g, index, split), at.rows, &other);
            f->base.arithmetic->merge(&whole, &other);
        }
        am_write_rows(&f->base, f->sinks, &at, &whole, w->kv.row);
    }
    return am_checkpoint(team);
}

static am_status run_waves(const am_context *context, forward *f)
{
    am_status status = AM_OK;
    for (ptrdiff_t task = 0; status == AM_OK && task < f->schedule.tasks; task += f->wave.tasks) {
        f->wave = am_next_wave(&f->schedule, &f->base, task);
        am_shared_tiles_begin(&f->kv.shared, &f->wave);
        /* Threads take different heads, so that two seldom need the same shared tile first. */
        const ptrdiff_t row_tasks = f->wave.row_tasks;
        status = am_parallel_rows(context, f->wave.tasks / row_tasks, row_tasks, blocks_task, f);
    }
    if (status == AM_OK && f->partials) status = am_parallel(context, f->schedule.tasks, 1, merge_task, f);
    return status;
}

/* The most shared tiles of a wave. */
static ptrdiff_t most_shared(const forward *f)
{
    ptrdiff_t most = 0, task = 0;
    while (f->schedule.shared_tiles > 0 && task < f->schedule.tasks) {
        const am_wave wave = am_next_wave(&f->schedule, &f->base, task);
        most = am_max(most, wave.shared);
        task += wave.tasks;
    }
    return most;
}

ptrdiff_t am_attn_scratch(const am_attn_base *base, const am_schedule *schedule, int threads)
{
    const forward f = {.base = *base, .schedule = *schedule, .kv = am_kv_of(base, NULL, schedule)};
    workspace unused;
    return threads * lay_out(&f, NULL, &unused) + schedule->partial_bytes +
           most_shared(&f) * (schedule->k_bytes + schedule->v_bytes);
}

static am_status compute(const am_context *context, forward *f)
{
    am_context own = *context;
    own.threads = am_threads_for(context, am_time_alone(f->base.attn, &f->sections));
    context = &own;
    am_status status = am_schedule_make(&f->schedule, &f->base, &f->sections, context->threads);
    if (status == AM_OK) status = am_sum_sinks(context, &f->base, &f->sinks);
    f->kv = am_kv_of(&f->base, &f->sections, &f->schedule);
    if (status == AM_OK)
        status = am_workspaces_make(&f->workspaces, context->threads, lay_out, f, sizeof(workspace));
    if (status == AM_OK) status = am_shared_tiles_make(&f->kv.shared, &f->schedule, most_shared(f));
    if (status == AM_OK && f->schedule.partial_bytes > 0) {
        f->partials = am_alloc_aligned(f->schedule.partial_bytes);
        if (!f->partials) status = AM_NO_MEMORY;
    }
    if (status == AM_OK) status = run_waves(context, f);
    am_free_aligned(f->partials, f->schedule.partial_bytes);
    am_shared_tiles_free(&f->kv.shared);
    am_workspaces_free(&f->workspaces);
    free(f->sinks);
    am_schedule_free(&f->schedule);
    return status;
}

am_status am_attn_forward_sections(const am_context *context, const am_attn_base *base,
                                   const am_sections *sections, const am_weights_taker *taker)
{
    forward f = {.base = *base, .sections = *sections, .taker = taker};
    return compute(context, &f);
}

am_status am_attn_forward(const am_context *context, const am_attn *attn)
{
    /* Tiles have room for the scales of both sides, or of none. */
    assert(am_kv_is_scaled(attn->k.type) == (attn->k_scales.array.data != NULL));
    assert(am_kv_is_scaled(attn->v.type) == (attn->v_scales.array.data != NULL));
    if (attn->batch == 0 || attn->heads == 0 || attn->queries == 0) return AM_OK;
    if (attn->value_dim == 0 && !attn->lse.data) return AM_OK;
    if (am_is_too_deep(attn)) return AM_NO_MEMORY;
    am_status status = am_mask_prepare(context, attn->mask);
    if (status != AM_OK) return status;
    if (context->kernels->plain) return am_plain_forward(context, attn);
    forward f = {.base = am_attn_base_of(context, attn)};
    status = am_sections_make(&f.sections, attn->mask, true);
    if (status == AM_OK) status = compute(context, &f);
    am_sections_free(&f.sections);
    return status;
}
