/* product_tpl.h – the product of matrices from which everything in a chunk is made, the solution of a
 * triangular system by it, and transposing. */

#ifndef AM_LINEAR_PRODUCT
#    define AM_LINEAR_PRODUCT
/* Where a product is known to be, or need be, only a triangle. */
typedef enum {
    ALL,
    LOWER_RESULT, /* the columns of row i up to i; what lies behind them may be written or not */
    LOWER_LEFT,   /* a[i][d] is 0 for d > i */
    UPPER_LEFT,   /* a[i][d] is 0 for d < i */
} triangle;
#endif

/* c = factor start + a b; c and start are [m][n], a is [m][depth], b is [depth][n]. Steps may be negative: a
 * matrix that is read transposed or backwards needs no other kernel. n is a multiple of LANES. */
typedef struct {
    T *c;
    const T *start, *factor; /* NULL: zeros; a number a row, NULL: ones */
    const T *a, *b;
    ptrdiff_t c_step, a_step, a_depth, b_step; /* from row to row, of a also from column to column */
    ptrdiff_t m, n, depth;
    triangle triangle;
} FN(product);

/* Some rows and columns of it. */
typedef struct {
    ptrdiff_t row, column, begin, end; /* begin, end: of depth */
} FN(place);

static inline __attribute__((always_inline)) void FN(tile)(const FN(product) * p, const FN(place) * at,
                                                           const int rows, const int vectors)
{
    V sums[ROWS][VECTORS];
    const ptrdiff_t a_step = p->a_step, a_depth = p->a_depth, b_step = p->b_step;
    const T *a = p->a + at->row * a_step + at->begin * a_depth;
    const T *b = p->b + at->begin * b_step + at->column;
    UNROLL(16)
    for (int r = 0; r < rows; r++) {
        const ptrdiff_t place = (at->row + r) * p->c_step + at->column;
        const V factor = VOP(set1)(p->factor ? p->factor[at->row + r] : 1);
        UNROLL(16)
        for (int j = 0; j < vectors; j++)
            sums[r][j] = p->start ? VOP(mul)(factor, VOP(load)(p->start + place + j * LANES)) : VOP(set1)(0);
    }
    for (ptrdiff_t d = at->begin; d < at->end; d++, a += a_depth, b += b_step) {
        V right[VECTORS];
        UNROLL(16)
        for (int j = 0; j < vectors; j++) right[j] = VOP(load)(b + j * LANES);
        UNROLL(16)
        for (int r = 0; r < rows; r++) {
            const V left = VOP(set1)(a[r * a_step]);
            UNROLL(16)
            for (int j = 0; j < vectors; j++) sums[r][j] = VOP(fma)(left, right[j], sums[r][j]);
        }
    }
    UNROLL(16)
    for (int r = 0; r < rows; r++) {
        T *c = p->c + (at->row + r) * p->c_step + at->column;
        UNROLL(16)
        for (int j = 0; j < vectors; j++) VOP(store)(c + j * LANES, sums[r][j]);
    }
}

