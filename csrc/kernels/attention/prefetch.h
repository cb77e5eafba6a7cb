/* prefetch.h – prefetches cache lines, a few at a time between the sums: processors drop some of many
 * at once. Where a loop waits for nothing but memory, each line is prefetched twice. */

enum { CACHE_LINE = 64 };

/* Rows that lie in runs, which lie anywhere. */
typedef struct {
    ptrdiff_t rows, run, runs; /* left of this run, of each run, and the runs after this one */
    const void *const *next;   /* where these begin */
    ptrdiff_t early_rows;      /* how many rows earlier than in order a line is prefetched, too */
    ptrdiff_t together;        /* rows whose lines `left` counts: one, or several without a gap */
} prefetch_runs;

/* Lines of some rows, in the order of memory. */
typedef struct {
    uintptr_t at;        /* the next line; prefetching an address that is not mapped is harmless */
    ptrdiff_t stride;    /* bytes from line to line */
    ptrdiff_t left;      /* lines left of this row, or of several without a gap */
    ptrdiff_t row;       /* lines of a whole row */
    ptrdiff_t gap;       /* bytes from behind a row's last line to the next row */
    ptrdiff_t count;     /* lines left of all rows, if the caller counts them */
    uintptr_t early;     /* bytes from a line to one that is prefetched with it, earlier than in order; a 0
                          * costs less than a test for it */
    bool near;           /* to the first-level cache */
    prefetch_runs *runs; /* NULL: rows lie one behind the other */
} prefetch_lines;

/* Rows may begin and end within a line. If `rows` is 0, lines of all rows are not counted. */
static inline prefetch_lines prefetch_lines_of(uintptr_t at, ptrdiff_t stride, ptrdiff_t length,
                                               ptrdiff_t rows, ptrdiff_t early_rows)
{
    const bool alike = stride % CACHE_LINE == 0;
    const ptrdiff_t skipped = alike ? (ptrdiff_t)(at % CACHE_LINE) : CACHE_LINE - 1;
    ptrdiff_t row = (skipped + length + CACHE_LINE - 1) / CACHE_LINE;
    if (alike && 0 < stride && stride < row * CACHE_LINE)
        row = stride / CACHE_LINE; /* the next one has the rest */
    const uintptr_t early = (uintptr_t)early_rows * (uintptr_t)stride;
    const ptrdiff_t gap = stride - row * CACHE_LINE;
    const ptrdiff_t left = gap == 0 && rows == 0 ? PTRDIFF_MAX : row; /* without a gap they are one row */
    return (prefetch_lines){.at = at,
                            .stride = CACHE_LINE,
                            .left = left,
                            .row = row,
                            .gap = gap,
                            .count = row * rows,
                            .early = early,
                            .near = am_prefetch_near,
                            .runs = NULL};
}

/* Begins with one row, or without gaps with several: those of a run up to its last `early_rows`, then these.
 * In the last rows lines of the next run are prefetched early, and behind the last run none. */
INLINE void prefetch_begin_rows(prefetch_lines *lines)
{
    prefetch_runs *runs = lines->runs;
    const ptrdiff_t early = runs->early_rows < runs->run ? runs->early_rows : runs->run;
    if (runs->rows == early) lines->early = runs->runs > 0 ? (uintptr_t)*runs->next - lines->at : 0;
    runs->together = lines->gap != 0 ? 1 : runs->rows > early ? runs->rows - early : runs->rows;
    lines->left = runs->together * lines->row;
}

/* Lines of runs of `run` rows each, which begin at these addresses. */
static inline prefetch_lines prefetch_runs_of(prefetch_runs *runs, const void *const *at, ptrdiff_t count,
                                              ptrdiff_t run, ptrdiff_t stride, ptrdiff_t length,
                                              ptrdiff_t early_rows)
{
    prefetch_lines lines = prefetch_lines_of((uintptr_t)at[0], stride, length, 0, early_rows);
    *runs = (prefetch_runs){
        .rows = run, .run = run, .runs = count - 1, .next = at + 1, .early_rows = early_rows, .together = 1};
    lines.runs = runs;
    prefetch_begin_rows(&lines);
    return lines;
}

