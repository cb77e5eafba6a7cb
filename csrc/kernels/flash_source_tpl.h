/* flash_source_tpl.h – keys and values of type S (LOAD makes lanes of them) on their way to attention: packed
 * for many rows, or used where they lie by few. */

/* The first `count` lanes, then zeros. */
static V FROM(load_first)(const S *src, ptrdiff_t count)
{
    S lanes[LANES] = {0};
    memcpy(lanes, src, (size_t)count * sizeof *src);
    return LOAD(lanes);
}

/* A square of lanes, turned; zeros where there are no more rows or columns. */
static inline __attribute__((always_inline)) void
FROM(load_turned)(V square[LANES], const S *src, ptrdiff_t step, ptrdiff_t rows, ptrdiff_t columns)
{
#pragma GCC unroll 16
    for (ptrdiff_t r = 0; r < LANES; r++) {
        square[r] = r >= rows          ? VOP(set1)(0)
                    : columns >= LANES ? LOAD(src + r * step)
                                       : FROM(load_first)(src + r * step, columns);
    }
    VOP(turn)(square);
}

static void FROM(pack_keys)(void *to, const void *from, ptrdiff_t step, ptrdiff_t rows, ptrdiff_t depth)
{
    T *dst = to;
    for (ptrdiff_t begin = 0; begin < AM_FLASH_TILE; begin += FN(PANEL), dst += FN(PANEL) * depth) {
        for (ptrdiff_t i = 0; i < depth; i += LANES) {
            for (ptrdiff_t half = 0; half < FN(PANEL); half += LANES) {
                const S *src = (const S *)from + (begin + half) * step + i;
                T *at = dst + i * FN(PANEL) + half;
                V square[LANES];
                if (begin + half + LANES <= rows && i + LANES <= depth) {
                    FROM(load_turned)(square, src, step, LANES, LANES);
#pragma GCC unroll 16
                    for (ptrdiff_t c = 0; c < LANES; c++) VOP(store)(at + c * FN(PANEL), square[c]);
                } else {
                    FROM(load_turned)(square, src, step, rows - begin - half, depth - i);
                    for (ptrdiff_t c = 0; c < LANES && i + c < depth; c++)
                        VOP(store)(at + c * FN(PANEL), square[c]);
                }
            }
        }
    }
}

/* Rows of up to a panel's columns. Adds 0 × what it reads to `nothing`: 0, or NaN if a value is not finite.
 */
static inline V FROM(pack_panel)(T *dst, const S *src, ptrdiff_t step, ptrdiff_t rows, ptrdiff_t columns,
                                 V nothing)
{
    const V zero = VOP(set1)(0);
    for (ptrdiff_t r = 0; r < rows; r++, src += step, dst += FN(PANEL)) {
        V left, right = zero;
        if (columns >= FN(PANEL)) {
            left = LOAD(src), right = LOAD(src + LANES);
        } else if (columns >= LANES) {
            left = LOAD(src);
            if (columns > LANES) right = FROM(load_first)(src + LANES, columns - LANES);
        } else {
            left = FROM(load_first)(src, columns);
        }
        VOP(store)(dst, left);
        VOP(store)(dst + LANES, right);
        nothing = VOP(fma)(left, zero, nothing);
        nothing = VOP(fma)(right, zero, nothing);
    }
    return nothing;
}

static bool FROM(pack_values)(void *to, const void *from, ptrdiff_t step, ptrdiff_t rows, ptrdiff_t depth)
{
    T *dst = to;
    V nothing = VOP(set1)(0);
    for (ptrdiff_t i = 0; i < depth; i += FN(PANEL), dst += AM_FLASH_TILE * FN(PANEL)) {
        nothing = FROM(pack_panel)(dst, (const S *)from + i, step, rows, depth - i, nothing);
        memset(dst + rows * FN(PANEL), 0, (size_t)((AM_FLASH_TILE - rows) * FN(PANEL)) * sizeof *dst);
    }
    return VOP(total)(nothing) == 0;
}