#define TILE(rows, vectors)                                                                                  \
    static void FN(tile_##rows##_##vectors)(const FN(product) * p, const FN(place) * at)                     \
    {                                                                                                        \
        FN(tile)(p, at, rows, vectors);                                                                      \
    }
#define NAME(rows, vectors) FN(tile_##rows##_##vectors),
#if VECTORS == 4
#    define EACH_WIDTH(DO, rows) DO(rows, 1) DO(rows, 2) DO(rows, 3) DO(rows, 4)
#else
#    define EACH_WIDTH(DO, rows) DO(rows, 1) DO(rows, 2)
#endif
EACH_WIDTH(TILE, 1)
EACH_WIDTH(TILE, 2)
EACH_WIDTH(TILE, 3)
EACH_WIDTH(TILE, 4)
EACH_WIDTH(TILE, 5)
EACH_WIDTH(TILE, 6)
static void (*const FN(tiles)[ROWS][VECTORS])(const FN(product) *, const FN(place) *) = {
    {EACH_WIDTH(NAME, 1)}, {EACH_WIDTH(NAME, 2)}, {EACH_WIDTH(NAME, 3)},
    {EACH_WIDTH(NAME, 4)}, {EACH_WIDTH(NAME, 5)}, {EACH_WIDTH(NAME, 6)},
};
#undef TILE
#undef NAME
#undef EACH_WIDTH

/* Panels of columns, whose part of b stays in the first-level cache, and in them strips of rows of about the
 * same height. */
static void FN(multiply)(const FN(product) * p)
{
    const ptrdiff_t strips = (p->m + ROWS - 1) / ROWS;
    for (ptrdiff_t column = 0; column < p->n; column += VECTORS * LANES) {
        for (ptrdiff_t i = 0, row = 0; i < strips; i++) {
            const ptrdiff_t rows = p->m / strips + (i < p->m % strips), last = row + rows;
            ptrdiff_t columns = p->n - column;
            if (p->triangle == LOWER_RESULT && columns > last - column) columns = last - column;
            const ptrdiff_t vectors = (columns + LANES - 1) / LANES;
            FN(place) at = {row, column, 0, p->depth};
            if (p->triangle == LOWER_LEFT && at.end > last) at.end = last;
            if (p->triangle == UPPER_LEFT) at.begin = row < p->depth ? row : p->depth;
            if (columns > 0) FN(tiles)[rows - 1][(vectors < VECTORS ? vectors : VECTORS) - 1](p, &at);
            row = last;
        }
    }
}

/* Some rows of a system, side by side in registers. */
enum { FN(BLOCK) = 8, FN(ABREAST) = VECTORS / 2 };

/* The first `count` rows of a block. */
static inline __attribute__((always_inline)) void FN(solve_rows)(T *x, ptrdiff_t step, const T *a,
                                                                 ptrdiff_t a_step, ptrdiff_t a_column,
                                                                 const ptrdiff_t count, const int abreast)
{
    V rows[FN(BLOCK)][VECTORS];
    UNROLL(16)
    for (int i = 0; i < FN(BLOCK); i++) {
        UNROLL(16)
        for (int v = 0; v < abreast; v++)
            rows[i][v] = i < count ? VOP(load)(x + i * step + v * LANES) : VOP(set1)(0);
    }
    UNROLL(16)
    for (int j = 0; j < FN(BLOCK); j++) {
        UNROLL(16)
        for (int i = j + 1; i < FN(BLOCK); i++) {
            const V left = VOP(set1)(i < count ? a[i * a_step + j * a_column] : 0);
            UNROLL(16)
            for (int v = 0; v < abreast; v++) rows[i][v] = VOP(fma)(left, rows[j][v], rows[i][v]);
        }
    }
    UNROLL(16)
    for (int i = 0; i < FN(BLOCK); i++) {
        UNROLL(16)
        for (int v = 0; v < abreast; v++)
            if (i < count) VOP(store)(x + i * step + v * LANES, rows[i][v]);
    }
}

/* Solves x_i = y_i + Σ_j<i a_ij x_j in place: x is [m][n], a is [m][m]. With negative steps from the last row
 * and the transposed a, the system that goes the other way. */
static void FN(solve)(T *x, ptrdiff_t step, const T *a, ptrdiff_t a_step, ptrdiff_t a_column, ptrdiff_t m,
                      ptrdiff_t n)
{
    for (ptrdiff_t row = 0; row < m; row += FN(BLOCK)) {
        const ptrdiff_t rows = m - row < FN(BLOCK) ? m - row : FN(BLOCK);
        T *to = x + row * step;
        const T *left = a + row * a_step, *square = left + row * a_column;
        const FN(product) before = {.c = to,
                                    .start = to,
                                    .a = left,
                                    .b = x,
                                    .c_step = step,
                                    .a_step = a_step,
                                    .a_depth = a_column,
                                    .b_step = step,
                                    .m = rows,
                                    .n = n,
                                    .depth = row};
        if (row > 0) FN(multiply)(&before);
        ptrdiff_t c = 0;
        for (; rows == FN(BLOCK) && c + FN(ABREAST) * LANES <= n; c += FN(ABREAST) * LANES)
            FN(solve_rows)(to + c, step, square, a_step, a_column, FN(BLOCK), FN(ABREAST));
        for (; c < n; c += LANES) FN(solve_rows)(to + c, step, square, a_step, a_column, rows, 1);
    }
}

/* to[c][r] = from[r][c], by squares of LANES. Rows beyond `rows`, up to a multiple of AM_LINEAR_PAD, are
 * taken as zeros. */
static void FN(turn)(T *to, ptrdiff_t to_step, const T *from, ptrdiff_t from_step, ptrdiff_t rows,
                     ptrdiff_t columns)
{
    const ptrdiff_t end = (rows + AM_LINEAR_PAD - 1) / AM_LINEAR_PAD * AM_LINEAR_PAD;
    for (ptrdiff_t r = 0; r < end; r += LANES) {
        for (ptrdiff_t c = 0; c < columns; c += LANES) {
            V square[LANES];
            UNROLL(16)
            for (int i = 0; i < LANES; i++)
                square[i] = r + i < rows ? VOP(load)(from + (r + i) * from_step + c) : VOP(set1)(0);
            VOP(transpose)(square);
            UNROLL(16)
            for (int i = 0; i < LANES; i++)
                if (c + i < columns) VOP(store)(to + (c + i) * to_step + r, square[i]);
        }
    }
}

/* Whether all numbers are finite: 0 times any other is NaN. */
static bool FN(all_finite)(const T *x, ptrdiff_t count)
{
    V sums[4];
    for (int j = 0; j < 4; j++) sums[j] = VOP(set1)(0);
    ptrdiff_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES) {
        UNROLL(16)
        for (int j = 0; j < 4; j++) sums[j] = VOP(fma)(VOP(load)(x + i + j * LANES), VOP(set1)(0), sums[j]);
    }
    for (; i < count; i += LANES) sums[0] = VOP(fma)(VOP(load)(x + i), VOP(set1)(0), sums[0]);
    const T total = VOP(total)(VOP(add)(VOP(add)(sums[0], sums[1]), VOP(add)(sums[2], sums[3])));
    return total == 0;
}

static T FN(dot)(const T *a, const T *b, ptrdiff_t count)
{
    V sums[2] = {VOP(set1)(0), VOP(set1)(0)};
    ptrdiff_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        sums[0] = VOP(fma)(VOP(load)(a + i), VOP(load)(b + i), sums[0]);
        sums[1] = VOP(fma)(VOP(load)(a + i + LANES), VOP(load)(b + i + LANES), sums[1]);
    }
    if (i < count) sums[0] = VOP(fma)(VOP(load)(a + i), VOP(load)(b + i), sums[0]);
    return VOP(total)(VOP(add)(sums[0], sums[1]));
}

static void FN(exp)(void *dst, const void *src, ptrdiff_t count)
{
    T *restrict to = dst;
    const T *restrict from = src;
    for (ptrdiff_t i = 0; i < count; i++) to[i] = FN(exp_one)(from[i]);
}
