/* backward.c – attention backward, from out and lse, with logits computed again.
 *
 * A task takes a few tiles of keys of one key head, more where each block sees few, and loops over the blocks
 * of 64 query rows that see them; it accumulates d_k and d_v for itself. Each block of d_q is shared by the
 * tasks of all keys that its rows attend to: sums of a few tiles each, which are added in the order of the
 * keys. Tasks begin in that order too, so a task waits only for one that is running. Tasks that share a bias
 * add to its gradient in order, too.
 *
 * How many tiles such a sum has follows from the group alone, so that d_q is the same whatever it is computed
 * with; the number of tiles of a task alters no sum. Nothing is as large as queries times keys, unless the
 * bias is. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/attention/terms/bias_gradient.h"
#include "core/attention/tiles/tiles.h"
#include "core/attention/terms/logit_terms.h"
#include "core/attention/terms/relative.h"
#include "core/arrays/convert.h"
#include "core/runtime/float_mode.h"

enum {
    TILE = AM_FLASH_TILE,
    ENOUGH_TASKS = 64,      /* that keep any number of threads busy */
    ENOUGH_SUMS = 32,       /* the same for one group, which adds as many parts to d_q */
    SUM_TILES = 4,          /* the most tiles whose parts of d_q are summed up before they are added */
    WIDE_TILES = 4,         /* the most tiles of a task whose blocks see many tiles */
    MOST_TILES = 16,        /* the same if they see few: these stay in the cache from block to block */
    NEAR_BYTES = 768 << 10, /* the most bytes of a task's tiles that one block sees: they stay in the cache */
    FAR = 1024,             /* |lse| from which its rounding costs P more than ten binary digits */
};

/* One block of query rows of one head. */
typedef struct {
    ptrdiff_t first, last;    /* the sums of tiles of its group that it sees; none if first > last */
    atomic_ptrdiff_t serving; /* the sum that may be added to d_q now */
} rows_state;

/* Tiles of one batch row that a task takes, and the groups that see them. */
typedef struct {
    am_range tiles, groups;
    am_range tokens; /* the keys whose gradients it writes, also those that no query sees */
} key_task;

typedef struct {
    am_attn_base base;
    const am_attn_gradients *problem;
    ptrdiff_t step, value_step; /* from row to row in the workspace, in elements */
    am_attn_groups groups;
    ptrdiff_t *sum_tiles;       /* of each group */
    key_task *tasks;            /* [batch][row_tasks] */
    ptrdiff_t row_tasks;        /* the most tasks of a key head and batch row */
    ptrdiff_t task_tiles;       /* the most tiles of a task */
    int threads;                /* the threads of the call */
    ptrdiff_t k_bytes, v_bytes; /* the lengths of a tile's rows in the workspace */
    ptrdiff_t k_columns_bytes, v_columns_bytes, k_panels_bytes; /* the lengths of a packed tile */
    am_tokens d_q;         /* of the arithmetic type: the result, or what is converted to it */
    rows_state *states;    /* [block][heads] */
    char *row_stats;       /* base, rest, add and share, each [batch][heads][queries] */
    ptrdiff_t stats_bytes; /* the length of each */
    am_sink_sum *sinks;    /* one for each head; NULL without sinks */
    ptrdiff_t sink_parts;  /* of a head, into which the gradient of its sinks is divided */
    double *d_sinks;       /* [heads][sink_parts][sink_count] */
    am_bias_gradient bias;
    am_table_gradient table;
    am_workspaces workspaces;
} plan;

/* The state of a local tile. */
typedef struct {
    bool packed, finite; /* finite: k is */
} local_tile;

typedef struct {
    char *q, *d_out, *q_rows, *d_out_rows, *d_q, *p, *ds, *d_bias, *d_bias_scratch, *row;
    char *k_columns, *v_columns, *k, *d_k, *d_v; /* task_tiles of each */
    am_logit_scratch terms;
    am_table_sums *table;
    local_tile *tiles;
} workspace;

static ptrdiff_t lay_out(const plan *p, char *memory, workspace *s)
{
    const am_attn *f = p->base.attn;
    const ptrdiff_t n = p->task_tiles, tile_bytes = AM_FLASH_ROWS * TILE * p->base.size,
                    word = sizeof(uint64_t);
    ptrdiff_t used = 0;
    const bool keeps_ds = p->problem->d_bias || p->problem->d_table;
    s->q = am_take(memory, &used, p->k_bytes);
    s->d_out = am_take(memory, &used, p->v_bytes);
    s->q_rows = p->base.bf16x2 ? am_take(memory, &used, p->k_bytes) : s->q;
    s->d_out_rows = p->base.bf16x2 ? am_take(memory, &used, p->v_bytes) : s->d_out;
    s->d_q = am_take(memory, &used, p->k_bytes);
    s->p = am_take(memory, &used, tile_bytes);
    s->ds = am_take(memory, &used, tile_bytes);
    s->terms.bias = am_take(memory, &used, am_adds_to_products(f) ? tile_bytes : 0);
    s->d_bias = am_take(memory, &used, keeps_ds ? tile_bytes : 0);
    s->d_bias_scratch = am_take(memory, &used, am_bias_scratch_bytes(&p->bias));
    s->table = am_table_sums_take(&p->table, memory, &used);
    s->row = s->terms.row =
        am_take(memory, &used, 2 * am_row_scratch(TILE, am_max(am_max(f->depth, f->value_depth), TILE)));
    s->k_columns = am_take(memory, &used, n * p->k_columns_bytes);
    s->v_columns = am_take(memory, &used, n * p->v_columns_bytes);
    s->k = am_take(memory, &used, n * p->k_panels_bytes);
    s->d_k = am_take(memory, &used, n * p->k_bytes);
    s->d_v = am_take(memory, &used, n * p->v_bytes);
    s->terms.live = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * word);
    s->terms.kept = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * word);
    s->terms.row_keys = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * word);
    s->tiles = (local_tile *)am_take(memory, &used, n * (ptrdiff_t)sizeof(local_tile));
    return used;
}

