/* avx2.h – vectors of 32 bytes with AVX2, FMA and F16C. */
#ifndef AM_KERNELS_VEC_AVX2_H
#define AM_KERNELS_VEC_AVX2_H

#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/unroll.h"

#define VF_LANES 8
#define V_STRIP 6 /* the number of rows of a strip: see baseline.h */
#define VD_LANES 4
typedef __m256 vf;
typedef __m256d vd;

/* A mask whose first `count` lanes are set. */
static inline __m256i v_mask_32(ptrdiff_t count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline __m256i v_mask_64(ptrdiff_t count)
{
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
}

static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline vf vf_load_part(const float *p, ptrdiff_t count)
{
    return _mm256_maskload_ps(p, v_mask_32(count));
}
static inline void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v); }
/* VMASKMOV is not used, since its stores take tens of cycles on some processors. */
static inline void vf_store_part(float *p, vf v, ptrdiff_t count)
{
    __m128 x = _mm256_castps256_ps128(v);
    if (count & 4) {
        _mm_storeu_ps(p, x);
        x = _mm256_extractf128_ps(v, 1);
        p += 4;
    }
    if (count & 2) {
        _mm_storel_pi((__m64 *)p, x);
        x = _mm_movehl_ps(x, x);
        p += 2;
    }
    if (count & 1) _mm_store_ss(p, x);
}
static inline void vf_stream(float *p, vf v) { _mm256_stream_ps(p, v); }
static inline vf vf_set1(float x) { return _mm256_set1_ps(x); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
/* Shift each half of a vector up or down by `bytes`; zeros come in. */
#define V_UP(v, bytes) _mm256_castsi256_ps(_mm256_slli_si256(_mm256_castps_si256(v), bytes))
#define V_DOWN(v, bytes) _mm256_castsi256_ps(_mm256_srli_si256(_mm256_castps_si256(v), bytes))
/* Moves lanes one up; the last one of `below` comes in. */
static inline vf vf_move_up(vf v, vf below)
{
    below = _mm256_permute2f128_ps(below, v, 0x21);
    return _mm256_castsi256_ps(_mm256_alignr_epi8(_mm256_castps_si256(v), _mm256_castps_si256(below), 12));
}
static inline vd vd_move_up(vd v, vd below)
{
    return _mm256_shuffle_pd(_mm256_permute2f128_pd(below, v, 0x21), v, 0x5);
}
/* Running sums from the first lane up, or from the last lane down. Every lane of `total` is the sum of all
 * lanes. VPERMPS would make the code shorter, but is slow on many processors. */
static inline vf vf_scan(vf v, vf *total)
{
    v = vf_add(v, V_UP(v, 4));
    v = vf_add(v, V_UP(v, 8));
    vf halves = _mm256_permute_ps(v, 0xff);
    *total = vf_add(halves, _mm256_permute2f128_ps(halves, halves, 0x01));
    return vf_add(v, _mm256_permute2f128_ps(halves, halves, 0x08));
}
static inline vf vf_scan_back(vf v, vf *total)
{
    v = vf_add(v, V_DOWN(v, 4));
    v = vf_add(v, V_DOWN(v, 8));
    vf halves = _mm256_permute_ps(v, 0);
    *total = vf_add(halves, _mm256_permute2f128_ps(halves, halves, 0x01));
    return vf_add(v, _mm256_permute2f128_ps(halves, halves, 0x81));
}
static inline float vf_first(vf v) { return _mm256_cvtss_f32(v); }

static inline vd vd_load(const double *p) { return _mm256_loadu_pd(p); }
static inline vd vd_load_part(const double *p, ptrdiff_t count)
{
    return _mm256_maskload_pd(p, v_mask_64(count));
}
static inline void vd_store(double *p, vd v) { _mm256_storeu_pd(p, v); }
static inline void vd_store_part(double *p, vd v, ptrdiff_t count)
{
    __m128d x = _mm256_castpd256_pd128(v);
    if (count & 2) {
        _mm_storeu_pd(p, x);
        x = _mm256_extractf128_pd(v, 1);
        p += 2;
    }
    if (count & 1) _mm_store_sd(p, x);
}
static inline void vd_stream(double *p, vd v) { _mm256_stream_pd(p, v); }
static inline vd vd_set1(double x) { return _mm256_set1_pd(x); }
static inline vd vd_add(vd a, vd b) { return _mm256_add_pd(a, b); }
static inline vd vd_mul(vd a, vd b) { return _mm256_mul_pd(a, b); }
static inline vd vd_scan(vd v, vd *total)
{
    v = vd_add(v, _mm256_castps_pd(V_UP(_mm256_castpd_ps(v), 8)));
    vd halves = _mm256_permute_pd(v, 0xf);
    *total = vd_add(halves, _mm256_permute2f128_pd(halves, halves, 0x01));
    return vd_add(v, _mm256_permute2f128_pd(halves, halves, 0x08));
}
static inline vd vd_scan_back(vd v, vd *total)
{
    v = vd_add(v, _mm256_castps_pd(V_DOWN(_mm256_castpd_ps(v), 8)));
    vd halves = _mm256_permute_pd(v, 0);
    *total = vd_add(halves, _mm256_permute2f128_pd(halves, halves, 0x01));
    return vd_add(v, _mm256_permute2f128_pd(halves, halves, 0x81));
}
static inline double vd_first(vd v) { return _mm256_cvtsd_f64(v); }

static inline vd vf_widen_low(vf v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
static inline vd vf_widen_high(vf v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
static inline vf vd_narrow(vd low, vd high)
{
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(low)), _mm256_cvtpd_ps(high), 1);
}

static inline vf vf_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline __m128i v_to_f16(vf v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
static inline void vf_store_f16(uint16_t *p, vf v) { _mm_storeu_si128((__m128i *)p, v_to_f16(v)); }
static inline void vf_stream_f16(uint16_t *p, vf v) { _mm_stream_si128((__m128i *)p, v_to_f16(v)); }
static inline vf vf_load_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline __m128i v_to_bf16(vf v)
{
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i half = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
static inline void vf_store_bf16(uint16_t *p, vf v) { _mm_storeu_si128((__m128i *)p, v_to_bf16(v)); }
static inline void vf_stream_bf16(uint16_t *p, vf v) { _mm_stream_si128((__m128i *)p, v_to_bf16(v)); }

static inline vf vf_load_i8(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
/* By way of float16, of which subnormal numbers are converted without delay. */
static inline vf vf_load_f8(const uint8_t *p)
{
    __m128i half = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
    __m128i magnitude = _mm_and_si128(half, _mm_set1_epi16(0x3f80));
    __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3f80));
    half = _mm_or_si128(magnitude, _mm_and_si128(half, _mm_set1_epi16((int16_t)0x8000)));
    half = _mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(0x1p8f));
}
/* Turns so many float8 at once into float16 of 2^-8 their value, subnormal ones too. For NaN it writes 1.875,
 * and sets a byte of `most` to 255. */
#define V_F8 32
typedef __m256i v_bytes;
static inline void v_f8_to_f16(uint16_t *to, const uint8_t *from, v_bytes *most)
{
    *most = _mm256_max_epu8(
        *most, _mm256_or_si256(_mm256_loadu_si256((const __m256i *)from), _mm256_set1_epi8(-128)));
    for (int i = 0; i < V_F8; i += 16) {
        __m256i half =
            _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(from + i))), 7);
        half = _mm256_and_si256(half, _mm256_set1_epi16((int16_t)0xbf80));
        _mm256_storeu_si256((__m256i *)(to + i), half);
    }
}
static inline bool v_any_255(v_bytes most)
{
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(most, _mm256_set1_epi8(-1))) != 0;
}

