/* jvp.c – attention with the tangent of its result, in one pass:
 *
 *     logiṫ = slope of the cap (q̇·k scale + q·k̇ scale + biaṡ)
 *     lsė = Σ p logiṫ,   ouṫ = Σ p logiṫ v + Σ p v̇ - lsė out
 *
 * with p = e^(logit - lse). A task takes a few blocks of up to 64 rows of one head over the tiles that they
 * see. It packs each tile once, and keeps three sums per row, one of them for `out`. How blocks are dealt to
 * tasks changes no sum. Types of 16 bits are computed in float32. */
#include <stdlib.h>
#include <string.h>

#include "core/attention/epilogue.h"
#include "core/attention/plan/schedule.h"
#include "core/runtime/float_mode.h"

enum {
    TILE = AM_FLASH_TILE,
    MOST_BLOCKS = 4,      /* of a task */
    TASK_BYTES = 2 << 20, /* of its blocks, which are read once for each tile */
    TASKS_OF_THREAD = 4,  /* at least, if there are as many blocks */
};

/* Consecutive blocks of a section. */
typedef struct {
    const am_section *section;
    am_range blocks;
} group;

typedef struct {
    am_attn_base base;
    const am_attn_tangents *problem;
    am_sections sections;
    am_sink_sum *sinks;                  /* one for each head; NULL without sinks */
    ptrdiff_t key_dim;                   /* of packed keys: k, and k̇ if it is given */
    ptrdiff_t columns;                   /* of values, in whole half panels */
    ptrdiff_t group_blocks, group_count; /* the most blocks of a group, and the number of groups */
    group *groups;
    am_workspaces workspaces;
} jvp;

/* The memory of a thread. */
typedef struct {
    char *keys, *k, *v, *d_v, *logits, *tangents, *d_bias, *row;
    char *q, *out, *stats; /* of each block */
    am_logit_scratch terms;
} workspace;

/* A block of a task. */
typedef struct {
    am_attn_place at;
    am_range tiles;
    am_logit_scratch terms;
    am_flash_rows rows;
    am_flash_tangents tangents;
} block;

/* From row to row of queries: q times the factor of logits, then q̇ and q times the scale. */
static ptrdiff_t query_stride(const jvp *j) { return 3 * j->base.attn->head_dim; }

static ptrdiff_t out_dim(const jvp *j) { return 2 * j->columns + j->base.arithmetic->panel / 2; }

static ptrdiff_t query_bytes(const jvp *j) { return TILE * query_stride(j) * j->base.size; }
static ptrdiff_t out_bytes(const jvp *j) { return TILE * out_dim(j) * j->base.size; }

static ptrdiff_t lay_out(const void *job, char *memory, void *parts)
{
    const jvp *j = job;
    const am_attn *f = j->base.attn;
    workspace *w = parts;
    const ptrdiff_t size = j->base.size, tile = TILE * TILE * size, panel = j->base.arithmetic->panel,
                    values = TILE * am_ceil_div(f->value_dim, panel) * panel * size,
                    words = AM_FLASH_ROWS * (ptrdiff_t)sizeof(uint64_t), blocks = j->group_blocks;
    ptrdiff_t used = 0;
    w->q = am_take(memory, &used, blocks * query_bytes(j));
    w->keys = am_take(memory, &used, TILE * j->key_dim * size);
    w->k = am_take(memory, &used, TILE * j->key_dim * size);
    w->v = am_take(memory, &used, values);
    w->d_v = am_take(memory, &used, j->problem->d_v.data ? values : 0);
    w->out = am_take(memory, &used, blocks * out_bytes(j));
    w->stats = am_take(memory, &used, blocks * 2 * TILE * size);
    w->logits = am_take(memory, &used, tile);
    w->tangents = am_take(memory, &used, tile);
    w->d_bias = am_take(memory, &used, j->problem->d_bias.data ? tile : 0);
    w->terms.bias = am_take(memory, &used, am_adds_to_products(&j->base.terms) ? tile : 0);
    w->row = w->terms.row =
        am_take(memory, &used, am_row_scratch(TILE, am_max(am_max(f->head_dim, f->value_dim), TILE)));
    w->terms.live = (uint64_t *)am_take(memory, &used, words);
    w->terms.kept = (uint64_t *)am_take(memory, &used, words);
    w->terms.row_keys = (uint64_t *)am_take(memory, &used, blocks * words);
    return used;
}

