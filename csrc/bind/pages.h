/* pages.h – block tables of paged caches as arguments. */
#ifndef AM_BIND_PAGES_H
#define AM_BIND_PAGES_H

#include "bind/args.h"
#include "core/attn.h"

/* A block table and the lengths of its sequences; `pages` points into these arrays. */
typedef struct {
    PyArrayObject *table, *used, *lengths, *starts;
    am_pages pages;
    npy_intp keys; /* of the mask */
} am_pages_arg;

/* Reads None, which leaves all NULL, or a tuple for a cache of so many pages of so many tokens each:
 *
 *     (table int32 [sequences, pages], used int64 [sequences], lengths int64 [sequences],
 *      starts int64 [sequences + 1] or None, keys)
 *
 * A sequence uses the entries of its table from that of token `used` to that of its last token; they are
 * checked, and no others are read. 0 or -1. */
int am_read_pages(PyObject *object, npy_intp pages, npy_intp size, am_pages_arg *arg);
void am_free_pages(am_pages_arg *arg);

#endif
