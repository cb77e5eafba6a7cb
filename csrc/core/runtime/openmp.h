/* openmp.h – the OpenMP runtime that this library uses, and the number of threads that it gives. */
#ifndef AM_CORE_RUNTIME_OPENMP_H
#define AM_CORE_RUNTIME_OPENMP_H

#include <stdbool.h>

enum { AM_MAX_THREADS = 1024 }; /* a larger number is a mistake */

/* What show_config prints about the runtime. */
typedef struct {
    const char *name; /* and the version of OpenMP that the compiler knows */
    const char *library;
    const char *spin; /* how long a thread of a team spins before it sleeps */
} am_openmp;

/* NULL where the compiler has no OpenMP. */
const am_openmp *am_openmp_info(void);

/* Whether a thread that has forked keeps its team in the child, and a region that it begins there waits for
 * the threads of the parent. GNU's runtime does so; LLVM's starts afresh in a child. */
bool am_openmp_keeps_teams_after_fork(void);

/* Whether another library loaded the runtime before this one, and may have used it already. */
bool am_openmp_loaded_before(void);

/* The number of threads that a loop of the calling thread may use. `requested` is the number that the user
 * has set, or 0 for what OpenMP gives. */
int am_openmp_threads(int requested);

/* The number of threads that OpenMP gives a thread that has not called omp_set_num_threads. */
int am_openmp_initial_threads(void);

/* Call it once per process, while the environment variables are the same as when the runtime was loaded. */
void am_openmp_init(void);

#endif
