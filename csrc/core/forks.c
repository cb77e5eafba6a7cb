/* forks.c – notices forks, and keeps the thread that leads regions for the one that a child has from its
 * parent. */
#define _GNU_SOURCE /* syscall */
#include "core/forks.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#ifdef __linux__
#    include <sys/syscall.h>
#endif

#include "core/openmp.h"

static unsigned forks;
static void (*tell_child)(void);

static _Thread_local enum { UNKNOWN, OWN, LEFT_OVER } origin;
static bool born_by_fork; /* before the module was loaded, when the runtime had been in use */

/* There is one left-over thread in a process, and so one caller. What is here is guarded by `lock`. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    void (*work)(void *arg); /* NULL: nothing to do */
    void *arg;
    bool hired;
} deputy = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
};

/* A child has none of its parent's other threads, and whatever they held is free. */
static void start_over_in_child(void)
{
    pthread_mutex_init(&deputy.lock, NULL);
    pthread_cond_init(&deputy.wake, NULL);
    pthread_cond_init(&deputy.done, NULL);
    deputy.work = NULL;
    deputy.hired = false;
    forks++;
    origin = am_openmp_minds_forks() ? LEFT_OVER : OWN;
    if (tell_child) tell_child();
}

/* Linux marks a process that has been forked and has executed no other program since. */
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
    const char *end = strrchr(text, ')'); /* of the command, which may hold anything */
    unsigned flags;
    if (end && sscanf(end + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) == 1) forked = flags & PF_FORKNOEXEC;
#endif
    return forked;
}

void am_forks_init(void (*in_child)(void))
{
    tell_child = in_child;
    pthread_atfork(NULL, NULL, start_over_in_child);
    born_by_fork = am_openmp_minds_forks() && am_openmp_was_here() && is_forked();
}

unsigned am_forks(void) { return forks; }

bool am_is_left_over(void)
{
    if (origin == UNKNOWN) {
        origin = OWN;
#ifdef __linux__
        if (born_by_fork && syscall(SYS_gettid) == getpid()) origin = LEFT_OVER;
#endif
    }
    return origin == LEFT_OVER;
}

static void *stand_in(void *unused)
{
    pthread_mutex_lock(&deputy.lock);
    for (;;) {
        while (!deputy.work) pthread_cond_wait(&deputy.wake, &deputy.lock);
        void (*work)(void *) = deputy.work;
        pthread_mutex_unlock(&deputy.lock);
        work(deputy.arg);
        pthread_mutex_lock(&deputy.lock);
        deputy.work = NULL;
        pthread_cond_signal(&deputy.done);
    }
    return unused;
}

/* It takes no signals, nor do those of its teams: they are for Python's threads. */
static bool hire(void)
{
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool hired = pthread_create(&thread, NULL, stand_in, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (hired) pthread_detach(thread);
    return hired;
}

bool am_deputy_start(void (*work)(void *arg), void *arg)
{
    pthread_mutex_lock(&deputy.lock);
    bool free = !deputy.work; /* a signal handler may call while its thread waits for the deputy */
    if (free && !deputy.hired) free = deputy.hired = hire();
    if (free) {
        deputy.arg = arg;
        deputy.work = work;
        pthread_cond_signal(&deputy.wake);
    }
    pthread_mutex_unlock(&deputy.lock);
    return free;
}

void am_deputy_wait(void)
{
    pthread_mutex_lock(&deputy.lock);
    while (deputy.work) pthread_cond_wait(&deputy.done, &deputy.lock);
    pthread_mutex_unlock(&deputy.lock);
}
