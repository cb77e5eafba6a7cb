/* flash.c – attention forward: takes each block of query rows over its keys.
 *
 * A block is up to 64 query rows of one head, or where queries are few, those of several heads that share
 * keys. It steps over tiles of up to 64 keys. Blocks and tiles begin where sequences do, if the mask has any,
 * and a sequence of up to 64 queries is a batch row of its own. How tiles are read follows from the shapes:
 *
 *  - Blocks that read the same keys share packed tiles: the first that needs a tile packs it into panels.
 *  - If each block sees few tiles, the items of a task are neighbouring blocks, and the task packs the
 *    tiles for itself, in memory that stays in the cache.
 *  - If only a few blocks read the keys, they are the items of one task, which packs each tile for itself and
 *    takes all items over it in lockstep.
 *  - A block of few rows reads keys and values unpacked, where they lie. So does a block with exclusive keys
 *    whose rows fill vectors: its queries are packed instead, and its steps transposed.
 *
 * Blocks that share nothing are items of one task if their heads lie side by side, so that a task reads
 * memory in order. Where blocks are too few to keep many threads busy, the keys of each are split, and the
 * accumulators of the splits are merged. */
#include "core/flash.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/convert.h"
#include "core/flash_plan.h"

enum { TILE = AM_FLASH_TILE };

typedef am_flash_plan plan;
typedef am_flash_place place;

/* The memory of a block; arrays of the arithmetic type. */
typedef struct {
    char *q, *q_packed, *logits, *bias, *k, *v, *row; /* row: scratch for a row of keys, values or results */
    char *accumulators;                               /* out, ref_max, sum, row_max */
    uint64_t *live, *kept, *row_keys;                 /* the last two for dropout */
} workspace;

/* The state of a shared tile. The first block that needs it packs it; a block that needs it meanwhile packs
 * for itself. */
typedef enum { UNPACKED, IN_WORK, PACKED, PACKED_FINITE } tile_state;

/* The tiles that a task has packed for itself, -1 for none, and whether v is finite. */
typedef struct {
    ptrdiff_t tile[AM_MOST_LOCAL_TILES];
    bool finite[AM_MOST_LOCAL_TILES];
} local_tiles;

/* An item of a task: a block and its part of the workspace. */
typedef struct {
    place at;
    workspace s;
    am_flash_rows rows;
    local_tiles *local;
} item;

/* Out, ref_max, sum and row_max of a block lie side by side. */
static am_flash_rows accumulators(const plan *p, char *at, ptrdiff_t rows)
{
    ptrdiff_t out_bytes = p->most_rows * p->out_depth * p->base.size,
              stat_bytes = p->most_rows * p->base.size;
    return (am_flash_rows){
        .rows = rows,
        .depth = p->lanes,
        .out_depth = p->out_depth,
        .out = at,
        .ref_max = at + out_bytes,
        .sum = at + out_bytes + stat_bytes,
        .row_max = p->base.flash->normalize ? NULL : at + out_bytes + 2 * stat_bytes,
        .cap = p->base.flash->cap,
        .factor = p->bf16x2 ? p->factor : 1,
        .unit = p->base.unit,
    };
}

/* Lays out the workspace of one thread from `memory` on, which may be NULL; returns its length. */
static ptrdiff_t lay_out(const plan *p, char *memory, workspace *s)
{
    const am_flash *f = p->base.flash;
    ptrdiff_t used = 0;
    s->q = am_take(memory, &used, p->lockstep * p->most_rows * f->depth * p->base.size);
    s->q_packed = am_take(memory, &used, p->transposed ? p->lockstep * p->k_bytes : 0);
    s->logits = am_take(memory, &used, AM_FLASH_ROWS * TILE * p->base.size);
    s->bias = am_take(memory, &used, f->bias ? AM_FLASH_ROWS * TILE * p->base.size : 0);
    s->row = am_take(memory, &used, am_row_scratch(TILE, am_max(f->depth, f->value_depth)));
    s->k =
        am_take(memory, &used,
                p->unpacked || p->transposed ? am_row_scratch(TILE, f->depth) : p->local_count * p->k_bytes);
    s->v = am_take(memory, &used,
                   p->unpacked ? am_row_scratch(TILE, f->value_depth) : p->local_count * p->v_bytes);
    s->accumulators = am_take(memory, &used, p->lockstep * p->partial_bytes);
    s->live = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * (ptrdiff_t)sizeof(uint64_t));
    s->kept = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * (ptrdiff_t)sizeof(uint64_t));
    s->row_keys =
        (uint64_t *)am_take(memory, &used, p->lockstep * p->most_rows * (ptrdiff_t)sizeof(uint64_t));
    return used;
}

