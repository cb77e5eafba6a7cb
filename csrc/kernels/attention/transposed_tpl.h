/* transposed_tpl.h – the transposed step of a block of rows over a full tile of unpacked keys:
 *
 *     Sᵀ = K Qᵀ         64 × rows, a few keys at a time; queries are packed, once per block
 *     Pᵀ = e^(Sᵀ - m)   lane by lane, which are rows here; m is the running max
 *     O = O + (Pᵀ)ᵀ V   one panel of columns after the other
 */
#if !defined T || !defined STEP || !defined WIDTH || !defined EXP2_TERMS
#    error "transposed_tpl.h needs what step_tpl.h does, which includes it"
#endif

/* Stores P of neighbouring keys where `add_product_transposed` reads it, and adds it to `total`. */
INLINE V STEP(store_p_transposed)(T *to, const V *p, const int count, V total)
{
    UNROLL(16)
    for (int j = 0; j < count; j += WIDTH) {
#if WIDTH > 1
        const V both = vf_join_bf16x2(p[j], p[j + 1]);
        VOP(store)(to + j / 2 * AM_FLASH_TILE, both);
        total = add_both_bf16x2(total, both);
#else
        VOP(store)(to + j * AM_FLASH_TILE, p[j]);
        total = VOP(add)(total, p[j]);
#endif
    }
    return total;
}

/* Turns products of up to LANES rows into P, as `softmax_plain` does. */
static void STEP(softmax_transposed)(const am_flash_rows *block, ptrdiff_t row, ptrdiff_t rows)
{
    T *logits = (T *)block->logits + row, *running_max = (T *)block->running_max + row,
      *sum = (T *)block->sum + row;
    T *row_max = block->row_max ? (T *)block->row_max + row : NULL,
      *exact_sum = WIDTH > 1 && block->exact_sum ? (T *)block->exact_sum + row : NULL;
    const V factor = VOP(set1)((T)block->factor);
    V most = VOP(set1)(-(T)INFINITY);
    for (ptrdiff_t k = 0; k < AM_FLASH_TILE; k++)
        most = VOP(max)(VOP(load)(logits + k * AM_FLASH_TILE), most);
    if (WIDTH > 1) most = VOP(mul)(factor, most);
    T lanes[LANES];
    VOP(store)(lanes, most);
    for (ptrdiff_t r = 0; r < rows; r++) {
        if (row_max && lanes[r] > row_max[r]) row_max[r] = lanes[r];
        if (lanes[r] - FLASH_SLACK > running_max[r]) STEP(rescale)(block, row + r, lanes[r]);
    }
    const V base = VOP(max)(VOP(load_part)(running_max, rows), VOP(set1)(-GREATEST)),
            minus_base = VOP(sub)(VOP(set1)(0), base);
    V total = VOP(set1)(0), exact_total = total;
    for (ptrdiff_t k = 0; k < AM_FLASH_TILE; k += FN(IN_FLIGHT)) {
        V p[FN(IN_FLIGHT)];
        UNROLL(16)
        for (int j = 0; j < FN(IN_FLIGHT); j++) {
            p[j] = VOP(load)(logits + (k + j) * AM_FLASH_TILE);
            p[j] = WIDTH > 1 ? VOP(fma)(factor, p[j], minus_base) : VOP(sub)(p[j], base);
        }
        FN(exp2_each)(p, FN(IN_FLIGHT), EXP2_TERMS, COUNT_OF(EXP2_TERMS));
        total = STEP(store_p_transposed)(logits + k / WIDTH * AM_FLASH_TILE, p, FN(IN_FLIGHT), total);
        if (exact_sum) exact_total = FN(add_weights)(exact_total, p, FN(IN_FLIGHT));
    }
    VOP(store)(lanes, total);
    for (ptrdiff_t r = 0; r < rows; r++) sum[r] += lanes[r];
    if (!exact_sum) return;
    VOP(store)(lanes, exact_total);
    for (ptrdiff_t r = 0; r < rows; r++) exact_sum[r] += lanes[r];
}

