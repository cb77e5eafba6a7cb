/* kv_i4.h – attention of few rows to keys and values of four bits by dot products of integers. The channels
 * of a group are multiplied by one scale, and have one offset:
 *
 *     q·k = Σ scale Σ q n + offset Σ q             over groups, n from 0 to 15
 *     O + P V = Σ (P scale) n + Σ P offset         over keys
 *
 * Queries, and P times the scales of a group, are rounded to sixteen bits; sums within a group and a tile are
 * exact. Channels are taken in chunks of up to 128.
 *
 * Products with keys are those of bytes: an integer of a query is 256 high + low, both with signs, and a lane
 * has the bytes of every other of eight channels. */

#include "kernels/attention/formats/i4_part.h"

#include "kernels/attention/formats/i4_keys.h"
#include "kernels/attention/formats/i4_values.h"

static void step_i4(const am_flash_rows *const *blocks, const am_flash_tile *tiles, ptrdiff_t heads)
{
    prefetch_runs runs;
    const ptrdiff_t rows = heads * blocks[0]->rows;
    next_scales_i4 k_scales = next_scales_of_i4(tiles->prefetch, AM_PREFETCH_K_SCALES, rows),
                   v_scales = next_scales_of_i4(tiles->prefetch, AM_PREFETCH_V_SCALES, rows);
    prefetch_lines prefetch = lines_behind_keys(blocks, tiles, heads, &runs);
    for (ptrdiff_t h = 0; h < heads; h++) {
        assert(tiles[h].layout == AM_ROWS);
        find_logits_i4(blocks[h], &tiles[h], &prefetch, &k_scales);
        OWN(find_p)(blocks[h], &tiles[h]);
    }
    if (!has_values(blocks)) return;
    prefetch = lines_of_next_keys(tiles, &runs);
    for (ptrdiff_t h = 0; h < heads; h++) add_tile_i4(blocks[h], &tiles[h], &prefetch, &v_scales);
}
