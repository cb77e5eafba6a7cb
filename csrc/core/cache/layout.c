/* layout.c – where the tokens of sequences lie in a cache, and what their queries see. */
#include "core/cache/layout.h"

#include <float.h>
#include <stdlib.h>

#include "core/runtime/sizes.h"

enum { ARRAYS = 11 }; /* of a number for each sequence */
#define MOST_KEYS ((ptrdiff_t)1 << 56)

am_status am_kv_cache_make(am_kv_cache *c, ptrdiff_t n)
{
    ptrdiff_t **const arrays[ARRAYS] = {&c->before,  &c->lengths, &c->used,  &c->low,
                                        &c->high,    &c->offsets, &c->moved, &c->k_starts,
                                        &c->q_shift, &c->k_shift, &c->zeros};
    c->sequences = n;
    if (n > INT32_MAX) return AM_NO_MEMORY;
    c->before = calloc((size_t)n + 1, ARRAYS * sizeof *c->before + sizeof *c->rows);
    if (!c->before) return AM_NO_MEMORY;
    for (int i = 1; i < ARRAYS; i++) *arrays[i] = c->before + i * (n + 1);
    c->rows = (int32_t *)(c->before + ARRAYS * (n + 1));
    return AM_OK;
}

void am_kv_cache_free(am_kv_cache *c)
{
    free(c->before); /* and all others */
    free(c->table.pages);
}

ptrdiff_t am_kv_cache_place(am_kv_cache *c, ptrdiff_t more, ptrdiff_t capacity)
{
    const ptrdiff_t *starts = c->q_starts, *added = c->new_starts;
    c->longest = 0;
    for (ptrdiff_t s = 0; s < c->sequences; s++) {
        const ptrdiff_t queries = starts ? starts[s + 1] - starts[s] : c->queries,
                        length = c->before[s] + (added ? added[s + 1] - added[s] : more),
                        offset = length - queries;
        if (length > capacity) return s;
        c->lengths[s] = length, c->offsets[s] = offset;
        c->moved[s] = offset;
        if (starts) {
            c->moved[s] += c->k_starts[s] - starts[s];
            c->k_starts[s + 1] = c->k_starts[s] + length;
            if (c->k_starts[s + 1] > MOST_KEYS) return s;
        }
        c->rows[s] = (int32_t)s;
        c->longest = am_max(c->longest, length);
    }
    c->keys = starts ? c->k_starts[c->sequences] : c->longest;
    return -1;
}

void am_kv_cache_limit(am_kv_cache *c, const am_kv_limits *limits)
{
    for (ptrdiff_t s = 0; s < c->sequences; s++) {
        const ptrdiff_t offset = c->offsets[s];
        c->low[s] = limits->has_low ? limits->low + offset : -AM_FAR;
        c->high[s] = limits->has_high ? limits->high + offset : AM_FAR;
        c->used[s] = limits->has_low ? am_max(0, limits->low + offset) : 0;
        if (!limits->chunk) continue;
        const ptrdiff_t chunk = am_floor_to(offset, limits->chunk);
        c->used[s] = am_max(c->used[s], chunk);
        c->k_shift[s] = am_max(0, -chunk), c->q_shift[s] = offset + c->k_shift[s];
    }
}

int am_kv_cache_terms(const am_kv_cache *c, const am_kv_limits *limits, am_node terms[AM_KV_TERMS])
{
    int count = 0;
    if (c->q_starts) {
        terms[count++] = (am_node){.kind = AM_TERM_SEQUENCES,
                                   .sequences = {c->sequences, c->q_starts, c->k_starts, c->low, c->high,
                                                 limits->chunk, c->offsets}};
        return count;
    }
    bool ragged = false;
    for (ptrdiff_t s = 0; s < c->sequences; s++) ragged |= c->lengths[s] != c->keys;
    if (ragged) terms[count++] = (am_node){.kind = AM_TERM_KEYS, .keys = {c->zeros, c->lengths}};
    if (limits->has_low || limits->has_high)
        terms[count++] = (am_node){.kind = AM_TERM_BAND, .band = {c->low, c->high, 1, 0}};
    if (limits->chunk)
        terms[count++] = (am_node){.kind = AM_TERM_CHUNK, .chunk = {limits->chunk, c->q_shift, c->k_shift}};
    return count;
}

