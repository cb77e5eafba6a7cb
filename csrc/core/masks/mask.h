/* mask.h – describes which query may attend to which key, and declares the three questions that all other
 * code asks of that description.
 *
 * A mask is an expression over terms in postfix order: `segments band AND dense OR` means ((segments and
 * band) or dense). A term points at arrays that its owner keeps alive. Each pair (q, k) of batch row b and
 * head h is either live or dead. An array that is the same for all batch rows or heads has a stride of zero
 * along that axis.
 *
 *     which keys may be live for these query rows?     am_mask_keys
 *     is this tile dead, full or mixed?                am_mask_bits
 *     which of its pairs are live?                     am_mask_bits
 *
 * am_mask_keys may return too large a range. How much too large may depend on other batch rows or sequences,
 * so nothing that changes a sum may depend on it. am_mask_bits is exact, and so is
 * am_mask_seen. A new kind of mask is a new term: a value of am_node_kind, its functions in a file beside
 * terms.c, its readers in bind, and its row in attnmask/_masks/terms.py.
 */
#ifndef AM_CORE_MASKS_MASK_H
#define AM_CORE_MASKS_MASK_H

#include "core/arrays/array.h"
#include "core/runtime/threads.h"

enum {
    AM_TILE_ROWS = 64,    /* the most rows in one question */
    AM_TILE_COLUMNS = 64, /* the most columns: one word of bits per row */
    AM_MASK_DEPTH = 16,   /* the most operands on the stack of an expression */
};

typedef enum { AM_DEAD, AM_FULL, AM_MIXED } am_tile;

/* Tokens begin … end - 1. A term may return end <= begin for an empty range; am_mask_keys returns a range
 * within the mask. */
typedef struct {
    ptrdiff_t begin, end;
} am_range;

typedef enum {
    /* Terms. */
    AM_TERM_ALL,       /* every pair */
    AM_TERM_BAND,      /* low[b, h] <= k - q <= high[b, h] */
    AM_TERM_CHUNK,     /* (q + q_shift[b]) / size == (k + k_shift[b]) / size */
    AM_TERM_KEYS,      /* begin[b] <= k < end[b] */
    AM_TERM_EQUAL,     /* q_ids[q] == k_ids[k], a valid id: not negative, and not 0 if exclude_zero */
    AM_TERM_SEQUENCES, /* q and k lie in the same sequence s, and low[s] <= k - q <= high[s] if both are
                          counted from its start; and if there are chunks, (q + offsets[s]) / size == k /
                          size */
    AM_TERM_DENSE,     /* array[q + q_shift[b], k + k_shift[b]] is not zero */
    AM_TERM_TILES, /* the tile of (q + q_shift[b], k + k_shift[b]) is live, or has a bit that is set for it */
    AM_TERM_DIAGONAL,     /* low[b, h] <= k - at[q] <= high[b, h] */
    AM_TERM_NEIGHBORHOOD, /* tokens are points of a grid, and along each axis point k + k_shift[b] is in the
                             window of point q + q_shift[b] */
    AM_TERM_KINDS,
    /* Operators on the one or two operands before them. */
    AM_NOT = AM_TERM_KINDS,
    AM_AND,
    AM_OR,
    AM_XOR,
} am_node_kind;

/* A summary of 64 consecutive ids, which saves the questions from reading them. am_mask_prepare makes it. */
typedef struct {
    int32_t low, high; /* the range of the valid ids; low > high if there are none */
    int32_t all_valid; /* every id is valid */
} am_id_block;

/* A number of each token. */
typedef struct {
    const int32_t *ids;    /* contiguous along tokens */
    ptrdiff_t batch, head; /* strides in elements */
    am_id_block *blocks;   /* summaries of 64 ids each, for each distinct (b, h) */
} am_token_ids;

