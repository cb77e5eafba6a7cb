/* numbers_tpl.h – the kernels for a bias and a result of one type in memory. */
#if !defined T || !defined S || !defined MEM || !defined FROM
#    error "numbers_tpl.h needs f32.h or f64.h, S (an element), MEM(op) (its loads and stores) and FROM(name)"
#endif

static uint64_t FROM(read_bias)(void *dst, const void *src, ptrdiff_t columns)
{
    T *to = dst;
    const S *from = src;
    V zero = VOP(set1)(0), least = zero; /* negated */
    for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
        V x = i + LANES <= columns ? MEM(load)(from + i)
              : i < columns        ? MEM(load_part)(from + i, columns - i)
                                   : zero;
        VOP(store)(to + i, x);
        least = VOP(max)(VOP(sub)(zero, x), least);
    }
    uint64_t bits = 0;
    if (VOP(highest)(least) == (T)INFINITY) {
        for (int i = 0; i < AM_FLASH_TILE; i++) bits |= (uint64_t)(to[i] == -(T)INFINITY) << i;
    }
    return bits;
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
