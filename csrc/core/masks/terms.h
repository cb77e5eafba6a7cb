/* terms.h – the functions that answer the questions of mask.h for one term. */
#ifndef AM_CORE_MASKS_TERMS_H
#define AM_CORE_MASKS_TERMS_H

#include "core/masks/mask.h"
#include "core/runtime/sizes.h"

/* What is known of the keys that the queries of one sequence see. */
typedef enum {
    AM_SCATTERED, /* nothing */
    AM_INTERVALS, /* each query sees one interval, and those of all queries together make one */
    AM_INTERVAL,  /* all queries see the same interval */
} am_keys_form;

typedef struct {
    am_status (*prepare)(const am_context *context, const am_mask *mask,
                         am_node *node); /* NULL: no summaries */
    void (*release)(am_node *node);
    am_range (*keys)(const am_mask *mask, const am_node *node,
                     const am_region *region); /* ignores k and columns */
    am_tile (*tile)(const am_mask *mask, const am_node *node, const am_region *region);
    void (*bits)(const am_mask *mask, const am_node *node, const am_region *region, uint64_t *bits);
    uint64_t (*boundaries)(const am_node *node, ptrdiff_t b, am_side side, ptrdiff_t begin,
                           ptrdiff_t count); /* the `count` tokens after `begin`; NULL: none */
    bool (*is_by_head)(const am_node *node); /* NULL: all heads see the same keys */
    am_keys_form form;
} am_term_kind;

extern const am_term_kind am_all_term, am_band_term, am_chunk_term, am_keys_term, am_equal_term,
    am_sequences_term, am_dense_term, am_tiles_term, am_diagonal_term, am_neighborhood_term;

/* A word whose lowest `count` bits are set, 0 ≤ count ≤ 64. */
static inline uint64_t am_low_bits(ptrdiff_t count)
{
    return count >= 64 ? UINT64_MAX : ((uint64_t)1 << count) - 1;
}

/* The bits of keys begin … end - 1 of a region. */
static inline uint64_t am_live_bits(am_range keys, const am_region *p)
{
    ptrdiff_t begin = am_min(am_max(keys.begin - p->k, 0), p->columns);
    ptrdiff_t end = am_min(am_max(keys.end - p->k, begin), p->columns);
    return am_low_bits(end) & ~am_low_bits(begin);
}

/* Bit i is set if token begin + 1 + i is a multiple of `size`, for the `count` tokens after `begin`. */
static inline uint64_t am_multiples(ptrdiff_t size, ptrdiff_t begin, ptrdiff_t count)
{
    uint64_t multiples = 0;
    for (ptrdiff_t i = size - begin % size; i <= count; i += size < 64 ? size : 64)
        multiples |= (uint64_t)1 << (i - 1);
    return multiples;
}

/* The number of distinct rows that an array has along batch and head: a stride of zero repeats one row. */
static inline ptrdiff_t am_distinct_rows(const am_mask *mask, ptrdiff_t batch_stride, ptrdiff_t head_stride)
{
    return (batch_stride ? mask->batch : 1) * (head_stride ? mask->heads : 1);
}

static inline ptrdiff_t am_distinct_index(const am_mask *mask, ptrdiff_t b, ptrdiff_t h,
                                          ptrdiff_t batch_stride, ptrdiff_t head_stride)
{
    return (batch_stride ? b : 0) * (head_stride ? mask->heads : 1) + (head_stride ? h : 0);
}

#endif
