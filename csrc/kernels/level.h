/* level.h – all kernels for one instruction set, whose vector operations the including file includes before;
 * and their table, if that file defines the name of the level (LEVEL). */
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/half.h"
#include "kernels/table.h"
#include "kernels/unroll.h"

/* Missing lanes are 0. */
static inline vf vf_load_part_i8(const int8_t *p, ptrdiff_t count)
{
    int8_t all[VF_LANES] = {0};
    memcpy(all, p, (size_t)(count < 0 ? 0 : count < VF_LANES ? count : VF_LANES));
    return vf_load_i8(all);
}
static inline vf vf_load_part_f8(const uint8_t *p, ptrdiff_t count)
{
    uint8_t all[VF_LANES] = {0};
    memcpy(all, p, (size_t)(count < 0 ? 0 : count < VF_LANES ? count : VF_LANES));
    return vf_load_f8(all);
}

#ifndef V_PARTS_16
/* Copies count < VF_LANES elements in steps of constant sizes, which become single instructions. */
static inline void copy_part(uint16_t *dst, const uint16_t *src, ptrdiff_t count)
{
    ptrdiff_t done = 0;
    if (VF_LANES > 8 && count & 8) memcpy(dst, src, 16), done = 8;
    if (VF_LANES > 4 && count & 4) memcpy(dst + done, src + done, 8), done += 4;
    if (count & 2) memcpy(dst + done, src + done, 4), done += 2;
    if (count & 1) dst[done] = src[done];
}
#endif
#define FN(name) name##_f16
#include "kernels/half_tpl.h"
#define FN(name) name##_bf16
#include "kernels/half_tpl.h"

static inline vf vf_carry_load(const double *carry)
{
    return vd_narrow(vd_load(carry), vd_load(carry + VD_LANES));
}
static inline void vf_carry_add(double *carry, vf sum)
{
    vd_store(carry, vd_add(vd_load(carry), vf_widen_low(sum)));
    vd_store(carry + VD_LANES, vd_add(vd_load(carry + VD_LANES), vf_widen_high(sum)));
}
#define T uint16_t
#define V vf
#define VOP(op) vf_##op
#define MEM(op) vf_##op##_f16
#define FN(name) name##_f16
#define LANES VF_LANES
#include "kernels/cumsum_tpl.h"
#define T uint16_t
#define V vf
#define VOP(op) vf_##op
#define MEM(op) vf_##op##_bf16
#define FN(name) name##_bf16
#define LANES VF_LANES
#include "kernels/cumsum_tpl.h"
#define T float
#define V vf
#define VOP(op) vf_##op
#define MEM(op) vf_##op
#define FN(name) name##_f32
#define LANES VF_LANES
#include "kernels/cumsum_tpl.h"

static inline vd vd_carry_load(const double *carry) { return vd_load(carry); }
static inline void vd_carry_add(double *carry, vd sum) { vd_store(carry, vd_add(vd_load(carry), sum)); }
#define T double
#define V vd
#define VOP(op) vd_##op
#define MEM(op) vd_##op
#define FN(name) name##_f64
#define LANES VD_LANES
#include "kernels/cumsum_tpl.h"

#define T float
#define V vf
#define VOP(op) vf_##op
#define FN(name) name##_32
#define LANES VF_LANES
#include "kernels/transpose_tpl.h"
#define T double
#define V vd
#define VOP(op) vd_##op
#define FN(name) name##_64
#define LANES VD_LANES
#include "kernels/transpose_tpl.h"

#define T int32_t
#define U uint32_t
#define FN(name) name##_32
#include "kernels/tokens_tpl.h"
#define T int64_t
#define U uint64_t
#define FN(name) name##_64
#include "kernels/tokens_tpl.h"

#include "kernels/divide.h"
#define T int32_t
#define UNSIGNED uint32_t
#define FN(name) name##_32
#include "kernels/sequences_tpl.h"
#define T int64_t
#define UNSIGNED uint64_t
#define FN(name) name##_64
#include "kernels/sequences_tpl.h"

