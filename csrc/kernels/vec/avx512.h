/* avx512.h – vectors of 64 bytes with AVX-512 F, BW, DQ and VL. */
#ifndef AM_KERNELS_VEC_AVX512_H
#define AM_KERNELS_VEC_AVX512_H

#include <assert.h>
#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/unroll.h"

#define VF_LANES 16
#define V_STRIP 12 /* the number of rows of a strip: see baseline.h */
#define VD_LANES 8
typedef __m512 vf;
typedef __m512d vd;

static inline __mmask16 v_mask_32(ptrdiff_t count) { return (__mmask16)((1u << count) - 1); }
static inline __mmask8 v_mask_64(ptrdiff_t count) { return (__mmask8)((1u << count) - 1); }

static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline vf vf_load_part(const float *p, ptrdiff_t count)
{
    return _mm512_maskz_loadu_ps(v_mask_32(count), p);
}
static inline void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
static inline void vf_store_part(float *p, vf v, ptrdiff_t count)
{
    _mm512_mask_storeu_ps(p, v_mask_32(count), v);
}
static inline void vf_stream(float *p, vf v) { _mm512_stream_ps(p, v); }
static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
/* Shift lanes up or down by `count`; zeros come in. */
#define V_ZERO _mm512_setzero_si512()
#define V_UP_32(v, count)                                                                                    \
    _mm512_castsi512_ps(_mm512_alignr_epi32(_mm512_castps_si512(v), V_ZERO, 16 - (count)))
#define V_DOWN_32(v, count) _mm512_castsi512_ps(_mm512_alignr_epi32(V_ZERO, _mm512_castps_si512(v), count))
#define V_UP_64(v, count)                                                                                    \
    _mm512_castsi512_pd(_mm512_alignr_epi64(_mm512_castpd_si512(v), V_ZERO, 8 - (count)))
#define V_DOWN_64(v, count) _mm512_castsi512_pd(_mm512_alignr_epi64(V_ZERO, _mm512_castpd_si512(v), count))
/* Moves lanes one up; the last one of `below` comes in. */
static inline vf vf_move_up(vf v, vf below)
{
    return _mm512_castsi512_ps(_mm512_alignr_epi32(_mm512_castps_si512(v), _mm512_castps_si512(below), 15));
}
static inline vd vd_move_up(vd v, vd below)
{
    return _mm512_castsi512_pd(_mm512_alignr_epi64(_mm512_castpd_si512(v), _mm512_castpd_si512(below), 7));
}
/* Running sums from the first lane up, or from the last lane down. Every lane of `total` is the sum of all
 * lanes. */
static inline vf vf_scan(vf v, vf *total)
{
    v = vf_add(v, V_UP_32(v, 1));
    v = vf_add(v, V_UP_32(v, 2));
    v = vf_add(v, V_UP_32(v, 4));
    v = vf_add(v, V_UP_32(v, 8));
    *total = _mm512_permutexvar_ps(_mm512_set1_epi32(15), v);
    return v;
}
static inline vf vf_scan_back(vf v, vf *total)
{
    v = vf_add(v, V_DOWN_32(v, 1));
    v = vf_add(v, V_DOWN_32(v, 2));
    v = vf_add(v, V_DOWN_32(v, 4));
    v = vf_add(v, V_DOWN_32(v, 8));
    *total = _mm512_broadcastss_ps(_mm512_castps512_ps128(v));
    return v;
}
static inline float vf_first(vf v) { return _mm_cvtss_f32(_mm512_castps512_ps128(v)); }

static inline vd vd_load(const double *p) { return _mm512_loadu_pd(p); }
static inline vd vd_load_part(const double *p, ptrdiff_t count)
{
    return _mm512_maskz_loadu_pd(v_mask_64(count), p);
}
static inline void vd_store(double *p, vd v) { _mm512_storeu_pd(p, v); }
static inline void vd_store_part(double *p, vd v, ptrdiff_t count)
{
    _mm512_mask_storeu_pd(p, v_mask_64(count), v);
}
static inline void vd_stream(double *p, vd v) { _mm512_stream_pd(p, v); }
static inline vd vd_set1(double x) { return _mm512_set1_pd(x); }
static inline vd vd_add(vd a, vd b) { return _mm512_add_pd(a, b); }
static inline vd vd_mul(vd a, vd b) { return _mm512_mul_pd(a, b); }
static inline vd vd_scan(vd v, vd *total)
{
    v = vd_add(v, V_UP_64(v, 1));
    v = vd_add(v, V_UP_64(v, 2));
    v = vd_add(v, V_UP_64(v, 4));
    *total = _mm512_permutexvar_pd(_mm512_set1_epi64(7), v);
    return v;
}
static inline vd vd_scan_back(vd v, vd *total)
{
    v = vd_add(v, V_DOWN_64(v, 1));
    v = vd_add(v, V_DOWN_64(v, 2));
    v = vd_add(v, V_DOWN_64(v, 4));
    *total = _mm512_broadcastsd_pd(_mm512_castpd512_pd128(v));
    return v;
}
static inline double vd_first(vd v) { return _mm_cvtsd_f64(_mm512_castpd512_pd128(v)); }

