/* tiles.h – where keys and values lie, and how a tile of them comes to the kernels: packed or not. */
#ifndef AM_CORE_ATTENTION_TILES_TILES_H
#define AM_CORE_ATTENTION_TILES_TILES_H

#include "core/attention/plan/schedule.h"

/* Keys or values of some tokens of one key head; steps in bytes. All that reads them asks here where they
 * lie; only prefetching looks at the array itself. */
typedef struct {
    const char *data;
    ptrdiff_t step, element; /* from token to token, and from number to number */
    am_dtype type;
    ptrdiff_t count, head_dim;
    const float *scales; /* AM_FLASH_TILE factors of the tokens, or NULL */
    ptrdiff_t run;       /* 0, or they lie in runs of so many, which begin at these addresses: as pairs of
                          * neighbours if kernels take them so */
    const void *const *runs;
} am_kv_rows;
am_kv_rows am_kv_rows_of(const am_tokens *t, const am_attn_place *at, am_range keys, ptrdiff_t head_dim);

/* Packs a tile of keys times a factor, or of values, for the kernels; `scratch` of am_row_scratch bytes.
 * Returns whether values are finite. */
void am_pack_keys(const am_attn_base *base, am_kv_rows rows, char *scratch, char *to, double factor);
bool am_pack_values(const am_attn_base *base, am_kv_rows rows, char *scratch, char *to);

/* The tiles of a wave that all tasks share. */
typedef struct {
    char *packed;         /* k and v of each; NULL if none are shared */
    atomic_uchar *states; /* a tile_state for each */
    ptrdiff_t first, count;
} am_shared_tiles;
am_status am_shared_tiles_make(am_shared_tiles *tiles, const am_schedule *schedule, ptrdiff_t count);
void am_shared_tiles_free(am_shared_tiles *tiles, const am_schedule *schedule, ptrdiff_t count);

/* Before a wave. */
void am_shared_tiles_begin(am_shared_tiles *tiles, const am_wave *wave);

enum {
    AM_MOST_RUNS = AM_FLASH_TILE / 2 + 1
}; /* of an unpacked tile, and the next one: their length is even */

/* The memory of a task for tiles: those that it has packed, and which they are. */
typedef struct {
    char *k, *v, *row;          /* row: scratch of am_row_scratch bytes */
    char *gathered;             /* keys and values of a tile that lie in several pages, for each item */
    ptrdiff_t k_bytes, v_bytes; /* of these */
    /* What the items of a step share: where keys and values of a tile begin in each page, and the keys of the
     * next one, for the key head of the first item; the rows of each page, 0 if they are not read there; and
     * the scales of keys and values of each key head from that one on. */
    const void *(*runs)[AM_MOST_RUNS];
    ptrdiff_t head, run;
    float (*scales)[2][AM_FLASH_TILE];
    struct {
        ptrdiff_t tile; /* the index among all heads; -1: none */
        bool finite;
    } local[AM_MOST_LOCAL_TILES];
} am_kv_workspace;
void am_kv_workspace_take(const am_schedule *schedule, const am_attn_base *base, char *memory,
                          ptrdiff_t *used, am_kv_workspace *workspace);

typedef struct {
    const am_attn_base *base;
    const am_sections *sections;
    const am_schedule *schedule;
    am_shared_tiles shared;
} am_kv;

/* Makes tiles[item], a tile with its keys and values, for the `item`-th of the items that take it in a step,
 * by the strategy of the section. The first comes first, since others share what it finds. `full`: all its
 * pairs are live. */
void am_kv_tile(const am_kv *kv, const am_scheduled *section, const am_attn_place *at, ptrdiff_t index,
                bool full, ptrdiff_t item, am_kv_workspace *workspace, am_flash_tile *tiles);

/* The keys and values of a tile to prefetch, unless it is packed already: of `heads` key heads, the `part`-th
 * of `parts`. */
void am_kv_prefetch(const am_kv *kv, const am_scheduled *section, const am_attn_place *at, ptrdiff_t index,
                    ptrdiff_t heads, ptrdiff_t part, ptrdiff_t parts, const am_kv_workspace *workspace,
                    am_prefetch_rows prefetch[AM_PREFETCH_KINDS]);

/* Lets step_unpacked prefetch the keys of another tile, of `heads` key heads. */
void am_kv_prefetch_keys(const am_kv *kv, const am_attn_place *at, ptrdiff_t index, ptrdiff_t heads,
                         am_kv_workspace *workspace, am_flash_tile *tile);

#endif
