/* avx2.c – the kernels for x86-64 processors with AVX2, FMA and F16C (Haswell, Zen). */
#include "kernels/vec_avx2.h"
#define LEVEL avx2
#include "kernels/level.h"