/* The part of the i-th item in lockstep. If unpacked, all items take one step, and have at most as many rows
 * as one full block; else they step one after the other, each with the whole memory for a tile. */
static workspace part_of(const plan *p, workspace s, ptrdiff_t i)
{
    ptrdiff_t row = i * p->most_rows;
    s.q += row * p->lanes * p->base.size;
    s.q_packed += p->transposed ? i * p->k_bytes : 0;
    s.accumulators += i * p->partial_bytes;
    s.row_keys += row;
    if (!p->unpacked) return s;
    s.logits += row * TILE * p->base.size;
    s.bias += p->base.flash->bias ? row * TILE * p->base.size : 0;
    s.live += row, s.kept += row;
    return s;
}

/* --- Numbers in and out --- */

/* Returns rows of keys or values where they lie if they are plain, else copies them to `scratch` as numbers
 * of the arithmetic type; and the kernels for them. */
static const char *read_tile(const plan *p, const am_tokens *t, bool plain, const place *at, ptrdiff_t k,
                             ptrdiff_t rows, ptrdiff_t count, char *scratch, ptrdiff_t *step,
                             const am_kv_format_kernels **format)
{
    const char *src = am_token(t, at->b, at->kv_head, k);
    *format = am_kv_format_of(&p->base, plain ? t->type : p->base.type);
    if (!plain) return am_read_rows(&p->base, scratch, src, t->token, t->element, t->type, rows, count, step);
    *step = t->token / (ptrdiff_t)am_size_of(t->type);
    return src;
}

static void pack_keys(const plan *p, const place *at, ptrdiff_t k, ptrdiff_t rows, char *scratch, char *to)
{
    const am_tokens *keys = &p->base.flash->k;
    ptrdiff_t depth = p->base.flash->depth, step;
    const am_kv_format_kernels *format = &p->base.kernels->kv_formats[AM_KV_FORMAT_OWN];
    const char *src =
        p->bf16x2 ? am_read_bf16x2(keys, at->b, at->kv_head, k, rows, depth, scratch, &step)
                  : read_tile(p, keys, am_is_plain(keys), at, k, rows, depth, scratch, &step, &format);
    format->pack_keys(to, src, step, rows, p->lanes, p->k_factor);
}

/* Returns whether they are finite. */
static bool pack_values(const plan *p, const place *at, ptrdiff_t k, ptrdiff_t rows, char *scratch, char *to)
{
    const am_tokens *values = &p->base.flash->v;
    ptrdiff_t depth = p->base.flash->value_depth, step;
    if (p->bf16x2) {
        const char *src = am_read_bf16x2(values, at->b, at->kv_head, k, rows, depth, scratch, &step);
        return p->base.kernels->pack_values_bf16x2(to, src, 2 * step, rows, depth);
    }
    const am_kv_format_kernels *format;
    const char *src = read_tile(p, values, am_is_plain(values), at, k, rows, depth, scratch, &step, &format);
    return format->pack_values(to, src, step, rows, depth);
}

/* Returns keys of a whole tile where they lie, if the kernels can load each of their lanes by itself, else
 * copies them to `scratch`. */
static const char *read_keys(const plan *p, const place *at, ptrdiff_t k, char *scratch, ptrdiff_t *step)
{
    const am_tokens *keys = &p->base.flash->k;
    const ptrdiff_t depth = p->base.flash->depth;
    const char *src = am_token(keys, at->b, at->kv_head, k);
    if (!p->bf16x2)
        return am_read_rows(&p->base, scratch, src, keys->token, keys->element, keys->type, TILE, depth,
                            step);
    if (am_is_aligned_bf16x2(keys, depth))
        return am_read_bf16x2(keys, at->b, at->kv_head, k, TILE, depth, scratch, step);
    am_copy_bf16x2(scratch, src, keys->token, keys->element, TILE, depth);
    *step = p->lanes;
    return scratch;
}

