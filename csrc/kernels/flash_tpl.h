/* flash_tpl.h – attention of a block of rows to a tile of keys, for one type of numbers.
 *
 *     S = Q Kᵀ           rows × 64, one panel of keys after the other, so that the panel stays in cache
 *     P = e^(S - high)   row by row; `high` is raised only when a logit exceeds it by far
 *     O = O + P V        one panel of columns after the other
 *
 * Of a tile that is only partly live, each strip takes the columns from its first live one to its last.
 */

/* How far a logit may exceed `high`: P stays below e^8, and rows are seldom scaled. */
#define SLACK 8

/* Adds the bias and caps. */
static void FN(dress)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row, T *logits,
                      ptrdiff_t begin, ptrdiff_t end)
{
    const T *bias = tile->bias ? (const T *)tile->bias + row * AM_FLASH_TILE : NULL;
    V cap = VOP(set1)((T)block->cap), inverse = VOP(set1)((T)(1 / block->cap));
    for (ptrdiff_t i = begin; i < end; i += LANES) {
        V s = VOP(load)(logits + i);
        if (bias) s = VOP(add)(s, VOP(load)(bias + i));
        if (block->cap > 0) s = VOP(mul)(cap, FN(tanh)(VOP(mul)(s, inverse)));
        VOP(store)(logits + i, s);
    }
}

/* Logits of one row to weights; columns begin … end - 1, whole vectors. Returns whether `high` rose. */
static void FN(weigh)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row, ptrdiff_t begin,
                      ptrdiff_t end)
{
    T *logits = (T *)block->logits + row * AM_FLASH_TILE, *high = (T *)block->high + row,
      *sum = (T *)block->sum + row, *top = (T *)block->top + row;
    V unit = VOP(set1)((T)block->unit);
    if (tile->bias || block->cap > 0) FN(dress)(block, tile, row, logits, begin, end);
    V most = VOP(set1)(-(T)INFINITY);
    if (tile->live) {
        for (ptrdiff_t i = begin; i < end; i += LANES) {
            V s = VOP(select)(tile->live[row] >> i, VOP(load)(logits + i), VOP(set1)(-(T)INFINITY));
            VOP(store)(logits + i, s);
            most = VOP(max)(s, most);
        }
    } else {
        for (ptrdiff_t i = begin; i < end; i += LANES) most = VOP(max)(VOP(load)(logits + i), most);
    }
    T highest = VOP(highest)(most);
    if (highest > *top) *top = highest;
    if (highest > *high + SLACK) { /* also if it was -INFINITY */
        if (*high > -(T)INFINITY) {
            V factor = FN(exp2)(VOP(mul)(VOP(set1)(*high - highest), unit));
            T *out = (T *)block->out + row * block->out_depth;
            for (ptrdiff_t i = 0; i < block->out_depth; i += LANES)
                VOP(store)(out + i, VOP(mul)(factor, VOP(load)(out + i)));
            *sum *= VOP(first)(factor);
        }
        *high = highest;
    }
    V base = VOP(set1)(*high > -(T)INFINITY ? *high : 0), total = VOP(set1)(0);
    for (ptrdiff_t i = begin; i < end; i += LANES) {
        V p = FN(exp2)(VOP(mul)(VOP(sub)(VOP(load)(logits + i), base), unit));
        total = VOP(add)(total, p);
        if (tile->kept) p = VOP(select)(tile->kept[row] >> i, p, VOP(set1)(0));
        VOP(store)(logits + i, p);
    }
    *sum += VOP(total)(total);
}

/* O + P V over live pairs alone, for values among which are NaN or Inf: 0 × NaN would reach beyond them. The
 * same sums in the same order as by `product`, so that garbage in dead pairs does not change a bit. */
static void FN(add_live)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row)
{
    T *out = (T *)block->out + row * block->out_depth;
    const T *p = (const T *)block->logits + row * AM_FLASH_TILE, *v = tile->v;
    for (ptrdiff_t column = 0; column < block->out_depth; column += LANES) {
        const T *panel = v + column / FN(PANEL) * FN(PANEL) * AM_FLASH_TILE + column % FN(PANEL);
        V sum = VOP(load)(out + column);
        for (uint64_t left = tile->live[row]; left; left &= left - 1) {
            int key = __builtin_ctzll(left);
            sum = VOP(fma)(VOP(set1)(p[key]), VOP(load)(panel + key * FN(PANEL)), sum);
        }
        VOP(store)(out + column, sum);
    }
}

