/* logit_terms.c – the terms of logits. */
#include "core/attention/terms/logit_terms.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/attention/terms/relative.h"
#include "core/arrays/convert.h"

enum {
    KEEP_PIECE = 1 << 16,  /* keys of dropout between two checkpoints */
    SINKS_PIECE = 1 << 14, /* sinks between two checkpoints */
};

am_prefetch_rows am_prefetch_bias(const am_attn_base *base, const am_attn_place *at, am_range keys)
{
    const am_attn *f = base->attn;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(f->bias_type), rows = f->bias_row ? at->queries : 1;
    if (!f->bias || at->heads > 1 || f->bias_column != size || keys.begin == keys.end)
        return (am_prefetch_rows){0};
    const char *first = f->bias + at->b * f->bias_batch + at->head * f->bias_head + at->q * f->bias_row;
    return (am_prefetch_rows){.at = first + keys.begin * size,
                              .step = f->bias_row,
                              .length = (keys.end - keys.begin) * size,
                              .rows = rows};
}

double am_sink_logit(const am_attn_base *base, ptrdiff_t head, ptrdiff_t i)
{
    double logit = base->attn->sinks[head * base->attn->sink_count + i];
    return base->type == AM_FLOAT64 ? logit : (double)(float)logit;
}

typedef struct {
    const am_attn_base *base;
    am_sink_sum *sums;
} sinks_job;

static am_status sinks_task(void *arg, ptrdiff_t head, am_team *team)
{
    const sinks_job *job = arg;
    const ptrdiff_t count = job->base->attn->sink_count;
    am_status status = AM_OK;
    am_sink_sum total = {.highest = -INFINITY};
    for (ptrdiff_t i = 0; i < count; i++) {
        const double logit = am_sink_logit(job->base, head, i);
        if (logit > total.highest) total.highest = logit; /* GCC 12 for arm64 breaks down on fmax here */
    }
    for (ptrdiff_t i = 0; status == AM_OK && i < count; i++) {
        const double logit = am_sink_logit(job->base, head, i);
        if (i % SINKS_PIECE == SINKS_PIECE - 1) status = am_checkpoint(team);
        if (logit == -INFINITY) continue;
        total.sum += am_power(AM_LOG2_E, logit, total.highest);
        total.count += logit == total.highest;
    }
    job->sums[head] = total;
    return status;
}

am_status am_sum_sinks(const am_context *context, const am_attn_base *base, am_sink_sum **sums)
{
    const ptrdiff_t heads = base->attn->heads;
    *sums = NULL;
    if (base->attn->sink_count == 0) return AM_OK;
    *sums = malloc((size_t)am_max(heads, 1) * sizeof **sums);
    if (!*sums) return AM_NO_MEMORY;
    sinks_job job = {base, *sums};
    return am_parallel(context, heads, am_ceil_div(SINKS_PIECE, base->attn->sink_count), sinks_task, &job);
}

/* --- Tiles --- */

/* The tiles of a section that hold some keys. */
static am_range tiles_with(const am_sections *sections, const am_section *section, am_range keys)
{
    const ptrdiff_t begin = am_max(keys.begin, section->keys.begin),
                    end = am_min(keys.end, section->keys.end);
    if (begin >= end) return (am_range){section->tiles.begin, section->tiles.begin};
    return (am_range){am_tile_index(sections, section, begin), am_tile_index(sections, section, end - 1) + 1};
}

/* The heads of a block that may see different keys. */
static am_range heads_of(const am_attn_base *base, const am_attn_place *at)
{
    const ptrdiff_t heads = at->queries == 0 ? 0 : base->by_head ? at->heads : am_min(1, at->heads);
    return (am_range){at->head, at->head + heads};
}

am_range am_tiles_seen(const am_attn_base *base, const am_sections *sections, const am_attn_place *at)
{
    const am_range queries = {at->q, at->q + at->queries};
    const am_seen seen = am_mask_seen(base->attn->mask, at->b, heads_of(base, at), queries, 1);
    return tiles_with(sections, at->section, seen.keys);
}

am_range am_tiles_within_reach(const am_attn_base *base, const am_sections *sections, const am_attn_place *at)
{
    const am_range heads = heads_of(base, at);
    am_range reach = {PTRDIFF_MAX, 0};
    for (ptrdiff_t h = heads.begin; h < heads.end; h++) {
        const am_range keys = am_mask_keys(base->attn->mask, at->b, h, at->q, at->queries);
        if (keys.begin >= keys.end) continue;
        reach = (am_range){am_min(reach.begin, keys.begin), am_max(reach.end, keys.end)};
    }
    return tiles_with(sections, at->section, reach);
}

