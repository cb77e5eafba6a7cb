/* schedule.c – chooses the strategy of each section, and deals its items to tasks. */
#include "core/attention/plan/schedule.h"

#include <stdlib.h>

#include "core/arrays/convert.h"
#include "core/attention/terms/logit_terms.h"

enum {
    TILE = AM_FLASH_TILE,
    FEW_ITEMS = 16,  /* of a thread; with fewer, each split is an item of its own */
    LONG_SHARE = 32, /* each split is one, too, if one item is more than this part of what a thread does */
    MOST_ORDERED = 1 << 12, /* tasks that are sorted: of more, each thread has so many that they are even */
    FEW_TASKS = 4,    /* each thread keeps at least so many: tasks do not get more items than that allows */
    FEW_UNPACKED = 2, /* tasks that a thread keeps of unpacked keys: these are read up to 1.15 times as fast
                       * if the items of a task are all heads that lie side by side */
    /* Heads are packed a wave at a time. A wave has at least so many tasks, and more while they fit so many
     * bytes: then its memory stays in the cache, and few pages are touched for the first time. */
    WAVE_TASKS = 256,
    WAVE_BYTES = 4 << 20,
    L1_WAY = 4096,           /* bytes after which addresses map to the same sets of the first-level cache */
    SIDE_BY_SIDE = 4096,     /* bytes of neighbouring heads of a key that one task reads */
    SIDE_BYTES = 128 << 10,  /* of queries and results of these heads: they stay in the second-level cache */
    SHARED_BYTES = 2 << 20,  /* of queries and results of heads that share keys, which are packed once */
    LOCAL_BYTES = 320 << 10, /* of all local tiles of a task: they stay in the second-level cache */
    TASKS_EACH = 16,         /* the fewest tasks of a thread if they have local tiles */
};

/* --- The shape of a section --- */

/* The tiles that the blocks of a section see of any head, and the most that one sees. */
static ptrdiff_t count_tiles(const am_attn_base *base, const am_sections *sections, const am_section *section,
                             ptrdiff_t *most)
{
    ptrdiff_t all = 0;
    *most = 0;
    for (ptrdiff_t block = section->blocks.begin; block < section->blocks.end; block++) {
        const am_attn_place at = am_place_of(base, sections, section, block, 0, base->attn->heads);
        const ptrdiff_t tiles = am_length(am_block_tiles(base, sections, &at));
        all += tiles, *most = am_max(*most, tiles);
    }
    return all;
}

/* Whether queries can be read where they lie, but for the factor: not if all rows map to the same cache
 * lines. */
static bool can_read_queries(const am_attn_base *base)
{
    const am_array *q = &base->attn->q;
    if (q->stride.token % L1_WAY == 0 || base->attn->k_scales.by_channel) return false;
    return am_width(base) > 1 ? am_is_aligned(q, am_width(base)) : q->type == base->type && am_is_plain(q, 1);
}

/* Whether values can be read where they lie, in whole vectors. */
static bool can_read_values(const am_attn_base *base)
{
    const am_array *v = &base->attn->v;
    const ptrdiff_t width = am_width(base), panel = base->arithmetic->panel, count = base->attn->value_dim;
    if (v->stride.token <= 0 || base->widens || !am_is_plain(v, width)) return false;
    if (width > 1) return am_kv_width(base) == width && count % panel == 0;
    return count % (panel / 2) == 0 && v->type == base->type;
}

/* What turns products into logits, as kernels round it, which may be to 0. */
static double factor_of(const am_attn_base *base)
{
    const double factor = base->attn->scale * AM_LOG2_E / base->unit;
    return am_scales_products(base) ? (float)factor : factor;
}

static am_work work_of(const am_attn_base *base, const am_sections *sections, const am_section *section)
{
    const am_attn *f = base->attn;
    return (am_work){
        .queries = am_most_queries(sections, section),
        .q_blocks = am_length(section->blocks),
        .tiles = am_length(section->tiles),
        .kv_heads = f->kv_heads,
        .heads_per_kv = base->heads_per_kv,
        .head_dim = f->head_dim,
        .value_dim = f->value_dim,
        .type = base->type,
        .k_type = f->k.type,
        .panel = base->arithmetic->panel,
        .size = base->size,
        .factor = factor_of(base),
        .width = am_width(base),
        .packed_alone = base->arithmetic->packed_alone,
        .products_alone = !(base->terms.dropout || base->terms.cap || am_adds_to_products(&base->terms)),
        .packs_rounded = base->packs_queries && base->kv_rows->queries == AM_QUERY_ROUNDED,
        .queries_readable = can_read_queries(base),
        .alone = f->alone,
        .values_readable = can_read_values(base),
    };
}

