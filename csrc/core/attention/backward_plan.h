/* backward_plan.h – how attention backward is divided, and what its tasks share: row statistics of the blocks
 * of queries, and tasks of keys. */
#ifndef AM_CORE_ATTENTION_BACKWARD_PLAN_H
#define AM_CORE_ATTENTION_BACKWARD_PLAN_H

#include "core/attention/plan/backward_strategy.h"
#include "core/attention/terms/bias_gradient.h"
#include "core/attention/terms/logit_terms.h"
#include "core/attention/terms/lines.h"
#include "core/attention/tiles/tiles.h"

/* One block of query rows of one head. */
typedef struct {
    ptrdiff_t first, last;      /* the sums of tiles of its section that it sees; none if first > last */
    atomic_ptrdiff_t semaphore; /* the sum that may be added to d_q now */
} am_rows_state;

/* Tiles of one batch row that a task takes, and the sections that see them. */
typedef struct {
    am_range tiles, sections;
    am_range tokens;  /* the keys whose gradients it writes, also those that no query sees */
    ptrdiff_t before; /* how many tasks add to d_q of its first section before it does */
    /* If splits are tasks: the visits of this one, which split of its tiles it is, and how many these have;
     * splits is 0 if the task takes all visits. */
    am_range visits;
    ptrdiff_t split, splits;
    ptrdiff_t slot; /* of its split among the splits of all tiles; splits of one tile are neighbours */
} am_key_task;

/* The memory of a block or a tile in a workspace: one for what has the channels of keys, one for values. */
typedef struct {
    ptrdiff_t stride;          /* of rows, in elements; all else in bytes */
    ptrdiff_t rows;            /* of queries and d_q, or of d_out */
    ptrdiff_t sums;            /* of d_k or d_v */
    ptrdiff_t columns, panels; /* packed; values have no panels */
} am_backward_lengths;

typedef struct {
    am_attn_base base;
    const am_attn_gradients *problem;
    const am_attn_tangents *along; /* gradients have tangents along these; NULL: none are wanted */
    am_backward_lengths k, v;
    am_sections sections;
    am_backward_sums *sums; /* of each section */
    am_key_task *tasks;     /* [batch][row_tasks], of a row as they begin */
    ptrdiff_t row_tasks;    /* the most tasks of a key head and batch row */
    ptrdiff_t task_tiles;   /* the most tiles of a task */
    struct {
        bool divided, are_tasks; /* some section has splits; each of them is a task */
        ptrdiff_t slots, bytes;  /* if they are tasks: their number for a key head, and the sums of one */
        uint32_t *summed;        /* a bit for each tile of a split that has a sum: [kv_heads][slots] */
        char *sums;              /* their d_k and d_v */
    } splits;
    bool lone_blocks;      /* each section is one block and one tile: the task of the tile begins its rows,
                            * else a pass of their own does */
    int threads;           /* the threads of the call */
    bool in_order;         /* tasks add to the gradient of a term, too: they are in the order of their keys,
                            * and the same for any number of threads */
    am_array d_q;          /* of the arithmetic type: the result, or what is converted to it */
    am_rows_state *states; /* [block][heads] */
    struct {
        char *data;      /* AM_ROW_STATS times [batch][heads][queries] */
        ptrdiff_t bytes; /* the length of each */
    } stats;
    struct {
        am_sink_sum *of_heads; /* one for each head; NULL without sinks */
        ptrdiff_t parts;       /* of a head, into which the gradient of its sinks is divided */
        double *gradients;     /* [heads][parts][sink_count] */
    } sinks;
    am_bias_gradient bias;
    am_line_gradients lines;
    am_workspaces workspaces;
} am_backward_plan;

/* How the sums of d_k or d_v of some keys lie. */
typedef struct {
    ptrdiff_t rows, columns, stride;
} am_sum_shape;
static inline am_sum_shape am_sum_shape_of(const am_backward_plan *p, ptrdiff_t keys, ptrdiff_t dim,
                                           ptrdiff_t stride)
{
    return p->base.arithmetic->by_channel
               ? (am_sum_shape){.rows = dim, .columns = keys, .stride = AM_CHANNEL_STRIDE}
               : (am_sum_shape){.rows = keys, .columns = dim, .stride = stride};
}

/* The state of a local tile. */
typedef struct {
    bool packed, finite; /* finite: k is */
    bool tangent_finite; /* the tangent of k is */
    bool open, summed;   /* this split adds to it; some split has been added */
} am_local_tile;

