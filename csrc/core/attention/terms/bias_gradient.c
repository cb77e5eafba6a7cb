/* bias_gradient.c – the gradient of the bias. */
#include "core/attention/terms/bias_gradient.h"

#include <stdlib.h>
#include <string.h>

enum {
    TILE = AM_FLASH_TILE,
    PIECE = 1 << 16, /* numbers that a thread zeroes or converts at a time */
};

typedef am_bias_gradient bias_gradient;

/* The index of the first number of a block in the result, or in its sums. */
static ptrdiff_t index_of(const bias_gradient *g, const am_attn_place *at, ptrdiff_t k)
{
    return am_bias_index(g->base->attn, g->base->terms.bias, at->b, at->head, at->q, k);
}

static void convert(const bias_gradient *g, ptrdiff_t index, const char *from, ptrdiff_t count)
{
    am_dtype own = g->base->type, wanted = g->base->terms.bias->array.type;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(wanted);
    const am_array to = am_one_row(g->result + index * size, wanted, size, count);
    am_scatter(g->base->all_kernels, &to, own, from, count);
}

/* --- Semaphores: ordered accumulation --- */

/* A task may add to what its keys share with the rows of a block while the semaphore holds its turn. */
typedef struct {
    atomic_ptrdiff_t *semaphore;
    ptrdiff_t turn;
} place_in_order;

static place_in_order order_of(const bias_gradient *g, const am_attn_place *at, ptrdiff_t task)
{
    const ptrdiff_t counts[] = {g->tasks, g->base->attn->heads}, here[] = {task, at->head},
                    sharers = am_bias_sharers(g->base->attn, g->base->terms.bias);
    const bool shared[] = {g->shape.channel == 1, g->shape.head == 1};
    ptrdiff_t turn = at->b % sharers, cell = at->b / sharers;
    for (int i = 0; i < 2; i++) {
        ptrdiff_t *which = shared[i] ? &turn : &cell;
        *which = *which * counts[i] + here[i];
    }
    if (g->shape.token != 1) { /* batch rows that share a bias have the same blocks */
        const bool same = sharers > 1 && !g->blocks->list;
        cell = cell * g->blocks->count + (same ? at->block % g->blocks->row : at->block);
    }
    return (place_in_order){&g->semaphores[cell], turn};
}

static am_status add_ordered(const bias_gradient *g, const am_attn_place *at, ptrdiff_t task, am_range keys,
                             const char *from, am_team *team)
{
    const place_in_order here = order_of(g, at, task);
    am_status status = am_await(team, here.semaphore, here.turn);
    if (status == AM_OK)
        g->base->arithmetic->add_rows(g->sums + index_of(g, at, keys.begin) * g->base->size, g->shape.channel,
                                      from, TILE, g->shape.token == 1 ? 1 : at->rows,
                                      g->shape.channel == 1 ? 1 : am_length(keys));
    return status;
}

static am_status pass_turn(const bias_gradient *g, const am_attn_place *at, ptrdiff_t task, am_team *team)
{
    const place_in_order here = order_of(g, at, task);
    am_status status = am_await(team, here.semaphore, here.turn);
    if (status == AM_OK) atomic_store_explicit(here.semaphore, here.turn + 1, memory_order_release);
    return status;
}

/* --- Tiles --- */

/* Sums up a tile along shared axes into its first row or column. */
static void fold(const bias_gradient *g, char *tile, ptrdiff_t rows)
{
    for (ptrdiff_t r = 0; g->shape.channel == 1 && r < rows; r++) {
        double sum = 0;
        for (ptrdiff_t c = 0; c < TILE; c++) sum += am_number(g->base, tile, r * TILE + c);
        am_set_number(g->base, tile, r * TILE, sum);
    }
    if (g->shape.token == 1)
        g->base->arithmetic->add_rows(tile, 0, tile + TILE * g->base->size, TILE, rows - 1, TILE);
}

/* A bias that all queries share is first summed over the whole task: if each block had a turn, the tasks
 * that share it would run one after the other. */
ptrdiff_t am_bias_scratch_bytes(const bias_gradient *g)
{
    return g->sums && g->shape.token == 1 ? g->base->heads_per_kv * g->task_tiles * TILE * g->base->size : 0;
}

static ptrdiff_t scratch_offset(const bias_gradient *g, const am_attn_place *at, ptrdiff_t index)
{
    return (at->head % g->base->heads_per_kv * g->task_tiles + index) * TILE * g->base->size;
}

/* True if each number of the gradient comes from one block and one tile: it is written once. */
static bool writes_once(const bias_gradient *g) { return g->result && !g->sums; }

void am_bias_clear(const bias_gradient *g, const am_attn_place *at, am_range keys)
{
    if (!writes_once(g) || am_length(keys) <= 0) return;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(g->base->terms.bias->array.type);
    char *to = g->result + index_of(g, at, keys.begin) * size;
    for (ptrdiff_t r = 0; r < at->rows; r++, to += g->shape.channel * size)
        memset(to, 0, (size_t)(am_length(keys) * size));
}

