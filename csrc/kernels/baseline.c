/* baseline.c – the kernels for any processor: what the compiler makes of plain C. */
#include "kernels/vec_baseline.h"
#define LEVEL baseline
#include "kernels/level.h"

bool am_prefetch_near; /* here, since every build has these kernels */
