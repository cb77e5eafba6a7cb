/* packed.c – fills arrays over the tokens of packed sequences, and counts the tokens of mask rows. */
#include "core/arrays/packed.h"

#include "core/runtime/sizes.h"
#include "core/arrays/convert.h"

enum {
    TASK_TOKENS = 1 << 15,
    PIECE_BYTES = 1 << 17, /* between two checkpoints */
    TASK_BYTES = 1 << 20,  /* worth another thread: about 40 µs, the time that a busy thread takes to start */
    TILE_BYTES = 1 << 13,
};

typedef struct {
    const am_kernels *kernels;
    am_token_kind kind;
    am_dtype type;
    char *dst;
    const ptrdiff_t *starts;
    ptrdiff_t sequences;
} token_job;

ptrdiff_t am_sequence_of(const ptrdiff_t *starts, ptrdiff_t sequences, ptrdiff_t t)
{
    return am_last_up_to(starts, sequences, sizeof *starts, t);
}

static am_status fill_task(void *arg, ptrdiff_t index, am_team *team)
{
    (void)team;
    const token_job *job = arg;
    const am_kernels *k = job->kernels;
    ptrdiff_t total = job->starts[job->sequences];
    ptrdiff_t begin = index * TASK_TOKENS, end = begin + am_min(TASK_TOKENS, total - begin);
    ptrdiff_t sequence = am_sequence_of(job->starts, job->sequences, begin);
    char *dst = job->dst + begin * (job->kind == AM_PAIRS ? 2 : 1) * (ptrdiff_t)am_size_of(job->type);
    if (job->type == AM_INT32) {
        am_fill_tokens_32 *const fill[] = {[AM_POSITIONS] = k->sequences.fill_positions_32,
                                           [AM_SEQUENCES] = k->sequences.fill_sequences_32,
                                           [AM_PAIRS] = k->sequences.fill_pairs_32};
        fill[job->kind]((int32_t *)dst, job->starts, sequence, begin, end);
    } else {
        am_fill_tokens_64 *const fill[] = {[AM_POSITIONS] = k->sequences.fill_positions_64,
                                           [AM_SEQUENCES] = k->sequences.fill_sequences_64,
                                           [AM_PAIRS] = k->sequences.fill_pairs_64};
        fill[job->kind]((int64_t *)dst, job->starts, sequence, begin, end);
    }
    return AM_OK;
}

am_status am_fill_tokens(const am_context *context, am_token_kind kind, am_dtype type, void *dst,
                         const ptrdiff_t *starts, ptrdiff_t sequences)
{
    token_job job = {.kernels = context->kernels,
                     .kind = kind,
                     .type = type,
                     .dst = dst,
                     .starts = starts,
                     .sequences = sequences};
    ptrdiff_t total = starts[sequences];
    return am_parallel(context, am_ceil_div(total, TASK_TOKENS), 1, fill_task, &job);
}

typedef struct {
    const am_mask_lens *mask;
    am_count_nonzero *count;
    ptrdiff_t size;
} count_job;

static am_status count_task(void *arg, ptrdiff_t row, am_team *team)
{
    const count_job *job = arg;
    const am_mask_lens *m = job->mask;
    const char *src = m->mask + row * m->row_stride;
    _Alignas(8) char tile[TILE_BYTES];
    ptrdiff_t columns = m->column_stride == job->size ? PIECE_BYTES : TILE_BYTES / job->size;
    int64_t len = 0;
    for (ptrdiff_t begin = 0; begin < m->columns; begin += columns) {
        ptrdiff_t count = am_min(columns, m->columns - begin);
        const char *from = src + begin * m->column_stride;
        if (m->column_stride != job->size) {
            am_copy_2d(tile, 0, job->size, from, 0, m->column_stride, 1, count, (size_t)job->size);
            from = tile;
        }
        len += job->count(from, count);
        if (begin + count == m->columns) break; /* a checkpoint costs as much as a short row */
        am_status status = am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    m->lens[row] = len;
    return AM_OK;
}

am_status am_count_rows(const am_context *context, const am_mask_lens *mask)
{
    count_job job = {.mask = mask,
                     .count = context->kernels->masks.nonzero[am_lane_of(mask->type)],
                     .size = (ptrdiff_t)am_size_of(mask->type)};
    ptrdiff_t row_bytes = mask->columns * job.size;
    return am_parallel(context, mask->rows, row_bytes ? TASK_BYTES / row_bytes : mask->rows, count_task,
                       &job);
}