/* The `part`-th of `parts` of some rows, to prefetch. */
static am_prefetch_rows prefetch_part(const am_tokens *t, ptrdiff_t b, ptrdiff_t head, ptrdiff_t heads,
                                      ptrdiff_t token, ptrdiff_t rows, ptrdiff_t count, ptrdiff_t part,
                                      ptrdiff_t parts)
{
    if (rows <= 0) return (am_prefetch_rows){0};
    ptrdiff_t begin = rows * part / parts, end = rows * (part + 1) / parts;
    return am_prefetch_tokens(t, b, head, heads, token + begin, end - begin, count);
}

/* The tiles that a block sees in its split. */
static am_range tiles_of(const plan *p, const place *at)
{
    const am_flash_row *row = &p->rows[at->row];
    const am_range tiles = p->exclusive ? row->tiles : am_tiles_of(&p->base, &p->keys, at);
    const ptrdiff_t begin = tiles.begin + row->split * row->split_tiles;
    return (am_range){begin, am_min(tiles.end, begin + row->split_tiles)};
}

/* The index of a tile among those that the queries of all heads and rows see. */
static ptrdiff_t tile_index(const plan *p, const place *at, ptrdiff_t tile)
{
    const ptrdiff_t head = at->b * p->base.flash->kv_heads + at->kv_head;
    return head * p->seen + tile - p->rows[at->row].tiles.begin;
}

/* The memory of a shared tile; NULL if it is not in the current wave. */
static char *shared_tile(const plan *p, const place *at, ptrdiff_t tile, atomic_uchar **state)
{
    ptrdiff_t index = tile_index(p, at, tile) - p->first * p->seen;
    if (!p->packed || index >= p->wave * p->seen) return NULL;
    *state = &p->states[index];
    return p->packed + index * (p->k_bytes + p->v_bytes);
}

/* What the step over a tile prefetches: the next tile of the same blocks, or after the last one what the next
 * blocks of this thread need. The blocks take the tile in `parts`, one after the other; each prefetches its
 * part, and the bias of its first block, `one`. */
static void choose_prefetch(const plan *p, const item *items, const item *one, const place *next,
                            ptrdiff_t index, ptrdiff_t end, ptrdiff_t part, ptrdiff_t parts,
                            am_flash_tile *tile)
{
    const am_flash *f = p->base.flash;
    const place *at = &items->at;
    const ptrdiff_t kv_heads = p->head_blocks > 1 ? 1 : p->lockstep,
                    heads = am_min(p->lockstep * p->block_heads, kv_heads * p->base.group);
    const bool last = index + 1 >= end;
    const place *where = last ? next : at;
    const am_range tiles = last ? tiles_of(p, next) : (am_range){index + 1, end};
    index = tiles.begin;
    const am_range keys = tiles.begin < tiles.end ? am_range_at(&p->keys, where->b, index) : (am_range){0, 0};
    const bool any = keys.begin < keys.end;
    atomic_uchar *state;
    char *to = any ? shared_tile(p, where, index, &state) : NULL;
    const bool there = to ? atomic_load_explicit(state, memory_order_relaxed) >= PACKED
                          : items->local->tile[index % p->local_count] == tile_index(p, where, index);
    tile->prefetch[AM_PREFETCH_BIAS] = am_prefetch_bias(&p->base, last ? next : &one->at, keys);
    if (any && !there) {
        const ptrdiff_t rows = keys.end - keys.begin, bytes = p->k_bytes + p->v_bytes;
        tile->prefetch[AM_PREFETCH_K] =
            prefetch_part(&f->k, where->b, where->kv_head, kv_heads, keys.begin, rows, f->depth, part, parts);
        tile->prefetch[AM_PREFETCH_V] = prefetch_part(&f->v, where->b, where->kv_head, kv_heads, keys.begin,
                                                      rows, f->value_depth, part, parts);
        if (to) tile->prefetch[AM_PREFETCH_PACKED] = (am_prefetch_rows){to, bytes, bytes, 1};
    }
    if (!last || p->splits > 1) return;
    tile->prefetch[AM_PREFETCH_Q] =
        prefetch_part(&f->q, next->b, next->head, heads, next->q, next->queries, f->depth, part, parts);
    tile->prefetch[AM_PREFETCH_OUT] =
        prefetch_part(&f->out, at->b, at->head, heads, at->q, at->queries, f->value_depth, part, parts);
}

