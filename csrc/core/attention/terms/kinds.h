/* kinds.h – the kinds of logit terms: whatever a call does to its logits and weights beside the mask. Each
 * has a row here, which answers all that forward, backward, schedules and bindings ask. Its functions are in
 * kinds.c. No other file knows kinds by name.
 *
 * A row has one of these forms; what none of them says does not compile (kinds.c):
 *
 *     NUMBER(kind, what, …)                               a number
 *     ARRAY(kind, what, (batch, heads, queries, last), …) an array of these axes
 *     LINE(kind, what, (batch, heads, last, add), …)      one that `add` adds along lines
 *     LEARNED(kind, what, (last, add, learn), …)          and `learn` adds up its gradient along them. Batch
 * rows share it, as they do its gradient; each head has its own
 *
 *     kind    becomes AM_LOGIT_kind; exported programs of JAX hold its number, so new kinds come last
 *     what    (name, acts, bound): the argument that it comes from, in Python; on what, see am_acts; and a
 * function of the most that it may add to a logit, see am_logit_row
 *     axes    1, or as long as its letter says: B batch rows, R batch rows or sequences, H heads, KV key
 * heads, Q queries, K keys, N any number from 1 on
 *
 * and fields by name; those that it does not name are false or AM_ANY_FIRST:
 *
 *     finite  whether the numbers of its array must be, of a line
 *     first   the keys to begin with, see am_first_keys */
#ifndef AM_CORE_ATTENTION_TERMS_KINDS_H
#define AM_CORE_ATTENTION_TERMS_KINDS_H

#define AM_LOGIT_KINDS(NUMBER, ARRAY, LINE, LEARNED)                                                         \
    ARRAY(BIAS, ("bias", AM_ADDS_PAIRS, no_bound), (B, H, Q, K))                                             \
    LINE(ALIBI, ("alibi_slopes", AM_ADDS_BY_DISTANCE, alibi_bound), (R, H, 1, alibi_add), .finite = true,    \
         .first = AM_NEAREST_FIRST)                                                                          \
    LEARNED(RELATIVE_BIAS, ("relative_bias", AM_ADDS_BY_DISTANCE, no_bound),                                 \
            (N, relative_bias_add, relative_bias_learn))                                                     \
    NUMBER(SOFT_CAP, ("logits_soft_cap", AM_CAPS, no_bound))                                                 \
    NUMBER(DROPOUT, ("dropout_prob", AM_DROPS, adds_nothing))                                                \
    ARRAY(SINKS, ("softmax_aux", AM_SINKS, adds_nothing), (1, H, 1, N))                                      \
    ARRAY(GRID_BIAS, ("grid_bias", AM_ADDS_BY_POINT, no_bound), (1, H, 1, N))

#define AM_LOGIT_KIND(kind, ...) AM_LOGIT_##kind,
typedef enum {
    AM_LOGIT_KINDS(AM_LOGIT_KIND, AM_LOGIT_KIND, AM_LOGIT_KIND, AM_LOGIT_KIND) AM_LOGIT_KIND_COUNT
} am_logit_kind;
#undef AM_LOGIT_KIND

#endif