/* Copies the rows of a block of queries or of their tangents, times a factor. */
static void load_rows(const jvp *j, const block *x, const am_array *from, double factor, ptrdiff_t part,
                      const workspace *w)
{
    const am_attn_base *base = &j->base;
    const ptrdiff_t dim = base->attn->head_dim;
    const am_array of_block = am_rows_of_block(from, &x->at);
    const am_rows rows = am_read_wide(base, &of_block, w->row);
    char *to = (char *)x->rows.q + part * dim * base->size;
    for (ptrdiff_t r = 0; r < x->at.rows; r++, to += query_stride(j) * base->size)
        base->arithmetic->numbers[base->type].write(to, (const char *)rows.data + r * rows.stride, factor,
                                                    dim);
}

/* Packs keys side by side with their tangents. */
static am_rows pack_keys(const jvp *j, const am_attn_place *at, am_range keys, const workspace *w)
{
    const am_attn_base *base = &j->base;
    const am_array *const parts[] = {&base->attn->k, &j->problem->d_k};
    const ptrdiff_t row = base->attn->head_dim * base->size, stride = j->key_dim * base->size;
    for (int i = 0; i < 2 && parts[i]->data; i++) {
        const am_array from = am_rows_of_keys(parts[i], at, keys);
        const am_rows rows = am_read_wide(base, &from, w->row);
        for (ptrdiff_t k = 0; k < am_length(keys); k++)
            memcpy(w->keys + k * stride + i * row, (const char *)rows.data + k * rows.stride, (size_t)row);
    }
    const am_rows rows = {.data = w->keys, .stride = stride};
    am_kv_own(base)->pack_keys(w->k, &rows, am_length(keys), j->key_dim, 1, NULL);
    return (am_rows){.data = w->k};
}

/* Packs values, or their tangents; returns whether all are finite. */
static bool pack_values(const jvp *j, const am_attn_place *at, am_range keys, const am_array *from, char *to,
                        const workspace *w)
{
    const am_array rows = am_rows_of_keys(from, at, keys);
    const am_rows read = am_read_wide(&j->base, &rows, w->row);
    return am_kv_own(&j->base)->pack_values(to, &read, am_length(keys), j->base.attn->value_dim, NULL);
}

static am_flash_rows rows_of(const jvp *j, ptrdiff_t rows, ptrdiff_t i, const workspace *w)
{
    const am_attn_base *base = &j->base;
    char *stats = w->stats + i * 2 * TILE * base->size;
    return (am_flash_rows){.rows = rows,
                           .head_dim = base->attn->head_dim,
                           .out_dim = out_dim(j),
                           .q = w->q + i * query_bytes(j),
                           .q_stride = query_stride(j),
                           .out = w->out + i * out_bytes(j),
                           .running_max = stats,
                           .sum = stats + TILE * base->size,
                           .logits = w->logits,
                           .cap = am_cap_of(&base->terms),
                           .factor = 1,
                           .unit = base->unit};
}

/* Which rows are multiplied by which channels of keys for tangents of logits. */
static am_flash_tangents tangents_of(const jvp *j, const am_flash_rows *rows, const workspace *w)
{
    const ptrdiff_t dim = j->base.attn->head_dim;
    const bool q = j->problem->d_q.data, k = j->problem->d_k.data;
    return (am_flash_tangents){.q = (const char *)rows->q + (q ? 1 : 2) * dim * j->base.size,
                               .first = q ? 0 : dim,
                               .length = (q + k) * dim,
                               .key_dim = j->key_dim,
                               .v = j->problem->d_v.data ? w->d_v : NULL,
                               .bias = j->problem->d_bias.data ? w->d_bias : NULL,
                               .logits = w->tangents,
                               .columns = j->columns};
}

