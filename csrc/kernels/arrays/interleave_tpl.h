/* interleave_tpl.h – splits and joins a few rows of elements. Compilers know the shuffles for it if the
 * number of rows is known. */
#if !defined T || !defined FN
#    error "interleave_tpl.h needs T (an integer as wide as an element) and FN(name)"
#endif

INLINE void FN(split_rows)(T *restrict to, ptrdiff_t stride, const T *restrict from, ptrdiff_t count,
                           const int rows)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        for (int r = 0; r < rows; r++) to[r * stride + i] = from[i * rows + r];
    }
}

static void FN(split)(void *dst, ptrdiff_t dst_stride, const void *src, ptrdiff_t count, ptrdiff_t rows)
{
    switch (rows) {
    case 1: FN(split_rows)(dst, dst_stride, src, count, 1); break;
    case 2: FN(split_rows)(dst, dst_stride, src, count, 2); break;
    case 3: FN(split_rows)(dst, dst_stride, src, count, 3); break;
    default: FN(split_rows)(dst, dst_stride, src, count, 4); break;
    }
}

INLINE void FN(join_rows)(T *restrict to, const T *restrict from, ptrdiff_t stride, ptrdiff_t count,
                          const int rows)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        for (int r = 0; r < rows; r++) to[i * rows + r] = from[r * stride + i];
    }
}

static void FN(join)(void *dst, const void *src, ptrdiff_t src_stride, ptrdiff_t count, ptrdiff_t rows)
{
    switch (rows) {
    case 1: FN(join_rows)(dst, src, src_stride, count, 1); break;
    case 2: FN(join_rows)(dst, src, src_stride, count, 2); break;
    case 3: FN(join_rows)(dst, src, src_stride, count, 3); break;
    default: FN(join_rows)(dst, src, src_stride, count, 4); break;
    }
}

#undef T
#undef FN
