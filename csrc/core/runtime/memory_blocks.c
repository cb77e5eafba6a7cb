/* memory_blocks.c – allocates large blocks in large pages, and keeps some freed blocks for later calls.
 *
 * The first access to a 4 KB page takes four times as long as writing the page. With a 2 MB page, it takes a
 * seventh of the time to write the page. Programs that call in a loop need blocks of the same sizes again. So
 * a few freed blocks are kept: their pages are mapped, and may still be in the cache.
 */
#include "core/runtime/memory_blocks.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#    include <sys/mman.h>
#endif

enum {
    LARGE_PAGE = 2 << 20,
    KEPT = 8,              /* blocks at most: as many as a training step needs */
    KEPT_BYTES = 64 << 20, /* of all kept blocks together */
};

/* The beginning of a block while it is kept. */
typedef struct {
    size_t size;
} kept_block;

static _Atomic(kept_block *) kept[KEPT];
static atomic_uint next_kept;
static atomic_size_t kept_bytes;

#if defined(__SANITIZE_ADDRESS__) || defined(AM_FAULTS)
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
 * blocks are not kept. Nor may a kept block take the place of an allocation that is to fail. */
static size_t whole_pages(size_t size)
{
    if (SANITIZED) return size ? size : 1;
    return size ? (size + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE : LARGE_PAGE;
}

/* On Linux a block is mapped by itself, and given back to the system when it is freed. A heap keeps it, but
 * has ever more gaps between blocks of many sizes. The pages before a block have its size. */
#if defined(__linux__) && !SANITIZED
enum { BEFORE = 1 << 16 }; /* whole pages, whatever their size */

static size_t *size_of(void *block) { return (size_t *)((char *)block - BEFORE); }

static void *new_memory(size_t size)
{
    const size_t bytes = BEFORE + size + LARGE_PAGE;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    const size_t gap = LARGE_PAGE - ((uintptr_t)memory + BEFORE) % LARGE_PAGE;
    if (gap < LARGE_PAGE) munmap(memory, gap);
    char *block = memory + BEFORE + gap % LARGE_PAGE;
    if (block + size < memory + bytes) munmap(block + size, (size_t)(memory + bytes - block) - size);
    *size_of(block) = size;
    return block;
}

static void free_memory(void *block)
{
    if (block) munmap(size_of(block), BEFORE + *size_of(block));
}

static void *resized_memory(void *block, size_t size)
{
    void *resized = new_memory(size);
    if (!resized) return NULL;
    memcpy(resized, block, size < *size_of(block) ? size : *size_of(block));
    free_memory(block);
    return resized;
}
#else
static void *new_memory(size_t size)
{
    void *block;
    return posix_memalign(&block, LARGE_PAGE, size) == 0 ? block : NULL;
}

static void *resized_memory(void *block, size_t size) { return realloc(block, size); }

static void free_memory(void *block) { free(block); }
#endif

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
        free_memory(block);
    }
    return NULL;
}

/* Keeps a block, or none if it is NULL, in place of another, which is freed. */
static void replace(kept_block *block)
{
    kept_block *old = atomic_exchange(&kept[atomic_fetch_add(&next_kept, 1) % KEPT], block);
    if (old) atomic_fetch_sub(&kept_bytes, old->size);
    free_memory(old);
}

void *am_buffer_new(size_t size)
{
    if (size > PTRDIFF_MAX - LARGE_PAGE) return NULL;
    size = whole_pages(size);
    void *block = take(size);
    if (block) return block;
    block = new_memory(size);
    if (block) am_buffer_advise(block, size);
    return block;
}

void am_buffer_advise(void *memory, size_t size)
{
#ifdef MADV_HUGEPAGE
    const uintptr_t begin = ((uintptr_t)memory + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    const uintptr_t end = ((uintptr_t)memory + size) / LARGE_PAGE * LARGE_PAGE;
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* the system may ignore it */
#else
    (void)memory, (void)size;
#endif
}

void *am_buffer_resize(void *block, size_t size)
{
    return size > PTRDIFF_MAX - LARGE_PAGE ? NULL : resized_memory(block, whole_pages(size));
}

void am_buffer_free(void *block, size_t size)
{
    size = whole_pages(size);
    /* A resized block may not be aligned. */
    if (!block || size > KEPT_BYTES || (uintptr_t)block % LARGE_PAGE != 0 || SANITIZED) {
        free_memory(block);
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
        free_memory(block);
        return;
    }
    for (int i = 0; i < KEPT; i++) {
        kept_block *empty = NULL;
        if (atomic_compare_exchange_strong(&kept[i], &empty, freed)) return;
    }
    replace(freed);
}
