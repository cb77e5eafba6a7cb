/* backward_plan.c – divides the work of attention backward: sums, tasks, and what a task keeps. */
#include "core/attention/backward_plan.h"

#include <stdlib.h>

enum { TILE = AM_FLASH_TILE };

ptrdiff_t am_backward_lay_out(const void *plan, char *memory, void *parts)
{
    const am_backward_plan *p = plan;
    const am_attn *f = p->base.attn;
    am_backward_workspace *s = parts;
    const ptrdiff_t n = p->task_tiles, tile_bytes = AM_FLASH_ROWS * TILE * p->base.size,
                    word = sizeof(uint64_t);
    ptrdiff_t used = 0;
    const bool keeps_ds = p->bias.result || p->lines.count > 0;
    s->q = am_take(memory, &used, p->k.rows);
    s->d_out = am_take(memory, &used, p->v.rows);
    s->q_rows = am_width(&p->base) > 1 ? am_take(memory, &used, p->k.rows) : s->q;
    s->d_out_rows = am_width(&p->base) > 1 ? am_take(memory, &used, p->v.rows) : s->d_out;
    s->d_q = am_take(memory, &used, p->k.rows);
    s->p = am_take(memory, &used, tile_bytes);
    s->ds = am_take(memory, &used, tile_bytes);
    s->terms.bias = am_take(memory, &used, am_adds_to_products(&p->base.terms) ? tile_bytes : 0);
    s->d_bias = am_take(memory, &used, keeps_ds ? tile_bytes : 0);
    s->d_bias_scratch = am_take(memory, &used, am_bias_scratch_bytes(&p->bias));
    s->lines = am_line_sums_take(&p->lines, memory, &used);
    s->row = s->terms.row =
        am_take(memory, &used, 2 * am_row_scratch(TILE, am_max(am_max(f->head_dim, f->value_dim), TILE)));
    s->k_columns = am_take(memory, &used, n * p->k.columns);
    s->v_columns = am_take(memory, &used, n * p->v.columns);
    s->k = am_take(memory, &used, n * p->k.panels);
    const am_attn_tangents none = {0}, *along = p->along ? p->along : &none;
    s->along.q = am_take(memory, &used, along->d_q.data ? p->k.rows : 0);
    s->along.by_q = am_take(memory, &used, p->along ? tile_bytes : 0);
    s->along.by_k = am_take(memory, &used, along->d_k.data ? tile_bytes : 0);
    s->along.by_v = am_take(memory, &used, along->d_v.data ? tile_bytes : 0);
    s->along.k_columns = am_take(memory, &used, along->d_k.data ? n * p->k.columns : 0);
    s->along.v_columns = am_take(memory, &used, along->d_v.data ? n * p->v.columns : 0);
    s->along.k = am_take(memory, &used, along->d_k.data ? n * p->k.panels : 0);
    s->total.d_k = am_take(memory, &used, n * p->k.sums);
    s->total.d_v = am_take(memory, &used, n * p->v.sums);
    s->split = s->total;
    if (p->splits.divided) {
        s->split.d_k = am_take(memory, &used, n * p->k.sums);
        s->split.d_v = am_take(memory, &used, n * p->v.sums);
    }
    s->terms.live = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * word);
    s->terms.kept = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * word);
    s->terms.row_keys = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * word);
    s->tiles = (am_local_tile *)am_take(memory, &used, n * (ptrdiff_t)sizeof(am_local_tile));
    return used;
}

static am_backward_lengths lengths_of(const am_backward_plan *p, ptrdiff_t dim)
{
    const ptrdiff_t size = p->base.size, panel = p->base.arithmetic->panel, a_line = AM_LINE / size,
                    in_panels = am_ceil_div(dim, panel) * panel;
    /* An odd number of cache lines: rows that are a power of two apart would map to few sets of the cache. */
    const ptrdiff_t stride = in_panels % (2 * a_line) == 0 ? in_panels + a_line : in_panels;
    const am_sum_shape sums = am_sum_shape_of(p, TILE, in_panels, stride);
    return (am_backward_lengths){.stride = stride,
                                 .rows = TILE * stride * size,
                                 .sums = sums.rows * sums.stride * size,
                                 .columns = TILE * am_lanes(&p->base, dim) * size,
                                 .panels = TILE * in_panels * size / am_width(&p->base)};
}

