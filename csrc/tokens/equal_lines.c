/* equal_lines.c – finds equal lines by partition refinement. A line is a row or a column of a mask.
 *
 * At first all lines are in one class. Then the mask is read 64 positions at a time, which gives one word per
 * line. A line whose word differs from that of its class's first line leaves the class: it joins the lines
 * that left the same class with the same word, or founds a new class. A hash table finds that class, and
 * compares the old class and the word themselves, so that classes are always exact. The cost is one
 * comparison per word, and one look-up for each line that leaves its class. Ranges of positions are refined
 * independently, and their classes are then combined.
 */
#include "tokens/equal_lines.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/runtime/sizes.h"

enum {
    WORD = 64,
    STRIPE = 8,           /* words read from each row at once */
    PANEL = 64,           /* words per row of the bit matrix that is transposed to read columns */
    PARTS = 8,            /* the most ranges of positions of either side; combining them takes one thread */
    MORE_PARTS = 16,      /* ranges where there are more threads than these */
    PART_PAIRS = 1 << 18, /* pairs that are worth a range of their own */
    MANY_LINES = 1 << 14, /* lines read or refined between two checkpoints */
};

/* --- Classes --- */

typedef struct {
    uint32_t round; /* the entry is valid in this round only */
    int32_t line;   /* the first line of a new class … */
    int32_t from;   /* … and the first line of the class that it left */
} entry;

/* Line 0 is all zeros, so lines of its class have no live pair. */
typedef struct {
    const am_kernels *kernels;
    ptrdiff_t lines, classes;
    int32_t *leader; /* of each line: the first line of its class */
    entry *table;
    size_t
        index_mask; /* the size of the table less 1; the size is a power of two, at least twice the lines */
    uint64_t secret;
    uint32_t round;
    int32_t last_moved; /* the line that left its class last in this round, or 0 */
    int32_t last_left;  /* the first line of the class that it left */
} classes;

/* The hash is secret, so that nobody can make a mask whose words all collide. */
static uint64_t draw_secret(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return ((uint64_t)now.tv_nsec << 32 ^ (uint64_t)(uintptr_t)&now ^ (uint64_t)now.tv_sec) *
               0x9e3779b97f4a7c15u |
           1;
}

static am_status start_classes(classes *c, const am_kernels *kernels, ptrdiff_t lines, int32_t *leader)
{
    size_t size = 16;
    while (size < 2 * (size_t)lines) size *= 2;
    *c = (classes){.kernels = kernels,
                   .lines = lines,
                   .classes = 1,
                   .leader = leader,
                   .table = calloc(size, sizeof *c->table),
                   .index_mask = size - 1,
                   .secret = draw_secret()};
    return c->table ? AM_OK : AM_NO_MEMORY;
}

static size_t hash(const classes *c, uint64_t word, int32_t from)
{
    unsigned __int128 product = (unsigned __int128)(word ^ c->secret) * (c->secret + 2 * (uint64_t)from);
    return (size_t)((uint64_t)product ^ (uint64_t)(product >> 64)) & c->index_mask;
}

/* Moves a line, whose word differs from that of the first line of its class, to another class. */
static void move_line(classes *c, const uint64_t *words, int32_t line)
{
    int32_t from = c->leader[line];
    if (c->last_moved && from == c->last_left && words[line] == words[c->last_moved]) {
        c->leader[line] = c->leader[c->last_moved];
        return;
    }
    c->last_moved = line;
    c->last_left = from;
    for (size_t i = hash(c, words[line], from);; i = (i + 1) & c->index_mask) {
        entry *e = &c->table[i];
        if (e->round != c->round) {
            *e = (entry){.round = c->round, .line = line, .from = from};
            c->leader[line] = line;
            c->classes++;
            return;
        }
        if (e->from == from && words[e->line] == words[line]) {
            c->leader[line] = e->line;
            return;
        }
    }
}

static void refine(classes *c, const uint64_t *words)
{
    c->round++;
    c->last_moved = 0;
    for (ptrdiff_t begin = 0; begin < c->lines; begin += WORD) {
        uint64_t bits =
            c->kernels->masks.unlike_bits(words, c->leader, begin, am_min(WORD, c->lines - begin));
        for (; bits; bits &= bits - 1) move_line(c, words, (int32_t)begin + __builtin_ctzll(bits));
    }
}

/* --- Lines as words --- */

