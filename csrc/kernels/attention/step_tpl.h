/* step_tpl.h – the forward step of a block of rows over a tile of keys:
 *
 *     S = Q Kᵀ        rows × 64, one panel of keys after the other, so that the panel stays in cache
 *     P = e^(S - m)   row by row; the running max m grows, and the row is rescaled, only when a logit exceeds
 *                     it by more than FLASH_SLACK
 *     O = O + P V     one panel of columns after the other
 *
 * Of a tile that is only partly live, each strip takes the columns from its first live one to its last.
 */
#if !defined T || !defined STEP || !defined WIDTH || !defined EXP2_TERMS
#    error "step_tpl.h needs f32.h or f64.h, STEP(name), EXP2_TERMS (coefficients of 2^x) and"
#    error "WIDTH (numbers in a lane of Q, K, P or V, which are neighbours in the sum that is taken)"
#endif

/* Whether a logit exceeds `running_max` by so much that the row is rescaled. */
static inline bool STEP(exceeds_running_max)(V most, const T *running_max)
{
    return VOP(exceeding)(VOP(sub)(most, VOP(set1)(FLASH_SLACK)), VOP(set1)(*running_max));
}

/* Sets `running_max` to a greater logit than any before, and rescales the accumulators of the row to it. */
static __attribute__((noinline)) void STEP(rescale)(const am_flash_rows *block, ptrdiff_t row, T highest)
{
    T *running_max = (T *)block->running_max + row, *sum = (T *)block->sum + row;
    if (*running_max > -(T)INFINITY) {
        V factor = FN(exp2)(VOP(mul)(VOP(set1)(*running_max - highest), VOP(set1)((T)block->unit)));
        T *out = (T *)block->out + row * block->out_dim;
        for (ptrdiff_t i = 0; i < block->out_dim; i += LANES)
            VOP(store)(out + i, VOP(mul)(factor, VOP(load)(out + i)));
        *sum *= VOP(first)(factor);
        if (WIDTH > 1 && block->exact_sum) ((T *)block->exact_sum)[row] *= VOP(first)(factor);
    }
    *running_max = highest;
}

/* Updates the true maximum of a row, if it is needed. */
static inline void STEP(update_row_max)(const am_flash_rows *block, ptrdiff_t row, V most)
{
    T *row_max = block->row_max ? (T *)block->row_max + row : NULL;
    if (row_max && VOP(exceeding)(most, VOP(set1)(*row_max))) *row_max = VOP(highest)(most);
}

/* The reference of a row's powers: finite, also where all logits are -INFINITY. */
static inline V STEP(base_of)(const am_flash_rows *block, ptrdiff_t row)
{
    return VOP(max)(VOP(set1)(((const T *)block->running_max)[row]), VOP(set1)(-GREATEST));
}

#ifdef V_FEW
#    define FEW V_FEW
#    define TOTALS_OF_FEW VOP(totals_of_few)
#else
#    define FEW 0
#    define TOTALS_OF_FEW VOP(totals)
#endif
/* Adds up the lanes of some rows side by side, and adds the totals to their sums. */
INLINE void STEP(add_lanes)(T *sums, V lanes[LANES], ptrdiff_t rows)
{
    T totals[LANES];
    const bool few = rows <= FEW;
    for (ptrdiff_t i = rows; i < (few ? FEW : LANES); i++) lanes[i] = VOP(set1)(0);
    VOP(store)(totals, few ? TOTALS_OF_FEW(lanes) : VOP(totals)(lanes));
    for (ptrdiff_t i = 0; i < rows; i++) sums[i] += totals[i];
}

#if WIDTH == 1 /* else whole tiles are taken */
/* Turns products of one row into logits, and rescales the row if one exceeds `running_max`; columns begin …
 * end - 1, whole vectors. */
