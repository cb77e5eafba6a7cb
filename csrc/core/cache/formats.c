/* formats.c – formats of keys and values. */
#include "core/cache/formats.h"

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
        float x = from[i] == from[i] ? from[i] : 0;
        x = x > -127 ? x : -127;
        x = x < 127 ? x : 127;
        ((int8_t *)to)[i] = (int8_t)am_bits_of_float(x + 0x1.8p23f); /* its last bits are the integer */
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

/* The lower half of a byte is the first of two numbers. */
static void widen_i4(void *restrict to, const void *restrict from, const float *groups, ptrdiff_t group,
                     ptrdiff_t count)
{
    for (ptrdiff_t begin = 0; begin < count; begin += group, groups += 2) {
        float *dst = (float *)to + begin;
        const uint8_t *src = (const uint8_t *)from + begin / 2;
        for (ptrdiff_t i = 0; i < group / 2; i++) {
            dst[2 * i] = groups[0] * (float)(src[i] & 15) + groups[1];
            dst[2 * i + 1] = groups[0] * (float)(src[i] >> 4) + groups[1];
        }
    }
}

static inline uint8_t narrow_one_i4(float x)
{
    x = x > 0 ? x : 0;
    x = x < 15 ? x : 15;
    return am_bits_of_float(x + 0x1.8p23f) & 15; /* to the nearest, ties to even */
}

static void narrow_i4(void *restrict to, const float *restrict from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count / 2; i++)
        ((uint8_t *)to)[i] = (uint8_t)(narrow_one_i4(from[2 * i]) | narrow_one_i4(from[2 * i + 1]) << 4);
}

#define SCALED(of, most, kind)                                                                               \
    .scales = AM_SCALES_OF_##of, .largest = (most), .widen = widen_##kind, .narrow = narrow_##kind
static const am_kv_format formats[] = {
    {.name = "float16", .type = AM_FLOAT16, .scales = AM_SCALES_NONE},
    {.name = "bfloat16", .type = AM_BFLOAT16, .scales = AM_SCALES_NONE},
    {.name = "float32", .type = AM_FLOAT32, .scales = AM_SCALES_NONE},
    {.name = "float64", .type = AM_FLOAT64, .scales = AM_SCALES_NONE},
    {.name = "int8", .type = AM_INT8, SCALED(ROWS, 127, i8)},
    {.name = "float8_e4m3fn", .type = AM_FLOAT8_E4M3, SCALED(ROWS, 448, e4m3), .xla = 20},
    {.name = "float8_e5m2", .type = AM_FLOAT8_E5M2, SCALED(ROWS, 57344, e5m2), .xla = 19},
    {.name = "uint8", .type = AM_INT4, SCALED(GROUPS, 15, i4)},
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

void am_kv_read_groups(const am_kv_scales *s, float *to, const char *from, ptrdiff_t groups)
{
    for (ptrdiff_t i = 0; i < 2 * groups; i++) {
        const char *at = from + i / 2 * s->array.stride.channel + i % 2 * s->offset;
        to[i] = s->array.type == AM_FLOAT16 ? am_widen_one_f16(*(const uint16_t *)at) : *(const float *)at;
    }
}

float am_kv_write_scale(const am_kv_scales *s, char *to, float number)
{
    if (s->array.type != AM_FLOAT16) return *(float *)to = number;
    *(uint16_t *)to = am_narrow_one_f16(number);
    return am_widen_one_f16(*(uint16_t *)to);
}

am_kv_widening am_kv_widening_of(am_widen_row *widen, ptrdiff_t size, const am_array *rows,
                                 const am_kv_scales *scales)
{
    const bool plain = am_is_plain(rows, 1) && (!scales->group || am_kv_has_pairs(scales, AM_FLOAT32));
    return (am_kv_widening){widen, size, rows, scales, plain};
}

void am_kv_widen_row(const am_kv_widening *w, char *to, const char *from, const char *groups, ptrdiff_t count)
{
    enum { PIECE = 2 * AM_KV_MOST_GROUP, MOST_GROUPS = PIECE / AM_KV_LEAST_GROUP };
    const am_array *t = w->rows;
    const am_kv_scales *s = w->scales;
    if (w->plain) {
        w->widen(to, from, (const float *)groups, s->group, count);
        return;
    }
    const ptrdiff_t size = (ptrdiff_t)am_size_of(t->type), numbers = am_numbers_of(t->type);
    for (ptrdiff_t i = 0, some; i < count; i += some, to += some * w->size) {
        char piece[PIECE];
        float scales[2 * MOST_GROUPS];
        some = am_min(count - i, PIECE / size);
        am_copy_2d(piece, 0, size, from + i / numbers * t->stride.channel, 0, t->stride.channel, 1,
                   some / numbers, (size_t)size);
        if (groups)
            am_kv_read_groups(s, scales, groups + i / s->group * s->array.stride.channel, some / s->group);
        w->widen(to, piece, scales, s->group, some);
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
