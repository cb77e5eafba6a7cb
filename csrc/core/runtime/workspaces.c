/* workspaces.c – memory of a call. */
#include "core/runtime/workspaces.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "core/runtime/memory_blocks.h"

enum { MOST_ADDRESS_BYTES = 512 }; /* of a workspace's parts: `parts_size` is at most this */

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

am_status am_workspaces_make(am_workspaces *workspaces, ptrdiff_t count, am_lay_out *lay_out, const void *job,
                             ptrdiff_t parts_size)
{
    _Alignas(AM_LINE) char unused[MOST_ADDRESS_BYTES] = {0};
    assert(parts_size <= MOST_ADDRESS_BYTES);
    *workspaces = (am_workspaces){.count = count};
    am_take(NULL, &workspaces->bytes, parts_size);
    const ptrdiff_t parts_bytes = workspaces->bytes;
    am_take(NULL, &workspaces->bytes, lay_out(job, NULL, unused));
    workspaces->memory = am_alloc_aligned(am_product(count, workspaces->bytes, 1));
    if (!workspaces->memory) return AM_NO_MEMORY;
    for (ptrdiff_t i = 0; i < count; i++) {
        char *parts = memset(am_workspace_at(workspaces, i), 0, (size_t)parts_size);
        lay_out(job, parts + parts_bytes, parts);
    }
    return AM_OK;
}

void am_workspaces_free(am_workspaces *workspaces)
{
    am_free_aligned(workspaces->memory, am_product(workspaces->count, workspaces->bytes, 1));
}

void *am_workspace_at(const am_workspaces *workspaces, ptrdiff_t i)
{
    return workspaces->memory + i * workspaces->bytes;
}

void *am_workspace(const am_workspaces *workspaces)
{
    return am_workspace_at(workspaces, am_thread_number());
}