/* At the end of rows of a run. */
INLINE void prefetch_end_of_rows(prefetch_lines *lines)
{
    prefetch_runs *runs = lines->runs;
    runs->rows -= runs->together;
    if (runs->rows == 0 && runs->runs == 0) { /* the last line once more */
        lines->at -= (uintptr_t)(CACHE_LINE + lines->gap);
        lines->stride = 0, lines->gap = 0, lines->left = lines->row = 1, lines->runs = NULL;
        return;
    }
    if (runs->rows == 0) {
        lines->at = (uintptr_t)*runs->next++;
        runs->runs--, runs->rows = runs->run;
        lines->early = (uintptr_t)(runs->early_rows * (lines->row * CACHE_LINE + lines->gap));
    }
    prefetch_begin_rows(lines);
}

/* One line of mapped memory over and over, which costs little. */
static inline prefetch_lines prefetch_nothing(const void *known)
{
    return (prefetch_lines){.at = (uintptr_t)known,
                            .stride = 0,
                            .left = PTRDIFF_MAX,
                            .row = PTRDIFF_MAX,
                            .gap = 0,
                            .count = 0,
                            .early = 0,
                            .near = false,
                            .runs = NULL};
}

/* A line and one that is early, to the first-level cache if `near`, else to the second. */
INLINE void prefetch_two(const char *early, const char *at, const bool near)
{
    if (near) {
        __builtin_prefetch(early);
        __builtin_prefetch(at);
    } else {
        __builtin_prefetch(early, 0, 2);
        __builtin_prefetch(at, 0, 2);
    }
}

/* The next line. Compilers hoist the test and make two loops. */
INLINE void prefetch_line(const prefetch_lines *lines)
{
    const char *early = (const char *)(lines->at + lines->early), *at = (const char *)lines->at;
    if (lines->near)
        prefetch_two(early, at, true);
    else
        prefetch_two(early, at, false);
}

INLINE void prefetch_next_row(prefetch_lines *lines, const bool runs)
{
    lines->at += (uintptr_t)lines->gap;
    lines->left = lines->row;
    if (runs && lines->runs) prefetch_end_of_rows(lines);
}

/* The next lines; of rows in runs only if `runs`. */
INLINE void prefetch_one(prefetch_lines *lines, const bool runs)
{
    prefetch_line(lines);
    lines->at += (uintptr_t)lines->stride;
    if (--lines->left <= 0) prefetch_next_row(lines, runs);
}
INLINE void prefetch_some(prefetch_lines *lines, ptrdiff_t count, const bool runs)
{
    NO_UNROLL
    for (; count > 0; count--) prefetch_one(lines, runs);
}

/* Prefetches a constant number of lines of rows in runs. The caller unrolls it for one row of queries, which
 * waits for memory alone (else int8 is 5 to 7 % slower), and where numbers are not widened (else 8 rows of
 * float32, and pages, are 6 % slower). */
INLINE void prefetch_each(prefetch_lines *lines, const ptrdiff_t count, const bool unrolled)
{
    if (!unrolled) {
        prefetch_some(lines, count, true);
        return;
    }
    UNROLL(16)
    for (ptrdiff_t i = 0; i < count; i++) prefetch_one(lines, true);
}

/* Prefetches a constant number of lines that do not reach the end of a row. */
INLINE void prefetch_at_once(prefetch_lines *lines, const ptrdiff_t count)
{
    const char *early = (const char *)(lines->at + lines->early), *at = (const char *)lines->at;
    const ptrdiff_t stride = lines->stride;
    if (lines->near) {
        UNROLL(16)
        for (ptrdiff_t i = 0; i < count; i++) prefetch_two(early + i * stride, at + i * stride, true);
    } else {
        UNROLL(16)
        for (ptrdiff_t i = 0; i < count; i++) prefetch_two(early + i * stride, at + i * stride, false);
    }
    lines->at += (uintptr_t)(count * stride);
    lines->left -= count;
}

