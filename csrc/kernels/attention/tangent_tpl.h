/* tangent_tpl.h – the forward step of a block of rows over a tile of keys, with the tangent of its result:
 *
 *     S = Q Kᵀ,  T = Q̇ Kᵀ + Q K̇ᵀ     T is one product: of rows [q̇ q] and keys [k k̇]
 *     P = e^(S - m),  W = P T          row by row; the sum of W is a column of its own
 *     O = O + P V                      one panel of columns after the other
 *     A = A + W V + P V̇
 *
 * O, A and the sums of W lie side by side in a row, so that all are rescaled together.
 */
#if !defined T || !defined EACH_ROWS
#    error "tangent_tpl.h needs f32.h or f64.h (what it computes with), product_tpl.h and attention_tpl.h"
#endif

/* c = a bᵀ, for rows of a and some channels of packed keys. */
static void FN(multiply_keys)(const FN(strip) * strips, ptrdiff_t count, const T *a, ptrdiff_t a_stride,
                              const T *keys, ptrdiff_t key_dim, ptrdiff_t length, T *c)
{
    const ptrdiff_t rows = strips[count - 1].row + strips[count - 1].rows;
    FN(operands) x = {.length = length, .a_row = a_stride, .b = keys};
    if (length == 0) memset(c, 0, (size_t)(rows * AM_FLASH_TILE) * sizeof *c);
    for (ptrdiff_t column = 0; length > 0 && column < AM_FLASH_TILE;
         column += FN(PANEL), x.b += FN(PANEL) * key_dim) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            x.a = a + s->row * a_stride, x.c = c + s->row * AM_FLASH_TILE + column;
            FN(product_within)(s->rows, s->begin - column, s->end - column, x, NULL);
        }
    }
}

/* Adds the tangent of the bias to those of logits, and multiplies them by the slope of the cap. */
static void FN(end_tangents)(const am_flash_rows *block, const am_flash_tile *tile,
                             const am_flash_tangents *t, ptrdiff_t row)
{
    const FN(soft_cap) cap = FN(soft_cap_of)(block->cap);
    const T *logits = (const T *)block->logits + row * AM_FLASH_TILE,
            *bias = tile->terms.bias ? (const T *)tile->terms.bias + row * tile->terms.bias_stride : NULL,
            *d_bias = t->bias ? (const T *)t->bias + row * AM_FLASH_TILE : NULL;
    T *tangents = (T *)t->logits + row * AM_FLASH_TILE;
    const V one = VOP(set1)(1);
    for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
        V x = VOP(load)(tangents + i), s = VOP(load)(logits + i), bent;
        if (d_bias) x = VOP(add)(x, VOP(load)(d_bias + i));
        if (block->cap > 0) {
            if (bias) s = VOP(add)(s, VOP(load)(bias + i));
            FN(apply_cap)(&cap, s, &bent);
            x = VOP(mul)(x, VOP(mul)(VOP(sub)(one, bent), VOP(add)(one, bent)));
        }
        VOP(store)(tangents + i, x);
    }
}

/* Turns the tangents of a row's logits into W, adds these to their sums, and drops from P and W what dropout
 * does not keep. Dead ones become 0. */
static void FN(weigh)(const am_flash_rows *block, const am_flash_tile *tile, const am_flash_tangents *t,
                      ptrdiff_t row, ptrdiff_t begin, ptrdiff_t end)
{
    const uint64_t live = tile->terms.live ? tile->terms.live[row] : UINT64_MAX,
                   kept = tile->terms.kept ? tile->terms.kept[row] : UINT64_MAX;
    T *p = (T *)block->logits + row * AM_FLASH_TILE, *w = (T *)t->logits + row * AM_FLASH_TILE,
      *sums = (T *)block->out + row * block->out_dim + 2 * t->columns;
    const V zero = VOP(set1)(0);
    V sum = VOP(load)(sums);
    for (ptrdiff_t i = begin; i < end; i += LANES) {
        const V x = VOP(load)(p + i), product = VOP(select)(live >> i, VOP(mul)(x, VOP(load)(w + i)), zero);
        sum = VOP(add)(sum, product);
        VOP(store)(w + i, tile->terms.kept ? VOP(select)(kept >> i, product, zero) : product);
        if (tile->terms.kept) VOP(store)(p + i, VOP(select)(kept >> i, x, zero));
    }
    VOP(store)(sums, sum);
}

/* Adds weights times values to columns from `first` on. */
static void FN(add_weighted)(const FN(strip) * strips, ptrdiff_t count, const am_flash_rows *block,
                             const T *weights, const T *values, const uint64_t *live, ptrdiff_t first,
                             ptrdiff_t columns)
{
    FN(operands) x = FN(by_rows)(0, weights, values, FN(PANEL), (T *)block->out + first, block->out_dim);
    if (live) {
        FN(add_live_rows)(block->rows, columns, live, &x, AM_FLASH_TILE * FN(PANEL));
        return;
    }
    for (ptrdiff_t column = 0; column < columns; column += FN(PANEL)) {
        const ptrdiff_t some = columns - column < FN(PANEL) ? columns - column : FN(PANEL);
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (s->begin == s->end) continue;
            x.length = s->end - s->begin, x.a = weights + s->row * AM_FLASH_TILE + s->begin;
            x.b = values + column * AM_FLASH_TILE + s->begin * FN(PANEL);
            x.c = (T *)block->out + s->row * block->out_dim + first + column;
            FN(add_product)(s->rows, some, x, NULL, NULL);
        }
    }
}

static void FN(tangent_step)(const am_flash_rows *block, const am_flash_tile *tile,
                             const am_flash_tangents *t)
{
    FN(strip) strips[AM_FLASH_ROWS];
    const ptrdiff_t count = FN(cut_strips)(strips, block->rows, STRIP, tile->terms.live, AM_FLASH_TILE);
    const T *keys = tile->k.data, *p = block->logits, *w = t->logits;
    FN(multiply_keys)(strips, count, block->q, block->q_stride, keys, t->key_dim, block->head_dim,
                      block->logits);
    FN(multiply_keys)(strips, count, t->q, block->q_stride, keys + t->first * FN(PANEL), t->key_dim,
                      t->length, t->logits);
    for (ptrdiff_t r = 0; (t->bias || block->cap > 0) && r < block->rows; r++)
        FN(end_tangents)(block, tile, t, r);
    am_flash_tile undropped = *tile;
    undropped.terms.kept = NULL;
    FN(softmax_step)(block, &undropped, strips, count);
    for (const FN(strip) *s = strips; s < strips + count; s++) {
        const ptrdiff_t begin = s->begin / LANES * LANES, end = (s->end + LANES - 1) / LANES * LANES;
        for (ptrdiff_t r = s->row; r < s->row + s->rows; r++) FN(weigh)(block, tile, t, r, begin, end);
    }
    const uint64_t *live = tile->terms.live;
    FN(add_weighted)(strips, count, block, p, tile->v.data, tile->finite ? NULL : live, 0, t->columns);
    if (t->length > 0 || t->bias)
        FN(add_weighted)(strips, count, block, w, tile->v.data, tile->finite ? NULL : live, t->columns,
                         t->columns);
    if (t->v)
        FN(add_weighted)(strips, count, block, p, t->v, t->v_finite ? NULL : live, t->columns, t->columns);
}
