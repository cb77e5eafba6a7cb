/* words.c – what messages say to readers of Python, and of JAX and PyTorch. */
#include "bind/request.h"

#define NAME(name, ...) name
#define TERM(kind, what, ...) [AM_LOGIT_##kind] = NAME what,
const am_words am_words_of_door = {
    .none = "None",
    .starts = "cu_seqlens",
    .q_starts = "cu_seqlens_q",
    .pairs = "attention_mask",
    .paged = "write block_table=",
    .comma = ",",
    .hints = true,
    .terms = {AM_LOGIT_KINDS(TERM, TERM, TERM, TERM)},
};
