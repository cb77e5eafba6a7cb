/* weights.c – the weights of chosen queries, and their statistics. Both need the logsumexp of each row, which
 * a pass of its own finds unless the caller gives it. Weights exist one tile at a time, unless they are the
 * result.
 *
 * Results of a query are found by tasks of a few blocks of one head. Such a task goes over the tiles that its
 * blocks see. The sum of a key over all queries is found by tasks of a few tiles of one key head. Such a task
 * goes over the blocks that see its tiles, in order, so the number of threads changes no bit. Types of 16
 * bits and quantized ones are computed in float32.
 *
 * In sections of few queries, attention forward itself computes these sums and the logsumexp, without values:
 * it reads the keys where they lie. */
#include <stdlib.h>
#include <string.h>

#include "core/attention/epilogue.h"
#include "core/attention/forward.h"
#include "core/attention/tiles/tiles.h"
#include "core/runtime/float_mode.h"

enum {
    TILE = AM_FLASH_TILE,
    MOST = 8, /* blocks or tiles of a task: what it loads or packs for itself serves all of them */
    TASKS_OF_A_THREAD = 4, /* of several threads, or tasks have fewer */
};

/* The chosen queries of a block, from the first to the last. */
typedef struct {
    const am_section *section;
    ptrdiff_t block;
    am_range chosen; /* indices of chosen queries */
} part;

typedef struct {
    am_attn_base base;
    const am_attn_weights *problem;
    am_sections sections, few; /* few: those of so few queries that keys are read where they lie */
    bool *is_few;              /* whether a section is one of these */
    am_schedule unplanned;     /* as tiles ask for them, where each is packed for itself */
    am_scheduled packing;
    am_kv kv;
    part *parts;
    am_range *of_sections; /* the parts of each section */
    ptrdiff_t count;       /* of parts */
    struct {
        const am_section *section;
        am_range range; /* of parts, or of tiles */
    } *tasks;
    ptrdiff_t task_count;
    ptrdiff_t some; /* the most blocks of a task, and the most tiles whose packed keys and sums it keeps */
    ptrdiff_t tile_tasks; /* tasks of the tiles of a section whose blocks go together */
    ptrdiff_t heads;      /* of a block: those that share a key head where all their rows fit, else 1 */
    ptrdiff_t q_stride;   /* of rows, in whole panels */
    ptrdiff_t ranks;      /* the most keys that may be among the greatest */
    ptrdiff_t top_bytes;  /* of the greatest weights of a row, or their keys */
    bool finds_lse;       /* this pass does */
    am_sink_sum *sinks;   /* one for each head; NULL without sinks */
    am_workspaces workspaces;
} weighing;

/* The memory of a thread. */
typedef struct {
    char *q, *k, *base, *highest, *entropy, *share; /* of some blocks or tiles */
    char *sums, *p;
    char *top_weights, *top_keys; /* as rank_keys has them, for each row */
    am_logit_scratch terms;
    am_kv_workspace kv;
} workspace;

/* A part on its way over tiles. */
typedef struct {
    am_attn_place at;
    am_range tiles, chosen;
    am_logit_scratch terms;
    am_backward_rows rows;
    am_weighed weighed;
    char *top_weights, *top_keys; /* as rank_keys has them, for each row */
} walk;

