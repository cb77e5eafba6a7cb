/* scales.h – the scales of a tile's tokens, or of their groups, for kernels. */
#ifndef AM_CORE_ATTENTION_TILES_SCALES_H
#define AM_CORE_ATTENTION_TILES_SCALES_H

#include "core/attention/base.h"

/* Copies the scales of a tile's tokens for `heads` heads, beginning with the head of a place. A head has
 * `columns` columns of AM_FLASH_TILE numbers. Tokens that are not to be read get 0. Prefetches scales of the
 * next tile unless kernels do. */
void am_read_scales(const am_attn_base *base, const am_kv_scales *scales, const am_attn_place *at,
                    am_range keys, ptrdiff_t heads, ptrdiff_t columns, float *to);

#endif
