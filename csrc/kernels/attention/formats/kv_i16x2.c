/* kv_i16x2.c – attention of few rows to int8 keys and values by the processor's own dot products of
 * sixteen-bit integers; for int4 see kv_i4.h. A lane of float32 holds two such integers (i16x2), sums are
 * int32. In queries and keys the two are neighbours in head_dim, in P and values neighbouring keys.
 *
 * With V_HALVES the processor has dot products of bytes (i8x4): a lane holds four of them. An integer of
 * queries or P is 256 high + low, both with signs, which are multiplied as if they were two rows.
 *
 * Keys and values become such integers as they are. Each row of queries, and each row of P of a tile, is
 * divided by a unit of its own and rounded. Its greatest number then becomes HIGHEST; in long rows of queries
 * a smaller integer, so that sums of int32 do not overflow. That is finer than bfloat16.
 * Rows whose greatest number is NaN or Inf, or about the least there is, are multiplied in float32.
 */
#include "kernels/attention/flash_f32.h"

/* Functions of kv_i8.c. */
void SHARED(step_unpacked_i8)(const am_flash_rows *const *blocks, const am_flash_tile *tiles,
                              ptrdiff_t heads);
void SHARED(add_tile_i8)(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch);

#ifdef V_HALVES
enum { INTEGERS = 4, HIGHEST = 127 * 256 + 127 }; /* in a lane; bytes of the greatest are both that of int8 */
#else
enum { INTEGERS = 2, HIGHEST = INT16_MAX };
#endif
enum {
    UNIT_LANES = 16, /* the last of a packed row of queries, which begin with its unit */
};

/* The greatest magnitude of some numbers, or NaN if one is that. */
static inline float greatest_of(const float *numbers, ptrdiff_t count)
{
    vf most = vf_set1(0);
    for (ptrdiff_t i = 0; i < count; i += VF_LANES)
        most = vf_greater(i + VF_LANES <= count ? vf_load(numbers + i) : vf_load_part(numbers + i, count - i),
                          most);
    return vf_greatest(most);
}
static inline bool has_unit(float greatest)
{
    return greatest == 0 || (0x1p-100f < greatest && greatest < INFINITY);
}

/* Writes the unit of a packed row of queries, and finds the factor by which its greatest number becomes
 * `most`. If the row has no unit, writes NaN and returns false. */
static inline bool write_unit(float *to, const float *q, ptrdiff_t head_dim, float most, vf *factor)
{
    const float greatest = greatest_of(q, head_dim);
    const bool has = has_unit(greatest);
    to[am_packed_query_lanes(head_dim) - UNIT_LANES] = has ? greatest / most : NAN;
    *factor = vf_set1(greatest > 0 ? most / greatest : 0);
    return has;
}

/* Rounds some vectors times a factor, and stores them; the low bytes, if apart, `low` lanes behind. */
INLINE void store_rounded(float *to, const vf *x, const int count, vf factor, ptrdiff_t low)
{
    UNROLL(8)
    for (int j = 0; j < count; j += INTEGERS, to += VF_LANES) {
        vf y[INTEGERS];
        UNROLL(4)
        for (int i = 0; i < INTEGERS; i++) y[i] = vf_mul(x[j + i], factor);
#ifdef V_HALVES
        vf halves[2];
        vf_narrow_i8x4(y, halves);
        vf_store(to, halves[0]), vf_store(to + low, halves[1]);
#else
        (void)low;
        vf_store(to, vf_narrow_i16x2(y[0], y[1]));
#endif
    }
}

