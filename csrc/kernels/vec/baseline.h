/* baseline.h – vectors of 16 bytes in the portable notation of GCC and Clang, which becomes SSE2, NEON or
 * scalar code. NEON intrinsics are used where that notation has no equivalent. */
#ifndef AM_KERNELS_VEC_BASELINE_H
#define AM_KERNELS_VEC_BASELINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __aarch64__
#    include <arm_neon.h>
#endif

#include "kernels/unroll.h"
#include "kernels/vec/half.h"

#define VF_LANES 4
#define VD_LANES 2
/* The number of rows of a strip: their accumulators, two vectors each, fit the registers together with their
 * operands. */
#ifdef __aarch64__
#    define V_STRIP 12
#else
#    define V_STRIP 4
#endif
typedef float vf __attribute__((vector_size(16)));
typedef double vd __attribute__((vector_size(16)));
typedef uint32_t vf_mask __attribute__((vector_size(16)));
typedef uint64_t vd_mask __attribute__((vector_size(16)));
/* Picks elements of two vectors; `places` is a vector of integers of their size. */
#ifdef __clang__
#    define SHUFFLE(places, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#    define SHUFFLE(places, a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

static inline vf vf_load(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline vf vf_load_part(const float *p, ptrdiff_t count)
{
    vf v = {0};
    memcpy(&v, p, (size_t)count * sizeof *p); /* lanes may be bf16x2, so p may not be aligned to a float */
    return v;
}
static inline void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
static inline void vf_store_part(float *p, vf v, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) p[i] = v[i];
}
static inline void vf_stream(float *p, vf v) { vf_store(p, v); }
static inline vf vf_set1(float x) { return (vf){x, x, x, x}; }
static inline vf vf_add(vf a, vf b) { return a + b; }
static inline vf vf_mul(vf a, vf b) { return a * b; }
/* Moves lanes one up; the last one of `below` comes in. */
static inline vf vf_move_up(vf v, vf below) { return SHUFFLE(vf_mask, below, v, 3, 4, 5, 6); }
static inline vd vd_move_up(vd v, vd below) { return SHUFFLE(vd_mask, below, v, 1, 2); }
/* Running sums from the first lane up, or from the last lane down. Every lane of `total` is the sum of all
 * lanes. */
static inline vf vf_scan(vf v, vf *total)
{
    v += (vf){0, v[0], v[1], v[2]};
    v += (vf){0, 0, v[0], v[1]};
    *total = vf_set1(v[3]);
    return v;
}
static inline vf vf_scan_back(vf v, vf *total)
{
    v += (vf){v[1], v[2], v[3], 0};
    v += (vf){v[2], v[3], 0, 0};
    *total = vf_set1(v[0]);
    return v;
}
static inline float vf_first(vf v) { return v[0]; }

static inline vd vd_load(const double *p)
{
    vd v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline vd vd_load_part(const double *p, ptrdiff_t count)
{
    return (vd){count > 0 ? p[0] : 0, count > 1 ? p[1] : 0};
}
static inline void vd_store(double *p, vd v) { memcpy(p, &v, sizeof v); }
static inline void vd_store_part(double *p, vd v, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) p[i] = v[i];
}
static inline void vd_stream(double *p, vd v) { vd_store(p, v); }
static inline vd vd_set1(double x) { return (vd){x, x}; }
static inline vd vd_add(vd a, vd b) { return a + b; }
static inline vd vd_mul(vd a, vd b) { return a * b; }
static inline vd vd_scan(vd v, vd *total)
{
    v += (vd){0, v[0]};
    *total = vd_set1(v[1]);
    return v;
}
static inline vd vd_scan_back(vd v, vd *total)
{
    v += (vd){v[1], 0};
    *total = vd_set1(v[0]);
    return v;
}
static inline double vd_first(vd v) { return v[0]; }

static inline vd vf_widen_low(vf v) { return (vd){v[0], v[1]}; }
static inline vd vf_widen_high(vf v) { return (vd){v[2], v[3]}; }
static inline vf vd_narrow(vd low, vd high)
{
    return (vf){(float)low[0], (float)low[1], (float)high[0], (float)high[1]};
}

