/* kinds.c – the kinds of logit terms: what each of kinds.h's rows says. */
#include "core/attention/terms/terms.h"

#include <math.h>

#include "core/runtime/sizes.h"

static double no_bound(const am_attn *attn, const am_logit_term *term)
{
    (void)attn, (void)term;
    return INFINITY;
}

static double adds_nothing(const am_attn *attn, const am_logit_term *term)
{
    (void)attn, (void)term;
    return 0;
}

/* --- ALiBi adds -slope |distance| --- */

static double alibi_bound(const am_attn *attn, const am_logit_term *term)
{
    const am_places *places = &attn->terms.places;
    const ptrdiff_t rows = places->starts ? places->sequences : attn->batch;
    double most = 0;
    for (ptrdiff_t row = 0; row < rows; row++) {
        const double offset = (double)am_offset_of_row(places, row),
                     farthest = (double)(attn->queries + attn->keys) + fabs(offset);
        for (ptrdiff_t head = 0; head < attn->heads; head++) {
            const double *slope = (const double *)am_token(&term->array, row, head, 0);
            most = fmax(most, fabs(*slope) * farthest);
        }
    }
    return most;
}

static void alibi_add(const am_line *line, double *numbers)
{
    const double slope = am_line_number(line, 0), first = (double)line->first;
    const int count = (int)line->count; /* int, so that the loop is one of vectors */
    for (int i = 0; i < count; i++) numbers[i] += -slope * fabs(first + i);
}

/* --- A relative bias adds a number of its table for each distance --- */

/* The place of a distance in the table: its ends stand for all that is farther. */
static ptrdiff_t table_index(const am_line *line, ptrdiff_t distance)
{
    return am_max(0, am_min(distance - line->term->integer, line->length - 1));
}

static void relative_bias_add(const am_line *line, double *numbers)
{
    const ptrdiff_t length = line->length, from = line->first - line->term->integer,
                    begin = am_max(0, am_min(-from, line->count)),
                    end = am_max(begin, am_min(length - from, line->count));
    const double first = am_line_number(line, 0), last = am_line_number(line, length - 1);
    for (ptrdiff_t i = 0; i < begin; i++) numbers[i] += first;
    for (ptrdiff_t i = begin; i < end; i++) numbers[i] += am_line_number(line, from + i);
    for (ptrdiff_t i = end; i < line->count; i++) numbers[i] += last;
}

static void relative_bias_learn(const am_line *line, const double *d_numbers, am_line_sums *sums)
{
    const am_range touched = {table_index(line, line->first),
                              table_index(line, line->first + line->count - 1) + 1};
    double *to = am_line_sums_in(sums, touched);
    for (ptrdiff_t i = 0; i < line->count; i++) to[table_index(line, line->first + i)] += d_numbers[i];
}

/* --- The table --- */

#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Woverride-init" /* a row cannot name what its form says */
#define AXES(batch, heads, queries, last)                                                                    \
    .axes = {AM_AXIS_##batch, AM_AXIS_##heads, AM_AXIS_##queries, AM_AXIS_##last}
#define NO_LINE .add = NULL, .learn = NULL, .finite = false
#define ADDED(batch, heads, last, adds) AXES(batch, heads, 1, last), .add = adds, .learn = NULL
#define ADDED_AND_LEARNED(last, adds, learns) AXES(1, H, 1, last), .add = adds, .learn = learns
#define WHAT(text, does, most) .name = (text), .acts = (does), .bound = (most)
#define NUMBER(kind, what, ...) [AM_LOGIT_##kind] = {WHAT what, NO_LINE, __VA_ARGS__},
#define ARRAY(kind, what, axes, ...) [AM_LOGIT_##kind] = {WHAT what, AXES axes, NO_LINE, __VA_ARGS__},
#define LINE(kind, what, line, ...) [AM_LOGIT_##kind] = {WHAT what, ADDED line, __VA_ARGS__},
#define LEARNED(kind, what, line, ...) [AM_LOGIT_##kind] = {WHAT what, ADDED_AND_LEARNED line, __VA_ARGS__},
const am_logit_row am_logit_rows[] = {AM_LOGIT_KINDS(NUMBER, ARRAY, LINE, LEARNED)};
#undef NUMBER
#undef ARRAY
#undef LINE
#undef LEARNED
#pragma GCC diagnostic pop

/* --- What goes together --- */

#define ACTS(name, acts, bound) (acts)
#define IS(axis, letter) (AM_AXIS_##axis == AM_AXIS_1 || AM_AXIS_##axis == AM_AXIS_##letter)
#define NUMBER(kind, what, ...)                                                                              \
    _Static_assert(ACTS what == AM_CAPS || ACTS what == AM_DROPS, #kind ": what acts so has an array");
#define ARE_PAIRS(batch, heads, queries, last) (IS(batch, B) && IS(heads, H) && IS(queries, Q) && IS(last, K))
#define IS_SHARED(acts) ((acts) == AM_SINKS || (acts) == AM_ADDS_BY_POINT)
#define ARE_SHARED(batch, heads, queries, last)                                                              \
    (IS(batch, 1) && IS(heads, H) && IS(queries, 1) && IS(last, N))
#define ARRAY(kind, what, axes, ...)                                                                         \
    _Static_assert(ACTS what == AM_ADDS_PAIRS || IS_SHARED(ACTS what), #kind ": what acts so is no ARRAY");  \
    _Static_assert(IS_SHARED(ACTS what) || ARE_PAIRS axes, #kind ": pairs have axes B, H, Q, K");            \
    _Static_assert(ACTS what == AM_ADDS_PAIRS || ARE_SHARED axes, #kind ": what acts so has axes 1, H, 1, "  \
                                                                        "N");
#define IS_OF_HEADS(batch, heads, ...) (IS(batch, R) && (IS(heads, H) || IS(heads, KV)))
#define IS_OF_ANY(batch, heads, last, ...) IS(last, N)
#define IS_OF_KEYS(batch, heads, last, ...) IS(last, K)
#define LINE(kind, what, line, ...)                                                                          \
    _Static_assert(ACTS what == AM_ADDS_BY_DISTANCE || ACTS what == AM_ADDS_BY_KEY,                          \
                   #kind ": what acts so has no lines");                                                     \
    _Static_assert(IS_OF_HEADS line, #kind ": lines have axes R, H or KV");                                  \
    _Static_assert(IS_OF_ANY line || (ACTS what == AM_ADDS_BY_KEY && IS_OF_KEYS line),                       \
                   #kind ": the last axis of a line is N, or by key K");
#define SHARED_BY_ROWS(last, ...) (1, H, last, )
#define LEARNED(kind, what, line, ...) LINE(kind, what, SHARED_BY_ROWS line, )
AM_LOGIT_KINDS(NUMBER, ARRAY, LINE, LEARNED)

#define PLUS(kind, what, ...) +(1 << ACTS what)
#define OR(kind, what, ...) | 1 << ACTS what
#define NOTHING(kind, ...)
_Static_assert((0 AM_LOGIT_KINDS(PLUS, PLUS, NOTHING, NOTHING)) ==
                   (0 AM_LOGIT_KINDS(OR, OR, NOTHING, NOTHING)),
               "several kinds that act alike must be lines, whose numbers are added up");
