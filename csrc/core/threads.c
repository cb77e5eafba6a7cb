/* threads.c – loops as OpenMP regions, one region a loop.
 *
 * A region ends when each of its threads has arrived, also one that the system has not let run because other
 * programs keep the processors busy. That is as fast as can be if nobody spins for long meanwhile, who would
 * lose the processor for a time slice of milliseconds: see attnmask/_loading.py.
 */
#define _GNU_SOURCE /* sched_getcpu, CPU_COUNT */
#include "core/threads.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#    include <omp.h>
#endif

#include "core/arithmetic.h"
#include "core/float_mode.h"
#include "core/forks.h"
#include "core/openmp.h"

/* The user feels 0.1 s; a GIL hand-over costs microseconds. */
static const long POLL_NANOSECONDS = 20 * 1000 * 1000;

/* How often a thread that waits looks before it sleeps or lets others run: about as long as waking it takes.
 */
enum { SPINS = 1 << 11 };

enum { LINE = 64, MOST_PARTS = 64 };

/* Tasks that one thread takes before it helps others; on a line of its own. */
typedef struct {
    _Alignas(LINE) atomic_ptrdiff_t next;
    ptrdiff_t end;
} part;

struct am_team {
    const am_run *run;
    am_task task;
    void *job;
    ptrdiff_t grain;
    am_float_mode mode;     /* the calling thread's, in which all compute */
    struct timespec polled; /* the calling thread's alone */
    pthread_t caller;
    unsigned forks;    /* when the loop began */
    int processor;     /* where the caller ran then; -1 if nobody knows */
    int members;       /* 1: nobody but the caller has tasks of it */
    atomic_int others; /* threads but the caller that are at work */
    atomic_int status;
    int part_count;
    part *parts;
    jmp_buf *out; /* of the region */
};

/* Callers at work on loops that are large enough for a team. */
static atomic_int callers;

/* Where the thread that polls sleeps until the others are through. Python has one such thread, and a team of
 * it waits before it begins another, so one is enough. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t through;
    bool awaited;
} ending = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void make_ending(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#ifdef __linux__
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    pthread_cond_init(&ending.through, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void start_over_in_child(void)
{
    pthread_mutex_init(&ending.lock, NULL);
    make_ending();
    ending.awaited = false;
    atomic_store(&callers, 0);
}

static ptrdiff_t cache_bytes = 16 << 20;

static void init(void)
{
    am_openmp_init();
    make_ending();
    am_forks_init(start_over_in_child);
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

ptrdiff_t am_cache_bytes(void) { return cache_bytes; }

static void fail(am_team *team, am_status status)
{
    int none = AM_OK;
    atomic_compare_exchange_strong(&team->status, &none, status);
}

/* Called by the thread that has called Python's function, which alone may run signal handlers. */
static void poll(am_team *team)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    long elapsed = (now.tv_sec - team->polled.tv_sec) * 1000000000L + (now.tv_nsec - team->polled.tv_nsec);
    if (elapsed < POLL_NANOSECONDS) return;
    if (team->run->stop(team->run->stop_arg)) fail(team, AM_INTERRUPTED);
    if (am_forks() != team->forks && team->members > 1) fail(team, AM_FORKED);
    clock_gettime(CLOCK_MONOTONIC, &team->polled);
}

am_status am_checkpoint(am_team *team)
{
    if (team->run->stop && pthread_equal(pthread_self(), team->caller)) poll(team);
    return (am_status)atomic_load_explicit(&team->status, memory_order_relaxed);
}

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

am_status am_await(am_team *team, const atomic_ptrdiff_t *number, ptrdiff_t value)
{
    for (int spins = 0; atomic_load_explicit(number, memory_order_acquire) != value;) {
        am_status status = am_checkpoint(team);
        if (status != AM_OK) return status;
        if (spins < SPINS)
            spins++, pause_briefly();
        else
            sched_yield(); /* who is waited for may have no processor */
    }
    return AM_OK;
}

