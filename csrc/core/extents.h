/* extents.h – which tokens a mask knows: those with a live pair, and from where to where they reach. */
#ifndef AM_EXTENTS_H
#define AM_EXTENTS_H

#include "core/dense.h"
#include "core/threads.h"

typedef enum { AM_ANY_HEAD, AM_ALL_HEADS } am_head_rule;

/* From the first token of a batch row with a live pair up to the last, as [begin, end); [0, 0) without one. A
 * pair is live where it is in any head, or in all heads (also if there are none). */
typedef struct {
    ptrdiff_t q_begin, q_end, k_begin, k_end;
} am_extent;
am_status am_find_extents(const am_run *run, const am_dense *mask, am_head_rule rule, am_extent *extents);

/* 0 for tokens with a live pair in any head, else -1; [batch, tokens]. */
am_status am_mark_padding(const am_run *run, const am_dense *mask, int32_t *q_ids, int32_t *k_ids);

#endif
