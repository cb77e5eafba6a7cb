/* convert.c – element types at the border of the kernels. */
#include "core/arrays/convert.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "core/runtime/sizes.h"
#include "kernels/vec/half.h"

am_lane am_lane_of_size(ptrdiff_t size)
{
    return size == 1 ? AM_LANE_8 : size == 2 ? AM_LANE_16 : size == 4 ? AM_LANE_32 : AM_LANE_64;
}

am_lane am_lane_of(am_dtype type)
{
    switch (type) {
    case AM_FLOAT16:
    case AM_BFLOAT16: return AM_LANE_F16;
    case AM_FLOAT32: return AM_LANE_F32;
    case AM_FLOAT64: return AM_LANE_F64;
    default: return am_lane_of_size((ptrdiff_t)am_size_of(type));
    }
}

uint64_t am_repeated(uint64_t element, ptrdiff_t size)
{
    if (size == 1) element = (element & 0xff) * 0x0101;
    if (size <= 2) element = (element & 0xffff) * 0x00010001;
    return size <= 4 ? (element & 0xffffffff) << 32 | (element & 0xffffffff) : element;
}

#define T int8_t
#define FN(name) name##_i8
#include "core/arrays/convert_tpl.h"
#define T uint8_t
#define FN(name) name##_u8
#include "core/arrays/convert_tpl.h"
#define T int16_t
#define FN(name) name##_i16
#include "core/arrays/convert_tpl.h"
#define T uint16_t
#define FN(name) name##_u16
#include "core/arrays/convert_tpl.h"
#define T int32_t
#define FN(name) name##_i32
#include "core/arrays/convert_tpl.h"
#define T uint32_t
#define FN(name) name##_u32
#include "core/arrays/convert_tpl.h"
#define T uint64_t
#define FN(name) name##_u64
#include "core/arrays/convert_tpl.h"

#define CAST(name, from, to)                                                                                 \
    static bool name(const am_kernels *kernels, void *restrict dst, const void *restrict src,                \
                     ptrdiff_t count)                                                                        \
    {                                                                                                        \
        (void)kernels;                                                                                       \
        for (ptrdiff_t i = 0; i < count; i++) ((to *)dst)[i] = (to)((const from *)src)[i];                   \
        return true;                                                                                         \
    }
CAST(i64_to_f64, int64_t, double)
CAST(f32_to_f64, float, double)
CAST(f64_to_f32, double, float)

static bool f64_to_i64(const am_kernels *kernels, void *restrict dst, const void *restrict src,
                       ptrdiff_t count)
{
    (void)kernels;
    bool fits = true;
    for (ptrdiff_t i = 0; i < count; i++) {
        double value = trunc(((const double *)src)[i]);
        bool inside = value >= -0x1p63 && value < 0x1p63; /* a NaN is not */
        ((int64_t *)dst)[i] = inside ? (int64_t)value : 0;
        fits &= inside;
    }
    return fits;
}

#define KERNEL(name, kernel)                                                                                 \
    static bool name(const am_kernels *kernels, void *dst, const void *src, ptrdiff_t count)                 \
    {                                                                                                        \
        kernels->copy.kernel(dst, src, count);                                                               \
        return true;                                                                                         \
    }
KERNEL(f16_to_f32, widen_f16)
KERNEL(bf16_to_f32, widen_bf16)
KERNEL(f32_to_f16, narrow_f16)
KERNEL(f32_to_bf16, narrow_bf16)

/* float64 meets the sixteen-bit types, and int64 the floating ones, by way of a type that both sides know. */
enum { STEP = 256 };

typedef struct {
    am_convert_row *first, *second;
    size_t src_size, dst_size;
} steps;

static bool two_steps(const am_kernels *kernels, void *dst, const void *src, ptrdiff_t count, steps s)
{
    double middle[STEP];
    bool fits = true;
    for (ptrdiff_t i = 0; i < count; i += STEP) {
        ptrdiff_t n = count - i < STEP ? count - i : STEP;
        fits &= s.first(kernels, middle, (const char *)src + (size_t)i * s.src_size, n);
        fits &= s.second(kernels, (char *)dst + (size_t)i * s.dst_size, middle, n);
    }
    return fits;
}

#define TWO_STEPS(name, ...)                                                                                 \
    static bool name(const am_kernels *kernels, void *dst, const void *src, ptrdiff_t count)                 \
    {                                                                                                        \
        return two_steps(kernels, dst, src, count, (steps){__VA_ARGS__});                                    \
    }
TWO_STEPS(f16_to_f64, .first = f16_to_f32, .second = f32_to_f64, .src_size = 2, .dst_size = 8)
TWO_STEPS(bf16_to_f64, .first = bf16_to_f32, .second = f32_to_f64, .src_size = 2, .dst_size = 8)

