/* dtype.h – what the library calls the element types of arrays. */
#ifndef AM_DTYPE_H
#define AM_DTYPE_H

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
    /* Only of keys and values: */
    AM_FLOAT8_E4M3, /* e4m3fn */
    AM_FLOAT8_E5M2,
    AM_INT4,  /* two in a byte */
    AM_OTHER, /* anything that the library does not compute with */
} am_dtype;

static inline int am_is_integer(am_dtype type) { return type >= AM_INT8 && type <= AM_UINT64; }
static inline int am_is_of_cache(am_dtype type) { return type >= AM_FLOAT8_E4M3 && type <= AM_INT4; }
static inline int am_is_floating(am_dtype type) { return type >= AM_FLOAT16 && type <= AM_FLOAT64; }

#endif
