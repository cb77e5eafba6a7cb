/* backward_plan.c – divides the work of attention backward: sums, tasks, and what a task keeps. */
#include "core/attention/backward_plan.h"

#include <stdlib.h>

enum {
    TILE = AM_FLASH_TILE,
    ENOUGH_TASKS = 64,   /* of a call; more for many threads */
    TASKS_EACH = 4,      /* for each thread */
    ENOUGH_SUMS = 32,    /* the same for one section, which adds as many parts to d_q */
    MANY_SUMS = 64,      /* of a section: with fewer, tasks for many threads take some of the blocks; enough
                          * under causal masks, where sums of one tile can be had */
    ENOUGH_VISITS = 512, /* of a section, in a split each, unless it would have less than these: */
    SPLIT_VISITS = 2,    /* twice as many under windows, where sums of d_k and d_v are of few visits */
    FEW_VISITS = 7,      /* of a sum, on average; with fewer, splits would cost narrow windows 5 % */
    EACH = 2,            /* with fewer tasks for each thread, each split is one */
    SUM_TILES = 4,       /* the most tiles whose d_q is summed up before it is added */
    WIDE_TILES = 4,      /* the most tiles of a task whose blocks see many tiles */
    MOST_TILES = 16,     /* the same if they see few: these stay in the cache from block to block */
    NEAR_BYTES = 768 << 10, /* the most bytes of a task's tiles that one block sees: they stay in the cache */
};
_Static_assert(SUM_TILES < 32 && WIDE_TILES < 32 && MOST_TILES < 32, "splits.summed has a bit for each tile");

ptrdiff_t am_backward_lay_out(const void *plan, char *memory, void *parts)
{
    const am_backward_plan *p = plan;
    const am_attn *f = p->base.attn;
    am_backward_workspace *s = parts;
    const ptrdiff_t n = p->task_tiles, tile_bytes = AM_FLASH_ROWS * TILE * p->base.size,
                    word = sizeof(uint64_t);
    ptrdiff_t used = 0;
    const bool keeps_ds = p->bias.result || p->lines.count > 0;
    s->q = am_take(memory, &used, p->lengths.k_rows);
    s->d_out = am_take(memory, &used, p->lengths.v_rows);
    s->q_rows = am_width(&p->base) > 1 ? am_take(memory, &used, p->lengths.k_rows) : s->q;
    s->d_out_rows = am_width(&p->base) > 1 ? am_take(memory, &used, p->lengths.v_rows) : s->d_out;
    s->d_q = am_take(memory, &used, p->lengths.k_rows);
    s->p = am_take(memory, &used, tile_bytes);
    s->ds = am_take(memory, &used, tile_bytes);
    s->terms.bias = am_take(memory, &used, am_adds_to_products(&p->base.terms) ? tile_bytes : 0);
    s->d_bias = am_take(memory, &used, keeps_ds ? tile_bytes : 0);
    s->d_bias_scratch = am_take(memory, &used, am_bias_scratch_bytes(&p->bias));
    s->lines = am_line_sums_take(&p->lines, memory, &used);
    s->row = s->terms.row =
        am_take(memory, &used, 2 * am_row_scratch(TILE, am_max(am_max(f->head_dim, f->value_dim), TILE)));
    s->k_columns = am_take(memory, &used, n * p->lengths.k_columns);
    s->v_columns = am_take(memory, &used, n * p->lengths.v_columns);
    s->k = am_take(memory, &used, n * p->lengths.k_panels);
    s->total.d_k = am_take(memory, &used, n * p->lengths.k_sums);
    s->total.d_v = am_take(memory, &used, n * p->lengths.v_sums);
    s->split = s->total;
    if (p->splits.divided) {
        s->split.d_k = am_take(memory, &used, n * p->lengths.k_sums);
        s->split.d_v = am_take(memory, &used, n * p->lengths.v_sums);
    }
    s->terms.live = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * word);
    s->terms.kept = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * word);
    s->terms.row_keys = (uint64_t *)am_take(memory, &used, AM_FLASH_ROWS * word);
    s->tiles = (am_local_tile *)am_take(memory, &used, n * (ptrdiff_t)sizeof(am_local_tile));
    return used;
}

/* Rounds up to whole panels, and to an odd number of cache lines: rows that are a power of two apart would
 * map to few sets of the cache. */
