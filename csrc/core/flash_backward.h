/* flash_backward.h – attention backward: the gradients of queries, keys, values, bias and sinks. */
#ifndef AM_FLASH_BACKWARD_H
#define AM_FLASH_BACKWARD_H

#include "core/flash.h"

/* One number for each row, of the arithmetic type; steps in bytes. */
typedef struct {
    const char *data;
    ptrdiff_t batch, head, token;
} am_row_stats;

typedef struct {
    am_flash forward;        /* `out` is its result; its lse is not read */
    am_row_stats lse, d_lse; /* d_lse.data: NULL if it is 0 */
    am_tokens d_out, d_q, d_k, d_v;
    char *d_bias;            /* C-contiguous, of bias_type; NULL: not computed */
    ptrdiff_t bias_shape[4]; /* of d_bias; 1 along axes that are shared */
    double *d_sinks;         /* [heads][sink_count]; NULL: not computed */
} am_backward_problem;

am_status am_flash_backward(const am_run *run, const am_backward_problem *problem);

#endif
