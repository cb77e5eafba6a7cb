/* pages.h – block tables of paged caches as arguments. */
#ifndef AM_BIND_PAGES_H
#define AM_BIND_PAGES_H

#include "bind/args.h"
#include "core/attn.h"

/* A block table and the lengths of its sequences; `pages` points into these arrays. */
typedef struct {
    PyArrayObject *table, *used, *lengths, *starts, *scales[2];
    am_pages pages;
    am_kv_scales k_scales, v_scales;
    npy_intp keys; /* of the mask */
} am_pages_arg;

/* Reads None, which leaves all NULL, or a tuple for a cache of keys of this shape, and of values of this
 * depth:
 *
 *     (table int32 [sequences, pages], used int64 [sequences], lengths int64 [sequences],
 *      starts int64 [sequences + 1] or None, keys, k_scale, v_scale)
 *
 * Scales are None, or float32 [pages or 1, tokens or 1, key heads or 1, channels or 1]; of channels if they
 * are the same for all pages and tokens.
 *
 * A sequence uses the entries of its table from that of token `used` to that of its last token; they are
 * checked, and no others are read. 0 or -1. */
int am_read_pages(PyObject *object, npy_intp const *shape, npy_intp value_depth, am_pages_arg *arg);
void am_free_pages(am_pages_arg *arg);

#endif
