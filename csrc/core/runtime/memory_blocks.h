/* memory_blocks.h – large blocks of memory, some of which are kept and used again. */
#ifndef AM_CORE_RUNTIME_MEMORY_BLOCKS_H
#define AM_CORE_RUNTIME_MEMORY_BLOCKS_H

#include <stddef.h>

enum { AM_BUFFER_BYTES = 1 << 20 }; /* the smallest size that is worth a block */

/* am_buffer_new and am_buffer_resize return NULL if there is no memory. am_buffer_free may keep a block for
 * the next call; `free` returns it to the system. */
void *am_buffer_new(size_t size);
void *am_buffer_resize(void *block, size_t size);
void am_buffer_free(void *block, size_t size);

/* Of memory from elsewhere that is about to be written for the first time: asks for large pages. */
void am_buffer_advise(void *memory, size_t size);

#endif