static void pack_queries_i16x2(void *dst, const void *q, ptrdiff_t q_stride, ptrdiff_t rows,
                               ptrdiff_t head_dim)
{
    enum { CHUNK = INTEGERS * VF_LANES };
    const ptrdiff_t stride = am_packed_query_lanes(head_dim), whole = (head_dim + 31) / 32 * 32;
    const double room = (double)INT32_MAX / (128 * (double)head_dim); /* so that sums do not overflow */
    const float most = (float)(room < HIGHEST ? (int)room : HIGHEST);
    float *to = dst;
    const float *from = q;
    for (ptrdiff_t r = 0; r < rows; r++, to += stride, from += q_stride) {
        vf factor;
        if (!write_unit(to, from, head_dim, most, &factor)) continue;
        for (ptrdiff_t i = 0; i < whole; i += CHUNK) {
            vf x[INTEGERS];
            UNROLL(2)
            for (int j = 0; j < INTEGERS; j += 2) {
                const ptrdiff_t begin = i + j * VF_LANES, left = head_dim > begin ? head_dim - begin : 0;
                load_two(from + begin, left, &x[j], &x[j + 1]);
            }
            store_rounded(to + i / INTEGERS, x, INTEGERS, factor, stride / 2);
        }
    }
}

static inline float unit_of_query(const am_flash_rows *block, ptrdiff_t row)
{
    const ptrdiff_t stride = am_packed_query_lanes(block->head_dim);
    return ((const float *)block->q_packed)[row * stride + stride - UNIT_LANES];
}

/* O + P V of one row in float32. */
static void add_row_apart(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row)
{
    am_flash_rows one = *block;
    one.rows = 1;
    one.logits = (float *)block->logits + row * AM_FLASH_TILE;
    one.out = (float *)block->out + row * block->out_dim;
    am_flash_tile its = *tile;
    if (tile->terms.live) its.terms.live += row;
    prefetch_lines none = prefetch_nothing(tile->v.data);
    if (!its.terms.live || *its.terms.live) SHARED(add_tile_i8)(&one, &its, &none);
}

/* Rounds some vectors of weights; returns their unit, or NaN if they have none. */
INLINE float narrow_weights_i16x2(const vf *x, const int count, float *to)
{
    vf most = vf_set1(0);
    UNROLL(16)
    for (int j = 0; j < count; j++) most = vf_greater(x[j], most);
    const float greatest = vf_greatest(most);
    if (!has_unit(greatest)) return NAN;
    store_rounded(to, x, count, vf_set1(greatest > 0 ? HIGHEST / greatest : 0), AM_FLASH_TILE / 2);
    return greatest / HIGHEST;
}

/* Turns P of some vectors of a row, times the scales of their values, into i16x2. The last lane of the row
 * gets its unit. To a row that has none values are added here, as numbers of float32. */
INLINE void narrow_row_i16x2(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row,
                             ptrdiff_t begin, const int count)
{
    float *p = (float *)block->logits + row * AM_FLASH_TILE, *unit = p + AM_FLASH_TILE - 1,
          *to = p + begin / INTEGERS;
    const float *scales = tile->v_scales;
    vf x[AM_FLASH_TILE / VF_LANES];
    p += begin;
    UNROLL(16)
    for (int j = 0; j < count; j++) {
        x[j] = vf_load(p + j * VF_LANES);
        if (scales) x[j] = scale_p_f32(x[j], vf_load(scales + begin + j * VF_LANES));
    }
    *unit = narrow_weights_i16x2(x, count, to);
    if (!isnan(*unit)) return;
    UNROLL(16)
    for (int j = 0; j < count; j++) vf_store(p + j * VF_LANES, x[j]);
    add_row_apart(block, tile, row);
    UNROLL(16)
    for (int j = 0; j < count; j++) x[j] = vf_set1(0);
    *unit = narrow_weights_i16x2(x, count, to);
}

#ifdef V_HALVES
#    define FMA_WEIGHTS vf_fma_one_i8x4
#    define FMA_QUERIES vf_fma_i8x4
#    define ROWS_OF_FOUR(b, b_row) (b), (b) + (b_row) / 4, (b) + (b_row) / 2, (b) + (b_row) / 4 * 3
#    define LOADS(b, b_row, vectors, to) vf_join_i8x4(ROWS_OF_FOUR(b, b_row), (to)[0], (to)[1])
#    define LOADS_WIDE(b, b_row, to)                                                                         \
        vf_join_wide_i8x4(ROWS_OF_FOUR(b, b_row), (to)[0], (to)[1], (to)[2], (to)[3])
