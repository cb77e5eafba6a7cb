/* terms.h – what is asked of a kind of logit term. */
#ifndef AM_CORE_ATTENTION_TERMS_TERMS_H
#define AM_CORE_ATTENTION_TERMS_TERMS_H

#include <assert.h>

#include "core/attention/attention.h"
#include "core/masks/mask.h"

typedef enum {
    AM_ADDS_PAIRS,       /* adds a number of its own to each pair */
    AM_ADDS_BY_DISTANCE, /* adds numbers that follow from k - q - offset: a row of a tile is the row before
                          * it, moved by one key */
    AM_ADDS_BY_KEY,      /* adds numbers that follow from the key: queries of a head and a batch row or
                          * sequence have the same. A cache counts the keys of each sequence from 0 */
    AM_ADDS_BY_POINT, /* adds numbers that follow from where query and key are in a grid, see am_bias_grid */
    AM_CAPS,          /* caps logits */
    AM_DROPS,         /* drops weights */
    AM_SINKS,         /* adds to the denominator of each row */
} am_acts;

/* Where the greatest logits of a row are likely to be: with them first, the row is seldom rescaled. */
typedef enum { AM_ANY_FIRST, AM_NEAREST_FIRST } am_first_keys;

/* The axes of an array, by the letters of kinds.h. */
typedef enum {
    AM_NO_AXIS,
    AM_AXIS_1,
    AM_AXIS_B,
    AM_AXIS_R,
    AM_AXIS_H,
    AM_AXIS_KV,
    AM_AXIS_Q,
    AM_AXIS_K,
    AM_AXIS_N,
} am_axis;

/* Some numbers along a line: those of the pairs of a head at distances from `first` on, or of its keys from
 * `first` on, which are keys that there are. */
typedef struct {
    const am_logit_term *term;
    const double *numbers; /* of the term for this head, and batch row or sequence */
    ptrdiff_t length;      /* of these: of the last axis */
    double factor;         /* from these to the unit of logits */
    ptrdiff_t first, count;
} am_line;

/* The line at a distance, or a key of the call, for a head and a batch row or sequence; `count` and `factor`
 * are 1. */
am_line am_line_of(const am_attn *attn, const am_logit_term *term, ptrdiff_t row, ptrdiff_t head,
                   ptrdiff_t at);

/* Where number i is in an array, which may have one for all. */
static inline ptrdiff_t am_line_index(const am_line *line, ptrdiff_t i)
{
    assert(line->length == 1 || (i >= 0 && i < line->length));
    return line->length == 1 ? 0 : i;
}

/* That number in the unit of logits. */
static inline double am_line_number(const am_line *line, ptrdiff_t i)
{
    return line->numbers[am_line_index(line, i)] * line->factor;
}

/* The batch row of a query, or its sequence, and that row's offset. */
ptrdiff_t am_row_of_query(const am_places *places, ptrdiff_t b, ptrdiff_t q);

/* The keys that a term has numbers for in a batch row or sequence, or in the row of a query: all, or those of
 * the sequence where sequences lie one behind the other in pages. */
am_range am_keys_of_row(const am_attn *attn, ptrdiff_t row);
am_range am_keys_of_query(const am_attn *attn, ptrdiff_t b, ptrdiff_t q);
static inline ptrdiff_t am_offset_of_row(const am_places *places, ptrdiff_t row)
{
    return places->offsets ? places->offsets[row * places->offset_stride] : 0;
}

/* The batch rows that share a row of a bias, which are neighbours; there are rows. */
static inline ptrdiff_t am_bias_sharers(const am_attn *attn, const am_logit_term *bias)
{
    return attn->batch / bias->array.shape.batch;
}

/* Where the number of a pair is in the gradient of a bias, which is C-contiguous. */
static inline ptrdiff_t am_bias_index(const am_attn *attn, const am_logit_term *bias, ptrdiff_t b,
                                      ptrdiff_t head, ptrdiff_t q, ptrdiff_t k)
{
    const am_by_axis *shape = &bias->array.shape;
    const ptrdiff_t row = b / am_bias_sharers(attn, bias) * shape->head + (shape->head == 1 ? 0 : head);
    return (row * shape->token + (shape->token == 1 ? 0 : q)) * shape->channel +
           (shape->channel == 1 ? 0 : k);
}

/* The first key of a batch row or sequence among those of the call. */
ptrdiff_t am_first_key_of_row(const am_attn *attn, ptrdiff_t row);

