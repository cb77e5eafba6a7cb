/* sums.c – cumulative sums, and the merge of attention over parts of the keys, called by XLA. The bindings of
 * Python check all that is known when a function is traced.
 *
 * `words` of sums (attnmask/jax/_faces.py) are VERSION, flags, the bits of the double scale, and the size of
 * chunks. Arguments are the numbers, [B, T, H, S], or [B, H, T, S] if HEAD_FIRST; cu_seqlens if its flag is
 * set; and for gradients dout. The result is the sums, or the gradient, which has the type of the numbers.
 *
 * `words` of a merge (attnmask/jax/_merge.py) are VERSION, flags, and the number of parts. Arguments are all
 * outs, [B, T, H, D]; all lses, [B, H, T], in the type of the arithmetic; and for gradients dout, and dlse if
 * its flag is set. Results are out and lse, or the gradients of all outs and of all lses, one part after the
 * other along the first axis. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bind/xla/xla.h"
#include "core/arrays/convert.h"
#include "core/attention/merge.h"
#include "tokens/cumsum.h"

enum { VERSION = 1 };
#define FLAGS(DO)                                                                                            \
    DO(REVERSE, 1, "reverse")                                                                                \
    DO(HEAD_FIRST, 2, "head_first")                                                                          \
    DO(STARTS, 4, "cu_seqlens")                                                                              \
    DO(SCALED, 8, "softmax_scale")                                                                           \
    DO(CHUNKS, 16, "chunk_size")                                                                             \
    DO(GRAD_LSE, 32, "dlse")
enum { FLAGS(AM_XLA_BIT) };
const am_xla_word am_xla_sum_words[] = {{"version", VERSION}, FLAGS(AM_XLA_WORD){NULL, 0}};

/* --- Sums --- */

typedef struct {
    am_view from, to;
    am_cumsum job;
    ptrdiff_t whole[2]; /* where one sequence starts and ends */
} sums;

static bool read_numbers(am_xla_call *c, sums *s)
{
    int64_t bits, chunk;
    if (!am_xla_read_flags(c, VERSION) || !am_xla_next_word(c, &bits) || !am_xla_next_word(c, &chunk))
        return false;
    memcpy(&s->job.scale, &bits, sizeof bits);
    s->job.scaled = (c->flags & SCALED) != 0;
    s->job.chunk = c->flags & CHUNKS ? chunk : 0;
    s->job.reverse = (c->flags & REVERSE) != 0;
    return !(c->flags & CHUNKS) || (chunk > 0 && (chunk & (chunk - 1)) == 0) ||
           am_xla_fail(c, "words: a number is out of its range");
}

static bool read_starts(am_xla_call *c, sums *s, ptrdiff_t steps)
{
    am_operand starts = {.kind = AM_ARRAY};
    const char *name = c->flags & CHUNKS ? "g" : "s";
    s->whole[1] = steps, s->job.starts = s->whole, s->job.sequences = 1;
    if (!(c->flags & STARTS)) return true;
    if (!am_xla_next(c, AM_XLA_ARGUMENT, false, &starts.view)) return false;
    if (s->from.shape[0] != 1)
        return am_xla_fail(c, "%s must have batch size 1 when cu_seqlens is given, got %td", name,
                           s->from.shape[0]);
    s->job.sequences = -1;
    s->job.starts = am_read_starts_of(&c->request, "cu_seqlens", &starts, steps, &s->job.sequences);
    return s->job.starts;
}

static bool is_alike(am_xla_call *c, const am_view *v, const am_view *like)
{
    return (v->axes == 4 && memcmp(v->shape, like->shape, sizeof v->shape) == 0 && v->type != AM_BOOL &&
            (am_is_floating(v->type) || am_is_integer(like->type))) ||
           am_xla_fail(c, "an argument or a result has a type or a shape that does not fit");
}

static bool compute(am_xla_call *c, sums *s)
{
    const am_by_axis axes = c->flags & HEAD_FIRST ? AM_HEADS_FIRST : AM_TOKENS_FIRST;
    s->job.src = am_array_of(&s->from, axes), s->job.dst = am_array_of(&s->to, axes);
    const am_status status = am_cumsum_compute(&c->context, &s->job);
    return status == AM_OVERFLOW ? am_xla_fail(c, "a sum of %s does not fit the type of the result",
                                               c->flags & CHUNKS ? "g" : "s")
                                 : am_refuse_status(&c->request, status);
}