#ifdef __aarch64__
static inline vf vf_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline void vf_store_f16(uint16_t *p, vf v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
static inline vf vf_load_bf16(const uint16_t *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
#else
static inline vf vf_load_f16(const uint16_t *p)
{
    vf v = {0};
    for (int i = 0; i < VF_LANES; i++) v[i] = am_widen_one_f16(p[i]);
    return v;
}
static inline void vf_store_f16(uint16_t *p, vf v)
{
    for (int i = 0; i < VF_LANES; i++) p[i] = am_narrow_one_f16(v[i]);
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    typedef uint16_t halves __attribute__((vector_size(2 * VF_LANES)));
    typedef uint32_t words __attribute__((vector_size(4 * VF_LANES)));
    halves x;
    memcpy(&x, p, sizeof x);
    return (vf)(__builtin_convertvector(x, words) << 16);
}
#endif
static inline void vf_stream_f16(uint16_t *p, vf v) { vf_store_f16(p, v); }
static inline void vf_store_bf16(uint16_t *p, vf v)
{
    for (int i = 0; i < VF_LANES; i++) p[i] = am_narrow_one_bf16(v[i]);
}
static inline void vf_stream_bf16(uint16_t *p, vf v) { vf_store_bf16(p, v); }

/* Interleaves the bytes, or the words of sixteen bits, of one half of two vectors. */
typedef uint8_t v_bytes __attribute__((vector_size(16)));
static inline v_bytes v_zip_8(v_bytes a, v_bytes b, const bool high)
{
    return high ? SHUFFLE(v_bytes, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
                : SHUFFLE(v_bytes, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
static inline v_bytes v_zip_16(v_bytes a, v_bytes b, const bool high)
{
    return high ? SHUFFLE(v_bytes, a, b, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31)
                : SHUFFLE(v_bytes, a, b, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
}
/* Four bytes as the highest of words, for shifts that keep their sign. */
typedef int32_t v_words __attribute__((vector_size(16)));
static inline v_words v_load_four_8(const void *p)
{
    uint32_t four;
    memcpy(&four, p, sizeof four);
#ifdef __aarch64__
    const uint8x16_t to = {255, 255, 255, 0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3};
    const uint32x2_t none = vdup_n_u32(0); /* one load, which GCC makes of no other words */
    const uint8x16_t bytes = vreinterpretq_u8_u32(vcombine_u32(vset_lane_u32(four, none, 0), none));
    return (v_words)vqtbl1q_u8(bytes, to);
#else
    const v_bytes bytes = (v_bytes)(vf_mask){four}, zero = {0};
    return (v_words)v_zip_16(zero, v_zip_8(zero, bytes, false), false);
#endif
}
static inline vf vf_load_i8(const int8_t *p)
{
#ifdef __aarch64__
    return vcvtq_n_f32_s32((int32x4_t)v_load_four_8(p), 24);
#else
    return __builtin_convertvector(v_load_four_8(p) >> 24, vf);
#endif
}
/* As am_widen_one_f8. */
static inline vf vf_load_f8(const uint8_t *p)
{
    const v_words bytes = v_load_four_8(p), magnitude = bytes >> 24 & 0x7f;
    const vf tiny = __builtin_convertvector(magnitude, vf) * vf_set1(0x1p-9f);
    const v_words usual = (magnitude << 20) + (120 << 23), is_tiny = magnitude < 8,
                  is_nan = magnitude == 0x7f, known = (usual & ~is_nan) | (0x7fc00000 & is_nan);
    return (vf)((known & ~is_tiny) | ((v_words)tiny & is_tiny) | (bytes & INT32_MIN));
}
#ifdef __aarch64__
/* For which conversions of float16 take one instruction. */
#    define V_F8 16
static inline void v_f8_to_f16(uint16_t *to, const uint8_t *from, v_bytes *most)
{
    const int8x16_t bytes = vld1q_s8((const int8_t *)from);
    const uint16x8_t places = vdupq_n_u16(0xbf80);
    *most = (v_bytes)vmaxq_u8((uint8x16_t)*most, vorrq_u8(vreinterpretq_u8_s8(bytes), vdupq_n_u8(0x80)));
    vst1q_u16(to, vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_low_s8(bytes), 7)), places));
    vst1q_u16(to + 8, vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_high_s8(bytes), 7)), places));
}
static inline bool v_any_255(v_bytes most) { return vmaxvq_u8((uint8x16_t)most) == 255; }
#endif
/* Sixteen numbers of four bits. */
#define V_I4
static inline void vf_load_i4(const uint8_t *p, vf numbers[4])
{
    uint64_t eight;
    memcpy(&eight, p, sizeof eight);
    const v_bytes twice = (v_bytes)(vd_mask){eight}, zero = {0},
                  each = v_zip_8(twice & 15, twice >> 4, false);
    UNROLL(4)
    for (int i = 0; i < 4; i++)
        numbers[i] = __builtin_convertvector((v_words)v_zip_16(v_zip_8(each, zero, i / 2), zero, i % 2), vf);
}