#include "kernels/mask_tpl.h"
#include "kernels/words_tpl.h"
#include "kernels/keep_tpl.h"

#define T uint8_t
#define MASK 0xff
#define BITS masked_bits_8
#define FN(name) name##_8
#include "kernels/mask_rows_tpl.h"
#define T uint16_t
#define MASK 0xffff
#define BITS masked_bits_16
#define FN(name) name##_16
#include "kernels/mask_rows_tpl.h"
#define T uint32_t
#define MASK 0xffffffff
#define BITS masked_bits_32
#define FN(name) name##_32
#include "kernels/mask_rows_tpl.h"
#define T uint64_t
#define MASK UINT64_MAX
#define BITS masked_bits_64
#define FN(name) name##_64
#include "kernels/mask_rows_tpl.h"
#define T uint16_t
#define MASK 0x7fff
#define BITS masked_bits_16
#define FN(name) name##_f16
#include "kernels/mask_rows_tpl.h"
#define T uint32_t
#define MASK 0x7fffffff
#define BITS masked_bits_32
#define FN(name) name##_f32
#include "kernels/mask_rows_tpl.h"
#define T uint64_t
#define MASK (UINT64_MAX >> 1)
#define BITS masked_bits_64
#define FN(name) name##_f64
#include "kernels/mask_rows_tpl.h"

/* Hides from the compiler where a pointer came from. */
#define HIDE(pointer) __asm__("" : "+r"(pointer))
#include "kernels/flash_prefetch.h"

enum {
    FLASH_SLACK = 8, /* P stays below 2^8 or e^8, and rows are seldom rescaled */
    /* Unpacked keys and values are prefetched this number of rows early, and a second time in order:
     * prefetching only once would be 0.8 times as fast. */
    EARLY_KEYS = 8,
    /* A step reads slices of so many bytes of unpacked keys, of all heads, one slice after the other. Where a
     * tile's keys take 256 KB, as eight heads of float32 and D = 128, whole tiles take 1.01 to 1.07 of the
     * time in memory; slices of 64 KB take 1.01 to 1.04 of it in the second-level cache. */
    SLICE_BYTES = 128 << 10,
    /* Rows of a run that instructions of their own read: Zen 4 prefetches by itself where one of them has
     * loaded at equal distances, and so beyond the end of the run. Decoding from pages of 16 takes 0.72 to
     * 0.96 of the time; with AVX2 it gains nothing. 0: none have. */
    RUN_ROWS = VF_LANES >= 16 ? 8 : 0,
    SOME_KEYS = 8,                             /* unpacked keys that are widened at once */
    DOT_SUMS = V_STRIP < 8 ? 2 * V_STRIP : 16, /* sums of products of a row and unpacked keys: as many as fit
                                                  the registers, or fill whole vectors */
};

/* Rows that lie in runs of so many, from *next + offset bytes on each after the first. */
typedef struct {
    ptrdiff_t rows;
    const void *const *next;
    ptrdiff_t offset;
} row_runs;

/* Those of a tile's values behind the first run, of which so many rows are joined to one. */
static inline row_runs runs_of_values(const am_flash_tile *tile, ptrdiff_t joined, ptrdiff_t offset)
{
    if (tile->run == 0) return (row_runs){0};
    const uintptr_t head = (uintptr_t)tile->v - (uintptr_t)*tile->v_runs;
    return (row_runs){tile->run / joined, tile->v_runs + 1, (ptrdiff_t)head + offset};
}

/* The run of row i of a tile. */
static inline ptrdiff_t run_of_row(const am_flash_tile *tile, ptrdiff_t i)
{
    return i >> __builtin_ctzll((unsigned long long)tile->run);
}

/* Those of a tile's keys behind the run of key i. */
static inline row_runs runs_of_keys(const am_flash_tile *tile, ptrdiff_t i)
{
    if (tile->run == 0) return (row_runs){0};
    const uintptr_t head = (uintptr_t)tile->k - (uintptr_t)*tile->k_runs;
    return (row_runs){tile->run, tile->k_runs + run_of_row(tile, i) + 1, (ptrdiff_t)head};
}

