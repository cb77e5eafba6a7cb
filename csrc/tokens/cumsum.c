/* cumsum.c – plans running sums: which axis the vectors lie along, what a task is, and where elements are
 * copied through tiles.
 *
 * A segment is the range of steps of one sum: a chunk, or a sequence if there are no chunks. A lane is one
 * index of the axes other than time. Sums of different segments and lanes are independent, so the boundaries
 * of tasks may lie between any of them and the result is the same, bit for bit.
 *
 *     rows   lanes are contiguous in memory: a vector holds lanes, and takes one step after the other
 *     scan   time is contiguous in memory: a vector holds steps, and takes one lane after the other
 *
 * Elements of the source or the result are copied through a tile in the first-level cache where their type is
 * not that of the sums, or where neither lanes nor time are contiguous.
 */
#include "tokens/cumsum.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/runtime/workspaces.h"
#include "core/arrays/packed.h"

enum {
    TILE = 2048,           /* elements; 16 KB of float64 */
    TILE_LANES = 256,      /* lanes of a band, so that a tile holds a block of steps */
    TRANSPOSED_LANES = 32, /* if a tile is transposed, so that it holds a few cache lines of steps */
    LINE_LANES = 16,       /* bands end at cache lines of float32 */
    PIECE = 1 << 17,       /* elements between two checkpoints, about 50 µs */
    TASK = 1 << 15,        /* elements worth handing to another thread */
    MANY_TASKS = 2, /* tasks per thread; if there are fewer, lanes are divided so that threads are about
                       equally busy */
};

typedef struct {
    ptrdiff_t begin, end; /* steps, from one boundary of segments to another */
} span;

typedef struct {
    const am_cumsum *cumsum;
    const am_kernels *kernels;
    am_dtype type;        /* of the sums: AM_INT64, AM_FLOAT32, AM_FLOAT64 */
    am_dtype kernel_type; /* that the kernel reads and writes: `type`, or a sixteen-bit float */
    bool scan;
    bool src_direct, dst_direct; /* the kernel reads the source, or writes the result, where it lies */
    bool stream;
    ptrdiff_t lanes, src_lane, dst_lane; /* the lane axis and its strides in bytes */
    ptrdiff_t band, bands;               /* lanes per task (1 in a scan), tasks along the lane axis */
    ptrdiff_t outer[2], src_outer[2], dst_outer[2];
    span *spans;
    ptrdiff_t span_count;
    am_workspaces workspaces; /* tile_buffers, unless source and result are direct */
} plan;

/* Buffers for a region that is copied through the cache: too much for the stack of a small thread. */
typedef struct {
    _Alignas(64) double in[TILE], out[TILE];
} tile_buffers;

static ptrdiff_t lay_out(const void *job, char *memory, void *parts)
{
    (void)job;
    *(tile_buffers **)parts = (tile_buffers *)memory;
    return sizeof(tile_buffers);
}

/* Whether a kernel transposes a tile: time is contiguous, and elements are not narrower than 32 bits. */
static bool is_transposed(ptrdiff_t stride, am_dtype type)
{
    const size_t size = am_size_of(type);
    return stride == (ptrdiff_t)size && size >= 4;
}

/* Stores integer sums in the type of the result. Scaled ones are computed in float64, and truncated if the
 * result is an integer. */
static bool store_integers(const plan *p, const am_array *to, tile_buffers *tile)
{
    const am_cumsum *c = p->cumsum;
    const ptrdiff_t count = to->shape.token * to->shape.channel;
    const bool integers = am_is_integer(c->dst.type);
    if (!c->scaled && integers) return am_scatter(p->kernels, to, AM_INT64, tile->out, to->shape.channel);
    am_converter(AM_INT64, AM_FLOAT64)(p->kernels, tile->in, tile->out, count);
    for (ptrdiff_t i = 0; c->scaled && i < count; i++) tile->in[i] *= c->scale;
    if (!integers) return am_scatter(p->kernels, to, AM_FLOAT64, tile->in, to->shape.channel);
    return am_converter(AM_FLOAT64, AM_INT64)(p->kernels, tile->out, tile->in, count) &&
           am_scatter(p->kernels, to, AM_INT64, tile->out, to->shape.channel);
}

