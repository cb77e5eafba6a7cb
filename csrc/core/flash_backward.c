/* flash_backward.c – attention backward, from out and lse, with logits computed again.
 *
 * A task takes a few tiles of keys of one key head, more where each row sees few, and loops over the blocks
 * of 64 query rows of its query heads; it accumulates d_k and d_v for itself. Each block of d_q is shared by
 * the tasks of all keys that its rows attend to, which add to it in the order of their keys. Tasks begin in
 * that order too, so a task waits only for one that is running. Tasks that share a bias add to its gradient
 * in order, too. No result depends on the number of threads, and nothing is as large as queries times keys,
 * unless the bias is. */
#include "core/flash_backward.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/convert.h"
#include "core/flash_bias.h"

enum {
    TILE = AM_FLASH_TILE,
    ENOUGH_TASKS = 64,      /* that keep any number of threads busy */
    WIDE_TILES = 4,         /* the most tiles of a task whose blocks see many tiles */
    MOST_TILES = 16,        /* the same if they see few: these stay in the cache from block to block */
    NEAR_BYTES = 768 << 10, /* the most bytes of a task's tiles that one block sees: they stay in the cache */
    FAR = 1024,             /* |lse| from which its rounding costs P more than ten binary digits */
};

/* One block of query rows of one head. */
typedef struct {
    ptrdiff_t first, last;    /* the tasks whose keys the block sees; none if first > last */
    atomic_ptrdiff_t serving; /* the task that may add to d_q */
} rows_state;

typedef struct {
    am_flash_base base;
    const am_backward_problem *problem;
    bool bf16x2;                 /* a lane of what is multiplied holds two bfloat16 */
    ptrdiff_t step, value_step;  /* from row to row in the workspace, in elements */
    am_ranges queries, keys;     /* the ranges of blocks, and of tiles */
    ptrdiff_t q_blocks, tiles;   /* the most of a batch row */
    ptrdiff_t task_tiles, tasks; /* the tiles of a task, and the tasks of a key head */
    int threads;                 /* the threads of the call */
    ptrdiff_t k_bytes, v_bytes;  /* the lengths of a tile's rows in the workspace */
    ptrdiff_t k_columns_bytes, v_columns_bytes, k_panels_bytes; /* the lengths of a packed tile */
    am_tokens d_q;         /* of the arithmetic type: the result, or what is converted to it */
    rows_state *states;    /* [batch][heads][q_blocks] */
    char *row_stats;       /* base, rest, add and share, each [batch][heads][queries] */
    ptrdiff_t stats_bytes; /* the length of each */
    am_sink_sum *sinks;    /* one for each head; NULL without sinks */
    am_bias_backward bias;
    am_workspaces workspaces;
} plan;

/* The state of a local tile. */
typedef struct {
    bool packed, finite; /* finite: k is */
} local_tile;

typedef struct {
    char *q, *d_out, *q_rows, *d_out_rows, *d_q, *p, *ds, *bias, *d_bias, *d_bias_scratch, *row;
    char *k_columns, *v_columns, *k, *d_k, *d_v; /* task_tiles of each */
    uint64_t *live, *kept;
    local_tile *tiles;
} workspace;

