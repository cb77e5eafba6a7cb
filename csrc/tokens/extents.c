/* extents.c – reduces masks to what extents.h declares; each search ends as soon as its result is known. */
#include "tokens/extents.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/runtime/sizes.h"

enum {
    WORD = 64,
    WORDS = 8,             /* of each head that are read at once */
    TASK_BYTES = 1 << 18,  /* of the rows of a task */
    PIECE_BYTES = 1 << 13, /* of a row: the marks of its columns stay in the first-level cache */
};

/* Converts a range of rows or columns to the order of the array. An axis along which the array repeats itself
 * is taken as a whole. */
static void range_in_array(const am_axis *axis, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t *first,
                           ptrdiff_t *past)
{
    *first = axis->count != axis->length ? 0 : axis->backwards ? axis->count - end : begin;
    *past = axis->count != axis->length ? axis->length : axis->backwards ? axis->count - begin : end;
}

/* --- Extents --- */

/* The bounds found so far in one batch row, which tasks widen. They are empty while begin > end. */
typedef struct {
    atomic_ptrdiff_t row_begin, row_end, column_begin, column_end;
} bounds;

typedef struct {
    am_mask_rows mask_rows;
    am_head_rule rule;
    ptrdiff_t task_rows, tasks; /* rows of a task; tasks of a batch row */
    bounds *bounds;
} extent_job;

/* These functions read a row in all heads at once: `row` is its address in head 0. */

static void live_in_all_heads(const extent_job *job, uint64_t *words, const char *row, ptrdiff_t begin,
                              ptrdiff_t count)
{
    memset(words, 0xff, WORDS * sizeof *words);
    for (ptrdiff_t h = 0; h < job->mask_rows.heads; h++) {
        uint64_t head[WORDS];
        am_mask_rows_pack(&job->mask_rows, head, row + h * job->mask_rows.head_stride, begin, count);
        for (ptrdiff_t w = 0; w < am_ceil_div(count, WORD); w++) words[w] &= head[w];
    }
}

/* The first live column in begin … end - 1, or `end`. */
static ptrdiff_t first_live(const extent_job *job, const char *row, ptrdiff_t begin, ptrdiff_t end)
{
    if (job->rule == AM_ANY_HEAD) {
        for (ptrdiff_t h = 0; h < job->mask_rows.heads && begin < end; h++)
            end = am_mask_rows_first(&job->mask_rows, row + h * job->mask_rows.head_stride, begin, end);
        return end;
    }
    for (; begin < end; begin += WORDS * WORD) {
        uint64_t words[WORDS];
        live_in_all_heads(job, words, row, begin, am_min(WORDS * WORD, end - begin));
        for (ptrdiff_t w = 0; w < WORDS && begin + w * WORD < end; w++) {
            if (words[w]) return begin + w * WORD + __builtin_ctzll(words[w]);
        }
    }
    return end;
}

/* One more than the last live column in begin … end - 1, or `begin`. */
static ptrdiff_t last_live(const extent_job *job, const char *row, ptrdiff_t begin, ptrdiff_t end)
{
    if (job->rule == AM_ANY_HEAD) {
        for (ptrdiff_t h = 0; h < job->mask_rows.heads && begin < end; h++)
            begin = am_mask_rows_last(&job->mask_rows, row + h * job->mask_rows.head_stride, begin, end);
        return begin;
    }
    for (ptrdiff_t low; begin < end; end = low) {
        low = am_max(begin, end - WORDS * WORD);
        uint64_t words[WORDS];
        live_in_all_heads(job, words, row, low, end - low);
        for (ptrdiff_t w = am_ceil_div(end - low, WORD) - 1; w >= 0; w--) {
            if (words[w]) return low + w * WORD + WORD - __builtin_clzll(words[w]);
        }
    }
    return begin;
}

/* Widens the bounds of a batch row so that they include the live pairs of rows begin … end - 1. Only what
 * lies outside of the bounds known so far is searched. */
