/* flash_base.c – what attention forward and backward share. */
#include "core/flash_base.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/blocks.h"
#include "core/convert.h"

enum {
    BF16_BYTES = 2,
    LANE_BYTES = 4,
    WIDEST = 8,            /* bytes of a number; a bias may be wider than the arithmetic */
    KEEP_PIECE = 1 << 16,  /* keys of dropout between two checkpoints */
    SINKS_PIECE = 1 << 14, /* sinks between two checkpoints */
};

am_flash_base am_flash_base_of(const am_run *run, const am_flash *flash)
{
    bool wide = flash->q.type == AM_FLOAT64;
    return (am_flash_base){
        .flash = flash,
        .all_kernels = run->kernels,
        .kernels = wide ? &run->kernels->flash_f64 : &run->kernels->flash_f32,
        .type = wide ? AM_FLOAT64 : AM_FLOAT32,
        .size = wide ? 8 : 4,
        .group = flash->kv_heads ? flash->heads / flash->kv_heads : 0,
        .unit = flash->bias || flash->cap > 0 ? AM_LOG2_E : 1,
        .by_head = am_mask_is_by_head(flash->mask),
        .threshold = flash->dropout > 0 ? am_threshold_of(flash->dropout) : 0,
    };
}

/* --- Numbers --- */

/* Twice: for the copy, and for the converted rows. */
ptrdiff_t am_row_scratch(ptrdiff_t rows, ptrdiff_t count)
{
    return 2 * am_ceil_div(rows * am_max(count, 1) * WIDEST, AM_LINE) * AM_LINE;
}

const char *am_read_rows(const am_flash_base *base, char *scratch, const char *src, ptrdiff_t row_step,
                         ptrdiff_t element_step, am_dtype type, ptrdiff_t rows, ptrdiff_t count,
                         ptrdiff_t *step)
{
    ptrdiff_t size = (ptrdiff_t)am_size_of(type);
    if (type == base->type && element_step == size && row_step % size == 0) {
        *step = row_step / size;
        return src;
    }
    char *raw =
        type == base->type ? scratch : scratch + am_ceil_div(rows * count * base->size, AM_LINE) * AM_LINE;
    *step = count;
    if (element_step == size && type != base->type) {
        am_convert_row *convert = am_converter(type, base->type);
        for (ptrdiff_t r = 0; r < rows; r++)
            convert(base->all_kernels, scratch + r * count * base->size, src + r * row_step, count);
        return scratch;
    }
    am_copy_2d(raw, count * size, size, src, row_step, element_step, rows, count, (size_t)size);
    if (type != base->type) am_converter(type, base->type)(base->all_kernels, scratch, raw, rows * count);
    return scratch;
}

bool am_is_plain(const am_tokens *t)
{
    ptrdiff_t size = (ptrdiff_t)am_size_of(t->type);
    return t->element == size && t->token % size == 0;
}

bool am_is_plain_bf16x2(const am_tokens *t, ptrdiff_t count)
{
    return am_is_plain(t) && t->token % LANE_BYTES == 0 && count % 2 == 0;
}

bool am_is_aligned_bf16x2(const am_tokens *t, ptrdiff_t count)
{
    const uintptr_t rows = (uintptr_t)t->data | (uintptr_t)t->batch | (uintptr_t)t->head;
    return am_is_plain_bf16x2(t, count) && rows % LANE_BYTES == 0;
}

void am_copy_bf16x2(char *to, const char *src, ptrdiff_t row_step, ptrdiff_t element_step, ptrdiff_t rows,
                    ptrdiff_t count)
{
    const ptrdiff_t size = BF16_BYTES, row = (count + count % 2) * size;
    if (count % 2) memset(to, 0, (size_t)(rows * row));
    am_copy_2d(to, row, size, src, row_step, element_step, rows, count, (size_t)size);
}

const char *am_read_bf16x2(const am_tokens *t, ptrdiff_t b, ptrdiff_t head, ptrdiff_t token, ptrdiff_t rows,
                           ptrdiff_t count, char *scratch, ptrdiff_t *step)
{
    const char *src = am_token(t, b, head, token);
    *step = t->token / LANE_BYTES;
    if (am_is_plain_bf16x2(t, count)) return src;
    *step = am_ceil_div(count, 2);
    am_copy_bf16x2(scratch, src, t->token, t->element, rows, count);
    return scratch;
}

am_prefetch_rows am_prefetch_tokens(const am_tokens *t, ptrdiff_t b, ptrdiff_t head, ptrdiff_t heads,
                                    ptrdiff_t token, ptrdiff_t rows, ptrdiff_t count)
{
    if (rows <= 0 || !am_is_plain(t)) return (am_prefetch_rows){0};
    ptrdiff_t one = count * (ptrdiff_t)am_size_of(t->type), all = (heads - 1) * t->head + one;
    bool side_by_side = one < all && all <= t->token;
    return (am_prefetch_rows){am_token(t, b, head, token), t->token, side_by_side ? all : one, rows};
}