/* Row i of a tile of unpacked rows, `step` bytes apart, of which the first is at `first`. */
static inline const void *row_in_runs(const am_flash_tile *tile, const void *first, const void *const *runs,
                                      ptrdiff_t step, ptrdiff_t i)
{
    if (tile->run == 0) return (const char *)first + i * step;
    const ptrdiff_t row = (i & (tile->run - 1)) * step;
    return (const void *)((uintptr_t)first + (uintptr_t)runs[run_of_row(tile, i)] - (uintptr_t)runs[0] +
                          (uintptr_t)row);
}

/* The number of columns of the panel of results that begins at `column`: a whole panel, or half of one. */
static inline ptrdiff_t columns_at(const am_flash_rows *block, ptrdiff_t column, ptrdiff_t panel)
{
    return block->out_depth - column < panel ? block->out_depth - column : panel;
}

/* Bits begin … end - 1 of a word as its lowest, which are at least one. */
static inline uint64_t live_between(uint64_t live, ptrdiff_t begin, ptrdiff_t end)
{
    return live >> begin & UINT64_MAX >> (64 - (end - begin));
}

/* Finds the columns of a tile from the first that is live in any row to the last: *begin … *end - 1. */
static void find_live(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t *begin, ptrdiff_t *end)
{
    uint64_t any = tile->live ? 0 : UINT64_MAX;
    for (ptrdiff_t r = 0; tile->live && r < block->rows; r++) any |= tile->live[r];
    *begin = __builtin_ctzll(any);
    *end = AM_FLASH_TILE - __builtin_clzll(any);
}

/* Coefficients of 2^x on [-1/2, 1/2], with relative errors of 2e-9 in float32 and 2e-17 in float64; 4e-7
 * where results are rounded to bfloat16. With VD_EIGHTHS x is in [-1/16, 1/16], and the error is 6e-18. */
#ifdef V_POWERS
#    define TERMS_FACTOR 1
#else
#    define TERMS_FACTOR 2 /* as take_whole and times_power halve */
#endif
static const float exp2_terms_f32[] = {
    1.0f, 0.6931472029f, 0.2402264791f, 0.05550332471f, 0.009618437358f, 0.001339887441f, 0.0001535336191f};
static const float exp2_terms_bf16x2[] = {1.0f,           0.6931428306f,   0.2402235065f,
                                          0.05557400469f, 0.009666282547f, 0.001112550926f};
#ifdef VD_EIGHTHS
static const double exp2_terms_f64[] = {
    1.0,
    0.6931471805599453,
    0.2402265069591204,
    0.055504108664823096,
    0.00961812908242099,
    0.0013333558127014689,
    0.00015404562882891175,
    1.5253528985683798e-5,
};
#else
static const double exp2_terms_f64[] = {
    1.0,
    0.69314718055994569675,
    0.24022650695910098007,
    0.055504108664790394552,
    0.0096181291076070023796,
    0.0013333558153439964747,
    0.0001540353044157213033,
    1.5252727385193868197e-5,
    1.3215442675329822143e-6,
    1.0180647659234138888e-7,
    7.0725704128144235096e-9,
    4.078071929588336665e-10,
};
#endif
/* For a function that is not inlined, so that it takes no registers from its callers. Not every type calls
 * it. */
#define APART static __attribute__((noinline, unused))
#define COUNT_OF(array) ((int)(sizeof(array) / sizeof *(array)))

