/* backward_tangents_tpl.h – the backward step with the tangents of its gradients:
 *
 *     S = Q Kᵀ,  dP = dO Vᵀ,  Q̇ Kᵀ,  Q K̇ᵀ,  dO V̇ᵀ      as products of the backward step
 *     dS, Ṗ, dṠ                                            row by row
 *     dV = dV + Ṗᵀ dO
 *     dK = dK + dṠᵀ Q + dSᵀ Q̇
 *     dQ = dQ + dṠ K + dS K̇
 *
 * Products of what is not given are left out.
 */
#if !defined T || !defined EACH_ROWS
#    error "backward_tangents_tpl.h needs f32.h or f64.h (what it computes with), and backward_step_tpl.h"
#endif

/* Of a row, beside what P and dS follow from. */
typedef struct {
    FN(gradient_terms) gradient;
    T *p, *ds;            /* S and dP, which become Ṗ and dṠ */
    T *by_q;              /* Q̇ Kᵀ, which becomes dS */
    const T *by_k, *by_v; /* Q K̇ᵀ and dO V̇ᵀ */
    bool has_q;
    V lse, moved, bend;
} FN(tangent_terms);

static inline FN(tangent_terms)
    FN(tangent_terms_of)(const am_backward_rows *block, const am_backward_tile *tile,
                         const am_backward_tangents *t, ptrdiff_t row)
{
    const ptrdiff_t at = row * AM_FLASH_TILE;
    return (FN(tangent_terms)){
        .gradient = FN(gradient_terms_of)(block, tile, row),
        .p = (T *)block->p + at,
        .ds = (T *)block->ds + at,
        .by_q = (T *)t->by_q + at,
        .by_k = t->k_columns ? (const T *)t->by_k + at : NULL,
        .by_v = t->v_columns ? (const T *)t->by_v + at : NULL,
        .has_q = t->q.lanes != NULL,
        .lse = VOP(set1)(((const T *)t->lse)[row]),
        .moved = VOP(set1)(((const T *)t->moved)[row]),
        .bend = VOP(set1)(block->cap > 0 ? (T)(-2 / block->cap) : 0),
    };
}

/* Turns products of a row, from column i on, into dS, Ṗ and dṠ. Dead ones become 0. */
INLINE void FN(tangents_at)(const FN(tangent_terms) * x, ptrdiff_t i)
{
    const FN(gradient_terms) *of = &x->gradient;
    const am_backward_tile *tile = of->tile;
    const ptrdiff_t row = of->row;
    const V zero = VOP(set1)(0);
    V slope = zero, d_p = VOP(load)(x->ds + i), d_p_tangent = x->by_v ? VOP(load)(x->by_v + i) : zero,
      logit_tangent = x->has_q ? VOP(load)(x->by_q + i) : zero;
    const V s = FN(logit_of)(&of->logits, VOP(load)(x->p + i), i, &slope);
    V p = FN(exp2)(VOP(fma)(VOP(sub)(s, of->base), of->unit, of->rest));
    if (x->by_k) logit_tangent = VOP(add)(logit_tangent, VOP(load)(x->by_k + i));
    logit_tangent = VOP(mul)(logit_tangent, of->scale);
    if (of->logits.capped) logit_tangent = VOP(mul)(logit_tangent, slope);
    if (tile->terms.live) p = VOP(select)(tile->terms.live[row] >> i, p, zero);
    V p_tangent = VOP(mul)(p, VOP(sub)(logit_tangent, x->lse)), kept = p_tangent;
    if (tile->terms.kept) {
        const uint64_t bits = tile->terms.kept[row] >> i;
        d_p = VOP(select)(bits, VOP(mul)(d_p, of->kept_factor), zero);
        d_p_tangent = VOP(select)(bits, VOP(mul)(d_p_tangent, of->kept_factor), zero);
        kept = VOP(select)(bits, VOP(mul)(p_tangent, of->kept_factor), zero);
    }
    const V shifted = VOP(add)(d_p, of->add);
    V ds = VOP(mul)(p, shifted),
      tangent = VOP(fma)(p_tangent, shifted, VOP(mul)(p, VOP(sub)(d_p_tangent, x->moved)));
    if (of->logits.capped) {
        const V bent = VOP(mul)(VOP(mul)(s, of->logits.cap.inverse), x->bend);
        tangent = VOP(fma)(tangent, slope, VOP(mul)(VOP(mul)(ds, bent), logit_tangent));
        ds = VOP(mul)(ds, slope);
    }
    if (tile->terms.live) { /* 0 times what is not a number of the dead */
        const uint64_t bits = tile->terms.live[row] >> i;
        kept = VOP(select)(bits, kept, zero);
        ds = VOP(select)(bits, ds, zero), tangent = VOP(select)(bits, tangent, zero);
    }
    VOP(store)(x->p + i, kept);
    VOP(store)(x->by_q + i, VOP(mul)(ds, of->scale));
    VOP(store)(x->ds + i, VOP(mul)(tangent, of->scale));
}

