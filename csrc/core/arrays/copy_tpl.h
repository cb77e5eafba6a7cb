/* copy_tpl.h – copies a strided matrix of elements. */
#if !defined T || !defined FN
#    error "copy_tpl.h needs T (an integer as wide as an element) and FN(name)"
#endif
static void FN(copy_2d)(char *dst, ptrdiff_t dst_row, ptrdiff_t dst_column, const char *src,
                        ptrdiff_t src_row, ptrdiff_t src_column, ptrdiff_t rows, ptrdiff_t columns)
{
    for (ptrdiff_t r = 0; r < rows; r++) {
        for (ptrdiff_t c = 0; c < columns; c++) {
            memcpy(dst + r * dst_row + c * dst_column, src + r * src_row + c * src_column, sizeof(T));
        }
    }
}

#undef T
#undef FN
