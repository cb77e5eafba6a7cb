/* flash_step_tpl.h – how a block of rows meets a tile of keys:
 *
 *     S = Q Kᵀ           rows × 64, one panel of keys after the other, so that the panel stays in cache
 *     P = e^(S - high)   row by row; `high` is raised only when a logit exceeds it by more than
 *                        FLASH_SLACK
 *     O = O + P V        one panel of columns after the other
 *
 * A lane of Q, K, P or V holds WIDTH numbers, which are neighbours in the sum that is taken. Of a tile that
 * is only partly live, each strip takes the columns from its first live one to its last.
 */

/* Whether there is a logit that raises what a row counts from. */
static inline bool STEP(is_over)(V most, const T *high)
{
    return VOP(exceeds)(VOP(sub)(most, VOP(set1)(FLASH_SLACK)), VOP(set1)(*high));
}

/* A row has met a greater logit than any before: what it has gathered is scaled. */
static __attribute__((noinline)) void STEP(raise)(const am_flash_rows *block, ptrdiff_t row, T highest)
{
    T *high = (T *)block->high + row, *sum = (T *)block->sum + row;
    if (*high > -(T)INFINITY) {
        V factor = FN(exp2)(VOP(mul)(VOP(set1)(*high - highest), VOP(set1)((T)block->unit)));
        T *out = (T *)block->out + row * block->out_depth;
        for (ptrdiff_t i = 0; i < block->out_depth; i += LANES)
            VOP(store)(out + i, VOP(mul)(factor, VOP(load)(out + i)));
        *sum *= VOP(first)(factor);
    }
    *high = highest;
}

/* The greatest logit of a row, if somebody wants it. */
static inline void STEP(note_top)(const am_flash_rows *block, ptrdiff_t row, V most)
{
    T *top = block->top ? (T *)block->top + row : NULL;
    if (top && VOP(exceeds)(most, VOP(set1)(*top))) *top = VOP(highest)(most);
}

/* What logits of a row count from: finite, also where all are -INFINITY. */
static inline V STEP(base_of)(const am_flash_rows *block, ptrdiff_t row)
{
    return VOP(max)(VOP(set1)(((const T *)block->high)[row]), VOP(set1)(-GREATEST));
}

/* Products of one row to logits, which may raise `high`; columns begin … end - 1, whole vectors. */
static inline void STEP(find_high)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row,
                                   ptrdiff_t begin, ptrdiff_t end)
{
    T *logits = (T *)block->logits + row * AM_FLASH_TILE;
    if (tile->bias || block->cap > 0 || block->factor != 1) FN(dress)(block, tile, row, logits, begin, end);
    V most = VOP(set1)(-(T)INFINITY);
    for (ptrdiff_t i = begin; i < end; i += LANES) {
        V s = VOP(load)(logits + i);
        if (tile->live) {
            s = VOP(select)(tile->live[row] >> i, s, VOP(set1)(-(T)INFINITY));
            VOP(store)(logits + i, s);
        }
        most = VOP(max)(s, most);
    }
    STEP(note_top)(block, row, most);
    if (STEP(is_over)(most, (const T *)block->high + row)) /* as any live logit does a `high` of -INFINITY */
        STEP(raise)(block, row, VOP(highest)(most));
}

/* Some vectors of logits to weights, whose sum is added to `total`, lane by lane. */
static inline __attribute__((always_inline)) V STEP(weigh_some)(const am_flash_rows *block,
                                                                const am_flash_tile *tile, ptrdiff_t row,
                                                                ptrdiff_t column, const int count, V total)
{
    T *logits = (T *)block->logits + row * AM_FLASH_TILE;
    V base = STEP(base_of)(block, row), unit = VOP(set1)((T)block->unit), p[FN(IN_FLIGHT)];
    UNROLL(16)
    for (int j = 0; j < count; j++)
        p[j] = VOP(mul)(VOP(sub)(VOP(load)(logits + column + j * LANES), base), unit);
    FN(exp2_each)(p, count, EXP2_TERMS, COUNT_OF(EXP2_TERMS));
    UNROLL(16)
    for (int j = 0; j < count; j++) {
        total = VOP(add)(total, p[j]);
        if (tile->kept) p[j] = VOP(select)(tile->kept[row] >> (column + j * LANES), p[j], VOP(set1)(0));
    }
    STEP(put)(logits + column / WIDTH, p, count);
    return total;
}