#else
#    define FMA_WEIGHTS vf_fma_i16x2
#    define FMA_QUERIES vf_fma_i16x2
#    define LOADS(b, b_row, vectors, to) vf_join_i16x2(b, (b) + (b_row) / 2, (to)[0], (to)[1])
#    define LOADS_WIDE(b, b_row, to)                                                                         \
        vf_join_wide_i16x2(b, (b) + (b_row) / 2, (to)[0], (to)[1], (to)[2], (to)[3])
#endif
#define S int8_t
#define FMA FMA_WEIGHTS
#define TIMES(x, y) FMA_WEIGHTS(x, y, vf_set1(0))
#define FROM(name) name##_i16x2
#include "kernels/attention/product_of_tpl.h"

#ifdef V_HALVES
#    define JOINED 4
#    define HALVES 2
#    define WHOLE_SUM(halves) vf_join_halves_i32(*(halves)[0], *(halves)[1])
#    define LOAD_WIDE vf_load_i8x4
#    define LOAD_PART_WIDE vf_load_part_i8x4
#else
#    define LOAD_WIDE vf_load_i16x2
#    define LOAD_PART_WIDE vf_load_part_i16x2
#endif
#define S int8_t
#define UNIT 1
#define SUMS(name) vf_##name##_i32
#define ROW_UNIT unit_of_query
#define P_UNIT(row) ((row)[AM_FLASH_TILE - 1])
#define FIND_P OWN(find_p)
#define STEP(name) name##_f32
#define FMA FMA_QUERIES
#define NUMBER_OF_SUM vf_of_i32
#define MOST_SUMS (V_STRIP < 8 ? 8 : DOT_SUMS)
#define USUAL 0
#define FROM(name) name##_i16x2
#include "kernels/attention/formats/pairs_tpl.h"

static void add_tile_i16x2(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch)
{
    enum { HALF = AM_FLASH_TILE / 2 };
    ptrdiff_t begin, end;
    find_live(block, tile, &begin, &end);
    const ptrdiff_t first = begin < HALF ? 0 : HALF, last = end > HALF ? AM_FLASH_TILE : HALF;
    float *p = block->logits;
    for (ptrdiff_t r = 0; r < block->rows; r++, p += AM_FLASH_TILE) {
        /* There is no P of panels without a live pair. */
        for (ptrdiff_t i = first; i < begin - begin % PANEL_f32; i += VF_LANES) vf_store(p + i, vf_set1(0));
        for (ptrdiff_t i = whole_panels_f32(end); i < last; i += VF_LANES) vf_store(p + i, vf_set1(0));
        if (last - first > HALF)
            narrow_row_i16x2(block, tile, r, 0, AM_FLASH_TILE / VF_LANES);
        else
            narrow_row_i16x2(block, tile, r, first, HALF / VF_LANES);
    }
    add_pairs_i16x2(block, tile, begin - begin % INTEGERS, end, prefetch);
}

static void step_i16x2(const am_flash_rows *const *blocks, const am_flash_tile *tiles, ptrdiff_t heads)
{
    bool have_units = blocks[0]->q_packed != NULL;
    for (ptrdiff_t h = 0; have_units && h < heads; h++) {
        for (ptrdiff_t r = 0; r < blocks[h]->rows; r++) have_units &= !isnan(unit_of_query(blocks[h], r));
    }
    if (have_units)
        step_unpacked_i16x2(blocks, tiles, heads);
    else
        SHARED(step_unpacked_i8)(blocks, tiles, heads);
}
#ifdef V_I8X4
#    include "kernels/attention/formats/kv_i4.h"
#endif

const am_kernels TABLE(kv_i16x2) = {
    .flash_f32.kv =
        {
            [AM_INT8] = {.reading = AM_KV_READ,
                         .queries = AM_QUERY_ROUNDED,
                         .pack_queries = pack_queries_i16x2,
                         .step_unpacked = step_i16x2},
#ifdef V_I8X4
            [AM_INT4] = {.reading = AM_KV_ROWS,
                         .queries = AM_QUERY_ROUNDED,
                         .pack_queries = pack_queries_i4,
                         .step_unpacked = step_i4},
#endif
        },
};
