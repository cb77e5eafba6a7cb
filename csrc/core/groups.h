/* groups.h – which rows of a mask are equal, and which columns. */
#ifndef AM_GROUPS_H
#define AM_GROUPS_H

#include "core/dense.h"
#include "core/threads.h"

/* The longest axis (without those along which an array repeats itself). */
enum { AM_LONGEST_GROUPED = INT32_MAX - 1024 };

/* Equal queries of a (b, h) get equal ids, in the order in which they come, and so do keys; what has no live
 * pair gets -1. The ids are [batch, heads, tokens]. No axis may be empty. */
am_status am_group_tokens(const am_run *run, const am_dense *mask, int32_t *q_ids, int32_t *k_ids);

/* The first pair in the order of memory that is live though its ids differ or are negative, or the other way
 * round. */
typedef struct {
    bool any, live;
    ptrdiff_t place[4]; /* b, h, q, k */
} am_ungrouped;

/* The ids are those of am_group_tokens, or with one of `id_heads` those of head 0, asked about every head. */
am_status am_find_ungrouped(const am_run *run, const am_dense *mask, ptrdiff_t id_heads, const int32_t *q_ids,
                            const int32_t *k_ids, am_ungrouped *found);

#endif