/* The sums of some rows, of which lanes are given: they are added up side by side. */
static inline __attribute__((always_inline)) void STEP(add_lanes)(T *sums, V lanes[LANES], ptrdiff_t rows)
{
    T totals[LANES];
    for (ptrdiff_t i = rows; i < LANES; i++) lanes[i] = VOP(set1)(0);
    VOP(store)(totals, VOP(totals)(lanes));
    for (ptrdiff_t i = 0; i < rows; i++) sums[i] += totals[i];
}

/* Products of some rows to weights. */
static void STEP(weigh)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row, ptrdiff_t rows,
                        ptrdiff_t begin, ptrdiff_t end)
{
    for (const ptrdiff_t last = row + rows; row < last; row += LANES) {
        const ptrdiff_t count = last - row < LANES ? last - row : LANES;
        V lanes[LANES];
        for (ptrdiff_t i = 0; i < count; i++) STEP(find_high)(block, tile, row + i, begin, end);
        for (ptrdiff_t i = 0; i < count; i++) {
            V total = VOP(set1)(0);
            ptrdiff_t column = begin;
            for (; column + FN(IN_FLIGHT) * LANES <= end; column += FN(IN_FLIGHT) * LANES)
                total = STEP(weigh_some)(block, tile, row + i, column, FN(IN_FLIGHT), total);
            for (; column < end; column += WIDTH * LANES)
                total = STEP(weigh_some)(block, tile, row + i, column, WIDTH, total);
            lanes[i] = total;
        }
        STEP(add_lanes)((T *)block->sum + row, lanes, count);
    }
}

/* Whether products are logits but for a factor, and nothing else is asked of them or of weights. */
static bool STEP(is_plain)(const am_flash_rows *block, const am_flash_tile *tile)
{
    bool scaled = WIDTH > 1 ? block->factor > 0 : block->factor == 1;
    return scaled && block->unit == 1 && block->cap == 0 && !block->top && !tile->kept && !tile->bias;
}

/* Some products of such a tile to logits, of which whole numbers are taken. The first of columns begin …
 * end - 1 may raise. `unit`: NULL for 1, and if nobody wants top. */
static inline __attribute__((always_inline)) void
STEP(begin_plain)(const am_flash_rows *block, ptrdiff_t row, const uint64_t *live, const V *unit,
                  ptrdiff_t begin, ptrdiff_t end, ptrdiff_t column, const int count, V *x, V *whole)
{
    const T *logits = (const T *)block->logits + row * AM_FLASH_TILE, *high = (const T *)block->high + row;
    const V factor = VOP(set1)((T)block->factor);
    if (column == begin) {
        V most = VOP(set1)(-(T)INFINITY);
        UNROLL(16)
        for (ptrdiff_t i = begin; i < end; i += LANES) {
            V s = VOP(load)(logits + i);
            if (live) s = VOP(select)(live[row] >> i, s, VOP(set1)(-(T)INFINITY));
            most = VOP(max)(s, most);
        }
        if (WIDTH > 1) most = VOP(mul)(factor, most);
        if (unit) STEP(note_top)(block, row, most);
        if (STEP(is_over)(most, high)) STEP(raise)(block, row, VOP(highest)(most));
    }
    const V base = STEP(base_of)(block, row), minus_base = VOP(sub)(VOP(set1)(0), base);
    UNROLL(16)
    for (int j = 0; j < count; j++) {
        x[j] = VOP(load)(logits + column + j * LANES);
        x[j] = WIDTH > 1 ? VOP(fma)(factor, x[j], minus_base) : VOP(sub)(x[j], base);
        if (unit) x[j] = VOP(mul)(x[j], *unit);
    }
    FN(exp2_begin)(x, whole, count);
}

/* `weigh` for such tiles, of columns begin … end - 1, `count` vectors at a time. `live`, `kept`: NULL if all
 * pairs are. What comes next is begun before powers are taken, whose steps wait for one another. */
