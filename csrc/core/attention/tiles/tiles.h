/* tiles.h – where keys and values lie, and how a tile of them comes to the kernels: packed or not. */
#ifndef AM_CORE_ATTENTION_TILES_TILES_H
#define AM_CORE_ATTENTION_TILES_TILES_H

#include "core/attention/plan/schedule.h"
#include "core/attention/tiles/pages.h"

/* The tiles of a wave that all tasks share. */
typedef struct {
    char *packed;         /* k and v of each; NULL if none are shared */
    atomic_uchar *states; /* a tile_state for each */
    ptrdiff_t bytes;      /* of all */
    ptrdiff_t first, count;
} am_shared_tiles;
am_status am_shared_tiles_make(am_shared_tiles *tiles, const am_schedule *schedule, ptrdiff_t count);
void am_shared_tiles_free(const am_shared_tiles *tiles);

/* Before a wave. */
void am_shared_tiles_begin(am_shared_tiles *tiles, const am_wave *wave);

/* Keys, or values: what all tiles of a call have in common. */
typedef struct {
    const am_array *array;
    const am_kv_scales *scales;
    ptrdiff_t count;                    /* numbers of a row */
    ptrdiff_t scale_columns;            /* of a head: one of tokens, or two of each of their groups */
    ptrdiff_t packed_bytes, copy_bytes; /* of a tile that is packed; of rows that are copied */
} am_kv_side;

typedef struct {
    const am_attn_base *base;
    const am_sections *sections;
    const am_schedule *schedule;
    am_kv_side sides[2];
    am_shared_tiles shared;
} am_kv;

/* Without shared tiles. */
am_kv am_kv_of(const am_attn_base *base, const am_sections *sections, const am_schedule *schedule);

/* How a task reads tiles, by the strategy of its section. */
typedef struct {
    const am_kv *kv;
    const am_scheduled *section;
    char *packed[2]; /* keys and values of the tiles that the task has packed */
    char *row;       /* scratch of am_row_scratch bytes */
    char *copies;    /* of rows that kernels cannot read where they lie: keys and values of a tile, in
                      * pages for each key head of a step */
    /* Of the tile that am_kv_begin_tile has begun: */
    ptrdiff_t index;
    am_range keys;
    ptrdiff_t head;                    /* the first key head of the step */
    ptrdiff_t run;                     /* the rows of each page, 0 if they are not read there */
    const void *(*runs)[AM_MOST_RUNS]; /* where keys and values begin in each page for that head, and the keys
                                        * of the tile after it */
    float *scales[2];                  /* of keys and of values, for that head and the heads after it */
    struct {
        ptrdiff_t tile; /* the index among all heads; -1: none */
        bool finite;
    } local[AM_MOST_LOCAL_TILES];
} am_kv_workspace;
void am_kv_workspace_take(const am_kv *kv, char *memory, ptrdiff_t *used, am_kv_workspace *workspace);

/* Begins a step over a tile, whose first item is at a place: finds what its key heads share. */
void am_kv_begin_tile(am_kv_workspace *workspace, const am_attn_place *at, ptrdiff_t index);

/* Makes that tile, with its keys and values, for the key head of an item. `all_keys`: as of its terms. */
void am_kv_tile(am_kv_workspace *workspace, const am_attn_place *at, ptrdiff_t all_keys, am_flash_tile *tile);

/* Packs the keys of a tile for the key head of a place, without a step. */
void am_kv_pack_keys(const am_kv_workspace *workspace, const am_attn_place *at, ptrdiff_t index, char *to);

/* Plans to prefetch these keys. */
void am_kv_prefetch_keys(const am_kv_workspace *workspace, const am_attn_place *at, ptrdiff_t index,
                         am_prefetch_plan *plan);

/* Plans to prefetch a tile, of `heads` key heads: for step_unpacked; else keys and values, unless it is
 * packed already. */
void am_kv_prefetch(am_kv_workspace *workspace, const am_scheduled *section, const am_attn_place *at,
                    ptrdiff_t index, ptrdiff_t heads, am_prefetch_plan *plan);

#endif
