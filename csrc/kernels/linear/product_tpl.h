/* product_tpl.h – the product of matrices from which everything in a chunk is made, the solution of a
 * triangular system by it, and transposing. */
#if !defined T || !defined EACH_ROWS || !defined HEIGHT || !defined VECTORS
#    error "product_tpl.h needs f32.h or f64.h, attention/product_tpl.h, HEIGHT and VECTORS (of a tile)"
#endif

#ifndef AM_LINEAR_PRODUCT
#    define AM_LINEAR_PRODUCT
/* Where a product is known to be, or need be, only a triangle. */
typedef enum {
    ALL,
    LOWER_RESULT, /* the columns of row i up to i; what lies behind them may be written or not */
    LOWER_LEFT,   /* a[i][d] is 0 for d > i */
    UPPER_LEFT,   /* a[i][d] is 0 for d < i */
} triangle;

/* So many steps of depth lie between lines that are prefetched: processors keep few misses at once. */
enum { BETWEEN_ROWS = 16 };

/* What products of so many rows and steps of depth, all together, and columns prefetch: to the second-level
 * cache, as they take a while. */
static inline void prefetch_between(prefetch_queue *queue, am_prefetch_plan *plan, ptrdiff_t rows,
                                    ptrdiff_t depth, ptrdiff_t columns)
{
    const ptrdiff_t pieces =
        rows * depth / (HEIGHT * BETWEEN_ROWS) * ((columns - 1) / (VECTORS * VF_LANES) + 1);
    prefetch_begin(queue, plan, pieces + 1);
    for (int i = 0; i < queue->count; i++) queue->kinds[i].near = false;
}
#endif

/* Distances from row to row and from number to number of a row may be negative: a matrix that is read
 * transposed or backwards needs no other kernel. */
typedef struct {
    const T *at;
    ptrdiff_t row, column;
} FN(matrix);

/* c = factor start + a b; c and start are [m][n], a is [m][depth], b is [depth][n]. Numbers of a
 * row of b and c lie side by side; n is a multiple of LANES. */
typedef struct {
    T *c;
    const T *start, *factor; /* NULL: zeros; a number per row, NULL: ones */
    FN(matrix) a, b;
    ptrdiff_t c_stride; /* of rows of c and of start */
    ptrdiff_t m, n, depth;
    triangle triangle;
    prefetch_queue *queue; /* NULL: nothing is prefetched */
} FN(product);

#define FROM(name) FN(name)
#define JOINED 1
#include "kernels/linear/multiply_tpl.h"

/* Some rows of a system, side by side in registers. */
enum { FN(BLOCK) = 8, FN(ABREAST) = VECTORS / 2 };

/* The first `count` rows of a block. */
INLINE void FN(solve_rows)(T *x, ptrdiff_t stride, const FN(matrix) a, const ptrdiff_t count,
                           const int abreast)
{
    V rows[FN(BLOCK)][VECTORS];
    UNROLL(16)
    for (int i = 0; i < FN(BLOCK); i++) {
        UNROLL(16)
        for (int v = 0; v < abreast; v++)
            rows[i][v] = i < count ? VOP(load)(x + i * stride + v * LANES) : VOP(set1)(0);
    }
    UNROLL(16)
    for (int j = 0; j < FN(BLOCK); j++) {
        UNROLL(16)
        for (int i = j + 1; i < FN(BLOCK); i++) {
            const V left = VOP(set1)(i < count ? a.at[i * a.row + j * a.column] : 0);
            UNROLL(16)
            for (int v = 0; v < abreast; v++) rows[i][v] = VOP(fma)(left, rows[j][v], rows[i][v]);
        }
    }
    UNROLL(16)
    for (int i = 0; i < FN(BLOCK); i++) {
        UNROLL(16)
        for (int v = 0; v < abreast; v++)
            if (i < count) VOP(store)(x + i * stride + v * LANES, rows[i][v]);
    }
}

/* Solves x_i = y_i + Σ_j<i a_ij x_j in place: x is [m][n], a is [m][m]. With negative strides from the last
 * row and the transposed a, the system that goes the other way. */
static void FN(solve)(T *x, ptrdiff_t stride, const FN(matrix) a, ptrdiff_t m, ptrdiff_t n)
{
    for (ptrdiff_t row = 0; row < m; row += FN(BLOCK)) {
        const ptrdiff_t rows = m - row < FN(BLOCK) ? m - row : FN(BLOCK);
        T *to = x + row * stride;
        const FN(matrix) left = {.at = a.at + row * a.row, .row = a.row, .column = a.column};
        const FN(matrix) square = {.at = left.at + row * a.column, .row = a.row, .column = a.column};
        const FN(product) before = {.c = to,
                                    .start = to,
                                    .a = left,
                                    .b = {.at = x, .row = stride, .column = 1},
                                    .c_stride = stride,
                                    .m = rows,
                                    .n = n,
                                    .depth = row};
        if (row > 0) FN(multiply)(&before);
        ptrdiff_t c = 0;
        for (; rows == FN(BLOCK) && c + FN(ABREAST) * LANES <= n; c += FN(ABREAST) * LANES)
            FN(solve_rows)(to + c, stride, square, FN(BLOCK), FN(ABREAST));
        for (; c < n; c += LANES) FN(solve_rows)(to + c, stride, square, rows, 1);
    }
}