/* The grid whose points, row by row, are the tokens of a batch row or sequence. The table of a head has
 * 2 height - 1 rows of 2 width - 1 numbers, by how far the key is from the query along either axis. */
typedef struct {
    ptrdiff_t height, width, stride; /* stride: the length of a row of the table */
} am_bias_grid;
am_bias_grid am_bias_grid_of(const am_logit_term *term);

/* The point of a query, and where the number of a pair of points is in the table. */
static inline ptrdiff_t am_point_of_query(const am_attn *attn, ptrdiff_t row, ptrdiff_t q)
{
    return q + am_offset_of_row(&attn->terms.places, row) - am_first_key_of_row(attn, row);
}
static inline ptrdiff_t am_point_index(const am_bias_grid *g, ptrdiff_t query, ptrdiff_t key)
{
    return (key / g->width - query / g->width + g->height - 1) * g->stride + key % g->width -
           query % g->width + g->width - 1;
}

/* Queries or keys of a batch row or sequence. */
typedef struct {
    ptrdiff_t row;
    bool are_queries;
    am_range points;
} am_row_points;

/* The first of these that are not all points of a term's grid; false if there are none. */
bool am_find_beyond_grid(const am_attn *attn, const am_logit_term *term, am_row_points *found);

/* The gradient of a term's numbers of one head, as a task adds it up: only numbers in a range are set. */
typedef struct {
    am_range filled;
    double *sums; /* [length of the last axis] */
} am_line_sums;

/* Sets to zero what is not set in a wanted range, and returns the sums. */
double *am_line_sums_in(am_line_sums *sums, am_range wanted);

typedef struct {
    const char *name;
    am_axis axes[4]; /* AM_NO_AXIS: it has a number instead */
    bool finite;
    am_acts acts;
    am_first_keys first;
    /* The most that it may add to a logit, in absolute value; INFINITY if that is not known, or logits are
     * not products and what is added to them. */
    double (*bound)(const am_attn *attn, const am_logit_term *term);
    /* Adds what the term adds along the line to `numbers`. */
    void (*add)(const am_line *line, double *numbers);
    /* The gradient from that of each number of the line. */
    void (*learn)(const am_line *line, const double *d_numbers, am_line_sums *sums);
} am_logit_row;
extern const am_logit_row am_logit_rows[AM_LOGIT_KIND_COUNT];

static inline const am_logit_row *am_row_of_term(const am_logit_term *term)
{
    return &am_logit_rows[term->kind];
}

/* The terms of a call by what they do; NULL: none. */
typedef struct {
    const am_logit_term *bias, *points, *cap, *dropout, *sinks;
    bool by_distance, by_key; /* whether any adds numbers along lines */
    bool nearest_first;       /* whether any term wants so */
    bool small;               /* all that is added to products is small enough for units of ln 2 */
} am_terms_found;
am_terms_found am_find_terms(const am_attn *attn);

/* Whether anything is added to the products of a tile. */
static inline bool am_adds_to_products(const am_terms_found *found)
{
    return found->bias || found->points || found->by_distance || found->by_key;
}
static inline double am_cap_of(const am_terms_found *found) { return found->cap ? found->cap->number : 0; }
static inline double am_dropout_of(const am_terms_found *found)
{
    return found->dropout ? found->dropout->number : 0;
}
static inline ptrdiff_t am_sink_count(const am_terms_found *found)
{
    return found->sinks ? found->sinks->array.shape.channel : 0;
}

/* Whether the array of a term has a gradient. */
static inline bool am_can_learn(const am_logit_term *term)
{
    const am_logit_row *row = am_row_of_term(term);
    return row->learn || row->acts == AM_ADDS_PAIRS || row->acts == AM_ADDS_BY_POINT || row->acts == AM_SINKS;
}

/* Whether tasks of keys add up that gradient in sums of their own. */
static inline bool am_has_sums(const am_logit_term *term)
{
    return am_row_of_term(term)->learn || am_row_of_term(term)->acts == AM_ADDS_BY_POINT;
}

/* Whether it is to be computed. */
static inline bool am_is_learned(const am_logit_term *term) { return term && term->gradient; }

/* Whether the array of a term is what its row says, and its integer in range. Bindings ask before they
 * compute. */
bool am_term_fits(const am_attn *attn, const am_logit_term *term);

#endif