static inline vd vf_widen_low(vf v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
static inline vd vf_widen_high(vf v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
static inline vf vd_narrow(vd low, vd high)
{
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
}

static inline __m256i v_load_part_16(const uint16_t *p, ptrdiff_t count)
{
    return _mm256_maskz_loadu_epi16(v_mask_32(count), p);
}
static inline vf v_from_f16(__m256i halves) { return _mm512_cvtph_ps(halves); }
static inline vf vf_load_f16(const uint16_t *p) { return v_from_f16(_mm256_loadu_si256((const __m256i *)p)); }
static inline __m256i v_to_f16(vf v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
static inline void vf_store_f16(uint16_t *p, vf v) { _mm256_storeu_si256((__m256i *)p, v_to_f16(v)); }
static inline void vf_stream_f16(uint16_t *p, vf v) { _mm256_stream_si256((__m256i *)p, v_to_f16(v)); }
static inline vf v_from_bf16(__m256i halves)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    return v_from_bf16(_mm256_loadu_si256((const __m256i *)p));
}
/* VCVTNEPS2BF16 is not used, since it flushes subnormal numbers to zero. */
static inline __m256i v_to_bf16(vf v)
{
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    __m512i half = _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16);
    return _mm512_cvtepi32_epi16(half);
}
static inline void vf_store_bf16(uint16_t *p, vf v) { _mm256_storeu_si256((__m256i *)p, v_to_bf16(v)); }
static inline void vf_stream_bf16(uint16_t *p, vf v) { _mm256_stream_si256((__m256i *)p, v_to_bf16(v)); }
#define V_PARTS_16
static inline vf vf_load_part_f16(const uint16_t *p, ptrdiff_t count)
{
    return v_from_f16(v_load_part_16(p, count));
}
static inline vf vf_load_part_bf16(const uint16_t *p, ptrdiff_t count)
{
    return v_from_bf16(v_load_part_16(p, count));
}
static inline void vf_store_part_f16(uint16_t *p, vf v, ptrdiff_t count)
{
    _mm256_mask_storeu_epi16(p, v_mask_32(count), v_to_f16(v));
}
static inline void vf_store_part_bf16(uint16_t *p, vf v, ptrdiff_t count)
{
    _mm256_mask_storeu_epi16(p, v_mask_32(count), v_to_bf16(v));
}

/* Lines of bfloat16, which are loaded whole: they become a vector of the numbers at even places, and one of
 * those at odd places, in half as many steps as two vectors in order. vf_split_32 puts vectors that lie in
 * order in that order, and vf_join_32 puts them back. */
#define V_LINES
static inline vf vf_load_line_bf16(const uint16_t *p) { return _mm512_castsi512_ps(_mm512_loadu_si512(p)); }
static inline vf vf_load_part_line_bf16(const uint16_t *p, ptrdiff_t count)
{
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((__mmask32)((UINT64_C(1) << count) - 1), p));
}
static inline vf vf_even_bf16(vf line)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(line), 16));
}
static inline vf vf_odd_bf16(vf line)
{
    return _mm512_and_ps(line, _mm512_castsi512_ps(_mm512_set1_epi32((int)0xffff0000)));
}
/* Two vectors of a line; or one in order. */
static inline void vf_load_columns_bf16(const uint16_t *p, const bool two, vf *first, vf *second)
{
    if (two) {
        const vf line = vf_load_line_bf16(p);
        *first = vf_even_bf16(line), *second = vf_odd_bf16(line);
    } else {
        *first = *second = vf_load_bf16(p);
    }
}
static inline void vf_split_32(vf *first, vf *second)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                  odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const vf x = *first, y = *second;
    *first = _mm512_permutex2var_ps(x, even, y);
    *second = _mm512_permutex2var_ps(x, odd, y);
}
static inline void vf_join_32(vf *first, vf *second)
{
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                  high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const vf x = *first, y = *second;
    *first = _mm512_permutex2var_ps(x, low, y);
    *second = _mm512_permutex2var_ps(x, high, y);
}

/* Loads up to 32 bytes; what is missing is zero. */
static inline __m256i v_load_some_8(const void *p, ptrdiff_t count)
{
    return _mm256_maskz_loadu_epi8((__mmask32)((UINT64_C(1) << count) - 1), p);
}
/* Copies up to 32 bytes, and makes the others up to there `rest`. */
static inline void v_copy_some_8(void *to, const void *from, ptrdiff_t count, int rest)
{
    const __mmask32 some = (__mmask32)((UINT64_C(1) << count) - 1);
    _mm256_storeu_si256(to, _mm256_mask_loadu_epi8(_mm256_set1_epi8((char)rest), some, from));
}
static inline vf vf_load_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* By way of float16, of which subnormal numbers are converted without delay. */
static inline vf vf_load_f8(const uint8_t *p)
{
    __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    half = _mm256_and_si256(half, _mm256_set1_epi16((int16_t)0xbf80));
    __mmask16 is_finite =
        _mm256_test_epi16_mask(_mm256_xor_si256(half, _mm256_set1_epi16(0x3f80)), _mm256_set1_epi16(0x3f80));
    half = _mm256_mask_blend_epi16(is_finite, _mm256_set1_epi16(0x7e00), half);
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(0x1p8f));
}
/* Turns so many float8 at once into float16 of 2^-8 their value, subnormal ones too. For NaN it writes 1.875,
 * and sets a byte of `most` to 255. */