/* Rounding twice may differ from rounding once, unless the first time is to an odd last bit where inexact. */
static bool f64_to_odd_f32(const am_kernels *kernels, void *restrict dst, const void *restrict src,
                           ptrdiff_t count)
{
    (void)kernels;
    for (ptrdiff_t i = 0; i < count; i++) {
        double value = ((const double *)src)[i];
        float nearest = (float)value;
        uint32_t bits = am_bits_of_float(nearest);
        bits -= fabs((double)nearest) > fabs(value);
        bits |= (double)nearest < value || (double)nearest > value;
        ((float *)dst)[i] = am_float_of_bits(bits);
    }
    return true;
}

TWO_STEPS(f64_to_f16, .first = f64_to_odd_f32, .second = f32_to_f16, .src_size = 8, .dst_size = 2)
TWO_STEPS(f64_to_bf16, .first = f64_to_odd_f32, .second = f32_to_bf16, .src_size = 8, .dst_size = 2)

static am_convert_row *const converters[AM_OTHER][AM_OTHER] = {
    [AM_INT8][AM_INT64] = load_i8,           [AM_UINT8][AM_INT64] = load_u8,
    [AM_INT16][AM_INT64] = load_i16,         [AM_UINT16][AM_INT64] = load_u16,
    [AM_INT32][AM_INT64] = load_i32,         [AM_UINT32][AM_INT64] = load_u32,
    [AM_UINT64][AM_INT64] = load_u64,        [AM_FLOAT64][AM_INT64] = f64_to_i64,

    [AM_INT64][AM_INT8] = store_i8,          [AM_INT64][AM_UINT8] = store_u8,
    [AM_INT64][AM_INT16] = store_i16,        [AM_INT64][AM_UINT16] = store_u16,
    [AM_INT64][AM_INT32] = store_i32,        [AM_INT64][AM_UINT32] = store_u32,
    [AM_INT64][AM_UINT64] = store_u64,       [AM_INT64][AM_FLOAT64] = i64_to_f64,

    [AM_FLOAT16][AM_FLOAT32] = f16_to_f32,   [AM_BFLOAT16][AM_FLOAT32] = bf16_to_f32,
    [AM_FLOAT64][AM_FLOAT32] = f64_to_f32,   [AM_FLOAT32][AM_FLOAT16] = f32_to_f16,
    [AM_FLOAT32][AM_BFLOAT16] = f32_to_bf16,

    [AM_FLOAT16][AM_FLOAT64] = f16_to_f64,   [AM_BFLOAT16][AM_FLOAT64] = bf16_to_f64,
    [AM_FLOAT32][AM_FLOAT64] = f32_to_f64,   [AM_FLOAT64][AM_FLOAT16] = f64_to_f16,
    [AM_FLOAT64][AM_BFLOAT16] = f64_to_bf16,
};

am_convert_row *am_converter(am_dtype from, am_dtype to) { return converters[from][to]; }

#define T uint8_t
#define FN(name) name##_1
#include "core/arrays/copy_tpl.h"
#define T uint16_t
#define FN(name) name##_2
#include "core/arrays/copy_tpl.h"
#define T uint32_t
#define FN(name) name##_4
#include "core/arrays/copy_tpl.h"
#define T uint64_t
#define FN(name) name##_8
#include "core/arrays/copy_tpl.h"

enum { WORTH_A_CALL = 64 }; /* bytes, of memcpy */

void am_copy_2d(char *dst, ptrdiff_t dst_row, ptrdiff_t dst_column, const char *src, ptrdiff_t src_row,
                ptrdiff_t src_column, ptrdiff_t rows, ptrdiff_t columns, size_t size)
{
    bool from_tile = am_abs(src_column) == (ptrdiff_t)size;
    bool transposed = from_tile ? am_abs(dst_row) < am_abs(dst_column) : am_abs(src_row) < am_abs(src_column);
    if (transposed) {
        ptrdiff_t swap = dst_row;
        dst_row = dst_column, dst_column = swap;
        swap = src_row, src_row = src_column, src_column = swap;
        swap = rows, rows = columns, columns = swap;
    }
    if (dst_column == (ptrdiff_t)size && src_column == dst_column && columns * dst_column >= WORTH_A_CALL) {
        for (ptrdiff_t r = 0; r < rows; r++)
            memcpy(dst + r * dst_row, src + r * src_row, (size_t)columns * size);
        return;
    }
    switch (size) {
    case 1: copy_2d_1(dst, dst_row, dst_column, src, src_row, src_column, rows, columns); break;
    case 2: copy_2d_2(dst, dst_row, dst_column, src, src_row, src_column, rows, columns); break;
    case 4: copy_2d_4(dst, dst_row, dst_column, src, src_row, src_column, rows, columns); break;
    default: copy_2d_8(dst, dst_row, dst_column, src, src_row, src_column, rows, columns); break;
    }
}
