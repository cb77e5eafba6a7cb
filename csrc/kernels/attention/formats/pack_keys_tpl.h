/* pack_keys_tpl.h – packs keys. */
#if !defined T || !defined S || !defined LOAD || !defined LOAD_PART || !defined FROM
#    error "pack_keys_tpl.h needs f32.h or f64.h, S (a lane of memory), FROM(name), LOAD and LOAD_PART"
#endif

/* Loads a square of lanes and transposes it; missing rows and columns are zero. */
INLINE void FROM(load_transposed)(V square[LANES], const S *src, ptrdiff_t stride, ptrdiff_t rows,
                                  ptrdiff_t columns)
{
    UNROLL(16)
    for (ptrdiff_t r = 0; r < LANES; r++) {
        square[r] = r >= rows ? VOP(set1)(0) : columns >= LANES ? LOAD(src) : LOAD_PART(src, columns);
        src += stride;
        HIDE(src); /* computed from the row before: there are no registers for the addresses of all rows */
    }
    VOP(transpose)(square);
}

/* Packs one row of squares after the other: fewer rows at a time conflict less in the cache. With a factor of
 * 1 lanes may also be bf16x2. */
static void FROM(pack_keys)(void *to, const am_rows *from, ptrdiff_t rows, ptrdiff_t head_dim, double factor,
                            const void *scales)
{
    const ptrdiff_t stride = from->stride / (ptrdiff_t)sizeof(S);
    const bool scaled = factor != 1 || scales;
    V scale = VOP(set1)((T)factor);
    for (ptrdiff_t row = 0; row < FN(whole_panels)(rows); row += LANES) {
        const S *src = row_at(from, row);
        T *dst = (T *)to + row / FN(PANEL) * FN(PANEL) * head_dim + row % FN(PANEL);
        if (scales) scale = VOP(mul)(VOP(set1)((T)factor), VOP(load)((const T *)scales + row));
        for (ptrdiff_t i = 0; i < head_dim; i += LANES, src += LANES, dst += LANES * FN(PANEL)) {
            V square[LANES];
            if (row + LANES <= rows && i + LANES <= head_dim) {
                FROM(load_transposed)(square, src, stride, LANES, LANES);
                UNROLL(16)
                for (ptrdiff_t c = 0; c < LANES; c++)
                    VOP(store)(dst + c * FN(PANEL), scaled ? VOP(mul)(scale, square[c]) : square[c]);
            } else {
                FROM(load_transposed)(square, src, stride, rows - row, head_dim - i);
                for (ptrdiff_t c = 0; c < LANES && i + c < head_dim; c++)
                    VOP(store)(dst + c * FN(PANEL), scaled ? VOP(mul)(scale, square[c]) : square[c]);
            }
        }
    }
}