/* The rows, or the columns, of a plane as lines. */
typedef struct {
    bool is_columns;       /* lines are columns */
    ptrdiff_t count;       /* lines in the plane */
    ptrdiff_t lines;       /* `count`, line 0, and lines that fill up the last tiles */
    ptrdiff_t positions;   /* elements of a line */
    ptrdiff_t at_once;     /* positions that are read at once */
    ptrdiff_t parts, part; /* ranges of positions, and the length of one */
    int32_t *leader;       /* [parts, lines] */
    atomic_bool distinct;  /* all lines are known to differ, from each other and from zero */
} side;

/* The number of row or column i of a plane among the lines: am_transpose_bits interleaves the lines of its
 * tiles. */
static ptrdiff_t line_number(const side *s, ptrdiff_t i)
{
    enum { TILES = AM_TRANSPOSE_TILES * WORD };
    return 1 + (s->is_columns
                    ? i / TILES * TILES + i % WORD * AM_TRANSPOSE_TILES + i / WORD % AM_TRANSPOSE_TILES
                    : i);
}

static am_status read_rows(const am_mask_rows *plane, const side *s, uint64_t *words, ptrdiff_t begin,
                           ptrdiff_t count, am_team *team)
{
    ptrdiff_t used = am_ceil_div(count, WORD);
    am_status status = AM_OK;
    for (ptrdiff_t w = 0; w < used; w++) words[w * s->lines] = 0;
    for (ptrdiff_t r = 0; status == AM_OK && r < s->count; r++) {
        uint64_t row[STRIPE];
        const char *data = plane->data + r * plane->rows.stride;
        const char *prefetch = data + 4 * plane->rows.stride + begin * plane->columns.stride;
        for (int i = 0; i < 8; i++) __builtin_prefetch(prefetch + 64 * i);
        am_mask_rows_pack(plane, row, data, begin, count);
        for (ptrdiff_t w = 0; w < used; w++) words[w * s->lines + 1 + r] = row[w];
        if (r % MANY_LINES == MANY_LINES - 1) status = am_checkpoint(team);
    }
    return status;
}

/* `panel`: memory for [WORD][PANEL]. */
static void read_columns(const am_mask_rows *plane, const side *s, uint64_t *words, uint64_t *panel,
                         ptrdiff_t begin, ptrdiff_t count)
{
    words[0] = 0;
    for (ptrdiff_t first = 0; first < s->count; first += PANEL * WORD) {
        ptrdiff_t columns = am_min(PANEL * WORD, s->count - first), used = am_ceil_div(columns, WORD);
        ptrdiff_t tiles = am_ceil_div(used, AM_TRANSPOSE_TILES) * AM_TRANSPOSE_TILES;
        for (ptrdiff_t r = 0; r < WORD; r++) {
            ptrdiff_t filled = r < count ? used : 0;
            if (filled)
                am_mask_rows_pack(plane, panel + r * PANEL, plane->data + (begin + r) * plane->rows.stride,
                                  first, columns);
            memset(panel + r * PANEL + filled, 0, (size_t)(tiles - filled) * sizeof *panel);
        }
        for (ptrdiff_t t = 0; t < tiles; t += AM_TRANSPOSE_TILES)
            plane->kernels->masks.transpose_bits(words + 1 + first + t * WORD, panel + t, PANEL);
    }
}

typedef struct {
    am_mask_rows plane;
    side sides[2]; /* rows, columns */
    const am_axis *axes[2];
    int32_t *ids[2];
} plane_job;

static am_status refine_part(const plane_job *job, side *s, ptrdiff_t part, am_team *team)
{
    classes c = {0};
    ptrdiff_t width = s->is_columns ? 1 : STRIPE, panel = s->is_columns ? WORD * PANEL : 0;
    int32_t *leader = s->leader + part * s->lines;
    uint64_t *words = malloc((size_t)(width * s->lines + panel) * sizeof *words);
    am_status status = words ? start_classes(&c, job->plane.kernels, s->lines, leader) : AM_NO_MEMORY;
    memset(leader, 0, (size_t)s->lines * sizeof *leader);
    ptrdiff_t end = am_min((part + 1) * s->part, s->positions);
    for (ptrdiff_t begin = part * s->part; status == AM_OK && begin < end; begin += s->at_once) {
        if (atomic_load_explicit(&s->distinct, memory_order_relaxed)) break;
        ptrdiff_t count = am_min(s->at_once, end - begin);
        if (s->is_columns)
            read_columns(&job->plane, s, words, words + s->lines, begin, count);
        else
            status = read_rows(&job->plane, s, words, begin, count, team);
        for (ptrdiff_t w = 0; status == AM_OK && w < am_ceil_div(count, WORD); w++) {
            refine(&c, words + w * s->lines);
            if (s->lines >= MANY_LINES) status = am_checkpoint(team);
        }
        if (c.classes == s->count + 1) atomic_store_explicit(&s->distinct, true, memory_order_relaxed);
        if (status == AM_OK) status = am_checkpoint(team);
    }
    free(words);
    free(c.table);
    return status;
}

