/* xla.h – what the handlers of XLA have in common. */
#ifndef AM_BIND_XLA_XLA_H
#define AM_BIND_XLA_XLA_H

#include "bind/xla/buffers.h"

/* The version of a kind of words and the bits of their flags, which Python asks for by name. */
typedef struct {
    const char *name; /* of an argument where a flag says that this is given; NULL behind the last one */
    int64_t value;
} am_xla_word;
extern const am_xla_word am_xla_cache_words[], am_xla_linear_words[], am_xla_sum_words[];

/* Computes results from arguments. */
typedef bool am_xla_do(am_xla_call *c);
/* Of the handler of this name; NULL if there is none. */
am_xla_do *am_xla_find(const char *name);
/* Does so for the buffers of one call, or of the calls of a vmap. */
bool am_xla_run(am_xla_call *c, am_xla_do *compute);
/* What becomes of each flag of a file, which lists them as FLAGS(DO): DO(flag, bit, name). */
#define AM_XLA_BIT(flag, bit, name) flag = bit,
#define AM_XLA_WORD(flag, bit, name) {name, flag},

/* The first words: version and flags. */
bool am_xla_read_flags(am_xla_call *c);
/* These and the scale, to an am_attn that has nothing else. */
bool am_xla_read_numbers(am_xla_call *c);

/* The terms of the logits, once shapes and places are known. */
bool am_xla_read_terms(am_xla_call *c);

/* Attention over a cache, to which new tokens are appended. */
bool am_xla_kvcache(am_xla_call *c);
/* Writes of new tokens to given slots of a cache. */
bool am_xla_kvcache_write(am_xla_call *c);

/* Linear attention and short convolutions (linear.c). */
bool am_xla_linear(am_xla_call *c);
bool am_xla_linear_gradients(am_xla_call *c);
bool am_xla_linear_step(am_xla_call *c);
bool am_xla_convolution(am_xla_call *c);
bool am_xla_convolution_gradients(am_xla_call *c);
bool am_xla_convolution_step(am_xla_call *c);

/* Cumulative sums, and merges of attention (sums.c). */
bool am_xla_cumsum(am_xla_call *c);
bool am_xla_cumsum_gradients(am_xla_call *c);
bool am_xla_merge(am_xla_call *c);
bool am_xla_merge_gradients(am_xla_call *c);

#endif
