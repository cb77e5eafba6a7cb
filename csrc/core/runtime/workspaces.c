/* workspaces.c – memory of a call. */
#include "core/runtime/workspaces.h"

#include <stdlib.h>

#include "core/runtime/memory_blocks.h"
#include "core/runtime/threads.h"

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
    return workspaces->memory ? AM_OK : AM_NO_MEMORY;
}

void am_workspaces_free(am_workspaces *workspaces)
{
    am_free_aligned(workspaces->memory, workspaces->count * workspaces->bytes);
}

char *am_workspace(const am_workspaces *workspaces)
{
    return workspaces->memory + am_thread_number() * workspaces->bytes;
}
