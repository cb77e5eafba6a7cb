/* chunks.h – the chunks of a sequence, as kernels of linear attention take them. */
#ifndef AM_LINEAR_CHUNKS_H
#define AM_LINEAR_CHUNKS_H

#include <string.h>

#include "core/arrays/array.h"
#include "core/linear/linear.h"
#include "core/runtime/workspaces.h"

/* --- Rows of arrays of any type and stride, to and from those that kernels see --- */

/* The rows [tokens, last axis] at a batch row, a token and a head; their number is not set. */
static inline am_array am_linear_rows_at(const am_linear_array *a, ptrdiff_t batch, ptrdiff_t token,
                                         ptrdiff_t head)
{
    char *data = (char *)a->data + batch * a->stride[0] + token * a->stride[1] + head * a->stride[2];
    return (am_array){
        .data = data, .type = a->type, .stride = {.token = a->stride[1], .channel = a->stride[3]}};
}

/* Reads rows as numbers of `type`, and pads each with zeros up to `stride`. */
static inline void am_linear_read(const am_kernels *kernels, am_dtype type, void *to, ptrdiff_t stride,
                                  am_array from, ptrdiff_t rows, ptrdiff_t columns)
{
    from.shape.token = rows, from.shape.channel = columns;
    am_gather(kernels, type, to, stride, &from);
}

/* Writes them; the array is writeable. */
static inline void am_linear_write(const am_kernels *kernels, am_dtype type, am_array to, const void *from,
                                   ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t columns)
{
    to.shape.token = rows, to.shape.channel = columns;
    am_scatter(kernels, &to, type, from, stride);
}

/* --- Chunks --- */

/* What all tasks of a call have in common. */
typedef struct {
    const am_linear *linear;
    const am_kernels *all_kernels;
    const am_linear_kernels *kernels;
    const am_linear_kernels *chunks; /* take chunks; the same or for bfloat16 */
    am_linear_shape shape;
    am_linear_scratch scratch;
    am_dtype type;         /* of sums */
    ptrdiff_t size;        /* of their elements */
    ptrdiff_t *offsets;    /* [sequences + 1]: states that are kept before each packed sequence */
    ptrdiff_t slices;      /* of the channels of values, which do not meet: a task takes one */
    ptrdiff_t kept_stride; /* from row to row of a state that is kept */
    bool unscaled;         /* queries and keys of chunks are as in memory */
} am_linear_base;

/* A sequence, value head, and slice of its channels. */
typedef struct {
    ptrdiff_t batch, begin, end, sequence, head, channel, channels;
} am_linear_place;

/* Numbers of one chunk, and memory for the kernels. */
typedef struct {
    char *q, *k, *v, *out, *decay, *factor, *reset, *beta;
    char *exact, *whole;         /* not by channel; by channel */
    char *sums;                  /* of decays, float64 */
    char *q_inverse, *k_inverse; /* of the norms; NULL: none */
    char *states[2];
    char *pairs, *scratch;
    char *spare; /* of results that are not finite */
    char *wide;  /* rows of the type of sums, where chunks are of bfloat16 */
    struct {
        char *state, *d_out, *d_q, *d_k, *d_v, *d_decay, *d_beta, *d_u;
        char *token_scratch; /* allocated when it is needed */
    } back;
} am_linear_buffers;

/* What chunks are taken for. */
typedef enum { AM_LINEAR_FORWARD, AM_LINEAR_BACKWARD, AM_LINEAR_STEP } am_linear_way;

/* Where a table holds the kernels for chunks: those of the arithmetic that takes the type of queries, keys
 * and values. If these differ, or for steps, those of the type of sums. */
const am_linear_kernels *const *am_linear_chosen(const am_kernels *kernels, const am_linear *linear,
                                                 am_linear_way way);

/* Fills in the base; release it also after a failure. */
am_status am_linear_begin(am_linear_base *base, const am_context *context, const am_linear *linear,
                          am_linear_way way);
