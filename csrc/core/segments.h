/* segments.h – properties of segment ids. */
#ifndef AM_SEGMENTS_H
#define AM_SEGMENTS_H

#include <stdint.h>

#include "core/status.h"
#include "core/threads.h"

enum { AM_ID_AXES = 3 };

/* Integers of any type, [rows …, tokens]. An id below 0 is padding. */
typedef struct {
    const char *data;
    am_dtype type;
    ptrdiff_t shape[AM_ID_AXES],
        stride[AM_ID_AXES]; /* strides in bytes; tokens last, unused axes first and 1 long */
} am_ids;

/* What stops a function: the first id in the array's order that is too large. */
typedef struct {
    bool any;
    ptrdiff_t index; /* in C order */
} am_large_id;

/* The ids as int32, side by side; negative ones all the way down are padding. */
am_status am_narrow_ids(const am_run *run, const am_ids *ids, int32_t *dst, am_large_id *large);

/* Any integers as int32; here one that is too small counts as too large. */
am_status am_narrow_integers(const am_run *run, const am_ids *ids, int32_t *dst, am_large_id *large);

/* `one` (the first `size` bytes of it) for each valid id, and zeros for padding. */
am_status am_mark_valid(const am_run *run, const int32_t *ids, ptrdiff_t count, void *dst, ptrdiff_t size,
                        uint64_t one);

/* The place of each token in the run of equal ids that it is in; `pad` for padding. */
am_status am_positions(const am_run *run, const am_ids *ids, int32_t pad, int32_t *dst, am_large_id *large);

/* How many tokens have each id: a new array of as many counts as returned in `segments`, one more than the
 * largest id; ids from `limit` on are too large. */
am_status am_count_segments(const am_run *run, const am_ids *ids, ptrdiff_t limit, ptrdiff_t **counts,
                            ptrdiff_t *segments, am_large_id *large);

#endif
