/* merge.c – merges partial attention results, one query row of one head after the other. */
#include "core/attention/merge.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/runtime/sizes.h"

enum {
    LANES = 16,      /* independent sums, which the compiler puts in vectors */
    PIECE = 256,     /* channels at a time, whose sums stay in the first-level cache */
    TASK = 1 << 15,  /* elements worth handing to another thread */
    EXP_COST = 16,   /* the cost of an exponential, in elements */
    CHECK = 1 << 17, /* elements between two checkpoints */
};

typedef struct {
    const am_merge *merge;
    const am_kernels *kernels;
    ptrdiff_t rows, task_rows;
} merge_job;

/* A row of an array: batch, token, head. */
static const char *row_of(const am_array *array, const ptrdiff_t place[3])
{
    return am_token(array, place[0], place[2], place[1]);
}

#define T float
#define TYPE AM_FLOAT32
#define FN(name) name##_f32
#define EXP expf
#define LOG logf
#include "core/attention/merge_tpl.h"
#define T double
#define TYPE AM_FLOAT64
#define FN(name) name##_f64
#define EXP exp
#define LOG log
#include "core/attention/merge_tpl.h"

static am_status merge_task(void *arg, ptrdiff_t index, am_team *team)
{
    const merge_job *job = arg;
    ptrdiff_t begin = index * job->task_rows, end = am_min(begin + job->task_rows, job->rows);
    size_t count = (size_t)job->merge->count;
    void *weights = calloc(count, 2 * sizeof(double)); /* calloc checks the product */
    if (!weights) return AM_NO_MEMORY;
    am_status status = job->merge->type == AM_FLOAT64 ? merge_rows_f64(job, begin, end, weights, team)
                                                      : merge_rows_f32(job, begin, end, weights, team);
    free(weights);
    return status;
}

am_status am_merge_states(const am_context *context, const am_merge *merge)
{
    merge_job job = {.merge = merge, .kernels = context->kernels};
    job.rows = merge->shape[0] * merge->shape[1] * merge->shape[2];
    job.task_rows = am_max(TASK / merge->count / (am_min(merge->shape[3], TASK) + EXP_COST), 1);
    ptrdiff_t tasks = am_ceil_div(job.rows, job.task_rows);
    return am_parallel(context, tasks, 1, merge_task, &job);
}
