/* i4_keys.h – logits of keys of four bits; see kv_i4.h. */

/* A row has four high bytes and four low ones of each four channels; then the sums up to each multiple of 32
 * channels, and the unit. */
static void pack_queries_i4(void *dst, const void *q, ptrdiff_t q_stride, ptrdiff_t rows, ptrdiff_t head_dim)
{
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15, 2, 6, 10, 14));
    const ptrdiff_t stride = am_packed_query_lanes(head_dim);
    float *to = dst;
    const float *from = q;
    for (ptrdiff_t r = 0; r < rows; r++, to += stride, from += q_stride) {
        int32_t sum = 0;
        vf factor;
        if (!write_unit(to, from, head_dim, MOST_I4, &factor)) continue;
        for (ptrdiff_t c = 0; c < head_dim; c += QUARTER_I4) {
            const vf first = vf_mul(vf_load(from + c), factor),
                     second = vf_mul(vf_load(from + c + VF_LANES), factor);
            const __m512i x = _mm512_castps_si512(vf_narrow_i16x2(first, second)),
                          high = _mm512_add_epi16(x, _mm512_set1_epi16(128)), /* rounded to its high byte */
                bytes = _mm512_mask_blend_epi8(UINT64_C(0xaaaaaaaaaaaaaaaa), x, high);
            _mm512_storeu_si512(to + c / 2, _mm512_shuffle_epi8(bytes, order));
            to[head_dim / 2 + c / QUARTER_I4] = (float)sum;
            sum += _mm512_reduce_add_epi32(_mm512_madd_epi16(x, _mm512_set1_epi16(1)));
        }
        to[head_dim / 2 + head_dim / QUARTER_I4] = (float)sum;
    }
}

/* A chunk of the keys of a tile. Of each sixteen keys, lane i of row j is four bytes of key i, with the
 * channels 8 j … 8 j + 7. */
typedef struct {
    _Alignas(64) uint8_t rows[AM_FLASH_TILE][CHUNK_I4 / 2];
} keys_i4;

/* Copies a chunk of sixteen keys; instead of those that are not live, others. */
APART void copy_keys_i4(const part_i4 *at, ptrdiff_t key, uint8_t (*to)[CHUNK_I4 / 2])
{
    for (ptrdiff_t i = key; i < key + VF_LANES; i++, to++) {
        const ptrdiff_t live = i < at->begin ? at->begin : i < at->end ? i : at->end - 1;
        memcpy(to, (const char *)row_at(&at->tile->k, live) + at->channel / 2, (size_t)at->width / 2);
    }
}

APART void transpose_keys_i4(const part_i4 *at, ptrdiff_t key, keys_i4 *to)
{
    const am_rows *k = &at->tile->k;
    const __mmask16 lanes = v_mask_32(at->width / 8);
    uint8_t copy[VF_LANES][CHUNK_I4 / 2];
    const char *from = (const char *)copy;
    ptrdiff_t stride = sizeof *copy;
    vf x[VF_LANES];
    if (at->begin <= key && key + VF_LANES <= at->end && (k->run == 0 || k->run >= VF_LANES))
        from = (const char *)row_at(k, key) + at->channel / 2, stride = k->stride;
    else
        copy_keys_i4(at, key, copy);
    UNROLL(16)
    for (int i = 0; i < VF_LANES; i++) x[i] = _mm512_maskz_loadu_ps(lanes, from + i * stride);
    vf_transpose(x);
    UNROLL(16)
    for (int i = 0; i < VF_LANES; i++) _mm512_store_ps(to->rows[key + i], x[i]);
}