static ptrdiff_t lay_out(const plan *p, char *memory, workspace *s)
{
    const am_flash *f = p->base.flash;
    ptrdiff_t used = 0, n = p->task_tiles, tile_bytes = AM_FLASH_ROWS * TILE * p->base.size;
    bool own_bias = p->problem->d_bias != NULL;
    s->q = am_take(memory, &used, p->k_bytes);
    s->d_out = am_take(memory, &used, p->v_bytes);
    s->q_rows = p->bf16x2 ? am_take(memory, &used, p->k_bytes) : s->q;
    s->d_out_rows = p->bf16x2 ? am_take(memory, &used, p->v_bytes) : s->d_out;
    s->d_q = am_take(memory, &used, p->k_bytes);
    s->p = am_take(memory, &used, tile_bytes);
    s->ds = am_take(memory, &used, tile_bytes);
    s->bias = am_take(memory, &used, f->bias ? tile_bytes : 0);
    s->d_bias = am_take(memory, &used, own_bias ? tile_bytes : 0);
    s->d_bias_scratch = am_take(memory, &used, am_bias_scratch_bytes(&p->bias));
    s->row = am_take(memory, &used, 2 * am_row_scratch(TILE, am_max(am_max(f->depth, f->value_depth), TILE)));
    s->k_columns = am_take(memory, &used, n * p->k_columns_bytes);
    s->v_columns = am_take(memory, &used, n * p->v_columns_bytes);
    s->k = am_take(memory, &used, n * p->k_panels_bytes);
    s->d_k = am_take(memory, &used, n * p->k_bytes);
    s->d_v = am_take(memory, &used, n * p->v_bytes);
    s->live = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * (ptrdiff_t)sizeof(uint64_t));
    s->kept = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * (ptrdiff_t)sizeof(uint64_t));
    s->tiles = (local_tile *)am_take(memory, &used, n * (ptrdiff_t)sizeof(local_tile));
    return used;
}

/* --- Rows of queries --- */

static am_flash_place place_of(const plan *p, ptrdiff_t b, ptrdiff_t head, ptrdiff_t block)
{
    const am_range queries = am_range_at(&p->queries, b, block);
    const ptrdiff_t rows = queries.end - queries.begin;
    return (am_flash_place){
        .b = b,
        .kv_head = p->base.group ? head / p->base.group : 0,
        .head = head,
        .heads = 1,
        .block = block,
        .q = queries.begin,
        .queries = rows,
        .rows = rows,
    };
}

static ptrdiff_t row_index(const plan *p, const am_flash_place *at)
{
    return (at->b * p->base.flash->heads + at->head) * p->base.flash->queries + at->q;
}

static rows_state *state_of(const plan *p, const am_flash_place *at)
{
    return &p->states[(at->b * p->base.flash->heads + at->head) * p->q_blocks + at->block];
}

typedef enum { BASE, REST, ADD, SHARE, ROW_STATS } row_stat;

/* One statistic of the rows of a block. */
static char *row_stats_of(const plan *p, const am_flash_place *at, row_stat which)
{
    return p->row_stats + which * p->stats_bytes + row_index(p, at) * p->base.size;
}

static const char *read_tokens(const plan *p, const am_tokens *t, const am_flash_place *at, ptrdiff_t head,
                               ptrdiff_t token, ptrdiff_t rows, ptrdiff_t depth, char *scratch,
                               ptrdiff_t *step)
{
    return am_read_rows(&p->base, scratch, am_token(t, at->b, head, token), t->token, t->element, t->type,
                        rows, depth, step);
}

/* Loads rows of a block, and returns whether they are finite. `bf16x2_to`: for the same rows, packed as
 * bf16x2. */
static bool load_tokens(const plan *p, const am_tokens *t, const am_flash_place *at, ptrdiff_t depth,
                        char *scratch, char *to, ptrdiff_t to_step, char *bf16x2_to)
{
    ptrdiff_t step;
    if (p->bf16x2) {
        am_copy_bf16x2(to, am_token(t, at->b, at->head, at->q), t->token, t->element, at->rows, depth);
        return p->base.kernels->pack_values_bf16x2(bf16x2_to, to, 2 * am_ceil_div(depth, 2), at->rows, depth);
    }
    const char *rows = read_tokens(p, t, at, at->head, at->q, at->rows, depth, scratch, &step);
    return p->base.kernels->load_rows(to, to_step, rows, step, at->rows, depth);
}

