/* mask_terms.h – the functions that answer the questions of mask.h for one term. */
#ifndef AM_MASK_TERMS_H
#define AM_MASK_TERMS_H

#include "core/mask.h"

/* The pairs that a question is about: rows × columns of them, beginning at (q, k). */
typedef struct {
    ptrdiff_t b, h, q, rows, k, columns;
} am_region;

typedef struct {
    am_status (*prepare)(const am_run *run, const am_mask *mask, am_node *node); /* NULL: no summaries */
    void (*release)(am_node *node);
    am_range (*keys)(const am_mask *mask, const am_node *node,
                     const am_region *region); /* ignores k and columns */
    am_tile (*tile)(const am_mask *mask, const am_node *node, const am_region *region);
    void (*bits)(const am_mask *mask, const am_node *node, const am_region *region, uint64_t *bits);
    uint64_t (*boundaries)(const am_node *node, ptrdiff_t b, am_side side, ptrdiff_t begin,
                           ptrdiff_t count); /* the `count` tokens after `begin`; NULL: none */
    bool (*is_by_head)(const am_node *node); /* NULL: all heads see the same keys */
} am_term_kind;

extern const am_term_kind am_term_kinds[AM_TERM_KINDS];

/* A word whose lowest `count` bits are set, 0 ≤ count ≤ 64. */
static inline uint64_t am_low_bits(ptrdiff_t count)
{
    return count >= 64 ? UINT64_MAX : ((uint64_t)1 << count) - 1;
}

#endif