static bool sum_integers(int64_t *dst, const int64_t *src, const am_cumsum_tile *tile, int64_t *carry)
{
    bool overflow = false;
    for (ptrdiff_t i = 0; i < tile->steps; i++) {
        ptrdiff_t t = tile->reverse ? tile->steps - 1 - i : i;
        bool first = tile->period && (i == 0 || (t + tile->reverse) % tile->period == 0);
        if (first) memset(carry, 0, (size_t)tile->lanes * sizeof *carry);
        for (ptrdiff_t l = t * tile->lanes, lane = 0; lane < tile->lanes; l++, lane++) {
            overflow |= __builtin_add_overflow(carry[lane], src[l], &carry[lane]);
            dst[l] = carry[lane];
        }
    }
    return !overflow;
}

static void sum_floats(const plan *p, void *dst, const void *src, const am_cumsum_tile *tile, double *carry)
{
    const am_cumsum_kernels *k = &p->kernels->cumsum;
    (p->scan ? k->scan : k->rows)[p->kernel_type](dst, src, tile, carry,
                                                  p->cumsum->scaled ? p->cumsum->scale : 1);
}

/* The lanes of one task. */
typedef struct {
    char *dst;
    const char *src;
    ptrdiff_t lanes;
    tile_buffers *buffers; /* NULL if the kernel reads and writes everything where it lies */
    am_team *team;
    ptrdiff_t done; /* elements since the last checkpoint */
} band;

/* The steps of a region in memory, which a scan takes as one row. */
static am_array rows_of(const plan *p, const am_array *a, const char *first, ptrdiff_t lane,
                        const am_cumsum_tile *tile)
{
    if (p->scan) return am_one_row(first, a->type, a->stride.token, tile->steps);
    am_array rows = am_rows_from(a, first, tile->steps);
    rows.shape.channel = tile->lanes, rows.stride.channel = lane;
    return rows;
}

/* Sums one region of a band, from step `first` in memory on. */
static bool sum_region(const plan *p, const band *l, ptrdiff_t first, ptrdiff_t steps, ptrdiff_t period,
                       void *carry)
{
    const am_cumsum *c = p->cumsum;
    ptrdiff_t size = (ptrdiff_t)am_size_of(p->kernel_type), lanes = l->lanes;
    char *dst = l->dst + first * c->dst.stride.token;
    const char *src = l->src + first * c->src.stride.token;
    am_cumsum_tile tile = {
        .steps = steps,
        .period = period,
        .lanes = lanes,
        .dst_stride = p->dst_direct ? c->dst.stride.token / size : lanes,
        .src_stride = p->src_direct ? c->src.stride.token / size : lanes,
        .reverse = c->reverse,
        .stream = p->stream,
    };
    if (p->src_direct && p->dst_direct) {
        sum_floats(p, dst, src, &tile, carry);
        return true;
    }
    tile_buffers *scratch = l->buffers;
    const am_array from = rows_of(p, &c->src, src, p->src_lane, &tile),
                   to = rows_of(p, &c->dst, dst, p->dst_lane, &tile);
    bool fits = p->src_direct || am_gather(p->kernels, p->type, scratch->in, from.shape.channel, &from);
    if (p->type == AM_INT64) {
        fits &= sum_integers((int64_t *)scratch->out, (const int64_t *)scratch->in, &tile, carry);
        return fits && store_integers(p, &to, scratch);
    }
    sum_floats(p, p->dst_direct ? (void *)dst : scratch->out, p->src_direct ? (const void *)src : scratch->in,
               &tile, carry);
    return p->dst_direct || am_scatter(p->kernels, &to, p->type, scratch->out, to.shape.channel);
}

