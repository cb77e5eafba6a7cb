/* avx512bf16.c – the kernels for x86-64 processors with AVX-512 and dot products of integers and bfloat16
 * (Cooper Lake, Zen 4). */
#include "kernels/vec_avx512.h"
#define LEVEL avx512bf16
#include "kernels/level.h"
