/* quantize.c – rows of numbers in a quantized format of keys and values. */
#include "core/cache/quantize.h"

#include <string.h>

#include "core/runtime/sizes.h"

enum {
    PIECE = 2 * AM_KV_MOST_GROUP, /* numbers that are converted at a time: whole groups */
    TASK_NUMBERS = 1 << 13,       /* of the rows that a thread takes at once */
    CHECK_NUMBERS = 1 << 16,      /* between two checkpoints in a long row */
};

/* --- Rows --- */

static am_status check(const am_quantized_row *r, ptrdiff_t done)
{
    return done % CHECK_NUMBERS || !r->team ? AM_OK : am_checkpoint(r->team);
}

/* Finite float64 beyond float32 become its largest numbers. */
static void saturate(const am_array *from, float *to)
{
    for (ptrdiff_t i = 0; i < from->shape.channel; i++) {
        const double number = *(const double *)(from->data + i * from->stride.channel);
        if (isinf(to[i]) && !isinf(number)) to[i] = copysignf(FLT_MAX, to[i]);
    }
}

/* Up to PIECE numbers of a row, from number i on, as float32: where they are, or in `to`. */
static const float *read_floats(const am_quantized_row *r, float *to, ptrdiff_t i, ptrdiff_t count)
{
    const am_array *row = &r->from, piece = am_one_row(row->data + i * row->stride.channel, row->type,
                                                       row->stride.channel, count);
    const float *numbers = am_read_rows(r->kernels, AM_FLOAT32, 1, &piece, count, to).data;
    if (r->saturates && piece.type == AM_FLOAT64) saturate(&piece, to);
    return numbers;
}

/* Writes the values of numbers that were divided by their scales. */
static void write_values(const am_quantized_row *r, ptrdiff_t i, const float *quotients, ptrdiff_t count)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(r->format->type), numbers = am_numbers_of(r->format->type);
    float values[PIECE]; /* of any format */
    char *to = r->to + i / numbers * r->stride;
    if (r->stride == size) {
        r->format->narrow(to, quotients, count);
        return;
    }
    r->format->narrow(values, quotients, count);
    am_copy_2d(to, 0, r->stride, (const char *)values, 0, size, 1, count / numbers, (size_t)size);
}

/* The bits of magnitudes are in their order, and those of NaN beyond. */
static int32_t greatest(int32_t known, const float *numbers, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        int32_t own;
        memcpy(&own, &numbers[i], sizeof own);
        own &= 0x7fffffff;
        known = own > known ? own : known;
    }
    return known;
}

static float scale_of(const am_kv_format *format, int32_t bits)
{
    float most;
    memcpy(&most, &bits, sizeof most);
    return am_kv_scale_of(format, most);
}

am_status am_quantize_row(const am_quantized_row *r, float *scale)
{
    float piece[PIECE], quotients[PIECE], own = 1;
    int32_t bits = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (ptrdiff_t i = 0, count; i < r->from.shape.channel; i += count) {
            count = am_min(PIECE, r->from.shape.channel - i);
            const float *numbers = read_floats(r, piece, i, count);
            if (pass == 0) {
                bits = greatest(bits, numbers, count);
            } else {
                for (ptrdiff_t j = 0; j < count; j++) quotients[j] = numbers[j] / own;
                write_values(r, i, quotients, count);
            }
            am_status status = check(r, i + count);
            if (status != AM_OK) return status;
        }
        if (pass == 0) *scale = own = scale_of(r->format, bits);
    }
    return AM_OK;
}

am_status am_quantize_by_channel(const am_quantized_row *r, const char *scales, ptrdiff_t stride)
{
    for (ptrdiff_t i = 0, count; i < r->from.shape.channel; i += count) {
        float piece[PIECE], quotients[PIECE];
        count = am_min(PIECE, r->from.shape.channel - i);
        const float *numbers = read_floats(r, piece, i, count);
        for (ptrdiff_t j = 0; j < count; j++)
            quotients[j] = numbers[j] / *(const float *)(scales + (i + j) * stride);
        write_values(r, i, quotients, count);
    }
    return AM_OK;
}

am_status am_quantize_groups(const am_quantized_row *r, const am_kv_scales *s, char *at)
{
    for (ptrdiff_t i = 0, count; i < r->from.shape.channel; i += count) {
        float numbers[PIECE];
        count = am_min(PIECE, r->from.shape.channel - i);
        const float *read = read_floats(r, numbers, i, count);
        if (read != numbers) memcpy(numbers, read, (size_t)count * sizeof *read);
        for (ptrdiff_t j = 0; j < count; j += s->group, at += s->array.stride.channel)
            am_kv_scale_group(s, at, numbers + j, r->saturates);
        write_values(r, i, numbers, count);
        am_status status = check(r, i + count);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

/* --- Arrays --- */

typedef struct {
    const am_kernels *kernels;
    const am_quantization *q;
} quantize_job;

static const am_quantized_axis *row_of(const am_quantization *q) { return &q->axis[q->axes - 1]; }

static am_status quantize_task(void *arg, ptrdiff_t index, am_team *team)
{
    const quantize_job *job = arg;
    const am_quantization *q = job->q;
    const am_quantized_axis *row = row_of(q);
    am_quantized_row r = {.kernels = job->kernels,
                          .format = q->format,
                          .from = am_one_row(q->from, q->type, row->from, row->length),
                          .to = q->to,
                          .stride = row->to,
                          .team = team};
    char *scale = q->scales;
    for (int i = q->axes - 2; i >= 0; i--) {
        const am_quantized_axis *axis = &q->axis[i];
        const ptrdiff_t place = index % axis->length;
        index /= axis->length;
        r.from.data += place * axis->from, r.to += place * axis->to, scale += place * axis->scale;
    }
    const am_kv_scales groups = {.array = {.type = AM_FLOAT32, .stride.channel = row->scale},
                                 .group = q->group,
                                 .offset = sizeof(float)};
    return q->group ? am_quantize_groups(&r, &groups, scale) : am_quantize_row(&r, (float *)scale);
}

am_status am_quantize(const am_context *context, const am_quantization *q)
{
    quantize_job job = {context->kernels, q};
    ptrdiff_t rows = 1;
    for (int i = 0; i < q->axes - 1; i++) rows *= q->axis[i].length;
    return am_parallel(context, rows, TASK_NUMBERS / am_max(row_of(q)->length, 1) + 1, quantize_task, &job);
}
