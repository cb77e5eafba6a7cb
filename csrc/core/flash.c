/* flash.c – attention forward: the plan, and the way of one block of query rows over its keys.
 *
 * A block is up to 64 query rows of one head, or where queries are few, those of several heads that share
 * keys. It walks over tiles of 64 keys, which are packed into panels: once for all blocks that share them, or
 * by the block itself if it is the only one. Where blocks are too few to keep many threads busy, the keys of
 * each are split, and what the splits gather is merged. All of it depends on shapes alone, so no result
 * depends on the number of threads. */
#define _DEFAULT_SOURCE /* madvise */
#include "core/flash.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#    include <sys/mman.h>
#endif

#include "core/convert.h"

enum {
    TILE = AM_FLASH_TILE,
    SHARED_QUERIES = 32, /* up to so many queries, a block takes several heads */
    ENOUGH_TASKS = 64,   /* for any number of threads */
    LEAST_SPLIT = 512,   /* keys that are worth a task */
    LINE = 64,
    HUGE_PAGE = 2 << 20,
    WIDEST = 8, /* bytes of a number; a bias may be wider than the arithmetic */
};

static ptrdiff_t min(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
static ptrdiff_t max(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }
static ptrdiff_t ceil_div(ptrdiff_t a, ptrdiff_t b) { return a / b + (a % b != 0); }

typedef struct {
    const am_flash *flash;
    const am_flash_kernels *kernels;
    const am_kernels *all_kernels;
    am_dtype type;        /* of arithmetic */
    ptrdiff_t size;       /* of its elements */
    ptrdiff_t group;      /* query heads that share keys */
    ptrdiff_t block_rows; /* queries of a block */
    ptrdiff_t block_heads;
    ptrdiff_t head_blocks, q_blocks;
    ptrdiff_t splits, split_keys;
    ptrdiff_t tiles;            /* of all keys */
    ptrdiff_t out_depth;        /* value_depth, in whole panels */
    ptrdiff_t k_bytes, v_bytes; /* of a packed tile */
    char *packed;               /* [batch][kv_heads][tiles] of k and v, NULL if blocks pack their own */
    uint8_t *finite;            /* the same, whether v is */
    char *partials;             /* [batch][kv_heads][head_blocks][q_blocks][splits], NULL without splits */
    ptrdiff_t partial_bytes;
    char *scratch; /* of each thread */
    ptrdiff_t scratch_bytes;
    atomic_flag *taken;
    double unit;        /* of logits, as an exponent of 2 */
    uint32_t threshold; /* of dropout */
} plan;

/* What a block works on; arrays of the arithmetic type. */
typedef struct {
    char *q, *logits, *bias, *k, *v, *row; /* row: one of keys, values or results on its way */
    char *gathered;                        /* out, high, sum, top */
    uint64_t *live, *kept;
} scratch;

typedef struct {
    ptrdiff_t b, kv_head, head, heads, q, queries, rows; /* row r: head + r / queries, q + r % queries */
    ptrdiff_t split;
} place;

/* The next `bytes` of `base`, whole lines; NULL as long as there is no base and lengths are only added up. */
static char *take(char *base, ptrdiff_t *used, ptrdiff_t bytes)
{
    char *at = base ? base + *used : NULL;
    *used += ceil_div(bytes, LINE) * LINE;
    return at;
}

/* Out, high, sum and top of a block lie side by side. */
static am_flash_rows gathered(const plan *p, char *at, ptrdiff_t rows)
{
    ptrdiff_t out_bytes = AM_FLASH_ROWS * p->out_depth * p->size, fact_bytes = AM_FLASH_ROWS * p->size;
    return (am_flash_rows){
        .rows = rows,
        .depth = p->flash->depth,
        .out_depth = p->out_depth,
        .out = at,
        .high = at + out_bytes,
        .sum = at + out_bytes + fact_bytes,
        .top = at + out_bytes + 2 * fact_bytes,
        .cap = p->flash->cap,
        .unit = p->unit,
    };
}
static ptrdiff_t gathered_bytes(const plan *p) { return AM_FLASH_ROWS * (p->out_depth + 3) * p->size; }

/* Lays out the scratch of one thread from `base` on, which may be NULL; returns its length. */
static ptrdiff_t lay_out(const plan *p, char *base, scratch *s)
{
    const am_flash *f = p->flash;
    ptrdiff_t used = 0;
    s->q = take(base, &used, AM_FLASH_ROWS * f->depth * p->size);
    s->logits = take(base, &used, AM_FLASH_ROWS * TILE * p->size);
    s->bias = take(base, &used, f->bias ? AM_FLASH_ROWS * TILE * p->size : 0);
    s->row = take(base, &used, 2 * TILE * max(f->depth, max(f->value_depth, 1)) * WIDEST);
    s->k = take(base, &used, p->k_bytes);
    s->v = take(base, &used, p->v_bytes);
    s->gathered = take(base, &used, gathered_bytes(p));
    s->live = (uint64_t *)take(base, &used, AM_FLASH_ROWS * (ptrdiff_t)sizeof(uint64_t));
    s->kept = (uint64_t *)take(base, &used, AM_FLASH_ROWS * (ptrdiff_t)sizeof(uint64_t));
    return used;
}

static ptrdiff_t claim(const plan *p)
{
    ptrdiff_t i = 0;
    while (atomic_flag_test_and_set(&p->taken[i])) i++; /* there are as many as threads */
    return i;
}

/* --- Numbers in and out
 * ---------------------------------------------------------------------------------------- */

/* Rows of `count` numbers as contiguous numbers of the arithmetic type: in place, or in `room`, which has
 * space for them twice, however wide. */
static const char *read_rows(const plan *p, char *room, const char *src, ptrdiff_t row_step,
                             ptrdiff_t element_step, am_dtype type, ptrdiff_t rows, ptrdiff_t count,
                             ptrdiff_t *step)
{
    ptrdiff_t size = (ptrdiff_t)am_size_of(type);
    if (type == p->type && element_step == size && row_step % size == 0) {
        *step = row_step / size;
        return src;
    }
    char *raw = type == p->type ? room : room + ceil_div(rows * count * p->size, LINE) * LINE;
    *step = count;
    if (element_step == size) {
        if (type == p->type) {
            for (ptrdiff_t r = 0; r < rows; r++)
                memcpy(raw + r * count * size, src + r * row_step, (size_t)(count * size));
            return room;
        }
        am_convert_row *convert = am_converter(type, p->type);
        for (ptrdiff_t r = 0; r < rows; r++)
            convert(p->all_kernels, room + r * count * p->size, src + r * row_step, count);
        return room;
    }
    am_copy_2d(raw, count * size, size, src, row_step, element_step, rows, count, (size_t)size);
    if (type != p->type) am_converter(type, p->type)(p->all_kernels, room, raw, rows * count);
    return room;
}

static void pack_tile(const plan *p, const place *at, ptrdiff_t k, char *room, char *k_to, char *v_to,
                      bool *finite)
{
    const am_flash *f = p->flash;
    ptrdiff_t rows = min(TILE, f->keys - k), step;
    const char *src = f->k.data + at->b * f->k.batch + at->kv_head * f->k.head + k * f->k.token;
    src = read_rows(p, room, src, f->k.token, f->k.element, f->k.type, rows, f->depth, &step);
    p->kernels->pack_keys(k_to, src, step, rows, f->depth);
    src = f->v.data + at->b * f->v.batch + at->kv_head * f->v.head + k * f->v.token;
    src = read_rows(p, room, src, f->v.token, f->v.element, f->v.type, rows, f->value_depth, &step);
    *finite = p->kernels->pack_values(v_to, src, step, rows, f->value_depth);
}

/* Asks for the rows of a tile ahead of time: they may lie a page apart, where the processor does not guess.
 */
static void prefetch_rows(const am_tokens *t, const place *at, ptrdiff_t k, ptrdiff_t rows, ptrdiff_t count)
{
    ptrdiff_t bytes = count * (ptrdiff_t)am_size_of(t->type);
    if (t->element != (ptrdiff_t)am_size_of(t->type)) return;
    const char *row = t->data + at->b * t->batch + at->kv_head * t->head + k * t->token;
    for (ptrdiff_t r = 0; r < rows; r++, row += t->token) {
        for (ptrdiff_t i = 0; i < bytes; i += LINE) __builtin_prefetch(row + i, 0, 2);
    }
}

static am_status pack_task(void *arg, ptrdiff_t index, am_team *team)
{
    const plan *p = arg;
    ptrdiff_t mine = claim(p), head = index / p->tiles;
    scratch s;
    lay_out(p, p->scratch + mine * p->scratch_bytes, &s);
    const place at = {.b = head / p->flash->kv_heads, .kv_head = head % p->flash->kv_heads};
    char *to = p->packed + index * (p->k_bytes + p->v_bytes);
    bool finite;
    pack_tile(p, &at, index % p->tiles * TILE, s.row, to, to + p->k_bytes, &finite);
    p->finite[index] = finite;
    atomic_flag_clear(&p->taken[mine]);
    return am_checkpoint(team);
}

static double number(const plan *p, const void *array, ptrdiff_t i)
{
    return p->type == AM_FLOAT64 ? ((const double *)array)[i] : (double)((const float *)array)[i];
}
static void set_number(const plan *p, void *array, ptrdiff_t i, double x)
{
    if (p->type == AM_FLOAT64)
        ((double *)array)[i] = x;
    else
        ((float *)array)[i] = (float)x;
}

static ptrdiff_t head_of(const place *at, ptrdiff_t row) { return at->head + row / at->queries; }
static ptrdiff_t query_of(const place *at, ptrdiff_t row) { return at->q + row % at->queries; }

static void scale_row(const plan *p, char *to, const char *from, double scale)
{
    ptrdiff_t depth = p->flash->depth;
    if (p->type == AM_FLOAT64) {
        for (ptrdiff_t i = 0; i < depth; i++) ((double *)to)[i] = ((const double *)from)[i] * scale;
    } else {
        float factor = (float)scale;
        for (ptrdiff_t i = 0; i < depth; i++) ((float *)to)[i] = ((const float *)from)[i] * factor;
    }
}

static const double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

static void begin_block(const plan *p, const place *at, const scratch *s, am_flash_rows *block)
{
    const am_flash *f = p->flash;
    double scale = f->scale * LOG2_E / p->unit;
    for (ptrdiff_t r = 0; r < at->rows; r++) {
        ptrdiff_t step;
        const char *src =
            f->q.data + at->b * f->q.batch + head_of(at, r) * f->q.head + query_of(at, r) * f->q.token;
        src = read_rows(p, s->row, src, 0, f->q.element, f->q.type, 1, f->depth, &step);
        scale_row(p, s->q + r * f->depth * p->size, src, scale);
    }
    memset(block->out, 0, (size_t)(at->rows * p->out_depth * p->size));
    for (ptrdiff_t r = 0; r < at->rows; r++) {
        double high = -INFINITY, sum = 0;
        const double *sinks = f->sinks + head_of(at, r) * f->sink_count;
        for (ptrdiff_t i = 0; at->split == 0 && i < f->sink_count; i++)
            high = fmax(high, sinks[i] * LOG2_E / p->unit);
        set_number(p, block->high, r, high);
        set_number(p, block->top, r, high);
        high = number(p, block->high, r); /* rounded, as the logits will meet it */
        for (ptrdiff_t i = 0; at->split == 0 && i < f->sink_count; i++)
            sum += sinks[i] == -INFINITY ? 0 : exp2(sinks[i] * LOG2_E - high * p->unit);
        set_number(p, block->sum, r, sum);
    }
}

/* --- Which pairs of a tile are live
 * ------------------------------------------------------------------------------- */

/* Fills in s->live; whether there is any pair, and whether all are. */
static am_tile find_live(const plan *p, const place *at, ptrdiff_t k, ptrdiff_t columns, const scratch *s)
{
    uint64_t all = columns == TILE ? UINT64_MAX : ((uint64_t)1 << columns) - 1;
    bool any_dead = columns < TILE, any_live = false;
    for (ptrdiff_t h = 0; h < at->heads; h++) {
        uint64_t *live = s->live + h * at->queries;
        am_tile tile =
            am_mask_bits(p->flash->mask, at->b, at->head + h, at->q, at->queries, k, columns, live);
        for (ptrdiff_t r = 0; tile != AM_MIXED && r < at->queries; r++) live[r] = tile == AM_FULL ? all : 0;
        any_dead |= tile != AM_FULL;
        any_live |= tile != AM_DEAD;
    }
    return !any_live ? AM_DEAD : any_dead ? AM_MIXED : AM_FULL;
}

/* Reads the bias of a tile, and takes pairs where it is -INFINITY for dead. */
static am_tile read_bias(const plan *p, const place *at, ptrdiff_t k, ptrdiff_t columns, const scratch *s,
                         am_tile tile)
{
    const am_flash *f = p->flash;
    ptrdiff_t distinct = f->bias_column ? columns : 1;
    uint64_t any = 0;
    for (ptrdiff_t r = 0; r < at->rows; r++) {
        const char *src = f->bias + at->b * f->bias_batch + head_of(at, r) * f->bias_head +
                          query_of(at, r) * f->bias_row + k * f->bias_column;
        ptrdiff_t step;
        src = read_rows(p, s->row, src, 0, f->bias_column, f->bias_type, 1, distinct, &step);
        char *to = s->bias + r * TILE * p->size;
        uint64_t live = s->live[r];
        for (ptrdiff_t i = 0; i < TILE; i++) {
            double x = i < columns ? number(p, src, f->bias_column ? i : 0) : 0;
            set_number(p, to, i, x);
            if (x == -INFINITY) live &= ~((uint64_t)1 << i);
        }
        if (live != s->live[r]) tile = AM_MIXED;
        any |= s->live[r] = live;
    }
    return any ? tile : AM_DEAD;
}

static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* What dropout's bits of one row are drawn with. */
static uint64_t row_key(uint64_t seed, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q)
{
    uint64_t key = mixed(seed + 0x9e3779b97f4a7c15u);
    key = mixed(key ^ (uint64_t)b) + 0x9e3779b97f4a7c15u;
    key = mixed(key ^ (uint64_t)h) + 0x9e3779b97f4a7c15u;
    return mixed(key ^ (uint64_t)q);
}

static uint32_t threshold_of(double probability)
{
    double scaled = nearbyint(ldexp(probability, 32));
    return scaled >= 0x1p32 ? UINT32_MAX : (uint32_t)scaled;
}

/* --- Blocks
 * ------------------------------------------------------------------------------------------------------ */

static place place_of(const plan *p, ptrdiff_t index)
{
    const am_flash *f = p->flash;
    place at = {.split = index % p->splits};
    index /= p->splits;
    ptrdiff_t block = p->q_blocks - 1 - index % p->q_blocks; /* under a causal mask the longest come first */
    index /= p->q_blocks;
    ptrdiff_t head_block = index % p->head_blocks;
    index /= p->head_blocks;
    at.kv_head = index % f->kv_heads;
    at.b = index / f->kv_heads;
    at.head = at.kv_head * p->group + head_block * p->block_heads;
    at.heads = min(p->block_heads, p->group - head_block * p->block_heads);
    at.q = block * p->block_rows;
    at.queries = min(p->block_rows, f->queries - at.q);
    at.rows = at.heads * at.queries;
    return at;
}

/* Results of a block: out and lse. */
static void write_rows(const plan *p, const place *at, const am_flash_rows *block, char *room)
{
    const am_flash *f = p->flash;
    ptrdiff_t size = (ptrdiff_t)am_size_of(f->out.type);
    for (ptrdiff_t r = 0; r < at->rows; r++) {
        double high = number(p, block->high, r), sum = number(p, block->sum, r),
               top = number(p, block->top, r);
        ptrdiff_t h = head_of(at, r), q = query_of(at, r);
        char *row = (char *)block->out + r * p->out_depth * p->size;
        double factor = f->normalize ? 1 / sum : exp2((high - top) * p->unit);
        if (f->dropout > 0) factor /= 1 - f->dropout;
        if (sum == 0) factor = 0; /* no live pair and no sink: out is zero already */
        for (ptrdiff_t i = 0; i < f->value_depth; i++) set_number(p, row, i, number(p, row, i) * factor);
        if (f->lse)
            set_number(p, f->lse, (at->b * f->heads + h) * f->queries + q,
                       sum == 0 ? -INFINITY : (high * p->unit + log2(sum)) * LN_2);
        char *dst = f->out.data + at->b * f->out.batch + h * f->out.head + q * f->out.token;
        if (f->out.type != p->type) {
            bool direct = f->out.element == size;
            am_converter(p->type, f->out.type)(p->all_kernels, direct ? dst : room, row, f->value_depth);
            if (direct) continue;
            row = room;
        }
        am_copy_2d(dst, 0, f->out.element, row, 0, size, 1, f->value_depth, (size_t)size);
    }
}

static am_status walk(const plan *p, const place *at, const scratch *s, am_flash_rows *block, am_team *team)
{
    const am_flash *f = p->flash;
    ptrdiff_t begin = PTRDIFF_MAX, end = 0;
    for (ptrdiff_t h = 0; h < at->heads; h++) {
        am_keys keys = am_mask_keys(f->mask, at->b, at->head + h, at->q, at->queries);
        if (keys.begin >= keys.end) continue;
        begin = min(begin, keys.begin);
        end = max(end, keys.end);
    }
    begin = max(begin / TILE * TILE, at->split * p->split_keys);
    end = min(end, (at->split + 1) * p->split_keys);
    uint64_t keys[AM_FLASH_ROWS];
    for (ptrdiff_t r = 0; p->threshold && r < at->rows; r++)
        keys[r] = row_key(f->seed, at->b, head_of(at, r), query_of(at, r));
    for (ptrdiff_t k = begin; k < end; k += TILE) {
        ptrdiff_t columns = min(TILE, f->keys - k);
        am_tile kind = find_live(p, at, k, columns, s);
        if (kind != AM_DEAD && f->bias) kind = read_bias(p, at, k, columns, s, kind);
        if (kind == AM_DEAD) continue;
        am_flash_tile tile = {.live = kind == AM_FULL ? NULL : s->live, .bias = f->bias ? s->bias : NULL};
        if (p->packed) {
            ptrdiff_t index = (at->b * f->kv_heads + at->kv_head) * p->tiles + k / TILE;
            tile.k = p->packed + index * (p->k_bytes + p->v_bytes);
            tile.v = (const char *)tile.k + p->k_bytes;
            tile.finite = p->finite[index];
        } else {
            ptrdiff_t next = min(TILE, end - k - TILE);
            prefetch_rows(&f->k, at, k + TILE, next, f->depth);
            prefetch_rows(&f->v, at, k + TILE, next, f->value_depth);
            pack_tile(p, at, k, s->row, s->k, s->v, &tile.finite);
            tile.k = s->k, tile.v = s->v;
        }
        if (p->threshold) {
            for (ptrdiff_t r = 0; r < at->rows; r++)
                s->kept[r] = p->all_kernels->keep_bits(keys[r], (uint32_t)k, p->threshold);
            tile.kept = s->kept;
        }
        p->kernels->step(block, &tile);
        am_status status = am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

static am_status block_task(void *arg, ptrdiff_t index, am_team *team)
{
    const plan *p = arg;
    const place at = place_of(p, index);
    ptrdiff_t mine = claim(p);
    scratch s;
    lay_out(p, p->scratch + mine * p->scratch_bytes, &s);
    am_flash_rows block =
        gathered(p, p->partials ? p->partials + index * p->partial_bytes : s.gathered, at.rows);
    block.q = s.q, block.logits = s.logits;
    begin_block(p, &at, &s, &block);
    am_status status = walk(p, &at, &s, &block, team);
    if (status == AM_OK && !p->partials) write_rows(p, &at, &block, s.row);
    atomic_flag_clear(&p->taken[mine]);
    return status;
}

/* Merges the splits of one block into the first. */
static am_status merge_task(void *arg, ptrdiff_t index, am_team *team)
{
    const plan *p = arg;
    const place at = place_of(p, index * p->splits);
    am_flash_rows whole = gathered(p, p->partials + index * p->splits * p->partial_bytes, at.rows);
    for (ptrdiff_t r = 0; r < at.rows; r++) {
        double high = -INFINITY, top = -INFINITY, sum = 0;
        char *out = (char *)whole.out + r * p->out_depth * p->size;
        for (ptrdiff_t i = 0; i < p->splits; i++) {
            am_flash_rows part = gathered(p, (char *)whole.out + i * p->partial_bytes, at.rows);
            high = fmax(high, number(p, part.high, r));
            top = fmax(top, number(p, part.top, r));
        }
        for (ptrdiff_t i = 0; i < p->splits; i++) {
            am_flash_rows part = gathered(p, (char *)whole.out + i * p->partial_bytes, at.rows);
            double part_high = number(p, part.high, r), part_sum = number(p, part.sum, r);
            /* All of a NaN row is NaN, though nothing was greater than -INFINITY in it. */
            double factor = part_sum == 0 ? 0 : high == -INFINITY ? 1 : exp2((part_high - high) * p->unit);
            sum += part_sum == 0 ? 0 : part_sum * factor;
            const char *from = (const char *)part.out + r * p->out_depth * p->size;
            for (ptrdiff_t j = 0; j < p->flash->value_depth; j++) {
                double x = part_sum == 0 ? 0 : number(p, from, j) * factor;
                set_number(p, out, j, i == 0 ? x : number(p, out, j) + x);
            }
        }
        set_number(p, whole.high, r, high);
        set_number(p, whole.top, r, top);
        set_number(p, whole.sum, r, sum);
    }
    ptrdiff_t mine = claim(p);
    write_rows(p, &at, &whole, p->scratch + mine * p->scratch_bytes);
    atomic_flag_clear(&p->taken[mine]);
    return am_checkpoint(team);
}

/* --- The plan
 * ---------------------------------------------------------------------------------------------------- */

static void choose(plan *p)
{
    const am_flash *f = p->flash;
    p->unit = f->bias || f->cap > 0 ? LOG2_E : 1;
    p->group = f->heads / f->kv_heads;
    bool shared = p->group > 1 && f->queries <= SHARED_QUERIES;
    p->block_rows = min(f->queries, AM_FLASH_ROWS);
    p->block_heads = shared ? min(p->group, AM_FLASH_ROWS / p->block_rows) : 1;
    p->head_blocks = ceil_div(p->group, p->block_heads);
    p->q_blocks = ceil_div(f->queries, p->block_rows);
    p->tiles = ceil_div(f->keys, TILE);
    p->out_depth = ceil_div(f->value_depth, p->kernels->panel) * p->kernels->panel;
    p->k_bytes = TILE * f->depth * p->size;
    p->v_bytes = TILE * p->out_depth * p->size;
    ptrdiff_t blocks = f->batch * f->kv_heads * p->head_blocks * p->q_blocks;
    ptrdiff_t wanted = min(ceil_div(ENOUGH_TASKS, blocks), ceil_div(f->keys, LEAST_SPLIT));
    p->splits = blocks < ENOUGH_TASKS ? max(wanted, 1) : 1;
    p->split_keys = ceil_div(max(p->tiles, 1), p->splits) * TILE;
    p->partial_bytes = ceil_div(gathered_bytes(p), LINE) * LINE;
    scratch unused;
    p->scratch_bytes = lay_out(p, NULL, &unused);
    if (f->dropout > 0) p->threshold = threshold_of(f->dropout);
}

/* Huge pages where there are some: touching fresh small ones would cost more than packing. */
static void *lines(ptrdiff_t bytes)
{
    void *memory = NULL;
    size_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : LINE;
    if (posix_memalign(&memory, alignment, (size_t)max(bytes, 1)) != 0) return NULL;
#ifdef MADV_HUGEPAGE
    if (bytes >= HUGE_PAGE) madvise(memory, (size_t)bytes, MADV_HUGEPAGE);
#endif
    return memory;
}

am_status am_flash_forward(const am_run *run, const am_flash *flash)
{
    if (flash->batch == 0 || flash->heads == 0 || flash->queries == 0) return AM_OK;
    bool wide = flash->q.type == AM_FLOAT64;
    plan p = {
        .flash = flash,
        .all_kernels = run->kernels,
        .kernels = wide ? &run->kernels->flash_f64 : &run->kernels->flash_f32,
        .type = wide ? AM_FLOAT64 : AM_FLOAT32,
        .size = wide ? 8 : 4,
    };
    choose(&p);
    ptrdiff_t heads = flash->batch * flash->kv_heads, blocks = heads * p.head_blocks * p.q_blocks;
    am_status status = AM_NO_MEMORY;
    p.scratch = lines(run->threads * p.scratch_bytes);
    p.taken = malloc((size_t)run->threads * sizeof *p.taken);
    if (!p.scratch || !p.taken) goto done;
    for (int i = 0; i < run->threads; i++) atomic_flag_clear(&p.taken[i]);
    if (p.splits > 1) {
        p.partials = lines(blocks * p.splits * p.partial_bytes);
        if (!p.partials) goto done;
    }
    if (p.head_blocks * p.q_blocks > 1) {
        p.packed = lines(heads * p.tiles * (p.k_bytes + p.v_bytes));
        p.finite = malloc((size_t)max(heads * p.tiles, 1));
        if (!p.packed || !p.finite) goto done;
        status = am_parallel(run, heads * p.tiles, 1, pack_task, &p);
        if (status != AM_OK) goto done;
    }
    status = am_parallel(run, blocks * p.splits, 1, block_task, &p);
    if (status == AM_OK && p.splits > 1) status = am_parallel(run, blocks, 1, merge_task, &p);
done:
    free(p.scratch);
    free(p.taken);
    free(p.partials);
    free(p.packed);
    free(p.finite);
    return status;
}

typedef struct {
    const am_kernels *kernels;
    const ptrdiff_t *shape;
    uint64_t seed;
    uint32_t threshold;
    uint8_t *kept;
} keep_job;

static am_status keep_task(void *arg, ptrdiff_t index, am_team *team)
{
    const keep_job *job = arg;
    ptrdiff_t heads = job->shape[1], queries = job->shape[2], keys = job->shape[3];
    uint64_t key = row_key(job->seed, index / queries / heads, index / queries % heads, index % queries);
    uint8_t *row = job->kept + index * keys;
    for (ptrdiff_t k = 0; k < keys; k += 64) {
        uint64_t bits = job->kernels->keep_bits(key, (uint32_t)k, job->threshold);
        job->kernels->expand_bits_8(row + k, bits, min(64, keys - k), 1, 0);
    }
    return index % 64 == 0 ? am_checkpoint(team) : AM_OK;
}

am_status am_dropout_keep_mask(const am_run *run, uint64_t seed, double probability, const ptrdiff_t shape[4],
                               uint8_t *kept)
{
    keep_job job = {run->kernels, shape, seed, threshold_of(probability), kept};
    return am_parallel(run, shape[0] * shape[1] * shape[2], 16, keep_task, &job);
}