/* Operations of attention. vf_max(a, b) is the greater number, or b if either is NaN. vf_select takes lane i
 * of x if bit i is set, else that of y. */
static inline vf vf_sub(vf a, vf b) { return a - b; }
static inline vf vf_div(vf a, vf b) { return a / b; }
static inline vf vf_pick_less(vf a, vf b, vf x, vf y)
{
    vf_mask less = (vf_mask)(a < b);
    return (vf)((less & (vf_mask)x) | (~less & (vf_mask)y));
}
static inline vf vf_max(vf a, vf b) { return vf_pick_less(b, a, a, b); }
static inline vf vf_pick_equal(vf a, vf b, vf x, vf y)
{
    vf_mask equal = (vf_mask)(a == b);
    return (vf)((equal & (vf_mask)x) | (~equal & (vf_mask)y));
}
static inline vf vf_select(uint64_t bits, vf x, vf y)
{
    const vf_mask own = {1, 2, 4, 8};
    vf_mask set =
        (vf_mask)(((vf_mask){(uint32_t)bits, (uint32_t)bits, (uint32_t)bits, (uint32_t)bits} & own) == own);
    return (vf)((set & (vf_mask)x) | (~set & (vf_mask)y));
}
/* Shifts the low bits to the place of the exponent. */
static inline vf vf_low_to_exponent(vf v) { return (vf)((vf_mask)v << 23); }
static inline float vf_highest(vf v)
{
    float most = v[0];
    for (int i = 1; i < VF_LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}
/* The bits of lanes that exceed their limits. */
static inline uint64_t vf_exceeding(vf v, vf limit)
{
    return (unsigned)((v[0] > limit[0]) | (v[1] > limit[1]) << 1 | (v[2] > limit[2]) << 2 |
                      (v[3] > limit[3]) << 3);
}
static inline float vf_total(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
/* Lane j of vector i becomes lane i of vector j. */
static inline void vf_transpose(vf v[VF_LANES])
{
    const vf low = SHUFFLE(vf_mask, v[0], v[1], 0, 4, 1, 5), high = SHUFFLE(vf_mask, v[0], v[1], 2, 6, 3, 7),
             next_low = SHUFFLE(vf_mask, v[2], v[3], 0, 4, 1, 5),
             next_high = SHUFFLE(vf_mask, v[2], v[3], 2, 6, 3, 7);
    v[0] = SHUFFLE(vf_mask, low, next_low, 0, 1, 4, 5);
    v[1] = SHUFFLE(vf_mask, low, next_low, 2, 3, 6, 7);
    v[2] = SHUFFLE(vf_mask, high, next_high, 0, 1, 4, 5);
    v[3] = SHUFFLE(vf_mask, high, next_high, 2, 3, 6, 7);
}
/* Lane i of the result is the sum of the lanes of vector i. */
static inline vf vf_totals(const vf v[VF_LANES])
{
    vf transposed[VF_LANES] = {v[0], v[1], v[2], v[3]};
    vf_transpose(transposed);
    return (transposed[0] + transposed[2]) + (transposed[1] + transposed[3]);
}
static inline vd vd_sub(vd a, vd b) { return a - b; }
static inline vd vd_div(vd a, vd b) { return a / b; }
#ifdef __aarch64__
static inline vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
static inline vd vd_fma(vd a, vd b, vd c) { return vfmaq_f64(c, a, b); }
#else
static inline vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
static inline vd vd_fma(vd a, vd b, vd c) { return a * b + c; }
#endif
static inline vd vd_pick_less(vd a, vd b, vd x, vd y)
{
    vd_mask less = (vd_mask)(a < b);
    return (vd)((less & (vd_mask)x) | (~less & (vd_mask)y));
}
static inline vd vd_max(vd a, vd b) { return vd_pick_less(b, a, a, b); }
static inline vd vd_pick_equal(vd a, vd b, vd x, vd y)
{
    vd_mask equal = (vd_mask)(a == b);
    return (vd)((equal & (vd_mask)x) | (~equal & (vd_mask)y));
}
static inline vd vd_select(uint64_t bits, vd x, vd y)
{
    const vd_mask own = {1, 2};
    vd_mask set = (vd_mask)(((vd_mask){(uint64_t)bits, (uint64_t)bits} & own) == own);
    return (vd)((set & (vd_mask)x) | (~set & (vd_mask)y));
}
static inline vd vd_low_to_exponent(vd v) { return (vd)((vd_mask)v << 52); }
static inline double vd_highest(vd v)
{
    double most = v[0];
    for (int i = 1; i < VD_LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}
static inline uint64_t vd_exceeding(vd v, vd limit)
{
    return (unsigned)((v[0] > limit[0]) | (v[1] > limit[1]) << 1);
}
static inline double vd_total(vd v) { return v[0] + v[1]; }
static inline void vd_transpose(vd v[VD_LANES])
{
    vd even = {v[0][0], v[1][0]};
    v[1] = (vd){v[0][1], v[1][1]};
    v[0] = even;
}
static inline vd vd_totals(const vd v[VD_LANES]) { return (vd){v[0][0], v[1][0]} + (vd){v[0][1], v[1][1]}; }

#if defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC || defined AM_EMULATE
/* Two bfloat16 in a lane. Builds for tests emulate what other processors do, so that those kernels run on any
 * processor. */
#    define V_BF16X2
static inline vf vf_only_bits(vf v, uint32_t bits)
{
    return (vf)((vf_mask)v & (vf_mask){bits, bits, bits, bits});
}
/* Loads `count` numbers; the others are zero. */
static inline vf vf_load_some_bf16x2(const uint16_t *p, ptrdiff_t count)
{
    vf v = {0};
    if (count == 2 * VF_LANES)
        memcpy(&v, p, sizeof v);
    else
        memcpy(&v, p, (size_t)count * sizeof *p);
    return v;
}
/* Interleaves the numbers of `low` and `high`: `first` gets the first halves of both. */
static inline void vf_interleave_bf16x2(vf low, vf high, vf *first, vf *second)
{
    *first = (vf)v_zip_16((v_bytes)low, (v_bytes)high, false);
    *second = (vf)v_zip_16((v_bytes)low, (v_bytes)high, true);
}
static inline vf vf_load_interleaved_bf16x2(const uint16_t *a, const uint16_t *b)
{
#    ifdef __aarch64__
    const uint16x4_t none = vdup_n_u16(0);
    return vreinterpretq_f32_u16(
        vzip1q_u16(vcombine_u16(vld1_u16(a), none), vcombine_u16(vld1_u16(b), none)));
#    else
    vf first, second;
    vf_interleave_bf16x2(vf_load_some_bf16x2(a, VF_LANES), vf_load_some_bf16x2(b, VF_LANES), &first, &second);
    return first;
#    endif
}
#    ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
/* No intrinsic functions: GCC 12 makes a constant of float16 of one of bfloat16, and Clang 19 two
 * instructions of the second. */
static inline vf vf_fma_bf16x2(vf a, vf b, vf c)
{
    __asm__("bfdot\t%0.4s, %1.8h, %2.8h" : "+w"(c) : "w"(a), "w"(b));
    return c;
}
/* vf_fma_bf16x2 where all lanes of the first vector are one number, which takes no instruction of its own. */
#        define V_FMA_ONE
static inline vf vf_fma_one_bf16x2(vf one, vf b, vf c)
{
    __asm__("bfdot\t%0.4s, %1.8h, %2.2h[0]" : "+w"(c) : "w"(b), "w"(one[0]));
    return c;
}
/* Two lanes of two rows of a times two lanes of two columns of b, to two columns of two rows: vf_fma_bf16x2
 * of the first lane, and of the second, bit by bit. */
#        define V_SQUARES
static inline vf vf_fma_square_bf16x2(vf a, vf b, vf c)
{
    return vbfmmlaq_f32(c, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
/* Two lanes of each of two rows: first those of a, or lane by lane. */
static inline vf vf_load_square(const float *a, const float *b, const bool by_lanes)
{
    const float32x2_t none = vdup_n_f32(0), x = vld1_f32(a), y = vld1_f32(b);
    return by_lanes ? vzip1q_f32(vcombine_f32(x, none), vcombine_f32(y, none)) : vcombine_f32(x, y);
}
/* Makes of two vectors their low lanes, and their high ones, lane by lane; or their low halves, and their
 * high ones. */
static inline void vf_zip(vf *a, vf *b)
{
    const vf low = vzip1q_f32(*a, *b), high = vzip2q_f32(*a, *b);
    *a = low, *b = high;
}
static inline void vf_zip_halves(vf *a, vf *b)
{
    const vd low = vzip1q_f64((vd)*a, (vd)*b), high = vzip2q_f64((vd)*a, (vd)*b);
    *a = (vf)low, *b = (vf)high;
    __asm__("" : "+w"(*a), "+w"(*b)); /* else GCC 12 spills copies */
}
/* For compilers, what is read at this pointer afterwards waits for two vectors. Else they load more of a
 * product than fits the registers. */
#        define V_BEHIND(pointer, x, y) __asm__("" : "+r"(pointer) : "w"(x), "w"(y))
static inline vf vf_narrow_bf16x2(vf first, vf second)
{
    return vreinterpretq_f32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second));
}
#    else
static inline vf vf_fma_bf16x2(vf a, vf b, vf c)
{
    c = vf_fma(vf_only_bits(a, 0xffff0000), vf_only_bits(b, 0xffff0000), c);
    return vf_fma((vf)((vf_mask)a << 16), (vf)((vf_mask)b << 16), c);
}
static inline vf vf_narrow_bf16x2(vf first, vf second)
{
    vf bf16x2;
    uint16_t halves[2 * VF_LANES];
    vf_store_bf16(halves, first);
    vf_store_bf16(halves + VF_LANES, second);
    memcpy(&bf16x2, halves, sizeof bf16x2);
    return bf16x2;
}
#    endif
static inline vf vf_join_bf16x2(vf low, vf high)
{
    vf joined, unused;
    vf_interleave_bf16x2(vf_narrow_bf16x2(low, high), vf_narrow_bf16x2(high, low), &joined, &unused);
    return joined;
}
#endif

#ifdef __ARM_FEATURE_DOTPROD
/* Four bytes in a lane, with sums of 32 bits. vf_fma_i8x4 adds the four products of a lane to c. */
#    define V_HALVES
static inline vf vf_fma_i8x4(vf a, vf b, vf c)
{
    return (vf)vdotq_s32((int32x4_t)c, (int8x16_t)a, (int8x16_t)b);
}
/* vf_fma_i8x4 where all lanes of the first vector are one number. */
static inline vf vf_fma_one_i8x4(vf one, vf b, vf c)
{
    __asm__("sdot\t%0.4s, %1.16b, %2.4b[0]" : "+w"(c) : "w"(b), "w"(one[0]));
    return c;
}
static inline vf vf_load_i8x4(const int8_t *p) { return (vf)vld1q_s8(p); }
static inline vf vf_load_part_i8x4(const int8_t *p, ptrdiff_t count)
{
    int8_t all[4 * VF_LANES] = {0};
    memcpy(all, p, (size_t)count);
    return vf_load_i8x4(all);
}
/* Copies up to eight bytes, and makes the others up to there `rest`. */
static inline void v_copy_some_8(void *to, const void *from, ptrdiff_t count, int rest)
{
    memset(to, rest, 2 * VF_LANES);
    memcpy(to, from, (size_t)count);
}
/* Joins the numbers of four rows: eight of each row to two vectors, or sixteen to four, in order. */
static inline void vf_join_i8x4(const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, vf *first,
                                vf *second)
{
    const int8x8x2_t ab = vzip_s8(vld1_s8(a), vld1_s8(b)), cd = vzip_s8(vld1_s8(c), vld1_s8(d));
    const v_bytes low = (v_bytes)vcombine_s8(ab.val[0], ab.val[1]),
                  high = (v_bytes)vcombine_s8(cd.val[0], cd.val[1]);
    *first = (vf)v_zip_16(low, high, false), *second = (vf)v_zip_16(low, high, true);
}
static inline void vf_join_wide_i8x4(const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d,
                                     vf *first, vf *second, vf *third, vf *fourth)
{
    const v_bytes row[] = {(v_bytes)vld1q_s8(a), (v_bytes)vld1q_s8(b), (v_bytes)vld1q_s8(c),
                           (v_bytes)vld1q_s8(d)};
    vf *const to[] = {first, second, third, fourth};
    UNROLL(4)
    for (int i = 0; i < 4; i++)
        *to[i] = (vf)v_zip_16(v_zip_8(row[0], row[1], i / 2), v_zip_8(row[2], row[3], i / 2), i % 2);
}
static inline void vf_straighten(vf sums[2]) { (void)sums; }
static inline void vf_straighten_wide(vf sums[4]) { (void)sums; }
static inline vf vf_join_halves_i32(vf high, vf low) { return (vf)(((v_words)high << 8) + (v_words)low); }
static inline vf vf_of_i32(vf sums) { return __builtin_convertvector((v_words)sums, vf); }
static inline vf vf_totals_i32(const vf v[VF_LANES])
{
    vf transposed[VF_LANES] = {v[0], v[1], v[2], v[3]};
    vf_transpose(transposed);
    const v_words left = (v_words)transposed[0] + (v_words)transposed[2],
                  right = (v_words)transposed[1] + (v_words)transposed[3];
    return vf_of_i32((vf)(left + right));
}
/* Rounds numbers of up to 127 * 257 to integers 256 high + low: vectors of high bytes and of low ones. */
static inline void vf_narrow_i8x4(const vf x[4], vf halves[2])
{
    int16x8_t y[2];
    UNROLL(2)
    for (int i = 0; i < 2; i++)
        y[i] = vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(x[2 * i])), vcvtnq_s32_f32(x[2 * i + 1]));
    const int16x8_t half = vdupq_n_s16(128); /* so that high bytes are rounded */
    halves[0] = (vf)vuzp2q_s8((int8x16_t)vaddq_s16(y[0], half), (int8x16_t)vaddq_s16(y[1], half));
    halves[1] = (vf)vuzp1q_s8((int8x16_t)y[0], (int8x16_t)y[1]);
}
/* The greater of the magnitude of x and a number that is not negative; and the greatest lane of such numbers.
 * NaN is greater than all numbers. */
static inline vf vf_greater(vf x, vf most)
{
    return (vf)vmaxq_u32(vreinterpretq_u32_f32(vabsq_f32(x)), vreinterpretq_u32_f32(most));
}
static inline float vf_greatest(vf x) { return am_float_of_bits(vmaxvq_u32(vreinterpretq_u32_f32(x))); }
#endif

typedef uint64_t vi __attribute__((vector_size(16)));
static inline vi vi_set1(uint64_t pattern) { return (vi){pattern, pattern}; }
static inline void vi_store(void *p, vi v) { memcpy(p, &v, sizeof v); }
static inline void vi_stream(void *p, vi v) { vi_store(p, v); }
/* Multiplies the low halves of lanes of 64 bits. */
static inline vi vi_mul_32(vi a, vi b) { return (a & UINT32_MAX) * (b & UINT32_MAX); }

static inline uint64_t v_equal_64(const int32_t *ids, int32_t id)
{
    uint64_t bits = 0;
    for (int i = 0; i < 64; i++) bits |= (uint64_t)(ids[i] == id) << i;
    return bits;
}
static inline uint64_t v_nonzero_64x_8(const void *src, uint64_t mask)
{
    const uint64_t low_bits = 0x7f7f7f7f7f7f7f7f, counted = (mask & 0xff) * 0x0101010101010101;
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) {
        uint64_t eight;
        memcpy(&eight, (const char *)src + 8 * i, sizeof eight);
        eight &= counted;
        /* Sets the top bit of every byte that is not zero, and then collects the eight bits in one byte. */
        eight = ((eight & low_bits) + low_bits) | eight;
        bits |= ((eight >> 7 & 0x0101010101010101) * 0x0102040810204080 >> 56) << 8 * i;
    }
    return bits;
}
#define V_NONZERO(size)                                                                                      \
    static inline uint64_t v_nonzero_64x_##size(const void *src, uint64_t mask)                              \
    {                                                                                                        \
        const uint##size##_t *p = src;                                                                       \
        uint64_t bits = 0;                                                                                   \
        for (int i = 0; i < 64; i++) bits |= (uint64_t)((p[i] & (uint##size##_t)mask) != 0) << i;            \
        return bits;                                                                                         \
    }
#define V_EXPAND(size)                                                                                       \
    static inline void v_expand_64x_##size(void *dst, uint64_t bits, uint64_t live, uint64_t dead)           \
    {                                                                                                        \
        uint##size##_t *p = dst;                                                                             \
        for (int i = 0; i < 64; i++) p[i] = (uint##size##_t)(bits >> i & 1 ? live : dead);                   \
    }
V_NONZERO(16)
V_NONZERO(32)
V_NONZERO(64)
V_EXPAND(8)
V_EXPAND(16)
V_EXPAND(32)
V_EXPAND(64)

static inline void v_fence(void) {}

#endif
