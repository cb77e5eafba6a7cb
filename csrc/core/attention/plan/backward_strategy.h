/* backward_strategy.h – how attention backward is divided: pure functions of a few numbers. How a section is
 * summed up follows from the section and from arguments of the whole call, as in strategy.h. What a task
 * takes alters no sum, and so may follow from all sections and from the number of threads. */
#ifndef AM_CORE_ATTENTION_PLAN_BACKWARD_STRATEGY_H
#define AM_CORE_ATTENTION_PLAN_BACKWARD_STRATEGY_H

#include <stdbool.h>
#include <stddef.h>

enum { AM_SUM_TILES = 4 }; /* the most tiles whose d_q is summed up before it is added */

/* The numbers that decide how a section is divided. */
typedef struct {
    ptrdiff_t heads, kv_heads;
    ptrdiff_t tiles, tile_bytes;        /* of keys, and what a task keeps of each */
    ptrdiff_t blocks;                   /* of queries, that see a tile */
    ptrdiff_t most;                     /* tiles that one block sees */
    ptrdiff_t begin, end;               /* from the first tile that a block sees to the last */
    ptrdiff_t visits[AM_SUM_TILES + 1]; /* [n]: sums of n tiles, a power of two, that blocks see, added up */
} am_backward_work;

/* How a section is summed up. */
typedef struct {
    ptrdiff_t tiles;        /* of a sum of d_q */
    ptrdiff_t split_visits; /* consecutive visits whose d_k and d_v are added up as one split */
} am_backward_sums;
am_backward_sums am_choose_sums(const am_backward_work *work);

/* The most tiles of a task, unless one sum has more. `all` has the tiles of all sections together. In order:
 * tasks add to the gradient of a term, too. */
ptrdiff_t am_choose_task_tiles(const am_backward_work *all, ptrdiff_t threads, bool in_order);

/* True if each split is a task of its own. `tasks`: how many there are otherwise. */
bool am_splits_as_tasks(ptrdiff_t tasks, ptrdiff_t threads, bool in_order);

#endif