static bool add_up(am_xla_call *c, bool gradient)
{
    sums s = {0};
    am_view x;
    if (!read_numbers(c, &s) || am_xla_one_by_one(c, (c->flags & STARTS) != 0) ||
        !am_xla_next(c, AM_XLA_ARGUMENT, true, &x))
        return false;
    s.from = x;
    if (!is_alike(c, &x, &x) || !read_starts(c, &s, x.shape[c->flags & HEAD_FIRST ? 2 : 1])) return false;
    if (gradient) {
        s.job.reverse = !s.job.reverse;
        if (!am_xla_next(c, AM_XLA_ARGUMENT, true, &s.from) || !is_alike(c, &s.from, &x)) return false;
    }
    return am_xla_next(c, AM_XLA_RESULT, true, &s.to) && is_alike(c, &s.to, &s.from) &&
           (!gradient || am_xla_is_like(c, &s.to, &x)) && compute(c, &s);
}

bool am_xla_cumsum_forward(am_xla_call *c) { return add_up(c, false); }
bool am_xla_cumsum_backward(am_xla_call *c) { return add_up(c, true); }

/* --- Merges --- */

typedef struct {
    am_view out, lse; /* the types and shapes of one part */
    am_merge_part *parts;
} merge;

static bool read_out(am_xla_call *c, merge *m, ptrdiff_t i)
{
    am_view v;
    if (!am_xla_next(c, AM_XLA_ARGUMENT, false, &v)) return false;
    if (i == 0) {
        if (v.axes != 4 || !am_is_floating(v.type))
            return am_xla_fail(c, "arguments must be floating-point numbers along four axes");
        m->out = v;
        m->lse = (am_view){
            .type = am_wide_type(v.type), .axes = 3, .shape = {v.shape[0], v.shape[2], v.shape[1], 1, 1}};
    }
    m->parts[i].out = am_tokens_of(&v);
    return am_xla_is_like(c, &v, &m->out);
}

static bool read_lse(am_xla_call *c, merge *m, ptrdiff_t i)
{
    am_view v;
    if (!am_xla_next_like(c, AM_XLA_ARGUMENT, false, &m->lse, &v)) return false;
    m->parts[i].lse = am_array_of(&v, AM_HEADS_FIRST);
    return true;
}

static bool merge_all(am_xla_call *c, merge *m, ptrdiff_t count, bool gradient)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        if (!read_out(c, m, i)) return false;
    }
    for (ptrdiff_t i = 0; i < count; i++) {
        if (!read_lse(c, m, i)) return false;
    }
    if (gradient && (!read_out(c, m, count) || ((c->flags & GRAD_LSE) && !read_lse(c, m, count))))
        return false;
    am_merge job = {.type = m->out.type,
                    .count = count,
                    .parts = m->parts,
                    .gradient = gradient ? &m->parts[count] : NULL};
    memcpy(job.shape, m->out.shape, sizeof job.shape);
    am_view out = m->out, lse = m->lse;
    if (gradient) out.shape[0] *= count, lse.shape[0] *= count;
    if (!am_xla_next_like(c, AM_XLA_RESULT, false, &out, &out) ||
        !am_xla_next_like(c, AM_XLA_RESULT, false, &lse, &lse))
        return false;
    job.out = out.data, job.lse = lse.data;
    return am_refuse_status(&c->request, am_merge_states(&c->context, &job));
}

static bool read_merge(am_xla_call *c, bool gradient)
{
    merge m = {0};
    int64_t count;
    if (!am_xla_read_flags(c, VERSION) || !am_xla_next_word(c, &count) || am_xla_one_by_one(c, true))
        return false;
    if (count < 1 || count > c->frame->arguments.count) return am_xla_fail(c, "there are too few arguments");
    m.parts = calloc((size_t)count + 1, sizeof *m.parts);
    const bool done =
        m.parts ? merge_all(c, &m, count, gradient) : am_refuse_status(&c->request, AM_NO_MEMORY);
    free(m.parts);
    return done;
}

bool am_xla_merge_forward(am_xla_call *c) { return read_merge(c, false); }
bool am_xla_merge_backward(am_xla_call *c) { return read_merge(c, true); }