/* Tiles of pairs, of any size. */
typedef struct {
    const int32_t *places; /* AM_DEAD, AM_FULL, or AM_MIXED and above. Other threads may write any number to
                            * those of the caller: it is checked where it is read */
    ptrdiff_t batch, head, row; /* strides in elements */
    ptrdiff_t q_size, k_size;   /* pairs in a tile */
    const ptrdiff_t *q_shift,
        *k_shift; /* [batch], not negative; no shifted position is beyond the last tile */
} am_tile_map;

/* Points in row-major order. Along an axis, points see only points that are a multiple of `dilation` away, as
 * if there were no others. Of these, `stride` neighbours share one window: `kernel` points around the middle
 * one, moved inside where the window would leave the axis. A causal window ends with the point itself, and
 * the last of the `stride` neighbours sees `kernel` points. */
typedef struct {
    ptrdiff_t length, kernel, stride, dilation; /* dilation × kernel ≤ length, stride ≤ kernel */
    bool causal;
    ptrdiff_t step; /* from a point to the next one, in tokens */
} am_grid_axis;

enum { AM_MOST_GRID_AXES = 3 };
typedef struct {
    int axes;
    am_grid_axis axis[AM_MOST_GRID_AXES];
} am_grid;

typedef struct {
    am_node_kind kind;
    bool borrowed; /* its summaries belong to another mask, which is prepared */
    union {
        struct {
            const ptrdiff_t *low, *high; /* within ±AM_FAR */
            ptrdiff_t batch, head;       /* strides in elements */
        } band;
        struct {
            const ptrdiff_t *low, *high; /* these four are those of a band, in the same memory */
            ptrdiff_t batch, head;
            am_token_ids at; /* the key that each query has on its diagonal */
        } diagonal;
        struct {
            ptrdiff_t size;
            const ptrdiff_t *q_shift, *k_shift; /* [batch], not negative */
        } chunk;
        struct {
            const ptrdiff_t *begin, *end; /* [batch] */
        } keys;
        struct {
            am_token_ids q, k;
            int exclude_zero;
            am_id_block *k_wide_blocks; /* summaries of 64 blocks each */
        } equal;
        struct {
            ptrdiff_t count;
            const ptrdiff_t *q_starts, *k_starts; /* [count + 1], from 0 to all queries or keys */
            const ptrdiff_t *low, *high;          /* [count], within ±AM_FAR */
            ptrdiff_t size;                       /* of chunks; 0: there are none */
            const ptrdiff_t *offsets;             /* [count] */
        } sequences;
        struct {
            am_tile_map map; /* summaries: of 64 × 64 pairs, and of all along an axis whose stride is 0.
                              * Arrays have an element for each shifted position of the others */
            const char *data;
            am_dtype type;
            ptrdiff_t batch, head, row, column; /* strides in bytes. Not an am_array: short calls would pay
                                                 * for longer nodes, 1 % */
        } dense;
        struct {
            am_tile_map map; /* in the same memory as that of an array; of 64 × 64 pairs, if any has bits */
            const unsigned char (*bits)[AM_TILE_ROWS][8]; /* of AM_MIXED + i, a bit for each pair of a row */
            ptrdiff_t patterns;                           /* tiles that have bits */
        } tiles;
        struct {
            const am_grid *grid;
            const ptrdiff_t *q_shift,
                *k_shift; /* [batch], not negative; no shifted token is beyond the grid */
        } neighborhood;
    };
} am_node;

/* The largest bound of a band. Positions are at most 2^56, so that sums of both cannot overflow. */
enum { AM_FAR_SHIFT = 60 };
#define AM_FAR ((ptrdiff_t)1 << AM_FAR_SHIFT)

typedef struct {
    ptrdiff_t batch, heads, queries, keys;
    am_node *nodes;
    ptrdiff_t node_count;
    /* Set by am_mask_prepare: */
    const am_kernels *kernels;
    bool exact_keys;     /* am_mask_keys returns no range that is too large */
    bool has_boundaries; /* there may be some */
    ptrdiff_t own_heads; /* heads that may see different keys: all, or only the first */
} am_mask;