/* --- Rows of queries --- */

static am_attn_place place_of(const plan *p, const am_attn_group *group, ptrdiff_t block, ptrdiff_t head)
{
    return am_place_of(&p->base, &p->groups, group, block, head, 1);
}

/* The index-th block of one head. */
static am_attn_place block_at(const plan *p, ptrdiff_t index)
{
    const ptrdiff_t heads = p->base.attn->heads, block = index / heads;
    return place_of(p, am_group_of(&p->groups, block), block, index % heads);
}

static ptrdiff_t row_index(const plan *p, const am_attn_place *at)
{
    return (at->b * p->base.attn->heads + at->head) * p->base.attn->queries + at->q;
}

static rows_state *state_of(const plan *p, const am_attn_place *at)
{
    return &p->states[at->block * p->base.attn->heads + at->head];
}

/* The sum of tiles that a tile of a group is in. */
static ptrdiff_t sum_of(const plan *p, const am_attn_group *group, ptrdiff_t tile)
{
    return (tile - group->tiles.begin) / p->sum_tiles[group - p->groups.list];
}

typedef enum { BASE, REST, ADD, SHARE, ROW_STATS } row_stat;

/* One statistic of the rows of a block. */
static char *row_stats_of(const plan *p, const am_attn_place *at, row_stat which)
{
    return p->row_stats + which * p->stats_bytes + row_index(p, at) * p->base.size;
}

static const char *read_tokens(const plan *p, const am_tokens *t, const am_attn_place *at, ptrdiff_t head,
                               ptrdiff_t token, ptrdiff_t rows, ptrdiff_t depth, char *scratch,
                               ptrdiff_t *step)
{
    return am_read_rows(&p->base, scratch, am_token(t, at->b, head, token), t->token, t->element, t->type,
                        rows, depth, step);
}

/* Loads rows of a block, and returns whether they are finite. `bf16x2_to`: for the same rows, packed as
 * bf16x2. */
static bool load_tokens(const plan *p, const am_tokens *t, const am_attn_place *at, ptrdiff_t depth,
                        char *scratch, char *to, ptrdiff_t to_step, char *bf16x2_to)
{
    ptrdiff_t step;
    if (p->base.bf16x2) {
        am_copy_pairs(to, am_token(t, at->b, at->head, at->q), (ptrdiff_t)am_size_of(t->type), t->token,
                      t->element, at->rows, depth);
        const am_unpacked_rows rows = {.data = to, .step = 2 * am_lanes(&p->base, depth)};
        return am_kv_own(&p->base)->pack_values(bf16x2_to, &rows, at->rows, depth, NULL);
    }
    const char *rows = read_tokens(p, t, at, at->head, at->q, at->rows, depth, scratch, &step);
    return p->base.kernels->load_rows(to, to_step, rows, step, at->rows, depth);
}

static am_backward_rows begin_rows(const plan *p, const am_attn_place *at, const workspace *s)
{
    const am_attn *f = p->base.attn;
    am_backward_rows block = {
        .rows = at->rows,
        .depth = f->depth,
        .value_depth = f->value_depth,
        .step = p->step,
        .value_step = p->value_step,
        .q = s->q,
        .d_out = s->d_out,
        .q_rows = s->q_rows,
        .d_out_rows = s->d_out_rows,
        .base = row_stats_of(p, at, BASE),
        .rest = row_stats_of(p, at, REST),
        .add = row_stats_of(p, at, ADD),
        .share = f->normalize ? NULL : row_stats_of(p, at, SHARE),
        .d_q = s->d_q,
        .p = s->p,
        .ds = s->ds,
        .scale = f->scale,
        .factor = f->scale * AM_LOG2_E / p->base.unit,
        .cap = f->cap,
        .unit = p->base.unit,
        .kept_factor = 1 / (1 - f->dropout),
    };
    block.q_finite = load_tokens(p, &f->q, at, f->depth, s->row, s->q, p->step, s->q_rows);
    block.d_out_finite = load_tokens(p, &p->problem->d_out, at, f->value_depth, s->row, s->d_out,
                                     p->value_step, s->d_out_rows);
    return block;
}

/* --- Tiles of keys --- */

/* Fills in the terms of the logits of a tile. False if no pair is live. */
static bool find_terms(const plan *p, const am_attn_place *at, am_range keys, const workspace *s,
                       am_backward_tile *tile)
{
    am_logit_terms terms;
    if (!am_find_logit_terms(&p->base, at, keys, &s->terms, &terms)) return false;
    tile->columns = am_length(keys);
    tile->live = terms.live, tile->kept = terms.kept;
    tile->bias = terms.bias, tile->bias_step = terms.bias_step;
    return true;
}

/* --- Before: row statistics, and zeros --- */

static double given_row_stat(const plan *p, const am_row_stats *row_stats, const am_attn_place *at,
                             ptrdiff_t row)
{
    return am_number(&p->base,
                     row_stats->data + at->b * row_stats->batch + at->head * row_stats->head +
                         (at->q + row) * row_stats->token,
                     0);
}

/* Finds of each row, sinks included, the greatest logit as BASE, the sum of powers relative to it as REST,
 * and the number of logits that are as great as SHARE. */
