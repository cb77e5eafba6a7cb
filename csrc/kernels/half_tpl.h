/* half_tpl.h – sixteen-bit floats to float32 and back: less than a vector of them, or whole rows. */

#ifndef V_PARTS_16
static inline vf FN(vf_load_part)(const uint16_t *p, ptrdiff_t count)
{
    uint16_t part[VF_LANES] = {0};
    copy_part(part, p, count);
    return FN(vf_load)(part);
}

static inline void FN(vf_store_part)(uint16_t *p, vf v, ptrdiff_t count)
{
    uint16_t part[VF_LANES];
    FN(vf_store)(part, v);
    copy_part(p, part, count);
}
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
