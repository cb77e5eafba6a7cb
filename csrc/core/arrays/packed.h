/* packed.h – packed sequences: `starts` has sequences + 1 entries, which begin with 0 and never decrease.
 * Sequence s owns tokens starts[s] … starts[s + 1] - 1. */
#ifndef AM_CORE_ARRAYS_PACKED_H
#define AM_CORE_ARRAYS_PACKED_H

#include <stddef.h>
#include <stdint.h>

#include "core/runtime/threads.h"

typedef enum { AM_POSITIONS, AM_SEQUENCES, AM_PAIRS } am_token_kind;

/* Writes for every token its position, its sequence, or (sequence, position). `type` is AM_INT32 or
 * AM_INT64. */
am_status am_fill_tokens(const am_context *context, am_token_kind kind, am_dtype type, void *dst,
                         const ptrdiff_t *starts, ptrdiff_t sequences);

/* The sequence of token t, 0 ≤ t < starts[sequences]. */
ptrdiff_t am_sequence_of(const ptrdiff_t *starts, ptrdiff_t sequences, ptrdiff_t t);

/* Sets lens[b] to the number of non-zero elements in row b of a mask. Strides are in bytes. */
typedef struct {
    const char *mask;
    am_dtype type;
    ptrdiff_t rows, columns, row_stride, column_stride;
    int64_t *lens;
} am_mask_lens;
am_status am_count_rows(const am_context *context, const am_mask_lens *job);

#endif