static ptrdiff_t lay_out(const void *job, char *memory, void *parts)
{
    const weighing *j = job;
    workspace *w = parts;
    const ptrdiff_t size = j->base.size, rows = TILE * size,
                    words = AM_FLASH_ROWS * (ptrdiff_t)sizeof(uint64_t);
    ptrdiff_t used = 0;
    w->q = am_take(memory, &used, j->some * TILE * j->q_stride * size);
    w->k = am_take(memory, &used, j->some * TILE * j->base.attn->head_dim * size);
    w->base = am_take(memory, &used, j->some * rows);
    w->highest = am_take(memory, &used, j->some * rows);
    w->entropy = am_take(memory, &used, j->some * rows);
    w->share = am_take(memory, &used, j->some * rows);
    w->sums = am_take(memory, &used, j->some * rows * (j->problem->by_key_head ? 1 : j->base.heads_per_kv));
    w->p = am_take(memory, &used, TILE * rows);
    w->top_weights = am_take(memory, &used, j->some * TILE * j->top_bytes);
    w->top_keys = am_take(memory, &used, j->some * TILE * j->top_bytes);
    am_kv_workspace_take(&j->kv, memory, &used, &w->kv);
    w->kv.section = &j->packing;
    w->terms.row = w->kv.row;
    w->terms.bias = am_take(memory, &used, am_adds_to_products(&j->base.terms) ? TILE * rows : 0);
    w->terms.live = (uint64_t *)am_take(memory, &used, words);
    w->terms.kept = (uint64_t *)am_take(memory, &used, words);
    w->terms.row_keys = (uint64_t *)am_take(memory, &used, j->some * words);
    return used;
}

/* True if one task can take all blocks that see a key head. */
static bool go_together(const weighing *j, am_range parts)
{
    return am_length(parts) * (j->base.heads_per_kv / j->heads) <= j->some;
}

/* The row of a chosen query of the h-th head of a block. */
static ptrdiff_t row_of(const weighing *j, const walk *x, ptrdiff_t h, ptrdiff_t chosen)
{
    return h * x->at.queries + j->problem->queries[chosen] - x->at.q;
}

/* Sets what is known of the rows of a block before any tile. */
static void begin_rows(const weighing *j, walk *x)
{
    const am_attn_base *base = &j->base;
    for (ptrdiff_t r = 0; r < x->at.rows; r++) {
        am_set_number(base, x->weighed.highest, r, -INFINITY);
        am_set_number(base, x->weighed.entropy, r, 0);
        if (j->finds_lse) am_set_number(base, x->rows.share, r, 0);
    }
    for (ptrdiff_t h = 0; h < x->at.heads; h++) {
        for (ptrdiff_t c = x->chosen.begin; c < x->chosen.end; c++) {
            const ptrdiff_t r = row_of(j, x, h, c);
            x->weighed.rows |= (uint64_t)1 << r;
            if (j->finds_lse) continue;
            const double lse = am_number(base, am_token(&j->problem->lse, x->at.b, x->at.head + h, c), 0);
            am_set_number(base, x->rows.base, r, lse == -INFINITY ? 0 : lse * AM_LOG2_E / base->unit);
        }
    }
    for (ptrdiff_t r = 0; j->problem->top_keys && r < x->at.rows; r++) {
        char *weights = x->top_weights + r * j->top_bytes;
        for (ptrdiff_t t = 0; t < j->top_bytes / base->size; t++) am_set_number(base, weights, t, -1);
        memset(x->top_keys + r * j->top_bytes, 0, (size_t)j->top_bytes);
    }
}

static void load_queries(const weighing *j, const walk *x, char *to, char *scratch)
{
    const am_attn_base *base = &j->base;
    const am_attn *f = base->attn;
    char *const first = to;
    for (ptrdiff_t h = 0; h < x->at.heads; h++) {
        const am_array rows =
            am_rows_from(&f->q, am_token(&f->q, x->at.b, x->at.head + h, x->at.q), x->at.queries);
        const am_rows read = am_read_wide(base, &rows, scratch);
        for (ptrdiff_t r = 0; r < x->at.queries; r++, to += j->q_stride * base->size)
            base->arithmetic->numbers[base->type].write(to, (const char *)read.data + r * read.stride,
                                                        f->scale * AM_LOG2_E / base->unit, f->head_dim);
    }
    if (f->k_scales.by_channel)
        am_scale_channels(&f->k_scales, x->at.kv_head, (float *)first, x->at.rows, f->head_dim, j->q_stride);
}