static void widen(const extent_job *job, bounds *known, const char *data, ptrdiff_t begin, ptrdiff_t end)
{
    ptrdiff_t columns = job->mask_rows.columns.count, stride = job->mask_rows.rows.stride, found;
    ptrdiff_t first_row = -1, last_row = -1; /* the rows whose first, and whose last, live column is known */
    if (atomic_load(&known->row_begin) > begin) {
        for (found = columns; begin < end; begin++) {
            found = first_live(job, data + begin * stride, 0, columns);
            if (found < columns) break;
        }
        if (begin == end) return;
        am_lower_to(&known->row_begin, begin);
        am_lower_to(&known->column_begin, found);
        first_row = begin;
    }
    if (atomic_load(&known->row_end) < end) {
        for (found = 0; begin < end; end--) {
            found = last_live(job, data + (end - 1) * stride, 0, columns);
            if (found > 0) break;
        }
        if (begin == end) return;
        am_raise_to(&known->row_end, end);
        am_raise_to(&known->column_end, found);
        last_row = end - 1;
    }
    for (ptrdiff_t r = begin; r < end; r++) {
        ptrdiff_t low = atomic_load(&known->column_begin), high = atomic_load(&known->column_end);
        if (low == 0 && high == columns) return;
        if (r != first_row) am_lower_to(&known->column_begin, first_live(job, data + r * stride, 0, low));
        if (r != last_row) am_raise_to(&known->column_end, last_live(job, data + r * stride, high, columns));
    }
}

/* A task takes some rows of one batch row. Rows at both ends come before those between them, since they tend
 * to widen the bounds most. */
static am_status extent_task(void *arg, ptrdiff_t index, am_team *team)
{
    (void)team; /* am_parallel makes a checkpoint between tasks, of which many are short */
    const extent_job *job = arg;
    ptrdiff_t b = index / job->tasks, t = index % job->tasks;
    ptrdiff_t begin = (t % 2 ? job->tasks - 1 - t / 2 : t / 2) * job->task_rows;
    ptrdiff_t end = am_min(begin + job->task_rows, job->mask_rows.rows.count);
    widen(job, &job->bounds[b], am_mask_plane(&job->mask_rows, b, 0), begin, end);
    return AM_OK;
}

static am_extent extent_of(const am_mask_rows *mask_rows, bounds *known)
{
    ptrdiff_t range[4] = {0};
    if (atomic_load(&known->row_begin) < atomic_load(&known->row_end)) {
        range_in_array(&mask_rows->rows, atomic_load(&known->row_begin), atomic_load(&known->row_end),
                       &range[0], &range[1]);
        range_in_array(&mask_rows->columns, atomic_load(&known->column_begin),
                       atomic_load(&known->column_end), &range[2], &range[3]);
    }
    const ptrdiff_t *q = range + (mask_rows->transposed ? 2 : 0),
                    *k = range + (mask_rows->transposed ? 0 : 2);
    return (am_extent){.q_begin = q[0], .q_end = q[1], .k_begin = k[0], .k_end = k[1]};
}

/* The number of rows of a task. */
static ptrdiff_t task_rows_of(const am_mask_rows *mask_rows)
{
    ptrdiff_t bytes = mask_rows->columns.count > TASK_BYTES / mask_rows->size
                          ? TASK_BYTES
                          : mask_rows->columns.count * mask_rows->size;
    return am_max(TASK_BYTES / bytes / mask_rows->heads, 1);
}

/* The bytes that a task reads. */
static ptrdiff_t task_bytes_of(const am_mask_rows *mask_rows)
{
    const ptrdiff_t rows = am_min(task_rows_of(mask_rows), mask_rows->rows.count);
    return rows * mask_rows->heads * mask_rows->columns.count * mask_rows->size;
}