static am_status part_task(void *arg, ptrdiff_t index, am_team *team)
{
    plane_job *job = arg;
    side *s = &job->sides[index >= job->sides[0].parts];
    return refine_part(job, s, s->is_columns ? index - job->sides[0].parts : index, team);
}

/* --- Ids --- */

/* Combines the classes of all parts; the first part then has the classes over all positions. */
static am_status combine_parts(const am_kernels *kernels, side *s)
{
    classes c = {0};
    uint64_t *words = malloc((size_t)s->lines * sizeof *words);
    am_status status = words ? start_classes(&c, kernels, s->lines, s->leader) : AM_NO_MEMORY;
    for (ptrdiff_t part = 1; status == AM_OK && part < s->parts; part++) {
        const int32_t *leader = s->leader + part * s->lines;
        for (ptrdiff_t i = 0; i < s->lines; i++) words[i] = (uint64_t)leader[i];
        refine(&c, words);
    }
    free(words);
    free(c.table);
    return status;
}

static am_status number_lines(const am_kernels *kernels, side *s, const am_axis *axis, int32_t *ids)
{
    if (atomic_load(&s->distinct)) {
        for (ptrdiff_t i = 0; i < axis->length; i++) ids[i] = axis->count == 1 ? 0 : (int32_t)i;
        return AM_OK;
    }
    am_status status = s->parts > 1 ? combine_parts(kernels, s) : AM_OK;
    if (status != AM_OK) return status;
    int32_t *id_of = malloc((size_t)s->lines * sizeof *id_of);
    if (!id_of) return AM_NO_MEMORY;
    memset(id_of, 0xff, (size_t)s->lines * sizeof *id_of);
    int32_t next = 0;
    for (ptrdiff_t i = 0; i < axis->count; i++) {
        int32_t leader = s->leader[line_number(s, axis->backwards ? axis->count - 1 - i : i)];
        if (leader && id_of[leader] < 0) id_of[leader] = next++;
        ids[i] = id_of[leader];
    }
    for (ptrdiff_t i = axis->count; i < axis->length; i++) ids[i] = ids[0];
    free(id_of);
    return AM_OK;
}

static am_status ids_task(void *arg, ptrdiff_t index, am_team *team)
{
    plane_job *job = arg;
    const am_status status =
        number_lines(job->plane.kernels, &job->sides[index], job->axes[index], job->ids[index]);
    return status == AM_OK ? am_checkpoint(team) : status;
}

static am_status prepare_side(side *s, bool is_columns, const am_axis *axis, const am_axis *other,
                              ptrdiff_t most)
{
    ptrdiff_t at_once = is_columns ? WORD : WORD * STRIPE, pieces = am_ceil_div(other->count, at_once);
    ptrdiff_t parts = am_min(am_min(most, pieces),
                             axis->count > PART_PAIRS ? most : 1 + axis->count * other->count / PART_PAIRS);
    *s = (side){.is_columns = is_columns,
                .count = axis->count,
                .lines = 1 + (is_columns ? am_ceil_div(axis->count, WORD * AM_TRANSPOSE_TILES) * WORD *
                                               AM_TRANSPOSE_TILES
                                         : axis->count),
                .positions = other->count,
                .at_once = at_once,
                .part = am_ceil_div(pieces, parts) * at_once};
    s->parts = am_ceil_div(s->positions, s->part);
    s->leader = malloc((size_t)(s->parts * s->lines) * sizeof *s->leader);
    return s->leader ? AM_OK : AM_NO_MEMORY;
}

/* --- Planes --- */

typedef struct {
    const am_context *context;
    const am_array *mask;
    am_mask_rows mask_rows;
    int32_t *q_ids, *k_ids;
} planes_job;