#define V_F8 64
typedef __m512i v_bytes;
static inline void v_f8_to_f16(uint16_t *to, const uint8_t *from, v_bytes *most)
{
    *most = _mm512_max_epu8(*most, _mm512_or_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(-128)));
    for (int i = 0; i < V_F8; i += 32) {
        __m512i half =
            _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(from + i))), 7);
        _mm512_storeu_si512(to + i, _mm512_and_si512(half, _mm512_set1_epi16((int16_t)0xbf80)));
    }
}
static inline bool v_any_255(v_bytes most) { return _mm512_cmpeq_epi8_mask(most, _mm512_set1_epi8(-1)) != 0; }

/* Operations of attention. vf_max(a, b) is the greater number, or b if either is NaN. vf_select takes lane i
 * of x if bit i is set, else that of y. */
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* Multiplies and adds the lower half of the lanes; the upper half of the result is undefined. It takes half
 * the time on processors that execute a vector as two of 256 bits, such as Zen 4. */
#define V_FMA_HALF
static inline vf vf_fma_half(vf a, vf b, vf c)
{
    return _mm512_castps256_ps512(
        _mm256_fmadd_ps(_mm512_castps512_ps256(a), _mm512_castps512_ps256(b), _mm512_castps512_ps256(c)));
}
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_pick_less(vf a, vf b, vf x, vf y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
static inline vf vf_pick_equal(vf a, vf b, vf x, vf y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), y, x);
}
static inline vf vf_select(uint64_t bits, vf x, vf y) { return _mm512_mask_blend_ps((__mmask16)bits, y, x); }
/* vf_take_whole subtracts the nearest whole number from *x and returns it. vf_times_power returns v times
 * 2^whole, or 0 if whole <= -126. The processor has instructions for both. */
#define V_POWERS
static inline vf vf_take_whole(vf *x)
{
    vf whole = _mm512_roundscale_ps(*x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    *x = vf_sub(*x, whole);
    return whole;
}
static inline vf vf_times_power(vf v, vf whole)
{
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(whole, vf_set1(-126), _CMP_NLE_UQ), v, whole);
}
static inline float vf_highest(vf v) { return _mm512_reduce_max_ps(v); }
/* The bits of lanes that exceed their limits. */
static inline uint64_t vf_exceeding(vf v, vf limit) { return _mm512_cmp_ps_mask(v, limit, _CMP_GT_OQ); }
static inline float vf_total(vf v) { return _mm512_reduce_add_ps(v); }
/* Lane j of vector i becomes lane i of vector j. */
static inline void vf_transpose(vf v[VF_LANES])
{
    vf pairs[16], fours[16];
    UNROLL(16)
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    UNROLL(16)
    for (int i = 0; i < 16; i += 4) {
        fours[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        fours[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
        fours[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        fours[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    /* Column c lies in quarter c / 4 of vector c % 4 of each group of four. */
    UNROLL(16)
    for (int i = 0; i < 4; i++) {
        vf low = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0x88);
        vf high = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0x88);
        v[i] = _mm512_shuffle_f32x4(low, high, 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(low, high, 0xdd);
        low = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0xdd);
        high = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0xdd);
        v[i + 4] = _mm512_shuffle_f32x4(low, high, 0x88);
        v[i + 12] = _mm512_shuffle_f32x4(low, high, 0xdd);
    }
}
/* Lanes are numbers, or integers of 32 bits if `integers`. */
static inline vf v_add_lanes(vf a, vf b, const bool integers)
{
    return integers ? _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)))
                    : vf_add(a, b);
}
/* V_PAIRS: lanes are added up in two functions, of which the first makes one vector of two. */
#define V_PAIRS
static inline vf v_add_pair(const vf v[2], const bool integers)
{
    return v_add_lanes(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]), integers);
}
INLINE vf v_totals_of_pairs(const vf pairs[VF_LANES / 2], const bool integers)
{
    vf twos[4], sums[2];
    UNROLL(16)
    for (int i = 0; i < 4; i++) {
        twos[i] = v_add_lanes(_mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44),
                              _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xee), integers);
    }
    UNROLL(16)
    for (int i = 0; i < 2; i++) {
        sums[i] = v_add_lanes(_mm512_shuffle_f32x4(twos[2 * i], twos[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(twos[2 * i], twos[2 * i + 1], 0xdd), integers);
    }
    return v_add_lanes(_mm512_shuffle_f32x4(sums[0], sums[1], 0x88),
                       _mm512_shuffle_f32x4(sums[0], sums[1], 0xdd), integers);
}
static inline vf vf_add_pair(const vf v[2]) { return v_add_pair(v, false); }
static inline vf vf_totals_of_pairs(const vf pairs[VF_LANES / 2]) { return v_totals_of_pairs(pairs, false); }
/* Lane i of the result is the sum of the lanes of vector i. */
static inline vf vf_totals(const vf v[VF_LANES])
{
    vf pairs[VF_LANES / 2];
    UNROLL(16)
    for (int i = 0; i < VF_LANES / 2; i++) pairs[i] = vf_add_pair(v + 2 * i);
    return vf_totals_of_pairs(pairs);
}
/* The totals of V_FEW vectors: the bits of `totals`, in fewer steps. */
#define V_FEW 4
static inline vf vf_totals_of_few(const vf v[V_FEW])
{
    const vf left = vf_add_pair(v), right = vf_add_pair(v + 2);
    vf sum = vf_add(_mm512_shuffle_ps(left, right, 0x44), _mm512_shuffle_ps(left, right, 0xee));
    sum = vf_add(_mm512_shuffle_f32x4(sum, sum, 0x88), _mm512_shuffle_f32x4(sum, sum, 0xdd));
    return vf_add(_mm512_shuffle_f32x4(sum, sum, 0x88), _mm512_shuffle_f32x4(sum, sum, 0xdd));
}

static inline vd vd_sub(vd a, vd b) { return _mm512_sub_pd(a, b); }
static inline vd vd_div(vd a, vd b) { return _mm512_div_pd(a, b); }
static inline vd vd_fma(vd a, vd b, vd c) { return _mm512_fmadd_pd(a, b, c); }
static inline vd vd_max(vd a, vd b) { return _mm512_max_pd(a, b); }
static inline vd vd_pick_less(vd a, vd b, vd x, vd y)
{
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), y, x);
}
static inline vd vd_pick_equal(vd a, vd b, vd x, vd y)
{
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ), y, x);
}
static inline vd vd_select(uint64_t bits, vd x, vd y) { return _mm512_mask_blend_pd((__mmask8)bits, y, x); }
/* In float64 vd_take_whole rounds to eighths, whose powers are in a table. That saves four multiplications,
 * and its own steps run at the same time as others. The low bits of the number select a power, and scalef
 * takes its whole part. vd_times_power returns 0 if whole <= -1022. */