/* Begins a part for some heads: its queries, and the logsumexp of its rows unless that is to be found. */
static void begin_part(const weighing *j, const part *from, ptrdiff_t head, ptrdiff_t i, const workspace *w,
                       walk *x)
{
    const am_attn_base *base = &j->base;
    const int64_t *chosen = j->problem->queries;
    const ptrdiff_t rows = TILE * base->size;
    char *q = w->q + i * j->q_stride * rows, *highest = w->highest + i * rows,
         *entropy = w->entropy + i * rows;
    *x = (walk){.at = am_place_of(base, &j->sections, from->section, from->block, head, j->heads),
                .chosen = from->chosen,
                .terms = w->terms,
                .weighed = {.highest = highest, .entropy = entropy},
                .top_weights = w->top_weights + i * TILE * j->top_bytes,
                .top_keys = w->top_keys + i * TILE * j->top_bytes};
    x->tiles = am_block_tiles(base, &j->sections, &x->at);
    x->terms.row_keys += i * AM_FLASH_ROWS;
    x->at.q = chosen[from->chosen.begin];
    x->at.queries = chosen[from->chosen.end - 1] + 1 - x->at.q;
    x->at.rows = x->at.queries * j->heads;
    x->rows = (am_backward_rows){.rows = x->at.rows,
                                 .q = {.dim = base->attn->head_dim, .stride = j->q_stride, .lanes = q},
                                 .base = j->finds_lse ? highest : w->base + i * rows,
                                 .rest = entropy,
                                 .share = j->finds_lse ? w->share + i * rows : NULL,
                                 .p = w->p,
                                 .factor = 1,
                                 .cap = am_cap_of(&base->terms),
                                 .unit = base->unit};
    load_queries(j, x, q, w->kv.row);
    begin_rows(j, x);
    am_begin_logits(base, &x->at, &x->terms);
}

/* Takes what a tile tells of a row. */
static void take_row(const weighing *j, const walk *x, const am_backward_tile *tile, am_range keys,
                     ptrdiff_t r, ptrdiff_t result)
{
    const am_attn_weights *problem = j->problem;
    const ptrdiff_t size = j->base.size, count = am_length(keys), ranks = r * j->top_bytes;
    const char *p = (const char *)x->rows.p + r * TILE * size;
    const uint64_t all = count == TILE ? UINT64_MAX : ((uint64_t)1 << count) - 1,
                   live = tile->terms.live ? tile->terms.live[r] : all;
    if (problem->weights)
        memcpy((char *)problem->weights + (result * j->base.attn->keys + keys.begin) * size, p,
               (size_t)(count * size));
    if (problem->top_keys)
        j->base.arithmetic->rank_keys(p, live & all, keys.begin, x->top_weights + ranks, x->top_keys + ranks,
                                      j->ranks);
}

/* Writes the results of a row. */
static void end_row(const weighing *j, const walk *x, ptrdiff_t r, ptrdiff_t result)
{
    const am_attn_weights *problem = j->problem;
    const am_attn_base *base = &j->base;
    const double unit = base->unit * AM_LN_2;
    if (problem->entropy)
        am_set_number(base, problem->entropy, result, am_number(base, x->weighed.entropy, r) * unit);
    if (problem->max_logit)
        am_set_number(base, problem->max_logit, result, am_number(base, x->weighed.highest, r) * unit);
    const char *weights = x->top_weights + r * j->top_bytes, *keys = x->top_keys + r * j->top_bytes;
    for (ptrdiff_t i = 0; problem->top_keys && i < problem->top; i++) {
        const ptrdiff_t at = result * problem->top + i;
        const double weight = i < j->ranks ? am_number(base, weights, i) : -1;
        int64_t *key = &problem->top_keys[at];
        *key = -1;
        if (weight >= 0) *key = base->size == 8 ? ((const int64_t *)keys)[i] : ((const int32_t *)keys)[i];
        am_set_number(base, problem->top_weights, at, fmax(weight, 0));
    }
}

/* Writes the logsumexp of a row, from its greatest logit and the sum of powers relative to that. Sinks enter
 * here. */