bool am_reads_unpacked(const am_attn_base *base, const am_sections *sections, const am_section *section)
{
    const am_work work = work_of(base, sections, section);
    return am_choose_shape(&work).strategy == AM_UNPACKED;
}

static am_shape shape_of(const am_attn_base *base, const am_sections *sections, const am_section *section)
{
    const am_work work = work_of(base, sections, section);
    am_shape h = am_choose_shape(&work);
    h.packs_queries = h.strategy == AM_UNPACKED && base->packs_queries && !h.widens_rows;
    ptrdiff_t most = work.tiles, all = most;
    if (am_counts_tiles(&work, &h)) all = count_tiles(base, sections, section, &most);
    am_choose_splits(&work, &h, all, most);
    return h;
}

double am_time_alone(const am_attn *attn, const am_sections *sections)
{
    enum { PRODUCTS = 60000, BYTES = 40000 }; /* in a microsecond */
    const double channels = (double)(attn->head_dim + attn->value_dim),
                 key_bytes = (double)attn->kv_heads * (double)am_size_of(attn->k.type);
    double time = 0;
    for (const am_section *s = sections->list; s < sections->list + sections->count; s++)
        time += (double)am_length(s->keys) * channels *
                ((double)(am_length(s->queries) * attn->heads) / PRODUCTS + key_bytes / BYTES);
    return time;
}

/* --- Tasks --- */

/* How many key heads lie side by side, up to those that one task reads. */
static ptrdiff_t side_by_side(const am_attn_base *base)
{
    const am_attn *f = base->attn;
    const am_array *k = &f->k, *v = &f->v;
    const ptrdiff_t width = am_kv_width(base);
    if (!am_is_plain(k, width) || !am_is_plain(v, width)) return 1;
    const ptrdiff_t k_head = k->stride.head, v_head = v->stride.head;
    if (k_head <= 0 || v_head <= 0 || k_head >= k->stride.token || v_head >= v->stride.token) return 1;
    return SIDE_BY_SIDE / am_max(k_head, v_head);
}

/* Items of a task that take each tile in lockstep, of `items` in all sections. */
static ptrdiff_t lockstep_items(const am_schedule *s, const am_attn_base *base, const am_scheduled *g,
                                ptrdiff_t items, int threads)
{
    const am_shape *h = &g->shape;
    const bool share = h->head_blocks > 1, unpacked = h->strategy == AM_UNPACKED;
    const ptrdiff_t row_bytes = am_max(1, (s->lanes + s->out_dim) * base->size),
                    rows = unpacked ? AM_FLASH_ROWS : (share ? SHARED_BYTES : SIDE_BYTES) / row_bytes,
                    few = unpacked ? FEW_UNPACKED : FEW_TASKS;
    ptrdiff_t most = am_min(share ? h->head_blocks : side_by_side(base), rows / h->rows);
    most = am_min(most, AM_MOST_ITEMS);
    return am_max(1, am_min(most, items / threads / few));
}

/* Items of a task that keeps its tiles: so many that little is packed more than once, and each thread still
 * gets some tasks; 1 if the tiles are better shared. */
static ptrdiff_t local_items(am_schedule *s, const am_attn_base *base, const am_sections *sections,
                             const am_scheduled *g, ptrdiff_t items, int threads)
{
    if (g->shape.head_blocks > 1 || s->splits_are_tasks) return 1;
    const ptrdiff_t most = am_min(AM_MOST_LOCAL_TILES, LOCAL_BYTES / am_max(s->k_bytes + s->v_bytes, 1)),
                    some = am_min(AM_MOST_ITEMS, items / threads / TASKS_EACH);
    if (some < 2) return 1;
    const ptrdiff_t tiles = am_max(1, am_most_tiles(base, sections, &g->section));
    if (tiles > most || some < 2 * tiles) return 1;
    s->local_tiles = am_max(s->local_tiles, tiles);
    return some;
}