/* Operations of attention. vf_max(a, b) is the greater number, or b if either is NaN. vf_select takes lane i
 * of x if bit i is set, else that of y. */
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_pick_less(vf a, vf b, vf x, vf y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
static inline vf vf_pick_equal(vf a, vf b, vf x, vf y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}
static inline vf vf_select(uint64_t bits, vf x, vf y)
{
    __m256i own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)(bits & 0xff)), own), own);
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(set));
}
/* Shifts the low bits to the place of the exponent. */
static inline vf vf_low_to_exponent(vf v)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 23));
}
static inline float vf_highest(vf v)
{
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
/* The bits of lanes that exceed their limits. */
static inline uint64_t vf_exceeding(vf v, vf limit)
{
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(v, limit, _CMP_GT_OQ));
}
static inline float vf_total(vf v)
{
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
/* Lane j of vector i becomes lane i of vector j. */
static inline void vf_transpose(vf v[VF_LANES])
{
    vf pairs[8], fours[8];
    UNROLL(16)
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    UNROLL(16)
    for (int i = 0; i < 8; i += 4) {
        fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
        fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    UNROLL(16)
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        v[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    }
}
/* Lanes are numbers, or integers of 32 bits if `integers`. */
static inline vf v_add_lanes(vf a, vf b, const bool integers)
{
    return integers ? _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)))
                    : vf_add(a, b);
}
INLINE vf v_totals(const vf v[VF_LANES], const bool integers)
{
    vf fours[4], twos[2];
    UNROLL(16)
    for (int i = 0; i < 4; i++)
        fours[i] = v_add_lanes(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                               _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]), integers);
    UNROLL(16)
    for (int i = 0; i < 2; i++) {
        twos[i] = v_add_lanes(_mm256_shuffle_ps(fours[2 * i], fours[2 * i + 1], 0x44),
                              _mm256_shuffle_ps(fours[2 * i], fours[2 * i + 1], 0xee), integers);
    }
    return v_add_lanes(_mm256_permute2f128_ps(twos[0], twos[1], 0x20),
                       _mm256_permute2f128_ps(twos[0], twos[1], 0x31), integers);
}
/* Lane i of the result is the sum of the lanes of vector i. */
static inline vf vf_totals(const vf v[VF_LANES]) { return v_totals(v, false); }

