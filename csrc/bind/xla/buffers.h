/* buffers.h – a call of XLA as the handlers see it: its buffers, and the numbers of its attribute. */
#ifndef AM_BIND_XLA_BUFFERS_H
#define AM_BIND_XLA_BUFFERS_H

#include <stddef.h>

#include "bind/xla/ffi.h"
#include "core/attention/attention.h"

typedef struct am_xla_memory am_xla_memory;

typedef struct {
    const am_xla_call_frame *frame;
    int64_t vmap_axes;
    const int64_t *vmap_shape;
    ptrdiff_t calls, call; /* call: of which the buffers are read, or AM_XLA_ALL_CALLS */
    bool apart;            /* calls cannot be rows of one */
    const int64_t *words, *words_end;
    int64_t flags;
    int64_t first_array, arrays; /* of the mask, among the arguments */
    am_xla_memory *kept;
    am_xla_code code;
    char message[240];
    am_context context;
    am_mask mask;
    am_attn attn;
} am_xla_call;

enum { AM_XLA_ALL_CALLS = -1 };

/* What fails returns false or NULL, and has said why. */
__attribute__((format(printf, 2, 3))) bool am_xla_fail(am_xla_call *c, const char *format, ...);
bool am_xla_fail_status(am_xla_call *c, am_status status); /* true for AM_OK */

/* Zeros, which am_xla_release frees as it does all that the mask holds. */
void *am_xla_keep(am_xla_call *c, ptrdiff_t count, size_t size);
void am_xla_release(am_xla_call *c);

static inline const am_xla_buffer *am_xla_argument(const am_xla_call *c, int64_t i)
{
    return c->frame->arguments.buffers[i];
}
static inline const am_xla_buffer *am_xla_result(const am_xla_call *c, int64_t i)
{
    return c->frame->results.buffers[i];
}

/* A buffer as one call, or all, see it. */
enum { AM_XLA_MOST_AXES = 4 };
typedef struct {
    char *data;
    am_dtype type;
    int axes;
    ptrdiff_t shape[AM_XLA_MOST_AXES]; /* 1 beyond the last axis */
} am_xla_view;

am_dtype am_xla_type_of(am_xla_dtype type);

/* The first axis of what is `by_row` is the batch, or shared by all rows. */
bool am_xla_look(am_xla_call *c, const am_xla_buffer *buffer, bool by_row, am_xla_view *v);

/* In bytes; the second one is 0 along axes of length 1, which are shared. */
ptrdiff_t am_xla_step_of(const am_xla_view *v, int axis);
ptrdiff_t am_xla_shared_step_of(const am_xla_view *v, int axis);

enum { AM_XLA_NOTHING, AM_XLA_INTEGER, AM_XLA_NARROW, AM_XLA_WIDE };
typedef struct {
    int64_t kind, number;
    const am_xla_buffer *buffer; /* NULL unless it is an array */
} am_xla_operand;

bool am_xla_next_word(am_xla_call *c, int64_t *word);
bool am_xla_next_operand(am_xla_call *c, am_xla_operand *o);

/* All numbers of an array, of one axis unless it is `wide`, as int64; `count` is -1 until it is known. */
const int64_t *am_xla_whole_numbers(am_xla_call *c, const am_xla_view *v, bool wide, ptrdiff_t *count);

/* `count` integers within ±AM_FAR, of an operand that may be one for all. */
ptrdiff_t *am_xla_integers(am_xla_call *c, const am_xla_operand *o, bool by_row, ptrdiff_t count,
                           ptrdiff_t none);

/* The next operand as starts of sequences of so many tokens; `count` of sequences is -1 until it is known. */
const ptrdiff_t *am_xla_read_starts(am_xla_call *c, const char *name, ptrdiff_t length, ptrdiff_t *count);

/* The rest of the words, and more terms that are joined to them by "and". */
bool am_xla_read_mask(am_xla_call *c, const am_node *more, int more_count);

#endif