/* Deals the items of a section, of `items` in all sections, to tasks. */
static void deal(am_schedule *s, const am_attn_base *base, const am_sections *sections, am_scheduled *g,
                 ptrdiff_t items, int threads)
{
    am_shape *h = &g->shape;
    g->lot_items = h->strategy == AM_LOCKSTEP ? h->head_blocks : g->items;
    ptrdiff_t most;
    if (h->strategy != AM_SHARED_PACKING) {
        most = lockstep_items(s, base, g, items, threads);
    } else {
        most = local_items(s, base, sections, g, items, threads);
        if (most > 1) h->strategy = AM_LOCAL_PACKING;
    }
    g->lot_tasks = am_ceil_div(g->lot_items, most);
    g->task_items = am_ceil_div(g->lot_items, am_max(g->lot_tasks, 1));
    g->lot_tasks = am_ceil_div(g->lot_items, am_max(g->task_items, 1));
}

/* Sections that share tiles come first, and then sections whose items take longest. */
static int compare(const void *a, const void *b)
{
    const am_scheduled *x = a, *y = b;
    const bool x_shares = x->shape.strategy == AM_SHARED_PACKING,
               y_shares = y->shape.strategy == AM_SHARED_PACKING;
    if (x_shares != y_shares) return x_shares ? -1 : 1;
    const ptrdiff_t x_work = am_length(x->section.tiles) * x->shape.rows,
                    y_work = am_length(y->section.tiles) * y->shape.rows;
    if (x_work != y_work) return x_work > y_work ? -1 : 1;
    if (x->section.b != y->section.b) return x->section.b < y->section.b ? -1 : 1;
    return x->section.queries.begin < y->section.queries.begin ? -1 : 1;
}

static void sort(am_schedule *s)
{
    for (ptrdiff_t i = 1; i < s->count; i++) {
        if (compare(&s->sections[i - 1], &s->sections[i]) < 0) continue;
        qsort(s->sections, (size_t)s->count, sizeof *s->sections, compare);
        return;
    }
}

/* Numbers tasks, shared tiles and partial sums, and finds how much memory an item needs. */
static void number(am_schedule *s, const am_attn_base *base)
{
    for (ptrdiff_t i = 0; i < s->count; i++) {
        am_scheduled *g = &s->sections[i];
        const am_shape *h = &g->shape;
        const ptrdiff_t bytes = am_accumulator_bytes(s, base, h->rows);
        const bool are_tasks = am_splits_are_tasks(s, g);
        g->first_task = s->tasks, g->first_shared = s->shared_tiles, g->first_partial = s->partial_bytes;
        s->tasks +=
            am_ceil_div(g->items, am_max(g->lot_items, 1)) * g->lot_tasks * (are_tasks ? h->splits : 1);
        if (h->strategy == AM_SHARED_PACKING)
            s->shared_tiles += base->attn->kv_heads * am_length(g->section.tiles);
        if (are_tasks) s->partial_bytes += am_product(g->items, h->splits, bytes);
        if (h->strategy == AM_TRANSPOSED) s->packed_queries = am_max(s->packed_queries, am_lockstep(g));
        if (h->strategy == AM_UNPACKED) s->step_items = am_max(s->step_items, am_lockstep(g));
        s->item_rows = am_max(s->item_rows, am_lockstep(g) * h->rows);
        /* A second one for the next split. */
        s->item_bytes = am_max(s->item_bytes, am_lockstep(g) * bytes * (h->splits > 1 && !are_tasks ? 2 : 1));
    }
}

typedef struct {
    ptrdiff_t work, task;
} task_work;

static int compare_work(const void *a, const void *b)
{
    const task_work *x = a, *y = b;
    if (x->work != y->work) return x->work > y->work ? -1 : 1;
    return x->task < y->task ? -1 : 1;
}

/* Rows times tiles of an item that takes all of its splits; under a causal mask some have half of that. */
static ptrdiff_t item_work(const am_scheduled *g) { return am_length(g->section.tiles) * g->shape.rows; }

typedef enum { ANY_ITEM, SPLIT_ITEM } long_item; /* SPLIT_ITEM: one that its splits can divide */

