/* partition.h – the queries of a call in sections that share no key, their blocks of queries and tiles of
 * keys.
 *
 * A section is a batch row; or where the mask separates sequences, a sequence in it. What is computed for a
 * section follows from the section alone, so that a sequence's results are the same bits whatever it is
 * computed with. Its first block begins with its first query, and its tiles are counted from its first key.
 * It ends with the last query that sees a key, and the last key that is seen. */
#ifndef AM_CORE_ATTENTION_PLAN_PARTITION_H
#define AM_CORE_ATTENTION_PLAN_PARTITION_H

#include <stdbool.h>

#include "core/runtime/sizes.h"
#include "core/masks/mask.h"
#include "kernels/table.h"

enum { AM_MOST_RANGE = AM_FLASH_TILE }; /* tokens of a block or tile */
_Static_assert(AM_FLASH_TILE == AM_FLASH_ROWS, "queries and keys have the same ranges");

/* Ranges of tokens, numbered through all batch rows: the blocks of queries, or the tiles of keys. */
typedef struct {
    ptrdiff_t tokens; /* of a batch row */
    ptrdiff_t row;    /* the ranges of a batch row, if there is no list */
    ptrdiff_t count;  /* of all batch rows */
    am_range *list;   /* NULL: every 64 tokens */
    ptrdiff_t capacity;
} am_ranges;

typedef struct {
    ptrdiff_t b;
    am_range queries;       /* tokens */
    am_range keys;          /* tokens: from the first that is seen to the last, of any head; may be none */
    am_range blocks, tiles; /* indices of ranges; tiles hold `keys` */
} am_section;

typedef struct {
    am_ranges blocks, tiles;
    am_section *list; /* in the order of batch rows and keys; those without keys are anywhere in their row */
    ptrdiff_t count, capacity;
    am_range *seen; /* am_tiles_seen of each block; NULL where the mask tells it at once, or for each head */
} am_sections;

/* The mask is prepared. `by_mask`: sections are sequences, and what is behind them; else whole batch rows. */
am_status am_sections_make(am_sections *sections, const am_mask *mask, bool by_mask);
void am_sections_free(am_sections *sections);

static inline am_range am_range_at(const am_ranges *ranges, ptrdiff_t index)
{
    if (ranges->list) return ranges->list[index];
    const ptrdiff_t begin = index % ranges->row * AM_MOST_RANGE;
    return (am_range){begin, am_min(begin + AM_MOST_RANGE, ranges->tokens)};
}

/* The section of a block. */
const am_section *am_section_of(const am_sections *sections, ptrdiff_t block);

/* The index of the tile of a section that a key is in. */
ptrdiff_t am_tile_index(const am_sections *sections, const am_section *section, ptrdiff_t key);

/* The tiles of a section from the first to the last that any query of a block sees in some heads; none if
 * begin == end. The only answer to this question: what forward and backward skip, split and sum follows from
 * it. */
am_range am_tiles_seen(const am_sections *sections, const am_mask *mask, const am_section *section,
                       ptrdiff_t block, am_range heads);

/* The most queries of a block of a section. */
ptrdiff_t am_most_queries(const am_sections *sections, const am_section *section);

static inline ptrdiff_t am_length(am_range range) { return range.end - range.begin; }

#endif
