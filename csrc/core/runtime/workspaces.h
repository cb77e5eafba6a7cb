/* workspaces.h – memory of a call: aligned, and a part of it for each thread, allocated before anything is
 * written. */
#ifndef AM_CORE_RUNTIME_WORKSPACES_H
#define AM_CORE_RUNTIME_WORKSPACES_H

#include <stddef.h>

#include "core/runtime/sizes.h"
#include "core/runtime/status.h"

enum { AM_LINE = 64 }; /* bytes of a line of the cache */

/* Memory that is aligned to a cache line; long memory is in large pages, and the next call uses it again. */
void *am_alloc_aligned(ptrdiff_t bytes);
#ifdef AM_FAULTS
#    define am_alloc_aligned(bytes) (am_fault(AM_FAULT_SITE) ? NULL : am_alloc_aligned(bytes))
#endif
void am_free_aligned(void *memory, ptrdiff_t bytes);

/* The next `bytes` of `from`, in whole cache lines; NULL if `from` is, when lengths are only added up. */
static inline char *am_take(char *from, ptrdiff_t *used, ptrdiff_t bytes)
{
    char *at = from ? from + *used : NULL;
    *used += am_ceil_div(bytes, AM_LINE) * AM_LINE;
    return at;
}

/* A workspace for each thread of a call: the loops that use them run with no more threads than they were made
 * for, which am_thread_number counts. A thread has the same one in every task, so that it stays in its
 * caches; and in every call of the same shape, so that it lies in the memory of the node that touched it
 * first. */
typedef struct {
    char *memory;
    ptrdiff_t bytes, count; /* the length of each, and their number */
} am_workspaces;
am_status am_workspaces_make(am_workspaces *workspaces, int threads, ptrdiff_t bytes);
void am_workspaces_free(am_workspaces *workspaces);

/* That of the thread that runs the task. */
char *am_workspace(const am_workspaces *workspaces);

#endif
