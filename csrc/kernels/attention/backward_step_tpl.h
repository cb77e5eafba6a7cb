/* backward_step_tpl.h – the backward step of a block of rows over a tile of keys:
 *
 *     S = Q Kᵀ,  dP = dO Vᵀ       like the logits of the forward step
 *     P, dS                       row by row
 *     dV = dV + Pᵀ dO             one panel of columns after the other, like the next two
 *     dK = dK + dSᵀ Q
 *     dQ = dQ + dS K
 *
 * With AMX_PRODUCTS, by products of amx.h; dV and dK are transposed.
 */
#if !defined T || !defined STEP || !defined WIDTH || !defined HEIGHT
#    error "backward_step_tpl.h needs f32.h or f64.h, STEP(name), HEIGHT (rows of a product) and"
#    error "WIDTH (numbers in a lane of the factors, which are neighbours in the sum that is taken)"
#endif

/* From row to row of P and dS as p_and_ds makes them. */
#define JOINED_STRIDE (WIDTH * AM_FLASH_TILE)

/* What products have of an operand of so many rows. */
#define OF(operand) .rows = rows, .stride = (operand)->stride, .columns = (operand)->dim

#if WIDTH == 1
/* Turns products of one row into P and dS; columns begin … end - 1, whole vectors. All others up to `columns`
 * are dead: 0. */
INLINE void STEP(p_and_ds_of)(const am_backward_rows *block, const am_backward_tile *tile, ptrdiff_t row,
                              ptrdiff_t begin, ptrdiff_t end, ptrdiff_t columns)
{
    T *p_row = (T *)block->p + row * AM_FLASH_TILE, *ds_row = (T *)block->ds + row * AM_FLASH_TILE;
    const FN(gradient_terms) of = FN(gradient_terms_of)(block, tile, row);
    for (ptrdiff_t i = 0; i < columns; i += LANES) {
        V p = VOP(load)(p_row + i), ds = VOP(load)(ds_row + i);
        FN(p_and_ds_at)(&of, i, i >= begin && i < end, &p, &ds);
        VOP(store)(p_row + i, p);
        VOP(store)(ds_row + i, ds);
    }
}
#else
/* Turns products of two rows into P and dS as products take them: to the first row of `p` go both rows of P,
 * joined, to the second both of dS; and to `ds` the rows of dS, narrowed. Each number is written as it is
 * made, so that none is loaded again to be rounded. */
INLINE void STEP(p_and_ds_of)(const am_backward_rows *block, const am_backward_tile *tile, ptrdiff_t row,
                              ptrdiff_t begin, ptrdiff_t end, ptrdiff_t columns)
{
    T *p_rows = (T *)block->p + row * AM_FLASH_TILE, *ds_rows = (T *)block->ds + row * AM_FLASH_TILE;
    const bool both = row + 1 < block->rows;
    const FN(gradient_terms) of = FN(gradient_terms_of)(block, tile, row),
                             below = FN(gradient_terms_of)(block, tile, row + both);
    for (ptrdiff_t i = 0; i < columns; i += 2 * LANES) {
        const bool live = i >= begin && i < end;
        V ds[2][2];
        UNROLL(2)
        for (int j = 0; j < 2; j++) {
            T *p_at = p_rows + i + j * LANES;
            const T *ds_at = ds_rows + i + j * LANES;
            V p[2] = {VOP(load)(p_at), VOP(set1)(0)};
            ds[0][j] = VOP(load)(ds_at), ds[1][j] = VOP(set1)(0);
            FN(p_and_ds_at)(&of, i + j * LANES, live, &p[0], &ds[0][j]);
            if (both) {
                p[1] = VOP(load)(p_at + AM_FLASH_TILE), ds[1][j] = VOP(load)(ds_at + AM_FLASH_TILE);
                FN(p_and_ds_at)(&below, i + j * LANES, live, &p[1], &ds[1][j]);
            }
            VOP(store)(p_at, vf_join_bf16x2(p[0], p[1]));
            VOP(store)(p_at + AM_FLASH_TILE, vf_join_bf16x2(ds[0][j], ds[1][j]));
        }
        VOP(store)(ds_rows + i / 2, vf_narrow_bf16x2(ds[0][0], ds[0][1]));
        if (both) VOP(store)(ds_rows + AM_FLASH_TILE + i / 2, vf_narrow_bf16x2(ds[1][0], ds[1][1]));
    }
}
#endif

