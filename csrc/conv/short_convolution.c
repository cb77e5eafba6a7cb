/* short_convolution.c – the forward convolution, and a step of it.
 *
 * A task is a piece of the tokens of all sequences, and some channels. Kernels read rows where they lie, if
 * they are of the type of the sums and their channels are contiguous; others are copied to a window first. A
 * result depends only on the W tokens up to its own, so pieces may begin anywhere. */
#include "conv/short_convolution.h"

#include <stdint.h>
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/runtime/workspaces.h"
#include "conv/short_convolution_rows.h"

enum {
    DIRECT_LANES =
        1024, /* channels of a task where rows are not copied: four rows stay in the first-level cache */
    DIRECT_TOKENS = 128, /* between two checkpoints */
    STEP_LANES = 512,    /* of a step, whose window stays in the first-level cache */
    STEP_TASK = 1 << 15, /* elements of a step's task */
    LINE = 64,           /* bytes of a line of the cache */
    /* Systems may report the caches of all groups of cores together, of which a core has one. Results of 32
     * MB take 1.7 and not 2.4 ms on Zen 5, where 384 MB are reported. */
    MOST_CACHE = 32 << 20,
};

typedef struct {
    const am_short_conv *conv;
    const am_kernels *kernels;
    ptrdiff_t size, lanes, bands; /* size: of an element of x; lanes: channels of a task */
    ptrdiff_t shift;          /* channels that the first task lacks, so that others begin at whole lines */
    ptrdiff_t tokens, pieces; /* tokens: of a piece */
    ptrdiff_t window;         /* rows of the window */
    bool src_direct, dst_direct, stream;
    am_workspaces workspaces;
} conv_job;

static am_conv_place place_of(const conv_job *job, ptrdiff_t band)
{
    const ptrdiff_t end = am_min((band + 1) * job->lanes - job->shift, job->conv->channels),
                    begin = am_max(band * job->lanes - job->shift, 0);
    return am_conv_place_of(job->conv, job->kernels, begin, end - begin, job->conv->x.type);
}

/* Memory of a task: weights and bias, a window, and the results. */
typedef struct {
    char *weight, *window, *results;
} buffers;

static ptrdiff_t lay_out(const void *arg, char *memory, void *parts)
{
    const conv_job *job = arg;
    const ptrdiff_t sum = (ptrdiff_t)am_size_of(job->conv->type);
    buffers *b = parts;
    ptrdiff_t used = 0;
    b->weight = am_take(memory, &used, (job->conv->width + 1) * job->lanes * sum);
    b->window = am_take(memory, &used, job->window * job->lanes * job->size);
    b->results = am_take(memory, &used, job->window * job->lanes * job->size);
    return used;
}

static am_status make_workspaces(conv_job *job, int threads)
{
    return am_workspaces_make(&job->workspaces, threads, lay_out, job, sizeof(buffers));
}

/* Results first … last - 1 of a sequence. */
static am_status convolve(const conv_job *job, const am_conv_place *p, const buffers *b, ptrdiff_t first,
                          ptrdiff_t last, am_team *team)
{
    const am_short_conv *c = job->conv;
    const ptrdiff_t history = c->width - 1, copied = am_conv_tokens(c->width);
    for (ptrdiff_t t = first, count; t < last; t += count) {
        const bool direct = job->src_direct && t >= history;
        count = am_min(last - t, direct && job->dst_direct ? DIRECT_TOKENS : copied);
        if (job->src_direct && !direct) count = am_min(count, history - t);
        am_conv_tile tile = am_conv_tile_of(p, count);
        tile.silu = c->silu;
        const char *src = b->window;
        if (direct) {
            src = am_conv_at(p, &c->x, p->first + t - history);
            tile.src_stride = c->x.stride.token / job->size;
        } else {
            am_conv_load_window(p, b->window, t, count);
        }
        char *dst = b->results;
        if (job->dst_direct) {
            dst = am_conv_at(p, &c->out, p->first + t);
            tile.dst_stride = c->out.stride.token / job->size;
            tile.stream = job->stream && (uintptr_t)dst % LINE == 0;
        }
        am_status status = am_conv_results(p, dst, src, tile, team);
        if (status == AM_OK) status = am_checkpoint(team);
        if (status != AM_OK) return status;
        if (!job->dst_direct) am_conv_store(p, p->type, &c->out, p->first + t, dst, count);
    }
    return AM_OK;
}

static am_status convolve_task(void *arg, ptrdiff_t index, am_team *team)
{
    const conv_job *job = arg;
    const am_short_conv *c = job->conv;
    am_conv_place p = place_of(job, index % job->bands);
    const ptrdiff_t begin = index / job->bands * job->tokens,
                    end = am_min(begin + job->tokens, am_conv_start(c, c->sequences));
    const buffers *b = am_workspace(&job->workspaces);
    am_conv_load_weights(&p, b->weight, false);
    am_status status = AM_OK;
    for (ptrdiff_t n = am_conv_sequence_of(c, begin);
         status == AM_OK && n < c->sequences && am_conv_start(c, n) < end; n++) {
        ptrdiff_t first, last;
        am_conv_part(&p, n, begin, end, &first, &last);
        status = convolve(job, &p, b, first, last, team);
    }
    return status;
}

/* The state behind a sequence. */
static am_status state_task(void *arg, ptrdiff_t index, am_team *team)
{
    const conv_job *job = arg;
    const am_short_conv *c = job->conv;
    am_conv_place p = place_of(job, index % job->bands);
    ptrdiff_t first, last;
    am_conv_part(&p, index / job->bands, 0, am_conv_start(c, c->sequences), &first, &last);
    const buffers *b = am_workspace(&job->workspaces);
    am_conv_load_window(&p, b->window, p.length, 0);
    am_conv_store(&p, p.type, &c->after, 0, b->window, c->width - 1);
    return am_checkpoint(team);
}

