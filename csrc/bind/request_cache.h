/* request_cache.h – attention over a cache of keys and values, to which new tokens may be appended. */
#ifndef AM_BIND_REQUEST_CACHE_H
#define AM_BIND_REQUEST_CACHE_H

#include "bind/request.h"
#include "core/cache/layout.h"

/* The door sets the first fields. Packed tokens have no axis for the batch. */
typedef struct {
    am_view query, caches[2];    /* of keys and of values, like all pairs below */
    am_view rows[2];             /* new keys and values; not given: none are appended */
    am_view scale_arrays[2];     /* of the caches */
    am_view table;               /* of int32 or int64; not given: the cache is contiguous */
    const ptrdiff_t *q_starts;   /* of packed queries */
    const ptrdiff_t *new_starts; /* of packed new tokens; not given: there are as many as queries */
    ptrdiff_t sequences, new_sequences;

    am_kv_limits limits; /* before am_cached_limit */

    bool latent; /* values are channels of the keys, with their scales; new tokens have rows[0] alone */

    const ptrdiff_t *slots; /* of new tokens, where am_cached_check_slots was called */

    ptrdiff_t prefix; /* tokens before those of the table and of layout, which all share */
    const int32_t *prefix_pages;

    ptrdiff_t capacity; /* of a sequence */
    am_kv_cache layout;
    am_pages pages;
    am_kv_scales scales[2];
} am_cached;

void am_cached_free(am_cached *c);

/* Checks types and shapes, and sets the shape of the mask but its keys. The type of a cache becomes that of
 * its format. */
bool am_cached_check(am_request *r, am_cached *c);
/* Checks types and shapes of caches, scales and packed new tokens alone, and reads the slots of these. */
bool am_cached_check_slots(am_request *r, am_cached *c, const am_view *slots);
/* Reads the number of tokens that each sequence has: nothing says all of a contiguous cache. */
bool am_cached_read_lengths(am_request *r, am_cached *c, const am_operand *lengths);
/* Cuts a prefix, in pages that all sequences share, off the table and the lengths. */
bool am_cached_cut(am_request *r, am_cached *c, ptrdiff_t prefix);
/* Finds how many tokens each sequence has, and sets the keys of the mask. */
bool am_cached_place(am_request *r, am_cached *c);
/* Checks that the queries are behind the prefix, once lengths are known. */
bool am_cached_check_prefix(am_request *r, const am_cached *c);
/* Finds which of them queries see, and reads their pages. */
bool am_cached_limit(am_request *r, am_cached *c);
/* Checks that no page would be written to twice. */
bool am_cached_check_pages(am_request *r, const am_cached *c);

/* Writes the terms of the mask that say which tokens the queries see: at least one, unless the mask
 * `has_others`. Returns their number. */
int am_cached_terms(const am_cached *c, bool has_others, am_node terms[AM_KV_TERMS]);

/* Sets all of attention but its scale, terms and results. */
void am_cached_describe(am_request *r, const am_cached *c);

/* Writes new keys and values to the cache, if there are any. */
am_status am_cached_append(const am_context *context, const am_cached *c);
/* Writes them and attends: packed queries sequence by sequence if a mask counts the keys of each from 0. */
am_status am_cached_attend(const am_context *context, am_request *r, const am_cached *c, bool one_by_one);

/* Writes them and attends to the prefix, once for all, and to what is behind it. */
am_status am_cached_attend_prefix(const am_context *context, am_request *r, const am_cached *c);
/* Looks at the weights, likewise. */
am_status am_cached_weigh(const am_context *context, am_request *r, const am_cached *c,
                          const am_attn_weights *weights, bool one_by_one);

/* The channels of a cache that was checked. */
ptrdiff_t am_cached_channels(const am_view *cache);

/* [tokens, heads, channels] of queries or new tokens that were checked. */
static inline const ptrdiff_t *am_cached_tokens(const am_view *v) { return v->shape + (v->axes == 4); }

#endif
