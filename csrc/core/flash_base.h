/* flash_base.h – what attention forward and backward share: how numbers are read, which pairs of a tile are
 * live, where memory comes from. */
#ifndef AM_FLASH_BASE_H
#define AM_FLASH_BASE_H

#include <math.h>
#include <stdatomic.h>

#include "core/arithmetic.h"
#include "core/flash.h"
#include "core/flash_ranges.h"

enum { AM_LINE = 64 }; /* bytes */

static const double AM_LOG2_E = 1.4426950408889634, AM_LN_2 = 0.6931471805599453;

/* More channels than this are refused as AM_NO_MEMORY. No memory holds as many, but up to here the lengths of
 * a workspace do not overflow. */
static const ptrdiff_t AM_MOST_DEPTH = PTRDIFF_MAX >> 23;
static inline bool am_is_too_deep(const am_flash *f)
{
    return am_max(f->depth, f->value_depth) > AM_MOST_DEPTH;
}

typedef struct {
    const am_flash *flash;
    const am_kernels *all_kernels;
    const am_flash_kernels *kernels;
    am_dtype type;      /* of the arithmetic */
    ptrdiff_t size;     /* of its elements */
    ptrdiff_t group;    /* query heads that share keys */
    double unit;        /* of logits: e^logit is 2^(unit logit) */
    uint32_t threshold; /* of dropout, 0 for none */
    bool by_head;       /* heads may see different keys */
} am_flash_base;

am_flash_base am_flash_base_of(const am_run *run, const am_flash *flash);

/* Rows of a block: row r is query q + r % queries of head head + r / queries. */
typedef struct {
    ptrdiff_t b, kv_head, head, heads, q, queries, rows;
    ptrdiff_t block; /* the index of its range of queries */
    ptrdiff_t row;   /* the index of its row in the plan */
} am_flash_place;

static inline ptrdiff_t am_head_of(const am_flash_place *at, ptrdiff_t row)
{
    return at->head + row / at->queries;
}
static inline ptrdiff_t am_query_of(const am_flash_place *at, ptrdiff_t row)
{
    return at->q + row % at->queries;
}

/* Read and write numbers of the arithmetic type. */
static inline double am_number(const am_flash_base *base, const void *array, ptrdiff_t i)
{
    return base->type == AM_FLOAT64 ? ((const double *)array)[i] : (double)((const float *)array)[i];
}
static inline void am_set_number(const am_flash_base *base, void *array, ptrdiff_t i, double x)
{
    if (base->type == AM_FLOAT64)
        ((double *)array)[i] = x;
    else
        ((float *)array)[i] = (float)x;
}

/* Returns rows of `count` numbers of the arithmetic type, `step` elements apart: where they lie, or copied to
 * `scratch` of am_row_scratch bytes. */
const char *am_read_rows(const am_flash_base *base, char *scratch, const char *src, ptrdiff_t row_step,
                         ptrdiff_t element_step, am_dtype type, ptrdiff_t rows, ptrdiff_t count,
                         ptrdiff_t *step);
ptrdiff_t am_row_scratch(ptrdiff_t rows, ptrdiff_t count);

/* The address of a token of one head. */
static inline const char *am_token(const am_tokens *t, ptrdiff_t b, ptrdiff_t head, ptrdiff_t token)
{
    return t->data + b * t->batch + head * t->head + token * t->token;
}

/* Whether the kernels can read rows where they lie: as numbers, or `count` bfloat16 as bf16x2, by whole
 * vectors or also lane by lane. */
bool am_is_plain(const am_tokens *t);
bool am_is_plain_bf16x2(const am_tokens *t, ptrdiff_t count);
bool am_is_aligned_bf16x2(const am_tokens *t, ptrdiff_t count);

/* Rows of `count` bfloat16 as whole lanes of bf16x2: copied; or `step` lanes apart, where they lie or copied
 * to `scratch`. */
void am_copy_bf16x2(char *to, const char *src, ptrdiff_t row_step, ptrdiff_t element_step, ptrdiff_t rows,
                    ptrdiff_t count);
const char *am_read_bf16x2(const am_tokens *t, ptrdiff_t b, ptrdiff_t head, ptrdiff_t token, ptrdiff_t rows,
                           ptrdiff_t count, char *scratch, ptrdiff_t *step);

