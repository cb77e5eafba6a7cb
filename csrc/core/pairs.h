/* pairs.h – masks whose live tokens form one range in each batch row. */
#ifndef AM_PAIRS_H
#define AM_PAIRS_H

#include <stdint.h>

#include "core/extents.h"
#include "core/status.h"
#include "core/threads.h"

/* `live` or `dead` for each pair (q, k) of each batch row: live are those inside of its box, which may reach
 * beyond the row, or end before it begins. Strides in bytes. */
typedef struct {
    char *data;
    ptrdiff_t batch, queries, keys;
    ptrdiff_t batch_stride, query_stride, key_stride;
    ptrdiff_t size;         /* of an element: 1, 2, 4 or 8 bytes */
    uint64_t live, dead;    /* in the lowest of them */
    const am_extent *boxes; /* [batch] */
} am_boxes;
am_status am_fill_boxes(const am_run *run, const am_boxes *boxes);

#endif
