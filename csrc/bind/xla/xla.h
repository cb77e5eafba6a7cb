/* xla.h – what the handlers of XLA have in common. */
#ifndef AM_BIND_XLA_XLA_H
#define AM_BIND_XLA_XLA_H

#include "bind/xla/buffers.h"

/* The first words: version, flags, scale, cap and dropout, to an am_attn that has nothing else. */
bool am_xla_read_numbers(am_xla_call *c);

/* [S] or [H, S], as a row for each head, finite where they are; once the query is known. */
bool am_xla_read_sinks(am_xla_call *c, const am_xla_buffer *buffer);

/* Slopes of all rows or of each, if there are any. */
bool am_xla_read_slopes(am_xla_call *c, const am_operand *slopes, ptrdiff_t rows);

/* Attention over a cache, to which new tokens are appended. */
bool am_xla_kvcache(am_xla_call *c);

/* Linear attention and short convolutions (linear.c). */
bool am_xla_linear(am_xla_call *c);
bool am_xla_linear_gradients(am_xla_call *c);
bool am_xla_linear_step(am_xla_call *c);
bool am_xla_convolution(am_xla_call *c);
bool am_xla_convolution_gradients(am_xla_call *c);
bool am_xla_convolution_step(am_xla_call *c);

#endif
