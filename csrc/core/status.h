/* status.h – how the core reports what went wrong. */
#ifndef AM_STATUS_H
#define AM_STATUS_H

#include "kernels/dtype.h"

typedef enum {
    AM_OK = 0,
    AM_NO_MEMORY,
    AM_OVERFLOW,    /* an integer result does not fit its type */
    AM_INTERRUPTED, /* the caller asked to stop; the binding holds the reason */
    AM_FORKED,      /* a child in the middle of a loop, without the threads that had begun its tasks */
} am_status;

#endif
