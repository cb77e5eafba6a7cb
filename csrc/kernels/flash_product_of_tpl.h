/* flash_product_of_tpl.h – the product's innermost loop, where b is of type S, LOAD makes lanes of it, and
 * FMA multiplies and adds. */

/* sums[r][j] += a[r] b[j] */
static inline __attribute__((always_inline)) void
FROM(add_outer)(const int rows, const int vectors, const T *a, ptrdiff_t a_row, const S *b, V sums[STRIP][2])
{
    V left = LOAD(b), right = vectors > 1 ? LOAD(b + LANES) : left;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        V x = VOP(set1)(a[r * a_row]);
        sums[r][0] = FMA(x, left, sums[r][0]);
        if (vectors > 1) sums[r][1] = FMA(x, right, sums[r][1]);
    }
}

/* c[r][j] = (add ? c[r][j] : 0) + sum over i of a[r][i] b[i][j], for one or two vectors of columns. With each
 * row of b it asks for `lines`. */
static inline __attribute__((always_inline)) void
FROM(product_of)(const int rows, const int vectors, ptrdiff_t depth, const T *a, ptrdiff_t a_row,
                 ptrdiff_t a_column, const S *b, ptrdiff_t b_row, T *c, ptrdiff_t c_row, bool add,
                 const int lines, flash_lines *ahead)
{
    V sums[STRIP][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++)
            sums[r][j] = add ? VOP(load)(c + r * c_row + j * LANES) : VOP(set1)(0);
    }
    if (!lines && rows >= FN(LEAST_UNROLLED)) {
#pragma GCC unroll 4
        for (ptrdiff_t i = 0; i < depth; i++, a += a_column, b += b_row)
            FROM(add_outer)(rows, vectors, a, a_row, b, sums);
        depth = 0;
    }
    flash_lines ask = lines ? *ahead : (flash_lines){0};
    for (; depth > 0; depth--, a += a_column, b += b_row) {
        flash_ask_lines(&ask, lines);
        FROM(add_outer)(rows, vectors, a, a_row, b, sums);
    }
    if (lines) *ahead = ask;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) VOP(store)(c + r * c_row + j * LANES, sums[r][j]);
    }
}

/* Rows of a, and b as one packed panel. */
static inline void FROM(product)(ptrdiff_t rows, ptrdiff_t depth, const T *a, ptrdiff_t a_step, const S *b,
                                 T *c, ptrdiff_t c_step, bool add)
{
#define ROWS_OF(n, depth) FROM(product_of)(n, 2, depth, a, a_step, 1, b, FN(PANEL), c, c_step, add, 0, NULL)
#define ROWS(n)                                                                                              \
    case n:                                                                                                  \
        if (n < FN(LEAST_UNROLLED) || depth != AM_FLASH_TILE)                                                \
            ROWS_OF(n, depth);                                                                               \
        else                                                                                                 \
            ROWS_OF(n, AM_FLASH_TILE); /* without a rest */                                                  \
        break;
    switch (rows) {
        EACH_ROWS(ROWS)
    }
#undef ROWS
#undef ROWS_OF
}

/* The same of columns begin … end - 1 at least, which may lie beside the panel; whether there are any. */
static inline bool FROM(product_within)(ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t depth,
                                        const T *a, ptrdiff_t a_step, const S *b, T *c, ptrdiff_t c_step)
{
    if (end <= 0 || begin >= FN(PANEL)) return false;
    if (begin < LANES && end > LANES) {
        FROM(product)(rows, depth, a, a_step, b, c, c_step, false);
        return true;
    }
    const ptrdiff_t half = begin < LANES ? 0 : LANES;
#define ROWS(n)                                                                                              \
    case n:                                                                                                  \
        FROM(product_of)(n, 1, depth, a, a_step, 1, b + half, FN(PANEL), c + half, c_step, false, 0, NULL);  \
        break;
    switch (rows) {
        EACH_ROWS(ROWS)
    }
#undef ROWS
    return true;
}

/* Columns of a, and rows of b: c = c + aᵀ b. */
static inline void FROM(product_turned)(ptrdiff_t columns, ptrdiff_t depth, const T *a, ptrdiff_t a_step,
                                        const S *b, ptrdiff_t b_step, T *c, ptrdiff_t c_step)
{
#define ROWS(n)                                                                                              \
    case n: FROM(product_of)(n, 2, depth, a, 1, a_step, b, b_step, c, c_step, true, 0, NULL); break;
    switch (columns) {
        EACH_ROWS(ROWS)
    }
#undef ROWS
}

#undef S
#undef LOAD
#undef FMA
#undef FROM
