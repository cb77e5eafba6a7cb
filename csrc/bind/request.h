/* request.h – what a call asks for: read and checked here for all doors, which are those of Python, XLA,
 * DLPack and C.
 *
 * A door looks at each array once and hands over a view of it. From then on only the view counts, and copies
 * of what is checked number by number: code of the caller that runs later, or in another thread, may give its
 * array another shape or other numbers, but cannot free memory that the door has a reference to. What does
 * not fit is refused in words that each door turns into its own kind of error. */
#ifndef AM_BIND_REQUEST_H
#define AM_BIND_REQUEST_H

#include "core/attention/attention.h"

/* The largest length of an axis: times the size of an element, or added to AM_FAR, it does not overflow. */
static const ptrdiff_t AM_LONGEST = (ptrdiff_t)1 << 56;

/* An array as it was when it was looked at. */
enum { AM_MOST_AXES = 5 };
typedef struct {
    char *data; /* NULL: not given */
    am_dtype type;
    int axes; /* with more than AM_MOST_AXES, the first ones are below */
    ptrdiff_t shape[AM_MOST_AXES], stride[AM_MOST_AXES]; /* in bytes; 1 and 0 beyond the last axis */
    void *object;                                        /* what the door looked at */
} am_view;

/* 0 along axes of length 1, which are shared, and along empty ones. */
static inline ptrdiff_t am_shared_stride(const am_view *v, int axis)
{
    return v->shape[axis] <= 1 ? 0 : v->stride[axis];
}

/* The same view with these strides: its array repeats itself along such an axis. */
static inline am_view am_shared(am_view v)
{
    for (int i = 0; i < AM_MOST_AXES; i++) v.stride[i] = am_shared_stride(&v, i);
    return v;
}

/* An array whose axes are these of the view; -1: it lacks this axis. */
static inline am_array am_array_of(const am_view *v, am_by_axis axes)
{
    am_array a = {.data = v->data, .type = v->type, .shape = {1, 1, 1, 1}};
    if (axes.batch >= 0)
        a.shape.batch = v->shape[axes.batch], a.stride.batch = am_shared_stride(v, (int)axes.batch);
    if (axes.token >= 0) a.shape.token = v->shape[axes.token], a.stride.token = v->stride[axes.token];
    if (axes.head >= 0) a.shape.head = v->shape[axes.head], a.stride.head = v->stride[axes.head];
    if (axes.channel >= 0)
        a.shape.channel = v->shape[axes.channel], a.stride.channel = v->stride[axes.channel];
    return a;
}
static const am_by_axis AM_TOKENS_FIRST = {.batch = 0, .token = 1, .head = 2, .channel = 3},
                        AM_HEADS_FIRST = {.batch = 0, .head = 1, .token = 2, .channel = 3};

/* The array of a view [batch, tokens, heads, channels] or [tokens, heads, channels]. */
static inline am_array am_tokens_of(const am_view *v)
{
    return am_array_of(v, v->axes == 4 ? AM_TOKENS_FIRST : (am_by_axis){-1, 0, 1, 2});
}

/* The array of a view [batch, heads, tokens] or [heads, tokens], with one number per row. */
static inline am_array am_stats_of(const am_view *v)
{
    return am_array_of(v, v->axes == 3 ? AM_HEADS_FIRST : (am_by_axis){-1, 1, 0, -1});
}

const char *am_dtype_name(am_dtype type);

/* Memory that is freed with the request. */
typedef struct am_kept am_kept;

/* Words that each door spells in its own way, in messages that all doors share. Each door defines them in its
 * words.c. */
typedef struct {
    const char *none;     /* what came where nothing is given */
    const char *starts;   /* of packed sequences, in linear attention */
    const char *q_starts; /* of packed queries, in caches */
    const char *pairs;    /* an array that says which pairs are allowed */
    const char *paged;    /* what to write for a k_cache of pages */
    const char *comma;    /* behind the one number of a shape */
    bool hints;           /* whether readers write Python */
    const char *terms[AM_LOGIT_KIND_COUNT];
} am_words;
extern const am_words am_words_of_door;

typedef enum { AM_WRONG_VALUE, AM_WRONG_TYPE, AM_WRONG_INDEX } am_wrong;

/* "… must be …, got …"; or "… must be …", to which a description of `got` is added; and maybe a hint. */
typedef struct {
    am_wrong wrong;
    am_view got; /* without data: not given */
    char words[512], hint[128];
} am_refusal;

typedef struct {
    am_status status;    /* AM_OK, unless memory was lacking, or the core has ended a call */
    am_refusal *refusal; /* NULL: none; of this thread, until the next one */
    am_kept *kept;
    am_mask mask;
    am_attn attn; /* of this mask, which has its shape, too */
    int waiting;  /* terms of the mask that wait for an operator */
} am_request;

