/* schedule.h – how attention forward is divided: a strategy for each section, and its tasks.
 *
 * The strategy of a section, its blocks, its splits and whatever else alters a sum follow from the shape of
 * the section and from arguments of the whole call. How items are dealt to tasks alters no sum, and so may
 * follow from all sections and from the number of threads. A schedule is constant once it is made. */
#ifndef AM_CORE_ATTENTION_PLAN_SCHEDULE_H
#define AM_CORE_ATTENTION_PLAN_SCHEDULE_H

#include "core/attention/base.h"
#include "core/attention/plan/strategy.h"

enum {
    AM_MOST_ITEMS = 16,      /* of a task */
    AM_MOST_LOCAL_TILES = 8, /* packed tiles that a task keeps for itself */
};

/* A section and its tasks. Its items are blocks of rows: for each key head those of the query heads that
 * share it, and of these the blocks of queries. */
typedef struct {
    am_section section;
    am_shape shape;
    ptrdiff_t items;                /* of each split */
    ptrdiff_t task_items;           /* of a task */
    ptrdiff_t lot_items, lot_tasks; /* items are dealt in lots: the items of one, and its tasks */
    ptrdiff_t first_task;           /* the tasks before the section */
    ptrdiff_t first_shared;         /* the shared tiles before the section */
    ptrdiff_t first_partial;        /* the bytes of partial sums before the section */
} am_scheduled;

typedef struct {
    ptrdiff_t count; /* sections: first those that share packed tiles, of each kind the longest first */
    am_scheduled *sections;
    ptrdiff_t tasks;
    ptrdiff_t *order;      /* in which tasks are dealt; NULL: as they are numbered */
    bool splits_are_tasks; /* each split is an item of its own, else an item takes all splits of its block */
    ptrdiff_t lanes, out_dim, k_bytes, v_bytes; /* of rows of accumulators, and of packed tiles */
    ptrdiff_t scale_bytes;    /* of these: the scales of their rows, by which steps multiply; or 0 */
    double factor;            /* turns products into logits, in units of ln 2 or 1 */
    ptrdiff_t item_rows;      /* the most rows of items in lockstep */
    ptrdiff_t item_bytes;     /* the most bytes of their accumulators */
    ptrdiff_t packed_queries; /* the most items in lockstep whose queries are packed */
    ptrdiff_t step_items;     /* the most items in one step: more than 1 if unpacked */
    ptrdiff_t step_tiles;     /* of a step where sections have many blocks; most kernels take 1 */
    ptrdiff_t local_tiles, shared_tiles, partial_bytes;
} am_schedule;

am_status am_schedule_make(am_schedule *schedule, const am_attn_base *base, const am_sections *sections,
                           int threads);
void am_schedule_free(am_schedule *schedule);

/* Whether a section has so few rows that they read keys where they lie. */
bool am_reads_unpacked(const am_attn_base *base, const am_sections *sections, const am_section *section);

/* About how long attention forward takes one thread, in microseconds, where keys and values are in its cache.
 */
double am_time_alone(const am_attn *attn, const am_sections *sections);

/* The task that is dealt as the index-th one. */
static inline ptrdiff_t am_task_at(const am_schedule *schedule, ptrdiff_t index)
{
    return schedule->order ? schedule->order[index] : index;
}

/* The section of a task. */
const am_scheduled *am_scheduled_of(const am_schedule *schedule, ptrdiff_t task);

/* The items of a task: its first item, their number, and its split. */
typedef struct {
    ptrdiff_t first, count, split;
} am_task_items;
am_task_items am_items_of(const am_scheduled *section, ptrdiff_t task);

/* The block of an item. */
am_attn_place am_item_place(const am_attn_base *base, const am_sections *sections,
                            const am_scheduled *section, ptrdiff_t item);

/* The tiles that an item takes: those that its block sees. If the section has one block, items of several
 * heads take it in lockstep, and then these are the tiles that any head sees. */
am_range am_item_tiles(const am_attn_base *base, const am_sections *sections, const am_scheduled *section,
                       const am_attn_place *at);

/* The tiles of an item that a split takes, and the splits that have any, at least 1. Splits are counted from
 * the block's first tile. */
static inline am_range am_split_tiles(const am_scheduled *section, am_range tiles, ptrdiff_t split)
{
    const ptrdiff_t begin = tiles.begin + split * section->shape.split_tiles;
    return (am_range){begin, am_min(tiles.end, begin + section->shape.split_tiles)};
}
static inline ptrdiff_t am_splits_of(const am_scheduled *section, am_range tiles)
{
    return section->shape.splits == 1 ? 1
                                      : am_max(1, am_ceil_div(am_length(tiles), section->shape.split_tiles));
}

/* Tasks that run in one parallel loop, and the shared tiles that they pack. */
typedef struct {
    ptrdiff_t first_task, tasks;
    ptrdiff_t row_tasks; /* tasks that one thread begins with if it can: the tasks of a key head */
    ptrdiff_t first_shared, shared;
} am_wave;

/* The wave from a task on. */
am_wave am_next_wave(const am_schedule *schedule, const am_attn_base *base, ptrdiff_t first_task);

/* The memory of a call by so many threads, in bytes, beside its results. */
ptrdiff_t am_attn_scratch(const am_attn_base *base, const am_schedule *schedule, int threads);

/* Items of a task that take each tile one after the other: all, or one. */
static inline ptrdiff_t am_lockstep(const am_scheduled *section)
{
    return section->shape.strategy >= AM_LOCAL_PACKING ? 1 : section->task_items;
}

/* True if a step takes several tiles of this section. These steps have one item. */
static inline bool am_takes_steps(const am_schedule *schedule, const am_scheduled *section)
{
    return schedule->step_tiles > 1 && section->shape.strategy >= AM_LOCAL_PACKING;
}

/* Whether the splits of a section are items of their own. */
static inline bool am_splits_are_tasks(const am_schedule *schedule, const am_scheduled *section)
{
    return schedule->splits_are_tasks && section->shape.splits > 1;
}

/* The bytes of the accumulators of a block: out, running_max, sum, row_max, exact_sum. */
static inline ptrdiff_t am_accumulator_bytes(const am_schedule *schedule, const am_attn_base *base,
                                             ptrdiff_t rows)
{
    return am_ceil_div(rows * (schedule->out_dim + 4) * base->size, AM_LINE) * AM_LINE;
}

#endif
