/* flash_ranges.c – the ranges of tokens that blocks and tiles follow. */
#include "core/flash_ranges.h"

#include <stdlib.h>

enum {
    MOST = AM_MOST_RANGE,
    MANY = 1 << 24, /* tokens, whose boundaries would take seconds to find */
};

/* The tokens of one batch row, which are divided into ranges. */
typedef struct {
    const am_mask *mask;
    am_side side;
    ptrdiff_t b, tokens;
    ptrdiff_t group; /* query heads that share a key head; 0: no keys are exclusive */
} side_tokens;

static am_query_kind exclusive_kind(ptrdiff_t queries, ptrdiff_t group)
{
    return queries <= AM_FEW_ROWS / group ? AM_EXCLUSIVE_FEW_ROWS
           : queries <= MOST / group      ? AM_EXCLUSIVE_ONE_BLOCK
                                          : AM_EXCLUSIVE_KEYS;
}

static am_range keys_of(const side_tokens *l, ptrdiff_t query, ptrdiff_t count)
{
    return am_mask_keys(l->mask, l->b, 0, query, count);
}

/* Whether these queries are a sequence whose keys the queries before and behind it do not see. False if
 * several such sequences fit a range and see no more keys than they have queries: one by one these are 0.77
 * to 0.98 times as fast, unless heads share keys. */
static bool has_exclusive_keys(const side_tokens *l, ptrdiff_t begin, ptrdiff_t end)
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
 * small ones as fit, or a part of a long one. Where queries and keys have the same boundaries, they have the
 * same ranges. */
static ptrdiff_t end_of(const side_tokens *l, ptrdiff_t begin, am_query_kind *kind)
{
    const ptrdiff_t last = am_min(begin + MOST, l->tokens);
    ptrdiff_t end = begin;
    *kind = AM_SHARED_KEYS;
    for (uint64_t boundaries = am_mask_boundaries(l->mask, l->b, l->side, begin); end < last;
         boundaries &= boundaries - 1) {
        const ptrdiff_t next = boundaries ? begin + 1 + __builtin_ctzll(boundaries) : last;
        /* What continues behind the last token of the range is a long sequence, or a part of one. */
        const bool whole = boundaries || next == l->tokens, first = end == begin,
                   exclusive = whole && has_exclusive_keys(l, end, next);
        if (exclusive || !whole || next - end > MOST / 2) {
            if (first && exclusive) *kind = exclusive_kind(next - end, l->group);
            return first ? next : end;
        }
        end = next;
    }
    return end;
}

static bool add(am_ranges *ranges, ptrdiff_t count, am_range range)
{
    if (count == ranges->capacity) {
        const ptrdiff_t capacity = am_max(2 * ranges->capacity, MOST);
        am_range *list = realloc(ranges->list, (size_t)capacity * sizeof *list);
        if (!list) return false;
        ranges->list = list, ranges->capacity = capacity;
    }
    ranges->list[count] = range;
    return true;
}

/* Divides the tokens into ranges of so many kinds. */
static am_status find_ranges(am_ranges *ranges, int kinds, side_tokens l)
{
    const ptrdiff_t batch = l.mask->batch;
    ptrdiff_t counts[AM_QUERY_KINDS] = {0};
    for (int i = 0; i < kinds; i++) {
        ranges[i].first = malloc((size_t)(batch + 1) * sizeof *ranges[i].first);
        if (!ranges[i].first || !add(&ranges[i], 0, (am_range){0, 0})) return AM_NO_MEMORY;
    }
    for (l.b = 0; l.b < batch; l.b++) {
        for (int i = 0; i < kinds; i++) ranges[i].first[l.b] = counts[i];
        for (ptrdiff_t begin = 0, end; begin < l.tokens; begin = end) {
            am_query_kind kind;
            end = end_of(&l, begin, &kind);
            if (!add(&ranges[kind], counts[kind]++, (am_range){begin, end})) return AM_NO_MEMORY;
        }
        for (int i = 0; i < kinds; i++)
            ranges[i].count = am_max(ranges[i].count, counts[i] - ranges[i].first[l.b]);
    }
    for (int i = 0; i < kinds; i++) ranges[i].first[batch] = counts[i];
    return AM_OK;
}

static bool has_boundaries(const am_mask *mask, ptrdiff_t tokens)
{
    return am_mask_has_boundaries(mask) && tokens <= MANY / am_max(mask->batch, 1);
}

am_status am_ranges_make(am_ranges *ranges, const am_mask *mask, am_side side, bool by_mask)
{
    const ptrdiff_t tokens = side == AM_QUERIES ? mask->queries : mask->keys;
    *ranges = (am_ranges){.tokens = tokens, .count = am_ceil_div(tokens, MOST)};
    if (!by_mask || !has_boundaries(mask, tokens)) return AM_OK;
    ranges->count = 0;
    return find_ranges(ranges, 1, (side_tokens){.mask = mask, .side = side, .tokens = tokens});
}

am_status am_ranges_of_queries(am_ranges ranges[AM_QUERY_KINDS], const am_mask *mask, ptrdiff_t group)
{
    const ptrdiff_t tokens = mask->queries;
    for (int kind = 0; kind < AM_QUERY_KINDS; kind++) ranges[kind] = (am_ranges){.tokens = tokens};
    if (has_boundaries(mask, tokens))
        return find_ranges(ranges, AM_QUERY_KINDS,
                           (side_tokens){.mask = mask, .side = AM_QUERIES, .tokens = tokens, .group = group});
    const am_query_kind kind = tokens <= MOST ? exclusive_kind(tokens, group) : AM_SHARED_KEYS;
    ranges[kind].count = am_ceil_div(tokens, MOST);
    return AM_OK;
}

void am_ranges_free(am_ranges *ranges)
{
    free(ranges->list);
    free(ranges->first);
}

ptrdiff_t am_range_index(const am_ranges *ranges, ptrdiff_t b, ptrdiff_t token)
{
    ptrdiff_t first = token / MOST, last = ranges->list ? ranges->first[b + 1] - ranges->first[b] - 1 : first;
    while (first < last) {
        ptrdiff_t middle = last - (last - first) / 2;
        if (am_range_at(ranges, b, middle).begin <= token)
            first = middle;
        else
            last = middle - 1;
    }
    return first;
}

ptrdiff_t am_longest_range(const am_ranges *ranges, ptrdiff_t batch)
{
    if (!ranges->list) return am_min(ranges->tokens, MOST);
    ptrdiff_t most = 0;
    for (ptrdiff_t i = 0; i < ranges->first[batch]; i++)
        most = am_max(most, ranges->list[i].end - ranges->list[i].begin);
    return most;
}

ptrdiff_t am_count_ranges(const am_ranges *ranges, ptrdiff_t batch)
{
    return ranges->list ? ranges->first[batch] : batch * ranges->count;
}
