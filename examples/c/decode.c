/* decode.c – a tiny model of one attention layer writes tokens, with a cache of keys and values in pages.
 *
 *     make lib
 *     cc examples/c/decode.c -Iinclude -Lbuild/lib -lattnmask -lm -Wl,-rpath,build/lib -o decode
 *     ./decode
 *
 * Two sequences share one cache. The prompts are written and attended to in one call, packed one behind the
 * other; then each step gives both sequences a token. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "attnmask.h"

enum { VOCABULARY = 27, HEADS = 4, KV_HEADS = 2, CHANNELS = 32, WIDTH = HEADS * CHANNELS };
enum { SEQUENCES = 2, PAGES = 16, PAGE_SIZE = 8, PAGES_EACH = 8, STEPS = 24 };

static float embeddings[VOCABULARY][WIDTH], k_cache[PAGES][PAGE_SIZE][KV_HEADS][CHANNELS],
    v_cache[PAGES][PAGE_SIZE][KV_HEADS][CHANNELS];

/* The pages of each sequence, in any order. */
static const int32_t table[SEQUENCES][PAGES_EACH] = {{0, 2, 4, 6, 8, 10, 12, 14},
                                                     {15, 13, 11, 9, 7, 5, 3, 1}};

/* The query of a token, turned by its position; its key and value are its first two heads. */
static void embed(int token, int position, float query[WIDTH])
{
    for (int i = 0; i < WIDTH; i += 2) {
        const float angle = (float)position * powf(1e4f, -(float)(i % CHANNELS) / CHANNELS), c = cosf(angle),
                    s = sinf(angle), *x = &embeddings[token][i];
        query[i] = x[0] * c - x[1] * s;
        query[i + 1] = x[0] * s + x[1] * c;
    }
}

/* The token whose embedding is most like the result, among those that were not written just before. */
static int best(const float result[WIDTH], int last)
{
    int found = 0;
    double most = -INFINITY;
    for (int token = 0; token < VOCABULARY; token++) {
        double likeness = token == last ? -INFINITY : 0;
        for (int i = 0; i < WIDTH; i++) likeness += (double)result[i] * (double)embeddings[token][i];
        if (likeness > most) most = likeness, found = token;
    }
    return found;
}

/* Attends from new tokens of both sequences, which go to the cache first: of sequence s those from starts[s]
 * to starts[s + 1] - 1. */
static void attend(const float *query, const int32_t starts[SEQUENCES + 1], const int64_t before[SEQUENCES],
                   float *result)
{
    const int64_t total = starts[SEQUENCES], queries[] = {total, HEADS, CHANNELS},
                  rows[] = {total, KV_HEADS, CHANNELS}, pages[] = {PAGES, PAGE_SIZE, KV_HEADS, CHANNELS},
                  of_table[] = {SEQUENCES, PAGES_EACH}, sequences = SEQUENCES, entries = SEQUENCES + 1;
    const attnmask_array lengths = attnmask_array_of(before, ATTNMASK_INT64, 1, &sequences);
    const attnmask_mask causal = {
        .size = sizeof causal,
        .high = attnmask_number(0),
        .cum_seqlens_q = attnmask_array_of(starts, ATTNMASK_INT32, 1, &entries),
    };
    attnmask_array new_rows = attnmask_array_of(query, ATTNMASK_FLOAT32, 3, rows);
    new_rows.stride[0] = WIDTH * sizeof(float); /* the first heads of each query */
    const attnmask_cached_attention call = {
        .size = sizeof call,
        .query = attnmask_array_of(query, ATTNMASK_FLOAT32, 3, queries),
        .k_cache = attnmask_array_of(k_cache, ATTNMASK_FLOAT32, 4, pages),
        .v_cache = attnmask_array_of(v_cache, ATTNMASK_FLOAT32, 4, pages),
        .key = new_rows,
        .value = new_rows,
        .cache_seqlens = attnmask_numbers(&lengths),
        .block_table = attnmask_array_of(table, ATTNMASK_INT32, 2, of_table),
        .mask = &causal,
        .out = attnmask_array_of(result, ATTNMASK_FLOAT32, 3, queries),
    };
    attnmask_message message;
    if (attnmask_cached_forward(&call, &message) == ATTNMASK_OK) return;
    fprintf(stderr, "%s\n", message.text);
    exit(1);
}

int main(void)
{
    static const char *const prompts[SEQUENCES] = {"hello", "attention in c"};
    static float query[64][WIDTH], result[64][WIDTH];
    int32_t starts[SEQUENCES + 1] = {0, 5, 19};
    int64_t before[SEQUENCES] = {0, 0};
    char text[SEQUENCES][STEPS + 1] = {{0}};
    for (int token = 0; token < VOCABULARY; token++) {
        for (int i = 0; i < WIDTH; i++)
            embeddings[token][i] = (float)((token * WIDTH + i) * 104729L % 2001 - 1000) / 2000;
    }
    for (int s = 0; s < SEQUENCES; s++) {
        for (int t = starts[s]; t < starts[s + 1]; t++) {
            const char letter = prompts[s][t - starts[s]];
            embed(letter == ' ' ? 0 : letter - 'a' + 1, t - starts[s], query[t]);
        }
    }
    for (int step = 0; step < STEPS; step++) {
        attend(query[0], starts, before, result[0]);
        for (int s = 0; s < SEQUENCES; s++) {
            const int last = step ? (text[s][step - 1] == ' ' ? 0 : text[s][step - 1] - 'a' + 1) : -1;
            const int token = best(result[starts[s + 1] - 1], last);
            text[s][step] = (char)(token ? 'a' + token - 1 : ' ');
            before[s] += starts[s + 1] - starts[s];
            embed(token, (int)before[s], query[s]); /* a token each from now on */
        }
        for (int s = 0; s <= SEQUENCES; s++) starts[s] = s;
    }
    for (int s = 0; s < SEQUENCES; s++) printf("%s|%s\n", prompts[s], text[s]);
    return 0;
}
