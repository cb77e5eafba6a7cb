/* attention.h – exact attention that never holds more logits than one tile, and its gradients. */
#ifndef AM_CORE_ATTENTION_ATTENTION_H
#define AM_CORE_ATTENTION_ATTENTION_H

#include <stdint.h>

#include "core/cache/formats.h"
#include "core/cache/layout.h"
#include "core/masks/mask.h"
#include "core/runtime/threads.h"
#include "core/attention/terms/kinds.h"

enum { AM_POINTS_SPARE = 32 };

/* One term of the logits, as kinds.h has them. */
typedef struct {
    am_logit_kind kind;
    am_array array;  /* its numbers by batch row or sequence, head, query and key. Shared axes have a stride
                      * of 0. Numbers are double, and side by side along the last axis. Those of a grid bias
                      * are of the type of the arithmetic, and AM_POINTS_SPARE bytes behind them can be read.
                      * A bias has any type and strides, and neighbouring batch rows may share one of its
                      * rows */
    double number;   /* of a soft cap, the cap; of dropout, the probability, below 1 */
    int64_t integer; /* of a relative bias, the distance that it begins with; of dropout, the seed; of a
                      * grid bias, the length of a row of its table */
    void *gradient;  /* of a bias, C-contiguous as its array and of its type; else double [heads][length]
                      * of the last axis; NULL: not computed */
} am_logit_term;

/* Where queries are among the keys: the distance of a pair is k - q - offset, with the offset of its batch
 * row, or of its sequence where batch rows are divided. */
typedef struct {
    const ptrdiff_t *offsets; /* NULL: 0 */
    ptrdiff_t offset_stride;  /* 1, or 0 if it is shared */
    const ptrdiff_t *starts;  /* where the queries of sequences begin, and their number; NULL: batch rows */
    const ptrdiff_t *key_starts; /* likewise of keys, if a term needs them and there are no pages */
    ptrdiff_t sequences;
    ptrdiff_t first_query, first_key; /* of a part of a larger problem: its places there */
} am_places;

/* The terms of a call, in any order; at most one of each kind. */
typedef struct {
    int count;
    am_logit_term list[AM_LOGIT_KIND_COUNT];
    am_places places;
} am_terms;

/* Query row q of head h attends to the keys that the mask lets it see, those of head h / (heads / kv_heads):
 *
 *     logit = q·k scale + added terms,  capped to cap tanh(logit / cap) if there is a soft cap
 *     out = Σ e^logit v / (Σ e^logit + Σ e^sink),  lse = log of the denominator
 *
 * Not normalized, out = Σ e^(logit - rowmax) v. A row without live pairs is zero. */
typedef struct {
    ptrdiff_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
    am_array q, k, v, out; /* k and v have one type, q and out have one */
    am_array wide_out;     /* takes out in the type of the arithmetic as well; data NULL: not wanted */
    am_pages pages;        /* then the batch rows of k and v are pages; not for gradients */
    am_kv_scales k_scales, v_scales; /* both, of pages of eight or four bits alone */
    am_mask *mask;                   /* batch × heads × queries × keys */
    am_terms terms;
    double scale;
    bool normalize;
    bool alone;   /* a row gets the same bits whatever other rows there are, of their number as well */
    am_array lse; /* one number for each row, of the arithmetic type; data NULL: not wanted */
} am_attn;

/* Dropout numbers keys by 32 bits. */
static const ptrdiff_t AM_MOST_KEYS_OF_DROPOUT = (ptrdiff_t)1 << 32;

am_status am_attn_forward(const am_context *context, const am_attn *attn);

typedef struct {
    am_attn forward;     /* its terms say which of their gradients are computed; `out` is its result, of
                          * its type or of that of the arithmetic; its lse is not read */
    am_array lse, d_lse; /* one number for each row, of the arithmetic type; d_lse.data: NULL if it is 0 */
    am_array d_out, d_q, d_k, d_v;
} am_attn_gradients;

