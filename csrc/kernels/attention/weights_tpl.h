/* weights_tpl.h – the weights of a block of rows over a tile of keys, from the logsumexp of each row, and
 * what is told of them:
 *
 *     P = e^(logit - lse),  of each row Σ P (lse - logit), and of each column Σ P
 */
#if !defined T || !defined EACH_ROWS
#    error "weights_tpl.h needs f32.h or f64.h (what it computes with), and backward_step_tpl.h"
#endif

/* Turns the products of a row into weights; `tells`: finds its greatest logit and its entropy, too. `plain`:
 * all are live, and logits are products times the scale. */
INLINE void FN(find_weights_of_row)(const am_backward_rows *block, const am_backward_tile *tile,
                                    const am_weighed *to, ptrdiff_t row, const bool tells, const bool plain)
{
    const FN(logit_terms) terms = FN(logit_terms_of)(block, tile, row);
    const uint64_t live = tile->terms.live ? tile->terms.live[row] : UINT64_MAX;
    const V zero = VOP(set1)(0), none = VOP(set1)(-(T)INFINITY), unit = VOP(set1)((T)block->unit),
            base = VOP(set1)(((const T *)block->base)[row]);
    T *p = (T *)block->p + row * AM_FLASH_TILE;
    V top = none, sum = zero, slope;
    for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += FN(IN_FLIGHT) * LANES) {
        V s[FN(IN_FLIGHT)], above[FN(IN_FLIGHT)], weight[FN(IN_FLIGHT)];
        UNROLL(4)
        for (int j = 0; j < FN(IN_FLIGHT); j++) {
            const ptrdiff_t at = i + j * LANES;
            const V product = VOP(load)(p + at);
            s[j] = plain ? VOP(mul)(product, terms.scale) : FN(logit_of)(&terms, product, at, &slope);
            above[j] = VOP(sub)(s[j], base);
            weight[j] = VOP(mul)(above[j], unit);
        }
        FN(exp2_each)(weight, FN(IN_FLIGHT), FN(exp2_terms), COUNT_OF(FN(exp2_terms)));
        UNROLL(4)
        for (int j = 0; j < FN(IN_FLIGHT); j++) {
            const ptrdiff_t at = i + j * LANES;
            if (!plain) weight[j] = VOP(select)(live >> at, weight[j], zero);
            VOP(store)(p + at, weight[j]);
            if (!tells) continue;
            top = VOP(max)(plain ? s[j] : VOP(select)(live >> at, s[j], none), top);
            sum = VOP(sub)(sum, VOP(pick_less)(zero, weight[j], VOP(mul)(weight[j], above[j]), zero));
        }
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
    prefetch_queue queue;
    prefetch_begin(&queue, tile->prefetch, count * (AM_FLASH_TILE / FN(PANEL)));
    FN(logits_of)(strips, count, &product, 1, &queue);
    const bool plain = !tile->terms.live && !tile->terms.bias && block->cap <= 0;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        if (!(to->rows >> r & 1)) continue;
        if (to->entropy && plain)
            FN(find_weights_of_row)(block, tile, to, r, true, true);
        else if (to->entropy)
            FN(find_weights_of_row)(block, tile, to, r, true, false);
        else if (plain)
            FN(find_weights_of_row)(block, tile, to, r, false, true);
        else
            FN(find_weights_of_row)(block, tile, to, r, false, false);
    }
}

/* Vectors of the greatest weights, which fall from lane to lane and from vector to vector, and their keys. */
enum { FN(RANKED) = 4 };
typedef struct {
    V weights[FN(RANKED)], keys[FN(RANKED)];
} FN(ranks);

/* Puts a weight and its key before the first lesser one. `below`: the vectors before these. */
INLINE void FN(insert)(FN(ranks) * to, const int vectors, V weight, V key, V below, V keys_below)
{
    UNROLL(4)
    for (int j = vectors - 1; j >= 0; j--) {
        const V here = to->weights[j], before = VOP(move_up)(here, j > 0 ? to->weights[j - 1] : below),
                own = to->keys[j], of_before = VOP(move_up)(own, j > 0 ? to->keys[j - 1] : keys_below);
        to->weights[j] = VOP(pick_less)(before, weight, before, VOP(pick_less)(here, weight, weight, here));
        to->keys[j] = VOP(pick_less)(before, weight, of_before, VOP(pick_less)(here, weight, key, own));
    }
}

INLINE FN(ranks) FN(load_ranks)(const T *weights, const T *keys, const int vectors)
{
    FN(ranks) at = {0};
    UNROLL(4)
    for (int j = 0; j < vectors; j++)
        at.weights[j] = VOP(load)(weights + j * LANES), at.keys[j] = VOP(load)(keys + j * LANES);
    return at;
}
INLINE void FN(store_ranks)(T *weights, T *keys, const FN(ranks) * at, const int vectors)
{
    UNROLL(4)
    for (int j = 0; j < vectors; j++)
        VOP(store)(weights + j * LANES, at->weights[j]), VOP(store)(keys + j * LANES, at->keys[j]);
}

/* The bits of a key, in a number. */
INLINE T FN(number_of_key)(int64_t key)
{
    union {
        int32_t narrow;
        int64_t wide;
        T number;
    } bits;
    if (IS_DOUBLE)
        bits.wide = key;
    else
        bits.narrow = (int32_t)key;
    return bits.number;
}

/* Ranks those of a vector of keys that have a bit in `greater`. So many vectors of ranks stay in registers;
 * of more, each key goes through all. */
INLINE void FN(rank_some)(const T *from, uint64_t greater, int64_t first, T *to, T *keys, ptrdiff_t count,
                          const int vectors)
{
    const V most = VOP(set1)((T)INFINITY);
    FN(ranks) at = FN(load_ranks)(to, keys, vectors);
    for (; greater; greater &= greater - 1) {
        const int k = __builtin_ctzll(greater);
        const V weight = VOP(set1)(from[k]), key = VOP(set1)(FN(number_of_key)(first + k));
        for (ptrdiff_t i = (count - 1) / LANES * LANES; i >= vectors * LANES; i -= LANES) {
            FN(ranks) one = FN(load_ranks)(to + i, keys + i, 1);
            FN(insert)(&one, 1, weight, key, VOP(load)(to + i - LANES), VOP(load)(keys + i - LANES));
            FN(store_ranks)(to + i, keys + i, &one, 1);
        }
        FN(insert)(&at, vectors, weight, key, most, key);
        if (count > vectors * LANES) FN(store_ranks)(to, keys, &at, vectors);
    }
    FN(store_ranks)(to, keys, &at, vectors);
}

static void FN(rank_keys)(const void *weights, uint64_t live, int64_t first, void *greatest, void *keys,
                          ptrdiff_t count)
{
    const T *from = weights, *least = (const T *)greatest + count - 1;
    for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES, live >>= LANES) {
        const uint64_t greater = live & VOP(exceeding)(VOP(load)(from + i), VOP(set1)(*least));
        if (!greater) continue;
        if (count <= LANES)
            FN(rank_some)(from + i, greater, first + i, greatest, keys, count, 1);
        else if (count <= 2 * LANES)
            FN(rank_some)(from + i, greater, first + i, greatest, keys, count, 2);
        else if (count <= 3 * LANES)
            FN(rank_some)(from + i, greater, first + i, greatest, keys, count, 3);
        else
            FN(rank_some)(from + i, greater, first + i, greatest, keys, count, FN(RANKED));
    }
}
