/* openmp.c – asks the OpenMP runtime what it is, and how many threads it gives. */
#define _GNU_SOURCE /* dladdr, dl_iterate_phdr */
#include "core/runtime/openmp.h"

#include <stddef.h>

#ifdef _OPENMP
#    include <dlfcn.h>
#    include <omp.h>
#    include <pthread.h>
#    include <stdint.h>
#    include <stdio.h>
#    include <stdlib.h>
#    include <string.h>
#    ifdef __linux__
#        include <link.h>
#    endif

#    include "core/runtime/forks.h"

static char name[64], library[1024], spin[64];
static am_openmp runtime_info;
static int initial_threads = 1;
static bool keeps_teams_after_fork = true, loaded_before;

#    ifdef __linux__
/* Shared objects are visited in the order in which they were loaded. The runtime comes after this library if
 * this library loaded it, and before it if the runtime was there already. */
typedef struct {
    uintptr_t runtime, own;
    bool runtime_first;
} search;

static bool holds(const struct dl_phdr_info *object, uintptr_t address)
{
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && address - (object->dlpi_addr + part->p_vaddr) < part->p_memsz)
            return true;
    }
    return false;
}

static int compare_order(struct dl_phdr_info *object, size_t size, void *arg)
{
    (void)size;
    search *s = arg;
    s->runtime_first = holds(object, s->runtime);
    return s->runtime_first || holds(object, s->own);
}

static bool is_older_than_this(uintptr_t runtime)
{
    search s = {.runtime = runtime, .own = (uintptr_t)&runtime_info};
    dl_iterate_phdr(compare_order, &s);
    return s.runtime_first;
}
#    else
static bool is_older_than_this(uintptr_t runtime) { return (void)runtime, false; }
#    endif

/* LLVM's runtime reports how long its threads spin; GNU's has read that from the environment. */
static void describe_spin(void *runtime)
{
    int (*blocktime)(void) = NULL;
    if (runtime) *(void **)&blocktime = dlsym(runtime, "kmp_get_blocktime");
    const char *count = getenv("GOMP_SPINCOUNT"), *policy = getenv("OMP_WAIT_POLICY");
    keeps_teams_after_fork = !blocktime;
    if (blocktime)
        snprintf(spin, sizeof spin, "KMP_BLOCKTIME=%d", blocktime());
    else if (loaded_before)
        snprintf(spin, sizeof spin, "as when another library loaded the runtime");
    else if (count)
        snprintf(spin, sizeof spin, "GOMP_SPINCOUNT=%s", count);
    else if (policy)
        snprintf(spin, sizeof spin, "OMP_WAIT_POLICY=%s", policy);
    else
        snprintf(spin, sizeof spin, "the runtime's own");
}

static void describe_name(void)
{
    static const struct {
        int date;
        const char *version;
    } versions[] = {{202411, "6.0"}, {202111, "5.2"}, {202011, "5.1"}, {201811, "5.0"}, {201511, "4.5"}};
    const char *version = "4.0 or older";
    for (size_t i = 0; i < sizeof versions / sizeof *versions && versions[i].date >= _OPENMP; i++)
        version = versions[i].version;
    snprintf(name, sizeof name, "%s, OpenMP %s (%d)", keeps_teams_after_fork ? "GNU libgomp" : "LLVM libomp",
             version, _OPENMP);
}

/* Runs in a new thread, whose number comes from the environment, whatever the importing thread has set for
 * itself. */
static void *count_initial_threads(void *unused)
{
    initial_threads = omp_get_max_threads();
    return unused;
}

void am_openmp_init(void)
{
    union { /* ISO C does not convert function pointers to void * */
        int (*function)(void);
        void *address;
    } known = {omp_get_max_threads};
    Dl_info info;
    void *runtime = NULL;
    if (dladdr(known.address, &info) && info.dli_fname) {
        snprintf(library, sizeof library, "%s", info.dli_fname);
        runtime = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    loaded_before = is_older_than_this((uintptr_t)known.address);
    describe_spin(runtime);
    if (runtime) dlclose(runtime);
    describe_name();
    runtime_info = (am_openmp){.name = name, .library = library, .spin = spin};
    pthread_t thread;
    if (pthread_create(&thread, NULL, count_initial_threads, NULL) == 0)
        pthread_join(thread, NULL);
    else
        count_initial_threads(NULL);
}

const am_openmp *am_openmp_info(void) { return &runtime_info; }

bool am_openmp_keeps_teams_after_fork(void) { return keeps_teams_after_fork; }

bool am_openmp_loaded_before(void) { return loaded_before; }

int am_openmp_initial_threads(void) { return initial_threads; }

int am_openmp_threads(int requested)
{
    /* A thread that survived a fork may have been in a region of the parent, which is gone. */
    if (omp_in_parallel() && !am_survived_fork()) return 1;
    const int given = omp_get_max_threads(), limit = omp_get_thread_limit();
    int threads = requested ? requested : given;
    /* omp_set_num_threads, which threadpoolctl calls, bounds the calling thread in every library. */
    if (given < initial_threads && threads > given) threads = given;
    if (threads > limit) threads = limit;
    return threads < 1 ? 1 : threads > AM_MAX_THREADS ? AM_MAX_THREADS : threads;
}

#else
const am_openmp *am_openmp_info(void) { return NULL; }
bool am_openmp_keeps_teams_after_fork(void) { return false; }
bool am_openmp_loaded_before(void) { return false; }
int am_openmp_initial_threads(void) { return 1; }
int am_openmp_threads(int requested) { return (void)requested, 1; }
void am_openmp_init(void) {}
#endif
