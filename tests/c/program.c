/* program.c – uses every part of the C library in C99, and writes the results to a file, which
 * test_programs.py compares with those of the Python package. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attnmask.h"

static FILE *results;
static attnmask_message message;

static void check(attnmask_status status, const char *what)
{
    if (status == ATTNMASK_OK) return;
    fprintf(stderr, "%s: status %d, %s\n", what, (int)status, message.text);
    exit(1);
}

static void *zeros(int64_t count, size_t size)
{
    void *memory = calloc((size_t)count + 1, size);
    if (!memory) exit(2);
    return memory;
}

/* Numbers from -2 to 2 that Python makes as well. */
static float *numbers(int64_t count, int64_t seed)
{
    float *x = (float *)zeros(count, sizeof *x);
    for (int64_t i = 0; i < count; i++)
        x[i] = (float)((double)((seed * 7919 + i * 104729) % 2001 - 1000) / 500);
    return x;
}

static attnmask_array floats(const float *x, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const int64_t shape[4] = {a, b, c, d};
    return attnmask_array_of(x, ATTNMASK_FLOAT32, 4, shape);
}

static attnmask_array integers(const int32_t *x, int64_t count)
{
    return attnmask_array_of(x, ATTNMASK_INT32, 1, &count);
}

static void write_results(const void *x, int64_t count, size_t size)
{
    if (fwrite(x, size, (size_t)count, results) != (size_t)count) exit(3);
}

enum { B = 2, TQ = 50, TK = 70, H = 4, KV = 2, D = 16, QUERIES = B * TQ * H * D, KEYS = B * TK * KV * D };

/* A causal mask, or a prefix of 10 keys, within a window; ALiBi; and the gradients. */
static void attention(void)
{
    float *q = numbers(QUERIES, 1), *k = numbers(KEYS, 2), *v = numbers(KEYS, 3),
          *d_out = numbers(QUERIES, 4), *out = (float *)zeros(QUERIES, sizeof *out),
          *lse = (float *)zeros(B * H * TQ, sizeof *lse), *d_q = (float *)zeros(QUERIES, sizeof *d_q),
          *d_k = (float *)zeros(KEYS, sizeof *d_k), *d_v = (float *)zeros(KEYS, sizeof *d_v);
    const double slopes[H] = {0.5, 0.25, 0.125, 0};
    const int64_t of_heads[4] = {1, H, 1, 1}, rows[3] = {B, H, TQ};
    const attnmask_node nodes[] = {
        {.kind = ATTNMASK_BAND,
         .operand = {[1] = {.given = 1, .number = 0}, [2] = {.given = 1, .number = TK - TQ}}},
        {.kind = ATTNMASK_KEYS, .operand = {[1] = {.given = 1, .number = 10}}},
        {.kind = ATTNMASK_OR},
    };
    attnmask_mask mask = {.size = sizeof mask};
    attnmask_term alibi = {.kind = ATTNMASK_ALIBI};
    attnmask_attention call = {.size = sizeof call};
    attnmask_gradients gradients = {.size = sizeof gradients};
    mask.low = attnmask_number(-40);
    mask.offset = attnmask_number(TK - TQ);
    mask.nodes = nodes;
    mask.node_count = 3;
    alibi.array = attnmask_array_of(slopes, ATTNMASK_FLOAT64, 4, of_heads);
    call.query = floats(q, B, TQ, H, D);
    call.key = floats(k, B, TK, KV, D);
    call.value = floats(v, B, TK, KV, D);
    call.mask = &mask;
    call.terms = &alibi;
    call.term_count = 1;
    call.out = floats(out, B, TQ, H, D);
    call.lse = attnmask_array_of(lse, ATTNMASK_FLOAT32, 3, rows);
    check(attnmask_forward(&call, &message), "forward");
    gradients.call = &call;
    gradients.d_out = floats(d_out, B, TQ, H, D);
    gradients.d_query = floats(d_q, B, TQ, H, D);
    gradients.d_key = floats(d_k, B, TK, KV, D);
    gradients.d_value = floats(d_v, B, TK, KV, D);
    check(attnmask_backward(&gradients, &message), "backward");
    write_results(out, QUERIES, sizeof *out);
    write_results(lse, B * H * TQ, sizeof *lse);
    write_results(d_q, QUERIES, sizeof *d_q);
    write_results(d_k, KEYS, sizeof *d_k);
    write_results(d_v, KEYS, sizeof *d_v);
    free(q), free(k), free(v), free(d_out), free(out), free(lse), free(d_q), free(d_k), free(d_v);
}

