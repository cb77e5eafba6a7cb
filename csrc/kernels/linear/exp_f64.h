/* exp_f64.h – e^x in float64, as exp_f32.h. Inf from 709.4 on. */

static inline double exp_one_f64(double x)
{
    const double shift = 0x1.8p52;
    const double inside = x < -709 ? -709 : x > 710 ? 710 : x; /* NaN stays */
    const double shifted = inside * 1.4426950408889634 + shift, n = shifted - shift;
    const double r = (inside - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    double power = 1. / 6227020800;
    power = power * r + 1. / 479001600;
    power = power * r + 1. / 39916800;
    power = power * r + 1. / 3628800;
    power = power * r + 1. / 362880;
    power = power * r + 1. / 40320;
    power = power * r + 1. / 5040;
    power = power * r + 1. / 720;
    power = power * r + 1. / 120;
    power = power * r + 1. / 24;
    power = power * r + 1. / 6;
    power = power * r + 0.5;
    power = power * r * r + r + 1;
    uint64_t bits;
    double scale;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52;
    memcpy(&scale, &bits, sizeof scale);
    return x < -708 ? 0 : power * scale;
}

static inline double root_f64(double x) { return sqrt(x); }
