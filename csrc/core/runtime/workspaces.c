/* workspaces.c – memory of a call. */
#include "core/runtime/workspaces.h"

#include <stdlib.h>

#include "core/runtime/memory_blocks.h"

void *(am_alloc_aligned)(ptrdiff_t bytes)
{
    if (bytes >= AM_BUFFER_BYTES) return am_buffer_new((size_t)bytes);
    void *memory = NULL;
    return posix_memalign(&memory, AM_LINE, (size_t)am_max(bytes, 1)) == 0 ? memory : NULL;
}

void am_free_aligned(void *memory, ptrdiff_t bytes)
{
    if (bytes >= AM_BUFFER_BYTES)
        am_buffer_free(memory, (size_t)bytes);
    else
        free(memory);
}

am_status am_workspaces_make(am_workspaces *workspaces, int threads, ptrdiff_t bytes)
{
    workspaces->bytes = am_ceil_div(bytes, AM_LINE) * AM_LINE;
    workspaces->count = threads;
    workspaces->memory = am_alloc_aligned(threads * workspaces->bytes);
    workspaces->taken = malloc((size_t)threads * sizeof *workspaces->taken);
    if (!workspaces->memory || !workspaces->taken) return AM_NO_MEMORY;
    for (int i = 0; i < threads; i++) atomic_flag_clear(&workspaces->taken[i]);
    return AM_OK;
}

void am_workspaces_free(am_workspaces *workspaces)
{
    am_free_aligned(workspaces->memory, workspaces->count * workspaces->bytes);
    free(workspaces->taken);
}

char *am_workspace_acquire(const am_workspaces *workspaces)
{
    ptrdiff_t i = 0;
    while (atomic_flag_test_and_set(&workspaces->taken[i])) i++; /* there are as many as threads */
    return workspaces->memory + i * workspaces->bytes;
}

void am_workspace_release(const am_workspaces *workspaces, const char *memory)
{
    atomic_flag_clear(&workspaces->taken[(memory - workspaces->memory) / workspaces->bytes]);
}