/* Cuts channels into slices, as many as keep all threads busy. A result is the same bits however they are
 * cut, but what the pairs of tokens take is taken for each slice. */
void am_linear_cut_channels(am_linear_base *base, const am_context *context);
void am_linear_end(am_linear_base *base);

am_linear_place am_linear_place_of(const am_linear_base *base, ptrdiff_t task);

/* What buffers are for. */
enum { AM_LINEAR_READ = 1, AM_LINEAR_FIND = 2, AM_LINEAR_PAIRS = 4, AM_LINEAR_TAKE = 8, AM_LINEAR_BACK = 16 };
/* Allocates `count` of them, for threads or for chains, before anything is written; free them also after a
 * failure. */
am_status am_linear_workspaces_make(am_workspaces *workspaces, const am_linear_base *base, ptrdiff_t count,
                                    int uses);
void am_linear_workspaces_free(am_workspaces *workspaces);

/* Reads the chunk that begins at a token, but for values; only what is needed where its pairs are known; and
 * values. */
am_linear_chunk am_linear_load(const am_linear_base *base, const am_linear_buffers *buffers,
                               const am_linear_place *at, ptrdiff_t token);
am_linear_chunk am_linear_load_known(const am_linear_base *base, const am_linear_buffers *buffers,
                                     const am_linear_place *at, ptrdiff_t token);
void am_linear_load_values(const am_linear_base *base, const am_linear_buffers *buffers,
                           const am_linear_place *at, ptrdiff_t token, am_linear_chunk *chunk);

/* Adds rows that are read or written soon: queries, keys and decays by channel; and those of values. */
void am_linear_keys_soon(const am_linear_base *base, const am_linear_place *at, ptrdiff_t token,
                         am_linear_soon *soon);
void am_linear_values_soon(const am_linear_base *base, const am_linear_array *values,
                           const am_linear_place *at, ptrdiff_t token, am_linear_soon *soon);

/* Reads what is missing before a chunk is taken token by token: all in the type of sums, and which decays are
 * -inf. */
void am_linear_load_tokens(const am_linear_base *base, const am_linear_buffers *buffers,
                           const am_linear_place *at, ptrdiff_t token, am_linear_chunk *chunk);

/* Chunks of a place, and the first token of one. */
ptrdiff_t am_linear_chunks(const am_linear_base *base, const am_linear_place *at);
ptrdiff_t am_linear_token(const am_linear_base *base, const am_linear_place *at, ptrdiff_t index);

/* Before a chunk is taken token by token, what its products gave is put aside; and behind that, what of it is
 * finite comes back. `tokens` rows of `out`, which may be none, and a state. */
void am_linear_put_aside(const am_linear_base *base, const am_linear_buffers *buffers, ptrdiff_t tokens,
                         const void *out, const void *state);
void am_linear_put_back(const am_linear_base *base, const am_linear_buffers *buffers, ptrdiff_t tokens,
                        void *out, void *state);

/* A state of an array, or zeros. */
void am_linear_read_state(const am_linear_base *base, const am_linear_array *states,
                          const am_linear_place *at, void *to);
void am_linear_write_state(const am_linear_base *base, const am_linear_array *states,
                           const am_linear_place *at, const void *from);

/* Rows of an array of values, or of one state. */
am_array am_linear_values_at(const am_linear_array *array, const am_linear_place *at, ptrdiff_t token);

/* The number of states that are kept before a sequence, for each head; and the sequence of one. */
ptrdiff_t am_linear_offset(const am_linear_base *base, ptrdiff_t sequence);
ptrdiff_t am_linear_sequence_of(const am_linear_base *base, ptrdiff_t state);

/* State `index` of a sequence among those that are kept. */
char *am_linear_kept_state(const am_linear_base *base, const void *kept, const am_linear_place *at,
                           ptrdiff_t index);

/* Copy a slice of it, to it or from it. */
void am_linear_keep(const am_linear_base *base, char *kept, const am_linear_place *at, const char *state);
void am_linear_recall(const am_linear_base *base, const char *kept, const am_linear_place *at, char *state);

#endif