/* Results that are larger than the cache are written around it, since they would be evicted before they are
 * read. That takes whole lines of the cache, where the memory of NumPy seldom begins. */
static void choose_stream(conv_job *job)
{
    const am_array *out = &job->conv->out;
    const ptrdiff_t tokens = am_conv_start(job->conv, job->conv->sequences);
    const uintptr_t places =
        (uintptr_t)out->stride.batch | (uintptr_t)out->stride.token | (uintptr_t)(job->lanes * job->size);
    job->stream = job->dst_direct && places % LINE == 0 && tokens > 0 &&
                  tokens >= am_min(am_cache_bytes(), MOST_CACHE) / job->size / job->conv->channels;
    const ptrdiff_t beyond = (ptrdiff_t)((uintptr_t)out->data % LINE);
    if (!job->stream || beyond == 0) return;
    job->shift = job->lanes - (LINE - beyond) / job->size;
    job->bands = am_ceil_div(job->conv->channels + job->shift, job->lanes);
}

static conv_job job_of(const am_context *context, const am_short_conv *conv)
{
    conv_job job = {.conv = conv, .kernels = context->kernels, .size = (ptrdiff_t)am_size_of(conv->x.type)};
    job.src_direct = am_is_plain(&conv->x, 1);
    job.dst_direct = am_is_plain(&conv->out, 1);
    job.lanes = am_conv_lanes(conv, job.src_direct && job.dst_direct ? DIRECT_LANES : AM_CONV_LANES);
    job.bands = am_ceil_div(conv->channels, job.lanes);
    job.window = am_conv_tokens(conv->width) + conv->width - 1;
    return job;
}

am_status am_short_conv_forward(const am_context *context, const am_short_conv *conv)
{
    if (conv->channels == 0) return AM_OK;
    if (conv->width > AM_CONV_WIDEST) return AM_NO_MEMORY;
    conv_job job = job_of(context, conv);
    const ptrdiff_t tokens = am_conv_start(conv, conv->sequences);
    job.tokens = am_max(am_max(AM_CONV_TASK / job.lanes, 8 * conv->width), 1);
    job.pieces = am_ceil_div(tokens, job.tokens);
    choose_stream(&job);
    am_status status = make_workspaces(&job, context->threads);
    if (status == AM_OK) status = am_parallel(context, job.pieces * job.bands, 1, convolve_task, &job);
    const ptrdiff_t grain = AM_CONV_TASK / am_max(conv->width * job.lanes, 1);
    if (status == AM_OK && conv->after.data && conv->width > 1)
        status = am_parallel(context, conv->sequences * job.bands, am_max(grain, 1), state_task, &job);
    am_workspaces_free(&job.workspaces);
    return status;
}

typedef struct {
    conv_job job;
    const ptrdiff_t *slots;
    ptrdiff_t rows, row_blocks; /* rows: of a task */
} step_job;

static am_status step_task(void *arg, ptrdiff_t index, am_team *team)
{
    (void)team;
    const step_job *step = arg;
    const conv_job *job = &step->job;
    const am_short_conv *c = job->conv;
    am_conv_place p = place_of(job, index % job->bands);
    const ptrdiff_t begin = index / job->bands * step->rows, end = am_min(begin + step->rows, c->sequences),
                    history = c->width - 1;
    const buffers *b = am_workspace(&job->workspaces);
    am_conv_load_weights(&p, b->weight, false);
    am_conv_tile tile = am_conv_tile_of(&p, 1);
    tile.silu = c->silu;
    char *const last = b->window + history * p.row;
    for (ptrdiff_t row = begin; row < end; row++) {
        const ptrdiff_t slot = step->slots ? step->slots[row] : row;
        if (slot >= 0) {
            p.sequence = slot;
            am_conv_load(&p, p.type, b->window, &c->before, 0, history);
            p.sequence = row;
            am_conv_load(&p, p.type, last, &c->x, 0, 1);
            am_conv_kernel (&p)(b->results, b->window, &tile);
            p.sequence = slot;
            am_conv_store(&p, p.type, &c->before, 0, b->window + p.row, history);
        } else {
            memset(b->results, 0, (size_t)p.row);
        }
        p.sequence = row;
        am_conv_store(&p, p.type, &c->out, 0, b->results, 1);
    }
    return AM_OK;
}

am_status am_short_conv_step(const am_context *context, const am_short_conv *conv, const ptrdiff_t *slots)
{
    if (conv->channels == 0) return AM_OK;
    if (conv->width > AM_CONV_WIDEST) return AM_NO_MEMORY;
    step_job step = {.job = job_of(context, conv), .slots = slots};
    step.job.lanes = am_conv_lanes(conv, STEP_LANES);
    step.job.bands = am_ceil_div(conv->channels, step.job.lanes);
    step.job.window = conv->width;
    step.rows = am_max(STEP_TASK / (step.job.lanes * conv->width), 1);
    step.row_blocks = am_ceil_div(conv->sequences, step.rows);
    const ptrdiff_t tasks = step.row_blocks * step.job.bands;
    am_status status = make_workspaces(&step.job, context->threads);
    if (status == AM_OK) status = am_parallel(context, tasks, 1, step_task, &step);
    am_workspaces_free(&step.job.workspaces);
    return status;
}
