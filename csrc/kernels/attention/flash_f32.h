/* flash_f32.h – attention in float32: products, logits and weights. */
#ifndef AM_KERNELS_ATTENTION_FLASH_F32_H
#define AM_KERNELS_ATTENTION_FLASH_F32_H

#include "kernels/attention/f32.h"
#include "kernels/attention/product_tpl.h"
#include "kernels/attention/attention_tpl.h"

/* Those of flash_f32.c, which other topics call. */
#define OWN(name) SHARED(name##_f32)
void SHARED(find_p_f32)(const am_flash_rows *block, const am_flash_tile *tile);
void SHARED(add_packed_f32)(ptrdiff_t rows, ptrdiff_t columns, const operands_f32 *p);

/* Loads up to two vectors; what is missing is zero. */
static inline void load_two(const float *from, ptrdiff_t count, vf *first, vf *second)
{
    *first = count >= VF_LANES ? vf_load(from) : vf_load_part(from, count);
    *second = count >= 2 * VF_LANES ? vf_load(from + VF_LANES)
              : count > VF_LANES    ? vf_load_part(from + VF_LANES, count - VF_LANES)
                                    : vf_set1(0);
}

#endif
