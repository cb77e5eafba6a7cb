/* layout.h – where the tokens of sequences lie in a cache of keys and values, and what their queries see.
 */
#ifndef AM_CORE_CACHE_LAYOUT_H
#define AM_CORE_CACHE_LAYOUT_H

#include "core/cache/formats.h"
#include "core/masks/mask.h"

/* Keys and values in pages: token t of sequence s is token t % size of page table[s][t / size]. A batch row
 * is a sequence; or packed sequences lie one behind the other in one row of keys. */
typedef struct {
    const int32_t *table;     /* NULL: keys and values are no pages */
    ptrdiff_t table_stride;   /* from sequence to sequence, in entries */
    ptrdiff_t size;           /* tokens of a page */
    const ptrdiff_t *used;    /* the first token of each sequence that may be read, and its page */
    const ptrdiff_t *lengths; /* of the sequences; what is behind them is not read */
    const ptrdiff_t *starts;  /* of packed sequences among the keys, [sequences + 1]; NULL: batch rows */
    ptrdiff_t sequences;
} am_pages;

/* The queries are the last tokens of their sequences, which are batch rows, or packed in one row. */
typedef struct {
    ptrdiff_t sequences;
    const ptrdiff_t *q_starts;   /* where the queries of each begin if they are packed; NULL: batch rows */
    const ptrdiff_t *new_starts; /* likewise of new tokens */
    ptrdiff_t queries;           /* of a batch row */
    ptrdiff_t keys;              /* of the mask: those of the longest sequence, or of all that are packed */
    ptrdiff_t longest;           /* tokens of a sequence */
    /* For each sequence: */
    ptrdiff_t *before;            /* the tokens that it had; to be filled in after am_kv_cache_make */
    ptrdiff_t *lengths;           /* and with the new ones */
    ptrdiff_t *used;              /* its first token that a query may see */
    ptrdiff_t *low, *high;        /* which distances k - q its queries see */
    ptrdiff_t *offsets;           /* the place of its first query */
    ptrdiff_t *moved;             /* k - q of its last query and last key among those of all */
    ptrdiff_t *k_starts;          /* [sequences + 1]; where packed keys would begin */
    ptrdiff_t *q_shift, *k_shift; /* what chunks add to queries and keys, so that no sum is negative */
    ptrdiff_t *zeros;
    int32_t *rows; /* a table of one page a sequence: the rows of a contiguous cache */
    struct {
        int32_t *pages; /* [sequences][columns]; what am_kv_cache_read_table has copied, or NULL */
        ptrdiff_t columns;
    } table;
} am_kv_cache;

/* Which keys a query sees: distances k - q from `low` to `high`, and only its own chunk. */
typedef struct {
    bool has_low, has_high; /* false: there is no such limit */
    ptrdiff_t low, high;    /* within ±2^59 */
    ptrdiff_t chunk; /* its tokens, up to 2^59, counted from the start of each sequence; 0: no chunks */
} am_kv_limits;

am_status am_kv_cache_make(am_kv_cache *cache, ptrdiff_t sequences);
void am_kv_cache_free(am_kv_cache *cache);

/* Computes all but `used`, limits and shifts from `before`, when new tokens are appended: packed ones, or
 * `more` to each sequence. Returns the first sequence that would have more than `capacity` tokens, or -1. */
ptrdiff_t am_kv_cache_place(am_kv_cache *cache, ptrdiff_t more, ptrdiff_t capacity);

/* Computes `used`, `low`, `high` and the shifts, once all others are known. */
void am_kv_cache_limit(am_kv_cache *cache, const am_kv_limits *limits);

/* Writes the terms of a mask that say what the queries see, each to be joined to the others by "and". Returns
 * their number. */
enum { AM_KV_TERMS = 3 };
int am_kv_cache_terms(const am_kv_cache *cache, const am_kv_limits *limits, am_node terms[AM_KV_TERMS]);

/* An entry of a table. */
typedef struct {
    int64_t page;
    ptrdiff_t sequence, index; /* sequence -1: there is none */
} am_kv_entry;

/* Copies the entries of a table of pages that decide where the call reads and writes. A page has `size`
 * tokens, at least 1. The table holds int32 or int64; its batch rows are sequences, and its tokens are pages.
 * Checks the copies, since other threads may write to the caller's table at any time. Sets `wrong` to the
 * first entry that is not from 0 to `pages` - 1. */
am_status am_kv_cache_read_table(am_kv_cache *cache, const am_array *from, ptrdiff_t size, ptrdiff_t pages,
                                 am_kv_entry *wrong);

/* The pages, of `size` tokens: those of the table that was read, or the rows of a contiguous cache. */
am_pages am_kv_cache_pages(const am_kv_cache *cache, ptrdiff_t size);

/* The first of the scales of channels that is not finite and positive, or NULL. */
const float *am_kv_wrong_scale(const am_kv_scales *scales, ptrdiff_t heads, ptrdiff_t channels);

/* Looks for a page that would be written to for two sequences, or twice for one. */
typedef struct {
    int32_t page, sequence, other; /* page -1: there is none */
} am_kv_writers;
am_status am_kv_find_writers(const am_pages *p, const ptrdiff_t *before, am_kv_writers *found);

#endif
