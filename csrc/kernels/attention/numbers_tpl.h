/* numbers_tpl.h – the kernels for a bias and a result whose elements in memory are S. LOAD and
 * LOAD_PART load lanes of them, STORE and STORE_PART store lanes. */

static uint64_t FROM(read_bias)(void *dst, const void *src, ptrdiff_t columns)
{
    T *to = dst;
    const S *from = src;
    V zero = VOP(set1)(0), least = zero; /* negated */
    for (ptrdiff_t i = 0; i < AM_FLASH_TILE; i += LANES) {
        V x = i + LANES <= columns ? LOAD(from + i) : i < columns ? LOAD_PART(from + i, columns - i) : zero;
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
    for (; i + LANES <= count; i += LANES) STORE(to + i, VOP(mul)(scale, VOP(load)(from + i)));
    if (i < count) STORE_PART(to + i, VOP(mul)(scale, VOP(load_part)(from + i, count - i)), count - i);
}

#undef STORE
#undef STORE_PART
#undef S
#undef LOAD
#undef LOAD_PART
#undef FROM
