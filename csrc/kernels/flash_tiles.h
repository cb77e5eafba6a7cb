/* flash_tiles.h – attention of bfloat16 numbers where the processor multiplies whole tiles of them. Queries,
 * keys, weights and values are pairs as in flash_pairs_tpl.h, and lie where they lie there: rows of a packed
 * panel are rows of tiles. Tiles 0 to 3 gather two by two, 4 and 5 are of a, 6 and 7 of b. */

enum {
    TILE_ROWS = 16,
    TILE_LANES = 16,
    TILES_ROWS = 2 * TILE_ROWS, /* that are multiplied at once, by as many columns */
};
_Static_assert(PANEL_f32 == 2 * TILE_LANES && VF_LANES == TILE_LANES, "a panel is two tiles wide");

/* What the tiles of a thread are made for: rows of a, and how many of their lanes. */
typedef struct {
    ptrdiff_t rows, lanes;
} tile_shape;

static void shape_tiles(tile_shape *now, ptrdiff_t rows, ptrdiff_t lanes)
{
    if (now->rows == rows && now->lanes == lanes) return;
    const uint8_t high = (uint8_t)(rows < TILE_ROWS ? rows : TILE_ROWS), low = (uint8_t)(rows - high),
                  depth = (uint8_t)lanes;
    const uint16_t line = TILE_LANES * sizeof(float), bytes = (uint16_t)(lanes * (ptrdiff_t)sizeof(float)),
                   low_line = low ? line : 0, low_bytes = low ? bytes : 0;
    const vt_shapes shapes = {
        .palette = 1,
        .rows = {high, high, low, low, high, low, depth, depth},
        .row_bytes = {line, line, low_line, low_line, bytes, low_bytes, line, line},
    };
    vt_begin(&shapes);
    *now = (tile_shape){rows, lanes};
}

/* c = (add ? c : 0) + a b, for tiles as they are made: two of rows with `low`, two of columns with `right`.
 * `chunks` of lanes. */
static inline __attribute__((always_inline)) void
multiply_chunks(const bool low, const bool right, ptrdiff_t chunks, const float *a, ptrdiff_t a_step,
                const float *b, float *c, ptrdiff_t c_step, bool add, flash_next *next)
{
    const float *a_low = a + TILE_ROWS * a_step;
    float *c_low = c + TILE_ROWS * c_step;
    if (add) {
        vt_load(0, c, c_step);
        if (right) vt_load(1, c + TILE_LANES, c_step);
        if (low) vt_load(2, c_low, c_step);
        if (low && right) vt_load(3, c_low + TILE_LANES, c_step);
    } else {
        vt_zero(0);
        if (right) vt_zero(1);
        if (low) vt_zero(2);
        if (low && right) vt_zero(3);
    }
    for (; chunks > 0; chunks--, a += TILE_LANES, a_low += TILE_LANES, b += TILE_LANES * PANEL_f32) {
        flash_ask_rest(next, NULL, 0);
        vt_load(4, a, a_step);
        vt_load(6, b, PANEL_f32);
        vt_fma_pairs(0, 4, 6);
        if (right) {
            vt_load(7, b + TILE_LANES, PANEL_f32);
            vt_fma_pairs(1, 4, 7);
        }
        if (low) {
            vt_load(5, a_low, a_step);
            vt_fma_pairs(2, 5, 6);
        }
        if (low && right) vt_fma_pairs(3, 5, 7);
    }
    vt_store(0, c, c_step);
    if (right) vt_store(1, c + TILE_LANES, c_step);
    if (low) vt_store(2, c_low, c_step);
    if (low && right) vt_store(3, c_low + TILE_LANES, c_step);
}

