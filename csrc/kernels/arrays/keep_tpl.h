/* keep_tpl.h – random bits for the dropout of attention. A bit is a function of its position, so it does not
 * depend on the order of calls. */

static uint64_t keep_bits(uint64_t row_key, uint32_t k, uint32_t threshold)
{
    uint32_t low = (uint32_t)row_key, high = (uint32_t)(row_key >> 32), kept[64];
    for (uint32_t i = 0; i < 64; i++) { /* one-to-one in k: two keyed rounds of multiply and shift */
        uint32_t x = k + i + low;
        x = (x ^ x >> 16) * 0x7feb352du;
        x = (x ^ x >> 15) * 0x846ca68bu;
        x = (x ^ x >> 16) + high;
        x = (x ^ x >> 17) * 0xed5ad4bbu;
        x = (x ^ x >> 11) * 0xac4c1b51u;
        x = x ^ x >> 15;
        kept[i] = x >= threshold;
    }
    return nonzero_bits_32(kept, 64);
}