/* True if one item takes so long that other threads would wait for it. */
static bool has_long_item(const am_schedule *s, int threads, long_item which)
{
    double longest = 0, all = 0;
    for (ptrdiff_t i = 0; i < s->count; i++) {
        const am_scheduled *g = &s->sections[i];
        const double work = (double)item_work(g);
        all += work * (double)g->items;
        if (g->shape.splits > 1 || which == ANY_ITEM) longest = work > longest ? work : longest;
    }
    return longest * threads * LONG_SHARE > all;
}

/* A few tasks of unequal lengths are dealt from one queue, the longest first. */
static am_status order_tasks(am_schedule *s, const am_attn_base *base, const am_sections *sections,
                             int threads)
{
    bool unequal =
        s->count > 1 && threads > 1 && s->tasks <= MOST_ORDERED && has_long_item(s, threads, ANY_ITEM);
    for (ptrdiff_t i = 0; i < s->count; i++)
        unequal |= s->sections[i].shape.q_blocks > 1 && s->sections[i].shape.splits > 1;
    if (!s->splits_are_tasks || !unequal) return AM_OK;
    task_work *works = malloc((size_t)s->tasks * sizeof *works);
    s->order = malloc((size_t)s->tasks * sizeof *s->order);
    for (ptrdiff_t task = 0; works && s->order && task < s->tasks; task++) {
        const am_scheduled *g = am_scheduled_of(s, task);
        const am_task_items some = am_items_of(g, task);
        const am_attn_place at = am_item_place(base, sections, g, some.first);
        const am_range tiles = am_split_tiles(g, am_item_tiles(base, sections, g, &at), some.split);
        works[task] = (task_work){some.count * at.rows * am_max(0, am_length(tiles)), task};
    }
    if (works && s->order) {
        qsort(works, (size_t)s->tasks, sizeof *works, compare_work);
        for (ptrdiff_t i = 0; i < s->tasks; i++) s->order[i] = works[i].task;
    }
    const bool failed = !works || !s->order;
    free(works);
    return failed ? AM_NO_MEMORY : AM_OK;
}

/* The tiles of a step: several if kernels take them at once, as long as logits are products alone. */
static ptrdiff_t step_tiles_of(const am_attn_base *base, double factor)
{
    const am_attn *f = base->attn;
    const am_terms_found *terms = &base->terms;
    const bool plain = !(terms->dropout || terms->cap || am_adds_to_products(terms)) && f->normalize &&
                       factor > 0 && base->unit == 1 && !f->k_scales.array.data && !f->v_scales.array.data &&
                       !terms->nearest_first && !f->alone;
    return base->arithmetic->steps && plain ? AM_STEP_TILES : 1;
}

/* Whether two sections of one block are of one shape. */
static bool is_like(const am_sections *sections, const am_section *a, const am_section *b)
{
    return am_length(a->blocks) == 1 && am_length(b->blocks) == 1 &&
           am_length(a->tiles) == am_length(b->tiles) &&
           am_most_queries(sections, a) == am_most_queries(sections, b);
}

am_status am_schedule_make(am_schedule *s, const am_attn_base *base, const am_sections *sections, int threads)
{
    const am_attn *f = base->attn;
    const ptrdiff_t panel = base->arithmetic->panel, panels = am_ceil_div(f->value_dim, panel);
    *s = (am_schedule){
        .count = sections->count,
        .sections = malloc((size_t)am_product(am_max(sections->count, 1), sizeof *s->sections, 1)),
        .factor = factor_of(base),
        .lanes = am_lanes(base, f->head_dim),
        .out_dim = am_ceil_div(2 * f->value_dim, panel) * panel / 2,
        .scale_bytes =
            am_scales_products(base) && f->k_scales.array.data && !f->k_scales.group ? TILE * base->size : 0,
    };
    if (!s->sections) return AM_NO_MEMORY;
    s->step_tiles = s->local_tiles = step_tiles_of(base, s->factor);
    s->k_bytes = TILE * s->lanes * base->size + s->scale_bytes;
    s->v_bytes = TILE * panels * panel * base->size / am_width(base) + s->scale_bytes;
    ptrdiff_t items = 0, all_splits = 0;
    for (ptrdiff_t i = 0; i < sections->count; i++) {
        const am_section *section = &sections->list[i];
        am_scheduled *g = &s->sections[i];
        const bool same = i > 0 && is_like(sections, section, section - 1);
        *g = (am_scheduled){.section = *section,
                            .shape = same ? g[-1].shape : shape_of(base, sections, section)};
        g->items = f->kv_heads * g->shape.head_blocks * g->shape.q_blocks;
        items += g->items, all_splits += g->items * g->shape.splits;
    }
    s->splits_are_tasks =
        items < FEW_ITEMS * threads || (threads > 1 && has_long_item(s, threads, SPLIT_ITEM));
    for (ptrdiff_t i = 0; i < sections->count; i++)
        deal(s, base, sections, &s->sections[i], s->splits_are_tasks ? all_splits : items, threads);
    sort(s);
    number(s, base);
    return order_tasks(s, base, sections, threads);
}

