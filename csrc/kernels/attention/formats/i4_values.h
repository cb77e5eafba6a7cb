/* i4_values.h – P times values of four bits; see kv_i4.h. */

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
