/* partition.c – divides the queries and keys of a call into sections, blocks and tiles. */
#include "core/attention/plan/partition.h"

#include <stdlib.h>
#include <string.h>

enum {
    MOST = AM_MOST_RANGE,
    FIRST = 8,      /* elements of a list at first: a size that the system allocates at once */
    MANY = 1 << 24, /* tokens, whose boundaries would take seconds to find */
};

/* One side of one batch row. */
typedef struct {
    const am_mask *mask;
    am_side side;
    ptrdiff_t b, tokens;
} row_side;

/* The first boundary of the mask behind token `begin`, or `limit` if that comes first. */
static ptrdiff_t next_boundary(const row_side *s, ptrdiff_t begin, ptrdiff_t limit)
{
    for (; begin < limit; begin += MOST) {
        const uint64_t boundaries = am_mask_boundaries(s->mask, s->b, s->side, begin);
        if (boundaries) return am_min(begin + 1 + __builtin_ctzll(boundaries), limit);
    }
    return limit;
}

static bool grow(void **list, ptrdiff_t count, ptrdiff_t *capacity, size_t size)
{
    if (count < *capacity) return true;
    const ptrdiff_t wanted = am_max(2 * *capacity, FIRST);
    void *longer = realloc(*list, (size_t)wanted * size);
    if (!longer) return false;
    *list = longer, *capacity = wanted;
    return true;
}

static am_status add_range(am_ranges *ranges, am_range range)
{
    void *list = ranges->list;
    if (!grow(&list, ranges->count, &ranges->capacity, sizeof range)) return AM_NO_MEMORY;
    ranges->list = list;
    ranges->list[ranges->count++] = range;
    return AM_OK;
}

/* --- Sections --- */

static bool sees_keys(const am_section *section) { return section->keys.begin < section->keys.end; }

/* Joins two sections. */
static void join(am_section *section, const am_section *other)
{
    section->queries = (am_range){am_min(section->queries.begin, other->queries.begin),
                                  am_max(section->queries.end, other->queries.end)};
    if (!sees_keys(section))
        section->keys = other->keys;
    else if (sees_keys(other))
        section->keys = (am_range){am_min(section->keys.begin, other->keys.begin),
                                   am_max(section->keys.end, other->keys.end)};
}

/* The sections of a batch row, in the order of queries. */
typedef struct {
    am_sections *sections;
    ptrdiff_t first; /* the first of them */
    ptrdiff_t end;   /* one more than the last key of all of them */
    int32_t
        *owners; /* 1 + a query of the section that has a key, or 0; NULL if sections see no keys of others */
    bool claimed; /* owners are set: not as long as keys come in the order of queries */
} row_sections;

/* The section that a query belongs to. */
static ptrdiff_t section_with(const row_sections *row, ptrdiff_t query)
{
    const am_section *list = row->sections->list + row->first;
    const ptrdiff_t count = row->sections->count - row->first;
    return row->first + am_last_up_to(&list->queries.begin, count, sizeof *list, query);
}

/* Gives keys that no section has to the last section. Returns the first section that has any of the others,
 * or `before` if that comes first. */
static ptrdiff_t claim(const row_sections *row, am_range keys, ptrdiff_t before)
{
    const am_section *list = row->sections->list;
    const int32_t owner = 1 + (int32_t)list[row->sections->count - 1].queries.begin;
    for (ptrdiff_t k = keys.begin; k < keys.end;) {
        if (row->owners[k] == 0) {
            row->owners[k++] = owner;
            continue;
        }
        const ptrdiff_t found = section_with(row, row->owners[k] - 1);
        before = am_min(before, found), k = am_max(list[found].keys.end, k + 1);
    }
    return before;
}

/* Gives each section but the last its keys. */
static void claim_all(row_sections *row)
{
    row->claimed = true;
    memset(row->owners, 0, (size_t)row->sections->tiles.tokens * sizeof *row->owners);
    for (ptrdiff_t i = row->first; i < row->sections->count - 1; i++) {
        const am_section *section = &row->sections->list[i];
        for (ptrdiff_t k = section->keys.begin; k < section->keys.end; k++)
            row->owners[k] = 1 + (int32_t)section->queries.begin;
    }
}

