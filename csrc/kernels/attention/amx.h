/* amx.h – attention in bfloat16, forward and backward, by the tile registers of AMX, which the
 * processor multiplies whole. Queries, keys, P and values are bf16x2 as in flash_bf16x2.h, and are laid
 * out alike: rows of a packed panel are rows of tiles. Tiles 0 to 3, two by two, accumulate; 4 and 5 hold
 * a, 6 and 7 hold b.
 *
 * A thread keeps the shapes of tiles from step to step, until am_end_tiles. Products are ordered by the
 * shapes that they need: where head_dim is a multiple of 32 and blocks have 32 or 64 rows, there is one.
 * (What it costs to configure tiles was not measured.)
 */

enum {
    AMX_TILE_ROWS = 16,
    AMX_TILE_LANES = 16,
    AMX_ROWS = 2 * AMX_TILE_ROWS, /* that are multiplied at a time, by as many columns */
};
_Static_assert(PANEL_f32 == 2 * AMX_TILE_LANES && VF_LANES == AMX_TILE_LANES, "a panel is two tiles wide");

/* The shape for which the tile registers of a thread are configured: rows of a, and their lanes; 0: none. */
typedef struct {
    ptrdiff_t rows, lanes;
} amx_shape;
static _Thread_local amx_shape amx_now;

static void amx_set_shape(amx_shape *now, ptrdiff_t rows, ptrdiff_t lanes)
{
    if (now->rows == rows && now->lanes == lanes) return;
    const uint8_t high = (uint8_t)(rows < AMX_TILE_ROWS ? rows : AMX_TILE_ROWS), low = (uint8_t)(rows - high),
                  head_dim = (uint8_t)lanes;
    const uint16_t line = AMX_TILE_LANES * sizeof(float),
                   bytes = (uint16_t)(lanes * (ptrdiff_t)sizeof(float)), low_line = low ? line : 0,
                   low_bytes = low ? bytes : 0;
    const vt_shapes shapes = {
        .palette = 1,
        .rows = {high, high, low, low, high, low, head_dim, head_dim},
        .row_bytes = {line, line, low_line, low_line, bytes, low_bytes, line, line},
    };
    vt_begin(&shapes);
    *now = (amx_shape){rows, lanes};
}

static void end_tiles(void)
{
    if (amx_now.rows) vt_end();
    amx_now.rows = 0;
}

/* c = (add ? c : 0) + a b, where b is a packed panel. */
typedef struct {
    const float *a, *b;
    ptrdiff_t a_step;
    float *c;
    ptrdiff_t c_step;
    bool add;
} amx_product;

/* For tiles as they are configured: two of rows with `low`, two of columns with `right`; `chunks` of lanes.
 */
static inline __attribute__((always_inline)) void amx_multiply_chunks(const bool low, const bool right,
                                                                      ptrdiff_t chunks, const amx_product *p,
                                                                      prefetch_queue *queue)
{
    const ptrdiff_t a_step = p->a_step, c_step = p->c_step;
    const float *a = p->a, *b = p->b;
    float *c = p->c;
    const float *a_low = a + AMX_TILE_ROWS * a_step;
    float *c_low = c + AMX_TILE_ROWS * c_step;
    if (p->add) {
        vt_load(0, c, c_step);
        if (right) vt_load(1, c + AMX_TILE_LANES, c_step);
        if (low) vt_load(2, c_low, c_step);
        if (low && right) vt_load(3, c_low + AMX_TILE_LANES, c_step);
    } else {
        vt_zero(0);
        if (right) vt_zero(1);
        if (low) vt_zero(2);
        if (low && right) vt_zero(3);
    }
    for (; chunks > 0;
         chunks--, a += AMX_TILE_LANES, a_low += AMX_TILE_LANES, b += AMX_TILE_LANES * PANEL_f32) {
        prefetch_rest(queue, NULL, 0);
        vt_load(4, a, a_step);
        vt_load(6, b, PANEL_f32);
        vt_fma_bf16x2(0, 4, 6);
        if (right) {
            vt_load(7, b + AMX_TILE_LANES, PANEL_f32);
            vt_fma_bf16x2(1, 4, 7);
        }
        if (low) {
            vt_load(5, a_low, a_step);
            vt_fma_bf16x2(2, 5, 6);
        }
        if (low && right) vt_fma_bf16x2(3, 5, 7);
    }
    vt_store(0, c, c_step);
    if (right) vt_store(1, c + AMX_TILE_LANES, c_step);
    if (low) vt_store(2, c_low, c_step);
    if (low && right) vt_store(3, c_low + AMX_TILE_LANES, c_step);
}

