/* flash_gradient_tpl.h – the gradient of attention of a block of rows to a tile of keys, for one type of
 * numbers.
 *
 *     S = Q Kᵀ,  dP = dO Vᵀ       like the logits of the forward pass
 *     P, dS                       row by row
 *     dV = dV + Pᵀ dO             one panel of columns after the other, and so are
 *     dK = dK + dSᵀ Q,  dQ = dQ + dS K
 */

/* c = a bᵀ, where b is packed like keys. */
static void FN(logits_of)(const FN(strip) * strips, ptrdiff_t count, const T *a, ptrdiff_t a_step,
                          ptrdiff_t depth, const T *b, T *c)
{
    for (ptrdiff_t column = 0; column < AM_FLASH_TILE; column += FN(PANEL), b += FN(PANEL) * depth) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (column >= s->end || column + FN(PANEL) <= s->begin) continue;
            FN(product)(s->rows, depth, a + s->row * a_step, a_step, b, c + s->row * AM_FLASH_TILE + column,
                        AM_FLASH_TILE, false);
        }
    }
}

/* c += aᵀ b, where a is [rows][AM_FLASH_TILE], and strips are of its columns. */
static void FN(add_turned)(const FN(strip) * strips, ptrdiff_t count, const T *a, const T *b, T *c,
                           ptrdiff_t step, ptrdiff_t depth)
{
    for (ptrdiff_t column = 0; column < depth; column += FN(PANEL)) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (s->begin == s->end) continue;
            FN(product_turned)(s->rows, s->end - s->begin, a + s->begin * AM_FLASH_TILE + s->row,
                               AM_FLASH_TILE, b + s->begin * step + column, step, c + s->row * step + column,
                               step);
        }
    }
}

/* What a logit is made of, for all of a row. */
typedef struct {
    V scale, cap, inverse_cap;
    bool capped;
    const T *bias; /* or NULL */
} FN(dressing);

static inline FN(dressing)
    FN(dressing_of)(const am_gradient_rows *block, const am_gradient_tile *tile, ptrdiff_t row)
{
    return (FN(dressing)){
        .scale = VOP(set1)((T)block->factor),
        .cap = VOP(set1)((T)block->cap),
        .inverse_cap = VOP(set1)((T)(1 / block->cap)),
        .capped = block->cap > 0,
        .bias = tile->bias ? (const T *)tile->bias + row * AM_FLASH_TILE : NULL,
    };
}

/* The logits from column i on; `slope` is that of the cap. */
static inline V FN(dressed)(const FN(dressing) * d, V product, ptrdiff_t i, V *slope)
{
    V s = VOP(mul)(product, d->scale);
    if (d->bias) s = VOP(add)(s, VOP(load)(d->bias + i));
    if (!d->capped) return s;
    V bent = FN(tanh)(VOP(mul)(s, d->inverse_cap)), one = VOP(set1)(1);
    *slope = VOP(mul)(VOP(sub)(one, bent), VOP(add)(one, bent));
    return VOP(mul)(d->cap, bent);
}

/* Products of one row to P and dS; columns begin … end - 1, whole vectors. All others are dead: 0. */
static void FN(slopes)(const am_gradient_rows *block, const am_gradient_tile *tile, ptrdiff_t row,
                       ptrdiff_t begin, ptrdiff_t end)
{
    T *weights = (T *)block->weights + row * AM_FLASH_TILE,
      *slopes = (T *)block->slopes + row * AM_FLASH_TILE;
    T *d_bias = tile->d_bias ? (T *)tile->d_bias + row * AM_FLASH_TILE : NULL;
    FN(dressing) d = FN(dressing_of)(block, tile, row);
    V zero = VOP(set1)(0), unit = VOP(set1)((T)block->unit), scale = VOP(set1)((T)block->scale);
    V base = VOP(set1)(((const T *)block->base)[row]), rest = VOP(set1)(((const T *)block->rest)[row]);
    V add = VOP(set1)(((const T *)block->add)[row]);
    V kept_factor = VOP(set1)((T)block->kept_factor), bend = zero;
    for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
        if (i < begin || i >= end) {
            VOP(store)(weights + i, zero);
            VOP(store)(slopes + i, zero);
            if (d_bias) VOP(store)(d_bias + i, zero);
            continue;
        }
        V s = FN(dressed)(&d, VOP(load)(weights + i), i, &bend);
        V p = FN(exp2)(VOP(fma)(VOP(sub)(s, base), unit, rest)), slope = VOP(load)(slopes + i), kept = p;
        if (tile->kept) {
            slope = VOP(select)(tile->kept[row] >> i, VOP(mul)(slope, kept_factor), zero);
            kept = VOP(select)(tile->kept[row] >> i, VOP(mul)(p, kept_factor), zero);
        }
        slope = VOP(mul)(p, VOP(add)(slope, add));
        if (block->share) {
            V share = VOP(set1)(((const T *)block->share)[row]);
            slope = VOP(sub)(slope, VOP(pick_less)(s, base, zero, share));
        }
        if (d.capped) slope = VOP(mul)(slope, bend);
        if (tile->live) {
            slope = VOP(select)(tile->live[row] >> i, slope, zero);
            kept = VOP(select)(tile->live[row] >> i, kept, zero);
        }
        if (d_bias) VOP(store)(d_bias + i, slope);
        VOP(store)(weights + i, kept);
        VOP(store)(slopes + i, VOP(mul)(slope, scale));
    }
}