static void FN(flash_step)(const am_flash_rows *block, const am_flash_tile *tile)
{
    FN(strip) strips[AM_FLASH_ROWS];
    ptrdiff_t count = FN(cut_strips)(strips, block->rows, tile->live, AM_FLASH_TILE);

    T *logits = block->logits, *out = block->out;
    const T *q = block->q, *k = tile->k, *v = tile->v;
    for (ptrdiff_t column = 0; column < AM_FLASH_TILE; column += FN(PANEL), k += FN(PANEL) * block->depth) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (column >= s->end || column + FN(PANEL) <= s->begin) continue;
            FN(product)(s->rows, block->depth, q + s->row * block->depth, block->depth, k,
                        logits + s->row * AM_FLASH_TILE + column, AM_FLASH_TILE, false);
        }
    }
    for (const FN(strip) *s = strips; s < strips + count; s++) {
        ptrdiff_t begin = s->begin / LANES * LANES, end = (s->end + LANES - 1) / LANES * LANES;
        for (ptrdiff_t r = s->row; begin < end && r < s->row + s->rows; r++)
            FN(weigh)(block, tile, r, begin, end);
    }
    if (tile->live && !tile->finite) {
        for (ptrdiff_t r = 0; r < block->rows; r++) FN(add_live)(block, tile, r);
        return;
    }
    for (ptrdiff_t column = 0; column < block->out_depth; column += FN(PANEL)) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (s->begin == s->end) continue;
            FN(product)(s->rows, s->end - s->begin, logits + s->row * AM_FLASH_TILE + s->begin, AM_FLASH_TILE,
                        v + s->begin * FN(PANEL), out + s->row * block->out_depth + column, block->out_depth,
                        true);
        }
        v += AM_FLASH_TILE * FN(PANEL);
    }
}

static void FN(pack_keys)(void *to, const void *from, ptrdiff_t step, ptrdiff_t rows, ptrdiff_t depth)
{
    T *dst = to;
    const T *src = from;
    for (ptrdiff_t begin = 0; begin < AM_FLASH_TILE; begin += FN(PANEL), dst += FN(PANEL) * depth) {
        ptrdiff_t count = rows - begin < FN(PANEL) ? rows - begin : FN(PANEL);
        if (count < FN(PANEL)) memset(dst, 0, (size_t)(FN(PANEL) * depth) * sizeof *dst);
        for (ptrdiff_t j = 0; j < count; j++) {
            const T *row = src + (begin + j) * step;
            for (ptrdiff_t i = 0; i < depth; i++) dst[i * FN(PANEL) + j] = row[i];
        }
    }
}

static bool FN(pack_values)(void *to, const void *from, ptrdiff_t step, ptrdiff_t rows, ptrdiff_t depth)
{
    T *dst = to;
    const T *src = from;
    V nothing = VOP(set1)(0); /* 0 × x is 0 for finite x, else NaN */
    for (ptrdiff_t begin = 0; begin < depth; begin += FN(PANEL)) {
        ptrdiff_t count = depth - begin < FN(PANEL) ? depth - begin : FN(PANEL);
        for (ptrdiff_t r = 0; r < AM_FLASH_TILE; r++, dst += FN(PANEL)) {
            if (r >= rows || count < FN(PANEL)) memset(dst, 0, FN(PANEL) * sizeof *dst);
            if (r < rows && count == FN(PANEL)) {
                VOP(store)(dst, VOP(load)(src + r * step + begin));
                VOP(store)(dst + LANES, VOP(load)(src + r * step + begin + LANES));
            } else if (r < rows) {
                memcpy(dst, src + r * step + begin, (size_t)count * sizeof *dst);
            }
            nothing = VOP(fma)(VOP(load)(dst), VOP(set1)(0), nothing);
            nothing = VOP(fma)(VOP(load)(dst + LANES), VOP(set1)(0), nothing);
        }
    }
    return VOP(total)(nothing) == 0;
}

#undef SLACK