static inline void STEP(find_running_max)(const am_flash_rows *block, const am_flash_tile *tile,
                                          ptrdiff_t row, ptrdiff_t begin, ptrdiff_t end)
{
    T *logits = (T *)block->logits + row * AM_FLASH_TILE;
    const bool adds = tile->terms.bias && block->cap == 0; /* here, which saves a pass over the row */
    if (!adds && (tile->terms.bias || block->cap > 0 || block->factor != 1))
        FN(apply_logit_terms)(block, tile, row, logits, begin, end);
    const T *bias = adds ? (const T *)tile->terms.bias + row * tile->terms.bias_stride : NULL;
    V most = VOP(set1)(-(T)INFINITY), factor = VOP(set1)((T)block->factor);
    for (ptrdiff_t i = begin; i < end; i += LANES) {
        V s = VOP(load)(logits + i);
        if (bias) s = VOP(add)(VOP(mul)(factor, s), VOP(load)(bias + i));
        if (tile->terms.live) s = VOP(select)(tile->terms.live[row] >> i, s, VOP(set1)(-(T)INFINITY));
        if (bias || tile->terms.live) VOP(store)(logits + i, s);
        most = VOP(max)(s, most);
    }
    STEP(update_row_max)(block, row, most);
    /* Any live logit exceeds a `running_max` of -INFINITY. */
    if (STEP(exceeds_running_max)(most, (const T *)block->running_max + row))
        STEP(rescale)(block, row, VOP(highest)(most));
}

/* Turns some vectors of logits into P, whose sum is added to `total`, lane by lane. */
INLINE V STEP(softmax_vectors)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row,
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
        if (tile->terms.kept)
            p[j] = VOP(select)(tile->terms.kept[row] >> (column + j * LANES), p[j], VOP(set1)(0));
    }
    STEP(store_p)(logits + column, p, count);
    return total;
}

/* Turns products of some rows into P. */
static void STEP(softmax_rows)(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row,
                               ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t end)
{
    for (const ptrdiff_t last = row + rows; row < last; row += LANES) {
        const ptrdiff_t count = last - row < LANES ? last - row : LANES;
        V lanes[LANES];
        for (ptrdiff_t i = 0; i < count; i++) STEP(find_running_max)(block, tile, row + i, begin, end);
        for (ptrdiff_t i = 0; i < count; i++) {
            V total = VOP(set1)(0);
            ptrdiff_t column = begin;
            for (; column + FN(IN_FLIGHT) * LANES <= end; column += FN(IN_FLIGHT) * LANES)
                total = STEP(softmax_vectors)(block, tile, row + i, column, FN(IN_FLIGHT), total);
            for (; column < end; column += LANES)
                total = STEP(softmax_vectors)(block, tile, row + i, column, 1, total);
            lanes[i] = total;
        }
        STEP(add_lanes)((T *)block->sum + row, lanes, count);
    }
}

#endif

/* Whether logits are products but for a factor, P is e^logit alone, and `row_max` is not needed. */
static bool STEP(is_plain)(const am_flash_rows *block, const am_flash_tile *tile)
{
    bool scaled = WIDTH > 1 ? block->factor > 0 : block->factor == 1;
    return scaled && block->unit == 1 && block->cap == 0 && !block->row_max && !tile->terms.kept &&
           !tile->terms.bias && (WIDTH == 1 || !tile->v_scales);
}

/* What such a tile may have beside products; NULL: it has none. */
typedef struct {
    const uint64_t *live, *kept;
    const T *bias;
    ptrdiff_t bias_stride;
    const V *unit;   /* NULL for 1, and if `row_max` is not needed */
    const T *scales; /* of values */
} STEP(extras);

/* Some vectors of logits, split into whole numbers and the rest. */
typedef struct {
    V x[FN(IN_FLIGHT)], whole[FN(IN_FLIGHT)];
} STEP(in_flight);

/* Turns some products of such a tile, or of one with a bias, into logits, and splits off their whole numbers.
 * The call for the first column first rescales the row if needed. */
