/* isa.c – finds out which kernels the processor can run. This file is compiled for any processor. */
#include "core/runtime/isa.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#if defined(__aarch64__)
enum { BASELINE, NEONDOT, NEONBF16, LEVELS, TOP = LEVELS - 1 };
#else
enum { BASELINE, AVX2, AVX512, AVX512VNNI, AVX512BF16, AMX, LEVELS, TOP = LEVELS - 1 };
#endif

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

static am_vendor vendor(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx ? AM_INTEL : AM_ANY_VENDOR;
}
#else
#    if defined __aarch64__ && defined __linux__
#        include <sys/auxv.h>
static int highest_level(void)
{
    /* HWCAP_ASIMDDP and HWCAP2_BF16, which older headers lack. */
    enum { HWCAP_HAS_DOT = 1 << 20, HWCAP2_HAS_BF16 = 1 << 14 };
    if (!(getauxval(AT_HWCAP) & HWCAP_HAS_DOT)) return BASELINE;
    return getauxval(AT_HWCAP2) & HWCAP2_HAS_BF16 ? NEONBF16 : NEONDOT;
}
#    elif defined __aarch64__ && defined __APPLE__
#        include <sys/sysctl.h>
static bool has_feature(const char *name)
{
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname(name, &has, &size, NULL, 0) == 0 && has;
}
static int highest_level(void)
{
    if (!has_feature("hw.optional.arm.FEAT_DotProd")) return BASELINE;
    return has_feature("hw.optional.arm.FEAT_BF16") ? NEONBF16 : NEONDOT;
}
#    else
static int highest_level(void) { return BASELINE; }
#    endif
static am_vendor vendor(void) { return AM_ANY_VENDOR; }
#endif

bool am_prefetch_near;

/* Levels, and the vendor whose processors have better kernels at the level below. Intel's processors start a
 * dot product of bfloat16 (vdpbf16ps) every other cycle. They start two multiply-adds of float32 every cycle,
 * which do as many products in half the time. Measured without tiles, attention takes 1.3 to 1.5 times as
 * long as by float32. Only Intel's processors have `amx`, so this level has no kernels of bf16x2 except those
 * that tiles share. */
static const struct {
    const char *name;
    am_vendor unless; /* AM_ANY_VENDOR: nobody */
} levels[LEVELS] = {
    {"baseline", AM_ANY_VENDOR},
#ifdef __aarch64__
    {"neondot", AM_ANY_VENDOR},
    {"neonbf16", AM_ANY_VENDOR},
#else
    {"avx2", AM_ANY_VENDOR},     {"avx512", AM_ANY_VENDOR}, {"avx512vnni", AM_ANY_VENDOR},
    {"avx512bf16", AM_INTEL},    {"amx", AM_ANY_VENDOR},
#endif
};

/* The highest that this build has: a compiler that cannot build one level cannot build those above it. */
#if defined AM_HAVE_AMX
enum { BUILT = AMX };
#elif defined AM_HAVE_AVX512BF16
enum { BUILT = AVX512BF16 };
#elif defined AM_HAVE_AVX512VNNI
enum { BUILT = AVX512VNNI };
#elif defined AM_HAVE_AVX512
enum { BUILT = AVX512 };
#elif defined AM_HAVE_AVX2
enum { BUILT = AVX2 };
#elif defined AM_HAVE_NEONBF16
enum { BUILT = NEONBF16 };
#elif defined AM_HAVE_NEONDOT
enum { BUILT = NEONDOT };
#else
enum { BUILT = BASELINE };
#endif

/* A part of the tables of some levels: the words that are not 0 of a topic, or of the table itself so far.
 * Later rows go over earlier ones. Numbers that share a word must be of one topic. */
typedef struct {
    const char *name;        /* of the topic, and of the level for which it is compiled */
    const am_kernels *topic; /* NULL: the table itself */
    size_t from, to, bytes;  /* what becomes what */
    int first, last;         /* levels */
} row;

#define SIZE_OF(member) sizeof(((am_kernels *)0)->member)
#define PLACES(before, behind)                                                                               \
    .from = offsetof(am_kernels, before), .to = offsetof(am_kernels, behind), .bytes = SIZE_OF(behind)
#define LEVELS(lowest, highest) .first = lowest, .last = highest
#define TOPIC(kernels, level) .name = #kernels " " #level, .topic = &AM_TOPIC(kernels, level)
#define WHOLE(topic, level, first, last)                                                                     \
    {TOPIC(topic, level), .bytes = sizeof(am_kernels), LEVELS(first, last)}
#define PART(topic, level, places, at) {TOPIC(topic, level), places, LEVELS(at, at)}
#define SHARE(from, to, at) {PLACES(from, to), LEVELS(at, at)}

/* bfloat16 by two in a lane: what it has in common with float32, as sums are float32, and its own topics. */
#define BY_BF16X2(member, level, at)                                                                         \
    SHARE(flash_f32.merge, member.merge, at),                                                                \
        SHARE(flash_f32.kv[AM_FLOAT32].pack_keys, member.kv[AM_BFLOAT16].pack_keys, at), /* of lanes */      \
        SHARE(flash_f32.numbers, member.numbers, at),                                                        \
        SHARE(flash_f32.find_infinite, member.find_infinite, at),                                            \
        SHARE(flash_f32.load_rows, member.load_rows, at), SHARE(flash_f32.add_rows, member.add_rows, at),    \
        SHARE(flash_f32.dot_rows, member.dot_rows, at),                                                      \
        PART(flash_bf16x2, level, PLACES(flash_bf16x2, member), at),                                         \
        PART(kv_bf16x2, level, PLACES(flash_bf16x2, member), at)

