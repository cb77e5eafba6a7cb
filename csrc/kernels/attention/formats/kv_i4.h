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

enum { CHUNK_I4 = 128, QUARTER_I4 = 32, MOST_I4 = 127 * 256 + 127 };

/* Channels of the chunk that begins at a channel: the last chunk may have fewer, and its other lanes
 * are 0. */
static inline ptrdiff_t width_i4(ptrdiff_t channels, ptrdiff_t begin)
{
    return channels - begin < CHUNK_I4 ? channels - begin : CHUNK_I4;
}

/* P of a row times the scales of some groups, as i16x2, their units, and the sums of P times offsets. */
typedef struct {
    float p[4][AM_FLASH_TILE / 2], units[4], offsets[4];
} weights_i4;

/* What is computed at once: rows of a block from `row` on, with keys begin … end - 1 of a tile and a chunk of
 * channels. */
typedef struct {
    const am_flash_rows *block;
    const am_flash_tile *tile;
    ptrdiff_t row, begin, end, channel, width;
    const weights_i4 *weights; /* of values: of each row */
} part_i4;

/* The group of a channel: their length is a power of two. */
static inline ptrdiff_t group_of_i4(ptrdiff_t channel, ptrdiff_t group)
{
    return channel >> __builtin_ctzll((unsigned long long)group);
}

static inline part_i4 part_of_i4(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t channel,
                                 ptrdiff_t channels)
{
    part_i4 at = {.block = block, .tile = tile, .channel = channel};
    find_live(block, tile, &at.begin, &at.end);
    at.width = width_i4(channels, channel);
    return at;
}

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

APART void find_dots_i4(ptrdiff_t rows, const part_i4 *at, keys_i4 *keys, dots_i4 *to,
                        prefetch_lines *prefetch)
{
    switch (rows) {
    case 1: multiply_i4(1, at, keys, to, prefetch); break;
    case 2: multiply_i4(2, at, keys, to, prefetch); break;
    case 4: multiply_i4(4, at, keys, to, prefetch); break;
    }
}

/* Logits of a row: the first, or what a chunk adds to them. */
static inline void scale_dots_i4(const part_i4 *at, ptrdiff_t row, const int32_t dots[4][AM_FLASH_TILE])
{
    const am_flash_rows *block = at->block;
    const ptrdiff_t group = at->tile->k_group, q_stride = am_packed_query_lanes(block->head_dim);
    const float *q = (const float *)block->q_packed + row * q_stride,
                *sum = q + block->head_dim / 2 + at->channel / QUARTER_I4, /* up to this chunk */
                    *scales = (const float *)at->tile->k_scales +
                              group_of_i4(at->channel, group) * 2 * AM_FLASH_TILE;
    float *logits = (float *)block->logits + row * AM_FLASH_TILE;
    vf sums[AM_FLASH_TILE / VF_LANES] = {vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0)};
    for (ptrdiff_t c = 0; c < at->width; c += group, dots++, scales += 2 * AM_FLASH_TILE) {
        const vf of_q = vf_set1(sum[group / QUARTER_I4] - *sum);
        sum += group / QUARTER_I4;
        UNROLL(4)
        for (int j = 0; j < 4; j++) {
            const vf dot = _mm512_cvtepi32_ps(_mm512_load_si512(*dots + j * VF_LANES)),
                     offset = vf_load(scales + AM_FLASH_TILE + j * VF_LANES);
            sums[j] = vf_fma(dot, vf_load(scales + j * VF_LANES), vf_fma(offset, of_q, sums[j]));
        }
    }
    const vf unit = vf_set1(q[q_stride - VF_LANES]);
    UNROLL(4)
    for (int j = 0; j < 4; j++) {
        float *to = logits + j * VF_LANES;
        vf_store(to, at->channel > 0 ? vf_fma(sums[j], unit, vf_load(to)) : vf_mul(sums[j], unit));
    }
}

static inline float number_i4(const uint8_t *row, ptrdiff_t channel)
{
    return (float)(row[channel / 2] >> channel % 2 * 4 & 15);
}

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

/* How many of the remaining rows are multiplied at once. */
static inline ptrdiff_t some_rows_i4(ptrdiff_t left) { return left >= 4 ? 4 : left >= 2 ? 2 : left; }

