/* convert_tpl.h – integers to and from int64, with checks that vanish where nothing can overflow. */
#if !defined T || !defined FN
#    error "convert_tpl.h needs T (the type of the integers) and FN(name)"
#endif

static bool FN(load)(const am_kernels *kernels, void *restrict dst, const void *restrict src, ptrdiff_t count)
{
    (void)kernels;
    int64_t *to = dst;
    const T *from = src;
    const bool is_signed = (T)-1 < (T)1;
    bool fits = true;
    for (ptrdiff_t i = 0; i < count; i++) {
        to[i] = (int64_t)from[i];
        fits &= is_signed || to[i] >= 0;
    }
    return fits;
}

static bool FN(store)(const am_kernels *kernels, void *restrict dst, const void *restrict src,
                      ptrdiff_t count)
{
    (void)kernels;
    T *to = dst;
    const int64_t *from = src;
    const bool is_signed = (T)-1 < (T)1;
    bool fits = true;
    for (ptrdiff_t i = 0; i < count; i++) {
        to[i] = (T)from[i];
        fits &= (int64_t)to[i] == from[i] && (is_signed || from[i] >= 0);
    }
    return fits;
}

#undef T
#undef FN
