/* isa.h – the kernels that this build has and this processor can run. */
#ifndef AM_CORE_RUNTIME_ISA_H
#define AM_CORE_RUNTIME_ISA_H

#include "kernels/table.h"

/* Joins the tables of levels, and chooses the cache to which kernels prefetch. Call it before any kernel;
 * again does nothing. */
void am_isa_begin(void);

/* The kernels of a level, from the plainest (0) to the last that runs here; NULL past the end. */
const am_kernels *am_isa_level(int level);

/* The same of levels that this build has, whether the processor runs them or not. */
const am_kernels *am_isa_built(int level);

/* The processor's vendor, where the choice of kernels depends on it. */
typedef enum { AM_ANY_VENDOR, AM_INTEL } am_vendor;

/* The fastest level, which is the last one as a rule; and that of a processor whose last one is `highest`. */
const am_kernels *am_isa_best(void);
int am_isa_best_of(int highest, am_vendor vendor);

/* The topic and level from which a word of the table of a level comes; NULL if it is 0. */
const char *am_isa_origin(const am_kernels *kernels, const void *word);

/* The level called `name`, or NULL if it is unknown or does not run here. There is one more level, `plain`:
 * its attention is core/attention/plain.c, and its other kernels are those of level 0. */
const am_kernels *am_isa_find(const char *name);

#endif
