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

/* The same line by line, in the order of memory, which loops ask for while they read others. */
typedef struct {
    uintptr_t at; /* asked for whether or not it is anybody's memory, which is harmless */
    ptrdiff_t step, left, row,
        gap; /* bytes from line to line, lines left of this row and of all, bytes to the next */
} flash_lines;

static inline flash_lines flash_lines_of(const void *first, ptrdiff_t skip, ptrdiff_t step, ptrdiff_t length)
{
    ptrdiff_t row = (length + FLASH_LINE - 1) / FLASH_LINE;
    return (flash_lines){(uintptr_t)first + (uintptr_t)skip, FLASH_LINE, row, row, step - row * FLASH_LINE};
}

/* A line that is known, again and again. */
static inline flash_lines flash_no_lines(const void *known)
{
    return (flash_lines){(uintptr_t)known, 0, PTRDIFF_MAX, PTRDIFF_MAX, 0};
}

static inline void flash_ask_lines(flash_lines *lines, ptrdiff_t count)
{
    for (; count > 0; count--) {
        __builtin_prefetch((const void *)lines->at, 0, 2);
        lines->at += (uintptr_t)lines->step;
        if (--lines->left > 0) continue;
        lines->at += (uintptr_t)lines->gap;
        lines->left = lines->row;
    }
}