/* Five tokens after 30, one at a time, to pages of int8. */
static void decoding(void)
{
    enum { PAGES = 5, PAGE = 8, NEW = 5, SEQUENCES = 1, CACHE = PAGES * PAGE * KV };
    int8_t *k_cache = (int8_t *)zeros(CACHE * D, 1), *v_cache = (int8_t *)zeros(CACHE * D, 1);
    float *k_scale = (float *)zeros(CACHE, sizeof *k_scale),
          *v_scale = (float *)zeros(CACHE, sizeof *v_scale), *q = numbers(NEW * H * D, 5),
          *k = numbers(35 * KV * D, 6), *v = numbers(35 * KV * D, 7),
          *out = (float *)zeros(NEW * H * D, sizeof *out);
    const int32_t table[PAGES] = {3, 1, 4, 0, 2};
    int64_t slot[30];
    const int64_t bytes[4] = {PAGES, PAGE, KV, D}, scales[4] = {PAGES, PAGE, KV, 1}, pages[2] = {1, PAGES},
                  slots = 30, first[3] = {30, KV, D};
    attnmask_mask causal = {.size = sizeof causal};
    attnmask_cache_rows rows = {.size = sizeof rows};
    attnmask_cached_attention call = {.size = sizeof call};
    for (int i = 0; i < 30; i++) slot[i] = table[i / PAGE] * PAGE + i % PAGE;
    rows.k_cache = call.k_cache = attnmask_array_of(k_cache, ATTNMASK_INT8, 4, bytes);
    rows.v_cache = call.v_cache = attnmask_array_of(v_cache, ATTNMASK_INT8, 4, bytes);
    rows.k_scale = call.k_scale = attnmask_array_of(k_scale, ATTNMASK_FLOAT32, 4, scales);
    rows.v_scale = call.v_scale = attnmask_array_of(v_scale, ATTNMASK_FLOAT32, 4, scales);
    rows.key = attnmask_array_of(k, ATTNMASK_FLOAT32, 3, first);
    rows.value = attnmask_array_of(v, ATTNMASK_FLOAT32, 3, first);
    rows.slot_mapping = attnmask_array_of(slot, ATTNMASK_INT64, 1, &slots);
    check(attnmask_write_cache(&rows, &message), "write");
    causal.high = attnmask_number(0);
    call.mask = &causal;
    call.block_table = attnmask_array_of(table, ATTNMASK_INT32, 2, pages);
    for (int i = 0; i < NEW; i++) {
        call.query = floats(q + i * H * D, SEQUENCES, 1, H, D);
        call.key = floats(k + (30 + i) * KV * D, SEQUENCES, 1, KV, D);
        call.value = floats(v + (30 + i) * KV * D, SEQUENCES, 1, KV, D);
        call.cache_seqlens = attnmask_number(30 + i);
        call.out = floats(out + i * H * D, SEQUENCES, 1, H, D);
        check(attnmask_cached_forward(&call, &message), "cached forward");
    }
    write_results(out, NEW * H * D, sizeof *out);
    write_results(k_cache, CACHE * D, 1);
    free(k_cache), free(v_cache), free(k_scale), free(v_scale), free(q), free(k), free(v), free(out);
}

