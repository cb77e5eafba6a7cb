/* cumsum_tpl.h – running sums, for the element type T with vectors V of LANES elements.
 *
 *     out[t] = scale * (carry + x[0] + … + x[t])
 *
 * `carry` is a double that takes in a block of a few steps at a time; inside the block the sum starts from zero, in T.
 * That costs one addition a step more than the plain recurrence, no compensation term, and needs no special care
 * for infinities: the carry obeys IEEE rules by itself.
 */

enum { FN(GROUP) = 64 / (int)sizeof(T) / LANES }; /* vectors that fill a cache line */

/* `steps` ≤ AM_CUMSUM_BLOCK rows of `vectors` whole vectors; or, with `part` lanes, of one vector that is not full. */
static inline __attribute__((always_inline)) void FN(cumsum_block)(T *dst, ptrdiff_t dst_step, const T *src,
                                                                   ptrdiff_t src_step, const ptrdiff_t steps,
                                                                   const int vectors, const ptrdiff_t part,
                                                                   double *carry, V scale, const bool stream)
{
    V base[FN(GROUP)], sum[FN(GROUP)];
    for (int v = 0; v < vectors; v++) {
        base[v] = FN(carry_load)(carry + v * LANES);
        sum[v] = VOP(set1)(0);
    }
    for (ptrdiff_t t = 0; t < steps; t++) {
        for (int v = 0; v < vectors; v++) {
            const T *from = src + t * src_step + v * LANES;
            T *to = dst + t * dst_step + v * LANES;
            sum[v] = VOP(add)(sum[v], part ? VOP(load_part)(from, part) : VOP(load)(from));
            V out = VOP(mul)(scale, VOP(add)(base[v], sum[v]));
            if (part) VOP(store_part)(to, out, part);
            else if (stream) VOP(stream)(to, out);
            else VOP(store)(to, out);
        }
    }
    for (int v = 0; v < vectors; v++) FN(carry_add)(carry + v * LANES, sum[v]);
}

static inline __attribute__((always_inline)) void FN(cumsum_band)(T *dst, ptrdiff_t dst_step, const T *src,
                                                                  ptrdiff_t src_step, const ptrdiff_t steps,
                                                                  ptrdiff_t lanes, double *carry, V scale,
                                                                  const bool stream)
{
    ptrdiff_t lane = 0;
    for (; lane + FN(GROUP) * LANES <= lanes; lane += FN(GROUP) * LANES) {
        FN(cumsum_block)(dst + lane, dst_step, src + lane, src_step, steps, FN(GROUP), 0, carry + lane, scale, stream);
    }
    for (; lane + LANES <= lanes; lane += LANES) {
        FN(cumsum_block)(dst + lane, dst_step, src + lane, src_step, steps, 1, 0, carry + lane, scale, false);
    }
    if (lane < lanes) {
        double last[LANES] = {0}; /* the carry has no room for a whole vector */
        memcpy(last, carry + lane, (size_t)(lanes - lane) * sizeof *carry);
        FN(cumsum_block)(dst + lane, dst_step, src + lane, src_step, steps, 1, lanes - lane, last, scale, false);
        memcpy(carry + lane, last, (size_t)(lanes - lane) * sizeof *carry);
    }
}

static void FN(cumsum_rows)(T *dst, ptrdiff_t dst_step, const T *src, ptrdiff_t src_step, ptrdiff_t steps,
                            ptrdiff_t lanes, double *carry, T scale, bool stream)
{
    const V factor = VOP(set1)(scale);
    ptrdiff_t t = 0;
    for (; t + AM_CUMSUM_BLOCK <= steps; t += AM_CUMSUM_BLOCK) {
        T *to = dst + t * dst_step;
        const T *from = src + t * src_step;
        if (stream) FN(cumsum_band)(to, dst_step, from, src_step, AM_CUMSUM_BLOCK, lanes, carry, factor, true);
        else FN(cumsum_band)(to, dst_step, from, src_step, AM_CUMSUM_BLOCK, lanes, carry, factor, false);
    }
    if (t < steps) {
        FN(cumsum_band)(dst + t * dst_step, dst_step, src + t * src_step, src_step, steps - t, lanes, carry, factor,
                        false);
    }
    if (stream) v_fence();
}

static inline __attribute__((always_inline)) void FN(cumsum_scan_row)(T *dst, const T *src, ptrdiff_t steps,
                                                                      const bool reverse, double *carry, V scale,
                                                                      const bool stream)
{
    double sum = *carry;
    for (ptrdiff_t t = 0; t < steps; t += LANES) {
        ptrdiff_t count = steps - t < LANES ? steps - t : LANES;
        ptrdiff_t at = reverse ? steps - t - count : t;
        V x = count < LANES ? VOP(load_part)(src + at, count) : VOP(load)(src + at);
        x = VOP(scan)(reverse ? VOP(reverse)(x) : x);
        V out = VOP(mul)(scale, VOP(add)(VOP(set1)((T)sum), x));
        if (reverse) out = VOP(reverse)(out);
        if (count < LANES) VOP(store_part)(dst + at, out, count);
        else if (stream) VOP(stream)(dst + at, out);
        else VOP(store)(dst + at, out);
        sum += (double)VOP(last)(x);
    }
    *carry = sum;
}

static void FN(cumsum_scan)(T *dst, const T *src, ptrdiff_t steps, bool reverse, double *carry, T scale, bool stream)
{
    const V factor = VOP(set1)(scale);
    /* Whole vectors are stored from the end downwards when reversed, from the beginning upwards when not. */
    stream = stream && (uintptr_t)(reverse ? dst + steps : dst) % sizeof(V) == 0;
    if (stream && reverse) FN(cumsum_scan_row)(dst, src, steps, true, carry, factor, true);
    else if (stream) FN(cumsum_scan_row)(dst, src, steps, false, carry, factor, true);
    else if (reverse) FN(cumsum_scan_row)(dst, src, steps, true, carry, factor, false);
    else FN(cumsum_scan_row)(dst, src, steps, false, carry, factor, false);
    if (stream) v_fence();
}

#undef T
#undef V
#undef VOP
#undef FN
#undef LANES