static void end_lse(const weighing *j, const walk *x, ptrdiff_t r, ptrdiff_t head, char *to)
{
    const am_attn_base *base = &j->base;
    const am_sink_sum *sinks = j->sinks ? &j->sinks[head] : NULL;
    const double own = am_number(base, x->weighed.highest, r) * base->unit * AM_LN_2;
    double sum = am_number(base, x->weighed.entropy, r), highest = own;
    if (sinks) {
        highest = fmax(own, sinks->highest);
        sum = sum * am_power(AM_LOG2_E, own, highest) +
              sinks->sum * am_power(AM_LOG2_E, sinks->highest, highest);
    }
    am_set_number(base, to, 0, sum == 0 ? -INFINITY : highest + log(sum));
}

/* Takes a tile, or ends if that is NULL, for all chosen queries of a part. */
static void take_rows(const weighing *j, const walk *x, const am_backward_tile *tile, am_range keys)
{
    for (ptrdiff_t h = 0; h < x->at.heads; h++) {
        for (ptrdiff_t c = x->chosen.begin; c < x->chosen.end; c++) {
            const ptrdiff_t r = row_of(j, x, h, c), head = x->at.head + h,
                            result = am_weights_row(j->problem, x->at.b, head, c);
            if (tile)
                take_row(j, x, tile, keys, r, result);
            else if (j->finds_lse)
                end_lse(j, x, r, head, am_token(&j->problem->lse, x->at.b, head, c));
            else
                end_row(j, x, r, result);
        }
    }
}

/* Packs the keys of a tile, and plans to prefetch those of the tile after it, up to `end`. */
static void pack_keys(const am_kv_workspace *kv, const am_attn_place *at, ptrdiff_t index, ptrdiff_t end,
                      char *to, am_backward_tile *tile, am_prefetch_plan *plan)
{
    am_kv_pack_keys(kv, at, index, to);
    if (index + 1 == end) return;
    am_plan_begin(plan, 1);
    am_kv_prefetch_keys(kv, at, index + 1, plan);
    tile->prefetch = plan;
}

/* How many query heads a sum is of. */
static ptrdiff_t heads_of_a_sum(const weighing *j)
{
    return j->problem->by_key_head ? j->base.heads_per_kv : 1;
}

/* The sums of a tile for the h-th of the query heads that share a key head. */
static char *sum_at(const weighing *j, const workspace *w, ptrdiff_t h, ptrdiff_t slot)
{
    return w->sums + (h / heads_of_a_sum(j) * j->some + slot) * TILE * j->base.size;
}

static void add_sums(const weighing *j, const walk *x, const workspace *w, ptrdiff_t slot)
{
    const ptrdiff_t each = j->problem->by_key_head ? x->at.rows : x->at.queries,
                    head = x->at.head % j->base.heads_per_kv;
    for (ptrdiff_t r = 0; r < x->at.rows; r += each)
        j->base.arithmetic->sum_weights(x->rows.p, NULL, x->weighed.rows, r, r + each,
                                        sum_at(j, w, head + r / x->at.queries, slot));
}

/* Blocks on their way over the same tiles. */
typedef struct {
    walk list[MOST];
    ptrdiff_t count;
    am_range tiles;
    bool packed[MOST]; /* whether the keys of the tile in a slot are */
    bool summed;       /* weights are added to sums */
} walks;

/* Takes blocks over a tile. The first one that sees it packs its keys. */
static am_status take_tile(const weighing *j, walks *of, ptrdiff_t t, ptrdiff_t slot, const workspace *w,
                           am_team *team)
{
    const am_range keys = am_range_at(&j->sections.tiles, t);
    char *k = w->k + slot * TILE * j->base.attn->head_dim * j->base.size;
    am_backward_tile tile = {.k_columns = k, .columns = am_length(keys)};
    am_prefetch_plan prefetch;
    am_status status = AM_OK;
    for (walk *x = of->list; status == AM_OK && x < of->list + of->count; x++) {
        if (t < x->tiles.begin || t >= x->tiles.end ||
            !am_find_logit_terms(&j->base, &x->at, keys, &x->terms, &tile.terms))
            continue;
        if (!of->packed[slot]) pack_keys(&w->kv, &x->at, t, of->tiles.end, k, &tile, &prefetch);
        of->packed[slot] = true;
        if (j->finds_lse)
            j->base.arithmetic->find_row_max(&x->rows, &tile);
        else
            j->base.arithmetic->find_weights(&x->rows, &tile, &x->weighed);
        if (of->summed)
            add_sums(j, x, w, slot);
        else if (!j->finds_lse)
            take_rows(j, x, &tile, keys);
        status = am_checkpoint(team);
    }
    return status;
}