/* tanh(x) / x - 1 for |x| < 0.625, from x². Coefficients are those of Moshier's Cephes. */
static inline vf tanh_tail_f32(vf z)
{
    vf p = vf_set1(-5.70498872745e-3f);
    p = vf_fma(p, z, vf_set1(2.06390887954e-2f));
    p = vf_fma(p, z, vf_set1(-5.37397155531e-2f));
    p = vf_fma(p, z, vf_set1(1.33314422036e-1f));
    p = vf_fma(p, z, vf_set1(-3.33332819422e-1f));
    return vf_mul(p, z);
}
static inline vd tanh_tail_f64(vd z)
{
    vd p = vd_set1(-9.64399179425052238628e-1);
    p = vd_fma(p, z, vd_set1(-9.92877231001918586564e1));
    p = vd_fma(p, z, vd_set1(-1.61468768441708447952e3));
    vd q = vd_add(z, vd_set1(1.12811678491632931402e2));
    q = vd_fma(q, z, vd_set1(2.23548839060100448583e3));
    q = vd_fma(q, z, vd_set1(4.84406305325125486048e3));
    return vd_div(vd_mul(p, z), q);
}

#define T float
#define V vf
#define VOP(op) vf_##op
#define FN(name) name##_f32
#define LANES VF_LANES
#define STRIP V_STRIP
#define GREATEST FLT_MAX
#define EPSILON FLT_EPSILON
#define MIN_POWER 126
#define ROUNDER (0x1.8p23 + MIN_POWER)
#define HALVES /* numbers in memory may also be sixteen-bit floats */
#include "kernels/flash_product_tpl.h"
#include "kernels/flash_tpl.h"
#ifdef V_AMX
#    include "kernels/flash_amx.h"
#endif
#include "kernels/flash_backward_tpl.h"
#define T double
#define V vd
#define VOP(op) vd_##op
#define FN(name) name##_f64
#define LANES VD_LANES
#define STRIP V_STRIP
#define GREATEST DBL_MAX
#define EPSILON DBL_EPSILON
#define MIN_POWER 1022
#define ROUNDER (0x1.8p52 + MIN_POWER)
#include "kernels/flash_product_tpl.h"
#include "kernels/flash_tpl.h"
#include "kernels/flash_backward_tpl.h"

#ifdef LEVEL
#    define EACH_LANE(name) {name##_8, name##_16, name##_32, name##_64, name##_f16, name##_f32, name##_f64}

