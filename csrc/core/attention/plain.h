/* plain.h – attention of the level `plain`: am_attn_forward and am_attn_backward, one query after the other.
 */
#ifndef AM_CORE_ATTENTION_PLAIN_H
#define AM_CORE_ATTENTION_PLAIN_H

#include "core/attention/attention.h"

am_status am_plain_forward(const am_context *context, const am_attn *attn);
am_status am_plain_backward(const am_context *context, const am_attn_gradients *problem);

#endif
