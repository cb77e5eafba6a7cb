/* flash_cuts.c – how queries are cut to blocks, and keys to tiles. */
#include "core/flash_cuts.h"

#include <stdlib.h>

enum {
    MOST = AM_MOST_CUT,
    MANY = 1 << 24, /* tokens, whose borders would take seconds to find */
};

/* The tokens of one batch row, which are cut. */
typedef struct {
    const am_mask *mask;
    am_side side;
    ptrdiff_t b, tokens;
    ptrdiff_t group; /* query heads that share a key head; 0: no keys are exclusive */
} line;

static am_query_kind exclusive_kind(ptrdiff_t queries, ptrdiff_t group)
{
    return queries <= AM_FEW_ROWS / group ? AM_EXCLUSIVE_FEW_ROWS
           : queries <= MOST / group      ? AM_EXCLUSIVE_ONE_BLOCK
                                          : AM_EXCLUSIVE_KEYS;
}

static am_range keys_of(const line *l, ptrdiff_t query, ptrdiff_t count)
{
    return am_mask_keys(l->mask, l->b, 0, query, count);
}

/* Whether these queries are a sequence whose keys the queries before and behind it do not see. False if
 * several such sequences fit a range and see no more keys than they have queries: one by one these are 0.77
 * to 0.98 times as fast, unless heads share keys. */
static bool has_exclusive_keys(const line *l, ptrdiff_t begin, ptrdiff_t end)
{
    const ptrdiff_t queries = end - begin;
    if (l->group == 0) return false;
    const am_range own = keys_of(l, begin, queries);
    if (own.begin >= own.end) return false;
    if (l->group == 1 && queries <= MOST / 2 && own.end - own.begin <= queries) return false;
    if (begin > 0 && keys_of(l, begin - 1, 1).end > own.begin) return false;
    const am_range behind = end < l->tokens ? keys_of(l, end, 1) : (am_range){0, 0};
    return behind.begin >= behind.end || own.end <= behind.begin;
}

/* Where the range that begins there ends: it is a sequence with exclusive keys, or a large one, or as many
 * small ones as fit, or a part of a long one. Where queries and keys have the same borders, they have the
 * same ranges. */
static ptrdiff_t end_of(const line *l, ptrdiff_t begin, am_query_kind *kind)
{
    const ptrdiff_t last = am_min(begin + MOST, l->tokens);
    ptrdiff_t end = begin;
    *kind = AM_SHARED_KEYS;
    for (uint64_t borders = am_mask_borders(l->mask, l->b, l->side, begin); end < last;
         borders &= borders - 1) {
        const ptrdiff_t next = borders ? begin + 1 + __builtin_ctzll(borders) : last;
        /* What goes on behind the last token of the range is a long sequence, or a part of one. */
        const bool whole = borders || next == l->tokens, first = end == begin,
                   exclusive = whole && has_exclusive_keys(l, end, next);
        if (exclusive || !whole || next - end > MOST / 2) {
            if (first && exclusive) *kind = exclusive_kind(next - end, l->group);
            return first ? next : end;
        }
        end = next;
    }
    return end;
}

static bool add(am_cuts *cuts, ptrdiff_t count, am_range range)
{
    if (count == cuts->capacity) {
        const ptrdiff_t capacity = am_max(2 * cuts->capacity, MOST);
        am_range *ranges = realloc(cuts->ranges, (size_t)capacity * sizeof *ranges);
        if (!ranges) return false;
        cuts->ranges = ranges, cuts->capacity = capacity;
    }
    cuts->ranges[count] = range;
    return true;
}

/* To so many kinds of ranges. */
static am_status cut(am_cuts *cuts, int kinds, line l)
{
    const ptrdiff_t batch = l.mask->batch;
    ptrdiff_t counts[AM_QUERY_KINDS] = {0};
    for (int i = 0; i < kinds; i++) {
        cuts[i].first = malloc((size_t)(batch + 1) * sizeof *cuts[i].first);
        if (!cuts[i].first || !add(&cuts[i], 0, (am_range){0, 0})) return AM_NO_MEMORY;
    }
    for (l.b = 0; l.b < batch; l.b++) {
        for (int i = 0; i < kinds; i++) cuts[i].first[l.b] = counts[i];
        for (ptrdiff_t begin = 0, end; begin < l.tokens; begin = end) {
            am_query_kind kind;
            end = end_of(&l, begin, &kind);
            if (!add(&cuts[kind], counts[kind]++, (am_range){begin, end})) return AM_NO_MEMORY;
        }
        for (int i = 0; i < kinds; i++) cuts[i].count = am_max(cuts[i].count, counts[i] - cuts[i].first[l.b]);
    }
    for (int i = 0; i < kinds; i++) cuts[i].first[batch] = counts[i];
    return AM_OK;
}

static bool is_parted(const am_mask *mask, ptrdiff_t tokens)
{
    return am_mask_has_borders(mask) && tokens <= MANY / am_max(mask->batch, 1);
}

am_status am_cuts_make(am_cuts *cuts, const am_mask *mask, am_side side, bool by_mask)
{
    const ptrdiff_t tokens = side == AM_QUERIES ? mask->queries : mask->keys;
    *cuts = (am_cuts){.tokens = tokens, .count = am_ceil_div(tokens, MOST)};
    if (!by_mask || !is_parted(mask, tokens)) return AM_OK;
    cuts->count = 0;
    return cut(cuts, 1, (line){.mask = mask, .side = side, .tokens = tokens});
}

am_status am_cuts_of_queries(am_cuts cuts[AM_QUERY_KINDS], const am_mask *mask, ptrdiff_t group)
{
    const ptrdiff_t tokens = mask->queries;
    for (int kind = 0; kind < AM_QUERY_KINDS; kind++) cuts[kind] = (am_cuts){.tokens = tokens};
    if (is_parted(mask, tokens))
        return cut(cuts, AM_QUERY_KINDS,
                   (line){.mask = mask, .side = AM_QUERIES, .tokens = tokens, .group = group});
    const am_query_kind kind = tokens <= MOST ? exclusive_kind(tokens, group) : AM_SHARED_KEYS;
    cuts[kind].count = am_ceil_div(tokens, MOST);
    return AM_OK;
}

void am_cuts_free(am_cuts *cuts)
{
    free(cuts->ranges);
    free(cuts->first);
}

ptrdiff_t am_cut_of(const am_cuts *cuts, ptrdiff_t b, ptrdiff_t token)
{
    ptrdiff_t first = token / MOST, last = cuts->ranges ? cuts->first[b + 1] - cuts->first[b] - 1 : first;
    while (first < last) {
        ptrdiff_t middle = last - (last - first) / 2;
        if (am_cut(cuts, b, middle).begin <= token)
            first = middle;
        else
            last = middle - 1;
    }
    return first;
}

ptrdiff_t am_longest_cut(const am_cuts *cuts, ptrdiff_t batch)
{
    if (!cuts->ranges) return am_min(cuts->tokens, MOST);
    ptrdiff_t most = 0;
    for (ptrdiff_t i = 0; i < cuts->first[batch]; i++)
        most = am_max(most, cuts->ranges[i].end - cuts->ranges[i].begin);
    return most;
}

ptrdiff_t am_count_cuts(const am_cuts *cuts, ptrdiff_t batch)
{
    return cuts->ranges ? cuts->first[batch] : batch * cuts->count;
}
