/* short_convolution_backward.c – gradients of short convolutions.
 *
 * With dz[t] = dout[t], times the slope of silu at z[t], which is computed again; and with what came in
 * behind the state at its place after the sequence:
 *
 *     d_x[t] = Σ weight[W - 1 - k] dz[t + k],   d_weight[j] = Σ dz[t] x[t - W + 1 + j],   d_bias = Σ dz[t]
 *
 * The first is a convolution with reversed weights. Near the ends of a sequence it has fewer terms; they are
 * left out, and not multiplied by zeros, as weights may be infinite. Sums over tokens are taken in pieces
 * that follow from the shapes alone, and then added in order. */
#include <stdlib.h>
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/runtime/workspaces.h"
#include "conv/short_convolution_rows.h"

enum { MOST_PIECES = 64 }; /* whose sums are kept at once */

typedef struct {
    const am_short_conv_gradients *gradients;
    const am_kernels *kernels;
    ptrdiff_t size, lanes, bands;
    ptrdiff_t tokens, pieces; /* tokens: of a piece */
    ptrdiff_t chunk;          /* tokens at once */
    double *sums;             /* [pieces][bands][W + 1][room of lanes] */
    am_workspaces workspaces;
} gradient_job;

/* Memory of a task; rows of `lanes` numbers. */
typedef struct {
    char *weight, *reversed; /* [W + 1], [W] */
    char *window, *dz, *dout, *dx;
    char *after;   /* a row of the state's gradient */
    double *total; /* of all pieces, for each channel */
} buffers;

static ptrdiff_t lay_out(const void *arg, char *memory, void *parts)
{
    const gradient_job *job = arg;
    const ptrdiff_t width = job->gradients->conv.width, row = job->lanes * job->size,
                    more = job->chunk + width - 1;
    buffers *b = parts;
    ptrdiff_t used = 0;
    b->total = (double *)am_take(memory, &used, job->lanes * (ptrdiff_t)sizeof *b->total);
    b->weight = am_take(memory, &used, (width + 1) * row);
    b->reversed = am_take(memory, &used, width * row);
    b->after = am_take(memory, &used, row);
    b->dz = am_take(memory, &used, more * row);
    b->dout = am_take(memory, &used, more * row);
    b->dx = am_take(memory, &used, job->chunk * row);
    b->window = am_take(memory, &used, (more + width - 1) * row);
    return used;
}

static am_conv_place place_of(const gradient_job *job, ptrdiff_t band)
{
    const am_short_conv *c = &job->gradients->conv;
    const ptrdiff_t channel = band * job->lanes, lanes = am_min(job->lanes, c->channels - channel);
    return am_conv_place_of(c, job->kernels, channel, lanes, c->type);
}

static void load_weights(am_conv_place *p, const buffers *b)
{
    am_conv_load_weights(p, b->reversed, true);
    am_conv_load_weights(p, b->weight, false);
}

/* dz of `count` tokens from `token` on, and the window that they are made of. */
static am_status find_dz(const am_conv_place *p, const buffers *b, ptrdiff_t token, ptrdiff_t count,
                         am_team *team)
{
    const am_short_conv *c = p->conv;
    am_conv_load_window(p, b->window, token, count);
    am_conv_load(p, p->type, c->silu ? b->dout : b->dz, &c->out, p->first + token, count);
    if (!c->silu) return AM_OK;
    const am_status status = am_conv_results(p, b->dz, b->window, am_conv_tile_of(p, count), team);
    if (status == AM_OK)
        am_conv_kernels_of(p->kernels, c->type)->silu_gradient(b->dz, b->dout, count * p->lanes);
    return status;
}

/* Adds up the gradients of the weights: of `count` tokens, whose dz and window are known. */
static am_status add_sums(const am_conv_place *p, const buffers *b, double *sums, ptrdiff_t count,
                          am_team *team)
{
    am_conv_tile tile = am_conv_tile_of(p, count);
    const ptrdiff_t most = am_conv_portion(&tile);
    am_status status = AM_OK;
    for (ptrdiff_t t = 0; t < count && status == AM_OK; t += most) {
        tile.steps = am_min(count - t, most);
        am_conv_kernels_of(p->kernels, p->conv->type)
            ->sums(sums, b->dz + t * p->row, b->window + t * p->row, &tile);
        if (t + most < count) status = am_checkpoint(team);
    }
    return status;
}

