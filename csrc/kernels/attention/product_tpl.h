/* product_tpl.h – the product of attention forward and backward, and two functions.
 *
 * A strip of up to STRIP rows times a panel of PANEL columns, or half a strip times two, which fill the
 * vector registers. */
#ifndef T
#    error "product_tpl.h needs f32.h or f64.h (what it computes with)"
#endif

enum {
    FN(PANEL) = 2 * LANES,
    FN(IN_FLIGHT) = 4, /* vectors whose sums do not wait for one another */
};

/* Rounds rows up to whole panels. */
static inline ptrdiff_t FN(whole_panels)(ptrdiff_t rows)
{
    return (rows + FN(PANEL) - 1) / FN(PANEL) * FN(PANEL);
}

/* Up to half a strip, and up to a whole one: the rows of which strip_rows makes strips. */
#if STRIP > 6
#    define EACH_FEW_ROWS(ROWS) ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#    define EACH_ROWS(ROWS) EACH_FEW_ROWS(ROWS) ROWS(8) ROWS(12)
#elif STRIP > 4
#    define EACH_FEW_ROWS(ROWS) ROWS(1) ROWS(2) ROWS(3)
#    define EACH_ROWS(ROWS) EACH_FEW_ROWS(ROWS) ROWS(4) ROWS(5) ROWS(6)
#else
#    define EACH_FEW_ROWS(ROWS) ROWS(1) ROWS(2)
#    define EACH_ROWS(ROWS) EACH_FEW_ROWS(ROWS) ROWS(3) ROWS(4)
#endif

#define IS_DOUBLE (sizeof(T) > sizeof(float)) /* of which some instances are spared */

#define S T
#define LOAD VOP(load)
#define FMA VOP(fma)
#define TIMES VOP(mul)
#define FROM(name) FN(name)
#if defined V_FMA_HALF && LANES == VF_LANES /* of float32 */
#    define FMA_HALF vf_fma_half
#endif
#include "kernels/attention/product_of_tpl.h"

typedef struct {
    ptrdiff_t row, rows, begin, end; /* begin, end: its live columns, none if equal */
} FN(strip);

/* Divides rows into strips of up to `most`; returns their number. `live`: a word for
 * each row, or NULL if all columns are live. */
static inline ptrdiff_t FN(cut_strips)(FN(strip) * strips, ptrdiff_t rows, ptrdiff_t most,
                                       const uint64_t *live, ptrdiff_t columns)
{
    ptrdiff_t count = 0;
    for (ptrdiff_t row = 0; row < rows;) {
        FN(strip) *s = &strips[count++];
        *s = (FN(strip)){.row = row, .rows = strip_rows(rows - row, most), .begin = 0, .end = columns};
        row += s->rows;
        if (!live) continue;
        uint64_t any = 0;
        for (ptrdiff_t r = s->row; r < row; r++) any |= live[r];
        s->begin = any ? __builtin_ctzll(any) : 0;
        s->end = any ? 64 - __builtin_clzll(any) : 0;
    }
    return count;
}

#ifndef V_POWERS
/* Subtracts from x the nearest whole number, and returns that; and multiplies v by half of 2 to its power,
 * which is 0 from -MIN_POWER on down. The number is kept in low bits, with the bias of half the power's
 * exponent added. */
static inline V VOP(take_whole)(V *x)
{
    const V shift = VOP(set1)((T)ROUNDER);
    *x = VOP(max)(VOP(set1)(-(T)MIN_POWER), *x);
    V whole = VOP(add)(*x, shift);
    *x = VOP(sub)(*x, VOP(sub)(whole, shift));
    return whole;
}
static inline V VOP(times_power)(V v, V whole) { return VOP(mul)(v, VOP(low_to_exponent)(whole)); }
#endif

