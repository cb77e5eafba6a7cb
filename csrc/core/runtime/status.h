/* status.h – the errors that the core reports. */
#ifndef AM_CORE_RUNTIME_STATUS_H
#define AM_CORE_RUNTIME_STATUS_H

#include "kernels/dtype.h"

typedef enum {
    AM_OK = 0,
    AM_NO_MEMORY,
    AM_OVERFLOW,    /* an integer result does not fit its type */
    AM_INTERRUPTED, /* `stop` of am_context ended the call; the binding knows the reason */
    AM_FORKED, /* the process is a child that was forked in the middle of a loop, and lacks the threads of
                  that loop */
} am_status;

#endif
