/* short_convolution_rows.h – what short convolutions and their gradients share: rows of tokens that are
 * copied to and from contiguous numbers of the type of the sums. */
#ifndef AM_SHORT_CONVOLUTION_ROWS_H
#define AM_SHORT_CONVOLUTION_ROWS_H

#include <stdint.h>

#include "conv/short_convolution.h"

enum {
    AM_CONV_LANES = 256,    /* channels of a task where rows are copied */
    AM_CONV_TOKENS = 32,    /* at once, or W if that is more */
    AM_CONV_TASK = 1 << 16, /* elements of a task, about 20 µs */
};

/* No memory holds the window of a wider one. Up to here its length does not overflow. */
#define AM_CONV_WIDEST (PTRDIFF_MAX >> 16)

/* Some channels of a sequence. */
typedef struct {
    const am_short_conv *conv;
    const am_kernels *kernels;
    ptrdiff_t sequence, length; /* length: its tokens */
    ptrdiff_t first;            /* where it begins in its batch row */
    ptrdiff_t channel, lanes;
    am_dtype type;      /* of rows that are copied: that of x, or of the sums */
    ptrdiff_t row;      /* bytes of one */
    const void *weight; /* [width][lanes], of the type of the sums */
    const void *bias;   /* [lanes], or NULL */
} am_conv_place;

/* So many channels, whose rows are copied as numbers of `type`, before a sequence is chosen. */
am_conv_place am_conv_place_of(const am_short_conv *conv, const am_kernels *kernels, ptrdiff_t channel,
                               ptrdiff_t lanes, am_dtype type);

/* So many steps with the weights of a place, rows side by side. */
am_conv_tile am_conv_tile_of(const am_conv_place *place, ptrdiff_t steps);

const am_conv_kernels *am_conv_kernels_of(const am_kernels *kernels, am_dtype type);

/* The kernel for rows of the place's type. */
am_conv *am_conv_kernel(const am_conv_place *place);

/* How many steps of a tile take a few milliseconds at most, however many taps there are. Longer work looks
 * for signals every so many steps. */
ptrdiff_t am_conv_portion(const am_conv_tile *tile);

/* Computes the results of a tile whose rows are of the place's type. */
am_status am_conv_results(const am_conv_place *place, void *to, const void *from, am_conv_tile tile,
                          am_team *team);

/* The place of a token in memory. */
char *am_conv_at(const am_conv_place *place, const am_array *array, ptrdiff_t token);

/* Copy rows [rows][lanes] of a type from tokens `token` … of an array, or to them. In x, and what is like it,
 * tokens of a sequence begin with its first one. */
void am_conv_load(const am_conv_place *place, am_dtype type, void *to, const am_array *from, ptrdiff_t token,
                  ptrdiff_t rows);
void am_conv_store(const am_conv_place *place, am_dtype type, const am_array *to, ptrdiff_t token,
                   const void *from, ptrdiff_t rows);

/* Copies what results token … token + count - 1 are made of: count + W - 1 rows, of which the first may be
 * those of the state. With a count of 0 that is the state before `token`. */
void am_conv_load_window(const am_conv_place *place, void *to, ptrdiff_t token, ptrdiff_t count);

/* Loads the weights, and the bias behind them, to `to`, which has room for W + 1 rows; `reversed` weights are
 * those of gradients. */
void am_conv_load_weights(am_conv_place *place, void *to, bool reversed);

/* The number of tokens before a sequence; and the sequence of a token that there is. */
ptrdiff_t am_conv_start(const am_short_conv *conv, ptrdiff_t sequence);
ptrdiff_t am_conv_sequence_of(const am_short_conv *conv, ptrdiff_t token);

/* The sequence's part of tokens begin … end - 1 of all: *first … *last - 1 of its own. */
void am_conv_part(am_conv_place *place, ptrdiff_t sequence, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t *first,
                  ptrdiff_t *last);

/* Tokens at once where rows are copied. */
ptrdiff_t am_conv_tokens(ptrdiff_t width);

/* Channels of a task; fewer than AM_CONV_LANES if the history is long. */
ptrdiff_t am_conv_lanes(const am_short_conv *conv, ptrdiff_t most);

#endif
