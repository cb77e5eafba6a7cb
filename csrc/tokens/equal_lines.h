/* equal_lines.h – finds out which rows of a mask are equal, and which columns. */
#ifndef AM_TOKENS_EQUAL_LINES_H
#define AM_TOKENS_EQUAL_LINES_H

#include "core/arrays/mask_rows.h"
#include "core/runtime/threads.h"

/* The largest length of an axis, except for axes along which the array repeats itself. */
enum { AM_LONGEST_GROUPED = INT32_MAX - 1024 };

/* Gives equal queries of a (b, h) equal ids, numbered in order of first appearance, and equal keys likewise.
 * A token without a live pair gets -1. The ids are [batch, heads, tokens]. No axis may be empty. */
am_status am_group_tokens(const am_context *context, const am_array *mask, int32_t *q_ids, int32_t *k_ids);

/* The first pair in the order of memory that contradicts the ids: it is live although its ids differ or are
 * negative, or dead although they are equal. */
typedef struct {
    bool any, live;
    ptrdiff_t place[4]; /* b, h, q, k */
} am_ungrouped;

/* Compares a mask with the ids of am_group_tokens. If `id_heads` is 1, the ids are those of head 0, and each
 * head is compared with them. */
am_status am_find_ungrouped(const am_context *context, const am_array *mask, ptrdiff_t id_heads,
                            const int32_t *q_ids, const int32_t *k_ids, am_ungrouped *found);

#endif
