/* backward_step_tpl.h – the backward step of a block of rows over a tile of keys:
 *
 *     S = Q Kᵀ,  dP = dO Vᵀ       like the logits of the forward step
 *     P, dS                       row by row
 *     dV = dV + Pᵀ dO             one panel of columns after the other, like the next two
 *     dK = dK + dSᵀ Q
 *     dQ = dQ + dS K
 *
 * A lane of the factors holds WIDTH numbers, which are neighbours in the sum that is taken.
 * AMX_PRODUCTS: by products of amx.h, of HEIGHT rows at a time.
 */

/* c = a bᵀ, where b is packed like keys. */
static void STEP(logits_of)(const FN(strip) * strips, ptrdiff_t count, const T *a, ptrdiff_t step,
                            ptrdiff_t head_dim, const T *b, T *c, prefetch_queue *queue)
{
    const ptrdiff_t lanes = (head_dim + WIDTH - 1) / WIDTH, a_step = WIDTH == 1 ? step : lanes;
    if (lanes == 0) {
        const ptrdiff_t rows = strips[count - 1].row + strips[count - 1].rows;
        memset(c, 0, (size_t)(rows * AM_FLASH_TILE) * sizeof *c);
        return;
    }
#ifdef AMX_PRODUCTS
    find_logits(strips, count, lanes, &(amx_product){a, b, a_step, c, AM_FLASH_TILE, false}, queue);
#else
    for (ptrdiff_t column = 0; column < AM_FLASH_TILE; column += FN(PANEL), b += FN(PANEL) * lanes) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            prefetch_lines *lines = prefetch_pick(queue, lanes);
            if (STEP(product_within)(s->rows, s->begin - column, s->end - column, lanes, a + s->row * a_step,
                                     a_step, b, c + s->row * AM_FLASH_TILE + column, lines))
                prefetch_rest(queue, lines, lanes);
        }
    }
#endif
}

#ifndef AMX_PRODUCTS
/* c += aᵀ b, where a is [rows][AM_FLASH_TILE], and strips are of its columns; of only the live pairs if
 * `live` is not NULL. `scratch`: as large as a, which it may be. */
static void STEP(add_transposed)(const FN(strip) * strips, ptrdiff_t count, ptrdiff_t rows,
                                 const uint64_t *live, const T *a, T *scratch, const T *b, T *c,
                                 ptrdiff_t step, ptrdiff_t head_dim, prefetch_queue *queue)
{
    (void)queue;
    a = STEP(join_rows)(scratch, a, rows);
    const ptrdiff_t b_row = WIDTH == 1 ? step : FN(PANEL),
                    b_panel = WIDTH == 1 ? FN(PANEL) : AM_FLASH_ROWS / WIDTH * FN(PANEL);
    if (live) {
        ptrdiff_t columns = strips[count - 1].row + strips[count - 1].rows;
        STEP(add_live_rows)(columns, live, a, 1, AM_FLASH_TILE, b, b_row, b_panel, c, step, head_dim);
        return;
    }
    for (ptrdiff_t column = 0; column < head_dim; column += FN(PANEL), b += b_panel) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (s->begin == s->end) continue;
            ptrdiff_t begin = s->begin / WIDTH, end = (s->end + WIDTH - 1) / WIDTH;
            STEP(add_product_transposed)(s->rows, head_dim - column, end - begin,
                                         a + begin * AM_FLASH_TILE + s->row, b + begin * b_row, b_row,
                                         c + s->row * step + column, step, NULL, NULL);
        }
    }
}

/* How many products prefetch. */
static ptrdiff_t STEP(prefetching_products)(const am_backward_rows *block, ptrdiff_t strips)
{
    (void)block;
    return 2 * strips * AM_FLASH_TILE / FN(PANEL);
}

/* c += a b, as `add_transposed`. */
static void STEP(add_straight)(const FN(strip) * strips, ptrdiff_t count, ptrdiff_t rows,
                               const uint64_t *live, const T *a, const T *b, T *c, ptrdiff_t step,
                               ptrdiff_t head_dim, prefetch_queue *queue)
{
    (void)queue;
    if (live) {
        STEP(add_live_rows)(rows, live, a, AM_FLASH_TILE, 1, b, FN(PANEL), FN(PANEL) * AM_FLASH_TILE / WIDTH,
                            c, step, head_dim);
        return;
    }
    for (ptrdiff_t column = 0; column < head_dim;
         column += FN(PANEL), b += FN(PANEL) * AM_FLASH_TILE / WIDTH) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (s->begin == s->end) continue;
            ptrdiff_t begin = s->begin / WIDTH, end = (s->end + WIDTH - 1) / WIDTH;
            STEP(add_product)(s->rows, head_dim - column, end - begin, a + s->row * AM_FLASH_TILE + begin,
                              b + begin * FN(PANEL), FN(PANEL), c + s->row * step + column, step, NULL, NULL);
        }
    }
}
#endif