#define VD_EIGHTHS
static inline vd vd_take_whole(vd *x)
{
    vd whole = _mm512_roundscale_pd(*x, 3 << 4 | _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    *x = vd_sub(*x, whole);
    return whole;
}
static inline vd vd_times_power(vd v, vd whole)
{
    static const double powers[] = {1.0,
                                    1.0905077326652577,
                                    1.189207115002721,
                                    1.2968395546510096,
                                    1.4142135623730951,
                                    1.5422108254079407,
                                    1.681792830507429,
                                    1.8340080864093424};
    __m512i eighths = _mm512_castpd_si512(vd_add(whole, vd_set1(0x1.8p49)));
    return _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(whole, vd_set1(-1022), _CMP_NLE_UQ),
                                  vd_mul(v, _mm512_permutexvar_pd(eighths, vd_load(powers))), whole);
}
static inline double vd_highest(vd v) { return _mm512_reduce_max_pd(v); }
static inline uint64_t vd_exceeding(vd v, vd limit) { return _mm512_cmp_pd_mask(v, limit, _CMP_GT_OQ); }
static inline double vd_total(vd v) { return _mm512_reduce_add_pd(v); }
static inline void vd_transpose(vd v[VD_LANES])
{
    vd pairs[8];
    UNROLL(16)
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm512_unpacklo_pd(v[i], v[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_pd(v[i], v[i + 1]);
    }
    /* Column c lies in quarter c / 2 of vector c % 2 of each pair. */
    UNROLL(16)
    for (int i = 0; i < 2; i++) {
        vd low = _mm512_shuffle_f64x2(pairs[i], pairs[i + 2], 0x88);
        vd high = _mm512_shuffle_f64x2(pairs[i + 4], pairs[i + 6], 0x88);
        v[i] = _mm512_shuffle_f64x2(low, high, 0x88);
        v[i + 4] = _mm512_shuffle_f64x2(low, high, 0xdd);
        low = _mm512_shuffle_f64x2(pairs[i], pairs[i + 2], 0xdd);
        high = _mm512_shuffle_f64x2(pairs[i + 4], pairs[i + 6], 0xdd);
        v[i + 2] = _mm512_shuffle_f64x2(low, high, 0x88);
        v[i + 6] = _mm512_shuffle_f64x2(low, high, 0xdd);
    }
}
static inline vd vd_add_pair(const vd v[2])
{
    return vd_add(_mm512_unpacklo_pd(v[0], v[1]), _mm512_unpackhi_pd(v[0], v[1]));
}
static inline vd vd_totals_of_pairs(const vd pairs[VD_LANES / 2])
{
    vd sums[2];
    UNROLL(16)
    for (int i = 0; i < 2; i++) {
        sums[i] = vd_add(_mm512_shuffle_f64x2(pairs[2 * i], pairs[2 * i + 1], 0x88),
                         _mm512_shuffle_f64x2(pairs[2 * i], pairs[2 * i + 1], 0xdd));
    }
    return vd_add(_mm512_shuffle_f64x2(sums[0], sums[1], 0x88), _mm512_shuffle_f64x2(sums[0], sums[1], 0xdd));
}
static inline vd vd_totals(const vd v[VD_LANES])
{
    vd pairs[VD_LANES / 2];
    UNROLL(16)
    for (int i = 0; i < VD_LANES / 2; i++) pairs[i] = vd_add_pair(v + 2 * i);
    return vd_totals_of_pairs(pairs);
}
static inline vd vd_totals_of_few(const vd v[V_FEW])
{
    const vd left = vd_add_pair(v), right = vd_add_pair(v + 2),
             sum = vd_add(_mm512_shuffle_f64x2(left, right, 0x88), _mm512_shuffle_f64x2(left, right, 0xdd));
    return vd_add(_mm512_shuffle_f64x2(sum, sum, 0x88), _mm512_shuffle_f64x2(sum, sum, 0xdd));
}

/* Two sixteen-bit integers in a lane, with sums of 32 bits. vf_fma_i16x2 adds both products of a lane to c.
 * V_I8X4: there are dot products of bytes, too. */
#ifdef __AVX512VNNI__
#    define V_I8X4
static inline vf vf_fma_i16x2(vf a, vf b, vf c)
{
    return _mm512_castsi512_ps(
        _mm512_dpwssd_epi32(_mm512_castps_si512(c), _mm512_castps_si512(a), _mm512_castps_si512(b)));
}
#else
static inline vf vf_fma_i16x2(vf a, vf b, vf c)
{
    return v_add_lanes(_mm512_castsi512_ps(_mm512_madd_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b))),
                       c, true);
}
#endif
static inline __m512i v_load_i16(const int8_t *p)
{
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
static inline vf vf_load_i16x2(const int8_t *p) { return _mm512_castsi512_ps(v_load_i16(p)); }
static inline vf vf_load_part_i16x2(const int8_t *p, ptrdiff_t count)
{
    return _mm512_castsi512_ps(_mm512_cvtepi8_epi16(v_load_some_8(p, count)));
}
/* Joins each number of the row at a with that of the row at b. Of eight neighbours the first four go to
 * `first`, the others to `second`; vf_straighten puts sums of these in order. */
static inline void v_join_16(__m512i a, __m512i b, vf *first, vf *second)
{
    *first = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
    *second = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
}
static inline void vf_join_i16x2(const int8_t *a, const int8_t *b, vf *first, vf *second)
{
    v_join_16(v_load_i16(a), v_load_i16(b), first, second);
}
static inline void vf_straighten(vf sums[2])
{
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
                  high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const vf x = sums[0], y = sums[1];
    sums[0] = _mm512_permutex2var_ps(x, low, y);
    sums[1] = _mm512_permutex2var_ps(x, high, y);
}
/* Joins whole vectors of bytes, in fewer steps. Of sixteen neighbours the first eight go to `first` and
 * `second`, the others to `third` and `fourth`, those at even places before those at odd ones;
 * vf_straighten_wide puts sums of these in order. Each word of `words` has a number as its high byte. */
static inline void v_join_bytes(const void *a, const void *b, __m512i words[4])
{
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    words[1] = _mm512_unpacklo_epi16(x, y);
    words[3] = _mm512_unpackhi_epi16(x, y);
    words[0] = _mm512_slli_epi16(words[1], 8);
    words[2] = _mm512_slli_epi16(words[3], 8);
}
static inline void vf_join_wide_i16x2(const int8_t *a, const int8_t *b, vf *first, vf *second, vf *third,
                                      vf *fourth)
{
    __m512i words[4];
    v_join_bytes(a, b, words);
    vf *const to[] = {first, second, third, fourth};
    UNROLL(4)
    for (int i = 0; i < 4; i++) *to[i] = _mm512_castsi512_ps(_mm512_srai_epi16(words[i], 8));
}
static inline void vf_straighten_wide(vf sums[4])
{
    vf_join_32(&sums[0], &sums[1]);
    vf_join_32(&sums[2], &sums[3]);
    const vf low = sums[1], high = sums[2];
    sums[1] = _mm512_shuffle_f32x4(sums[0], high, 0xee);
    sums[0] = _mm512_shuffle_f32x4(sums[0], high, 0x44);
    sums[2] = _mm512_shuffle_f32x4(low, sums[3], 0x44);
    sums[3] = _mm512_shuffle_f32x4(low, sums[3], 0xee);
}
static inline vf vf_of_i32(vf sums) { return _mm512_cvtepi32_ps(_mm512_castps_si512(sums)); }
static inline vf vf_add_pair_i32(const vf v[2]) { return v_add_pair(v, true); }
static inline vf vf_totals_of_pairs_i32(const vf pairs[VF_LANES / 2])
{
    return vf_of_i32(v_totals_of_pairs(pairs, true));
}
/* Rounds the lanes of `first`, then those of `second`, to sixteen-bit integers, at most the greatest one. */
static inline vf vf_narrow_i16x2(vf first, vf second)
{
    const __m512i both = _mm512_packs_epi32(_mm512_cvtps_epi32(first), _mm512_cvtps_epi32(second));
    return _mm512_castsi512_ps(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), both));
}
/* The greater of the magnitude of x and a number that is not negative; and the greatest lane of such numbers.
 * NaN is greater than all numbers. */
