/* kinds.h – the kinds of logit terms: whatever a call does to its logits and weights beside the mask. Each
 * has a row here, which answers all that forward, backward, schedules and bindings ask. Its functions are in
 * kinds.c. No other file knows kinds by name.
 *
 *     kind   it becomes AM_LOGIT_kind. Exported programs of JAX hold its number: new kinds come last
 *     name   in Python: of the argument that it comes from
 *     axes   of its array, each 1, or as many as: B batch rows, R batch rows or sequences, H heads, Q
 * queries, K keys; or N any number, which is at least 1; "": it has none, but a number finite whether its
 * numbers must be acts   what it alters, see am_acts first  the keys to begin with, see am_first_keys bound
 * the most that it may add to a logit, see am_logit_row; likewise add    its numbers along a line, NULL
 * unless it acts by distance or by key learn  the gradient of what it has added along a line; NULL: its array
 * has none, or not along lines */
#ifndef AM_CORE_ATTENTION_TERMS_KINDS_H
#define AM_CORE_ATTENTION_TERMS_KINDS_H

#define AM_LOGIT_KINDS(ROW)                                                                                  \
    ROW(BIAS, "bias", "BHQK", false, AM_ADDS_PAIRS, AM_ANY_FIRST, no_bound, NULL, NULL)                      \
    ROW(ALIBI, "alibi_slopes", "RH11", true, AM_ADDS_BY_DISTANCE, AM_NEAREST_FIRST, alibi_bound, alibi_add,  \
        NULL)                                                                                                \
    ROW(RELATIVE_BIAS, "relative_bias", "1H1N", false, AM_ADDS_BY_DISTANCE, AM_ANY_FIRST, no_bound,          \
        relative_bias_add, relative_bias_learn)                                                              \
    ROW(SOFT_CAP, "logits_soft_cap", "", true, AM_CAPS, AM_ANY_FIRST, no_bound, NULL, NULL)                  \
    ROW(DROPOUT, "dropout_prob", "", true, AM_DROPS, AM_ANY_FIRST, adds_nothing, NULL, NULL)                 \
    ROW(SINKS, "softmax_aux", "1H1N", false, AM_SINKS, AM_ANY_FIRST, adds_nothing, NULL, NULL)

#define AM_LOGIT_KIND(kind, ...) AM_LOGIT_##kind,
typedef enum { AM_LOGIT_KINDS(AM_LOGIT_KIND) AM_LOGIT_KIND_COUNT } am_logit_kind;
#undef AM_LOGIT_KIND

#endif
