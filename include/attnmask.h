/* attnmask.h - attention on CPUs, from C and C++: masks, exact attention and its gradients, caches for
 * decoding, linear attention, and sums over tokens. Link with -lattnmask.
 *
 *     // 2 batch rows of 128 tokens, 8 heads of 64 channels
 *     static float query[2 * 128 * 8 * 64], key[2 * 128 * 8 * 64]; // and value, out
 *     const int64_t shape[] = {2, 128, 8, 64};
 *     const attnmask_mask causal = {.size = sizeof causal, .high = attnmask_number(0)};
 *     const attnmask_attention call = {
 *         .size = sizeof call,
 *         .query = attnmask_array_of(query, ATTNMASK_FLOAT32, 4, shape),
 *         .key = attnmask_array_of(key, ATTNMASK_FLOAT32, 4, shape),
 *         .value = attnmask_array_of(value, ATTNMASK_FLOAT32, 4, shape),
 *         .mask = &causal,
 *         .out = attnmask_array_of(out, ATTNMASK_FLOAT32, 4, shape),
 *     };
 *     attnmask_message message;
 *     if (attnmask_forward(&call, &message) != ATTNMASK_OK) puts(message.text);
 *
 * What holds for all functions:
 *
 * - A field that is zero is not given; messages call that NULL. The fields that a call needs say so.
 * - A struct begins with its size, `sizeof` of the variable, by which later versions know what it lacks.
 * - A function checks all that it is given, then computes. It returns a status, and writes what is wrong to
 *   the caller's message, which may be NULL. After an error nothing has been written, but for
 *   ATTNMASK_NO_MEMORY and ATTNMASK_OVERFLOW, which may come in the middle.
 * - Results are arrays of the caller's. They share no memory with anything else that is given.
 * - Any number of threads may call at once. A call itself uses attnmask_threads(); results have the same bits
 *   for any number of threads.
 * - Axes in comments: B batch rows, T tokens (Tq of queries, Tk of keys), H heads (Hkv of keys and values, a
 *   divisor of H: query head h has key head h / (H / Hkv)), D channels (Dv of values), N sequences. Packed
 *   sequences lie one behind the other in the tokens of one batch row; cum_seqlens [N + 1], int32 or int64,
 *   says where each begins, and in the end where the last one ends. */
#ifndef ATTNMASK_H
#define ATTNMASK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifdef __cplusplus
#    define ATTNMASK_ZERO                                                                                    \
        {                                                                                                    \
        }
#else
#    define ATTNMASK_ZERO {0}
#endif
#if defined(__GNUC__)
#    define ATTNMASK_API __attribute__((visibility("default")))
#else
#    define ATTNMASK_API
#endif

/* --- Status --- */

typedef enum {
    ATTNMASK_OK,
    ATTNMASK_INVALID,   /* something does not fit; the message names it */
    ATTNMASK_NO_MEMORY, /* for what a call needs beside the caller's arrays */
    ATTNMASK_OVERFLOW,  /* an integer does not fit the type of the result */
    ATTNMASK_FORKED,    /* the process was forked in the middle of the call, which the child cannot end */
} attnmask_status;

typedef struct {
    char text[512];
} attnmask_message;

/* --- Arrays --- */

typedef enum {
    ATTNMASK_BOOL, /* a byte, 0 or 1 */
    ATTNMASK_INT8,
    ATTNMASK_UINT8, /* of caches: two numbers of four bits */
    ATTNMASK_INT16,
    ATTNMASK_UINT16,
    ATTNMASK_INT32,
    ATTNMASK_UINT32,
    ATTNMASK_INT64,
    ATTNMASK_UINT64,
    ATTNMASK_FLOAT16,
    ATTNMASK_BFLOAT16,
    ATTNMASK_FLOAT32,
    ATTNMASK_FLOAT64,
    ATTNMASK_FLOAT8_E4M3, /* float8_e4m3fn; these two of caches alone */
    ATTNMASK_FLOAT8_E5M2,
} attnmask_type;

