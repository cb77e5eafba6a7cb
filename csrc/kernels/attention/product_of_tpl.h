/* product_of_tpl.h – the innermost loop of the product.
 *
 * On some processors stores delay FMA, but not a plain product: sums that do not add to c begin with TIMES,
 * while the strip before is stored. */
#if !defined T || !defined EACH_ROWS || !defined S || !defined FROM
#    error "product_of_tpl.h needs f32.h or f64.h, product_tpl.h, S (a number of b) and FROM(name)"
#endif
#if !defined FMA || !defined TIMES || !(defined LOAD || defined LOADS)
#    error "product_of_tpl.h needs FMA (multiplies, adds), TIMES (multiplies), and LOAD (a vector) or LOADS"
#endif

#ifndef SPLIT /* where two loaded vectors hold columns in another order: puts sums in that order, JOIN back  \
               */
#    define SPLIT(first, second) (void)0
#    define JOIN(first, second) (void)0
#endif
#ifndef LOADS /* loads one or two vectors of the row at b, or two of the two rows half of b_row apart there  \
               */
#    define LOADS(b, b_row, vectors, to) *(to)[0] = LOAD(b), *(to)[1] = LOAD((b) + ((vectors) > 1) * LANES)
#endif
#ifndef LOADS_WIDE /* loads four */
#    define LOADS_WIDE(b, b_row, to)                                                                         \
        LOADS(b, b_row, 2, to);                                                                              \
        LOADS((b) + FN(PANEL), b_row, 2, (to) + 2)
#endif
#ifndef SUM_A_COLUMN /* from row to row of P and dS in backward */
#    define SUM_A_COLUMN AM_FLASH_TILE
#endif

/* FMA_HALF, which may be missing, is FMA for the lower half of the lanes. ENDS_IN_HALF: columns fill one
 * vector and at most half of a second. */
#ifdef FMA_HALF
#    define ENDS_IN_HALF(columns) (LANES < (columns) && 2 * (columns) <= 3 * LANES)
#else
#    define FMA_HALF FMA
#    define ENDS_IN_HALF(columns) false
#endif

#ifdef SQUARE /* adds products of two steps, two rows of a and two columns, where there are as many */
#    define TWO_STEPS true
#else
#    define TWO_STEPS false
#endif

/* What is multiplied, and where sums go: c += a b or c = a b, of sums of `length` products. Functions that
 * are not inlined take it by value: then GCC hands its fields over in registers. Where products are short, as
 * in the transposed step, loading them first took 1.03 of the time. */
typedef struct {
    ptrdiff_t length;
    const T *a;
    ptrdiff_t a_row, a_column; /* from row to row of a, and from number to number of a row */
    const S *b;
    ptrdiff_t b_row;
    T *c;
    ptrdiff_t c_row;
} FROM(operands);

/* Rows of a that lie AM_FLASH_TILE apart, and rows of b. */
INLINE FROM(operands)
    FROM(by_rows)(ptrdiff_t length, const T *a, const S *b, ptrdiff_t b_row, T *c, ptrdiff_t c_row)
{
    return (FROM(operands)){.length = length,
                            .a = a,
                            .a_row = AM_FLASH_TILE,
                            .a_column = 1,
                            .b = b,
                            .b_row = b_row,
                            .c = c,
                            .c_row = c_row};
}

/* How rows of b are read. */
typedef struct {
    int lines; /* that are prefetched with each of them */
    prefetch_lines *prefetch;
    bool runs;                    /* whether these lines may lie in runs */
    const row_runs *in_runs;      /* in which rows of b lie; NULL: one behind the other */
    T *loaded;                    /* where panels of them are stored as they were loaded, or NULL */
    const FROM(operands) * again; /* c and c_row are read again behind the loop; NULL: they are kept */
    const am_backward_sum *sum;   /* at c; NULL: sums add to c */
    bool goes_on, stays;          /* with SQUARE: sums come from turn_sums already; and are left so */
    bool half;                    /* columns end in the lower half of the second vector; sums add to c */
} FROM(reading);

/* Strips of up to so many rows of a keep the address of each in a register. There are too few registers for
 * more: their addresses are that of row 0 plus the bytes to an odd row, times 1, 2, 4 or 8, which one
 * instruction adds. Clang for Arm would step one address through six rows, each of which waits for the one
 * before, and spill sums. */