static am_status group_plane(const am_context *context, const planes_job *planes, ptrdiff_t index)
{
    const am_array *mask = planes->mask;
    const am_axis *rows = &planes->mask_rows.rows, *columns = &planes->mask_rows.columns;
    const ptrdiff_t heads = planes->mask_rows.heads, b = index / heads, h = index % heads,
                    plane = b * mask->shape.head + h;
    int32_t *q_ids = planes->q_ids + plane * mask->shape.token,
            *k_ids = planes->k_ids + plane * mask->shape.channel;
    plane_job job = {.plane = planes->mask_rows, .axes = {rows, columns}, .ids = {q_ids, k_ids}};
    job.plane.data = am_mask_plane(&planes->mask_rows, b, h);
    if (job.plane.transposed) job.ids[0] = k_ids, job.ids[1] = q_ids;
    const ptrdiff_t most = context->threads > PARTS ? MORE_PARTS : PARTS;
    am_status status = prepare_side(&job.sides[0], false, rows, columns, most);
    if (status == AM_OK) status = prepare_side(&job.sides[1], true, columns, rows, most);
    if (status == AM_OK)
        status = am_parallel(context, job.sides[0].parts + job.sides[1].parts, 1, part_task, &job);
    if (status == AM_OK) status = am_parallel(context, 2, 1, ids_task, &job);
    free(job.sides[0].leader);
    free(job.sides[1].leader);
    return status;
}

static am_status plane_task(void *arg, ptrdiff_t index, am_team *team)
{
    const planes_job *job = arg;
    const am_context single = {.kernels = job->context->kernels, .threads = 1};
    am_status status = group_plane(&single, job, index);
    return status == AM_OK ? am_checkpoint(team) : status;
}

/* Copies the ids of the first head, or of the first batch row, to the others. */
static void repeat_ids(int32_t *ids, ptrdiff_t count, ptrdiff_t times)
{
    for (ptrdiff_t i = 1; i < times; i++) memcpy(ids + i * count, ids, (size_t)count * sizeof *ids);
}

am_status am_group_tokens(const am_context *context, const am_array *mask, int32_t *q_ids, int32_t *k_ids)
{
    planes_job job = {.context = context,
                      .mask = mask,
                      .mask_rows = am_mask_rows_of(context->kernels, mask),
                      .q_ids = q_ids,
                      .k_ids = k_ids};
    const ptrdiff_t batch = job.mask_rows.batch, heads = job.mask_rows.heads, planes = batch * heads;
    bool large = job.mask_rows.columns.count > PART_PAIRS / job.mask_rows.rows.count;
    am_status status = AM_OK;
    if (large) {
        for (ptrdiff_t i = 0; i < planes && status == AM_OK; i++) status = group_plane(context, &job, i);
    } else {
        status = am_parallel(context, planes, 1, plane_task, &job);
    }
    if (status != AM_OK) return status;
    for (ptrdiff_t b = 0; b < batch && heads < mask->shape.head; b++) {
        repeat_ids(q_ids + b * mask->shape.head * mask->shape.token, mask->shape.token, mask->shape.head);
        repeat_ids(k_ids + b * mask->shape.head * mask->shape.channel, mask->shape.channel, mask->shape.head);
    }
    if (batch < mask->shape.batch) {
        repeat_ids(q_ids, mask->shape.head * mask->shape.token, mask->shape.batch);
        repeat_ids(k_ids, mask->shape.head * mask->shape.channel, mask->shape.batch);
    }
    return AM_OK;
}

/* --- Comparing a mask with its ids --- */

typedef struct {
    am_mask_rows mask_rows;
    ptrdiff_t id_heads, blocks;
    int32_t *row_ids, *column_ids; /* [batch, id_heads, count], in the order of the rows and columns */
    atomic_ptrdiff_t found;        /* (plane * rows + row) * columns + column of the first contradiction */
} check_job;

static int32_t *ids_in_order(const int32_t *ids, ptrdiff_t planes, const am_axis *axis)
{
    int32_t *ordered = malloc((size_t)(planes * axis->count) * sizeof *ordered);
    for (ptrdiff_t p = 0; ordered && p < planes; p++) {
        for (ptrdiff_t i = 0; i < axis->count; i++)
            ordered[p * axis->count + i] =
                ids[p * axis->length + (axis->backwards ? axis->count - 1 - i : i)];
    }
    return ordered;
}

/* The first column where a row differs from what the ids imply, or -1. The second half of `words` holds what
 * they imply, which stays valid for the next row if that has the same id. */
