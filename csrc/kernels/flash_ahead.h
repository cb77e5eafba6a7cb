/* flash_ahead.h – asking for memory ahead of time, a little at a time between the sums: of many lines at once
 * processors drop some. */

enum { FLASH_LINE = 64 };

/* So many rows of what comes next, one kind after the other. */
static inline void flash_ask_rows(am_flash_ahead next[AM_NEXTS], ptrdiff_t count)
{
    const am_flash_ahead *end = next + AM_NEXTS;
    for (; count > 0; count--) {
        while (next < end && next->rows <= 0) next++;
        if (next == end) return;
        for (ptrdiff_t i = 0; i < next->length; i += FLASH_LINE) __builtin_prefetch(next->at + i, 0, 2);
        next->at += next->step;
        next->rows--;
    }
}

/* The same in the order of memory, in runs of neighbouring lines: of those each loop asks for as many as it
 * reads elsewhere. */
typedef struct {
    const char *row;
    ptrdiff_t step, length, column; /* of rows, bytes; rows may be neighbours */
} flash_lines;

typedef struct {
    const char *at;
    ptrdiff_t step; /* from line to line, or 0 if there is nothing to ask for */
} flash_run;

static inline flash_run flash_take(flash_lines *lines, ptrdiff_t bytes)
{
    bool gaps = lines->step != lines->length;
    if (gaps && bytes > lines->length) return (flash_run){lines->row, 0};
    flash_run run = {lines->row + lines->column, FLASH_LINE};
    lines->column += bytes;
    if (lines->column >= lines->length) {
        lines->row += lines->step;
        lines->column = gaps ? 0 : lines->column - lines->length;
    }
    return run;
}

static inline void flash_ask_lines(flash_run *run, ptrdiff_t count)
{
    for (; count > 0; count--, run->at += run->step) __builtin_prefetch(run->at, 0, 2);
}