static void find_logits_i4(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch)
{
    prefetch_lines none = prefetch_nothing(tile->k.data);
    part_i4 at;
    for (ptrdiff_t c = 0; c < block->head_dim; c += CHUNK_I4) {
        keys_i4 keys;
        at = part_of_i4(block, tile, c, block->head_dim);
        for (ptrdiff_t rows; at.row < block->rows; at.row += rows) {
            dots_i4 dots;
            rows = some_rows_i4(block->rows - at.row);
            find_dots_i4(rows, &at, &keys, &dots, at.row == 0 ? prefetch : &none);
            for (ptrdiff_t r = 0; r < rows; r++) scale_dots_i4(&at, at.row + r, dots.of_rows[r]);
        }
    }
    for (ptrdiff_t r = 0; r < block->rows; r++)
        if (isnan(unit_of_query(block, r))) find_logits_apart_i4(block, tile, r, at.begin, at.end);
}

/* O + P V of one group, whose first channel is `channel`, in float32: for P times scales without a unit. */
static void add_group_apart_i4(float *out, const am_flash_tile *tile, ptrdiff_t begin, ptrdiff_t end,
                               ptrdiff_t channel, const float *p)
{
    for (ptrdiff_t i = begin; i < end; i++) {
        const uint8_t *v = row_at(&tile->v, i);
        for (ptrdiff_t c = channel; p[i] != 0 && c < channel + tile->v_group; c++)
            out[c] += p[i] * number_i4(v, c);
    }
}

/* Finds the weights of one row in the groups of a chunk, from `count` vectors of P from the first on. */
static inline __attribute__((always_inline)) void
weigh_groups_i4(const part_i4 *at, ptrdiff_t groups, ptrdiff_t first, const int count, weights_i4 *to)
{
    const am_flash_tile *tile = at->tile;
    const float *p = (const float *)at->block->logits + at->row * AM_FLASH_TILE + first,
                *scales = (const float *)tile->v_scales +
                          group_of_i4(at->channel, tile->v_group) * 2 * AM_FLASH_TILE + first;
    for (ptrdiff_t g = 0; g < groups; g++, scales += 2 * AM_FLASH_TILE) {
        vf x[AM_FLASH_TILE / VF_LANES], sum = vf_set1(0);
        UNROLL(4)
        for (int j = 0; j < count; j++) {
            const vf y = vf_load(p + j * VF_LANES);
            const __mmask16 lanes = _mm512_cmp_ps_mask(y, vf_set1(0), _CMP_NEQ_UQ); /* as scale_p_f32 */
            x[j] = _mm512_maskz_mul_ps(lanes, y, vf_load(scales + j * VF_LANES));
            sum = vf_add(sum, _mm512_maskz_mul_ps(lanes, y, vf_load(scales + AM_FLASH_TILE + j * VF_LANES)));
        }
        to->offsets[g] = vf_total(sum);
        to->units[g] = narrow_weights_i16x2(x, count, to->p[g] + first / 2);
        if (!isnan(to->units[g])) continue;
        float apart[AM_FLASH_TILE];
        UNROLL(4)
        for (int j = 0; j < count; j++) vf_store(apart + first + j * VF_LANES, x[j]);
        add_group_apart_i4((float *)at->block->out + at->row * at->block->out_dim, tile, at->begin, at->end,
                           at->channel + g * tile->v_group, apart);
        memset(to->p[g], 0, sizeof to->p[g]);
        to->units[g] = 0;
    }
}

/* Sets the lanes of each group to its number. */
static inline vf of_groups_i4(const float *first, ptrdiff_t stride, const int groups, const __mmask16 *lanes)
{
    vf v = vf_set1(*first);
    UNROLL(4)
    for (int g = 1; g < groups; g++)
        v = _mm512_mask_broadcastss_ps(v, lanes[g], _mm_load_ss(first + g * stride));
    return v;
}

