/* cumsum.h – running sums over time that restart at every sequence and chunk. */
#ifndef AM_TOKENS_CUMSUM_H
#define AM_TOKENS_CUMSUM_H

#include "core/arrays/array.h"
#include "core/runtime/threads.h"

/* Tokens are steps of time. */
typedef struct {
    am_array src, dst;       /* of one shape; both integers, both floating, or integer to floating */
    const ptrdiff_t *starts; /* [sequences + 1], from 0 to all steps; there is at least one sequence */
    ptrdiff_t sequences;
    ptrdiff_t chunk; /* steps per chunk, counted from the start of each sequence; 0 for no chunks */
    bool reverse;    /* sum from the end of each chunk or sequence */
    bool scaled;
    double scale;
} am_cumsum;

am_status am_cumsum_compute(const am_context *context, const am_cumsum *cumsum);

#endif
