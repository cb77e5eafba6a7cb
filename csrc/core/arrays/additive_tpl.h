/* additive_tpl.h – the first negative, infinite or NaN number of a row, as unsigned integers T. They were
 * written as floats, so that a plain T would be another object to the compiler. */
typedef T FN(bits_of) __attribute__((may_alias));

static ptrdiff_t FN(first_additive)(const char *row, ptrdiff_t stride, ptrdiff_t count, T infinity)
{
    const T minus_zero = (T)((T)1 << (8 * sizeof(T) - 1));
    bool any = false; /* a loop without an exit is a loop of vectors */
    if (stride == (ptrdiff_t)sizeof(T)) {
        const FN(bits_of) *numbers = (const FN(bits_of) *)row;
        for (ptrdiff_t i = 0; i < count; i++) any |= (numbers[i] >= infinity) & (numbers[i] != minus_zero);
        if (!any) return -1;
    }
    for (ptrdiff_t i = 0; i < count; i++) {
        const T number = *(const FN(bits_of) *)(row + i * stride);
        if (number >= infinity && number != minus_zero) return i;
    }
    return -1;
}
#undef T
#undef FN
