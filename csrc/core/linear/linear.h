/* linear.h – linear attention of sequences, forward, backward, and one token at a time. See kernels/linear/
 * for what happens in a chunk. */
#ifndef AM_LINEAR_H
#define AM_LINEAR_H

#include "core/arrays/array.h"
#include "core/runtime/threads.h"
#include "kernels/linear/table.h"

typedef struct {
    ptrdiff_t heads, key_heads, key_dim, value_dim; /* of values; of queries and keys; K; V */
    am_array query, key, value, decay, beta;
    am_array state;  /* the initial ones: sequences, heads, key_dim as tokens, and value_dim */
    bool by_channel; /* decay has an axis of channels */
    bool normalize;
    double scale;
    ptrdiff_t chunk;
    const ptrdiff_t *starts; /* [sequences + 1] of packed sequences, or NULL: batch rows of `tokens` each */
    ptrdiff_t sequences, tokens;
} am_linear;

/* Where results go. States are of the type of sums. */
typedef struct {
    am_array out;
    am_array state; /* data may be NULL */
    void *kept; /* the state before each chunk and after the last, [am_linear_kept] of them; may be NULL */
} am_linear_results;

/* float64 for float64, else float32. */
am_dtype am_linear_type(const am_linear *linear);

/* How many states are kept for gradients, of so many numbers each; false if the numbers do not fit. */
bool am_linear_kept(const am_linear *linear, ptrdiff_t *states, ptrdiff_t *numbers);

am_status am_linear_forward_all(const am_context *context, const am_linear *linear,
                                const am_linear_results *results);

/* Gradients, of the shapes and types of the inputs; arrays without data are not wanted. */
typedef struct {
    am_array d_out, d_state; /* of the results; d_state may lack data */
    const void *kept;
    am_array query, key, value, decay, beta, state;
    bool decay_of_heads; /* one number per head, whose gradient sums over all tokens */
} am_linear_back;

am_status am_linear_backward_all(const am_context *context, const am_linear *linear,
                                 const am_linear_back *back);

/* One token of each batch row, in place. `linear` has one token; its `state` lacks data. */
typedef struct {
    am_array out, state;    /* state: slots, heads, key_dim as tokens, and value_dim, of the type of sums */
    const ptrdiff_t *slots; /* of each batch row; -1: the row is left out. NULL: slot i for row i */
} am_linear_step;

am_status am_linear_step_all(const am_context *context, const am_linear *linear, const am_linear_step *step);

#endif
