/* baseline.c – the kernels for any processor, in portable C. */
#include "kernels/vec_baseline.h"
#define LEVEL baseline
#include "kernels/level.h"

bool am_prefetch_near; /* defined here, since every build has this file */
