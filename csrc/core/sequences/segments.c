/* segments.c – converts, checks and counts segment ids, a block of tokens at a time. */
#include "core/sequences/segments.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/arrays/convert.h"

enum {
    WORD = 64,
    BLOCK = 512, /* ids converted at once */
    TASK_TOKENS = 1 << 15,
};

static ptrdiff_t rows_of(const am_ids *ids) { return ids->shape[0] * ids->shape[1]; }
static ptrdiff_t tokens_of(const am_ids *ids) { return ids->shape[2]; }

/* Converts ids of one row to int64; ids above its range become INT64_MAX. */
static void widen(const am_kernels *kernels, const am_ids *ids, ptrdiff_t row, ptrdiff_t begin,
                  ptrdiff_t count, int64_t *wide)
{
    ptrdiff_t size = (ptrdiff_t)am_size_of(ids->type), step = ids->stride[2];
    const char *from = ids->data + row / ids->shape[1] * ids->stride[0] +
                       row % ids->shape[1] * ids->stride[1] + begin * step;
    uint64_t piece[BLOCK];
    if (step != size) {
        am_copy_2d((char *)piece, 0, size, from, 0, step, 1, count, (size_t)size);
        from = (const char *)piece;
    }
    bool fits = am_converter(ids->type, AM_INT64)(kernels, wide, from, count);
    for (ptrdiff_t i = 0; i < count && !fits; i++) wide[i] = wide[i] < 0 ? INT64_MAX : wide[i];
}

/* --- Conversion: a row is divided into pieces unless its results depend on earlier tokens --- */

typedef struct {
    const am_kernels *kernels;
    const am_ids *ids;
    ptrdiff_t row_pieces; /* tasks per row */
    bool positions;
    int32_t pad;
    int64_t lowest; /* the lowest id that is allowed */
    int32_t *dst;
    atomic_ptrdiff_t large; /* the first index of an id that is too large, or PTRDIFF_MAX */
} row_job;

/* Converts ids to int32. Returns the index of the first one that does not fit, or `count`. */
static ptrdiff_t narrow(const row_job *job, const int64_t *wide, ptrdiff_t count, int32_t *dst)
{
    if (am_converter(AM_INT64, AM_INT32)(job->kernels, dst, wide, count)) return count;
    ptrdiff_t i = 0;
    for (; i < count && wide[i] <= INT32_MAX && wide[i] >= job->lowest; i++)
        dst[i] = wide[i] < INT32_MIN ? INT32_MIN : (int32_t)wide[i];
    return i;
}

static void report_large(row_job *job, ptrdiff_t index)
{
    ptrdiff_t known = atomic_load(&job->large);
    while (index < known && !atomic_compare_exchange_weak(&job->large, &known, index)) continue;
}

/* Copies contiguous int32 ids as they are. */
static am_status copy_piece(const row_job *job, ptrdiff_t row, ptrdiff_t begin, ptrdiff_t end, am_team *team)
{
    const am_ids *ids = job->ids;
    const char *from = ids->data + row / ids->shape[1] * ids->stride[0] +
                       row % ids->shape[1] * ids->stride[1] + begin * (ptrdiff_t)sizeof(int32_t);
    memcpy(job->dst + row * tokens_of(ids) + begin, from, (size_t)(end - begin) * sizeof(int32_t));
    return am_checkpoint(team);
}

