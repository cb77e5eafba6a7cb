/* flash_ahead.h – asking for memory ahead of time, a little at a time between the sums: of many lines at once
 * processors drop some. Where memory is all that is waited for, lines are asked for twice. */

enum { FLASH_LINE = 64 };

/* Lines of some rows, in the order of memory. */
typedef struct {
    uintptr_t at;    /* asked for whether or not it is anybody's memory, which is harmless */
    ptrdiff_t step;  /* bytes from line to line */
    ptrdiff_t left;  /* lines of this row */
    ptrdiff_t row;   /* lines of a whole row */
    ptrdiff_t gap;   /* bytes from behind a row's last line to the next row */
    ptrdiff_t count; /* lines left of all rows, in so far as somebody counts */
    uintptr_t early; /* bytes from a line to one that is asked for beside it, before its turn; 0 costs
                      * less than to find out that it is 0 */
    bool near;       /* to the first-level cache */
} flash_lines;

/* Rows may begin and end within a line. */
static inline flash_lines flash_lines_of(uintptr_t at, ptrdiff_t step, ptrdiff_t length, ptrdiff_t rows,
                                         ptrdiff_t early_rows)
{
    const bool alike = step % FLASH_LINE == 0;
    const ptrdiff_t skipped = alike ? (ptrdiff_t)(at % FLASH_LINE) : FLASH_LINE - 1;
    ptrdiff_t row = (skipped + length + FLASH_LINE - 1) / FLASH_LINE;
    if (alike && 0 < step && step < row * FLASH_LINE) row = step / FLASH_LINE; /* the next one has the rest */
    const uintptr_t early = (uintptr_t)early_rows * (uintptr_t)step;
    return (flash_lines){at,    FLASH_LINE,      row, row, step - row * FLASH_LINE, row * rows,
                         early, am_prefetch_near};
}

/* A line that is known, again and again. */
static inline flash_lines flash_no_lines(const void *known)
{
    return (flash_lines){(uintptr_t)known, 0, PTRDIFF_MAX, PTRDIFF_MAX, 0, 0, 0, false};
}

static inline void flash_ask_lines(flash_lines *lines, ptrdiff_t count)
{
    for (; count > 0; count--) {
        if (lines->near) { /* compilers make two loops of those in which this is asked */
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

/* What comes after a tile. */
typedef struct {
    flash_lines kinds[AM_NEXTS];
    ptrdiff_t left, share; /* lines of all kinds, and how many of them a product asks for at least */
} flash_next;

static inline flash_next flash_next_of(const am_flash_ahead kinds[AM_NEXTS], ptrdiff_t products)
{
    flash_next next = {.left = 0};
    for (int i = 0; i < AM_NEXTS; i++) {
        const am_flash_ahead *rows = &kinds[i];
        if (rows->rows <= 0) continue;
        next.kinds[i] = flash_lines_of((uintptr_t)rows->at, rows->step, rows->length, rows->rows, 0);
        next.left += next.kinds[i].count;
    }
    next.share = next.left / products + 1;
    return next;
}

/* What a loop asks for, one line at a time, so many times; NULL if no kind has as many left. */
static inline flash_lines *flash_next_for(flash_next *next, ptrdiff_t count)
{
    for (int i = 0; next->left >= count && i < AM_NEXTS; i++) {
        if (next->kinds[i].count >= count) return &next->kinds[i];
    }
    return NULL;
}

/* After a loop that has asked `count` times, if not for NULL: asks for what is missing to its share. */
static inline void flash_ask_rest(flash_next *next, flash_lines *asked, ptrdiff_t count)
{
    if (next->left == 0) return;
    ptrdiff_t more = next->share;
    if (asked) asked->count -= count, next->left -= count, more -= count;
    for (int i = 0; more > 0 && i < AM_NEXTS; i++) {
        const ptrdiff_t some = next->kinds[i].count < more ? next->kinds[i].count : more;
        flash_ask_lines(&next->kinds[i], some);
        next->kinds[i].count -= some, next->left -= some, more -= some;
    }
}
