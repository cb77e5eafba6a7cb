/* half_tpl.h – loads and stores less than a vector of sixteen-bit floats. */
#ifndef FN
#    error "half_tpl.h needs FN(name) (for one kind of these floats)"
#endif

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

#undef FN
