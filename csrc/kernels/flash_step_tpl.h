/* flash_step_tpl.h – how a block of rows meets a tile of keys:
 *
 *     S = Q Kᵀ           rows × 64, one panel of keys after the other, so that the panel stays in cache
 *     P = e^(S - high)   row by row; `high` is raised only when a logit exceeds it by more than SLACK
 *     O = O + P V        one panel of columns after the other
 *
 * A lane of Q, K, P or V holds WIDTH numbers, which are neighbours in the sum that is taken. Of a tile that
 * is only partly live, each strip takes the columns from its first live one to its last.
 */

/* Products of one row to logits, which may raise `high`; columns begin … end - 1, whole vectors. */
static inline void STEP(raise)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row,
                               ptrdiff_t begin, ptrdiff_t end)
{
    T *logits = (T *)block->logits + row * AM_FLASH_TILE, *high = (T *)block->high + row,
      *sum = (T *)block->sum + row, *top = block->top ? (T *)block->top + row : NULL;
    if (tile->bias || block->cap > 0 || block->factor != 1) FN(dress)(block, tile, row, logits, begin, end);
    V most = VOP(set1)(-(T)INFINITY);
    if (tile->live) {
        for (ptrdiff_t i = begin; i < end; i += LANES) {
            V s = VOP(select)(tile->live[row] >> i, VOP(load)(logits + i), VOP(set1)(-(T)INFINITY));
            VOP(store)(logits + i, s);
            most = VOP(max)(s, most);
        }
    } else if (begin == 0 && end == AM_FLASH_TILE) { /* as many as the compiler knows */
        for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) most = VOP(max)(VOP(load)(logits + i), most);
    } else {
        for (ptrdiff_t i = begin; i < end; i += LANES) most = VOP(max)(VOP(load)(logits + i), most);
    }
    if (!top && !VOP(exceeds)(most, *high + SLACK)) return;
    T highest = VOP(highest)(most);
    if (top) *top = highest > *top ? highest : *top;
    if (!(highest > *high + SLACK)) return; /* any live logit exceeds a `high` of -INFINITY */
    if (*high > -(T)INFINITY) {
        V factor = FN(exp2)(VOP(mul)(VOP(set1)(*high - highest), VOP(set1)((T)block->unit)));
        T *out = (T *)block->out + row * block->out_depth;
        for (ptrdiff_t i = 0; i < block->out_depth; i += LANES)
            VOP(store)(out + i, VOP(mul)(factor, VOP(load)(out + i)));
        *sum *= VOP(first)(factor);
    }
    *high = highest;
}

/* Some vectors of logits to weights; their sum is added to `total`. `unit`: NULL for 1. */
static inline __attribute__((always_inline)) V STEP(weigh_some)(T *logits, const int count, V base,
                                                                const V *unit, const uint64_t *kept,
                                                                ptrdiff_t column, V total)
{
    V p[FN(AT_ONCE)];
#pragma GCC unroll 16
    for (int j = 0; j < count; j++) {
        p[j] = VOP(sub)(VOP(load)(logits + column + j * LANES), base);
        if (unit) p[j] = VOP(mul)(p[j], *unit);
    }
    FN(exp2_each)(p, count);
#pragma GCC unroll 16
    for (int j = 0; j < count; j++) {
        total = VOP(add)(total, p[j]);
        if (kept) p[j] = VOP(select)(*kept >> (column + j * LANES), p[j], VOP(set1)(0));
        VOP(store)(logits + column + j * LANES, p[j]);
    }
    return total;
}

/* Logits of one row to weights; their sum, lane by lane. */
static inline __attribute__((always_inline)) V STEP(weigh_row)(T *logits, T high, ptrdiff_t begin,
                                                               ptrdiff_t end, const V *unit,
                                                               const uint64_t *kept)
{
    V base = VOP(set1)(high > -(T)INFINITY ? high : 0), total = VOP(set1)(0);
    ptrdiff_t i = begin;
    for (; i + FN(AT_ONCE) * LANES <= end; i += FN(AT_ONCE) * LANES)
        total = STEP(weigh_some)(logits, FN(AT_ONCE), base, unit, kept, i, total);
    for (; i < end; i += LANES) total = STEP(weigh_some)(logits, 1, base, unit, kept, i, total);
    STEP(narrow)(logits, begin, end);
    return total;
}

