/* extents.h – the tokens that have a live pair in a mask, and the range from the first of them to the
 * last. */
#ifndef AM_TOKENS_EXTENTS_H
#define AM_TOKENS_EXTENTS_H

#include "core/arrays/mask_rows.h"
#include "core/runtime/threads.h"

typedef enum { AM_ANY_HEAD, AM_ALL_HEADS } am_head_rule;

/* The range [begin, end) from the first token of a batch row that has a live pair to the last; [0, 0) without
 * one. A pair counts as live if it is live in any head, or in all heads (if there are no heads, every pair
 * is). */
typedef struct {
    ptrdiff_t q_begin, q_end, k_begin, k_end;
} am_extent;
am_status am_find_extents(const am_context *context, const am_array *mask, am_head_rule rule,
                          am_extent *extents);

/* Writes 0 for tokens that have a live pair in any head, and -1 for the others; [batch, tokens]. */
am_status am_mark_padding(const am_context *context, const am_array *mask, int32_t *q_ids, int32_t *k_ids);

/* Writes -1 for all tokens. */
am_status am_mark_all_padding(const am_context *context, int32_t *ids, ptrdiff_t count);

#endif
