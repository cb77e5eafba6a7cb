/* kinds.h – the kinds of logit terms: whatever a call does to its logits and weights beside the mask. Each
 * has a row here, which answers all that forward, backward, schedules and bindings ask. Its functions are in
 * kinds.c. No other file knows kinds by name.
 *
 * A row has one of these forms; what none of them says does not compile (kinds.c):
 *
 *     NUMBER(kind, acts, …)                               a number
 *     ARRAY(kind, acts, (batch, heads, queries, last), …) an array of these axes
 *     LINE(kind, acts, (batch, heads, last, add), …)      one that `add` adds along lines
 *     LEARNED(kind, acts, (last, add, learn), …)          and `learn` adds up its gradient along them. Batch
 * rows share it, as they do its gradient; each head has its own
 *
 *     kind    becomes AM_LOGIT_kind; exported programs of JAX hold its number, so new kinds come last
 *     acts    on what, see am_acts
 *     axes    1, or as long as its letter says: B batch rows, R batch rows or sequences, H heads, KV key
 * heads, Q queries, K keys, N any number from 1 on
 *
 * and fields by name; those that it does not name are false or AM_ANY_FIRST:
 *
 *     name    of the argument that it comes from, in Python
 *     bound   the most that it may add to a logit, see am_logit_row
 *     finite  whether the numbers of its array must be, of a line
 *     first   the keys to begin with, see am_first_keys */
#ifndef AM_CORE_ATTENTION_TERMS_KINDS_H
#define AM_CORE_ATTENTION_TERMS_KINDS_H

#define AM_LOGIT_KINDS(NUMBER, ARRAY, LINE, LEARNED)                                                         \
    ARRAY(BIAS, AM_ADDS_PAIRS, (B, H, Q, K), .name = "bias", .bound = no_bound)                              \
    LINE(ALIBI, AM_ADDS_BY_DISTANCE, (R, H, 1, alibi_add), .name = "alibi_slopes", .bound = alibi_bound,     \
         .finite = true, .first = AM_NEAREST_FIRST)                                                          \
    LEARNED(RELATIVE_BIAS, AM_ADDS_BY_DISTANCE, (N, relative_bias_add, relative_bias_learn),                 \
            .name = "relative_bias", .bound = no_bound)                                                      \
    NUMBER(SOFT_CAP, AM_CAPS, .name = "logits_soft_cap", .bound = no_bound)                                  \
    NUMBER(DROPOUT, AM_DROPS, .name = "dropout_prob", .bound = adds_nothing)                                 \
    ARRAY(SINKS, AM_SINKS, (1, H, 1, N), .name = "softmax_aux", .bound = adds_nothing)

#define AM_LOGIT_KIND(kind, ...) AM_LOGIT_##kind,
typedef enum {
    AM_LOGIT_KINDS(AM_LOGIT_KIND, AM_LOGIT_KIND, AM_LOGIT_KIND, AM_LOGIT_KIND) AM_LOGIT_KIND_COUNT
} am_logit_kind;
#undef AM_LOGIT_KIND

#endif
