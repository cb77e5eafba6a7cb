/* table.h – what every instruction set offers: each kernel's signature, written once. A level has all
 * kernels, its own or those of the level below (core/runtime/isa.c).
 *
 * Kernels see tiles: plain pointers, strides in elements, no Python, no checks. Callers guarantee what is
 * stated here.
 */
#ifndef AM_TABLE_H
#define AM_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/dtype.h"

/* A region of running sums; strides in elements. Time is cut into segments of `period` steps from its
 * start, each summed from zero; or with a period of 0 the region is a piece of one segment that goes on from
 * `carry`. With `reverse` sums run from the end of each segment, and pieces of one are given from its end. */
typedef struct {
    ptrdiff_t steps, period, lanes;
    ptrdiff_t dst_stride, src_stride;
    bool reverse;
    bool stream; /* write around the caches */
} am_cumsum_tile;

/* Lanes side by side, one step after the other. For each lane l, in the order of the sums:
 *     carry[l] += src[t * src_stride + l];    dst[t * dst_stride + l] = scale * carry[l]
 * Sums inside a block of AM_CUMSUM_BLOCK steps are taken in the element type, those of sixteen-bit floats in
 * float32; `carry`, a double, moves from
 * block to block. So the error stays below 10 roundings of the sum of absolute values, however long the row.
 * To stream, dst and dst_stride are multiples of a cache line. `carry` has room for AM_CUMSUM_PAD zeros
 * behind it. */
#define AM_CUMSUM_BLOCK 8
#define AM_CUMSUM_PAD 16
#define AM_CUMSUM_LANES 1024 /* at most */
typedef void am_cumsum_rows(void *dst, const void *src, const am_cumsum_tile *tile, double *carry,
                            double scale);

/* One lane whose steps lie side by side. Here sums inside a vector are a tree, and `carry` moves on after
 * every AM_CUMSUM_SCAN vectors, which makes the same error. Streams where dst turns out to be aligned to a
 * vector. */
#define AM_CUMSUM_SCAN 4
typedef am_cumsum_rows am_cumsum_scan;

/* A multiple of both kinds of blocks on any instruction set: segments are cut into pieces of a multiple of
 * it. */
#define AM_CUMSUM_PIECE 64

/* Transposes a matrix of elements of 32 or 64 bits: dst[c * dst_stride + r] = src[r * src_stride + c]. */
typedef void am_transpose(void *dst, ptrdiff_t dst_stride, const void *src, ptrdiff_t src_stride,
                          ptrdiff_t rows, ptrdiff_t columns);

/* Sixteen-bit floats to float32 and back, rounding to nearest even. */
typedef void am_widen_16(float *dst, const uint16_t *src, ptrdiff_t count);
typedef void am_narrow_16(uint16_t *dst, const float *src, ptrdiff_t count);

/* Per-token arrays of packed sequences for tokens begin … end-1, the first of which lies in `sequence`; dst
 * points at the entry of token `begin`. Sequence s owns tokens starts[s] … starts[s+1]-1 and may be empty. */
typedef void am_fill_tokens_32(int32_t *dst, const ptrdiff_t *starts, ptrdiff_t sequence, ptrdiff_t begin,
                               ptrdiff_t end);
typedef void am_fill_tokens_64(int64_t *dst, const ptrdiff_t *starts, ptrdiff_t sequence, ptrdiff_t begin,
                               ptrdiff_t end);

/* lens[i] = starts[i+1] - starts[i] for i < count; false if one is negative. */
typedef bool am_lens_32(int32_t *lens, const int32_t *starts, ptrdiff_t count);
typedef bool am_lens_64(int64_t *lens, const int64_t *starts, ptrdiff_t count);

/* offsets[i] = chunks before sequence i, for i = 0 … count; false if a length is negative. */
typedef bool am_chunk_offsets_32(int32_t *offsets, const int32_t *starts, ptrdiff_t count, int64_t chunk);
typedef bool am_chunk_offsets_64(int64_t *offsets, const int64_t *starts, ptrdiff_t count, int64_t chunk);

/* dst[i] = a[i] / b rounded up, for b > 0. */
typedef void am_divide_32(int32_t *restrict dst, const int32_t *restrict a, ptrdiff_t count, int64_t b);
typedef void am_divide_64(int64_t *restrict dst, const int64_t *restrict a, ptrdiff_t count, int64_t b);

/* How many of `count` elements are non-zero; the second form takes floating-point numbers, whose sign does
 * not count. */
typedef ptrdiff_t am_count_nonzero(const void *src, ptrdiff_t count);

/* Bit i tells whether ids[i] == id, or whether element i is not zero; at most 64 elements, further bits are
 * zero. */