/* Prefetches lines, counted at once unless they reach the end of a row: that is half of the code of a
 * product. */
INLINE void prefetch_few(prefetch_lines *lines, const ptrdiff_t count, const bool runs)
{
    if (count == 0) return;
    if (lines->left <= count) {
        prefetch_some(lines, count, runs);
        return;
    }
    prefetch_at_once(lines, count);
}

static inline void prefetch_issue(prefetch_lines *lines, ptrdiff_t count)
{
    prefetch_some(lines, count, false);
}

/* Whether so many lines lie one behind the other, which a loop asks before it begins. It prefetches from a
 * copy. */
static inline bool prefetch_is_straight(const prefetch_lines *lines, ptrdiff_t count)
{
    return lines->left >= count;
}
/* So many lines from each of two addresses on. */
INLINE void prefetch_from(const char *early, const char *at, ptrdiff_t count, const bool near)
{
    HIDE(early); /* else compilers keep an address for each line */
    HIDE(at);
    UNROLL(16)
    for (ptrdiff_t i = 0; i < count; i++) prefetch_two(early + i * CACHE_LINE, at + i * CACHE_LINE, near);
}
INLINE void prefetch_straight(prefetch_lines *copy, ptrdiff_t count)
{
    const char *early = (const char *)(copy->at + copy->early), *at = (const char *)copy->at;
    if (copy->near)
        prefetch_from(early, at, count, true);
    else
        prefetch_from(early, at, count, false);
    copy->at += (uintptr_t)(count * copy->stride);
}
static inline void prefetch_end_straight(prefetch_lines *lines, const prefetch_lines *copy)
{
    if (lines->stride == 0) return; /* the same line over and over */
    lines->left -= (ptrdiff_t)(copy->at - lines->at) / CACHE_LINE;
    lines->at = copy->at;
    if (lines->left <= 0) prefetch_next_row(lines, true);
}

/* What the products of one step prefetch. */
typedef struct {
    prefetch_lines kinds[AM_PREFETCH_MOST];
    int count;
    ptrdiff_t left, share; /* lines of all kinds; how many of them a product prefetches at least */
} prefetch_queue;

/* Begins with the share of a step, which it takes off its plan. */
static inline void prefetch_begin(prefetch_queue *queue, am_prefetch_plan *plan, ptrdiff_t products)
{
    queue->count = 0, queue->left = 0;
    for (int i = 0; plan && i < plan->count; i++) {
        am_prefetch_rows *rows = &plan->rows[i];
        const ptrdiff_t some = (rows->rows + plan->steps - 1) / plan->steps;
        if (some <= 0) continue;
        prefetch_lines *lines = &queue->kinds[queue->count++];
        *lines = prefetch_lines_of((uintptr_t)rows->at, rows->stride, rows->length, some, 0);
        queue->left += lines->count;
        rows->at += some * rows->stride, rows->rows -= some;
    }
    if (plan && plan->steps > 1) plan->steps--;
    queue->share = queue->left / products + 1;
}

/* A kind with at least `count` lines left, of which a loop prefetches one per step; NULL if there is none. */
static inline prefetch_lines *prefetch_pick(prefetch_queue *queue, ptrdiff_t count)
{
    for (int i = 0; queue->left >= count && i < queue->count; i++) {
        if (queue->kinds[i].count >= count) return &queue->kinds[i];
    }
    return NULL;
}

/* Called after a loop that prefetched `count` lines of `issued`, unless that is NULL: prefetches what its
 * share still lacks. */
static inline void prefetch_rest(prefetch_queue *queue, prefetch_lines *issued, ptrdiff_t count)
{
    if (queue->left == 0) return;
    ptrdiff_t more = queue->share;
    if (issued) issued->count -= count, queue->left -= count, more -= count;
    for (int i = 0; more > 0 && i < queue->count; i++) {
        const ptrdiff_t some = queue->kinds[i].count < more ? queue->kinds[i].count : more;
        prefetch_issue(&queue->kinds[i], some);
        queue->kinds[i].count -= some, queue->left -= some, more -= some;
    }
}
