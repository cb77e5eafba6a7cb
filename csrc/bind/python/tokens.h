/* tokens.h – arrays of queries, keys and values as the core takes them. */
#ifndef AM_BIND_PYTHON_TOKENS_H
#define AM_BIND_PYTHON_TOKENS_H

#include "bind/python/arguments.h"
#include "core/attention/attention.h"

/* An array [batch, tokens, heads, channels] as it was when it was read. Code of the caller that runs later,
 * while other arguments are checked or in another thread, may give his array another shape, strides or type.
 * What it cannot do is free the memory while the array has a reference here: a.resize(refcheck=False), which
 * NumPy leaves to him, aside. */
typedef struct {
    am_tokens tokens;
    npy_intp shape[4];
} am_tokens_read;

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

/* Of an array of four axes. */
static inline am_tokens_read am_read_tokens(PyArrayObject *array)
{
    const npy_intp *shape = PyArray_DIMS(array);
    return (am_tokens_read){am_tokens_of(array), {shape[0], shape[1], shape[2], shape[3]}};
}

#endif
