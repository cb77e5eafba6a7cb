/* threads.c – runs each parallel loop as one OpenMP region.
 *
 * A region ends when all of its threads have arrived, including those that the system has not scheduled
 * because other programs keep the processors busy. A thread that spins for long while it waits loses its
 * processor for a time slice of milliseconds, so threads spin briefly: see attnmask/_common/loading.py.
 */
#define _GNU_SOURCE /* sched_getcpu, CPU_COUNT */
#include "core/runtime/threads.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#    include <omp.h>
#endif

#include "core/runtime/sizes.h"
#include "core/runtime/float_mode.h"
#include "core/runtime/forks.h"
#include "core/runtime/openmp.h"

/* The time between two polls for signals. Users notice 0.1 s; taking the GIL costs microseconds. */
static const long POLL_NANOSECONDS = 20 * 1000 * 1000;
static const long FAST_NANOSECONDS = 100 * 1000; /* of a few checkpoints that come fast */

/* The number of times that a waiting thread checks its condition before it sleeps or yields: about as long as
 * it takes to wake a thread. */
enum { SPINS = 1 << 11 };

enum { CACHE_LINE = 64, MOST_PARTS = 64 };

/* A part of the tasks. One thread takes them first, before it takes those of other parts. Each part has a
 * cache line of its own. */
typedef struct {
    _Alignas(CACHE_LINE) atomic_ptrdiff_t next;
    ptrdiff_t end;
} part;

struct am_team {
    const am_context *context;
    am_task task;
    void *job;
    ptrdiff_t grain;
    am_float_mode mode;     /* of the calling thread; all threads compute in it */
    struct timespec polled; /* when the calling thread polled last */
    struct timespec looked; /* when it looked at the clock last */
    int unlooked;           /* how many checkpoints may pass until it looks again */
    pthread_t caller;
    unsigned forks;    /* am_forks() when the loop began */
    int processor;     /* where the caller ran then; -1 if it is not known */
    int members;       /* the threads of the team; 1: the caller alone */
    atomic_int active; /* threads other than the caller that run tasks */
    atomic_int status;
    int part_count;
    part *parts;
    jmp_buf *region_end; /* where a forked child leaves the region */
};

/* The number of threads that are calling loops large enough for a team. */
static atomic_int callers;

/* `waiting_threads`: of all callers, the threads that wait for the next loop. `possible_threads`: the most
 * that have existed or could have existed at a time, so that so many need not be tried again. `own_threads`:
 * how many a caller has. */
static atomic_int waiting_threads, possible_threads;
static pthread_key_t own_threads;

static void forget_threads(void *own) { atomic_fetch_sub(&waiting_threads, (int)(intptr_t)own); }