INLINE void STEP(begin_plain)(const am_flash_rows *block, const STEP(extras) extras, ptrdiff_t row,
                              ptrdiff_t column, STEP(in_flight) * next)
{
    const uint64_t *live = extras.live;
    const T *bias = extras.bias ? extras.bias + row * extras.bias_stride : NULL;
    const V *unit = extras.unit;
    V *x = next->x;
    T *logits = (T *)block->logits + row * AM_FLASH_TILE;
    const T *running_max = (const T *)block->running_max + row;
    const V factor = VOP(set1)((T)block->factor);
    const bool all = FN(IN_FLIGHT) * LANES == AM_FLASH_TILE; /* of the row's vectors, which need no memory */
    if (column == 0) {
        V most = VOP(set1)(-(T)INFINITY);
        UNROLL(16)
        for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
            V s = VOP(load)(logits + i);
            if (bias) {
                s = VOP(add)(WIDTH > 1 ? VOP(mul)(factor, s) : s, VOP(load)(bias + i));
                if (all)
                    x[i / LANES] = s;
                else
                    VOP(store)(logits + i, s);
            }
            if (live) s = VOP(select)(live[row] >> i, s, VOP(set1)(-(T)INFINITY));
            most = VOP(max)(s, most);
        }
        if (WIDTH > 1 && !bias) most = VOP(mul)(factor, most);
        if (unit) STEP(update_row_max)(block, row, most);
        if (STEP(exceeds_running_max)(most, running_max)) STEP(rescale)(block, row, VOP(highest)(most));
    }
    const V base = STEP(base_of)(block, row), minus_base = VOP(sub)(VOP(set1)(0), base);
    UNROLL(16)
    for (int j = 0; j < FN(IN_FLIGHT); j++) {
        if (!bias || !all) x[j] = VOP(load)(logits + column + j * LANES);
        x[j] = WIDTH > 1 && !bias ? VOP(fma)(factor, x[j], minus_base) : VOP(sub)(x[j], base);
        if (unit) x[j] = VOP(mul)(x[j], *unit);
    }
    FN(exp2_begin)(x, next->whole, FN(IN_FLIGHT));
}

/* P times the scales of values. That of a dead pair is 0, and stays so whatever is its scale. */
static inline V STEP(scale_p)(V p, V scales)
{
    const V zero = VOP(set1)(0);
    return VOP(pick_equal)(p, zero, zero, VOP(mul)(p, scales));
}

/* Turns products of all rows into P for such tiles. The next vectors are begun before the powers of these are
 * taken, whose steps wait for one another. */
INLINE void STEP(softmax_plain)(const am_flash_rows *block, const STEP(extras) extras)
{
    enum { COUNT = FN(IN_FLIGHT), COLUMNS = COUNT * LANES };
    const uint64_t *live = extras.live, *kept = extras.kept;
    const T *scales = extras.scales;
    T *const exact_sum = WIDTH > 1 ? block->exact_sum : NULL;
    STEP(in_flight) next;
    STEP(begin_plain)(block, extras, 0, 0, &next);
    for (ptrdiff_t row = 0; row < block->rows;) {
        const ptrdiff_t first = row, behind = block->rows - row < LANES ? block->rows : row + LANES;
        V lanes[LANES], exact_lanes[LANES];
        for (; row < behind; row++) {
            T *logits = (T *)block->logits + row * AM_FLASH_TILE;
            V total = VOP(set1)(0), exact_total = total;
            UNROLL(16)
            for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += COLUMNS) {
                V p[COUNT], whole[COUNT];
                UNROLL(16)
                for (int j = 0; j < COUNT; j++) p[j] = next.x[j], whole[j] = next.whole[j];
                if (i + COLUMNS < AM_FLASH_TILE)
                    STEP(begin_plain)(block, extras, row, i + COLUMNS, &next);
                else if (row + 1 < block->rows)
                    STEP(begin_plain)(block, extras, row + 1, 0, &next);
                FN(exp2_end)(p, whole, COUNT, EXP2_TERMS, COUNT_OF(EXP2_TERMS));
                UNROLL(16)
                for (int j = 0; j < COUNT; j++)
                    if (live) p[j] = VOP(select)(live[row] >> (i + j * LANES), p[j], VOP(set1)(0));
                total = WIDTH > 1 && !scales ? STEP(add_weights)(total, p, COUNT)
                                             : FN(add_weights)(total, p, COUNT);
                if (exact_sum) exact_total = FN(add_weights)(exact_total, p, COUNT);
                UNROLL(16)
                for (int j = 0; j < COUNT; j++) {
                    if (kept) p[j] = VOP(select)(kept[row] >> (i + j * LANES), p[j], VOP(set1)(0));
                    if (scales) p[j] = STEP(scale_p)(p[j], VOP(load)(scales + i + j * LANES));
                }
                STEP(store_p)(logits + i / WIDTH, p, COUNT);
            }
            lanes[row - first] = total;
            if (exact_sum) exact_lanes[row - first] = exact_total;
        }
        STEP(add_lanes)((T *)block->sum + first, lanes, row - first);
        if (exact_sum) STEP(add_lanes)(exact_sum + first, exact_lanes, row - first);
    }
}