/* Two sixteen-bit integers in a lane, with sums of 32 bits. vf_fma_i16x2 adds both products of a lane to c.
 */
static inline vf vf_fma_i16x2(vf a, vf b, vf c)
{
    return v_add_lanes(_mm256_castsi256_ps(_mm256_madd_epi16(_mm256_castps_si256(a), _mm256_castps_si256(b))),
                       c, true);
}
static inline vf vf_load_i16x2(const int8_t *p)
{
    return _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)));
}
/* Copies up to 16 bytes, and makes the others up to there `rest`. */
static inline void v_copy_some_8(void *to, const void *from, ptrdiff_t count, int rest)
{
    _mm_storeu_si128(to, _mm_set1_epi8((char)rest));
    memcpy(to, from, (size_t)count);
}
static inline vf vf_load_part_i16x2(const int8_t *p, ptrdiff_t count)
{
    int8_t all[2 * VF_LANES];
    v_copy_some_8(all, p, count, 0);
    return vf_load_i16x2(all);
}
/* Joins each number of the row at a with that of the row at b. Of eight neighbours the first four go to
 * `first`, the others to `second`; vf_straighten puts sums of these in order. */
static inline void vf_join_i16x2(const int8_t *a, const int8_t *b, vf *first, vf *second)
{
    const __m256i x = _mm256_castps_si256(vf_load_i16x2(a)), y = _mm256_castps_si256(vf_load_i16x2(b));
    *first = _mm256_castsi256_ps(_mm256_unpacklo_epi16(x, y));
    *second = _mm256_castsi256_ps(_mm256_unpackhi_epi16(x, y));
}
static inline void vf_straighten(vf sums[2])
{
    const vf x = sums[0], y = sums[1];
    sums[0] = _mm256_permute2f128_ps(x, y, 0x20);
    sums[1] = _mm256_permute2f128_ps(x, y, 0x31);
}
/* Joins whole vectors of bytes, in steps that more units of processors take. Of sixteen neighbours the first
 * eight go to `first` and `second`, the others to `third` and `fourth`, those at even places before those at
 * odd ones; vf_straighten_wide puts sums of these in order. */