/* The thread that polls sleeps here until the other threads of its team have ended their tasks. Only Python's
 * main thread polls, and it has one team at a time, so one condition is enough. If it yielded its processor
 * again and again instead, decoding would take 1.09 of the processor time, and causal attention 1.05 (two
 * threads on two busy cores of a Zen 5). */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t reached;
    bool awaited;
} ending = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void make_ending(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#ifdef __linux__
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    pthread_cond_init(&ending.reached, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void start_over_in_child(void)
{
    pthread_mutex_init(&ending.lock, NULL);
    make_ending();
    ending.awaited = false;
    atomic_store(&callers, 0);
    atomic_store(&waiting_threads, 0);
    atomic_store(&possible_threads, 0);
    pthread_setspecific(own_threads, NULL);
}

static ptrdiff_t cache_bytes = 16 << 20;

static void init(void)
{
    am_openmp_init();
    make_ending();
    pthread_key_create(&own_threads, forget_threads);
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

static _Thread_local int thread_number;
int am_thread_number(void) { return thread_number; }

static void fail(am_team *team, am_status status)
{
    int none = AM_OK;
    atomic_compare_exchange_strong(&team->status, &none, status);
}

static void end_tiles(const am_team *team)
{
    am_end_tiles *end = team->context->kernels->end_tiles;
    if (end) end();
}

static long nanoseconds(struct timespec from, struct timespec to)
{
    return (to.tv_sec - from.tv_sec) * 1000000000L + (to.tv_nsec - from.tv_nsec);
}

/* Only the calling thread polls: signal handlers run in it. Where checkpoints come fast, most do not look at
 * the clock, which would take a fiftieth of the time of short sequences. */
static void poll(am_team *team)
{
    enum { SKIPPED = 7 };
    if (team->unlooked > 0) {
        team->unlooked--;
        return;
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    team->unlooked = nanoseconds(team->looked, now) < FAST_NANOSECONDS ? SKIPPED : 0;
    team->looked = now;
    if (nanoseconds(team->polled, now) < POLL_NANOSECONDS) return;
    end_tiles(team); /* handlers of signals may run any code */
    if (team->context->stop(team->context->stop_arg)) fail(team, AM_INTERRUPTED);
    if (am_forks() != team->forks && team->members > 1) fail(team, AM_FORKED);
    clock_gettime(CLOCK_MONOTONIC, &team->polled);
}

am_status am_checkpoint(am_team *team)
{
    if (team->context->stop && pthread_equal(pthread_self(), team->caller)) poll(team);
    return (am_status)atomic_load_explicit(&team->status, memory_order_relaxed);
}

am_status am_checkpoint_between_loops(const am_context *context)
{
    return context->stop && context->stop(context->stop_arg) ? AM_INTERRUPTED : AM_OK;
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
            sched_yield(); /* the thread that sets the number may have no processor */
    }
    return AM_OK;
}

static void run_part(am_team *team, part *p)
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

static void run_parts(am_team *team, int first)
{
    for (int i = 0; i < team->part_count; i++) run_part(team, &team->parts[(first + i) % team->part_count]);
    end_tiles(team);
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

/* If other programs keep the processors busy, Linux wakes a thread on the processor of its waker, and leaves
 * it there. Then two threads share one processor, call after call. Next to 2 busy processes on 2 cores, sums
 * of 8 MB take 0.24 ms instead of 0.14, and decoding by 256 keys 0.134 ms instead of 0.048. So a thread that
 * finds itself on the caller's processor removes that from its affinity mask, which moves it to another
 * processor. Then it restores the mask. */
static void leave_callers_processor(const am_team *team)
{
#    ifdef __linux__
    cpu_set_t own, others;
    if (this_processor() != team->processor || sched_getaffinity(0, sizeof own, &own) != 0) return;
    if (CPU_COUNT(&own) < team->members) return; /* there are too few processors for all threads */
    others = own;
    CPU_CLR((size_t)team->processor, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
    sched_setaffinity(0, sizeof own, &own);
#    else
    (void)team;
#    endif
}

/* Only Python's own threads handle signals. The other threads of a team block them themselves, once: if the
 * caller blocked them during each region, so that new threads inherit that, a region would take 0.5 µs
 * longer. */
static void block_signals(void)
{
    static _Thread_local bool blocked;
    if (blocked) return;
    sigset_t all;
    sigfillset(&all);
    blocked = pthread_sigmask(SIG_SETMASK, &all, NULL) == 0;
}

/* Runs tasks in a thread of the team other than the caller. Afterwards the thread gets its own floating-point
 * mode back, since other libraries use it, too. */
static void run_member(am_team *team, int number)
{
    block_signals();
    const am_float_mode own = am_float_mode_get();
    leave_callers_processor(team);
    thread_number = number;
    atomic_fetch_add(&team->active, 1);
    am_float_mode_set(team->mode);
    run_parts(team, number);
    am_float_mode_set(own);
    if (atomic_fetch_sub(&team->active, 1) != 1 || !team->context->stop) return;
    pthread_mutex_lock(&ending.lock);
    if (ending.awaited) pthread_cond_signal(&ending.reached);
    pthread_mutex_unlock(&ending.lock);
}

static void sleep_until_others_end(am_team *team)
{
    pthread_mutex_lock(&ending.lock);
    if (atomic_load(&team->active) > 0) {
        struct timespec then;
#    ifdef __linux__
        clock_gettime(CLOCK_MONOTONIC, &then);
#    else
        clock_gettime(CLOCK_REALTIME, &then);
#    endif
        then.tv_nsec += POLL_NANOSECONDS;
        if (then.tv_nsec >= 1000000000L) then.tv_nsec -= 1000000000L, then.tv_sec++;
        ending.awaited = true;
        pthread_cond_timedwait(&ending.reached, &ending.lock, &then);
        ending.awaited = false;
    }
    pthread_mutex_unlock(&ending.lock);
}

/* Waits for the tasks that other threads have begun, since the caller could not poll at the end of the
 * region. A thread that arrives later finds no tasks. */
static void wait_for_others(am_team *team)
{
    if (!team->context->stop) return;
    for (int spins = 0; atomic_load(&team->active) > 0 && am_checkpoint(team) == AM_OK;) {
        if (spins < SPINS)
            spins++, pause_briefly();
        else
            sleep_until_others_end(team);
    }
}

/* A child that was forked in the middle of a region jumps out of it, since the end of the region would wait
 * for threads that the child does not have. From then on its thread counts as one that survived a fork. */
static void leave_if_forked(am_team *team)
{
    if (am_forks() != team->forks) _longjmp(*team->region_end, 1);
}

static void *wait_for_lock(void *lock)
{
    pthread_mutex_lock(lock);
    pthread_mutex_unlock(lock);
    return NULL;
}

/* How many threads the system creates, up to `wanted`: they are there at the same time, and end. */
static int creatable_threads(int wanted)
{
    pthread_t *threads = malloc((size_t)wanted * sizeof *threads);
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    int count = 0;
    if (!threads) return 0;
    pthread_mutex_lock(&lock);
    while (count < wanted && pthread_create(&threads[count], NULL, wait_for_lock, &lock) == 0) count++;
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&lock);
    free(threads);
    return count;
}

/* The size of a region that the calling thread can begin. If a runtime cannot create a thread, it ends the
 * process, so threads are created on trial first. A runtime keeps the threads of the caller's last region
 * until the caller ends. So only additional threads are tried, and only if more threads will wait than ever
 * before: creating 63 threads takes milliseconds. */
static int possible_members(int members)
{
    const int own = (int)(intptr_t)pthread_getspecific(own_threads);
    int more = members - 1 - own;
    const int waiting = atomic_fetch_add(&waiting_threads, more) + more;
    if (more > 0 && waiting > atomic_load(&possible_threads)) {
        const int missing = more - creatable_threads(more);
        atomic_fetch_sub(&waiting_threads, missing);
        more -= missing;
        for (int known = atomic_load(&possible_threads);
             known < waiting - missing &&
             !atomic_compare_exchange_weak(&possible_threads, &known, waiting - missing);)
            continue;
    }
    if (more != 0) pthread_setspecific(own_threads, (void *)(intptr_t)(own + more));
    return 1 + own + more;
}

static void run_region(am_team *team)
{
    jmp_buf region_end;
    team->region_end = &region_end;
    if (_setjmp(region_end) != 0) return;
#    pragma omp parallel num_threads(team->members)
    {
        const int number = omp_get_thread_num();
        if (number == 0) {
            run_parts(team, 0);
            wait_for_others(team);
            leave_if_forked(team);
        } else {
            run_member(team, number);
        }
    }
}

/* Runs the team without the caller, in a region that another thread begins for the caller. */
static void run_region_of_others(void *arg)
{
    am_team *team = arg;
    const int others = possible_members(team->members - 1);
    if (others == 1) {
        run_member(team, 1);
        return;
    }
#    pragma omp parallel num_threads(others)
    run_member(team, 1 + omp_get_thread_num());
}

static void run_team(am_team *team)
{
    team->processor = this_processor();
    if (!am_survived_fork()) {
        team->members = possible_members(team->members);
        run_region(team);
    } else if (am_region_thread_start(run_region_of_others, team)) {
        run_parts(team, 0);
        wait_for_others(team);
        am_region_thread_wait();
    } else {
        team->members = 1;
        run_parts(team, 0);
    }
}

/* The number of threads for a loop whose tasks are dealt out in `grains` portions. Even with fewer portions,
 * a team has as many threads as OpenMP gives: GNU's runtime destroys the threads that a smaller team leaves
 * idle, and creating threads takes longer than waking them. On 2 cores, a region takes 0.07 ms with teams of
 * 8, and 0.15 to 1.9 ms if teams of 8 and 2 alternate. Only threads in excess of what OpenMP gives are left
 * out. */
static int team_size(const am_context *context, ptrdiff_t grains)
{
    if (grains < 2 || context->threads < 2) return 1;
    const ptrdiff_t usual = am_max(am_openmp_initial_threads(), 2);
    return (int)am_min(context->threads, am_max(grains, usual));
}

/* Callers that run loops at the same time share the threads that a single caller may have: if each had all of
 * them, a region would wait for threads that another team keeps from running. */
static int fair_share(int size, int most)
{
    const int callers_now = atomic_fetch_add(&callers, 1) + 1;
    return (int)am_min(size, am_max(1, most / callers_now));
}
#endif

static void run_shared(am_team *team, ptrdiff_t grains)
{
#ifdef _OPENMP
    const int size = team_size(team->context, grains);
    if (size > 1) {
        team->members = fair_share(size, team->context->threads);
        if (team->members > 1)
            run_team(team);
        else
            run_parts(team, 0);
        if (am_forks() == team->forks) atomic_fetch_sub(&callers, 1); /* a child has set it to 0 */
        return;
    }
#endif
    (void)grains;
    run_parts(team, 0);
}

/* A thread takes `grain` tasks at once; parts begin at multiples of `unit`. */
static am_status run_loop(const am_context *context, ptrdiff_t count, ptrdiff_t grain, ptrdiff_t unit,
                          am_task task, void *job)
{
    if (count <= 0) return AM_OK;
    const ptrdiff_t grains = am_ceil_div(count, grain), units = am_ceil_div(count, unit);
    part parts[MOST_PARTS];
    am_team team = {.context = context,
                    .task = task,
                    .job = job,
                    .grain = grain,
                    .mode = am_float_mode_get(),
                    .caller = pthread_self(),
                    .forks = am_forks(),
                    .processor = -1,
                    .members = 1,
                    .parts = parts};
    team.part_count = (int)am_min(am_min(context->threads, grains), am_min(units, MOST_PARTS));
    ptrdiff_t given = 0;
    for (int i = 0; i < team.part_count; i++) {
        atomic_init(&parts[i].next, given * unit);
        given += units / team.part_count + (i < units % team.part_count);
        parts[i].end = given == units ? count : given * unit;
    }
    clock_gettime(CLOCK_MONOTONIC, &team.polled);
    team.looked = team.polled;
    const int outer = thread_number; /* a task may run a loop of its own */
    thread_number = 0;
    run_shared(&team, grains);
    thread_number = outer;
    return (am_status)atomic_load(&team.status);
}

am_status am_parallel(const am_context *context, ptrdiff_t count, ptrdiff_t grain, am_task task, void *job)
{
    if (grain < 1) grain = 1;
    return run_loop(context, count, grain, grain, task, job);
}

/* To wake a sleeping thread takes a microsecond of the thread that wakes it. Two that are awake begin and end
 * a loop in 3: sums that take one thread 5, 9 and 18 µs take two 5, 7 and 11. */
int am_threads_for(const am_context *context, double microseconds)
{
    return microseconds < 3 + 1.2 * context->threads ? 1 : context->threads;
}

am_status am_parallel_bytes(const am_context *context, ptrdiff_t count, ptrdiff_t bytes, am_task task,
                            void *job)
{
    enum { BYTES = 110 << 10, PORTION = 1 << 18 }; /* BYTES: in a microsecond */
    am_context own = *context;
    own.threads = am_threads_for(context, (double)count * (double)bytes / BYTES);
    return am_parallel(&own, count, PORTION / am_max(bytes, 1), task, job);
}

am_status am_parallel_rows(const am_context *context, ptrdiff_t rows, ptrdiff_t row_tasks, am_task task,
                           void *job)
{
    return run_loop(context, rows * row_tasks, 1, row_tasks, task, job);
}