/* d_k and d_v of the tiles of a task. */
typedef struct {
    char *d_k, *d_v;
} am_key_sums;

typedef struct {
    char *q, *d_out, *q_rows, *d_out_rows, *d_q, *p, *ds, *d_bias, *d_bias_scratch, *row;
    char *k_columns, *v_columns, *k; /* task_tiles of each */
    struct {                         /* of tangents: the same, where they are wanted */
        char *q, *by_q, *by_k, *by_v, *k_columns, *v_columns, *k;
    } along;
    am_key_sums split, total; /* split: the total itself if no section has splits */
    am_logit_scratch terms;
    am_line_sums *lines;
    am_local_tile *tiles;
} am_backward_workspace;

typedef enum {
    AM_ROW_BASE,
    AM_ROW_REST,
    AM_ROW_ADD,
    AM_ROW_SHARE,
    AM_ROW_LSE,   /* its tangent */
    AM_ROW_MOVED, /* d_out times the tangent of out */
    AM_ROW_STATS,
} am_row_stat;

/* The index-th block of one head. */
static inline am_attn_place am_backward_block(const am_backward_plan *p, ptrdiff_t index)
{
    const ptrdiff_t heads = p->base.attn->heads, block = index / heads;
    const am_section *section = am_section_of(&p->sections, block);
    return am_place_of(&p->base, &p->sections, section, block, index % heads, 1);
}

static inline am_rows_state *am_rows_state_of(const am_backward_plan *p, const am_attn_place *at)
{
    return &p->states[at->block * p->base.attn->heads + at->head];
}

/* The sum of tiles that a tile of a section is in. */
static inline ptrdiff_t am_sum_of_tile(const am_backward_plan *p, const am_section *section, ptrdiff_t tile)
{
    return (tile - section->tiles.begin) / p->sums[section - p->sections.list].tiles;
}

/* The visits to all blocks of a section. */
static inline ptrdiff_t am_visits_of(const am_backward_plan *p, const am_section *section)
{
    return am_length(section->blocks) * p->base.heads_per_kv;
}

/* True if a split of the sums of its tiles ends with this visit. Visits go from the last to the first. */
static inline bool am_ends_split(const am_backward_plan *p, const am_section *section, ptrdiff_t visit)
{
    return visit % p->sums[section - p->sections.list].split_visits == 0;
}

/* One statistic of the rows of a block. */
static inline char *am_row_stats_of(const am_backward_plan *p, const am_attn_place *at, am_row_stat which)
{
    const ptrdiff_t row = (at->b * p->base.attn->heads + at->head) * p->base.attn->queries + at->q;
    return p->stats.data + which * p->stats.bytes + row * p->base.size;
}

/* Divides the work: sections, sums, tasks and the lengths of what a task keeps. */
am_status am_backward_plan_make(am_backward_plan *p, bool by_mask);
void am_backward_plan_free(am_backward_plan *p);

/* Lays out an am_backward_workspace of a plan. */
ptrdiff_t am_backward_lay_out(const void *plan, char *memory, void *parts);

/* Begins the rows of a block: their statistics, and which sums of d_q they have. */
am_status am_begin_rows(const am_backward_plan *p, const am_attn_place *at, const am_backward_workspace *s,
                        am_team *team);

/* Loads the queries and d_out of a block. */
am_backward_rows am_begin_backward_rows(const am_backward_plan *p, const am_attn_place *at,
                                        const am_backward_workspace *s);

/* Loads the tangents of the queries of a block. */
am_backward_tangents am_begin_backward_tangents(const am_backward_plan *p, const am_attn_place *at,
                                                const am_backward_workspace *s);

/* The tasks, in the order in which they run. The first computes the statistics of a block, and the second d_k
 * and d_v of a few tiles. The third adds the splits of these sums, if each split was a task. The last
 * converts d_q of a block, if it was added up in another type. */
am_status am_row_stats_task(void *arg, ptrdiff_t index, am_team *team);
am_status am_key_task_run(void *arg, ptrdiff_t index, am_team *team);
am_status am_add_splits(void *arg, ptrdiff_t index, am_team *team);
am_status am_finish_d_q(void *arg, ptrdiff_t index, am_team *team);

/* The gradient of the sinks, which follows from the statistics of all rows. */
am_status am_sum_sink_gradients(const am_context *context, am_backward_plan *p);

#endif