/* Turns products into P and dS from the first live column to the last; compiled once more for tiles whose
 * logits are products, or products and a bias: with fewer branches, more vectors are in flight. */
static void STEP(p_and_ds)(const am_backward_rows *block, const am_backward_tile *tile, ptrdiff_t row,
                           ptrdiff_t columns)
{
    if (tile->terms.live || tile->terms.kept || block->share || block->cap > 0) {
        uint64_t any = tile->terms.live ? 0 : UINT64_MAX;
        for (ptrdiff_t r = row; tile->terms.live && r < row + WIDTH && r < block->rows; r++)
            any |= tile->terms.live[r];
        const ptrdiff_t begin = any ? __builtin_ctzll(any) : 0, end = any ? 64 - __builtin_clzll(any) : 0,
                        each = WIDTH * LANES;
        const ptrdiff_t from = begin / each * each, to = (end + each - 1) / each * each;
        if (columns == AM_FLASH_TILE) /* a constant, so that the compiler unrolls the loop */
            STEP(p_and_ds_of)(block, tile, row, from, to, AM_FLASH_TILE);
        else
            STEP(p_and_ds_of)(block, tile, row, from, to, columns);
        return;
    }
    am_backward_tile few = {0};
    am_backward_rows plain = *block;
    plain.share = NULL, plain.cap = 0;
    if (tile->terms.bias || tile->d_bias) {
        few.terms.bias = tile->terms.bias, few.terms.bias_stride = tile->terms.bias_stride;
        few.d_bias = tile->d_bias, few.d_bias_stride = tile->d_bias_stride;
        STEP(p_and_ds_of)(&plain, &few, row, 0, AM_FLASH_TILE, AM_FLASH_TILE);
    } else
        STEP(p_and_ds_of)(&plain, &few, row, 0, AM_FLASH_TILE, AM_FLASH_TILE);
}

#ifndef AMX_PRODUCTS
/* c = a bᵀ of some products, where b is packed like keys. */
static void STEP(logits_of)(const FN(strip) * strips, ptrdiff_t count, const FN(backward_product) * products,
                            int how_many, prefetch_queue *queue)
{
    for (const FN(backward_product) *p = products; p < products + how_many; p++) {
        const ptrdiff_t lanes = (p->columns + WIDTH - 1) / WIDTH, a_stride = WIDTH == 1 ? p->stride : lanes;
        if (lanes == 0) {
            memset(p->c, 0, (size_t)(p->rows * AM_FLASH_TILE) * sizeof *p->c);
            continue;
        }
        STEP(operands) x = {.length = lanes, .a_row = a_stride, .b = p->b};
        for (ptrdiff_t column = 0; column < AM_FLASH_TILE; column += FN(PANEL), x.b += FN(PANEL) * lanes) {
            for (const FN(strip) *s = strips; s < strips + count; s++) {
                prefetch_lines *lines = prefetch_pick(queue, lanes);
                x.a = p->a + s->row * a_stride, x.c = p->c + s->row * AM_FLASH_TILE + column;
                if (STEP(product_within)(s->rows, s->begin - column, s->end - column, x, lines))
                    prefetch_rest(queue, lines, lanes);
            }
        }
    }
}