typedef uint64_t am_equal_bits(const int32_t *ids, int32_t id, ptrdiff_t count);
typedef uint64_t am_nonzero_bits(const void *src, ptrdiff_t count);

/* Element i becomes `live` if bit i is set, else `dead`: the low bytes of either. At most 64 elements. */
typedef void am_expand_bits(void *dst, uint64_t bits, ptrdiff_t count, uint64_t live, uint64_t dead);

/* Repeats an element whose size divides 8, and of which `pattern` holds copies; dst is aligned to that size.
 */
typedef void am_fill_bytes(void *dst, uint64_t pattern, size_t bytes, bool stream);

/* The ways in which elements are told zero from non-zero: by their size, and floating-point numbers without
 * their sign. Kernels that read rows of a mask come once for each. */
typedef enum {
    AM_LANE_8,
    AM_LANE_16,
    AM_LANE_32,
    AM_LANE_64,
    AM_LANE_F16, /* and bfloat16 */
    AM_LANE_F32,
    AM_LANE_F64,
    AM_LANES,
} am_lane;

/* Bit i of the words in dst tells whether element i is not zero; the last word's further bits are zero. */
typedef void am_pack_bits(uint64_t *dst, const void *src, ptrdiff_t count);

/* Where the first or the last non-zero element is, or -1. */
typedef ptrdiff_t am_find_nonzero(const void *src, ptrdiff_t count);

/* Makes non-zero what is so in src, and leaves the rest of `seen`; whether there was any. */
typedef bool am_collect_nonzero(void *seen, const void *src, ptrdiff_t count);

/* Transposes tiles of 64 × 64 bits that lie side by side: bit c of word t in row r of src becomes bit r of
 * word t in row c of dst. Rows of src are `stride` words apart, those of dst AM_TRANSPOSE_TILES. */
#define AM_TRANSPOSE_TILES 8
typedef void am_transpose_bits(uint64_t *dst, const uint64_t *src, ptrdiff_t stride);

/* Bit i tells whether words[begin + i] != words[twin[begin + i]]; at most 64 bits. */
typedef uint64_t am_unlike_bits(const uint64_t *words, const int32_t *twin, ptrdiff_t begin, ptrdiff_t count);

/* Bit i tells whether attention's dropout keeps weight k + i of a row that has this key; 64 bits. A weight is
 * dropped with probability threshold / 2^32. */
typedef uint64_t am_keep_bits(uint64_t row_key, uint32_t k, uint32_t threshold);

/* Attention, in float32 or float64: a block of query rows takes tiles of keys, and accumulates
 *
 *     out[r] = Σ e^(logit - running_max[r]) v,   sum[r] = Σ e^(logit - running_max[r]),   row_max[r] = max
 * logit
 *
 * They start from 0, 0 and -INFINITY (running_max and row_max). `running_max` is the reference of the powers:
 * it follows the row's maximum lazily. `row_max` is the true maximum, and is NULL if it is not needed. Logits
 * and maxima are in units of ln 2, so that powers are those of two; or where a bias might be too large for
 * that, in units of 1.
 *
 * Where a lane holds two numbers, weights are rounded to bfloat16 before values are multiplied by them, and
 * `sum` adds them as they are then, unless scales of values are multiplied into them. `exact_sum` adds them
 * as they were before, for the logsumexp; it is NULL if that is not needed. With `float_weights` they are
 * not rounded.
 */
enum {
    AM_FLASH_ROWS = 64,
    AM_FLASH_TILE = 64,
    /* Keys of a transposed tile that are multiplied at once. They may lie pages apart, so that they map to
     * the same sets of the first-level cache: fewer than a strip has rows leave space for packed queries. */
    AM_TRANSPOSED_KEYS = 8,
};

typedef struct {
    ptrdiff_t rows, head_dim, out_dim; /* out_dim: a multiple of half a panel's columns */
    ptrdiff_t out_padding;             /* out_dim minus the columns of values */
    const void *q;                     /* [rows][head_dim] */
    ptrdiff_t q_stride;                /* lanes from row to row; `head_dim` where keys are unpacked */
    const void *q_packed;              /* like keys, for transposed tiles; or by pack_queries */
    void *out;                         /* [rows][out_dim]; columns of padding are undefined */
    void *running_max, *sum, *row_max; /* [rows]; row_max may be NULL */
    void *exact_sum;                   /* [rows]; where a lane holds two numbers, or NULL */
    void *logits;                      /* scratch of the kernel: [rows][AM_FLASH_TILE]; if transposed
                                        * [AM_FLASH_TILE][AM_FLASH_ROWS] */
    double cap;                        /* 0: none */
    double factor;                     /* logits are q kᵀ times it, but for bias and cap; 1 unless a lane of q
                                        * and k holds two numbers */
    bool float_weights;                /* for unpacked bfloat16 where a lane holds two numbers */
    double q_factor;                   /* what step_unpacked multiplies products by, if it scales them */
    double unit;                       /* of logits: e^logit is 2^(unit logit); 1, or log2 e */
} am_flash_rows;

