/* exp_f32.h – e^x, which compilers vectorize: 2^n e^r for the nearest whole n, and a polynomial of r. Its
 * error is below 2 units of the last place. 0 where the result would be subnormal; Inf from 88.4 on. */

static inline float exp_one_f32(float x)
{
    const float shift = 0x1.8p23f;
    const float inside = x < -88 ? -88 : x > 89 ? 89 : x; /* NaN stays */
    const float shifted = inside * 1.44269504f + shift, n = shifted - shift;
    const float r = (inside - n * 0.693145752f) - n * 1.42860677e-6f;
    float power = 1.f / 5040;
    power = power * r + 1.f / 720;
    power = power * r + 1.f / 120;
    power = power * r + 1.f / 24;
    power = power * r + 1.f / 6;
    power = power * r + 0.5f;
    power = power * r * r + r + 1;
    const uint32_t bits = (am_bits_of_float(shifted) + 127) << 23;
    return x < -87.3f ? 0 : power * am_float_of_bits(bits);
}

static inline float root_f32(float x) { return sqrtf(x); }
