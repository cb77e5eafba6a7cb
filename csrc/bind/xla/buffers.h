/* buffers.h – a call of XLA as the handlers see it: its buffers, and the numbers of its attribute. */
#ifndef AM_BIND_XLA_BUFFERS_H
#define AM_BIND_XLA_BUFFERS_H

#include <stddef.h>

#include "bind/request.h"
#include "bind/xla/ffi.h"

typedef struct {
    const am_xla_call_frame *frame;
    int64_t vmap_axes;
    const int64_t *vmap_shape;
    ptrdiff_t calls, call; /* call: of which the buffers are read, or AM_XLA_ALL_CALLS */
    bool one_by_one;       /* calls cannot be rows of one */
    int64_t next[2];       /* the next argument, the next result */
    const int64_t *words, *words_end;
    int64_t flags;
    int64_t first_array, arrays; /* of the words, among the arguments */
    am_context context;
    am_request request;
} am_xla_call;

enum { AM_XLA_ALL_CALLS = -1 };

#define am_xla_fail(c, ...) am_refuse(&(c)->request, AM_WRONG_VALUE, NULL, __VA_ARGS__)

/* Calls of a vmap are first tried as rows of one larger call. If they `cannot` be, they are repeated one by
 * one. */
static inline bool am_xla_one_by_one(am_xla_call *c, bool cannot)
{
    return c->one_by_one = cannot && c->call == AM_XLA_ALL_CALLS && c->calls > 1;
}

static inline const am_xla_buffer *am_xla_argument(const am_xla_call *c, int64_t i)
{
    return c->frame->arguments.buffers[i];
}
static inline const am_xla_buffer *am_xla_result(const am_xla_call *c, int64_t i)
{
    return c->frame->results.buffers[i];
}

am_dtype am_xla_type_of(am_xla_dtype type);

/* Looks at a buffer as one call, or all, see it. The first axis of what is `by_row` is the batch, or shared
 * by all rows. */
bool am_xla_look(am_xla_call *c, const am_xla_buffer *buffer, bool by_row, am_view *v);

typedef enum { AM_XLA_ARGUMENT, AM_XLA_RESULT } am_xla_side;

/* Looks at the next argument or result. An argument that is `by_row` and has a single row has it for all. */
bool am_xla_next(am_xla_call *c, am_xla_side side, bool by_row, am_view *v);
/* Checks that it has the type and the shape of another one. */
bool am_xla_is_like(am_xla_call *c, const am_view *v, const am_view *like);
/* Looks at the next argument or result, and checks that it is like another array. */
bool am_xla_next_like(am_xla_call *c, am_xla_side side, bool by_row, const am_view *like, am_view *v);
/* The next result must be the memory of an argument. */
bool am_xla_next_written(am_xla_call *c, const am_view *argument);

bool am_xla_next_word(am_xla_call *c, int64_t *word);

/* Reads two words: 0, 0 for nothing; 1 and an integer; 2 or 3 and the index of an array among those of the
 * words; 4 and the index of an argument. Arrays of 64 bits, 3, come as pairs of int32 along one axis more,
 * and are of the type `wide`. */
bool am_xla_next_operand(am_xla_call *c, bool by_row, am_dtype wide, am_operand *o);

/* The rest of the words, and more terms that are joined to them by "and". */
bool am_xla_read_mask(am_xla_call *c, const am_node *more, int more_count);

#endif
