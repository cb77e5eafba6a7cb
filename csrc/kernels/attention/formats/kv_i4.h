/* kv_i4.h – attention of few rows to keys and values of four bits by dot products of sixteen-bit integers,
 * as i16x2_tpl.h for int8. A vector holds a chunk of 128 channels, eight per lane. Each quarter of a chunk
 * (32 channels) is multiplied by one scale and has one offset; quarters of one group have the same:
 *
 *     q·k = Σ scale Σ q n + offset Σ q             over quarters, n from 0 to 15
 *     O + P V = Σ (P scale) n + Σ P offset         over keys
 *
 * Queries, and P times the scales of a group, are rounded to sixteen bits; sums within a chunk and a tile are
 * exact. A packed row of queries begins with its chunks, each of four vectors: word w of vector p is channel
 * 4 w + p. Behind them are the sums of each chunk's quarters, and then the unit of the row. */

enum { CHUNK_I4 = 128, QUARTER_I4 = 32 };

/* Channels of the chunk that begins at a channel: the last chunk may have fewer, and its other lanes
 * are 0. */
static inline ptrdiff_t width_i4(ptrdiff_t channels, ptrdiff_t begin)
{
    return channels - begin < CHUNK_I4 ? channels - begin : CHUNK_I4;
}
static inline __m512i load_i4(const void *p, __mmask16 lanes) { return _mm512_maskz_loadu_epi32(lanes, p); }

/* Loads half a chunk of each of two keys into one vector. */
static inline __m512i load_both_i4(const void *p, const void *other)
{
    const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(p));
    return _mm512_inserti64x4(low, _mm256_loadu_si256(other), 1);
}

/* Returns channels 4 w + part as words w. */
static inline __m512i part_of_i4(__m512i x, const int part)
{
    const __m512i low = _mm512_set1_epi16(15);
    switch (part) {
    case 0: return _mm512_and_si512(x, low);
    case 1: return _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
    case 2: return _mm512_and_si512(_mm512_srli_epi16(x, 8), low);
    default: return _mm512_srli_epi16(x, 12);
    }
}

static void pack_queries_i4(void *dst, const void *q, ptrdiff_t q_step, ptrdiff_t rows, ptrdiff_t head_dim)
{
    const ptrdiff_t step = am_packed_query_lanes(head_dim);
    float *to = dst;
    const float *from = q;
    for (ptrdiff_t r = 0; r < rows; r++, to += step, from += q_step) {
        vf factor;
        if (!write_unit(to, from, head_dim, MOST_I16, &factor)) continue;
        for (ptrdiff_t c = 0; c < head_dim; c += CHUNK_I4) {
            const ptrdiff_t width = width_i4(head_dim, c), words = width / 4;
            int16_t in_order[CHUNK_I4], parts[CHUNK_I4];
            float sums[VF_LANES] = {0};
            for (ptrdiff_t i = 0; i < width; i += QUARTER_I4) {
                const vf first = vf_mul(vf_load(from + c + i), factor),
                         second = vf_mul(vf_load(from + c + i + VF_LANES), factor);
                _mm512_storeu_si512(in_order + i, _mm512_castps_si512(vf_narrow_i16x2(first, second)));
                int32_t sum = 0;
                for (ptrdiff_t j = i; j < i + QUARTER_I4; j++) sum += in_order[j];
                for (ptrdiff_t j = i / 8; j < i / 8 + 4; j++) sums[j] = (float)sum;
            }
            for (ptrdiff_t w = 0; w < words; w++) {
                for (ptrdiff_t part = 0; part < 4; part++) parts[part * words + w] = in_order[4 * w + part];
            }
            memcpy(to + c / 2, parts, (size_t)width * sizeof *parts);
            memcpy(to + head_dim / 2 + c / 8, sums, sizeof sums);
        }
    }
}

/* Loads four numbers into each quarter of a vector, from a pointer per quarter. */
static inline vf load_quarters(const float *const quarters[4])
{
    vf v = _mm512_broadcast_f32x4(_mm_loadu_ps(quarters[0]));
    v = _mm512_mask_broadcast_f32x4(v, 0x00f0, _mm_loadu_ps(quarters[1]));
    v = _mm512_mask_broadcast_f32x4(v, 0x0f00, _mm_loadu_ps(quarters[2]));
    return _mm512_mask_broadcast_f32x4(v, 0xf000, _mm_loadu_ps(quarters[3]));
}

