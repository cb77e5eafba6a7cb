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

/* --- Few rows: keys and values are used where they lie --- */

/* Logits of up to four rows and as many keys as sums fit the registers and do not wait for each other; keys
 * behind the last count as it. From three rows on it asks for as many lines as it reads of keys. */
static inline __attribute__((always_inline)) void FROM(dots_of)(const ptrdiff_t rows, const ptrdiff_t keys,
                                                                ptrdiff_t depth, const T *q, const S *k,
                                                                ptrdiff_t step, ptrdiff_t last, T *logits,
                                                                flash_lines *ahead)
{
    flash_lines ask = *ahead;
    V sums[2 * STRIP + LANES], x[2 * STRIP];
    const S *key[2 * STRIP];
#pragma GCC unroll 32
    for (ptrdiff_t i = 0; i < rows * keys + LANES - 1; i++) sums[i] = VOP(set1)(0);
#pragma GCC unroll 32
    for (ptrdiff_t j = 0; j < keys; j++) key[j] = k + (j < last ? j : last) * step;
    ptrdiff_t i = 0;
    for (; i + LANES <= depth; i += LANES) {
#pragma GCC unroll 32
        for (ptrdiff_t j = 0; j < keys; j++) x[j] = LOAD(key[j] + i);
        if (rows > 2 && i * sizeof(S) % FLASH_LINE == 0) flash_ask_lines(&ask, keys);
#pragma GCC unroll 4
        for (ptrdiff_t r = 0; r < rows; r++) {
            V y = VOP(load)(q + r * depth + i);
#pragma GCC unroll 32
            for (ptrdiff_t j = 0; j < keys; j++) sums[r * keys + j] = VOP(fma)(x[j], y, sums[r * keys + j]);
        }
    }
    if (i < depth) {
#pragma GCC unroll 32
        for (ptrdiff_t j = 0; j < keys; j++) x[j] = FROM(load_first)(key[j] + i, depth - i);
#pragma GCC unroll 4
        for (ptrdiff_t r = 0; r < rows; r++) {
            V y = VOP(load_part)(q + r * depth + i, depth - i);
#pragma GCC unroll 32
            for (ptrdiff_t j = 0; j < keys; j++) sums[r * keys + j] = VOP(fma)(x[j], y, sums[r * keys + j]);
        }
    }
    T dots[2 * STRIP + LANES];
#pragma GCC unroll 32
    for (ptrdiff_t begin = 0; begin < rows * keys; begin += LANES)
        VOP(store)(dots + begin, VOP(totals)(sums + begin));
#pragma GCC unroll 4
    for (ptrdiff_t r = 0; r < rows; r++) {
#pragma GCC unroll 32
        for (ptrdiff_t j = 0; j < keys; j++)
            if (j <= last) logits[r * AM_FLASH_TILE + j] = dots[r * keys + j];
    }
    *ahead = ask;
}

/* Takes `most` keys at a time, and half as many where few are left. */
#define DOTS(rows, most)                                                                                     \
    case rows:                                                                                               \
        while (keys > 0) {                                                                                   \
            _Static_assert((rows) * (most) <= 2 * STRIP, "more sums than there is room for");                \
            ptrdiff_t taken = keys > (most) / 2 ? (most) : (most) / 2;                                       \
            if (taken == (most))                                                                             \
                FROM(dots_of)(rows, most, depth, q, k, step, keys - 1, logits, ahead);                       \
            else                                                                                             \
                FROM(dots_of)(rows, (most) / 2, depth, q, k, step, keys - 1, logits, ahead);                 \
            keys -= taken, k += taken * step, logits += taken;                                               \
        }                                                                                                    \
        break;
static void FROM(dots)(ptrdiff_t rows, ptrdiff_t keys, ptrdiff_t depth, const T *q, const S *k,
                       ptrdiff_t step, T *logits, flash_lines *ahead)
{
    switch (rows) {
        DOTS(1, 8)
        DOTS(2, STRIP > 6 ? 8 : STRIP)
        DOTS(3, 2 * STRIP / 3)
        DOTS(4, STRIP / 2)
    }
}
#undef DOTS

/* O + P V for a strip and a panel of columns. From three rows on it asks for as many lines as it reads. */
static void FROM(gather)(ptrdiff_t rows, ptrdiff_t keys, const T *p, const S *v, ptrdiff_t step, T *out,
                         ptrdiff_t out_step, flash_lines *ahead)
{
    enum { BYTES = FN(PANEL) * sizeof(S), LINES = BYTES > FLASH_LINE ? BYTES / FLASH_LINE : 1 };
#define ROWS(n)                                                                                              \
    case n:                                                                                                  \
        FROM(product_of)(n, keys, p, AM_FLASH_TILE, 1, v, step, out, out_step, true, n > 2 ? LINES : 0,      \
                         ahead);                                                                             \
        break;
    switch (rows) {
        EACH_ROWS(ROWS)
    }
#undef ROWS
}

/* Cuts a range to the columns that are live in any row; whether some are. */
static bool FROM(cut)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t *begin, ptrdiff_t *end)
{
    uint64_t any = tile->live ? 0 : UINT64_MAX;
    for (ptrdiff_t r = 0; tile->live && r < block->rows; r++) any |= tile->live[r];
    any = any >> *begin << *begin;
    any = any << (AM_FLASH_TILE - *end) >> (AM_FLASH_TILE - *end);
    if (!any) return false;
    *begin = __builtin_ctzll(any);
    *end = AM_FLASH_TILE - __builtin_clzll(any);
    return true;
}

