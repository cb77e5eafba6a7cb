/* multiply_tpl.h – the product of matrices, by the innermost loop of attention's. */
#if !defined T || !defined FROM || !defined JOINED || !defined HEIGHT || !defined VECTORS
#    error "multiply_tpl.h needs f32.h or f64.h, FROM(name), JOINED (numbers in a lane of depth),"
#    error "HEIGHT and VECTORS (rows and vectors of a tile)"
#endif

/* Some rows and columns of a product. */
INLINE void FROM(tile)(const FN(product) * p, ptrdiff_t row, ptrdiff_t column, ptrdiff_t begin, ptrdiff_t end,
                       const int rows, const int vectors)
{
    V sums[HEIGHT * VECTORS / 2][2]; /* of all rows, then of their third and fourth vectors */
    UNROLL(16)
    for (int r = 0; r < rows; r++) {
        const V factor = VOP(set1)(p->factor ? p->factor[row + r] : 1);
        UNROLL(4)
        for (int j = 0; j < vectors; j++) {
            const T *start = p->start + (row + r) * p->c_stride + column + j * LANES;
            sums[j / 2 * rows + r][j % 2] = p->start ? VOP(mul)(factor, VOP(load)(start)) : VOP(set1)(0);
        }
    }
    const ptrdiff_t piece = p->queue && p->queue->left ? BETWEEN_ROWS : end - begin;
    for (ptrdiff_t at = begin; at < end; at += piece) {
        if (p->queue) prefetch_rest(p->queue, NULL, 0);
        const FROM(operands) x = {.length = at + piece < end ? piece : end - at,
                                  .a = p->a.at + row * p->a.row + at * p->a.column,
                                  .a_row = p->a.row,
                                  .a_column = p->a.column,
                                  .b = p->b.at + at * p->b.row + column,
                                  .b_row = p->b.row};
        FROM(add_to_sums)(rows, vectors, x,
                          (FROM(reading)){.lines = 0, .goes_on = at > begin, .stays = at + piece < end},
                          sums);
    }
    UNROLL(16)
    for (int r = 0; r < rows; r++) {
        T *c = p->c + (row + r) * p->c_stride + column;
        UNROLL(4)
        for (int j = 0; j < vectors; j++) VOP(store)(c + j * LANES, sums[j / 2 * rows + r][j % 2]);
    }
}

#define TILE(rows, vectors)                                                                                  \
    static void FROM(tile_##rows##_##vectors)(const FN(product) * p, ptrdiff_t row, ptrdiff_t column,        \
                                              ptrdiff_t begin, ptrdiff_t end)                                \
    {                                                                                                        \
        FROM(tile)(p, row, column, begin, end, rows, vectors);                                               \
    }
#define NAME(rows, vectors) FROM(tile_##rows##_##vectors),
#if VECTORS == 4
#    define EACH_WIDTH(DO, rows) DO(rows, 1) DO(rows, 2) DO(rows, 4)
#else
#    define EACH_WIDTH(DO, rows) DO(rows, 1) DO(rows, 2)
#endif
EACH_WIDTH(TILE, 1)
EACH_WIDTH(TILE, 2)
EACH_WIDTH(TILE, 4)
EACH_WIDTH(TILE, 6)
/* By half of the height. */
static void (*const FROM(tiles)[HEIGHT / 2 + 1][VECTORS / 2 + 1])(const FN(product) *, ptrdiff_t, ptrdiff_t,
                                                                  ptrdiff_t, ptrdiff_t) = {
    {EACH_WIDTH(NAME, 1)}, {EACH_WIDTH(NAME, 2)}, {EACH_WIDTH(NAME, 4)}, {EACH_WIDTH(NAME, 6)}};
#undef TILE
#undef NAME
#undef EACH_WIDTH

/* Panels of columns, whose part of b stays in the first-level cache, and in them strips of six rows, then of
 * four, two and one; but the last eight are two of four, as two rows take as long as three. */
static void FROM(multiply)(const FN(product) * p)
{
    for (ptrdiff_t column = 0; column < p->n; column += VECTORS * LANES) {
        for (ptrdiff_t row = 0, last; row < p->m; row = last) {
            const ptrdiff_t left = p->m - row, most = left == 8 ? 4 : HEIGHT;
            const ptrdiff_t rows = left >= most ? most : left > 1 ? left / 2 * 2 : 1;
            last = row + rows;
            ptrdiff_t columns = p->n - column, begin = 0, end = p->depth;
            if (columns > VECTORS * LANES) columns = VECTORS * LANES;
            if (p->triangle == LOWER_RESULT && columns > last - column) columns = last - column;
            if (p->triangle == LOWER_LEFT && end > (last + JOINED - 1) / JOINED)
                end = (last + JOINED - 1) / JOINED;
            if (p->triangle == UPPER_LEFT) begin = row < end ? row : end;
            for (ptrdiff_t at = column; columns > 0;) { /* more than needed where that is one vector */
                const int width =
                    columns > 2 * LANES && VECTORS == 4 && p->n - at >= 4 * LANES ? 2 : columns > LANES;
                FROM(tiles)[rows / 2][width](p, row, at, begin, end);
                columns -= (ptrdiff_t)LANES << width, at += (ptrdiff_t)LANES << width;
            }
        }
    }
}
#undef FROM
#undef JOINED