static void begin_block(const plan *p, const item *it)
{
    const am_flash *f = p->base.flash;
    const place *at = &it->at;
    const am_flash_rows *block = &it->rows;
    const ptrdiff_t row_bytes = p->lanes * p->base.size;
    for (ptrdiff_t h = 0, row = 0; h < at->heads; h++, row += at->queries) {
        const char *src = am_token(&f->q, at->b, at->head + h, at->q);
        char *to = it->s.q + row * row_bytes;
        for (ptrdiff_t r = row; r < row + at->queries; r++) {
            am_set_number(&p->base, block->ref_max, r, -INFINITY);
            if (block->row_max) am_set_number(&p->base, block->row_max, r, -INFINITY);
            am_set_number(&p->base, block->sum, r, 0);
            if (p->base.threshold)
                it->s.row_keys[r] = am_row_key(f->seed, at->b, at->head + h, at->q + r - row);
        }
        if (p->queries_direct) continue;
        if (p->bf16x2) {
            am_copy_bf16x2(to, src, f->q.token, f->q.element, at->queries, f->depth);
            continue;
        }
        ptrdiff_t step;
        src = am_read_rows(&p->base, it->s.row, src, f->q.token, f->q.element, f->q.type, at->queries,
                           f->depth, &step);
        for (ptrdiff_t r = 0; r < at->queries; r++, to += row_bytes, src += step * p->base.size)
            p->base.kernels->scale(to, src, p->q_factor, f->depth, false);
    }
    if (p->transposed)
        p->base.kernels->kv_formats[AM_KV_FORMAT_OWN].pack_keys(it->s.q_packed, it->s.q, p->lanes, at->rows,
                                                                p->lanes, 1);
    memset(block->out, 0, (size_t)(at->rows * p->out_depth * p->base.size));
}

/* --- Blocks --- */

/* The block, and its split, of an item. */
static place place_of(const plan *p, ptrdiff_t index)
{
    const am_flash *f = p->base.flash;
    place at = {0};
    ptrdiff_t block = p->q_blocks - 1 - index % p->q_blocks; /* longest first under a causal mask */
    index /= p->q_blocks;
    ptrdiff_t head_block = index % p->head_blocks;
    index /= p->head_blocks;
    at.kv_head = index % f->kv_heads; /* heads lie side by side: the pages of the next are still in the TLB */
    index /= f->kv_heads;
    at.row = index;
    at.b = p->rows[index].b;
    at.head = at.kv_head * p->base.group + head_block * p->block_heads;
    at.heads = am_min(p->block_heads, p->base.group - head_block * p->block_heads);
    at.block = p->exclusive ? p->rows[index].part : block;
    const am_range queries = am_range_at(&p->queries, at.b, at.block);
    at.q = queries.begin;
    at.queries = queries.end - queries.begin;
    at.rows = at.heads * at.queries;
    return at;
}

/* Writes the lse of one row, and returns the factor that makes its result of its accumulator. Sinks enter
 * here. */
