/* flash_ahead.h – asking for memory ahead of time, a little at a time between the sums: of many lines at once
 * processors drop some. */

typedef struct {
    const char *at;
    ptrdiff_t piece, pieces, gap; /* bytes of a piece, pieces of a row, and bytes from one row to the next */
    ptrdiff_t left, rows;         /* what is still to ask for: pieces of this row, and rows */
} flash_ahead;

static inline flash_ahead flash_ahead_of(const am_flash_ahead *rows, ptrdiff_t piece)
{
    ptrdiff_t pieces = (rows->length + piece - 1) / piece;
    return (flash_ahead){rows->at, piece, pieces, rows->step - pieces * piece, pieces, rows->rows};
}

static inline void flash_ask(flash_ahead *ahead)
{
    if (ahead->rows <= 0) return;
    __builtin_prefetch(ahead->at, 0, 2);
    ahead->at += ahead->piece;
    if (--ahead->left > 0) return;
    ahead->at += ahead->gap;
    ahead->left = ahead->pieces;
    ahead->rows--;
}

/* The same in the order of memory, in runs of neighbouring lines: of those each loop asks for as many as it
 * reads elsewhere. */
enum { FLASH_LINE = 64 };

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