static inline vf vf_greater(vf x, vf most)
{
    const __m512i magnitude = _mm512_and_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    return _mm512_castsi512_ps(_mm512_max_epi32(magnitude, _mm512_castps_si512(most)));
}
static inline float vf_greatest(vf x)
{
    const int32_t bits = _mm512_reduce_max_epi32(_mm512_castps_si512(x));
    float greatest;
    memcpy(&greatest, &bits, sizeof greatest);
    return greatest;
}

#ifdef __AVX512BF16__
/* Two bfloat16 in a lane. vf_fma_bf16x2 adds both products of a lane to c; subnormal numbers count as 0. */
#    define V_BF16X2
static inline vf vf_fma_bf16x2(vf a, vf b, vf c)
{
#    ifdef __clang__
    __asm__("" : "+v"(a)); /* clang 16 crashes if it sees that all lanes are equal */
#    endif
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
#    define V_FMA_HALF_BF16X2
static inline vf vf_fma_half_bf16x2(vf a, vf b, vf c)
{
    return _mm512_castps256_ps512(_mm256_dpbf16_ps(_mm512_castps512_ps256(c),
                                                   (__m256bh)_mm256_castps_si256(_mm512_castps512_ps256(a)),
                                                   (__m256bh)_mm256_castps_si256(_mm512_castps512_ps256(b))));
}
/* Loads `count` numbers; the others are zero. */
static inline vf vf_load_some_bf16x2(const uint16_t *p, ptrdiff_t count)
{
    return vf_load_part_line_bf16(p, count);
}
/* Rounds the lanes of `first`, then those of `second`, to bfloat16. */
static inline vf vf_narrow_bf16x2(vf first, vf second)
{
    return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(second, first));
}
/* Rounds to bfloat16: each lane of the result holds a lane of `low` and that of `high`. */
static inline vf vf_join_bf16x2(vf low, vf high)
{
    static const uint16_t order[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_loadu_si512(order), rounded));
}
/* Interleaves the numbers of `low` and `high`: `first` gets the first halves of both, `second` the second
 * halves. Unpack instructions work in quarters of a vector, so each quarter first gets a piece of both
 * halves. Unlike a permutation of two vectors, that runs at the same time as multiplications. */