/* Begins the i-th block of a task. */
static void begin_block(const jvp *j, const group *g, ptrdiff_t head, ptrdiff_t i, const workspace *w,
                        block *x)
{
    const am_attn_base *base = &j->base;
    const am_attn *f = base->attn;
    x->at = am_place_of(base, &j->sections, g->section, g->blocks.begin + i, head, 1);
    x->tiles = am_block_tiles(base, &j->sections, &x->at);
    x->terms = w->terms;
    x->terms.row_keys += i * AM_FLASH_ROWS;
    x->rows = rows_of(j, x->at.rows, i, w);
    x->tangents = tangents_of(j, &x->rows, w);
    load_rows(j, x, &f->q, f->scale * AM_LOG2_E / base->unit, 0, w);
    if (j->problem->d_q.data) load_rows(j, x, &j->problem->d_q, f->scale, 1, w);
    if (j->problem->d_k.data) load_rows(j, x, &f->q, f->scale, 2, w);
    am_clear_rows(base, &x->rows);
    am_begin_logits(base, &x->at, &x->terms);
}

/* Reads the tangent of the bias of a block and some keys. */
static void read_d_bias(const jvp *j, const am_attn_place *at, am_range keys, char *to)
{
    const am_array *bias = &j->problem->d_bias;
    const ptrdiff_t stride = bias->stride.channel,
                    b = at->b / am_bias_sharers(j->base.attn, j->base.terms.bias);
    for (ptrdiff_t r = 0; r < at->rows; r++, to += TILE * j->base.size) {
        const char *row = am_token(bias, b, at->head, at->q + r) + keys.begin * stride;
        const am_array numbers = am_one_row(row, bias->type, stride, am_length(keys));
        am_copy_rows(j->base.all_kernels, AM_GATHER, &numbers, j->base.type, to, TILE);
    }
}

/* Takes all blocks that see it over a tile. */
static am_status take_tile(const jvp *j, block *blocks, ptrdiff_t count, ptrdiff_t index, const workspace *w,
                           am_team *team)
{
    const am_attn_tangents *problem = j->problem;
    const am_range keys = am_range_at(&j->sections.tiles, index);
    am_flash_tile tile = {.layout = AM_PACKED, .keys = am_length(keys), .v = {.data = w->v}};
    bool packed = false, d_v_finite = false;
    am_status status = AM_OK;
    for (block *x = blocks; status == AM_OK && x < blocks + count; x++) {
        if (index < x->tiles.begin || index >= x->tiles.end ||
            !am_find_logit_terms(&j->base, &x->at, keys, &x->terms, &tile.terms))
            continue;
        if (!packed) {
            tile.k = pack_keys(j, &x->at, keys, w);
            tile.finite = pack_values(j, &x->at, keys, &problem->forward.v, w->v, w);
            if (problem->d_v.data) d_v_finite = pack_values(j, &x->at, keys, &problem->d_v, w->d_v, w);
            packed = true;
        }
        x->tangents.v_finite = d_v_finite;
        if (problem->d_bias.data) read_d_bias(j, &x->at, keys, w->d_bias);
        j->base.arithmetic->tangent_step(&x->rows, &tile, &x->tangents);
        status = am_checkpoint(team);
    }
    return status;
}

