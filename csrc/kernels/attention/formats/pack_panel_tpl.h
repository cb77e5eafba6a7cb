/* pack_panel_tpl.h – packs values. */
#if !defined T || !defined S || !defined LOAD || !defined LOAD_PART || !defined FROM
#    error "pack_panel_tpl.h needs f32.h or f64.h, S (an element), FROM(name), LOAD and LOAD_PART"
#endif

/* Packs rows of up to a panel's columns. Adds 0 × what it reads to `nothing`: 0, or NaN if a value is not
 * finite.
 */
static inline V FROM(pack_panel)(T *dst, const S *src, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t columns,
                                 V nothing)
{
    const V zero = VOP(set1)(0);
    for (ptrdiff_t r = 0; r < rows; r++, src += stride, dst += FN(PANEL)) {
        V left, right = zero;
        if (columns >= FN(PANEL)) {
            left = LOAD(src), right = LOAD(src + LANES);
        } else if (columns >= LANES) {
            left = LOAD(src);
            if (columns > LANES) right = LOAD_PART(src + LANES, columns - LANES);
        } else {
            left = LOAD_PART(src, columns);
        }
        VOP(store)(dst, left);
        VOP(store)(dst + LANES, right);
        nothing = VOP(fma)(left, zero, nothing);
        nothing = VOP(fma)(right, zero, nothing);
    }
    return nothing;
}