static void work_on(am_team *team, part *p)
{
    while (am_checkpoint(team) == AM_OK) {
        ptrdiff_t begin = atomic_fetch_add_explicit(&p->next, team->grain, memory_order_relaxed);
        if (begin >= p->end) return;
        ptrdiff_t end = p->end - begin < team->grain ? p->end : begin + team->grain;
        for (ptrdiff_t index = begin; index < end; index++) {
            am_status status = team->task(team->job, index, team);
            if (status != AM_OK) {
                fail(team, status);
                return;
            }
        }
    }
}

/* One part after the other. */
static void work(am_team *team, int first)
{
    for (int i = 0; i < team->part_count; i++) work_on(team, &team->parts[(first + i) % team->part_count]);
}

#ifdef _OPENMP
static int this_processor(void)
{
#    ifdef __linux__
    return sched_getcpu();
#    else
    return -1;
#    endif
}

/* Where others keep the processors busy, Linux wakes a thread on the processor of the one that wakes it, and
 * leaves it there: the two take turns on one processor, call after call (2 busy processes on 2 cores: sums of
 * 8 MB in 0.24 ms, of 0.14; decoding by 256 keys in 0.134 ms, of 0.048). So a thread that finds itself where
 * the caller runs goes elsewhere: where it may run is taken back for a moment, and is as before afterwards.
 */
static void step_aside(const am_team *team)
{
#    ifdef __linux__
    cpu_set_t own, others;
    if (this_processor() != team->processor || sched_getaffinity(0, sizeof own, &own) != 0) return;
    if (CPU_COUNT(&own) < team->members) return; /* some have to share */
    others = own;
    CPU_CLR((size_t)team->processor, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
    sched_setaffinity(0, sizeof own, &own);
#    else
    (void)team;
#    endif
}

/* What a thread but the caller does; its own mode is for others who begin regions with it. */
static void help(am_team *team, int number)
{
    const am_float_mode own = am_float_mode_get();
    step_aside(team);
    atomic_fetch_add(&team->others, 1);
    am_float_mode_set(team->mode);
    work(team, number);
    am_float_mode_set(own);
    if (atomic_fetch_sub(&team->others, 1) != 1 || !team->run->stop) return;
    pthread_mutex_lock(&ending.lock);
    if (ending.awaited) pthread_cond_signal(&ending.through);
    pthread_mutex_unlock(&ending.lock);
}

static void sleep_until_through(am_team *team)
{
    pthread_mutex_lock(&ending.lock);
    if (atomic_load(&team->others) > 0) {
        struct timespec then;
#    ifdef __linux__
        clock_gettime(CLOCK_MONOTONIC, &then);
#    else
        clock_gettime(CLOCK_REALTIME, &then);
#    endif
        then.tv_nsec += POLL_NANOSECONDS;
        if (then.tv_nsec >= 1000000000L) then.tv_nsec -= 1000000000L, then.tv_sec++;
        ending.awaited = true;
        pthread_cond_timedwait(&ending.through, &ending.lock, &then);
        ending.awaited = false;
    }
    pthread_mutex_unlock(&ending.lock);
}

/* The caller waits for tasks that others have begun: at the end of the region it could not poll. Who comes
 * later finds no tasks. */
static void wait_for_others(am_team *team)
{
    if (!team->run->stop) return;
    for (int spins = 0; atomic_load(&team->others) > 0 && am_checkpoint(team) == AM_OK;) {
        if (spins < SPINS)
            spins++, pause_briefly();
        else
            sleep_until_through(team);
    }
}

/* In a child of a fork in the middle of a region its end would wait for threads that are gone. Whoever leaves
 * it in another way may begin no other one on this thread, which is left over from now on. */
static void leave_if_forked(am_team *team)
{
    if (am_forks() != team->forks) _longjmp(*team->out, 1);
}

/* Begun threads have the signal mask of the one that begins them: they take no signals, which are for
 * Python's threads. */
static void block_signals(sigset_t *before)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, before);
}

