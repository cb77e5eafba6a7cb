/* logit_terms.c – the terms of logits. */
#include "core/attention/terms/logit_terms.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/attention/terms/lines.h"
#include "core/attention/terms/points.h"
#include "core/arrays/convert.h"

enum {
    KEEP_PIECE = 1 << 16,  /* keys of dropout between two checkpoints */
    SINKS_PIECE = 1 << 14, /* sinks between two checkpoints */
};

/* The bias of a row of a block, in the `b`-th of its own batch rows, from the `i`-th key on that it has
 * numbers for. */
static const char *bias_at(const am_attn_base *base, const am_attn_place *at, ptrdiff_t b, ptrdiff_t row,
                           ptrdiff_t i)
{
    const am_array *bias = &base->terms.bias->array;
    return am_token(bias, b, am_head_of(at, row), am_query_of(at, row)) + i * bias->stride.channel;
}

am_prefetch_rows am_prefetch_bias(const am_attn_base *base, const am_attn_place *at, am_range keys)
{
    if (!base->terms.bias || at->heads > 1 || keys.begin == keys.end) return (am_prefetch_rows){0};
    const am_array *bias = &base->terms.bias->array;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(bias->type);
    if (bias->stride.channel != size) return (am_prefetch_rows){0};
    const ptrdiff_t b = at->b / am_bias_sharers(base->attn, base->terms.bias),
                    first = am_keys_of_query(base->attn, at->b, at->q).begin;
    return (am_prefetch_rows){.at = bias_at(base, at, b, 0, keys.begin - first),
                              .stride = bias->stride.token,
                              .length = (keys.end - keys.begin) * size,
                              .rows = bias->stride.token ? at->queries : 1};
}

double am_sink_logit(const am_logit_term *sinks, bool wide, ptrdiff_t head, ptrdiff_t i)
{
    const am_array *array = &sinks->array;
    const double logit = *(const double *)(am_token(array, 0, head, 0) + i * array->stride.channel);
    const float narrow = (float)logit;
    if (wide) return logit;
    return isfinite(logit) && isinf(narrow) ? (double)copysignf(FLT_MAX, narrow) : (double)narrow;
}

typedef struct {
    const am_attn_base *base;
    am_sink_sum *sums;
} sinks_job;