static inline void vf_interleave_bf16x2(vf low, vf high, vf *first, vf *second)
{
    const __m512i halves = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i x = _mm512_permutexvar_epi64(halves, _mm512_castps_si512(low));
    __m512i y = _mm512_permutexvar_epi64(halves, _mm512_castps_si512(high));
    *first = _mm512_castsi512_ps(_mm512_unpacklo_epi16(x, y));
    *second = _mm512_castsi512_ps(_mm512_unpackhi_epi16(x, y));
}
/* Loads a vector's lanes of numbers of two rows interleaved. */
static inline vf vf_load_interleaved_bf16x2(const uint16_t *a, const uint16_t *b)
{
    static const uint16_t order[] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)a)),
                  y = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)b));
    return _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, _mm512_loadu_si512(order), y));
}
static inline vf vf_only_bits(vf v, uint32_t bits)
{
    return _mm512_and_ps(v, _mm512_castsi512_ps(_mm512_set1_epi32((int)bits)));
}

/* Turns float8 into bfloat16, or into those of 2^-8 of their value, which takes less: exponent and fraction
 * move to their places in bfloat16, and the exponent is corrected, or bits of it that are not float8's are
 * set. Zero, subnormal numbers and NaN, which are seldom, are looked for, and mended. */
#    define V_F8X2
enum { USUAL_F8 = 0x38 }; /* 1 */
/* Of numbers that are not to be mended; `moved` has them at their places in bfloat16. */
static inline __m512i v_usual_bf16_of_f8(__m512i moved, const bool whole)
{
    const __m512i bits = _mm512_set1_epi16((int16_t)0x87f0), some = _mm512_set1_epi16(0x3800),
                  offset = _mm512_set1_epi16(0x3c00);
    enum { EITHER = 0xea }; /* first & second | third */
    return whole ? _mm512_add_epi16(_mm512_and_si512(moved, bits), offset)
                 : _mm512_ternarylogic_epi64(moved, bits, some, EITHER);
}
/* `wide` has the numbers as words with their sign, and y is what the function above makes of them. */
static inline __m512i v_mend_bf16_of_f8(__m512i y, __m512i wide, const bool whole)
{
    static const uint16_t small[2][16] = {{0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860},
                                          {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60}};
    const __m512i table = _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)small[whole])),
                  sign = _mm512_and_si512(wide, _mm512_set1_epi16(INT16_MIN)), all = _mm512_set1_epi16(0x7f);
    const __mmask32 is_small = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78)),
                    is_nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(wide, all), all);
    y = _mm512_mask_blend_epi16(is_small, y, _mm512_or_si512(sign, _mm512_permutexvar_epi16(wide, table)));
    return _mm512_mask_blend_epi16(is_nan, y, _mm512_set1_epi16(0x7fc0));
}
INLINE __m512i v_bf16_of_f8(__m256i x, const bool whole)
{
    const __m512i wide = _mm512_cvtepi8_epi16(x), y = v_usual_bf16_of_f8(_mm512_slli_epi16(wide, 4), whole);
    /* One more than any that is mended, but for its sign, is at most 8. */
    const __m256i more = _mm256_add_epi8(x, _mm256_set1_epi8(1));
    if (__builtin_expect(_mm256_testn_epi8_mask(more, _mm256_set1_epi8(0x70)) == 0, true)) return y;
    return v_mend_bf16_of_f8(y, wide, whole);
}
static inline __m512i v_load_bf16_of_f8(const uint8_t *p)
{
    return v_bf16_of_f8(_mm256_loadu_si256((const __m256i *)p), false);
}
static inline vf vf_load_f8x2(const uint8_t *p) { return _mm512_castsi512_ps(v_load_bf16_of_f8(p)); }
/* Behind the last number, where queries are zero, this has a 1, since zero takes longer. */
static inline vf vf_load_part_f8x2(const uint8_t *p, ptrdiff_t count)
{
    const __mmask32 some = (__mmask32)((UINT64_C(1) << count) - 1);
    return _mm512_castsi512_ps(
        v_bf16_of_f8(_mm256_mask_loadu_epi8(_mm256_set1_epi8(USUAL_F8), some, p), false));
}
/* As vf_join_i16x2. */
static inline void vf_join_f8x2(const uint8_t *a, const uint8_t *b, vf *first, vf *second)
{
    v_join_16(v_load_bf16_of_f8(a), v_load_bf16_of_f8(b), first, second);
}
/* Those of a vector that are mended, as v_bf16_of_f8 finds them. */
static inline __mmask64 v_mended_f8(const uint8_t *p)
{
    const __m512i more = _mm512_add_epi8(_mm512_loadu_si512(p), _mm512_set1_epi8(1));
    return _mm512_testn_epi8_mask(more, _mm512_set1_epi8(0x70));
}
/* As vf_join_wide_i16x2. */
static inline void vf_join_wide_f8x2(const uint8_t *a, const uint8_t *b, vf *first, vf *second, vf *third,
                                     vf *fourth)
{
    __m512i words[4], y[4];
    v_join_bytes(a, b, words);
    UNROLL(4)
    for (int i = 0; i < 4; i++) y[i] = v_usual_bf16_of_f8(_mm512_srai_epi16(words[i], 4), false);
    if (__builtin_expect((v_mended_f8(a) | v_mended_f8(b)) != 0, false)) {
        UNROLL(4)
        for (int i = 0; i < 4; i++) y[i] = v_mend_bf16_of_f8(y[i], _mm512_srai_epi16(words[i], 8), false);
    }
    vf *const to[] = {first, second, third, fourth};
    UNROLL(4)
    for (int i = 0; i < 4; i++) *to[i] = _mm512_castsi512_ps(y[i]);
}

