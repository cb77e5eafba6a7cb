/* transposed_tpl.h – the transposed step of a block of rows over a tile of unpacked keys:
 *
 *     Sᵀ = K Qᵀ         keys × rows, a few keys at a time; queries are packed, once per block
 *     Pᵀ = e^(Sᵀ - m)   lane by lane, which are rows here; m is the running max
 *     O = O + (Pᵀ)ᵀ V   one panel of columns after the other
 */
#if !defined T || !defined STEP || !defined WIDTH || !defined EXP2_TERMS
#    error "transposed_tpl.h needs what step_tpl.h does, which includes it"
#endif

/* Stores P of neighbouring keys where `add_product_transposed` reads it, and adds it to `total`, also what
 * dropout does not keep. `kept`: a word for each of these keys, or NULL. */
INLINE V STEP(store_p_transposed)(T *to, const V *p, const int count, const uint64_t *kept, ptrdiff_t row,
                                  V total)
{
    const V zero = VOP(set1)(0);
    UNROLL(16)
    for (int j = 0; j < count; j += WIDTH) {
        V some[WIDTH];
        UNROLL(2)
        for (int i = 0; i < WIDTH; i++)
            some[i] = kept ? VOP(select)(kept[j + i] >> row, p[j + i], zero) : p[j + i];
#if WIDTH > 1
        VOP(store)(to + j / 2 * AM_FLASH_TILE, vf_join_bf16x2(some[0], some[1]));
        total = add_both_bf16x2(total, vf_join_bf16x2(p[j], p[j + 1]));
#else
        VOP(store)(to + j * AM_FLASH_TILE, some[0]);
        total = VOP(add)(total, p[j]);
#endif
    }
    return total;
}

/* Turns products into logits where these are more than products times a factor. */
static void STEP(apply_terms_transposed)(const am_flash_rows *block, const am_logit_terms *of,
                                         const FN(strip) * s)
{
    const FN(soft_cap) cap = FN(soft_cap_of)(block->cap);
    const V factor = VOP(set1)((T)block->factor);
    const ptrdiff_t last = s->row + s->rows - 1;
    const T *bias = of->bias;
    V terms[LANES], bent;
    for (ptrdiff_t k = s->begin / LANES * LANES; k < s->end; k += LANES) {
        for (ptrdiff_t r = s->row; bias && r < s->row + LANES; r++)
            terms[r - s->row] = VOP(load)(bias + (r < last ? r : last) * of->bias_stride + k);
        if (bias) VOP(transpose)(terms);
        for (ptrdiff_t j = 0; j < LANES && k + j < s->end; j++) {
            T *to = (T *)block->logits + (k + j) * AM_FLASH_TILE + s->row;
            V x = VOP(mul)(factor, VOP(load)(to));
            if (bias) x = VOP(add)(x, terms[j]);
            VOP(store)(to, block->cap > 0 ? FN(apply_cap)(&cap, x, &bent) : x);
        }
    }
}

/* Turns products of a strip of up to LANES rows into P, as `softmax_plain` does. Live and kept pairs are a
 * word for each key. P is 0 from the strip's last key up to a multiple of FN(IN_FLIGHT). */
