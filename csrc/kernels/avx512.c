/* avx512.c – the kernels for x86-64 processors with AVX-512 (Skylake-X, Zen 4). */
#include "kernels/vec_avx512.h"
#define LEVEL avx512
#include "kernels/level.h"
