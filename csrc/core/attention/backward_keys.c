/* backward_keys.c – the tasks of attention backward: a few tiles of keys of one head, and all blocks of
 * queries that see them. */
#include <string.h>

#include "core/attention/backward_plan.h"

enum { TILE = AM_FLASH_TILE };

/* Writes rows of the arithmetic type, `stride` numbers apart, to the rows of an array. */
static void write_rows(const am_backward_plan *p, const am_array *to, const char *from, ptrdiff_t stride)
{
    am_scatter(p->base.all_kernels, to, p->base.type, from, stride);
}

/* Adds a sum of tiles to d_q, if there is one, once all sums before it have been added. There always is a
 * first sum, which is written. */
static am_status add_ordered(const am_backward_plan *p, const am_attn_place *at, am_rows_state *state,
                             ptrdiff_t sum, const char *d_q, am_team *team)
{
    am_status status = am_await(team, &state->semaphore, sum);
    const am_array to = am_rows_of_block(&p->d_q, at);
    if (status != AM_OK) return status;
    if (sum == state->first)
        write_rows(p, &to, d_q, p->k.stride);
    else if (d_q)
        p->base.arithmetic->add_rows(to.data, to.stride.token / p->base.size, d_q, p->k.stride, at->rows,
                                     p->base.attn->head_dim);
    atomic_store_explicit(&state->semaphore, sum + 1, memory_order_release);
    return AM_OK;
}

/* The sums of the i-th tile of a task. */
static am_key_sums tile_sums(const am_backward_plan *p, const am_key_sums *sums, ptrdiff_t i)
{
    return (am_key_sums){sums->d_k + i * p->k.sums, sums->d_v + i * p->v.sums};
}

static am_sum_shape shape_of_d_k(const am_backward_plan *p, ptrdiff_t keys)
{
    return am_sum_shape_of(p, keys, p->base.attn->head_dim, p->k.stride);
}
static am_sum_shape shape_of_d_v(const am_backward_plan *p, ptrdiff_t keys)
{
    return am_sum_shape_of(p, keys, p->base.attn->value_dim, p->v.stride);
}

static void clear_sums(const am_backward_plan *p, am_key_sums to, ptrdiff_t keys)
{
    const am_sum_shape k = shape_of_d_k(p, keys), v = shape_of_d_v(p, keys);
    memset(to.d_k, 0, (size_t)(k.rows * k.stride * p->base.size));
    memset(to.d_v, 0, (size_t)(v.rows * v.stride * p->base.size));
}

/* Tells a step where to sum up this split of the i-th tile. If splits are tasks, or the total is still empty,
 * the split is summed up in the total. Otherwise it is summed up apart, and its last step adds it to the
 * total. */
static void open_sums(const am_backward_plan *p, const am_key_task *task, ptrdiff_t i, bool last,
                      const am_backward_workspace *s, am_backward_tile *tile)
{
    am_local_tile *local = &s->tiles[i];
    const bool own = task->splits == 0 && local->summed;
    const am_key_sums total = tile_sums(p, &s->total, i), sums = own ? tile_sums(p, &s->split, i) : total;
    tile->d_k = (am_backward_sum){.sum = sums.d_k, .fresh = !local->open};
    tile->d_v = (am_backward_sum){.sum = sums.d_v, .fresh = !local->open};
    local->open = !(own && last);
    if (local->open) return;
    tile->d_k.onto = total.d_k, tile->d_k.onto_stride = shape_of_d_k(p, TILE).stride;
    tile->d_v.onto = total.d_v, tile->d_v.onto_stride = shape_of_d_v(p, TILE).stride;
}

