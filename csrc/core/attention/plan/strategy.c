/* strategy.c – chooses how a section is computed. tests/attention/test_strategy.py has a line for each
 * decision. */
#include "core/attention/plan/strategy.h"

#include <math.h>

#include "core/runtime/sizes.h"
#include "kernels/table.h"

enum {
    ENOUGH_ITEMS = 64,   /* of a section; with fewer its keys are split */
    MANY_ITEMS = 512,    /* of a section; with as many they may differ in length */
    SPLIT_TILES = 8,     /* the fewest tiles that are worth a split; fewer are if there is much work: */
    MUCH_WORK = 256,     /* tiles of all items of a section that is worth many threads */
    UNPACKED_TILES = 4,  /* of a split of unpacked keys for few rows: many heads read them in lockstep */
    ALONE_TILES = 16,    /* of a split of rows that must not depend on others */
    FEW_SPLIT_ROWS = 12, /* of a block whose unpacked keys are split so: more have more sums to merge */
    /* Bytes of a panel of long vectors, whose products are so fast that packing is a large part of the time.
     * Transposed tiles would be 0.93 to 1.03 times as fast with AVX2. */
    LONG_PANEL = 128,
    FEWEST_TRANSPOSED = 13, /* rows of a block whose tiles are transposed */
    MOST_TRANSPOSED = 56,   /* rows of a block whose only tile is transposed; any where vectors are long */
    MOST_CONVERTED = 32,    /* the most if the keys of this tile are converted */
    MOST_MIXED = 16,        /* the most if its rows see different keys: with more it would take 0.9 to 1.1 */
    FEW_ROWS = 16,          /* of a block that reads keys unpacked */
    MORE_ROWS = 24,         /* of a block that reads keys unpacked, where vectors and keys are long */
    FEW_WIDENED = 12,       /* of a block that reads short keys unpacked, widened for every few rows */
    FEW_ROWS_F8X2 = 8,      /* of a block that reads float8, which takes longer to become bf16x2 */
    FEW_ROWS_I4 = 8,        /* of a block that multiplies int4 as integers: 12 would take 5 % longer */
    /* Of a block of bfloat16 that waits for memory, not for products. On Zen 5, 4 rows take 1.00 to 1.03 of
     * the time in memory, and 8 rows would take 1.19. */
    FLOAT_WEIGHTS = 4,
    LONG_ROW = 64,   /* channels of keys or values */
    WHOLE_PART = 32, /* channels that kernels of any type take at once */
    FEW_TILES = 2,   /* of a block for which copying its queries takes a large part of the time */
};

const char *am_strategy_name(am_strategy strategy)
{
    static const char *const names[AM_STRATEGIES] = {
        [AM_UNPACKED] = "unpacked",           [AM_TRANSPOSED] = "transposed",
        [AM_PRIVATE_PACKING] = "private",     [AM_LOCKSTEP] = "lockstep",
        [AM_LOCAL_PACKING] = "local packing", [AM_SHARED_PACKING] = "shared packing",
    };
    return names[strategy];
}

/* Whether full tiles are transposed: if more than a few rows fill vectors, and logits are products but for a
 * factor. */
static bool can_transpose(const am_work *w, const am_shape *h)
{
    if (h->head_blocks > 1 || w->head_dim == 0 || w->tiles <= FEW_TILES || h->rows < FEWEST_TRANSPOSED)
        return false;
    if (!w->products_alone || !am_is_floating(w->k_type)) return false;
    if (w->packed_alone || (w->width > 1 && w->factor <= 0)) return false;
    const bool one_vector = w->k_type == w->type && h->rows <= w->panel / 2;
    const ptrdiff_t part = one_vector ? w->panel / 2 : w->panel, lanes = am_ceil_div(h->rows, part) * part;
    /* With more lanes empty it is 0.82 to 1.08 times as fast. */
    return w->panel * w->size >= LONG_PANEL && h->rows >= lanes * 7 / 8;
}

/* True if a section of one block and one tile is transposed: its rows fill a quarter of a panel. Near 64 rows
 * that gains nothing, unless vectors are long and logits are mere products. Converting keys costs part of the
 * gain, and would be done again for each block of heads. */
static bool can_transpose_one(const am_work *w, const am_shape *h)
{
    if (w->tiles != 1 || h->q_blocks > 1 || w->head_dim == 0 || w->packed_alone) return false;
    if (!am_is_floating(w->k_type) || w->panel * w->size < LONG_PANEL / 2) return false;
    const bool long_plain = w->products_alone && w->panel * w->size >= LONG_PANEL;
    if (w->k_type != w->type && w->width == 1)
        return 4 * h->rows > w->panel && h->rows <= MOST_CONVERTED && h->head_blocks == 1;
    return 4 * h->rows >= w->panel && (long_plain || h->rows <= MOST_TRANSPOSED);
}

/* The most rows of a block that reads keys unpacked: more where vectors and keys are long. Widened keys that
 * are short, or no whole vectors, are packed for fewer rows, and so are all if vectors have but four lanes or
 * the processor has tiles. */
