/* squares_tpl.h – the innermost loop of the product where one instruction multiplies two rows of a by two
 * columns of b, two steps of depth at once (BFMMLA). */
#if !defined SQUARE || !defined FROM || !defined LOADS || !defined FMA
#    error "squares_tpl.h needs what product_of_tpl.h needs, and SQUARE (multiplies, adds)"
#endif

/* Turns sums of each two rows into vectors that have two columns of both, or back. A row without another
 * stays as it is. */
INLINE void FROM(turn_sums)(const int rows, const int vectors, V sums[STRIP][2])
{
    UNROLL(16)
    for (int r = 1; r < rows; r += 2) {
        UNROLL(4)
        for (int j = 0; j < vectors; j++)
            VOP(zip_halves)(&sums[j / 2 * rows + r - 1][j % 2], &sums[j / 2 * rows + r][j % 2]);
    }
}

/* As `outer`, for two steps at once; sums are as turn_sums makes them. `by_lanes`: the rows of a are
 * neighbours in memory, else the numbers of a row. Registers have room for two vectors of columns and one
 * pair of rows, or for one vector and all pairs. */
INLINE void FROM(outer_squares)(const int rows, const int vectors, const FROM(operands) x, FROM(cursor) at,
                                const FROM(odd_rows) * odd, const bool by_lanes, V sums[STRIP][2])
{
    const int some = vectors == 2 ? 2 : 1;
    UNROLL(4)
    for (int j = 0; j < vectors; j += some) {
        V b[2][2], *const first[] = {&b[0][0], &b[1][0]}, *const second[] = {&b[0][1], &b[1][1]};
        V(*const its)[2] = sums + j / 2 * rows;
        LOADS(at.b + j * LANES, x.b_row, some, first);
        LOADS(at.b + x.b_row + j * LANES, x.b_row, some, second);
        UNROLL(2)
        for (int i = 0; i < some; i++) {
            if (at.loaded && vectors == 2)
                VOP(store)(at.loaded + i * LANES, b[i][0]), VOP(store)(at.loaded + (2 + i) * LANES, b[i][1]);
            if (rows % 2) {
                const T *last = FROM(row_at)(rows, x, at, odd, rows - 1);
                V *sum = &its[rows - 1][j % 2 + i];
                *sum = FMA(VOP(set1)(last[0]), b[i][0], *sum);
                *sum = FMA(VOP(set1)(last[x.a_column]), b[i][1], *sum);
            }
            VOP(zip)(&b[i][0], &b[i][1]);
        }
        UNROLL(16)
        for (int r = 1; r < rows; r += 2) {
            const T *upper = FROM(row_at)(rows, x, at, odd, r - 1),
                    *lower = by_lanes ? upper + x.a_column : FROM(row_at)(rows, x, at, odd, r);
            const V y = VOP(load_square)(upper, lower, by_lanes);
            UNROLL(2)
            for (int i = 0; i < some; i++) {
                V *left = &its[r - 1][j % 2 + i], *right = &its[r][j % 2 + i];
                *left = SQUARE(y, b[i][0], *left);
                *right = SQUARE(y, b[i][1], *right);
                if (vectors > 2)
                    V_BEHIND(at.b, *left, *right);
                else
                    V_BEHIND(at.a, *left, *right);
            }
        }
    }
}