/* Adds a split of the sums of a tile to the total. */
static void add_split(const am_backward_plan *p, bool first, am_key_sums total, am_key_sums split,
                      ptrdiff_t keys)
{
    const am_sum_shape k = shape_of_d_k(p, keys), v = shape_of_d_v(p, keys);
    if (first) {
        memcpy(total.d_k, split.d_k, (size_t)(k.rows * k.stride * p->base.size));
        memcpy(total.d_v, split.d_v, (size_t)(v.rows * v.stride * p->base.size));
        return;
    }
    p->base.arithmetic->add_rows(total.d_k, k.stride, split.d_k, k.stride, k.rows, k.columns);
    p->base.arithmetic->add_rows(total.d_v, v.stride, split.d_v, v.stride, v.rows, v.columns);
}

/* The tiles of a task that a section sees. */
static am_range tiles_of(const am_key_task *task, const am_section *section)
{
    return (am_range){am_max(task->tiles.begin, section->tiles.begin),
                      am_min(task->tiles.end, section->tiles.end)};
}

/* Ends the splits of a task that end with a visit: adds them to the total. */
static void end_splits(const am_backward_plan *p, const am_key_task *task, const am_section *section,
                       ptrdiff_t visit, const am_backward_workspace *s)
{
    if (!am_ends_split(p, section, visit)) return;
    const am_range tiles = tiles_of(task, section);
    for (ptrdiff_t index = tiles.begin; index < tiles.end; index++) {
        const ptrdiff_t i = index - task->tiles.begin;
        am_local_tile *tile = &s->tiles[i];
        if (!tile->open) continue;
        if (tile->summed)
            add_split(p, false, tile_sums(p, &s->total, i), tile_sums(p, &s->split, i),
                      am_length(am_range_at(&p->sections.tiles, index)));
        tile->open = false, tile->summed = true;
    }
}

/* The sums of a split that is a task. */
static am_key_sums sums_of_split(const am_backward_plan *p, ptrdiff_t kv_head, ptrdiff_t slot)
{
    char *sums = p->splits.sums + (kv_head * p->splits.slots + slot) * p->splits.bytes;
    return (am_key_sums){sums, sums + p->task_tiles * p->k.sums};
}

/* Packs keys or values by columns, and keys like values, too, unless `panels` is NULL; returns whether these
 * are finite. */
static bool pack_rows(const am_backward_plan *p, const am_array *rows, char *columns, char *panels,
                      char *scratch)
{
    const am_kv_kernels *kv = p->base.kv;
    const ptrdiff_t count = rows->shape.token, dim = rows->shape.channel;
    const am_rows read = am_read_lanes(&p->base, rows, scratch);
    kv->pack_keys(columns, &read, count, am_lanes(&p->base, dim), 1, NULL);
    return panels && kv->pack_values(panels, &read, count, dim, NULL);
}

/* Packs the i-th tile of a task when a block first needs it: under narrow masks it is then still in the
 * cache. */
static void pack_tile(const am_backward_plan *p, const am_attn_place *at, am_range keys, ptrdiff_t i,
                      const am_backward_workspace *s)
{
    if (s->tiles[i].packed) return;
    const am_attn *f = p->base.attn;
    const am_array k = am_rows_of_keys(&f->k, at, keys), v = am_rows_of_keys(&f->v, at, keys);
    am_local_tile *tile = &s->tiles[i];
    tile->packed = true;
    tile->finite = pack_rows(p, &k, s->k_columns + i * p->k.columns, s->k + i * p->k.panels, s->row);
    pack_rows(p, &v, s->v_columns + i * p->v.columns, NULL, s->row);
    if (p->along && p->along->d_k.data) {
        const am_array d_k = am_rows_of_keys(&p->along->d_k, at, keys);
        tile->tangent_finite =
            pack_rows(p, &d_k, s->along.k_columns + i * p->k.columns, s->along.k + i * p->k.panels, s->row);
    }
    if (p->along && p->along->d_v.data) {
        const am_array d_v = am_rows_of_keys(&p->along->d_v, at, keys);
        pack_rows(p, &d_v, s->along.v_columns + i * p->v.columns, NULL, s->row);
    }
}

