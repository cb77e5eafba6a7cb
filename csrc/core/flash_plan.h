/* flash_plan.h – how attention forward goes about a call: what blocks and tasks are, and what is packed. */
#ifndef AM_FLASH_PLAN_H
#define AM_FLASH_PLAN_H

#include "core/flash_base.h"

enum {
    AM_MOST_ITEMS = 16,      /* of a task */
    AM_MOST_LOCAL_TILES = 8, /* packed tiles that a task keeps for itself */
};

/* One of the splits of the keys of a batch row, or of a sequence in it with exclusive keys. */
typedef struct {
    ptrdiff_t b, part;       /* the latter: the sequence */
    am_range tiles;          /* that its queries see, with any head, of all splits */
    ptrdiff_t split, splits; /* which, of how many: they follow each other */
    ptrdiff_t split_tiles;   /* of each */
} am_flash_row;

typedef struct {
    am_flash_base base;
    bool exclusive;       /* no other query reads the keys of a sequence */
    ptrdiff_t block_rows; /* queries of a block */
    ptrdiff_t block_heads;
    ptrdiff_t most_rows;                     /* of a block */
    ptrdiff_t head_blocks, q_blocks, blocks; /* the last: in all, not counting splits */
    ptrdiff_t row_blocks;                    /* of a row */
    ptrdiff_t item_group, group_tasks; /* items that a task may not leave, and how many tasks they make */
    ptrdiff_t row_count;
    am_flash_row *rows;
    ptrdiff_t task_items, lockstep; /* blocks of a task, and how many of them advance in lockstep: of heads
                                     * side by side, or of those that share keys */
    ptrdiff_t local_count;          /* local tiles of a task */
    bool shares_keys;               /* tasks read the tiles that other tasks have packed */
    bool unpacked;                  /* keys and values are not packed: decode */
    bool values_unpacked;           /* values are not, of tiles whose pairs are all live */
    bool transposed;                /* full tiles are, Sᵀ = K Qᵀ: keys stay, and queries are packed */
    bool queries_direct;            /* they are not copied */
    bool bf16x2;                    /* a lane of queries, keys and values holds two bfloat16 */
    double factor;                  /* of products, to make logits of them */
    double q_factor, k_factor;      /* what queries are scaled by, and keys as they are packed */
    ptrdiff_t lanes;                /* of a query or key */
    am_ranges queries, keys;        /* to blocks, and to tiles */
    ptrdiff_t splits, split_tiles;
    ptrdiff_t seen;             /* tiles of a row, at most */
    ptrdiff_t out_depth;        /* value_depth, in halves of panels */
    ptrdiff_t k_bytes, v_bytes; /* of a packed tile */
    int threads;                /* that take blocks */
    ptrdiff_t first, wave;      /* of batch × kv_heads: those that are packed, and how many at once */
    char *packed;               /* [wave][seen] of k and v, NULL if blocks pack their own */
    atomic_uchar *states;       /* of each a tile_state */
    char *partials;             /* of each sequence or batch row [row_blocks][splits], or NULL */
    ptrdiff_t partial_bytes;  /* of the accumulators of a block: out, ref_max, sum and row_max of its rows */
    const am_sink_sum *sinks; /* of each head, NULL without */
    am_workspaces workspaces; /* one for each thread */
} am_flash_plan;

/* All but the memory, for queries of one kind. Blocks and splits follow from shapes and the mask, so no
 * result depends on the number of threads or on what a task takes. */
am_status am_flash_plan_make(am_flash_plan *plan, const am_run *run, const am_flash *flash,
                             const am_ranges *queries, const am_ranges *keys, am_query_kind kind);
void am_flash_plan_free(am_flash_plan *plan);

#endif
