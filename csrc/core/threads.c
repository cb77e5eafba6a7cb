/* threads.c – the parallel loop on OpenMP, or on the calling thread alone. */
#include "core/threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#    include <omp.h>
#endif

/* The user feels 0.1 s; a GIL hand-over costs microseconds. */
static const long POLL_NANOSECONDS = 20 * 1000 * 1000;

struct am_team {
    const am_run *run;
    am_task task;
    void *job;
    ptrdiff_t count, grain;
    struct timespec polled; /* the calling thread's alone */
    pthread_t caller;
    atomic_ptrdiff_t next;
    atomic_int status;
};

/* GNU OpenMP's pool does not survive fork: a child that used it would wait for threads that are not there. */
static atomic_bool in_forked_child;

static void after_fork(void) { atomic_store(&in_forked_child, true); }

static ptrdiff_t cache_bytes = 16 << 20;

static void init(void)
{
    pthread_atfork(NULL, NULL, after_fork);
#ifdef _SC_LEVEL3_CACHE_SIZE
    long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (bytes > 0) cache_bytes = bytes;
#endif
}

void am_threads_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, init);
}

int am_default_threads(void)
{
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

ptrdiff_t am_cache_bytes(void) { return cache_bytes; }

static void fail(am_team *team, am_status status)
{
    int none = AM_OK;
    atomic_compare_exchange_strong(&team->status, &none, status);
}

am_status am_checkpoint(am_team *team)
{
    if (team->run->stop && pthread_equal(pthread_self(), team->caller)) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        long elapsed =
            (now.tv_sec - team->polled.tv_sec) * 1000000000L + (now.tv_nsec - team->polled.tv_nsec);
        if (elapsed >= POLL_NANOSECONDS) {
            if (team->run->stop(team->run->stop_arg)) fail(team, AM_INTERRUPTED);
            clock_gettime(CLOCK_MONOTONIC, &team->polled);
        }
    }
    return (am_status)atomic_load_explicit(&team->status, memory_order_relaxed);
}

static void work(am_team *team)
{
    while (am_checkpoint(team) == AM_OK) {
        ptrdiff_t begin = atomic_fetch_add_explicit(&team->next, team->grain, memory_order_relaxed);
        if (begin >= team->count) return;
        ptrdiff_t end = team->count - begin < team->grain ? team->count : begin + team->grain;
        for (ptrdiff_t index = begin; index < end; index++) {
            am_status status = team->task(team->job, index, team);
            if (status != AM_OK) {
                fail(team, status);
                return;
            }
        }
    }
}

am_status am_parallel(const am_run *run, ptrdiff_t count, ptrdiff_t grain, am_task task, void *job)
{
    if (grain < 1) grain = 1;
    am_team team = {
        .run = run, .task = task, .job = job, .count = count, .grain = grain, .caller = pthread_self()};
    clock_gettime(CLOCK_MONOTONIC, &team.polled);
#ifdef _OPENMP
    ptrdiff_t shares = count / grain + (count % grain != 0);
    int threads = shares < run->threads ? (int)shares : run->threads;
    if (threads > 1 && !atomic_load(&in_forked_child)) {
#    pragma omp parallel num_threads(threads)
        work(&team);
        return (am_status)atomic_load(&team.status);
    }
#endif
    work(&team);
    return (am_status)atomic_load(&team.status);
}
