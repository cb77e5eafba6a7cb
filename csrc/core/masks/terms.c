/* terms.c – the terms that are told by intervals of keys, or by ids of tokens. terms_arrays.c has the
 * others. */
#include "core/masks/terms.h"

#include <stdlib.h>

#include "core/runtime/sizes.h"
#include "core/arrays/packed.h"

enum {
    BLOCK = AM_TILE_COLUMNS,
    WIDE = 64, /* blocks of ids in a wide block */
};

/* --- Terms where each query sees one interval of keys, and neither its begin nor its end decreases from one
 * query to the next --- */

typedef am_range interval_of(const am_node *node, const am_region *p, ptrdiff_t q);

static am_range interval_keys(interval_of *interval, const am_mask *mask, const am_node *node,
                              const am_region *p)
{
    am_range first = interval(node, p, p->q), last = interval(node, p, p->q + p->rows - 1);
    return (am_range){am_max(first.begin, 0), am_min(last.end, mask->keys)};
}

/* The tile of rows whose intervals lie between the `first` and the `last` one, which are among them. */
static am_tile tile_between(am_range first, am_range last, const am_region *p)
{
    if (p->k >= last.end || p->k + p->columns <= first.begin) return AM_DEAD;
    return p->k >= last.begin && p->k + p->columns <= first.end ? AM_FULL : AM_MIXED;
}

static am_tile interval_tile(interval_of *interval, const am_node *node, const am_region *p)
{
    return tile_between(interval(node, p, p->q), interval(node, p, p->q + p->rows - 1), p);
}

static void interval_bits(interval_of *interval, const am_node *node, const am_region *p, uint64_t *bits)
{
    for (ptrdiff_t r = 0; r < p->rows; r++) bits[r] = am_live_bits(interval(node, p, p->q + r), p);
}

