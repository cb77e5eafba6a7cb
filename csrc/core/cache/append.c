/* append.c – writes new keys or values behind those that a cache holds, or to given places. */
#include "core/cache/append.h"

#include <math.h>
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/arrays/convert.h"
#include "core/cache/formats.h"
#include "core/sequences/packed.h"

enum {
    PIECE = 2 * AM_KV_MOST_GROUP, /* numbers that are converted at a time: whole groups */
    GRAIN = 16,                   /* rows of a task */
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
        return (row_move){a->rows.data + index * a->rows.token, slot < 0 ? -1 : slot / p->size,
                          slot % p->size};
    }
    const ptrdiff_t count = a->starts ? 1 : p->lengths[0] - a->begins[0],
                    s = a->starts ? am_sequence_of(a->starts, p->sequences, index) : index / count,
                    row = index - (a->starts ? a->starts[s] : s * count), token = a->begins[s] + row;
    const char *from = a->starts ? a->rows.data + index * a->rows.token
                                 : a->rows.data + s * a->rows.batch + row * a->rows.token;
    return (row_move){from, p->table[s * p->table_step + token / p->size], token % p->size};
}

typedef struct {
    const am_context *context;
    const am_kv_append *append;
} append_job;

/* Copies up to PIECE numbers side by side, of their own type. */
static const void *read_piece(const am_kv_append *a, uint64_t *to, const char *from, ptrdiff_t count)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(a->rows.type);
    if (a->rows.element == size) return from;
    am_copy_2d((char *)to, 0, size, from, 0, a->rows.element, 1, count, (size_t)size);
    return to;
}

/* The same as float32. */
static const float *read_floats(const append_job *job, float *to, const char *from, ptrdiff_t count)
{
    const am_kv_append *a = job->append;
    uint64_t piece[PIECE];
    const void *numbers = read_piece(a, piece, from, count);
    am_converter(a->rows.type, AM_FLOAT32)(job->context->kernels, to, numbers, count);
    return to;
}

static void write_piece(const am_kv_append *a, char *to, const void *from, ptrdiff_t count)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(a->cache.type);
    if (a->cache.element == size)
        memcpy(to, from, (size_t)(count * size));
    else
        am_copy_2d(to, 0, a->cache.element, from, 0, size, 1, count, (size_t)size);
}

/* Converts numbers, by way of float32 where there is no direct one. */
static void convert_row(const append_job *job, char *to, const char *from)
{
    const am_kv_append *a = job->append;
    am_convert_row *direct = am_converter(a->rows.type, a->cache.type);
    for (ptrdiff_t i = 0, count; i < a->head_dim;
         i += count, from += count * a->rows.element, to += count * a->cache.element) {
        uint64_t piece[PIECE], converted[PIECE];
        float middle[PIECE];
        count = am_min(PIECE, a->head_dim - i);
        const void *numbers = read_piece(a, piece, from, count);
        if (a->rows.type != a->cache.type) {
            if (direct)
                direct(job->context->kernels, converted, numbers, count);
            else
                am_converter(AM_FLOAT32, a->cache.type)(job->context->kernels, converted,
                                                        read_floats(job, middle, from, count), count);
            numbers = converted;
        }
        write_piece(a, to, numbers, count);
    }
}

/* --- Quantized caches --- */

static float greatest_magnitude(const append_job *job, const char *from)
{
    const am_kv_append *a = job->append;
    float most = 0;
    for (ptrdiff_t i = 0, count; i < a->head_dim; i += count, from += count * a->rows.element) {
        float numbers[PIECE];
        count = am_min(PIECE, a->head_dim - i);
        read_floats(job, numbers, from, count);
        for (ptrdiff_t j = 0; j < count; j++) {
            const float x = fabsf(numbers[j]);
            most = x > most || x != x ? x : most; /* a NaN stays */
        }
    }
    return most;
}

static void quantize_row(const append_job *job, const am_kv_format *format, const row_move *move,
                         ptrdiff_t head, char *to, const char *from)
{
    const am_kv_append *a = job->append;
    const am_kv_scales *s = &a->scales;
    float scale = 1;
    if (!s->by_channel) {
        scale = am_kv_scale_of(format, greatest_magnitude(job, from));
        *(float *)(s->data + move->page * s->batch + move->token * s->token + head * s->head) = scale;
    }
    for (ptrdiff_t i = 0, count; i < a->head_dim;
         i += count, from += count * a->rows.element, to += count * a->cache.element) {
        float numbers[PIECE];
        uint8_t bytes[PIECE];
        count = am_min(PIECE, a->head_dim - i);
        read_floats(job, numbers, from, count);
        for (ptrdiff_t j = 0; j < count; j++) {
            const float own =
                s->by_channel ? *(const float *)(s->data + head * s->head + (i + j) * s->element) : scale;
            numbers[j] /= own;
        }
        format->narrow(bytes, numbers, count);
        write_piece(a, to, bytes, count);
    }
}

static void quantize_groups(const append_job *job, const am_kv_format *format, const row_move *move,
                            ptrdiff_t head, char *to, const char *from)
{
    const am_kv_append *a = job->append;
    const am_kv_scales *s = &a->scales;
    char *at = s->data + move->page * s->batch + move->token * s->token + head * s->head;
    for (ptrdiff_t i = 0, count; i < a->head_dim;
         i += count, from += count * a->rows.element, to += count / format->numbers * a->cache.element) {
        float numbers[PIECE];
        uint8_t bytes[PIECE];
        count = am_min(PIECE, a->head_dim - i);
        read_floats(job, numbers, from, count);
        for (ptrdiff_t j = 0; j < count; j += s->group, at += s->element)
            am_kv_scale_group(s, at, numbers + j);
        format->narrow(bytes, numbers, count);
        write_piece(a, to, bytes, count / format->numbers);
    }
}

static am_status append_task(void *arg, ptrdiff_t index, am_team *team)
{
    const append_job *job = arg;
    const am_kv_append *a = job->append;
    const row_move move = move_of(a, index);
    const am_kv_format *format = am_kv_format_of(a->cache.type);
    (void)team; /* what is begun is finished */
    for (ptrdiff_t h = 0; move.page >= 0 && h < a->kv_heads; h++) {
        const char *from = move.from + h * a->rows.head;
        char *to =
            a->cache.data + move.page * a->cache.batch + move.token * a->cache.token + h * a->cache.head;
        if (format->scales == AM_SCALES_OF_ROWS)
            quantize_row(job, format, &move, h, to, from);
        else if (format->scales == AM_SCALES_OF_GROUPS)
            quantize_groups(job, format, &move, h, to, from);
        else
            convert_row(job, to, from);
    }
    return AM_OK;
}

am_status am_kv_append_rows(const am_context *context, const am_kv_append *a)
{
    const ptrdiff_t n = a->pages.sequences, rows = a->slots    ? a->count
                                                   : n == 0    ? 0
                                                   : a->starts ? a->starts[n]
                                                               : n * (a->pages.lengths[0] - a->begins[0]);
    append_job job = {context, a};
    return am_parallel(context, rows, GRAIN, append_task, &job);
}
