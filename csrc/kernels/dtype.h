/* dtype.h – what the library calls the element types of arrays. */
#ifndef AM_DTYPE_H
#define AM_DTYPE_H

#include <stddef.h>

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
    AM_OTHER, /* the last: anything that the library does not compute with */
} am_dtype;

static inline int am_is_integer(am_dtype type) { return type >= AM_INT8 && type <= AM_UINT64; }
static inline int am_is_of_cache(am_dtype type) { return type >= AM_FLOAT8_E4M3 && type < AM_OTHER; }
static inline int am_is_floating(am_dtype type) { return type >= AM_FLOAT16 && type <= AM_FLOAT64; }

/* Bits of a number. */
static inline size_t am_bits_of(am_dtype type)
{
    static const unsigned char bits[] = {
        [AM_BOOL] = 8,      [AM_INT8] = 8,     [AM_UINT8] = 8,    [AM_INT16] = 16,      [AM_UINT16] = 16,
        [AM_INT32] = 32,    [AM_UINT32] = 32,  [AM_INT64] = 64,   [AM_UINT64] = 64,     [AM_FLOAT16] = 16,
        [AM_BFLOAT16] = 16, [AM_FLOAT32] = 32, [AM_FLOAT64] = 64, [AM_FLOAT8_E4M3] = 8, [AM_FLOAT8_E5M2] = 8,
        [AM_INT4] = 4,      [AM_OTHER] = 0,
    };
    return bits[type];
}

/* Bytes of an element of an array, and the numbers in it. */
static inline size_t am_size_of(am_dtype type) { return (am_bits_of(type) + 7) / 8; }
static inline ptrdiff_t am_numbers_of(am_dtype type)
{
    return (ptrdiff_t)(8 * am_size_of(type) / am_bits_of(type));
}

#endif