/* Puts channels in order, where lane l of vector i has channel 8 l + i. */
static inline void straighten_i4(vf v[8])
{
    vf fours[8];
    UNROLL(2)
    for (int h = 0; h < 8; h += 4) {
        const __m512d low[] = {_mm512_castps_pd(_mm512_unpacklo_ps(v[h], v[h + 1])),
                               _mm512_castps_pd(_mm512_unpacklo_ps(v[h + 2], v[h + 3]))},
                      high[] = {_mm512_castps_pd(_mm512_unpackhi_ps(v[h], v[h + 1])),
                                _mm512_castps_pd(_mm512_unpackhi_ps(v[h + 2], v[h + 3]))};
        fours[h] = _mm512_castpd_ps(_mm512_unpacklo_pd(low[0], low[1]));
        fours[h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low[0], low[1]));
        fours[h + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high[0], high[1]));
        fours[h + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high[0], high[1]));
    }
    UNROLL(2)
    for (int i = 0; i < 2; i++) { /* lanes 2 i and 2 i + 1 of each quarter */
        const vf *a = fours + 2 * i, *b = fours + 4 + 2 * i;
        const vf first = _mm512_shuffle_f32x4(a[0], b[0], 0x44),
                 second = _mm512_shuffle_f32x4(a[1], b[1], 0x44),
                 third = _mm512_shuffle_f32x4(a[0], b[0], 0xee),
                 fourth = _mm512_shuffle_f32x4(a[1], b[1], 0xee);
        v[i] = _mm512_shuffle_f32x4(first, second, 0x88);
        v[i + 2] = _mm512_shuffle_f32x4(first, second, 0xdd);
        v[i + 4] = _mm512_shuffle_f32x4(third, fourth, 0x88);
        v[i + 6] = _mm512_shuffle_f32x4(third, fourth, 0xdd);
    }
}

/* Lanes of a chunk, and of each of its groups. */
typedef struct {
    __mmask16 all, groups[4];
} lanes_i4;

/* Halves of a chunk that are added up at once: as many as there are registers for. */
static inline __attribute__((always_inline)) int halves_i4(const int rows) { return rows <= 2 ? 2 : 1; }

/* Adds products of some rows of P with pairs of keys of one run to sums of half of a chunk's columns or of
 * both. A lane has eight channels of a key, and those of two keys are joined word by word to four vectors a
 * half; sums of the second of these are sixteen times as great. The last key may have no other. */
static inline __attribute__((always_inline)) void add_pairs_i4(const int rows, const int groups,
                                                               const int half, const part_i4 at,
                                                               const lanes_i4 *lanes, vf sums[4][8],
                                                               prefetch_lines *prefetch)
{
    const int halves = halves_i4(rows);
    const char *v = (const char *)row_at(&at.tile->v, at.begin) + at.channel / 2;
    const float *p = at.weights->p[0] + at.begin / 2;
    ptrdiff_t stride = at.tile->v.stride, keys = at.end - at.begin;
    const __m512i low = _mm512_set1_epi16(0x000f), second = _mm512_set1_epi16(0x00f0);
    prefetch_lines current = half == 0 ? *prefetch : (prefetch_lines){0};
#pragma GCC unroll 2
    for (; keys > 0; keys -= 2, v += 2 * stride, p++) {
        const __m512i x = _mm512_maskz_loadu_epi32(lanes->all, v),
                      y = _mm512_maskz_loadu_epi32(lanes->all, v + (keys > 1 ? stride : 0));
        vf n[8];
        UNROLL(2)
        for (int h = 0; h < halves; h++) {
            const __m512i joined = half + h == 0
                                       ? _mm512_mask_blend_epi16(0xaaaaaaaa, x, _mm512_slli_epi32(y, 16))
                                       : _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y);
            n[4 * h] = _mm512_castsi512_ps(_mm512_and_si512(joined, low));
            n[4 * h + 1] = _mm512_castsi512_ps(_mm512_and_si512(joined, second));
            n[4 * h + 2] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_srli_epi16(joined, 8), low));
            n[4 * h + 3] = _mm512_castsi512_ps(_mm512_srli_epi16(joined, 12));
        }
        if (half == 0) prefetch_few(&current, 2, true);
        UNROLL(4)
        for (int r = 0; r < rows; r++) {
            const vf weight = of_groups_i4(p + r * (ptrdiff_t)(sizeof(weights_i4) / sizeof *p),
                                           AM_FLASH_TILE / 2, groups, lanes->groups);
            UNROLL(8)
            for (int j = 0; j < 4 * halves; j++) sums[r][j] = vf_fma_i16x2(n[j], weight, sums[r][j]);
        }
    }
    if (half == 0) *prefetch = current;
}