/* Plans to prefetch the rows of a block. */
static void plan_prefetch(const am_backward_plan *p, const am_attn_place *at, const am_key_task *task,
                          am_prefetch_plan *plan)
{
    const am_attn *f = p->base.attn;
    const am_array *d_out = &p->problem->d_out;
    const am_range tiles = tiles_of(task, at->section);
    /* Lone blocks are begun by the task itself, which has not come to this one. */
    const am_rows_state *state = p->lone_blocks ? NULL : am_rows_state_of(p, at);
    if (am_length(tiles) <= 0) return;
    if (state && (am_sum_of_tile(p, at->section, tiles.begin) > state->last ||
                  am_sum_of_tile(p, at->section, tiles.end - 1) < state->first))
        return;
    const am_range keys = {am_range_at(&p->sections.tiles, tiles.begin).begin,
                           am_range_at(&p->sections.tiles, tiles.end - 1).end};
    am_plan_rows(plan, am_prefetch_block(&f->q, at, 1));
    am_plan_rows(plan, am_prefetch_block(d_out, at, 1));
    if (p->lone_blocks) am_plan_rows(plan, am_prefetch_block(&f->out, at, 1));
    am_plan_rows(plan, am_prefetch_bias(&p->base, at, keys));
    const char *d_bias = am_bias_place(&p->bias, at, keys);
    if (d_bias)
        am_plan_rows(plan, (am_prefetch_rows){.at = d_bias,
                                              .stride = p->bias.shape.channel * p->base.size,
                                              .length = am_length(keys) * p->base.size,
                                              .rows = at->rows});
    am_plan_rows(plan, am_prefetch_block(&p->d_q, at, 1));
}

/* The i-th key head that is begun. Rows of neighbouring heads share cache lines, and their writers would
 * contend. So threads in one batch row take heads far from each other. Heads that share a bias are begun in
 * the order in which they add to its gradient: a task may only wait for one that was begun before it. */
static ptrdiff_t ordered_head(const am_backward_plan *p, ptrdiff_t i)
{
    const bool in_order = p->bias.sums && p->bias.shape.head == 1;
    if (in_order || p->base.attn->batch >= p->threads) return i;
    const ptrdiff_t heads = p->base.attn->kv_heads, thread = i % p->threads;
    return heads / p->threads * thread + am_min(heads % p->threads, thread) + i / p->threads;
}

/* The block and head of a visit. */
static am_attn_place place_of_visit(const am_backward_plan *p, const am_section *section, ptrdiff_t kv_head,
                                    ptrdiff_t visit)
{
    const ptrdiff_t shared = p->base.heads_per_kv;
    return am_place_of(&p->base, &p->sections, section, section->blocks.begin + visit / shared,
                       (kv_head + 1) * shared - 1 - visit % shared, 1);
}

/* The visits of a task to the blocks of a section. */
static am_range visits_of(const am_backward_plan *p, const am_key_task *task, const am_section *section)
{
    return task->splits > 0 ? task->visits : (am_range){0, am_visits_of(p, section)};
}

/* The section that a thread takes next: another one of its task, or the first of the task after it. `task` is
 * NULL at the end. */
typedef struct {
    const am_key_task *task;
    const am_section *section;
    ptrdiff_t kv_head;
} follower;

static follower follower_of(const am_backward_plan *p, ptrdiff_t index, ptrdiff_t section)
{
    const ptrdiff_t heads = p->base.attn->kv_heads;
    if (section + 1 < p->tasks[index / heads].sections.end)
        section++;
    else if (++index < p->base.attn->batch * p->row_tasks * heads)
        section = p->tasks[index / heads].sections.begin;
    else
        return (follower){.task = NULL};
    const am_key_task *task = &p->tasks[index / heads];
    if (am_length(task->sections) <= 0) return (follower){.task = NULL};
    return (follower){task, &p->sections.list[section], ordered_head(p, index % heads)};
}