/* The visits that see some tiles of a section. */
static am_range visits_seen(const am_backward_plan *p, const am_section *section, am_range tiles)
{
    const ptrdiff_t shared = p->base.heads_per_kv;
    am_range visits = {0, 0};
    for (ptrdiff_t block = section->blocks.begin; block < section->blocks.end; block++) {
        const am_attn_place at = am_place_of(&p->base, &p->sections, section, block, 0, p->base.attn->heads);
        const am_range seen = am_block_tiles(&p->base, &p->sections, &at);
        if (am_min(seen.end, tiles.end) <= am_max(seen.begin, tiles.begin)) continue;
        const ptrdiff_t first = (block - section->blocks.begin) * shared;
        if (visits.end == 0) visits.begin = first;
        visits.end = first + shared;
    }
    return visits;
}

/* Counts what the blocks of a section see of it. */
static am_backward_work count_work(const am_backward_plan *p, const am_section *section, ptrdiff_t tile_bytes)
{
    const am_attn *f = p->base.attn;
    am_backward_work w = {.heads = f->heads,
                          .kv_heads = f->kv_heads,
                          .tiles = am_length(section->tiles),
                          .tile_bytes = tile_bytes};
    for (ptrdiff_t block = section->blocks.begin; block < section->blocks.end; block++) {
        const am_attn_place at = am_place_of(&p->base, &p->sections, section, block, 0, f->heads);
        const am_range tiles = am_block_tiles(&p->base, &p->sections, &at);
        const ptrdiff_t begin = tiles.begin - section->tiles.begin, end = tiles.end - section->tiles.begin;
        if (begin >= end) continue;
        w.begin = w.blocks == 0 ? begin : am_min(w.begin, begin), w.end = am_max(w.end, end);
        w.blocks++, w.most = am_max(w.most, end - begin);
        for (ptrdiff_t n = 1; n <= AM_SUM_TILES; n *= 2) w.visits[n] += am_count_parts(begin, end, n);
    }
    return w;
}

/* Chooses the lengths of rows, of sums and of tasks; returns the most tiles of a task, unless one sum has
 * more. */
static ptrdiff_t choose(am_backward_plan *p)
{
    p->k = lengths_of(p, p->base.attn->head_dim), p->v = lengths_of(p, p->base.attn->value_dim);
    am_backward_work all = {.kv_heads = p->base.attn->kv_heads,
                            .tile_bytes = p->k.sums + p->v.sums +
                                          (p->along ? 2 : 1) * (p->k.columns + p->v.columns + p->k.panels)};
    p->lone_blocks = true;
    for (ptrdiff_t i = 0; i < p->sections.count; i++) {
        const am_section *section = &p->sections.list[i];
        const am_backward_work own = count_work(p, section, all.tile_bytes);
        p->sums[i] = am_choose_sums(&own);
        p->splits.divided |= am_visits_of(p, section) > p->sums[i].split_visits;
        p->lone_blocks &= am_length(section->blocks) == 1 && am_length(section->tiles) == 1;
        all.tiles += own.tiles;
        if (own.tiles > all.most) all.most = am_max(all.most, am_most_tiles(&p->base, &p->sections, section));
    }
    return am_choose_task_tiles(&all, p->threads, p->in_order);
}

/* Lists a task, or one for each of its splits, from the last visit to the first; returns how many. */
static ptrdiff_t list_task(am_backward_plan *p, const am_key_task *task, am_key_task *to)
{
    const ptrdiff_t g = task->sections.begin;
    const bool divided = p->splits.are_tasks && am_length(task->sections) == 1;
    const am_range visits = divided ? visits_seen(p, &p->sections.list[g], task->tiles) : (am_range){0, 0};
    const ptrdiff_t each = divided ? p->sums[g].split_visits : 1,
                    splits = am_count_parts(visits.begin, visits.end, each);
    p->task_tiles = am_max(p->task_tiles, am_length(task->tiles));
    if (to) to[0] = *task;
    for (ptrdiff_t i = 0; to && splits > 1 && i < splits; i++) {
        const ptrdiff_t begin = ((visits.end - 1) / each - i) * each;
        to[i] = *task;
        to[i].visits = (am_range){am_max(begin, visits.begin), am_min(begin + each, visits.end)};
        to[i].split = i, to[i].splits = splits, to[i].slot = p->splits.slots++;
    }
    return am_max(splits, 1);
}

/* Ends a task, and begins the next one with the tile behind it; returns how many it has listed. */
static ptrdiff_t end_task(am_backward_plan *p, am_key_task *task, am_key_task *to, ptrdiff_t section)
{
    const ptrdiff_t end = task->tiles.end;
    task->tokens.end = am_range_at(&p->sections.tiles, end - 1).end;
    const ptrdiff_t count = list_task(p, task, to);
    const bool within = end > p->sections.list[section].tiles.begin;
    *task = (am_key_task){.tiles = {end, end},
                          .sections = {section, section},
                          .tokens = {task->tokens.end, task->tokens.end},
                          .before = within ? task->before + 1 : 0};
    return count;
}

