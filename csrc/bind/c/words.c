/* words.c – what messages say to readers of include/attnmask.h. */
#include "bind/request.h"

#define TERM(kind, ...) [AM_LOGIT_##kind] = "ATTNMASK_" #kind,
const am_words am_words_of_door = {
    .none = "NULL",
    .starts = "cum_seqlens",
    .q_starts = "cum_seqlens_q",
    .pairs = "array", /* of ATTNMASK_DENSE */
    .paged = "set block_table",
    .comma = "",
    .terms = {AM_LOGIT_KINDS(TERM, TERM, TERM, TERM)},
};
