/* faults.h – a build in which allocations fail, and threads are late, on request. With ATTNMASK_FAULTS=1
 * setup.py includes it before every source; the tests ask for faults through what faults.c exports. */
#ifndef AM_FAULTS_H
#define AM_FAULTS_H

#define _GNU_SOURCE
#include <stdbool.h>
#include <stdlib.h>
#ifdef __x86_64__
#    include <mm_malloc.h> /* which intrinsics include, declares posix_memalign again */
#endif

/* A place in the sources that allocates. The linker gathers their addresses in one section. */
typedef struct {
    const char *file;
    long line, calls;
} am_fault_site;

#define AM_FAULT_SITE                                                                                        \
    ({                                                                                                       \
        static am_fault_site site = {__FILE__, __LINE__, 0};                                                 \
        static am_fault_site *const am_site __attribute__((section("am_fault_sites"), used)) = &site;        \
        am_site;                                                                                             \
    })

/* Counts an allocation, and says whether it fails. */
bool am_fault(am_fault_site *site);

void *am_fault_malloc(am_fault_site *site, size_t size);
void *am_fault_calloc(am_fault_site *site, size_t count, size_t size);
void *am_fault_realloc(am_fault_site *site, void *memory, size_t size);
int am_fault_memalign(am_fault_site *site, void **memory, size_t alignment, size_t size);
void am_fault_free(void *memory);

#define malloc(size) am_fault_malloc(AM_FAULT_SITE, size)
#define calloc(count, size) am_fault_calloc(AM_FAULT_SITE, count, size)
#define realloc(memory, size) am_fault_realloc(AM_FAULT_SITE, memory, size)
#define posix_memalign(memory, alignment, size) am_fault_memalign(AM_FAULT_SITE, memory, alignment, size)
#define free(memory) am_fault_free(memory)

#endif
