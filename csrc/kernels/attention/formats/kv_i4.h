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

/* P of some rows times the scales of some groups, as i16x2, their units, and the sums of P times offsets. */
typedef struct {
    _Alignas(64) float p[4][4][AM_FLASH_TILE / 2]; /* [row][group] */
    float units[4][4], offsets[4][4];              /* [group][row] */
} weights_i4;

/* What is computed at once: rows of a block from `row` on, with keys begin … end - 1 of a tile and a chunk of
 * channels. */
typedef struct {
    const am_flash_rows *block;
    const am_flash_tile *tile;
    ptrdiff_t row, begin, end, channel, width;
    const weights_i4 *weights; /* of values */
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
            const vf unit = vf_set1(q[(r + 1) * q_stride - VF_LANES]);
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

/* Scales of keys or of values of the next tile, which a step prefetches line by line between its products: if
 * it prefetched all at once, it would wait for them, and memory for its products. */
typedef struct {
    prefetch_lines lines;
    const am_prefetch_rows *next, *end; /* the runs after these */
    ptrdiff_t fours;                    /* of lines, for each row of queries */
} next_scales_i4;

/* Begins with a run; returns how many lines it has. */
static inline ptrdiff_t begin_scales_i4(next_scales_i4 *scales, const am_prefetch_rows *run)
{
    scales->lines = prefetch_lines_of((uintptr_t)run->at, run->stride, run->length, run->rows, 0);
    return scales->lines.count;
}

/* Those of a plan from `place` on, if it has some. `rows` rows of queries prefetch them. */
static inline next_scales_i4 next_scales_of_i4(const am_prefetch_plan *plan, int place, ptrdiff_t rows)
{
    static const am_prefetch_rows none[AM_PREFETCH_RUNS];
    const am_prefetch_rows *first = plan && plan->count > place ? plan->rows + place : none;
    next_scales_i4 scales = {.next = first + 1, .end = first + AM_PREFETCH_RUNS};
    ptrdiff_t count = 0;
    for (int i = AM_PREFETCH_RUNS - 1; i >= 0; i--) count += begin_scales_i4(&scales, first + i);
    scales.fours = (count + 4 * rows - 1) / (4 * rows);
    return scales;
}

/* Four lines of runs that may end. */
APART void prefetch_each_i4(next_scales_i4 *scales)
{
    for (int i = 0; i < 4; i++) {
        while (scales->lines.count == 0) {
            if (scales->next == scales->end) return;
            begin_scales_i4(scales, scales->next++);
        }
        prefetch_one(&scales->lines, false);
        scales->lines.count--;
    }
}

/* What a row of queries has to prefetch. */
static inline void prefetch_scales_i4(next_scales_i4 *scales)
{
    prefetch_lines *lines = &scales->lines;
    for (ptrdiff_t i = 0; i < scales->fours; i++) {
        const char *at = (const char *)lines->at;
        if (lines->left <= 4 || lines->count < 4) {
            prefetch_each_i4(scales);
            continue;
        }
        UNROLL(4)
        for (int j = 0; j < 4; j++) __builtin_prefetch(at + j * CACHE_LINE);
        lines->at += 4 * CACHE_LINE, lines->left -= 4, lines->count -= 4;
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

/* The greatest lane of each of four vectors of magnitudes, in each quarter. */
static inline vf greatest_of_few_i4(const vf v[4])
{
    __m512i x[4];
    UNROLL(2)
    for (int i = 0; i < 4; i += 2)
        x[i / 2] = _mm512_max_epi32(_mm512_castps_si512(_mm512_unpacklo_ps(v[i], v[i + 1])),
                                    _mm512_castps_si512(_mm512_unpackhi_ps(v[i], v[i + 1])));
    __m512i most = _mm512_max_epi32(_mm512_unpacklo_epi64(x[0], x[1]), _mm512_unpackhi_epi64(x[0], x[1]));
    most = _mm512_max_epi32(most, _mm512_shuffle_i32x4(most, most, 0x4e));
    return _mm512_castsi512_ps(_mm512_max_epi32(most, _mm512_shuffle_i32x4(most, most, 0xb1)));
}

/* Finds the weights of some rows in the groups of a chunk, from `count` vectors of P from the first on. */
static inline __attribute__((always_inline)) void weigh_groups_i4(const part_i4 *at, ptrdiff_t groups,
                                                                  ptrdiff_t first, const int rows,
                                                                  const int count, ptrdiff_t row,
                                                                  weights_i4 *to)
{
    const am_flash_tile *tile = at->tile;
    const float *p = (const float *)at->block->logits + (at->row + row) * AM_FLASH_TILE + first,
                *scales = (const float *)tile->v_scales +
                          group_of_i4(at->channel, tile->v_group) * 2 * AM_FLASH_TILE + first;
    for (ptrdiff_t g = 0; g < groups; g++, scales += 2 * AM_FLASH_TILE) {
        vf x[4][AM_FLASH_TILE / VF_LANES], sums[4], most[4];
        UNROLL(4)
        for (int r = 0; r < 4; r++) {
            if (r >= rows) {
                sums[r] = sums[0], most[r] = most[0];
                continue;
            }
            sums[r] = most[r] = vf_set1(0);
            UNROLL(4)
            for (int j = 0; j < count; j++) {
                const vf y = vf_load(p + r * AM_FLASH_TILE + j * VF_LANES);
                const __mmask16 lanes = _mm512_cmp_ps_mask(y, vf_set1(0), _CMP_NEQ_UQ); /* as scale_p_f32 */
                x[r][j] = _mm512_maskz_mul_ps(lanes, y, vf_load(scales + j * VF_LANES));
                sums[r] = vf_add(
                    sums[r], _mm512_maskz_mul_ps(lanes, y, vf_load(scales + AM_FLASH_TILE + j * VF_LANES)));
                most[r] = vf_greater(x[r][j], most[r]);
            }
        }
        const vf greatest = greatest_of_few_i4(most), totals = vf_totals_of_few(sums);
        const __mmask16 some = _mm512_cmp_ps_mask(greatest, vf_set1(0), _CMP_NEQ_UQ),
                        in_range = _mm512_cmp_ps_mask(greatest, vf_set1(0x1p-100f), _CMP_GT_OQ) &
                                   _mm512_cmp_ps_mask(greatest, vf_set1(INFINITY), _CMP_LT_OQ);
        const vf factors = _mm512_maskz_div_ps(some & in_range, vf_set1(MOST_I16), greatest),
                 units = _mm512_maskz_div_ps(in_range, greatest, vf_set1(MOST_I16));
        UNROLL(4)
        for (int r = 0; r < rows; r++) {
            const vf factor = r == 0   ? _mm512_shuffle_ps(factors, factors, 0x00)
                              : r == 1 ? _mm512_shuffle_ps(factors, factors, 0x55)
                              : r == 2 ? _mm512_shuffle_ps(factors, factors, 0xaa)
                                       : _mm512_shuffle_ps(factors, factors, 0xff);
            UNROLL(2)
            for (int j = 0; j < count; j += 2)
                vf_store(to->p[row + r][g] + first / 2 + j / 2 * VF_LANES,
                         vf_narrow_i16x2(vf_mul(x[r][j], factor), vf_mul(x[r][j + 1], factor)));
        }
        if (rows == 4) {
            _mm_storeu_ps(to->units[g], _mm512_castps512_ps128(units));
            _mm_storeu_ps(to->offsets[g], _mm512_castps512_ps128(totals));
        } else {
            _mm_mask_storeu_ps(to->units[g] + row, (1 << rows) - 1, _mm512_castps512_ps128(units));
            _mm_mask_storeu_ps(to->offsets[g] + row, (1 << rows) - 1, _mm512_castps512_ps128(totals));
        }
        const __mmask16 apart = ~in_range & some & ((1 << rows) - 1);
        if (__builtin_expect(apart == 0, 1)) continue;
        for (int r = 0; r < rows; r++) {
            float numbers[AM_FLASH_TILE];
            if (!(apart >> r & 1)) continue;
            for (int j = 0; j < count; j++) {
                const vf y = vf_load(p + r * AM_FLASH_TILE + j * VF_LANES);
                vf_store(numbers + first + j * VF_LANES, scale_p_f32(y, vf_load(scales + j * VF_LANES)));
            }
            add_group_apart_i4((float *)at->block->out + (at->row + row + r) * at->block->out_dim, tile,
                               at->begin, at->end, at->channel + g * tile->v_group, numbers);
            memset(to->p[row + r][g], 0, sizeof to->p[row + r][g]);
        }
    }
}

/* Lanes of a chunk, and of each of its groups. */
typedef struct {
    int groups;
    __mmask16 all, of_group[4];
} lanes_i4;

/* Sets the lanes of each group to its number. */
static inline vf of_groups_i4(const float *first, ptrdiff_t stride, const lanes_i4 *lanes)
{
    vf v = vf_set1(*first);
    UNROLL(4)
    for (int g = 1; g < lanes->groups; g++)
        v = _mm512_mask_broadcastss_ps(v, lanes->of_group[g], _mm_load_ss(first + g * stride));
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

/* Halves of a chunk that are added up at once: as many as there are registers for. */
static inline __attribute__((always_inline)) int halves_i4(const int rows) { return rows <= 2 ? 2 : 1; }

/* Adds products of some rows of P with two keys at v and `other` to sums of half of a chunk's columns or of
 * both. A lane has eight channels of a key, and those of two keys are joined word by word to four vectors a
 * half; sums of the second of these are sixteen times as great. */
static inline __attribute__((always_inline)) void add_pair_i4(const int rows, const int half,
                                                              const lanes_i4 *lanes, const char *v,
                                                              const char *other, const float *p,
                                                              vector_i4 sums[4][8])
{
    const int halves = halves_i4(rows);
    const __m512i x = _mm512_maskz_loadu_epi32(lanes->all, v),
                  y = _mm512_maskz_loadu_epi32(lanes->all, other), low = _mm512_set1_epi16(0x000f),
                  second = _mm512_set1_epi16(0x00f0);
    __m512i n[8];
    UNROLL(2)
    for (int h = 0; h < halves; h++) {
        const __m512i joined = half + h == 0
                                   ? _mm512_mask_blend_epi16(0xaaaaaaaa, x, _mm512_slli_epi32(y, 16))
                                   : _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y);
        n[4 * h] = _mm512_and_si512(joined, low);
        n[4 * h + 1] = _mm512_and_si512(joined, second);
        n[4 * h + 2] = _mm512_and_si512(_mm512_srli_epi16(joined, 8), low);
        n[4 * h + 3] = _mm512_srli_epi16(joined, 12);
    }
    UNROLL(4)
    for (int r = 0; r < rows; r++) {
        const __m512i weight =
            _mm512_castps_si512(of_groups_i4(p + r * (4 * AM_FLASH_TILE / 2), AM_FLASH_TILE / 2, lanes));
        UNROLL(8)
        for (int j = 0; j < 4 * halves; j++)
            sums[r][j] = (vector_i4)_mm512_dpwssd_epi32((__m512i)sums[r][j], n[j], weight);
    }
}

/* The same of all keys of a run. The last key may have no other. */
static inline __attribute__((always_inline)) void add_pairs_i4(const int rows, const int half,
                                                               const part_i4 at, const lanes_i4 *lanes,
                                                               vector_i4 sums[4][8], prefetch_lines *prefetch)
{
    const ptrdiff_t stride = at.tile->v.stride;
    const char *v = (const char *)row_at(&at.tile->v, at.begin) + at.channel / 2;
    const float *p = at.weights->p[0][0] + at.begin / 2;
    ptrdiff_t keys = at.end - at.begin;
    for (; keys >= 4; keys -= 4, v += 4 * stride, p += 2) {
        if (half == 0) prefetch_few(prefetch, 4, true);
        add_pair_i4(rows, half, lanes, v, v + stride, p, sums);
        add_pair_i4(rows, half, lanes, v + 2 * stride, v + 3 * stride, p + 1, sums);
    }
    NO_UNROLL
    for (; keys > 0; keys -= 2, v += 2 * stride, p++) {
        if (half == 0) prefetch_few(prefetch, 2, true);
        add_pair_i4(rows, half, lanes, v, v + (keys > 1 ? stride : 0), p, sums);
    }
}

/* O + P V of some rows and a chunk of columns. */
static inline __attribute__((always_inline)) void add_chunk_i4(const int rows, const int groups, part_i4 at,
                                                               prefetch_lines *prefetch)
{
    const int halves = halves_i4(rows);
    const am_flash_tile *tile = at.tile;
    const ptrdiff_t width = width_i4(2 * tile->value_bytes, at.channel),
                    group = tile->v_group / 8; /* lanes */
    lanes_i4 lanes = {.groups = groups, .all = v_mask_32(width / 8)};
    vf out[4][8];
    UNROLL(4)
    for (int g = 0; g < groups; g++) lanes.of_group[g] = (__mmask16)(((1u << group) - 1) << g * group);
    UNROLL(2)
    for (int half = 0; half < 2; half += halves) {
        vector_i4 sums[4][8];
        UNROLL(4)
        for (int r = 0; r < rows; r++) {
            UNROLL(8)
            for (int i = 0; i < 4 * halves; i++) sums[r][i] = (vector_i4){0};
        }
        part_i4 run = at;
        for (; run.begin < at.end; run.begin = run.end) {
            run.end = end_of_run(&tile->v, run.begin, at.end);
            add_pairs_i4(rows, half, run, &lanes, sums, prefetch);
        }
        UNROLL(4)
        for (int r = 0; r < rows; r++) {
            const vf unit = of_groups_i4(&at.weights->units[0][r], 4, &lanes),
                     offset = of_groups_i4(&at.weights->offsets[0][r], 4, &lanes);
            UNROLL(8)
            for (int j = 0; j < 4 * halves; j++) {
                const vf its = j % 4 == 1 ? vf_mul(unit, vf_set1(0x1p-4f)) : unit;
                out[r][4 * half + j] = vf_fma(its, _mm512_cvtepi32_ps((__m512i)sums[r][j]), offset);
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

APART void weigh_rows_i4(const part_i4 *at, ptrdiff_t groups, ptrdiff_t rows, weights_i4 *to)
{
    enum { ALL = AM_FLASH_TILE / VF_LANES };
    if (at->begin >= PANEL_f32 || at->end <= PANEL_f32) {
        const ptrdiff_t first = at->begin - at->begin % PANEL_f32;
        for (ptrdiff_t r = 0; r < rows; r++)
            weigh_groups_i4(at, groups, first, 1, PANEL_f32 / VF_LANES, r, to);
        return;
    }
    switch (rows) {
    case 1: weigh_groups_i4(at, groups, 0, 1, ALL, 0, to); break;
    case 2: weigh_groups_i4(at, groups, 0, 2, ALL, 0, to); break;
    case 4: weigh_groups_i4(at, groups, 0, 4, ALL, 0, to); break;
    }
}

static void add_tile_i4(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch,
                        next_scales_i4 *scales)
{
    ptrdiff_t begin, end;
    find_live(block, tile, &begin, &end);
    prefetch_lines none = prefetch_nothing(tile->v.data);
    for (ptrdiff_t column = 0; column < 2 * tile->value_bytes; column += CHUNK_I4) {
        const ptrdiff_t groups = width_i4(2 * tile->value_bytes, column) / tile->v_group;
        for (ptrdiff_t row = 0, rows; row < block->rows; row += rows) {
            weights_i4 weights;
            part_i4 at = {.block = block,
                          .tile = tile,
                          .row = row,
                          .begin = begin,
                          .end = end,
                          .channel = column,
                          .weights = &weights};
            rows = some_rows_i4(block->rows - row);
            for (ptrdiff_t r = 0; r < rows; r++) prefetch_scales_i4(scales);
            weigh_rows_i4(&at, groups, rows, &weights);
            at.begin = begin - begin % 2;
            add_weighted_i4(rows, groups, &at, row == 0 ? prefetch : &none);
        }
    }
}

static void step_i4(const am_flash_rows *const *blocks, const am_flash_tile *tiles, ptrdiff_t heads)
{
    prefetch_runs runs;
    const ptrdiff_t rows = heads * blocks[0]->rows;
    next_scales_i4 k_scales = next_scales_of_i4(tiles->prefetch, AM_PREFETCH_K_SCALES, rows),
                   v_scales = next_scales_of_i4(tiles->prefetch, AM_PREFETCH_V_SCALES, rows);
    prefetch_lines prefetch = lines_of_values(tiles, heads, &runs);
    for (ptrdiff_t h = 0; h < heads; h++) {
        assert(tiles[h].layout == AM_ROWS);
        find_logits_i4(blocks[h], &tiles[h], &prefetch, &k_scales);
        OWN(find_p)(blocks[h], &tiles[h]);
    }
    prefetch = lines_of_next_keys(tiles, &runs);
    for (ptrdiff_t h = 0; h < heads; h++) add_tile_i4(blocks[h], &tiles[h], &prefetch, &v_scales);
}
