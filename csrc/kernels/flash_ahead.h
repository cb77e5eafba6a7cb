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
