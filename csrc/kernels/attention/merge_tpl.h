/* merge_tpl.h – joins what attention has accumulated over other keys. */
#if !defined T || !defined EACH_ROWS
#    error "merge_tpl.h needs f32.h or f64.h (what it computes with), and product_tpl.h"
#endif

/* Stores the first of LANES numbers, which may be all. */
static inline void FN(store_first)(T *to, V v, ptrdiff_t count)
{
    T all[LANES];
    VOP(store)(all, v);
    memcpy(to, all, (size_t)count * sizeof *to);
}

/* LANES rows at a time: first their factors, then what these multiply. */
static void FN(merge)(const am_flash_rows *whole, const am_flash_rows *split)
{
    const V unit = VOP(set1)((T)whole->unit);
    T *running_max = whole->running_max, *const sums[] = {whole->sum, whole->exact_sum},
      *row_max = whole->row_max, *out = whole->out;
    const T *other_max = split->running_max, *const more[] = {split->sum, split->exact_sum},
            *most = split->row_max, *from = split->out;
    for (ptrdiff_t row = 0; row < whole->rows; row += LANES) {
        const ptrdiff_t count = whole->rows - row < LANES ? whole->rows - row : LANES;
        const V own = VOP(load_part)(running_max + row, count),
                other = VOP(load_part)(other_max + row, count), both = VOP(max)(own, other),
                base = VOP(max)(both, VOP(set1)(-GREATEST)),
                own_factor = FN(exp2)(VOP(mul)(VOP(sub)(own, base), unit)),
                other_factor = FN(exp2)(VOP(mul)(VOP(sub)(other, base), unit));
        FN(store_first)(running_max + row, both, count);
        for (int i = 0; i < 2; i++) {
            if (!sums[i]) continue;
            const V own_sum = VOP(mul)(own_factor, VOP(load_part)(sums[i] + row, count)),
                    other_sum = VOP(mul)(other_factor, VOP(load_part)(more[i] + row, count));
            FN(store_first)(sums[i] + row, VOP(add)(own_sum, other_sum), count);
        }
        for (ptrdiff_t r = row; row_max && r < row + count; r++)
            if (most[r] > row_max[r]) row_max[r] = most[r];
        T own_factors[LANES], other_factors[LANES];
        VOP(store)(own_factors, own_factor);
        VOP(store)(other_factors, other_factor);
        for (ptrdiff_t r = 0; r < count; r++, out += whole->out_dim, from += split->out_dim) {
            const V a = VOP(set1)(own_factors[r]), b = VOP(set1)(other_factors[r]);
            for (ptrdiff_t i = 0; i < whole->out_dim; i += LANES) {
                const V x = VOP(mul)(a, VOP(load)(out + i)), y = VOP(mul)(b, VOP(load)(from + i));
                VOP(store)(out + i, VOP(add)(x, y));
            }
        }
    }
}
