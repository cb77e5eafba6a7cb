/* bias_gradient.h – the gradient of the bias: tiles of dS, summed up over the pairs that share a number.
 *
 * Rows of d_bias that no other queries share are added to block by block. What heads, batch rows or tasks
 * share is accumulated in order: of batch rows, of their tasks, and of the heads of each. So sums do not
 * depend on the number of threads, and a task waits only for tasks before it. Sums are of the arithmetic
 * type, also for a wider bias. */
#ifndef AM_CORE_ATTENTION_TERMS_BIAS_GRADIENT_H
#define AM_CORE_ATTENTION_TERMS_BIAS_GRADIENT_H

#include "core/attention/base.h"

typedef struct {
    const am_attn_base *base;
    char *result; /* C-contiguous, of the bias's type; NULL: not computed */
    am_by_axis shape;
    ptrdiff_t count;
    const am_ranges *blocks;
    ptrdiff_t tasks, task_tiles; /* tasks of each key head and batch row, in the order of keys */
    char
        *sums; /* of the arithmetic type: the result, or what is converted to it; NULL: no number is shared */
    atomic_ptrdiff_t *semaphores; /* each: the turn that may add now */
} am_bias_gradient;

/* Sections are batch rows where these share a row of the bias. */
am_status am_bias_gradient_make(am_bias_gradient *bias, const am_attn_base *base, const am_sections *sections,
                                ptrdiff_t tasks, ptrdiff_t task_tiles);
void am_bias_gradient_free(const am_bias_gradient *bias);

/* Called before any tile, and after all. */
am_status am_bias_gradient_begin(const am_context *context, am_bias_gradient *bias);
am_status am_bias_gradient_end(const am_context *context, am_bias_gradient *bias);

/* The scratch of a task, which is to be zero at first. */
ptrdiff_t am_bias_scratch_bytes(const am_bias_gradient *bias);

/* Unless numbers are shared, each is written once: those of keys that no tile of the block has by
 * `am_bias_begin_rows`, those of a dead tile by `am_bias_clear`, and all others with their tiles. */
void am_bias_begin_rows(const am_bias_gradient *bias, const am_attn_place *at, const am_ranges *ranges,
                        am_range tiles);
void am_bias_clear(const am_bias_gradient *bias, const am_attn_place *at, am_range keys);

/* Where a step may write the tile of a block and some keys as it is, in rows of the shape's channels; or
 * NULL. */
char *am_bias_place(const am_bias_gradient *bias, const am_attn_place *at, am_range keys);

/* A tile of dS of some keys, the `index`-th of the task. */
typedef struct {
    am_range keys;
    ptrdiff_t index;
    char *d_s; /* [rows][AM_FLASH_TILE] */
} am_bias_tile;

/* Adds a tile, which is overwritten. A task adds its tiles block by block, one head after the other. It ends
 * each block of its batch row, also one without tiles, and after all blocks itself, for its key head. */
am_status am_bias_add(const am_bias_gradient *bias, const am_attn_place *at, ptrdiff_t task,
                      const am_bias_tile *tile, char *scratch, am_team *team);
am_status am_bias_end_block(const am_bias_gradient *bias, const am_attn_place *at, ptrdiff_t task,
                            am_team *team);
am_status am_bias_end_task(const am_bias_gradient *bias, const am_attn_place *at, ptrdiff_t task,
                           const am_ranges *ranges, am_range tiles, const char *scratch, am_team *team);

#endif
