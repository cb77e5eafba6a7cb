/* plain.h – linear attention in plain C, for the level `plain`. */
#ifndef AM_CORE_LINEAR_PLAIN_H
#define AM_CORE_LINEAR_PLAIN_H

#include "core/linear/linear.h"

/* Computes one of the three that is not NULL: results, gradients, or one token of each sequence. It keeps no
 * states for gradients, and needs none. */
am_status am_plain_linear(const am_context *context, const am_linear *linear,
                          const am_linear_results *results, const am_linear_back *back,
                          const am_linear_step *step);

#endif