/* Whether kernels prefetch to the first-level cache, else to the second; the core sets it before any runs.
 * Where the first has 48 KB, that is up to 1.1 times as fast on Zen 5, and 0.64 to 0.95 times for few queries
 * on Intel's processors, whose first level waits for few lines at once. Where it has 32 KB (Zen 4), it is 0.9
 * times as fast, and 0.6 times for few queries. */
extern bool am_prefetch_near;

/* Rows of memory to prefetch: they may lie a page apart, where hardware does not prefetch. Strides and
 * lengths in bytes. */
typedef struct {
    const char *at;
    ptrdiff_t stride, length, rows;
} am_prefetch_rows;

/* What kernels prefetch while they multiply: what comes after a tile or a chunk, in the order of use. For
 * step_unpacked: the next keys, and of formats that have scales of groups where the next of these lie. */
enum {
    AM_PREFETCH_RUNS = 4,     /* of keys, and of values, that may lie in pages */
    AM_PREFETCH_BLOCKS = 16,  /* whose bias may come as well */
    AM_PREFETCH_K_SCALES = 1, /* so many runs each, behind the first row */
    AM_PREFETCH_V_SCALES = AM_PREFETCH_K_SCALES + AM_PREFETCH_RUNS,
    AM_PREFETCH_MOST = 2 * AM_PREFETCH_RUNS + AM_PREFETCH_BLOCKS + 3,
};
typedef struct {
    am_prefetch_rows rows[AM_PREFETCH_MOST]; /* each step takes its share off these */
    int count;
    ptrdiff_t steps;         /* over the tile, that are still to come */
    const void *const *runs; /* where all runs begin, if rows[0] is the first of several; else NULL */
    ptrdiff_t run_count;
} am_prefetch_plan;
static inline void am_plan_begin(am_prefetch_plan *plan, ptrdiff_t steps)
{
    plan->count = 0, plan->steps = steps, plan->runs = NULL;
}
static inline void am_plan_rows(am_prefetch_plan *plan, am_prefetch_rows rows)
{
    if (rows.rows > 0) plan->rows[plan->count++] = rows;
}

/* Rows of keys or values in memory, `stride` bytes apart: one behind the other, or in runs of `run` rows
 * each, a power of two from 4 on. The first row is at `data`. `runs` has the addresses where runs begin,
 * which all heads share: only their distances count. */
typedef struct {
    const void *data;
    ptrdiff_t stride, run; /* run: 0 if not in runs */
    const void *const *runs;
} am_rows;

/* How keys and values of a tile lie. Where values are rows, all pairs are live, and rows have `out_dim`
 * numbers, in whole panels where a lane holds two. Unless the tile is transposed, there are AM_FLASH_TILE of
 * them. */
typedef enum {
    AM_PACKED,      /* keys and values by pack_keys and pack_values; k.data and v.data alone count */
    AM_PACKED_KEYS, /* keys are packed, values are rows */
    AM_ROWS,        /* for step_unpacked */
    /* Keys are rows on multiples of a lane, in runs of at least AM_TRANSPOSED_KEYS, and queries are packed
     * instead. */
    AM_TRANSPOSED_PACKED_VALUES,
    AM_TRANSPOSED_ROWS, /* transposed, and values are rows: as many as keys, which fill lanes of P */
} am_tile_layout;
static inline bool am_is_transposed(am_tile_layout layout) { return layout >= AM_TRANSPOSED_PACKED_VALUES; }
static inline bool am_has_value_rows(am_tile_layout layout)
{
    return layout != AM_PACKED && layout != AM_TRANSPOSED_PACKED_VALUES;
}

/* The terms of the logits of a tile; each is NULL if it does nothing. */
typedef struct {
    const uint64_t *live; /* a word a row, not all 0 */
    ptrdiff_t all_keys;   /* if each row sees the first so many keys and no other; else 0 */
    const uint64_t *kept; /* a word a row: what dropout keeps */
    const void *bias;     /* rows of AM_FLASH_TILE numbers of the arithmetic type, bias_stride apart */
    ptrdiff_t bias_stride;
} am_logit_terms;

