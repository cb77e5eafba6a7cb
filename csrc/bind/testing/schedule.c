/* schedule.c – how a call of attention is divided, as plain data, for tests and simulations. */
#include "bind/testing/schedule.h"

#include "bind/python/state.h"
#include "core/attention/backward_plan.h"
#include "core/attention/plan/schedule.h"

/* Appends an item to a list, which is NULL from the first failure on. */
static void append(PyObject **list, PyObject *item)
{
    if (*list && (!item || PyList_Append(*list, item) < 0)) Py_CLEAR(*list);
    Py_XDECREF(item);
}

/* --- Forward --- */

/* A schedule of attention forward, and what it was made from. */
typedef struct {
    const am_attn_base *base;
    const am_sections *sections;
    const am_schedule *schedule;
} schedule_view;

static PyObject *section_data(const am_scheduled *g)
{
    return Py_BuildValue("{s:n,s:(nn),s:(nn),s:n,s:s,s:n,s:n,s:n,s:n}", "row", g->section.b, "queries",
                         g->section.queries.begin, g->section.queries.end, "keys", g->section.keys.begin,
                         g->section.keys.end, "tiles", am_length(g->section.tiles), "strategy",
                         am_strategy_name(g->shape.strategy), "block_rows", g->shape.rows, "items", g->items,
                         "splits", g->shape.splits, "task_items", g->task_items);
}

/* The index of a task's section, and the rows and the number of tiles of each of its items. */
static PyObject *task_data(const am_attn_base *base, const am_sections *sections, const am_schedule *s,
                           ptrdiff_t task)
{
    const am_scheduled *g = am_scheduled_of(s, task);
    const am_task_items task_items = am_items_of(g, task);
    PyObject *items = PyList_New(0);
    for (ptrdiff_t i = task_items.first; items && i < task_items.first + task_items.count; i++) {
        const am_attn_place at = am_item_place(base, sections, g, i);
        const am_range seen = am_item_tiles(base, sections, g, &at);
        ptrdiff_t tiles = 0;
        for (ptrdiff_t split = 0; split < g->shape.splits; split++) {
            if (!s->splits_are_tasks || split == task_items.split)
                tiles += am_max(0, am_length(am_split_tiles(g, seen, split)));
        }
        append(&items, Py_BuildValue("(nn)", at.rows, tiles));
    }
    return items ? Py_BuildValue("(nN)", (Py_ssize_t)(g - s->sections), items) : NULL;
}

static PyObject *section_at(const schedule_view *view, ptrdiff_t i)
{
    return section_data(&view->schedule->sections[i]);
}
static PyObject *task_at(const schedule_view *view, ptrdiff_t i)
{
    return task_data(view->base, view->sections, view->schedule, am_task_at(view->schedule, i));
}

static PyObject *list_of(const schedule_view *view, ptrdiff_t count,
                         PyObject *(*make)(const schedule_view *, ptrdiff_t))
{
    PyObject *list = PyList_New(0);
    for (ptrdiff_t i = 0; list && i < count; i++) append(&list, make(view, i));
    return list;
}

/* The number of tasks in each parallel loop, and how many of them one thread takes in order if it can. */
static PyObject *wave_list(const schedule_view *view)
{
    PyObject *list = PyList_New(0);
    for (ptrdiff_t task = 0; list && task < view->schedule->tasks;) {
        const am_wave wave = am_next_wave(view->schedule, view->base, task);
        append(&list, Py_BuildValue("(nn)", wave.tasks, wave.row_tasks));
        task += wave.tasks;
    }
    return list;
}

PyObject *am_attention_schedule(PyObject *module, const am_attn *attn, int threads)
{
    am_scoped(am_sections_free) am_sections sections = {0};
    am_scoped(am_schedule_free) am_schedule schedule = {0};
    am_call call;
    const am_context *context = am_enter(&call, module, 0);
    const am_attn_base base = am_attn_base_of(context, attn);
    am_status status = am_mask_prepare(context, attn->mask);
    if (status == AM_OK) status = am_sections_make(&sections, attn->mask, true);
    if (status == AM_OK) status = am_schedule_make(&schedule, &base, &sections, threads);
    if (am_leave(&call, status) < 0) return NULL;
    const schedule_view view = {.base = &base, .sections = &sections, .schedule = &schedule};
    return Py_BuildValue("{s:N,s:N,s:N,s:n}", "sections", list_of(&view, schedule.count, section_at), "tasks",
                         list_of(&view, schedule.tasks, task_at), "waves", wave_list(&view), "scratch",
                         am_attn_scratch(&base, &schedule, threads));
}

/* --- Backward --- */

/* The tiles that each block of a section sees, of its own. */
static PyObject *blocks_of(const am_backward_plan *p, const am_section *section)
{
    PyObject *blocks = PyList_New(0);
    for (ptrdiff_t block = section->blocks.begin; blocks && block < section->blocks.end; block++) {
        const am_attn_place at = am_place_of(&p->base, &p->sections, section, block, 0, 1);
        const am_range tiles = am_block_tiles(&p->base, &p->sections, &at);
        append(&blocks,
               Py_BuildValue("(nn)", tiles.begin - section->tiles.begin, tiles.end - section->tiles.begin));
    }
    return blocks;
}

/* The sections of a task, and the tiles that it takes of them. */
static PyObject *tiles_of_task(const am_backward_plan *p, const am_key_task *task)
{
    PyObject *some = PyList_New(0);
    for (ptrdiff_t g = task->sections.begin; some && g < task->sections.end; g++) {
        const am_range own = p->sections.list[g].tiles,
                       tiles = {am_max(own.begin, task->tiles.begin), am_min(own.end, task->tiles.end)};
        if (tiles.begin < tiles.end)
            append(&some, Py_BuildValue("(nnn)", g, tiles.begin - own.begin, tiles.end - own.begin));
    }
    return some;
}

PyObject *am_backward_schedule(PyObject *module, const am_attn *attn, int threads)
{
    am_scoped(am_backward_plan_free) am_backward_plan plan = {.threads = threads};
    am_backward_plan *const p = &plan;
    am_call call;
    const am_context *context = am_enter(&call, module, 0);
    p->base = am_attn_base_of(context, attn);
    am_status status = am_mask_prepare(context, attn->mask);
    if (status == AM_OK) status = am_backward_plan_make(p, true);
    if (am_leave(&call, status) < 0) return NULL;
    PyObject *sections = PyList_New(0), *tasks = PyList_New(0);
    for (ptrdiff_t g = 0; sections && g < p->sections.count; g++)
        append(&sections,
               Py_BuildValue("{s:n,s:n,s:N}", "sum_tiles", p->sums[g].tiles, "split_visits",
                             p->sums[g].split_visits, "blocks", blocks_of(p, &p->sections.list[g])));
    for (ptrdiff_t i = 0; tasks && i < p->base.attn->batch * p->row_tasks; i++)
        append(&tasks, Py_BuildValue("(nN(nn)nn)", i / p->row_tasks, tiles_of_task(p, &p->tasks[i]),
                                     p->tasks[i].visits.begin, p->tasks[i].visits.end, p->tasks[i].split,
                                     p->tasks[i].splits));
    return Py_BuildValue("{s:N,s:N,s:n}", "sections", sections, "tasks", tasks, "row_tasks", p->row_tasks);
}