/* The same of up to two tiles of rows and of columns of the panel; of whole tiles of lanes of a, or of less
 * than one. */
static void amx_multiply(amx_shape *now, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t lanes,
                         const amx_product *p, prefetch_queue *queue)
{
    const bool low = rows > AMX_TILE_ROWS, right = columns > AMX_TILE_LANES;
    const ptrdiff_t chunks = (lanes + AMX_TILE_LANES - 1) / AMX_TILE_LANES;
    if (lanes == 0) return;
    __asm__ volatile("" : : : "memory"); /* compilers do not know what a tile reads */
    amx_set_shape(now, rows, lanes / chunks);
    if (low && right)
        amx_multiply_chunks(true, true, chunks, p, queue);
    else if (low)
        amx_multiply_chunks(true, false, chunks, p, queue);
    else if (right)
        amx_multiply_chunks(false, true, chunks, p, queue);
    else
        amx_multiply_chunks(false, false, chunks, p, queue);
}

/* c = a bᵀ, where b is packed like keys: first of whole tiles of lanes, then of the rest. */
static void find_logits(const strip_f32 *strips, ptrdiff_t count, ptrdiff_t lanes, const amx_product *p,
                        prefetch_queue *queue)
{
    amx_shape *now = &amx_now;
    for (ptrdiff_t first = 0, some; first < lanes; first += some) {
        some = lanes - first < AMX_TILE_LANES ? lanes - first
                                              : (lanes - first) / AMX_TILE_LANES * AMX_TILE_LANES;
        for (const strip_f32 *s = strips; s < strips + count; s++) {
            for (ptrdiff_t i = s->begin / PANEL_f32 * PANEL_f32; i < s->end; i += PANEL_f32) {
                const amx_product one = {p->a + s->row * p->a_step + first,
                                         p->b + i * lanes + first * PANEL_f32,
                                         p->a_step,
                                         p->c + s->row * p->c_step + i,
                                         p->c_step,
                                         first > 0};
                amx_multiply(now, s->rows, PANEL_f32, some, &one, queue);
            }
        }
    }
}

enum { PANEL_LANES = AM_FLASH_TILE / 2 * PANEL_f32 }; /* lanes of a panel that is packed like values */

/* Splits a panel into its finite numbers and the rest, which is NaN or Inf. */
static void split_panel(const float *panel, float *finite, uint16_t *rest)
{
    enum { EXPONENT = 0x7f80 };
    uint16_t numbers[2 * PANEL_LANES];
    memcpy(rest, panel, sizeof numbers);
    for (ptrdiff_t i = 0; i < 2 * PANEL_LANES; i++)
        numbers[i] = (rest[i] & EXPONENT) == EXPONENT ? 0 : rest[i];
    for (ptrdiff_t i = 0; i < 2 * PANEL_LANES; i++) rest[i] ^= numbers[i];
    memcpy(finite, numbers, sizeof numbers);
}

/* c += a b of live pairs of such a rest, which is 0 where numbers are finite. */
static void add_rest(ptrdiff_t rows, const uint64_t *live, const float *a, ptrdiff_t a_step,
                     const uint16_t *rest, float *c, ptrdiff_t c_step)
{
    uint64_t any = 0;
    for (ptrdiff_t r = 0; r < rows; r++) any |= live[r];
    for (ptrdiff_t i = 0; i < 2 * PANEL_LANES; i++) {
        const ptrdiff_t row = i / (2 * PANEL_f32) * 2 + i % 2, column = i / 2 % PANEL_f32;
        if (rest[i] == 0 || !(any >> row & 1)) continue;
        for (ptrdiff_t r = 0; r < rows; r++) {
            if (!(live[r] >> row & 1)) continue;
            uint16_t p;
            memcpy(&p, (const char *)(a + r * a_step) + row * 2, sizeof p);
            c[r * c_step + column] += am_widen_one_bf16(p) * am_widen_one_bf16(rest[i]);
        }
    }
}

/* c += a b, where b is packed like values; of only the live pairs if `live` is not NULL. Finite numbers
 * are multiplied by tiles even then: another order of sums would round otherwise, and dead pairs must not
 * change a bit. */