/* Finds what belongs to the queries of a few parts and the heads of a block, or their logsumexp. */
static am_status queries_task(void *arg, ptrdiff_t index, am_team *team)
{
    const weighing *j = arg;
    const workspace *w = am_workspace(&j->workspaces);
    const ptrdiff_t blocks = j->base.attn->heads / j->heads, head = index % blocks * j->heads;
    const am_range range = j->tasks[index / blocks].range;
    walks of = {.count = am_length(range), .tiles = {PTRDIFF_MAX, 0}};
    am_status status = AM_OK;
    for (ptrdiff_t i = 0; i < of.count; i++) {
        walk *x = &of.list[i];
        begin_part(j, &j->parts[range.begin + i], head, i, w, x);
        if (am_length(x->tiles) <= 0) continue;
        of.tiles.begin = am_min(of.tiles.begin, x->tiles.begin);
        of.tiles.end = am_max(of.tiles.end, x->tiles.end);
    }
    for (ptrdiff_t t = of.tiles.begin; status == AM_OK && t < of.tiles.end; t++) {
        of.packed[0] = false;
        status = take_tile(j, &of, t, 0, w, team);
    }
    for (ptrdiff_t i = 0; status == AM_OK && i < of.count; i++)
        take_rows(j, &of.list[i], NULL, (am_range){0, 0});
    return status;
}

/* Writes the sums of a tile, and clears them for another. */
static void write_sums(const weighing *j, const am_section *section, ptrdiff_t kv_head, ptrdiff_t t,
                       ptrdiff_t slot, const workspace *w)
{
    const am_range keys = am_range_at(&j->sections.tiles, t);
    const ptrdiff_t shared = j->base.heads_per_kv, size = j->base.size;
    for (ptrdiff_t h = 0; h < shared; h += heads_of_a_sum(j)) {
        const ptrdiff_t to = am_weights_sums(j->problem, section->b, kv_head * shared + h);
        char *from = sum_at(j, w, h, slot);
        memcpy((char *)j->problem->key_sum + (to + keys.begin) * size, from,
               (size_t)(am_length(keys) * size));
        memset(from, 0, (size_t)(TILE * size));
    }
}

/* Adds up the weights of each key, for some tiles of one key head. If all its blocks go together, a tile is
 * finished before the next begins, and only one is kept. */
static am_status keys_task(void *arg, ptrdiff_t index, am_team *team)
{
    const weighing *j = arg;
    const workspace *w = am_workspace(&j->workspaces);
    const ptrdiff_t kv_heads = j->base.attn->kv_heads, kv_head = index % kv_heads,
                    shared = j->base.heads_per_kv, blocks = shared / j->heads;
    const am_section *section = j->tasks[index / kv_heads].section;
    const am_range parts = j->of_sections[section - j->sections.list];
    const bool together = go_together(j, parts);
    const ptrdiff_t all = am_length(parts) * blocks;
    walks of = {.tiles = j->tasks[index / kv_heads].range, .summed = true};
    am_status status = AM_OK;
    memset(w->sums, 0, (size_t)(shared / heads_of_a_sum(j) * j->some * TILE * j->base.size));
    for (ptrdiff_t i = 0; status == AM_OK && i < all; i += of.count) {
        of.count = am_min(all - i, j->some);
        for (ptrdiff_t n = 0; n < of.count; n++) {
            walk *x = &of.list[n];
            begin_part(j, &j->parts[parts.begin + (i + n) / blocks],
                       kv_head * shared + (i + n) % blocks * j->heads, n, w, x);
            x->weighed.highest = x->weighed.entropy = NULL;
        }
        for (ptrdiff_t t = of.tiles.begin; status == AM_OK && t < of.tiles.end; t++) {
            if (together) of.packed[0] = false;
            status = take_tile(j, &of, t, together ? 0 : t - of.tiles.begin, w, team);
            if (together) write_sums(j, section, kv_head, t, 0, w);
        }
    }
    for (ptrdiff_t t = of.tiles.begin; !together && t < of.tiles.end; t++)
        write_sums(j, section, kv_head, t, t - of.tiles.begin, w);
    return status;
}