/* to[c][r] = from[r][c], by squares of LANES. Rows beyond `rows`, up to a multiple of AM_LINEAR_PAD, are
 * taken as zeros. */
static void FN(turn)(T *to, ptrdiff_t to_stride, const T *from, ptrdiff_t from_stride, ptrdiff_t rows,
                     ptrdiff_t columns)
{
    const ptrdiff_t end = (rows + AM_LINEAR_PAD - 1) / AM_LINEAR_PAD * AM_LINEAR_PAD;
    for (ptrdiff_t r = 0; r < end; r += LANES) {
        for (ptrdiff_t c = 0; c < columns; c += LANES) {
            V square[LANES];
            UNROLL(16)
            for (int i = 0; i < LANES; i++)
                square[i] = r + i < rows ? VOP(load)(from + (r + i) * from_stride + c) : VOP(set1)(0);
            VOP(transpose)(square);
            UNROLL(16)
            for (int i = 0; i < LANES; i++)
                if (c + i < columns) VOP(store)(to + (c + i) * to_stride + r, square[i]);
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

typedef struct {
    T **place;
    ptrdiff_t numbers;
} FN(buffer);

/* Lays out buffers in memory; returns the bytes that they take. NULL only counts. */
static ptrdiff_t FN(lay_out)(const FN(buffer) * buffers, size_t count, char *memory)
{
    ptrdiff_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        *buffers[i].place = memory ? (T *)(memory + bytes) : NULL;
        bytes += buffers[i].numbers * (ptrdiff_t)sizeof(T);
    }
    return bytes;
}

/* e^(x + low), where x + low is x; `low` is NULL for 0. */
INLINE V FN(exp_of)(V x, const V *low)
{
    const double log2_e = 1.4426950408889634;
    const V high = VOP(set1)((T)log2_e), rest = VOP(set1)((T)(log2_e - (double)(T)log2_e));
    const V least = VOP(set1)(-(T)MIN_POWER), most = VOP(set1)((T)(MIN_POWER / log2_e + 2)); /* 0 and Inf */
    V whole;
    x = VOP(max)(least, x);
    x = VOP(pick_less)(most, x, most, x);
    V power = VOP(mul)(x, high); /* and what its rounding loses */
    V lost = VOP(fma)(x, rest, VOP(fma)(x, high, VOP(sub)(VOP(set1)(0), power)));
    if (low) lost = VOP(fma)(*low, high, lost);
    FN(exp2_begin)(&power, &whole, 1);
    power = VOP(add)(power, lost);
    FN(exp2_end)(&power, &whole, 1, FN(exp2_terms), COUNT_OF(FN(exp2_terms)));
    return power;
}

/* Some rows, whose sums stay in registers. */
INLINE void FN(factors_of_rows)(T *factor, double *sums, const T *decay, ptrdiff_t stride, const int rows,
                                ptrdiff_t columns)
{
    for (ptrdiff_t c = 0; c < columns; c += LANES) {
        vd sum[LANES / VD_LANES];
        for (int j = 0; j < LANES / VD_LANES; j++) sum[j] = vd_load(sums + c + j * VD_LANES);
        UNROLL(4)
        for (int r = 0; r < rows; r++) {
            const V x = VOP(load)(decay + r * stride + c);
            VOP(add_wide)(sum, x);
            VOP(store)(factor + r * columns + c, FN(exp_of)(x, NULL));
        }
        for (int j = 0; j < LANES / VD_LANES; j++) vd_store(sums + c + j * VD_LANES, sum[j]);
    }
}

static void FN(factors)(void *factor, double *sums, const void *decay, ptrdiff_t stride, ptrdiff_t rows,
                        ptrdiff_t columns)
{
    const T *from = decay;
    T *to = factor;
    memset(sums, 0, (size_t)columns * sizeof *sums);
    for (; rows >= 4; rows -= 4, from += 4 * stride, to += 4 * columns)
        FN(factors_of_rows)(to, sums, from, stride, 4, columns);
    for (; rows > 0; rows--, from += stride, to += columns)
        FN(factors_of_rows)(to, sums, from, stride, 1, columns);
}

static void FN(exp_of_sums)(void *dst, double *sums, ptrdiff_t count)
{
    const double most = MIN_POWER; /* e^-most is 0, e^most Inf */
    for (ptrdiff_t i = 0; i < count; i++) sums[i] = sums[i] < -most ? -most : sums[i] > most ? most : sums[i];
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        const V high = VOP(carry_load)(sums + i);
        VOP(carry_add)(sums + i, VOP(sub)(VOP(set1)(0), high));
        const V low = VOP(carry_load)(sums + i);
        VOP(store)((T *)dst + i, FN(exp_of)(high, &low));
    }
}
