/* fill.c – walks over the tiles of a mask to fill arrays, count live pairs, and mark tokens that have
 * one. */
#include "core/runtime/sizes.h"
#include "core/masks/mask.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/arrays/convert.h"
#include "core/masks/terms.h"

enum {
    ROW_COLUMNS = 4096, /* the most columns whose tiles are found before their rows are written */
    ROW_TILES = ROW_COLUMNS / AM_TILE_COLUMNS,
    ROW_MIXED = 16,        /* the most mixed tiles of them, which take up stack */
    APART_BYTES = 1 << 13, /* the most of a row whose elements lie apart */
    MANY_TILES = 1024,     /* between two checkpoints */
};

static ptrdiff_t count_bits(uint64_t bits) { return __builtin_popcountll(bits); }

/* A checkpoint costs too much to be made at every tile. */
static am_status checkpoint_if_due(am_team *team, ptrdiff_t position)
{
    return position / AM_TILE_COLUMNS % MANY_TILES == 0 ? am_checkpoint(team) : AM_OK;
}

/* --- Arrays --- */

typedef struct {
    const am_mask *mask;
    const am_mask_target *target;
    ptrdiff_t blocks; /* of AM_TILE_ROWS queries */
    am_expand_bits *expand;
    uint64_t live, dead; /* repeated to eight bytes */
    bool stream;
} fill_job;

/* Adjacent tiles of one block of queries: the kind of each, and the bits of the mixed ones. */
typedef struct {
    uint8_t kind[ROW_TILES + 1]; /* the last entry differs from every kind, and so ends any span */
    uint64_t bits[ROW_MIXED][AM_TILE_ROWS];
} tile_row;

/* Writes row r of adjacent tiles. A span of full or dead tiles is written at once. A row of a small mask
 * takes 25 ns, so that a call would show. */
static inline __attribute__((always_inline)) void
fill_row(const fill_job *job, char *row, const tile_row *tiles, ptrdiff_t r, ptrdiff_t columns)
{
    const am_mask_target *t = job->target;
    const am_kernels *k = job->mask->kernels;
    for (ptrdiff_t w = 0, mixed = 0; w * AM_TILE_COLUMNS < columns;) {
        ptrdiff_t begin = w * AM_TILE_COLUMNS;
        am_tile kind = tiles->kind[w++];
        if (kind == AM_MIXED) {
            job->expand(row + begin * t->size, tiles->bits[mixed++][r],
                        am_min(AM_TILE_COLUMNS, columns - begin), t->live, t->dead);
            continue;
        }
        while (tiles->kind[w] == kind) w++;
        ptrdiff_t end = am_min(w * AM_TILE_COLUMNS, columns);
        k->masks.fill_bytes(row + begin * t->size, kind == AM_FULL ? job->live : job->dead,
                            (size_t)((end - begin) * t->size), job->stream);
    }
}

/* Writes row r where its elements lie apart. */
static __attribute__((noinline)) void fill_apart(const fill_job *job, char *row, const tile_row *tiles,
                                                 ptrdiff_t r, ptrdiff_t columns)
{
    const am_mask_target *t = job->target;
    uint64_t buffer[APART_BYTES / sizeof(uint64_t)];
    fill_row(job, (char *)buffer, tiles, r, columns);
    am_copy_2d(row, 0, t->array.stride.channel, (const char *)buffer, 0, t->size, 1, columns,
               (size_t)t->size);
}

/* Finds the tiles of a region, or the first of them with as many mixed ones as there is room for. Returns the
 * columns of those found. */
static ptrdiff_t find_tiles(const am_mask *mask, const am_region *p, am_range live, tile_row *tiles)
{
    ptrdiff_t w = 0;
    for (ptrdiff_t mixed = 0; w * AM_TILE_COLUMNS < p->columns && mixed < ROW_MIXED; w++) {
        ptrdiff_t k = p->k + w * AM_TILE_COLUMNS, count = am_min(AM_TILE_COLUMNS, mask->keys - k);
        bool outside = k + count <= live.begin || k >= live.end;
        const am_region tile = {.b = p->b, .h = p->h, .q = p->q, .rows = p->rows, .k = k, .columns = count};
        am_tile kind = outside ? AM_DEAD : am_mask_bits(mask, &tile, tiles->bits[mixed]);
        tiles->kind[w] = (uint8_t)kind;
        mixed += kind == AM_MIXED;
    }
    tiles->kind[w] = UINT8_MAX;
    return am_min(w * AM_TILE_COLUMNS, p->columns);
}

/* The rows of a block; `blocks` are those of a (b, h). */
static am_region block_at(const am_mask *mask, ptrdiff_t blocks, ptrdiff_t index)
{
    const ptrdiff_t plane = index / blocks, q = index % blocks * AM_TILE_ROWS;
    return (am_region){.b = plane / mask->heads,
                       .h = plane % mask->heads,
                       .q = q,
                       .rows = am_min(AM_TILE_ROWS, mask->queries - q)};
}

