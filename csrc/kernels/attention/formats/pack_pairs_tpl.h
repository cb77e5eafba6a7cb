/* pack_pairs_tpl.h – packs values as bf16x2. */
#if !defined T || !defined S || !defined LOAD_SOME || !defined FROM
#    error "pack_pairs_tpl.h needs f32.h, S (an element), LOAD_SOME (some as bfloat16) and FROM(name)"
#endif

/* Packs up to a panel's columns of some rows into `lanes` rows of bf16x2. Adds 0 × what it reads to `nothing`
 * unless that is NULL, and prefetches as many lines as it reads. */
INLINE void FROM(pack_panel)(float *dst, ptrdiff_t lanes, const S *src, ptrdiff_t stride, ptrdiff_t rows,
                             ptrdiff_t columns, vf nothing[2], prefetch_lines *prefetch)
{
    prefetch_lines current = *prefetch;
    const ptrdiff_t some = columns < PANEL_f32 ? columns : PANEL_f32;
    for (ptrdiff_t r = 0; r < 2 * lanes; r += 2, dst += PANEL_f32) {
        vf row[2], bf16x2[2];
        for (ptrdiff_t i = 0; i < 2; i++) {
            row[i] = r + i < rows ? LOAD_SOME(src + (r + i) * stride, some) : vf_set1(0);
        }
        vf_interleave_bf16x2(row[0], row[1], &bf16x2[0], &bf16x2[1]);
        prefetch_few(&current, 2, true);
        for (ptrdiff_t i = 0; i < 2; i++) {
            vf_store(dst + i * VF_LANES, bf16x2[i]);
            if (nothing) nothing[i] = vf_fma_bf16x2(bf16x2[i], vf_set1(0), nothing[i]);
        }
    }
    *prefetch = current;
}

static bool FROM(pack_values)(void *to, const am_rows *from, ptrdiff_t rows, ptrdiff_t head_dim,
                              const void *scales)
{
    (void)scales;
    const ptrdiff_t whole = whole_panels_f32(rows), run = from->run && from->run < whole ? from->run : whole;
    float *dst = to;
    vf nothing[] = {vf_set1(0), vf_set1(0)};
    prefetch_lines none = prefetch_nothing(from->data);
    for (ptrdiff_t i = 0; i < head_dim; i += PANEL_f32, dst += AM_FLASH_TILE / 2 * PANEL_f32) {
        for (ptrdiff_t r = 0; r < whole; r += run) {
            const bool missing = r >= rows;
            const S *src = missing ? from->data : row_at(from, r);
            FROM(pack_panel)(dst + r / 2 * PANEL_f32, run / 2, src + i, from->stride / (ptrdiff_t)sizeof(S),
                             missing ? 0 : rows - r, head_dim - i, nothing, &none);
        }
    }
    return vf_total(vf_add(nothing[0], nothing[1])) == 0;
}

#undef S
#undef LOAD_SOME
#undef FROM