am_status am_find_extents(const am_context *context, const am_array *mask, am_head_rule rule,
                          am_extent *extents)
{
    bool empty = mask->shape.token == 0 || mask->shape.channel == 0 || mask->shape.head == 0;
    am_extent whole = {0, mask->shape.token, 0, mask->shape.channel}, none = {0};
    for (ptrdiff_t b = 0; b < mask->shape.batch; b++) {
        bool vacuous =
            rule == AM_ALL_HEADS && mask->shape.head == 0 && mask->shape.token > 0 && mask->shape.channel > 0;
        extents[b] = vacuous ? whole : none;
    }
    if (empty || mask->shape.batch == 0) return AM_OK;
    extent_job job = {.mask_rows = am_mask_rows_of(context->kernels, mask), .rule = rule};
    job.task_rows = task_rows_of(&job.mask_rows);
    job.tasks = am_ceil_div(job.mask_rows.rows.count, job.task_rows);
    const ptrdiff_t batch = job.mask_rows.batch;
    job.bounds = malloc((size_t)batch * sizeof *job.bounds);
    if (!job.bounds) return AM_NO_MEMORY;
    for (ptrdiff_t b = 0; b < batch; b++) {
        atomic_init(&job.bounds[b].row_begin, job.mask_rows.rows.count);
        atomic_init(&job.bounds[b].row_end, 0);
        atomic_init(&job.bounds[b].column_begin, job.mask_rows.columns.count);
        atomic_init(&job.bounds[b].column_end, 0);
    }
    am_status status =
        am_parallel_bytes(context, batch * job.tasks, task_bytes_of(&job.mask_rows), extent_task, &job);
    for (ptrdiff_t b = 0; b < mask->shape.batch; b++)
        extents[b] = extent_of(&job.mask_rows, &job.bounds[batch == 1 ? 0 : b]);
    free(job.bounds);
    return status;
}

/* --- Padding --- */

typedef struct {
    am_mask_rows mask_rows;
    ptrdiff_t task_rows, tasks; /* rows of a task; tasks of a batch row */
    ptrdiff_t words;
    _Atomic uint64_t *columns; /* [batch, words]: bit i is set if column i has a live pair */
    int32_t *row_ids, *column_ids;
} padding_job;

/* A task takes some rows of one batch row, piece by piece, so that the marks of a piece's columns stay in the
 * cache. */