static ptrdiff_t most_unpacked_rows(const am_work *w)
{
    const ptrdiff_t head_dim = am_min(w->head_dim, w->value_dim), panel_bytes = w->panel * w->size;
    const bool widened = w->k_type != w->type,
               whole = w->head_dim % WHOLE_PART == 0 && w->value_dim % WHOLE_PART == 0;
    if (w->width > 1 && w->k_type == AM_FLOAT8_E4M3) return FEW_ROWS_F8X2;
    if (widened && (!whole || head_dim < LONG_ROW || panel_bytes < LONG_PANEL / 2 || w->packed_alone))
        return FEW_WIDENED;
    /* The kernels multiply integers, but packed keys would be float32. */
    if (w->packs_rounded && w->width == 1) return AM_FLASH_ROWS;
    return whole && head_dim >= 2 * LONG_ROW && panel_bytes >= LONG_PANEL ? MORE_ROWS : FEW_ROWS;
}

static am_strategy choose_strategy(const am_work *w, const am_shape *h)
{
    if (h->q_blocks > 1) return AM_SHARED_PACKING;
    if (w->alone) return h->head_blocks > 1 ? AM_LOCKSTEP : AM_PRIVATE_PACKING;
    if (can_transpose(w, h) || can_transpose_one(w, h)) return AM_TRANSPOSED;
    const bool can_widen = w->k_type != AM_FLOAT8_E4M3 || w->head_dim <= AM_MOST_WIDENED;
    if (can_widen && h->rows <= most_unpacked_rows(w)) return AM_UNPACKED;
    return h->head_blocks > 1 ? AM_LOCKSTEP : AM_PRIVATE_PACKING;
}

/* Values are not worth packing if few strips of one block read them, and with long vectors never, unless they
 * would be interleaved for each strip. */
static bool can_leave_values(const am_work *w, const am_shape *h)
{
    const bool always = h->one_tile || (w->panel * w->size >= LONG_PANEL && w->width == 1);
    return !w->alone && h->head_blocks * h->q_blocks == 1 &&
           h->rows <= (always ? AM_FLASH_ROWS : w->panel * 3 / 2) && w->values_readable && !w->packed_alone;
}

/* Whether weights of a block stay float32 although other blocks round them to bfloat16. A pair of values then
 * takes two multiply-adds of float32 instead of one of bf16x2. Zen 4 and 5 start as many of either kind. So
 * the products of four rows take about 0.1 cycles per byte of keys and values, half of what memory takes to
 * deliver it to a core. Intel's processors start four times as many of float32. */
static bool has_float_weights(const am_work *w, const am_shape *h)
{
    if (w->width == 1 || h->strategy != AM_UNPACKED) return false;
    return (w->packs_rounded && !h->widens_rows) || w->k_type == AM_INT8 ||
           (w->k_type == AM_BFLOAT16 && (h->rows <= FLOAT_WEIGHTS || w->packed_alone));
}

am_shape am_choose_shape(const am_work *w)
{
    am_shape h = {.splits = 1, .split_tiles = w->tiles, .q_blocks = w->q_blocks};
    h.block_heads = am_max(1, am_min(w->heads_per_kv, AM_FLASH_ROWS / w->queries));
    h.head_blocks = am_ceil_div(w->heads_per_kv, h.block_heads);
    h.rows = w->queries * h.block_heads;
    h.strategy = choose_strategy(w, &h);
    h.one_tile = h.strategy == AM_TRANSPOSED && w->tiles == 1;
    h.one_mixed_tile = h.one_tile && h.rows <= MOST_MIXED;
    /* Where few keys are packed for one block, these are scaled instead of queries, unless the factor could
     * make one infinite. */
    const bool few =
        !w->alone && h.strategy != AM_SHARED_PACKING && h.strategy != AM_UNPACKED && w->tiles <= FEW_TILES;
    h.scales_keys = few && w->width == 1 && fabs(w->factor) <= 1;
    h.queries_direct =
        few && h.block_heads == 1 && w->queries_readable && (w->width > 1 || h.scales_keys || w->factor == 1);
    h.values_unpacked = can_leave_values(w, &h);
    h.widens_rows = h.strategy == AM_UNPACKED && w->k_type == AM_INT4 && w->width > 1 && h.rows > FEW_ROWS_I4;
    h.float_weights = has_float_weights(w, &h);
    return h;
}

static ptrdiff_t items_of(const am_work *w, const am_shape *h)
{
    return am_max(1, w->kv_heads * h->head_blocks * h->q_blocks);
}

bool am_counts_tiles(const am_work *w, const am_shape *h)
{
    return h->q_blocks > 1 && items_of(w, h) < MANY_ITEMS;
}

void am_choose_splits(const am_work *w, am_shape *h, ptrdiff_t all, ptrdiff_t most)
{
    const ptrdiff_t items = items_of(w, h), work = all * w->kv_heads * h->head_blocks;
    most = am_max(1, most);
    if (w->alone) {
        h->splits = am_ceil_div(most, ALONE_TILES);
    } else if (h->strategy == AM_UNPACKED) {
        const ptrdiff_t fewest = h->rows <= FEW_SPLIT_ROWS ? UNPACKED_TILES : SPLIT_TILES;
        h->splits = am_min(am_ceil_div(most, fewest), am_max(1, ENOUGH_ITEMS / items));
    } else if (items < MANY_ITEMS)
        h->splits = am_ceil_div(most, work < MUCH_WORK ? SPLIT_TILES : am_ceil_div(work, ENOUGH_ITEMS));
    h->split_tiles = am_ceil_div(most, h->splits);
    h->splits = am_ceil_div(most, h->split_tiles);
}
