/* words.h – transposes matrices of bits, and compares rows of a mask by words of 64 bits. */
#include "kernels/arrays/transpose_tiles.h"

static void transpose_bits(uint64_t *dst, const uint64_t *src, ptrdiff_t stride)
{
    uint64_t rows[64 * AM_TRANSPOSE_TILES];
    for (int r = 0; r < 64; r++)
        memcpy(rows + r * AM_TRANSPOSE_TILES, src + r * stride, AM_TRANSPOSE_TILES * sizeof *rows);
    transpose_tiles(rows, AM_TRANSPOSE_TILES);
    memcpy(dst, rows, sizeof rows);
}

static uint64_t unlike_bits(const uint64_t *words, const int32_t *leader, ptrdiff_t begin, ptrdiff_t count)
{
    uint64_t bits = 0;
    for (ptrdiff_t i = 0; i < count; i++) {
        bits |= (uint64_t)(words[begin + i] != words[leader[begin + i]]) << i;
    }
    return bits;
}