/* Frees all but what belongs to the door. */
void am_request_free(am_request *r);

/* All functions below return false or NULL if they fail, after they have refused the request. */
__attribute__((format(printf, 4, 5))) bool am_refuse(am_request *r, am_wrong wrong, const am_view *got,
                                                     const char *format, ...);
/* Adds what to write in Python to what was refused, "; write …", if that is what readers of the door write.
 */
__attribute__((format(printf, 2, 3))) bool am_hint(am_request *r, const char *format, ...);
bool am_refuse_status(am_request *r, am_status status); /* true for AM_OK */
static inline bool am_is_refused(const am_request *r) { return r->status != AM_OK || r->refusal; }

/* The whole message, for doors that do not add a description of their own. */
const char *am_request_words(am_request *r);

/* Checks that no axis is longer than AM_LONGEST. */
bool am_check_axes(am_request *r, const am_view *v, const char *name);

/* Zeros, which are freed with the request. */
void *am_keep(am_request *r, ptrdiff_t count, size_t size);

/* Converts the integers of an array of one axis, or its only one. What exceeds ptrdiff_t becomes its largest
 * value. Returns the index of the first such number, or -1. */
ptrdiff_t am_widen(const am_view *v, ptrdiff_t *to);

/* --- Masks (request_masks.c) --- */

/* An operand of a term, as the door brings it. */
typedef struct {
    enum { AM_NOTHING, AM_INTEGER, AM_ARRAY } kind;
    int64_t number;
    am_view view;
    const char *name; /* NULL: the door has none, and messages say what it is for */
} am_operand;

/* A kind of term, or an operator. */
enum { AM_MOST_OPERANDS = 6 };
typedef struct {
    const char *name;
    am_node_kind kind;
    const char *operands; /* a letter each: b if an array has an axis for the batch, s if all rows share it;
                           * NULL: an operator */
    bool (*read)(am_request *r, am_node *node, const am_operand *operands);
} am_node_row;

/* Find a row by its number, as exported programs hold it, or by its name. NULL: no such row. */
const am_node_row *am_node_row_at(ptrdiff_t number);
const am_node_row *am_node_row_named(const char *name);

/* A mask is read in postfix order, once its shape is set: begin, add terms and operators, and end. */
bool am_mask_begin(am_request *r, ptrdiff_t most_nodes);
bool am_mask_add(am_request *r, const am_node_row *term, const am_operand *operands);
bool am_mask_join(am_request *r, am_node_kind operator);
/* Adds a mask of the same shape that is prepared and that the door keeps. */
bool am_mask_include(am_request *r, const am_mask *mask);
/* `more` terms are joined by "and" to what was read, which may be nothing. */
bool am_mask_end(am_request *r, const am_node *more, int more_count);
/* Gives a mask that has a shape the nodes of the request's mask, which has one batch row, from a query on,
 * and likewise more. Neither is prepared. */
bool am_mask_cut(am_request *r, ptrdiff_t begin, am_mask *part, const am_node *more, int more_count);

/* --- Integers --- */

/* `count` integers within ±AM_FAR, of an operand that may be one for all; `none` where there is nothing. The
 * second function returns new memory. */
bool am_convert_integers(am_request *r, const am_operand *o, ptrdiff_t count, ptrdiff_t none, ptrdiff_t *to);
ptrdiff_t *am_read_integers(am_request *r, const am_operand *o, ptrdiff_t count, ptrdiff_t none);

/* Starts of sequences of so many tokens; `count` of sequences is -1 until it is known. */
const ptrdiff_t *am_read_starts_of(am_request *r, const char *name, const am_operand *o, ptrdiff_t tokens,
                                   ptrdiff_t *count);

/* --- Attention (request_attention.c, request_terms.c) --- */

/* Sets the shape of the call, which what comes next is compared with. */
bool am_read_inputs(am_request *r, const am_view *query, const am_view *key, const am_view *value);
/* Checks the numbers and places that the door has set. */
bool am_check_numbers(am_request *r);

/* Says where queries are among the keys: `starts` of packed sequences, or nothing. */
bool am_read_places(am_request *r, const am_operand *starts, const am_operand *key_starts,
                    const am_operand *offsets);

/* A term of the logits, as the door brings it. */
typedef struct {
    am_logit_kind kind;
    double number;
    am_operand integer, array; /* array: of four axes */
} am_term_given;
/* Adds a term, once places and all other numbers are known. */
bool am_read_term(am_request *r, const am_term_given *given);

bool am_check_stats(am_request *r, const am_view *v, const char *name);

typedef struct {
    am_view d_out, out, lse, d_lse; /* d_lse may be no array */
} am_gradients_given;
/* Sets all but the results. */
bool am_read_gradients(am_request *r, const am_gradients_given *given, am_attn_gradients *to);

#endif