/* Load up to a vector of numbers of eight bits as bfloat16; what is missing is zero. */
static inline vf v_bf16_of_i8(__m256i x)
{
    const __m512i low = _mm512_cvtepi8_epi32(_mm256_castsi256_si128(x)),
                  high = _mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1));
    return vf_narrow_bf16x2(_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(high));
}
static inline vf vf_load_some_bf16x2_f8(const uint8_t *p, ptrdiff_t count)
{
    return _mm512_castsi512_ps(v_bf16_of_f8(v_load_some_8(p, count), true));
}
static inline vf vf_load_some_bf16x2_i8(const int8_t *p, ptrdiff_t count)
{
    return v_bf16_of_i8(v_load_some_8(p, count));
}
#endif

#ifdef V_AMX /* if the including file needs tiles */
/* Each thread has eight tile registers of up to 16 rows of 64 bytes; `n`, `a`, `b` and `c` are their numbers.
 * vt_fma_bf16x2 adds to each row of c the rows of b times the lanes of the same row of a; a lane holds two
 * bfloat16. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} vt_shapes;
#    ifndef AM_EMULATE
/* Sets the shapes of all tiles; their contents become zero. */
static inline void vt_begin(const vt_shapes *shapes)
{
    __asm__ volatile("ldtilecfg %0" : : "m"(*shapes) : "memory");
}
static inline void vt_end(void) { _tile_release(); }
#        define vt_zero(n) _tile_zero(n)
#        define vt_load(n, p, stride) _tile_loadd(n, p, (stride) * (ptrdiff_t)sizeof(float))
#        define vt_store(n, p, stride) _tile_stored(n, p, (stride) * (ptrdiff_t)sizeof(float))
#        define vt_fma_bf16x2(c, a, b) _tile_dpbf16ps(c, a, b)
#    else
/* Builds for tests emulate tiles in memory, and assert what the processor requires. */
static _Thread_local struct {
    vt_shapes shapes;
    __m512 rows[8][16];
} vt_state;
static inline void vt_begin(const vt_shapes *shapes)
{
    memset(&vt_state, 0, sizeof vt_state);
    vt_state.shapes = *shapes;
}
static inline void vt_end(void) { vt_begin(&(vt_shapes){0}); }
static inline void vt_zero(int n)
{
    assert(vt_state.shapes.rows[n] > 0);
    memset(vt_state.rows[n], 0, sizeof vt_state.rows[n]);
}
static inline void vt_load(int n, const float *p, ptrdiff_t stride)
{
    vt_zero(n);
    for (int row = 0; row < vt_state.shapes.rows[n]; row++)
        memcpy(&vt_state.rows[n][row], p + row * stride, vt_state.shapes.row_bytes[n]);
}
static inline void vt_store(int n, float *p, ptrdiff_t stride)
{
    assert(vt_state.shapes.rows[n] > 0);
    for (int row = 0; row < vt_state.shapes.rows[n]; row++)
        memcpy(p + row * stride, &vt_state.rows[n][row], vt_state.shapes.row_bytes[n]);
}
static inline void vt_fma_bf16x2(int c, int a, int b)
{
    const vt_shapes *s = &vt_state.shapes;
    assert(s->rows[c] > 0 && s->rows[a] == s->rows[c] && s->row_bytes[b] == s->row_bytes[c] &&
           s->row_bytes[a] == s->rows[b] * sizeof(float));
    for (int row = 0; row < s->rows[c]; row++) {
        for (int lane = 0; lane < s->rows[b]; lane++) {
            vf x = vf_set1(vt_state.rows[a][row][lane]);
            vt_state.rows[c][row] = vf_fma_bf16x2(x, vt_state.rows[b][lane], vt_state.rows[c][row]);
        }
    }
}
#    endif
#endif

