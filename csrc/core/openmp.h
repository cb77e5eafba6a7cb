/* openmp.h – which OpenMP runtime this library runs with, and how many threads it grants. */
#ifndef AM_OPENMP_H
#define AM_OPENMP_H

#include <stdbool.h>

enum { AM_MAX_THREADS = 1024 }; /* more is asked for by mistake only */

/* What show_config tells of the runtime. */
typedef struct {
    const char *name; /* and the version of OpenMP that the compiler knows */
    const char *library;
    const char *spin; /* how long a thread of a team looks for work before it sleeps */
} am_openmp;

/* NULL where the compiler has no OpenMP. */
const am_openmp *am_openmp_info(void);

/* Whether a child of a fork that begins a region on the thread that has forked waits for the threads of its
 * parent, as in GNU's runtime. LLVM's starts afresh in a child. */
bool am_openmp_keeps_teams_after_fork(void);

/* Whether another library had loaded the runtime before, and may have used it already. */
bool am_openmp_loaded_before(void);

/* The threads that a loop of the calling thread may use if the user of this library asks for `asked`, or for
 * 0: for what OpenMP gives. */
int am_openmp_threads(int asked);

/* The threads that OpenMP gives a thread that has not called omp_set_num_threads. */
int am_openmp_initial_threads(void);

/* Once per process, while the variables of the environment are as they were when the runtime was loaded. */
void am_openmp_init(void);

#endif
