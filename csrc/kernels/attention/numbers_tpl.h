/* numbers_tpl.h – the kernels for a bias and a result of one type in memory. */
#if !defined T || !defined S || !defined MEM || !defined FROM
#    error "numbers_tpl.h needs f32.h or f64.h, S (an element), MEM(op) (its loads and stores) and FROM(name)"
#endif

/* As `am_flash_read_bias`, for callers that know `columns` or have no place to write to. */
INLINE bool FROM(read_rows)(T *to, const char *from, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t columns)
{
    const V zero = VOP(set1)(0);
    V least[4] = {zero, zero, zero, zero}; /* negated */
    for (ptrdiff_t r = 0; r < rows; r++, from += stride) {
        const S *row = (const S *)from;
        for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += 4 * LANES) {
            UNROLL(4)
            for (int j = 0; j < 4; j++) {
                const ptrdiff_t at = i + j * LANES;
                const V x = at + LANES <= columns ? MEM(load)(row + at)
                            : at < columns        ? MEM(load_part)(row + at, columns - at)
                                                  : zero;
                if (to) VOP(store)(to + r * AM_FLASH_TILE + at, x);
                least[j] = VOP(max)(VOP(sub)(zero, x), least[j]);
            }
        }
    }
    const V all = VOP(max)(VOP(max)(least[0], least[1]), VOP(max)(least[2], least[3]));
    return VOP(highest)(all) == (T)INFINITY;
}

static bool FROM(read_bias)(void *dst, const void *src, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t columns)
{
    if (!dst) return FROM(read_rows)(NULL, src, stride, rows, AM_FLASH_TILE);
    if (columns == AM_FLASH_TILE) return FROM(read_rows)(dst, src, stride, rows, AM_FLASH_TILE);
    return FROM(read_rows)(dst, src, stride, rows, columns);
}

static void FROM(write)(void *dst, const void *src, double factor, ptrdiff_t count)
{
    S *to = dst;
    const T *from = src;
    const V scale = VOP(set1)((T)factor);
    ptrdiff_t i = 0;
    for (; i + LANES <= count; i += LANES) MEM(store)(to + i, VOP(mul)(scale, VOP(load)(from + i)));
    if (i < count) MEM(store_part)(to + i, VOP(mul)(scale, VOP(load_part)(from + i, count - i)), count - i);
}

#undef S
#undef MEM
#undef FROM
