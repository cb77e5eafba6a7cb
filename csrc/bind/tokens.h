/* tokens.h – arrays of queries, keys and values as the core takes them. */
#ifndef AM_BIND_TOKENS_H
#define AM_BIND_TOKENS_H

#include "bind/args.h"
#include "core/attn.h"

/* Of an array [batch, tokens, heads, channels], or of one without the first axis. */
static inline am_tokens am_tokens_of(PyArrayObject *array)
{
    const int first = PyArray_NDIM(array) == 4;
    return (am_tokens){
        .data = PyArray_BYTES(array),
        .type = am_kv_dtype_of(PyArray_DESCR(array)),
        .batch = first ? PyArray_STRIDE(array, 0) : 0,
        .token = PyArray_STRIDE(array, first),
        .head = PyArray_STRIDE(array, first + 1),
        .element = PyArray_STRIDE(array, first + 2),
    };
}

#endif
