/* points.h – a term of the logits that follows from the points of a query and of a key in a grid, and its
 * gradient.
 *
 * The table of a head has a number for each distance along both axes of the grid. One row of it serves a row
 * of keys and a query; the next query of that row reads it from one number before, the next row of keys reads
 * the next row of the table. So queries of one column of the grid read the same numbers, in the same order,
 * from key to key: each begins as many of them later as a row of the grid has points. In a tile they are
 * every width-th row, and have one window. */
#ifndef AM_CORE_ATTENTION_TERMS_POINTS_H
#define AM_CORE_ATTENTION_TERMS_POINTS_H

#include "core/attention/terms/logit_terms.h"

/* Adds a term by point for a block and the keys from `k` on to the tile in the scratch, or writes it there if
 * nothing is added before. Pairs for which it is -INFINITY become dead; returns whether there are any. */
bool am_add_points(const am_attn_base *base, const am_attn_place *at, ptrdiff_t k,
                   const am_logit_scratch *scratch, bool added);

/* Adds dS of a tile to the sums of the gradient of a term. */
void am_learn_points(const am_attn_base *base, const am_logit_term *term, const am_attn_place *at,
                     am_range tile, const char *d_s, char *window, am_line_sums *sums);

#endif