/* Define the functions of a term whose interval of keys is name##_interval. */
#define INTERVAL_KEYS_AND_TILE(name)                                                                         \
    static am_range name##_keys(const am_mask *mask, const am_node *node, const am_region *p)                \
    {                                                                                                        \
        return interval_keys(name##_interval, mask, node, p);                                                \
    }                                                                                                        \
    static am_tile name##_tile(const am_mask *mask, const am_node *node, const am_region *p)                 \
    {                                                                                                        \
        (void)mask;                                                                                          \
        return interval_tile(name##_interval, node, p);                                                      \
    }
#define INTERVAL_FUNCTIONS(name)                                                                             \
    INTERVAL_KEYS_AND_TILE(name)                                                                             \
    static void name##_bits(const am_mask *mask, const am_node *node, const am_region *p, uint64_t *bits)    \
    {                                                                                                        \
        (void)mask;                                                                                          \
        interval_bits(name##_interval, node, p, bits);                                                       \
    }

static am_range all_interval(const am_node *node, const am_region *p, ptrdiff_t q)
{
    (void)node, (void)p, (void)q;
    return (am_range){0, PTRDIFF_MAX};
}
INTERVAL_FUNCTIONS(all)

static am_range band_interval(const am_node *node, const am_region *p, ptrdiff_t q)
{
    const ptrdiff_t i = p->b * node->band.batch + p->h * node->band.head;
    return (am_range){q + node->band.low[i], q + node->band.high[i] + 1};
}
INTERVAL_FUNCTIONS(band)
static bool band_is_by_head(const am_node *node) { return node->band.head != 0; }

static am_range chunk_interval(const am_node *node, const am_region *p, ptrdiff_t q)
{
    ptrdiff_t size = node->chunk.size;
    ptrdiff_t begin = (q + node->chunk.q_shift[p->b]) / size * size - node->chunk.k_shift[p->b];
    return (am_range){begin, begin > PTRDIFF_MAX - size ? PTRDIFF_MAX : begin + size};
}
INTERVAL_FUNCTIONS(chunk)
static uint64_t chunk_boundaries(const am_node *node, ptrdiff_t b, am_side side, ptrdiff_t begin,
                                 ptrdiff_t count)
{
    const ptrdiff_t shift = side == AM_QUERIES ? node->chunk.q_shift[b] : node->chunk.k_shift[b];
    return am_multiples(node->chunk.size, begin + shift, count);
}

static am_range keys_interval(const am_node *node, const am_region *p, ptrdiff_t q)
{
    (void)q;
    return (am_range){node->keys.begin[p->b], node->keys.end[p->b]};
}
INTERVAL_FUNCTIONS(keys)

/* The keys of sequence s that query q, which belongs to it, sees. */
static am_range keys_in_sequence(const am_node *node, ptrdiff_t s, ptrdiff_t q)
{
    const ptrdiff_t begin = node->sequences.k_starts[s], end = node->sequences.k_starts[s + 1],
                    place = q - node->sequences.q_starts[s], size = node->sequences.size;
    am_range near = {begin + place + node->sequences.low[s], begin + place + node->sequences.high[s] + 1};
    if (size) {
        const ptrdiff_t chunk = begin + am_floor_to(place + node->sequences.offsets[s], size);
        near = (am_range){am_max(near.begin, chunk), am_min(near.end, chunk + size)};
    }
    return (am_range){am_min(am_max(near.begin, begin), end), am_max(am_min(near.end, end), begin)};
}
static am_range sequences_interval(const am_node *node, const am_region *p, ptrdiff_t q)
{
    (void)p;
    if (node->sequences.count == 0) return (am_range){0, 0};
    return keys_in_sequence(node, am_sequence_of(node->sequences.q_starts, node->sequences.count, q), q);
}
INTERVAL_KEYS_AND_TILE(sequences)
static void sequences_bits(const am_mask *mask, const am_node *node, const am_region *p, uint64_t *bits)
{
    (void)mask;
    ptrdiff_t count = node->sequences.count,
              s = count ? am_sequence_of(node->sequences.q_starts, count, p->q) : 0;
    for (ptrdiff_t q = p->q; q < p->q + p->rows; q++) {
        while (s + 1 < count && node->sequences.q_starts[s + 1] <= q) s++;
        *bits++ = count ? am_live_bits(keys_in_sequence(node, s, q), p) : 0;
    }
}

/* The boundaries of chunks. */
static uint64_t chunks_of_sequences(const am_node *node, am_side side, ptrdiff_t begin, ptrdiff_t count)
{
    const ptrdiff_t *starts = side == AM_QUERIES ? node->sequences.q_starts : node->sequences.k_starts,
                    sequences = node->sequences.count, size = node->sequences.size;
    ptrdiff_t s = size ? am_sequence_of(starts, sequences, begin) : 0;
    uint64_t boundaries = 0;
    for (ptrdiff_t token = begin + 1; size && token <= begin + count; token++) {
        while (s + 1 < sequences && starts[s + 1] <= token) s++;
        const ptrdiff_t offset = side == AM_QUERIES ? node->sequences.offsets[s] : 0;
        if ((token - starts[s] + offset) % size == 0) boundaries |= (uint64_t)1 << (token - begin - 1);
    }
    return boundaries;
}

static uint64_t sequences_boundaries(const am_node *node, ptrdiff_t b, am_side side, ptrdiff_t begin,
                                     ptrdiff_t count)
{
    (void)b;
    const ptrdiff_t *starts = side == AM_QUERIES ? node->sequences.q_starts : node->sequences.k_starts;
    uint64_t boundaries = 0;
    for (ptrdiff_t s = am_sequence_of(starts, node->sequences.count, begin) + 1; s < node->sequences.count;
         s++) {
        if (starts[s] > begin + count) break;
        boundaries |= (uint64_t)1 << (starts[s] - begin - 1);
    }
    return boundaries | chunks_of_sequences(node, side, begin, count);
}

/* --- Summaries of numbers of tokens, of which those from `least` on are valid --- */

static void summarize_ids(am_id_block *blocks, const int32_t *ids, ptrdiff_t count, int32_t least)
{
    for (ptrdiff_t begin = 0; begin < count; begin += BLOCK, blocks++) {
        ptrdiff_t end = am_min(begin + BLOCK, count);
        int32_t low = INT32_MAX, high = INT32_MIN, all_valid = 1;
        for (ptrdiff_t t = begin; t < end; t++) {
            int valid = ids[t] >= least;
            all_valid &= valid;
            low = valid && ids[t] < low ? ids[t] : low;
            high = valid && ids[t] > high ? ids[t] : high;
        }
        *blocks = (am_id_block){.low = low, .high = high, .all_valid = all_valid};
    }
}

static am_id_block merged(am_id_block a, am_id_block b)
{
    return (am_id_block){.low = a.low < b.low ? a.low : b.low,
                         .high = a.high > b.high ? a.high : b.high,
                         .all_valid = a.all_valid & b.all_valid};
}

static const am_id_block no_ids = {.low = INT32_MAX, .high = INT32_MIN, .all_valid = 1};

static am_status summarize_side(const am_mask *mask, am_token_ids *side, ptrdiff_t length, int32_t least)
{
    const ptrdiff_t heads = side->head ? mask->heads : 1, blocks = am_ceil_div(length, BLOCK),
                    rows = blocks ? (side->batch ? mask->batch : 1) * heads : 0;
    side->blocks = malloc((size_t)am_max(rows * blocks, 1) * sizeof *side->blocks);
    for (ptrdiff_t i = 0; side->blocks && i < rows; i++)
        summarize_ids(side->blocks + i * blocks, side->ids + i / heads * side->batch + i % heads * side->head,
                      length, least);
    return side->blocks ? AM_OK : AM_NO_MEMORY;
}

/* The numbers of one (b, h) and their summaries. */
typedef struct {
    const int32_t *ids;
    const am_id_block *blocks;
    int32_t least;
} id_view;

static id_view view_of(const am_mask *mask, const am_region *p, const am_token_ids *side, ptrdiff_t length,
                       int32_t least)
{
    const ptrdiff_t row = am_distinct_index(mask, p->b, p->h, side->batch, side->head);
    return (id_view){.ids = side->ids + p->b * side->batch + p->h * side->head,
                     .blocks = side->blocks + row * am_ceil_div(length, BLOCK),
                     .least = least};
}

/* Summarizes tokens begin … begin + count - 1. The summary of a block that lies there only in part may be too
 * wide, so its ids are read unless they are all the same. */
static am_id_block summarize_range(const id_view *view, ptrdiff_t begin, ptrdiff_t count)
{
    am_id_block summary = no_ids;
    for (ptrdiff_t token = begin, end; token < begin + count; token = end) {
        end = am_min((token / BLOCK + 1) * BLOCK, begin + count);
        am_id_block part = view->blocks[token / BLOCK];
        const bool differ = part.low < part.high || (part.low == part.high && !part.all_valid);
        if (differ && end - token < BLOCK) summarize_ids(&part, view->ids + token, end - token, view->least);
        summary = merged(summary, part);
    }
    return summary;
}

/* --- Diagonals --- */

static am_status diagonal_prepare(const am_context *context, const am_mask *mask, am_node *node)
{
    (void)context;
    return summarize_side(mask, &node->diagonal.at, mask->queries, INT32_MIN);
}

static void diagonal_release(am_node *node)
{
    free(node->diagonal.at.blocks);
    node->diagonal.at.blocks = NULL;
}

static id_view diagonal_of(const am_mask *mask, const am_node *node, const am_region *p)
{
    return view_of(mask, p, &node->diagonal.at, mask->queries, INT32_MIN);
}

/* The keys around `at`. */
static am_range keys_around(const am_node *node, const am_region *p, int32_t at)
{
    const ptrdiff_t i = p->b * node->diagonal.batch + p->h * node->diagonal.head;
    return (am_range){at + node->diagonal.low[i], at + node->diagonal.high[i] + 1};
}

static am_range diagonal_keys(const am_mask *mask, const am_node *node, const am_region *p)
{
    const id_view view = diagonal_of(mask, node, p);
    const am_id_block at = summarize_range(&view, p->q, p->rows);
    return (am_range){am_max(keys_around(node, p, at.low).begin, 0),
                      am_min(keys_around(node, p, at.high).end, mask->keys)};
}

static am_tile diagonal_tile(const am_mask *mask, const am_node *node, const am_region *p)
{
    const id_view view = diagonal_of(mask, node, p);
    const am_id_block at = summarize_range(&view, p->q, p->rows);
    return tile_between(keys_around(node, p, at.low), keys_around(node, p, at.high), p);
}

static void diagonal_bits(const am_mask *mask, const am_node *node, const am_region *p, uint64_t *bits)
{
    const int32_t *at = diagonal_of(mask, node, p).ids + p->q;
    for (ptrdiff_t r = 0; r < p->rows; r++) bits[r] = am_live_bits(keys_around(node, p, at[r]), p);
}

static bool diagonal_is_by_head(const am_node *node) { return node->diagonal.head || node->diagonal.at.head; }

/* --- Equal ids --- */

static int32_t least_id(const am_node *node) { return node->equal.exclude_zero ? 1 : 0; }

static am_status summarize_blocks(const am_mask *mask, am_node *node)
{
    const ptrdiff_t blocks = am_ceil_div(mask->keys, BLOCK), wide_blocks = am_ceil_div(blocks, WIDE),
                    planes = blocks ? am_distinct_rows(mask, node->equal.k.batch, node->equal.k.head) : 0;
    am_id_block *wide = malloc((size_t)am_max(planes * wide_blocks, 1) * sizeof *wide);
    node->equal.k_wide_blocks = wide;
    if (!wide) return AM_NO_MEMORY;
    for (ptrdiff_t plane = 0; plane < planes; plane++) {
        const am_id_block *block = node->equal.k.blocks + plane * blocks;
        for (ptrdiff_t i = 0; i < blocks; i++) {
            if (i % WIDE == 0) *wide = no_ids;
            *wide = merged(*wide, block[i]);
            if (i % WIDE == WIDE - 1 || i == blocks - 1) wide++;
        }
    }
    return AM_OK;
}

static am_status equal_prepare(const am_context *context, const am_mask *mask, am_node *node)
{
    (void)context;
    am_status status = summarize_side(mask, &node->equal.q, mask->queries, least_id(node));
    if (status == AM_OK) status = summarize_side(mask, &node->equal.k, mask->keys, least_id(node));
    return status == AM_OK ? summarize_blocks(mask, node) : status;
}

static void equal_release(am_node *node)
{
    free(node->equal.q.blocks);
    free(node->equal.k.blocks);
    free(node->equal.k_wide_blocks);
    node->equal.q.blocks = node->equal.k.blocks = node->equal.k_wide_blocks = NULL;
}

static id_view ids_of(const am_mask *mask, const am_node *node, const am_region *p, am_side side)
{
    return side == AM_QUERIES ? view_of(mask, p, &node->equal.q, mask->queries, least_id(node))
                              : view_of(mask, p, &node->equal.k, mask->keys, least_id(node));
}

static bool disjoint(const am_id_block *a, const am_id_block *b)
{
    return a->low > b->high || b->low > a->high;
}
static bool is_within(const am_id_block *ids, int32_t id) { return ids->low <= id && id <= ids->high; }

/* Narrows a range of keys to the part from the first to the last key that has an id. If ids are in disorder,
 * each span of queries may read all blocks of the range. It reads whole words, so this takes long only for
 * hundreds of thousands of keys. */
static am_range keys_with(const am_mask *mask, const id_view *keys, int32_t id, am_range range)
{
    for (ptrdiff_t stop; range.begin < range.end; range.begin = stop) {
        stop = am_min((range.begin / BLOCK + 1) * BLOCK, range.end);
        if (!is_within(&keys->blocks[range.begin / BLOCK], id)) continue;
        const uint64_t found =
            mask->kernels->masks.equal_bits(keys->ids + range.begin, id, stop - range.begin);
        if (!found) continue;
        range.begin += __builtin_ctzll(found);
        break;
    }
    for (ptrdiff_t start; range.begin < range.end; range.end = start) {
        start = am_max((range.end - 1) / BLOCK * BLOCK, range.begin);
        if (!is_within(&keys->blocks[start / BLOCK], id)) continue;
        const uint64_t found = mask->kernels->masks.equal_bits(keys->ids + start, id, range.end - start);
        if (!found) continue;
        range.end = start + BLOCK - __builtin_clzll(found);
        break;
    }
    return range;
}

static am_range equal_keys(const am_mask *mask, const am_node *node, const am_region *p)
{
    const id_view q_view = ids_of(mask, node, p, AM_QUERIES), k_view = ids_of(mask, node, p, AM_KEYS);
    const am_id_block queries = summarize_range(&q_view, p->q, p->rows), *keys = k_view.blocks;
    const ptrdiff_t blocks = am_ceil_div(mask->keys, BLOCK), wide_blocks = am_ceil_div(blocks, WIDE);
    const am_id_block *wide =
        node->equal.k_wide_blocks +
        am_distinct_index(mask, p->b, p->h, node->equal.k.batch, node->equal.k.head) * wide_blocks;
    ptrdiff_t begin = 0, end = wide_blocks;
    while (begin < end && disjoint(&queries, &wide[begin])) begin++;
    while (begin < end && disjoint(&queries, &wide[end - 1])) end--;
    begin *= WIDE, end = am_min(end * WIDE, blocks);
    while (begin < end && disjoint(&queries, &keys[begin])) begin++;
    while (begin < end && disjoint(&queries, &keys[end - 1])) end--;
    begin *= BLOCK, end = am_min(end * BLOCK, mask->keys);
    if (queries.low == queries.high) return keys_with(mask, &k_view, queries.low, (am_range){begin, end});
    while (begin < end && !is_within(&queries, k_view.ids[begin])) begin++;
    while (begin < end && !is_within(&queries, k_view.ids[end - 1])) end--;
    return (am_range){begin, end};
}

static am_tile equal_tile(const am_mask *mask, const am_node *node, const am_region *p)
{
    const id_view q_view = ids_of(mask, node, p, AM_QUERIES), k_view = ids_of(mask, node, p, AM_KEYS);
    const am_id_block queries = summarize_range(&q_view, p->q, p->rows),
                      keys = summarize_range(&k_view, p->k, p->columns);
    if (disjoint(&queries, &keys)) return AM_DEAD;
    int one_id = queries.low == queries.high && keys.low == keys.high;
    return one_id && queries.all_valid && keys.all_valid ? AM_FULL : AM_MIXED;
}

static void equal_bits(const am_mask *mask, const am_node *node, const am_region *p, uint64_t *bits)
{
    const int32_t *q_ids = ids_of(mask, node, p, AM_QUERIES).ids + p->q,
                  *k_ids = ids_of(mask, node, p, AM_KEYS).ids + p->k;
    const int32_t least = least_id(node);
    if (p->rows == 1 && p->columns == 1) { /* as each short sequence asks of its ends */
        *bits = q_ids[0] >= least && q_ids[0] == k_ids[0];
        return;
    }
    for (ptrdiff_t r = 0; r < p->rows; r++) {
        int repeated = r > 0 && q_ids[r] == q_ids[r - 1];
        if (repeated)
            bits[r] = bits[r - 1];
        else
            bits[r] = q_ids[r] >= least ? mask->kernels->masks.equal_bits(k_ids, q_ids[r], p->columns) : 0;
    }
}

static uint64_t equal_boundaries(const am_node *node, ptrdiff_t b, am_side side, ptrdiff_t begin,
                                 ptrdiff_t count)
{
    const am_token_ids *of = side == AM_QUERIES ? &node->equal.q : &node->equal.k;
    const int32_t *ids = of->ids + b * of->batch;
    uint64_t boundaries = 0;
    for (ptrdiff_t i = 0; i < count; i++) boundaries |= (uint64_t)(ids[begin + i] != ids[begin + i + 1]) << i;
    return boundaries;
}

static bool equal_is_by_head(const am_node *node) { return node->equal.q.head || node->equal.k.head; }

const am_term_kind am_all_term = {.keys = all_keys, .tile = all_tile, .bits = all_bits, .form = AM_INTERVAL};
const am_term_kind am_band_term = {.keys = band_keys,
                                   .tile = band_tile,
                                   .bits = band_bits,
                                   .is_by_head = band_is_by_head,
                                   .form = AM_INTERVALS};
const am_term_kind am_chunk_term = {.keys = chunk_keys,
                                    .tile = chunk_tile,
                                    .bits = chunk_bits,
                                    .boundaries = chunk_boundaries,
                                    .form = AM_INTERVALS};
const am_term_kind am_keys_term = {
    .keys = keys_keys, .tile = keys_tile, .bits = keys_bits, .form = AM_INTERVAL};
const am_term_kind am_diagonal_term = {.prepare = diagonal_prepare,
                                       .release = diagonal_release,
                                       .keys = diagonal_keys,
                                       .tile = diagonal_tile,
                                       .bits = diagonal_bits,
                                       .is_by_head = diagonal_is_by_head};
const am_term_kind am_equal_term = {.prepare = equal_prepare,
                                    .release = equal_release,
                                    .keys = equal_keys,
                                    .tile = equal_tile,
                                    .bits = equal_bits,
                                    .boundaries = equal_boundaries,
                                    .is_by_head = equal_is_by_head};
const am_term_kind am_sequences_term = {.keys = sequences_keys,
                                        .tile = sequences_tile,
                                        .bits = sequences_bits,
                                        .boundaries = sequences_boundaries,
                                        .form = AM_INTERVALS};
