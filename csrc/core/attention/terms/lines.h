/* lines.h – terms of the logits that follow from how far a key is from a query, or from the key alone, and
 * their gradients.
 *
 * By distance, a term is the same number along a diagonal of a tile. So a tile of Q queries and K keys has
 * Q + K - 1 of them, its window, and row r + 1 begins one number of the window before row r. By key, the
 * window is one row, which all rows share. */
#ifndef AM_CORE_ATTENTION_TERMS_LINES_H
#define AM_CORE_ATTENTION_TERMS_LINES_H

#include "core/attention/terms/logit_terms.h"

/* Rows of a block for which one window serves: queries of one head and one sequence. */
typedef struct {
    ptrdiff_t rows, head;
    ptrdiff_t row;      /* the batch row, or the sequence */
    ptrdiff_t distance; /* from the last of these queries to key 0 */
} am_span;

/* The span that begins with row r. */
am_span am_span_from(const am_attn_base *base, const am_attn_place *at, ptrdiff_t r);

/* The keys of a tile that the rows of a span have: tiles are whole, and may hold keys of other sequences. */
am_range am_keys_of_span(const am_attn_base *base, const am_span *span, am_range keys);

/* What is added to the products of a tile: rows of AM_FLASH_TILE numbers of the arithmetic type, so many
 * numbers apart. They may overlap, so nobody writes to them. NULL: nothing is added. */
typedef struct {
    const void *rows;
    ptrdiff_t stride;
} am_added;

/* Adds all terms of a call that act along lines, for a block and the keys from `k` on, to what is added
 * already, in the scratch or nothing. Pairs for which they are -INFINITY become dead; returns whether there
 * are any. */
bool am_add_lines(const am_attn_base *base, const am_attn_place *at, ptrdiff_t k,
                  const am_logit_scratch *scratch, am_added *added);

/* The key at distance 0 from the last query of a block; it need not be one of the keys. */
ptrdiff_t am_nearest_key(const am_attn_base *base, const am_attn_place *at);

/* --- The gradients --- */

typedef struct {
    const am_attn_base *base;
    int count;
    const am_logit_term *terms[AM_LOGIT_KIND_COUNT]; /* along lines or by point, with a gradient */
    atomic_ptrdiff_t *semaphores; /* of each key head: the task that may add to the results now */
} am_line_gradients;
am_status am_line_gradients_make(am_line_gradients *gradients, const am_attn_base *base);
void am_line_gradients_free(const am_line_gradients *gradients);

/* The sums of a task, for each term and each query head that shares its keys. */
am_line_sums *am_line_sums_take(const am_line_gradients *gradients, char *memory, ptrdiff_t *used);

/* Adds dS of a tile. */
void am_learn_lines(const am_line_gradients *gradients, const am_attn_place *at, am_range keys,
                    const char *d_s, char *scratch, am_line_sums *sums);

/* Adds the sums of a task of a key head to the results, when its turn comes, and empties them for the next.
 */
am_status am_end_line_sums(const am_line_gradients *gradients, const am_attn_place *at, ptrdiff_t turn,
                           am_line_sums *sums, am_team *team);

#endif