typedef struct {
    am_tile_layout layout;
    ptrdiff_t keys; /* of a transposed tile: `all_keys` of its terms unless that is 0 */
    am_rows k, v;   /* in layout AM_ROWS runs have behind the last address that of what follows the tile,
                     * or NULL */
    ptrdiff_t value_bytes; /* of a row of values */
    bool finite;           /* no packed value is NaN or Inf */
    /* Of rows, and of packed ones where a lane holds two numbers: AM_FLASH_TILE numbers of the arithmetic
     * type by which they are multiplied, or NULL. For step_unpacked of formats that have scales of groups:
     * the same of the scales of each group, then of its offsets. */
    const void *k_scales, *v_scales;
    ptrdiff_t k_group, v_group; /* channels of a group */
    am_logit_terms terms;
    am_prefetch_plan *prefetch; /* NULL: nothing. step_unpacked takes that of its first tile */
} am_flash_tile;
typedef void am_flash_step(const am_flash_rows *block, const am_flash_tile *tile);

/* Takes several packed tiles at once, of which only `live` may alter products: no bias, dropout or scales; of
 * the block no cap, no row_max, a factor of more than 0 and a unit of 1. Logits have AM_STEP_ROWS rows of all
 * tiles. */
enum { AM_STEP_TILES = 4, AM_STEP_ROWS = 32 };
typedef void am_flash_steps(const am_flash_rows *block, const am_flash_tile *tiles, ptrdiff_t count);

/* For few rows, and unpacked keys and values: of several heads, which may lie side by side. Keys of float8
 * have at most AM_MOST_WIDENED numbers. If `out_dim` is 0, it leaves e^(logit - running_max) in `logits`. */
enum { AM_MOST_WIDENED = 1024 };
typedef void am_flash_step_unpacked(const am_flash_rows *const *blocks, const am_flash_tile *tiles,
                                    ptrdiff_t heads);

/* Adds the accumulators of the same rows over other keys to those of `whole`. */
typedef void am_flash_merge(const am_flash_rows *whole, const am_flash_rows *split);

enum { AM_PACKED_RUN = 16 };

/* Packs up to AM_FLASH_TILE keys or values into panels: keys [panel of rows][head_dim][row], times a factor,
 * which is 1 where a lane holds two numbers, values [panel of columns][AM_FLASH_TILE][column]. Each row is
 * multiplied by its scale; `scales` are AM_FLASH_TILE numbers of the arithmetic type, or NULL for 1, as where
 * a lane holds two numbers. Rows may be in runs of a multiple of AM_PACKED_RUN. Missing columns are zero, and
 * so are missing rows up to whole panels; those behind are not written. Returns whether all values are
 * finite. */
typedef void am_flash_pack_keys(void *dst, const am_rows *src, ptrdiff_t rows, ptrdiff_t head_dim,
                                double factor, const void *scales);
typedef bool am_flash_pack_values(void *dst, const am_rows *src, ptrdiff_t rows, ptrdiff_t head_dim,
                                  const void *scales);

/* Reads rows of the bias, `stride` bytes apart, of up to AM_FLASH_TILE numbers, as rows of AM_FLASH_TILE of
 * the arithmetic type; into nothing if `dst` is NULL, where rows are whole. Returns whether any is -INFINITY.
 */
typedef bool am_flash_read_bias(void *dst, const void *src, ptrdiff_t stride, ptrdiff_t rows,
                                ptrdiff_t columns);

/* Which of AM_FLASH_TILE numbers of the arithmetic type are -INFINITY. */
typedef uint64_t am_flash_find_infinite(const void *row);

/* dst[i] = src[i] factor, in the type of the result. */
typedef void am_flash_write(void *dst, const void *src, double factor, ptrdiff_t count);

/* Packs rows of queries, q_stride apart, as step_unpacked reads them; each row has am_packed_query_lanes
 * lanes. */
typedef void am_flash_pack_queries(void *dst, const void *q, ptrdiff_t q_stride, ptrdiff_t rows,
                                   ptrdiff_t head_dim);
static inline ptrdiff_t am_packed_query_lanes(ptrdiff_t head_dim) { return (head_dim + 31) / 32 * 32 + 16; }

/* What an arithmetic does with keys and values of one element type. */
typedef enum {
    AM_KV_OTHER,   /* it does not take them; the last arithmetic does, widened by their format */
    AM_KV_WIDENED, /* rows become numbers that it multiplies (`widen`), which its kernels read */
    AM_KV_ROWS,    /* as AM_KV_WIDENED, but step_unpacked reads rows as they are if it takes packed queries */
    AM_KV_READ,    /* its kernels read them */
} am_kv_reading;