/* The delta rule over two packed sequences, with its gradients, then one step. */
static void linear(void)
{
    enum { T = 40, STATES = 2 * H * D * D };
    float *q = numbers(T * H * D, 8), *k = numbers(T * H * D, 9), *v = numbers(T * H * D, 10),
          *beta = numbers(T * H, 11), *state = (float *)zeros(STATES, sizeof *state),
          *out = (float *)zeros(T * H * D, sizeof *out), *d_q = (float *)zeros(T * H * D, sizeof *d_q), *kept;
    const int32_t starts[3] = {0, 25, 40};
    const int64_t of_beta[3] = {1, T, H};
    int64_t shape[2];
    attnmask_linear_attention call = {.size = sizeof call}, step;
    attnmask_linear_gradients gradients = {.size = sizeof gradients};
    call.query = floats(q, 1, T, H, D);
    call.key = floats(k, 1, T, H, D);
    call.value = floats(v, 1, T, H, D);
    call.beta = attnmask_array_of(beta, ATTNMASK_FLOAT32, 3, of_beta);
    call.cum_seqlens = integers(starts, 3);
    call.normalize_qk = 1;
    call.out = floats(out, 1, T, H, D);
    call.state = floats(state, 2, H, D, D);
    check(attnmask_linear_kept(&call, shape, &message), "kept");
    kept = (float *)zeros(shape[0] * shape[1], sizeof *kept);
    call.kept = attnmask_array_of(kept, ATTNMASK_FLOAT32, 2, shape);
    check(attnmask_linear_forward(&call, &message), "linear forward");
    write_results(out, T * H * D, sizeof *out);
    gradients.call = &call;
    gradients.d_out = call.query;
    gradients.d_query = floats(d_q, 1, T, H, D);
    check(attnmask_linear_backward(&gradients, &message), "linear backward");
    write_results(d_q, T * H * D, sizeof *d_q);
    memset(&step, 0, sizeof step);
    step.size = sizeof step;
    step.query = floats(q, 2, 1, H, D);
    step.key = floats(k, 2, 1, H, D);
    step.value = floats(v, 2, 1, H, D);
    step.initial_state = call.state;
    step.out = floats(out, 2, 1, H, D);
    check(attnmask_linear_step(&step, NULL, &message), "step");
    write_results(out, 2 * H * D, sizeof *out);
    write_results(state, STATES, sizeof *state);
    free(q), free(k), free(v), free(beta), free(state), free(out), free(d_q), free(kept);
}

static void tokens(void)
{
    const int32_t ids[8] = {0, 0, 1, 1, 1, 3, -1, -1};
    const int64_t of_sums[3] = {1, 6, 1};
    int32_t starts[5], back[6];
    float *x = numbers(6, 12), sum[6];
    attnmask_array of_ids = integers(ids, 8), of_starts = integers(starts, 5), of_back = integers(back, 6);
    attnmask_sums sums = {.size = sizeof sums};
    check(attnmask_segment_ids_to_cu_seqlens(&of_ids, &of_starts, &message), "cu_seqlens");
    check(attnmask_cu_seqlens_to_segment_ids(&of_starts, &of_back, &message), "segment ids");
    sums.x = attnmask_array_of(x, ATTNMASK_FLOAT32, 3, of_sums);
    sums.out = attnmask_array_of(sum, ATTNMASK_FLOAT32, 3, of_sums);
    sums.cum_seqlens = of_starts;
    check(attnmask_cumsum(&sums, &message), "sums");
    write_results(starts, 5, sizeof *starts);
    write_results(back, 6, sizeof *back);
    write_results(sum, 6, sizeof *sum);
    free(x);
}

int main(int count, char **arguments)
{
    attnmask_configuration configuration = {.size = sizeof configuration};
    results = count > 1 ? fopen(arguments[1], "wb") : NULL;
    if (!results) return 4;
    check(attnmask_config(&configuration, &message), "config");
    check(attnmask_set_threads(2, &message), "set threads");
    attention();
    decoding();
    linear();
    tokens();
    if (attnmask_forward(NULL, &message) != ATTNMASK_INVALID) return 5;
    printf("%s %s %d: %s\n", configuration.version, configuration.level, (int)attnmask_threads(),
           message.text);
    return fclose(results) ? 3 : 0;
}