static uint64_t FROM(read_bias)(void *dst, const void *src, ptrdiff_t columns)
{
    T *to = dst;
    const S *from = src;
    V zero = VOP(set1)(0), least = zero; /* as its opposite */
    for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
        V x = i + LANES <= columns ? LOAD(from + i)
              : i < columns        ? FROM(load_first)(from + i, columns - i)
                                   : zero;
        VOP(store)(to + i, x);
        least = VOP(max)(VOP(sub)(zero, x), least);
    }
    uint64_t bits = 0;
    if (VOP(highest)(least) == (T)INFINITY) {
        for (int i = 0; i < AM_FLASH_TILE; i++) bits |= (uint64_t)(to[i] == -(T)INFINITY) << i;
    }
    return bits;
}

/* --- Few rows: keys and values are used where they lie
 * --------------------------------------------------------------- */

/* Dot products at a time: so many that their sums do not wait for each other. */
enum { FROM(DOTS) = LANES > 8 ? LANES : 8 };

/* Logits of up to four rows and as many keys as make DOTS of them; those behind the last count as it.
 * Meanwhile it asks for the rows `ahead`, one for each key. */
static inline __attribute__((always_inline)) void FROM(dots_of)(const ptrdiff_t rows, ptrdiff_t depth,
                                                                const T *q, const S *k, ptrdiff_t step,
                                                                ptrdiff_t last, T *logits, const S *ahead,
                                                                ptrdiff_t ahead_step)
{
    const ptrdiff_t keys = FROM(DOTS) / (rows == 3 ? 4 : rows);
    V sums[FROM(DOTS)], x[FROM(DOTS)];
    const S *key[FROM(DOTS)];
#pragma GCC unroll 16
    for (ptrdiff_t i = 0; i < FROM(DOTS); i++) sums[i] = VOP(set1)(0);
#pragma GCC unroll 16
    for (ptrdiff_t j = 0; j < keys; j++) key[j] = k + (j < last ? j : last) * step;
    ptrdiff_t i = 0;
    for (; i + LANES <= depth; i += LANES) {
#pragma GCC unroll 16
        for (ptrdiff_t j = 0; j < keys; j++) {
            x[j] = LOAD(key[j] + i);
            if (ahead && i * sizeof(S) % 64 == 0) __builtin_prefetch(ahead + j * ahead_step + i, 0, 2);
        }
#pragma GCC unroll 4
        for (ptrdiff_t r = 0; r < rows; r++) {
            V y = VOP(load)(q + r * depth + i);
#pragma GCC unroll 16
            for (ptrdiff_t j = 0; j < keys; j++) sums[r * keys + j] = VOP(fma)(x[j], y, sums[r * keys + j]);
        }
    }
    if (i < depth) {
#pragma GCC unroll 16
        for (ptrdiff_t j = 0; j < keys; j++) x[j] = FROM(load_first)(key[j] + i, depth - i);
#pragma GCC unroll 4
        for (ptrdiff_t r = 0; r < rows; r++) {
            V y = VOP(load_part)(q + r * depth + i, depth - i);
#pragma GCC unroll 16
            for (ptrdiff_t j = 0; j < keys; j++) sums[r * keys + j] = VOP(fma)(x[j], y, sums[r * keys + j]);
        }
    }
    T dots[FROM(DOTS)];
#pragma GCC unroll 16
    for (ptrdiff_t begin = 0; begin < FROM(DOTS); begin += LANES)
        VOP(store)(dots + begin, VOP(totals)(sums + begin));
#pragma GCC unroll 4
    for (ptrdiff_t r = 0; r < rows; r++)
        memcpy(logits + r * AM_FLASH_TILE, dots + r * keys, (size_t)keys * sizeof *dots);
}

