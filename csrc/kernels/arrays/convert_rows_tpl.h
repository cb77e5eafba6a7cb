/* convert_rows_tpl.h – whole rows of sixteen-bit floats to float32 and back. */
#ifndef FN
#    error "convert_rows_tpl.h needs FN(name) (for one kind of these floats)"
#endif

static void FN(widen)(float *dst, const uint16_t *src, ptrdiff_t count)
{
    ptrdiff_t i = 0;
    for (; i + VF_LANES <= count; i += VF_LANES) vf_store(dst + i, FN(vf_load)(src + i));
    if (i < count) vf_store_part(dst + i, FN(vf_load_part)(src + i, count - i), count - i);
}

static void FN(narrow)(uint16_t *dst, const float *src, ptrdiff_t count)
{
    ptrdiff_t i = 0;
    for (; i + VF_LANES <= count; i += VF_LANES) FN(vf_store)(dst + i, vf_load(src + i));
    if (i < count) FN(vf_store_part)(dst + i, vf_load_part(src + i, count - i), count - i);
}

#undef FN