static void STEP(backward)(const am_backward_rows *block, const am_backward_tile *tile)
{
    FN(strip) strips[AM_FLASH_ROWS];
    ptrdiff_t count = FN(cut_strips)(strips, block->rows, HEIGHT, tile->live, AM_FLASH_TILE);
    T *p = block->p, *ds = block->ds;
    prefetch_queue queue = prefetch_queue_of(tile->prefetch, STEP(prefetching_products)(block, count));
    STEP(logits_of)(strips, count, block->q, block->step, block->head_dim, tile->k_columns, p, &queue);
    STEP(logits_of)(strips, count, block->d_out, block->value_step, block->value_dim, tile->v_columns, ds,
                    &queue);
    for (const FN(strip) *s = strips; s < strips + count; s++) {
        ptrdiff_t begin = s->begin / LANES * LANES, end = (s->end + LANES - 1) / LANES * LANES;
        for (ptrdiff_t r = s->row; r < s->row + s->rows; r++) FN(p_and_ds)(block, tile, r, begin, end);
    }

    uint64_t transposed[64] = {0};
    if (tile->live) {
        memcpy(transposed, tile->live, (size_t)block->rows * sizeof *transposed);
        transpose_tiles(transposed, 1);
    }
    FN(strip) transposed_strips[AM_FLASH_TILE];
    ptrdiff_t transposed_count =
        FN(cut_strips)(transposed_strips, tile->columns, HEIGHT, tile->live ? transposed : NULL, block->rows);
    STEP(add_transposed)(transposed_strips, transposed_count, block->rows,
                         tile->live && !block->d_out_finite ? transposed : NULL, p, p, block->d_out_rows,
                         tile->d_v, block->value_step, block->value_dim, &queue);
    STEP(add_transposed)(transposed_strips, transposed_count, block->rows,
                         tile->live && !block->q_finite ? transposed : NULL, ds, p, block->q_rows, tile->d_k,
                         block->step, block->head_dim, &queue);
    for (ptrdiff_t r = 0; r < block->rows; r++) STEP(narrow)(ds + r * AM_FLASH_TILE, 0, AM_FLASH_TILE);
    STEP(add_straight)(strips, count, block->rows, tile->live && !tile->k_finite ? tile->live : NULL, ds,
                       tile->k, block->d_q, block->step, block->head_dim, &queue);
#ifdef AMX_PRODUCTS
    amx_end();
#endif
}

static void STEP(find_row_max)(const am_backward_rows *block, const am_backward_tile *tile)
{
    FN(strip) strips[AM_FLASH_ROWS];
    ptrdiff_t count = FN(cut_strips)(strips, block->rows, HEIGHT, tile->live, AM_FLASH_TILE);
    T *logits = block->p;
    prefetch_queue none = {.left = 0};
    STEP(logits_of)(strips, count, block->q, block->step, block->head_dim, tile->k_columns, logits, &none);
#ifdef AMX_PRODUCTS
    amx_end();
#endif
    V zero = VOP(set1)(0), one = VOP(set1)(1), unit = VOP(set1)((T)block->unit), bend;
    for (ptrdiff_t r = 0; r < block->rows; r++, logits += AM_FLASH_TILE) {
        T *row_max = (T *)block->base + r, *sum = (T *)block->rest + r, *times = (T *)block->share + r;
        uint64_t live = tile->live ? tile->live[r] : UINT64_MAX;
        FN(logit_terms) d = FN(logit_terms_of)(block, tile, r);
        V most = VOP(set1)(-(T)INFINITY), total = zero, equal = zero;
        for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
            V s = FN(logit_of)(&d, VOP(load)(logits + i), i, &bend);
            VOP(store)(logits + i, s);
            most = VOP(max)(VOP(select)(live >> i, s, VOP(set1)(-(T)INFINITY)), most);
        }
        T highest = VOP(highest)(most);
        if (highest > *row_max) {
            *sum *= VOP(first)(FN(exp2)(VOP(mul)(VOP(set1)(*row_max - highest), unit)));
            *times = 0;
            *row_max = highest;
        }
        V base = VOP(set1)(*row_max > -(T)INFINITY ? *row_max : 0);
        for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
            V s = VOP(load)(logits + i), p = FN(exp2)(VOP(mul)(VOP(sub)(s, base), unit));
            total = VOP(add)(total, VOP(select)(live >> i, p, zero));
            equal = VOP(add)(equal, VOP(select)(live >> i, VOP(pick_less)(s, base, zero, one), zero));
        }
        T more = VOP(total)(total);
        *sum += more;
        *times += VOP(total)(equal);
        if (more != more) *row_max = more; /* a NaN stays */
    }
}

#undef STEP
#undef WIDTH
#undef HEIGHT
#undef AMX_PRODUCTS