#if defined __clang__ && defined __aarch64__
#    define ROWS_WITH_ADDRESSES 4
#else
#    define ROWS_WITH_ADDRESSES 6
#endif
typedef struct {
    ptrdiff_t to[STRIP / 2 + 1];
} FROM(odd_rows);
INLINE FROM(odd_rows) FROM(odd_rows_of)(ptrdiff_t a_row)
{
    FROM(odd_rows) odd;
    UNROLL(8)
    for (int i = 0; i <= STRIP / 2; i++) odd.to[i] = (2 * i + 1) * a_row * (ptrdiff_t)sizeof(T);
    return odd;
}

/* Where a loop over numbers of a and rows of b is. */
typedef struct {
    const T *a;
    const S *b;
    T *loaded;
} FROM(cursor);

/* Where row r of a is. */
INLINE const T *FROM(row_at)(const int rows, const FROM(operands) x, const FROM(cursor) at,
                             const FROM(odd_rows) * odd, const int r)
{
    const int twos = r ? __builtin_ctz((unsigned)r) : 0;
    const ptrdiff_t offset = r ? odd->to[r >> twos >> 1] * (1 << twos) : 0;
    return rows <= ROWS_WITH_ADDRESSES ? at.a + r * x.a_row : (const T *)((const char *)at.a + offset);
}

/* How products enter sums: sums = a b; sums += a b; or += with the lower half of the second vector alone. */
enum FROM(entry) { FROM(SET), FROM(ADD), FROM(ADD_HALF) };

/* sums[r][j] = (entry == SET ? 0 : sums[r][j]) + a[r] b[j]. */
INLINE void FROM(outer)(const int rows, const int vectors, const FROM(operands) x, const FROM(cursor) at,
                        const FROM(odd_rows) * odd, const enum FROM(entry) entry, V sums[STRIP][2])
{
    const bool add = entry != FROM(SET), half = entry == FROM(ADD_HALF);
    V left, right, third, fourth, *const row[] = {&left, &right, &third, &fourth};
    if (vectors > 2) {
        LOADS_WIDE(at.b, x.b_row, row);
    } else {
        LOADS(at.b, x.b_row, vectors, row);
    }
    if (vectors == 2 && at.loaded) VOP(store)(at.loaded, left), VOP(store)(at.loaded + LANES, right);
    UNROLL(16)
    for (int r = 0; r < rows; r++) {
        V y = VOP(set1)(*FROM(row_at)(rows, x, at, odd, r));
        sums[r][0] = add ? FMA(y, left, sums[r][0]) : TIMES(y, left);
        if (half)
            sums[r][1] = FMA_HALF(y, right, sums[r][1]);
        else if (vectors > 1)
            sums[r][1] = add ? FMA(y, right, sums[r][1]) : TIMES(y, right);
        if (vectors <= 2) continue;
        V *more = sums[rows + r];
        more[0] = add ? FMA(y, third, more[0]) : TIMES(y, third);
        more[1] = add ? FMA(y, fourth, more[1]) : TIMES(y, fourth);
    }
}

#ifdef SQUARE
#    include "kernels/attention/squares_tpl.h"
#endif

/* sums[r][j] = sums[r][j] + sum over i of a[r][i] b[i][j], for one, two or four vectors of columns; four of
 * half as many rows at most. */
