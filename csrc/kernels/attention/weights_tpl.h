/* weights_tpl.h – the weights of a block of rows over a tile of keys, from the logsumexp of each row, and
 * what is told of them:
 *
 *     P = e^(logit - lse),  of each row Σ P (lse - logit), and of each column Σ P
 */
#if !defined T || !defined EACH_ROWS
#    error "weights_tpl.h needs f32.h or f64.h (what it computes with), and backward_step_tpl.h"
#endif

/* Turns the products of a row into weights; `tells`: finds its greatest logit and its entropy, too. */
INLINE void FN(find_weights_of_row)(const am_backward_rows *block, const am_backward_tile *tile,
                                    const am_weighed *to, ptrdiff_t row, const bool tells)
{
    const FN(logit_terms) terms = FN(logit_terms_of)(block, tile, row);
    const uint64_t live = tile->terms.live ? tile->terms.live[row] : UINT64_MAX;
    const V zero = VOP(set1)(0), none = VOP(set1)(-(T)INFINITY), unit = VOP(set1)((T)block->unit),
            base = VOP(set1)(((const T *)block->base)[row]);
    T *p = (T *)block->p + row * AM_FLASH_TILE;
    V top = none, sum = zero, slope;
    for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
        const V s = FN(logit_of)(&terms, VOP(load)(p + i), i, &slope), above = VOP(sub)(s, base);
        const V weight = VOP(select)(live >> i, FN(exp2)(VOP(mul)(above, unit)), zero);
        VOP(store)(p + i, weight);
        if (!tells) continue;
        top = VOP(max)(VOP(select)(live >> i, s, none), top);
        sum = VOP(sub)(sum, VOP(pick_less)(zero, weight, VOP(mul)(weight, above), zero));
    }
    if (!tells) return;
    T *highest = (T *)to->highest + row;
    *highest = VOP(highest)(VOP(max)(top, VOP(set1)(*highest)));
    ((T *)to->entropy)[row] += VOP(total)(sum);
}

static void FN(sum_weights)(const void *weights, const uint64_t *live, uint64_t rows, ptrdiff_t begin,
                            ptrdiff_t end, void *sums)
{
    for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
        V sum = VOP(load)((T *)sums + i);
        for (ptrdiff_t r = begin; r < end; r++) {
            if (!(rows >> r & 1)) continue;
            V x = VOP(load)((const T *)weights + r * AM_FLASH_TILE + i);
            if (live) x = VOP(select)(live[r] >> i, x, VOP(set1)(0));
            sum = VOP(add)(sum, x);
        }
        VOP(store)((T *)sums + i, sum);
    }
}

static void FN(find_weights)(const am_backward_rows *block, const am_backward_tile *tile,
                             const am_weighed *to)
{
    FN(strip) strips[AM_FLASH_ROWS];
    const am_backward_operand *q = &block->q;
    const ptrdiff_t count = FN(cut_strips)(strips, block->rows, STRIP, tile->terms.live, AM_FLASH_TILE);
    const FN(backward_product) product = {.a = q->lanes,
                                          .b = tile->k_columns,
                                          .c = block->p,
                                          .rows = block->rows,
                                          .stride = q->stride,
                                          .columns = q->dim};
    prefetch_queue nothing = {.left = 0};
    FN(logits_of)(strips, count, &product, 1, &nothing);
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        if (!(to->rows >> r & 1)) continue;
        if (to->entropy)
            FN(find_weights_of_row)(block, tile, to, r, true);
        else
            FN(find_weights_of_row)(block, tile, to, r, false);
    }
}

/* Puts a number and its key, whose bits are those of `key`, where the numbers fall below it. */
INLINE void FN(insert)(T *to, T *keys, ptrdiff_t count, T number, T key)
{
    const V x = VOP(set1)(number), of_x = VOP(set1)(key);
    for (ptrdiff_t i = (count - 1) / LANES * LANES; i >= 0; i -= LANES) {
        const V here = VOP(load)(to + i), before = VOP(load)(to + i - 1), own = VOP(load)(keys + i),
                of_before = VOP(load)(keys + i - 1);
        VOP(store)(to + i, VOP(pick_less)(before, x, before, VOP(pick_less)(here, x, x, here)));
        VOP(store)(keys + i, VOP(pick_less)(before, x, of_before, VOP(pick_less)(here, x, of_x, own)));
    }
}

static void FN(rank_keys)(const void *weights, uint64_t live, int64_t first, void *greatest, void *keys,
                          ptrdiff_t count)
{
    const T *from = weights;
    T *to = greatest;
    for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
        if (!VOP(exceeds)(VOP(load)(from + i), VOP(set1)(to[count - 1]))) continue;
        for (ptrdiff_t k = i; k < i + LANES; k++) {
            if (!(live >> k & 1) || !(from[k] > to[count - 1])) continue;
            union {
                int32_t narrow;
                int64_t wide;
                T number;
            } key;
            if (IS_DOUBLE)
                key.wide = first + k;
            else
                key.narrow = (int32_t)(first + k);
            FN(insert)(to, keys, count, from[k], key.number);
        }
    }
}
