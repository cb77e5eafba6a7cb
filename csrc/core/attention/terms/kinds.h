/* kinds.h – the kinds of logit terms: whatever a call does to its logits and weights beside the mask. Each
 * has a row here, which answers all that forward, backward, schedules and bindings ask. Its functions are in
 * kinds.c. No other file knows kinds by name.
 *
 *     kind    becomes AM_LOGIT_kind; exported programs of JAX hold its number, so new kinds come last
 *     name    of the argument that it comes from, in Python
 *     axes    of its array; empty: it has a number instead. Each axis is 1, or as long as its letter says:
 *             B batch rows, R batch rows or sequences, H heads, Q queries, K keys, N any number from 1 on
 *     finite  whether the numbers of its array must be
 *     acts    on what, see am_acts
 *     first   the keys to begin with, see am_first_keys
 *     bound   the most that it may add to a logit, see am_logit_row
 *     add     adds its numbers along a line; NULL unless it acts along lines
 *     learn   adds up the gradient of its array along a line; NULL if it has none, or not along lines
 *
 * Fields that a row does not name are false, AM_ANY_FIRST or NULL. */
#ifndef AM_CORE_ATTENTION_TERMS_KINDS_H
#define AM_CORE_ATTENTION_TERMS_KINDS_H

#define AM_LOGIT_KINDS(ROW)                                                                                  \
    ROW(BIAS, .name = "bias", .axes = "BHQK", .acts = AM_ADDS_PAIRS, .bound = no_bound)                      \
    ROW(ALIBI, .name = "alibi_slopes", .axes = "RH11", .finite = true, .acts = AM_ADDS_BY_DISTANCE,          \
        .first = AM_NEAREST_FIRST, .bound = alibi_bound, .add = alibi_add)                                   \
    ROW(RELATIVE_BIAS, .name = "relative_bias", .axes = "1H1N", .acts = AM_ADDS_BY_DISTANCE,                 \
        .bound = no_bound, .add = relative_bias_add, .learn = relative_bias_learn)                           \
    ROW(SOFT_CAP, .name = "logits_soft_cap", .axes = "", .finite = true, .acts = AM_CAPS, .bound = no_bound) \
    ROW(DROPOUT, .name = "dropout_prob", .axes = "", .finite = true, .acts = AM_DROPS,                       \
        .bound = adds_nothing)                                                                               \
    ROW(SINKS, .name = "softmax_aux", .axes = "1H1N", .acts = AM_SINKS, .bound = adds_nothing)

#define AM_LOGIT_KIND(kind, ...) AM_LOGIT_##kind,
typedef enum { AM_LOGIT_KINDS(AM_LOGIT_KIND) AM_LOGIT_KIND_COUNT } am_logit_kind;
#undef AM_LOGIT_KIND

#endif