static void FN(gradient)(const am_gradient_rows *block, const am_gradient_tile *tile)
{
    FN(strip) strips[AM_FLASH_ROWS];
    ptrdiff_t count = FN(cut_strips)(strips, block->rows, tile->live, AM_FLASH_TILE);
    T *weights = block->weights, *slopes = block->slopes;
    FN(logits_of)(strips, count, block->q, block->step, block->depth, tile->k_columns, weights);
    FN(logits_of)(strips, count, block->d_out, block->value_step, block->value_depth, tile->v_columns,
                  slopes);
    for (const FN(strip) *s = strips; s < strips + count; s++) {
        ptrdiff_t begin = s->begin / LANES * LANES, end = (s->end + LANES - 1) / LANES * LANES;
        for (ptrdiff_t r = s->row; r < s->row + s->rows; r++) FN(slopes)(block, tile, r, begin, end);
    }

    uint64_t turned[64] = {0};
    if (tile->live) {
        memcpy(turned, tile->live, (size_t)block->rows * sizeof *turned);
        turn_tiles(turned, 1);
    }
    FN(strip) turned_strips[AM_FLASH_TILE];
    ptrdiff_t turned_count =
        FN(cut_strips)(turned_strips, tile->columns, tile->live ? turned : NULL, block->rows);
    if (tile->live && !block->d_out_finite)
        FN(add_live_rows)(tile->columns, turned, weights, 1, AM_FLASH_TILE, block->d_out, block->value_step,
                          FN(PANEL), tile->d_v, block->value_step, block->value_depth);
    else
        FN(add_turned)(turned_strips, turned_count, weights, block->d_out, tile->d_v, block->value_step,
                       block->value_depth);
    if (tile->live && !block->q_finite)
        FN(add_live_rows)(tile->columns, turned, slopes, 1, AM_FLASH_TILE, block->q, block->step, FN(PANEL),
                          tile->d_k, block->step, block->depth);
    else
        FN(add_turned)(turned_strips, turned_count, slopes, block->q, tile->d_k, block->step, block->depth);
    if (tile->live && !tile->k_finite) {
        FN(add_live_rows)(block->rows, tile->live, slopes, AM_FLASH_TILE, 1, tile->k, FN(PANEL),
                          FN(PANEL) * AM_FLASH_TILE, block->d_q, block->step, block->depth);
        return;
    }
    const T *k = tile->k;
    for (ptrdiff_t column = 0; column < block->depth; column += FN(PANEL), k += FN(PANEL) * AM_FLASH_TILE) {
        for (const FN(strip) *s = strips; s < strips + count; s++) {
            if (s->begin == s->end) continue;
            FN(product)(s->rows, s->end - s->begin, slopes + s->row * AM_FLASH_TILE + s->begin, AM_FLASH_TILE,
                        k + s->begin * FN(PANEL), (T *)block->d_q + s->row * block->step + column,
                        block->step, true);
        }
    }
}

