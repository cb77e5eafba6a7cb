/* threads.c – a small pool of threads of the library's own.
 *
 * Not OpenMP: there a parallel region ends only when each of its threads has arrived, also one that the
 * system has not let run because other programs keep the processors busy, and a call of 0.1 ms waits for a
 * time slice of 8 ms. Here the caller works as well, and waits at the end only for those who took tasks:
 * whoever comes late finds nothing to do. Nor does a pool of one's own mind fork, or lack on systems whose
 * compiler has no OpenMP.
 */
#define _GNU_SOURCE /* CPU_COUNT */
#include "core/threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "core/arithmetic.h"

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
    bool taken; /* by a thread that begins with it */
} part;

struct am_team {
    const am_run *run;
    am_task task;
    void *job;
    ptrdiff_t grain;
    bool helped;            /* others may have tasks of it */
    struct timespec polled; /* the calling thread's alone */
    pthread_t caller;
    atomic_int status;
    int part_count;
    part *parts;
};

/* One loop at a time has the pool; a second caller meanwhile works alone. What is not atomic is guarded by
 * `lock`. */
static struct {
    pthread_mutex_t owner; /* held by the caller whose loop it is */
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    am_team *team;       /* NULL: nothing to do */
    int seats;           /* helpers that may still join the team */
    atomic_int inside;   /* helpers that have joined and not yet left */
    atomic_uint loops;   /* counts the loops that there were */
    int helpers, asleep; /* in all, and those waiting for `wake` */
    unsigned forks;      /* that led to this process; changes in a child alone, which has one thread yet */
    struct {
        pthread_t thread;
        int processor; /* on which it fell asleep; -1 if it is awake, or nobody knows */
        int kept_off;  /* a processor on which it may not run for now, or -1 */
    } who[AM_MAX_THREADS];
} pool = {
    .owner = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
};

/* A child has none of its parent's threads, and whatever they held is free. */
static void start_over_in_child(void)
{
    const bool owned = pool.team && pthread_equal(pool.team->caller, pthread_self());
    pthread_mutex_init(&pool.owner, NULL);
    if (owned) pthread_mutex_lock(&pool.owner); /* until this thread is out of its loop */
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.team = NULL;
    pool.helpers = pool.asleep = 0;
    atomic_store(&pool.inside, 0);
    pool.forks++;
}

static ptrdiff_t cache_bytes = 16 << 20;
static int default_threads = 1;

/* OpenMP's rules: OMP_NUM_THREADS (for nested regions a list, of which the first counts), else the processors
 * that this process may run on; OMP_THREAD_LIMIT bounds both. */
static int count_threads(void)
{
    long count = 0, limit = 0;
    const char *wanted = getenv("OMP_NUM_THREADS"), *most = getenv("OMP_THREAD_LIMIT");
    if (wanted) count = strtol(wanted, NULL, 10);
    if (most) limit = strtol(most, NULL, 10);
#ifdef __linux__
    cpu_set_t allowed;
    if (count < 1 && sched_getaffinity(0, sizeof allowed, &allowed) == 0) count = CPU_COUNT(&allowed);
#endif
    if (count < 1) count = sysconf(_SC_NPROCESSORS_ONLN);
    if (limit > 0 && count > limit) count = limit;
    return count < 1 ? 1 : count > AM_MAX_THREADS ? AM_MAX_THREADS : (int)count;
}

static void init(void)
{
    pthread_atfork(NULL, NULL, start_over_in_child);
    default_threads = count_threads();
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

int am_default_threads(void) { return default_threads; }

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
            const unsigned forks = pool.forks;
            if (team->run->stop(team->run->stop_arg)) fail(team, AM_INTERRUPTED);
            if (pool.forks != forks && team->helped) fail(team, AM_FORKED);
            clock_gettime(CLOCK_MONOTONIC, &team->polled);
        }
    }
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

/* Where a helper begins: with the part that has its number, or if that is taken with the next one that is
 * not, or with any. */