#define ROWS(n)                                                                                              \
    case n:                                                                                                  \
        for (ptrdiff_t j = 0; j < keys; j += FROM(DOTS) / (n == 3 ? 4 : n))                                  \
            FROM(dots_of)(n, depth, q, k + j * step, step, keys - 1 - j, logits + j,                         \
                          ahead ? ahead + j * ahead_step : NULL, ahead_step);                                \
        break;
static void FROM(dots)(ptrdiff_t rows, ptrdiff_t keys, ptrdiff_t depth, const T *q, const S *k,
                       ptrdiff_t step, T *logits, const S *ahead, ptrdiff_t ahead_step)
{
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
    }
}
#undef ROWS

/* O + P V for a strip and a panel of columns. */
static void FROM(gather)(ptrdiff_t rows, ptrdiff_t keys, const T *p, const S *v, ptrdiff_t step, T *out,
                         ptrdiff_t out_step, flash_ahead *ahead)
{
#define ROWS(n)                                                                                              \
    case n: FROM(product_of)(n, keys, p, AM_FLASH_TILE, 1, v, step, out, out_step, true, ahead); break;
    switch (rows) {
        EACH_ROWS(ROWS)
    }
#undef ROWS
}

/* While keys are read, values of the same tile are on their way, and while values are, the next keys. */
static void FROM(step_in_place)(const am_flash_rows *block, const am_flash_tile *tile)
{
    uint64_t any = tile->live ? 0 : UINT64_MAX;
    for (ptrdiff_t r = 0; tile->live && r < block->rows; r++) any |= tile->live[r];
    ptrdiff_t begin = __builtin_ctzll(any) / FROM(DOTS) * FROM(DOTS),
              end = AM_FLASH_TILE - __builtin_clzll(any);
    const S *k = tile->k, *v = tile->v;
    const T *q = block->q;
    T *logits = block->logits, *out = block->out;
    for (ptrdiff_t j = begin; j < end; j += FROM(DOTS)) {
        ptrdiff_t keys = end - j < FROM(DOTS) ? end - j : FROM(DOTS);
        for (ptrdiff_t r = 0; r < block->rows; r += 4) {
            FROM(dots)(block->rows - r < 4 ? block->rows - r : 4, keys, block->depth, q + r * block->depth,
                       k + j * tile->k_step, tile->k_step, logits + r * AM_FLASH_TILE + j,
                       r == 0 ? v + j * tile->v_step : NULL, tile->v_step);
        }
    }
    for (ptrdiff_t r = 0; r < block->rows; r++)
        FN(weigh)(block, tile, r, begin, (end + LANES - 1) / LANES * LANES);

    T panel[AM_FLASH_TILE * FN(PANEL)];
    flash_ahead next = flash_ahead_of(&tile->next_k, FN(PANEL) * (ptrdiff_t)sizeof(S));
    ptrdiff_t strips = (block->rows + STRIP - 1) / STRIP;
    for (ptrdiff_t column = 0; column < block->out_depth; column += FN(PANEL)) {
        const S *from = v + begin * tile->v_step + column;
        if (!tile->live && strips == 1 && column + FN(PANEL) <= tile->value_depth) {
            FROM(gather)(block->rows, end - begin, logits + begin, from, tile->v_step, out + column,
                         block->out_depth, &next);
            continue;
        }
        T *to = panel + begin * FN(PANEL);
        V nothing =
            FROM(pack_panel)(to, from, tile->v_step, end - begin, tile->value_depth - column, VOP(set1)(0));
        if (tile->live && VOP(total)(nothing) != 0) {
            FN(add_live)(block, tile, column, panel);
            continue;
        }
        for (ptrdiff_t i = 0, r = 0; i < strips; i++) {
            ptrdiff_t rows = block->rows / strips + (i < block->rows % strips);
            FN(product)(rows, end - begin, logits + r * AM_FLASH_TILE + begin, AM_FLASH_TILE, to,
                        out + r * block->out_depth + column, block->out_depth, true);
            r += rows;
        }
    }
}

#undef S
#undef LOAD
#undef FROM