ptrdiff_t am_most_tiles(const am_attn_base *base, const am_sections *sections, const am_section *section)
{
    enum { SAMPLES = 16 }; /* blocks that the estimate looks at */
    const ptrdiff_t heads = base->attn->heads, blocks = am_length(section->blocks),
                    most = am_length(section->tiles), count = am_min(blocks, SAMPLES);
    ptrdiff_t found = 0;
    for (ptrdiff_t i = 0; heads > 0 && i < count && found < most; i++) {
        const ptrdiff_t block = section->blocks.begin + (count == 1 ? 0 : i * (blocks - 1) / (count - 1));
        const am_range rows = am_range_at(&sections->blocks, block);
        const am_attn_place at = {.section = section,
                                  .b = section->b,
                                  .head = i % heads,
                                  .heads = 1,
                                  .q = rows.begin,
                                  .queries = am_length(rows)};
        found = am_max(found, am_length(am_tiles_within_reach(base, sections, &at)));
    }
    return found;
}

/* --- The terms of a tile --- */

/* Returns whether a tile is dead, mixed or full, and unless it is dead fills in a word for each row. */
static am_tile find_live(const am_attn_base *base, const am_attn_place *at, ptrdiff_t k, ptrdiff_t columns,
                         uint64_t *live)
{
    const uint64_t all = columns == AM_FLASH_TILE ? UINT64_MAX : ((uint64_t)1 << columns) - 1;
    const ptrdiff_t heads = base->by_head ? at->heads : am_min(1, at->heads);
    bool any_dead = columns < AM_FLASH_TILE, any_live = false;
    for (ptrdiff_t h = 0; h < heads; h++) {
        uint64_t *words = live + h * at->queries;
        am_tile tile =
            am_mask_bits(base->attn->mask, at->b, at->head + h, at->q, at->queries, k, columns, words);
        if (tile == AM_DEAD && heads == 1) return tile; /* without bits, which are not read */
        for (ptrdiff_t r = 0; tile != AM_MIXED && r < at->queries; r++) words[r] = tile == AM_FULL ? all : 0;
        any_dead |= tile != AM_FULL;
        any_live |= tile != AM_DEAD;
    }
    for (ptrdiff_t r = heads * at->queries; r < at->rows; r++) live[r] = live[r - at->queries];
    return !any_live ? AM_DEAD : any_dead ? AM_MIXED : AM_FULL;
}

/* Reads the bias of a tile to [rows][AM_FLASH_TILE]; pairs where it is -INFINITY become dead. */
static am_tile read_bias(const am_attn_base *base, const am_attn_place *at, ptrdiff_t k, ptrdiff_t columns,
                         char *scratch, char *bias, uint64_t *live, am_tile tile)
{
    const am_attn *f = base->attn;
    const bool plain = f->bias_column == (ptrdiff_t)am_size_of(f->bias_type);
    am_flash_read_bias *own = base->arithmetic->numbers[base->type].read_bias,
                       *direct = plain ? base->arithmetic->numbers[f->bias_type].read_bias : NULL;
    uint64_t any = 0;
    for (ptrdiff_t r = 0; r < at->rows; r++) {
        const char *src = f->bias + at->b * f->bias_batch + am_head_of(at, r) * f->bias_head +
                          am_query_of(at, r) * f->bias_row + k * f->bias_column;
        char *to = bias + r * AM_FLASH_TILE * base->size;
        uint64_t infinite;
        if (direct) {
            infinite = direct(to, src, columns);
        } else if (f->bias_column) {
            const am_tokens row = {.type = f->bias_type, .element = f->bias_column};
            infinite = own(to, am_read_rows(base, &row, src, 1, columns, scratch).data, columns);
        } else { /* one number for all keys */
            const am_tokens one = {.type = f->bias_type, .element = (ptrdiff_t)am_size_of(f->bias_type)};
            src = am_read_rows(base, &one, src, 1, 1, scratch).data;
            uint64_t pattern = 0;
            memcpy(&pattern, src, (size_t)base->size);
            if (base->size == 4) pattern |= pattern << 32;
            base->all_kernels->fill_bytes(to, pattern, (size_t)(AM_FLASH_TILE * base->size), false);
            infinite = am_number(base, src, 0) == -INFINITY ? UINT64_MAX : 0;
        }
        uint64_t left = live[r] & ~infinite;
        if (left != live[r]) tile = AM_MIXED;
        any |= live[r] = left;
    }
    return any ? tile : AM_DEAD;
}

