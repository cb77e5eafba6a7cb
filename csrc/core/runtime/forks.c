/* forks.c – counts forks, and owns the thread that begins regions for a thread that survived a fork. */
#define _GNU_SOURCE /* syscall */
#include "core/runtime/forks.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#ifdef __linux__
#    include <sys/syscall.h>
#endif

#include "core/runtime/openmp.h"

static unsigned forks;
static void (*call_in_child)(void);

static _Thread_local enum { UNKNOWN, CREATED_HERE, SURVIVED_FORK } origin;
static bool born_by_fork; /* the process was forked before it loaded the module, and the runtime may have been
                             in use */

/* At most one thread of a process has survived a fork, so there is one caller. `lock` guards all fields. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    void (*work)(void *arg); /* NULL: nothing to do */
    void *arg;
    bool started;
} region_thread = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
};

/* A child does not have the other threads of its parent, which may have held the locks. */
static void start_over_in_child(void)
{
    pthread_mutex_init(&region_thread.lock, NULL);
    pthread_cond_init(&region_thread.wake, NULL);
    pthread_cond_init(&region_thread.done, NULL);
    region_thread.work = NULL;
    region_thread.started = false;
    forks++;
    origin = am_openmp_keeps_teams_after_fork() ? SURVIVED_FORK : CREATED_HERE;
    if (call_in_child) call_in_child();
}

/* Linux marks a process that was forked and has not executed another program since. */
static bool is_forked(void)
{
    bool forked = false;
#ifdef __linux__
    enum { PF_FORKNOEXEC = 0x40 };
    char text[1024];
    FILE *file = fopen("/proc/self/stat", "r");
    const size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
    text[length] = 0;
    if (file) fclose(file);
    const char *end = strrchr(text, ')'); /* the command's name ends here; it may contain anything */
    unsigned flags;
    if (end && sscanf(end + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) == 1) forked = flags & PF_FORKNOEXEC;
#endif
    return forked;
}

void am_forks_init(void (*in_child)(void))
{
    call_in_child = in_child;
    pthread_atfork(NULL, NULL, start_over_in_child);
    born_by_fork = am_openmp_keeps_teams_after_fork() && am_openmp_loaded_before() && is_forked();
}

unsigned am_forks(void) { return forks; }

bool am_survived_fork(void)
{
    if (origin == UNKNOWN) {
        origin = CREATED_HERE;
#ifdef __linux__
        if (born_by_fork && syscall(SYS_gettid) == getpid()) origin = SURVIVED_FORK;
#endif
    }
    return origin == SURVIVED_FORK;
}

static void *run_region_thread(void *unused)
{
    pthread_mutex_lock(&region_thread.lock);
    for (;;) {
        while (!region_thread.work) pthread_cond_wait(&region_thread.wake, &region_thread.lock);
        void (*work)(void *) = region_thread.work;
        pthread_mutex_unlock(&region_thread.lock);
        work(region_thread.arg);
        pthread_mutex_lock(&region_thread.lock);
        region_thread.work = NULL;
        pthread_cond_signal(&region_thread.done);
    }
    return unused;
}

/* The thread and its teams block signals, which are for Python's own threads. */
static bool start_thread(void)
{
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool started = pthread_create(&thread, NULL, run_region_thread, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started) pthread_detach(thread);
    return started;
}

bool am_region_thread_start(void (*work)(void *arg), void *arg)
{
    pthread_mutex_lock(&region_thread.lock);
    bool free =
        !region_thread.work; /* not if a signal handler calls while its thread waits for the region thread */
    if (free && !region_thread.started) free = region_thread.started = start_thread();
    if (free) {
        region_thread.arg = arg;
        region_thread.work = work;
        pthread_cond_signal(&region_thread.wake);
    }
    pthread_mutex_unlock(&region_thread.lock);
    return free;
}

void am_region_thread_wait(void)
{
    pthread_mutex_lock(&region_thread.lock);
    while (region_thread.work) pthread_cond_wait(&region_thread.done, &region_thread.lock);
    pthread_mutex_unlock(&region_thread.lock);
}
