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

/* Writes a row of numbers of the arithmetic type, times a factor. */
static void write_row(const am_attn_base *base, const am_array *to, char *at, const char *row, double factor,
                      char *scratch)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(to->type);
    const bool direct = to->stride.channel == size;
    base->arithmetic->numbers[to->type].write(direct ? at : scratch, row, factor, to->shape.channel);
    if (!direct) am_copy_2d(at, 0, to->stride.channel, scratch, 0, size, 1, to->shape.channel, (size_t)size);
}

void am_write_rows(const am_attn_base *base, const am_sink_sum *sinks, const am_attn_place *at,
                   const am_flash_rows *block, char *scratch)
{
    const am_attn *f = base->attn;
    const am_array *out = &f->out;
    const char *row = block->out;
    if (f->v_scales.by_channel)
        am_scale_channels(&f->v_scales, at->kv_head, block->out, block->rows, f->value_dim, block->out_dim);
    for (ptrdiff_t h = 0, r = 0; h < at->heads; h++) {
        const ptrdiff_t head = at->head + h;
        char *dst = am_token(out, at->b, head, at->q);
        for (ptrdiff_t q = 0; q < at->queries; q++, r++, dst += out->stride.token) {
            char *lse = f->lse.data ? am_token(&f->lse, at->b, head, at->q + q) : NULL;
            const double factor = end_row(base, sinks ? &sinks[head] : NULL, block, r, lse);
            write_row(base, out, dst, row, factor, scratch);
            if (f->wide_out.data)
                write_row(base, &f->wide_out, am_token(&f->wide_out, at->b, head, at->q + q), row, factor,
                          scratch);
            row += block->out_dim * base->size;
        }
    }
}

/* The tangent of the logsumexp of a row: Σ p l̇, where p l̇ of its keys has been summed up but for the
 * denominator of p. */
static double tangent_of_lse(const am_attn_base *base, const am_attn_tangents *problem, ptrdiff_t head,
                             double lse, double of_keys)
{
    const ptrdiff_t sinks = problem->d_sinks ? am_sink_count(&base->terms) : 0;
    double sum = of_keys;
    for (ptrdiff_t i = 0; i < sinks; i++) {
        const double sink = am_sink_logit(base->terms.sinks, base->type == AM_FLOAT64, head, i);
        if (sink > -INFINITY) sum += exp(sink - lse) * problem->d_sinks[head * sinks + i];
    }
    return sum;
}

void am_write_tangents(const am_attn_base *base, const am_attn_tangents *problem, const am_sink_sum *sinks,
                       const am_attn_place *at, const am_flash_rows *block, ptrdiff_t columns, char *scratch)
{
    const ptrdiff_t half_panel = base->arithmetic->panel / 2, dim = base->attn->value_dim;
    char *row = block->out;
    for (ptrdiff_t r = 0; r < block->rows; r++, row += block->out_dim * base->size) {
        union {
            float narrow;
            double wide;
        } number = {.wide = 0};
        double of_keys = 0;
        const double factor = end_row(base, sinks ? &sinks[at->head] : NULL, block, r, (char *)&number),
                     lse = am_number(base, &number, 0);
        for (ptrdiff_t i = 0; i < half_panel; i++) of_keys += am_number(base, row, 2 * columns + i);
        of_keys *= factor * (1 - am_dropout_of(&base->terms));
        const double d_lse = tangent_of_lse(base, problem, at->head, lse, of_keys);
        char *tangent = row + columns * base->size;
        for (ptrdiff_t i = 0; i < dim; i++)
            am_set_number(base, tangent, i, am_number(base, tangent, i) - d_lse * am_number(base, row, i));
        const am_array *to = &problem->d_out, *stats = &problem->d_lse;
        write_row(base, to, am_token(to, at->b, at->head, at->q + r), tangent, factor, scratch);
        if (stats->data) am_set_number(base, am_token(stats, at->b, at->head, at->q + r), 0, d_lse);
    }
}