/* Numbers in memory, aligned to their size. An array that is not given is all zeros. An empty one has a
 * shape, and needs no data. */
typedef struct {
    void *data;
    int32_t type; /* attnmask_type */
    int32_t axes; /* at most 5 */
    int64_t shape[5];
    int64_t stride[5]; /* in bytes, of any sign; 0: the numbers are the same along that axis */
} attnmask_array;

/* An array in C order, the last axis side by side; of what is only read, too. */
static inline attnmask_array attnmask_array_of(const void *data, attnmask_type type, int32_t axes,
                                               const int64_t *shape)
{
    static const uint8_t bytes[] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 1, 1};
    attnmask_array a = ATTNMASK_ZERO;
    int64_t stride = (unsigned)type < sizeof bytes ? bytes[type] : 1;
    a.data = (void *)(uintptr_t)data;
    a.type = (int32_t)type;
    a.axes = axes;
    for (int32_t i = axes; i-- > 0 && i < 5;) {
        a.shape[i] = shape[i];
        a.stride[i] = stride;
        stride *= shape[i] > 0 ? shape[i] : 1;
    }
    return a;
}

/* An integer for all, or an array of integers, one each. */
typedef struct {
    int32_t given; /* 0: neither; 1: the number; 2: the array */
    int64_t number;
    const attnmask_array *array;
} attnmask_operand;

static inline attnmask_operand attnmask_number(int64_t number)
{
    attnmask_operand o = ATTNMASK_ZERO;
    o.given = 1;
    o.number = number;
    return o;
}

static inline attnmask_operand attnmask_numbers(const attnmask_array *array)
{
    attnmask_operand o = ATTNMASK_ZERO;
    o.given = 2;
    o.array = array;
    return o;
}

/* --- Masks --- */

/* The terms of a mask, with their operands in order, and operators. A term allows a pair of a query q and a
 * key k, both counted from 0, if the condition holds. Integers are one for all, or an array of one for each
 * batch row [B], unless it says otherwise; an operand that is not given sets no limit, or is 0. With shifts a
 * term looks at query q + q_shift and key k + k_shift instead: the mask is a part of a larger one. */
typedef enum {
    ATTNMASK_ALL,       /* no operands: every pair */
    ATTNMASK_BAND,      /* low, high, offset: low <= k - q - offset <= high. Low and high: one, or [H] */
    ATTNMASK_DIAGONAL,  /* low, high, offset, at: a band about the key at[q]; at [B, Tq] of int32 */
    ATTNMASK_CHUNK,     /* size, q_shift, k_shift: q / size == k / size */
    ATTNMASK_KEYS,      /* begin, end: begin <= k < end */
    ATTNMASK_EQUAL,     /* q_ids, k_ids, exclude_zero: ids, [B, T] or [B, H, T], are equal and not negative,
                         * nor 0 if exclude_zero is 1 */
    ATTNMASK_SEQUENCES, /* cum_seqlens_q, cum_seqlens_k, low, high, offset: both are in the same sequence, and
                         * in a band as counted from its start; the last three one, or [N] */
    ATTNMASK_DENSE,     /* array, q_shift, k_shift: its number is not 0; [B, H, Tq, Tk], axes 1 if shared */
    ATTNMASK_TILES,     /* places, q_size, k_size, bits, q_shift, k_shift: pairs lie in tiles of q_size times
                         * k_size. places [B, H, tiles, tiles] of int32 has 0 for one of dead pairs, 1 for one
                         * of live pairs, and 2 + i where each pair has a bit: bits [patterns, 64, 8] of uint8,
                         * the first pair the lowest bit */
    ATTNMASK_NEIGHBORHOOD, /* grid, q_shift, k_shift: tokens are points of a grid in row-major order, and
                            * along each axis the key is in the query's window. grid [axes, 5]: of each axis
                            * its length, kernel, stride, dilation, and 1 if it is causal */
    ATTNMASK_NOT,          /* of the mask before it */
    ATTNMASK_AND,          /* these three of the two masks before them */
    ATTNMASK_OR,
    ATTNMASK_XOR,
} attnmask_kind;

