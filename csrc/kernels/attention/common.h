/* common.h – what attention's kernels share, whatever is multiplied. */
#ifndef AM_KERNELS_ATTENTION_COMMON_H
#define AM_KERNELS_ATTENTION_COMMON_H

#include <assert.h>
#include <float.h>
#include <math.h>

#include "kernels/arrays/transpose_tiles.h"
#include "kernels/level.h"

/* Hides from the compiler where a pointer came from. */
#define HIDE(pointer) __asm__("" : "+r"(pointer))
#include "kernels/attention/prefetch.h"

enum {
    FLASH_SLACK = 8, /* P stays below 2^8 or e^8, and rows are seldom rescaled */
    /* Unpacked keys and values are prefetched this number of rows early, and a second time in order:
     * prefetching only once would be 0.8 times as fast. */
    EARLY_KEYS = 8,
    /* Rows of a run that instructions of their own read: Zen 4 prefetches by itself where one of them has
     * loaded at equal distances, and so beyond the end of the run. Decoding from pages of 16 takes 0.72 to
     * 0.96 of the time; with AVX2 it gains nothing. 0: none have. */
    RUN_ROWS = VF_LANES >= 16 ? 8 : 0,
    SOME_KEYS = 8,                             /* unpacked keys that are widened at once */
    DOT_SUMS = V_STRIP < 8 ? 2 * V_STRIP : 16, /* sums of products of a row and unpacked keys: as many as fit
                                                  the registers, or fill whole vectors */
};

/* How many of the rows that are left make the next strip, of at most so many. Products of 7, 9, 10 and 11
 * rows are not compiled: two strips take as long. */
static inline ptrdiff_t strip_rows(ptrdiff_t left, ptrdiff_t most)
{
    static const uint8_t of_12[] = {0, 1, 2, 3, 4, 5, 6, 4, 8, 5, 5, 6, 12, 8, 8, 12, 8};
    if (most == 12) return left < (ptrdiff_t)sizeof of_12 ? of_12[left] : most;
    const ptrdiff_t strips = (left + most - 1) / most;
    return (left + strips - 1) / strips;
}

/* Rows that lie in runs of so many, from *next + offset bytes on each after the first. */
typedef struct {
    ptrdiff_t rows;
    const void *const *next;
    ptrdiff_t offset;
} row_runs;

/* The run of row i. */
static inline ptrdiff_t run_of_row(const am_rows *rows, ptrdiff_t i)
{
    return i >> __builtin_ctzll((unsigned long long)rows->run);
}

/* The runs behind that of row i, of which so many rows are joined to one. */
static inline row_runs runs_behind(const am_rows *rows, ptrdiff_t i, ptrdiff_t joined, ptrdiff_t offset)
{
    if (rows->run == 0) return (row_runs){0};
    const uintptr_t head = (uintptr_t)rows->data - (uintptr_t)*rows->runs;
    return (row_runs){.rows = rows->run / joined,
                      .next = rows->runs + run_of_row(rows, i) + 1,
                      .offset = (ptrdiff_t)head + offset};
}

/* Row i. */
static inline const void *row_at(const am_rows *rows, ptrdiff_t i)
{
    if (rows->run == 0) return (const char *)rows->data + i * rows->stride;
    const ptrdiff_t row = (i & (rows->run - 1)) * rows->stride;
    return (const void *)((uintptr_t)rows->data + (uintptr_t)rows->runs[run_of_row(rows, i)] -
                          (uintptr_t)rows->runs[0] + (uintptr_t)row);
}

/* The end of the run of row i, or `end`. */
static inline ptrdiff_t end_of_run(const am_rows *rows, ptrdiff_t i, ptrdiff_t end)
{
    const ptrdiff_t next = rows->run ? (i | (rows->run - 1)) + 1 : end;
    return next < end ? next : end;
}

/* Lines of values of all heads, which lie side by side if there are several. */
static inline prefetch_lines lines_of_values(const am_flash_tile *tiles, ptrdiff_t heads, prefetch_runs *runs)
{
    const am_rows *v = &tiles->v;
    const ptrdiff_t length =
        (const char *)tiles[heads - 1].v.data - (const char *)v->data + tiles->value_bytes;
    if (v->run == 0) return prefetch_lines_of((uintptr_t)v->data, v->stride, length, 0, EARLY_KEYS);
    const ptrdiff_t count = AM_FLASH_TILE / v->run;
    return prefetch_runs_of(runs, v->runs, count + (v->runs[count] != NULL), v->run, v->stride, length,
                            EARLY_KEYS);
}

static inline prefetch_lines lines_of_next_keys(const am_flash_tile *tile, prefetch_runs *runs)
{
    const am_prefetch_plan *plan = tile->prefetch;
    if (!plan || plan->count == 0 || plan->rows[0].rows <= 0) return prefetch_nothing(tile->k.data);
    const am_prefetch_rows *next = &plan->rows[0];
    if (!plan->runs) return prefetch_lines_of((uintptr_t)next->at, next->stride, next->length, 0, EARLY_KEYS);
    return prefetch_runs_of(runs, plan->runs, plan->run_count, next->rows, next->stride, next->length,
                            EARLY_KEYS);
}

/* Whether some heads have values. Without them, P is left in the logits of each. */
static inline bool has_values(const am_flash_rows *const *blocks) { return blocks[0]->out_dim > 0; }

