/* epilogue.h – what becomes of accumulators: sinks enter, results are written. */
#ifndef AM_CORE_ATTENTION_EPILOGUE_H
#define AM_CORE_ATTENTION_EPILOGUE_H

#include "core/attention/terms/logit_terms.h"

/* Sets accumulators to the sums of no keys. */
void am_clear_rows(const am_attn_base *base, const am_flash_rows *block);

/* Writes out and lse of a block. `sinks`: one for each head, or NULL. `scratch`: for a row. */
void am_write_rows(const am_attn_base *base, const am_sink_sum *sinks, const am_attn_place *at,
                   const am_flash_rows *block, char *scratch);

/* Writes the tangents of out and lse of a block whose rows are those of am_flash_tangents. */
void am_write_tangents(const am_attn_base *base, const am_attn_tangents *problem, const am_sink_sum *sinks,
                       const am_attn_place *at, const am_flash_rows *block, ptrdiff_t columns, char *scratch);

#endif