static void FN(peaks)(const am_gradient_rows *block, const am_gradient_tile *tile)
{
    FN(strip) strips[AM_FLASH_ROWS];
    ptrdiff_t count = FN(cut_strips)(strips, block->rows, tile->live, AM_FLASH_TILE);
    T *logits = block->weights;
    FN(logits_of)(strips, count, block->q, block->step, block->depth, tile->k_columns, logits);
    V zero = VOP(set1)(0), one = VOP(set1)(1), unit = VOP(set1)((T)block->unit), bend;
    for (ptrdiff_t r = 0; r < block->rows; r++, logits += AM_FLASH_TILE) {
        T *peak = (T *)block->base + r, *sum = (T *)block->rest + r, *times = (T *)block->share + r;
        uint64_t live = tile->live ? tile->live[r] : UINT64_MAX;
        FN(dressing) d = FN(dressing_of)(block, tile, r);
        V most = VOP(set1)(-(T)INFINITY), total = zero, equal = zero;
        for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
            V s = FN(dressed)(&d, VOP(load)(logits + i), i, &bend);
            VOP(store)(logits + i, s);
            most = VOP(max)(VOP(select)(live >> i, s, VOP(set1)(-(T)INFINITY)), most);
        }
        T highest = VOP(highest)(most);
        if (highest > *peak) {
            *sum *= VOP(first)(FN(exp2)(VOP(mul)(VOP(set1)(*peak - highest), unit)));
            *times = 0;
            *peak = highest;
        }
        V base = VOP(set1)(*peak > -(T)INFINITY ? *peak : 0);
        for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
            V s = VOP(load)(logits + i), p = FN(exp2)(VOP(mul)(VOP(sub)(s, base), unit));
            total = VOP(add)(total, VOP(select)(live >> i, p, zero));
            equal = VOP(add)(equal, VOP(select)(live >> i, VOP(pick_less)(s, base, zero, one), zero));
        }
        T more = VOP(total)(total);
        *sum += more;
        *times += VOP(total)(equal);
        if (more != more) *peak = more; /* of a NaN there is no way back */
    }
}

static bool FN(load_rows)(void *dst, ptrdiff_t dst_step, const void *src, ptrdiff_t src_step, ptrdiff_t rows,
                          ptrdiff_t depth)
{
    T *to = dst;
    const T *from = src;
    V nothing = VOP(set1)(0); /* 0 × x is 0 for finite x, else NaN */
    for (ptrdiff_t r = 0; r < rows; r++, to += dst_step, from += src_step) {
        ptrdiff_t i = 0;
        for (; i + LANES <= depth; i += LANES) {
            V x = VOP(load)(from + i);
            VOP(store)(to + i, x);
            nothing = VOP(fma)(x, VOP(set1)(0), nothing);
        }
        if (i == depth && depth % FN(PANEL) == 0) continue;
        memset(to + i, 0, (size_t)(dst_step - i) * sizeof *to);
        memcpy(to + i, from + i, (size_t)(depth - i) * sizeof *to);
        if (i < depth) nothing = VOP(fma)(VOP(load)(to + i), VOP(set1)(0), nothing);
    }
    return VOP(total)(nothing) == 0;
}

static void FN(add_rows)(void *dst, ptrdiff_t dst_step, const void *src, ptrdiff_t src_step, ptrdiff_t rows,
                         ptrdiff_t depth)
{
    T *to = dst;
    const T *from = src;
    for (ptrdiff_t r = 0; r < rows; r++, to += dst_step, from += src_step) {
        for (ptrdiff_t i = 0; i < depth; i++) to[i] += from[i];
    }
}

static void FN(dot_rows)(void *dst, const void *a, ptrdiff_t a_step, const void *b, ptrdiff_t b_step,
                         ptrdiff_t rows, ptrdiff_t depth)
{
    const T *left = a, *right = b;
    for (ptrdiff_t r = 0; r < rows; r++, left += a_step, right += b_step) {
        V sums = VOP(set1)(0);
        ptrdiff_t i = 0;
        for (; i + LANES <= depth; i += LANES)
            sums = VOP(fma)(VOP(load)(left + i), VOP(load)(right + i), sums);
        T sum = VOP(total)(sums);
        for (; i < depth; i++) sum += left[i] * right[i];
        bool zero = sum != sum;
        for (i = 0; zero && i < depth; i++) zero = right[i] == 0;
        ((T *)dst)[r] = zero ? 0 : sum;
    }
}

#undef T
#undef V
#undef VOP
#undef FN
#undef LANES
#undef STRIP
#undef MIN_POWER
#undef ROUNDER
#undef EXP2_TERMS
