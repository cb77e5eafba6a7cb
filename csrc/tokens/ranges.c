/* ranges.c – fills masks from ranges of tokens. */
#include "tokens/ranges.h"

#include "core/runtime/sizes.h"
#include "core/arrays/convert.h"

enum { FILL_BYTES = 1 << 18 };

typedef struct {
    const am_kernels *kernels;
    const am_boxes *boxes;
    uint64_t live, dead;     /* repeated to eight bytes */
    ptrdiff_t pieces, piece; /* pieces of a row, and elements of a piece */
    bool stream;
} box_job;

static ptrdiff_t clamp(ptrdiff_t value, ptrdiff_t low, ptrdiff_t high)
{
    return value < low ? low : value > high ? high : value;
}

static void fill_range(const box_job *job, char *row, ptrdiff_t begin, ptrdiff_t end, uint64_t pattern)
{
    const am_boxes *t = job->boxes;
    char *dst = row + begin * t->key_stride;
    if (t->key_stride == t->size)
        job->kernels->masks.fill_bytes(dst, pattern, (size_t)((end - begin) * t->size), job->stream);
    else
        am_copy_2d(dst, 0, t->key_stride, (const char *)&pattern, 0, 0, 1, end - begin, (size_t)t->size);
}

static am_status box_task(void *arg, ptrdiff_t index, am_team *team)
{
    const box_job *job = arg;
    const am_boxes *t = job->boxes;
    ptrdiff_t row = index / job->pieces, b = row / t->queries, q = row % t->queries;
    ptrdiff_t begin = index % job->pieces * job->piece, end = am_min(begin + job->piece, t->keys);
    const am_extent *box = &t->boxes[b];
    bool live = box->q_begin <= q && q < box->q_end;
    ptrdiff_t from = live ? clamp(box->k_begin, begin, end) : end,
              to = live ? clamp(box->k_end, from, end) : end;
    char *dst = t->data + b * t->batch_stride + q * t->query_stride;
    fill_range(job, dst, begin, from, job->dead);
    fill_range(job, dst, from, to, job->live);
    fill_range(job, dst, to, end, job->dead);
    return am_checkpoint(team);
}

am_status am_fill_boxes(const am_context *context, const am_boxes *boxes)
{
    if (boxes->batch == 0 || boxes->queries == 0 || boxes->keys == 0) return AM_OK;
    ptrdiff_t rows = boxes->batch * boxes->queries, piece = FILL_BYTES / boxes->size;
    box_job job = {.kernels = context->kernels,
                   .boxes = boxes,
                   .live = am_repeated(boxes->live, boxes->size),
                   .dead = am_repeated(boxes->dead, boxes->size),
                   .pieces = am_ceil_div(boxes->keys, piece),
                   .piece = piece,
                   .stream = rows > am_cache_bytes() / 2 / boxes->size / boxes->keys};
    ptrdiff_t grain = am_max(piece / boxes->keys, 1);
    return am_parallel(context, rows * job.pieces, grain, box_task, &job);
}