/* A block on its way over the tiles of a task. */
typedef struct {
    const am_key_task *task;
    const am_attn_place *at, *next; /* next: the block after it, or NULL */
    const follower *then;
    ptrdiff_t visit;
    char *d_q; /* the result, if a step adds to it; NULL: a sum of tiles does */
    am_backward_rows rows;
    am_backward_tangents *tangents; /* set if they are wanted */
    bool loaded;
} block_walk;

/* Computes a step of a block over the i-th tile of a task. */
static void take_step(const am_backward_plan *p, block_walk *walk, const am_backward_tile *tile, ptrdiff_t i,
                      const am_backward_workspace *s)
{
    am_backward_tangents *t = walk->tangents;
    if (!p->along) {
        p->base.arithmetic->backward(&walk->rows, tile);
        return;
    }
    if (p->along->d_k.data) {
        t->k_columns = s->along.k_columns + i * p->k.columns, t->k = s->along.k + i * p->k.panels;
        t->k_finite = s->tiles[i].tangent_finite;
    }
    if (p->along->d_v.data) t->v_columns = s->along.v_columns + i * p->v.columns;
    p->base.arithmetic->backward_tangents(&walk->rows, tile, t);
}

/* Plans what to prefetch during the last block of a section: the gradients of a tile, which are written next,
 * then keys and values of the next tile and the rows of its first block. Short sequences have no other block
 * during which to prefetch. */
static void plan_end(const am_backward_plan *p, const block_walk *walk, am_range keys, am_prefetch_plan *plan)
{
    const am_attn *f = p->base.attn;
    const follower *then = walk->then;
    const ptrdiff_t b = walk->at->b, kv_head = walk->at->kv_head;
    am_plan_rows(plan, am_prefetch_tokens(&p->problem->d_k, b, kv_head, 1, keys.begin, am_length(keys)));
    am_plan_rows(plan, am_prefetch_tokens(&p->problem->d_v, b, kv_head, 1, keys.begin, am_length(keys)));
    if (!then->task) return;
    const am_range visits = visits_of(p, then->task, then->section),
                   tiles = tiles_of(then->task, then->section);
    if (am_length(visits) <= 0 || am_length(tiles) <= 0) return;
    const am_attn_place at = place_of_visit(p, then->section, then->kv_head, visits.end - 1);
    keys = am_range_at(&p->sections.tiles, tiles.begin);
    am_plan_rows(plan, am_prefetch_tokens(&f->k, at.b, at.kv_head, 1, keys.begin, am_length(keys)));
    am_plan_rows(plan, am_prefetch_tokens(&f->v, at.b, at.kv_head, 1, keys.begin, am_length(keys)));
    plan_prefetch(p, &at, then->task, plan);
}