typedef __m512i vi;
static inline vi vi_set1(uint64_t pattern) { return _mm512_set1_epi64((long long)pattern); }
static inline void vi_store(void *p, vi v) { _mm512_storeu_si512(p, v); }
static inline void vi_stream(void *p, vi v) { _mm512_stream_si512((__m512i *)p, v); }
/* Multiplies the low halves of lanes of 64 bits. */
static inline vi vi_mul_32(vi a, vi b) { return _mm512_mul_epu32(a, b); }
static inline vi vi_load(const void *p) { return _mm512_loadu_si512(p); }

static inline uint64_t v_equal_64(const int32_t *ids, int32_t id)
{
    uint64_t bits = 0;
    for (int i = 0; i < 4; i++) {
        bits |= (uint64_t)_mm512_cmpeq_epi32_mask(vi_load(ids + 16 * i), _mm512_set1_epi32(id)) << (16 * i);
    }
    return bits;
}

/* Bit i of the result is set if element i has a bit in common with `mask`. The v_expand functions do the
 * reverse. */
#define V_BITS(size, type, lanes, lane_mask)                                                                 \
    static inline uint64_t v_nonzero_64x_##size(const void *src, uint64_t mask)                              \
    {                                                                                                        \
        const vi counted = _mm512_set1_epi##size((type)mask);                                                \
        uint64_t bits = 0;                                                                                   \
        for (int i = 0; i < 64 / (lanes); i++)                                                               \
            bits |= (uint64_t)_mm512_test_epi##size##_mask(vi_load((const char *)src + 64 * i), counted)     \
                    << ((lanes) * i);                                                                        \
        return bits;                                                                                         \
    }                                                                                                        \
    static inline void v_expand_64x_##size(void *dst, uint64_t bits, uint64_t live, uint64_t dead)           \
    {                                                                                                        \
        const vi is_live = _mm512_set1_epi##size((type)live), is_dead = _mm512_set1_epi##size((type)dead);   \
        for (int i = 0; i < 64 / (lanes); i++)                                                               \
            vi_store((char *)dst + 64 * i,                                                                   \
                     _mm512_mask_blend_epi##size((lane_mask)(bits >> ((lanes) * i)), is_dead, is_live));     \
    }
V_BITS(8, char, 64, __mmask64)
V_BITS(16, short, 32, __mmask32)
V_BITS(32, int, 16, __mmask16)
V_BITS(64, long long, 8, __mmask8)

/* Makes streaming stores visible to other threads. */
static inline void v_fence(void) { _mm_sfence(); }

#endif