#    define KV_KERNELS(type)                                                                                 \
        {.pack_keys = pack_keys_##type,                                                                      \
         .pack_values = pack_values_##type,                                                                  \
         .step_unpacked = step_unpacked_##type}
#    ifdef V_I16X2
#        define KV_KERNELS_I8 {pack_queries_i16x2, pack_keys_i8, pack_values_i8, step_i16x2, true, false}
#    else
#        define KV_KERNELS_I8 KV_KERNELS(i8)
#    endif
#    ifdef V_LINES
#        define KV_KERNELS_BF16                                                                              \
            {pack_queries_bf16, pack_keys_bf16, pack_values_bf16, step_unpacked_bf16, false, false}
#    else
#        define KV_KERNELS_BF16 KV_KERNELS(bf16)
#    endif
#    define KV_KERNELS_BF16X2 {NULL, pack_keys_f32, pack_values_bf16x2, step_unpacked_bf16x2, false, false}
#    ifdef V_F8X2
#        define KV_KERNELS_I8X2                                                                              \
            {pack_queries_i16x2, pack_keys_bf16x2_i8, pack_values_bf16x2_i8, step_i16x2, true, false}
#        define KV_KERNELS_F8X2                                                                              \
            {pack_queries_f8x2, pack_keys_bf16x2_f8, pack_values_bf16x2_f8, step_unpacked_f8x2, false, true}
#    else
#        define KV_KERNELS_I8X2 {0}
#        define KV_KERNELS_F8X2 {0}
#    endif
#    define NUMBER_KERNELS(type) {read_bias_##type, write_##type}
#    define NUMBERS_F32                                                                                      \
        {[AM_FLOAT32] = NUMBER_KERNELS(f32),                                                                 \
         [AM_FLOAT16] = NUMBER_KERNELS(f16),                                                                 \
         [AM_BFLOAT16] = NUMBER_KERNELS(bf16)}

#    define JOIN_(a, b) a##b
#    define JOIN(a, b) JOIN_(a, b)
#    define STRING_(a) #a
#    define STRING(a) STRING_(a)

const am_kernels JOIN(am_kernels_, LEVEL) = {
    .name = STRING(LEVEL),
    .cumsum_rows_f16 = cumsum_rows_f16,
    .cumsum_rows_bf16 = cumsum_rows_bf16,
    .cumsum_rows_f32 = cumsum_rows_f32,
    .cumsum_rows_f64 = cumsum_rows_f64,
    .cumsum_scan_f16 = cumsum_scan_f16,
    .cumsum_scan_bf16 = cumsum_scan_bf16,
    .cumsum_scan_f32 = cumsum_scan_f32,
    .cumsum_scan_f64 = cumsum_scan_f64,
    .transpose_32 = transpose_32,
    .transpose_64 = transpose_64,
    .widen_f16 = widen_f16,
    .widen_bf16 = widen_bf16,
    .narrow_f16 = narrow_f16,
    .narrow_bf16 = narrow_bf16,
    .fill_positions_32 = fill_positions_32,
    .fill_positions_64 = fill_positions_64,
    .fill_sequences_32 = fill_sequences_32,
    .fill_sequences_64 = fill_sequences_64,
    .fill_pairs_32 = fill_pairs_32,
    .fill_pairs_64 = fill_pairs_64,
    .lens_32 = lens_32,
    .lens_64 = lens_64,
    .chunk_offsets_32 = chunk_offsets_32,
    .chunk_offsets_64 = chunk_offsets_64,
    .divide_32 = divide_32,
    .divide_64 = divide_64,
    .nonzero = EACH_LANE(nonzero),
    .equal_bits = equal_bits,
    .nonzero_bits = EACH_LANE(nonzero_bits),
    .expand_bits = {expand_bits_8, expand_bits_16, expand_bits_32, expand_bits_64},
    .fill_bytes = fill_bytes,
    .pack = EACH_LANE(pack),
    .first = EACH_LANE(first),
    .last = EACH_LANE(last),
    .collect = EACH_LANE(collect),
    .transpose_bits = transpose_bits,
    .unlike_bits = unlike_bits,
    .keep_bits = keep_bits,
    .flash_f32 =
        {
            .panel = PANEL_f32,
            .step = flash_step_f32,
            .merge = merge_f32,
            .kv = {[AM_FLOAT32] = KV_KERNELS(f32),
                   [AM_FLOAT16] = KV_KERNELS(f16),
                   [AM_BFLOAT16] = KV_KERNELS_BF16,
                   [AM_INT8] = KV_KERNELS_I8,
                   [AM_FLOAT8] = KV_KERNELS(f8)},
            .numbers = NUMBERS_F32,
            .backward = backward_f32,
            .find_row_max = find_row_max_f32,
            .load_rows = load_rows_f32,
            .add_rows = add_rows_f32,
            .dot_rows = dot_rows_f32,
        },
    .flash_f64 =
        {
            .panel = PANEL_f64,
            .step = flash_step_f64,
            .merge = merge_f64,
            .kv = {[AM_FLOAT64] = KV_KERNELS(f64)},
            .numbers = {[AM_FLOAT64] = NUMBER_KERNELS(f64)},
            .backward = backward_f64,
            .find_row_max = find_row_max_f64,
            .load_rows = load_rows_f64,
            .add_rows = add_rows_f64,
            .dot_rows = dot_rows_f64,
        },
#    ifdef V_BF16X2
    .flash_bf16x2 =
        {
            .panel = PANEL_f32,
            .step = flash_step_bf16x2,
            .merge = merge_f32,
            .kv = {[AM_BFLOAT16] = KV_KERNELS_BF16X2,
                   [AM_INT8] = KV_KERNELS_I8X2,
                   [AM_FLOAT8] = KV_KERNELS_F8X2},
            .numbers = NUMBERS_F32,
            .backward = backward_bf16x2,
            .find_row_max = find_row_max_bf16x2,
            .load_rows = load_rows_f32,
            .add_rows = add_rows_f32,
            .dot_rows = dot_rows_f32,
        },
#    endif
};
#endif
