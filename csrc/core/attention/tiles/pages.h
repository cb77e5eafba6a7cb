/* pages.h – where the keys and values of a sequence lie: in the pages of a cache, or one after the other. */
#ifndef AM_CORE_ATTENTION_TILES_PAGES_H
#define AM_CORE_ATTENTION_TILES_PAGES_H

#include "core/attention/base.h"

/* The runs of an unpacked tile, whose length is a multiple of four, and the first of the next tile. */
enum { AM_MOST_RUNS = AM_FLASH_TILE / 4 + 1 };

/* Tokens of one sequence that lie one after the other, from some key on: all, if they lie in no pages. */
typedef struct {
    const char *data; /* NULL: they are not to be read */
    ptrdiff_t count;
} am_key_run;
am_key_run am_key_run_of(const am_attn *attn, const am_array *tokens, const am_attn_place *at, am_range keys);

/* Finds where the rows of a whole tile begin in each page, for kernels that read them there. Each run has
 * `*rows` rows. Behind the runs comes the first one of the next tile, to prefetch, or NULL if there is none.
 * Returns false if pages are too short or too long, or the tile does not begin with a page. */
bool am_find_runs(const am_attn *attn, const am_array *tokens, const am_attn_place *at, am_range keys,
                  const void *runs[AM_MOST_RUNS], ptrdiff_t *rows);

#endif