static void lead(am_team *team)
{
    jmp_buf out;
    team->out = &out;
    if (_setjmp(out) != 0) return;
    sigset_t before;
    block_signals(&before);
#    pragma omp parallel num_threads(team->members)
    {
        const int number = omp_get_thread_num();
        if (number == 0) {
            pthread_sigmask(SIG_SETMASK, &before, NULL);
            work(team, 0);
            wait_for_others(team);
            leave_if_forked(team);
        } else {
            help(team, number);
        }
    }
}

/* The deputy's region: the team but for the caller. */
static void lead_others(void *arg)
{
    am_team *team = arg;
    const int others = team->members - 1;
    if (others == 1) {
        help(team, 1);
        return;
    }
#    pragma omp parallel num_threads(others)
    help(team, 1 + omp_get_thread_num());
}

static void work_together(am_team *team)
{
    team->processor = this_processor();
    if (!am_is_left_over()) {
        lead(team);
    } else if (am_deputy_start(lead_others, team)) {
        work(team, 0);
        wait_for_others(team);
        am_deputy_wait();
    } else {
        team->members = 1;
        work(team, 0);
    }
}

/* How many threads work on a loop of so many shares. A team has as many threads as the last one of its caller
 * even if there are fewer shares, since GNU's runtime ends the threads that a smaller one leaves out, and
 * beginning them again takes longer than waking them (2 cores, teams of 8 and 2 in turn: 0.15 to 1.9 ms a
 * region, of 8 always: 0.07 ms). Only threads in excess of what OpenMP gives are left out. */
static int team_size(const am_run *run, ptrdiff_t shares)
{
    if (shares < 2 || run->threads < 2) return 1;
    const ptrdiff_t usual = am_max(am_openmp_initial_threads(), 2);
    return (int)am_min(run->threads, am_max(shares, usual));
}

/* Callers whose loops are large enough for a team share the threads that one may have: where each had all,
 * a region would wait for threads that others keep from running. */
static int share(int size, int most)
{
    const int callers_now = atomic_fetch_add(&callers, 1) + 1;
    return (int)am_min(size, am_max(1, most / callers_now));
}
#endif

static void work_as_allowed(am_team *team, ptrdiff_t shares)
{
#ifdef _OPENMP
    const int size = team_size(team->run, shares);
    if (size > 1) {
        team->members = share(size, team->run->threads);
        if (team->members > 1)
            work_together(team);
        else
            work(team, 0);
        if (am_forks() == team->forks) atomic_fetch_sub(&callers, 1); /* a child begins at 0 */
        return;
    }
#endif
    (void)shares;
    work(team, 0);
}

/* `grain` tasks are taken at once, and parts begin at multiples of `unit`. */
static am_status run_loop(const am_run *run, ptrdiff_t count, ptrdiff_t grain, ptrdiff_t unit, am_task task,
                          void *job)
{
    if (count <= 0) return AM_OK;
    const ptrdiff_t shares = am_ceil_div(count, grain), units = am_ceil_div(count, unit);
    part parts[MOST_PARTS];
    am_team team = {.run = run,
                    .task = task,
                    .job = job,
                    .grain = grain,
                    .mode = am_float_mode_get(),
                    .caller = pthread_self(),
                    .forks = am_forks(),
                    .processor = -1,
                    .members = 1,
                    .parts = parts};
    team.part_count = (int)am_min(am_min(run->threads, shares), am_min(units, MOST_PARTS));
    ptrdiff_t given = 0;
    for (int i = 0; i < team.part_count; i++) {
        atomic_init(&parts[i].next, given * unit);
        given += units / team.part_count + (i < units % team.part_count);
        parts[i].end = given == units ? count : given * unit;
    }
    clock_gettime(CLOCK_MONOTONIC, &team.polled);
    work_as_allowed(&team, shares);
    return (am_status)atomic_load(&team.status);
}

am_status am_parallel(const am_run *run, ptrdiff_t count, ptrdiff_t grain, am_task task, void *job)
{
    if (grain < 1) grain = 1;
    return run_loop(run, count, grain, grain, task, job);
}

am_status am_parallel_rows(const am_run *run, ptrdiff_t rows, ptrdiff_t row_tasks, am_task task, void *job)
{
    return run_loop(run, rows * row_tasks, 1, row_tasks, task, job);
}
