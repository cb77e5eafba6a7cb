/* seen.c – which keys are seen, and which queries see any key. The answers are exact for every expression:
 * am_mask_keys says where to look, and tiles are read from both ends of this range until one has a live
 * pair. */
#include "core/masks/mask.h"

#include "core/runtime/sizes.h"
#include "core/masks/terms.h"

enum { ROWS = AM_TILE_ROWS, COLUMNS = AM_TILE_COLUMNS };

/* Summaries describe aligned tiles, so a question about an aligned tile seldom has to read arrays. */
static ptrdiff_t next_multiple(ptrdiff_t i, ptrdiff_t size) { return (i / size + 1) * size; }
static ptrdiff_t last_multiple(ptrdiff_t i, ptrdiff_t size) { return (i - 1) / size * size; }

static bool sees(const am_mask *mask, const am_region *p, ptrdiff_t q, ptrdiff_t k)
{
    return am_mask_row(mask, p->b, p->h, q, k, 1);
}

/* The keys that some rows of a tile see, as bits. */
static uint64_t keys_of_tile(const am_mask *mask, const am_region *p)
{
    return p->rows == 1 ? am_mask_row(mask, p->b, p->h, p->q, p->k, p->columns)
                        : am_mask_seen_in(mask, p, AM_KEYS);
}

/* The first key of a region that is seen, or where its keys end. */
static ptrdiff_t first_key(const am_mask *mask, const am_region *p, ptrdiff_t grain)
{
    const ptrdiff_t q_end = p->q + p->rows, k_end = p->k + p->columns;
    if (p->columns <= 0 || sees(mask, p, p->q, p->k)) return p->k;
    am_region part = *p;
    for (part.k = p->k; part.k < k_end; part.k += part.columns) {
        ptrdiff_t found = k_end;
        part.columns = am_min(next_multiple(part.k, COLUMNS), k_end) - part.k;
        for (part.q = p->q; part.q < q_end && !(found < k_end && found / grain == part.k / grain);
             part.q += part.rows) {
            part.rows = am_min(next_multiple(part.q, ROWS), q_end) - part.q;
            const uint64_t keys = keys_of_tile(mask, &part);
            if (keys) found = am_min(found, part.k + __builtin_ctzll(keys));
        }
        if (found < k_end) return found;
    }
    return k_end;
}

/* One more than the last key of a region that is seen, or its first key. */
static ptrdiff_t last_key(const am_mask *mask, const am_region *p, ptrdiff_t grain, bool *by_last)
{
    const ptrdiff_t q_end = p->q + p->rows, k_end = p->k + p->columns;
    if (p->columns <= 0) return k_end;
    if (sees(mask, p, q_end - 1, k_end - 1)) {
        *by_last = true;
        return k_end;
    }
    am_region part = *p;
    for (ptrdiff_t end = k_end; end > p->k; end = part.k) {
        ptrdiff_t found = p->k;
        part.k = am_max(last_multiple(end, COLUMNS), p->k), part.columns = end - part.k;
        for (ptrdiff_t last = q_end; last > p->q; last = part.q) {
            if (found > p->k && (found - 1) / grain == (end - 1) / grain) break;
            part.q = am_max(last_multiple(last, ROWS), p->q), part.rows = last - part.q;
            const uint64_t keys = keys_of_tile(mask, &part);
            if (keys) found = am_max(found, part.k + COLUMNS - __builtin_clzll(keys));
        }
        if (found > p->k) return found;
    }
    return p->k;
}

/* Widens what is seen by a region. Only what lies outside of it is read. */
static void widen(const am_mask *mask, const am_region *p, ptrdiff_t grain, am_seen *seen)
{
    const ptrdiff_t end = p->k + p->columns;
    am_range *keys = &seen->keys;
    am_region part = *p;
    if (p->k / grain < keys->begin / grain) {
        part.columns = am_min(end, keys->begin) - p->k;
        const ptrdiff_t first = first_key(mask, &part, grain);
        if (first < p->k + part.columns) *keys = (am_range){first, am_max(keys->end, first + 1)};
    }
    if (keys->end == 0 || (end - 1) / grain <= (keys->end - 1) / grain) return;
    part.k = am_max(p->k, keys->end), part.columns = end - part.k;
    keys->end = am_max(keys->end, last_key(mask, &part, grain, &seen->by_last));
}

am_seen am_mask_seen(const am_mask *mask, ptrdiff_t b, am_range heads, am_range queries, ptrdiff_t grain)
{
    am_region p = {.b = b, .q = queries.begin, .rows = queries.end - queries.begin};
    am_seen seen = {.keys = {PTRDIFF_MAX, 0}};
    for (p.h = heads.begin; p.h < heads.end; p.h++) {
        const am_range keys = am_mask_keys(mask, b, p.h, p.q, p.rows);
        if (keys.begin >= keys.end) continue;
        p.k = keys.begin, p.columns = keys.end - keys.begin;
        if (mask->exact_keys)
            seen.keys = (am_range){am_min(seen.keys.begin, keys.begin), am_max(seen.keys.end, keys.end)};
        else
            widen(mask, &p, grain, &seen);
    }
    if (seen.keys.end == 0) return (am_seen){.by_last = false};
    if (!mask->exact_keys) {
        seen.keys.begin = seen.keys.begin / grain * grain;
        seen.keys.end = am_min(am_ceil_div(seen.keys.end, grain) * grain, mask->keys);
    }
    return seen;
}

/* Whether a query sees a key; false also if only tiles tell. */
static bool sees_any(const am_mask *mask, const am_region *p, ptrdiff_t q)
{
    const am_range keys = am_mask_keys(mask, p->b, p->h, q, 1);
    if (keys.begin >= keys.end) return false;
    return mask->exact_keys || sees(mask, p, q, keys.begin) || sees(mask, p, q, keys.end - 1);
}

/* How many of up to ROWS queries there are up to the last one that sees a key. */
static ptrdiff_t count_to_last(const am_mask *mask, const am_region *p)
{
    const am_range keys = am_mask_keys(mask, p->b, p->h, p->q, p->rows);
    ptrdiff_t found = 0;
    for (ptrdiff_t k = keys.begin, next; k < keys.end && found < p->rows; k = next) {
        next = am_min(next_multiple(k, COLUMNS), keys.end);
        const am_region tile = {
            .b = p->b, .h = p->h, .q = p->q, .rows = p->rows, .k = k, .columns = next - k};
        const uint64_t seen = am_mask_seen_in(mask, &tile, AM_QUERIES);
        if (seen) found = am_max(found, 64 - __builtin_clzll(seen));
    }
    return found;
}

ptrdiff_t am_mask_queries_end(const am_mask *mask, ptrdiff_t b, am_range heads, am_range queries)
{
    ptrdiff_t found = queries.begin;
    am_region p = {.b = b};
    for (p.h = heads.begin; p.h < heads.end && found < queries.end; p.h++) {
        if (sees_any(mask, &p, queries.end - 1)) return queries.end;
        ptrdiff_t count = 0;
        for (ptrdiff_t end = queries.end; count == 0 && end > found; end = p.q) {
            p.q = am_max(last_multiple(end, ROWS), found), p.rows = end - p.q;
            count = count_to_last(mask, &p);
        }
        if (count > 0) found = p.q + count;
    }
    return found;
}