/* clang-format off */
#define FROM_BASELINE(topic, level) WHOLE(topic, level, BASELINE, TOP),
#define FROM_AVX2(topic, level) WHOLE(topic, level, AVX2, TOP),
#define FROM_AVX512(topic, level) WHOLE(topic, level, AVX512, TOP),
static const row rows[] = {
    AM_EACH_TOPIC(FROM_BASELINE, baseline)
#ifdef AM_EMULATE
    BY_BF16X2(flash_bf16x2, baseline, BASELINE),
    WHOLE(linear_bf16x2, baseline, BASELINE, BASELINE),
#endif
#ifdef AM_HAVE_NEONDOT
    WHOLE(kv_i16x2, neondot, NEONDOT, TOP),
#endif
#ifdef AM_HAVE_NEONBF16
    BY_BF16X2(flash_bf16x2, neonbf16, NEONBF16),
    WHOLE(linear_bf16x2, neonbf16, NEONBF16, NEONBF16),
#endif
#ifdef AM_HAVE_AVX2
    AM_EACH_TOPIC(FROM_AVX2, avx2)
    WHOLE(kv_i16x2, avx2, AVX2, AVX2),
#endif
#ifdef AM_HAVE_AVX512
    AM_EACH_TOPIC(FROM_AVX512, avx512)
    WHOLE(kv_i16x2, avx512, AVX512, AVX512),
#endif
#ifdef AM_HAVE_AVX512VNNI
    WHOLE(kv_i16x2, avx512vnni, AVX512VNNI, TOP),
#endif
#ifdef AM_HAVE_AVX512BF16
    BY_BF16X2(flash_bf16x2, avx512bf16, AVX512BF16),
    WHOLE(linear_bf16x2, avx512bf16, AVX512BF16, AVX512BF16),
    SHARE(flash_f32.kv[AM_INT8], flash_bf16x2.kv[AM_INT8], AVX512BF16), /* but for those that pack */
    SHARE(flash_f32.kv[AM_INT4], flash_bf16x2.kv[AM_INT4], AVX512BF16),
    WHOLE(kv_f8x2, avx512bf16, AVX512BF16, AVX512BF16),
#endif
#ifdef AM_HAVE_AMX
    BY_BF16X2(flash_amx, avx512bf16, AMX),
    SHARE(flash_f32.kv[AM_INT4], flash_amx.kv[AM_INT4], AMX),
    PART(kv_f8x2, avx512bf16, PLACES(flash_bf16x2.kv[AM_INT4], flash_amx.kv[AM_INT4]), AMX),
    PART(kv_f8x2, avx512bf16, PLACES(flash_bf16x2.widen, flash_amx.widen), AMX),
    SHARE(flash_f32.linear_forward, flash_amx.linear_forward, AMX),
    SHARE(flash_f32.linear_backward, flash_amx.linear_backward, AMX),
    WHOLE(flash_amx, amx, AMX, AMX),
#endif
};
/* clang-format on */
enum { ROWS = sizeof rows / sizeof *rows };

static am_kernels ladder[LEVELS], plain;

static bool has_word(const am_kernels *table, size_t at)
{
    uintptr_t word;
    memcpy(&word, (const char *)table + at, sizeof word);
    return word != 0;
}

static void join_level(int level)
{
    am_kernels *to = &ladder[level];
    for (const row *r = rows; r < rows + ROWS; r++) {
        const am_kernels *topic = r->topic ? r->topic : to;
        for (size_t at = 0; at < r->bytes && level >= r->first && level <= r->last; at += sizeof(uintptr_t)) {
            if (has_word(topic, r->from + at))
                memcpy((char *)to + r->to + at, (const char *)topic + r->from + at, sizeof(uintptr_t));
        }
    }
    to->name = levels[level].name;
}

static void join_levels(void)
{
    for (int level = 0; level <= BUILT; level++) join_level(level);
    plain = ladder[BASELINE];
    plain.name = "plain", plain.plain = true;
#ifdef _SC_LEVEL1_DCACHE_SIZE
    am_prefetch_near = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10 && vendor() != AM_INTEL;
#endif
}

/* Once a process, as kernels may run while another interpreter loads the library. */
void am_isa_begin(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, join_levels);
}

const am_kernels *am_isa_built(int level) { return level <= BUILT ? &ladder[level] : NULL; }

const am_kernels *am_isa_level(int level) { return level <= highest_level() ? am_isa_built(level) : NULL; }

int am_isa_best_of(int highest, am_vendor vendor)
{
    return vendor != AM_ANY_VENDOR && levels[highest].unless == vendor ? highest - 1 : highest;
}

const am_kernels *am_isa_best(void)
{
    int level = 0;
    while (am_isa_level(level + 1)) level++;
    return &ladder[am_isa_best_of(level, vendor())];
}

const am_kernels *am_isa_find(const char *name)
{
    const am_kernels *kernels;
    for (int level = 0; (kernels = am_isa_level(level)); level++) {
        if (strcmp(kernels->name, name) == 0) return kernels;
    }
    return strcmp(name, plain.name) == 0 ? &plain : NULL;
}

const char *am_isa_origin(const am_kernels *kernels, const void *word)
{
    const int level = (int)(kernels - ladder);
    size_t at = (size_t)((const char *)word - (const char *)kernels);
    for (const row *r = rows + ROWS; r-- > rows;) {
        if (level < r->first || level > r->last || at < r->to || at >= r->to + r->bytes) continue;
        const size_t from = at - r->to + r->from;
        if (!has_word(r->topic ? r->topic : kernels, from)) continue;
        if (r->topic) return r->name;
        at = from;
    }
    return NULL;
}