static ptrdiff_t stride_of(const am_backward_plan *p, ptrdiff_t in_panels)
{
    ptrdiff_t a_line = AM_LINE / p->base.size;
    return in_panels % (2 * a_line) == 0 ? in_panels + a_line : in_panels;
}

/* Half as many tiles until their bytes stay in the cache, and there are enough sums for many threads. */
static ptrdiff_t limit_tiles(const am_backward_plan *p, ptrdiff_t most, ptrdiff_t seen, ptrdiff_t tiles,
                             ptrdiff_t bytes, ptrdiff_t enough)
{
    while (most > 1 &&
           (am_min(most, seen) * bytes > NEAR_BYTES || p->base.attn->kv_heads * (tiles / most) < enough))
        most /= 2;
    return most;
}

/* How many tiles of a section its blocks see: all of them, more and more, or few. */
typedef enum { SEE_ALL, SEE_MORE, SEE_FEW } sight;

static sight sight_of(const am_backward_plan *p, const am_section *section)
{
    ptrdiff_t blocks = 0, all = 0, most = 0, first = PTRDIFF_MAX, last = 0;
    for (ptrdiff_t block = section->blocks.begin; block < section->blocks.end; block++) {
        const am_attn_place at = am_place_of(&p->base, &p->sections, section, block, 0, p->base.attn->heads);
        const am_range tiles = am_block_tiles(&p->base, &p->sections, &at);
        if (am_length(tiles) <= 0) continue;
        blocks++, all += am_length(tiles), most = am_max(most, am_length(tiles));
        first = am_min(first, tiles.begin), last = am_max(last, tiles.end);
    }
    if (most < last - first) return SEE_FEW;
    return all < blocks * most / 4 * 3 ? SEE_MORE : SEE_ALL;
}

/* The sums of d_q that are enough for a section. Under a causal mask the last tasks are of few tiles: then
 * each sum is of one tile, if these are few. One thread gains as much by adding them to d_q at once as it
 * loses. */