am_status am_attn_backward(const am_context *context, const am_attn_gradients *problem);

/* A call, and the tangents of what it takes and returns. */
typedef struct {
    am_attn forward;        /* its out.data may be NULL: out and lse are not wanted then */
    am_array d_q, d_k, d_v; /* as q, k and v; data NULL: 0 */
    am_array d_bias;        /* as the array of the bias */
    const double *d_sinks;  /* [heads][sinks]; NULL: 0 */
    am_array d_out, d_lse;  /* results; d_lse.data NULL: not wanted */
} am_attn_tangents;

am_status am_attn_jvp(const am_context *context, const am_attn_tangents *problem);

/* The same, of a mask that is prepared. */
am_status am_attn_prepared_jvp(const am_context *context, const am_attn_tangents *problem);

/* The tangents of the gradients as inputs move. d_q, d_k and d_v take the tangents of these gradients. d_out
 * and d_lse of `along`, both wanted, take the tangents of the results. Second derivatives are symmetric, so
 * this is also the gradient of the sum of d_q, d_k and d_v, each times the tangent given with it. Only q, k
 * and v have tangents, no term has a gradient, and results are normalized. */
am_status am_attn_backward_tangents(const am_context *context, const am_attn_gradients *problem,
                                    const am_attn_tangents *along);

/* The weights of some queries, and statistics of them. A result is of the arithmetic type unless it says
 * another, and C-contiguous but that heads lie `rows` or `sums` apart. NULL: it is not wanted. */
typedef struct {
    am_attn attn;           /* its values are not read, and its out is not written; terms drop nothing */
    am_array lse;           /* of the chosen queries */
    bool finds_lse;         /* it is a result, else given */
    const int64_t *queries; /* the chosen ones, in rising order */
    ptrdiff_t count;
    bool by_key_head;
    ptrdiff_t rows, sums;      /* results from head to head: of queries, at least `count`; of keys */
    void *weights;             /* [batch][heads][rows][keys] */
    void *key_sum;             /* [batch][heads, or kv_heads if by_key_head][sums] */
    void *entropy, *max_logit; /* [batch][heads][rows] */
    int64_t *top_keys;         /* [batch][heads][rows][top]: the keys of the greatest weights, from the
                                * greatest on, of equal ones the lower first; -1 behind them */
    void *top_weights;
    ptrdiff_t top;
} am_attn_weights;

/* The index of the results of the i-th chosen query of a head. */
static inline ptrdiff_t am_weights_row(const am_attn_weights *w, ptrdiff_t b, ptrdiff_t head, ptrdiff_t i)
{
    return (b * w->attn.heads + head) * w->rows + i;
}

/* The index of the sums of a query head. */
static inline ptrdiff_t am_weights_sums(const am_attn_weights *w, ptrdiff_t b, ptrdiff_t head)
{
    const ptrdiff_t shared = w->by_key_head ? w->attn.heads / w->attn.kv_heads : 1;
    return (b * (w->attn.heads / shared) + head / shared) * w->sums;
}

am_status am_attn_weigh(const am_context *context, const am_attn_weights *problem);

/* Attention and its gradients at the level `plain`, one query after the other. */
am_status am_plain_forward(const am_context *context, const am_attn *attn);
am_status am_plain_backward(const am_context *context, const am_attn_gradients *problem);
am_status am_plain_jvp(const am_context *context, const am_attn_tangents *problem);
am_status am_plain_weigh(const am_context *context, const am_attn_weights *problem);
am_status am_plain_backward_tangents(const am_context *context, const am_attn_gradients *problem,
                                     const am_attn_tangents *along);

/* Writes which weights dropout keeps, as bytes of 0 or 1: queries are tokens, and keys channels. */
am_status am_dropout_keep_mask(const am_context *context, uint64_t seed, double probability,
                               const am_array *kept);

#endif