typedef struct {
    int32_t kind; /* attnmask_kind */
    attnmask_operand operand[8];
} attnmask_node;

/* Who attends to whom: all that is given holds at once. */
typedef struct {
    size_t size;
    /* low <= k - q - offset <= high: high 0 is a causal mask, low -128 a window of 128 keys to the left. One
     * for all, or low and high [H], or [N] of packed sequences, in which k and q are counted from the starts
     * of theirs; offset one for each batch row or sequence, such as Tk - Tq if the last query is at the last
     * key. */
    attnmask_operand low, high, offset;
    /* Packed sequences of queries and keys; of keys may be left out if they are those of queries. */
    attnmask_array cum_seqlens_q, cum_seqlens_k;
    /* Terms and operators in postfix order: segments band AND dense OR is (segments and band) or dense. What
     * no operator has taken is joined by AND. */
    const attnmask_node *nodes;
    int64_t node_count;
} attnmask_mask;

/* Writes whether each pair is allowed, as 1 or 0, to out [B, H, Tq, Tk], of bool or uint8:
 *
 *     uint8_t pairs[1 * 1 * 5 * 5];
 *     const int64_t shape[] = {1, 1, 5, 5};
 *     const attnmask_array out = attnmask_array_of(pairs, ATTNMASK_UINT8, 4, shape);
 *     attnmask_fill_mask(&causal, &out, &message); // pairs[q * 5 + k] is k <= q */
ATTNMASK_API attnmask_status attnmask_fill_mask(const attnmask_mask *mask, const attnmask_array *out,
                                                attnmask_message *message);

/* --- Attention --- */

/* What else changes logits and weights; at most one of each kind. Logits are scaled products; what is added
 * to them is added before the soft cap, and the mask and the sinks come after it. A bias of -inf masks its
 * pair out. In packed sequences k and q are counted from the starts of theirs. */
typedef enum {
    ATTNMASK_BIAS,          /* array [B, H, Tq, Tk] of floats, axes 1 if shared: added to logits */
    ATTNMASK_ALIBI,         /* array [B or N, H, 1, 1], axes 1 if shared: adds -slope |k - q - offset| */
    ATTNMASK_RELATIVE_BIAS, /* array [1, H, 1, L], integer: adds the number of k - q - offset - integer, or
                             * the nearest that there is */
    ATTNMASK_SOFT_CAP,      /* number: logits become number tanh(logit / number) */
    ATTNMASK_DROPOUT,       /* number, integer: drops weights with this probability, by this seed */
    ATTNMASK_SINKS,         /* array [1, H, 1, S]: logits of S keys without values */
    ATTNMASK_GRID_BIAS, /* array [1, H, 1, rows * width], integer width: tokens are points of a grid of h rows
                         * of w points, rows is 2 h - 1 and width 2 w - 1. Adds the number at row yk - yq + h
                         * - 1 and place xk - xq + w - 1, where the query is at point q + offset */
} attnmask_term_kind;

/* Arrays are float32 or float64; a bias has any floating-point type. The heads' axis may be 1 for all. */
typedef struct {
    int32_t kind; /* attnmask_term_kind */
    double number;
    int64_t integer;
    attnmask_array array;
    /* Takes the gradient, where attnmask_backward is called: in C order, of a bias as its array and of its
     * type, of other arrays float64 [H, L]. */
    attnmask_array gradient;
} attnmask_term;

/* out[q] is the sum of w[k] value[k] over the keys that q may see, where w is the softmax of the logits
 * scale query[q] key[k], with the terms; 0 if q sees none. Needed: query, key, value and out. An example is
 * at the top of this file. */