/* Rows of `count` numbers to prefetch, none if rows <= 0: of all heads if they lie side by side, else of the
 * first. */
am_prefetch_rows am_prefetch_tokens(const am_tokens *t, ptrdiff_t b, ptrdiff_t head, ptrdiff_t heads,
                                    ptrdiff_t token, ptrdiff_t rows, ptrdiff_t count);

/* The bias of the rows of one head and some keys, to prefetch if it lies side by side. */
am_prefetch_rows am_prefetch_bias(const am_flash_base *base, const am_flash_place *at, am_range keys);

/* e^(logit - from), for a unit as an exponent of 2; 1 where both are the same infinity. */
static inline double am_power(double unit, double logit, double from)
{
    return logit == from ? 1 : exp2((logit - from) * unit);
}

/* A sink in units of 1, rounded as logits are. */
double am_sink_logit(const am_flash_base *base, ptrdiff_t head, ptrdiff_t i);

/* The greatest of a head's sinks, Σ e^(sink - highest), and the number of sinks that are as great. */
typedef struct {
    double highest, sum, count;
} am_sink_sum;

/* Makes one for each head, which the caller frees; NULL if there are no sinks. */
am_status am_sum_sinks(const am_run *run, const am_flash_base *base, am_sink_sum **sums);

/* The kernels for keys, values or bias of a type, NULL if they have to be converted first. */
static inline const am_kv_format_kernels *am_kv_format_of(const am_flash_base *base, am_dtype type)
{
    am_kv_format format = type == AM_FLOAT16    ? AM_KV_FORMAT_F16
                          : type == AM_BFLOAT16 ? AM_KV_FORMAT_BF16
                                                : AM_KV_FORMAT_OWN;
    bool known = format == AM_KV_FORMAT_OWN ? type == base->type : base->type == AM_FLOAT32;
    return known ? &base->kernels->kv_formats[format] : NULL;
}

/* Returns whether a tile is dead, mixed or full, and unless it is dead fills in a word for each row. */
am_tile am_find_live(const am_flash_base *base, const am_flash_place *at, ptrdiff_t k, ptrdiff_t columns,
                     uint64_t *live);

/* The range of tiles from the first to the last that any row of the block may see. */
am_range am_tiles_of(const am_flash_base *base, const am_ranges *tiles, const am_flash_place *at);

/* An estimate from a few blocks of the most tiles that a block of query rows sees. */
ptrdiff_t am_most_tiles(const am_flash_base *base, const am_ranges *blocks, const am_ranges *tiles);

/* Reads the bias of a tile to [rows][AM_FLASH_TILE]; pairs where it is -INFINITY become dead. `scratch` is
 * for one row. */
am_tile am_read_bias(const am_flash_base *base, const am_flash_place *at, ptrdiff_t k, ptrdiff_t columns,
                     char *scratch, char *bias, uint64_t *live, am_tile tile);

/* The key of one row for am_keep_bits. */
uint64_t am_row_key(uint64_t seed, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q);
uint32_t am_threshold_of(double probability);

/* Memory that is aligned to a cache line; long memory is in large pages, and the next call uses it again. */
void *am_alloc_aligned(ptrdiff_t bytes);
void am_free_aligned(void *memory, ptrdiff_t bytes);

/* The next `bytes` of `from`, in whole cache lines; NULL if `from` is, when lengths are only added up. */
static inline char *am_take(char *from, ptrdiff_t *used, ptrdiff_t bytes)
{
    char *at = from ? from + *used : NULL;
    *used += am_ceil_div(bytes, AM_LINE) * AM_LINE;
    return at;
}

/* A workspace for each thread; a task acquires any that is free. */
typedef struct {
    char *memory;
    ptrdiff_t bytes, count; /* the length of each, and their number */
    atomic_flag *taken;
} am_workspaces;
am_status am_workspaces_make(am_workspaces *workspaces, int threads, ptrdiff_t bytes);
void am_workspaces_free(am_workspaces *workspaces);
char *am_workspace_acquire(const am_workspaces *workspaces);
void am_workspace_release(const am_workspaces *workspaces, const char *memory);

#endif