static double end_row(const plan *p, const place *at, const am_flash_rows *block, ptrdiff_t r,
                      ptrdiff_t lse_index)
{
    const am_flash *f = p->base.flash;
    /* In units of 1, as sinks are: in units of ln 2 a sink might overflow. */
    const double unit = p->base.unit == 1 ? AM_LN_2 : 1,
                 ref_max = unit * am_number(&p->base, block->ref_max, r),
                 live = am_number(&p->base, block->sum, r);
    double highest = ref_max, sum = live,
           row_max = block->row_max ? unit * am_number(&p->base, block->row_max, r) : 0;
    if (p->sinks) {
        const am_sink_sum *sinks = &p->sinks[am_head_of(at, r)];
        highest = fmax(ref_max, sinks->highest), row_max = fmax(row_max, sinks->highest);
        sum = live * am_power(AM_LOG2_E, ref_max, highest) +
              sinks->sum * am_power(AM_LOG2_E, sinks->highest, highest);
    }
    if (f->lse) am_set_number(&p->base, f->lse, lse_index, sum == 0 ? -INFINITY : highest + log(sum));
    if (live == 0) return 0; /* no live pair: out is zero already */
    /* A NaN is of a logit whose P may have been dropped out. */
    double factor = f->normalize  ? am_power(AM_LOG2_E, ref_max, highest) / sum
                    : isnan(live) ? live
                                  : am_power(AM_LOG2_E, ref_max, row_max);
    return f->dropout > 0 ? factor / (1 - f->dropout) : factor;
}

/* Writes the results of a block: out and lse. */
static void write_rows(const plan *p, const place *at, const am_flash_rows *block, char *scratch)
{
    const am_flash *f = p->base.flash;
    const am_tokens *out = &f->out;
    ptrdiff_t size = (ptrdiff_t)am_size_of(out->type);
    const bool direct = out->element == size;
    am_flash_write *write = am_kv_format_of(&p->base, out->type)->write;
    char *row = block->out;
    for (ptrdiff_t h = 0, r = 0; h < at->heads; h++) {
        char *dst = out->data + at->b * out->batch + (at->head + h) * out->head + at->q * out->token;
        ptrdiff_t lse_index = (at->b * f->heads + at->head + h) * f->queries + at->q;
        for (ptrdiff_t q = 0; q < at->queries; q++, r++, dst += out->token, lse_index++) {
            double factor = end_row(p, at, block, r, lse_index);
            write(direct ? dst : scratch, row, factor, f->value_depth);
            if (!direct) am_copy_2d(dst, 0, out->element, scratch, 0, size, 1, f->value_depth, (size_t)size);
            row += p->out_depth * p->base.size;
        }
    }
}

/* Finds a shared tile, and packs it if no other task has begun to. False if tiles are not shared, or another
 * task is packing it. */
static bool find_shared(const plan *p, const place *at, ptrdiff_t index, char *scratch, am_flash_tile *tile)
{
    const am_range keys = am_range_at(&p->keys, at->b, index);
    const ptrdiff_t k = keys.begin, rows = keys.end - k;
    atomic_uchar *state;
    char *shared = shared_tile(p, at, index, &state);
    if (!shared) return false;
    tile->k = shared, tile->v = shared + p->k_bytes;
    unsigned char found = atomic_load_explicit(state, memory_order_acquire);
    if (found == UNPACKED && atomic_compare_exchange_strong(state, &found, IN_WORK)) {
        pack_keys(p, at, k, rows, scratch, shared);
        found = pack_values(p, at, k, rows, scratch, shared + p->k_bytes) ? PACKED_FINITE : PACKED;
        atomic_store_explicit(state, found, memory_order_release);
    }
    tile->finite = found == PACKED_FINITE;
    return found >= PACKED;
}

/* Whether the block has live pairs among the keys of a tile; if so, fills in the tile, and the step for it if
 * it is unpacked. */