/* --- Sections of few queries --- */

/* The chosen queries from `begin` to `end` - 1. */
static am_range chosen_between(const weighing *j, ptrdiff_t begin, ptrdiff_t end)
{
    const int64_t *chosen = j->problem->queries;
    ptrdiff_t low = 0, high = j->problem->count; /* the first that is not before them */
    while (low < high) {
        const ptrdiff_t middle = low + (high - low) / 2;
        if (chosen[middle] < begin)
            low = middle + 1;
        else
            high = middle;
    }
    for (high = low; high < j->problem->count && chosen[high] < end;) high++;
    return (am_range){low, high};
}

/* Weights are relative to the logsumexp; those of queries that are not chosen are 0. */
static void begin_few(void *arg, const am_attn_place *at, const am_flash_rows *rows)
{
    const weighing *j = arg;
    const am_range chosen = chosen_between(j, at->q, at->q + at->queries);
    for (ptrdiff_t r = 0; r < rows->rows; r++) am_set_number(&j->base, rows->running_max, r, INFINITY);
    for (ptrdiff_t h = 0; h < at->heads; h++) {
        for (ptrdiff_t c = chosen.begin; c < chosen.end; c++) {
            const ptrdiff_t r = h * at->queries + j->problem->queries[c] - at->q;
            const double lse = am_number(&j->base, am_token(&j->problem->lse, at->b, at->head + h, c), 0);
            if (lse > -INFINITY || isnan(lse))
                am_set_number(&j->base, rows->running_max, r, lse * AM_LOG2_E / j->base.unit);
        }
    }
}

static void take_few(void *arg, const am_attn_place *at, am_range keys, const am_flash_rows *rows,
                     const uint64_t *live)
{
    const weighing *j = arg;
    const ptrdiff_t size = j->base.size, each = j->problem->by_key_head ? at->rows : at->queries;
    _Alignas(AM_LINE) double sums[TILE];
    for (ptrdiff_t r = 0; r < at->rows; r += each) {
        const ptrdiff_t index = am_weights_sums(j->problem, at->b, at->head + r / at->queries) + keys.begin;
        char *result = (char *)j->problem->key_sum + index * size; /* cleared by `clear` */
        const bool whole = am_length(keys) == TILE;
        void *to = whole ? (void *)result : memset(sums, 0, (size_t)(TILE * size));
        j->base.arithmetic->sum_weights(rows->logits, live, UINT64_MAX, r, r + each, to);
        if (!whole) memcpy(result, sums, (size_t)(am_length(keys) * size));
        /* the sums of the next tile */
        for (ptrdiff_t i = 0; i < TILE * size; i += AM_LINE) __builtin_prefetch(result + TILE * size + i, 1);
    }
}

/* Finds the logsumexp of all their queries, and keeps that of the chosen ones. */
static am_status find_few_lse(const am_context *context, const weighing *j)
{
    am_attn attn = *j->base.attn;
    am_attn_base base = j->base;
    const ptrdiff_t row = attn.queries * base.size, bytes = am_product(attn.batch, attn.heads, row);
    char *all = malloc((size_t)bytes);
    if (!all) return AM_NO_MEMORY;
    base.attn = &attn;
    attn.lse = (am_array){.data = all,
                          .type = base.type,
                          .stride = {.batch = attn.heads * row, .head = row, .token = base.size}};
    const am_status status = am_attn_forward_sections(context, &base, &j->few, NULL);
    for (const am_section *s = j->few.list; status == AM_OK && s < j->few.list + j->few.count; s++) {
        const am_range chosen = chosen_between(j, s->queries.begin, s->queries.end);
        for (ptrdiff_t h = 0; h < attn.heads; h++) {
            for (ptrdiff_t c = chosen.begin; c < chosen.end; c++)
                memcpy(am_token(&j->problem->lse, s->b, h, c),
                       am_token(&attn.lse, s->b, h, j->problem->queries[c]), (size_t)base.size);
        }
    }
    free(all);
    return status;
}

