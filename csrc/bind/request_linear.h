/* request_linear.h – linear attention and short convolutions. */
#ifndef AM_BIND_REQUEST_LINEAR_H
#define AM_BIND_REQUEST_LINEAR_H

#include "bind/request.h"
#include "core/linear/linear.h"
#include "conv/short_convolution.h"

/* Adds an axis for the one token of a step, behind that of the batch. */
am_view am_with_token(am_view v);

/* Checks the shape: "… must be `words`of shape (…)". The message about a step leaves out the axis of tokens.
 */
bool am_check_shape(am_request *r, const am_view *v, const char *name, const char *words, int axes,
                    const ptrdiff_t *shape, bool step);
/* Checks that packed sequences are those of one row and end with it; `starts` may be NULL. */
bool am_check_packed(am_request *r, const char *name, const am_view *v, const ptrdiff_t *starts,
                     ptrdiff_t sequences);
bool am_has_numbers(const am_view *v); /* false for no array, too */

/* The slot of each of `rows` batch rows, from -1, which leaves a row out, to slots - 1, each at most once. */
const ptrdiff_t *am_read_slots(am_request *r, const am_view *indices, ptrdiff_t rows, ptrdiff_t slots);

enum { AM_LINEAR_LEAST_CHUNK = 16, AM_LINEAR_MOST_CHUNK = 256 }; /* tokens */

enum { AM_QUERY, AM_KEY, AM_VALUE, AM_DECAY, AM_BETA, AM_STATE, AM_LINEAR_INPUTS };
/* Checks the inputs, of which the last three may be no arrays, and sets all but scale, chunk and `normalize`.
 * Packed sequences are in `linear` already. */
bool am_read_linear(am_request *r, const am_view inputs[AM_LINEAR_INPUTS], bool step, am_linear *linear);
am_array am_linear_array_of(am_view v);
static inline am_array am_linear_states_of(am_view v) { return am_array_of(&v, AM_HEADS_FIRST); }
/* Sets where the gradients of the inputs go; without data: not wanted. Returns whether any has numbers. */
bool am_set_linear_gradients(am_linear_back *back, const am_view results[AM_LINEAR_INPUTS]);

/* Checks x [B, T, C], weight [C, W] and bias, which may be no array, and sets the sizes and weights. */
bool am_read_conv(am_request *r, const am_view *x, const am_view *weight, const am_view *bias, bool step,
                  am_short_conv *conv);
/* Checks the last tokens before a sequence, or their gradient: [rows, C, W - 1], of the type of x unless that
 * is NULL. */
bool am_check_tail(am_request *r, const am_view *v, const char *name, const am_short_conv *conv,
                   ptrdiff_t rows, const am_view *x);
/* Arrays [B, T, C]; [N, C, W - 1]; and [C, W], or [C] of a bias. */
static inline am_array am_conv_tokens_of(am_view v) { return am_array_of(&v, (am_by_axis){0, 1, -1, 2}); }
static inline am_array am_conv_states_of(am_view v) { return am_array_of(&v, (am_by_axis){0, 2, -1, 1}); }
static inline am_array am_conv_weights_of(am_view v) { return am_array_of(&v, (am_by_axis){-1, 1, -1, 0}); }

#endif