/* A strip of a sum without live pairs: 0 is added, too, as that is the sum of -0 and 0. */
static void STEP(pass_strip)(const FN(strip) * s, const FN(backward_product) * p)
{
    FN(clear_fresh)(p, s->row, s->rows);
    FN(add_onto)(p, s->row, s->rows);
}

/* sum += aᵀ b, where strips are of columns of a, which is as p_and_ds makes it. */
static void STEP(add_transposed)(const FN(strip) * strips, ptrdiff_t count, const FN(backward_product) * p,
                                 prefetch_queue *queue)
{
    (void)queue;
    const T *a = p->a, *b = p->b;
    const ptrdiff_t stride = p->stride, b_row = WIDTH == 1 ? stride : FN(PANEL),
                    b_panel = WIDTH == 1 ? FN(PANEL) : AM_FLASH_ROWS / WIDTH * FN(PANEL);
    STEP(operands) x = {.a = a, .a_row = 1, .a_column = JOINED_STRIDE, .b = b, .b_row = b_row};
    x.c = p->sum.sum, x.c_row = stride;
    if (p->live) {
        const ptrdiff_t columns = strips[count - 1].row + strips[count - 1].rows;
        FN(clear_fresh)(p, 0, columns);
        STEP(add_live_rows)(columns, p->columns, p->live, &x, b_panel);
        FN(add_onto)(p, 0, columns);
        return;
    }
    for (const FN(strip) *s = strips; s < strips + count; s++)
        if (s->begin == s->end) STEP(pass_strip)(s, p);
    for (ptrdiff_t column = 0; column < p->columns; column += FN(PANEL), b += b_panel) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (s->begin == s->end) continue;
            const am_backward_sum at = FN(sum_at)(p, s->row, column);
            ptrdiff_t begin = s->begin / WIDTH, end = (s->end + WIDTH - 1) / WIDTH;
            x.length = end - begin, x.a = a + begin * JOINED_STRIDE + s->row, x.b = b + begin * b_row;
            x.c = at.sum;
            STEP(sum_transposed)(s->rows, p->columns - column, x, &at);
        }
    }
}

/* How many products prefetch. */
static ptrdiff_t STEP(prefetching_products)(const am_backward_rows *block, ptrdiff_t strips,
                                            ptrdiff_t columns)
{
    (void)block;
    return 2 * strips * ((columns + FN(PANEL) - 1) / FN(PANEL));
}

/* sum += a b, as `add_transposed`. */
static void STEP(add_straight)(const FN(strip) * strips, ptrdiff_t count, const FN(backward_product) * p,
                               prefetch_queue *queue)
{
    (void)queue;
    const T *b = p->b;
    const ptrdiff_t stride = p->stride, b_panel = FN(PANEL) * AM_FLASH_TILE / WIDTH;
    STEP(operands) x = STEP(by_rows)(0, p->a, b, FN(PANEL), p->sum.sum, stride);
    if (p->live) {
        FN(clear_fresh)(p, 0, p->rows);
        STEP(add_live_rows)(p->rows, p->columns, p->live, &x, b_panel);
        FN(add_onto)(p, 0, p->rows);
        return;
    }
    for (const FN(strip) *s = strips; s < strips + count; s++)
        if (s->begin == s->end) STEP(pass_strip)(s, p);
    for (ptrdiff_t column = 0; column < p->columns; column += FN(PANEL), b += b_panel) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (s->begin == s->end) continue;
            const am_backward_sum at = FN(sum_at)(p, s->row, column);
            ptrdiff_t begin = s->begin / WIDTH, end = (s->end + WIDTH - 1) / WIDTH;
            x.length = end - begin, x.a = p->a + s->row * AM_FLASH_TILE + begin, x.b = b + begin * FN(PANEL);
            x.c = at.sum;
            STEP(sum_straight)(s->rows, p->columns - column, x, &at);
        }
    }
}
#endif

