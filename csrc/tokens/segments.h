/* segments.h – converts, checks, counts and numbers the tokens of segments. */
#ifndef AM_TOKENS_SEGMENTS_H
#define AM_TOKENS_SEGMENTS_H

#include <stdint.h>

#include "core/arrays/array.h"
#include "core/runtime/threads.h"

/* Segment ids are arrays without channels: integers of any type. Negative ids are padding. */

/* These functions set `large` to the index in C order of the first id that is too large for the result, which
 * ends them, or to -1. */

/* What becomes of integers, as contiguous int32. */
typedef enum {
    AM_TO_IDS,      /* all negative ids are padding; those below the range of int32 become its lowest value */
    AM_TO_INTEGERS, /* a number that is too small is reported like one that is too large */
    AM_TO_POSITIONS, /* the position of each token in its span of equal ids, and `pad` for padding */
} am_id_result;
am_status am_convert_ids(const am_context *context, const am_array *ids, am_id_result what, int32_t pad,
                         int32_t *dst, ptrdiff_t *large);

/* Writes `one` (the first `size` bytes of it) for each valid id, and zeros for padding. */
am_status am_mark_valid(const am_context *context, const int32_t *ids, ptrdiff_t count, void *dst,
                        ptrdiff_t size, uint64_t one);

/* Counts the tokens of each id. `counts` becomes a new array of `segments` entries, one more than the largest
 * id. Ids from `limit` on are too large. */
am_status am_count_segments(const am_context *context, const am_array *ids, ptrdiff_t limit,
                            ptrdiff_t **counts, ptrdiff_t *segments, ptrdiff_t *large);

/* What am_number_tokens writes for each token. A segment is all tokens of a row that have the same id, in one
 * span of them or several. */
typedef enum {
    AM_EARLIER_TOKENS,   /* for queries: how many tokens of the segment come before; -1 for padding */
    AM_CHUNKS,           /* the chunk of the span, counted from 1 in each row, segment by segment; -1 for
                            padding. Queries are `shifts` positions further, and have -1, too, where that is
                            in no chunk of their segment */
    AM_SAME_FIRST_TOKEN, /* for queries: the position among the keys, if the first token of each segment is
                            the same on both sides; the own position for padding and segments without keys */
    AM_SAME_LAST_TOKEN,  /* as above, if the last token is the same on both sides */
} am_token_number;

typedef struct {
    am_token_number what;
    am_array ids[2];        /* of queries and keys: int32, of the same rows */
    ptrdiff_t size;         /* of a chunk */
    const char *shifts;     /* int64, one for each batch row of ids */
    ptrdiff_t shift_stride; /* in bytes */
    int32_t *dst[2];        /* C-contiguous; NULL for keys that get no numbers */
    bool moved;             /* becomes true if a position differs among the keys */
} am_numbering;
am_status am_number_tokens(const am_context *context, am_numbering *numbering);

#endif
