/* relative.h – terms of the logits that follow from how far a key is from a query: ALiBi and a relative
 * bias, and the gradient of the latter.
 *
 * Along a diagonal of a tile such a term is the same number. So a tile of Q queries and K keys has Q + K - 1
 * of them, its window, and row r + 1 begins one number of the window before row r. */
#ifndef AM_CORE_ATTENTION_TERMS_RELATIVE_H
#define AM_CORE_ATTENTION_TERMS_RELATIVE_H

#include "core/attention/terms/logit_terms.h"

/* Adds the terms of a block and the keys from `k` on to its `bias` in the scratch, or makes one if that is
 * NULL. Pairs whose term is -INFINITY become dead; returns whether there are any. */
bool am_relative_terms(const am_attn_base *base, const am_attn_place *at, ptrdiff_t k,
                       const am_logit_scratch *scratch, const void **bias, ptrdiff_t *bias_step);

/* The key at distance 0 from the last query of a block; it need not be one of the keys. */
ptrdiff_t am_nearest_key(const am_attn_base *base, const am_attn_place *at);

/* --- The gradient of the table --- */

/* What a task has added up for one head: numbers of the table in a range, the rest of `sums` is not set. */
typedef struct {
    am_range filled;
    double *sums; /* [length] */
} am_table_sums;

typedef struct {
    const am_attn_base *base;
    double *result;            /* [heads][length]; NULL: not computed */
    atomic_ptrdiff_t *serving; /* of each key head: the task that may add to the result now */
} am_table_gradient;
am_status am_table_gradient_make(am_table_gradient *gradient, const am_attn_base *base, double *result);
void am_table_gradient_free(const am_table_gradient *gradient);

/* The sums of a task, for each query head that shares its keys. */
am_table_sums *am_table_sums_take(const am_table_gradient *gradient, char *memory, ptrdiff_t *used);

/* Adds dS of a tile along its diagonals. */
void am_table_add(const am_table_gradient *gradient, const am_attn_place *at, am_range keys, const char *d_s,
                  char *scratch, am_table_sums *sums);

/* Adds the sums of the ticket-th task of a key head to the result, after those of the tasks before it. */
am_status am_table_end_task(const am_table_gradient *gradient, const am_attn_place *at, ptrdiff_t ticket,
                            const am_table_sums *sums, am_team *team);

#endif