/* 2^x for x up to some hundred; NaN for NaN; 0 where it would be subnormal, as processors of Intel multiply
 * slowly by such numbers: under ALiBi, P V took a tenth longer. It takes several vectors step by step: a step
 * waits for the one before, but vectors do not wait for each other. exp2_begin splits off whole numbers. */
INLINE void FN(exp2_begin)(V *x, V *whole, const int count)
{
    UNROLL(16)
    for (int j = 0; j < count; j++) whole[j] = VOP(take_whole)(&x[j]);
}
INLINE void FN(exp2_end)(V *x, const V *whole, const int count, const T *terms, const int term_count)
{
    V power[FN(IN_FLIGHT)];
    UNROLL(16)
    for (int j = 0; j < count; j++) power[j] = VOP(set1)(TERMS_FACTOR * terms[term_count - 1]);
    UNROLL(16)
    for (int i = term_count - 2; i >= 0; i--) {
        UNROLL(16)
        for (int j = 0; j < count; j++)
            power[j] = VOP(fma)(power[j], x[j], VOP(set1)(TERMS_FACTOR * terms[i]));
    }
    UNROLL(16)
    for (int j = 0; j < count; j++) x[j] = VOP(times_power)(power[j], whole[j]);
}
INLINE void FN(exp2_each)(V *x, const int count, const T *terms, const int term_count)
{
    V whole[FN(IN_FLIGHT)];
    FN(exp2_begin)(x, whole, count);
    FN(exp2_end)(x, whole, count, terms, term_count);
}

static inline V FN(exp2)(V x)
{
    FN(exp2_each)(&x, 1, FN(exp2_terms), COUNT_OF(FN(exp2_terms)));
    return x;
}

/* Near 0, where most logits are if the cap is large, tanh is a polynomial: 1 - 2 / (e^2x + 1) would lose the
 * digits of x beyond the last digit of 1. */
static inline V FN(tanh)(V x)
{
    const V zero = VOP(set1)(0), one = VOP(set1)(1), limit = VOP(set1)((T)0.625);
    const V near = VOP(fma)(FN(tanh_tail)(VOP(mul)(x, x)), x, x), size = VOP(max)(VOP(sub)(zero, x), x);
    if (!VOP(exceeding)(size, limit)) return near;
    const V minus_size = VOP(max)(VOP(set1)(-20), VOP(sub)(zero, size)); /* 1 + e^-40 rounds to 1 */
    const V e = FN(exp2)(VOP(mul)(minus_size, VOP(set1)((T)-2.8853900817779268)));
    const V far = VOP(sub)(one, VOP(div)(VOP(set1)(2), VOP(add)(e, one)));
    return VOP(pick_less)(limit, size, VOP(pick_less)(x, zero, VOP(sub)(zero, far), far), near);
}

/* A soft cap. One that is nearly as large as the greatest number is `huge`: its reciprocal, and logits of
 * usual size divided by it, are denormal or 0. */
typedef struct {
    V cap, inverse;
    bool huge;
} FN(soft_cap);
static inline FN(soft_cap) FN(soft_cap_of)(double cap)
{
    return (FN(soft_cap)){.cap = VOP(set1)((T)cap),
                          .inverse = VOP(set1)((T)(1 / cap)),
                          .huge = cap > GREATEST * (EPSILON / 16)};
}

/* cap tanh(s / cap); `bent` is the tangent. Logits far below a huge cap stay as they are, to which the result
 * is equal up to rounding: it is less by a third of the square of s / cap. */
static inline V FN(apply_cap)(const FN(soft_cap) * c, V s, V *bent)
{
    *bent = FN(tanh)(c->huge ? VOP(div)(s, c->cap) : VOP(mul)(s, c->inverse));
    const V capped = VOP(mul)(c->cap, *bent);
    if (!c->huge) return capped;
    const V size = VOP(max)(VOP(sub)(VOP(set1)(0), *bent), *bent);
    return VOP(pick_less)(VOP(mul)(size, size), VOP(set1)((T)(EPSILON / 4)), s, capped);
}