/* Joins the last section with each section that has keys between its first and its last key, and with all
 * sections in between. A section owns all keys between its ends. So each key is claimed once, and the time is
 * that of reading the keys, in any order. */
static void join_keys(const row_sections *row)
{
    am_section *list = row->sections->list;
    ptrdiff_t before = row->sections->count - 1, joined = before;
    am_section all = list[before];
    for (am_range claimed = {all.keys.begin, all.keys.begin}; am_length(claimed) < am_length(all.keys);) {
        const am_range keys = all.keys;
        before = claim(row, (am_range){keys.begin, claimed.begin}, before);
        before = claim(row, (am_range){claimed.end, keys.end}, before);
        claimed = keys;
        while (joined > before) join(&all, &list[--joined]);
    }
    list[before] = all;
    row->sections->count = before + 1;
}

/* Lists a section, and joins it with others. Sections that see no keys are joined, too, so that at most one
 * lies between two others. */
static am_status add_section(row_sections *row, ptrdiff_t b, am_range queries, am_range keys)
{
    am_sections *sections = row->sections;
    void *list = sections->list;
    if (!grow(&list, sections->count, &sections->capacity, sizeof *sections->list)) return AM_NO_MEMORY;
    sections->list = list;
    am_section *section = &sections->list[sections->count++];
    *section = (am_section){.b = b, .queries = queries, .keys = keys};
    if (row->owners && sees_keys(section)) {
        const bool behind = keys.begin >= row->end;
        if (!behind && !row->claimed) claim_all(row);
        row->end = am_max(row->end, keys.end);
        if (row->claimed) join_keys(row);
    } else if (!sees_keys(section) && sections->count - 1 > row->first && !sees_keys(section - 1))
        join(section - 1, section), sections->count--;
    return AM_OK;
}

static int compare_keys(const void *a, const void *b)
{
    const am_section *x = a, *y = b;
    const ptrdiff_t i = x->keys.begin, j = y->keys.begin;
    return i != j ? (i > j) - (i < j)
                  : (x->queries.begin > y->queries.begin) - (x->queries.begin < y->queries.begin);
}

/* Brings the sections of a batch row into the order of keys. */
static void order_by_keys(const row_sections *row)
{
    am_section *list = row->sections->list + row->first;
    const ptrdiff_t count = row->sections->count - row->first;
    ptrdiff_t key = 0;
    bool ordered = true;
    for (ptrdiff_t i = 0; i < count; i++) {
        if (!sees_keys(&list[i])) continue;
        ordered &= list[i].keys.begin >= key, key = list[i].keys.end;
    }
    if (!ordered) qsort(list, (size_t)count, sizeof *list, compare_keys);
}

/* How batch rows are divided into sections. */
typedef struct {
    bool by_boundaries; /* else sections begin with batch rows */
    bool leaves_rest;   /* queries behind the last one that sees a key are left to a section without keys */
    bool has_rest;      /* some queries are left to a section without keys */
    int32_t *owners;    /* memory for the owners of a batch row's keys; NULL unless by boundaries */
} division;

/* Lists the sections of a batch row, without their blocks and tiles. */
static am_status list_sections(am_sections *sections, const am_mask *mask, ptrdiff_t b, division *d)
{
    row_sections row = {.sections = sections, .first = sections->count, .owners = d->owners};
    const row_side side = {.mask = mask, .side = AM_QUERIES, .b = b, .tokens = mask->queries};
    const am_range heads = {0, mask->own_heads};
    am_status status = AM_OK;
    for (ptrdiff_t begin = 0, end; status == AM_OK && begin < mask->queries; begin = end) {
        end = d->by_boundaries ? next_boundary(&side, begin, mask->queries) : mask->queries;
        const am_range all = {begin, end};
        const am_seen seen = am_mask_seen(mask, b, heads, all, d->by_boundaries ? 1 : MOST);
        const bool known = seen.by_last || seen.keys.begin == seen.keys.end || end - begin == 1;
        const ptrdiff_t last = known || !d->leaves_rest ? end : am_mask_queries_end(mask, b, heads, all);
        if (last > begin) status = add_section(&row, b, (am_range){begin, last}, seen.keys);
        if (last == end || status != AM_OK) continue;
        status = add_section(&row, b, (am_range){last, end}, (am_range){0, 0});
        d->has_rest = true;
    }
    order_by_keys(&row);
    return status;
}

