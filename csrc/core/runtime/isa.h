/* isa.h – the kernels that this build has and this processor can run. */
#ifndef AM_CORE_RUNTIME_ISA_H
#define AM_CORE_RUNTIME_ISA_H

#include "kernels/table.h"

/* Joins the tables of levels, and chooses the cache to which kernels prefetch. Call it before any kernel;
 * again does nothing. */
void am_isa_begin(void);

/* The kernels of a level, from the plainest (0) to the last that runs here; NULL past the end. */
const am_kernels *am_isa_level(int level);

/* The fastest level, which is the last one as a rule. */
const am_kernels *am_isa_best(void);

/* The level called `name`, or NULL if it is unknown or does not run here. Beside those above there is
 * `plain`, whose attention is core/attention/plain.c, and whose other kernels are those of level 0. */
const am_kernels *am_isa_find(const char *name);

#endif