/* How step_unpacked reads queries. */
typedef enum {
    AM_QUERY_ROWS,    /* as they are */
    AM_QUERY_PACKED,  /* by pack_queries */
    AM_QUERY_ROUNDED, /* packed, to less than the precision of float32; as they are where that is too
                       * little */
} am_query_reading;

/* Reads keys and values of one element type in memory. */
typedef struct {
    am_kv_reading reading;
    am_query_reading queries;
    am_flash_pack_queries *pack_queries;
    am_flash_pack_keys *pack_keys;
    am_flash_pack_values *pack_values;
    am_flash_step_unpacked *step_unpacked;
    bool scales_products; /* step_unpacked multiplies products by q_factor, not pack_queries queries */
} am_kv_kernels;

/* Turns `count` numbers that lie side by side in a format that no kernel reads into `factors` of the
 * arithmetic. `groups`: the scale and the offset of each `group` of them, in formats that have some. */
typedef void am_widen_row(void *to, const void *from, const float *groups, ptrdiff_t group, ptrdiff_t count);

/* Reads a bias, and writes a result, of one element type in memory. */
typedef struct {
    am_flash_read_bias *read_bias;
    am_flash_write *write;
} am_number_kernels;

/* Attention backward: a block of query rows takes a tile of keys. With P = e^(logit - base) 2^rest and dP =
 * d_out vᵀ
 *
 *     dS = P (dP + add) - (share where logit == base)
 *     d_v += Pᵀ d_out,   d_k += scale dSᵀ q,   d_q += scale dS k
 *
 * where dropout clears entries of P in the second line, and of dP. Logits and base are in units as above. */
typedef struct {
    ptrdiff_t dim, stride; /* stride: of rows, in whole panels, which are zero beyond dim */
    const void *lanes;     /* [rows][stride]; or where a lane holds two, [rows][lanes] */
    const void *packed; /* as `lanes`; or where a lane holds two, packed like values, or by channel: panels of
                         * these that are transposed, of two rows a lane */
    bool finite;
} am_backward_operand;

/* From channel to channel of sums by channel: an odd number of cache lines. */
enum { AM_CHANNEL_STRIDE = AM_FLASH_TILE + 16 };

/* To what a step adds its products: sum = (fresh ? 0 : sum) + products; or where `onto` is not NULL, all this
 * is added there, and no longer needed in `sum`. That saves what sums of a few steps would cost most: to be
 * cleared, and to be added by a loop of their own. */
typedef struct {
    void *sum;
    bool fresh;
    void *onto;
    ptrdiff_t onto_stride; /* whole vectors of its rows are read and written */
} am_backward_sum;

typedef struct {
    ptrdiff_t rows;
    am_backward_operand q, d_out;
    void *base, *rest, *add, *share; /* [rows]; share may be NULL */
    am_backward_sum d_q;             /* of [rows][q.stride] */
    void *p, *ds;                    /* [rows][AM_FLASH_TILE], scratch; rows are even if a lane holds two,
                                      * and AM_FLASH_ROWS if sums are by channel */
    double scale, factor;            /* logits are q kᵀ scale, and in their unit q kᵀ factor */
    double cap, unit;                /* as above */
    double kept_factor;              /* of entries of P that dropout keeps */
} am_backward_rows;

typedef struct {
    const void *k_columns, *v_columns; /* packed like keys */
    const void *k;                     /* packed like values */
    bool k_finite;
    am_backward_sum d_k, d_v; /* of [columns][q.stride], [columns][d_out.stride]; or by channel,
                               * [channel][AM_CHANNEL_STRIDE], where columns from `columns` on may hold
                               * anything */
    am_logit_terms terms;
    void *d_bias; /* dS: rows of AM_FLASH_TILE numbers, or NULL */
    ptrdiff_t d_bias_stride;
    ptrdiff_t columns;
    am_prefetch_plan *prefetch; /* as above */
} am_backward_tile;
typedef void am_flash_backward_step(const am_backward_rows *block, const am_backward_tile *tile);

/* Attention with the tangent of its result: beside what the forward step takes, where keys and values are
 * packed, the tangents of these. A row of `out` has `columns` sums of values, as many of their tangents, and
 * half a panel whose numbers together are the sum of the weights times the tangents of their logits. */
typedef struct {
    const void *q; /* rows [q̇ q], or one of these alone; they lie as far apart as those of q */
    ptrdiff_t first, length, key_dim; /* they meet channels `first` on of packed keys, [k k̇] or [k] */
    const void *v;                    /* v̇, packed like values; NULL: 0 */
    bool v_finite;
    const void *bias; /* the tangent of the bias: [rows][AM_FLASH_TILE]; NULL: 0 */
    void *logits;     /* scratch: [rows][AM_FLASH_TILE] */
    ptrdiff_t columns;
} am_flash_tangents;
typedef void am_flash_tangent_step(const am_flash_rows *block, const am_flash_tile *tile,
                                   const am_flash_tangents *tangents);

