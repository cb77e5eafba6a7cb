/* flash_plan.h – the plan of attention forward: its blocks, tasks and splits, and what is packed. */
#ifndef AM_FLASH_PLAN_H
#define AM_FLASH_PLAN_H

#include "core/flash_base.h"

enum {
    AM_MOST_ITEMS = 16,      /* of a task */
    AM_MOST_LOCAL_TILES = 8, /* packed tiles that a task keeps for itself */
};

/* One split of the keys of a row: a row is a batch row, or a sequence in it with exclusive keys. */
typedef struct {
    ptrdiff_t b, part;       /* the batch row, and the index of the sequence in it */
    am_range tiles;          /* the tiles that any head of its queries sees, over all splits */
    ptrdiff_t split, splits; /* the index and the number of splits; those of a row follow each other */
    ptrdiff_t split_tiles;   /* the tiles of each split */
} am_flash_row;

typedef struct {
    am_flash_base base;
    bool exclusive;                  /* rows are sequences with exclusive keys, else batch rows */
    ptrdiff_t block_rows;            /* the most queries of a block */
    ptrdiff_t block_heads;           /* the most query heads of a block */
    ptrdiff_t most_rows;             /* the most rows of a block: queries × heads */
    ptrdiff_t head_blocks, q_blocks; /* blocks along the heads of a group, and along the queries of a row */
    ptrdiff_t blocks;                /* all blocks, each counted once for all splits */
    ptrdiff_t row_blocks;            /* the blocks of a row */
    ptrdiff_t item_group;            /* the items among which those of a task are */
    ptrdiff_t group_tasks;           /* the tasks of an item group */
    ptrdiff_t row_count;             /* the length of `rows` */
    am_flash_row *rows;              /* all splits of all rows */
    ptrdiff_t task_items;            /* the blocks of a task: of heads that lie side by side or share keys */
    ptrdiff_t lockstep;              /* the items of a task that advance in lockstep */
    ptrdiff_t local_count;           /* the local tiles of a task */
    bool shares_keys;                /* tasks read the tiles that other tasks have packed */
    bool unpacked;                   /* keys and values are read unpacked: decode */
    bool values_unpacked;            /* values are read unpacked, in tiles whose pairs are all live */
    bool transposed;                 /* tiles whose pairs are all live are transposed: Sᵀ = K Qᵀ, keys are
                                      * read unpacked, and queries are packed */
    bool queries_direct;             /* queries are read where they lie, else they are copied */
    bool bf16x2;                     /* a lane of queries, keys and values holds two bfloat16 */
    double factor;                   /* turns products into logits, in units of ln 2 or 1 */
    double q_factor, k_factor;       /* scale queries as they are copied, and keys as they are packed */
    ptrdiff_t lanes;                 /* the lanes of a query or key */
    am_ranges queries, keys;         /* the ranges of blocks, and of tiles */
    ptrdiff_t splits, split_tiles;   /* the most splits of a row, and the tiles of each if keys are packed */
    ptrdiff_t seen;                  /* the most tiles that a row sees */
    ptrdiff_t out_depth;             /* value_depth, rounded up to half a panel */
    ptrdiff_t k_bytes, v_bytes;      /* the lengths of a packed tile */
    int threads;                     /* the threads of the call */
    ptrdiff_t first, wave;    /* of batch × kv_heads: the first head of a wave, and the heads of each */
    char *packed;             /* the shared tiles, [wave][seen] of k and v; NULL if none are shared */
    atomic_uchar *states;     /* a tile_state for each of them */
    char *partials;           /* accumulators, [row][row_blocks][splits]; NULL if keys are not split */
    ptrdiff_t partial_bytes;  /* the length of a block's accumulators: out, ref_max, sum, row_max */
    const am_sink_sum *sinks; /* one for each head; NULL without sinks */
    am_workspaces workspaces; /* one for each thread */
} am_flash_plan;

/* Makes all but the memory, for queries of one kind. Blocks and splits follow from shapes and the mask, so
 * results depend neither on the number of threads nor on the items of a task. */
am_status am_flash_plan_make(am_flash_plan *plan, const am_run *run, const am_flash *flash,
                             const am_ranges *queries, const am_ranges *keys, am_query_kind kind);
void am_flash_plan_free(am_flash_plan *plan);

#endif
