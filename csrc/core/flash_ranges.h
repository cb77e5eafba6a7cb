/* flash_ranges.h – the ranges of tokens that blocks of queries and tiles of keys follow: they end every 64
 * tokens and at the boundaries of the mask, so that few tiles are mixed. */
#ifndef AM_FLASH_RANGES_H
#define AM_FLASH_RANGES_H

#include <stdbool.h>

#include "core/arithmetic.h"
#include "core/mask.h"
#include "kernels/table.h"

enum {
    AM_MOST_RANGE = AM_FLASH_TILE, /* tokens of a range */
    AM_FEW_ROWS = 12,              /* of a block, for which keys are not packed, of whatever type they are */
};
_Static_assert(AM_FLASH_TILE == AM_FLASH_ROWS, "queries and keys have the same ranges");

typedef struct {
    ptrdiff_t count;    /* of a batch row, at most: behind its own follow empty ones */
    ptrdiff_t tokens;   /* of the side, whether or not they are in a range */
    am_range *list;     /* of batch row b those from first[b] on, in their order; NULL: every 64 tokens */
    ptrdiff_t *first;   /* [batch + 1] */
    ptrdiff_t capacity; /* ranges that there is memory for */
} am_ranges;

/* All tokens of a side; `by_mask`: ranges also end at the boundaries of the mask. */
am_status am_ranges_make(am_ranges *ranges, const am_mask *mask, am_side side, bool by_mask);

/* The kinds of ranges of queries. A short sequence whose keys no other query sees has exclusive keys: it is a
 * range of its own, as if it were a batch row. Its rows, over the query heads of a group, make several
 * blocks, one block, or up to AM_FEW_ROWS rows of one. The plan of a kind depends on its longest range. */
typedef enum {
    AM_SHARED_KEYS,
    AM_EXCLUSIVE_KEYS,
    AM_EXCLUSIVE_ONE_BLOCK,
    AM_EXCLUSIVE_FEW_ROWS,
    AM_QUERY_KINDS,
} am_query_kind;

/* All queries, by kinds. */
am_status am_ranges_of_queries(am_ranges ranges[AM_QUERY_KINDS], const am_mask *mask, ptrdiff_t group);

void am_ranges_free(am_ranges *ranges);

static inline am_range am_range_at(const am_ranges *ranges, ptrdiff_t b, ptrdiff_t index)
{
    if (!ranges->list)
        return (am_range){index * AM_MOST_RANGE, am_min((index + 1) * AM_MOST_RANGE, ranges->tokens)};
    index += ranges->first[b];
    return index < ranges->first[b + 1] ? ranges->list[index] : (am_range){ranges->tokens, ranges->tokens};
}

/* The index of the range that a token is in, if ranges are of all tokens. */
ptrdiff_t am_range_index(const am_ranges *ranges, ptrdiff_t b, ptrdiff_t token);

/* The most tokens of a range, and the number of ranges, in so many batch rows. */
ptrdiff_t am_longest_range(const am_ranges *ranges, ptrdiff_t batch);
ptrdiff_t am_count_ranges(const am_ranges *ranges, ptrdiff_t batch);

#endif