/* O + P V of some rows and a chunk of columns. */
static inline __attribute__((always_inline)) void add_chunk_i4(const int rows, const int groups, part_i4 at,
                                                               prefetch_lines *prefetch)
{
    const int halves = halves_i4(rows);
    const am_flash_tile *tile = at.tile;
    const ptrdiff_t width = width_i4(2 * tile->value_bytes, at.channel),
                    group = tile->v_group / 8; /* lanes */
    lanes_i4 lanes = {.all = v_mask_32(width / 8)};
    vf out[4][8];
    UNROLL(4)
    for (int g = 0; g < groups; g++) lanes.groups[g] = (__mmask16)(((1u << group) - 1) << g * group);
    UNROLL(2)
    for (int half = 0; half < 2; half += halves) {
        vf sums[4][8];
        UNROLL(4)
        for (int r = 0; r < rows; r++) {
            UNROLL(8)
            for (int i = 0; i < 4 * halves; i++) sums[r][i] = vf_set1(0);
        }
        part_i4 run = at;
        for (; run.begin < at.end; run.begin = run.end) {
            run.end = end_of_run(&tile->v, run.begin, at.end);
            add_pairs_i4(rows, groups, half, run, &lanes, sums, prefetch);
        }
        UNROLL(4)
        for (int r = 0; r < rows; r++) {
            const vf unit = of_groups_i4(at.weights[r].units, 1, groups, lanes.groups),
                     offset = of_groups_i4(at.weights[r].offsets, 1, groups, lanes.groups);
            UNROLL(8)
            for (int j = 0; j < 4 * halves; j++) {
                const vf its = j % 4 == 1 ? vf_mul(unit, vf_set1(0x1p-4f)) : unit;
                out[r][4 * half + j] = vf_fma(its, vf_of_i32(sums[r][j]), offset);
            }
        }
    }
    UNROLL(4)
    for (int r = 0; r < rows; r++) {
        float *to = (float *)at.block->out + (at.row + r) * at.block->out_dim + at.channel;
        straighten_i4(out[r]);
        for (ptrdiff_t i = 0; i < width / VF_LANES; i++)
            vf_store(to + i * VF_LANES, vf_add(vf_load(to + i * VF_LANES), out[r][i]));
    }
}

#define ROWS_I4(n)                                                                                           \
    case n:                                                                                                  \
        switch (groups) {                                                                                    \
        case 1:                                                                                              \
        case 2: add_chunk_i4(n, 2, *at, prefetch); break;                                                    \
        default: add_chunk_i4(n, 4, *at, prefetch); break;                                                   \
        }                                                                                                    \
        break;
/* One group is taken as two, and three as four, of which the last has no columns. */
APART void add_weighted_i4(ptrdiff_t rows, ptrdiff_t groups, const part_i4 *at, prefetch_lines *prefetch)
{
    switch (rows) {
        ROWS_I4(1)
        ROWS_I4(2)
        ROWS_I4(4)
    }
}
#undef ROWS_I4

static void add_tile_i4(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch)
{
    ptrdiff_t begin, end;
    find_live(block, tile, &begin, &end);
    const bool both = begin < PANEL_f32 && end > PANEL_f32;
    prefetch_lines none = prefetch_nothing(tile->v.data);
    for (ptrdiff_t column = 0; column < 2 * tile->value_bytes; column += CHUNK_I4) {
        const ptrdiff_t groups = width_i4(2 * tile->value_bytes, column) / tile->v_group;
        for (ptrdiff_t row = 0, rows; row < block->rows; row += rows) {
            weights_i4 weights[4];
            part_i4 at = {.block = block,
                          .tile = tile,
                          .row = row,
                          .begin = begin,
                          .end = end,
                          .channel = column,
                          .weights = weights};
            rows = some_rows_i4(block->rows - row);
            for (ptrdiff_t r = 0; r < rows; r++, at.row++) {
                if (both)
                    weigh_groups_i4(&at, groups, 0, AM_FLASH_TILE / VF_LANES, &weights[r]);
                else
                    weigh_groups_i4(&at, groups, begin - begin % PANEL_f32, PANEL_f32 / VF_LANES,
                                    &weights[r]);
            }
            at.row = row;
            at.begin = begin - begin % 2;
            add_weighted_i4(rows, groups, &at, row == 0 ? prefetch : &none);
        }
    }
}

static void step_i4(const am_flash_rows *const *blocks, const am_flash_tile *tiles, ptrdiff_t heads)
{
    prefetch_runs runs;
    prefetch_lines prefetch = lines_of_values(tiles, heads, &runs);
    for (ptrdiff_t h = 0; h < heads; h++) {
        assert(tiles[h].layout == AM_ROWS);
        find_logits_i4(blocks[h], &tiles[h], &prefetch);
        OWN(find_p)(blocks[h], &tiles[h]);
    }
    prefetch = lines_of_next_keys(tiles, &runs);
    for (ptrdiff_t h = 0; h < heads; h++) add_tile_i4(blocks[h], &tiles[h], &prefetch);
}
