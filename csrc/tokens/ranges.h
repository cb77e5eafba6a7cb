/* ranges.h – masks whose live tokens form one range in each batch row. */
#ifndef AM_TOKENS_RANGES_H
#define AM_TOKENS_RANGES_H

#include <stdint.h>

#include "tokens/extents.h"
#include "core/runtime/threads.h"

/* An array that am_fill_boxes fills: with `live` for each pair (q, k) inside of the box of its batch row,
 * else with `dead`. A box may reach beyond the array, or end before it begins. Strides are in bytes. */
typedef struct {
    char *data;
    ptrdiff_t batch, queries, keys;
    ptrdiff_t batch_stride, query_stride, key_stride;
    ptrdiff_t size;         /* of an element: 1, 2, 4 or 8 bytes */
    uint64_t live, dead;    /* in the lowest `size` bytes */
    const am_extent *boxes; /* [batch] */
} am_boxes;
am_status am_fill_boxes(const am_context *context, const am_boxes *boxes);

#endif