void am_bias_begin_rows(const bias_gradient *g, const am_attn_place *at, const am_ranges *ranges,
                        am_range tiles)
{
    ptrdiff_t behind = 0; /* the last tile */
    if (!writes_once(g)) return;
    for (ptrdiff_t i = tiles.begin; i < tiles.end; i++) {
        const am_range keys = am_range_at(ranges, i);
        am_bias_clear(g, at, (am_range){behind, keys.begin});
        behind = keys.end;
    }
    am_bias_clear(g, at, (am_range){behind, g->base->attn->keys});
}

char *am_bias_place(const bias_gradient *g, const am_attn_place *at, am_range keys)
{
    const am_attn_base *base = g->base;
    if (!writes_once(g) || base->terms.bias->array.type != base->type || am_length(keys) < TILE) return NULL;
    return g->result + index_of(g, at, keys.begin) * base->size;
}

am_status am_bias_add(const bias_gradient *g, const am_attn_place *at, ptrdiff_t task,
                      const am_bias_tile *tile, char *scratch, am_team *team)
{
    const ptrdiff_t row = TILE * g->base->size;
    if (!g->sums) {
        const ptrdiff_t first = index_of(g, at, tile->keys.begin);
        for (ptrdiff_t r = 0; r < at->rows; r++)
            convert(g, first + r * g->shape.channel, tile->d_s + r * row, am_length(tile->keys));
        return AM_OK;
    }
    fold(g, tile->d_s, at->rows);
    if (g->shape.token != 1) return add_ordered(g, at, task, tile->keys, tile->d_s, team);
    char *sums = scratch + scratch_offset(g, at, tile->index);
    g->base->arithmetic->add_rows(sums, TILE, tile->d_s, TILE, 1, TILE);
    return AM_OK;
}

am_status am_bias_end_block(const bias_gradient *g, const am_attn_place *at, ptrdiff_t task, am_team *team)
{
    return g->sums && g->shape.token != 1 ? pass_turn(g, at, task, team) : AM_OK;
}

am_status am_bias_end_task(const bias_gradient *g, const am_attn_place *at, ptrdiff_t task,
                           const am_ranges *ranges, am_range tiles, const char *scratch, am_team *team)
{
    if (!am_bias_scratch_bytes(g)) return AM_OK;
    am_attn_place head = *at;
    am_status status = AM_OK;
    for (ptrdiff_t h = 0; status == AM_OK && h < g->base->heads_per_kv; h++) {
        head.head = at->kv_head * g->base->heads_per_kv + h;
        for (ptrdiff_t i = 0; status == AM_OK && i < am_length(tiles); i++)
            status = add_ordered(g, &head, task, am_range_at(ranges, tiles.begin + i),
                                 scratch + scratch_offset(g, &head, i), team);
        if (status == AM_OK) status = pass_turn(g, &head, task, team);
    }
    return status;
}

/* --- Begin and end --- */

am_status am_bias_gradient_make(bias_gradient *g, const am_attn_base *base, const am_sections *sections,
                                ptrdiff_t tasks, ptrdiff_t task_tiles)
{
    const am_logit_term *bias = base->terms.bias;
    *g = (bias_gradient){.base = base,
                         .result = bias ? bias->gradient : NULL,
                         .blocks = &sections->blocks,
                         .tasks = tasks,
                         .task_tiles = task_tiles};
    if (!g->result) return AM_OK;
    g->shape = bias->array.shape;
    g->count = g->shape.batch * g->shape.head * g->shape.token * g->shape.channel;
    const am_attn *f = base->attn;
    const am_by_axis *s = &g->shape;
    if (s->batch == f->batch && s->head == f->heads && s->token == f->queries && s->channel == f->keys)
        return AM_OK;
    const ptrdiff_t cells = am_product(s->batch * s->head * (s->channel == 1 ? 1 : tasks),
                                       s->token == 1 ? 1 : sections->blocks.count, sizeof *g->semaphores);
    g->semaphores = calloc((size_t)am_max(cells, 1), 1);
    g->sums = bias->array.type == base->type ? g->result : am_alloc_aligned(g->count * base->size);
    return g->semaphores && g->sums ? AM_OK : AM_NO_MEMORY;
}

void am_bias_gradient_free(const bias_gradient *g)
{
    free(g->semaphores);
    if (g->sums != g->result) am_free_aligned(g->sums, g->count * g->base->size);
}

static am_status zero_task(void *arg, ptrdiff_t index, am_team *team)
{
    const bias_gradient *g = arg;
    const ptrdiff_t size = g->base->size, begin = index * PIECE;
    memset(g->sums + begin * size, 0, (size_t)(am_min(PIECE, g->count - begin) * size));
    return am_checkpoint(team);
}

static am_status convert_task(void *arg, ptrdiff_t index, am_team *team)
{
    const bias_gradient *g = arg;
    ptrdiff_t begin = index * PIECE;
    convert(g, begin, g->sums + begin * g->base->size, am_min(PIECE, g->count - begin));
    return am_checkpoint(team);
}

am_status am_bias_gradient_begin(const am_context *context, bias_gradient *g)
{
    return g->sums ? am_parallel(context, am_ceil_div(g->count, PIECE), 1, zero_task, g) : AM_OK;
}

am_status am_bias_gradient_end(const am_context *context, bias_gradient *g)
{
    bool elsewhere = g->sums && g->sums != g->result;
    return elsewhere ? am_parallel(context, am_ceil_div(g->count, PIECE), 1, convert_task, g) : AM_OK;
}