am_status am_kv_cache_read_table(am_kv_cache *c, const am_array *from, ptrdiff_t size, ptrdiff_t pages,
                                 am_kv_entry *wrong)
{
    const ptrdiff_t columns = c->table.columns = am_ceil_div(c->longest, size);
    *wrong = (am_kv_entry){.sequence = -1};
    c->table.pages = malloc((size_t)am_product(c->sequences, columns, sizeof *c->table.pages) | 1);
    if (!c->table.pages) return AM_NO_MEMORY;
    for (ptrdiff_t s = 0; s < c->sequences; s++) {
        const ptrdiff_t end = am_ceil_div(c->lengths[s], size);
        /* Queries may see fewer tokens than are appended. */
        ptrdiff_t i = c->before[s] < c->lengths[s] ? am_min(c->used[s], c->before[s]) : c->used[s];
        for (i /= size; i < end; i++) {
            const char *entry = am_token(from, s, 0, i);
            const int64_t page = from->type == AM_INT64 ? *(const volatile int64_t *)entry
                                                        : am_read_once((const int32_t *)entry);
            c->table.pages[s * columns + i] = (int32_t)page;
            if (page >= 0 && page < am_min(pages, INT32_MAX)) continue;
            *wrong = (am_kv_entry){.page = page, .sequence = s, .index = i};
            return AM_OK;
        }
    }
    return AM_OK;
}

am_pages am_kv_cache_pages(const am_kv_cache *c, ptrdiff_t size)
{
    return (am_pages){
        .table = c->table.pages ? c->table.pages : c->rows,
        .table_stride = c->table.pages ? c->table.columns : 1,
        .size = am_max(1, size), /* no sequence has tokens in pages without any */
        .used = c->used,
        .lengths = c->lengths,
        .starts = c->q_starts ? c->k_starts : NULL,
        .sequences = c->sequences,
    };
}

static bool is_scale(float x) { return 0 < x && x <= FLT_MAX; }

const float *am_kv_wrong_scale(const am_kv_scales *scales, ptrdiff_t heads, ptrdiff_t channels)
{
    for (ptrdiff_t h = 0; h < heads; h++) {
        const char *head = am_token(&scales->array, 0, h, 0);
        if (scales->array.stride.channel == sizeof(float)) { /* side by side: without a branch for each */
            const float *x = (const float *)head;
            int all = 1;
            for (ptrdiff_t i = 0; i < channels; i++) all &= is_scale(x[i]);
            if (all) continue;
        }
        for (ptrdiff_t i = 0; i < channels; i++) {
            const float *x = (const float *)(head + i * scales->array.stride.channel);
            if (!is_scale(*x)) return x;
        }
    }
    return NULL;
}

static int compare_pages(const void *a, const void *b)
{
    const int32_t *x = a, *y = b;
    return x[0] != y[0] ? (x[0] < y[0] ? -1 : 1) : (x[1] > y[1]) - (x[1] < y[1]);
}

am_status am_kv_find_writers(const am_pages *p, const ptrdiff_t *before, am_kv_writers *found)
{
    enum { FEW = 64 };
    int32_t few[FEW][2], (*written)[2] = few; /* a page and its sequence */
    ptrdiff_t count = 0, n = 0;
    for (ptrdiff_t s = 0; s < p->sequences; s++) {
        if (before[s] < p->lengths[s]) count += (p->lengths[s] - 1) / p->size - before[s] / p->size + 1;
    }
    if (count > FEW) written = calloc((size_t)count, sizeof *written);
    if (!written) return AM_NO_MEMORY;
    for (ptrdiff_t s = 0; s < p->sequences; s++) {
        for (ptrdiff_t i = before[s] / p->size; before[s] < p->lengths[s] && i * p->size < p->lengths[s];
             i++, n++)
            written[n][0] = p->table[s * p->table_stride + i], written[n][1] = (int32_t)s;
    }
    qsort(written, (size_t)n, sizeof *written, compare_pages);
    *found = (am_kv_writers){.page = -1};
    for (ptrdiff_t i = n - 1; i > 0; i--) { /* the first one is found last */
        if (written[i][0] == written[i - 1][0])
            *found =
                (am_kv_writers){.page = written[i][0], .sequence = written[i - 1][1], .other = written[i][1]};
    }
    if (written != few) free(written);
    return AM_OK;
}