INLINE void FROM(add_to_sums)(const int rows, const int vectors, const FROM(operands) x,
                              const FROM(reading) how, V sums[STRIP][2])
{
    const enum FROM(entry) entry = how.half ? FROM(ADD_HALF) : FROM(ADD);
    const int lines = how.lines;
    const bool runs = how.runs;
    const row_runs *in_runs = how.in_runs;
    ptrdiff_t length = x.length;
    const T *a = x.a;
    const S *b = x.b;
    T *loaded = how.loaded;
    prefetch_lines current = lines ? *how.prefetch : (prefetch_lines){0};
    const void *const *next = in_runs ? in_runs->next : NULL;
    FROM(odd_rows) odd = FROM(odd_rows_of)(x.a_row);
    const int hidden = __builtin_constant_p(x.a_row) || rows <= ROWS_WITH_ADDRESSES ? 0 : rows / 2;
    /* Where unpacked rows are few, one panel alone is seldom taken. */
    const bool unrolled = RUN_ROWS > 0 && !IS_DOUBLE && (vectors > 2 || (vectors == 2 && !runs));
#ifdef SQUARE
    /* Two or three rows take as many instructions by FMA. Runs have one row or an even number. */
    const bool squares = rows > 3 && !(in_runs && in_runs->rows % 2);
    if (squares && !how.goes_on) FROM(turn_sums)(rows, vectors, sums);
#endif
    for (;;) {
        ptrdiff_t left = in_runs && in_runs->rows < length ? in_runs->rows : length;
        length -= left;
        for (; unrolled && in_runs && left >= RUN_ROWS; left -= RUN_ROWS) {
            if (lines && current.left <= RUN_ROWS * lines) break;
            UNROLL(8)
            for (int i = 0; i < RUN_ROWS; i++, a += x.a_column, b += x.b_row) {
                if (lines) prefetch_at_once(&current, lines);
                HIDE(b); /* one register for all rows */
                FROM(outer)(rows, vectors, x, (FROM(cursor)){.a = a, .b = b, .loaded = loaded}, &odd, entry,
                            sums);
                if (loaded) loaded += FN(PANEL);
            }
        }
#ifdef SQUARE
#    define SQUARES(by_lanes)                                                                                \
        for (; left > 1; left -= 2, a += 2 * x.a_column, b += 2 * x.b_row) {                                 \
            prefetch_few(&current, 2 * lines, runs);                                                         \
            UNROLL(8)                                                                                        \
            for (int i = 0; i < hidden; i++) HIDE(odd.to[i]);                                                \
            FROM(outer_squares)(rows, vectors, x, (FROM(cursor)){.a = a, .b = b, .loaded = loaded}, &odd,    \
                                by_lanes, sums);                                                             \
            if (loaded) loaded += 2 * FN(PANEL);                                                             \
        }
        if (squares && x.a_column == 1)
            SQUARES(false)
        else if (squares)
            SQUARES(true)
#    undef SQUARES
        if (squares && length <= 0 && !how.stays) FROM(turn_sums)(rows, vectors, sums);
#endif
#pragma GCC unroll 2
        for (; left > 0; left--, a += x.a_column, b += x.b_row) {
            prefetch_few(&current, lines, runs);
            UNROLL(8)
            for (int i = 0; i < hidden; i++) HIDE(odd.to[i]); /* else they are computed before the loop */
            FROM(outer)(rows, vectors, x, (FROM(cursor)){.a = a, .b = b, .loaded = loaded}, &odd, entry,
                        sums);
            if (loaded) loaded += FN(PANEL);
        }
        if (length <= 0) break;
        b = (const S *)((const char *)*next++ + in_runs->offset);
    }
    if (lines) *how.prefetch = current;
}

/* Sums of products, from c or from 0, and to c: c[r][j] = (add ? c[r][j] : 0) + … */
INLINE void FROM(product_of)(const int rows, const int vectors, FROM(operands) x, FROM(reading) how,
                             const bool add)
{
    V sums[STRIP][2]; /* of all rows, then of their third and fourth vectors */
    T *c = x.c, *row = c;
    const bool fresh = (TWO_STEPS && !add) || (how.sum && how.sum->fresh);
    if (fresh) {
        UNROLL(16)
        for (int r = 0; r < rows; r++) {
            UNROLL(4)
            for (int j = 0; j < vectors; j++) sums[j / 2 * rows + r][j % 2] = VOP(set1)(0);
        }
    } else {
        UNROLL(16)
        for (int r = 0; add && r < rows; r++, row += x.c_row) {
            UNROLL(4)
            for (int j = 0; j < vectors; j++) sums[j / 2 * rows + r][j % 2] = VOP(load)(row + j * LANES);
            if (vectors > 1) SPLIT(&sums[r][0], &sums[r][1]);
            if (vectors > 2) SPLIT(&sums[rows + r][0], &sums[rows + r][1]);
        }
    }
    prefetch_lines *const prefetch = how.prefetch, current = how.lines ? *prefetch : (prefetch_lines){0};
    how.prefetch = &current;
    if (!add && !TWO_STEPS) {
        prefetch_few(&current, how.lines, how.runs);
        const FROM(odd_rows) odd = FROM(odd_rows_of)(x.a_row);
        FROM(outer)(rows, vectors, x, (FROM(cursor)){.a = x.a, .b = x.b, .loaded = NULL}, &odd, FROM(SET),
                    sums);
        x.length--, x.a += x.a_column, x.b += x.b_row;
    }
    FROM(add_to_sums)(rows, vectors, x, how, sums);
    if (how.lines) *prefetch = current;
    if (how.again) {
        HIDE(how.again);
        c = how.again->c, x.c_row = how.again->c_row;
    }
    if (how.sum && how.sum->onto) {
        row = c = how.sum->onto, x.c_row = how.sum->onto_stride;
        UNROLL(16)
        for (int r = 0; r < rows; r++, row += x.c_row) {
            UNROLL(4)
            for (int j = 0; j < vectors; j++)
                sums[j / 2 * rows + r][j % 2] =
                    VOP(add)(VOP(load)(row + j * LANES), sums[j / 2 * rows + r][j % 2]);
        }
    }
    HIDE(c); /* computing the addresses of its rows again is cheaper: there are no registers to keep them */
    row = c;
    UNROLL(16)
    for (int r = 0; r < rows; r++, row += x.c_row) {
        if (vectors > 1) JOIN(&sums[r][0], &sums[r][1]);
        if (vectors > 2) JOIN(&sums[rows + r][0], &sums[rows + r][1]);
        UNROLL(4)
        for (int j = 0; j < vectors; j++) VOP(store)(row + j * LANES, sums[j / 2 * rows + r][j % 2]);
    }
}