/* Those of a row, up to `columns`. */
static void FN(tangents_of_row)(const am_backward_rows *block, const am_backward_tile *tile,
                                const am_backward_tangents *t, ptrdiff_t row, ptrdiff_t columns)
{
    const FN(tangent_terms) x = FN(tangent_terms_of)(block, tile, t, row);
    for (ptrdiff_t i = 0; i < columns; i += LANES) FN(tangents_at)(&x, i);
}

/* The first and the second of two products that go to one sum. */
static inline am_backward_sum FN(first_of)(am_backward_sum sum)
{
    sum.onto = NULL;
    return sum;
}
static inline am_backward_sum FN(second_of)(am_backward_sum sum)
{
    sum.fresh = false;
    return sum;
}

static void FN(backward_tangents)(const am_backward_rows *block, const am_backward_tile *tile,
                                  const am_backward_tangents *t)
{
    FN(strip) strips[AM_FLASH_ROWS], transposed_strips[AM_FLASH_TILE];
    const am_backward_operand *q = &block->q, *d_out = &block->d_out;
    const bool has_q = t->q.lanes, has_k = t->k_columns;
    const ptrdiff_t rows = block->rows, columns = tile->columns;
    const ptrdiff_t count = FN(cut_strips)(strips, rows, STRIP, tile->terms.live, AM_FLASH_TILE);
#define OF(operand) .rows = rows, .stride = (operand)->stride, .columns = (operand)->dim
    FN(backward_product)
    logits[5] = {
        {.a = q->lanes, .b = tile->k_columns, .c = block->p, OF(q)},
        {.a = d_out->lanes, .b = tile->v_columns, .c = block->ds, OF(d_out)},
    };
    int products = 2;
    if (has_q)
        logits[products++] =
            (FN(backward_product)){.a = t->q.lanes, .b = tile->k_columns, .c = t->by_q, OF(q)};
    if (has_k)
        logits[products++] = (FN(backward_product)){.a = q->lanes, .b = t->k_columns, .c = t->by_k, OF(q)};
    if (t->v_columns)
        logits[products++] =
            (FN(backward_product)){.a = d_out->lanes, .b = t->v_columns, .c = t->by_v, OF(d_out)};
    prefetch_queue queue;
    prefetch_begin(&queue, tile->prefetch, FN(prefetching_products)(block, count, columns));
    FN(logits_of)(strips, count, logits, products, &queue);
    const ptrdiff_t made = (columns + LANES - 1) / LANES * LANES;
    for (ptrdiff_t r = 0; r < rows; r++) FN(tangents_of_row)(block, tile, t, r, made);

    uint64_t of_keys[64];
    const uint64_t *live = tile->terms.live, *live_keys = words_of_keys(of_keys, live, rows);
    const ptrdiff_t transposed_count = FN(cut_strips)(transposed_strips, columns, STRIP, live_keys, rows);
    const FN(backward_product) dv = {.a = block->p,
                                     .b = d_out->packed,
                                     .sum = tile->d_v,
                                     .live = d_out->finite ? NULL : live_keys,
                                     OF(d_out)},
                               dk = {.a = block->ds,
                                     .b = q->packed,
                                     .sum = has_q ? FN(first_of)(tile->d_k) : tile->d_k,
                                     .live = q->finite ? NULL : live_keys,
                                     OF(q)},
                               dk_of_q = {.a = t->by_q,
                                          .b = t->q.packed,
                                          .sum = FN(second_of)(tile->d_k),
                                          .live = t->q.finite ? NULL : live_keys,
                                          OF(q)},
                               dq = {.a = block->ds,
                                     .b = tile->k,
                                     .sum = has_k ? FN(first_of)(block->d_q) : block->d_q,
                                     .live = tile->k_finite ? NULL : live,
                                     OF(q)},
                               dq_of_k = {.a = t->by_q,
                                          .b = t->k,
                                          .sum = FN(second_of)(block->d_q),
                                          .live = t->k_finite ? NULL : live,
                                          OF(q)};
#undef OF
    FN(add_transposed)(transposed_strips, transposed_count, &dv, &queue);
    FN(add_transposed)(transposed_strips, transposed_count, &dk, &queue);
    if (has_q) FN(add_transposed)(transposed_strips, transposed_count, &dk_of_q, &queue);
    FN(add_straight)(strips, count, &dq, &queue);
    if (has_k) FN(add_straight)(strips, count, &dq_of_k, &queue);
}
