/* cumsum.h – running sums over time that restart at every sequence and chunk. */
#ifndef AM_CORE_SEQUENCES_CUMSUM_H
#define AM_CORE_SEQUENCES_CUMSUM_H

#include "core/runtime/threads.h"

enum { AM_CUMSUM_AXES = 3 };

typedef struct {
    am_dtype src_type, dst_type; /* both integers, both floating, or integer to floating */
    const char *src;
    char *dst;
    ptrdiff_t steps;                            /* the length of the time axis */
    ptrdiff_t src_time_stride, dst_time_stride; /* its strides, in bytes */
    ptrdiff_t shape[AM_CUMSUM_AXES];            /* the other axes, outermost first; unused ones are 1 */
    ptrdiff_t src_stride[AM_CUMSUM_AXES], dst_stride[AM_CUMSUM_AXES];
    const ptrdiff_t *starts; /* [sequences + 1], from 0 to `steps`; there is at least one sequence */
    ptrdiff_t sequences;
    ptrdiff_t chunk; /* steps per chunk, counted from the start of each sequence; 0 for no chunks */
    bool reverse;    /* sum from the end of each chunk or sequence */
    bool scaled;
    double scale;
} am_cumsum;

am_status am_cumsum_compute(const am_context *context, const am_cumsum *cumsum);

#endif
