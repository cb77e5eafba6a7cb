/* pages.c – where the keys and values of a sequence lie in the pages of a cache. */
#include "core/attention/tiles/pages.h"

#include "core/arrays/packed.h"

/* Where a key lies in a paged cache. */
typedef struct {
    ptrdiff_t sequence, token; /* the token-th of the sequence */
    const int32_t *page;       /* its entry of the table */
    ptrdiff_t inside;          /* its place in the page */
} page_place;

static page_place page_place_of(const am_pages *p, const am_attn_place *at, ptrdiff_t key)
{
    const ptrdiff_t s = p->starts ? am_sequence_of(p->starts, p->sequences, key) : at->b,
                    token = key - (p->starts ? p->starts[s] : 0);
    return (page_place){.sequence = s,
                        .token = token,
                        .page = p->table + s * p->table_stride + token / p->size,
                        .inside = token % p->size};
}

am_key_run am_key_run_of(const am_attn *f, const am_array *t, const am_attn_place *at, am_range keys)
{
    const am_pages *p = &f->pages;
    if (!p->table) return (am_key_run){am_token(t, at->b, at->kv_head, keys.begin), am_length(keys)};
    const page_place first = page_place_of(p, at, keys.begin);
    const ptrdiff_t s = first.sequence,
                    all = (p->starts ? am_min(keys.end, p->starts[s + 1]) : keys.end) - keys.begin,
                    used = am_min(all, p->lengths[s] - first.token);
    if (used <= 0) return (am_key_run){NULL, all};
    if (first.token < p->used[s]) return (am_key_run){NULL, am_min(all, p->used[s] - first.token)};
    const int32_t *page = first.page;
    const char *data = am_token(t, *page, at->kv_head, first.inside);
    ptrdiff_t count = p->size - first.inside;
    const bool joined = t->stride.batch == p->size * t->stride.token;
    for (; count < used && joined && page[1] == page[0] + 1; page++) count += p->size;
    /* A page has memory behind the end of its sequence, which may be read as well. */
    return (am_key_run){data, count >= all ? all : am_min(count, used)};
}

bool am_find_runs(const am_attn *f, const am_array *t, const am_attn_place *at, am_range keys,
                  const void *runs[AM_MOST_RUNS], ptrdiff_t *rows)
{
    const am_pages *p = &f->pages;
    const page_place begin = page_place_of(p, at, keys.begin);
    const ptrdiff_t s = begin.sequence, end = am_min(p->lengths[s], begin.token + am_length(keys));
    *rows = am_min(p->size, AM_FLASH_TILE);
    if (begin.token >= end || AM_FLASH_TILE % *rows != 0 || *rows % 4 != 0) return false;
    if (p->size > AM_FLASH_TILE ? begin.inside + AM_FLASH_TILE > p->size : begin.inside != 0) return false;
    if (p->starts && keys.end > p->starts[s + 1]) return false;
    const ptrdiff_t first = am_max(0, p->used[s] - begin.token) / *rows;
    if (first * *rows >= end - begin.token) return false;
    /* Rows that are not to be read are dead, and may be any. */
    for (ptrdiff_t i = 0; i * *rows < AM_FLASH_TILE; i++) {
        const bool there = i >= first && begin.token + i * *rows < end;
        runs[i] = am_token(t, begin.page[there ? i : first], at->kv_head, begin.inside);
    }
    const ptrdiff_t next = begin.inside + AM_FLASH_TILE;
    runs[AM_FLASH_TILE / *rows] = begin.token + AM_FLASH_TILE < p->lengths[s]
                                      ? am_token(t, begin.page[next / p->size], at->kv_head, next % p->size)
                                      : NULL;
    return true;
}