/* Makes the summaries that the questions need. Call it before the first question; the functions that compute
 * with a mask do. am_mask_release frees the summaries, also after a failure. */
am_status am_mask_prepare(const am_context *context, am_mask *mask);
void am_mask_release(am_mask *mask);

/* Sets the strides of a term of tiles, whose other fields are set, by the shape of its places. False if they
 * do not cover the mask, or if one of them is of a tile that is not there; `count` have bits. */
bool am_mask_set_tiles(const am_mask *mask, am_node *node, const ptrdiff_t shape[4], ptrdiff_t count);

/* The pairs that a question is about: rows × columns of them, beginning at (q, k). */
typedef struct {
    ptrdiff_t b, h, q, rows, k, columns;
} am_region;

am_range am_mask_keys(const am_mask *mask, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q, ptrdiff_t rows);

/* Sets bit i of bits[r] if pair (q + r, k + i) is live; bits from `columns` on are zero. Returns the exact
 * kind of the tile, and writes the bits only if the tile is mixed. A tile has up to AM_TILE_ROWS ×
 * AM_TILE_COLUMNS pairs and may begin anywhere. */
am_tile am_mask_bits(const am_mask *mask, const am_region *tile, uint64_t *bits);

typedef enum { AM_QUERIES, AM_KEYS } am_side;

/* The queries of a tile that see any of its keys, or the keys that any of its queries sees: bit i is set for
 * the i-th. */
uint64_t am_mask_seen_in(const am_mask *mask, const am_region *tile, am_side side);

/* The bits of one query and up to AM_TILE_COLUMNS keys. Asks no summaries: for a few pairs it is faster. */
uint64_t am_mask_row(const am_mask *mask, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q, ptrdiff_t k,
                     ptrdiff_t columns);

/* The range from the first to the last key that any of the queries sees in any of the heads. It is exact for
 * all terms, but may be rounded outwards to multiples of `grain` ≤ AM_TILE_COLUMNS. */
typedef struct {
    am_range keys;
    bool by_last; /* the last of the queries is known to see a key */
} am_seen;
am_seen am_mask_seen(const am_mask *mask, ptrdiff_t b, am_range heads, am_range queries, ptrdiff_t grain);

/* One more than the last of the queries that sees a key in any of the heads, or queries.begin. */
ptrdiff_t am_mask_queries_end(const am_mask *mask, ptrdiff_t b, am_range heads, am_range queries);

/* Bit i is set if token begin + 1 + i belongs to another sequence, segment or chunk than the token before it,
 * in the first head. This is a hint: tiles that begin at boundaries are seldom mixed. */
uint64_t am_mask_boundaries(const am_mask *mask, ptrdiff_t b, am_side side, ptrdiff_t begin);

/* Functions that read whole masks. Arrays are C-contiguous unless strides are given. */

/* An array, whose type does not count, that am_mask_fill fills with `live` or `dead` for every pair: the
 * first `size` bytes of either. `size` is 1, 2, 4 or 8; queries are tokens, and keys channels. */
typedef struct {
    am_array array;
    ptrdiff_t size;
    uint64_t live, dead;
} am_mask_target;
am_status am_mask_fill(const am_context *context, am_mask *mask, const am_mask_target *target);

/* Counts the live pairs in each cell of a grid over one (b, h). Cells have q_cell × k_cell pairs; the last
 * ones may be smaller. */
am_status am_mask_grid(const am_context *context, am_mask *mask, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q_cell,
                       ptrdiff_t k_cell, int64_t *counts);

/* Counts the live pairs of each (b, h). */
am_status am_mask_count(const am_context *context, am_mask *mask, int64_t *counts);

/* Marks the queries and the keys that have a live pair with 1, and the others with 0: [batch, heads, queries]
 * and [batch, heads, keys]. */
am_status am_mask_any(const am_context *context, am_mask *mask, uint8_t *queries, uint8_t *keys);

#endif