/* Turns products of whole tiles that are not plain into P: terms other than a bias are applied first. */
APART void STEP(softmax_with_terms)(const am_flash_rows *block, const am_flash_tile *tile)
{
    const V unit = VOP(set1)((T)block->unit);
    const ptrdiff_t stride = tile->terms.bias_stride;
    const T *bias = tile->terms.bias, *scales = WIDTH > 1 ? tile->v_scales : NULL;
    am_flash_rows with_terms = *block;
    if (block->cap > 0 || block->factor <= 0) {
        T *logits = block->logits;
        for (ptrdiff_t r = 0; r < block->rows; r++)
            FN(apply_logit_terms)(block, tile, r, logits + r * AM_FLASH_TILE, 0, AM_FLASH_TILE);
        with_terms.factor = 1, bias = NULL;
    }
    const uint64_t *live = tile->terms.live, *kept = tile->terms.kept;
    if (scales)
        STEP(softmax_plain)(&with_terms, (STEP(extras)){.live = live,
                                                        .kept = kept,
                                                        .bias = bias,
                                                        .bias_stride = stride,
                                                        .unit = &unit,
                                                        .scales = scales});
    else if (bias)
        STEP(softmax_plain)(
            block,
            (STEP(extras)){.live = live, .kept = kept, .bias = bias, .bias_stride = stride, .unit = &unit});
    else
        STEP(softmax_plain)(&with_terms, (STEP(extras)){.live = live, .kept = kept, .unit = &unit});
}

/* Turns products into P for all columns of a tile, unless it is better to leave out dead ones; returns
 * whether it has. If a lane holds two numbers, leaving out dead vectors costs more than it saves. */
static bool STEP(softmax_whole)(const am_flash_rows *block, const am_flash_tile *tile)
{
    if (WIDTH == 1 && tile->terms.live) return false;
    if (!STEP(is_plain)(block, tile))
        STEP(softmax_with_terms)(block, tile);
    else if (tile->terms.live)
        STEP(softmax_plain)(block, (STEP(extras)){.live = tile->terms.live});
    else
        STEP(softmax_plain)(block, (STEP(extras)){.live = NULL});
    return true;
}

/* Turns products of unpacked keys into P. */
static void STEP(find_p)(const am_flash_rows *block, const am_flash_tile *tile)
{
    if (STEP(softmax_whole)(block, tile)) return;
#if WIDTH == 1
    ptrdiff_t begin, end;
    find_live(block, tile, &begin, &end);
    begin -= begin % FN(PANEL);
    end = (end + FN(PANEL) - 1) / FN(PANEL) * FN(PANEL);
    STEP(softmax_rows)(block, tile, 0, block->rows, begin, end);
#endif
}

/* Turns the products of a tile into P: of all columns, or for each strip of those that it takes. */
static void STEP(softmax_step)(const am_flash_rows *block, const am_flash_tile *tile,
                               const FN(strip) * strips, ptrdiff_t count)
{
    (void)strips, (void)count;
    if (STEP(softmax_whole)(block, tile)) return;
#if WIDTH == 1
    for (const FN(strip) *s = strips; s < strips + count; s++) {
        ptrdiff_t begin = s->begin / LANES * LANES, end = (s->end + LANES - 1) / LANES * LANES;
        if (begin < end) STEP(softmax_rows)(block, tile, s->row, s->rows, begin, end);
    }
#endif
}

