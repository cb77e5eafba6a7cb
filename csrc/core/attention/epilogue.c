/* epilogue.c – writes results. */
#include "core/attention/epilogue.h"

#include <math.h>
#include <string.h>

#include "core/arrays/convert.h"

void am_clear_rows(const am_attn_base *base, const am_flash_rows *block)
{
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        am_set_number(base, block->running_max, r, -INFINITY);
        if (block->row_max) am_set_number(base, block->row_max, r, -INFINITY);
        am_set_number(base, block->sum, r, 0);
        if (block->exact_sum) am_set_number(base, block->exact_sum, r, 0);
    }
    memset(block->out, 0, (size_t)(block->rows * block->out_dim * base->size));
}

/* Writes the lse of one row, and returns the factor that makes its result of its accumulator. Sinks enter
 * here. */
static double end_row(const am_attn_base *base, const am_sink_sum *sinks, const am_flash_rows *block,
                      ptrdiff_t r, char *lse)
{
    const am_attn *f = base->attn;
    /* In units of 1, as sinks are: in units of ln 2 a sink might overflow. */
    const double unit = base->unit == 1 ? AM_LN_2 : 1,
                 running_max = unit * am_number(base, block->running_max, r),
                 live = am_number(base, block->sum, r);
    double highest = running_max, sum = live,
           exact_sum = block->exact_sum ? am_number(base, block->exact_sum, r) : live,
           row_max = block->row_max ? unit * am_number(base, block->row_max, r) : 0;
    if (sinks) {
        highest = fmax(running_max, sinks->highest), row_max = fmax(row_max, sinks->highest);
        const double power = am_power(AM_LOG2_E, running_max, highest),
                     more = sinks->sum * am_power(AM_LOG2_E, sinks->highest, highest);
        sum = live * power + more, exact_sum = exact_sum * power + more;
    }
    if (lse) am_set_number(base, lse, 0, exact_sum == 0 ? -INFINITY : highest + log(exact_sum));
    if (live == 0) return 0; /* no live pair: out is zero already */
    /* A NaN is of a logit whose P may have been dropped out. */
    const double factor = f->normalize  ? am_power(AM_LOG2_E, running_max, highest) / sum
                          : isnan(live) ? live
                                        : am_power(AM_LOG2_E, running_max, row_max);
    return base->terms.dropout ? factor / (1 - am_dropout_of(&base->terms)) : factor;
}

void am_write_rows(const am_attn_base *base, const am_sink_sum *sinks, const am_attn_place *at,
                   const am_flash_rows *block, char *scratch)
{
    const am_attn *f = base->attn;
    const am_array *out = &f->out;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(out->type);
    const bool direct = out->stride.channel == size;
    am_flash_write *write = base->arithmetic->numbers[out->type].write;
    const char *row = block->out;
    if (f->v_scales.by_channel)
        am_scale_channels(&f->v_scales, at->kv_head, block->out, block->rows, f->value_dim, block->out_dim);
    for (ptrdiff_t h = 0, r = 0; h < at->heads; h++) {
        const ptrdiff_t head = at->head + h;
        char *dst = am_token(out, at->b, head, at->q);
        for (ptrdiff_t q = 0; q < at->queries; q++, r++, dst += out->stride.token) {
            char *lse = f->lse.data ? am_token(&f->lse, at->b, head, at->q + q) : NULL;
            const double factor = end_row(base, sinks ? &sinks[head] : NULL, block, r, lse);
            write(direct ? dst : scratch, row, factor, f->value_dim);
            if (f->wide_out.data)
                base->arithmetic->numbers[base->type].write(am_token(&f->wide_out, at->b, head, at->q + q),
                                                            row, factor, f->value_dim);
            if (!direct)
                am_copy_2d(dst, 0, out->stride.channel, scratch, 0, size, 1, f->value_dim, (size_t)size);
            row += block->out_dim * base->size;
        }
    }
}
