/* append.c – writes new keys or values behind those that a cache holds, or to given places. */
#include "core/cache/append.h"

#include "core/runtime/sizes.h"
#include "core/cache/quantize.h"
#include "core/arrays/packed.h"

enum {
    PIECE = 256, /* numbers that are converted at a time */
    GRAIN = 16,  /* rows of a task */
};

/* Where a new row comes from, and the page or row and the token in it that it goes to; page -1: nowhere. */
typedef struct {
    const char *from;
    ptrdiff_t page, token;
} row_move;

static row_move move_of(const am_kv_append *a, ptrdiff_t index)
{
    const am_pages *p = &a->pages;
    if (a->slots) {
        const ptrdiff_t slot = a->slots[index];
        return (row_move){am_token(&a->rows, 0, 0, index), slot < 0 ? -1 : slot / p->size, slot % p->size};
    }
    const ptrdiff_t count = a->starts ? 1 : p->lengths[0] - a->begins[0],
                    s = a->starts ? am_sequence_of(a->starts, p->sequences, index) : index / count,
                    row = index - (a->starts ? a->starts[s] : s * count), token = a->begins[s] + row;
    const char *from = am_token(&a->rows, a->starts ? 0 : s, 0, a->starts ? index : row);
    return (row_move){from, p->table[s * p->table_stride + token / p->size], token % p->size};
}

typedef struct {
    const am_context *context;
    const am_kv_append *append;
    const am_kv_format *format; /* of the cache */
} append_job;

/* Converts numbers, by way of float32 where there is no direct one. */
static void convert_row(const am_kernels *kernels, const am_array *target, const am_array *source)
{
    const bool direct = source->type == target->type || am_converter(source->type, target->type);
    const am_dtype type = direct ? target->type : AM_FLOAT32;
    if (direct && am_is_plain(target, 1)) {
        am_gather(kernels, type, target->data, target->shape.channel, source);
        return;
    }
    am_array to = *target, from = *source;
    for (ptrdiff_t left = to.shape.channel, count; left > 0; left -= count) {
        double piece[PIECE];
        to.shape.channel = from.shape.channel = count = am_min(PIECE, left);
        am_scatter(kernels, &to, type, am_read_rows(kernels, type, 1, &from, count, piece).data, count);
        from.data += count * from.stride.channel, to.data += count * to.stride.channel;
    }
}

/* Finds scales, too, unless they are of channels. */
static void quantize_row(const append_job *job, const row_move *move, ptrdiff_t head, char *to,
                         const am_array *from)
{
    const am_kv_scales *s = &job->append->scales;
    const am_quantized_row row = {.kernels = job->context->kernels,
                                  .format = job->format,
                                  .from = *from,
                                  .to = to,
                                  .stride = job->append->cache.stride.channel,
                                  .saturates = true};
    char *scale = am_token(&s->array, move->page, head, move->token);
    if (job->format->scales == AM_SCALES_OF_GROUPS)
        am_quantize_groups(&row, s, scale);
    else if (s->by_channel)
        am_quantize_by_channel(&row, am_token(&s->array, 0, head, 0), s->array.stride.channel);
    else
        am_quantize_row(&row, (float *)scale);
}

static am_status append_task(void *arg, ptrdiff_t index, am_team *team)
{
    const append_job *job = arg;
    const am_kv_append *a = job->append;
    const row_move move = move_of(a, index);
    const ptrdiff_t count = a->rows.shape.channel;
    am_array from = am_one_row(move.from, a->rows.type, a->rows.stride.channel, count),
             to = am_one_row(NULL, a->cache.type, a->cache.stride.channel, count);
    (void)team; /* what is begun is finished */
    for (ptrdiff_t h = 0; move.page >= 0 && h < a->rows.shape.head; h++, from.data += a->rows.stride.head) {
        to.data = am_token(&a->cache, move.page, h, move.token);
        if (job->format->scales == AM_SCALES_NONE)
            convert_row(job->context->kernels, &to, &from);
        else
            quantize_row(job, &move, h, to.data, &from);
    }
    return AM_OK;
}

am_status am_kv_append_rows(const am_context *context, const am_kv_append *a)
{
    const ptrdiff_t n = a->pages.sequences, rows = a->slots    ? a->rows.shape.token
                                                   : n == 0    ? 0
                                                   : a->starts ? a->starts[n]
                                                               : n * (a->pages.lengths[0] - a->begins[0]);
    append_job job = {.context = context, .append = a, .format = am_kv_format_of(a->cache.type)};
    return am_parallel(context, rows, GRAIN, append_task, &job);
}
