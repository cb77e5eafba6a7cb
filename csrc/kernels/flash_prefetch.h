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
    return (prefetch_lines){at, CACHE_LINE, row, row, gap, row * rows, early, am_prefetch_near};
}

/* The same line of mapped memory over and over, which costs little. */
static inline prefetch_lines prefetch_nothing(const void *known)
{
    return (prefetch_lines){(uintptr_t)known, 0, PTRDIFF_MAX, PTRDIFF_MAX, 0, 0, 0, false};
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
