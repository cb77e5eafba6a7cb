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
        const vf factors = _mm512_maskz_div_ps(some & in_range, vf_set1(HIGHEST), greatest),
                 units = _mm512_maskz_div_ps(in_range, greatest, vf_set1(HIGHEST));
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

/* Channels of a chunk are added up in halves, which have one group or two. */
enum { HALF_I4 = CHUNK_I4 / 2 };

/* Sums of a row in half of a chunk: lane 4 l + k of vector i has channel 16 k + 4 l + i. Those of some rows
 * are variables of their own, since GCC keeps arrays in memory. */
typedef struct {
    vector_i4 first, second, third, fourth;
} sums_i4;

/* Two keys in half of a chunk: lanes have one of each four channels of either, as words. Numbers of the
 * second and of the fourth channels are sixteen times as great. */
typedef struct {
    __m512i first, second, third, fourth;
} pair_i4;

static inline pair_i4 pair_of_i4(__m512i key, __m512i other, __m512i words)
{
    const __m512i low = _mm512_set1_epi16(0x000f), high = _mm512_set1_epi16(0x00f0),
                  x = _mm512_permutex2var_epi16(key, words, other), y = _mm512_srli_epi16(x, 8);
    return (pair_i4){.first = _mm512_and_si512(x, low),
                     .second = _mm512_and_si512(x, high),
                     .third = _mm512_and_si512(y, low),
                     .fourth = _mm512_and_si512(y, high)};
}

/* Sums and the products of a pair with its weights, which lie at p for the first group. */
INLINE sums_i4 add_pair_i4(sums_i4 sums, const pair_i4 *n, const float *p, const int groups)
{
    const vf one = vf_set1(*p),
             both = groups > 1 ? _mm512_mask_broadcastss_ps(one, 0xcccc, _mm_load_ss(p + AM_FLASH_TILE / 2))
                               : one;
    const __m512i weights = _mm512_castps_si512(both);
    return (sums_i4){.first = (vector_i4)_mm512_dpwssd_epi32((__m512i)sums.first, n->first, weights),
                     .second = (vector_i4)_mm512_dpwssd_epi32((__m512i)sums.second, n->second, weights),
                     .third = (vector_i4)_mm512_dpwssd_epi32((__m512i)sums.third, n->third, weights),
                     .fourth = (vector_i4)_mm512_dpwssd_epi32((__m512i)sums.fourth, n->fourth, weights)};
}

/* Where sums of half of a chunk are added, and what makes them numbers: of the first row. */
typedef struct {
    float *out;
    ptrdiff_t out_dim, vectors; /* vectors: as many have columns */
    const float *units, *offsets;
} results_i4;

/* O + P V of a row and half of a chunk. */
INLINE void add_sums_i4(const results_i4 to, const sums_i4 sums, ptrdiff_t row, const int groups)
{
    const __m512i x[] = {(__m512i)sums.first, (__m512i)sums.second, (__m512i)sums.third,
                         (__m512i)sums.fourth},
                  low[] = {_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpacklo_epi32(x[2], x[3])},
                  high[] = {_mm512_unpackhi_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[2], x[3])},
                  in_order[] = {_mm512_unpacklo_epi64(low[0], low[1]), _mm512_unpackhi_epi64(low[0], low[1]),
                                _mm512_unpacklo_epi64(high[0], high[1]),
                                _mm512_unpackhi_epi64(high[0], high[1])};
    const vf once = _mm512_broadcast_f32x4(_mm_setr_ps(1, 0x1p-4f, 1, 0x1p-4f));
    float *out = to.out + row * to.out_dim;
    UNROLL(4)
    for (int i = 0; i < 4; i++, out += VF_LANES) {
        const ptrdiff_t place = (groups > 1 && i >= 2 ? 4 : 0) + row;
        const vf unit = vf_mul(vf_set1(to.units[place]), once),
                 sum = vf_fma(unit, _mm512_cvtepi32_ps(in_order[i]), vf_set1(to.offsets[place]));
        const __mmask16 lanes = i < to.vectors ? 0xffff : 0;
        _mm512_mask_storeu_ps(out, lanes, vf_add(_mm512_maskz_loadu_ps(lanes, out), sum));
    }
}

