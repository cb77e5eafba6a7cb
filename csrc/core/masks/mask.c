/* mask.c – answers the three questions for a whole expression. */
#include "core/masks/mask.h"

#include "core/masks/terms.h"

/* NULL for an operator. */
static const am_term_kind *term_of(const am_node *node)
{
    static const am_term_kind *const terms[AM_XOR + 1] = {
        [AM_TERM_ALL] = &am_all_term,           [AM_TERM_BAND] = &am_band_term,
        [AM_TERM_CHUNK] = &am_chunk_term,       [AM_TERM_KEYS] = &am_keys_term,
        [AM_TERM_EQUAL] = &am_equal_term,       [AM_TERM_SEQUENCES] = &am_sequences_term,
        [AM_TERM_DENSE] = &am_dense_term,       [AM_TERM_TILES] = &am_tiles_term,
        [AM_TERM_DIAGONAL] = &am_diagonal_term, [AM_TERM_NEIGHBORHOOD] = &am_neighborhood_term,
    };
    return terms[node->kind];
}

am_status am_mask_prepare(const am_context *context, am_mask *mask)
{
    bool exact_keys = true, has_boundaries = false, is_by_head = false;
    int by_query =
        0; /* intervals that follow from the query: am_mask_keys is not exact where two intersect */
    for (am_node *node = mask->nodes; node < mask->nodes + mask->node_count; node++) {
        const am_term_kind *term = term_of(node);
        exact_keys &= term ? term->form != AM_SCATTERED : node->kind == AM_AND;
        if (!term) continue;
        by_query += term->form == AM_INTERVALS;
        has_boundaries |= term->boundaries != NULL;
        is_by_head |= term->is_by_head && term->is_by_head(node);
    }
    mask->kernels = context->kernels;
    mask->exact_keys = exact_keys && by_query <= 1;
    mask->has_boundaries = has_boundaries;
    mask->own_heads = is_by_head || mask->heads == 0 ? mask->heads : 1;
    for (am_node *node = mask->nodes; node < mask->nodes + mask->node_count; node++) {
        const am_term_kind *term = term_of(node);
        if (node->borrowed || !term || !term->prepare) continue;
        am_status status = term->prepare(context, mask, node);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

void am_mask_release(am_mask *mask)
{
    for (ptrdiff_t i = 0; i < mask->node_count; i++) {
        am_node *node = &mask->nodes[i];
        const am_term_kind *term = term_of(node);
        if (!node->borrowed && term && term->release) term->release(node);
    }
}

/* Each question evaluates the expression on a stack. Its entries are ranges of keys, kinds of tiles, or tiles
 * with their bits. */

am_range am_mask_keys(const am_mask *mask, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q, ptrdiff_t rows)
{
    if (mask->keys == 0) return (am_range){0, 0};
    const am_region region = {.b = b, .h = h, .q = q, .rows = rows};
    am_range stack[AM_MASK_DEPTH];
    int top = -1;
    for (ptrdiff_t i = 0; i < mask->node_count; i++) {
        const am_node *node = &mask->nodes[i];
        const am_term_kind *term = term_of(node);
        if (term) {
            stack[++top] = term->keys(mask, node, &region);
            continue;
        }
        if (node->kind == AM_NOT) { /* knowing which keys may be live does not tell which may be dead */
            stack[top] = (am_range){0, mask->keys};
            continue;
        }
        am_range right = stack[top--], *left = &stack[top];
        if (node->kind == AM_AND) {
            left->begin = left->begin > right.begin ? left->begin : right.begin;
            left->end = left->end < right.end ? left->end : right.end;
        } else if (left->begin >= left->end) {
            *left = right;
        } else if (right.begin < right.end) {
            left->begin = left->begin < right.begin ? left->begin : right.begin;
            left->end = left->end > right.end ? left->end : right.end;
        }
    }
    if (stack[0].end <= stack[0].begin) return (am_range){0, 0};
    return stack[0];
}

uint64_t am_mask_boundaries(const am_mask *mask, ptrdiff_t b, am_side side, ptrdiff_t begin)
{
    const ptrdiff_t remaining = (side == AM_QUERIES ? mask->queries : mask->keys) - begin - 1,
                    count = remaining < 64 ? remaining : 64;
    uint64_t boundaries = 0;
    for (const am_node *node = mask->nodes; node < mask->nodes + mask->node_count; node++) {
        const am_term_kind *term = term_of(node);
        if (term && term->boundaries) boundaries |= term->boundaries(node, b, side, begin, count);
    }
    return boundaries;
}

static am_tile inverted_kind(am_tile tile)
{
    return tile == AM_MIXED ? AM_MIXED : tile == AM_FULL ? AM_DEAD : AM_FULL;
}

/* The kind of tile that an operator makes of two tiles. It may return AM_MIXED for a tile that is dead or
 * full, which only the bits show. */
static am_tile combined_kind(am_node_kind operator, am_tile left, am_tile right)
{
    const am_tile decisive = operator == AM_AND ? AM_DEAD : AM_FULL;
    if (operator != AM_XOR && (left == decisive || right == decisive)) return decisive;
    if (left == AM_MIXED || right == AM_MIXED) return AM_MIXED;
    if (operator == AM_XOR) return left == right ? AM_DEAD : AM_FULL;
    return left;
}

/* A tile on the stack. Its bits are set only if it is mixed. */
typedef struct {
    am_tile kind;
    uint64_t bits[AM_TILE_ROWS];
} operand;

static void invert(operand *x, const am_region *region)
{
    if (x->kind == AM_MIXED) {
        for (ptrdiff_t r = 0; r < region->rows; r++) x->bits[r] ^= am_low_bits(region->columns);
    }
    x->kind = inverted_kind(x->kind);
}

static void combine(am_node_kind operator, operand *left, operand *right, const am_region *region)
{
    am_tile kind = combined_kind(operator, left->kind, right->kind);
    if (left->kind == AM_MIXED && right->kind == AM_MIXED) {
        for (ptrdiff_t r = 0; r < region->rows; r++) {
            if (operator == AM_AND)
                left->bits[r] &= right->bits[r];
            else if (operator == AM_OR)
                left->bits[r] |= right->bits[r];
            else
                left->bits[r] ^= right->bits[r];
        }
        kind = AM_MIXED;
    } else if (kind == AM_MIXED) {
        operand *mixed = left->kind == AM_MIXED ? left : right, *other = mixed == left ? right : left;
        if (operator == AM_XOR && other->kind == AM_FULL) invert(mixed, region);
        if (mixed == right) {
            for (ptrdiff_t r = 0; r < region->rows; r++) left->bits[r] = right->bits[r];
        }
    }
    left->kind = kind;
}

am_tile am_mask_bits(const am_mask *mask, const am_region *region, uint64_t *bits)
{
    operand stack[AM_MASK_DEPTH];
    int top = -1;
    for (ptrdiff_t i = 0; i < mask->node_count; i++) {
        const am_node *node = &mask->nodes[i];
        const am_term_kind *term = term_of(node);
        if (term) {
            operand *x = &stack[++top];
            x->kind = term->tile(mask, node, region);
            if (x->kind == AM_MIXED) term->bits(mask, node, region, x->bits);
        } else if (node->kind == AM_NOT) {
            invert(&stack[top], region);
        } else {
            top--;
            combine(node->kind, &stack[top], &stack[top + 1], region);
        }
    }
    if (stack[0].kind != AM_MIXED) return stack[0].kind;
    uint64_t any = 0, all = UINT64_MAX;
    for (ptrdiff_t r = 0; r < region->rows; r++) {
        bits[r] = stack[0].bits[r];
        any |= bits[r];
        all &= bits[r];
    }
    return !any ? AM_DEAD : all == am_low_bits(region->columns) ? AM_FULL : AM_MIXED;
}

uint64_t am_mask_seen_in(const am_mask *mask, const am_region *tile, am_side side)
{
    uint64_t bits[AM_TILE_ROWS], seen = 0;
    const am_tile kind = am_mask_bits(mask, tile, bits);
    if (kind == AM_FULL) return am_low_bits(side == AM_QUERIES ? tile->rows : tile->columns);
    for (ptrdiff_t r = 0; kind == AM_MIXED && r < tile->rows; r++)
        seen |= side == AM_KEYS ? bits[r] : (uint64_t)(bits[r] != 0) << r;
    return seen;
}

uint64_t am_mask_row(const am_mask *mask, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q, ptrdiff_t k,
                     ptrdiff_t columns)
{
    const am_region region = {.b = b, .h = h, .q = q, .rows = 1, .k = k, .columns = columns};
    uint64_t stack[AM_MASK_DEPTH];
    int top = -1;
    for (const am_node *node = mask->nodes; node < mask->nodes + mask->node_count; node++) {
        const am_term_kind *term = term_of(node);
        if (term) {
            term->bits(mask, node, &region, &stack[++top]);
            continue;
        }
        if (node->kind == AM_NOT) {
            stack[top] ^= am_low_bits(columns);
            continue;
        }
        const uint64_t right = stack[top--];
        stack[top] = node->kind == AM_AND  ? stack[top] & right
                     : node->kind == AM_OR ? stack[top] | right
                                           : stack[top] ^ right;
    }
    return stack[0];
}