static void STEP(softmax_transposed)(const am_flash_rows *block, const am_logit_terms *of,
                                     const FN(strip) * s)
{
    const ptrdiff_t row = s->row, rows = s->rows, begin = s->begin / FN(IN_FLIGHT) * FN(IN_FLIGHT);
    const uint64_t *live = of->live, *kept = of->kept;
    const bool more = of->bias || block->cap > 0 || (WIDTH > 1 && block->factor <= 0);
    T *logits = (T *)block->logits + row, *running_max = (T *)block->running_max + row,
      *sum = (T *)block->sum + row;
    T *row_max = block->row_max ? (T *)block->row_max + row : NULL,
      *exact_sum = WIDTH > 1 && block->exact_sum ? (T *)block->exact_sum + row : NULL;
    const V factor = VOP(set1)(more ? 1 : (T)block->factor), unit = VOP(set1)((T)block->unit),
            none = VOP(set1)(-(T)INFINITY);
    V most = none;
    if (more) STEP(apply_terms_transposed)(block, of, s);
    for (ptrdiff_t k = begin; live && k < s->end; k++) {
        T *of_key = logits + k * AM_FLASH_TILE;
        VOP(store)(of_key, VOP(select)(live[k] >> row, VOP(load)(of_key), none));
    }
    for (ptrdiff_t k = begin; k < s->end; k++) most = VOP(max)(VOP(load)(logits + k * AM_FLASH_TILE), most);
    for (ptrdiff_t k = s->end; k % FN(IN_FLIGHT); k++) VOP(store)(logits + k * AM_FLASH_TILE, none);
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
    for (ptrdiff_t k = begin; k < s->end; k += FN(IN_FLIGHT)) {
        V p[FN(IN_FLIGHT)];
        UNROLL(16)
        for (int j = 0; j < FN(IN_FLIGHT); j++) {
            p[j] = VOP(load)(logits + (k + j) * AM_FLASH_TILE);
            p[j] = WIDTH > 1 ? VOP(fma)(factor, p[j], minus_base) : VOP(sub)(p[j], base);
            if (block->unit != 1) p[j] = VOP(mul)(p[j], unit);
        }
        FN(exp2_each)(p, FN(IN_FLIGHT), EXP2_TERMS, COUNT_OF(EXP2_TERMS));
        total = STEP(store_p_transposed)(logits + k / WIDTH * AM_FLASH_TILE, p, FN(IN_FLIGHT),
                                         kept ? kept + k : NULL, row, total);
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
    const ptrdiff_t columns = value_columns_at(block, column, FN(PANEL)), begin = s->begin / WIDTH,
                    count = (s->end + WIDTH - 1) / WIDTH - begin;
    const T *p = (const T *)block->logits + begin * AM_FLASH_TILE + s->row, *v = tile->v.data;
    T *c = (T *)block->out + s->row * block->out_dim + column;
    const bool packed = !am_has_value_rows(tile->layout);
    if (packed) v += column * (AM_FLASH_TILE / WIDTH);
    if (packed && tile->terms.live && !tile->finite) {
        STEP(operands)
        x = STEP(by_rows)(0, (const T *)block->logits + s->row, v, FN(PANEL), c, block->out_dim);
        x.a_row = 1, x.a_column = AM_FLASH_TILE;
        STEP(add_live_rows)(s->rows, columns, tile->terms.live + s->row, &x, 0);
        return;
    }
    if (packed || (WIDTH > 1 && s->row > 0 && columns > LANES)) {
        const STEP(operands) x = STEP(by_rows)(count, p, packed ? v + begin * FN(PANEL) : interleaved,
                                               FN(PANEL), c, block->out_dim);
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

/* A strip of other rows, with the keys that strips of these see. */
static FN(strip) STEP(strip_over)(const FN(strip) * strips, ptrdiff_t count, ptrdiff_t row, ptrdiff_t rows)
{
    FN(strip) over = {.row = row, .rows = rows, .begin = AM_FLASH_TILE, .end = 0};
    for (const FN(strip) *s = strips; s < strips + count; s++) {
        if (s->begin == s->end || s->row >= row + rows || s->row + s->rows <= row) continue;
        if (s->begin < over.begin) over.begin = s->begin;
        if (s->end > over.end) over.end = s->end;
    }
    return over;
}

static void STEP(step_transposed)(const am_flash_rows *block, const am_flash_tile *tile)
{
    /* Keys at a time; of those in runs as many as divide these. */
    const ptrdiff_t most = STRIP >= AM_TRANSPOSED_KEYS ? AM_TRANSPOSED_KEYS : tile->k.run ? 4 : STRIP;
    FN(strip) strips[AM_FLASH_ROWS];
    uint64_t live[64], kept[64];
    const uint64_t *of_rows = tile->terms.all_keys > 0 ? NULL : tile->terms.live;
    am_logit_terms terms = tile->terms; /* with words for each key */
    terms.live = words_of_keys(live, of_rows, block->rows);
    terms.kept = words_of_keys(kept, tile->terms.kept, block->rows);
    const ptrdiff_t count = FN(cut_strips)(strips, block->rows, STRIP, of_rows, tile->keys),
                    panels = (block->rows + FN(PANEL) - 1) / FN(PANEL);
    prefetch_queue queue;
    prefetch_begin(&queue, tile->prefetch, panels * ((tile->keys + most - 1) / most));
    T *logits = block->logits;
    STEP(operands)
    x = {.length = block->head_dim, .a_row = tile->k.stride / (ptrdiff_t)sizeof(T), .b = block->q_packed};
    for (ptrdiff_t row = 0; row < block->rows; row += FN(PANEL), x.b += FN(PANEL) * block->head_dim) {
        for (ptrdiff_t key = 0, some; key < tile->keys; key += some) {
            some = tile->keys - key;
            if (tile->k.run && some > most) some = most; /* so that no strip crosses the end of a run */
            some = strip_rows(some, STRIP);
            if (some > most) some = most;
            uint64_t seen = terms.live ? 0 : UINT64_MAX >> (64 - block->rows);
            for (ptrdiff_t k = key; terms.live && k < key + some; k++) seen |= terms.live[k];
            seen >>= row;
            if (!seen) continue;
            prefetch_lines *lines = prefetch_pick(&queue, block->head_dim);
            x.a = row_at(&tile->k, key), x.c = logits + key * AM_FLASH_TILE + row;
            if (STEP(product_within)(some, __builtin_ctzll(seen), 64 - __builtin_clzll(seen), x, lines))
                prefetch_rest(&queue, lines, block->head_dim);
        }
    }
    for (ptrdiff_t row = 0; row < block->rows; row += LANES) {
        const FN(strip) s =
            STEP(strip_over)(strips, count, row, block->rows - row < LANES ? block->rows - row : LANES);
        STEP(softmax_transposed)(block, &terms, &s);
    }
    _Alignas(CACHE_LINE) T interleaved[AM_FLASH_TILE / WIDTH * FN(PANEL)];
    for (ptrdiff_t column = 0; column < block->out_dim; column += FN(PANEL)) {
        for (const FN(strip) *s = strips; s < strips + count; s++)
            if (s->begin < s->end) STEP(add_values_transposed)(block, tile, s, column, interleaved);
    }
}