#if WIDTH == 1 || !defined V_AMX
#    include "kernels/attention/transposed_tpl.h"

/* Multiplies products by the scales of their keys. */
static void STEP(scale_products)(const am_flash_rows *block, const T *scales)
{
    T *row = block->logits;
    for (ptrdiff_t r = 0; r < block->rows; r++, row += AM_FLASH_TILE) {
        for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES)
            VOP(store)(row + i, VOP(mul)(VOP(load)(row + i), VOP(load)(scales + i)));
    }
}

static void STEP(flash_step)(const am_flash_rows *block, const am_flash_tile *tile)
{
    if (am_is_transposed(tile->layout)) {
        STEP(step_transposed)(block, tile);
        return;
    }
    assert(tile->layout == AM_PACKED || tile->layout == AM_PACKED_KEYS);
    FN(strip) strips[AM_FLASH_ROWS];
    ptrdiff_t count = FN(cut_strips)(strips, block->rows, STRIP, tile->terms.live, AM_FLASH_TILE);

    prefetch_queue queue;
    const ptrdiff_t keys = tile->terms.all_keys > 0 ? tile->terms.all_keys : AM_FLASH_TILE;
    prefetch_begin(&queue, tile->prefetch,
                   count * ((keys + FN(PANEL) - 1) / FN(PANEL) + block->out_dim / FN(PANEL)));

    T *logits = block->logits, *out = block->out;
    const T *q = block->q, *v = tile->v.data;
    STEP(operands)
    s_of = {.length = block->head_dim, .a_row = block->q_stride, .b = tile->k.data},
    o_of = {.b_row = FN(PANEL), .c_row = block->out_dim};
    if (block->head_dim == 0) memset(logits, 0, (size_t)(block->rows * AM_FLASH_TILE) * sizeof *logits);
    for (ptrdiff_t column = 0; block->head_dim > 0 && column < AM_FLASH_TILE;
         column += FN(PANEL), s_of.b += FN(PANEL) * block->head_dim) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            prefetch_lines *lines = prefetch_pick(&queue, block->head_dim);
            s_of.a = q + s->row * block->q_stride, s_of.c = logits + s->row * AM_FLASH_TILE + column;
            if (STEP(product_within)(s->rows, s->begin - column, s->end - column, s_of, lines))
                prefetch_rest(&queue, lines, block->head_dim);
        }
    }
    if (WIDTH > 1 && tile->k_scales) STEP(scale_products)(block, tile->k_scales);
    STEP(softmax_step)(block, tile, strips, count);
    for (ptrdiff_t column = 0; column < block->out_dim; column += FN(PANEL)) {
        const ptrdiff_t panel =
            column * (AM_FLASH_TILE / WIDTH); /* the first element of the panel in packed values */
        const ptrdiff_t columns = value_columns_at(block, column, FN(PANEL));
        if (tile->terms.live && !tile->finite) {
            STEP(add_live)(block, tile, column, v + panel);
            continue;
        }
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (s->begin == s->end) continue;
            ptrdiff_t begin = s->begin / WIDTH, end = (s->end + WIDTH - 1) / WIDTH;
            prefetch_lines *lines = columns > LANES ? prefetch_pick(&queue, end - begin) : NULL;
            if (tile->layout == AM_PACKED_KEYS) {
                STEP(add_unpacked)(block, tile, s, column, lines);
            } else {
                o_of.length = end - begin, o_of.a = logits + s->row * AM_FLASH_TILE + begin;
                o_of.b = v + panel + begin * FN(PANEL), o_of.c = out + s->row * block->out_dim + column;
                STEP(add_product)(s->rows, columns, o_of, lines, NULL);
            }
            prefetch_rest(&queue, lines, end - begin);
        }
    }
}
#endif

#undef FEW
#undef TOTALS_OF_FEW
#undef STEP
#undef WIDTH
#undef EXP2_TERMS
