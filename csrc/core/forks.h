/* forks.h – what a forked child may do with threads.
 *
 * GNU's runtime keeps the threads of a team with the thread that has begun the region. In a child they are
 * gone, but the one thread that the child has, which has forked, still waits for them if it begins a region:
 * for ever. A region that begins on a new thread is safe, so that a deputy leads those of that one thread.
 */
#ifndef AM_FORKS_H
#define AM_FORKS_H

#include <stdbool.h>

/* How many forks have led to this process since the module was loaded; it changes in a child alone. */
unsigned am_forks(void);

/* Whether the calling thread is the one that a child has from its parent, and may not begin a region. */
bool am_is_left_over(void);

/* Lets another thread do work(arg); false if none can be had now. The caller waits for its end with
 * am_deputy_wait, which returns at once in a child that was forked meanwhile. */
bool am_deputy_start(void (*work)(void *arg), void *arg);
void am_deputy_wait(void);

/* Once per process, after am_openmp_init. `in_child` is called in each child. */
void am_forks_init(void (*in_child)(void));

#endif
