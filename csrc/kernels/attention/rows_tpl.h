/* rows_tpl.h – loads, adds and multiplies rows of numbers. */
#if !defined T || !defined EACH_ROWS
#    error "rows_tpl.h needs f32.h or f64.h (what it computes with), and product_tpl.h"
#endif

static bool FN(load_rows)(void *dst, ptrdiff_t dst_stride, const void *src, ptrdiff_t src_stride,
                          ptrdiff_t rows, ptrdiff_t head_dim)
{
    T *to = dst;
    const T *from = src;
    V nothing = VOP(set1)(0); /* 0 × x is 0 for finite x, else NaN */
    for (ptrdiff_t r = 0; r < rows; r++, to += dst_stride, from += src_stride) {
        ptrdiff_t i = 0;
        for (; i + LANES <= head_dim; i += LANES) {
            V x = VOP(load)(from + i);
            VOP(store)(to + i, x);
            nothing = VOP(fma)(x, VOP(set1)(0), nothing);
        }
        if (i == head_dim && head_dim % FN(PANEL) == 0) continue;
        memset(to + i, 0, (size_t)(dst_stride - i) * sizeof *to);
        memcpy(to + i, from + i, (size_t)(head_dim - i) * sizeof *to);
        if (i < head_dim) nothing = VOP(fma)(VOP(load)(to + i), VOP(set1)(0), nothing);
    }
    return VOP(total)(nothing) == 0;
}

static uint64_t FN(find_infinite)(const void *row)
{
    const T *numbers = row;
    const V zero = VOP(set1)(0), limit = VOP(set1)(GREATEST);
    uint64_t bits = 0;
    UNROLL(16)
    for (int i = 0; i < AM_FLASH_TILE; i += LANES)
        bits |= VOP(exceeding)(VOP(sub)(zero, VOP(load)(numbers + i)), limit) << i;
    return bits;
}

static void FN(add_rows)(void *dst, ptrdiff_t dst_stride, const void *src, ptrdiff_t src_stride,
                         ptrdiff_t rows, ptrdiff_t head_dim)
{
    T *to = dst;
    const T *from = src;
    for (ptrdiff_t r = 0; r < rows; r++, to += dst_stride, from += src_stride) {
        ptrdiff_t i = 0;
        for (; i + LANES <= head_dim; i += LANES)
            VOP(store)(to + i, VOP(add)(VOP(load)(to + i), VOP(load)(from + i)));
        for (; i < head_dim; i++) to[i] += from[i];
    }
}

static void FN(dot_rows)(void *dst, const void *a, ptrdiff_t a_stride, const void *b, ptrdiff_t b_stride,
                         ptrdiff_t rows, ptrdiff_t head_dim)
{
    const T *left = a, *right = b;
    for (ptrdiff_t r = 0; r < rows; r++, left += a_stride, right += b_stride) {
        V sums = VOP(set1)(0);
        ptrdiff_t i = 0;
        for (; i + LANES <= head_dim; i += LANES)
            sums = VOP(fma)(VOP(load)(left + i), VOP(load)(right + i), sums);
        T sum = VOP(total)(sums);
        for (; i < head_dim; i++) sum += left[i] * right[i];
        bool zero = sum != sum;
        for (i = 0; zero && i < head_dim; i++) zero = right[i] == 0;
        ((T *)dst)[r] = zero ? 0 : sum;
    }
}