static inline void vf_join_wide_i16x2(const int8_t *a, const int8_t *b, vf *first, vf *second, vf *third,
                                      vf *fourth)
{
    const __m256i x = _mm256_loadu_si256((const __m256i *)a), y = _mm256_loadu_si256((const __m256i *)b),
                  low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
    *first = _mm256_castsi256_ps(_mm256_srai_epi16(_mm256_slli_epi16(low, 8), 8));
    *second = _mm256_castsi256_ps(_mm256_srai_epi16(low, 8));
    *third = _mm256_castsi256_ps(_mm256_srai_epi16(_mm256_slli_epi16(high, 8), 8));
    *fourth = _mm256_castsi256_ps(_mm256_srai_epi16(high, 8));
}
static inline void vf_straighten_wide(vf sums[4])
{
    vf ordered[4];
    UNROLL(4)
    for (int i = 0; i < 4; i += 2) {
        ordered[i] = _mm256_unpacklo_ps(sums[i], sums[i + 1]);
        ordered[i + 1] = _mm256_unpackhi_ps(sums[i], sums[i + 1]);
    }
    UNROLL(4)
    for (int i = 0; i < 2; i++) {
        sums[i] = _mm256_permute2f128_ps(ordered[2 * i], ordered[2 * i + 1], 0x20);
        sums[2 + i] = _mm256_permute2f128_ps(ordered[2 * i], ordered[2 * i + 1], 0x31);
    }
}
static inline vf vf_of_i32(vf sums) { return _mm256_cvtepi32_ps(_mm256_castps_si256(sums)); }
static inline vf vf_totals_i32(const vf v[VF_LANES]) { return vf_of_i32(v_totals(v, true)); }
/* Rounds the lanes of `first`, then those of `second`, to sixteen-bit integers, at most the greatest one. */
static inline vf vf_narrow_i16x2(vf first, vf second)
{
    const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(first), _mm256_cvtps_epi32(second));
    return _mm256_castsi256_ps(_mm256_permute4x64_epi64(both, 0xd8));
}
/* The greater of the magnitude of x and a number that is not negative; and the greatest lane of such numbers.
 * NaN is greater than all numbers. */
static inline vf vf_greater(vf x, vf most)
{
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
    return _mm256_castsi256_ps(_mm256_max_epi32(magnitude, _mm256_castps_si256(most)));
}
static inline float vf_greatest(vf v)
{
    const __m256i all = _mm256_castps_si256(v);
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    x = _mm_max_epi32(x, _mm_unpackhi_epi64(x, x));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 1));
    return _mm_cvtss_f32(_mm_castsi128_ps(x));
}