/* --- Blocks and tiles --- */

/* Where the range that begins at `begin` ends. Boundaries cut a section into parts. A range is one large
 * part, or as many small parts as fit, or a piece of a long part. */
static ptrdiff_t range_end(const row_side *s, ptrdiff_t begin, ptrdiff_t limit)
{
    const ptrdiff_t last = am_min(begin + MOST, limit);
    ptrdiff_t end = begin;
    while (end < last) {
        const ptrdiff_t next = next_boundary(s, end, am_min(last + 1, limit));
        if (next > last || next - end > MOST / 2) return end == begin ? am_min(next, last) : end;
        end = next;
    }
    return end;
}

/* Where the part begins between two boundaries in which `key` lies, not before `begin`. */
static ptrdiff_t part_begin(const row_side *s, ptrdiff_t begin, ptrdiff_t key)
{
    for (ptrdiff_t next; (next = next_boundary(s, begin, key + 1)) <= key;) begin = next;
    return begin;
}

static am_status list_ranges(am_sections *sections, const am_mask *mask)
{
    row_side q = {.mask = mask, .side = AM_QUERIES, .b = -1, .tokens = mask->queries},
             k = {.mask = mask, .side = AM_KEYS, .b = -1, .tokens = mask->keys};
    ptrdiff_t key = 0; /* no key before it belongs to this section or those behind it */
    am_status status = AM_OK;
    for (am_section *section = sections->list; section < sections->list + sections->count; section++) {
        if (section->b != q.b) key = 0;
        q.b = k.b = section->b;
        section->blocks.begin = sections->blocks.count;
        for (ptrdiff_t begin = section->queries.begin, end; status == AM_OK && begin < section->queries.end;
             begin = end) {
            end = range_end(&q, begin, section->queries.end);
            status = add_range(&sections->blocks, (am_range){begin, end});
        }
        section->blocks.end = sections->blocks.count;
        section->tiles = (am_range){sections->tiles.count, sections->tiles.count};
        if (!sees_keys(section)) continue;
        for (ptrdiff_t begin = part_begin(&k, key, section->keys.begin), end;
             status == AM_OK && begin < section->keys.end; begin = end) {
            end = range_end(&k, begin, section->keys.end);
            if (end > section->keys.begin) status = add_range(&sections->tiles, (am_range){begin, end});
        }
        section->tiles.end = sections->tiles.count;
        key = section->keys.end;
    }
    return status;
}

static void number(am_ranges *ranges, ptrdiff_t batch)
{
    ranges->row = am_ceil_div(ranges->tokens, MOST);
    ranges->count = batch * ranges->row;
}

/* Numbers ranges of 64 tokens. */
static void number_ranges(am_sections *sections, ptrdiff_t batch)
{
    number(&sections->blocks, batch);
    number(&sections->tiles, batch);
    for (am_section *section = sections->list; section < sections->list + sections->count; section++) {
        const ptrdiff_t block = section->b * sections->blocks.row, tile = section->b * sections->tiles.row;
        section->blocks = (am_range){block, block + sections->blocks.row};
        section->tiles =
            (am_range){tile + section->keys.begin / MOST, tile + am_ceil_div(section->keys.end, MOST)};
        if (!sees_keys(section)) section->tiles.end = section->tiles.begin;
    }
}