/* Divides the tiles that the sections of a batch row see into tasks of whole sums. Returns the number of
 * tasks, and lists them unless `to` is NULL. If a section does not fit into the rest of a task, it begins a
 * new one, unless p->in_order. So the tasks of a divided section never wait for those of the section before
 * it. */
static ptrdiff_t divide_row(am_backward_plan *p, am_range sections, ptrdiff_t most, am_key_task *to)
{
    ptrdiff_t count = 0;
    am_key_task task = {.sections = {sections.begin, sections.begin}};
    if (sections.begin < sections.end)
        task.tiles.begin = task.tiles.end = p->sections.list[sections.begin].tiles.begin;
    for (ptrdiff_t g = sections.begin; g < sections.end; g++) {
        const am_range tiles = p->sections.list[g].tiles;
        for (ptrdiff_t begin = tiles.begin, end; begin < tiles.end; begin = end) {
            end = am_min(begin + p->sums[g].tiles, tiles.end);
            const ptrdiff_t wanted = begin == tiles.begin && !p->in_order ? tiles.end : end;
            if (am_length(task.tiles) > 0 && wanted - task.tiles.begin > most)
                count += end_task(p, &task, to ? &to[count] : NULL, g);
            task.tiles.end = end, task.sections.end = g + 1;
        }
    }
    task.tokens.end = p->base.attn->keys;
    return count + list_task(p, &task, to ? &to[count] : NULL);
}

static int compare_tasks(const void *a, const void *b)
{
    const am_key_task *x = a, *y = b;
    if (x->before != y->before) return x->before < y->before ? -1 : 1;
    if (x->tiles.begin != y->tiles.begin) return x->tiles.begin < y->tiles.begin ? -1 : 1;
    return (x->split > y->split) - (x->split < y->split);
}

/* Divides all batch rows into tasks, and lists these once there is memory for them; returns their number. */
static ptrdiff_t divide_rows(am_backward_plan *p, ptrdiff_t most)
{
    am_range sections = {0, 0};
    ptrdiff_t all = 0;
    for (ptrdiff_t b = 0; b < p->base.attn->batch; b++, sections.begin = sections.end) {
        while (sections.end < p->sections.count && p->sections.list[sections.end].b == b) sections.end++;
        am_key_task *tasks = p->tasks ? p->tasks + b * p->row_tasks : NULL;
        const ptrdiff_t count = divide_row(p, sections, most, tasks);
        p->row_tasks = am_max(p->row_tasks, count), all += count;
        /* First the first task of each section, and so on: threads seldom wait for each other's sums. */
        if (tasks && !p->in_order) qsort(tasks, (size_t)count, sizeof *tasks, compare_tasks);
        for (ptrdiff_t i = 0; tasks && am_is_learned(p->base.terms.bias) && i < p->row_tasks; i++)
            tasks[i].sections = sections; /* each task takes the turns of all blocks */
    }
    return all * p->base.attn->kv_heads;
}

/* Divides the work. */
am_status am_backward_plan_make(am_backward_plan *p, bool by_mask)
{
    const am_terms *terms = &p->base.attn->terms;
    for (const am_logit_term *term = terms->list; term < terms->list + terms->count; term++)
        p->in_order |= am_is_learned(term) && term != p->base.terms.sinks;
    am_status status = am_sections_make(&p->sections, p->base.attn->mask, by_mask);
    p->sums = malloc((size_t)am_product(am_max(p->sections.count, 1), sizeof *p->sums, 1));
    /* Before blocks are visited one by one: more than memory has room for are an error at once. */
    p->states = malloc(
        (size_t)am_max(am_product(p->sections.blocks.count, p->base.attn->heads, sizeof *p->states), 1));
    if (status == AM_OK && !(p->sums && p->states)) status = AM_NO_MEMORY;
    if (status != AM_OK) return status;
    const ptrdiff_t most = choose(p), tasks = divide_rows(p, most);
    p->splits.are_tasks = p->splits.divided && am_splits_as_tasks(tasks, p->threads, p->in_order);
    if (p->splits.are_tasks) divide_rows(p, most);
    p->tasks = calloc((size_t)am_max(am_product(p->base.attn->batch, p->row_tasks, 1), 1), sizeof *p->tasks);
    if (p->tasks) divide_rows(p, most);
    return p->tasks ? AM_OK : AM_NO_MEMORY;
}

void am_backward_plan_free(am_backward_plan *p)
{
    am_sections_free(&p->sections);
    free(p->sums);
    free(p->states);
    free(p->tasks);
}