static bool find_tile(const plan *p, const item *it, ptrdiff_t index, am_flash_tile *tile,
                      am_flash_step_unpacked **step_unpacked)
{
    const am_flash *f = p->base.flash;
    const place *at = &it->at;
    const workspace *s = &it->s;
    const am_range keys = am_range_at(&p->keys, at->b, index);
    const ptrdiff_t k = keys.begin, columns = keys.end - k;
    am_tile kind = am_find_live(&p->base, at, k, columns, s->live);
    if (kind != AM_DEAD && f->bias)
        kind = am_read_bias(&p->base, at, k, columns, s->row, s->bias, s->live, kind);
    if (kind == AM_DEAD) return false;
    *tile = (am_flash_tile){.live = kind == AM_FULL ? NULL : s->live, .bias = f->bias ? s->bias : NULL};
    if (p->unpacked && p->bf16x2) {
        tile->k = am_read_bf16x2(&f->k, at->b, at->kv_head, k, columns, f->depth, s->k, &tile->k_step);
        tile->v = am_read_bf16x2(&f->v, at->b, at->kv_head, k, columns, f->value_depth, s->v, &tile->v_step);
        tile->value_depth = am_ceil_div(f->value_depth, 2);
        *step_unpacked = p->base.kernels->step_unpacked_bf16x2;
    } else if (p->unpacked) {
        const am_kv_format_kernels *format;
        bool plain = am_is_plain(&f->k) && am_is_plain(&f->v);
        tile->k = read_tile(p, &f->k, plain, at, k, columns, f->depth, s->k, &tile->k_step, &format);
        tile->v = read_tile(p, &f->v, plain, at, k, columns, f->value_depth, s->v, &tile->v_step, &format);
        tile->value_depth = f->value_depth;
        *step_unpacked = format->step_unpacked;
    } else if (!find_shared(p, at, index, s->row, tile)) {
        const ptrdiff_t among_all = tile_index(p, at, index), local = index % p->local_count;
        char *local_k = s->k + local * p->k_bytes, *local_v = s->v + local * p->v_bytes;
        const bool full = kind == AM_FULL, there = p->values_unpacked && full,
                   known = it->local->tile[local] == among_all;
        tile->transposed = p->transposed && full && columns == TILE;
        if (!known && !tile->transposed) pack_keys(p, at, k, columns, s->row, local_k);
        if (!known && !there) it->local->finite[local] = pack_values(p, at, k, columns, s->row, local_v);
        it->local->tile[local] = there || tile->transposed ? -1 : among_all;
        tile->k = tile->transposed ? read_keys(p, at, k, local_k, &tile->k_step) : local_k;
        tile->v = there ? am_token(&f->v, at->b, at->kv_head, k) : local_v;
        tile->v_step = there ? f->v.token / p->base.size : 0;
        tile->finite = it->local->finite[local];
    }
    if (p->base.threshold) {
        for (ptrdiff_t r = 0; r < at->rows; r++)
            s->kept[r] = p->base.all_kernels->keep_bits(s->row_keys[r], (uint32_t)k, p->base.threshold);
        tile->kept = s->kept;
    }
    return true;
}

/* Takes items in lockstep over their keys. `next`: the first block that this thread may begin after them. */
static am_status advance_items(const plan *p, const item *items, ptrdiff_t count, const place *next,
                               am_team *team)
{
    ptrdiff_t begin = PTRDIFF_MAX, end = 0;
    for (const item *it = items; it < items + count; it++) {
        const am_range tiles = tiles_of(p, &it->at);
        if (tiles.begin >= tiles.end) continue;
        begin = am_min(begin, tiles.begin);
        end = am_max(end, tiles.end);
    }
    am_flash_step *step = p->bf16x2 ? p->base.kernels->bf16x2.step : p->base.kernels->step;
    const ptrdiff_t per_step = p->unpacked ? count : 1, parts = count / per_step;
    for (ptrdiff_t index = begin; index < end; index++) {
        for (ptrdiff_t part = 0; part < parts; part++) {
            const item *first = items + part * per_step;
            am_flash_rows rows[AM_MOST_ITEMS];
            am_flash_tile tiles[AM_MOST_ITEMS];
            am_flash_step_unpacked *step_unpacked = NULL;
            ptrdiff_t live = 0;
            for (const item *it = first; it < first + per_step; it++) {
                if (!find_tile(p, it, index, &tiles[live], &step_unpacked)) continue;
                if (live == 0)
                    choose_prefetch(p, items, it, next, index, end, part, parts, tiles); /* for all */
                rows[live++] = it->rows;
            }
            if (live == 0) continue;
            if (step_unpacked)
                step_unpacked(rows, tiles, live);
            else
                step(rows, tiles);
            am_status status = am_checkpoint(team);
            if (status != AM_OK) return status;
        }
    }
    return AM_OK;
}

