/* kv_append.c – writes new keys or values behind those that a cache holds. */
#include "core/kv_append.h"

#include <string.h>

#include "core/arithmetic.h"
#include "core/convert.h"
#include "core/packed.h"

enum {
    PIECE = 256, /* numbers that are converted at a time */
    GRAIN = 16,  /* rows of a task */
};

/* Where a new row comes from and goes to. */
typedef struct {
    const char *from;
    char *to;
} row_move;

static row_move move_of(const am_kv_append *a, ptrdiff_t index)
{
    const am_pages *p = &a->pages;
    const ptrdiff_t count = a->starts ? 1 : p->lengths[0] - a->begins[0],
                    s = a->starts ? am_sequence_of(a->starts, p->sequences, index) : index / count,
                    row = index - (a->starts ? a->starts[s] : s * count), token = a->begins[s] + row;
    const char *from = a->starts ? a->rows.data + index * a->rows.token
                                 : a->rows.data + s * a->rows.batch + row * a->rows.token;
    if (!p->table) return (row_move){from, a->cache.data + s * a->cache.batch + token * a->cache.token};
    const ptrdiff_t page = p->table[s * p->table_step + token / p->size];
    return (row_move){from, a->cache.data + page * a->cache.batch + token % p->size * a->cache.token};
}

/* Copies up to PIECE numbers, and converts them by way of float32 unless either side is float64. */
static void convert_piece(const am_run *run, const am_kv_append *a, char *to, const char *from,
                          ptrdiff_t count)
{
    const am_dtype in = a->rows.type, out = a->cache.type;
    const ptrdiff_t in_size = (ptrdiff_t)am_size_of(in), out_size = (ptrdiff_t)am_size_of(out);
    uint64_t read[PIECE], middle[PIECE], written[PIECE];
    const void *numbers = from;
    if (a->rows.element != in_size) {
        am_copy_2d((char *)read, 0, in_size, from, 0, a->rows.element, 1, count, (size_t)in_size);
        numbers = read;
    }
    if (in != out) {
        am_convert_row *direct = am_converter(in, out);
        if (direct) {
            direct(run->kernels, written, numbers, count);
        } else {
            am_converter(in, AM_FLOAT32)(run->kernels, middle, numbers, count);
            am_converter(AM_FLOAT32, out)(run->kernels, written, middle, count);
        }
        numbers = written;
    }
    if (a->cache.element == out_size)
        memcpy(to, numbers, (size_t)(count * out_size));
    else
        am_copy_2d(to, 0, a->cache.element, numbers, 0, out_size, 1, count, (size_t)out_size);
}

typedef struct {
    const am_run *run;
    const am_kv_append *append;
} append_job;

static am_status append_task(void *arg, ptrdiff_t index, am_team *team)
{
    const append_job *job = arg;
    const am_kv_append *a = job->append;
    const row_move move = move_of(a, index);
    (void)team; /* what is begun is finished */
    for (ptrdiff_t h = 0; h < a->kv_heads; h++) {
        const char *from = move.from + h * a->rows.head;
        char *to = move.to + h * a->cache.head;
        for (ptrdiff_t i = 0; i < a->depth; i += PIECE)
            convert_piece(job->run, a, to + i * a->cache.element, from + i * a->rows.element,
                          am_min(PIECE, a->depth - i));
    }
    return AM_OK;
}

am_status am_kv_append_rows(const am_run *run, const am_kv_append *a)
{
    const ptrdiff_t n = a->pages.sequences, rows = n == 0      ? 0
                                                   : a->starts ? a->starts[n]
                                                               : n * (a->pages.lengths[0] - a->begins[0]);
    append_job job = {run, a};
    return am_parallel(run, rows, GRAIN, append_task, &job);
}