/* `product_of` for so many rows; of four vectors, up to half a strip. */
INLINE void FROM(product_of_rows)(ptrdiff_t rows, const int vectors, const FROM(operands) x,
                                  const FROM(reading) how, const bool add)
{
#define ROWS(n)                                                                                              \
    case n: FROM(product_of)(n, vectors, x, how, add); break;
    if (vectors > 2) {
        switch (rows) {
            EACH_FEW_ROWS(ROWS)
        }
    } else {
        switch (rows) {
            EACH_ROWS(ROWS)
        }
    }
#undef ROWS
}

INLINE bool FROM(within)(ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t end, FROM(operands) x,
                         const FROM(reading) how)
{
    if (end <= 0 || begin >= FN(PANEL)) return false;
    const ptrdiff_t half = begin < LANES ? 0 : LANES;
    x.a_column = 1, x.b_row = FN(PANEL), x.c_row = AM_FLASH_TILE;
    x.b += half, x.c += half;
    if (begin < LANES && end > LANES)
        FROM(product_of_rows)(rows, 2, x, how, false);
    else
        FROM(product_of_rows)(rows, 1, x, how, false);
    return true;
}
APART bool FROM(within_no_prefetch)(ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t end, const FROM(operands) p)
{
    return FROM(within)(rows, begin, end, p, (FROM(reading)){.lines = 0});
}
APART bool FROM(within_prefetching)(ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t end, const FROM(operands) p,
                                    prefetch_lines *prefetch)
{
    return FROM(within)(rows, begin, end, p, (FROM(reading)){.lines = 1, .prefetch = prefetch});
}

/* Multiplies rows of a by one packed panel, to rows of c that lie AM_FLASH_TILE apart; `length` is at least
 * 1. It computes at least those of the columns begin … end - 1 that lie in the panel, and returns whether any
 * do. It prefetches a line with each row of b, if `prefetch` is not NULL. */
static inline bool FROM(product_within)(ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t end,
                                        const FROM(operands) p, prefetch_lines *prefetch)
{
    prefetch_lines none = prefetch_nothing(p.b);
    return prefetch || IS_DOUBLE ? FROM(within_prefetching)(rows, begin, end, p, prefetch ? prefetch : &none)
                                 : FROM(within_no_prefetch)(rows, begin, end, p);
}

/* c = c + a b, where rows of a lie AM_FLASH_TILE apart, and b is some vectors of rows that lie anywhere. */
INLINE void FROM(accumulate)(ptrdiff_t rows, const int vectors, FROM(operands) x, const FROM(reading) how)
{
    x.a_row = AM_FLASH_TILE, x.a_column = 1;
    FROM(product_of_rows)(rows, vectors, x, how, true);
}

APART void FROM(add_no_prefetch)(ptrdiff_t rows, const FROM(operands) p)
{
    FROM(accumulate)(rows, 2, p, (FROM(reading)){.lines = 0});
}
/* Rows of b lie `in_runs` unless that is NULL. */
APART void FROM(add_vector)(ptrdiff_t rows, const FROM(operands) p, const row_runs *in_runs)
{
    FROM(accumulate)(rows, 1, p, (FROM(reading)){.in_runs = in_runs});
}
APART void FROM(add_prefetching)(ptrdiff_t rows, const FROM(operands) p, prefetch_lines *prefetch,
                                 const row_runs *in_runs)
{
    FROM(accumulate)(rows, 2, p, (FROM(reading)){.lines = 1, .prefetch = prefetch, .in_runs = in_runs});
}