/* c = (add ? c : 0) + a b, of up to two tiles of rows, and of columns of a panel of b. */
static void multiply_tiles(tile_shape *now, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t lanes,
                           const float *a, ptrdiff_t a_step, const float *b, float *c, ptrdiff_t c_step,
                           bool add, flash_next *next)
{
    const bool low = rows > TILE_ROWS, right = columns > TILE_LANES;
    __asm__ volatile("" : : : "memory"); /* compilers do not know what a tile reads */
    for (ptrdiff_t some; lanes > 0; lanes -= some, a += some, b += some * PANEL_f32, add = true) {
        some = lanes < TILE_LANES ? lanes : lanes / TILE_LANES * TILE_LANES;
        const ptrdiff_t chunks = (some + TILE_LANES - 1) / TILE_LANES;
        shape_tiles(now, rows, some / chunks);
        if (low && right)
            multiply_chunks(true, true, chunks, a, a_step, b, c, c_step, add, next);
        else if (low)
            multiply_chunks(true, false, chunks, a, a_step, b, c, c_step, add, next);
        else if (right)
            multiply_chunks(false, true, chunks, a, a_step, b, c, c_step, add, next);
        else
            multiply_chunks(false, false, chunks, a, a_step, b, c, c_step, add, next);
    }
}

/* O + P V of a tile of which values that are dead for some rows are not finite. Everything goes the way of
 * values that are: sums are added up in another order elsewhere, and what is dead must leave no trace. The
 * rest weighs on the rows for which it lives. */
static void split_values(const float *panel, float *finite, float *rest)
{
    enum { COUNT = AM_FLASH_TILE * PANEL_f32, EXPONENT = 0x7f80 };
    uint16_t all[COUNT], numbers[COUNT];
    memcpy(all, panel, sizeof all);
    for (ptrdiff_t i = 0; i < COUNT; i++) numbers[i] = (all[i] & EXPONENT) == EXPONENT ? 0 : all[i];
    for (ptrdiff_t i = 0; i < COUNT; i++) all[i] ^= numbers[i];
    memcpy(finite, numbers, sizeof numbers);
    memcpy(rest, all, sizeof all);
}

static void flash_step_tiles(const am_flash_rows *block, const am_flash_tile *tile)
{
    strip_f32 strips[AM_FLASH_ROWS / TILES_ROWS];
    ptrdiff_t count = cut_strips_f32(strips, block->rows, TILES_ROWS, tile->live, AM_FLASH_TILE);
    const ptrdiff_t key_chunks = AM_FLASH_TILE / 2 / TILE_LANES,
                    chunks = (block->depth + block->out_depth) / TILE_LANES * key_chunks + 1;
    flash_next next = flash_next_of(tile->next, count * chunks);
    tile_shape now = {0};
    float *logits = block->logits, *out = block->out;
    const float *q = block->q, *k = tile->k, *v = tile->v;
    if (block->depth == 0) memset(logits, 0, (size_t)(block->rows * AM_FLASH_TILE) * sizeof *logits);
    for (const strip_f32 *s = strips; s < strips + count; s++) {
        for (ptrdiff_t i = s->begin / PANEL_f32 * PANEL_f32; i < s->end; i += PANEL_f32)
            multiply_tiles(&now, s->rows, PANEL_f32, block->depth, q + s->row * block->q_step, block->q_step,
                           k + i * block->depth, logits + s->row * AM_FLASH_TILE + i, AM_FLASH_TILE, false,
                           &next);
    }
    weigh_strips_pairs(block, tile, strips, count);
    for (ptrdiff_t column = 0; column < block->out_depth; column += PANEL_f32) {
        enum { PANEL_LANES = AM_FLASH_TILE / 2 * PANEL_f32 };
        float finite[PANEL_LANES], rest[PANEL_LANES];
        const bool split = tile->live && !tile->finite;
        const float *panel = v + column * (AM_FLASH_TILE / 2);
        if (split) split_values(panel, finite, rest), panel = finite;
        for (const strip_f32 *s = strips; s < strips + count; s++) {
            const ptrdiff_t begin = s->begin / PANEL_f32 * TILE_LANES,
                            end = (s->end + PANEL_f32 - 1) / PANEL_f32 * TILE_LANES;
            multiply_tiles(&now, s->rows, columns_at(block, column, PANEL_f32), end - begin,
                           logits + s->row * AM_FLASH_TILE + begin, AM_FLASH_TILE, panel + begin * PANEL_f32,
                           out + s->row * block->out_depth + column, block->out_depth, true, &next);
        }
        if (split) add_live_pairs(block, tile, column, rest);
    }
    vt_end();
}
