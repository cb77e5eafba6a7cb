/* status.h – how the core reports what went wrong, and what it calls the element types. */
#ifndef AM_STATUS_H
#define AM_STATUS_H

typedef enum {
    AM_OK = 0,
    AM_NO_MEMORY,
    AM_OVERFLOW,    /* an integer result does not fit its type */
    AM_INTERRUPTED, /* the caller asked to stop; the binding holds the reason */
    AM_FORKED,      /* a child in the middle of a loop, without the threads that had begun its tasks */
} am_status;

typedef enum {
    AM_BOOL,
    AM_INT8,
    AM_UINT8,
    AM_INT16,
    AM_UINT16,
    AM_INT32,
    AM_UINT32,
    AM_INT64,
    AM_UINT64,
    AM_FLOAT16,
    AM_BFLOAT16,
    AM_FLOAT32,
    AM_FLOAT64,
    AM_OTHER, /* anything that the library does not compute with */
} am_dtype;

static inline int am_is_integer(am_dtype type) { return type >= AM_INT8 && type <= AM_UINT64; }
static inline int am_is_floating(am_dtype type) { return type >= AM_FLOAT16 && type <= AM_FLOAT64; }

#endif
