/* flash_cuts.c – how queries are cut to blocks, and keys to tiles. */
#include "core/flash_cuts.h"

#include <stdlib.h>

enum {
    MOST = AM_MOST_CUT,
    MANY = 1 << 28, /* tokens, of which to find the borders would take long */
};

/* The tokens of one batch row, which are cut. */
typedef struct {
    const am_mask *mask;
    am_side side;
    bool by_mask;
    ptrdiff_t b, tokens;
    ptrdiff_t group; /* heads of queries that share keys; 0: no sequence is alone */
} line;

/* Where the sequence that begins there ends, or a token more than a range may have. */
static ptrdiff_t end_of(const line *l, ptrdiff_t begin)
{
    const uint64_t borders = am_mask_borders(l->mask, l->b, l->side, begin);
    return am_min(begin + 1 + (borders ? __builtin_ctzll(borders) : MOST), l->tokens);
}

/* Whether these queries are a sequence whose keys those before and behind it do not see, and one block takes
 * all of a group. Not if many fit a range, and see no more keys than they are: such are 0.77 to 0.98 times as
 * fast one by one, unless heads share keys. */
static bool is_alone(const line *l, ptrdiff_t begin, ptrdiff_t end)
{
    const ptrdiff_t queries = end - begin;
    if (l->group == 0 || queries > MOST / l->group) return false;
    if (!l->by_mask) return true;
    const am_range none = {0, 0}, own = am_mask_keys(l->mask, l->b, 0, begin, end - begin),
                   before = begin > 0 ? am_mask_keys(l->mask, l->b, 0, begin - 1, 1) : none,
                   behind = end < l->tokens ? am_mask_keys(l->mask, l->b, 0, end, 1) : none;
    const bool many = l->group == 1 && queries <= MOST / 2 && own.end - own.begin <= queries;
    return own.begin < own.end && !many && before.end <= own.begin &&
           (behind.begin >= behind.end || own.end <= behind.begin);
}

/* The end of a range of as many whole sequences as it takes, or of a part of a long one. */
static ptrdiff_t fill(const line *l, ptrdiff_t begin)
{
    ptrdiff_t end = end_of(l, begin);
    if (end - begin > MOST) return begin + MOST;
    for (ptrdiff_t next; end < l->tokens; end = next) {
        next = end_of(l, end);
        if (next - begin > MOST || is_alone(l, end, next)) break;
    }
    return end;
}

/* Writes the ranges, those of others and those alone, unless there is no room for them; counts them. */
static void cut(const line *l, am_range *ranges[2], ptrdiff_t counts[2])
{
    counts[0] = counts[1] = 0;
    for (ptrdiff_t begin = 0, end; begin < l->tokens; begin = end) {
        end = end_of(l, begin);
        const bool alone = is_alone(l, begin, end);
        if (!alone) end = fill(l, begin);
        if (ranges[alone]) ranges[alone][counts[alone]] = (am_range){begin, end};
        counts[alone]++;
    }
}

/* Others, and those alone. */
static am_status make(am_cuts *cuts[2], line l)
{
    const ptrdiff_t batch = l.mask->batch;
    l.tokens = l.side == AM_QUERIES ? l.mask->queries : l.mask->keys;
    *cuts[0] = *cuts[1] = (am_cuts){.tokens = l.tokens};
    l.by_mask = l.by_mask && am_mask_has_borders(l.mask) && l.tokens <= MANY / am_max(batch, 1);
    if (!l.by_mask) {
        cuts[l.tokens > 0 && is_alone(&l, 0, l.tokens)]->count = am_ceil_div(l.tokens, MOST);
        return AM_OK;
    }
    ptrdiff_t counts[2];
    for (l.b = 0; l.b < batch; l.b++) {
        cut(&l, (am_range *[2]){NULL, NULL}, counts);
        for (int i = 0; i < 2; i++) cuts[i]->count = am_max(cuts[i]->count, counts[i]);
    }
    for (int i = 0; i < 2; i++) {
        cuts[i]->ranges = malloc((size_t)am_max(batch * cuts[i]->count, 1) * sizeof *cuts[i]->ranges);
        if (!cuts[i]->ranges) return AM_NO_MEMORY;
    }
    for (l.b = 0; l.b < batch; l.b++) {
        am_range *ranges[2] = {cuts[0]->ranges + l.b * cuts[0]->count,
                               cuts[1]->ranges + l.b * cuts[1]->count};
        cut(&l, ranges, counts);
        for (int i = 0; i < 2; i++) {
            while (counts[i] < cuts[i]->count) ranges[i][counts[i]++] = (am_range){l.tokens, l.tokens};
        }
    }
    return AM_OK;
}

am_status am_cuts_make(am_cuts *cuts, const am_mask *mask, am_side side, bool by_mask)
{
    am_cuts none;
    am_status status =
        make((am_cuts *[2]){cuts, &none}, (line){.mask = mask, .side = side, .by_mask = by_mask});
    am_cuts_free(&none);
    return status;
}

am_status am_cuts_of_queries(am_cuts *alone, am_cuts *others, const am_mask *mask, ptrdiff_t group)
{
    return make((am_cuts *[2]){others, alone},
                (line){.mask = mask, .side = AM_QUERIES, .by_mask = true, .group = group});
}

void am_cuts_free(am_cuts *cuts)
{
    free(cuts->ranges);
    cuts->ranges = NULL;
}

ptrdiff_t am_cut_of(const am_cuts *cuts, ptrdiff_t b, ptrdiff_t token)
{
    ptrdiff_t first = token / MOST, last = cuts->ranges ? cuts->count - 1 : first;
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
    for (ptrdiff_t i = 0; i < batch * cuts->count; i++)
        most = am_max(most, cuts->ranges[i].end - cuts->ranges[i].begin);
    return most;
}