typedef struct {
    size_t size;
    attnmask_array query;      /* [B, Tq, H, D], float16, bfloat16, float32 or float64 */
    attnmask_array key, value; /* [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv] of the same type */
    double scale;              /* 0: 1 / sqrt(D) */
    int32_t unnormalized;      /* 1: out is not divided by the sum of the weights */
    const attnmask_mask *mask; /* NULL: every pair */
    const attnmask_term *terms;
    int64_t term_count;
    attnmask_array out; /* [B, Tq, H, Dv] of the type of query */
    attnmask_array lse; /* [B, H, Tq]: the log of the sum of the weights; float64 for float64, else float32 */
    attnmask_array wide_out; /* as out, of the type of lse: gradients of 16 bits are better with it */
} attnmask_attention;

ATTNMASK_API attnmask_status attnmask_forward(const attnmask_attention *call, attnmask_message *message);

/* The gradients of a call, whose out (or wide_out) and lse are what attnmask_forward has written. Needed: all
 * but d_lse:
 *
 *     attnmask_gradients gradients = {.size = sizeof gradients, .call = &call, .d_out = ...};
 *     gradients.d_query = attnmask_array_of(d_query, ATTNMASK_FLOAT32, 4, shape); // d_key, d_value likewise
 *     attnmask_backward(&gradients, &message); */
typedef struct {
    size_t size;
    const attnmask_attention *call;
    attnmask_array d_out, d_lse;            /* as out and lse: read */
    attnmask_array d_query, d_key, d_value; /* as query, key and value: written */
} attnmask_gradients;

ATTNMASK_API attnmask_status attnmask_backward(const attnmask_gradients *gradients,
                                               attnmask_message *message);

/* --- Caches of keys and values --- */

/* Attention over a cache, to which new keys and values are written first. Contiguous caches have a row for
 * each sequence, [B, Tmax, Hkv, D]; paged ones are [pages, page_size, Hkv, D] with a table [B, pages of a
 * sequence], whose entries behind a sequence's tokens are not read. The last query of a sequence is at its
 * last key. Needed: query, k_cache, v_cache and out.
 *
 * Caches are of a floating-point type; of int8 or float8, times scales: float32 [B or pages, tokens, Hkv, 1],
 * or [1, 1, Hkv, D] for each channel; or of uint8 [.., D / 2], whose bytes hold two numbers from 0 to 15, the
 * first one in the lower four bits, times a scale plus an offset for each group of 32, 64 or 128 channels,
 * float32 or float16 [B or pages, tokens, Hkv, D / group, 2]. New tokens are rounded, and their scales
 * written, but for those of channels, which are yours. Values may be some channels of the keys, in the same
 * memory (latent attention): new tokens then have no value.
 *
 *     attnmask_cached_attention step = {.size = sizeof step, .mask = &causal};
 *     step.query = attnmask_array_of(query, ATTNMASK_FLOAT32, 4, one_token); // key, value and out likewise
 *     step.k_cache = attnmask_array_of(k_cache, ATTNMASK_FLOAT32, 4, longest); // and v_cache
 *     step.cache_seqlens = attnmask_number(tokens);
 *     attnmask_cached_forward(&step, &message); // the cache has tokens + 1 now */
typedef struct {
    size_t size;
    attnmask_array query; /* [B, Tq, H, D]; with cum_seqlens_q of mask [total, H, D], as key and value then */
    attnmask_array k_cache, v_cache, k_scale, v_scale;
    attnmask_array key, value;       /* [B, Tnew, Hkv, D] and Dv: written behind what the cache has */
    attnmask_array cu_seqlens_k_new; /* of packed new tokens; not given: as of queries */
    attnmask_operand cache_seqlens;  /* tokens in the cache before the new ones: one, or [N] of them; not
                                      * given: all of a contiguous cache */
    attnmask_array block_table;      /* int32 or int64 */
    double scale;                    /* 0: 1 / sqrt(D) */
    const attnmask_mask *mask;       /* without offset and cum_seqlens_k; keys of its terms are those of the
                                      * longest sequence, each counted from 0 */
    int64_t chunk;                   /* keys of the same chunk of so many positions alone; 0: none */
    int64_t prefix; /* tokens at the beginning that all sequences share, in whole pages: read once for all.
                     * Not with nodes, low, chunk, a bias, or terms of distances */
    const attnmask_term *terms; /* a bias may have more keys than there are tokens */
    int64_t term_count;
    attnmask_array out; /* [B, Tq, H, Dv], or [total, H, Dv], of the type of query */
    attnmask_array lse; /* [B, H, Tq], or [H, total]; float64 for float64, else float32 */
} attnmask_cached_attention;

