/* xla.h – what the handlers of XLA have in common. */
#ifndef AM_BIND_XLA_XLA_H
#define AM_BIND_XLA_XLA_H

#include "bind/xla/buffers.h"

/* The version of a kind of words and the bits of their flags, which Python asks for by name. */
typedef struct {
    const char *name; /* of an argument where a flag says that this is given; NULL behind the last one */
    int64_t value;
} am_xla_word;
extern const am_xla_word am_xla_cache_words[], am_xla_linear_words[];

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

#endif