static am_status find_row_maxima(const plan *p, const am_attn_place *at, const workspace *s, am_range tiles,
                                 am_team *team)
{
    const am_attn *f = p->base.attn;
    am_backward_rows block = begin_rows(p, at, s);
    block.share = row_stats_of(p, at, SHARE);
    am_begin_logits(&p->base, at, &s->terms);
    const am_sink_sum sinks = p->sinks ? p->sinks[at->head] : (am_sink_sum){.highest = -INFINITY};
    for (ptrdiff_t r = 0; r < at->rows; r++) {
        am_set_number(&p->base, block.base, r, sinks.highest);
        am_set_number(&p->base, block.rest, r, sinks.sum);
        am_set_number(&p->base, block.share, r, sinks.count);
    }
    for (ptrdiff_t i = tiles.begin; i < tiles.end; i++) {
        const am_range keys = am_range_at(&p->groups.tiles, i);
        am_backward_tile tile = {.k_columns = s->k_columns};
        if (!find_terms(p, at, keys, s, &tile)) continue;
        am_pack_keys(&p->base, am_kv_rows_of(&f->k, at, keys, f->depth), s->row, s->k_columns, 1);
        p->base.kernels->find_row_max(&block, &tile);
        am_status status = am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

/* Whether P is computed from the row's maximum, not from its lse, whose rounding is the relative error of P.
 */
static bool uses_row_max(const plan *p, const am_attn_place *at, ptrdiff_t row)
{
    double size = fabs(given_row_stat(p, &p->problem->lse, at, row));
    return !p->base.attn->normalize || (size > FAR && size < INFINITY);
}

/* The statistics from which kernels compute P and dS of the rows, beside the logits. */
static void find_row_stats(const plan *p, const am_attn_place *at, const workspace *s)
{
    const am_attn *f = p->base.attn;
    ptrdiff_t step, d_step;
    char *other = s->row + am_row_scratch(TILE, am_max(f->depth, f->value_depth)),
         *base = row_stats_of(p, at, BASE), *rest = row_stats_of(p, at, REST),
         *add = row_stats_of(p, at, ADD), *share = row_stats_of(p, at, SHARE);
    const char *out = read_tokens(p, &f->out, at, at->head, at->q, at->rows, f->value_depth, s->row, &step);
    const char *d_out =
        read_tokens(p, &p->problem->d_out, at, at->head, at->q, at->rows, f->value_depth, other, &d_step);
    p->base.kernels->dot_rows(add, d_out, d_step, out, step, at->rows, f->value_depth);
    for (ptrdiff_t r = 0; r < at->rows; r++) {
        double reference = given_row_stat(p, &p->problem->lse, at, r) * AM_LOG2_E / p->base.unit, power = 0;
        double d_lse = p->problem->d_lse.data ? given_row_stat(p, &p->problem->d_lse, at, r) : 0;
        double moved = am_number(&p->base, add, r); /* the effect of a common shift of the logits */
        if (uses_row_max(p, at, r)) {
            /* The sum over these keys, unless lse is of other keys too. */
            double row_max = am_number(&p->base, base, r), own = log2(am_number(&p->base, rest, r));
            double lse = (reference - row_max) * p->base.unit,
                   rounding =
                       4 * (p->base.size == 8 ? DBL_EPSILON : FLT_EPSILON) * fabs(reference * p->base.unit);
            power = fabs(lse - own) <= rounding || isnan(own) ? -own : -lse;
            reference = row_max;
        }
        if (!f->normalize) {
            am_set_number(&p->base, share, r, moved / fmax(am_number(&p->base, share, r), 1));
            moved = 0;
            if (reference > -INFINITY) d_lse *= exp2(power);
            power = 0;
        }
        am_set_number(&p->base, base, r, reference == -INFINITY ? 0 : reference);
        am_set_number(&p->base, rest, r, reference == -INFINITY ? 0 : power);
        am_set_number(&p->base, add, r, d_lse - moved);
    }
}

static am_status rows_task(void *arg, ptrdiff_t index, am_team *team)
{
    const plan *p = arg;
    const am_attn *f = p->base.attn;
    const am_attn_place place = block_at(p, index), *at = &place;
    const am_range tiles = am_tiles_seen(&p->base, &p->groups, at);
    rows_state *state = state_of(p, at);
    state->first = sum_of(p, at->group, tiles.begin);
    state->last = tiles.begin < tiles.end ? sum_of(p, at->group, tiles.end - 1) : state->first - 1;
    atomic_init(&state->serving, state->first);

    char *memory = am_workspace_acquire(&p->workspaces);
    workspace s;
    lay_out(p, memory, &s);
    bool uses_any_row_max = false;
    for (ptrdiff_t r = 0; r < at->rows; r++) uses_any_row_max |= uses_row_max(p, at, r);
    am_status status = uses_any_row_max ? find_row_maxima(p, at, &s, tiles, team) : AM_OK;
    if (status == AM_OK) {
        find_row_stats(p, at, &s);
        const ptrdiff_t unseen = state->first > state->last ? at->rows : 0; /* rows that no task writes */
        for (ptrdiff_t r = 0; r < unseen; r++)
            memset((char *)am_token(&p->d_q, at->b, at->head, at->q + r), 0,
                   (size_t)(f->depth * p->base.size));
    }
    am_workspace_release(&p->workspaces, memory);
    return status == AM_OK ? am_checkpoint(team) : status;
}

/* The gradient of the sinks of one head, of a part of its blocks. A sink adds to the sum of powers as a key
 * without a value would; not normalized, it may also be the row's maximum, which moves all powers. */
static am_status sinks_task(void *arg, ptrdiff_t index, am_team *team)
{
    const plan *p = arg;
    const am_attn *f = p->base.attn;
    const ptrdiff_t head = index / p->sink_parts, part = index % p->sink_parts,
                    blocks = p->groups.blocks.count;
    double *d_sinks = p->d_sinks + index * f->sink_count;
    am_status status = AM_OK;
    memset(d_sinks, 0, (size_t)f->sink_count * sizeof *d_sinks);
    for (ptrdiff_t block = part * blocks / p->sink_parts;
         status == AM_OK && block < (part + 1) * blocks / p->sink_parts; block++) {
        const am_attn_place at = block_at(p, block * f->heads + head);
        for (ptrdiff_t r = 0; status == AM_OK && r < at.rows; r++) {
            double base = am_number(&p->base, row_stats_of(p, &at, BASE), r),
                   rest = am_number(&p->base, row_stats_of(p, &at, REST), r),
                   add = am_number(&p->base, row_stats_of(p, &at, ADD), r);
            for (ptrdiff_t i = 0; i < f->sink_count; i++) {
                double logit = am_sink_logit(&p->base, head, i);
                if (logit == -INFINITY) continue;
                d_sinks[i] += exp2((logit - base) * p->base.unit + rest) * add;
                if (!f->normalize && logit == base)
                    d_sinks[i] -= am_number(&p->base, row_stats_of(p, &at, SHARE), r);
            }
            status = am_checkpoint(team);
        }
    }
    return status;
}

/* The gradient of the sinks. How many parts a head has follows from the shape alone, and parts are added in
 * their order, so that the sums are the same for any number of threads. */
static am_status sum_sinks(const am_run *run, plan *p)
{
    enum { MOST_PARTS = 64, PART = 1 << 16 }; /* rows times sinks that are worth a part: a millisecond */
    const am_attn *f = p->base.attn;
    const ptrdiff_t work = am_product(p->groups.blocks.count, TILE, f->sink_count),
                    sums = f->heads * f->sink_count;
    p->sink_parts = am_max(1, am_min(am_min(work / PART, MOST_PARTS), p->groups.blocks.count));
    p->d_sinks = malloc((size_t)am_max(am_product(sums, p->sink_parts, sizeof *p->d_sinks), 1));
    am_status status =
        p->d_sinks ? am_parallel(run, f->heads * p->sink_parts, 1, sinks_task, p) : AM_NO_MEMORY;
    for (ptrdiff_t i = 0; status == AM_OK && i < sums; i++) {
        const double *from =
            p->d_sinks + i / f->sink_count * p->sink_parts * f->sink_count + i % f->sink_count;
        p->problem->d_sinks[i] = 0;
        for (ptrdiff_t part = 0; part < p->sink_parts; part++)
            p->problem->d_sinks[i] += from[part * f->sink_count];
    }
    free(p->d_sinks);
    return status;
}

/* --- The tasks --- */

static void write_tokens(const plan *p, const am_tokens *t, const am_attn_place *at, ptrdiff_t head,
                         ptrdiff_t token, ptrdiff_t rows, const char *from, ptrdiff_t step, ptrdiff_t depth)
{
    for (ptrdiff_t r = 0; r < rows; r++, from += step * p->base.size) {
        char *to = (char *)am_token(t, at->b, head, token + r);
        if (t->type == p->base.type)
            memcpy(to, from, (size_t)(depth * p->base.size));
        else
            am_converter(p->base.type, t->type)(p->base.all_kernels, to, from, depth);
    }
}

/* Adds a sum of tiles to d_q, if there is one, once those before have been added. There always is a first
 * one, which is written. */
static am_status add_ordered(const plan *p, const am_attn_place *at, rows_state *state, ptrdiff_t sum,
                             const char *d_q, am_team *team)
{
    am_status status = am_await(team, &state->serving, sum);
    if (status != AM_OK) return status;
    if (sum == state->first) {
        write_tokens(p, &p->d_q, at, at->head, at->q, at->rows, d_q, p->step, p->base.attn->depth);
    } else if (d_q) {
        char *to = (char *)am_token(&p->d_q, at->b, at->head, at->q);
        p->base.kernels->add_rows(to, p->d_q.token / p->base.size, d_q, p->step, at->rows,
                                  p->base.attn->depth);
    }
    atomic_store_explicit(&state->serving, sum + 1, memory_order_release);
    return AM_OK;
}

static void clear_tile(const plan *p, ptrdiff_t i, ptrdiff_t rows, const workspace *s)
{
    memset(s->d_k + i * p->k_bytes, 0, (size_t)(rows * p->step * p->base.size));
    memset(s->d_v + i * p->v_bytes, 0, (size_t)(rows * p->value_step * p->base.size));
}

/* Packs the i-th tile of a task when a block first needs it: under narrow masks it is then still in the
 * cache. */
static void pack_tile(const plan *p, const am_attn_place *at, am_range keys, ptrdiff_t i, const workspace *s)
{
    if (s->tiles[i].packed) return;
    const am_attn *f = p->base.attn;
    const am_kv_rows k = am_kv_rows_of(&f->k, at, keys, f->depth),
                     v = am_kv_rows_of(&f->v, at, keys, f->value_depth);
    am_pack_keys(&p->base, k, s->row, s->k_columns + i * p->k_columns_bytes, 1);
    const bool finite = am_pack_values(&p->base, k, s->row, s->k + i * p->k_panels_bytes);
    am_pack_keys(&p->base, v, s->row, s->v_columns + i * p->v_columns_bytes, 1);
    clear_tile(p, i, am_length(keys), s);
    s->tiles[i] = (local_tile){.packed = true, .finite = finite};
}

/* The tiles of a task that a group sees. */
static am_range tiles_of(const key_task *task, const am_attn_group *group)
{
    return (am_range){am_max(task->tiles.begin, group->tiles.begin),
                      am_min(task->tiles.end, group->tiles.end)};
}

/* Prefetches the rows of a block. */
static void choose_prefetch(const plan *p, const am_attn_place *at, const key_task *task,
                            am_backward_tile *tile)
{
    const am_attn *f = p->base.attn;
    const am_tokens *d_out = &p->problem->d_out;
    const am_range tiles = tiles_of(task, at->group);
    const rows_state *state = state_of(p, at);
    if (am_length(tiles) <= 0 || sum_of(p, at->group, tiles.begin) > state->last ||
        sum_of(p, at->group, tiles.end - 1) < state->first)
        return;
    const am_range keys = {am_range_at(&p->groups.tiles, tiles.begin).begin,
                           am_range_at(&p->groups.tiles, tiles.end - 1).end};
    tile->prefetch[AM_PREFETCH_Q] = am_prefetch_tokens(&f->q, at->b, at->head, 1, at->q, at->rows, f->depth);
    tile->prefetch[AM_PREFETCH_OUT] =
        am_prefetch_tokens(d_out, at->b, at->head, 1, at->q, at->rows, f->value_depth);
    tile->prefetch[AM_PREFETCH_BIAS] = am_prefetch_bias(&p->base, at, keys);
    tile->prefetch[AM_PREFETCH_D_Q] =
        am_prefetch_tokens(&p->d_q, at->b, at->head, 1, at->q, at->rows, f->depth);
}

/* A block on its way over the tiles of a task. */
typedef struct {
    const key_task *task;
    const am_attn_place *at, *next; /* next: the block after it, or NULL */
    am_backward_rows rows;
    bool loaded;
} block_walk;

/* Takes a block over some tiles, which make one sum of d_q; returns whether any has live pairs. */
static bool sum_tiles(const plan *p, block_walk *walk, am_range tiles, const workspace *s, am_team *team,
                      am_status *status)
{
    const am_attn_place *at = walk->at;
    const ptrdiff_t task = walk->task - p->tasks;
    bool any = false;
    for (ptrdiff_t index = tiles.begin; index < tiles.end; index++) {
        const am_range keys = am_range_at(&p->groups.tiles, index);
        const ptrdiff_t i = index - walk->task->tiles.begin;
        am_backward_tile tile = {
            .k_columns = s->k_columns + i * p->k_columns_bytes,
            .v_columns = s->v_columns + i * p->v_columns_bytes,
            .k = s->k + i * p->k_panels_bytes,
            .d_k = s->d_k + i * p->k_bytes,
            .d_v = s->d_v + i * p->v_bytes,
            .d_bias = p->bias.result || p->table.result ? s->d_bias : NULL,
        };
        if (!find_terms(p, at, keys, s, &tile)) continue;
        pack_tile(p, at, keys, i, s);
        tile.k_finite = s->tiles[i].finite;
        if (!walk->loaded) {
            if (walk->next) choose_prefetch(p, walk->next, walk->task, &tile);
            walk->rows = begin_rows(p, at, s);
            walk->loaded = true;
        }
        if (!any) memset(s->d_q, 0, (size_t)(at->rows * p->step * p->base.size));
        any = true;
        p->base.kernels->backward(&walk->rows, &tile);
        if (p->table.result) am_table_add(&p->table, at, keys, s->d_bias, s->row, s->table);
        if (p->bias.result)
            *status =
                am_bias_add(&p->bias, at, task % p->row_tasks, keys, i, s->d_bias, s->d_bias_scratch, team);
        if (*status == AM_OK) *status = am_checkpoint(team);
        if (*status != AM_OK) break;
    }
    return any;
}

/* Takes a block over the tiles of a task. */
static am_status block_step(const plan *p, block_walk *walk, const workspace *s, am_team *team)
{
    const am_attn_group *group = walk->at->group;
    rows_state *state = state_of(p, walk->at);
    const am_range tiles = tiles_of(walk->task, group);
    am_status status = AM_OK;
    if (tiles.begin < tiles.end) am_begin_logits(&p->base, walk->at, &s->terms);
    for (ptrdiff_t begin = tiles.begin, end; status == AM_OK && begin < tiles.end; begin = end) {
        const ptrdiff_t sum = sum_of(p, group, begin), each = p->sum_tiles[group - p->groups.list];
        end = am_min(group->tiles.begin + (sum + 1) * each, tiles.end);
        if (sum < state->first || sum > state->last) continue;
        bool any = sum_tiles(p, walk, (am_range){begin, end}, s, team, &status);
        if (!any && sum == state->first) {
            memset(s->d_q, 0, (size_t)(walk->at->rows * p->step * p->base.size));
            any = true;
        }
        if (status == AM_OK) status = add_ordered(p, walk->at, state, sum, any ? s->d_q : NULL, team);
    }
    const ptrdiff_t task = (walk->task - p->tasks) % am_max(p->row_tasks, 1);
    return status == AM_OK ? am_bias_end_block(&p->bias, walk->at, task, team) : status;
}

/* The i-th key head that is begun. Threads in the same batch row take heads far from each other, as rows of
 * neighbouring heads share cache lines, for which writers would contend. Heads that share a bias are begun in
 * the order in which they add to its gradient: a task may only wait for one that was begun before it. */
static ptrdiff_t ordered_head(const plan *p, ptrdiff_t i)
{
    const bool in_order = p->bias.sums && p->bias.shape[1] == 1;
    if (in_order || p->base.attn->batch >= p->threads) return i;
    const ptrdiff_t heads = p->base.attn->kv_heads, thread = i % p->threads;
    return heads / p->threads * thread + am_min(heads % p->threads, thread) + i / p->threads;
}

/* Writes zeros as the gradients of keys that no query sees. */
static am_status write_zeros(const plan *p, const am_attn_place *at, am_range keys, am_team *team)
{
    enum { PIECE = 1 << 12 }; /* keys between two checkpoints */
    const am_tokens *const results[] = {&p->problem->d_k, &p->problem->d_v};
    const ptrdiff_t depths[] = {p->base.attn->depth, p->base.attn->value_depth};
    am_status status = AM_OK;
    for (ptrdiff_t k = keys.begin; status == AM_OK && k < keys.end; k++) {
        for (int i = 0; i < 2; i++)
            memset((char *)am_token(results[i], at->b, at->kv_head, k), 0,
                   (size_t)depths[i] * am_size_of(results[i]->type));
        if (k % PIECE == 0) status = am_checkpoint(team);
    }
    return status;
}

/* Writes the gradients of the keys of a task. */
static am_status write_keys(const plan *p, const am_attn_place *at, const key_task *task, const workspace *s,
                            am_team *team)
{
    const am_attn *f = p->base.attn;
    ptrdiff_t behind = task->tokens.begin; /* the last tile */
    am_status status = AM_OK;
    for (ptrdiff_t i = 0; status == AM_OK && i < am_length(task->tiles); i++) {
        const am_range keys = am_range_at(&p->groups.tiles, task->tiles.begin + i);
        status = write_zeros(p, at, (am_range){behind, keys.begin}, team);
        if (!s->tiles[i].packed) clear_tile(p, i, am_length(keys), s);
        write_tokens(p, &p->problem->d_k, at, at->kv_head, keys.begin, am_length(keys),
                     s->d_k + i * p->k_bytes, p->step, f->depth);
        write_tokens(p, &p->problem->d_v, at, at->kv_head, keys.begin, am_length(keys),
                     s->d_v + i * p->v_bytes, p->value_step, f->value_depth);
        behind = keys.end;
    }
    return status == AM_OK ? write_zeros(p, at, (am_range){behind, task->tokens.end}, team) : status;
}

static am_status keys_task(void *arg, ptrdiff_t index, am_team *team)
{
    const plan *p = arg;
    const ptrdiff_t heads = p->base.attn->kv_heads, group_heads = p->base.group;
    const key_task *task = &p->tasks[index / heads];
    const am_attn_place at = {.b = index / heads / p->row_tasks, .kv_head = ordered_head(p, index % heads)};
    char *memory = am_workspace_acquire(&p->workspaces);
    workspace s;
    lay_out(p, memory, &s);
    memset(s.tiles, 0, (size_t)p->task_tiles * sizeof *s.tiles);
    memset(s.d_bias_scratch, 0, (size_t)am_bias_scratch_bytes(&p->bias));
    am_status status = AM_OK;
    for (ptrdiff_t g = task->groups.begin; g < task->groups.end; g++) {
        const am_attn_group *group = &p->groups.list[g];
        const ptrdiff_t first = group->blocks.begin, count = am_length(group->blocks) * group_heads;
        for (ptrdiff_t i = 0; status == AM_OK && i < count; i++) {
            const ptrdiff_t head = at.kv_head * group_heads, then = am_min(i + 1, count - 1);
            const am_attn_place rows = place_of(p, group, first + i / group_heads, head + i % group_heads),
                                next =
                                    place_of(p, group, first + then / group_heads, head + then % group_heads);
            block_walk walk = {.task = task, .at = &rows, .next = i < then ? &next : NULL};
            status = block_step(p, &walk, &s, team);
        }
    }
    if (status == AM_OK)
        status = am_bias_end_task(&p->bias, &at, index / heads % p->row_tasks, &p->groups.tiles, task->tiles,
                                  s.d_bias_scratch, team);
    if (status == AM_OK) status = am_table_end_task(&p->table, &at, index / heads, s.table, team);
    if (status == AM_OK) status = write_keys(p, &at, task, &s, team);
    am_workspace_release(&p->workspaces, memory);
    return status;
}

/* Converts d_q that was accumulated in another type to the result. */
static am_status finish_task(void *arg, ptrdiff_t index, am_team *team)
{
    const plan *p = arg;
    const am_attn_place at = block_at(p, index);
    write_tokens(p, &p->problem->d_q, &at, at.head, at.q, at.rows, am_token(&p->d_q, at.b, at.head, at.q),
                 p->d_q.token / p->base.size, p->base.attn->depth);
    return am_checkpoint(team);
}

/* --- The plan --- */

/* Rounds up to whole panels, and to an odd number of cache lines: rows that are a power of two apart would
 * map to few sets of the cache. */
static ptrdiff_t step_of(const plan *p, ptrdiff_t in_panels)
{
    ptrdiff_t a_line = AM_LINE / p->base.size;
    return in_panels % (2 * a_line) == 0 ? in_panels + a_line : in_panels;
}

/* Half as many tiles until their bytes stay in the cache, and there are enough parts for many threads. */
static ptrdiff_t limit_tiles(const plan *p, ptrdiff_t most, ptrdiff_t seen, ptrdiff_t tiles, ptrdiff_t bytes,
                             ptrdiff_t enough)
{
    while (most > 1 &&
           (am_min(most, seen) * bytes > NEAR_BYTES || p->base.attn->kv_heads * (tiles / most) < enough))
        most /= 2;
    return most;
}

/* Chooses the lengths of rows, of sums and of tasks; returns the most tiles of a task, unless one sum has
 * more. */
static ptrdiff_t choose(plan *p)
{
    const am_attn *f = p->base.attn;
    if (f->sink_count > 0) p->base.unit = AM_LOG2_E; /* the unit of sinks, as a base may be one */
    const ptrdiff_t panel = p->base.kernels->panel, size = p->base.size,
                    depth = am_ceil_div(f->depth, panel) * panel;
    p->step = step_of(p, depth);
    p->value_step = step_of(p, am_ceil_div(f->value_depth, panel) * panel);
    p->k_bytes = TILE * p->step * size;
    p->v_bytes = TILE * p->value_step * size;
    p->k_columns_bytes = TILE * am_lanes(&p->base, f->depth) * size;
    p->v_columns_bytes = TILE * am_lanes(&p->base, f->value_depth) * size;
    p->k_panels_bytes = TILE * depth * size / (p->base.bf16x2 ? 2 : 1);
    const ptrdiff_t bytes =
        p->k_bytes + p->v_bytes + p->k_columns_bytes + p->v_columns_bytes + p->k_panels_bytes;
    ptrdiff_t seen = 0, tiles = 0;
    for (ptrdiff_t i = 0; i < p->groups.count; i++) {
        const am_attn_group *group = &p->groups.list[i];
        const ptrdiff_t own = am_length(group->tiles);
        p->sum_tiles[i] = limit_tiles(p, SUM_TILES, own, own, bytes, ENOUGH_SUMS);
        tiles += own;
        if (own > seen) seen = am_max(seen, am_most_tiles(&p->base, &p->groups, group));
    }
    return limit_tiles(p, seen > NEAR_BYTES / bytes ? WIDE_TILES : MOST_TILES, seen, tiles, bytes,
                       ENOUGH_TASKS);
}

/* Ends a task, and begins the next one with the tile behind it. */
static void end_task(const plan *p, key_task *task, key_task *to, ptrdiff_t group)
{
    const ptrdiff_t end = task->tiles.end;
    task->tokens.end = am_range_at(&p->groups.tiles, end - 1).end;
    if (to) *to = *task;
    *task = (key_task){{end, end}, {group, group}, {task->tokens.end, task->tokens.end}};
}

/* Divides the tiles that the groups of a batch row see into tasks of whole sums; returns the number of tasks,
 * and lists them unless `to` is NULL. */
static ptrdiff_t divide_row(const plan *p, am_range groups, ptrdiff_t most, key_task *to)
{
    ptrdiff_t count = 0;
    key_task task = {.groups = {groups.begin, groups.begin}};
    if (groups.begin < groups.end)
        task.tiles.begin = task.tiles.end = p->groups.list[groups.begin].tiles.begin;
    for (ptrdiff_t g = groups.begin; g < groups.end; g++) {
        const am_range tiles = p->groups.list[g].tiles;
        for (ptrdiff_t begin = tiles.begin, end; begin < tiles.end; begin = end) {
            end = am_min(begin + p->sum_tiles[g], tiles.end);
            if (am_length(task.tiles) > 0 && end - task.tiles.begin > most)
                end_task(p, &task, to ? &to[count] : NULL, g), count++;
            task.tiles.end = end, task.groups.end = g + 1;
        }
    }
    task.tokens.end = p->base.attn->keys;
    if (to) to[count] = task;
    return count + 1;
}

/* The groups of a batch row, the first of which is not before `first`. */
static am_range groups_of(const plan *p, ptrdiff_t b, ptrdiff_t first)
{
    am_range groups = {first, first};
    while (groups.end < p->groups.count && p->groups.list[groups.end].b == b) groups.end++;
    return groups;
}

static am_status list_tasks(plan *p, ptrdiff_t most)
{
    const ptrdiff_t batch = p->base.attn->batch;
    am_range groups = {0, 0};
    for (ptrdiff_t b = 0; b < batch; b++) {
        groups = groups_of(p, b, groups.end);
        p->row_tasks = am_max(p->row_tasks, divide_row(p, groups, most, NULL));
    }
    p->tasks = calloc((size_t)am_max(am_product(batch, p->row_tasks, 1), 1), sizeof *p->tasks);
    if (!p->tasks) return AM_NO_MEMORY;
    groups = (am_range){0, 0};
    for (ptrdiff_t b = 0; b < batch; b++) {
        groups = groups_of(p, b, groups.end);
        key_task *tasks = p->tasks + b * p->row_tasks;
        divide_row(p, groups, most, tasks);
        for (key_task *task = tasks; task < tasks + p->row_tasks; task++) {
            p->task_tiles = am_max(p->task_tiles, am_length(task->tiles));
            if (p->problem->d_bias) task->groups = groups; /* each task passes the tickets of all blocks */
        }
    }
    return AM_OK;
}

static am_status compute(const am_run *run, plan *p)
{
    const am_attn *f = p->base.attn;
    const ptrdiff_t blocks = p->groups.blocks.count * f->heads;
    am_status status = am_parallel(run, blocks, 1, rows_task, p);
    if (status == AM_OK) status = am_bias_gradient_begin(run, &p->bias);
    if (status == AM_OK && p->problem->d_sinks) status = sum_sinks(run, p);
    /* Batch rows that share a bias or a table add to its gradient in order, too. */
    const bool in_order = (p->bias.sums && p->bias.shape[0] == 1) || p->table.result;
    const ptrdiff_t row_tasks = p->row_tasks * f->kv_heads;
    if (status == AM_OK)
        status = am_parallel_rows(run, in_order ? 1 : f->batch, in_order ? f->batch * row_tasks : row_tasks,
                                  keys_task, p);
    if (status == AM_OK && p->d_q.data != p->problem->d_q.data)
        status = am_parallel(run, blocks, 1, finish_task, p);
    return status == AM_OK ? am_bias_gradient_end(run, &p->bias) : status;
}

/* Divides the work. */
static am_status make_plan(plan *p, bool by_mask)
{
    am_status status = am_attn_groups_make(&p->groups, p->base.attn->mask, by_mask);
    p->sum_tiles = malloc((size_t)am_product(am_max(p->groups.count, 1), sizeof *p->sum_tiles, 1));
    if (status == AM_OK && !p->sum_tiles) status = AM_NO_MEMORY;
    return status == AM_OK ? list_tasks(p, choose(p)) : status;
}

static am_status compute_gradients(const am_run *run, const am_attn_gradients *problem, bool by_mask)
{
    const am_attn *f = &problem->forward;
    plan p = {
        .base = am_attn_base_of(run, f), .problem = problem, .threads = run->threads, .d_q = problem->d_q};
    am_status status = make_plan(&p, by_mask);
    ptrdiff_t rows = f->batch * f->heads * f->queries, size = p.base.size,
              d_q_bytes = am_product(rows, f->depth, size),
              stats_bytes = am_product(am_ceil_div(rows, AM_LINE / size), AM_LINE, ROW_STATS);
    char *own_d_q = NULL;
    workspace unused;
    if (status == AM_OK)
        status = am_bias_gradient_make(&p.bias, &p.base, problem, &p.groups, p.row_tasks, p.task_tiles);
    if (status == AM_OK) status = am_table_gradient_make(&p.table, &p.base, problem->d_table);
    if (status == AM_OK) status = am_workspaces_make(&p.workspaces, run->threads, lay_out(&p, NULL, &unused));
    if (status == AM_OK) status = am_sum_sinks(run, &p.base, &p.sinks);
    p.states = malloc((size_t)am_max(am_product(p.groups.blocks.count, f->heads, sizeof *p.states), 1));
    p.stats_bytes = stats_bytes / ROW_STATS;
    p.row_stats = am_alloc_aligned(stats_bytes);
    if (p.d_q.type != p.base.type) {
        own_d_q = am_alloc_aligned(d_q_bytes);
        p.d_q = (am_tokens){
            .data = own_d_q,
            .type = p.base.type,
            .batch = f->heads * f->queries * f->depth * size,
            .head = f->queries * f->depth * size,
            .token = f->depth * size,
            .element = size,
        };
    }
    if (status == AM_OK && !(p.states && p.row_stats && p.d_q.data)) status = AM_NO_MEMORY;
    if (status == AM_OK) status = compute(run, &p);
    am_workspaces_free(&p.workspaces);
    am_attn_groups_free(&p.groups);
    free(p.sum_tiles);
    free(p.tasks);
    free(p.sinks);
    free(p.states);
    am_free_aligned(p.row_stats, stats_bytes);
    am_free_aligned(own_d_q, d_q_bytes);
    am_bias_gradient_free(&p.bias);
    am_table_gradient_free(&p.table);
    return status;
}

/* Whether blocks and tiles by the mask are those of whole batch rows. */
static am_status find_whole_rows(const am_mask *mask, bool *whole)
{
    am_attn_groups groups;
    const am_status status = am_attn_groups_make(&groups, mask, true);
    *whole = true;
    for (ptrdiff_t g = 0; status == AM_OK && g < groups.count; g++) {
        const am_attn_group *group = &groups.list[g];
        if (am_length(group->tiles) == 0) continue;
        *whole &= group->queries.begin == 0;
        for (ptrdiff_t i = group->blocks.begin; i < group->blocks.end; i++)
            *whole &= am_range_at(&groups.blocks, i).begin % TILE == 0;
        for (ptrdiff_t i = group->tiles.begin; i < group->tiles.end; i++)
            *whole &= am_range_at(&groups.tiles, i).begin % TILE == 0;
    }
    am_attn_groups_free(&groups);
    return status;
}

static am_status backward(const am_run *run, const am_attn_gradients *problem)
{
    const am_attn *f = &problem->forward;
    if (am_is_too_deep(f)) return AM_NO_MEMORY;
    if (f->depth == 0 && f->value_depth == 0 && !problem->d_bias && !problem->d_sinks && !problem->d_table)
        return AM_OK;
    if (!problem->d_bias || problem->bias_shape[0] > 1 || f->batch == 1)
        return compute_gradients(run, problem, true);
    /* Batch rows that share a bias add to its gradient with the same blocks and tiles. Where the mask has
     * sequences that begin elsewhere, the other gradients come from a pass of their own, with the bits that
     * they have without that of the bias. */
    bool whole;
    am_status status = find_whole_rows(f->mask, &whole);
    if (status == AM_OK) status = compute_gradients(run, problem, false);
    if (status != AM_OK || whole) return status;
    am_attn_gradients others = *problem;
    others.d_bias = NULL, others.d_sinks = NULL, others.d_table = NULL;
    return compute_gradients(run, &others, true);
}

/* Gradients of pairs that ALiBi makes unlikely are often denormal, and with such numbers processors of Intel
 * take 1.6 times as long in all. */
am_status am_attn_backward(const am_run *run, const am_attn_gradients *problem)
{
    const am_float_mode mode = am_float_mode_get();
    am_float_mode_set(am_float_mode_flushing(mode));
    const am_status status = backward(run, problem);
    am_float_mode_set(mode);
    return status;
}