static inline __attribute__((always_inline)) void
STEP(weigh_plain)(const am_flash_rows *block, const uint64_t *live, const uint64_t *kept, const V *unit,
                  ptrdiff_t row, ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t end, const int count)
{
    const ptrdiff_t last = row + rows, some = count * LANES;
    V next[FN(IN_FLIGHT)], next_whole[FN(IN_FLIGHT)];
    STEP(begin_plain)(block, row, live, unit, begin, end, begin, count, next, next_whole);
    while (row < last) {
        const ptrdiff_t first = row, behind = last - row < LANES ? last : row + LANES;
        V lanes[LANES];
        for (; row < behind; row++) {
            T *logits = (T *)block->logits + row * AM_FLASH_TILE;
            V total = VOP(set1)(0);
            UNROLL(16)
            for (ptrdiff_t i = begin; i < end; i += some) {
                V p[FN(IN_FLIGHT)], whole[FN(IN_FLIGHT)];
                UNROLL(16)
                for (int j = 0; j < count; j++) p[j] = next[j], whole[j] = next_whole[j];
                if (i + some < end)
                    STEP(begin_plain)(block, row, live, unit, begin, end, i + some, count, next, next_whole);
                else if (row + 1 < last)
                    STEP(begin_plain)(block, row + 1, live, unit, begin, end, begin, count, next, next_whole);
                FN(exp2_end)(p, whole, count, EXP2_TERMS, COUNT_OF(EXP2_TERMS));
                UNROLL(16)
                for (int j = 0; j < count; j++) {
                    if (live) p[j] = VOP(select)(live[row] >> (i + j * LANES), p[j], VOP(set1)(0));
                    total = VOP(add)(total, p[j]);
                    if (kept) p[j] = VOP(select)(kept[row] >> (i + j * LANES), p[j], VOP(set1)(0));
                }
                STEP(put)(logits + i / WIDTH, p, count);
            }
            lanes[row - first] = total;
        }
        STEP(add_lanes)((T *)block->sum + first, lanes, row - first);
    }
}

/* The same for whole tiles that are not plain: products are made logits first. */
APART void STEP(weigh_dressed)(const am_flash_rows *block, const am_flash_tile *tile)
{
    const V unit = VOP(set1)((T)block->unit);
    am_flash_rows dressed = *block;
    if (tile->bias || block->cap > 0 || block->factor <= 0) {
        T *logits = block->logits;
        for (ptrdiff_t r = 0; r < block->rows; r++)
            FN(dress)(block, tile, r, logits + r * AM_FLASH_TILE, 0, AM_FLASH_TILE);
        dressed.factor = 1;
    }
    STEP(weigh_plain)(&dressed, tile->live, tile->kept, &unit, 0, block->rows, 0, AM_FLASH_TILE,
                      FN(IN_FLIGHT));
}

/* Weighs all rows of a tile if they are taken whole; whether they are. Where vectors go together to pairs,
 * leaving out those that are dead costs more than it saves. */
static bool STEP(weigh_whole)(const am_flash_rows *block, const am_flash_tile *tile)
{
    const ptrdiff_t rows = block->rows;
    if (WIDTH == 1 && tile->live) return false;
    if (!STEP(is_plain)(block, tile))
        STEP(weigh_dressed)(block, tile);
    else if (tile->live)
        STEP(weigh_plain)(block, tile->live, NULL, NULL, 0, rows, 0, AM_FLASH_TILE, FN(IN_FLIGHT));
    else
        STEP(weigh_plain)(block, NULL, NULL, NULL, 0, rows, 0, AM_FLASH_TILE, FN(IN_FLIGHT));
    return true;
}

/* The same of a strip of a tile that is partly live; whether it takes so few vectors. Short documents and
 * narrow windows are 1.02 times as fast by it where a whole row is so few, and 0.98 times where it is more.
 */