/* Attention backward with the tangents of its gradients, as inputs move by q̇, k̇ and v̇, but d_out and d_lse do
 * not: beside what the backward step takes, in float32 or float64, these and what follows from them. With L̇ =
 * scale (q̇ kᵀ + q k̇ᵀ), times the slope of a cap,
 *
 *     Ṗ = P (L̇ - lsė),   dṠ = Ṗ (dP + add) + P (d_out v̇ᵀ - d_out·ouṫ)
 *     d_v += Ṗᵀ d_out,   d_k += scale (dṠᵀ q + dSᵀ q̇),   d_q += scale (dṠ k + dS k̇) */
typedef struct {
    am_backward_operand q;             /* q̇, as q; lanes NULL: 0 */
    const void *k_columns, *v_columns; /* k̇ and v̇, packed like keys; NULL: 0 */
    const void *k;                     /* k̇, packed like values */
    bool k_finite;
    const void *lse, *moved;  /* [rows]: lsė and d_out·ouṫ */
    void *by_q, *by_k, *by_v; /* scratch: [rows][AM_FLASH_TILE] */
} am_backward_tangents;
typedef void am_flash_backward_tangents(const am_backward_rows *block, const am_backward_tile *tile,
                                        const am_backward_tangents *tangents);

/* The weights e^(logit - base) of some rows of a block, which go to its `p`, and what is told of them. Of a
 * block and a tile as backward has them, q, base, the terms of logits and k_columns are read. */
typedef struct {
    uint64_t rows;           /* a bit for each row whose weights are wanted */
    void *highest, *entropy; /* [rows]: the greatest logit; Σ weight (base - logit) is added; both or none */
} am_weighed;
typedef void am_flash_find_weights(const am_backward_rows *block, const am_backward_tile *tile,
                                   const am_weighed *weighed);

/* Adds weights, [rows][AM_FLASH_TILE], to AM_FLASH_TILE sums, one for each key: of rows begin … end - 1 those
 * that have a bit in `rows`, and of these the live ones. `live`: a word a row, or NULL if all are. */
typedef void am_flash_sum_weights(const void *weights, const uint64_t *live, uint64_t rows, ptrdiff_t begin,
                                  ptrdiff_t end, void *sums);

/* Puts keys from `first` on among the `count` of the greatest weights, which fall, of those that are live.
 * Both arrays have whole lines. Keys are integers as wide as the arithmetic type. Places that are free have
 * the weight -1. */
typedef void am_flash_rank_keys(const void *weights, uint64_t live, int64_t first, void *greatest, void *keys,
                                ptrdiff_t count);

/* Updates `base`, the maxima of the rows; `rest` accumulates Σ e^(logit - base), and `share` the number of
 * logits that are as great. */
typedef void am_flash_find_row_max(const am_backward_rows *block, const am_backward_tile *tile);

/* Load, add or multiply rows whose strides may differ. Loaded rows are zero up to whole panels; returns
 * whether all numbers are finite. */
typedef bool am_load_rows(void *dst, ptrdiff_t dst_stride, const void *src, ptrdiff_t src_stride,
                          ptrdiff_t rows, ptrdiff_t head_dim);
typedef void am_add_rows(void *dst, ptrdiff_t dst_stride, const void *src, ptrdiff_t src_stride,
                         ptrdiff_t rows, ptrdiff_t head_dim);
/* The scalar product of each row; 0 where all of b is 0, whatever is in a. */
typedef void am_dot_rows(void *dst, const void *a, ptrdiff_t a_stride, const void *b, ptrdiff_t b_stride,
                         ptrdiff_t rows, ptrdiff_t head_dim);

/* Where the factor of logits and the scales of tokens are multiplied: into queries or keys and into values,
 * as these are copied or packed; or by the step, into products and P. */
typedef enum { AM_SCALE_NUMBERS, AM_SCALE_PRODUCTS } am_scaling;

typedef struct am_linear_kernels am_linear_kernels; /* kernels/linear/table.h */

/* Attention in one arithmetic: what it takes, how numbers lie in lanes, and its kernels; and those of linear
 * attention for the same types. */
