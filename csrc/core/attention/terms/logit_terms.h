/* logit_terms.h – what makes logits of products, beside the scale: the mask, the bias, dropout and sinks.
 * Forward and backward ask here for each tile; kernels apply what they are given, and the soft cap. */
#ifndef AM_CORE_ATTENTION_TERMS_LOGIT_TERMS_H
#define AM_CORE_ATTENTION_TERMS_LOGIT_TERMS_H

#include "core/attention/base.h"
#include "core/attention/terms/terms.h"

/* Memory for the terms of one tile. */
typedef struct {
    char *bias, *row; /* row: for a row of the bias as it is read */
    uint64_t *live, *kept, *row_keys;
} am_logit_scratch;

/* The key of one row for am_keep_bits. */
uint64_t am_dropout_row_key(uint64_t seed, ptrdiff_t b, ptrdiff_t h, ptrdiff_t q);

/* Once for each block: the keys of its rows for dropout. */
void am_begin_logits(const am_attn_base *base, const am_attn_place *at, const am_logit_scratch *scratch);

/* Finds the terms of the rows of a block for a tile of keys; false if no pair is live. */
bool am_find_logit_terms(const am_attn_base *base, const am_attn_place *at, am_range keys,
                         const am_logit_scratch *scratch, am_logit_terms *terms);

/* Pairs of some rows for which -INFINITY is added become dead; returns whether any was live. Rows of
 * AM_FLASH_TILE numbers are `stride` numbers apart. */
static inline bool am_drop_infinite(const am_attn_base *base, const void *rows, ptrdiff_t stride,
                                    ptrdiff_t count, uint64_t *live)
{
    bool any = false;
    for (ptrdiff_t r = 0; r < count; r++) {
        const uint64_t infinite =
            base->arithmetic->find_infinite((const char *)rows + r * stride * base->size);
        any |= (live[r] & infinite) != 0;
        live[r] &= ~infinite;
    }
    return any;
}

/* The tiles from the first to the last that any row of a block sees. */
am_range am_block_tiles(const am_attn_base *base, const am_sections *sections, const am_attn_place *at);

/* An estimate from a few blocks of a section of the most tiles that a block may see. */
ptrdiff_t am_most_tiles(const am_attn_base *base, const am_sections *sections, const am_section *section);

/* The bias of the rows of one head and some keys, to prefetch if it lies side by side. */
am_prefetch_rows am_prefetch_bias(const am_attn_base *base, const am_attn_place *at, am_range keys);

/* A sink in units of 1, rounded as logits are: to float unless they are `wide`. */
double am_sink_logit(const am_logit_term *sinks, bool wide, ptrdiff_t head, ptrdiff_t i);

/* The greatest of a head's sinks, Σ e^(sink - highest), and the number of sinks that are as great. */
typedef struct {
    double highest, sum, count;
} am_sink_sum;

/* Makes one for each head, which the caller frees; NULL if there are no sinks. */
am_status am_sum_sinks(const am_context *context, const am_attn_base *base, am_sink_sum **sums);

#endif