/* The accumulators of a block: those of its splits lie side by side. */
static char *partial_of(const plan *p, ptrdiff_t index)
{
    const am_flash_row *row = &p->rows[index / p->row_blocks];
    const ptrdiff_t first = (index / p->row_blocks - row->split) * p->row_blocks,
                    partial = first + index % p->row_blocks * row->splits + row->split;
    return p->partials + partial * p->partial_bytes;
}

/* The first block of a task. */
static ptrdiff_t first_of(const plan *p, ptrdiff_t task)
{
    ptrdiff_t begin = p->first * p->head_blocks * p->q_blocks;
    return begin + task / p->group_tasks * p->item_group + task % p->group_tasks * p->task_items;
}

static am_status block_task(void *arg, ptrdiff_t task, am_team *team)
{
    const plan *p = arg;
    ptrdiff_t begin = first_of(p, task),
              end = am_min(begin + p->task_items, (begin / p->item_group + 1) * p->item_group),
              after = am_min(end, p->row_count * p->row_blocks - (end - begin));
    char *memory = am_workspace_acquire(&p->workspaces);
    workspace s;
    lay_out(p, memory, &s);
    item items[AM_MOST_ITEMS];
    local_tiles local = {0};
    for (int i = 0; i < AM_MOST_LOCAL_TILES; i++) local.tile[i] = -1;
    am_status status = AM_OK;
    for (; status == AM_OK && begin < end; begin += p->lockstep) {
        if (place_of(p, begin).queries == 0) continue; /* behind the last block of its batch row */
        ptrdiff_t count = am_min(p->lockstep, end - begin);
        for (ptrdiff_t i = 0; i < count; i++) {
            item *it = &items[i];
            *it = (item){.at = place_of(p, begin + i), .s = part_of(p, s, i), .local = &local};
            it->rows =
                accumulators(p, p->partials ? partial_of(p, begin + i) : it->s.accumulators, it->at.rows);
            it->rows.q = it->s.q, it->rows.q_step = p->lanes, it->rows.logits = it->s.logits;
            it->rows.q_packed = p->transposed ? it->s.q_packed : NULL;
            if (p->queries_direct) {
                it->rows.q = am_token(&p->base.flash->q, it->at.b, it->at.head, it->at.q);
                it->rows.q_step = p->base.flash->q.token / p->base.size;
            }
            begin_block(p, it);
        }
        const place next = place_of(p, begin + count < end ? begin + count : after);
        status = advance_items(p, items, count, &next, team);
        for (ptrdiff_t i = 0; status == AM_OK && !p->partials && i < count; i++)
            write_rows(p, &items[i].at, &items[i].rows, s.row);
    }
    am_workspace_release(&p->workspaces, memory);
    return status;
}

/* Merges the splits of a block into the first one; does nothing for the other splits. */
static am_status merge_task(void *arg, ptrdiff_t index, am_team *team)
{
    const plan *p = arg;
    const am_flash_row *row = &p->rows[index / p->row_blocks];
    if (row->split > 0) return AM_OK;
    const ptrdiff_t splits = row->splits;
    const place at = place_of(p, index);
    am_flash_rows whole = accumulators(p, partial_of(p, index), at.rows);
    for (ptrdiff_t r = 0; r < at.rows; r++) {
        double ref_max = -INFINITY, row_max = -INFINITY, sum = 0;
        char *out = (char *)whole.out + r * p->out_depth * p->base.size;
        for (ptrdiff_t i = 0; i < splits; i++) {
            am_flash_rows part = accumulators(p, (char *)whole.out + i * p->partial_bytes, at.rows);
            ref_max = fmax(ref_max, am_number(&p->base, part.ref_max, r));
            if (part.row_max) row_max = fmax(row_max, am_number(&p->base, part.row_max, r));
        }
        for (ptrdiff_t i = 0; i < splits; i++) {
            am_flash_rows part = accumulators(p, (char *)whole.out + i * p->partial_bytes, at.rows);
            double part_ref_max = am_number(&p->base, part.ref_max, r),
                   part_sum = am_number(&p->base, part.sum, r);
            /* The sum of a NaN row is NaN, though its ref_max is -INFINITY: no comparison with NaN is true.
             */
            double factor = part_sum == 0 ? 0 : am_power(p->base.unit, part_ref_max, ref_max);
            sum += part_sum == 0 ? 0 : part_sum * factor;
            char *from = (char *)part.out + r * p->out_depth * p->base.size;
            if (i == 0 || part_sum != 0)
                p->base.kernels->scale(out, from, factor, p->base.flash->value_depth, i > 0);
        }
        am_set_number(&p->base, whole.ref_max, r, ref_max);
        if (whole.row_max) am_set_number(&p->base, whole.row_max, r, row_max);
        am_set_number(&p->base, whole.sum, r, sum);
    }
    char *memory = am_workspace_acquire(&p->workspaces);
    write_rows(p, &at, &whole, memory);
    am_workspace_release(&p->workspaces, memory);
    return am_checkpoint(team);
}

