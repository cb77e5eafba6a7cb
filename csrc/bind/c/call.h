/* call.h – what the functions of include/attnmask.h have in common: they look at the caller's structs and
 * arrays, fill in a request, and say what is wrong with it. */
#ifndef AM_BIND_C_CALL_H
#define AM_BIND_C_CALL_H

#include "attnmask.h"
#include "bind/request.h"
#include "core/runtime/float_mode.h"

/* A call from its beginning to its end. All functions below that return bool return false after they have
 * refused the request. */
typedef struct {
    am_context context;
    am_float_mode mode; /* the caller's */
    am_request request;
} am_c_call;

/* Begins a call: false if the library cannot compute. */
bool am_c_begin(am_c_call *c);
/* Ends it, and frees the request: the status of what was done, with the message of what was refused. */
attnmask_status am_c_end(am_c_call *c, bool done, attnmask_message *message);

/* Copies a struct that begins with its size and that must be given. */
#define am_c_read(c, to, from, name) am_c_read_struct(c, to, sizeof *(to), from, name)
bool am_c_read_struct(am_c_call *c, void *to, size_t size, const void *from, const char *name);

/* Looks at an array; without data: it is not given. */
bool am_c_look(am_c_call *c, const attnmask_array *array, const char *name, am_view *v);
bool am_c_need(am_c_call *c, const attnmask_array *array, const char *name, am_view *v);
/* Looks at one that must be C-contiguous. */
bool am_c_look_in_order(am_c_call *c, const attnmask_array *array, const char *name, am_view *v);
/* Whether a view has this type and shape. */
bool am_c_is_like(am_c_call *c, const am_view *v, const char *name, const am_view *like);
/* Looks at the starts of packed sequences of so many tokens; NULL, and true, if they are not given. */
bool am_c_read_starts(am_c_call *c, const attnmask_array *array, const char *name, ptrdiff_t tokens,
                      const ptrdiff_t **starts, ptrdiff_t *sequences);

/* An operand, whose array the caller's operand points to. */
bool am_c_operand(am_c_call *c, const attnmask_operand *given, const char *name, am_operand *o);

/* The scale of products; 0: 1 / sqrt(channels). */
bool am_c_scale(am_c_call *c, double given, ptrdiff_t channels, double *scale);

/* A mask that is not given is that of all pairs. */
bool am_c_read_mask_struct(am_c_call *c, attnmask_mask *to, const attnmask_mask *from);
/* Adds the nodes that are given to the mask of the request, which has begun. */
bool am_c_add_nodes(am_c_call *c, const attnmask_mask *mask);
/* Adds terms of the logits. */
bool am_c_read_terms(am_c_call *c, const attnmask_term *terms, int64_t count, bool with_gradients);

#endif
