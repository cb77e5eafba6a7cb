/* chains.h – chunks of which each needs the state of the one before, or backwards of the one behind: how they
 * are divided among threads. A chain is a sequence, a value head and a slice of channels.
 *
 * If there are as many sequences and heads as threads, each is a task. Else they go on in rounds: first the
 * pairs of some chunks of each are found, all at once, and then chains of slices take these chunks side by
 * side. Threads share only the pairs: where processors have no cache in common, what another has written
 * comes slowly. The result is the same bits. */
#ifndef AM_LINEAR_CHAINS_H
#define AM_LINEAR_CHAINS_H

#include "core/linear/chunks.h"

typedef struct {
    const am_linear_base *base;
    bool backward;
    void *job;
    void (*begin)(void *job, const am_linear_place *at); /* before the first chunk, if any */
    am_status (*take)(void *job, const am_linear_place *at, am_linear_chunk *chunk);
    void (*end)(void *job, const am_linear_place *at); /* behind the last one */
} am_linear_chains;

/* Tokens that are sooner taken one by one than as a chunk; forward only. */
enum { AM_LINEAR_FEW = 4 };

am_status am_linear_run_chains(const am_context *context, const am_linear_chains *chains);

/* Runs tasks 0 … count-1, with denormal results as 0. */
am_status am_linear_parallel(const am_context *context, ptrdiff_t count, am_task task, void *job);

/* Whether it goes in rounds. */
bool am_linear_in_rounds(const am_context *context, const am_linear_base *base);

#endif