APART __attribute__((nonnull)) bool STEP(weigh_few)(const am_flash_rows *block, const uint64_t *live,
                                                    const FN(strip) * s, ptrdiff_t begin, ptrdiff_t end)
{
#define VECTORS(n)                                                                                           \
    case n: STEP(weigh_plain)(block, live, NULL, NULL, s->row, s->rows, begin, begin + (n) * LANES, n); break;
    switch ((end - begin) / LANES) {
        VECTORS(1)
        VECTORS(2)
        VECTORS(3)
        VECTORS(4)
    default: return false;
    }
#undef VECTORS
    return true;
}

/* Weighs the rows of a tile: all, or of each strip the columns that it takes. */
static void STEP(weigh_strips)(const am_flash_rows *block, const am_flash_tile *tile,
                               const FN(strip) * strips, ptrdiff_t count)
{
    if (STEP(weigh_whole)(block, tile)) return;
    const bool plain = WIDTH == 1 && FN(IN_FLIGHT) * LANES >= AM_FLASH_TILE && STEP(is_plain)(block, tile);
    for (const FN(strip) *s = strips; s < strips + count; s++) {
        ptrdiff_t whole = WIDTH * LANES, begin = s->begin / whole * whole,
                  end = (s->end + whole - 1) / whole * whole;
        if (begin == end || (plain && STEP(weigh_few)(block, tile->live, s, begin, end))) continue;
        STEP(weigh)(block, tile, s->row, s->rows, begin, end);
    }
}

#if WIDTH == 1 || !defined V_TILES
#    if VF_LANES >= 16
#        include "kernels/flash_transposed_tpl.h"
#    endif

static void STEP(flash_step)(const am_flash_rows *block, const am_flash_tile *tile)
{
#    if VF_LANES >= 16
    if (tile->transposed) {
        STEP(step_transposed)(block, tile);
        return;
    }
#    endif
    FN(strip) strips[AM_FLASH_ROWS];
    ptrdiff_t count = FN(cut_strips)(strips, block->rows, STRIP, tile->live, AM_FLASH_TILE);

    prefetch_queue queue =
        prefetch_queue_of(tile->prefetch, count * (AM_FLASH_TILE + block->out_depth) / FN(PANEL));

    T *logits = block->logits, *out = block->out;
    const T *q = block->q, *k = tile->k, *v = tile->v;
    if (block->depth == 0) memset(logits, 0, (size_t)(block->rows * AM_FLASH_TILE) * sizeof *logits);
    for (ptrdiff_t column = 0; block->depth > 0 && column < AM_FLASH_TILE;
         column += FN(PANEL), k += FN(PANEL) * block->depth) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            prefetch_lines *lines = prefetch_pick(&queue, block->depth);
            if (STEP(product_within)(s->rows, s->begin - column, s->end - column, block->depth,
                                     q + s->row * block->q_step, block->q_step, k,
                                     logits + s->row * AM_FLASH_TILE + column, lines))
                prefetch_rest(&queue, lines, block->depth);
        }
    }
    STEP(weigh_strips)(block, tile, strips, count);
    for (ptrdiff_t column = 0; column < block->out_depth; column += FN(PANEL)) {
        const ptrdiff_t panel = column * (AM_FLASH_TILE / WIDTH); /* where it begins, of packed values */
        const ptrdiff_t columns = columns_at(block, column, FN(PANEL));
        if (tile->live && !tile->finite) {
            STEP(add_live)(block, tile, column, v + panel);
            continue;
        }
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (s->begin == s->end) continue;
            ptrdiff_t begin = s->begin / WIDTH, end = (s->end + WIDTH - 1) / WIDTH;
            prefetch_lines *lines = columns > LANES ? prefetch_pick(&queue, end - begin) : NULL;
            const T *p = logits + s->row * AM_FLASH_TILE + begin;
            T *c = out + s->row * block->out_depth + column;
            if (tile->v_step > 0)
                STEP(add_in_place)(s->rows, columns, p, v, tile->v_step, column, c, block->out_depth, lines);
            else
                STEP(add_product)(s->rows, columns, end - begin, p, v + panel + begin * FN(PANEL), FN(PANEL),
                                  c, block->out_depth, lines);
            prefetch_rest(&queue, lines, end - begin);
        }
    }
}
#endif

#undef STEP
#undef WIDTH
#undef EXP2_TERMS