/* Adds up each quarter of four vectors: lane i of a quarter is the sum of that quarter of vector i. */
static inline __m512i add_quarters_i32(const __m512i v[4])
{
    vf pairs[2];
    UNROLL(2)
    for (int i = 0; i < 2; i++) {
        const vf two[] = {_mm512_castsi512_ps(v[2 * i]), _mm512_castsi512_ps(v[2 * i + 1])};
        pairs[i] = vf_add_pair_i32(two);
    }
    return _mm512_castps_si512(v_add_lanes(_mm512_shuffle_ps(pairs[0], pairs[1], 0x44),
                                           _mm512_shuffle_ps(pairs[0], pairs[1], 0xee), true));
}

/* Quarter i of the result is the sum of the quarters of vector i. */
static inline vf add_up_quarters(const vf v[4])
{
    vf sums[2];
    UNROLL(2)
    for (int i = 0; i < 2; i++)
        sums[i] = vf_add(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
    return vf_add(_mm512_shuffle_f32x4(sums[0], sums[1], 0x88), _mm512_shuffle_f32x4(sums[0], sums[1], 0xdd));
}

/* Of each of two vectors, the sum of the first two quarters, then that of the others. */
static inline vf add_up_halves(const vf v[2])
{
    return vf_add(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

/* P of a row times the scales of some groups, as i16x2, their units, and the sums of P times offsets. */
typedef struct {
    float p[4][AM_FLASH_TILE / 2], units[4], offsets[4];
} weights_i4;

/* What is computed at once: rows of a block from `row` on, with keys begin … end - 1 of a tile. */
typedef struct {
    const am_flash_rows *block;
    const am_flash_tile *tile;
    ptrdiff_t row, begin, end;
    ptrdiff_t column;          /* of values: where the chunk begins */
    const weights_i4 *weights; /* of values: of each row */
} part_i4;

/* How the channels of a row of keys fill vectors. */
typedef enum {
    WHOLE_I4,   /* chunks */
    TWICE_I4,   /* half a chunk, so that a vector has those of two keys, four apart */
    PARTIAL_I4, /* any number, behind which lanes are 0 */
} layout_i4;

/* Logits of some rows with four or eight keys `fours` times, from k on, where the part begins. Keys behind
 * `last` are read as that, and have no logits. It prefetches as many lines as it reads. */
static inline __attribute__((always_inline)) void dots_i4(const ptrdiff_t rows, const ptrdiff_t fours,
                                                          const layout_i4 layout, const part_i4 at,
                                                          const uint8_t *k, ptrdiff_t last,
                                                          prefetch_lines *prefetch)
{
    const am_flash_rows *block = at.block;
    const am_flash_tile *tile = at.tile;
    const bool whole = layout == WHOLE_I4, twice = layout == TWICE_I4;
    const ptrdiff_t some = twice ? 8 : 4;
    const ptrdiff_t head_dim = block->head_dim, q_step = am_packed_query_lanes(head_dim),
                    shift = __builtin_ctzll((unsigned long long)tile->k_group);
    const float *q = (const float *)block->q_packed + at.row * q_step, *scales = tile->k_scales;
    vf sums[] = {vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0)};
    for (ptrdiff_t c = 0; c < head_dim; c += CHUNK_I4, k += CHUNK_I4 / 2) {
        const ptrdiff_t width = whole ? CHUNK_I4 : twice ? CHUNK_I4 / 2 : width_i4(head_dim, c);
        const __mmask16 lanes = whole ? 0xffff : v_mask_32(width / 8);
        __m512i dots[16];
        UNROLL(16)
        for (ptrdiff_t i = 0; i < 4 * rows * fours; i++) dots[i] = _mm512_setzero_si512();
        UNROLL(4)
        for (ptrdiff_t f = 0; f < fours; f++) {
            __m512i x[4];
            UNROLL(4)
            for (ptrdiff_t j = 0; j < 4; j++) {
                const ptrdiff_t i = some * f + j, other = i + 4;
                const uint8_t *from = k + (i < last ? i : last) * tile->k.step;
                x[j] = twice ? load_both_i4(from, k + (other < last ? other : last) * tile->k.step)
                             : load_i4(from, lanes);
            }
            UNROLL(4)
            for (int part = 0; part < 4; part++) {
                __m512i n[4];
                UNROLL(4)
                for (int j = 0; j < 4; j++) n[j] = part_of_i4(x[j], part);
                UNROLL(4)
                for (ptrdiff_t r = 0; r < rows; r++) {
                    const float *its = q + r * q_step + c / 2 + part * width / 8;
                    const __m512i y = twice ? load_both_i4(its, its) : load_i4(its, lanes);
                    __m512i *to = dots + 4 * (r * fours + f);
                    UNROLL(4)
                    for (int j = 0; j < 4; j++) to[j] = _mm512_dpwssd_epi32(to[j], n[j], y);
                }
            }
        }
        prefetch_few(prefetch, 4 * fours, true);
        const float *of_scales[4], *of_offsets[4];
        UNROLL(4)
        for (ptrdiff_t i = 0; i < 4; i++) {
            const ptrdiff_t quarter = twice ? i % 2 : i,
                            channel = whole || twice || quarter * QUARTER_I4 < width
                                          ? c + quarter * QUARTER_I4
                                          : head_dim - 1;
            of_scales[i] =
                scales + (channel >> shift) * 2 * AM_FLASH_TILE + at.begin + (twice ? i / 2 * 4 : 0);
            of_offsets[i] = of_scales[i] + AM_FLASH_TILE;
        }
        UNROLL(4)
        for (ptrdiff_t f = 0; f < fours; f++) {
            const vf scale = load_quarters(of_scales), offset = load_quarters(of_offsets);
            UNROLL(4)
            for (ptrdiff_t i = 0; i < 4; i++) of_scales[i] += some, of_offsets[i] += some;
            UNROLL(4)
            for (ptrdiff_t r = 0; r < rows; r++) {
                const ptrdiff_t i = r * fours + f;
                const float *its = q + r * q_step + head_dim / 2 + c / 8;
                const vf of_q = twice ? _mm512_castsi512_ps(load_both_i4(its, its)) : vf_load(its),
                         dot = _mm512_cvtepi32_ps(add_quarters_i32(dots + 4 * i));
                sums[i] = vf_add(sums[i], vf_fma(dot, scale, vf_mul(offset, of_q)));
            }
        }
    }
    float all[2 * VF_LANES];
    vf_store(all, twice ? add_up_halves(sums) : add_up_quarters(sums));
    if (twice) vf_store(all + VF_LANES, add_up_halves(sums + 2));
    UNROLL(4)
    for (ptrdiff_t r = 0; r < rows; r++) {
        const __m128 unit = _mm_set1_ps(q[r * q_step + q_step - VF_LANES]);
        float *logits = (float *)block->logits + (at.row + r) * AM_FLASH_TILE + at.begin;
        UNROLL(8)
        for (ptrdiff_t i = 0; i < some * fours; i += 4) {
            const __m128 four = _mm_mul_ps(unit, _mm_loadu_ps(all + r * some * fours + i));
            if (last + 1 >= some * fours)
                _mm_storeu_ps(logits + i, four);
            else if (i <= last)
                _mm_mask_storeu_ps(logits + i, (__mmask8)(last - i < 3 ? (2 << (last - i)) - 1 : 15), four);
        }
    }
}

/* Logits of up to four rows with keys of one run. */
static inline __attribute__((always_inline)) void dots_of_run_i4(const ptrdiff_t rows, const ptrdiff_t fours,
                                                                 const layout_i4 layout, part_i4 at,
                                                                 prefetch_lines *prefetch)
{
    const uint8_t *k = row_at(&at.tile->k, at.begin);
    const ptrdiff_t step = at.tile->k.step, some = layout == TWICE_I4 ? 8 : 4;
    for (; at.end - at.begin >= some * fours; at.begin += some * fours, k += some * fours * step)
        dots_i4(rows, fours, layout, at, k, some * fours - 1, prefetch);
    for (; fours > 1 && at.end - at.begin >= some; at.begin += some, k += some * step)
        dots_i4(rows, 1, layout, at, k, some - 1, prefetch);
    if (at.begin < at.end) dots_i4(rows, 1, layout, at, k, at.end - at.begin - 1, prefetch);
}

#define DOTS_I4(n, fours)                                                                                    \
    case n:                                                                                                  \
        if (head_dim % CHUNK_I4 == 0)                                                                        \
            dots_of_run_i4(n, fours, WHOLE_I4, *at, prefetch);                                               \
        else if (head_dim == CHUNK_I4 / 2)                                                                   \
            dots_of_run_i4(n, fours, TWICE_I4, *at, prefetch);                                               \
        else                                                                                                 \
            dots_of_run_i4(n, fours, PARTIAL_I4, *at, prefetch);                                             \
        break;
APART void find_dots_i4(ptrdiff_t rows, const part_i4 *at, prefetch_lines *prefetch)
{
    const ptrdiff_t head_dim = at->block->head_dim;
    switch (rows) {
        DOTS_I4(1, 4)
        DOTS_I4(2, 2)
        DOTS_I4(4, 1)
    }
}
#undef DOTS_I4

static inline float number_i4(const uint8_t *row, ptrdiff_t channel)
{
    return (float)(row[channel / 2] >> channel % 2 * 4 & 15);
}

/* Logits of a row that has no unit, in float32. */
static void find_logits_apart_i4(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row,
                                 ptrdiff_t begin, ptrdiff_t end)
{
    const float *q = (const float *)block->q + row * block->q_step;
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
    ptrdiff_t begin, end;
    find_live(block, tile, &begin, &end);
    prefetch_lines none = prefetch_nothing(tile->k.data);
    for (ptrdiff_t i = begin, next; i < end; i = next) {
        next = end_of_run(&tile->k, i, end);
        for (ptrdiff_t row = 0, rows; row < block->rows; row += rows) {
            rows = some_rows_i4(block->rows - row);
            const part_i4 at = {block, tile, .row = row, .begin = i, .end = next};
            find_dots_i4(rows, &at, row == 0 ? prefetch : &none);
        }
    }
    for (ptrdiff_t r = 0; r < block->rows; r++)
        if (isnan(unit_of_query(block, r))) find_logits_apart_i4(block, tile, r, begin, end);
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
                *scales =
                    (const float *)tile->v_scales + at->column / tile->v_group * 2 * AM_FLASH_TILE + first;
    for (ptrdiff_t g = 0; g < groups; g++, scales += 2 * AM_FLASH_TILE) {
        vf x[AM_FLASH_TILE / VF_LANES], sum = vf_set1(0);
        UNROLL(4)
        for (int j = 0; j < count; j++) {
            const vf y = vf_load(p + j * VF_LANES);
            x[j] = scale_p_f32(y, vf_load(scales + j * VF_LANES));
            sum = vf_add(sum, scale_p_f32(y, vf_load(scales + AM_FLASH_TILE + j * VF_LANES)));
        }
        to->offsets[g] = vf_total(sum);
        to->units[g] = narrow_weights_i16x2(x, count, to->p[g] + first / 2);
        if (!isnan(to->units[g])) continue;
        float apart[AM_FLASH_TILE];
        UNROLL(4)
        for (int j = 0; j < count; j++) vf_store(apart + first + j * VF_LANES, x[j]);
        add_group_apart_i4((float *)at->block->out + at->row * at->block->out_dim, tile, at->begin, at->end,
                           at->column + g * tile->v_group, apart);
        memset(to->p[g], 0, sizeof to->p[g]);
        to->units[g] = 0;
    }
}

/* Sets the lanes of each group to its number. */
static inline vf of_groups_i4(const float *first, ptrdiff_t step, const int groups, const __mmask16 *lanes)
{
    vf v = vf_set1(*first);
    UNROLL(4)
    for (int g = 1; g < groups; g++)
        v = _mm512_mask_broadcastss_ps(v, lanes[g], _mm_load_ss(first + g * step));
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
    const char *v = (const char *)row_at(&at.tile->v, at.begin) + at.column / 2;
    const float *p = at.weights->p[0] + at.begin / 2;
    ptrdiff_t step = at.tile->v.step, keys = at.end - at.begin;
    const __m512i low = _mm512_set1_epi16(0x000f), second = _mm512_set1_epi16(0x00f0);
    prefetch_lines current = half == 0 ? *prefetch : (prefetch_lines){0};
#pragma GCC unroll 4
    for (; keys > 0; keys -= 2, v += 2 * step, p++) {
        const __m512i x = load_i4(v, lanes->all), y = load_i4(v + (keys > 1 ? step : 0), lanes->all);
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
    const ptrdiff_t width = width_i4(2 * tile->value_bytes, at.column), group = tile->v_group / 8; /* lanes */
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
        float *to = (float *)at.block->out + (at.row + r) * at.block->out_dim + at.column;
        straighten_i4(out[r]);
        for (ptrdiff_t i = 0; i < width / VF_LANES; i++)
            vf_store(to + i * VF_LANES, vf_add(vf_load(to + i * VF_LANES), out[r][i]));
    }
}

#define ROWS_I4(n)                                                                                           \
    case n:                                                                                                  \
        switch (groups) {                                                                                    \
        case 1: add_chunk_i4(n, 1, *at, prefetch); break;                                                    \
        case 2: add_chunk_i4(n, 2, *at, prefetch); break;                                                    \
        default: add_chunk_i4(n, 4, *at, prefetch); break;                                                   \
        }                                                                                                    \
        break;
/* Three groups are taken as four, of which the last has no columns. */
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
            part_i4 at = {block, tile, row, begin, end, column, weights};
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
