/* isa.c – finds out which kernels the processor can run. This file is compiled for any processor. */
#include "core/runtime/isa.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

enum { BASELINE, AVX2, AVX512, AVX512VNNI, AVX512BF16, AMX, LEVELS };

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
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & LEAF1_ECX) != LEAF1_ECX) return BASELINE;
    unsigned saved = saved_registers();
    if ((saved & XCR0_YMM) != XCR0_YMM) return BASELINE;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & LEAF7_EBX_AVX2) != LEAF7_EBX_AVX2) return BASELINE;
    if ((b & LEAF7_EBX_AVX512) != LEAF7_EBX_AVX512 || (saved & XCR0_ZMM) != XCR0_ZMM) return AVX2;
    const unsigned leaf7_edx = d;
    if (!(c & LEAF7_ECX_VNNI) || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & LEAF7_1_EAX_BF16))
        return AVX512;
    return has_tiles(leaf7_edx) ? AMX : AVX512BF16;
}

static bool is_intel(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
}
#else
static int highest_level(void) { return BASELINE; }
static bool is_intel(void) { return false; }
#endif

bool am_prefetch_near;

/* The kernels of each level. A compiler that cannot build one level cannot build those above it. */
static am_kernels ladder[LEVELS], plain;
static int built; /* the highest of them that this build has */

/* Copies the words that are not 0 from a topic to the table of a level; the others come from other topics.
 * Numbers that share a word must be of one topic. */
static void add_topic(am_kernels *to, const am_kernels *topic)
{
    uintptr_t words[sizeof *to / sizeof(uintptr_t)], more[sizeof words / sizeof *words];
    _Static_assert(sizeof words == sizeof *to, "a table is made of whole words");
    memcpy(words, to, sizeof words);
    memcpy(more, topic, sizeof more);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (more[i]) words[i] = more[i];
    memcpy(to, words, sizeof words);
}
#define ADD(topic, level) add_topic(to, &AM_TOPIC(topic, level));

/* The table of a level, which begins as that of the level below. */
static am_kernels *begin_level(int level, const char *name)
{
    am_kernels *to = &ladder[level];
    if (level > 0) *to = ladder[level - 1];
    to->name = name;
    built = level;
    return to;
}

/* What bf16x2 has in common with float32, as sums are float32. */
static void share_float32(am_kernels *to)
{
    const am_arithmetic *from = &to->flash_f32;
    am_arithmetic *bf16x2 = &to->flash_bf16x2;
    bf16x2->merge = from->merge;
    bf16x2->kv[AM_BFLOAT16].pack_keys = from->kv[AM_FLOAT32].pack_keys; /* of lanes, whatever is in them */
    memcpy(bf16x2->numbers, from->numbers, sizeof from->numbers);
    bf16x2->load_rows = from->load_rows;
    bf16x2->add_rows = from->add_rows;
    bf16x2->dot_rows = from->dot_rows;
}

static void join_levels(void)
{
    am_kernels *to = begin_level(BASELINE, "baseline");
    AM_EACH_TOPIC(ADD, baseline)
    plain = *to;
    plain.name = "plain", plain.plain = true;
#ifdef AM_EMULATE
    share_float32(to);
    ADD(flash_bf16x2, baseline)
    ADD(kv_bf16x2, baseline)
    ADD(linear_bf16x2, baseline)
#endif
#ifdef AM_HAVE_AVX2
    to = begin_level(AVX2, "avx2");
    to->flash_bf16x2 = (am_arithmetic){0};
    to->linear_bf16x2 = NULL;
    AM_EACH_TOPIC(ADD, avx2)
#endif
#ifdef AM_HAVE_AVX512
    to = begin_level(AVX512, "avx512");
    AM_EACH_TOPIC(ADD, avx512)
#endif
#ifdef AM_HAVE_AVX512VNNI
    to = begin_level(AVX512VNNI, "avx512vnni");
    ADD(kv_i16x2, avx512vnni)
#endif
#ifdef AM_HAVE_AVX512BF16
    to = begin_level(AVX512BF16, "avx512bf16");
    share_float32(to);
    to->flash_bf16x2.kv[AM_INT8] = to->flash_f32.kv[AM_INT8]; /* but for those that pack */
    to->flash_bf16x2.kv[AM_INT4] = to->flash_f32.kv[AM_INT4];
    ADD(flash_bf16x2, avx512bf16)
    ADD(kv_bf16x2, avx512bf16)
    ADD(linear_bf16x2, avx512bf16)
    ADD(kv_f8x2, avx512bf16)
#endif
#ifdef AM_HAVE_AMX
    to = begin_level(AMX, "amx");
    to->flash_amx = to->flash_bf16x2; /* the topic replaces its products */
    /* These are for processors whose vdpbf16ps is quick, and the step does not multiply by scales. */
    to->flash_amx.kv[AM_INT8] = to->flash_amx.kv[AM_FLOAT8_E4M3] = (am_kv_kernels){0};
    to->flash_bf16x2 = (am_arithmetic){0};
    to->linear_bf16x2 = NULL;
    ADD(flash_amx, amx)
#endif
#ifdef _SC_LEVEL1_DCACHE_SIZE
    am_prefetch_near = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10 && !is_intel();
#endif
}

/* Once a process, as kernels may run while another interpreter loads the library. */
void am_isa_begin(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, join_levels);
}

const am_kernels *am_isa_level(int level)
{
    return level <= built && level <= highest_level() ? &ladder[level] : NULL;
}

/* Intel's processors start a dot product of bfloat16 (vdpbf16ps) every other cycle, and two multiply-adds of
 * float32 every cycle, which are as many products in half the time. Measured without tiles: attention
 * takes 1.3 to 1.5 times as long as by float32. */
const am_kernels *am_isa_best(void)
{
    int level = 0;
    while (am_isa_level(level + 1)) level++;
    const bool by_bf16 = level == AVX512BF16;
    return &ladder[by_bf16 && is_intel() ? AVX512VNNI : level];
}

const am_kernels *am_isa_find(const char *name)
{
    const am_kernels *kernels;
    for (int level = 0; (kernels = am_isa_level(level)); level++) {
        if (strcmp(kernels->name, name) == 0) return kernels;
    }
    return strcmp(name, plain.name) == 0 ? &plain : NULL;
}
