/* workspaces.h – memory of a call: aligned, and a part of it for each thread, allocated before anything is
 * written. */
#ifndef AM_CORE_RUNTIME_WORKSPACES_H
#define AM_CORE_RUNTIME_WORKSPACES_H

#include <stddef.h>

#include "core/runtime/sizes.h"
#include "core/runtime/threads.h"

enum { AM_LINE = 64 }; /* bytes of a line of the cache */

/* With the address sanitizer, each part of a workspace ends in a line that nobody may touch. */
#ifdef __SANITIZE_ADDRESS__
#    include <sanitizer/asan_interface.h>
enum { AM_GUARD = AM_LINE };
static inline void am_guard(char *memory) { __asan_poison_memory_region(memory, AM_GUARD); }
#else
enum { AM_GUARD = 0 };
static inline void am_guard(char *memory) { (void)memory; }
#endif

/* Memory that is aligned to a cache line; long memory is in large pages, and the next call uses it again. */
void *am_alloc_aligned(ptrdiff_t bytes);
#ifdef AM_FAULTS
#    define am_alloc_aligned(bytes) (am_fault(AM_FAULT_SITE) ? NULL : am_alloc_aligned(bytes))
#endif
void am_free_aligned(void *memory, ptrdiff_t bytes);

/* The next `bytes` of `from`, in whole cache lines; NULL if `from` is, when lengths are only added up. Sums
 * that overflow are PTRDIFF_MAX. */
static inline char *am_take(char *from, ptrdiff_t *used, ptrdiff_t bytes)
{
    char *at = from ? from + *used : NULL;
    const ptrdiff_t whole = am_product(am_ceil_div(bytes, AM_LINE), AM_LINE, 1);
    if (__builtin_add_overflow(*used, whole, used) || __builtin_add_overflow(*used, AM_GUARD, used))
        *used = PTRDIFF_MAX;
    if (at) am_guard(at + whole);
    return at;
}

/* Lays out a workspace from `memory` on, and sets the addresses of its parts; returns its bytes. NULL: only
 * these. */
typedef ptrdiff_t am_lay_out(const void *job, char *memory, void *parts);

/* A workspace for each thread of a call, laid out once. Loops that use workspaces run with no more threads
 * than there are workspaces, and am_thread_number counts the threads. A thread keeps one workspace for all
 * tasks, so it stays in the thread's caches. In calls of equal shape the thread gets it again, so it lies in
 * the memory of the node that touched it first. */
typedef struct {
    char *memory;           /* of each the addresses of its parts, and then these */
    ptrdiff_t bytes, count; /* the length of each, and their number */
} am_workspaces;
am_status am_workspaces_make(am_workspaces *workspaces, ptrdiff_t count, am_lay_out *lay_out, const void *job,
                             ptrdiff_t parts_size);
void am_workspaces_free(am_workspaces *workspaces);

/* The parts of the i-th; and of that of the thread that runs the task. */
void *am_workspace_at(const am_workspaces *workspaces, ptrdiff_t i);
void *am_workspace(const am_workspaces *workspaces);

#endif
