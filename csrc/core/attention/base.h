/* base.h – what all of attention stands on: the arithmetic, how rows of numbers are read, and where
 * memory comes from. */
#ifndef AM_CORE_ATTENTION_BASE_H
#define AM_CORE_ATTENTION_BASE_H

#include <math.h>

#include "core/runtime/sizes.h"
#include "core/runtime/workspaces.h"
#include "core/attention/attention.h"
#include "core/attention/terms/terms.h"
#include "core/attention/plan/partition.h"

static const double AM_LOG2_E = 1.4426950408889634, AM_LN_2 = 0.6931471805599453;

/* More channels than this are refused as AM_NO_MEMORY. No memory holds as many, but up to here the lengths of
 * a workspace do not overflow. */
static const ptrdiff_t AM_MOST_DEPTH = PTRDIFF_MAX >> 23;
static inline bool am_is_too_deep(const am_attn *f)
{
    return am_max(f->head_dim, f->value_dim) > AM_MOST_DEPTH;
}

typedef struct {
    const am_attn *attn;
    const am_kernels *all_kernels;
    const am_arithmetic *arithmetic;
    const am_kv_kernels *kv;      /* of keys and values as they lie in memory, or as they are widened */
    const am_kv_kernels *kv_rows; /* of rows that are not packed: as in memory, or widened */
    bool widens;                  /* keys and values are widened before kernels pack them */
    bool widens_rows;             /* unpacked rows are widened before kernels read them */
    am_widen_row *widen;          /* to the type that the arithmetic multiplies */
    bool packs_queries;           /* for unpacked keys */
    am_dtype type;                /* of sums */
    ptrdiff_t size;               /* of their elements */
    ptrdiff_t heads_per_kv;       /* query heads that share a key head */
    double unit;                  /* of logits: e^logit is 2^(unit logit) */
    am_terms_found terms;
    uint32_t threshold; /* of dropout, 0 for none */
} am_attn_base;

/* The greatest number of 32 bits for which am_keep_bits drops a weight. */
uint32_t am_threshold_of(double probability);

/* In the arithmetic that takes the types of the call, or in a given one. */
am_attn_base am_attn_base_of(const am_context *context, const am_attn *attn);
am_attn_base am_attn_base_in(const am_context *context, const am_attn *attn, const am_arithmetic *arithmetic);

/* In float64 if that is the type of the call, else in float32. */
static inline am_attn_base am_attn_base_wide(const am_context *context, const am_attn *attn)
{
    const am_kernels *k = context->kernels;
    return am_attn_base_in(context, attn, attn->q.type == AM_FLOAT64 ? &k->flash_f64 : &k->flash_f32);
}

/* Rows of a block: row r is query q + r % queries of head head + r / queries. */
typedef struct {
    const am_section *section;
    ptrdiff_t b, kv_head, head, heads, q, queries, rows;
    ptrdiff_t block; /* the index of its range of queries */
} am_attn_place;

/* A block of so many heads from `head` on, which share a key head. */
static inline am_attn_place am_place_of(const am_attn_base *base, const am_sections *sections,
                                        const am_section *section, ptrdiff_t block, ptrdiff_t head,
                                        ptrdiff_t heads)
{
    const am_range queries = am_range_at(&sections->blocks, block);
    const ptrdiff_t count = queries.end - queries.begin;
    return (am_attn_place){.section = section,
                           .b = section->b,
                           .kv_head = head / base->heads_per_kv,
                           .head = head,
                           .heads = heads,
                           .q = queries.begin,
                           .queries = count,
                           .rows = heads * count,
                           .block = block};
}

static inline ptrdiff_t am_head_of(const am_attn_place *at, ptrdiff_t row)
{
    return at->head + row / at->queries;
}
static inline ptrdiff_t am_query_of(const am_attn_place *at, ptrdiff_t row)
{
    return at->q + row % at->queries;
}

/* The numbers of a lane, and the lanes that hold so many numbers of a query or key. */
static inline ptrdiff_t am_width(const am_attn_base *base) { return base->arithmetic->width; }
static inline ptrdiff_t am_lanes(const am_attn_base *base, ptrdiff_t numbers)
{
    return am_ceil_div(numbers, am_width(base));
}

/* The numbers of a lane of unpacked keys and values: numbers of eight bits become lanes of two as they are
 * packed. */
