/* merge.h – merges attention over parts of the keys into attention over all of them, and computes its
 * gradients.
 *
 *     lse = log Σ_i exp(lse_i)          out = Σ_i w_i · out_i          w_i = exp(lse_i - lse)
 *
 *     d out_i = w_i · d out             d lse_i = w_i · (d out · (out_i - out) + d lse)
 *
 * A part whose lse is -inf, or +inf as FlashAttention has it, has no live pair: its out is ignored, even if
 * it holds NaN, and its gradients are zero. If all parts are so, out is zero and lse is -inf.
 */
#ifndef AM_CORE_ATTENTION_MERGE_H
#define AM_CORE_ATTENTION_MERGE_H

#include "core/arrays/array.h"
#include "core/runtime/threads.h"

typedef struct {
    am_array out, lse; /* lse: one number for each row */
} am_merge_part;

typedef struct {
    am_dtype type;      /* floating, of `out`; lse is float64 for float64 and else float32 */
    ptrdiff_t shape[4]; /* batch, tokens, heads, channels */
    ptrdiff_t count;    /* of parts, at least 1 */
    const am_merge_part *parts;
    const am_merge_part *gradient; /* of the result: gradients are computed; its lse may lack data. NULL:
                                    * parts are merged */
    char *out; /* [batch, tokens, heads, channels], C-contiguous; for gradients one such array per part */
    char *lse; /* [batch, heads, tokens], likewise */
} am_merge;

am_status am_merge_states(const am_context *context, const am_merge *merge);

#endif
