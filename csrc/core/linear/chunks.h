/* chunks.h – the chunks of a sequence, as kernels of linear attention take them. */
#ifndef AM_LINEAR_CHUNKS_H
#define AM_LINEAR_CHUNKS_H

#include "core/linear/linear.h"
#include "core/runtime/workspaces.h"

/* What all tasks of a call have in common. */
typedef struct {
    const am_linear *linear;
    const am_kernels *all_kernels;
    const am_linear_kernels *kernels;
    const am_linear_kernels *arithmetic; /* take chunks; of the type of sums, or of bfloat16 */
    am_linear_shape shape;
    am_linear_scratch scratch;
    am_dtype type;         /* of sums */
    ptrdiff_t size;        /* of their elements */
    ptrdiff_t *offsets;    /* [sequences + 1]: states that are kept before each packed sequence */
    ptrdiff_t slices;      /* of the channels of values, which do not meet: a task takes one */
    ptrdiff_t kept_stride; /* from row to row of a state that is kept */
    bool unscaled;         /* queries and keys of chunks are as in memory */
} am_linear_base;

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

/* A chunk of a sequence, value head and slice of its channels, and the memory of whoever takes it. */
typedef struct {
    const am_linear_base *base;
    ptrdiff_t batch, begin, end, sequence; /* begin, end: tokens of the sequence */
    ptrdiff_t head, key_head, channel, channels;
    ptrdiff_t index; /* of the chunk */
    am_linear_buffers *b;
    void *pairs; /* of the tokens of the chunk */
} am_linear_place;

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

/* The first chunk of a task, without memory. */
am_linear_place am_linear_place_of(const am_linear_base *base, ptrdiff_t task);

/* The chunks of a sequence. */
static inline ptrdiff_t am_linear_chunks(const am_linear_place *at)
{
    return am_ceil_div(at->end - at->begin, at->base->linear->chunk);
}

/* What buffers are for. */
enum { AM_LINEAR_READ = 1, AM_LINEAR_FIND = 2, AM_LINEAR_PAIRS = 4, AM_LINEAR_TAKE = 8, AM_LINEAR_BACK = 16 };
/* Allocates `count` of them, for threads or for chains, before anything is written; free them also after a
 * failure. */
am_status am_linear_workspaces_make(am_workspaces *workspaces, const am_linear_base *base, ptrdiff_t count,
                                    int uses);
void am_linear_workspaces_free(am_workspaces *workspaces);

/* The part of an array that belongs to a chunk. */
typedef enum {
    AM_LINEAR_ROWS,    /* the rows of its value head */
    AM_LINEAR_KEYS,    /* the rows of its key head */
    AM_LINEAR_VALUES,  /* the rows of its value head, of the channels of its slice */
    AM_LINEAR_NUMBERS, /* a number per token, as one row */
    AM_LINEAR_STATE,   /* the state of its sequence, of the channels of its slice */
} am_linear_part;

/* Reads it as rows of the type of sums, or writes it. */
void am_linear_read(const am_linear_place *at, const am_array *from, am_linear_part part, void *to,
                    ptrdiff_t stride);
void am_linear_write(const am_linear_place *at, const am_array *to, am_linear_part part, const void *from,
                     ptrdiff_t stride);

/* Reads a chunk, but for values; only what is needed where its pairs are known; and values. */
am_linear_chunk am_linear_load(const am_linear_place *at);
am_linear_chunk am_linear_load_known(const am_linear_place *at);
void am_linear_load_values(const am_linear_place *at, am_linear_chunk *chunk);

/* Plans to prefetch rows: queries, keys and decays by channel; and those of values. */
void am_linear_plan_keys(const am_linear_place *at, am_prefetch_plan *plan);
void am_linear_plan_values(const am_linear_place *at, const am_array *values, am_prefetch_plan *plan);

/* Reads what is missing before a chunk is taken token by token: all in the type of sums, and which decays are
 * -inf. */
void am_linear_load_tokens(const am_linear_place *at, am_linear_chunk *chunk);

/* A chunk with results that are not finite is computed again token by token. Before that, the results of its
 * products are put aside: `tokens` rows of `out`, which may be none, and a state. Afterwards the finite ones
 * are put back. */
void am_linear_put_aside(const am_linear_place *at, ptrdiff_t tokens, const void *out, const void *state);
void am_linear_put_back(const am_linear_place *at, ptrdiff_t tokens, void *out, void *state);

/* Reads a state of an array, or zeros. */
void am_linear_read_state(const am_linear_place *at, const am_array *states, void *to);

/* The number of states that are kept before a sequence, for each head; and the sequence of one. */
ptrdiff_t am_linear_offset(const am_linear_base *base, ptrdiff_t sequence);
ptrdiff_t am_linear_sequence_of(const am_linear_base *base, ptrdiff_t state);

/* State `index` of a sequence among those that are kept; and copies of a slice of it, to it or from it. */
char *am_linear_kept_state(const am_linear_place *at, const void *kept, ptrdiff_t index);
void am_linear_keep(const am_linear_place *at, void *kept, ptrdiff_t index, const char *state);
void am_linear_recall(const am_linear_place *at, const void *kept, ptrdiff_t index, char *state);

#endif