/* O + P V of a strip and one panel of columns, where values are packed, or unpacked and interleaved if a
 * lane holds two. Then the first strip stores them as it has interleaved them, and the others read that. */
static void STEP(add_values_transposed)(const am_flash_rows *block, const am_flash_tile *tile,
                                        const FN(strip) * s, ptrdiff_t column, T *interleaved)
{
    const ptrdiff_t columns = columns_at(block, column, FN(PANEL)), count = AM_FLASH_TILE / WIDTH;
    const T *p = (const T *)block->logits + s->row, *v = tile->v.data;
    T *c = (T *)block->out + s->row * block->out_dim + column;
    const bool packed = !am_has_value_rows(tile->layout);
    if (packed || (WIDTH > 1 && s->row > 0 && columns > LANES)) {
        const STEP(operands) x =
            STEP(by_rows)(count, p, packed ? v + column * count : interleaved, FN(PANEL), c, block->out_dim);
        STEP(add_product_transposed)(s->rows, columns, x, NULL, NULL);
        return;
    }
    const row_runs runs = runs_behind(&tile->v, 0, WIDTH, column * (ptrdiff_t)sizeof(T) / WIDTH);
#if WIDTH > 1
    const operands_interleaved x = by_rows_interleaved(count, p, (const uint16_t *)v + column,
                                                       TWO_ROWS(tile->v.stride), c, block->out_dim);
    add_product_transposed_interleaved(s->rows, columns, x, tile->v.run ? &runs : NULL,
                                       s->rows < block->rows ? interleaved : NULL);
#else
    const FN(operands) x =
        FN(by_rows)(count, p, v + column, tile->v.stride / (ptrdiff_t)sizeof(T), c, block->out_dim);
    FN(add_product_transposed)(s->rows, columns, x, tile->v.run ? &runs : NULL, NULL);
#endif
}

static void STEP(step_transposed)(const am_flash_rows *block, const am_flash_tile *tile)
{
    FN(strip) strips[AM_FLASH_ROWS];
    const ptrdiff_t count = FN(cut_strips)(strips, block->rows, STRIP, NULL, AM_FLASH_TILE),
                    panels = (block->rows + FN(PANEL) - 1) / FN(PANEL);
    prefetch_queue queue;
    prefetch_begin(&queue, tile->prefetch, panels * AM_FLASH_TILE / AM_TRANSPOSED_KEYS);
    T *logits = block->logits;
    STEP(operands)
    x = {.length = block->head_dim, .a_row = tile->k.stride / (ptrdiff_t)sizeof(T), .b = block->q_packed};
    for (ptrdiff_t row = 0; row < block->rows; row += FN(PANEL), x.b += FN(PANEL) * block->head_dim) {
        for (ptrdiff_t key = 0; key < AM_FLASH_TILE; key += AM_TRANSPOSED_KEYS) {
            prefetch_lines *lines = prefetch_pick(&queue, block->head_dim);
            x.a = row_at(&tile->k, key), x.c = logits + key * AM_FLASH_TILE + row;
            STEP(product_within)(AM_TRANSPOSED_KEYS, 0, block->rows - row, x, lines);
            prefetch_rest(&queue, lines, block->head_dim);
        }
    }
    for (ptrdiff_t row = 0; row < block->rows; row += LANES)
        STEP(softmax_transposed)(block, row, block->rows - row < LANES ? block->rows - row : LANES);
    _Alignas(CACHE_LINE) T interleaved[AM_FLASH_TILE / WIDTH * FN(PANEL)];
    for (ptrdiff_t column = 0; column < block->out_dim; column += FN(PANEL)) {
        for (const FN(strip) *s = strips; s < strips + count; s++)
            STEP(add_values_transposed)(block, tile, s, column, interleaved);
    }
}
