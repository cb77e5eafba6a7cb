/* forks.h – how a forked child uses threads.
 *
 * GNU's runtime keeps the threads of a team with the thread that began the region. A forked child does not
 * have them. It does have the thread that called fork, which would wait for them for ever if it began a
 * region. A region that begins on a new thread is safe. So a new thread, the region thread, begins regions
 * for the surviving one.
 *
 * Without it, the first loop of a child whose thread had a team in the parent never ends. With it, two
 * threads of a Zen 5 take 470 µs for the first call of a child (one thread 235; the first
 * call of a new thread in the parent 215), and later ones 8 to 14 µs longer than in the parent, where one
 * takes 16.
 */
#ifndef AM_CORE_RUNTIME_FORKS_H
#define AM_CORE_RUNTIME_FORKS_H

#include <stdbool.h>

/* The number of forks that led to this process since the module was loaded. It changes only in a child. */
unsigned am_forks(void);

/* Whether the calling thread has survived a fork, and so may not begin a region. */
bool am_survived_fork(void);

/* Makes the region thread run work(arg); returns false if that thread is busy or cannot be created. The
 * caller waits for the end with am_region_thread_wait, which returns at once in a child that was forked
 * meanwhile. */
bool am_region_thread_start(void (*work)(void *arg), void *arg);
void am_region_thread_wait(void);

/* Call it once per process, after am_openmp_init. Each child calls `in_child`. */
void am_forks_init(void (*in_child)(void));

#endif