/* Takes a block over some tiles, which make one sum of d_q; returns whether any has live pairs. */
static bool sum_tiles(const am_backward_plan *p, block_walk *walk, am_range tiles,
                      const am_backward_workspace *s, am_team *team, am_status *status)
{
    const am_attn_place *at = walk->at;
    const ptrdiff_t task = walk->task - p->tasks;
    am_prefetch_plan prefetch;
    am_plan_begin(&prefetch, 1);
    bool any = false;
    for (ptrdiff_t index = tiles.begin; index < tiles.end; index++) {
        const am_range keys = am_range_at(&p->sections.tiles, index);
        const ptrdiff_t i = index - walk->task->tiles.begin;
        char *d_bias = p->lines.count > 0 ? NULL : am_bias_place(&p->bias, at, keys);
        am_backward_tile tile = {
            .k_columns = s->k_columns + i * p->k.columns,
            .v_columns = s->v_columns + i * p->v.columns,
            .k = s->k + i * p->k.panels,
            .d_bias = d_bias                                 ? d_bias
                      : p->bias.result || p->lines.count > 0 ? s->d_bias
                                                             : NULL,
            .d_bias_stride = d_bias ? p->bias.shape.channel : TILE,
            .columns = am_length(keys),
        };
        if (!am_find_logit_terms(&p->base, at, keys, &s->terms, &tile.terms)) {
            am_bias_clear(&p->bias, at, keys);
            continue;
        }
        pack_tile(p, at, keys, i, s);
        tile.k_finite = s->tiles[i].finite;
        open_sums(p, walk->task, i, am_ends_split(p, at->section, walk->visit), s, &tile);
        if (!walk->loaded) {
            if (walk->next)
                plan_prefetch(p, walk->next, walk->task, &prefetch);
            else
                plan_end(p, walk, keys, &prefetch);
            tile.prefetch = &prefetch;
            walk->rows = am_begin_backward_rows(p, at, s);
            if (p->along) *walk->tangents = am_begin_backward_tangents(p, at, s);
            walk->loaded = true;
        }
        walk->rows.d_q = (am_backward_sum){
            .sum = s->d_q,
            .fresh = !any,
            .onto = walk->d_q,
            .onto_stride = p->d_q.stride.token / p->base.size,
        };
        any = true;
        take_step(p, walk, &tile, i, s);
        am_learn_lines(&p->lines, at, keys, s->d_bias, s->row, s->lines);
        if (p->bias.result && !d_bias)
            *status = am_bias_add(&p->bias, at, task % p->row_tasks,
                                  &(am_bias_tile){.keys = keys, .index = i, .d_s = s->d_bias},
                                  s->d_bias_scratch, team);
        if (*status == AM_OK) *status = am_checkpoint(team);
        if (*status != AM_OK) break;
    }
    return any;
}

/* Where a step adds to d_q itself, or NULL. It may if it makes a whole sum that is not the first one, and the
 * semaphore has reached the number of this sum. */
static char *result_of_step(const am_backward_plan *p, const am_attn_place *at, const am_rows_state *state,
                            ptrdiff_t sum)
{
    const bool whole = p->sums[at->section - p->sections.list].tiles == 1 && sum > state->first,
               fits = p->d_q.stride.channel == p->base.size &&
                      p->base.attn->head_dim % (p->base.arithmetic->panel / 2) == 0;
    if (!whole || !fits || atomic_load_explicit(&state->semaphore, memory_order_acquire) != sum) return NULL;
    return am_token(&p->d_q, at->b, at->head, at->q);
}

/* Takes a block over the tiles of a task. */
static am_status block_step(const am_backward_plan *p, block_walk *walk, const am_backward_workspace *s,
                            am_team *team)
{
    const am_section *section = walk->at->section;
    am_rows_state *state = am_rows_state_of(p, walk->at);
    const am_range tiles = tiles_of(walk->task, section);
    am_status status = AM_OK;
    if (p->lone_blocks && tiles.begin < tiles.end) status = am_begin_rows(p, walk->at, s, team);
    if (tiles.begin < tiles.end) am_begin_logits(&p->base, walk->at, &s->terms);
    for (ptrdiff_t begin = tiles.begin, end; status == AM_OK && begin < tiles.end; begin = end) {
        const ptrdiff_t sum = am_sum_of_tile(p, section, begin),
                        each = p->sums[section - p->sections.list].tiles;
        end = am_min(section->tiles.begin + (sum + 1) * each, tiles.end);
        if (sum < state->first || sum > state->last) continue;
        walk->d_q = result_of_step(p, walk->at, state, sum);
        bool any = sum_tiles(p, walk, (am_range){begin, end}, s, team, &status);
        if (!any && sum == state->first) {
            memset(s->d_q, 0, (size_t)(walk->at->rows * p->k.stride * p->base.size));
            any = true;
        }
        if (status == AM_OK)
            status = add_ordered(p, walk->at, state, sum, any && !walk->d_q ? s->d_q : NULL, team);
    }
    const ptrdiff_t task = (walk->task - p->tasks) % am_max(p->row_tasks, 1);
    return status == AM_OK ? am_bias_end_block(&p->bias, walk->at, task, team) : status;
}

