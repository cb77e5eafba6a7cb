/* threads.h – the parallel loop of the whole library: an OpenMP region that deals out tasks dynamically, can
 * be interrupted by signals, and works in a forked child.
 *
 * Each thread begins with a contiguous part of the tasks, usually the same part in every loop of the same
 * shape. When that is done, it takes tasks from the parts of other threads. So a thread finds data of earlier
 * loops in its cache, reads memory in order, and seldom writes to cache lines that other threads write to.
 *
 * Work is divided into tasks by the shape of the problem, and by the number of threads only where that alters
 * no sum. Tasks do not accumulate floating-point numbers in a shared place, or do so in a fixed order. So
 * results are the same for any number of threads.
 */
#ifndef AM_CORE_RUNTIME_THREADS_H
#define AM_CORE_RUNTIME_THREADS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "kernels/table.h"

/* The errors that the core reports. */
typedef enum {
    AM_OK = 0,
    AM_NO_MEMORY,
    AM_OVERFLOW,    /* an integer result does not fit its type */
    AM_INTERRUPTED, /* `stop` of am_context ended the call; the binding knows the reason */
    AM_FORKED, /* the process is a child that was forked in the middle of a loop, and lacks the threads of
                  that loop */
} am_status;

/* How a call runs. The binding fills it in; the core passes it on. */
typedef struct {
    const am_kernels *kernels;
    int threads;
    bool (*stop)(void *arg); /* whether to end the call; NULL: never; only the calling thread asks */
    void *stop_arg;
} am_context;

typedef struct am_team am_team;

/* Runs task `index`. A long task calls am_checkpoint every millisecond or so, and returns at once if the
 * result is not AM_OK. */
typedef am_status (*am_task)(void *job, ptrdiff_t index, am_team *team);

/* The threads of a call that takes one thread so many microseconds: one, unless the others gain more time
 * than it takes to wake them. */
int am_threads_for(const am_context *context, double microseconds);

/* Runs tasks 0 … count-1, `grain` consecutive ones at a time, in any order; the first status that is not
 * AM_OK ends the loop and is returned. */
am_status am_parallel(const am_context *context, ptrdiff_t count, ptrdiff_t grain, am_task task, void *job);

/* The same for tasks that do little more than read and write `bytes` each: with the threads of
 * am_threads_for, and a grain that follows from the bytes. */
am_status am_parallel_bytes(const am_context *context, ptrdiff_t count, ptrdiff_t bytes, am_task task,
                            void *job);

/* The same for rows of tasks, which are numbered row by row. The tasks of a row begin in order, and one
 * thread takes all tasks of a row as long as there are enough rows. */
am_status am_parallel_rows(const am_context *context, ptrdiff_t rows, ptrdiff_t row_tasks, am_task task,
                           void *job);

/* The number of the thread among those of the loop whose task it runs: 0 … threads - 1. */
int am_thread_number(void);

/* Returns AM_OK, or the reason to stop. The second is for calls of many loops, each too short for the first
 * to ask: they call it every few milliseconds. */
am_status am_checkpoint(am_team *team);
am_status am_checkpoint_between_loops(const am_context *context);

/* Waits until `number` has this value, which an earlier task of the same row sets. */
am_status am_await(am_team *team, const atomic_ptrdiff_t *number, ptrdiff_t value);

/* The size of the last-level cache, or a guess if the system does not report it. */
ptrdiff_t am_cache_bytes(void);

/* Call it once per process, before the first am_parallel. */
void am_threads_init(void);

/* Lowers or raises a bound that tasks have in common, unless it is as low or high already. */
static inline void am_lower_to(atomic_ptrdiff_t *bound, ptrdiff_t value)
{
    ptrdiff_t known = atomic_load(bound);
    while (value < known && !atomic_compare_exchange_weak(bound, &known, value)) continue;
}
static inline void am_raise_to(atomic_ptrdiff_t *bound, ptrdiff_t value)
{
    ptrdiff_t known = atomic_load(bound);
    while (value > known && !atomic_compare_exchange_weak(bound, &known, value)) continue;
}

#endif