/* Loads bytes and splits them into their first numbers and their second ones. */
static inline void load_numbers_i4(const void *bytes, __m512i n[2])
{
    const __m512i x = _mm512_load_si512(bytes), low = _mm512_set1_epi8(15);
    n[0] = _mm512_and_si512(x, low);
    n[1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
}

/* Sums of products with four high bytes and with four low ones. GCC would copy sums of type __m512i to and
 * fro. */
typedef int32_t vector_i4 __attribute__((vector_size(64)));
static inline void add_i4(vector_i4 sums[2], __m512i n, __m512i high, __m512i low)
{
    sums[0] = (vector_i4)_mm512_dpbusd_epi32((__m512i)sums[0], n, high);
    sums[1] = (vector_i4)_mm512_dpbusd_epi32((__m512i)sums[1], n, low);
}

/* Products of some rows with keys, summed up in each group of a chunk. */
typedef struct {
    _Alignas(64) int32_t of_rows[4][4][AM_FLASH_TILE];
} dots_i4;

/* Finds these, for 32 keys at a time, which the first rows transpose. It prefetches as many lines as it
 * reads. */
static inline __attribute__((always_inline)) void
multiply_i4(const int rows, const part_i4 *at, keys_i4 *keys, dots_i4 *to, prefetch_lines *prefetch)
{
    enum { VECTORS = 2, KEYS = VECTORS * VF_LANES };
    const int parts = rows < 4 ? 2 : 1; /* else too few sums do not wait for one another */
    const ptrdiff_t q_stride = am_packed_query_lanes(at->block->head_dim), group = at->tile->k_group;
    const float *q = (const float *)at->block->q_packed + at->row * q_stride + at->channel / 2;
    prefetch_lines current = *prefetch;
    for (ptrdiff_t key = at->begin & -KEYS; key < at->end; key += KEYS) {
        for (ptrdiff_t i = 0; at->row == 0 && i < KEYS; i += VF_LANES) transpose_keys_i4(at, key + i, keys);
        const uint8_t (*k)[CHUNK_I4 / 2] = &keys->rows[key];
        const float *bytes = q;
        int32_t *dots = &to->of_rows[0][0][key];
        for (ptrdiff_t c = 0; c < at->width; c += group, dots += AM_FLASH_TILE) {
            vector_i4 sums[4 * VECTORS][2][2];
            UNROLL(8)
            for (int i = 0; i < rows * VECTORS; i++) {
                UNROLL(4)
                for (int j = 0; j < 4; j++) sums[i][j / 2][j % 2] = (vector_i4){0};
            }
            for (ptrdiff_t i = 0; i < group; i += 8, k++, bytes += 4) {
                __m512i n[VECTORS][2];
                prefetch_few(&current, VECTORS, true);
                UNROLL(2)
                for (int j = 0; j < VECTORS; j++) load_numbers_i4(k + j * VF_LANES, n[j]);
                UNROLL(2)
                for (int part = 0; part < 2; part++) {
                    UNROLL(4)
                    for (int r = 0; r < rows; r++) {
                        const float *four = bytes + r * q_stride + 2 * part;
                        const __m512i high = _mm512_castps_si512(vf_set1(four[0])),
                                      low = _mm512_castps_si512(vf_set1(four[1]));
                        UNROLL(2)
                        for (int j = 0; j < VECTORS; j++)
                            add_i4(sums[j * rows + r][part % parts], n[j][part], high, low);
                    }
                }
            }
            UNROLL(8)
            for (int i = 0; i < rows * VECTORS; i++) {
                vector_i4 high = sums[i][0][0], low = sums[i][0][1];
                if (parts > 1) high += sums[i][1][0], low += sums[i][1][1];
                int32_t *its = dots + i % rows * 4 * AM_FLASH_TILE + i / rows * VF_LANES;
                _mm512_store_si512(its, (__m512i)(high * 256 + low));
            }
        }
    }
    *prefetch = current;
}

/* Logits of some rows: the first, or what a chunk adds to them. */
static inline __attribute__((always_inline)) void scale_dots_i4(const int rows, const part_i4 *at,
                                                                const dots_i4 *dots)
{
    const am_flash_rows *block = at->block;
    const ptrdiff_t group = at->tile->k_group, q_stride = am_packed_query_lanes(block->head_dim);
    const float *q = (const float *)block->q_packed + at->row * q_stride,
                *sum = q + block->head_dim / 2 + at->channel / QUARTER_I4, /* up to this chunk */
                    *scales = (const float *)at->tile->k_scales +
                              group_of_i4(at->channel, group) * 2 * AM_FLASH_TILE;
    float *logits = (float *)block->logits + at->row * AM_FLASH_TILE, of_q[4][4];
    ptrdiff_t groups = 0;
    for (ptrdiff_t c = 0; c < at->width; c += group, groups++, sum += group / QUARTER_I4) {
        UNROLL(4)
        for (int r = 0; r < rows; r++)
            of_q[groups][r] = sum[r * q_stride + group / QUARTER_I4] - sum[r * q_stride];
    }
    for (ptrdiff_t j = 0; j < AM_FLASH_TILE; j += VF_LANES) {
        vf sums[4];
        UNROLL(4)
        for (int r = 0; r < rows; r++) sums[r] = vf_set1(0);
        for (ptrdiff_t g = 0; g < groups; g++) {
            const vf scale = vf_load(scales + 2 * g * AM_FLASH_TILE + j),
                     offset = vf_load(scales + (2 * g + 1) * AM_FLASH_TILE + j);
            UNROLL(4)
            for (int r = 0; r < rows; r++) {
                const vf dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots->of_rows[r][g] + j));
                sums[r] = vf_fma(dot, scale, vf_fma(offset, vf_set1(of_q[g][r]), sums[r]));
            }
        }
        UNROLL(4)
        for (int r = 0; r < rows; r++) {
            float *to = logits + r * AM_FLASH_TILE + j;
            const vf unit = vf_set1(q[(r + 1) * q_stride - UNIT_LANES]);
            vf_store(to, at->channel > 0 ? vf_fma(sums[r], unit, vf_load(to)) : vf_mul(sums[r], unit));
        }
    }
}