static inline ptrdiff_t am_kv_width(const am_attn_base *base)
{
    return base->widens_rows || base->attn->k.type == base->arithmetic->factors ? am_width(base) : 1;
}

static inline bool am_scales_products(const am_attn_base *base)
{
    return base->arithmetic->scaling == AM_SCALE_PRODUCTS;
}

/* Read and write numbers of the arithmetic type. */
static inline double am_number(const am_attn_base *base, const void *array, ptrdiff_t i)
{
    return base->type == AM_FLOAT64 ? ((const double *)array)[i] : (double)((const float *)array)[i];
}
static inline void am_set_number(const am_attn_base *base, void *array, ptrdiff_t i, double x)
{
    if (base->type == AM_FLOAT64)
        ((double *)array)[i] = x;
    else
        ((float *)array)[i] = (float)x;
}

/* Rows as numbers of the arithmetic type: where they lie, or copied to `scratch` of am_row_scratch bytes. */
static inline am_rows am_read_wide(const am_attn_base *base, const am_array *rows, char *scratch)
{
    return am_read_rows(base->all_kernels, base->type, 1, rows, rows->shape.channel, scratch);
}

/* The bytes of a scratch for rows of so many numbers, or for the window of a term by distance. */
enum {
    AM_TERM_WINDOW = AM_FLASH_ROWS + AM_FLASH_TILE
}; /* the most numbers from which a tile's rows follow */
ptrdiff_t am_row_scratch(ptrdiff_t rows, ptrdiff_t count);

/* Copies rows as whole lanes, side by side, without converting them. */
static inline am_rows am_copy_lanes(const am_attn_base *base, const am_array *rows, char *to)
{
    const ptrdiff_t stride = am_lanes(base, rows->shape.channel) * am_width(base);
    am_gather(base->all_kernels, rows->type, to, stride, rows);
    return (am_rows){.data = to, .stride = stride * (ptrdiff_t)am_size_of(rows->type)};
}

/* Returns rows of whole lanes: where they lie if they can be read there, else copied. */
static inline am_rows am_read_lanes(const am_attn_base *base, const am_array *rows, char *scratch)
{
    if (am_is_aligned(rows, am_width(base)))
        return (am_rows){.data = rows->data, .stride = rows->stride.token};
    return am_copy_lanes(base, rows, scratch);
}

/* The rows of a block of one head. */
static inline am_array am_rows_of_block(const am_array *a, const am_attn_place *at)
{
    return am_rows_from(a, am_token(a, at->b, at->head, at->q), at->rows);
}

/* The rows of some keys of one key head, in no pages. */
static inline am_array am_rows_of_keys(const am_array *a, const am_attn_place *at, am_range keys)
{
    return am_rows_from(a, am_token(a, at->b, at->kv_head, keys.begin), keys.end - keys.begin);
}

/* Rows to prefetch, none if rows <= 0: of all heads if they lie side by side, else of the first. */
am_prefetch_rows am_prefetch_tokens(const am_array *t, ptrdiff_t b, ptrdiff_t head, ptrdiff_t heads,
                                    ptrdiff_t token, ptrdiff_t rows);

static inline am_prefetch_rows am_prefetch_block(const am_array *a, const am_attn_place *at, ptrdiff_t heads)
{
    return am_prefetch_tokens(a, at->b, at->head, heads, at->q, at->queries);
}

/* e^(logit - from), for a unit as an exponent of 2; 1 where both are inf, or both -inf. */
static inline double am_power(double unit, double logit, double from)
{
    return logit == from ? 1 : exp2((logit - from) * unit);
}

/* The kernels for keys that lie in memory as the arithmetic takes them. */
static inline const am_kv_kernels *am_kv_own(const am_attn_base *base)
{
    return &base->arithmetic->kv[base->arithmetic->factors];
}

/* Whether kernels round queries too much: the more channels, the fewer digits a sum of int32 has room for,
 * and from 2^16 channels on they are fewer than those of bfloat16. */
static inline bool am_rounds_too_much(const am_kv_kernels *kv, ptrdiff_t head_dim)
{
    return kv->queries == AM_QUERY_ROUNDED && head_dim >= 1 << 16;
}

/* Multiplies rows of `count` numbers, `stride` apart, by the factors of the channels of a key head. */
void am_scale_channels(const am_kv_scales *scales, ptrdiff_t kv_head, float *rows, ptrdiff_t row_count,
                       ptrdiff_t count, ptrdiff_t stride);

#endif