/* --- Tasks --- */

/* Lists the sections of few queries. */
static void list_few(weighing *j)
{
    for (ptrdiff_t g = 0; g < j->sections.count; g++) {
        const am_section *section = &j->sections.list[g];
        j->is_few[g] = am_reads_unpacked(&j->base, &j->sections, section);
        if (j->is_few[g]) j->few.list[j->few.count++] = *section;
    }
}

/* Lists the blocks that have a chosen query. */
static void list_parts(weighing *j)
{
    const int64_t *chosen = j->problem->queries;
    ptrdiff_t most = 0; /* queries of a block */
    for (ptrdiff_t g = 0; g < j->sections.count; g++) {
        const am_section *section = &j->sections.list[g];
        j->of_sections[g].begin = j->count;
        for (ptrdiff_t block = section->blocks.begin; block < section->blocks.end; block++) {
            const am_range queries = am_range_at(&j->sections.blocks, block);
            const part found = {
                .section = section, .block = block, .chosen = chosen_between(j, queries.begin, queries.end)};
            if (am_length(found.chosen) == 0) continue;
            j->parts[j->count++] = found;
            most = am_max(most, chosen[found.chosen.end - 1] + 1 - chosen[found.chosen.begin]);
        }
        j->of_sections[g].end = j->count;
    }
    j->heads = most * j->base.heads_per_kv <= AM_FLASH_ROWS ? j->base.heads_per_kv : 1;
}

/* Divides the parts or the tiles of each section into tasks, or of each that has many queries. */
static void list_tasks(weighing *j, bool of_keys, bool of_many)
{
    j->task_count = 0;
    for (ptrdiff_t g = 0; g < j->sections.count; g++) {
        if (of_many && j->is_few[g]) continue;
        const am_section *section = &j->sections.list[g];
        const am_range parts = j->of_sections[g], all = of_keys ? section->tiles : parts;
        const bool together = of_keys && go_together(j, parts);
        const ptrdiff_t some =
            together ? am_max(j->some, am_ceil_div(am_length(all), j->tile_tasks)) : j->some;
        for (ptrdiff_t begin = all.begin; begin < all.end; begin += some) {
            j->tasks[j->task_count].section = section;
            j->tasks[j->task_count++].range = (am_range){begin, am_min(begin + some, all.end)};
        }
    }
}

/* Runs the tasks of the queries, or of the keys; `of_many`: as of list_tasks. */
static am_status run_tasks(const am_context *context, weighing *j, bool of_keys, bool of_many)
{
    const am_attn *f = j->base.attn;
    list_tasks(j, of_keys, of_many);
    return am_parallel(context, j->task_count * (of_keys ? f->kv_heads : f->heads / j->heads), 1,
                       of_keys ? keys_task : queries_task, j);
}

static am_status find_lse(const am_context *context, weighing *j)
{
    am_status status = j->few.count > 0 ? find_few_lse(context, j) : AM_OK;
    j->finds_lse = true;
    if (status == AM_OK) status = run_tasks(context, j, false, true);
    j->finds_lse = false;
    return status;
}

static am_status sum_keys(const am_context *context, weighing *j)
{
    const am_weights_taker taker = {.arg = j, .begin = begin_few, .take = take_few};
    am_status status =
        j->few.count > 0 ? am_attn_forward_sections(context, &j->base, &j->few, &taker) : AM_OK;
    return status == AM_OK ? run_tasks(context, j, true, true) : status;
}

