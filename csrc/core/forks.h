/* forks.h – what a forked child may do with threads.
 *
 * GNU's runtime keeps the threads of a team with the thread that began the region. In a forked child they are
 * gone, but the thread that called fork survives, and waits for them for ever if it begins a region. A region
 * that begins on a new thread is safe, so a region thread begins regions for the surviving one.
 */
#ifndef AM_FORKS_H
#define AM_FORKS_H

#include <stdbool.h>

/* How many forks have led to this process since the module was loaded; it changes in a child alone. */
unsigned am_forks(void);

/* Whether the calling thread is the one that survived a fork, and may not begin a region. */
bool am_survived_fork(void);

/* Lets the region thread do work(arg); false if it is busy or cannot be created. The caller waits for its end
 * with am_region_thread_wait, which returns at once in a child that was forked meanwhile. */
bool am_region_thread_start(void (*work)(void *arg), void *arg);
void am_region_thread_wait(void);

/* Once per process, after am_openmp_init. `in_child` is called in each child. */
void am_forks_init(void (*in_child)(void));

#endif
