/* strategy.h – how a section is computed: pure functions of a few numbers, which follow from the section and
 * from arguments of the whole call. Whatever they choose may alter a sum, so nothing else may enter: not the
 * number of threads, and not what else is in the batch. */
#ifndef AM_CORE_ATTENTION_PLAN_STRATEGY_H
#define AM_CORE_ATTENTION_PLAN_STRATEGY_H

#include <stdbool.h>
#include <stddef.h>

#include "kernels/dtype.h"

/* How a section reads its keys. */
typedef enum {
    AM_UNPACKED,   /* a few rows in all: keys and values are read where they lie; decode */
    AM_TRANSPOSED, /* one block whose rows fill vectors: queries are packed, and Sᵀ = K Qᵀ in full tiles, or
                      in the only one */
    AM_PRIVATE_PACKING, /* one block: a task packs each tile for it */
    AM_LOCKSTEP, /* blocks of heads that share keys: a task packs each tile, and its items take it one after
                    the other */
    AM_LOCAL_PACKING,  /* many blocks that see few tiles: a task keeps the tiles that it has packed */
    AM_SHARED_PACKING, /* many blocks: the first task that needs a tile packs it for all */
    AM_STRATEGIES
} am_strategy;
const char *am_strategy_name(am_strategy strategy);

/* What a strategy is chosen by. */
typedef struct {
    ptrdiff_t queries, q_blocks; /* the most queries of a block, and the number of blocks */
    ptrdiff_t tiles;             /* of keys */
    ptrdiff_t kv_heads, heads_per_kv;
    ptrdiff_t head_dim, value_dim;
    am_dtype type, k_type; /* of sums, and of keys and values in memory */
    ptrdiff_t panel, size; /* numbers of a panel of the kernels, and bytes of a number */
    double factor;         /* turns products into logits */
    ptrdiff_t width;       /* numbers of a lane of queries; where it holds two, the step scales products */
    bool packed_alone;     /* the step takes no rows of keys and values */
    bool products_alone;   /* logits are products times the factor: no bias, cap or dropout */
    bool packs_rounded;    /* kernels for unpacked keys multiply queries that they round as integers */
    bool queries_readable; /* queries can be read where they lie, but for the factor */
    bool alone;            /* as of am_attn */
    bool values_readable;  /* values can be read where they lie, in whole vectors */
} am_work;

/* How a section is computed. */
typedef struct {
    am_strategy strategy;
    ptrdiff_t rows;                  /* the most of a block: queries × heads */
    ptrdiff_t block_heads;           /* the most query heads of a block */
    ptrdiff_t head_blocks, q_blocks; /* blocks along the heads that share keys, and along the queries */
    ptrdiff_t splits, split_tiles;   /* parts of the keys, and the tiles of each */
    bool one_tile;                   /* transposed, and so is the only tile though it is not full */
    bool one_mixed_tile;             /* and even if its rows see different keys */
    bool scales_keys;                /* keys are scaled as they are packed, else queries as they are copied */
    bool queries_direct;             /* queries are read where they lie, else they are copied */
    bool values_unpacked;            /* values are read where they lie, in full tiles */
    bool widens_rows;                /* unpacked rows are widened even if kernels read them */
    bool packs_queries;              /* unpacked rows are multiplied by packed queries; set by the schedule */
    bool float_weights;              /* weights are not rounded though others of the arithmetic are */
} am_shape;

/* All but the splits. */
am_shape am_choose_shape(const am_work *work);

/* Whether splits follow from what each block sees, which takes a while to count; else every block is taken to
 * see all tiles. */
bool am_counts_tiles(const am_work *work, const am_shape *shape);

/* Splits keys: `all` tiles are seen by the blocks of a head together, `most` by one of them. */
void am_choose_splits(const am_work *work, am_shape *shape, ptrdiff_t all, ptrdiff_t most);

#endif
