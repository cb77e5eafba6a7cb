/* table.h – the kernels of linear attention, for one type of numbers.
 *
 * They see one chunk of one sequence and value head. Matrices are rows of numbers of that type; each row is
 * padded with zeros to a multiple of AM_LINEAR_PAD numbers, so that no loop has a tail. The state is
 * [key_dim][value_dim]: a row for each channel of a key.
 */
#ifndef AM_LINEAR_TABLE_H
#define AM_LINEAR_TABLE_H

#include <stdbool.h>
#include <stddef.h>

#include "kernels/table.h"

#define AM_LINEAR_PAD 16

typedef enum {
    AM_DECAY_BY_TOKEN,   /* a number per token */
    AM_DECAY_BY_CHANNEL, /* a number for each row of the state */
} am_linear_decay;

typedef struct {
    ptrdiff_t tokens, key_dim, value_dim;             /* of a chunk, at most; K; V */
    ptrdiff_t token_stride, key_stride, value_stride; /* these sizes, padded */
    am_linear_decay decay;
    bool delta;     /* with beta */
    bool normalize; /* what is left to do to the queries and keys of a chunk, also the scale */
    double scale;
} am_linear_shape;

/* The arguments of a chunk, and what comes of it. Queries and keys are as in memory where results can take
 * their scale and norms: forward, with a decay per token or in bfloat16. Else they are scaled and, if asked
 * for, normalized. Where the kernels read bfloat16, q, k and v are of that type, and rows of q and k padded
 * to a multiple of 2 AM_LINEAR_PAD, and so are tokens. */
typedef struct {
    const am_linear_shape *shape;
    ptrdiff_t tokens;  /* of this chunk */
    const void *q, *k; /* [tokens][key_stride] */
    const void *v;     /* [tokens][v_stride]; value_stride, unless each row is read once */
    ptrdiff_t v_stride;
    const void *factor; /* exp(decay): [tokens], or [tokens][key_stride] by channel */
    /* Equal decays have factors that are rounded equally, which adds up from token to token: after 4,096
     * tokens, float32 had lost 6e-5 of the result. So what is multiplied into states is more precise: */
    const double *exact; /* not by channel, factor in float64 */
    const void *whole;   /* by channel, exp(Σ decay) of all tokens: [key_stride] */
    const void *reset;   /* bool: which factors are 0 for a decay of -inf, as factor; NULL: none */
    const void *beta;    /* [tokens]; NULL without the delta rule */
    const void *state;   /* before the chunk: [key_dim][value_stride] */
    void *next;          /* the state after it */
    void *out;           /* [tokens][value_stride] */
    /* What is read or written soon, NULL: not known. Processors do not read ahead from page to page; with it
     * forward takes 0.83 to 0.92 of the time. */
    am_prefetch_plan *prefetch;
} am_linear_chunk;

/* Gradients of a chunk. `next` of the chunk is the state that the forward pass left. */
typedef struct {
    const void *d_out;  /* [tokens][value_stride] */
    const void *d_next; /* of the state after the chunk */
    void *d_state;      /* of the state before it */
    void *d_q, *d_k;    /* [tokens][key_stride] */
    void *d_v;          /* [tokens][value_stride] */
    void *d_decay;      /* as factor */
    void *d_beta;       /* [tokens] */
    void *d_u;          /* of what is added for each key: [tokens][value_stride] */
    bool known;         /* backward_state has been here: d_u holds what it left, and d_state is not written */
} am_linear_gradients;

/* The pairs of tokens in a chunk, which depend on queries, keys, decays and beta alone: several threads may
 * then share them, each with a slice of the channels of values. With a decay per token they are little, and
 * threads read queries and keys themselves. */
typedef void am_linear_pairs(const am_linear_chunk *chunk, void *pairs, void *scratch);

/* The chunk by products of matrices, or token by token. The first returns false if a result is not finite:
 * then NaN or Inf may have reached what it should not, and the second, which is slower, does better. */
typedef bool am_linear_forward(const am_linear_chunk *chunk, void *pairs, void *scratch);
typedef void am_linear_forward_tokens(const am_linear_chunk *chunk, void *scratch);
/* Gradients of a chunk, by products of matrices or token by token, as forward. */
typedef bool am_linear_backward(const am_linear_chunk *chunk, const am_linear_gradients *gradients,
                                void *pairs, void *scratch);
typedef void am_linear_backward_tokens(const am_linear_chunk *chunk, const am_linear_gradients *gradients,
                                       void *scratch);

/* What each kernel needs of memory, in bytes. */
typedef struct {
    ptrdiff_t pairs, find, forward, backward, backward_tokens;
} am_linear_scratch;

struct am_linear_kernels {
    am_dtype type; /* of q, k and v */
    am_linear_scratch (*scratch)(const am_linear_shape *shape);
    am_linear_pairs *find_pairs;
    am_linear_forward *forward;
    am_linear_forward_tokens *forward_tokens;
    am_linear_backward *backward;
    am_linear_backward
        *backward_state; /* only of the state, to the bits of `backward`; pairs are left as they are */
    am_linear_backward_tokens *backward_tokens;
    /* Copies those blocks of AM_LINEAR_PAD channels of results, and of a state, that are finite in both.
     * Channels do not meet, so what becomes of one does not depend on which others a thread takes. */
    void (*keep_finite)(const am_linear_shape *shape, ptrdiff_t tokens, void *const to[2],
                        const void *const from[2]);
    /* factor[r][c] = e^decay[r][c], and sums[c] = Σ decay[r][c]; decay has rows of `stride` numbers, factor
     * of `columns`. Then dst[c] = e^sums[c], for a multiple of AM_LINEAR_PAD; sums are not kept. */
    void (*factors)(void *factor, double *sums, const void *decay, ptrdiff_t stride, ptrdiff_t rows,
                    ptrdiff_t columns);
    void (*exp_of_sums)(void *dst, double *sums, ptrdiff_t count);
    /* Multiplies rows of `stride` numbers by `scale`, and unless `inverse` is NULL by 1 / √(Σ x² + 1e-6),
     * which it writes there for each row. The second does so with gradients of the results `x`. */
    void (*scale_rows)(void *x, void *inverse, double scale, ptrdiff_t rows, ptrdiff_t stride);
    void (*scale_rows_back)(void *d, const void *x, const void *inverse, double scale, ptrdiff_t rows,
                            ptrdiff_t stride);
};

#endif