/* Sums steps begin … end - 1 in regions of `piece` steps, in the direction of the sums. */
static am_status sum_steps(const plan *p, band *l, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t piece,
                           ptrdiff_t period)
{
    const am_cumsum *c = p->cumsum;
    double carry[AM_CUMSUM_LANES + AM_CUMSUM_PAD]; /* or int64_t, whose zero has the same bits */
    memset(carry, 0, (size_t)(l->lanes + AM_CUMSUM_PAD) * sizeof *carry);
    /* Pieces begin at multiples of `piece` from `begin`, so that they hold whole chunks. In reverse, a
     * shorter one may come first. */
    ptrdiff_t first_piece = c->reverse && period ? (end - begin - 1) % piece + 1 : piece;
    for (ptrdiff_t left = end - begin; left > 0;) {
        ptrdiff_t steps = am_min(left == end - begin ? first_piece : piece, left);
        ptrdiff_t first = c->reverse ? begin + left - steps : end - left;
        if (!sum_region(p, l, first, steps, period, carry)) return AM_OVERFLOW;
        left -= steps;
        l->done += steps * l->lanes;
        if (l->done >= PIECE) {
            am_status status = am_checkpoint(l->team);
            if (status != AM_OK) return status;
            l->done = 0;
        }
    }
    return AM_OK;
}

/* Sums the part of a sequence that lies in a span. The kernel takes many short chunks at once, and long
 * segments in pieces. */
