/* float_mode.h – the floating-point mode of a thread: rounding, denormals, traps, and the flags of
 * exceptions. */
#ifndef AM_CORE_RUNTIME_FLOAT_MODE_H
#define AM_CORE_RUNTIME_FLOAT_MODE_H

#if defined(__x86_64__)
#    include <xmmintrin.h>

typedef unsigned am_float_mode; /* MXCSR */

static inline am_float_mode am_float_mode_get(void) { return _mm_getcsr(); }
static inline void am_float_mode_set(am_float_mode mode) { _mm_setcsr(mode); }

/* The mode with all traps disabled. */
static inline am_float_mode am_float_mode_quiet(am_float_mode mode) { return mode | _MM_MASK_MASK; }

/* The mode in which denormal results are 0, where they take long. */
static inline am_float_mode am_float_mode_flushing(am_float_mode mode) { return mode | _MM_FLUSH_ZERO_ON; }

#elif defined(__aarch64__)
#    include <stdint.h>

typedef struct {
    uint64_t control, flags; /* FPCR, FPSR */
} am_float_mode;

static inline am_float_mode am_float_mode_get(void)
{
    am_float_mode mode;
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(mode.control), "=r"(mode.flags));
    return mode;
}

static inline void am_float_mode_set(am_float_mode mode)
{
    __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(mode.control), "r"(mode.flags) : "memory");
}

static inline am_float_mode am_float_mode_quiet(am_float_mode mode)
{
    enum { TRAPS = 0x9f00 };
    mode.control &= ~(uint64_t)TRAPS;
    return mode;
}

static inline am_float_mode am_float_mode_flushing(am_float_mode mode) { return mode; }

#else
#    include <fenv.h>

typedef fenv_t am_float_mode;

static inline am_float_mode am_float_mode_get(void)
{
    fenv_t mode;
    fegetenv(&mode);
    return mode;
}

static inline void am_float_mode_set(am_float_mode mode) { fesetenv(&mode); }
static inline am_float_mode am_float_mode_quiet(am_float_mode mode) { return mode; }
static inline am_float_mode am_float_mode_flushing(am_float_mode mode) { return mode; }
#endif

#endif
