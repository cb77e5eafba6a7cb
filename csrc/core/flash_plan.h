/* flash_plan.h – how attention forward goes about a call: what blocks and tasks are, and what is packed. */
#ifndef AM_FLASH_PLAN_H
#define AM_FLASH_PLAN_H

#include "core/flash_base.h"

enum {
    AM_MOST_BLOCKS = 16, /* of a task */
    AM_MOST_SLOTS = 8,   /* for tiles that a task packs for itself */
};

typedef struct {
    am_flash_base base;
    ptrdiff_t block_rows; /* queries of a block */
    ptrdiff_t block_heads;
    ptrdiff_t most_rows;                     /* of a block */
    ptrdiff_t parts;                         /* of a batch row, whose blocks see keys of their own */
    ptrdiff_t head_blocks, q_blocks, blocks; /* of a part; the last: in all */
    ptrdiff_t row_blocks, row_tasks;         /* of a part and split */
    ptrdiff_t together, at_once; /* blocks of a task, and how many walk at once: of heads side by side */
    ptrdiff_t slots;             /* for tiles that a task packs for itself */
    bool shares_keys;            /* blocks do, and find what others have packed */
    bool in_place;               /* keys and values are not packed */
    bool values_in_place;        /* values are not, of tiles whose pairs are all live */
    bool turned;                 /* tiles whose pairs are all live are: keys stay, and queries are packed */
    bool queries_in_place;       /* they are not copied */
    bool pairs;                  /* a lane of queries, keys and values holds two bfloat16 */
    double factor;               /* of products, to make logits of them */
    double q_factor, k_factor;   /* what queries are scaled by, and keys as they are packed */
    ptrdiff_t lanes;             /* of a query or key */
    am_cuts queries, keys;       /* to blocks, and to tiles */
    ptrdiff_t splits, split_tiles;
    ptrdiff_t tiles, seen;      /* of all keys, and by a part at most */
    ptrdiff_t out_depth;        /* value_depth, in halves of panels */
    ptrdiff_t k_bytes, v_bytes; /* of a packed tile */
    int threads;                /* that take blocks */
    ptrdiff_t first, wave;      /* of batch × parts × kv_heads: those that are packed, and how many at once */
    char *packed;               /* [wave][tiles] of k and v, NULL if blocks pack their own */
    atomic_uchar *states;       /* of each a tile_state */
    char *partials; /* [batch][parts][kv_heads][head_blocks][q_blocks][splits], NULL without splits */
    ptrdiff_t partial_bytes;  /* of what a block gathers: out, high, sum and top of its rows */
    const am_sink_sum *sinks; /* of each head, NULL without */
    am_rooms rooms;           /* for scratch */
} am_flash_plan;

/* All but the memory, for queries that are each `alone` with its keys, or for others. Blocks and splits
 * follow from shapes and the mask, so no result depends on the number of threads or on what a task takes. */
am_flash_plan am_flash_plan_of(const am_run *run, const am_flash *flash, const am_cuts *queries,
                               const am_cuts *keys, bool alone);

#endif