ATTNMASK_API attnmask_status attnmask_cached_forward(const attnmask_cached_attention *call,
                                                     attnmask_message *message);

/* Writes keys and values [T, Hkv, D] to slots of a cache. slot_mapping [T]: page * page_size + place; -1: not
 * at all. Needed: k_cache, v_cache, key and slot_mapping; and value, unless values are channels of the keys.
 *
 *     attnmask_cache_rows rows = {.size = sizeof rows, .k_cache = step.k_cache, .v_cache = step.v_cache};
 *     rows.slot_mapping = attnmask_array_of(slots, ATTNMASK_INT64, 1, &count); // and key, value
 *     attnmask_write_cache(&rows, &message); */
typedef struct {
    size_t size;
    attnmask_array k_cache, v_cache, k_scale, v_scale;
    attnmask_array key, value, slot_mapping;
} attnmask_cache_rows;

ATTNMASK_API attnmask_status attnmask_write_cache(const attnmask_cache_rows *rows, attnmask_message *message);

/* --- Linear attention --- */

/* Each head has a state S [K, V]. For each token it becomes exp(decay) S + key value', the outer product,
 * and out is scale query' S. With beta, which is the delta rule, value is beta (value - exp(decay) key' S)
 * there. Needed: query, key, value and out:
 *
 *     attnmask_linear_attention call = {.size = sizeof call, .query = ..., .key = ...}; // value, out
 *     call.decay = attnmask_array_of(decay, ATTNMASK_FLOAT32, 1, &heads);
 *     attnmask_linear_forward(&call, &message); */
typedef struct {
    size_t size;
    attnmask_array query, key;    /* [B, T, Hk, K] */
    attnmask_array value;         /* [B, T, H, V], H a multiple of Hk */
    attnmask_array decay;         /* [H], [B, T, H] or [B, T, H, K]: logarithms, at most 0 */
    attnmask_array beta;          /* [B, T, H] */
    attnmask_array initial_state; /* [B or N, H, K, V]; float64 for float64, else float32 */
    attnmask_array cum_seqlens;   /* of packed sequences, B = 1 */
    double scale;                 /* 0: 1 / sqrt(K) */
    int32_t normalize_qk;         /* 1: queries and keys are divided by their length */
    int32_t chunk;                /* tokens computed at once: a power of two from 16 to 256; 0: 64 */
    attnmask_array out;           /* as value, of the type of query */
    attnmask_array state;         /* as initial_state: the last ones */
    attnmask_array kept; /* for gradients: [states, numbers], C order, as attnmask_linear_kept says */
} attnmask_linear_attention;

ATTNMASK_API attnmask_status attnmask_linear_forward(const attnmask_linear_attention *call,
                                                     attnmask_message *message);

/* Finds the shape of `kept`, whose type is that of a state. The call needs no results for this:
 *
 *     int64_t shape[2];
 *     attnmask_linear_kept(&call, shape, &message);
 *     call.kept = attnmask_array_of(malloc(shape[0] * shape[1] * sizeof(float)), ATTNMASK_FLOAT32, 2, shape);
 */
ATTNMASK_API attnmask_status attnmask_linear_kept(const attnmask_linear_attention *call, int64_t shape[2],
                                                  attnmask_message *message);

/* The gradients of a call, whose `kept` attnmask_linear_forward has written. Needed: call and d_out.
 * Gradients that are not given are not computed:
 *
 *     attnmask_linear_gradients gradients = {.size = sizeof gradients, .call = &call, .d_out = ...};
 *     gradients.d_query = attnmask_array_of(d_query, ATTNMASK_FLOAT32, 4, of_query);
 *     attnmask_linear_backward(&gradients, &message); */