static inline vd vd_sub(vd a, vd b) { return _mm256_sub_pd(a, b); }
static inline vd vd_div(vd a, vd b) { return _mm256_div_pd(a, b); }
static inline vd vd_fma(vd a, vd b, vd c) { return _mm256_fmadd_pd(a, b, c); }
static inline vd vd_max(vd a, vd b) { return _mm256_max_pd(a, b); }
static inline vd vd_pick_less(vd a, vd b, vd x, vd y)
{
    return _mm256_blendv_pd(y, x, _mm256_cmp_pd(a, b, _CMP_LT_OQ));
}
static inline vd vd_pick_equal(vd a, vd b, vd x, vd y)
{
    return _mm256_blendv_pd(y, x, _mm256_cmp_pd(a, b, _CMP_EQ_OQ));
}
static inline vd vd_select(uint64_t bits, vd x, vd y)
{
    __m256i own = _mm256_setr_epi64x(1, 2, 4, 8);
    __m256i set = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x((long long)bits), own), own);
    return _mm256_blendv_pd(y, x, _mm256_castsi256_pd(set));
}
static inline vd vd_low_to_exponent(vd v)
{
    return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(v), 52));
}
static inline double vd_highest(vd v)
{
    __m128d x = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_max_sd(x, _mm_unpackhi_pd(x, x)));
}
static inline uint64_t vd_exceeding(vd v, vd limit)
{
    return (unsigned)_mm256_movemask_pd(_mm256_cmp_pd(v, limit, _CMP_GT_OQ));
}
static inline double vd_total(vd v)
{
    __m128d x = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(x, _mm_unpackhi_pd(x, x)));
}
static inline void vd_transpose(vd v[VD_LANES])
{
    vd even = _mm256_unpacklo_pd(v[0], v[1]), odd = _mm256_unpackhi_pd(v[0], v[1]);
    vd next_even = _mm256_unpacklo_pd(v[2], v[3]), next_odd = _mm256_unpackhi_pd(v[2], v[3]);
    v[0] = _mm256_permute2f128_pd(even, next_even, 0x20);
    v[1] = _mm256_permute2f128_pd(odd, next_odd, 0x20);
    v[2] = _mm256_permute2f128_pd(even, next_even, 0x31);
    v[3] = _mm256_permute2f128_pd(odd, next_odd, 0x31);
}
static inline vd vd_totals(const vd v[VD_LANES])
{
    vd low = vd_add(_mm256_unpacklo_pd(v[0], v[1]), _mm256_unpackhi_pd(v[0], v[1]));
    vd high = vd_add(_mm256_unpacklo_pd(v[2], v[3]), _mm256_unpackhi_pd(v[2], v[3]));
    return vd_add(_mm256_permute2f128_pd(low, high, 0x20), _mm256_permute2f128_pd(low, high, 0x31));
}

typedef __m256i vi;
static inline vi vi_set1(uint64_t pattern) { return _mm256_set1_epi64x((long long)pattern); }
static inline void vi_store(void *p, vi v) { _mm256_storeu_si256((__m256i *)p, v); }
static inline void vi_stream(void *p, vi v) { _mm256_stream_si256((__m256i *)p, v); }
/* Multiplies the low halves of lanes of 64 bits. */
static inline vi vi_mul_32(vi a, vi b) { return _mm256_mul_epu32(a, b); }
static inline vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

static inline uint64_t v_equal_64(const int32_t *ids, int32_t id)
{
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) {
        vi same = _mm256_cmpeq_epi32(vi_load(ids + 8 * i), _mm256_set1_epi32(id));
        bits |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(same)) << 8 * i;
    }
    return bits;
}

