/* pairs.h – masks whose live tokens form one range in each batch row. */
#ifndef AM_PAIRS_H
#define AM_PAIRS_H

#include <stdint.h>

#include "core/status.h"
#include "core/threads.h"

/* `live` or `dead` for each pair (q, k) of each batch row b: live are those with q_begin <= q < q_end and
 * k_begin <= k < k_end, given as { q_begin, q_end, k_begin, k_end } of any size. Strides in bytes. */
typedef struct {
    char *data;
    ptrdiff_t batch, queries, keys;
    ptrdiff_t batch_stride, query_stride, key_stride;
    ptrdiff_t size;      /* of an element: 1, 2, 4 or 8 bytes */
    uint64_t live, dead; /* in the lowest of them */
    const ptrdiff_t (*boxes)[4];
} am_boxes;
am_status am_fill_boxes(const am_run *run, const am_boxes *boxes);

#endif
