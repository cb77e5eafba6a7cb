/* level.h – what all kernels of an instruction set (a level) share: its vector operations, and the name of a
 * table. Each topic, a file, is compiled for each level that has something of its own, by its flags and with
 * its name as LEVEL. A topic has a table that is empty but for its own kernels. core/runtime/isa.c joins
 * those of a level, and takes what is missing from the level below. */
#ifndef AM_LEVEL_H
#define AM_LEVEL_H

#include <stdbool.h>
#include <string.h>

#if defined __AVX512F__
#    include "kernels/vec/avx512.h"
#elif defined __AVX2__
#    include "kernels/vec/avx2.h"
#else
#    include "kernels/vec/baseline.h"
#endif
#include "kernels/vec/half.h"
#include "kernels/table.h"
#include "kernels/unroll.h"

#pragma GCC diagnostic ignored "-Wunused-function" /* a topic needs only some of what is shared */

#define TABLE_OF(topic, level) AM_TOPIC(topic, level)
#define TABLE(topic) TABLE_OF(topic, LEVEL)

/* The name of a function of a topic for the others: of all topics, or of those of bf16x2. Levels that have
 * only some topics use what is below. */
#if defined __AVX512F__
#    define SHARED(name) AM_TOPIC(name, avx512)
#    define SHARED_BF16X2(name) AM_TOPIC(name, avx512bf16)
#elif defined __AVX2__
#    define SHARED(name) AM_TOPIC(name, avx2)
#else
#    define SHARED(name) AM_TOPIC(name, baseline)
#    ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#        define SHARED_BF16X2(name) AM_TOPIC(name, neonbf16)
#    else
#        define SHARED_BF16X2(name) AM_TOPIC(name, baseline)
#    endif
#endif

#ifndef V_FMA_ONE /* vf_fma_bf16x2 where all lanes of the first vector are one number */
#    define vf_fma_one_bf16x2 vf_fma_bf16x2
#endif

/* Sums in float64, to which vectors are added: in registers, as many as a vector takes; and in memory. */
static inline void vf_add_wide(vd *sums, vf x)
{
    sums[0] = vd_add(sums[0], vf_widen_low(x));
    sums[1] = vd_add(sums[1], vf_widen_high(x));
}
static inline void vd_add_wide(vd *sums, vd x) { sums[0] = vd_add(sums[0], x); }
static inline vf vf_carry_load(const double *carry)
{
    return vd_narrow(vd_load(carry), vd_load(carry + VD_LANES));
}
static inline void vf_carry_add(double *carry, vf sum)
{
    vd_store(carry, vd_add(vd_load(carry), vf_widen_low(sum)));
    vd_store(carry + VD_LANES, vd_add(vd_load(carry + VD_LANES), vf_widen_high(sum)));
}
static inline vd vd_carry_load(const double *carry) { return vd_load(carry); }
static inline void vd_carry_add(double *carry, vd sum) { vd_store(carry, vd_add(vd_load(carry), sum)); }

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
#include "kernels/vec/half_tpl.h"
#define FN(name) name##_bf16
#include "kernels/vec/half_tpl.h"

#endif
