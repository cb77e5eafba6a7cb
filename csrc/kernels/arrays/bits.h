/* bits.h – converts rows of arrays to words of bits and back, fills rows, and makes random bits. */

static uint64_t low_bits(ptrdiff_t count) { return count >= 64 ? UINT64_MAX : ((uint64_t)1 << count) - 1; }

static uint64_t equal_bits(const int32_t *ids, int32_t id, ptrdiff_t count)
{
    if (count == 64) return v_equal_64(ids, id);
    int32_t padded[64] = {0};
    memcpy(padded, ids, (size_t)count * sizeof *padded);
    return v_equal_64(padded, id) & low_bits(count);
}

#define SIZE 8
#include "kernels/arrays/mask_bits_tpl.h"
#define SIZE 16
#include "kernels/arrays/mask_bits_tpl.h"
#define SIZE 32
#include "kernels/arrays/mask_bits_tpl.h"
#define SIZE 64
#include "kernels/arrays/mask_bits_tpl.h"

static uint64_t nonzero_bits_f16(const void *src, ptrdiff_t count)
{
    return masked_bits_16(src, count, 0x7fff);
}
static uint64_t nonzero_bits_f32(const void *src, ptrdiff_t count)
{
    return masked_bits_32(src, count, 0x7fffffff);
}
static uint64_t nonzero_bits_f64(const void *src, ptrdiff_t count)
{
    return masked_bits_64(src, count, UINT64_MAX >> 1);
}

static void fill_bytes(void *dst, uint64_t pattern, size_t bytes, bool stream)
{
    enum { STEP = sizeof(vi) };
    char *p = dst;
    vi value = vi_set1(pattern);
    if (bytes < STEP) {
        memcpy(p, &value, bytes);
        return;
    }
    /* The first and the last vector may overlap the aligned vectors between them. dst is aligned to an
     * element, so the pattern is the same wherever a vector begins. */
    vi_store(p, value);
    vi_store(p + bytes - STEP, value);
    char *end = p + bytes;
    p += STEP - (uintptr_t)p % STEP;
    if (stream) {
        for (; p + STEP <= end; p += STEP) vi_stream(p, value);
    } else {
        for (; p + STEP <= end; p += STEP) vi_store(p, value);
    }
}

/* Random bits for the dropout of attention. A bit is a function of its position, so it does not depend on
 * the order of calls. */
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
