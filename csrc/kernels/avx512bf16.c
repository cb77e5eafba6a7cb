/* avx512bf16.c – the kernels for x86-64 processors with AVX-512 and bfloat16 dot products (Cooper Lake, Zen
 * 4). */
#include "kernels/vec_avx512.h"
#define LEVEL avx512bf16
#include "kernels/level.h"