static void add_products(const strip_f32 *strips, ptrdiff_t count, const uint64_t *live, const amx_product *p,
                         ptrdiff_t head_dim, prefetch_queue *queue)
{
    amx_shape *now = &amx_now;
    for (const strip_f32 *s = strips + count; s-- > strips;) { /* first the shape that logits had last */
        const ptrdiff_t begin = s->begin / PANEL_f32 * AMX_TILE_LANES,
                        end = (s->end + PANEL_f32 - 1) / PANEL_f32 * AMX_TILE_LANES;
        const float *a = p->a + s->row * p->a_step, *b = p->b;
        float *c = p->c + s->row * p->c_step;
        for (ptrdiff_t column = 0; column < head_dim; column += PANEL_f32, b += PANEL_LANES, c += PANEL_f32) {
            const ptrdiff_t columns = head_dim - column < PANEL_f32 ? head_dim - column : PANEL_f32;
            float finite[PANEL_LANES];
            uint16_t rest[2 * PANEL_LANES];
            if (live) split_panel(b, finite, rest);
            const amx_product one = {
                a + begin, (live ? finite : b) + begin * PANEL_f32, p->a_step, c, p->c_step, true};
            amx_multiply(now, s->rows, columns, end - begin, &one, queue);
            if (live) add_rest(s->rows, live + s->row, a, p->a_step, rest, c, p->c_step);
        }
    }
}

static void flash_step_amx(const am_flash_rows *block, const am_flash_tile *tile)
{
    assert(tile->layout == AM_PACKED);
    strip_f32 strips[AM_FLASH_ROWS / AMX_ROWS];
    ptrdiff_t count = cut_strips_f32(strips, block->rows, AMX_ROWS, tile->live, AM_FLASH_TILE);
    const ptrdiff_t chunks = (2 * block->head_dim + block->out_dim) / AMX_TILE_LANES + 1;
    prefetch_queue queue = prefetch_queue_of(tile->prefetch, count * chunks);
    if (block->head_dim == 0) memset(block->logits, 0, (size_t)(block->rows * AM_FLASH_TILE) * sizeof(float));
    const amx_product logits = {block->q, tile->k.data, block->q_step, block->logits, AM_FLASH_TILE, false},
                      out = {block->logits, tile->v.data, AM_FLASH_TILE, block->out, block->out_dim, true};
    find_logits(strips, count, block->head_dim, &logits, &queue);
    SHARED_BF16X2(find_p_bf16x2)(block, tile);
    add_products(strips, count, tile->finite ? NULL : tile->live, &out, block->out_dim, &queue);
}

/* --- Products for backward_step_tpl.h --- */

/* Transposes [rows][AM_FLASH_TILE] to bf16x2 of neighbouring rows: [AM_FLASH_TILE][AM_FLASH_ROWS / 2]. */
static void transpose_rows(float *to, const float *from, ptrdiff_t rows)
{
    enum { STEP = AM_FLASH_ROWS / 2 };
    for (ptrdiff_t lane = 0; lane < STEP; lane += VF_LANES) {
        for (ptrdiff_t column = 0; column < AM_FLASH_TILE; column += VF_LANES) {
            vf bf16x2[VF_LANES];
            UNROLL(16)
            for (ptrdiff_t i = 0; i < VF_LANES; i++) {
                const ptrdiff_t r = 2 * (lane + i);
                const float *row = from + r * AM_FLASH_TILE + column;
                vf even = r < rows ? vf_load(row) : vf_set1(0),
                   odd = r + 1 < rows ? vf_load(row + AM_FLASH_TILE) : vf_set1(0);
                bf16x2[i] = vf_join_bf16x2(even, odd);
            }
            vf_transpose(bf16x2);
            UNROLL(16)
            for (ptrdiff_t i = 0; i < VF_LANES; i++) vf_store(to + (column + i) * STEP + lane, bf16x2[i]);
        }
    }
}

static void add_transposed_bf16x2(const strip_f32 *strips, ptrdiff_t count, const backward_product_f32 *p,
                                  float *scratch, prefetch_queue *queue)
{
    (void)scratch;
    float transposed[AM_FLASH_TILE * AM_FLASH_ROWS / 2];
    transpose_rows(transposed, p->a, p->rows);
    const amx_product product = {transposed, p->b, AM_FLASH_ROWS / 2, p->c, p->step, true};
    add_products(strips, count, p->live, &product, p->columns, queue);
}

static void add_straight_bf16x2(const strip_f32 *strips, ptrdiff_t count, const backward_product_f32 *p,
                                prefetch_queue *queue)
{
    const amx_product product = {p->a, p->b, AM_FLASH_TILE, p->c, p->step, true};
    add_products(strips, count, p->live, &product, p->columns, queue);
}

/* The number of chunks in all its products. */
static ptrdiff_t prefetching_products_bf16x2(const am_backward_rows *block, ptrdiff_t strips)
{
    return strips * ((3 * block->q.dim + 2 * block->d_out.dim) / AMX_TILE_LANES + 1);
}