static am_status fill_task(void *arg, ptrdiff_t index, am_team *team)
{
    const fill_job *job = arg;
    const am_mask *mask = job->mask;
    const am_mask_target *t = job->target;
    const am_by_axis *stride = &t->array.stride;
    const bool apart = stride->channel != t->size;
    const ptrdiff_t most = apart ? APART_BYTES / t->size : ROW_COLUMNS;
    am_region p = block_at(mask, job->blocks, index);
    am_range live = am_mask_keys(mask, p.b, p.h, p.q, p.rows);
    for (p.k = 0; p.k < mask->keys; p.k += p.columns) {
        tile_row tiles;
        p.columns = am_min(am_min(most, ROW_COLUMNS), mask->keys - p.k);
        p.columns = find_tiles(mask, &p, live, &tiles);
        for (ptrdiff_t r = 0; r < p.rows; r++) {
            char *row = am_token(&t->array, p.b, p.h, p.q + r) + p.k * stride->channel;
            if (apart)
                fill_apart(job, row, &tiles, r, p.columns);
            else
                fill_row(job, row, &tiles, r, p.columns);
        }
        am_status status = am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

am_status am_mask_fill(const am_context *context, am_mask *mask, const am_mask_target *target)
{
    am_status status = am_mask_prepare(context, mask);
    if (status != AM_OK) return status;
    if (mask->batch == 0 || mask->heads == 0 || mask->queries == 0 || mask->keys == 0) return AM_OK;
    ptrdiff_t bytes = target->size, limit = am_cache_bytes() / 2;
    bytes = bytes * mask->keys > limit / mask->queries ? limit : bytes * mask->keys * mask->queries;
    fill_job job = {
        .mask = mask,
        .target = target,
        .blocks = am_ceil_div(mask->queries, AM_TILE_ROWS),
        .expand = context->kernels->masks.expand_bits[am_lane_of_size(target->size)],
        .live = am_repeated(target->live, target->size),
        .dead = am_repeated(target->dead, target->size),
        .stream = bytes > limit / (mask->batch * mask->heads) && target->array.stride.channel == target->size,
    };
    return am_parallel(context, mask->batch * mask->heads * job.blocks, 1, fill_task, &job);
}

/* --- Counts --- */

/* Adds the live pairs of a region of at most AM_TILE_ROWS rows to `count`. */
static am_status count_region(const am_mask *mask, const am_region *p, am_range live, int64_t *count,
                              am_team *team)
{
    ptrdiff_t end = am_min(p->k + p->columns, live.end);
    for (ptrdiff_t k = am_max(p->k, live.begin), next; k < end; k = next) {
        /* Summaries describe aligned tiles, so a question about an aligned tile seldom has to read arrays. */
        next = am_min((k / AM_TILE_COLUMNS + 1) * AM_TILE_COLUMNS, end);
        uint64_t bits[AM_TILE_ROWS];
        const am_region region = {
            .b = p->b, .h = p->h, .q = p->q, .rows = p->rows, .k = k, .columns = next - k};
        am_tile kind = am_mask_bits(mask, &region, bits);
        if (kind == AM_FULL) *count += p->rows * (next - k);
        for (ptrdiff_t r = 0; kind == AM_MIXED && r < p->rows; r++) *count += count_bits(bits[r]);
        am_status status = checkpoint_if_due(team, k);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

typedef struct {
    const am_mask *mask;
    ptrdiff_t plane, rows;           /* the first (b, h), and the rows of cells of each */
    ptrdiff_t q_cell, k_cell, cells; /* cells: in a row */
    int64_t *counts;
} grid_job;

/* Counts the live pairs of one row of cells. */
static am_status grid_task(void *arg, ptrdiff_t index, am_team *team)
{
    const grid_job *job = arg;
    const am_mask *mask = job->mask;
    const ptrdiff_t plane = job->plane + index / job->rows, begin = index % job->rows * job->q_cell,
                    end = am_min(mask->queries - begin, job->q_cell) + begin;
    int64_t *counts = job->counts + index * job->cells;
    memset(counts, 0, (size_t)job->cells * sizeof *counts);
    for (ptrdiff_t q = begin, next; q < end; q = next) {
        next = am_min((q / AM_TILE_ROWS + 1) * AM_TILE_ROWS, end);
        am_region p = {.b = plane / mask->heads, .h = plane % mask->heads, .q = q, .rows = next - q};
        am_range live = am_mask_keys(mask, p.b, p.h, q, p.rows);
        for (ptrdiff_t cell = live.begin / job->k_cell; cell * job->k_cell < live.end; cell++) {
            p.k = cell * job->k_cell;
            p.columns = am_min(job->k_cell, mask->keys - p.k);
            am_status status = count_region(mask, &p, live, &counts[cell], team);
            if (status != AM_OK) return status;
        }
        am_status status = am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

am_status am_mask_grid(const am_context *context, am_mask *mask, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q_cell,
                       ptrdiff_t k_cell, int64_t *counts)
{
    am_status status = am_mask_prepare(context, mask);
    if (status != AM_OK) return status;
    const ptrdiff_t rows = am_ceil_div(mask->queries, q_cell), cells = am_ceil_div(mask->keys, k_cell);
    grid_job job = {.mask = mask, .rows = rows, .q_cell = q_cell, .k_cell = k_cell, .cells = cells};
    job.plane = b * mask->heads + h, job.counts = counts;
    return am_parallel(context, rows, 1, grid_task, &job);
}

am_status am_mask_count(const am_context *context, am_mask *mask, int64_t *counts)
{
    am_status status = am_mask_prepare(context, mask);
    if (status != AM_OK) return status;
    const ptrdiff_t planes = mask->batch * mask->heads, rows = am_ceil_div(mask->queries, AM_TILE_ROWS);
    int64_t *of_rows = malloc((size_t)am_max(planes * rows, 1) * sizeof *of_rows);
    if (!of_rows) return AM_NO_MEMORY;
    grid_job job = {.mask = mask,
                    .rows = rows,
                    .q_cell = AM_TILE_ROWS,
                    .k_cell = am_max(mask->keys, 1),
                    .cells = 1,
                    .counts = of_rows};
    status = am_parallel(context, planes * rows, 1, grid_task, &job);
    for (ptrdiff_t plane = 0; status == AM_OK && plane < planes; plane++) {
        counts[plane] = 0;
        for (ptrdiff_t row = 0; row < rows; row++) counts[plane] += of_rows[plane * rows + row];
    }
    free(of_rows);
    return status;
}

/* --- Tokens with a live pair --- */

typedef struct {
    const am_mask *mask;
    ptrdiff_t blocks;
    uint8_t *queries, *keys;
} any_job;

/* A task takes AM_TILE_COLUMNS keys of one (b, h), so that no two tasks mark the same key. */
static am_status any_key_task(void *arg, ptrdiff_t index, am_team *team)
{
    const any_job *job = arg;
    const am_mask *mask = job->mask;
    const ptrdiff_t plane = index / job->blocks, k = index % job->blocks * AM_TILE_COLUMNS,
                    columns = am_min(AM_TILE_COLUMNS, mask->keys - k);
    am_region p = {.b = plane / mask->heads, .h = plane % mask->heads, .k = k, .columns = columns};
    uint64_t seen = 0;
    for (; p.q < mask->queries && seen != am_low_bits(columns); p.q += AM_TILE_ROWS) {
        p.rows = am_min(AM_TILE_ROWS, mask->queries - p.q);
        seen |= am_mask_seen_in(mask, &p, AM_KEYS);
        am_status status = checkpoint_if_due(team, p.q);
        if (status != AM_OK) return status;
    }
    mask->kernels->masks.expand_bits[AM_LANE_8](job->keys + plane * mask->keys + k, seen, columns, 1, 0);
    return am_checkpoint(team);
}

static am_status any_query_task(void *arg, ptrdiff_t index, am_team *team)
{
    const any_job *job = arg;
    const am_mask *mask = job->mask;
    am_region p = block_at(mask, job->blocks, index);
    am_range live = am_mask_keys(mask, p.b, p.h, p.q, p.rows);
    uint64_t seen = 0;
    for (p.k = live.begin; p.k < live.end && seen != am_low_bits(p.rows); p.k += p.columns) {
        p.columns = am_min(am_floor_to(p.k, AM_TILE_COLUMNS) + AM_TILE_COLUMNS, live.end) - p.k;
        seen |= am_mask_seen_in(mask, &p, AM_QUERIES);
        am_status status = checkpoint_if_due(team, p.k);
        if (status != AM_OK) return status;
    }
    mask->kernels->masks.expand_bits[AM_LANE_8](
        job->queries + (p.b * mask->heads + p.h) * mask->queries + p.q, seen, p.rows, 1, 0);
    return am_checkpoint(team);
}

am_status am_mask_any(const am_context *context, am_mask *mask, uint8_t *queries, uint8_t *keys)
{
    am_status status = am_mask_prepare(context, mask);
    if (status != AM_OK) return status;
    ptrdiff_t planes = mask->batch * mask->heads;
    any_job job = {
        .mask = mask, .blocks = am_ceil_div(mask->queries, AM_TILE_ROWS), .queries = queries, .keys = keys};
    status = am_parallel(context, planes * job.blocks, 1, any_query_task, &job);
    if (status != AM_OK) return status;
    job.blocks = am_ceil_div(mask->keys, AM_TILE_COLUMNS);
    return am_parallel(context, planes * job.blocks, 1, any_key_task, &job);
}