am_prefetch_rows am_prefetch_bias(const am_flash_base *base, const am_flash_place *at, am_range keys)
{
    const am_flash *f = base->flash;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(f->bias_type), rows = f->bias_row ? at->queries : 1;
    if (!f->bias || at->heads > 1 || f->bias_column != size || keys.begin == keys.end)
        return (am_prefetch_rows){0};
    const char *first = f->bias + at->b * f->bias_batch + at->head * f->bias_head + at->q * f->bias_row;
    return (am_prefetch_rows){first + keys.begin * size, f->bias_row, (keys.end - keys.begin) * size, rows};
}

double am_sink_logit(const am_flash_base *base, ptrdiff_t head, ptrdiff_t i)
{
    double logit = base->flash->sinks[head * base->flash->sink_count + i];
    return base->type == AM_FLOAT64 ? logit : (double)(float)logit;
}

typedef struct {
    const am_flash_base *base;
    am_sink_sum *sums;
} sinks_job;

static am_status sinks_task(void *arg, ptrdiff_t head, am_team *team)
{
    const sinks_job *job = arg;
    const ptrdiff_t count = job->base->flash->sink_count;
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

am_status am_sum_sinks(const am_run *run, const am_flash_base *base, am_sink_sum **sums)
{
    const ptrdiff_t heads = base->flash->heads;
    *sums = NULL;
    if (base->flash->sink_count == 0) return AM_OK;
    *sums = malloc((size_t)am_max(heads, 1) * sizeof **sums);
    if (!*sums) return AM_NO_MEMORY;
    sinks_job job = {base, *sums};
    return am_parallel(run, heads, am_ceil_div(SINKS_PIECE, base->flash->sink_count), sinks_task, &job);
}

/* --- Which pairs of a tile are live --- */

am_tile am_find_live(const am_flash_base *base, const am_flash_place *at, ptrdiff_t k, ptrdiff_t columns,
                     uint64_t *live)
{
    const uint64_t all = columns == AM_FLASH_TILE ? UINT64_MAX : ((uint64_t)1 << columns) - 1;
    const ptrdiff_t heads = base->by_head ? at->heads : am_min(1, at->heads);
    bool any_dead = columns < AM_FLASH_TILE, any_live = false;
    for (ptrdiff_t h = 0; h < heads; h++) {
        uint64_t *words = live + h * at->queries;
        am_tile tile =
            am_mask_bits(base->flash->mask, at->b, at->head + h, at->q, at->queries, k, columns, words);
        if (tile == AM_DEAD && heads == 1) return tile; /* without bits, which are not read */
        for (ptrdiff_t r = 0; tile != AM_MIXED && r < at->queries; r++) words[r] = tile == AM_FULL ? all : 0;
        any_dead |= tile != AM_FULL;
        any_live |= tile != AM_DEAD;
    }
    for (ptrdiff_t r = heads * at->queries; r < at->rows; r++) live[r] = live[r - at->queries];
    return !any_live ? AM_DEAD : any_dead ? AM_MIXED : AM_FULL;
}

am_range am_tiles_of(const am_flash_base *base, const am_ranges *tiles, const am_flash_place *at)
{
    const ptrdiff_t heads = at->queries == 0 ? 0 : base->by_head ? at->heads : am_min(1, at->heads);
    ptrdiff_t begin = PTRDIFF_MAX, end = 0;
    for (ptrdiff_t h = 0; h < heads; h++) {
        const am_range keys = am_mask_keys(base->flash->mask, at->b, at->head + h, at->q, at->queries);
        if (keys.begin >= keys.end) continue;
        begin = am_min(begin, keys.begin);
        end = am_max(end, keys.end);
    }
    if (begin >= end) return (am_range){0, 0};
    return (am_range){am_range_index(tiles, at->b, begin), am_range_index(tiles, at->b, end - 1) + 1};
}

ptrdiff_t am_most_tiles(const am_flash_base *base, const am_ranges *blocks, const am_ranges *tiles)
{
    enum { SAMPLES = 16 }; /* blocks that the estimate looks at */
    const am_flash *f = base->flash;
    ptrdiff_t most = 1;
    if (f->batch == 0 || f->heads == 0 || blocks->count == 0) return most;
    for (ptrdiff_t i = 0; i < SAMPLES; i++) {
        const ptrdiff_t b = i % f->batch;
        const am_range rows = am_range_at(blocks, b, i * (blocks->count - 1) / (SAMPLES - 1));
        const am_flash_place at = {
            .b = b, .head = i % f->heads, .heads = 1, .q = rows.begin, .queries = rows.end - rows.begin};
        const am_range seen = am_tiles_of(base, tiles, &at);
        most = am_max(most, seen.end - seen.begin);
    }
    return most;
}

am_tile am_read_bias(const am_flash_base *base, const am_flash_place *at, ptrdiff_t k, ptrdiff_t columns,
                     char *scratch, char *bias, uint64_t *live, am_tile tile)
{
    const am_flash *f = base->flash;
    const am_kv_format_kernels *own = am_kv_format_of(base, base->type),
                               *direct = am_kv_format_of(base, f->bias_type);
    if (f->bias_column != (ptrdiff_t)am_size_of(f->bias_type)) direct = NULL;
    uint64_t any = 0;
    for (ptrdiff_t r = 0; r < at->rows; r++) {
        const char *src = f->bias + at->b * f->bias_batch + am_head_of(at, r) * f->bias_head +
                          am_query_of(at, r) * f->bias_row + k * f->bias_column;
        char *to = bias + r * AM_FLASH_TILE * base->size;
        uint64_t infinite;
        if (direct) {
            infinite = direct->read_bias(to, src, columns);
        } else if (f->bias_column) {
            ptrdiff_t step;
            src = am_read_rows(base, scratch, src, 0, f->bias_column, f->bias_type, 1, columns, &step);
            infinite = own->read_bias(to, src, columns);
        } else { /* one number for all keys */
            ptrdiff_t step, size = (ptrdiff_t)am_size_of(f->bias_type);
            src = am_read_rows(base, scratch, src, 0, size, f->bias_type, 1, 1, &step);
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

static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t am_row_key(uint64_t seed, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q)
{
    uint64_t key = mixed(seed + 0x9e3779b97f4a7c15u);
    key = mixed(key ^ (uint64_t)b) + 0x9e3779b97f4a7c15u;
    key = mixed(key ^ (uint64_t)h) + 0x9e3779b97f4a7c15u;
    return mixed(key ^ (uint64_t)q);
}

uint32_t am_threshold_of(double probability)
{
    double scaled = nearbyint(ldexp(probability, 32));
    return scaled >= 0x1p32 ? UINT32_MAX : scaled < 1 && probability > 0 ? 1 : (uint32_t)scaled;
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
    uint64_t key = am_row_key(job->seed, b, h, q);
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

am_status am_dropout_keep_mask(const am_run *run, uint64_t seed, double probability, const ptrdiff_t shape[4],
                               const ptrdiff_t strides[4], uint8_t *kept)
{
    keep_job job = {run->kernels, shape, strides, seed, am_threshold_of(probability), kept};
    return am_parallel(run, shape[3] == 0 ? 0 : shape[0] * shape[1] * shape[2], 16, keep_task, &job);
}

/* --- Memory --- */

void *am_alloc_aligned(ptrdiff_t bytes)
{
    if (bytes >= AM_BLOCK_BYTES) return am_block_new((size_t)bytes);
    void *memory = NULL;
    return posix_memalign(&memory, AM_LINE, (size_t)am_max(bytes, 1)) == 0 ? memory : NULL;
}

void am_free_aligned(void *memory, ptrdiff_t bytes)
{
    if (bytes >= AM_BLOCK_BYTES)
        am_block_free(memory, (size_t)bytes);
    else
        free(memory);
}

am_status am_workspaces_make(am_workspaces *workspaces, int threads, ptrdiff_t bytes)
{
    workspaces->bytes = am_ceil_div(bytes, AM_LINE) * AM_LINE;
    workspaces->count = threads;
    workspaces->memory = am_alloc_aligned(threads * workspaces->bytes);
    workspaces->taken = malloc((size_t)threads * sizeof *workspaces->taken);
    if (!workspaces->memory || !workspaces->taken) return AM_NO_MEMORY;
    for (int i = 0; i < threads; i++) atomic_flag_clear(&workspaces->taken[i]);
    return AM_OK;
}

void am_workspaces_free(am_workspaces *workspaces)
{
    am_free_aligned(workspaces->memory, workspaces->count * workspaces->bytes);
    free(workspaces->taken);
}

char *am_workspace_acquire(const am_workspaces *workspaces)
{
    ptrdiff_t i = 0;
    while (atomic_flag_test_and_set(&workspaces->taken[i])) i++; /* there are as many as threads */
    return workspaces->memory + i * workspaces->bytes;
}

void am_workspace_release(const am_workspaces *workspaces, const char *memory)
{
    atomic_flag_clear(&workspaces->taken[(memory - workspaces->memory) / workspaces->bytes]);
}