/* Writes zeros as the gradients of keys that no query sees. */
static am_status write_zeros(const am_backward_plan *p, const am_attn_place *at, am_range keys, am_team *team)
{
    enum { PIECE = 1 << 12 }; /* keys between two checkpoints */
    const am_array *const results[] = {&p->problem->d_k, &p->problem->d_v};
    am_status status = AM_OK;
    for (ptrdiff_t k = keys.begin; status == AM_OK && k < keys.end; k++) {
        for (int i = 0; i < 2; i++)
            memset(am_token(results[i], at->b, at->kv_head, k), 0,
                   (size_t)results[i]->shape.channel * am_size_of(results[i]->type));
        if (k % PIECE == 0) status = am_checkpoint(team);
    }
    return status;
}

/* Writes sums of some keys to an array. */
static void write_sums(const am_backward_plan *p, am_array to, const char *sums, am_sum_shape shape,
                       char *scratch)
{
    if (!p->base.arithmetic->by_channel) {
        write_rows(p, &to, sums, shape.stride);
        return;
    }
    for (ptrdiff_t channel = 0; channel < shape.rows; channel += TILE) {
        to.shape.channel = am_min(shape.rows - channel, TILE);
        p->base.all_kernels->copy.transpose_32(scratch, TILE, sums + channel * shape.stride * p->base.size,
                                               shape.stride, to.shape.channel, shape.columns);
        write_rows(p, &to, scratch, TILE);
        to.data += TILE * to.stride.channel;
    }
}

/* Writes the gradients of the keys of a task. */
static am_status write_keys(const am_backward_plan *p, const am_attn_place *at, const am_key_task *task,
                            const am_backward_workspace *s, am_team *team)
{
    ptrdiff_t behind = task->tokens.begin; /* the last tile */
    am_status status = AM_OK;
    for (ptrdiff_t i = 0; status == AM_OK && i < am_length(task->tiles); i++) {
        const am_range keys = am_range_at(&p->sections.tiles, task->tiles.begin + i);
        status = write_zeros(p, at, (am_range){behind, keys.begin}, team);
        const am_key_sums sums = tile_sums(p, &s->total, i);
        if (!s->tiles[i].summed) clear_sums(p, sums, am_length(keys));
        const am_array *d_k = &p->problem->d_k, *d_v = &p->problem->d_v;
        write_sums(p, am_rows_of_keys(d_k, at, keys), sums.d_k, shape_of_d_k(p, am_length(keys)), s->p);
        write_sums(p, am_rows_of_keys(d_v, at, keys), sums.d_v, shape_of_d_v(p, am_length(keys)), s->p);
        behind = keys.end;
    }
    return status == AM_OK ? write_zeros(p, at, (am_range){behind, task->tokens.end}, team) : status;
}

/* Takes a task over some visits of a section, each to a block of one head. */
static am_status visit_blocks(const am_backward_plan *p, const am_key_task *task, const am_section *section,
                              ptrdiff_t kv_head, const follower *then, const am_backward_workspace *s,
                              am_team *team)
{
    /* The last block first: of tasks that begin together, each then waits one step for the one before it,
     * under causal masks and windows, too. The first blocks see no keys of later tasks. */
    const am_range visits = visits_of(p, task, section);
    am_backward_tangents tangents;
    am_status status = AM_OK;
    for (ptrdiff_t i = visits.end; status == AM_OK && i-- > visits.begin;) {
        const am_attn_place rows = place_of_visit(p, section, kv_head, i),
                            next = place_of_visit(p, section, kv_head, am_max(i - 1, 0));
        block_walk walk = {.task = task,
                           .at = &rows,
                           .next = i > 0 ? &next : NULL,
                           .then = then,
                           .visit = i,
                           .tangents = &tangents};
        status = block_step(p, &walk, s, team);
        if (task->splits == 0) end_splits(p, task, section, i, s);
    }
    return status;
}