/* Bit i of the result is set if element i has a bit in common with `mask`. */
static inline uint64_t v_nonzero_64x_8(const void *src, uint64_t mask)
{
    const char *p = src;
    vi zero = _mm256_setzero_si256(), counted = _mm256_set1_epi8((char)mask);
    uint32_t low =
        (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(vi_load(p), counted), zero));
    uint32_t high =
        (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(vi_load(p + 32), counted), zero));
    return ~((uint64_t)high << 32 | low);
}
static inline uint64_t v_nonzero_64x_16(const void *src, uint64_t mask)
{
    const uint16_t *p = src;
    vi zero = _mm256_setzero_si256(), counted = _mm256_set1_epi16((short)mask);
    uint64_t zeros = 0;
    for (int i = 0; i < 2; i++, p += 32) {
        vi low = _mm256_cmpeq_epi16(_mm256_and_si256(vi_load(p), counted), zero);
        vi high = _mm256_cmpeq_epi16(_mm256_and_si256(vi_load(p + 16), counted), zero);
        vi bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
        zeros |= (uint64_t)(uint32_t)_mm256_movemask_epi8(bytes) << 32 * i;
    }
    return ~zeros;
}
static inline uint64_t v_nonzero_64x_32(const void *src, uint64_t mask)
{
    const uint32_t *p = src;
    vi zero = _mm256_setzero_si256(), counted = _mm256_set1_epi32((int)mask);
    uint64_t zeros = 0;
    for (int i = 0; i < 8; i++) {
        vi is_zero = _mm256_cmpeq_epi32(_mm256_and_si256(vi_load(p + 8 * i), counted), zero);
        zeros |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(is_zero)) << 8 * i;
    }
    return ~zeros;
}
static inline uint64_t v_nonzero_64x_64(const void *src, uint64_t mask)
{
    const uint64_t *p = src;
    vi zero = _mm256_setzero_si256(), counted = vi_set1(mask);
    uint64_t zeros = 0;
    for (int i = 0; i < 16; i++) {
        vi is_zero = _mm256_cmpeq_epi64(_mm256_and_si256(vi_load(p + 4 * i), counted), zero);
        zeros |= (uint64_t)(uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(is_zero)) << 4 * i;
    }
    return ~zeros;
}

/* Each lane tests its own bit in a copy of `bits`. */
static inline void v_expand_64x_8(void *dst, uint64_t bits, uint64_t live, uint64_t dead)
{
    vi spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3,
                                 3, 3, 3, 3, 3, 3);
    vi own = vi_set1(0x8040201008040201u);
    for (int i = 0; i < 2; i++) {
        vi copy = _mm256_shuffle_epi8(_mm256_set1_epi32((int)(uint32_t)(bits >> 32 * i)), spread);
        vi is_live = _mm256_cmpeq_epi8(_mm256_and_si256(copy, own), own);
        vi out = _mm256_blendv_epi8(_mm256_set1_epi8((char)dead), _mm256_set1_epi8((char)live), is_live);
        vi_store((char *)dst + 32 * i, out);
    }
}
static inline void v_expand_64x_16(void *dst, uint64_t bits, uint64_t live, uint64_t dead)
{
    vi own = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
    for (int i = 0; i < 4; i++) {
        vi copy = _mm256_set1_epi16((short)(bits >> 16 * i));
        vi is_live = _mm256_cmpeq_epi16(_mm256_and_si256(copy, own), own);
        vi out = _mm256_blendv_epi8(_mm256_set1_epi16((short)dead), _mm256_set1_epi16((short)live), is_live);
        vi_store((uint16_t *)dst + 16 * i, out);
    }
}
static inline void v_expand_64x_32(void *dst, uint64_t bits, uint64_t live, uint64_t dead)
{
    vi own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int i = 0; i < 8; i++) {
        vi copy = _mm256_set1_epi32((int)(bits >> 8 * i & 0xff));
        vi is_live = _mm256_cmpeq_epi32(_mm256_and_si256(copy, own), own);
        vi out = _mm256_blendv_epi8(_mm256_set1_epi32((int)dead), _mm256_set1_epi32((int)live), is_live);
        vi_store((uint32_t *)dst + 8 * i, out);
    }
}
static inline void v_expand_64x_64(void *dst, uint64_t bits, uint64_t live, uint64_t dead)
{
    vi own = _mm256_setr_epi64x(1, 2, 4, 8);
    for (int i = 0; i < 16; i++) {
        vi copy = vi_set1(bits >> 4 * i & 0xf);
        vi is_live = _mm256_cmpeq_epi64(_mm256_and_si256(copy, own), own);
        vi_store((uint64_t *)dst + 4 * i, _mm256_blendv_epi8(vi_set1(dead), vi_set1(live), is_live));
    }
}

/* Makes streaming stores visible to other threads. */
static inline void v_fence(void) { _mm_sfence(); }

#endif
