/* threads.h – one parallel loop for the whole library: an OpenMP region, dynamic, interruptible, safe after
 * fork.
 *
 * Each thread begins with a part of the tasks that lies together, if it can with the same one in each loop of
 * that shape, and helps others when it is through. So it finds in its cache what it has left there, reads
 * memory in order, and does not write to the lines that another one is writing to.
 *
 * Tasks are numbered by the shape of the problem, by the number of threads only where that alters no sum, and
 * share no floating-point accumulator: that is what makes every result the same for any number of threads.
 */
#ifndef AM_THREADS_H
#define AM_THREADS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "core/status.h"
#include "kernels/table.h"

/* What a call runs with. The binding fills it in, the core passes it down. */
typedef struct {
    const am_kernels *kernels;
    int threads;
    bool (*stop)(void *arg); /* asked now and then by the calling thread: has the user had enough? */
    void *stop_arg;
} am_run;

typedef struct am_team am_team;

/* Does task `index`. Long tasks ask am_checkpoint every millisecond or so and return at once if it says no.
 */
typedef am_status (*am_task)(void *job, ptrdiff_t index, am_team *team);

/* Runs tasks 0 … count-1, `grain` consecutive ones at a time, in any order; the first status that is not
 * AM_OK ends the loop and is returned. */
am_status am_parallel(const am_run *run, ptrdiff_t count, ptrdiff_t grain, am_task task, void *job);

/* The same for rows of tasks, numbered row by row: those of a row begin in their order, and one thread goes
 * through a row as long as there are rows enough. */
am_status am_parallel_rows(const am_run *run, ptrdiff_t rows, ptrdiff_t row_tasks, am_task task, void *job);

/* AM_OK, or the reason to stop. */
am_status am_checkpoint(am_team *team);

/* Waits until `number`, which a task before this one in its row sets, has this value. */
am_status am_await(am_team *team, const atomic_ptrdiff_t *number, ptrdiff_t value);

/* The size of the last-level cache, or a guess. */
ptrdiff_t am_cache_bytes(void);

/* Once per process, before the first am_parallel. */
void am_threads_init(void);

#endif
