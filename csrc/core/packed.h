/* packed.h – sequences laid end to end: `starts` has sequences + 1 entries, from 0, never falling. */
#ifndef AM_PACKED_H
#define AM_PACKED_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "core/threads.h"

typedef enum { AM_POSITIONS, AM_SEQUENCES, AM_PAIRS } am_token_kind;

/* Writes the position, the sequence, or (sequence, position) of every token; `type` is AM_INT32 or AM_INT64.
 */
am_status am_fill_tokens(const am_run *run, am_token_kind kind, am_dtype type, void *dst,
                         const ptrdiff_t *starts, ptrdiff_t sequences);

/* The sequence that token t belongs to; `t` is not negative and below the total. */
ptrdiff_t am_sequence_of(const ptrdiff_t *starts, ptrdiff_t sequences, ptrdiff_t t);

/* lens[b] = non-zero elements of row b of a mask; strides in bytes. */
typedef struct {
    const char *mask;
    am_dtype type;
    ptrdiff_t rows, columns, row_stride, column_stride;
    int64_t *lens;
} am_mask_lens;
am_status am_count_rows(const am_run *run, const am_mask_lens *job);

#endif
