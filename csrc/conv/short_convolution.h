/* short_convolution.h – causal convolutions of each channel along time, with a few steps of history:
 *
 *     z[t] = bias + Σ weight[j] x[t - W + 1 + j],   out[t] = z[t], or z[t] / (1 + e^-z[t])
 *
 * What comes before a sequence is its state, W - 1 tokens of which the last is the youngest, or zeros. */
#ifndef AM_SHORT_CONVOLUTION_H
#define AM_SHORT_CONVOLUTION_H

#include "core/arrays/array.h"
#include "core/runtime/threads.h"

/* Arrays of tokens and channels, without heads. States have W - 1 tokens, weights W, and a bias one; their
 * batch rows are sequences, or shared by all. */
typedef struct {
    am_dtype type; /* of the sums: AM_FLOAT32 or AM_FLOAT64 */
    ptrdiff_t channels, width, sequences;
    const ptrdiff_t *starts; /* [sequences + 1] of packed sequences, or NULL: rows of `tokens` each */
    ptrdiff_t tokens;
    bool silu;
    am_array x, weight, bias, before; /* before: the states */
    am_array out, after;              /* the result, and the states at the end */
} am_short_conv;

am_status am_short_conv_forward(const am_context *context, const am_short_conv *conv);

/* Gradients: `out` and `after` of the convolution are those that come in, of which `after` may be missing;
 * these are the results. d_bias and d_before are missing where they are not wanted. */
typedef struct {
    am_short_conv conv;
    am_array d_x, d_weight, d_bias, d_before;
} am_short_conv_gradients;
am_status am_short_conv_backward(const am_context *context, const am_short_conv_gradients *gradients);

/* One token of each row, `sequences` of them, whose state is before[slots[row]], and is updated there. A slot
 * below 0 leaves out the row: its result is 0. */
am_status am_short_conv_step(const am_context *context, const am_short_conv *conv, const ptrdiff_t *slots);

#endif