bool am_find_logit_terms(const am_attn_base *base, const am_attn_place *at, am_range keys,
                         const am_logit_scratch *scratch, am_logit_terms *terms)
{
    const ptrdiff_t k = keys.begin, columns = keys.end - k;
    am_tile kind = find_live(base, at, k, columns, scratch->live);
    if (kind != AM_DEAD && base->attn->bias)
        kind = read_bias(base, at, k, columns, scratch->row, scratch->bias, scratch->live, kind);
    const void *bias = base->attn->bias ? scratch->bias : NULL;
    ptrdiff_t bias_step = AM_FLASH_TILE;
    if (kind != AM_DEAD && am_has_relative_terms(base->attn) &&
        am_relative_terms(base, at, k, scratch, &bias, &bias_step)) {
        uint64_t any = 0;
        for (ptrdiff_t r = 0; r < at->rows; r++) any |= scratch->live[r];
        kind = any ? AM_MIXED : AM_DEAD;
    }
    if (kind == AM_DEAD) return false;
    for (ptrdiff_t r = 0; base->threshold && r < at->rows; r++)
        scratch->kept[r] = base->all_kernels->keep_bits(
            scratch->row_keys[r], (uint32_t)(k + base->attn->first_key), base->threshold);
    *terms = (am_logit_terms){.live = kind == AM_FULL ? NULL : scratch->live,
                              .kept = base->threshold ? scratch->kept : NULL,
                              .bias = bias,
                              .bias_step = bias_step};
    return true;
}

/* --- Dropout --- */

static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t am_dropout_row_key(uint64_t seed, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q)
{
    uint64_t key = mixed(seed + 0x9e3779b97f4a7c15u);
    key = mixed(key ^ (uint64_t)b) + 0x9e3779b97f4a7c15u;
    key = mixed(key ^ (uint64_t)h) + 0x9e3779b97f4a7c15u;
    return mixed(key ^ (uint64_t)q);
}

void am_begin_logits(const am_attn_base *base, const am_attn_place *at, const am_logit_scratch *scratch)
{
    for (ptrdiff_t r = 0; base->threshold && r < at->rows; r++)
        scratch->row_keys[r] = am_dropout_row_key(base->attn->seed, at->b, am_head_of(at, r),
                                                  base->attn->first_query + am_query_of(at, r));
}

typedef struct {
    const am_kernels *kernels;
    const ptrdiff_t *shape, *strides;
    uint64_t seed;
    uint32_t threshold;
    uint8_t *kept;
} keep_job;

static am_status keep_task(void *arg, ptrdiff_t index, am_team *team)
{
    const keep_job *job = arg;
    const ptrdiff_t heads = job->shape[1], queries = job->shape[2], keys = job->shape[3],
                    step = job->strides[3];
    const ptrdiff_t b = index / queries / heads, h = index / queries % heads, q = index % queries;
    uint64_t key = am_dropout_row_key(job->seed, b, h, q);
    uint8_t *row = job->kept + b * job->strides[0] + h * job->strides[1] + q * job->strides[2];
    am_status status = index % 64 == 0 ? am_checkpoint(team) : AM_OK;
    for (ptrdiff_t k = 0; status == AM_OK && k < keys; k += 64) {
        uint64_t bits = job->kernels->keep_bits(key, (uint32_t)k, job->threshold);
        ptrdiff_t count = am_min(64, keys - k);
        if (step == 1)
            job->kernels->expand_bits[AM_LANE_8](row + k, bits, count, 1, 0);
        else
            for (ptrdiff_t i = 0; i < count; i++) row[(k + i) * step] = bits >> i & 1;
        if (k % KEEP_PIECE == KEEP_PIECE - 64) status = am_checkpoint(team);
    }
    return status;
}

am_status am_dropout_keep_mask(const am_context *context, uint64_t seed, double probability,
                               const ptrdiff_t shape[4], const ptrdiff_t strides[4], uint8_t *kept)
{
    keep_job job = {context->kernels, shape, strides, seed, am_threshold_of(probability), kept};
    return am_parallel(context, shape[3] == 0 ? 0 : shape[0] * shape[1] * shape[2], 16, keep_task, &job);
}