#define ROWS_I4(n)                                                                                           \
    case n:                                                                                                  \
        multiply_i4(n, at, keys, &dots, prefetch);                                                           \
        scale_dots_i4(n, at, &dots);                                                                         \
        break;
APART void find_part_i4(ptrdiff_t rows, const part_i4 *at, keys_i4 *keys, prefetch_lines *prefetch)
{
    dots_i4 dots;
    switch (rows) {
        ROWS_I4(1)
        ROWS_I4(2)
        ROWS_I4(4)
    }
}
#undef ROWS_I4

/* Logits of a row that has no unit, in float32. */
static void find_logits_apart_i4(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row,
                                 ptrdiff_t begin, ptrdiff_t end)
{
    const float *q = (const float *)block->q + row * block->q_stride;
    for (ptrdiff_t i = begin; i < end; i++) {
        const uint8_t *k = row_at(&tile->k, i);
        float sum = 0;
        for (ptrdiff_t c = 0; c < block->head_dim; c++) {
            const float *group = (const float *)tile->k_scales + c / tile->k_group * 2 * AM_FLASH_TILE + i;
            sum += q[c] * (group[0] * number_i4(k, c) + group[AM_FLASH_TILE]);
        }
        ((float *)block->logits)[row * AM_FLASH_TILE + i] = sum;
    }
}

static void find_logits_i4(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch,
                           next_scales_i4 *scales)
{
    prefetch_lines none = prefetch_nothing(tile->k.data);
    part_i4 at;
    for (ptrdiff_t c = 0; c < block->head_dim; c += CHUNK_I4) {
        keys_i4 keys;
        at = part_of_i4(block, tile, c, block->head_dim);
        for (ptrdiff_t rows; at.row < block->rows; at.row += rows) {
            rows = some_rows_i4(block->rows - at.row);
            find_part_i4(rows, &at, &keys, at.row == 0 ? prefetch : &none);
            for (ptrdiff_t r = 0; r < rows; r++) prefetch_scales_i4(scales);
        }
    }
    for (ptrdiff_t r = 0; r < block->rows; r++)
        if (isnan(unit_of_query(block, r))) find_logits_apart_i4(block, tile, r, at.begin, at.end);
}
