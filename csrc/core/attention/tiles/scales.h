/* scales.h – the scales of a tile's tokens, or of their groups, for kernels. */
#ifndef AM_CORE_ATTENTION_TILES_SCALES_H
#define AM_CORE_ATTENTION_TILES_SCALES_H

#include "core/attention/base.h"

/* Copies the scales of a tile's tokens for `heads` heads from that of a place on, each of so many columns of
 * AM_FLASH_TILE numbers, and prefetches those of the next tile that kernels do not prefetch. What is not to
 * be read has 0. */
void am_read_scales(const am_attn_base *base, const am_kv_scales *scales, const am_attn_place *at,
                    am_range keys, ptrdiff_t heads, ptrdiff_t columns, float *to);

#endif