/* Products of some rows to weights. Their highest logits are found first, so that no row's powers wait for
 * the row before, and lanes are added up last, those of several rows side by side. Whole rows of nothing but
 * logits, which are most, are compiled once more. */
static void STEP(weigh)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row, ptrdiff_t rows,
                        ptrdiff_t begin, ptrdiff_t end)
{
    const ptrdiff_t last = row + rows;
    for (ptrdiff_t r = row; r < last; r++) STEP(raise)(block, tile, r, begin, end);
    const V unit = VOP(set1)((T)block->unit);
    const bool plain = begin == 0 && end == AM_FLASH_TILE && block->unit == 1 && !tile->kept;
    for (; row < last; row += LANES) {
        const ptrdiff_t count = last - row < LANES ? last - row : LANES;
        V lanes[LANES];
        T totals[LANES], *sums = (T *)block->sum + row;
        for (ptrdiff_t i = 0; i < count; i++) {
            T *logits = (T *)block->logits + (row + i) * AM_FLASH_TILE, high = ((T *)block->high)[row + i];
            const uint64_t *kept = tile->kept ? tile->kept + row + i : NULL;
            lanes[i] = plain ? STEP(weigh_row)(logits, high, 0, AM_FLASH_TILE, NULL, NULL)
                             : STEP(weigh_row)(logits, high, begin, end, &unit, kept);
        }
        for (ptrdiff_t i = count; i < LANES; i++) lanes[i] = VOP(set1)(0);
        VOP(store)(totals, VOP(totals)(lanes));
        for (ptrdiff_t i = 0; i < count; i++) sums[i] += totals[i];
    }
}

static void STEP(flash_step)(const am_flash_rows *block, const am_flash_tile *tile)
{
    FN(strip) strips[AM_FLASH_ROWS];
    ptrdiff_t count = FN(cut_strips)(strips, block->rows, tile->live, AM_FLASH_TILE);

    am_flash_ahead next[AM_NEXTS];
    ptrdiff_t rows = 0;
    for (int i = 0; i < AM_NEXTS; i++) rows += (next[i] = tile->next[i]).rows;
    ptrdiff_t share = rows * FN(PANEL) / (count * (AM_FLASH_TILE + block->out_depth)) + (rows > 0);

    T *logits = block->logits, *out = block->out;
    const T *q = block->q, *k = tile->k, *v = tile->v;
    for (ptrdiff_t column = 0; column < AM_FLASH_TILE; column += FN(PANEL), k += FN(PANEL) * block->depth) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (column >= s->end || column + FN(PANEL) <= s->begin) continue;
            STEP(product)(s->rows, block->depth, q + s->row * block->depth, block->depth, k,
                          logits + s->row * AM_FLASH_TILE + column, AM_FLASH_TILE, false);
            flash_ask_rows(next, share);
        }
    }
    for (const FN(strip) *s = strips; s < strips + count; s++) {
        ptrdiff_t whole = WIDTH * LANES, begin = s->begin / whole * whole,
                  end = (s->end + whole - 1) / whole * whole;
        if (begin < end) STEP(weigh)(block, tile, s->row, s->rows, begin, end);
    }
    for (ptrdiff_t column = 0; column < block->out_depth;
         column += FN(PANEL), v += AM_FLASH_TILE / WIDTH * FN(PANEL)) {
        if (tile->live && !tile->finite) {
            STEP(add_live)(block, tile, column, v);
            continue;
        }
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (s->begin == s->end) continue;
            ptrdiff_t begin = s->begin / WIDTH, end = (s->end + WIDTH - 1) / WIDTH;
            STEP(product)(s->rows, end - begin, logits + s->row * AM_FLASH_TILE + begin, AM_FLASH_TILE,
                          v + begin * FN(PANEL), out + s->row * block->out_depth + column, block->out_depth,
                          true);
            flash_ask_rows(next, share);
        }
    }
}

#undef STEP
#undef WIDTH
#undef SLACK