static am_backward_rows begin_rows(const plan *p, const am_flash_place *at, const workspace *s)
{
    const am_flash *f = p->base.flash;
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

/* Packs rows of keys or values as columns, and unless `to_rows` is NULL also as panels; returns whether the
 * panels are finite. */
static bool pack(const plan *p, const am_tokens *t, const am_flash_place *at, am_range keys, ptrdiff_t depth,
                 char *scratch, char *to_columns, char *to_rows)
{
    const am_kv_format_kernels *own = &p->base.kernels->kv_formats[AM_KV_FORMAT_OWN];
    ptrdiff_t rows = keys.end - keys.begin, step;
    if (p->bf16x2) {
        const char *src = am_read_bf16x2(t, at->b, at->kv_head, keys.begin, rows, depth, scratch, &step);
        own->pack_keys(to_columns, src, step, rows, am_ceil_div(depth, 2), 1);
        return to_rows && p->base.kernels->pack_values_bf16x2(to_rows, src, 2 * step, rows, depth);
    }
    const char *src = read_tokens(p, t, at, at->kv_head, keys.begin, rows, depth, scratch, &step);
    own->pack_keys(to_columns, src, step, rows, depth, 1);
    return to_rows && own->pack_values(to_rows, src, step, rows, depth);
}

/* Fills in the live and kept pairs of a tile, and its bias. False if no pair is live. */
static bool find_tile(const plan *p, const am_flash_place *at, am_range keys, const workspace *s,
                      am_backward_tile *tile)
{
    const am_flash *f = p->base.flash;
    const ptrdiff_t k = keys.begin, columns = keys.end - k;
    am_tile kind = am_find_live(&p->base, at, k, columns, s->live);
    if (kind != AM_DEAD && f->bias)
        kind = am_read_bias(&p->base, at, k, columns, s->row, s->bias, s->live, kind);
    if (kind == AM_DEAD) return false;
    tile->columns = columns;
    tile->live = kind == AM_FULL ? NULL : s->live;
    tile->bias = f->bias ? s->bias : NULL;
    if (p->base.threshold) {
        for (ptrdiff_t r = 0; r < at->rows; r++) {
            uint64_t key = am_row_key(f->seed, at->b, at->head, at->q + r);
            s->kept[r] = p->base.all_kernels->keep_bits(key, (uint32_t)k, p->base.threshold);
        }
        tile->kept = s->kept;
    }
    return true;
}

/* --- Before: row statistics, and zeros --- */

static double given_row_stat(const plan *p, const am_row_stats *row_stats, const am_flash_place *at,
                             ptrdiff_t row)
{
    return am_number(&p->base,
                     row_stats->data + at->b * row_stats->batch + at->head * row_stats->head +
                         (at->q + row) * row_stats->token,
                     0);
}

/* Finds of each row, sinks included, the greatest logit as BASE, the sum of powers relative to it as REST,
 * and the number of logits that are as great as SHARE. */
static am_status find_row_maxima(const plan *p, const am_flash_place *at, const workspace *s, am_range tiles,
                                 am_team *team)
{
    const am_flash *f = p->base.flash;
    am_backward_rows block = begin_rows(p, at, s);
    block.share = row_stats_of(p, at, SHARE);
    const am_sink_sum sinks = p->sinks ? p->sinks[at->head] : (am_sink_sum){.highest = -INFINITY};
    for (ptrdiff_t r = 0; r < at->rows; r++) {
        am_set_number(&p->base, block.base, r, sinks.highest);
        am_set_number(&p->base, block.rest, r, sinks.sum);
        am_set_number(&p->base, block.share, r, sinks.count);
    }
    for (ptrdiff_t i = tiles.begin; i < tiles.end; i++) {
        const am_range keys = am_range_at(&p->keys, at->b, i);
        am_backward_tile tile = {.k_columns = s->k_columns};
        if (!find_tile(p, at, keys, s, &tile)) continue;
        pack(p, &f->k, at, keys, f->depth, s->row, s->k_columns, NULL);
        (p->bf16x2 ? p->base.kernels->bf16x2.find_row_max : p->base.kernels->find_row_max)(&block, &tile);
        am_status status = am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

/* Whether P is computed from the row's maximum, not from its lse, whose rounding is the relative error of P.
 */
static bool uses_row_max(const plan *p, const am_flash_place *at, ptrdiff_t row)
{
    double size = fabs(given_row_stat(p, &p->problem->lse, at, row));
    return !p->base.flash->normalize || (size > FAR && size < INFINITY);
}

/* The statistics from which kernels compute P and dS of the rows, beside the logits. */
static void find_row_stats(const plan *p, const am_flash_place *at, const workspace *s)
{
    const am_flash *f = p->base.flash;
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
    const am_flash *f = p->base.flash;
    ptrdiff_t head = index / p->q_blocks;
    const am_flash_place place = place_of(p, head / f->heads, head % f->heads, index % p->q_blocks),
                         *at = &place;
    const am_range tiles = am_tiles_of(&p->base, &p->keys, at);
    rows_state *state = state_of(p, at);
    state->first = tiles.begin / p->task_tiles;
    state->last = tiles.begin < tiles.end ? (tiles.end - 1) / p->task_tiles : state->first - 1;
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

/* The gradient of the sinks. A sink adds to the sum of powers as a key without a value would; not normalized,
 * it may also be the row's maximum, which moves all powers. */
static am_status sinks_task(void *arg, ptrdiff_t head, am_team *team)
{
    const plan *p = arg;
    const am_flash *f = p->base.flash;
    double *d_sinks = p->problem->d_sinks + head * f->sink_count;
    am_status status = AM_OK;
    memset(d_sinks, 0, (size_t)f->sink_count * sizeof *d_sinks);
    for (ptrdiff_t index = 0; status == AM_OK && index < f->batch * p->q_blocks; index++) {
        const am_flash_place at = place_of(p, index / p->q_blocks, head, index % p->q_blocks);
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

/* --- The tasks --- */

static void write_tokens(const plan *p, const am_tokens *t, const am_flash_place *at, ptrdiff_t head,
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

/* Adds the block's part to d_q, if there is one, once the tasks before have added theirs. The first task
 * always has a part, and writes it. */
static am_status add_ordered(const plan *p, const am_flash_place *at, rows_state *state, ptrdiff_t task,
                             const char *d_q, am_team *team)
{
    am_status status = am_await(team, &state->serving, task);
    if (status != AM_OK) return status;
    if (task == state->first) {
        write_tokens(p, &p->d_q, at, at->head, at->q, at->rows, d_q, p->step, p->base.flash->depth);
    } else if (d_q) {
        char *to = (char *)am_token(&p->d_q, at->b, at->head, at->q);
        p->base.kernels->add_rows(to, p->d_q.token / p->base.size, d_q, p->step, at->rows,
                                  p->base.flash->depth);
    }
    atomic_store_explicit(&state->serving, task + 1, memory_order_release);
    return AM_OK;
}

static void clear_tile(const plan *p, ptrdiff_t i, const workspace *s)
{
    memset(s->d_k + i * p->k_bytes, 0, (size_t)p->k_bytes);
    memset(s->d_v + i * p->v_bytes, 0, (size_t)p->v_bytes);
}

/* Packs the i-th tile of a task when a block first needs it: under narrow masks it is then still in the
 * cache. */
static void pack_tile(const plan *p, const am_flash_place *at, ptrdiff_t task, ptrdiff_t i,
                      const workspace *s)
{
    if (s->tiles[i].packed) return;
    const am_range keys = am_range_at(&p->keys, at->b, task * p->task_tiles + i);
    bool finite = pack(p, &p->base.flash->k, at, keys, p->base.flash->depth, s->row,
                       s->k_columns + i * p->k_columns_bytes, s->k + i * p->k_panels_bytes);
    pack(p, &p->base.flash->v, at, keys, p->base.flash->value_depth, s->row,
         s->v_columns + i * p->v_columns_bytes, NULL);
    clear_tile(p, i, s);
    s->tiles[i] = (local_tile){.packed = true, .finite = finite};
}

/* Whether the rows attend to any of the task's keys. */
static bool has_part(const rows_state *state, ptrdiff_t task)
{
    return state->first <= task && task <= state->last;
}

/* Prefetches the rows of a block. */
static void choose_prefetch(const plan *p, const am_flash_place *at, ptrdiff_t task, am_backward_tile *tile)
{
    const am_flash *f = p->base.flash;
    if (!has_part(state_of(p, at), task)) return;
    const am_tokens *d_out = &p->problem->d_out;
    tile->prefetch[AM_PREFETCH_Q] = am_prefetch_tokens(&f->q, at->b, at->head, 1, at->q, at->rows, f->depth);
    tile->prefetch[AM_PREFETCH_OUT] =
        am_prefetch_tokens(d_out, at->b, at->head, 1, at->q, at->rows, f->value_depth);
    const ptrdiff_t first = task * p->task_tiles, last = am_min(first + p->task_tiles, p->tiles) - 1;
    const am_range keys = {am_range_at(&p->keys, at->b, first).begin, am_range_at(&p->keys, at->b, last).end};
    tile->prefetch[AM_PREFETCH_BIAS] = am_prefetch_bias(&p->base, at, keys);
    tile->prefetch[AM_PREFETCH_D_Q] =
        am_prefetch_tokens(&p->d_q, at->b, at->head, 1, at->q, at->rows, f->depth);
}

/* Takes a block over the tiles of a task. `next`: the block after it, or NULL. */
static am_status block_step(const plan *p, const am_flash_place *at, const am_flash_place *next,
                            ptrdiff_t task, const workspace *s, am_team *team)
{
    rows_state *state = state_of(p, at);
    bool any = has_part(state, task), begun = false;
    am_backward_rows block;
    am_status status = AM_OK;
    const ptrdiff_t tiles = am_min(p->task_tiles, p->tiles - task * p->task_tiles);
    for (ptrdiff_t i = 0; any && i < tiles; i++) {
        const am_range keys = am_range_at(&p->keys, at->b, task * p->task_tiles + i);
        am_backward_tile tile = {
            .k_columns = s->k_columns + i * p->k_columns_bytes,
            .v_columns = s->v_columns + i * p->v_columns_bytes,
            .k = s->k + i * p->k_panels_bytes,
            .d_k = s->d_k + i * p->k_bytes,
            .d_v = s->d_v + i * p->v_bytes,
            .d_bias = p->bias.result ? s->d_bias : NULL,
        };
        if (keys.begin == keys.end || !find_tile(p, at, keys, s, &tile)) continue;
        pack_tile(p, at, task, i, s);
        tile.k_finite = s->tiles[i].finite;
        if (!begun) {
            if (next) choose_prefetch(p, next, task, &tile);
            block = begin_rows(p, at, s);
            memset(s->d_q, 0, (size_t)(at->rows * p->step * p->base.size));
            begun = true;
        }
        (p->bf16x2 ? p->base.kernels->bf16x2.backward : p->base.kernels->backward)(&block, &tile);
        if (tile.d_bias)
            status = am_bias_add(&p->bias, at, task, keys.begin, s->d_bias, s->d_bias_scratch, team);
        if (status == AM_OK) status = am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    if (any && !begun && task == state->first) {
        memset(s->d_q, 0, (size_t)(at->rows * p->step * p->base.size));
        begun = true;
    }
    status = am_bias_end_block(&p->bias, at, task, team);
    if (status == AM_OK && any) status = add_ordered(p, at, state, task, begun ? s->d_q : NULL, team);
    return status;
}

/* The i-th of the blocks that share the keys. */
static am_flash_place block_of(const plan *p, const am_flash_place *keys, ptrdiff_t i)
{
    ptrdiff_t group = p->base.group;
    return place_of(p, keys->b, keys->kv_head * group + i % group, i / group);
}

/* The i-th key head that is begun. Threads in the same batch row take heads far from each other, as rows of
 * neighbouring heads share cache lines, for which writers would contend. Heads that share a bias are begun in
 * the order in which they add to its gradient: a task may only wait for one that was begun before it. */
static ptrdiff_t ordered_head(const plan *p, ptrdiff_t i)
{
    const bool in_order = p->bias.sums && p->bias.shape[1] == 1;
    if (in_order || p->base.flash->batch >= p->threads) return i;
    const ptrdiff_t heads = p->base.flash->kv_heads, thread = i % p->threads;
    return heads / p->threads * thread + am_min(heads % p->threads, thread) + i / p->threads;
}

static am_status keys_task(void *arg, ptrdiff_t index, am_team *team)
{
    const plan *p = arg;
    const am_flash *f = p->base.flash;
    ptrdiff_t task = index / f->kv_heads % p->tasks;
    am_flash_place at = {.b = index / f->kv_heads / p->tasks,
                         .kv_head = ordered_head(p, index % f->kv_heads)};
    char *memory = am_workspace_acquire(&p->workspaces);
    workspace s;
    lay_out(p, memory, &s);
    ptrdiff_t tiles = am_min(p->task_tiles, p->tiles - task * p->task_tiles);
    memset(s.tiles, 0, (size_t)p->task_tiles * sizeof *s.tiles);
    memset(s.d_bias_scratch, 0, (size_t)am_bias_scratch_bytes(&p->bias));
    am_status status = AM_OK;
    ptrdiff_t blocks = p->q_blocks * p->base.group;
    for (ptrdiff_t i = 0; status == AM_OK && i < blocks; i++) {
        const am_flash_place rows = block_of(p, &at, i), next = block_of(p, &at, am_min(i + 1, blocks - 1));
        status = block_step(p, &rows, i + 1 < blocks ? &next : NULL, task, &s, team);
    }
    if (status == AM_OK) status = am_bias_end_task(&p->bias, &at, task, s.d_bias_scratch, team);
    for (ptrdiff_t i = 0; status == AM_OK && i < tiles; i++) {
        const am_range keys = am_range_at(&p->keys, at.b, task * p->task_tiles + i);
        const ptrdiff_t k = keys.begin, rows = keys.end - k;
        if (!s.tiles[i].packed) clear_tile(p, i, &s);
        write_tokens(p, &p->problem->d_k, &at, at.kv_head, k, rows, s.d_k + i * p->k_bytes, p->step,
                     f->depth);
        write_tokens(p, &p->problem->d_v, &at, at.kv_head, k, rows, s.d_v + i * p->v_bytes, p->value_step,
                     f->value_depth);
    }
    am_workspace_release(&p->workspaces, memory);
    return status;
}

/* Converts d_q that was accumulated in another type to the result. */
static am_status finish_task(void *arg, ptrdiff_t index, am_team *team)
{
    const plan *p = arg;
    ptrdiff_t head = index / p->q_blocks;
    const am_flash_place at =
        place_of(p, head / p->base.flash->heads, head % p->base.flash->heads, index % p->q_blocks);
    write_tokens(p, &p->problem->d_q, &at, at.head, at.q, at.rows, am_token(&p->d_q, at.b, at.head, at.q),
                 p->d_q.token / p->base.size, p->base.flash->depth);
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

static void choose(plan *p)
{
    const am_flash *f = p->base.flash;
    if (f->sink_count > 0) p->base.unit = AM_LOG2_E; /* the unit of sinks, as a base may be one */
    p->bf16x2 = f->q.type == AM_BFLOAT16 && p->base.kernels->bf16x2.backward;
    ptrdiff_t panel = p->base.kernels->panel, size = p->base.size, width = p->bf16x2 ? 2 : 1;
    ptrdiff_t depth = am_ceil_div(f->depth, panel) * panel;
    p->step = step_of(p, depth);
    p->value_step = step_of(p, am_ceil_div(f->value_depth, panel) * panel);
    p->k_bytes = TILE * p->step * size;
    p->v_bytes = TILE * p->value_step * size;
    p->k_columns_bytes = TILE * am_ceil_div(f->depth, width) * size;
    p->v_columns_bytes = TILE * am_ceil_div(f->value_depth, width) * size;
    p->k_panels_bytes = TILE / width * depth * size;
    p->q_blocks = p->queries.count;
    p->tiles = p->keys.count;
    ptrdiff_t bytes = p->k_bytes + p->v_bytes + p->k_columns_bytes + p->v_columns_bytes + p->k_panels_bytes;
    ptrdiff_t seen = am_most_tiles(&p->base, &p->queries, &p->keys);
    p->task_tiles = seen > NEAR_BYTES / bytes ? WIDE_TILES : MOST_TILES;
    while (p->task_tiles > 1 && (am_min(p->task_tiles, seen) * bytes > NEAR_BYTES ||
                                 f->batch * f->kv_heads * (p->tiles / p->task_tiles) < ENOUGH_TASKS))
        p->task_tiles /= 2;
    p->tasks = am_ceil_div(p->tiles, p->task_tiles);
}

static am_status compute(const am_run *run, plan *p)
{
    const am_flash *f = p->base.flash;
    ptrdiff_t heads = f->batch * f->heads, blocks = heads * p->q_blocks;
    am_status status = am_parallel(run, blocks, 1, rows_task, p);
    if (status == AM_OK) status = am_bias_backward_begin(run, &p->bias);
    if (status == AM_OK && p->problem->d_sinks) status = am_parallel(run, f->heads, 1, sinks_task, p);
    /* Batch rows that share a bias add to its gradient in order, too. */
    const bool in_order = p->bias.sums && p->bias.shape[0] == 1;
    const ptrdiff_t row_tasks = p->tasks * f->kv_heads;
    if (status == AM_OK)
        status = am_parallel_rows(run, in_order ? 1 : f->batch, in_order ? f->batch * row_tasks : row_tasks,
                                  keys_task, p);
    if (status == AM_OK && p->d_q.data != p->problem->d_q.data)
        status = am_parallel(run, blocks, 1, finish_task, p);
    return status == AM_OK ? am_bias_backward_end(run, &p->bias) : status;
}

am_status am_flash_backward(const am_run *run, const am_backward_problem *problem)
{
    const am_flash *f = &problem->forward;
    if (am_is_too_deep(f)) return AM_NO_MEMORY;
    if (f->depth == 0 && f->value_depth == 0 && !problem->d_bias && !problem->d_sinks) return AM_OK;
    plan p = {
        .base = am_flash_base_of(run, f), .problem = problem, .threads = run->threads, .d_q = problem->d_q};
    /* Batch rows may share a bias, and then need the same blocks and tiles to add to its gradient. */
    const bool by_mask = !problem->d_bias;
    am_status status = am_ranges_make(&p.queries, f->mask, AM_QUERIES, by_mask);
    if (status == AM_OK) status = am_ranges_make(&p.keys, f->mask, AM_KEYS, by_mask);
    if (status == AM_OK) choose(&p);
    ptrdiff_t rows = f->batch * f->heads * f->queries, size = p.base.size,
              d_q_bytes = am_product(rows, f->depth, size),
              stats_bytes = am_product(am_ceil_div(rows, AM_LINE / size), AM_LINE, ROW_STATS);
    char *own_d_q = NULL;
    workspace unused;
    if (status == AM_OK)
        status = am_bias_backward_make(&p.bias, &p.base, problem->d_bias, problem->bias_shape, p.tasks,
                                       p.task_tiles);
    if (status == AM_OK) status = am_workspaces_make(&p.workspaces, run->threads, lay_out(&p, NULL, &unused));
    if (status == AM_OK) status = am_sum_sinks(run, &p.base, &p.sinks);
    p.states = malloc((size_t)am_max(f->batch * f->heads * p.q_blocks, 1) * sizeof *p.states);
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
    am_ranges_free(&p.queries);
    am_ranges_free(&p.keys);
    free(p.sinks);
    free(p.states);
    am_free_aligned(p.row_stats, stats_bytes);
    am_free_aligned(own_d_q, d_q_bytes);
    am_bias_backward_free(&p.bias);
    return status;
}