static am_status blocks_task(void *arg, ptrdiff_t index, am_team *team)
{
    const jvp *j = arg;
    const workspace *w = am_workspace(&j->workspaces);
    const group *g = &j->groups[index / j->base.attn->heads];
    const ptrdiff_t head = index % j->base.attn->heads, count = am_length(g->blocks);
    block blocks[MOST_BLOCKS];
    am_range tiles = {PTRDIFF_MAX, 0};
    for (ptrdiff_t i = 0; i < count; i++) {
        begin_block(j, g, head, i, w, &blocks[i]);
        if (am_length(blocks[i].tiles) <= 0) continue;
        tiles.begin = am_min(tiles.begin, blocks[i].tiles.begin);
        tiles.end = am_max(tiles.end, blocks[i].tiles.end);
    }
    am_status status = AM_OK;
    for (ptrdiff_t i = tiles.begin; status == AM_OK && i < tiles.end; i++)
        status = take_tile(j, blocks, count, i, w, team);
    for (block *x = blocks; status == AM_OK && x < blocks + count; x++) {
        if (j->base.attn->out.data) am_write_rows(&j->base, j->sinks, &x->at, &x->rows, w->row);
        am_write_tangents(&j->base, j->problem, j->sinks, &x->at, &x->rows, j->columns, w->row);
    }
    return status;
}

/* Divides the blocks of each section into groups: fewer of more blocks where threads have enough. */
static am_status make_groups(jvp *j, int threads)
{
    const ptrdiff_t blocks = j->sections.blocks.count, wanted = am_product(threads, TASKS_OF_THREAD, 1),
                    bytes = query_bytes(j) + out_bytes(j);
    j->group_blocks = am_min(am_product(blocks, j->base.attn->heads, 1) / wanted, TASK_BYTES / bytes);
    j->group_blocks = am_max(1, am_min(j->group_blocks, MOST_BLOCKS));
    j->groups = malloc((size_t)am_max(am_product(blocks, sizeof *j->groups, 1), 1));
    if (!j->groups) return AM_NO_MEMORY;
    for (ptrdiff_t i = 0; i < j->sections.count; i++) {
        const am_section *section = &j->sections.list[i];
        for (ptrdiff_t begin = section->blocks.begin, end; begin < section->blocks.end; begin = end) {
            end = am_min(begin + j->group_blocks, section->blocks.end);
            j->groups[j->group_count++] = (group){section, {begin, end}};
        }
    }
    return AM_OK;
}

static am_status compute(const am_context *context, jvp *j)
{
    const am_attn *f = j->base.attn;
    am_status status = am_sections_make(&j->sections, f->mask, true);
    am_context own = *context; /* it takes three times as long as forward */
    if (status == AM_OK) own.threads = am_threads_for(context, 3 * am_time_alone(f, &j->sections));
    if (status == AM_OK) status = am_sum_sinks(&own, &j->base, &j->sinks);
    if (status == AM_OK) status = make_groups(j, own.threads);
    if (status == AM_OK)
        status = am_workspaces_make(&j->workspaces, own.threads, lay_out, j, sizeof(workspace));
    if (status == AM_OK) status = am_parallel(&own, j->group_count * f->heads, 1, blocks_task, j);
    am_workspaces_free(&j->workspaces);
    am_sections_free(&j->sections);
    free(j->groups);
    free(j->sinks);
    return status;
}

am_status am_attn_prepared_jvp(const am_context *context, const am_attn_tangents *problem)
{
    const am_attn *f = &problem->forward;
    if (f->batch == 0 || f->heads == 0 || f->queries == 0) return AM_OK;
    if (am_is_too_deep(f)) return AM_NO_MEMORY;
    if (context->kernels->plain) return am_plain_jvp(context, problem);
    const am_attn_base base = am_attn_base_wide(context, f);
    const ptrdiff_t half_panel = base.arithmetic->panel / 2;
    jvp j = {.base = base,
             .problem = problem,
             .key_dim = f->head_dim * (problem->d_k.data ? 2 : 1),
             .columns = am_ceil_div(f->value_dim, half_panel) * half_panel};
    const am_float_mode mode = am_float_mode_get();
    am_float_mode_set(am_float_mode_flushing(mode));
    const am_status status = compute(context, &j);
    am_float_mode_set(mode);
    return status;
}

am_status am_attn_jvp(const am_context *context, const am_attn_tangents *problem)
{
    const am_status status = am_mask_prepare(context, problem->forward.mask);
    return status == AM_OK ? am_attn_prepared_jvp(context, problem) : status;
}