static ptrdiff_t enough_sums(const am_backward_plan *p, const am_section *section)
{
    const bool few = p->base.attn->kv_heads * am_length(section->tiles) <= MANY_SUMS;
    return few && sight_of(p, section) == SEE_MORE ? MANY_SUMS : ENOUGH_SUMS;
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

/* The visits of a split of a section. They follow from what is seen of it, and not from what it has behind
 * that: padding does not alter how its sums are divided. */
static ptrdiff_t choose_split(const am_backward_plan *p, const am_section *section)
{
    const am_attn *f = p->base.attn;
    const sight seen = sight_of(p, section);
    const bool of_one_tile = p->sum_tiles[section - p->sections.list] == 1 && seen == SEE_MORE;
    const ptrdiff_t most = of_one_tile ? MANY_SUMS : MANY_SUMS - 1,
                    least = seen == SEE_FEW ? 2 * SPLIT_VISITS : SPLIT_VISITS;
    ptrdiff_t visits = 0, first = PTRDIFF_MAX, last = 0;
    for (ptrdiff_t block = section->blocks.begin; block < section->blocks.end; block++) {
        const am_attn_place at = am_place_of(&p->base, &p->sections, section, block, 0, f->heads);
        const am_range tiles = am_block_tiles(&p->base, &p->sections, &at);
        if (am_length(tiles) <= 0) continue;
        const am_range sums = {am_sum_of_tile(p, section, tiles.begin),
                               am_sum_of_tile(p, section, tiles.end - 1) + 1};
        visits += f->heads * am_length(sums);
        first = am_min(first, sums.begin), last = am_max(last, sums.end);
        if (f->kv_heads * (last - first) > most) return PTRDIFF_MAX;
    }
    if (visits == 0) return PTRDIFF_MAX; /* then there is no first sum, either */
    const ptrdiff_t all = f->kv_heads * (last - first);
    if (visits >= all * FEW_VISITS) return am_max(least, visits / ENOUGH_VISITS);
    return of_one_tile ? 2 * SPLIT_VISITS : PTRDIFF_MAX; /* causal: the first tiles have most of the visits */
}

/* Chooses the lengths of rows, of sums and of tasks; returns the most tiles of a task, unless one sum has
 * more. */
static ptrdiff_t choose(am_backward_plan *p)
{
    const am_attn *f = p->base.attn;
    const ptrdiff_t panel = p->base.arithmetic->panel, size = p->base.size,
                    head_dim = am_ceil_div(f->head_dim, panel) * panel,
                    value_dim = am_ceil_div(f->value_dim, panel) * panel;
    p->lengths.stride = stride_of(p, head_dim);
    p->lengths.value_stride = stride_of(p, value_dim);
    p->lengths.k_rows = TILE * p->lengths.stride * size;
    p->lengths.v_rows = TILE * p->lengths.value_stride * size;
    const am_sum_shape k = am_sum_shape_of(p, TILE, head_dim, p->lengths.stride),
                       v = am_sum_shape_of(p, TILE, value_dim, p->lengths.value_stride);
    p->lengths.k_sums = k.rows * k.stride * size;
    p->lengths.v_sums = v.rows * v.stride * size;
    p->lengths.k_columns = TILE * am_lanes(&p->base, f->head_dim) * size;
    p->lengths.v_columns = TILE * am_lanes(&p->base, f->value_dim) * size;
    p->lengths.k_panels = TILE * head_dim * size / am_width(&p->base);
    const ptrdiff_t bytes = p->lengths.k_sums + p->lengths.v_sums + p->lengths.k_columns +
                            p->lengths.v_columns + p->lengths.k_panels;
    ptrdiff_t seen = 0, tiles = 0;
    for (ptrdiff_t i = 0; i < p->sections.count; i++) {
        const am_section *section = &p->sections.list[i];
        const ptrdiff_t own = am_length(section->tiles);
        p->sum_tiles[i] = limit_tiles(p, SUM_TILES, own, own, bytes, enough_sums(p, section));
        p->split_visits[i] = choose_split(p, section);
        p->splits.divided |= am_visits_of(p, section) > p->split_visits[i];
        tiles += own;
        if (own > seen) seen = am_max(seen, am_most_tiles(&p->base, &p->sections, section));
    }
    return limit_tiles(p, seen > NEAR_BYTES / bytes ? WIDE_TILES : MOST_TILES, seen, tiles, bytes,
                       p->in_order ? ENOUGH_TASKS : am_max(ENOUGH_TASKS, TASKS_EACH * p->threads));
}

/* Lists a task, or one for each of its splits, from the last visit to the first; returns how many. */
static ptrdiff_t list_task(const am_backward_plan *p, const am_key_task *task, am_key_task *to)
{
    const am_section *section = &p->sections.list[task->sections.begin];
    am_key_task split = *task;
    ptrdiff_t count = 0;
    if (p->splits.are_tasks && am_length(task->sections) == 1)
        split.visits = visits_seen(p, section, task->tiles);
    const ptrdiff_t first = split.visits.begin;
    for (ptrdiff_t visit = split.visits.end; visit-- > first;) {
        if (visit > first && !am_ends_split(p, section, visit)) continue;
        split.visits.begin = visit, split.split = count;
        if (to) to[count] = split;
        split.visits.end = visit, count++;
    }
    for (ptrdiff_t i = 0; to && count > 1 && i < count; i++) to[i].splits = count;
    if (to && count <= 1) to[0] = *task;
    return am_max(count, 1);
}

/* Ends a task, and begins the next one with the tile behind it; returns how many it has listed. */
static ptrdiff_t end_task(const am_backward_plan *p, am_key_task *task, am_key_task *to, ptrdiff_t section)
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

/* Divides the tiles that the sections of a batch row see into tasks of whole sums; returns the number of
 * tasks, and lists them unless `to` is NULL. Unless p->in_order, a section that does not fit into the rest of
 * a task begins a new one, so that the tasks of a divided section never wait for those of the section before
 * it. */
static ptrdiff_t divide_row(const am_backward_plan *p, am_range sections, ptrdiff_t most, am_key_task *to)
{
    ptrdiff_t count = 0;
    am_key_task task = {.sections = {sections.begin, sections.begin}};
    if (sections.begin < sections.end)
        task.tiles.begin = task.tiles.end = p->sections.list[sections.begin].tiles.begin;
    for (ptrdiff_t g = sections.begin; g < sections.end; g++) {
        const am_range tiles = p->sections.list[g].tiles;
        for (ptrdiff_t begin = tiles.begin, end; begin < tiles.end; begin = end) {
            end = am_min(begin + p->sum_tiles[g], tiles.end);
            const ptrdiff_t wanted = begin == tiles.begin && !p->in_order ? tiles.end : end;
            if (am_length(task.tiles) > 0 && wanted - task.tiles.begin > most)
                count += end_task(p, &task, to ? &to[count] : NULL, g);
            task.tiles.end = end, task.sections.end = g + 1;
        }
    }
    task.tokens.end = p->base.attn->keys;
    return count + list_task(p, &task, to ? &to[count] : NULL);
}

/* The sections of a batch row, the first of which is not before `first`. */
static am_range sections_of(const am_backward_plan *p, ptrdiff_t b, ptrdiff_t first)
{
    am_range sections = {first, first};
    while (sections.end < p->sections.count && p->sections.list[sections.end].b == b) sections.end++;
    return sections;
}

static int compare_tasks(const void *a, const void *b)
{
    const am_key_task *x = a, *y = b;
    if (x->before != y->before) return x->before < y->before ? -1 : 1;
    if (x->tiles.begin != y->tiles.begin) return x->tiles.begin < y->tiles.begin ? -1 : 1;
    return (x->split > y->split) - (x->split < y->split);
}

/* Counts the tasks of all batch rows, and finds the most of one. */
static ptrdiff_t count_tasks(am_backward_plan *p, ptrdiff_t most)
{
    am_range sections = {0, 0};
    ptrdiff_t all = 0;
    p->row_tasks = 0;
    for (ptrdiff_t b = 0; b < p->base.attn->batch; b++) {
        sections = sections_of(p, b, sections.end);
        const ptrdiff_t tasks = divide_row(p, sections, most, NULL);
        p->row_tasks = am_max(p->row_tasks, tasks), all += tasks;
    }
    return all * p->base.attn->kv_heads;
}

static am_status list_tasks(am_backward_plan *p, ptrdiff_t most)
{
    const ptrdiff_t batch = p->base.attn->batch;
    am_range sections = {0, 0};
    p->splits.are_tasks = count_tasks(p, most) < EACH * p->threads && p->splits.divided && !p->in_order;
    if (p->splits.are_tasks) count_tasks(p, most);
    p->tasks = calloc((size_t)am_max(am_product(batch, p->row_tasks, 1), 1), sizeof *p->tasks);
    if (!p->tasks) return AM_NO_MEMORY;
    sections = (am_range){0, 0};
    for (ptrdiff_t b = 0; b < batch; b++) {
        sections = sections_of(p, b, sections.end);
        am_key_task *tasks = p->tasks + b * p->row_tasks;
        const ptrdiff_t count = divide_row(p, sections, most, tasks);
        for (am_key_task *task = tasks; task < tasks + count; task++)
            if (task->splits > 0) task->slot = p->splits.slots++;
        /* First the first task of each section, and so on: threads seldom wait for each other's sums. */
        if (!p->in_order) qsort(tasks, (size_t)count, sizeof *tasks, compare_tasks);
        for (am_key_task *task = tasks; task < tasks + p->row_tasks; task++) {
            p->task_tiles = am_max(p->task_tiles, am_length(task->tiles));
            if (am_is_learned(p->base.terms.bias))
                task->sections = sections; /* each task takes the turns of all blocks */
        }
    }
    return AM_OK;
}

/* Divides the work. */
am_status am_backward_plan_make(am_backward_plan *p, bool by_mask)
{
    const am_terms *terms = &p->base.attn->terms;
    for (const am_logit_term *term = terms->list; term < terms->list + terms->count; term++)
        p->in_order |= am_is_learned(term) && term != p->base.terms.sinks;
    am_status status = am_sections_make(&p->sections, p->base.attn->mask, by_mask);
    const size_t bytes = (size_t)am_product(am_max(p->sections.count, 1), sizeof(ptrdiff_t), 1);
    p->sum_tiles = malloc(bytes), p->split_visits = malloc(bytes);
    /* Before blocks are visited one by one: more than memory has room for are an error at once. */
    p->states = malloc(
        (size_t)am_max(am_product(p->sections.blocks.count, p->base.attn->heads, sizeof *p->states), 1));
    if (status == AM_OK && !(p->sum_tiles && p->split_visits && p->states)) status = AM_NO_MEMORY;
    return status == AM_OK ? list_tasks(p, choose(p)) : status;
}

void am_backward_plan_free(am_backward_plan *p)
{
    am_sections_free(&p->sections);
    free(p->sum_tiles);
    free(p->split_visits);
    free(p->states);
    free(p->tasks);
}