static int take_part(am_team *team, int number)
{
    int i = number % team->part_count;
    for (int tried = 1; team->parts[i].taken && tried < team->part_count; tried++)
        i = (i + 1) % team->part_count;
    team->parts[i].taken = true;
    return i;
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

static int this_processor(void)
{
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
}

/* Linux wakes a thread where it ran last, and may leave it waiting there for the caller, who has come to run
 * on the same processor, though others are idle: for a millisecond or more. So whoever has fallen asleep
 * where the caller runs now is kept off that processor, until it falls asleep where a caller runs again. */
static void make_way(void)
{
#ifdef __linux__
    const int here = this_processor();
    for (int i = 0; here >= 0 && i < pool.helpers; i++) {
        cpu_set_t others; /* of those that are its own */
        if (pool.who[i].processor != here) continue;
        if (pthread_getaffinity_np(pool.who[i].thread, sizeof others, &others) != 0) return;
        if (pool.who[i].kept_off >= 0) CPU_SET((size_t)pool.who[i].kept_off, &others);
        CPU_CLR((size_t)here, &others);
        if (CPU_COUNT(&others) == 0) continue;
        if (pthread_setaffinity_np(pool.who[i].thread, sizeof others, &others) == 0)
            pool.who[i].kept_off = here;
    }
#endif
}

static void *help(void *number)
{
    const int index = (int)(intptr_t)number - 1;
    pthread_mutex_lock(&pool.lock);
    pool.who[index].thread = pthread_self();
    for (;;) {
        while (!pool.team || pool.seats == 0) {
            unsigned seen = atomic_load(&pool.loops);
            pthread_mutex_unlock(&pool.lock);
            for (int i = 0; i < SPINS && atomic_load_explicit(&pool.loops, memory_order_relaxed) == seen; i++)
                pause_briefly();
            pthread_mutex_lock(&pool.lock);
            if (atomic_load(&pool.loops) != seen) continue;
            pool.asleep++;
            pool.who[index].processor = this_processor();
            pthread_cond_wait(&pool.wake, &pool.lock);
            pool.who[index].processor = -1;
            pool.asleep--;
        }
        am_team *team = pool.team;
        pool.seats--;
        const int first = take_part(team, (int)(intptr_t)number);
        atomic_fetch_add(&pool.inside, 1);
        pthread_mutex_unlock(&pool.lock);
        work(team, first);
        pthread_mutex_lock(&pool.lock);
        if (atomic_fetch_sub(&pool.inside, 1) == 1) pthread_cond_signal(&pool.done);
    }
    return NULL;
}

/* Helpers up to `count`, or as many as the system grants. They take no signals: those are for Python's
 * threads. */
static void hire(int count)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; pool.helpers < count; pool.helpers++) {
        pool.who[pool.helpers].processor = pool.who[pool.helpers].kept_off = -1;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)(pool.helpers + 1)) != 0) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void work_together(am_team *team, int helpers)
{
    team->helped = true;
    pthread_mutex_lock(&pool.lock);
    if (pool.helpers < helpers) hire(helpers);
    pool.team = team;
    pool.seats = helpers;
    atomic_fetch_add(&pool.loops, 1);
    int sleeping = pool.asleep;
    if (sleeping > 0) make_way();
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < sleeping && i < helpers; i++) pthread_cond_signal(&pool.wake);

    work(team, 0);

    pthread_mutex_lock(&pool.lock);
    pool.team = NULL; /* nobody joins any more */
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < SPINS && atomic_load(&pool.inside); i++) pause_briefly();
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.inside)) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

/* `grain` tasks are taken at once, and parts begin at multiples of `unit`. */
static am_status run_loop(const am_run *run, ptrdiff_t count, ptrdiff_t grain, ptrdiff_t unit, am_task task,
                          void *job)
{
    if (count <= 0) return AM_OK;
    const ptrdiff_t shares = am_ceil_div(count, grain), units = am_ceil_div(count, unit);
    const int threads = shares < run->threads ? (int)shares : run->threads;
    const bool together = threads > 1 && pthread_mutex_trylock(&pool.owner) == 0;
    part parts[MOST_PARTS];
    am_team team = {
        .run = run, .task = task, .job = job, .grain = grain, .caller = pthread_self(), .parts = parts};
    team.part_count = !together ? 1 : threads < MOST_PARTS ? threads : MOST_PARTS;
    if (team.part_count > units) team.part_count = (int)units;
    ptrdiff_t given = 0;
    for (int i = 0; i < team.part_count; i++) {
        atomic_init(&parts[i].next, given * unit);
        given += units / team.part_count + (i < units % team.part_count);
        parts[i].end = given == units ? count : given * unit;
        parts[i].taken = i == 0; /* by the caller */
    }
    clock_gettime(CLOCK_MONOTONIC, &team.polled);
    if (together) {
        work_together(&team, threads - 1);
        pthread_mutex_unlock(&pool.owner);
    } else {
        work(&team, 0);
    }
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
