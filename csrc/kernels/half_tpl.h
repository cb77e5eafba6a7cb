/* half_tpl.h – whole rows of sixteen-bit floats to float32 and back. */

static void FN(widen)(float *dst, const uint16_t *src, ptrdiff_t count)
{
    ptrdiff_t i = 0;
    for (; i + VF_LANES <= count; i += VF_LANES) vf_store(dst + i, FN(vf_load)(src + i));
    for (; i < count; i++) dst[i] = FN(am_widen_one)(src[i]);
}

static void FN(narrow)(uint16_t *dst, const float *src, ptrdiff_t count)
{
    ptrdiff_t i = 0;
    for (; i + VF_LANES <= count; i += VF_LANES) FN(vf_store)(dst + i, vf_load(src + i));
    for (; i < count; i++) dst[i] = FN(am_narrow_one)(src[i]);
}

#undef FN
