/* backward_strategy.c – chooses how attention backward is divided. tests/attention/test_backward_strategy.py
 * has a line for each decision. */
#include "core/attention/plan/backward_strategy.h"

#include "core/runtime/sizes.h"

enum {
    NEAR_BYTES = 768 << 10, /* of tiles that stay in the cache from block to block */
    ENOUGH_SUMS = 32,       /* of d_q in a section, so that as many tasks can take them */
    MANY_SUMS = 64,      /* with fewer there are splits, which are tasks for many threads; enough under causal
                          * masks if each sum is of one tile */
    ENOUGH_SPLITS = 512, /* of a section, unless each would have fewer visits than these: */
    SPLIT_VISITS = 2,    /* twice as many under windows, where sums of d_k and d_v are of few visits */
    FEW_VISITS = 7,      /* of a sum, on average; with fewer, splits would cost narrow windows 5 % */
    WIDE_TILES = 4,      /* the most tiles of a task whose blocks see more than stay in the cache */
    MOST_TILES = 16,     /* of a task whose blocks see no more than that */
    ENOUGH_TASKS = 64,   /* of a call; more for many threads: */
    TASKS_EACH = 4,      /* for each thread */
    FEW_EACH = 2,        /* with fewer tasks for each thread, each split is one */
};
_Static_assert(AM_SUM_TILES < 32 && WIDE_TILES < 32 && MOST_TILES < 32,
               "splits.summed has a bit for each tile");

/* Halves the tiles of a sum or of a task until `near` or fewer are left, and there are `enough` of these. */
static ptrdiff_t limit_tiles(const am_backward_work *w, ptrdiff_t tiles, ptrdiff_t near, ptrdiff_t enough)
{
    while (tiles > 1 && (tiles > near || w->kv_heads * (w->tiles / tiles) < enough)) tiles /= 2;
    return tiles;
}

am_backward_sums am_choose_sums(const am_backward_work *w)
{
    /* Each block sees few tiles, as under a window, or more than the one before, as under a causal mask. */
    const bool see_few = w->most < w->end - w->begin,
               see_more = !see_few && w->visits[1] < w->blocks * w->most / 4 * 3;
    am_backward_sums s = {limit_tiles(w, AM_SUM_TILES, NEAR_BYTES / w->tile_bytes, ENOUGH_SUMS), PTRDIFF_MAX};
    /* Under a causal mask the last tasks are of few tiles. One thread gains as much by adding each tile to
     * d_q at once as it loses. */
    if (see_more && w->kv_heads * w->tiles <= MANY_SUMS) s.tiles = 1;
    /* Splits follow from the part of the section that is seen. So padding behind it does not change how its
     * sums are divided. */
    const ptrdiff_t sums = w->kv_heads * am_count_parts(w->begin, w->end, s.tiles),
                    visits = w->heads * w->visits[s.tiles];
    const bool of_one_tile = s.tiles == 1 && see_more;
    if (visits == 0 || sums > (of_one_tile ? MANY_SUMS : MANY_SUMS - 1)) return s;
    if (visits >= sums * FEW_VISITS)
        s.split_visits = am_max(see_few ? 2 * SPLIT_VISITS : SPLIT_VISITS, visits / ENOUGH_SPLITS);
    else if (of_one_tile)
        s.split_visits = 2 * SPLIT_VISITS; /* causal: the first tiles have most of the visits */
    return s;
}

ptrdiff_t am_choose_task_tiles(const am_backward_work *all, ptrdiff_t threads, bool in_order)
{
    const ptrdiff_t enough = in_order ? ENOUGH_TASKS : am_max(ENOUGH_TASKS, TASKS_EACH * threads),
                    near = NEAR_BYTES / all->tile_bytes;
    return all->most > near ? limit_tiles(all, WIDE_TILES, near, enough)
                            : limit_tiles(all, MOST_TILES, MOST_TILES, enough);
}

bool am_splits_as_tasks(ptrdiff_t tasks, ptrdiff_t threads, bool in_order)
{
    return tasks < FEW_EACH * threads && !in_order;
}
