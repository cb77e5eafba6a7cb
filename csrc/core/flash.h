/* flash.h – exact attention that never holds more logits than one tile. */
#ifndef AM_FLASH_H
#define AM_FLASH_H

#include <stdint.h>

#include "core/mask.h"
#include "core/status.h"
#include "core/threads.h"

/* A strided array; steps in bytes. */
typedef struct {
    char *data;
    am_dtype type;
    ptrdiff_t batch, token, head, element;
} am_tokens;

/* Query row q of head h attends to the keys that the mask lets it see, those of head h / (heads / kv_heads):
 *
 *     logit = q·k scale + bias,  capped to cap tanh(logit / cap) if there is a cap
 *     out = Σ e^logit v / (Σ e^logit + Σ e^sink),  lse = log of the denominator
 *
 * Not normalized, out = Σ e^(logit - rowmax) v. A row without live pairs is zero. */
typedef struct {
    ptrdiff_t batch, heads, kv_heads, queries, keys, depth, value_depth;
    am_tokens q, k, v, out; /* of one floating type */
    am_mask *mask;          /* batch × heads × queries × keys */
    const char *bias;       /* NULL: none */
    am_dtype bias_type;
    ptrdiff_t bias_batch, bias_head, bias_row, bias_column; /* in bytes, 0 along axes that are shared */
    double scale, cap;                                      /* cap 0: none */
    const double *sinks;                                    /* [heads][sink_count] */
    ptrdiff_t sink_count;
    bool normalize;
    double dropout; /* the probability, below 1 */
    uint64_t seed;
    void *lse; /* [batch][heads][queries] float, or double for float64; NULL: not wanted */
} am_flash;

am_status am_flash_forward(const am_run *run, const am_flash *flash);

/* Which weights dropout keeps, as bytes of 0 or 1: shape [batch][heads][queries][keys]; strides in bytes. */
am_status am_dropout_keep_mask(const am_run *run, uint64_t seed, double probability, const ptrdiff_t shape[4],
                               const ptrdiff_t strides[4], uint8_t *kept);

#endif
