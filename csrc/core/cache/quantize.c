/* quantize.c – rows of numbers in a quantized format of keys and values. */
#include "core/cache/quantize.h"

#include <string.h>

#include "core/arrays/convert.h"
#include "core/runtime/sizes.h"

enum {
    PIECE = 2 * AM_KV_MOST_GROUP, /* numbers that are converted at a time: whole groups */
    TASK_NUMBERS = 1 << 13,       /* of the rows that a thread takes at once */
    CHECK_NUMBERS = 1 << 16,      /* between two checkpoints in a long row */
};

typedef struct {
    const am_kernels *kernels;
    const am_quantization *q;
} quantize_job;

static const am_quantized_axis *row_of(const am_quantization *q) { return &q->axis[q->axes - 1]; }

/* Returns up to PIECE numbers of a row as float32: where they are, or in `to`. */
static const float *read_floats(const quantize_job *job, float *to, const char *from, ptrdiff_t count)
{
    const am_quantization *q = job->q;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(q->type), step = row_of(q)->from;
    uint64_t piece[PIECE];
    if (step != size) {
        am_copy_2d((char *)piece, 0, size, from, 0, step, 1, count, (size_t)size);
        from = (const char *)piece;
    } else if (q->type == AM_FLOAT32) {
        return (const float *)from;
    }
    am_converter(q->type, AM_FLOAT32)(job->kernels, to, from, count);
    return to;
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

static am_status quantize_row(const quantize_job *job, const char *from, char *to, char *scale, am_team *team)
{
    const am_quantization *q = job->q;
    const am_quantized_axis *row = row_of(q);
    float piece[PIECE], quotients[PIECE], own = 1;
    int32_t bits = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (ptrdiff_t i = 0, count; i < row->length; i += count) {
            count = am_min(PIECE, row->length - i);
            const float *numbers = read_floats(job, piece, from + i * row->from, count);
            if (pass == 0) {
                bits = greatest(bits, numbers, count);
            } else {
                for (ptrdiff_t j = 0; j < count; j++) quotients[j] = numbers[j] / own;
                q->format->narrow(to + i * row->to, quotients, count);
            }
            am_status status = (i + count) % CHECK_NUMBERS ? AM_OK : am_checkpoint(team);
            if (status != AM_OK) return status;
        }
        if (pass == 0) *(float *)scale = own = scale_of(q->format, bits);
    }
    return AM_OK;
}

static am_status quantize_groups(const quantize_job *job, const char *from, char *to, char *scales,
                                 am_team *team)
{
    const am_quantization *q = job->q;
    const am_quantized_axis *row = row_of(q);
    const am_kv_scales s = {.group = q->group, .offset = sizeof(float), .type = AM_FLOAT32};
    for (ptrdiff_t i = 0, count; i < row->length; i += count) {
        float piece[PIECE], numbers[PIECE];
        count = am_min(PIECE, row->length - i);
        memcpy(numbers, read_floats(job, piece, from + i * row->from, count),
               (size_t)count * sizeof *numbers);
        for (ptrdiff_t j = 0; j < count; j += q->group)
            am_kv_scale_group(&s, scales + (i + j) / q->group * row->scale, numbers + j);
        q->format->narrow(to + i / q->format->numbers * row->to, numbers, count);
        am_status status = (i + count) % CHECK_NUMBERS ? AM_OK : am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

static am_status quantize_task(void *arg, ptrdiff_t index, am_team *team)
{
    const quantize_job *job = arg;
    const am_quantization *q = job->q;
    const char *from = q->from;
    char *to = q->to, *scale = q->scales;
    for (int i = q->axes - 2; i >= 0; i--) {
        const am_quantized_axis *axis = &q->axis[i];
        const ptrdiff_t step = index % axis->length;
        index /= axis->length;
        from += step * axis->from, to += step * axis->to, scale += step * axis->scale;
    }
    return q->group ? quantize_groups(job, from, to, scale, team) : quantize_row(job, from, to, scale, team);
}

am_status am_quantize(const am_context *context, const am_quantization *q)
{
    quantize_job job = {context->kernels, q};
    ptrdiff_t rows = 1;
    for (int i = 0; i < q->axes - 1; i++) rows *= q->axis[i].length;
    return am_parallel(context, rows, TASK_NUMBERS / am_max(row_of(q)->length, 1) + 1, quantize_task, &job);
}