/* Asks the mask which tiles of its section a block sees. */
static am_range find_tiles(const am_sections *sections, const am_mask *mask, const am_section *section,
                           ptrdiff_t block, am_range heads)
{
    if (am_length(section->blocks) == 1 && am_length(heads) == mask->own_heads) return section->tiles;
    const am_range queries = am_range_at(&sections->blocks, block),
                   keys = am_mask_seen(mask, section->b, heads, queries, 1).keys;
    const ptrdiff_t begin = am_max(keys.begin, section->keys.begin),
                    end = am_min(keys.end, section->keys.end);
    if (begin >= end) return (am_range){section->tiles.begin, section->tiles.begin};
    return (am_range){am_tile_index(sections, section, begin), am_tile_index(sections, section, end - 1) + 1};
}

am_range am_tiles_seen(const am_sections *sections, const am_mask *mask, const am_section *section,
                       ptrdiff_t block, am_range heads)
{
    return sections->seen ? sections->seen[block] : find_tiles(sections, mask, section, block, heads);
}

/* Lists what blocks see where all heads see the same keys and the mask has to be read to tell. */
static am_status list_seen(am_sections *sections, const am_mask *mask)
{
    if (mask->exact_keys || mask->own_heads != 1) return AM_OK;
    am_range *seen = malloc((size_t)am_max(sections->blocks.count, 1) * sizeof *seen);
    if (!seen) return AM_NO_MEMORY;
    for (const am_section *section = sections->list; section < sections->list + sections->count; section++)
        for (ptrdiff_t block = section->blocks.begin; block < section->blocks.end; block++)
            seen[block] = find_tiles(sections, mask, section, block, (am_range){0, 1});
    sections->seen = seen;
    return AM_OK;
}

am_status am_sections_make(am_sections *sections, const am_mask *mask, bool by_mask)
{
    const ptrdiff_t most = MANY / am_max(mask->batch, 1);
    by_mask = by_mask && mask->queries <= most && mask->keys <= most;
    division d = {.by_boundaries = by_mask && mask->has_boundaries, .leaves_rest = by_mask};
    *sections = (am_sections){.blocks.tokens = mask->queries, .tiles.tokens = mask->keys};
    if (d.by_boundaries) d.owners = malloc((size_t)am_max(mask->keys, 1) * sizeof *d.owners);
    am_status status = d.by_boundaries && !d.owners ? AM_NO_MEMORY : AM_OK;
    for (ptrdiff_t b = 0; status == AM_OK && b < mask->batch; b++)
        status = list_sections(sections, mask, b, &d);
    free(d.owners);
    if (status != AM_OK) return status;
    if (d.by_boundaries || d.has_rest)
        status = list_ranges(sections, mask);
    else
        number_ranges(sections, mask->batch);
    return status == AM_OK ? list_seen(sections, mask) : status;
}

void am_sections_free(am_sections *sections)
{
    free(sections->list);
    free(sections->blocks.list);
    free(sections->tiles.list);
    free(sections->seen);
}

ptrdiff_t am_tile_index(const am_sections *sections, const am_section *section, ptrdiff_t key)
{
    const am_ranges *tiles = &sections->tiles;
    if (!tiles->list) return section->b * tiles->row + key / MOST;
    const am_range *list = tiles->list + section->tiles.begin;
    return section->tiles.begin + am_last_up_to(&list->begin, am_length(section->tiles), sizeof *list, key);
}

ptrdiff_t am_most_queries(const am_sections *sections, const am_section *section)
{
    if (!sections->blocks.list) return am_min(sections->blocks.tokens, MOST);
    ptrdiff_t most = 0;
    for (ptrdiff_t i = section->blocks.begin; i < section->blocks.end; i++)
        most = am_max(most, am_length(sections->blocks.list[i]));
    return most;
}

const am_section *am_section_of(const am_sections *sections, ptrdiff_t block)
{
    const am_section *list = sections->list;
    return list + am_last_up_to(&list->blocks.begin, sections->count, sizeof *list, block);
}
