/* transpose_tiles.h – transposes matrices of 64 × 64 bits. */
#ifndef AM_KERNELS_TRANSPOSE_TILES_H
#define AM_KERNELS_TRANSPOSE_TILES_H

#include <stdint.h>

#include "kernels/unroll.h"

INLINE void swap_quarters(uint64_t *rows, const int tiles, const int size, const uint64_t low)
{
    for (int top = 0; top < 64; top += 2 * size) {
        for (int r = top; r < top + size; r++) {
            for (int t = 0; t < tiles; t++) {
                uint64_t *above = rows + r * tiles + t, *below = above + size * tiles;
                uint64_t swap = (*above >> size ^ *below) & low;
                *above ^= swap << size;
                *below ^= swap;
            }
        }
    }
}

/* Adjacent tiles are transposed at the same time, each in a lane of vectors: the two quarters of 32 × 32 bits
 * off the diagonal change places, then those of 16 × 16 bits in each quarter, and so on. */
INLINE void transpose_tiles(uint64_t *rows, const int tiles)
{
    swap_quarters(rows, tiles, 32, 0x00000000ffffffff);
    swap_quarters(rows, tiles, 16, 0x0000ffff0000ffff);
    swap_quarters(rows, tiles, 8, 0x00ff00ff00ff00ff);
    swap_quarters(rows, tiles, 4, 0x0f0f0f0f0f0f0f0f);
    swap_quarters(rows, tiles, 2, 0x3333333333333333);
    swap_quarters(rows, tiles, 1, 0x5555555555555555);
}

#endif