am_status am_key_task_run(void *arg, ptrdiff_t index, am_team *team)
{
    const am_backward_plan *p = arg;
    const ptrdiff_t heads = p->base.attn->kv_heads;
    const am_key_task *task = &p->tasks[index / heads];
    const am_attn_place at = {.b = index / heads / p->row_tasks, .kv_head = ordered_head(p, index % heads)};
    am_backward_workspace s = *(const am_backward_workspace *)am_workspace(&p->workspaces);
    memset(s.tiles, 0, (size_t)p->task_tiles * sizeof *s.tiles);
    memset(s.d_bias_scratch, 0, (size_t)am_bias_scratch_bytes(&p->bias));
    am_status status = AM_OK;
    if (task->splits > 0) s.total = s.split = sums_of_split(p, at.kv_head, task->slot);
    for (ptrdiff_t g = task->sections.begin; status == AM_OK && g < task->sections.end; g++) {
        const am_section *section = &p->sections.list[g];
        const follower then = follower_of(p, index, g);
        status = visit_blocks(p, task, section, at.kv_head, &then, &s, team);
    }
    if (status != AM_OK) return status;
    if (task->splits > 0) { /* am_add_splits writes the gradients */
        uint32_t *summed = p->splits.summed + at.kv_head * p->splits.slots + task->slot;
        for (ptrdiff_t i = 0; i < am_length(task->tiles); i++) *summed |= (uint32_t)s.tiles[i].open << i;
        return AM_OK;
    }
    status = am_bias_end_task(&p->bias, &at, index / heads % p->row_tasks, &p->sections.tiles, task->tiles,
                              s.d_bias_scratch, team);
    if (status == AM_OK) status = am_end_line_sums(&p->lines, &at, index / heads, s.lines, team);
    if (status == AM_OK) status = write_keys(p, &at, task, &s, team);
    return status;
}

am_status am_add_splits(void *arg, ptrdiff_t index, am_team *team)
{
    const am_backward_plan *p = arg;
    const ptrdiff_t heads = p->base.attn->kv_heads, kv_head = index % heads;
    const am_key_task *task = &p->tasks[index / heads];
    const am_attn_place at = {.b = index / heads / p->row_tasks, .kv_head = kv_head};
    am_backward_workspace s = *(const am_backward_workspace *)am_workspace(&p->workspaces);
    if (task->splits == 0 || task->split > 0) return AM_OK;
    s.total = sums_of_split(p, kv_head, task->slot);
    const uint32_t *summed = p->splits.summed + kv_head * p->splits.slots + task->slot;
    for (ptrdiff_t i = 0; i < am_length(task->tiles); i++) {
        const am_key_sums total = tile_sums(p, &s.total, i);
        const ptrdiff_t keys = am_length(am_range_at(&p->sections.tiles, task->tiles.begin + i));
        bool any = *summed >> i & 1;
        for (ptrdiff_t split = 1; split < task->splits; split++) {
            if (!(summed[split] >> i & 1)) continue;
            const am_key_sums sums = sums_of_split(p, kv_head, task->slot + split);
            add_split(p, !any, total, tile_sums(p, &sums, i), keys);
            any = true;
        }
        s.tiles[i].summed = any;
    }
    return write_keys(p, &at, task, &s, team);
}

/* Converts d_q that was accumulated in another type to the result. */
am_status am_finish_d_q(void *arg, ptrdiff_t index, am_team *team)
{
    const am_backward_plan *p = arg;
    const am_attn_place at = am_backward_block(p, index);
    const am_array to = am_rows_of_block(&p->problem->d_q, &at);
    write_rows(p, &to, am_token(&p->d_q, at.b, at.head, at.q), p->d_q.stride.token / p->base.size);
    return am_checkpoint(team);
}
