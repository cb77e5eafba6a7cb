/* half.h – floats of sixteen and of eight bits, one at a time and without branches on most values, so that
 * compilers vectorize it. */
#ifndef AM_KERNELS_VEC_HALF_H
#define AM_KERNELS_VEC_HALF_H

#include <stdint.h>
#include <string.h>

static inline float am_float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t am_bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float am_widen_one_bf16(uint16_t half) { return am_float_of_bits((uint32_t)half << 16); }

static inline uint16_t am_narrow_one_bf16(float value)
{
    uint32_t bits = am_bits_of_float(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t quiet = bits >> 16 | 0x40; /* rounding could carry a NaN into infinity */
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

static inline float am_widen_one_f16(uint16_t half)
{
    uint32_t magnitude = half & 0x7fffu;
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t tiny = am_bits_of_float((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t special = magnitude << 13 | 0x7f800000;
    uint32_t bits = magnitude < 0x400 ? tiny : magnitude < 0x7c00 ? normal : special;
    return am_float_of_bits(bits | (uint32_t)(half & 0x8000u) << 16);
}

static inline uint16_t am_narrow_one_f16(float value)
{
    uint32_t bits = am_bits_of_float(value);
    uint32_t magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    /* Adding 0.5 leaves float32 just the 24 bits behind the point that a subnormal float16 keeps. */
    uint32_t tiny = am_bits_of_float(am_float_of_bits(magnitude) + 0.5f) - 0x3f000000;
    uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t half = magnitude < 0x38800000 ? tiny : magnitude < 0x47800000 ? normal : special;
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

/* e4m3fn: four bits of exponent, three of mantissa, no infinity. */
static inline float am_widen_one_f8(uint8_t byte)
{
    uint32_t magnitude = byte & 0x7fu;
    uint32_t normal = (magnitude << 20) + (120u << 23);
    uint32_t tiny = am_bits_of_float((float)(int32_t)magnitude * 0x1p-9f);
    uint32_t bits = magnitude < 8 ? tiny : magnitude < 0x7f ? normal : 0x7fc00000;
    return am_float_of_bits(bits | (uint32_t)(byte & 0x80u) << 24);
}

/* What is beyond ±448 becomes that. */
static inline uint8_t am_narrow_one_f8(float value)
{
    uint32_t bits = am_bits_of_float(value);
    uint32_t magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - (120u << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    /* Adding 2^14 leaves float32 just the 9 bits behind the point that a subnormal number keeps. */
    uint32_t tiny = am_bits_of_float(am_float_of_bits(magnitude) + 0x1p14f) - 0x46800000;
    uint32_t most = normal > 0x7e ? 0x7e : normal;
    uint32_t byte = magnitude > 0x7f800000    ? 0x7f
                    : magnitude < 0x3c800000  ? tiny
                    : magnitude >= 0x43e00000 ? 0x7e
                                              : most;
    return (uint8_t)(byte | (bits >> 24 & 0x80));
}

#endif
