/* blocks.c – allocates large blocks in large pages, and keeps some that were freed.
 *
 * The first access to a 4 KB page takes four times as long as writing the page; that to a 2 MB page takes a
 * seventh of the time to write it. Programs that call in a loop need blocks of the same sizes again. So a few
 * freed blocks are kept: their pages are mapped, and may still be in the cache.
 */
#define _DEFAULT_SOURCE /* madvise */
#include "core/blocks.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#ifdef __linux__
#    include <sys/mman.h>
#endif

enum {
    LARGE_PAGE = 2 << 20,
    KEPT = 4,              /* blocks at most */
    KEPT_BYTES = 64 << 20, /* of all kept blocks together */
};

/* The beginning of a block while it is kept. */
typedef struct {
    size_t size;
} kept_block;

static _Atomic(kept_block *) kept[KEPT];
static atomic_uint next_kept;
static atomic_size_t kept_bytes;

#if defined(__SANITIZE_ADDRESS__)
#    define SANITIZED 1
#elif defined(__has_feature)
#    if __has_feature(address_sanitizer)
#        define SANITIZED 1
#    endif
#endif
#ifndef SANITIZED
#    define SANITIZED 0
#endif

/* The address sanitizer finds accesses beyond a size and after `free` only if sizes are not rounded up and
 * blocks are not kept. */
static size_t whole_pages(size_t size)
{
    if (SANITIZED) return size ? size : 1;
    return size ? (size + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE : LARGE_PAGE;
}

/* Takes a kept block of exactly this size; NULL if there is none. */
static void *take(size_t size)
{
    for (int i = 0; i < KEPT; i++) {
        kept_block *block = atomic_exchange(&kept[i], NULL), *empty = NULL;
        if (!block) continue;
        bool fits = block->size == size;
        if (!fits && atomic_compare_exchange_strong(&kept[i], &empty, block)) continue;
        atomic_fetch_sub(&kept_bytes, block->size);
        if (fits) return block;
        free(block);
    }
    return NULL;
}

/* Keeps a block, or none if it is NULL, in place of another, which is freed. */
static void replace(kept_block *block)
{
    kept_block *old = atomic_exchange(&kept[atomic_fetch_add(&next_kept, 1) % KEPT], block);
    if (old) atomic_fetch_sub(&kept_bytes, old->size);
    free(old);
}

void *am_block_new(size_t size)
{
    if (size > PTRDIFF_MAX - LARGE_PAGE) return NULL;
    size = whole_pages(size);
    void *block = take(size);
    if (block) return block;
    if (posix_memalign(&block, LARGE_PAGE, size) != 0) return NULL;
    am_block_advise(block, size);
    return block;
}

void am_block_advise(void *memory, size_t size)
{
#ifdef MADV_HUGEPAGE
    const uintptr_t begin = ((uintptr_t)memory + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    const uintptr_t end = ((uintptr_t)memory + size) / LARGE_PAGE * LARGE_PAGE;
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* the system may ignore it */
#else
    (void)memory, (void)size;
#endif
}

void *am_block_resize(void *block, size_t size)
{
    return size > PTRDIFF_MAX - LARGE_PAGE ? NULL : realloc(block, whole_pages(size));
}

void am_block_free(void *block, size_t size)
{
    size = whole_pages(size);
    /* A resized block may not be aligned. */
    if (!block || size > KEPT_BYTES || (uintptr_t)block % LARGE_PAGE != 0 || SANITIZED) {
        free(block);
        return;
    }
    kept_block *freed = block;
    freed->size = size;
    size_t others = atomic_fetch_add(&kept_bytes, size);
    for (int i = 0; i < KEPT && others + size > KEPT_BYTES; i++) {
        replace(NULL);
        others = atomic_load(&kept_bytes) - size;
    }
    if (others + size > KEPT_BYTES) { /* other threads are about to keep blocks */
        atomic_fetch_sub(&kept_bytes, size);
        free(block);
        return;
    }
    for (int i = 0; i < KEPT; i++) {
        kept_block *empty = NULL;
        if (atomic_compare_exchange_strong(&kept[i], &empty, freed)) return;
    }
    replace(freed);
}
