/* mask.h – who may attend to whom: a description, and the three questions that everything asks of it.
 *
 * A mask is an expression over terms, written in postfix order: `segments band AND dense OR` means
 * ((segments and band) or dense). A term points at arrays that its owner keeps alive. A pair (q, k) of batch
 * row b and head h is live or dead; arrays that are the same for all rows or heads have a stride of zero
 * there.
 *
 *     which keys may be live for these query rows?     am_mask_keys
 *     is this tile dead, full or mixed?                am_mask_tile
 *     which of its pairs are live?                     am_mask_bits
 *
 * The first two may err on one side: keys may name too many, and a tile may be called mixed that is not. The
 * third is exact. A new kind of mask is a new term: a value of am_node_kind, its functions in mask_terms.c,
 * reading it in bind/mask.c, and its row in attnmask/_mask_terms.py.
 */
#ifndef AM_MASK_H
#define AM_MASK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "core/threads.h"

enum {
    AM_TILE_ROWS = 64,    /* at most, in one question about a tile */
    AM_TILE_COLUMNS = 64, /* one word of bits a row */
    AM_MASK_DEPTH = 16,   /* operands waiting at once while an expression is evaluated */
};

typedef enum { AM_DEAD, AM_FULL, AM_MIXED } am_tile;

/* A range of tokens. What am_mask_keys tells lies within the mask; terms may say nothing by end <= begin. */
typedef struct {
    ptrdiff_t begin, end;
} am_range;

typedef enum {
    /* Terms. */
    AM_TERM_ALL,       /* every pair */
    AM_TERM_BAND,      /* low[b] <= k - q <= high[b] */
    AM_TERM_CHUNK,     /* (q + q_shift[b]) / size == (k + k_shift[b]) / size */
    AM_TERM_KEYS,      /* begin[b] <= k < end[b] */
    AM_TERM_EQUAL,     /* q_ids[q] == k_ids[k], not negative, and not 0 if zero is excluded */
    AM_TERM_SEQUENCES, /* q and k lie in the same sequence s, at low[s] <= k - q <= high[s] counted from its
                          start */
    AM_TERM_DENSE,     /* array[q + q_shift[b], k + k_shift[b]] is not zero */
    AM_TERM_KINDS,
    /* Operators on the one or two operands before them. */
    AM_NOT = AM_TERM_KINDS,
    AM_AND,
    AM_OR,
    AM_XOR,
} am_node_kind;

/* What am_mask_prepare notes about blocks of 64 ids or tiles of 64 × 64 pairs, so that questions need not
 * look. */
typedef struct {
    int32_t low, high; /* of the valid ids; low > high if there are none */
    int32_t clean;     /* no id is invalid */
} am_id_block;

typedef struct {
    am_node_kind kind;
    bool borrowed; /* what is noted about it belongs to another mask, which is prepared */
    union {
        struct {
            const ptrdiff_t *low, *high; /* [batch], within ±AM_FAR */
        } band;
        struct {
            ptrdiff_t size;
            const ptrdiff_t *q_shift, *k_shift; /* [batch], not negative */
        } chunk;
        struct {
            const ptrdiff_t *begin, *end; /* [batch] */
        } keys;
        struct {
            const int32_t *q_ids, *k_ids;               /* contiguous along tokens */
            ptrdiff_t q_batch, q_head, k_batch, k_head; /* strides in elements */
            int exclude_zero;
            am_id_block *q_blocks, *k_blocks; /* prepared; by distinct (batch, head) */
            am_id_block *k_groups;            /* the same of 64 blocks each */
        } equal;
        struct {
            ptrdiff_t count;
            const ptrdiff_t *q_starts, *k_starts; /* [count + 1], from 0 to all queries or keys */
            const ptrdiff_t *low, *high;          /* [count], within ±AM_FAR */
        } sequences;
        struct {
            const char *data;
            am_dtype type;
            ptrdiff_t batch, head, row, column; /* strides in bytes */
            const ptrdiff_t *q_shift,
                *k_shift;   /* [batch], not negative; both zero unless rows, columns reach as far */
            uint8_t *tiles; /* prepared; an am_tile for each 64 × 64 pairs of each distinct (batch, head) */
            ptrdiff_t q_blocks, k_blocks; /* of them */
        } dense;
    };
} am_node;

enum { AM_FAR_SHIFT = 60 };
#define AM_FAR ((ptrdiff_t)1 << AM_FAR_SHIFT)

typedef struct {
    ptrdiff_t batch, heads, queries, keys;
    am_node *nodes;
    ptrdiff_t node_count;
    const am_kernels *kernels; /* set by am_mask_prepare */
} am_mask;

/* Notes what the questions need; once, before the first. am_mask_release frees it, also after a failure. */
am_status am_mask_prepare(const am_run *run, am_mask *mask);
void am_mask_release(am_mask *mask);

am_range am_mask_keys(const am_mask *mask, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q, ptrdiff_t rows);

/* Tiles of up to AM_TILE_ROWS × AM_TILE_COLUMNS pairs, anywhere. */
am_tile am_mask_tile(const am_mask *mask, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q, ptrdiff_t rows, ptrdiff_t k,
                     ptrdiff_t columns);

/* Bit i of bits[r] tells whether pair (q + r, k + i) is live; bits beyond `columns` are zero. Returns the
 * tile's exact kind; the bits are filled in only if it is mixed. */
am_tile am_mask_bits(const am_mask *mask, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q, ptrdiff_t rows, ptrdiff_t k,
                     ptrdiff_t columns, uint64_t *bits);

typedef enum { AM_QUERIES, AM_KEYS } am_side;

/* A hint for tiles that are seldom mixed: bit i tells whether token begin + 1 + i is of
 * another sequence, segment or chunk than the one before it, in the first head. */
uint64_t am_mask_boundaries(const am_mask *mask, ptrdiff_t b, am_side side, ptrdiff_t begin);

/* Whether there may be any, and whether heads may see different keys. */
bool am_mask_has_boundaries(const am_mask *mask);
bool am_mask_is_by_head(const am_mask *mask);

/* What is made of masks. Arrays are C-contiguous unless strides are given. */

/* Writes `live` or `dead` (the first `size` bytes of each) for every pair. Strides in bytes, size 1, 2, 4
 * or 8. */
typedef struct {
    char *data;
    ptrdiff_t batch, head, row, column;
    ptrdiff_t size;
    uint64_t live, dead;
} am_mask_target;
am_status am_mask_fill(const am_run *run, const am_mask *mask, const am_mask_target *target);

/* Live pairs of each cell of a grid over one (b, h): cells of q_cell × k_cell pairs, the last ones cut off.
 */
am_status am_mask_grid(const am_run *run, const am_mask *mask, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q_cell,
                       ptrdiff_t k_cell, int64_t *counts);

/* Live pairs of each (b, h). */
am_status am_mask_count(const am_run *run, const am_mask *mask, int64_t *counts);

/* Which queries, and which keys, have a live pair: bytes of 0 or 1, [batch, heads, queries] and [batch,
 * heads, keys]. */
am_status am_mask_any(const am_run *run, const am_mask *mask, uint8_t *queries, uint8_t *keys);

#endif