/* c = c + a b for columns that end in the lower half of the second vector. */
APART void FROM(add_one_and_half)(ptrdiff_t rows, const FROM(operands) p, prefetch_lines *prefetch)
{
    FROM(accumulate)(rows, 2, p, (FROM(reading)){.lines = 1, .prefetch = prefetch, .half = true});
}

/* c = c + a b, of `columns` or a panel of them if there are more. It prefetches one line with each row of b,
 * if `prefetch` is not NULL; half a panel never prefetches. */
static inline void FROM(add_product)(ptrdiff_t rows, ptrdiff_t columns, const FROM(operands) p,
                                     prefetch_lines *prefetch, const row_runs *in_runs)
{
    prefetch_lines none = prefetch_nothing(p.b);
    if (ENDS_IN_HALF(columns) && !in_runs)
        FROM(add_one_and_half)(rows, p, prefetch ? prefetch : &none);
    else if (columns <= LANES)
        FROM(add_vector)(rows, p, in_runs);
    else if (prefetch || in_runs || IS_DOUBLE)
        FROM(add_prefetching)(rows, p, prefetch ? prefetch : &none, in_runs);
    else
        FROM(add_no_prefetch)(rows, p);
}

/* As `accumulate`, for two panels of columns and up to half a strip of rows. */
APART void FROM(accumulate_wide)(ptrdiff_t rows, const FROM(operands) * p, const int lines,
                                 prefetch_lines *prefetch, const row_runs *in_runs)
{
    FROM(accumulate)(
        rows, 4, *p,
        (FROM(reading)){.lines = lines, .prefetch = prefetch, .runs = true, .in_runs = in_runs, .again = p});
}

/* c = c + aᵀ b, of `columns` or a panel of them. */
INLINE void FROM(accumulate_transposed)(ptrdiff_t rows, ptrdiff_t columns, FROM(operands) x,
                                        const FROM(reading) how)
{
    x.a_row = 1;
    if (columns > LANES)
        FROM(product_of_rows)(rows, 2, x, how, true);
    else
        FROM(product_of_rows)(rows, 1, x, how, true);
}

/* c = c + aᵀ b for such columns; `sum` may be NULL. */
APART void FROM(transposed_one_and_half)(ptrdiff_t rows, FROM(operands) x, const am_backward_sum *sum)
{
    x.a_row = 1;
    FROM(product_of_rows)(rows, 2, x, (FROM(reading)){.sum = sum, .half = true}, true);
}

/* c = c + aᵀ b where rows of a lie AM_FLASH_TILE apart. Rows of b lie `in_runs` unless that is NULL, and
 * panels of them are stored as they were loaded unless `loaded` is NULL. */
APART void FROM(add_product_transposed)(ptrdiff_t rows, ptrdiff_t columns, FROM(operands) x,
                                        const row_runs *in_runs, T *loaded)
{
    x.a_column = AM_FLASH_TILE;
    if (ENDS_IN_HALF(columns) && !in_runs && !loaded)
        FROM(transposed_one_and_half)(rows, x, NULL);
    else
        FROM(accumulate_transposed)(rows, columns, x, (FROM(reading)){.in_runs = in_runs, .loaded = loaded});
}

/* c + aᵀ b and c + a b, to a sum of backward at c. */
APART void FROM(sum_transposed)(ptrdiff_t rows, ptrdiff_t columns, FROM(operands) x,
                                const am_backward_sum *sum)
{
    x.a_column = SUM_A_COLUMN;
    if (ENDS_IN_HALF(columns))
        FROM(transposed_one_and_half)(rows, x, sum);
    else
        FROM(accumulate_transposed)(rows, columns, x, (FROM(reading)){.sum = sum});
}
APART void FROM(sum_straight)(ptrdiff_t rows, ptrdiff_t columns, FROM(operands) x, const am_backward_sum *sum)
{
    if (ENDS_IN_HALF(columns))
        FROM(accumulate)(rows, 2, x, (FROM(reading)){.sum = sum, .half = true});
    else if (columns > LANES)
        FROM(accumulate)(rows, 2, x, (FROM(reading)){.sum = sum});
    else
        FROM(accumulate)(rows, 1, x, (FROM(reading)){.sum = sum});
}

#undef SPLIT
#undef JOIN
#undef S
#undef LOAD
#undef LOADS
#undef LOADS_WIDE
#undef SUM_A_COLUMN
#undef TWO_STEPS
#undef FMA_HALF
#undef ENDS_IN_HALF
#undef FMA
#undef TIMES
#undef FROM
