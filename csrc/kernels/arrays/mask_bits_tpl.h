/* mask_bits_tpl.h – converts up to 64 elements to a word of bits, and back. */
#ifndef SIZE
#    error "mask_bits_tpl.h needs SIZE (the bits of an element)"
#endif
#define NAME_(name, size) name##_##size
#define NAME2(name, size) NAME_(name, size)
#define FN(name) NAME2(name, SIZE)

static uint64_t FN(masked_bits)(const void *src, ptrdiff_t count, uint64_t mask)
{
    if (count == 64) return FN(v_nonzero_64x)(src, mask);
    _Alignas(8) char padded[64 * SIZE / 8] = {0};
    memcpy(padded, src, (size_t)count * SIZE / 8);
    return FN(v_nonzero_64x)(padded, mask);
}

static uint64_t FN(nonzero_bits)(const void *src, ptrdiff_t count)
{
    return FN(masked_bits)(src, count, UINT64_MAX);
}

static void FN(expand_bits)(void *dst, uint64_t bits, ptrdiff_t count, uint64_t live, uint64_t dead)
{
    if (count == 64) {
        FN(v_expand_64x)(dst, bits, live, dead);
        return;
    }
    _Alignas(8) char padded[64 * SIZE / 8];
    FN(v_expand_64x)(padded, bits, live, dead);
    memcpy(dst, padded, (size_t)count * SIZE / 8);
}

#undef NAME_
#undef NAME2
#undef FN
#undef SIZE
