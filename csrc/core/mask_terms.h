/* mask_terms.h – what every kind of term answers; see mask.h for the questions. */
#ifndef AM_MASK_TERMS_H
#define AM_MASK_TERMS_H

#include "core/mask.h"

/* Where a question points: rows × columns pairs from (q, k) on. */
typedef struct {
    ptrdiff_t b, h, q, rows, k, columns;
} am_place;

typedef struct {
    am_status (*prepare)(const am_run *run, const am_mask *mask, am_node *node); /* NULL: nothing to note */
    void (*release)(am_node *node);
    am_range (*keys)(const am_mask *mask, const am_node *node,
                     const am_place *place); /* ignores k and columns */
    am_tile (*tile)(const am_mask *mask, const am_node *node, const am_place *place);
    void (*bits)(const am_mask *mask, const am_node *node, const am_place *place, uint64_t *bits);
    uint64_t (*boundaries)(const am_node *node, ptrdiff_t b, am_side side, ptrdiff_t begin,
                           ptrdiff_t count); /* of so many tokens behind `begin`; NULL: never any */
    bool (*is_by_head)(const am_node *node); /* NULL: never */
} am_term_kind;

extern const am_term_kind am_term_kinds[AM_TERM_KINDS];

/* The lowest `count` bits, 0 ≤ count ≤ 64. */
static inline uint64_t am_low_bits(ptrdiff_t count)
{
    return count >= 64 ? UINT64_MAX : ((uint64_t)1 << count) - 1;
}

#endif
