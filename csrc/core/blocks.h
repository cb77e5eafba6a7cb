/* blocks.h – long memory, which is worth being used again. */
#ifndef AM_BLOCKS_H
#define AM_BLOCKS_H

#include <stddef.h>

enum { AM_BLOCK_BYTES = 1 << 20 }; /* from which memory counts as long */

/* NULL if there is no memory. `free` gives it back for good, `am_block_free` so that the next call finds it.
 */
void *am_block_new(size_t size);
void *am_block_resize(void *block, size_t size);
void am_block_free(void *block, size_t size);

/* Of memory from elsewhere that is about to be written for the first time: asks for large pages. */
void am_block_advise(void *memory, size_t size);

#endif