void am_schedule_free(am_schedule *s)
{
    free(s->sections);
    free(s->order);
}

/* --- Questions --- */

const am_scheduled *am_scheduled_of(const am_schedule *s, ptrdiff_t task)
{
    const am_scheduled *list = s->sections;
    return list + am_last_up_to(&list->first_task, s->count, sizeof *list, task);
}

am_task_items am_items_of(const am_scheduled *g, ptrdiff_t task)
{
    task -= g->first_task;
    const ptrdiff_t split_tasks = g->items / g->lot_items * g->lot_tasks, split = task / split_tasks,
                    begin = task % split_tasks / g->lot_tasks * g->lot_items,
                    first = begin + task % g->lot_tasks * g->task_items;
    return (am_task_items){
        .first = first, .count = am_min(g->task_items, begin + g->lot_items - first), .split = split};
}

am_attn_place am_item_place(const am_attn_base *base, const am_sections *sections, const am_scheduled *g,
                            ptrdiff_t item)
{
    const am_shape *h = &g->shape;
    const ptrdiff_t row = item / h->q_blocks, index = item % h->q_blocks;
    const ptrdiff_t block = g->section.blocks.end - 1 - index; /* longest first under a causal mask */
    /* Heads lie side by side: the pages of the next are still in the TLB. */
    const ptrdiff_t kv_head = row / h->head_blocks, in_kv_head = row % h->head_blocks * h->block_heads;
    return am_place_of(base, sections, &g->section, block, kv_head * base->heads_per_kv + in_kv_head,
                       am_min(h->block_heads, base->heads_per_kv - in_kv_head));
}

am_range am_item_tiles(const am_attn_base *base, const am_sections *sections, const am_scheduled *g,
                       const am_attn_place *at)
{
    return g->shape.q_blocks == 1 ? g->section.tiles : am_block_tiles(base, sections, at);
}

am_wave am_next_wave(const am_schedule *s, const am_attn_base *base, ptrdiff_t first_task)
{
    const am_scheduled *g = am_scheduled_of(s, first_task), *end = s->sections + s->count;
    am_wave wave = {.first_task = first_task, .tasks = s->tasks - first_task};
    const ptrdiff_t bytes = s->k_bytes + s->v_bytes, kv_heads = base->attn->kv_heads,
                    head_tasks = kv_heads ? g->items / kv_heads : 0;
    bool equal = g->shape.strategy == AM_SHARED_PACKING; /* heads have as many tasks as the first */
    ptrdiff_t head = equal ? (first_task - g->first_task) / head_tasks : 0, tasks = 0;
    if (equal) wave.first_shared = g->first_shared + head * am_length(g->section.tiles);
    while (g < end && g->shape.strategy == AM_SHARED_PACKING) {
        const ptrdiff_t tiles = am_length(g->section.tiles), more = g->items / kv_heads;
        if (!s->splits_are_tasks && tasks >= WAVE_TASKS &&
            am_product(wave.shared + tiles, bytes, 1) > WAVE_BYTES)
            break;
        equal = equal && more == head_tasks;
        tasks += more * (s->splits_are_tasks ? g->shape.splits : 1);
        wave.shared += tiles;
        if (++head == kv_heads) head = 0, g++;
    }
    if (g == end || g->shape.strategy == AM_SHARED_PACKING)
        wave.tasks = tasks;
    else
        equal = false; /* the sections that share nothing follow in the same loop */
    wave.row_tasks = s->order ? wave.tasks /* one queue */ : equal ? head_tasks : 1;
    return wave;
}