static ptrdiff_t check_row(const check_job *job, const char *row, const int32_t *column_ids, int32_t id,
                           bool id_is_new, uint64_t *words)
{
    ptrdiff_t columns = job->mask_rows.columns.count, used = am_ceil_div(columns, WORD);
    uint64_t *expected = words + used;
    am_mask_rows_pack(&job->mask_rows, words, row, 0, columns);
    for (ptrdiff_t w = 0; w < used; w++) {
        if (id_is_new) {
            ptrdiff_t count = am_min(WORD, columns - w * WORD);
            expected[w] =
                id < 0 ? 0 : job->mask_rows.kernels->masks.equal_bits(column_ids + w * WORD, id, count);
        }
        if (words[w] != expected[w]) return w * WORD + __builtin_ctzll(words[w] ^ expected[w]);
    }
    return -1;
}

/* A task checks a block of rows of one plane. */
static am_status check_task(void *arg, ptrdiff_t index, am_team *team)
{
    check_job *job = arg;
    const am_mask_rows *mask_rows = &job->mask_rows;
    ptrdiff_t plane = index / job->blocks, first = index % job->blocks * WORD, rows = mask_rows->rows.count;
    ptrdiff_t b = plane / mask_rows->heads, h = plane % mask_rows->heads, columns = mask_rows->columns.count;
    ptrdiff_t ids = b * job->id_heads + (h < job->id_heads ? h : 0);
    const char *data = am_mask_plane(mask_rows, b, h);
    if (atomic_load_explicit(&job->found, memory_order_relaxed) < (plane * rows + first) * columns)
        return AM_OK;
    uint64_t *words = malloc((size_t)(2 * am_ceil_div(columns, WORD)) * sizeof *words);
    if (!words) return AM_NO_MEMORY;
    const int32_t *row_ids = job->row_ids + ids * rows;
    for (ptrdiff_t r = first; r < am_min(first + WORD, rows); r++) {
        bool id_is_new = r == first || row_ids[r] != row_ids[r - 1];
        ptrdiff_t column = check_row(job, data + r * mask_rows->rows.stride, job->column_ids + ids * columns,
                                     row_ids[r], id_is_new, words);
        if (column < 0) continue;
        am_lower_to(&job->found, (plane * rows + r) * columns + column);
        break;
    }
    free(words);
    return am_checkpoint(team);
}

static void locate(const check_job *job, am_ungrouped *found)
{
    const am_mask_rows *mask_rows = &job->mask_rows;
    ptrdiff_t flat = atomic_load(&job->found);
    if (flat == PTRDIFF_MAX) return;
    ptrdiff_t column = flat % mask_rows->columns.count,
              row = flat / mask_rows->columns.count % mask_rows->rows.count;
    ptrdiff_t plane = flat / mask_rows->columns.count / mask_rows->rows.count;
    ptrdiff_t b = plane / mask_rows->heads, h = plane % mask_rows->heads;
    const char *data = am_mask_plane(mask_rows, b, h);
    found->any = true;
    found->live =
        am_mask_rows_first(mask_rows, data + row * mask_rows->rows.stride, column, column + 1) == column;
    if (mask_rows->rows.backwards) row = mask_rows->rows.count - 1 - row;
    if (mask_rows->columns.backwards) column = mask_rows->columns.count - 1 - column;
    found->place[0] = b;
    found->place[1] = h;
    found->place[2] = mask_rows->transposed ? column : row;
    found->place[3] = mask_rows->transposed ? row : column;
}

am_status am_find_ungrouped(const am_context *context, const am_array *mask, ptrdiff_t id_heads,
                            const int32_t *q_ids, const int32_t *k_ids, am_ungrouped *found)
{
    const am_mask_rows mask_rows = am_mask_rows_of(context->kernels, mask);
    const ptrdiff_t planes = mask_rows.batch * id_heads;
    const int32_t *row_ids = mask_rows.transposed ? k_ids : q_ids,
                  *column_ids = mask_rows.transposed ? q_ids : k_ids;
    check_job job = {.mask_rows = mask_rows,
                     .id_heads = id_heads,
                     .blocks = am_ceil_div(mask_rows.rows.count, WORD),
                     .row_ids = ids_in_order(row_ids, planes, &mask_rows.rows),
                     .column_ids = ids_in_order(column_ids, planes, &mask_rows.columns)};
    atomic_init(&job.found, PTRDIFF_MAX);
    am_status status = job.row_ids && job.column_ids ? AM_OK : AM_NO_MEMORY;
    if (status == AM_OK)
        status = am_parallel(context, mask_rows.batch * mask_rows.heads * job.blocks, 1, check_task, &job);
    free(job.row_ids);
    free(job.column_ids);
    if (status == AM_OK) locate(&job, found);
    return status;
}
