/* amx.c – the kernels for x86-64 processors that multiply tiles of bfloat16 (Sapphire Rapids). */
#include "kernels/vec_avx512.h"
#define LEVEL amx
#include "kernels/level.h"