typedef struct {
    am_dtype type;    /* of sums and logits, as large as a lane */
    am_dtype factors; /* of what is multiplied, queries and packed keys and values; if it is not `type`,
                       * weights are rounded to it */
    ptrdiff_t width;  /* numbers of these in a lane */
    ptrdiff_t panel;  /* rows or columns of one; divides AM_FLASH_TILE */
    uint32_t queries; /* bit t: it takes queries of am_dtype t; 0 if the processor has no such
                       * arithmetic */
    am_scaling scaling;
    bool packed_alone; /* the step takes no rows of keys and values */
    bool by_channel;   /* backward sums up d_k and d_v transposed: Q and d_out are then transposed once for
                        * many tiles, not P and dS of each */
    am_flash_step *step;
    am_flash_steps *steps; /* NULL: there is none */
    am_flash_merge *merge;
    am_kv_kernels kv[AM_OTHER];    /* by am_dtype */
    am_widen_row *widen[AM_OTHER]; /* what is AM_KV_WIDENED or AM_KV_ROWS */
    am_number_kernels numbers[AM_OTHER];
    am_flash_backward_step *backward;
    am_flash_find_row_max *find_row_max;
    am_flash_find_infinite *find_infinite;
    am_flash_tangent_step *tangent_step;
    am_flash_backward_tangents *backward_tangents;
    am_flash_find_weights *find_weights;
    am_flash_sum_weights *sum_weights;
    am_flash_rank_keys *rank_keys;
    am_load_rows *load_rows;
    am_add_rows *add_rows;
    am_dot_rows *dot_rows;
    const am_linear_kernels *linear_forward, *linear_backward;
} am_arithmetic;

/* Convolutions of each channel along time, of `width` steps:
 *     dst[t] = bias + Σ weight[j] src[t + j], j from 0 up
 * for `steps` results of `lanes` channels side by side. Strides are in elements; no bias: NULL. With
 * `silu` a result z becomes z / (1 + e^-z). */
typedef struct {
    ptrdiff_t steps, lanes, width;
    ptrdiff_t dst_stride, src_stride, weight_stride;
    const void *weight, *bias;
    bool silu;
    bool stream; /* write around the caches; rows of dst lie on multiples of 64 bytes */
} am_conv_tile;
typedef void am_conv(void *dst, const void *src, const am_conv_tile *tile);

/* A few rows of elements to and from elements in turn: row r has elements r, r + rows, … of `count` times
 * `rows`, which are 1 to AM_MOST_SPLIT. */
enum { AM_MOST_SPLIT = 4 };
typedef void am_split(void *dst, ptrdiff_t dst_stride, const void *src, ptrdiff_t count, ptrdiff_t rows);
typedef void am_join(void *dst, const void *src, ptrdiff_t src_stride, ptrdiff_t count, ptrdiff_t rows);

/* Multiplies `count` dout by the slope of silu at z, and writes them to z. */
typedef void am_silu_gradient(void *z, const void *dout, ptrdiff_t count);

/* Adds up the gradients of the weights and of the bias, for gradients dz that lie as dst does:
 *     sums[j] += Σ dz[t] src[t + j],   sums[width] += Σ dz[t]
 * in rows of am_conv_sums_stride(lanes). */
typedef void am_conv_sums(double *sums, const void *dz, const void *src, const am_conv_tile *tile);
static inline ptrdiff_t am_conv_sums_stride(ptrdiff_t lanes) { return (lanes + 15) / 16 * 16; }

typedef struct {
    am_conv *forward[AM_OTHER]; /* by the type of dst and src in memory; others are of the type of the sums */
    am_silu_gradient *silu_gradient;
    am_conv_sums *sums;
} am_conv_kernels;

typedef struct {
    am_cumsum_rows *rows[AM_OTHER]; /* by am_dtype: of floating-point numbers */
    am_cumsum_scan *scan[AM_OTHER];
} am_cumsum_kernels;

typedef struct {
    am_transpose *transpose_32, *transpose_64;
    am_widen_16 *widen_f16, *widen_bf16;
    am_narrow_16 *narrow_f16, *narrow_bf16;
    am_split *split_16, *split_32, *split_64;
    am_join *join_16, *join_32, *join_64;
} am_copy_kernels;

typedef struct {
    am_fill_tokens_32 *fill_positions_32, *fill_sequences_32, *fill_pairs_32;
    am_fill_tokens_64 *fill_positions_64, *fill_sequences_64, *fill_pairs_64;
    am_lens_32 *lens_32;
    am_lens_64 *lens_64;
    am_chunk_offsets_32 *chunk_offsets_32;
    am_chunk_offsets_64 *chunk_offsets_64;
    am_divide_32 *divide_32;
    am_divide_64 *divide_64;
} am_sequence_kernels;