static am_status piece_task(void *arg, ptrdiff_t index, am_team *team)
{
    row_job *job = arg;
    const ptrdiff_t tokens = tokens_of(job->ids), row = index / job->row_pieces;
    const ptrdiff_t first = index % job->row_pieces * TASK_TOKENS;
    /* A position depends on all earlier tokens of its row, so one task takes the whole row. */
    const ptrdiff_t end = job->positions ? tokens : am_min(first + TASK_TOKENS, tokens);
    if (!job->positions && job->ids->type == AM_INT32 && job->ids->stride[2] == sizeof(int32_t))
        return copy_piece(job, row, first, end, team);
    int64_t previous = -1;
    int32_t position = 0;
    for (ptrdiff_t begin = first; begin < end; begin += BLOCK) {
        int64_t wide[BLOCK];
        ptrdiff_t count = am_min(BLOCK, end - begin);
        int32_t *dst = job->dst + row * tokens + begin;
        widen(job->kernels, job->ids, row, begin, count, wide);
        ptrdiff_t fit = narrow(job, wide, count, dst);
        if (fit < count) {
            report_large(job, row * tokens + begin + fit);
            return AM_OK;
        }
        for (ptrdiff_t i = 0; i < count && job->positions; i++) {
            int64_t id = wide[i];
            if (id == previous && position == INT32_MAX) return AM_OVERFLOW;
            position = id == previous ? position + 1 : 0;
            previous = id;
            dst[i] = id < 0 ? job->pad : position;
        }
        am_status status = am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

static am_status convert_rows(const am_context *context, row_job *job, am_large_id *large)
{
    atomic_init(&job->large, PTRDIFF_MAX);
    ptrdiff_t tokens = tokens_of(job->ids), rows = tokens > 0 ? rows_of(job->ids) : 0;
    job->row_pieces = job->positions ? 1 : am_max(1, am_ceil_div(tokens, TASK_TOKENS));
    am_status status =
        am_parallel(context, rows * job->row_pieces, TASK_TOKENS / am_max(tokens, 1), piece_task, job);
    large->index = atomic_load(&job->large);
    large->any = large->index != PTRDIFF_MAX;
    return status;
}

am_status am_narrow_ids(const am_context *context, const am_ids *ids, int32_t *dst, am_large_id *large)
{
    row_job job = {.kernels = context->kernels, .ids = ids, .lowest = INT64_MIN, .dst = dst};
    return convert_rows(context, &job, large);
}

am_status am_narrow_integers(const am_context *context, const am_ids *ids, int32_t *dst, am_large_id *large)
{
    row_job job = {.kernels = context->kernels, .ids = ids, .lowest = INT32_MIN, .dst = dst};
    return convert_rows(context, &job, large);
}

am_status am_positions(const am_context *context, const am_ids *ids, int32_t pad, int32_t *dst,
                       am_large_id *large)
{
    row_job job = {.kernels = context->kernels,
                   .ids = ids,
                   .positions = true,
                   .pad = pad,
                   .lowest = INT64_MIN,
                   .dst = dst};
    return convert_rows(context, &job, large);
}

typedef struct {
    am_expand_bits *expand;
    const int32_t *ids;
    char *dst;
    ptrdiff_t count, size;
    uint64_t one;
} valid_job;

static am_status valid_task(void *arg, ptrdiff_t index, am_team *team)
{
    const valid_job *job = arg;
    ptrdiff_t end = am_min((index + 1) * TASK_TOKENS, job->count);
    for (ptrdiff_t begin = index * TASK_TOKENS; begin < end; begin += WORD) {
        uint64_t bits = 0;
        ptrdiff_t count = am_min(WORD, end - begin);
        for (ptrdiff_t i = 0; i < count; i++) bits |= (uint64_t)(job->ids[begin + i] >= 0) << i;
        job->expand(job->dst + begin * job->size, bits, count, job->one, 0);
    }
    return am_checkpoint(team);
}

am_status am_mark_valid(const am_context *context, const int32_t *ids, ptrdiff_t count, void *dst,
                        ptrdiff_t size, uint64_t one)
{
    valid_job job = {context->kernels->masks.expand_bits[am_lane_of_size(size)], ids, dst, count, size, one};
    return am_parallel(context, am_ceil_div(count, TASK_TOKENS), 1, valid_task, &job);
}

/* --- Counts --- */

typedef struct {
    const am_kernels *kernels;
    const am_ids *ids;
    ptrdiff_t limit, *counts;
    ptrdiff_t capacity, segments;
    am_large_id *large;
} count_job;

/* calloc zeroes the memory, and pages where no id is counted take up none. */
static am_status grow(count_job *job, ptrdiff_t segments)
{
    if (segments > PTRDIFF_MAX / 16) return AM_NO_MEMORY;
    ptrdiff_t capacity = am_max(job->capacity, 128);
    while (capacity < segments) capacity *= 2;
    ptrdiff_t *counts = calloc((size_t)capacity, sizeof *counts);
    if (!counts) return AM_NO_MEMORY;
    if (job->segments) memcpy(counts, job->counts, (size_t)job->segments * sizeof *counts);
    free(job->counts);
    job->counts = counts;
    job->capacity = capacity;
    return AM_OK;
}

/* Equal ids of packed sequences follow each other, so a whole run is counted at once. */
static am_status count_block(count_job *job, const int64_t *ids, ptrdiff_t count, ptrdiff_t index)
{
    for (ptrdiff_t i = 0, end; i < count; i = end) {
        int64_t id = ids[i];
        for (end = i + 1; end < count && ids[end] == id;) end++;
        if (id < 0) continue;
        if (id >= job->limit) {
            *job->large = (am_large_id){true, index + i};
            return AM_OK;
        }
        if (id >= job->capacity) {
            am_status status = id < PTRDIFF_MAX ? grow(job, (ptrdiff_t)id + 1) : AM_NO_MEMORY;
            if (status != AM_OK) return status;
        }
        if (id >= job->segments) job->segments = (ptrdiff_t)id + 1;
        job->counts[id] += end - i;
    }
    return AM_OK;
}

static am_status count_task(void *arg, ptrdiff_t index, am_team *team)
{
    (void)index; /* there is only one task */
    count_job *job = arg;
    ptrdiff_t tokens = tokens_of(job->ids);
    for (ptrdiff_t row = 0; tokens > 0 && row < rows_of(job->ids) && !job->large->any; row++) {
        for (ptrdiff_t begin = 0; begin < tokens && !job->large->any; begin += BLOCK) {
            int64_t wide[BLOCK];
            ptrdiff_t count = am_min(BLOCK, tokens - begin);
            widen(job->kernels, job->ids, row, begin, count, wide);
            am_status status = count_block(job, wide, count, row * tokens + begin);
            if (status == AM_OK) status = am_checkpoint(team);
            if (status != AM_OK) return status;
        }
    }
    return AM_OK;
}

am_status am_count_segments(const am_context *context, const am_ids *ids, ptrdiff_t limit, ptrdiff_t **counts,
                            ptrdiff_t *segments, am_large_id *large)
{
    count_job job = {.kernels = context->kernels, .ids = ids, .limit = limit, .large = large};
    am_status status = am_parallel(context, 1, 1, count_task, &job);
    if (status != AM_OK) {
        free(job.counts);
        return status;
    }
    *counts = job.counts;
    *segments = job.segments;
    return AM_OK;
}