/* O + P V of some rows, from one half of a chunk on. */
INLINE void add_halves_i4(const int rows, const int halves, const int groups, const part_i4 *at,
                          ptrdiff_t half, prefetch_lines *prefetch)
{
    enum { ROW = 4 * AM_FLASH_TILE / 2 };
    const am_rows *v = &at->tile->v;
    const __mmask16 lanes = v_mask_32(at->width / 8);
    const __m512i numbers = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                  second_half = _mm512_set1_epi16(16),
                  words = _mm512_add_epi16(
                      _mm512_or_si512(
                          numbers, _mm512_slli_epi32(_mm512_add_epi32(numbers, _mm512_set1_epi32(32)), 16)),
                      half > 0 ? second_half : _mm512_setzero_si512()),
                  next_words = _mm512_add_epi16(words, second_half);
    const ptrdiff_t next = group_of_i4(HALF_I4, at->tile->v_group) * (AM_FLASH_TILE / 2);
    sums_i4 a = {.first = {0}}, b = a, c = a, d = a;
    for (ptrdiff_t begin = at->begin, end; begin < at->end; begin = end) {
        end = end_of_run(v, begin, at->end);
        const char *key = (const char *)row_at(v, begin) + at->channel / 2;
        const float *p = at->weights->p[0][0] + half * next + begin / 2;
        const straight_i4 lines = take_lines_i4(prefetch, (end - begin + 1) / 2 * halves);
        const char *line = lines.at;
        for (ptrdiff_t keys = end - begin; keys > 0; keys -= 2, key += 2 * v->stride, p++) {
            const __m512i x = _mm512_maskz_loadu_epi32(lanes, key),
                          y = _mm512_maskz_loadu_epi32(lanes, key + (keys > 1 ? v->stride : 0));
            const pair_i4 n = pair_of_i4(x, y, words);
            line = prefetch_straight_i4(&lines, line, halves);
            a = add_pair_i4(a, &n, p, groups);
            if (rows > 1) b = add_pair_i4(b, &n, p + ROW, groups);
            if (rows > 2) c = add_pair_i4(c, &n, p + 2 * ROW, groups);
            if (rows > 2) d = add_pair_i4(d, &n, p + 3 * ROW, groups);
            if (halves == 1) continue;
            const pair_i4 its = pair_of_i4(x, y, next_words);
            c = add_pair_i4(c, &its, p + next, groups);
            if (rows > 1) d = add_pair_i4(d, &its, p + next + ROW, groups);
        }
    }
    const ptrdiff_t group = group_of_i4(half * HALF_I4, at->tile->v_group), out_dim = at->block->out_dim;
    results_i4 to = {.out = (float *)at->block->out + at->row * out_dim + at->channel + half * HALF_I4,
                     .out_dim = out_dim,
                     .vectors = (at->width - half * HALF_I4) / VF_LANES,
                     .units = at->weights->units[group],
                     .offsets = at->weights->offsets[group]};
    add_sums_i4(to, a, 0, groups);
    if (rows > 1) add_sums_i4(to, b, 1, groups);
    if (rows > 2) add_sums_i4(to, c, 2, groups);
    if (rows > 2) add_sums_i4(to, d, 3, groups);
    if (halves == 1) return;
    const ptrdiff_t step = 4 * group_of_i4(HALF_I4, at->tile->v_group);
    to.out += HALF_I4, to.vectors -= HALF_I4 / VF_LANES, to.units += step, to.offsets += step;
    add_sums_i4(to, c, 0, groups);
    if (rows > 1) add_sums_i4(to, d, 1, groups);
}

/* O + P V of some rows and a chunk, both halves at once if there are registers for these. */
INLINE void add_chunk_i4(ptrdiff_t rows, const int groups, const part_i4 *at, prefetch_lines *prefetch)
{
    const ptrdiff_t halves = at->width > HALF_I4 ? 2 : 1;
    switch (2 * rows + halves) {
    case 3: add_halves_i4(1, 1, groups, at, 0, prefetch); break;
    case 4: add_halves_i4(1, 2, groups, at, 0, prefetch); break;
    case 5: add_halves_i4(2, 1, groups, at, 0, prefetch); break;
    case 6: add_halves_i4(2, 2, groups, at, 0, prefetch); break;
    default:
        for (ptrdiff_t half = 0; half < halves; half++) add_halves_i4(4, 1, groups, at, half, prefetch);
    }
}
APART void add_weighted_i4(ptrdiff_t rows, const part_i4 *at, prefetch_lines *prefetch)
{
    if (at->tile->v_group < HALF_I4)
        add_chunk_i4(rows, 2, at, prefetch);
    else
        add_chunk_i4(rows, 1, at, prefetch);
}

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
                          .width = width_i4(2 * tile->value_bytes, column),
                          .weights = &weights};
            rows = some_rows_i4(block->rows - row);
            for (ptrdiff_t r = 0; r < rows; r++) prefetch_scales_i4(scales);
            weigh_rows_i4(&at, groups, rows, &weights);
            at.begin = begin - begin % 2;
            add_weighted_i4(rows, &at, row == 0 ? prefetch : &none);
        }
    }
}
