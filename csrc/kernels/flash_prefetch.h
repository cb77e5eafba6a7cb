/* flash_prefetch.h – prefetches cache lines, a few at a time between the sums: processors drop some of many
 * at once. Where a loop waits for nothing but memory, each line is prefetched twice. */

enum { CACHE_LINE = 64 };

/* Lines of some rows, in the order of memory. */
typedef struct {
    uintptr_t at;    /* the next line; prefetching an address that is not mapped is harmless */
    ptrdiff_t step;  /* bytes from line to line */
    ptrdiff_t left;  /* lines left of this row */
    ptrdiff_t row;   /* lines of a whole row */
    ptrdiff_t gap;   /* bytes from behind a row's last line to the next row */
    ptrdiff_t count; /* lines left of all rows, if the caller counts them */
    uintptr_t early; /* bytes from a line to one that is prefetched with it, earlier than in order; a 0
                      * costs less than a test for it */
    bool near;       /* to the first-level cache */
    /* Rows may lie in runs, which lie anywhere; without runs `rows` is too large to matter. */
    ptrdiff_t rows, run, runs; /* left of this run, of each run, and the runs after this one */
    const void *const *next;   /* where these begin */
    ptrdiff_t early_rows;      /* `early` in rows */
} prefetch_lines;

/* Rows may begin and end within a line. */
static inline prefetch_lines prefetch_lines_of(uintptr_t at, ptrdiff_t step, ptrdiff_t length, ptrdiff_t rows,
                                               ptrdiff_t early_rows)
{
    const bool alike = step % CACHE_LINE == 0;
    const ptrdiff_t skipped = alike ? (ptrdiff_t)(at % CACHE_LINE) : CACHE_LINE - 1;
    ptrdiff_t row = (skipped + length + CACHE_LINE - 1) / CACHE_LINE;
    if (alike && 0 < step && step < row * CACHE_LINE) row = step / CACHE_LINE; /* the next one has the rest */
    const uintptr_t early = (uintptr_t)early_rows * (uintptr_t)step;
    const ptrdiff_t gap = step - row * CACHE_LINE;
    return (prefetch_lines){.at = at,
                            .step = CACHE_LINE,
                            .left = row,
                            .row = row,
                            .gap = gap,
                            .count = row * rows,
                            .early = early,
                            .near = am_prefetch_near,
                            .rows = PTRDIFF_MAX,
                            .early_rows = early_rows};
}

/* In the last rows of a run, lines of the next run are prefetched early, and behind the last run none. */
static inline void prefetch_near_end(prefetch_lines *lines)
{
    lines->early = lines->runs > 0 ? (uintptr_t)*lines->next - lines->at : 0;
}

/* The same of runs of `run` rows each, which begin at these addresses. */
static inline prefetch_lines prefetch_runs_of(const void *const *at, ptrdiff_t count, ptrdiff_t run,
                                              ptrdiff_t step, ptrdiff_t length, ptrdiff_t early_rows)
{
    prefetch_lines lines = prefetch_lines_of((uintptr_t)at[0], step, length, 0, early_rows);
    lines.rows = lines.run = run, lines.runs = count - 1, lines.next = at + 1;
    if (run <= early_rows) prefetch_near_end(&lines);
    return lines;
}

/* At the end of a row, when few are left of its run. */
static inline void prefetch_end_of_row(prefetch_lines *lines)
{
    if (lines->rows == lines->early_rows) prefetch_near_end(lines);
    if (lines->rows > 0) return;
    if (lines->runs == 0) { /* the last line once more */
        lines->at -= (uintptr_t)(CACHE_LINE + lines->gap);
        lines->step = 0, lines->gap = 0, lines->rows = PTRDIFF_MAX;
        return;
    }
    lines->at = (uintptr_t)*lines->next++;
    lines->runs--, lines->rows = lines->run;
    lines->early = (uintptr_t)(lines->early_rows * (lines->row * CACHE_LINE + lines->gap));
    if (lines->run <= lines->early_rows) prefetch_near_end(lines);
}

/* The same line of mapped memory over and over, which costs little. */
static inline prefetch_lines prefetch_nothing(const void *known)
{
    return (prefetch_lines){
        .at = (uintptr_t)known, .left = PTRDIFF_MAX, .row = PTRDIFF_MAX, .rows = PTRDIFF_MAX};
}

static inline void prefetch_issue(prefetch_lines *lines, ptrdiff_t count)
{
    for (; count > 0; count--) {
        if (lines->near) { /* compilers hoist this test and make two loops */
            __builtin_prefetch((const void *)(lines->at + lines->early));
            __builtin_prefetch((const void *)lines->at);
        } else {
            __builtin_prefetch((const void *)(lines->at + lines->early), 0, 2);
            __builtin_prefetch((const void *)lines->at, 0, 2);
        }
        lines->at += (uintptr_t)lines->step;
        if (--lines->left > 0) continue;
        lines->at += (uintptr_t)lines->gap;
        lines->left = lines->row;
        if (--lines->rows <= lines->early_rows) prefetch_end_of_row(lines);
    }
}

/* What the products of one tile prefetch. */
typedef struct {
    prefetch_lines kinds[AM_PREFETCH_KINDS];
    ptrdiff_t left, share; /* lines of all kinds; how many of them a product prefetches at least */
} prefetch_queue;

static inline prefetch_queue prefetch_queue_of(const am_prefetch_rows kinds[AM_PREFETCH_KINDS],
                                               ptrdiff_t products)
{
    prefetch_queue queue = {.left = 0};
    for (int i = 0; i < AM_PREFETCH_KINDS; i++) {
        const am_prefetch_rows *rows = &kinds[i];
        if (rows->rows <= 0) continue;
        queue.kinds[i] = prefetch_lines_of((uintptr_t)rows->at, rows->step, rows->length, rows->rows, 0);
        queue.left += queue.kinds[i].count;
    }
    queue.share = queue.left / products + 1;
    return queue;
}

/* A kind with at least `count` lines left, of which a loop prefetches one per step; NULL if there is none. */
static inline prefetch_lines *prefetch_pick(prefetch_queue *queue, ptrdiff_t count)
{
    for (int i = 0; queue->left >= count && i < AM_PREFETCH_KINDS; i++) {
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
    for (int i = 0; more > 0 && i < AM_PREFETCH_KINDS; i++) {
        const ptrdiff_t some = queue->kinds[i].count < more ? queue->kinds[i].count : more;
        prefetch_issue(&queue->kinds[i], some);
        queue->kinds[i].count -= some, queue->left -= some, more -= some;
    }
}