typedef struct {
    am_count_nonzero *nonzero[AM_LANES];
    am_equal_bits *equal_bits;
    am_nonzero_bits *nonzero_bits[AM_LANES];
    am_expand_bits *expand_bits[AM_LANE_64 + 1]; /* for lanes that are told by their size alone */
    am_fill_bytes *fill_bytes;
    am_pack_bits *pack[AM_LANES];
    am_find_nonzero *first[AM_LANES], *last[AM_LANES];
    am_collect_nonzero *collect[AM_LANES];
    am_transpose_bits *transpose_bits;
    am_unlike_bits *unlike_bits;
    am_keep_bits *keep_bits;
} am_mask_kernels;

/* Gives back the tile registers, which kernels of the thread keep from step to step; NULL where there are
 * none. Other code may use them for itself. */
typedef void am_end_tiles(void);

typedef struct {
    const char *name;
    bool plain; /* attention is that of core/attention/plain.c, linear attention of core/linear/plain.c */
    am_end_tiles *end_tiles;
    am_cumsum_kernels cumsum;
    am_copy_kernels copy;
    am_sequence_kernels sequences;
    am_mask_kernels masks;
    am_arithmetic flash_f32, flash_f64; /* a row for each arithmetic, of which am_arithmetic_at picks one */
    /* For bfloat16, where the processor multiplies it by vectors, or by tile registers. A lane of float32
     * holds two (bf16x2): neighbours in channels of what pack_keys packs and of the rows that are multiplied
     * with it (`head_dim` of am_flash_rows counts lanes) and of unpacked keys and values, neighbouring rows
     * of what pack_values packs. Keys and values of eight bits are so when they are packed; unpacked their
     * numbers are counted, and queries are packed for them. */
    am_arithmetic flash_bf16x2, flash_amx;
    am_conv_kernels conv_f32, conv_f64;
} am_kernels;

/* The arithmetics of a level, of which the first that takes a call computes it. The level `plain` needs none:
 * core/attention/plain.c. */
enum { AM_ARITHMETICS = 4 };
static inline const am_arithmetic *am_arithmetic_at(const am_kernels *kernels, int i)
{
    const am_arithmetic *const all[AM_ARITHMETICS] = {&kernels->flash_amx, &kernels->flash_bf16x2,
                                                      &kernels->flash_f64, &kernels->flash_f32};
    return all[i];
}

/* Whether a type is in a set of bits. */
static inline bool am_is_among(uint32_t types, am_dtype type) { return types >> type & 1; }

/* The arithmetic of linear attention: the first that takes a type. */
static inline const am_arithmetic *am_arithmetic_for(const am_kernels *kernels, am_dtype type)
{
    int i = 0;
    while (!am_is_among(am_arithmetic_at(kernels, i)->queries, type)) i++;
    return am_arithmetic_at(kernels, i);
}

/* A table of one topic at one level, which is empty but for its kernels. */
#define AM_TOPIC(topic, level) am_##topic##_##level
#define AM_DECLARE(topic, level) extern const am_kernels AM_TOPIC(topic, level);

/* The topics of a level that has kernels for everything. */
#define AM_EACH_TOPIC(DO, level)                                                                             \
    DO(arrays, level)                                                                                        \
    DO(flash_f32, level)                                                                                     \
    DO(flash_f64, level)                                                                                     \
    DO(kv_f32, level)                                                                                        \
    DO(kv_f16, level)                                                                                        \
    DO(kv_bf16, level)                                                                                       \
    DO(kv_i8, level)                                                                                         \
    DO(kv_f8, level)                                                                                         \
    DO(conv_f32, level)                                                                                      \
    DO(conv_f64, level)                                                                                      \
    DO(linear, level)
AM_EACH_TOPIC(AM_DECLARE, baseline)
AM_EACH_TOPIC(AM_DECLARE, avx2)
AM_EACH_TOPIC(AM_DECLARE, avx512)
/* What other levels have of their own; the baseline emulates bf16x2 in builds for tests. */
AM_DECLARE(kv_i16x2, neondot)
AM_DECLARE(kv_i16x2, avx2)
AM_DECLARE(kv_i16x2, avx512)
AM_DECLARE(kv_i16x2, avx512vnni)
AM_DECLARE(flash_bf16x2, baseline)
AM_DECLARE(kv_bf16x2, baseline)
AM_DECLARE(linear_bf16x2, baseline)
AM_DECLARE(flash_bf16x2, neonbf16)
AM_DECLARE(kv_bf16x2, neonbf16)
AM_DECLARE(linear_bf16x2, neonbf16)
AM_DECLARE(flash_bf16x2, avx512bf16)
AM_DECLARE(kv_bf16x2, avx512bf16)
AM_DECLARE(linear_bf16x2, avx512bf16)
AM_DECLARE(kv_f8x2, avx512bf16)
AM_DECLARE(flash_amx, amx)

#endif
