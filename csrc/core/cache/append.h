/* append.h – writes new keys or values behind those that a cache holds, or to given places. */
#ifndef AM_CORE_CACHE_APPEND_H
#define AM_CORE_CACHE_APPEND_H

#include "core/cache/layout.h"

typedef struct {
    am_array cache;          /* of pages */
    am_array rows;           /* what is appended: batch rows, or packed in one row */
    am_pages pages;          /* its lengths are those after it, and its starts are not looked at */
    const ptrdiff_t *begins; /* the lengths before it */
    const ptrdiff_t *starts; /* where the rows of each sequence begin if they are packed; NULL: batch rows */
    const ptrdiff_t *slots;  /* where each packed row goes: page * pages.size + place in the page, or -1 for
                              * nowhere; sequences are not looked at. NULL: behind those of its sequence */
    am_kv_scales scales;     /* of a quantized cache; those of tokens are found and written, too */
} am_kv_append;

/* Converts the rows to the type of the cache. Rows of different sequences go to different places. */
am_status am_kv_append_rows(const am_context *context, const am_kv_append *append);

#endif