static am_status compute(const am_context *context, weighing *j)
{
    const am_attn_weights *problem = j->problem;
    const am_attn *f = &problem->attn;
    am_status status = am_sections_make(&j->sections, f->mask, true);
    am_context own = *context;
    if (status == AM_OK) own.threads = am_threads_for(context, am_time_alone(f, &j->sections));
    const ptrdiff_t share = j->sections.blocks.count * f->heads / (TASKS_OF_A_THREAD * own.threads);
    j->some = own.threads > 1 ? am_max(1, am_min(share, MOST)) : MOST;
    j->tile_tasks = own.threads > 1 ? am_ceil_div(TASKS_OF_A_THREAD * own.threads, f->kv_heads) : 1;
    const ptrdiff_t blocks = am_max(j->sections.blocks.count, 1), sections = am_max(j->sections.count, 1),
                    tasks = am_max(blocks, j->sections.tiles.count + sections);
    j->few = j->sections, j->few.count = 0;
    j->few.list = malloc((size_t)am_product(sections, sizeof *j->few.list, 1));
    j->is_few = malloc((size_t)sections * sizeof *j->is_few);
    j->parts = malloc((size_t)am_product(blocks, sizeof *j->parts, 1));
    j->of_sections = malloc((size_t)am_product(sections, sizeof *j->of_sections, 1));
    j->tasks = malloc((size_t)am_product(tasks, sizeof *j->tasks, 1));
    if (status == AM_OK && !(j->few.list && j->is_few && j->parts && j->of_sections && j->tasks))
        status = AM_NO_MEMORY;
    j->kv = am_kv_of(&j->base, &j->sections, &j->unplanned);
    if (status == AM_OK)
        status = am_workspaces_make(&j->workspaces, own.threads, lay_out, j, sizeof(workspace));
    if (status == AM_OK) status = am_sum_sinks(&own, &j->base, &j->sinks);
    if (status == AM_OK) list_few(j), list_parts(j);
    if (status == AM_OK && problem->finds_lse) status = find_lse(&own, j);
    if (status == AM_OK && (problem->weights || problem->entropy || problem->max_logit || problem->top_keys))
        status = run_tasks(&own, j, false, false);
    if (status == AM_OK && problem->key_sum) status = sum_keys(&own, j);
    am_workspaces_free(&j->workspaces);
    am_sections_free(&j->sections);
    free(j->few.list);
    free(j->is_few);
    free(j->parts);
    free(j->of_sections);
    free(j->tasks);
    free(j->sinks);
    return status;
}

/* Clears what tasks write for the pairs that they see alone. */
static void clear(const am_attn_weights *problem, ptrdiff_t size)
{
    const am_attn *f = &problem->attn;
    const ptrdiff_t heads = f->batch * f->heads,
                    sums = f->batch * (problem->by_key_head ? f->kv_heads : f->heads);
    if (problem->weights) memset(problem->weights, 0, (size_t)(heads * problem->rows * f->keys * size));
    if (problem->key_sum) memset(problem->key_sum, 0, (size_t)(sums * problem->sums * size));
}

am_status am_attn_weigh(const am_context *context, const am_attn_weights *problem)
{
    const am_attn *f = &problem->attn;
    clear(problem, (ptrdiff_t)am_size_of(f->q.type == AM_FLOAT64 ? AM_FLOAT64 : AM_FLOAT32));
    if (f->batch == 0 || f->heads == 0 || problem->count == 0) return AM_OK;
    if (am_is_too_deep(f)) return AM_NO_MEMORY;
    am_status status = am_mask_prepare(context, f->mask);
    if (status != AM_OK) return status;
    if (context->kernels->plain) return am_plain_weigh(context, problem);
    am_attn attn = *f; /* with a result of no channels */
    attn.out = attn.q, attn.out.shape.channel = 0;
    const am_attn_base base = am_attn_base_wide(context, &attn);
    weighing j = {.base = base,
                  .problem = problem,
                  .packing = {.shape.strategy = AM_PRIVATE_PACKING},
                  .heads = 1,
                  .ranks = am_min(problem->top, f->keys),
                  .q_stride = am_ceil_div(f->head_dim, base.arithmetic->panel) * base.arithmetic->panel};
    j.top_bytes = am_ceil_div(j.ranks * base.size, AM_LINE) * AM_LINE;
    const am_float_mode mode = am_float_mode_get();
    am_float_mode_set(am_float_mode_flushing(mode));
    status = compute(context, &j);
    am_float_mode_set(mode);
    return status;
}