/* The gradients of `count` rows from `row` on, where row W - 1 is that of the first token, and those before
 * it are of the state. They have `terms` terms, of dz from b->dz + first_dz rows on; weights before
 * `first_weight` are left out. */
typedef struct {
    ptrdiff_t count, terms, first_dz, first_weight;
} sums_of_rows;

static am_status add_terms(const am_conv_place *p, const buffers *b, void *to, const void *more,
                           sums_of_rows s, am_team *team)
{
    am_conv_tile tile = am_conv_tile_of(p, s.count);
    tile.width = s.terms, tile.weight = b->reversed + s.first_weight * p->row, tile.bias = more;
    return am_conv_results(p, to, b->dz + s.first_dz * p->row, tile, team);
}

/* The gradient of row number `i` of those near an end of the sequence, at `row`; dz begins at `token`. */
static am_status find_edge(const am_conv_place *p, const buffers *b, void *to, ptrdiff_t i, ptrdiff_t row,
                           ptrdiff_t token, am_team *team)
{
    const am_short_conv *c = p->conv;
    const ptrdiff_t history = c->width - 1, first = am_max(history - row, 0),
                    last = am_min(c->width, p->length + history - row);
    const void *more = NULL;
    if (c->after.data && row >= p->length) {
        am_conv_load(p, p->type, b->after, &c->after, row - p->length, 1);
        more = b->after;
    }
    const sums_of_rows s = {.count = 1,
                            .terms = am_max(last - first, 0),
                            .first_dz = am_max(row + first - history - token, 0),
                            .first_weight = first};
    const am_conv_tile tile = am_conv_tile_of(p, 1);
    const am_status status = add_terms(p, b, to, more, s, team);
    return status == AM_OK && (i + 1) % am_conv_portion(&tile) == 0 ? am_checkpoint(team) : status;
}

/* The gradients of x, of tokens first … last - 1 of a sequence; adds up those of the weights. */
static am_status find_gradients(const gradient_job *job, const am_conv_place *p, const buffers *b,
                                ptrdiff_t first, ptrdiff_t last, double *sums, am_team *team)
{
    const am_short_conv *c = p->conv;
    const ptrdiff_t history = c->width - 1;
    for (ptrdiff_t t = first; t < last; t += job->chunk) {
        const ptrdiff_t count = am_min(job->chunk, last - t);
        const ptrdiff_t whole = am_max(am_min(count, p->length - history - t), 0);
        am_status status = find_dz(p, b, t, am_min(count + history, p->length - t), team);
        if (status == AM_OK) status = add_sums(p, b, sums, count, team);
        if (status == AM_OK)
            status = add_terms(p, b, b->dx, NULL, (sums_of_rows){.count = whole, .terms = c->width}, team);
        for (ptrdiff_t i = whole; status == AM_OK && i < count; i++)
            status = find_edge(p, b, b->dx + i * p->row, i, t + i + history, t, team);
        if (status == AM_OK) status = am_checkpoint(team);
        if (status != AM_OK) return status;
        am_conv_store(p, c->type, &job->gradients->d_x, p->first + t, b->dx, count);
    }
    return AM_OK;
}

static am_status gradient_task(void *arg, ptrdiff_t index, am_team *team)
{
    const gradient_job *job = arg;
    const am_short_conv *c = &job->gradients->conv;
    am_conv_place p = place_of(job, index % job->bands);
    const ptrdiff_t begin = index / job->bands * job->tokens,
                    end = am_min(begin + job->tokens, am_conv_start(c, c->sequences));
    double *sums = job->sums + index * (c->width + 1) * am_conv_sums_stride(job->lanes);
    memset(sums, 0, (size_t)((c->width + 1) * am_conv_sums_stride(p.lanes)) * sizeof *sums);
    const buffers *b = am_workspace(&job->workspaces);
    load_weights(&p, b);
    am_status status = AM_OK;
    for (ptrdiff_t n = am_conv_sequence_of(c, begin);
         status == AM_OK && n < c->sequences && am_conv_start(c, n) < end; n++) {
        ptrdiff_t first, last;
        am_conv_part(&p, n, begin, end, &first, &last);
        status = find_gradients(job, &p, b, first, last, sums, team);
    }
    return status;
}