/* Computes attention for the queries of a plan. */
static am_status attend(const am_run *run, plan *p)
{
    const am_flash *f = p->base.flash;
    const ptrdiff_t heads = f->batch * f->kv_heads, blocks = am_product(p->row_count, p->row_blocks, 1);
    workspace unused;
    ptrdiff_t partials_bytes = am_product(blocks, p->partial_bytes, 1),
              packed_bytes = am_product(p->wave, p->seen, p->k_bytes + p->v_bytes);
    am_status status = am_workspaces_make(&p->workspaces, run->threads, lay_out(p, NULL, &unused));
    if (status != AM_OK) goto done;
    status = AM_NO_MEMORY;
    if (p->splits > 1) {
        p->partials = am_alloc_aligned(partials_bytes);
        if (!p->partials) goto done;
    }
    if (p->shares_keys) {
        p->packed = am_alloc_aligned(packed_bytes);
        p->states = malloc((size_t)am_max(p->wave * p->seen, 1) * sizeof *p->states);
        if (!p->packed || !p->states) goto done;
    }
    status = AM_OK;
    if (!p->packed) status = am_parallel(run, blocks / p->item_group * p->group_tasks, 1, block_task, p);
    for (; status == AM_OK && p->packed && p->first < heads; p->first += p->wave) {
        p->wave = am_min(p->wave, heads - p->first);
        for (ptrdiff_t i = 0; i < p->wave * p->seen; i++) atomic_init(&p->states[i], UNPACKED);
        /* Threads take different heads, so that two seldom need the same shared tile first. */
        const ptrdiff_t rows = p->splits > 1 ? p->row_count * f->kv_heads : p->wave;
        status = am_parallel_rows(run, rows, p->head_blocks * p->q_blocks, block_task, p);
    }
    if (status == AM_OK && p->splits > 1) status = am_parallel(run, blocks, 1, merge_task, p);
done:
    am_workspaces_free(&p->workspaces);
    am_free_aligned(p->partials, partials_bytes);
    am_free_aligned(p->packed, packed_bytes);
    free(p->states);
    return status;
}

am_status am_flash_forward(const am_run *run, const am_flash *flash)
{
    if (flash->batch == 0 || flash->heads == 0 || flash->queries == 0) return AM_OK;
    if (flash->value_depth == 0 && !flash->lse) return AM_OK;
    if (am_is_too_deep(flash)) return AM_NO_MEMORY;
    const am_flash_base base = am_flash_base_of(run, flash);
    am_ranges queries[AM_QUERY_KINDS] = {0}, keys = {0};
    am_sink_sum *sinks = NULL;
    am_status status = am_ranges_of_queries(queries, flash->mask, base.group);
    if (status == AM_OK) status = am_ranges_make(&keys, flash->mask, AM_KEYS, true);
    if (status == AM_OK) status = am_sum_sinks(run, &base, &sinks);
    for (int kind = 0; status == AM_OK && kind < AM_QUERY_KINDS; kind++) {
        if (queries[kind].count == 0) continue;
        plan p;
        status = am_flash_plan_make(&p, run, flash, &queries[kind], &keys, kind);
        p.sinks = sinks;
        if (status == AM_OK) status = attend(run, &p);
        am_flash_plan_free(&p);
    }
    for (int kind = 0; kind < AM_QUERY_KINDS; kind++) am_ranges_free(&queries[kind]);
    am_ranges_free(&keys);
    free(sinks);
    return status;
}