/* Logits of some keys. */
static void FROM(look)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t begin, ptrdiff_t end,
                       flash_lines *ahead)
{
    flash_lines none = flash_no_lines(tile->k);
    if (!FROM(cut)(block, tile, &begin, &end)) return;
    const S *k = (const S *)tile->k + begin * tile->k_step;
    const T *q = block->q;
    T *logits = (T *)block->logits + begin;
    for (ptrdiff_t r = 0; r < block->rows; r += 4) {
        FROM(dots)(block->rows - r < 4 ? block->rows - r : 4, end - begin, block->depth, q + r * block->depth,
                   k, tile->k_step, logits + r * AM_FLASH_TILE, r == 0 ? ahead : &none);
    }
}

/* O + P V of some keys. */
static void FROM(add_values)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t begin,
                             ptrdiff_t end, flash_lines *ahead)
{
    if (!FROM(cut)(block, tile, &begin, &end)) return;
    flash_lines none = flash_no_lines(tile->k);
    T *logits = (T *)block->logits + begin, panel[IN_PLACE_KEYS * FN(PANEL)];
    const ptrdiff_t strips = (block->rows + STRIP - 1) / STRIP, keys = end - begin;
    for (ptrdiff_t column = 0; column < block->out_depth; column += FN(PANEL)) {
        const S *v = (const S *)tile->v + begin * tile->v_step + column;
        T *out = (T *)block->out + column;
        bool packed = tile->live || column + FN(PANEL) > tile->value_depth;
        if (packed) {
            V nothing =
                FROM(pack_panel)(panel, v, tile->v_step, keys, tile->value_depth - column, VOP(set1)(0));
            if (tile->live && VOP(total)(nothing) != 0) {
                uint64_t live[AM_FLASH_ROWS];
                for (ptrdiff_t r = 0; r < block->rows; r++)
                    live[r] = tile->live[r] >> begin & UINT64_MAX >> (AM_FLASH_TILE - keys);
                FN(add_live_rows)(block->rows, live, logits, AM_FLASH_TILE, 1, panel, FN(PANEL), 0, out,
                                  block->out_depth, FN(PANEL));
                continue;
            }
        }
        /* The first strip asks, and of panels that share a line the first. */
        flash_lines *ask = column * sizeof(S) % FLASH_LINE == 0 ? ahead : &none;
        for (ptrdiff_t i = 0, r = 0; i < strips; i++, ask = &none) {
            ptrdiff_t rows = block->rows / strips + (i < block->rows % strips);
            const T *p = logits + r * AM_FLASH_TILE;
            T *to = out + r * block->out_depth;
            if (packed)
                FN(product)(rows, keys, p, AM_FLASH_TILE, panel, to, block->out_depth, true);
            else
                FROM(gather)(rows, keys, p, v, tile->v_step, to, block->out_depth, ask);
            r += rows;
        }
    }
}

/* What lies `keys` after the first of the tiles: a row of all heads for each key. */
static flash_lines FROM(lines_of)(const void *first, const void *last, ptrdiff_t step, ptrdiff_t depth,
                                  ptrdiff_t keys)
{
    const ptrdiff_t size = sizeof(S);
    ptrdiff_t length = (const char *)last - (const char *)first + depth * size;
    return flash_lines_of(first, keys * step * size, step * size, length);
}

/* Logits and weights of some keys, then their values.
 *
 * One or two rows are as fast as memory if that is walked in its order, of all heads a few keys at a time:
 * then the processor sees what comes next. More rows are slower than it looks ahead. There, while keys are
 * read, their values are on their way, and while values are, the next keys, in the order of memory as well.
 */
static void FROM(step_in_place)(const am_flash_rows *blocks, const am_flash_tile *tiles, ptrdiff_t heads)
{
    const am_flash_tile *last = &tiles[heads - 1];
    const am_flash_ahead *next = &tiles->next[AM_NEXT_K];
    const ptrdiff_t piece = blocks->rows > 2 ? IN_PLACE_KEYS : IN_ORDER_KEYS;
    for (ptrdiff_t begin = 0, end; begin < AM_FLASH_TILE; begin = end) {
        end = begin + IN_PLACE_KEYS;
        flash_lines ahead = FROM(lines_of)(tiles->v, last->v, tiles->v_step, tiles->value_depth, begin);
        for (ptrdiff_t k = begin; k < end; k += piece) {
            for (ptrdiff_t h = 0; h < heads; h++) FROM(look)(&blocks[h], &tiles[h], k, k + piece, &ahead);
        }
        for (ptrdiff_t h = 0; h < heads; h++) {
            ptrdiff_t from = begin, to = end;
            if (!FROM(cut)(&blocks[h], &tiles[h], &from, &to)) continue;
            from -= from % LANES;
            to = (to + LANES - 1) / LANES * LANES;
            FN(weigh)(&blocks[h], &tiles[h], 0, blocks[h].rows, from, to);
        }
        ahead = FROM(lines_of)(tiles->k, last->k, tiles->k_step, blocks->depth, end);
        if (end == AM_FLASH_TILE) {
            ahead.at = (uintptr_t)next->at;
            if (next->rows <= 0) ahead = flash_no_lines(tiles->k);
        }
        for (ptrdiff_t k = begin; k < end; k += piece) {
            for (ptrdiff_t h = 0; h < heads; h++)
                FROM(add_values)(&blocks[h], &tiles[h], k, k + piece, &ahead);
        }
    }
}

#undef S
#undef LOAD
#undef FROM
