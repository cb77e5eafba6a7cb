/* forward.h – attention forward over some sections, whose weights may be taken instead of a result. */
#ifndef AM_CORE_ATTENTION_FORWARD_H
#define AM_CORE_ATTENTION_FORWARD_H

#include "core/attention/plan/schedule.h"

/* Receives the weights of each step. For sections that read keys where they lie, and values of no channels.
 */
typedef struct {
    void *arg;
    /* Sets what the powers of rows are relative to: `running_max`, which no logit exceeds. */
    void (*begin)(void *arg, const am_attn_place *at, const am_flash_rows *rows);
    /* Takes the weights of a tile, which are in `logits`; those of dead pairs may be anything. */
    void (*take)(void *arg, const am_attn_place *at, am_range keys, const am_flash_rows *rows,
                 const uint64_t *live);
} am_weights_taker;

/* Computes the results of some sections; `taker` NULL: no other takes the weights. The mask is prepared. */
am_status am_attn_forward_sections(const am_context *context, const am_attn_base *base,
                                   const am_sections *sections, const am_weights_taker *taker);

#endif
