/* kv_i16x2.c – attention of few rows to int8 keys and values by the processor's own dot products of
 * sixteen-bit integers; for int4 see kv_i4.h. A lane of float32 holds two such integers (i16x2), sums are
 * int32. In queries and keys the two are neighbours in head_dim, in P and values neighbouring keys.
 *
 * Keys and values become such integers as they are. Each row of queries, and each row of P of a tile, is
 * rounded to multiples of a unit, of which its greatest number has MOST_I16, or in long rows of queries as
 * many as sums have room for; that is finer than bfloat16.
 * Rows whose greatest number is NaN or Inf, or about the least there is, are multiplied in float32.
 */
#include "kernels/attention/flash_f32.h"

/* Functions of kv_i8.c. */
void SHARED(step_unpacked_i8)(const am_flash_rows *const *blocks, const am_flash_tile *tiles,
                              ptrdiff_t heads);
void SHARED(add_tile_i8)(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch);

enum { MOST_I16 = INT16_MAX };

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
    to[am_packed_query_lanes(head_dim) - VF_LANES] = has ? greatest / most : NAN;
    *factor = vf_set1(greatest > 0 ? most / greatest : 0);
    return has;
}

static void pack_queries_i16x2(void *dst, const void *q, ptrdiff_t q_stride, ptrdiff_t rows,
                               ptrdiff_t head_dim)
{
    const ptrdiff_t stride = am_packed_query_lanes(head_dim), lanes = (head_dim + 31) / 32 * 16;
    const double room = (double)INT32_MAX / (128 * (double)head_dim); /* so that sums do not overflow */
    const float most = (float)(room < MOST_I16 ? (int)room : MOST_I16);
    float *to = dst;
    const float *from = q;
    for (ptrdiff_t r = 0; r < rows; r++, to += stride, from += q_stride) {
        vf factor;
        if (!write_unit(to, from, head_dim, most, &factor)) continue;
        for (ptrdiff_t lane = 0; lane < lanes; lane += VF_LANES) {
            const ptrdiff_t i = 2 * lane;
            vf first, second;
            load_two(from + i, head_dim - i, &first, &second);
            vf_store(to + lane, vf_narrow_i16x2(vf_mul(first, factor), vf_mul(second, factor)));
        }
    }
}

static inline float unit_of_query(const am_flash_rows *block, ptrdiff_t row)
{
    const ptrdiff_t stride = am_packed_query_lanes(block->head_dim);
    return ((const float *)block->q_packed)[row * stride + stride - VF_LANES];
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

/* Rounds some vectors of weights to i16x2; returns their unit, or NaN if they have none. */
INLINE float narrow_weights_i16x2(const vf *x, const int count, float *to)
{
    vf most = vf_set1(0);
    UNROLL(4)
    for (int j = 0; j < count; j++) most = vf_greater(x[j], most);
    const float greatest = vf_greatest(most);
    if (!has_unit(greatest)) return NAN;
    const vf factor = vf_set1(greatest > 0 ? MOST_I16 / greatest : 0);
    UNROLL(4)
    for (int j = 0; j < count; j += 2)
        vf_store(to + j / 2 * VF_LANES, vf_narrow_i16x2(vf_mul(x[j], factor), vf_mul(x[j + 1], factor)));
    return greatest / MOST_I16;
}

/* Turns P of some vectors of a row, times the scales of their values, into i16x2. The last lane of the row
 * gets its unit. To a row that has none values are added here, as numbers of float32. */
INLINE void narrow_row_i16x2(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t row,
                             ptrdiff_t begin, const int count)
{
    float *p = (float *)block->logits + row * AM_FLASH_TILE, *unit = p + AM_FLASH_TILE - 1;
    const float *scales = tile->v_scales;
    vf x[AM_FLASH_TILE / VF_LANES];
    p += begin;
    UNROLL(4)
    for (int j = 0; j < count; j++) {
        x[j] = vf_load(p + j * VF_LANES);
        if (scales) x[j] = scale_p_f32(x[j], vf_load(scales + begin + j * VF_LANES));
    }
    *unit = narrow_weights_i16x2(x, count, p - begin / 2);
    if (!isnan(*unit)) return;
    UNROLL(4)
    for (int j = 0; j < count; j++) vf_store(p + j * VF_LANES, x[j]);
    add_row_apart(block, tile, row);
    UNROLL(4)
    for (int j = 0; j < count; j += 2) vf_store(p - begin / 2 + j / 2 * VF_LANES, vf_set1(0));
    *unit = 0;
}

#define S int8_t
#define LOADS(b, b_row, vectors, to) vf_join_i16x2(b, (b) + (b_row) / 2, (to)[0], (to)[1])
#define LOADS_WIDE(b, b_row, to) vf_join_wide_i16x2(b, (b) + (b_row) / 2, (to)[0], (to)[1], (to)[2], (to)[3])
#define FMA vf_fma_i16x2
#define TIMES(x, y) vf_fma_i16x2(x, y, vf_set1(0))
#define FROM(name) name##_i16x2
#include "kernels/attention/product_of_tpl.h"

#define S int8_t
#define UNIT 1
#define SUMS(name) vf_##name##_i32
#define ROW_UNIT unit_of_query
#define P_UNIT(row) ((row)[AM_FLASH_TILE - 1])
#define FIND_P OWN(find_p)
#define STEP(name) name##_f32
#define LOAD_WIDE vf_load_i16x2
#define LOAD_PART_WIDE vf_load_part_i16x2
#define FMA vf_fma_i16x2
#define NUMBER_OF_SUM vf_of_i32
#define USUAL 0
#define FROM(name) name##_i16x2
#include "kernels/attention/formats/pairs_tpl.h"

static void add_tile_i16x2(const am_flash_rows *block, const am_flash_tile *tile, prefetch_lines *prefetch)
{
    ptrdiff_t begin, end;
    find_live(block, tile, &begin, &end);
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        if (begin < PANEL_f32 && end > PANEL_f32)
            narrow_row_i16x2(block, tile, r, 0, AM_FLASH_TILE / VF_LANES);
        else
            narrow_row_i16x2(block, tile, r, begin - begin % PANEL_f32, PANEL_f32 / VF_LANES);
    }
    add_pairs_i16x2(block, tile, begin - begin % 2, end, prefetch);
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
#include "kernels/attention/formats/kv_i4.h"

const am_kernels TABLE(kv_i16x2) = {
    .flash_f32.kv =
        {
            [AM_INT8] = {.reading = AM_KV_READ,
                         .queries = AM_QUERY_ROUNDED,
                         .pack_queries = pack_queries_i16x2,
                         .step_unpacked = step_i16x2},
            [AM_INT4] = {.reading = AM_KV_ROWS,
                         .queries = AM_QUERY_ROUNDED,
                         .pack_queries = pack_queries_i4,
                         .step_unpacked = step_i4},
        },
};
