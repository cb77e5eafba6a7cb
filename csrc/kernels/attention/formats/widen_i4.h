/* widen_i4.h – numbers of four bits, two in a byte, by the scales and offsets of their groups. What a group's
 * sixteen numbers stand for is a table in a register, from which vectors pick. */
#ifndef AM_KERNELS_ATTENTION_FORMATS_WIDEN_I4_H
#define AM_KERNELS_ATTENTION_FORMATS_WIDEN_I4_H

#include "kernels/level.h"

#ifdef __AVX512F__
/* What the numbers 0 to 15 of a group stand for. */
static inline __m512 table_i4(const float *group)
{
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(group[0]), numbers), _mm512_set1_ps(group[1]));
}
#endif

#ifdef __AVX512BF16__
/* As bfloat16. A lane of 32 bits gets both numbers of a byte as indices of a table of 32 numbers: above the
 * four bits of the first there is one of the second, so the table has each number twice. */
INLINE void widen_groups_bf16(uint16_t *dst, const uint8_t *src, const float *groups, const ptrdiff_t group,
                              ptrdiff_t count)
{
    const __m512i twice = _mm512_set1_epi32(0x1001);
    for (const uint16_t *end = dst + count; dst < end; groups += 2, src += group / 2, dst += group) {
        const __m256i once = (__m256i)_mm512_cvtneps_pbh(table_i4(groups));
        const __m512i table = _mm512_broadcast_i64x4(once);
        UNROLL(4)
        for (ptrdiff_t i = 0; i < group; i += 32) {
            const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(src + i / 2)));
            _mm512_storeu_si512(dst + i, _mm512_permutexvar_epi16(_mm512_madd_epi16(bytes, twice), table));
        }
    }
}

static void widen_i4_bf16(void *to, const void *from, const float *groups, ptrdiff_t group, ptrdiff_t count)
{
    switch (group) {
    case 32: widen_groups_bf16(to, from, groups, 32, count); break;
    case 64: widen_groups_bf16(to, from, groups, 64, count); break;
    default: widen_groups_bf16(to, from, groups, 128, count); break;
    }
}
#else
static void widen_i4_f32(void *restrict to, const void *restrict from, const float *groups, ptrdiff_t group,
                         ptrdiff_t count)
{
    float *dst = to;
    const uint8_t *src = from;
    for (ptrdiff_t begin = 0; begin < count; begin += group, groups += 2) {
#    ifdef __AVX512F__
        const __m512 table = table_i4(groups);
        for (ptrdiff_t i = 0; i < group; i += 16, src += 8, dst += 16) {
            const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)src)),
                          both = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
            _mm512_storeu_ps(dst, _mm512_permutexvar_ps(both, table));
        }
#    elif defined V_I4
        const vf scale = vf_set1(groups[0]), offset = vf_set1(groups[1]);
        for (ptrdiff_t i = 0; i < group; i += 4 * VF_LANES, src += 2 * VF_LANES) {
            vf numbers[4];
            vf_load_i4(src, numbers);
            UNROLL(4)
            for (int j = 0; j < 4; j++, dst += VF_LANES)
                vf_store(dst, vf_add(vf_mul(scale, numbers[j]), offset));
        }
#    else
        const float scale = groups[0], offset = groups[1];
        for (ptrdiff_t i = 0; i < group / 2; i++) {
            dst[2 * i] = scale * (float)(src[i] & 15) + offset;
            dst[2 * i + 1] = scale * (float)(src[i] >> 4) + offset;
        }
        src += group / 2, dst += group;
#    endif
    }
}
#endif

#endif
