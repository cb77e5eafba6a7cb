/* formats.c – formats of keys and values. */
#include "core/cache/formats.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>

#include "kernels/vec/half.h"

static void widen_i8(float *restrict to, const void *restrict from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) to[i] = ((const int8_t *)from)[i];
}

/* Ties go to even; NaN becomes 0, as its scale is NaN. */
static void narrow_i8(void *restrict to, const float *restrict from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        const float x = from[i];
        ((int8_t *)to)[i] = x != x ? 0 : (int8_t)lrintf(fminf(fmaxf(x, -127), 127));
    }
}

static void widen_f8(float *restrict to, const void *restrict from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) to[i] = am_widen_one_f8(((const uint8_t *)from)[i]);
}

static void narrow_f8(void *restrict to, const float *restrict from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) ((uint8_t *)to)[i] = am_narrow_one_f8(from[i]);
}

static const am_kv_format formats[] = {
    {.name = "float16", .type = AM_FLOAT16},
    {.name = "bfloat16", .type = AM_BFLOAT16},
    {.name = "float32", .type = AM_FLOAT32},
    {.name = "float64", .type = AM_FLOAT64},
    {"int8", AM_INT8, AM_SCALES_OF_ROWS, 127, widen_i8, narrow_i8},
    {"float8_e4m3fn", AM_FLOAT8, AM_SCALES_OF_ROWS, 448, widen_f8, narrow_f8},
};
enum { FORMATS = sizeof formats / sizeof *formats };

const am_kv_format *am_kv_format_at(int i) { return i < FORMATS ? &formats[i] : NULL; }

const am_kv_format *am_kv_format_of(am_dtype type)
{
    for (int i = 0; i < FORMATS; i++) {
        if (formats[i].type == type) return &formats[i];
    }
    return NULL;
}

void am_kv_format_names(char names[AM_KV_NAMES])
{
    int length = 0;
    for (int i = 0; i < FORMATS && length < AM_KV_NAMES; i++)
        length += snprintf(names + length, (size_t)(AM_KV_NAMES - length), "%s%s",
                           i == 0            ? ""
                           : i + 1 < FORMATS ? ", "
                                             : " or ",
                           formats[i].name);
}
