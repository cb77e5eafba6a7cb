/* formats.c – formats of keys and values. */
#include "core/cache/formats.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>

#include "core/arrays/convert.h"
#include "core/runtime/sizes.h"
#include "kernels/vec/half.h"

/* Widens numbers one by one. */
#define WIDEN(name, T, number)                                                                               \
    static void name(void *restrict to, const void *restrict from, const float *groups, ptrdiff_t group,     \
                     ptrdiff_t count)                                                                        \
    {                                                                                                        \
        (void)groups, (void)group;                                                                           \
        for (ptrdiff_t i = 0; i < count; i++) ((float *)to)[i] = number(((const T *)from)[i]);               \
    }

/* The high byte of a float16. */
static inline float widen_one_e5m2(uint8_t byte) { return am_widen_one_f16((uint16_t)(byte << 8)); }

WIDEN(widen_i8, int8_t, (float))
WIDEN(widen_e4m3, uint8_t, am_widen_one_f8)
WIDEN(widen_e5m2, uint8_t, widen_one_e5m2)

/* Ties go to even; NaN becomes 0, as its scale is NaN. */
static void narrow_i8(void *restrict to, const float *restrict from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        const float x = from[i];
        ((int8_t *)to)[i] = x != x ? 0 : (int8_t)lrintf(fminf(fmaxf(x, -127), 127));
    }
}

static void narrow_e4m3(void *restrict to, const float *restrict from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) ((uint8_t *)to)[i] = am_narrow_one_f8(from[i]);
}

/* What is beyond ±57344 becomes that. */
static inline uint8_t narrow_one_e5m2(float value)
{
    uint32_t bits = am_bits_of_float(value);
    uint32_t magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - (112u << 23) + 0xfffff + (magnitude >> 21 & 1)) >> 21;
    /* Adding 2^7 leaves float32 just the 16 bits behind the point that a subnormal number keeps. */
    uint32_t tiny = am_bits_of_float(am_float_of_bits(magnitude) + 0x1p7f) - 0x43000000;
    uint32_t byte = magnitude > 0x7f800000    ? 0x7e
                    : magnitude < 0x38800000  ? tiny
                    : magnitude >= 0x47600000 ? 0x7b
                                              : normal;
    return (uint8_t)(byte | (bits >> 24 & 0x80));
}

static void narrow_e5m2(void *restrict to, const float *restrict from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) ((uint8_t *)to)[i] = narrow_one_e5m2(from[i]);
}

static const am_kv_format formats[] = {
    {.name = "float16", .type = AM_FLOAT16},
    {.name = "bfloat16", .type = AM_BFLOAT16},
    {.name = "float32", .type = AM_FLOAT32},
    {.name = "float64", .type = AM_FLOAT64},
    {"int8", AM_INT8, AM_SCALES_OF_ROWS, 127, widen_i8, narrow_i8},
    {"float8_e4m3fn", AM_FLOAT8_E4M3, AM_SCALES_OF_ROWS, 448, widen_e4m3, narrow_e4m3},
    {"float8_e5m2", AM_FLOAT8_E5M2, AM_SCALES_OF_ROWS, 57344, widen_e5m2, narrow_e5m2},
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

void am_kv_widen_row(am_widen_row *widen, const am_tokens *t, float *to, const char *from, ptrdiff_t count)
{
    enum { PIECE = 256 };
    const ptrdiff_t size = (ptrdiff_t)am_size_of(t->type);
    if (t->element == size) {
        widen(to, from, NULL, 0, count);
        return;
    }
    for (ptrdiff_t i = 0, some; i < count; i += some, from += some * t->element) {
        char piece[PIECE];
        some = am_min(count - i, PIECE / size);
        am_copy_2d(piece, 0, size, from, 0, t->element, 1, some, (size_t)size);
        widen(to + i, piece, NULL, 0, some);
    }
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