static void STEP(backward)(const am_backward_rows *block, const am_backward_tile *tile)
{
    FN(strip) strips[AM_FLASH_ROWS];
    const am_backward_operand *q = &block->q, *d_out = &block->d_out;
    const ptrdiff_t rows = block->rows;
    ptrdiff_t count = FN(cut_strips)(strips, rows, HEIGHT, tile->terms.live, AM_FLASH_TILE);
    T *p = block->p, *ds = block->ds;
    prefetch_queue queue;
    prefetch_begin(&queue, tile->prefetch, STEP(prefetching_products)(block, count, tile->columns));
    const FN(backward_product) logits[] = {
        {.a = q->lanes, .b = tile->k_columns, .c = p, OF(q)},
        {.a = d_out->lanes, .b = tile->v_columns, .c = ds, OF(d_out)},
    };
    STEP(logits_of)(strips, count, logits, 2, &queue);
#ifdef AMX_PRODUCTS
    const ptrdiff_t made = AM_FLASH_TILE; /* columns of P and dS: products read whole tiles */
#else
    const ptrdiff_t each = WIDTH * LANES, some = (tile->columns + each - 1) / each * each,
                    made = tile->d_bias ? AM_FLASH_TILE : some;
#endif
    for (ptrdiff_t r = 0; r < rows; r += WIDTH) STEP(p_and_ds)(block, tile, r, made);

    uint64_t of_keys[64];
    const uint64_t *live = words_of_keys(of_keys, tile->terms.live, rows);
    FN(strip) transposed_strips[AM_FLASH_TILE];
#ifdef AMX_PRODUCTS
    const ptrdiff_t columns = (tile->columns + HEIGHT - 1) / HEIGHT * HEIGHT; /* strips are whole panels */
#else
    const ptrdiff_t columns = tile->columns;
#endif
    ptrdiff_t transposed_count = FN(cut_strips)(transposed_strips, columns, HEIGHT, live, rows);
    const T *joined_ds = WIDTH == 1 ? ds : p + AM_FLASH_TILE;
    const FN(backward_product)
        dv = {.a = p, .b = d_out->packed, .sum = tile->d_v, .live = d_out->finite ? NULL : live, OF(d_out)},
        dk = {.a = joined_ds, .b = q->packed, .sum = tile->d_k, .live = q->finite ? NULL : live, OF(q)},
        dq = {.a = ds,
              .b = tile->k,
              .sum = block->d_q,
              .live = tile->k_finite ? NULL : tile->terms.live,
              OF(q)};
    STEP(add_transposed)(transposed_strips, transposed_count, &dv, &queue);
    STEP(add_transposed)(transposed_strips, transposed_count, &dk, &queue);
    STEP(add_straight)(strips, count, &dq, &queue);
}

static void STEP(find_row_max)(const am_backward_rows *block, const am_backward_tile *tile)
{
    FN(strip) strips[AM_FLASH_ROWS];
    ptrdiff_t count = FN(cut_strips)(strips, block->rows, HEIGHT, tile->terms.live, AM_FLASH_TILE);
    T *logits = block->p;
    const ptrdiff_t rows = block->rows;
    const am_backward_operand *q = &block->q;
    prefetch_queue none = {.left = 0};
    const FN(backward_product) product = {.a = q->lanes, .b = tile->k_columns, .c = logits, OF(q)};
    STEP(logits_of)(strips, count, &product, 1, &none);
    V zero = VOP(set1)(0), one = VOP(set1)(1), unit = VOP(set1)((T)block->unit), bend;
    for (ptrdiff_t r = 0; r < block->rows; r++, logits += AM_FLASH_TILE) {
        T *row_max = (T *)block->base + r, *sum = (T *)block->rest + r, *times = (T *)block->share + r;
        uint64_t live = tile->terms.live ? tile->terms.live[r] : UINT64_MAX;
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
#undef JOINED_STRIDE
#undef OF
#undef WIDTH
#undef HEIGHT
#undef AMX_PRODUCTS