typedef struct {
    size_t size;
    const attnmask_linear_attention *call;
    attnmask_array d_out, d_state;                                            /* read */
    attnmask_array d_query, d_key, d_value, d_decay, d_beta, d_initial_state; /* as the inputs: written */
} attnmask_linear_gradients;

ATTNMASK_API attnmask_status attnmask_linear_backward(const attnmask_linear_gradients *gradients,
                                                      attnmask_message *message);

/* One token of each batch row: T = 1. initial_state is a pool [slots, H, K, V], which is read and written
 * in place; state_indices [B] name the slot of each row, -1 for none, and may be NULL if row i has slot i:
 *
 *     call.initial_state = attnmask_array_of(states, ATTNMASK_FLOAT32, 4, of_states);
 *     attnmask_linear_step(&call, NULL, &message); */
ATTNMASK_API attnmask_status attnmask_linear_step(const attnmask_linear_attention *call,
                                                  const attnmask_array *state_indices,
                                                  attnmask_message *message);

/* --- Tokens --- */

/* Sums over time that begin again with each sequence and chunk. Needed: x and out:
 *
 *     const attnmask_sums sums = {.size = sizeof sums, .x = of_x, .chunk = 64, .out = of_out};
 *     attnmask_cumsum(&sums, &message); */
typedef struct {
    size_t size;
    attnmask_array x;           /* [B, T, H] or [B, T, H, S]; integers or floating-point */
    attnmask_array cum_seqlens; /* of packed sequences, B = 1 */
    int64_t chunk;              /* steps, a power of two, counted from the start of a sequence; 0: none */
    int32_t reverse;            /* 1: sums from the end */
    double scale;               /* of each sum; 0: none */
    attnmask_array out;         /* as x; of integers, or floating-point */
} attnmask_sums;

ATTNMASK_API attnmask_status attnmask_cumsum(const attnmask_sums *sums, attnmask_message *message);

/* From segment ids [B, T] or [T], where negative ones are padding, to cum_seqlens [N + 1], int32 or int64:
 * the tokens of id 0, then of id 1 and so on. Ids are below N. And back: the number of its sequence for each
 * token, to ids [T]:
 *
 *     attnmask_segment_ids_to_cu_seqlens(&ids, &starts, &message); // 0 0 1 1 1 -1 -> 0 2 5, for N = 2
 *     attnmask_cu_seqlens_to_segment_ids(&starts, &ids, &message); // 0 2 5 -> 0 0 1 1 1 */
ATTNMASK_API attnmask_status attnmask_segment_ids_to_cu_seqlens(const attnmask_array *segment_ids,
                                                                const attnmask_array *cum_seqlens,
                                                                attnmask_message *message);
ATTNMASK_API attnmask_status attnmask_cu_seqlens_to_segment_ids(const attnmask_array *cum_seqlens,
                                                                const attnmask_array *segment_ids,
                                                                attnmask_message *message);

/* --- The library --- */

/* How many threads a call uses: as many as were set, else as OpenMP says (OMP_NUM_THREADS). 0: as OpenMP
 * says again. The one setting; all threads of the process share it. */
ATTNMASK_API int32_t attnmask_threads(void);
ATTNMASK_API attnmask_status attnmask_set_threads(int32_t threads, attnmask_message *message);

/* What computes here. The environment variable ATTNMASK_ISA names another level before the first call.
 *
 *     attnmask_configuration here = {.size = sizeof here};
 *     if (attnmask_config(&here, NULL) == ATTNMASK_OK) printf("%s on %s\n", here.version, here.level); */
typedef struct {
    size_t size;
    const char *version;
    const char *level;  /* of instruction sets, such as "avx2" */
    const char *openmp; /* its name and version; NULL: one thread */
} attnmask_configuration;

ATTNMASK_API attnmask_status attnmask_config(attnmask_configuration *configuration,
                                             attnmask_message *message);

#ifdef __cplusplus
}
#endif

#endif