/* What is prefetched while keys are multiplied: what is read next. */
static inline prefetch_lines lines_behind_keys(const am_flash_rows *const *blocks, const am_flash_tile *tiles,
                                               ptrdiff_t heads, prefetch_runs *runs)
{
    return has_values(blocks) ? lines_of_values(tiles, heads, runs) : lines_of_next_keys(tiles, runs);
}

/* The number of columns of the panel of results that begins at `column`: a whole panel, or half of one. */
static inline ptrdiff_t columns_at(const am_flash_rows *block, ptrdiff_t column, ptrdiff_t panel)
{
    return block->out_dim - column < panel ? block->out_dim - column : panel;
}

/* The columns of that panel that values have. */
static inline ptrdiff_t value_columns_at(const am_flash_rows *block, ptrdiff_t column, ptrdiff_t panel)
{
    const ptrdiff_t left = block->out_dim - block->out_padding - column;
    return left < panel ? left : panel;
}

/* Bits begin … end - 1 of a word as its lowest, which are at least one. */
static inline uint64_t live_between(uint64_t live, ptrdiff_t begin, ptrdiff_t end)
{
    return live >> begin & UINT64_MAX >> (64 - (end - begin));
}

/* Finds the columns of a tile from the first that is live in any row to the last: *begin … *end - 1. */
static void find_live(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t *begin, ptrdiff_t *end)
{
    uint64_t any = tile->terms.live ? 0 : UINT64_MAX;
    for (ptrdiff_t r = 0; tile->terms.live && r < block->rows; r++) any |= tile->terms.live[r];
    *begin = __builtin_ctzll(any);
    *end = AM_FLASH_TILE - __builtin_clzll(any);
}

/* Makes a word for each key of a word for each row; NULL stays NULL. */
static inline const uint64_t *words_of_keys(uint64_t keys[64], const uint64_t *rows, ptrdiff_t count)
{
    if (!rows) return NULL;
    memset(keys, 0, 64 * sizeof *keys);
    memcpy(keys, rows, (size_t)count * sizeof *keys);
    transpose_tiles(keys, 1);
    return keys;
}

/* Coefficients of 2^x on [-1/2, 1/2], with relative errors of 2e-9 in float32 and 2e-17 in float64; 4e-7
 * where results are rounded to bfloat16. With VD_EIGHTHS x is in [-1/16, 1/16], and the error is 6e-18. */
#ifdef V_POWERS
#    define TERMS_FACTOR 1
#else
#    define TERMS_FACTOR 2 /* as take_whole and times_power halve */
#endif
static const float exp2_terms_f32[] = {
    1.0f, 0.6931472029f, 0.2402264791f, 0.05550332471f, 0.009618437358f, 0.001339887441f, 0.0001535336191f};
static const float exp2_terms_bf16x2[] = {1.0f,           0.6931428306f,   0.2402235065f,
                                          0.05557400469f, 0.009666282547f, 0.001112550926f};
#ifdef VD_EIGHTHS
static const double exp2_terms_f64[] = {
    1.0,
    0.6931471805599453,
    0.2402265069591204,
    0.055504108664823096,
    0.00961812908242099,
    0.0013333558127014689,
    0.00015404562882891175,
    1.5253528985683798e-5,
};
#else
static const double exp2_terms_f64[] = {
    1.0,
    0.69314718055994569675,
    0.24022650695910098007,
    0.055504108664790394552,
    0.0096181291076070023796,
    0.0013333558153439964747,
    0.0001540353044157213033,
    1.5252727385193868197e-5,
    1.3215442675329822143e-6,
    1.0180647659234138888e-7,
    7.0725704128144235096e-9,
    4.078071929588336665e-10,
};
#endif
#define COUNT_OF(array) ((int)(sizeof(array) / sizeof *(array)))

/* tanh(x) / x - 1 for |x| < 0.625, from x². Coefficients are those of Moshier's Cephes. */
static inline vf tanh_tail_f32(vf z)
{
    vf p = vf_set1(-5.70498872745e-3f);
    p = vf_fma(p, z, vf_set1(2.06390887954e-2f));
    p = vf_fma(p, z, vf_set1(-5.37397155531e-2f));
    p = vf_fma(p, z, vf_set1(1.33314422036e-1f));
    p = vf_fma(p, z, vf_set1(-3.33332819422e-1f));
    return vf_mul(p, z);
}
static inline vd tanh_tail_f64(vd z)
{
    vd p = vd_set1(-9.64399179425052238628e-1);
    p = vd_fma(p, z, vd_set1(-9.92877231001918586564e1));
    p = vd_fma(p, z, vd_set1(-1.61468768441708447952e3));
    vd q = vd_add(z, vd_set1(1.12811678491632931402e2));
    q = vd_fma(q, z, vd_set1(2.23548839060100448583e3));
    q = vd_fma(q, z, vd_set1(4.84406305325125486048e3));
    return vd_div(vd_mul(p, z), q);
}

/* The kernels of a format of keys and values, and members that not all formats have. */
#define KV_KERNELS(type, ...)                                                                                \
    {.reading = AM_KV_READ,                                                                                  \
     .pack_keys = pack_keys_##type,                                                                          \
     .pack_values = pack_values_##type,                                                                      \
     .step_unpacked = step_unpacked_##type,                                                                  \
     __VA_ARGS__}

#endif