/* Adds up the sums of all pieces, in order. */
static am_status join_task(void *arg, ptrdiff_t band, am_team *team)
{
    const gradient_job *job = arg;
    const am_short_conv *c = &job->gradients->conv;
    const am_conv_place p = place_of(job, band);
    const ptrdiff_t stride = am_conv_sums_stride(p.lanes),
                    one = (c->width + 1) * am_conv_sums_stride(job->lanes);
    double *const row = ((const buffers *)am_workspace(&job->workspaces))->total;
    for (ptrdiff_t j = 0; j <= c->width; j++) {
        memset(row, 0, (size_t)p.lanes * sizeof *row);
        for (ptrdiff_t piece = 0; piece < job->pieces; piece++) {
            const double *sums = job->sums + (piece * job->bands + band) * one + j * stride;
            for (ptrdiff_t i = 0; i < p.lanes; i++) row[i] += sums[i];
        }
        if (j < c->width)
            am_conv_store(&p, AM_FLOAT64, &job->gradients->d_weight, j, row, 1);
        else if (job->gradients->d_bias.data)
            am_conv_store(&p, AM_FLOAT64, &job->gradients->d_bias, 0, row, 1);
        const am_status status = j % 256 == 0 ? am_checkpoint(team) : AM_OK;
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

/* The gradient of the state before a sequence. */
static am_status state_task(void *arg, ptrdiff_t index, am_team *team)
{
    const gradient_job *job = arg;
    const am_short_conv *c = &job->gradients->conv;
    am_conv_place p = place_of(job, index % job->bands);
    ptrdiff_t first, last;
    am_conv_part(&p, index / job->bands, 0, am_conv_start(c, c->sequences), &first, &last);
    const buffers *b = am_workspace(&job->workspaces);
    load_weights(&p, b);
    am_status status = find_dz(&p, b, 0, am_min(p.length, c->width - 1), team);
    for (ptrdiff_t row = 0; status == AM_OK && row < c->width - 1; row++) {
        status = find_edge(&p, b, b->dx, row, row, 0, team);
        if (status == AM_OK) am_conv_store(&p, c->type, &job->gradients->d_before, row, b->dx, 1);
    }
    return status == AM_OK ? am_checkpoint(team) : status;
}

am_status am_short_conv_backward(const am_context *context, const am_short_conv_gradients *gradients)
{
    const am_short_conv *c = &gradients->conv;
    if (c->channels == 0) return AM_OK;
    if (c->width > AM_CONV_WIDEST) return AM_NO_MEMORY;
    gradient_job job = {.gradients = gradients, .kernels = context->kernels};
    job.size = (ptrdiff_t)am_size_of(c->type);
    job.lanes = am_conv_lanes(c, AM_CONV_LANES);
    job.bands = am_ceil_div(c->channels, job.lanes);
    job.chunk = am_conv_tokens(c->width);
    const ptrdiff_t tokens = am_conv_start(c, c->sequences);
    job.tokens =
        am_max(am_max(AM_CONV_TASK / job.lanes, 16 * (c->width + 1)), am_ceil_div(tokens, MOST_PIECES));
    job.pieces = am_ceil_div(tokens, job.tokens);
    const ptrdiff_t rows = am_product(job.pieces * job.bands, c->width + 1, (ptrdiff_t)sizeof *job.sums);
    job.sums = malloc((size_t)am_product(rows, am_conv_sums_stride(job.lanes), 1));
    am_status status = am_workspaces_make(&job.workspaces, context->threads, lay_out, &job, sizeof(buffers));
    if (!job.sums && rows) status = AM_NO_MEMORY;
    if (status == AM_OK) status = am_parallel(context, job.pieces * job.bands, 1, gradient_task, &job);
    if (status == AM_OK) status = am_parallel(context, job.bands, 1, join_task, &job);
    if (status == AM_OK && gradients->d_before.data && c->width > 1)
        status = am_parallel(context, c->sequences * job.bands, 1, state_task, &job);
    am_workspaces_free(&job.workspaces);
    free(job.sums);
    return status;
}