static am_status sinks_task(void *arg, ptrdiff_t head, am_team *team)
{
    const sinks_job *job = arg;
    const ptrdiff_t count = am_sink_count(&job->base->terms);
    am_status status = AM_OK;
    am_sink_sum total = {.highest = -INFINITY};
    for (ptrdiff_t i = 0; i < count; i++) {
        const double logit = am_sink_logit(job->base->terms.sinks, job->base->type == AM_FLOAT64, head, i);
        if (logit > total.highest) total.highest = logit; /* GCC 12 for arm64 breaks down on fmax here */
    }
    for (ptrdiff_t i = 0; status == AM_OK && i < count; i++) {
        const double logit = am_sink_logit(job->base->terms.sinks, job->base->type == AM_FLOAT64, head, i);
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
    const ptrdiff_t heads = base->attn->heads, count = am_sink_count(&base->terms);
    *sums = NULL;
    if (count == 0) return AM_OK;
    *sums = malloc((size_t)am_max(heads, 1) * sizeof **sums);
    if (!*sums) return AM_NO_MEMORY;
    sinks_job job = {base, *sums};
    return am_parallel(context, heads, am_ceil_div(SINKS_PIECE, count), sinks_task, &job);
}

/* --- Tiles --- */

/* The heads of a block that may see different keys. */
static am_range heads_of(const am_attn_base *base, const am_attn_place *at)
{
    return (am_range){at->head, at->head + am_min(at->heads, base->attn->mask->own_heads)};
}

am_range am_block_tiles(const am_attn_base *base, const am_sections *sections, const am_attn_place *at)
{
    return am_tiles_seen(sections, base->attn->mask, at->section, at->block, heads_of(base, at));
}

ptrdiff_t am_most_tiles(const am_attn_base *base, const am_sections *sections, const am_section *section)
{
    enum { SAMPLES = 16 }; /* blocks that the estimate looks at */
    const ptrdiff_t heads = base->attn->heads, blocks = am_length(section->blocks),
                    most = am_length(section->tiles), count = am_min(blocks, SAMPLES);
    ptrdiff_t found = 0;
    for (ptrdiff_t i = 0; heads > 0 && i < count && found < most; i++) {
        const ptrdiff_t block = section->blocks.begin + (count == 1 ? 0 : i * (blocks - 1) / (count - 1));
        const am_attn_place at = am_place_of(base, sections, section, block, i % heads, 1);
        found = am_max(found, am_length(am_block_tiles(base, sections, &at)));
    }
    return found;
}

/* --- The terms of a tile --- */

/* Returns whether a tile is dead, mixed or full, up to `columns`, and unless it is dead fills in a word for
 * each row. */
static am_tile find_live(const am_attn_base *base, const am_attn_place *at, ptrdiff_t k, ptrdiff_t columns,
                         uint64_t *live)
{
    const uint64_t all = columns == AM_FLASH_TILE ? UINT64_MAX : ((uint64_t)1 << columns) - 1;
    const ptrdiff_t heads = am_length(heads_of(base, at));
    bool any_dead = false, any_live = false;
    for (ptrdiff_t h = 0; h < heads; h++) {
        uint64_t *words = live + h * at->queries;
        const am_region region = {
            .b = at->b, .h = at->head + h, .q = at->q, .rows = at->queries, .k = k, .columns = columns};
        const am_tile tile = am_mask_bits(base->attn->mask, &region, words);
        if (tile == AM_DEAD && heads == 1) return tile; /* without bits, which are not read */
        for (ptrdiff_t r = 0; tile != AM_MIXED && r < at->queries; r++) words[r] = tile == AM_FULL ? all : 0;
        any_dead |= tile != AM_FULL;
        any_live |= tile != AM_DEAD;
    }
    for (ptrdiff_t r = heads * at->queries; r < at->rows; r++) live[r] = live[r - at->queries];
    return !any_live ? AM_DEAD : any_dead ? AM_MIXED : AM_FULL;
}

/* Reads a row of the bias that kernels cannot read as it is. */
static bool read_row(const am_attn_base *base, const char *src, ptrdiff_t columns, char *scratch, char *to)
{
    const am_array *bias = &base->terms.bias->array;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(bias->type);
    if (bias->stride.channel) {
        const am_array row = am_one_row(src, bias->type, bias->stride.channel, columns);
        src = am_read_wide(base, &row, scratch).data;
        return base->arithmetic->numbers[base->type].read_bias(to, src, 0, 1, columns);
    }
    const am_array one = am_one_row(src, bias->type, size, 1); /* for all keys */
    src = am_read_wide(base, &one, scratch).data;
    uint64_t pattern = 0;
    memcpy(&pattern, src, (size_t)base->size);
    if (base->size == 4) pattern |= pattern << 32;
    base->all_kernels->masks.fill_bytes(to, pattern, (size_t)(AM_FLASH_TILE * base->size), false);
    return am_number(base, src, 0) == -INFINITY;
}

/* Reads some rows of the bias of one head as AM_FLASH_TILE numbers each of the arithmetic type; returns
 * whether any is -INFINITY. */
static bool read_rows(const am_attn_base *base, const char *src, ptrdiff_t rows, ptrdiff_t columns,
                      char *scratch, char *to)
{
    const am_array *bias = &base->terms.bias->array;
    am_flash_read_bias *direct = base->arithmetic->numbers[bias->type].read_bias; /* not of all types */
    if (direct && bias->stride.channel == (ptrdiff_t)am_size_of(bias->type))
        return direct(to, src, bias->stride.token, rows, columns);
    bool any = false;
    for (ptrdiff_t r = 0; r < rows; r++, src += bias->stride.token, to += AM_FLASH_TILE * base->size)
        any |= read_row(base, src, columns, scratch, to);
    return any;
}

/* Reads a row of the bias whose sequence has only some of a tile's keys; the others are dead. */
static bool read_own_row(const am_attn_base *base, const am_attn_place *at, ptrdiff_t b, ptrdiff_t r,
                         am_range keys, char *scratch, char *to)
{
    const am_range own = am_keys_of_query(base->attn, at->b, am_query_of(at, r));
    const ptrdiff_t begin = am_max(keys.begin, own.begin), count = am_min(keys.end, own.end) - begin,
                    before = begin - keys.begin, end = before + count;
    if (count <= 0) {
        memset(to, 0, (size_t)(AM_FLASH_TILE * base->size));
        return false;
    }
    const bool any = read_rows(base, bias_at(base, at, b, r, begin - own.begin), 1, count, scratch, to);
    memmove(to + before * base->size, to, (size_t)(count * base->size));
    memset(to, 0, (size_t)(before * base->size));
    memset(to + end * base->size, 0, (size_t)((AM_FLASH_TILE - end) * base->size));
    return any;
}

/* True if kernels can read the bias of a tile in place, from `src` on. */
static bool lies_as_tile(const am_attn_base *base, const am_attn_place *at, const char *src)
{
    const am_terms_found *found = &base->terms;
    const am_array *bias = &found->bias->array;
    const ptrdiff_t size = base->size, rows = bias->stride.token;
    return bias->type == base->type && bias->stride.channel == size && (uintptr_t)src % (size_t)size == 0 &&
           rows % size == 0 && (at->heads == 1 || bias->stride.head == at->queries * rows) &&
           !(found->points || found->by_distance || found->by_key);
}

/* Finds the bias of a tile, where it lies or read to the scratch; pairs where it is -INFINITY become dead.
 * Returns whether any is. */
static bool find_bias(const am_attn_base *base, const am_attn_place *at, am_range keys,
                      const am_logit_scratch *scratch, am_added *added)
{
    const ptrdiff_t b = at->b / am_bias_sharers(base->attn, base->terms.bias),
                    row = AM_FLASH_TILE * base->size;
    bool any = false;
    *added = (am_added){scratch->bias, AM_FLASH_TILE};
    if (base->attn->pages.starts) {
        for (ptrdiff_t r = 0; r < at->rows; r++)
            any |= read_own_row(base, at, b, r, keys, scratch->row, scratch->bias + r * row);
    } else {
        const char *src = bias_at(base, at, b, 0, keys.begin);
        const ptrdiff_t stride = base->terms.bias->array.stride.token;
        if (am_length(keys) == AM_FLASH_TILE && lies_as_tile(base, at, src)) {
            *added = (am_added){src, stride / base->size};
            any = base->arithmetic->numbers[base->type].read_bias(NULL, src, stride, at->rows, AM_FLASH_TILE);
        }
        for (ptrdiff_t r = 0; added->rows == scratch->bias && r < at->rows; r += at->queries)
            any |= read_rows(base, bias_at(base, at, b, r, keys.begin), at->queries, am_length(keys),
                             scratch->row, scratch->bias + r * row);
    }
    return any && am_drop_infinite(base, added->rows, added->stride, at->rows, scratch->live);
}

/* Finds what is added to the products of a tile that has live pairs; returns what it is then. Nobody else
 * sees the parts of the sum, so that none can write to one that overlaps. */
static am_tile add_terms(const am_attn_base *base, const am_attn_place *at, am_range keys,
                         const am_logit_scratch *scratch, am_tile kind, am_added *added)
{
    bool any = false;
    *added = (am_added){NULL, AM_FLASH_TILE};
    if (base->terms.bias) any = find_bias(base, at, keys, scratch, added);
    if (base->terms.points) {
        any |= am_add_points(base, at, keys.begin, scratch, added->rows != NULL);
        added->rows = scratch->bias;
    }
    any |= am_add_lines(base, at, keys.begin, scratch, added);
    if (!any) return kind;
    uint64_t live = 0;
    for (ptrdiff_t r = 0; r < at->rows; r++) live |= scratch->live[r];
    return live ? AM_MIXED : AM_DEAD;
}

/* The number of keys if each row sees the first of them up to there and no other, else 0. Of a padded
 * sequence masks may know no more than that it ends in this tile. */
static ptrdiff_t all_keys_of(const uint64_t *live, ptrdiff_t rows)
{
    for (ptrdiff_t r = 1; r < rows; r++)
        if (live[r] != live[0]) return 0;
    return (live[0] & (live[0] + 1)) == 0 ? AM_FLASH_TILE - __builtin_clzll(live[0]) : 0;
}

bool am_find_logit_terms(const am_attn_base *base, const am_attn_place *at, am_range keys,
                         const am_logit_scratch *scratch, am_logit_terms *terms)
{
    am_added added;
    am_tile kind = find_live(base, at, keys.begin, am_length(keys), scratch->live);
    if (kind != AM_DEAD) kind = add_terms(base, at, keys, scratch, kind, &added);
    if (kind == AM_DEAD) return false;
    const uint32_t first = (uint32_t)(keys.begin + base->attn->terms.places.first_key);
    for (ptrdiff_t r = 0; base->threshold && r < at->rows; r++)
        scratch->kept[r] = base->all_kernels->masks.keep_bits(scratch->row_keys[r], first, base->threshold);
    const bool full = kind == AM_FULL && am_length(keys) == AM_FLASH_TILE;
    *terms = (am_logit_terms){.live = full ? NULL : scratch->live,
                              .all_keys = full ? AM_FLASH_TILE : all_keys_of(scratch->live, at->rows),
                              .kept = base->threshold ? scratch->kept : NULL,
                              .bias = added.rows,
                              .bias_stride = added.stride};
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
        scratch->row_keys[r] =
            am_dropout_row_key((uint64_t)base->terms.dropout->integer, at->b, am_head_of(at, r),
                               base->attn->terms.places.first_query + am_query_of(at, r));
}

typedef struct {
    const am_kernels *kernels;
    const am_array *kept;
    uint64_t seed;
    uint32_t threshold;
} keep_job;

static am_status keep_task(void *arg, ptrdiff_t index, am_team *team)
{
    const keep_job *job = arg;
    const am_by_axis *shape = &job->kept->shape;
    const ptrdiff_t heads = shape->head, queries = shape->token, keys = shape->channel,
                    stride = job->kept->stride.channel;
    const ptrdiff_t b = index / queries / heads, h = index / queries % heads, q = index % queries;
    uint64_t key = am_dropout_row_key(job->seed, b, h, q);
    char *row = am_token(job->kept, b, h, q);
    am_status status = index % 64 == 0 ? am_checkpoint(team) : AM_OK;
    for (ptrdiff_t k = 0; status == AM_OK && k < keys; k += 64) {
        uint64_t bits = job->kernels->masks.keep_bits(key, (uint32_t)k, job->threshold);
        ptrdiff_t count = am_min(64, keys - k);
        if (stride == 1)
            job->kernels->masks.expand_bits[AM_LANE_8](row + k, bits, count, 1, 0);
        else
            for (ptrdiff_t i = 0; i < count; i++) row[(k + i) * stride] = bits >> i & 1;
        if (k % KEEP_PIECE == KEEP_PIECE - 64) status = am_checkpoint(team);
    }
    return status;
}

am_status am_dropout_keep_mask(const am_context *context, uint64_t seed, double probability,
                               const am_array *kept)
{
    const am_by_axis *shape = &kept->shape;
    keep_job job = {context->kernels, kept, seed, am_threshold_of(probability)};
    return am_parallel(context, shape->channel == 0 ? 0 : shape->batch * shape->head * shape->token, 16,
                       keep_task, &job);
}