static am_status sum_sequence(const plan *p, band *l, ptrdiff_t begin, ptrdiff_t end)
{
    const am_cumsum *c = p->cumsum;
    ptrdiff_t capacity = p->src_direct && p->dst_direct ? PIECE : TILE;
    ptrdiff_t piece = am_max(capacity / l->lanes / AM_CUMSUM_PIECE * AM_CUMSUM_PIECE, AM_CUMSUM_BLOCK);
    if (!c->chunk) return sum_steps(p, l, begin, end, piece, 0);
    if (c->chunk <= piece) return sum_steps(p, l, begin, end, piece / c->chunk * c->chunk, c->chunk);
    ptrdiff_t count = (end - begin - 1) / c->chunk + 1;
    for (ptrdiff_t i = 0; i < count; i++) {
        ptrdiff_t first = begin + (c->reverse ? count - 1 - i : i) * c->chunk;
        am_status status = sum_steps(p, l, first, am_min(end, first + c->chunk), piece, 0);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

/* Sums the sequences of a span in the direction of the sums, so that memory is read in one direction
 * throughout. */
static am_status sum_span(const plan *p, const span *s, band *l)
{
    const am_cumsum *c = p->cumsum;
    ptrdiff_t first = am_sequence_of(c->starts, c->sequences, s->begin);
    ptrdiff_t last = am_sequence_of(c->starts, c->sequences, s->end - 1);
    for (ptrdiff_t i = 0; i <= last - first; i++) {
        ptrdiff_t sequence = c->reverse ? last - i : first + i;
        ptrdiff_t begin = am_max(c->starts[sequence], s->begin),
                  end = am_min(c->starts[sequence + 1], s->end);
        am_status status = begin < end ? sum_sequence(p, l, begin, end) : AM_OK;
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

static am_status sum_task(void *job, ptrdiff_t index, am_team *team)
{
    const plan *p = job;
    const am_cumsum *c = p->cumsum;
    const span *s = &p->spans[index % p->span_count];
    index /= p->span_count;
    ptrdiff_t first_lane = index % p->bands * p->band;
    index /= p->bands;
    ptrdiff_t i = index / p->outer[1], j = index % p->outer[1];
    char *dst = c->dst.data + i * p->dst_outer[0] + j * p->dst_outer[1] + first_lane * p->dst_lane;
    const char *src = c->src.data + i * p->src_outer[0] + j * p->src_outer[1] + first_lane * p->src_lane;
    band l = {.dst = dst, .src = src, .lanes = am_min(p->band, p->lanes - first_lane), .team = team};
    if (p->src_direct && p->dst_direct) return sum_span(p, s, &l);
    tile_buffers *const *buffers = am_workspace(&p->workspaces);
    l.buffers = *buffers;
    return sum_span(p, s, &l);
}

/* Divides time at boundaries of segments into spans of at least `target` steps, except for the last. */
static am_status divide_time(plan *p, ptrdiff_t target)
{
    const am_cumsum *c = p->cumsum;
    p->spans = malloc((size_t)(c->src.shape.token / target + 1) * sizeof *p->spans);
    if (!p->spans) return AM_NO_MEMORY;
    ptrdiff_t begin = 0;
    for (ptrdiff_t sequence = 0; sequence < c->sequences; sequence++) {
        ptrdiff_t start = c->starts[sequence], end = c->starts[sequence + 1];
        while (end - begin >= target) {
            ptrdiff_t boundary = end;
            if (c->chunk) {
                ptrdiff_t chunks = am_ceil_div(am_max(begin + target - start, 0), c->chunk);
                boundary = am_min(end, start + chunks * c->chunk);
            }
            p->spans[p->span_count++] = (span){begin, boundary};
            begin = boundary;
        }
    }
    if (begin < c->src.shape.token) p->spans[p->span_count++] = (span){begin, c->src.shape.token};
    return AM_OK;
}

/* An axis other than time; strides in bytes. */
enum { AXES = 3 };
typedef struct {
    ptrdiff_t length, src, dst;
} axis;

/* Drops axes of length 1 and merges axes that are contiguous with each other. Returns the number of axes that
 * are left. */
static int merge_axes(const am_cumsum *c, axis *axes)
{
    const am_by_axis *shape = &c->src.shape, *src = &c->src.stride, *dst = &c->dst.stride;
    const axis all[AXES] = {{shape->batch, src->batch, dst->batch},
                            {shape->head, src->head, dst->head},
                            {shape->channel, src->channel, dst->channel}};
    int count = 0;
    for (int i = 0; i < AXES; i++) {
        const axis a = all[i];
        if (a.length == 1) continue;
        axis *outer = count ? &axes[count - 1] : NULL;
        if (outer && outer->src == a.length * a.src && outer->dst == a.length * a.dst) {
            *outer = (axis){.length = outer->length * a.length, .src = a.src, .dst = a.dst};
        } else {
            axes[count++] = a;
        }
    }
    return count;
}

/* Chooses the axis that lies along the vectors; tasks are divided along the others. */
static void choose_axes(plan *p)
{
    const am_cumsum *c = p->cumsum;
    ptrdiff_t src_size = (ptrdiff_t)am_size_of(c->src.type), dst_size = (ptrdiff_t)am_size_of(c->dst.type);
    axis axes[AXES];
    int count = merge_axes(c, axes);
    while (count < AXES) axes[count++] = (axis){1, 0, 0};
    int lane = 0;
    for (int i = 1; i < AXES; i++) {
        if (axes[i].length > 1 && am_abs(axes[i].dst) <= am_abs(axes[lane].dst)) lane = i;
    }
    axis lanes = axes[lane];
    axes[lane] = axes[AXES - 1];
    p->lanes = lanes.length, p->src_lane = lanes.src, p->dst_lane = lanes.dst;
    for (int i = 0; i < 2; i++) {
        p->outer[i] = axes[i].length, p->src_outer[i] = axes[i].src, p->dst_outer[i] = axes[i].dst;
    }

    bool contiguous_lanes = lanes.length > 1 && (lanes.dst == dst_size || lanes.src == src_size);
    p->scan = !contiguous_lanes &&
              (lanes.length == 1 || c->dst.stride.token == dst_size || c->src.stride.token == src_size);
    bool src_contiguous = (p->scan ? c->src.stride.token : p->src_lane) == src_size;
    bool dst_contiguous = (p->scan ? c->dst.stride.token : p->dst_lane) == dst_size;
    /* Loading and storing less than a vector of sixteen-bit floats is slow. */
    bool whole_vectors = (p->scan ? c->chunk : p->lanes) % LINE_LANES == 0;
    bool sixteen_bits = c->src.type == c->dst.type && src_size == 2 && p->type == AM_FLOAT32;
    p->kernel_type =
        sixteen_bits && whole_vectors && src_contiguous && dst_contiguous ? c->src.type : p->type;
    p->src_direct = c->src.type == p->kernel_type && p->kernel_type != AM_INT64 && src_contiguous;
    p->dst_direct = c->dst.type == p->kernel_type && p->kernel_type != AM_INT64 && dst_contiguous;
}

/* Results that are larger than the cache are written around it, since they would be evicted before they are
 * read. */
static bool should_stream(const plan *p)
{
    static const uintptr_t LINE = 64;
    const am_cumsum *c = p->cumsum;
    uintptr_t misaligned = (uintptr_t)c->dst.data | (uintptr_t)p->dst_outer[0] | (uintptr_t)p->dst_outer[1];
    misaligned |= (uintptr_t)(p->scan ? p->dst_lane : c->dst.stride.token);
    misaligned |= (uintptr_t)(p->scan ? 0 : p->lanes * p->dst_lane);
    return p->dst_direct && misaligned % LINE == 0 &&
           p->outer[0] * p->outer[1] * p->lanes >=
               am_cache_bytes() / (ptrdiff_t)am_size_of(c->dst.type) / c->src.shape.token;
}

/* The lanes of bands that keep threads equally busy where there are `tasks` with whole bands: for two threads
 * a few for each. Parts of a row take longer than all of it, above all single cache lines: of 64 lanes, one
 * thread of a Zen 5 reads and writes all at 40 GB/s, 32 at 23, and 16 at 16. So more threads divide rows only
 * as far as they gain from it. */
static ptrdiff_t divide_band(const plan *p, ptrdiff_t tasks, ptrdiff_t threads)
{
    const double part = 0.6, line = 0.4; /* their speeds */
    ptrdiff_t best = p->band;
    double least = 0;
    if (threads <= 2)
        return am_min(p->band, am_max(p->lanes * tasks / p->bands / (MANY_TASKS * threads) / LINE_LANES, 1) *
                                   LINE_LANES);
    for (ptrdiff_t lanes = p->band;; lanes = am_ceil_div(lanes / 2, LINE_LANES) * LINE_LANES) {
        const ptrdiff_t rounds = am_ceil_div(tasks * am_ceil_div(p->band, lanes), threads);
        const double speed = lanes == p->lanes    ? 1
                             : lanes > LINE_LANES ? part
                                                  : line,
                     time = (double)(rounds * lanes) / speed;
        if (least == 0 || time < least) best = lanes, least = time;
        if (lanes <= LINE_LANES) return best;
    }
}

am_status am_cumsum_compute(const am_context *context, const am_cumsum *cumsum)
{
    am_cumsum c = *cumsum;
    const am_by_axis *shape = &c.src.shape;
    const ptrdiff_t steps = shape->token;
    if (steps == 0 || shape->batch == 0 || shape->head == 0 || shape->channel == 0) return AM_OK;
    if (c.chunk >= steps) c.chunk = 0;
    plan p = {.cumsum = &c, .kernels = context->kernels, .type = AM_FLOAT32};
    if (am_is_integer(c.src.type))
        p.type = AM_INT64;
    else if (c.src.type == AM_FLOAT64 || c.dst.type == AM_FLOAT64)
        p.type = AM_FLOAT64;
    choose_axes(&p);
    p.stream = should_stream(&p);

    bool transposed =
        is_transposed(c.src.stride.token, c.src.type) || is_transposed(c.dst.stride.token, c.dst.type);
    ptrdiff_t most_lanes = transposed                     ? TRANSPOSED_LANES
                           : p.src_direct && p.dst_direct ? AM_CUMSUM_LANES
                                                          : TILE_LANES;
    if (p.scan) most_lanes = 1;
    p.band = am_min(p.lanes, most_lanes);
    p.bands = am_ceil_div(p.lanes, p.band);
    am_status status = divide_time(&p, am_max(TASK / p.band, 1));
    if (status != AM_OK) return status;
    ptrdiff_t outer = p.outer[0] * p.outer[1], tasks = outer * p.bands * p.span_count;
    const bool many = outer * p.lanes * steps >= MANY_TASKS * TASK * (ptrdiff_t)context->threads;
    if (!p.scan && many && tasks < MANY_TASKS * context->threads && tasks % context->threads != 0) {
        p.band = divide_band(&p, tasks, context->threads);
        p.bands = am_ceil_div(p.lanes, p.band);
    }
    const ptrdiff_t bytes =
        p.band * (steps / p.span_count) * (ptrdiff_t)(am_size_of(c.src.type) + am_size_of(c.dst.type));
    tasks = outer * p.bands * p.span_count;
    if (!(p.src_direct && p.dst_direct))
        status = am_workspaces_make(&p.workspaces, context->threads, lay_out, NULL, sizeof(tile_buffers *));
    if (status == AM_OK) status = am_parallel_bytes(context, tasks, bytes, sum_task, &p);
    am_workspaces_free(&p.workspaces);
    free(p.spans);
    return status;
}
