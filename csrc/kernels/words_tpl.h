/* words_tpl.h – words of 64 bits: matrices of bits turned, and lines compared word by word. */

static inline __attribute__((always_inline)) void swap_corners(uint64_t (*rows)[AM_TURN_TILES],
                                                               const int size, const uint64_t low)
{
    for (int top = 0; top < 64; top += 2 * size) {
        for (int r = top; r < top + size; r++) {
            for (int t = 0; t < AM_TURN_TILES; t++) {
                uint64_t swap = (rows[r][t] >> size ^ rows[r + size][t]) & low;
                rows[r][t] ^= swap << size;
                rows[r + size][t] ^= swap;
            }
        }
    }
}

/* The tiles are turned at once, a vector lane each: corners of 32 × 32 bits change places, then those of 16 ×
 * 16 in each quarter, and so on. */
static void turn_bits(uint64_t *dst, const uint64_t *src, ptrdiff_t step)
{
    uint64_t rows[64][AM_TURN_TILES];
    for (int r = 0; r < 64; r++) memcpy(rows[r], src + r * step, sizeof rows[r]);
    swap_corners(rows, 32, 0x00000000ffffffff);
    swap_corners(rows, 16, 0x0000ffff0000ffff);
    swap_corners(rows, 8, 0x00ff00ff00ff00ff);
    swap_corners(rows, 4, 0x0f0f0f0f0f0f0f0f);
    swap_corners(rows, 2, 0x3333333333333333);
    swap_corners(rows, 1, 0x5555555555555555);
    memcpy(dst, rows, sizeof rows);
}

static uint64_t unlike_bits(const uint64_t *words, const int32_t *twin, ptrdiff_t begin, ptrdiff_t count)
{
    uint64_t bits = 0;
    for (ptrdiff_t i = 0; i < count; i++) {
        bits |= (uint64_t)(words[begin + i] != words[twin[begin + i]]) << i;
    }
    return bits;
}
