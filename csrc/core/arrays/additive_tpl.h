/* additive_tpl.h – the first negative, infinite or NaN number of a row, and what the row has. */
#if !defined T || !defined FN
#    error "additive_tpl.h needs T (an unsigned integer as wide as a number) and FN(name)"
#endif

/* Numbers were written as floats, so that a plain T would be another object to the compiler. */
typedef T FN(bits_of) __attribute__((may_alias));

static ptrdiff_t FN(first_additive)(const char *row, ptrdiff_t stride, ptrdiff_t count, T infinity, T one,
                                    contents *seen)
{
    const T minus_zero = (T)((T)1 << (8 * sizeof(T) - 1));
    T bits = 0, graded = 0; /* a loop without an exit is a loop of vectors */
    bool wrong = false;
    for (ptrdiff_t i = 0; i < count; i++) {
        const T number = stride == (ptrdiff_t)sizeof(T) ? ((const FN(bits_of) *)row)[i]
                                                        : *(const FN(bits_of) *)(row + i * stride);
        wrong |= (number >= infinity) & (number != minus_zero);
        bits |= number;
        graded |= (T)(number != one ? number : 0);
    }
    seen->any = (T)(bits << 1) != 0, seen->graded = (T)(graded << 1) != 0;
    for (ptrdiff_t i = 0; wrong && i < count; i++) {
        const T number = *(const FN(bits_of) *)(row + i * stride);
        if (number >= infinity && number != minus_zero) return i;
    }
    return -1;
}
#undef T
#undef FN
