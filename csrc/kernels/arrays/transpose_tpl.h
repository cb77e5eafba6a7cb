/* transpose_tpl.h – transposes a matrix of elements in tiles of LANES × LANES. */
#if !defined V || !defined VOP || !defined LANES || !defined T || !defined FN
#    error "transpose_tpl.h needs V, VOP(op), LANES (vectors), T (as wide as an element) and FN(name)"
#endif

static void FN(transpose)(void *dst, ptrdiff_t dst_stride, const void *src, ptrdiff_t src_stride,
                          ptrdiff_t rows, ptrdiff_t columns)
{
    T *to = dst;
    const T *from = src;
    const bool down = dst_stride > src_stride; /* rows that lie far apart are completed one by one */
    for (ptrdiff_t i = 0; i < (down ? columns : rows); i += LANES) {
        for (ptrdiff_t j = 0; j < (down ? rows : columns); j += LANES) {
            const ptrdiff_t r = down ? j : i, c = down ? i : j;
            if (r + LANES <= rows && c + LANES <= columns) {
                V tile[LANES];
                for (int k = 0; k < LANES; k++) tile[k] = VOP(load)(from + (r + k) * src_stride + c);
                VOP(transpose)(tile);
                for (int k = 0; k < LANES; k++) VOP(store)(to + (c + k) * dst_stride + r, tile[k]);
                continue;
            }
            for (ptrdiff_t y = r; y < rows && y < r + LANES; y++) {
                for (ptrdiff_t x = c; x < columns && x < c + LANES; x++)
                    to[x * dst_stride + y] = from[y * src_stride + x];
            }
        }
    }
}

#undef T
#undef FN
