/* xla.h – what the handlers of XLA have in common. */
#ifndef AM_BIND_XLA_XLA_H
#define AM_BIND_XLA_XLA_H

#include "bind/xla/buffers.h"

/* The version of a kind of words and the bits of their flags, which Python asks for by name. */
typedef struct {
    const char *name; /* of an argument where a flag says that this is given; NULL behind the last one */
    int64_t value;
} am_xla_word;
extern const am_xla_word am_xla_cache_words[], am_xla_linear_words[], am_xla_sum_words[],
    am_xla_weight_words[];

enum { AM_XLA_VERSION = 3 }; /* of the words of attention and caches: programs are exported and kept */

/* Computes results from arguments. */
typedef bool am_xla_do(am_xla_call *c);
/* Finds the function behind the handler of this name; NULL for an unknown name. */
am_xla_do *am_xla_find(const char *name);
/* Runs it on the buffers of one call, or of the calls of a vmap. */
bool am_xla_run(am_xla_call *c, am_xla_do *compute);
/* A file lists its flags once, as FLAGS(DO) with a DO(flag, bit, name) per flag. These two make an enum and
 * a table of them. */
#define AM_XLA_BIT(flag, bit, name) flag = bit,
#define AM_XLA_WORD(flag, bit, name) {name, flag},

/* Reads the first words: the version, which must be this one, and flags. */
bool am_xla_read_flags(am_xla_call *c, int64_t version);
/* Reads those of attention and the scale, to an am_attn that has nothing else. */
bool am_xla_read_numbers(am_xla_call *c);

/* The terms of the logits, once shapes and places are known. */
bool am_xla_read_terms(am_xla_call *c);

/* The arguments that say what attention is asked for; `own` more come behind, and those that flags name. */
bool am_xla_read_attention(am_xla_call *c, int own);

/* What XLA calls as attnmask_<call>: attention (xla.c), its weights (weights.c), attention over a cache to
 * which new tokens are appended, writes of new tokens to given slots (cache.c), linear attention and short
 * convolutions (linear.c), cumulative sums and merges (sums.c). */
#define AM_XLA_EACH_CALL(DO)                                                                                 \
    DO(flash_forward)                                                                                        \
    DO(flash_backward)                                                                                       \
    DO(flash_jvp)                                                                                            \
    DO(flash_backward_vjp)                                                                                   \
    DO(flash_weights)                                                                                        \
    DO(flash_kvcache)                                                                                        \
    DO(write_kvcache)                                                                                        \
    DO(linear_forward)                                                                                       \
    DO(linear_backward)                                                                                      \
    DO(linear_step)                                                                                          \
    DO(convolution_forward)                                                                                  \
    DO(convolution_backward)                                                                                 \
    DO(convolution_step)                                                                                     \
    DO(cumsum_forward)                                                                                       \
    DO(cumsum_backward)                                                                                      \
    DO(merge_forward)                                                                                        \
    DO(merge_backward)
#define AM_XLA_DECLARE(call) bool am_xla_##call(am_xla_call *c);
AM_XLA_EACH_CALL(AM_XLA_DECLARE)

#endif