static am_status padding_task(void *arg, ptrdiff_t index, am_team *team)
{
    const padding_job *job = arg;
    const am_mask_rows *mask_rows = &job->mask_rows;
    ptrdiff_t b = index / job->tasks, first = index % job->tasks * job->task_rows;
    ptrdiff_t end = am_min(first + job->task_rows, mask_rows->rows.count),
              piece = PIECE_BYTES / mask_rows->size;
    int32_t *ids = job->row_ids + b * mask_rows->rows.length;
    for (ptrdiff_t r = first; r < end; r++) ids[r] = -1;
    for (ptrdiff_t begin = 0; begin < mask_rows->columns.count; begin += piece) {
        _Alignas(64) char seen[PIECE_BYTES];
        ptrdiff_t count = am_min(piece, mask_rows->columns.count - begin);
        memset(seen, 0, (size_t)(count * mask_rows->size));
        for (ptrdiff_t r = first; r < end; r++) {
            bool any = false;
            for (ptrdiff_t h = 0; h < mask_rows->heads; h++) {
                const char *row = am_mask_plane(mask_rows, b, h) + r * mask_rows->rows.stride;
                any |= am_mask_rows_collect(mask_rows, seen, row, begin, count);
            }
            if (any) ids[r] = 0;
        }
        uint64_t bits[PIECE_BYTES / WORD];
        mask_rows->kernels->masks.pack[mask_rows->lane](bits, seen, count);
        for (ptrdiff_t w = 0; w < am_ceil_div(count, WORD); w++)
            atomic_fetch_or_explicit(&job->columns[b * job->words + begin / WORD + w], bits[w],
                                     memory_order_relaxed);
        am_status status = am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

/* Converts ids from the order of rows or columns to that of the array. */
static void ids_to_array_order(int32_t *ids, const am_axis *axis)
{
    for (ptrdiff_t i = axis->count; i < axis->length; i++) ids[i] = ids[0];
    if (!axis->backwards) return;
    for (ptrdiff_t i = 0, j = axis->length - 1; i < j; i++, j--) {
        int32_t swap = ids[i];
        ids[i] = ids[j];
        ids[j] = swap;
    }
}

/* Writes the ids of a batch row's columns, and brings those of its rows to the order of the array. */
static am_status order_task(void *arg, ptrdiff_t b, am_team *team)
{
    const padding_job *job = arg;
    int32_t *ids = job->column_ids + b * job->mask_rows.columns.length;
    (void)team;
    for (ptrdiff_t w = 0; w < job->words; w++) {
        uint64_t bits = atomic_load_explicit(&job->columns[b * job->words + w], memory_order_relaxed);
        ptrdiff_t count = am_min(WORD, job->mask_rows.columns.count - w * WORD);
        job->mask_rows.kernels->masks.expand_bits[AM_LANE_32](ids + w * WORD, bits, count, 0, UINT32_MAX);
    }
    ids_to_array_order(ids, &job->mask_rows.columns);
    ids_to_array_order(job->row_ids + b * job->mask_rows.rows.length, &job->mask_rows.rows);
    return AM_OK;
}

/* Copies of the first row, for rows that share its memory. */
typedef struct {
    int32_t *ids[2];
    ptrdiff_t lengths[2], distinct;
} copy_job;

static am_status copy_task(void *arg, ptrdiff_t index, am_team *team)
{
    const copy_job *job = arg;
    (void)team;
    for (int side = 0; side < 2; side++)
        memcpy(job->ids[side] + (job->distinct + index) * job->lengths[side], job->ids[side],
               (size_t)job->lengths[side] * sizeof(int32_t));
    return AM_OK;
}

typedef struct {
    int32_t *ids;
    ptrdiff_t count;
} mark_job;

enum { MARKED = 1 << 14 }; /* ids of a task */

static am_status mark_task(void *arg, ptrdiff_t index, am_team *team)
{
    const mark_job *job = arg;
    (void)team;
    memset(job->ids + index * MARKED, 0xff,
           (size_t)am_min(MARKED, job->count - index * MARKED) * sizeof *job->ids);
    return AM_OK;
}

am_status am_mark_all_padding(const am_context *context, int32_t *ids, ptrdiff_t count)
{
    mark_job job = {ids, count};
    return am_parallel_bytes(context, am_ceil_div(count, MARKED), MARKED * sizeof *ids, mark_task, &job);
}

am_status am_mark_padding(const am_context *context, const am_array *mask, int32_t *q_ids, int32_t *k_ids)
{
    if (mask->shape.batch == 0) return AM_OK;
    if (mask->shape.head == 0 || mask->shape.token == 0 || mask->shape.channel == 0) {
        const am_status status = am_mark_all_padding(context, q_ids, mask->shape.batch * mask->shape.token);
        return status == AM_OK ? am_mark_all_padding(context, k_ids, mask->shape.batch * mask->shape.channel)
                               : status;
    }
    padding_job job = {.mask_rows = am_mask_rows_of(context->kernels, mask)};
    const ptrdiff_t batch = job.mask_rows.batch;
    job.column_ids = job.mask_rows.transposed ? q_ids : k_ids;
    job.row_ids = job.mask_rows.transposed ? k_ids : q_ids;
    job.task_rows = task_rows_of(&job.mask_rows);
    job.tasks = am_ceil_div(job.mask_rows.rows.count, job.task_rows);
    job.words = am_ceil_div(job.mask_rows.columns.count, WORD);
    job.columns = calloc((size_t)(batch * job.words), sizeof *job.columns);
    if (!job.columns) return AM_NO_MEMORY;
    am_status status =
        am_parallel_bytes(context, batch * job.tasks, task_bytes_of(&job.mask_rows), padding_task, &job);
    const ptrdiff_t row_bytes = (mask->shape.token + mask->shape.channel) * (ptrdiff_t)sizeof *q_ids;
    if (status == AM_OK) status = am_parallel_bytes(context, batch, row_bytes, order_task, &job);
    copy_job copies = {{q_ids, k_ids}, {mask->shape.token, mask->shape.channel}, batch};
    if (status == AM_OK)
        status = am_parallel_bytes(context, mask->shape.batch - batch, row_bytes, copy_task, &copies);
    free(job.columns);
    return status;
}
