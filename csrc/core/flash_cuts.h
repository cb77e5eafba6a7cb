/* flash_cuts.h – how queries are cut to blocks, and keys to tiles: every 64 tokens, and where the mask parts
 * them, so that few tiles are mixed. */
#ifndef AM_FLASH_CUTS_H
#define AM_FLASH_CUTS_H

#include <stdbool.h>

#include "core/arithmetic.h"
#include "core/mask.h"
#include "kernels/table.h"

enum {
    AM_MOST_CUT = AM_FLASH_TILE, /* tokens of a range */
    AM_FEW_ROWS = 12,            /* of a block, for which keys are not packed, of whatever type they are */
};
_Static_assert(AM_FLASH_TILE == AM_FLASH_ROWS, "queries and keys are cut alike");

typedef struct {
    ptrdiff_t count;    /* of a batch row, at most: behind its own follow empty ones */
    ptrdiff_t tokens;   /* of the side, whether or not they are in a range */
    am_range *ranges;   /* of batch row b those from first[b] on, in their order; NULL: every 64 tokens */
    ptrdiff_t *first;   /* [batch + 1] */
    ptrdiff_t capacity; /* ranges that there is memory for */
} am_cuts;

/* All tokens of a side; `by_mask`: also where the mask parts them. */
am_status am_cuts_make(am_cuts *cuts, const am_mask *mask, am_side side, bool by_mask);

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
am_status am_cuts_of_queries(am_cuts cuts[AM_QUERY_KINDS], const am_mask *mask, ptrdiff_t group);

void am_cuts_free(am_cuts *cuts);

static inline am_range am_cut(const am_cuts *cuts, ptrdiff_t b, ptrdiff_t index)
{
    if (!cuts->ranges)
        return (am_range){index * AM_MOST_CUT, am_min((index + 1) * AM_MOST_CUT, cuts->tokens)};
    index += cuts->first[b];
    return index < cuts->first[b + 1] ? cuts->ranges[index] : (am_range){cuts->tokens, cuts->tokens};
}

/* The range that a token is in, of those of all tokens. */
ptrdiff_t am_cut_of(const am_cuts *cuts, ptrdiff_t b, ptrdiff_t token);

/* The most tokens of a range, and how many ranges there are, in so many batch rows. */
ptrdiff_t am_longest_cut(const am_cuts *cuts, ptrdiff_t batch);
ptrdiff_t am_count_cuts(const am_cuts *cuts, ptrdiff_t batch);

#endif
