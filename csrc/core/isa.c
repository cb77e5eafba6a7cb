/* isa.c – finds out which kernels the processor can run. This file is compiled for any processor. */
#include "core/isa.h"

#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#    include <cpuid.h>
#    ifdef __linux__
#        include <sys/syscall.h>
#    endif

static const unsigned LEAF1_ECX = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29; /* FMA, OSXSAVE, AVX, F16C */
static const unsigned LEAF7_EBX_AVX2 = 1u << 3 | 1u << 5 | 1u << 8;          /* BMI1, AVX2, BMI2 */
static const unsigned LEAF7_EBX_AVX512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
static const unsigned LEAF7_ECX_VNNI = 1u << 11;
static const unsigned LEAF7_1_EAX_BF16 = 1u << 5;
static const unsigned XCR0_YMM = 0x6;  /* the system saves the XMM and YMM registers */
static const unsigned XCR0_ZMM = 0xe6; /* and the mask and ZMM registers */

static unsigned saved_registers(void)
{
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* Linux lets a process and its children use tile registers only after the process has requested it. Builds
 * for tests emulate tiles in memory. */
static bool has_tiles(unsigned leaf7_edx)
{
#    if defined AM_EMULATE
    return (void)leaf7_edx, true;
#    elif defined __linux__
    enum { BF16_AND_TILES = 1 << 22 | 1 << 24, XCR0_TILES = 0x60000 };
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return (leaf7_edx & BF16_AND_TILES) == BF16_AND_TILES && (saved_registers() & XCR0_TILES) == XCR0_TILES &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#    else
    return (void)leaf7_edx, false;
#    endif
}

static int highest_level(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & LEAF1_ECX) != LEAF1_ECX) return 0;
    unsigned saved = saved_registers();
    if ((saved & XCR0_YMM) != XCR0_YMM) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & LEAF7_EBX_AVX2) != LEAF7_EBX_AVX2) return 0;
    if ((b & LEAF7_EBX_AVX512) != LEAF7_EBX_AVX512 || (saved & XCR0_ZMM) != XCR0_ZMM) return 1;
    const unsigned leaf7_edx = d;
    if (!(c & LEAF7_ECX_VNNI) || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & LEAF7_1_EAX_BF16))
        return 2;
    return has_tiles(leaf7_edx) ? 5 : 4;
}

static bool is_intel(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
}
#else
static int highest_level(void) { return 0; }
static bool is_intel(void) { return false; }
#endif

#ifdef AM_HAVE_AVX512BF16
static am_kernels avx512vnni;
#endif
#ifdef AM_HAVE_AMX
static am_kernels amx;
#endif

void am_isa_begin(void)
{
#ifdef AM_HAVE_AVX512BF16
    avx512vnni = am_kernels_avx512bf16;
    avx512vnni.name = "avx512vnni";
    avx512vnni.flash_bf16x2 = (am_flash_kernels){0};
#endif
#ifdef AM_HAVE_AMX
    amx = am_kernels_avx512bf16;
    amx.name = "amx";
    /* These are for processors whose vdpbf16ps is quick, and the step does not multiply by scales. */
    amx.flash_bf16x2.kv[AM_INT8] = amx.flash_bf16x2.kv[AM_FLOAT8] = (am_kv_kernels){0};
    amx.flash_bf16x2.amx = am_kernels_amx.amx;
    amx.flash_bf16x2.step = am_kernels_amx.step;
    amx.flash_bf16x2.backward = am_kernels_amx.backward;
    amx.flash_bf16x2.find_row_max = am_kernels_amx.find_row_max;
#endif
#ifdef _SC_LEVEL1_DCACHE_SIZE
    am_prefetch_near = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10 && !is_intel();
#endif
}

/* The kernels of each level. A compiler that cannot build one level cannot build those above it. */
static const am_kernels *const ladder[] = {
    &am_kernels_baseline,
#ifdef AM_HAVE_AVX2
    &am_kernels_avx2,
#endif
#ifdef AM_HAVE_AVX512
    &am_kernels_avx512,
#endif
#ifdef AM_HAVE_AVX512BF16
    &avx512vnni, /* what multiplies integers of the next level, without its bfloat16 */
    &am_kernels_avx512bf16,
#endif
#ifdef AM_HAVE_AMX
    &amx,
#endif
};

const am_kernels *am_isa_level(int level)
{
    int built = (int)(sizeof ladder / sizeof *ladder);
    return level < built && level <= highest_level() ? ladder[level] : NULL;
}

/* Intel's processors start a dot product of bfloat16 (vdpbf16ps) every other cycle, and two multiply-adds of
 * float32 every cycle, which are as many products in half the time. Measured without tiles: attention
 * takes 1.3 to 1.5 times as long as by float32. */
const am_kernels *am_isa_best(void)
{
    int level = 0;
    while (am_isa_level(level + 1)) level++;
    const bool by_bf16 = strcmp(ladder[level]->name, "avx512bf16") == 0;
    return ladder[by_bf16 && is_intel() ? level - 1 : level];
}

const am_kernels *am_isa_find(const char *name)
{
    const am_kernels *kernels;
    for (int level = 0; (kernels = am_isa_level(level)); level++) {
        if (strcmp(kernels->name, name) == 0) return kernels;
    }
    return NULL;
}
