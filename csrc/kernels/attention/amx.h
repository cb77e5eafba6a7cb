/* amx.h – attention in bfloat16, forward and backward, by the tile registers of AMX, which the
 * processor multiplies whole. Queries, keys, P and values are bf16x2 as in flash_bf16x2.h, and are laid
 * out alike: rows of a packed panel are rows of tiles. Tiles 0 to 3, two by two, accumulate; 4 and 5 hold
 * a, 6 and 7 hold b.
 *
 * A thread keeps the shapes of tiles from step to step, until am_end_tiles. Products are ordered by the
 * shapes that they need: where head_dim is a multiple of 32 and blocks have 32 or 64 rows, there is one.
 * (What it costs to configure tiles was not measured.)
 *
 * Forward, a strip of 32 rows takes several tiles of keys at once: its logits stay in the first-level cache,
 * softmax goes over all of them, and accumulators of P V are loaded and stored once. For 64 rows and 64 keys
 * that makes 68 loads and 20 stores of tile registers instead of 80 and 32 (head_dim 64), or 136 and 24
 * instead of 160 and 48 (128), for 64 or 128 products.
 *
 * Backward computes dVᵀ = dOᵀ P and dKᵀ = Qᵀ dS, so P and dS are right-hand factors and are not transposed.
 * Q and dO are, once per block. By count, a step of 64 rows and 64 keys takes 6,700 vector instructions in
 * place of 8,600, and a block takes 1,600 more (head_dim 64) or 3,200 more (128). If a task has four tiles,
 * that is 18 or 13 % less in all; if it has one, 4 % less or 15 % more.
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
    /* If all rows are in the first tiles, the second ones may have any shape. */
    const bool has_rows = now->rows == rows || (rows == AMX_TILE_ROWS && now->rows > rows);
    if (has_rows && now->lanes == lanes) return;
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

/* c = (add ? c : 0) + a b, where b is packed. */
typedef struct {
    const float *a, *b;
    ptrdiff_t a_stride, b_stride; /* of b: of lanes */
    float *c;
    ptrdiff_t c_stride;
    bool add;
} amx_product;

/* Lanes of rows of a, and of a panel of b, whose products are added up. */
typedef struct {
    const float *a, *b;
    ptrdiff_t lanes;
} amx_span;

/* c = (add ? c : 0) + Σ a b of some spans, for tiles as they are configured: two of rows with `low`, two of
 * columns with `right`. */
INLINE void amx_multiply_spans(const bool low, const bool right, const amx_product *p, const amx_span *spans,
                               ptrdiff_t count, prefetch_queue *queue)
{
    const ptrdiff_t a_stride = p->a_stride, b_stride = p->b_stride, c_stride = p->c_stride;
    float *c = p->c, *c_low = c + AMX_TILE_ROWS * c_stride;
    if (p->add) {
        vt_load(0, c, c_stride);
        if (right) vt_load(1, c + AMX_TILE_LANES, c_stride);
        if (low) vt_load(2, c_low, c_stride);
        if (low && right) vt_load(3, c_low + AMX_TILE_LANES, c_stride);
    } else {
        vt_zero(0);
        if (right) vt_zero(1);
        if (low) vt_zero(2);
        if (low && right) vt_zero(3);
    }
    for (const amx_span *span = spans; span < spans + count; span++) {
        const float *a = span->a, *a_low = a + AMX_TILE_ROWS * a_stride, *b = span->b;
        for (ptrdiff_t left = span->lanes; left > 0; left -= AMX_TILE_LANES) {
            prefetch_rest(queue, NULL, 0);
            vt_load(4, a, a_stride);
            vt_load(6, b, b_stride);
            vt_fma_bf16x2(0, 4, 6);
            if (right) {
                vt_load(7, b + AMX_TILE_LANES, b_stride);
                vt_fma_bf16x2(1, 4, 7);
            }
            if (low) {
                vt_load(5, a_low, a_stride);
                vt_fma_bf16x2(2, 5, 6);
            }
            if (low && right) vt_fma_bf16x2(3, 5, 7);
            a += AMX_TILE_LANES, a_low += AMX_TILE_LANES, b += AMX_TILE_LANES * b_stride;
        }
    }
    vt_store(0, c, c_stride);
    if (right) vt_store(1, c + AMX_TILE_LANES, c_stride);
    if (low) vt_store(2, c_low, c_stride);
    if (low && right) vt_store(3, c_low + AMX_TILE_LANES, c_stride);
}

/* c = (add ? c : 0) + a b of up to two tiles of rows and of columns of the panel; spans have whole tiles of
 * lanes, or one has less than a tile. */
static void amx_multiply(amx_shape *now, ptrdiff_t rows, ptrdiff_t columns, const amx_product *p,
                         const amx_span *spans, ptrdiff_t count, prefetch_queue *queue)
{
    const bool low = rows > AMX_TILE_ROWS, right = columns > AMX_TILE_LANES;
    if (count == 0 || spans->lanes == 0) return;
    __asm__ volatile("" : : : "memory"); /* compilers do not know what a tile reads */
    amx_set_shape(now, rows, spans->lanes < AMX_TILE_LANES ? spans->lanes : AMX_TILE_LANES);
    if (low && right)
        amx_multiply_spans(true, true, p, spans, count, queue);
    else if (low)
        amx_multiply_spans(true, false, p, spans, count, queue);
    else if (right)
        amx_multiply_spans(false, true, p, spans, count, queue);
    else
        amx_multiply_spans(false, false, p, spans, count, queue);
}

/* How many of the lanes from `first` on are multiplied at once: whole tiles of them, or the rest. */
static ptrdiff_t lanes_at(ptrdiff_t first, ptrdiff_t lanes)
{
    return lanes - first < AMX_TILE_LANES ? lanes - first : (lanes - first) / AMX_TILE_LANES * AMX_TILE_LANES;
}

/* c = a bᵀ of a strip, or where `first` > 0 c + a bᵀ, of lanes from there on, where b is packed like keys. */
static void add_logits(amx_shape *now, const strip_f32 *s, ptrdiff_t first, ptrdiff_t lanes,
                       const amx_product *p, prefetch_queue *queue)
{
    for (ptrdiff_t i = s->begin / PANEL_f32 * PANEL_f32; i < s->end; i += PANEL_f32) {
        const amx_product one = {.a_stride = p->a_stride,
                                 .b_stride = PANEL_f32,
                                 .c = p->c + s->row * p->c_stride + i,
                                 .c_stride = p->c_stride,
                                 .add = first > 0};
        const amx_span span = {.a = p->a + s->row * p->a_stride + first,
                               .b = p->b + i * lanes + first * PANEL_f32,
                               .lanes = lanes_at(first, lanes)};
        amx_multiply(now, s->rows, PANEL_f32, &one, &span, 1, queue);
    }
}

/* c = a bᵀ of whole tiles of lanes, or where `rest`, with the lanes behind them. */
static void find_logits(const strip_f32 *strips, ptrdiff_t count, ptrdiff_t lanes, bool rest,
                        const amx_product *p, prefetch_queue *queue)
{
    const ptrdiff_t whole = lanes / AMX_TILE_LANES * AMX_TILE_LANES;
    if (rest ? whole == lanes : whole == 0) return;
    for (const strip_f32 *s = strips; s < strips + count; s++)
        add_logits(&amx_now, s, rest ? whole : 0, lanes, p, queue);
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

/* P or dS: the weights of pairs of a row and a token. A lane has those of two tokens; strides are in lanes.
 */
typedef struct {
    const float *data;
    ptrdiff_t row, two_tokens;
} amx_weights;

/* c[row, channel] += weight[row, token] rest[token, channel] of live pairs, which is 0 where numbers are
 * finite: a panel that is packed like values, or `by_channel`. */
static void add_rest(ptrdiff_t rows, const uint64_t *live, const amx_weights *weights, const uint16_t *rest,
                     bool by_channel, float *c, ptrdiff_t c_stride)
{
    const ptrdiff_t c_row = by_channel ? 1 : c_stride, c_channel = by_channel ? c_stride : 1;
    uint64_t any = 0;
    for (ptrdiff_t r = 0; r < rows; r++) any |= live[r];
    for (ptrdiff_t i = 0; i < 2 * PANEL_LANES; i++) {
        const ptrdiff_t token = by_channel ? i % AM_FLASH_TILE : i / (2 * PANEL_f32) * 2 + i % 2,
                        channel = by_channel ? i / AM_FLASH_TILE : i / 2 % PANEL_f32;
        if (rest[i] == 0 || !(any >> token & 1)) continue;
        for (ptrdiff_t r = 0; r < rows; r++) {
            if (!(live[r] >> token & 1)) continue;
            const float *two = weights->data + r * weights->row + token / 2 * weights->two_tokens;
            uint16_t weight;
            memcpy(&weight, (const char *)two + token % 2 * 2, sizeof weight);
            c[r * c_row + channel * c_channel] += am_widen_one_bf16(weight) * am_widen_one_bf16(rest[i]);
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
        const float *a = p->a + s->row * p->a_stride, *b = p->b;
        float *c = p->c + s->row * p->c_stride;
        for (ptrdiff_t column = 0; column < head_dim; column += PANEL_f32, b += PANEL_LANES, c += PANEL_f32) {
            const ptrdiff_t columns = head_dim - column < PANEL_f32 ? head_dim - column : PANEL_f32;
            float finite[PANEL_LANES];
            uint16_t rest[2 * PANEL_LANES];
            if (live) split_panel(b, finite, rest);
            const amx_product one = {
                .a_stride = p->a_stride, .b_stride = PANEL_f32, .c = c, .c_stride = p->c_stride, .add = true};
            const amx_span span = {
                .a = a + begin, .b = (live ? finite : b) + begin * PANEL_f32, .lanes = end - begin};
            amx_multiply(now, s->rows, columns, &one, &span, 1, queue);
            const amx_weights weights = {.data = a, .row = p->a_stride, .two_tokens = 1};
            if (live) add_rest(s->rows, live + s->row, &weights, rest, false, c, p->c_stride);
        }
    }
}

static void flash_step_amx(const am_flash_rows *block, const am_flash_tile *tile)
{
    assert(tile->layout == AM_PACKED);
    strip_f32 strips[AM_FLASH_ROWS / AMX_ROWS];
    ptrdiff_t count = cut_strips_f32(strips, block->rows, AMX_ROWS, tile->terms.live, AM_FLASH_TILE);
    const ptrdiff_t chunks = (2 * block->head_dim + block->out_dim) / AMX_TILE_LANES + 1;
    prefetch_queue queue;
    prefetch_begin(&queue, tile->prefetch, count * chunks);
    if (block->head_dim == 0) memset(block->logits, 0, (size_t)(block->rows * AM_FLASH_TILE) * sizeof(float));
    const amx_product logits = {.a = block->q,
                                .b = tile->k.data,
                                .a_stride = block->q_stride,
                                .b_stride = PANEL_f32,
                                .c = block->logits,
                                .c_stride = AM_FLASH_TILE},
                      out = {.a = block->logits,
                             .b = tile->v.data,
                             .a_stride = AM_FLASH_TILE,
                             .b_stride = PANEL_f32,
                             .c = block->out,
                             .c_stride = block->out_dim,
                             .add = true};
    for (int rest = 0; rest < 2; rest++) find_logits(strips, count, block->head_dim, rest, &logits, &queue);
    SHARED_BF16X2(find_p_bf16x2)(block, tile);
    add_products(strips, count, tile->finite ? NULL : tile->terms.live, &out, block->out_dim, &queue);
}

/* --- Steps over several tiles --- */

enum { STEP_COLUMNS = AM_STEP_TILES * AM_FLASH_TILE }; /* of logits, in rows of all tiles */
_Static_assert((int)AM_STEP_ROWS == (int)AMX_ROWS, "a step takes a strip at a time");

/* One of the tiles that a strip sees: which of its columns; the live pairs of the strip's rows, or NULL; and
 * its columns of the logits. P takes the first half of them. */
typedef struct {
    const am_flash_tile *tile;
    strip_f32 strip;
    const uint64_t *live;
    float *logits;
    prefetch_queue queue;
} strip_tile;

/* Turns products of a row into P, and returns the sum of that lane by lane. */
INLINE vf softmax_row(const am_flash_rows *block, ptrdiff_t row, const strip_tile *tiles, ptrdiff_t count,
                      vf *exact_total)
{
    enum { VECTORS = AM_FLASH_TILE / VF_LANES };
    const vf factor = vf_set1((float)block->factor), zero = vf_set1(0), none = vf_set1(-INFINITY);
    vf most = none, total = zero;
    for (const strip_tile *t = tiles; t < tiles + count; t++) {
        const float *logits = t->logits + row * STEP_COLUMNS;
        const uint64_t live = t->live ? t->live[row] : UINT64_MAX;
        UNROLL(16)
        for (int j = 0; j < VECTORS; j++)
            most = vf_max(vf_select(live >> j * VF_LANES, vf_load(logits + j * VF_LANES), none), most);
    }
    most = vf_mul(factor, most);
    if (exceeds_running_max_bf16x2(most, (const float *)block->running_max + row))
        rescale_bf16x2(block, row, vf_highest(most));
    const vf minus_base = vf_sub(zero, base_of_bf16x2(block, row));
    for (const strip_tile *t = tiles; t < tiles + count; t++) {
        float *logits = t->logits + row * STEP_COLUMNS;
        const uint64_t live = t->live ? t->live[row] : UINT64_MAX;
        vf p[VECTORS];
        UNROLL(16)
        for (int j = 0; j < VECTORS; j++) p[j] = vf_fma(factor, vf_load(logits + j * VF_LANES), minus_base);
        exp2_each_f32(p, VECTORS, exp2_terms_bf16x2, COUNT_OF(exp2_terms_bf16x2));
        UNROLL(16)
        for (int j = 0; j < VECTORS; j++) p[j] = vf_select(live >> j * VF_LANES, p[j], zero);
        total = add_weights_bf16x2(total, p, VECTORS);
        if (block->exact_sum) *exact_total = add_weights_f32(*exact_total, p, VECTORS);
        store_p_bf16x2(logits, p, VECTORS);
    }
    return total;
}

/* P of a strip, whose sums are added to those of its rows. */
static void softmax_strip(const am_flash_rows *block, const strip_tile *tiles, ptrdiff_t count)
{
    for (ptrdiff_t first = 0; first < block->rows; first += VF_LANES) {
        const ptrdiff_t rows = block->rows - first < VF_LANES ? block->rows - first : VF_LANES;
        vf lanes[VF_LANES], exact_lanes[VF_LANES];
        for (ptrdiff_t r = 0; r < rows; r++) {
            exact_lanes[r] = vf_set1(0);
            lanes[r] = softmax_row(block, first + r, tiles, count, &exact_lanes[r]);
        }
        add_lanes_bf16x2((float *)block->sum + first, lanes, rows);
        if (block->exact_sum) add_lanes_bf16x2((float *)block->exact_sum + first, exact_lanes, rows);
    }
}

/* O + P V of a strip: its accumulators stay in tile registers from the first tile of keys to the last. */
static void add_values(const am_flash_rows *block, strip_tile *tiles, ptrdiff_t count)
{
    float *c = block->out;
    for (ptrdiff_t column = 0; column < block->out_dim; column += PANEL_f32, c += PANEL_f32) {
        float finite[AM_STEP_TILES][PANEL_LANES];
        uint16_t rest[AM_STEP_TILES][2 * PANEL_LANES];
        amx_span spans[AM_STEP_TILES];
        for (ptrdiff_t i = 0; i < count; i++) {
            const strip_tile *t = &tiles[i];
            const float *b = (const float *)t->tile->v.data + column * (AM_FLASH_TILE / 2);
            const ptrdiff_t begin = t->strip.begin / PANEL_f32 * AMX_TILE_LANES,
                            end = (t->strip.end + PANEL_f32 - 1) / PANEL_f32 * AMX_TILE_LANES;
            if (t->live && !t->tile->finite) {
                split_panel(b, finite[i], rest[i]);
                b = finite[i];
            }
            spans[i] = (amx_span){.a = t->logits + begin, .b = b + begin * PANEL_f32, .lanes = end - begin};
        }
        const amx_product one = {
            .a_stride = STEP_COLUMNS, .b_stride = PANEL_f32, .c = c, .c_stride = block->out_dim, .add = true};
        amx_multiply(&amx_now, block->rows, columns_at(block, column, PANEL_f32), &one, spans, count,
                     &tiles[0].queue);
        for (ptrdiff_t i = 0; i < count; i++) {
            const strip_tile *t = &tiles[i];
            const amx_weights weights = {.data = t->logits, .row = STEP_COLUMNS, .two_tokens = 1};
            if (t->live && !t->tile->finite)
                add_rest(block->rows, t->live, &weights, rest[i], false, c, block->out_dim);
        }
    }
}

/* Takes a strip over some tiles. */
static void take_strip(const am_flash_rows *block, ptrdiff_t row, const am_flash_tile *tiles, ptrdiff_t all)
{
    strip_tile seen[AM_STEP_TILES];
    ptrdiff_t count = 0;
    const ptrdiff_t lanes = block->head_dim, products = (2 * lanes + block->out_dim) / AMX_TILE_LANES + 1;
    for (const am_flash_tile *tile = tiles; tile < tiles + all; tile++) {
        strip_tile *t = &seen[count];
        t->tile = tile;
        t->live = tile->terms.live ? tile->terms.live + row : NULL;
        t->logits = (float *)block->logits + count * AM_FLASH_TILE;
        prefetch_begin(&t->queue, tile->prefetch, products);
        cut_strips_f32(&t->strip, block->rows, AMX_ROWS, t->live, AM_FLASH_TILE);
        count += t->strip.begin < t->strip.end;
    }
    if (lanes == 0) memset(block->logits, 0, (size_t)(block->rows * STEP_COLUMNS) * sizeof(float));
    for (ptrdiff_t first = 0; first < lanes; first += lanes_at(first, lanes)) {
        for (strip_tile *t = seen; t < seen + count; t++) {
            const amx_product one = {.a = block->q,
                                     .b = t->tile->k.data,
                                     .a_stride = block->q_stride,
                                     .b_stride = PANEL_f32,
                                     .c = t->logits,
                                     .c_stride = STEP_COLUMNS};
            add_logits(&amx_now, &t->strip, first, lanes, &one, &t->queue);
        }
    }
    if (count == 0) return;
    softmax_strip(block, seen, count);
    add_values(block, seen, count);
}

static void flash_steps_amx(const am_flash_rows *block, const am_flash_tile *tiles, ptrdiff_t count)
{
    for (ptrdiff_t row = 0; row < block->rows; row += AMX_ROWS) {
        am_flash_rows strip = *block;
        strip.rows = block->rows - row < AMX_ROWS ? block->rows - row : AMX_ROWS;
        strip.q = (const float *)block->q + row * block->q_stride;
        strip.out = (float *)block->out + row * block->out_dim;
        strip.running_max = (float *)block->running_max + row, strip.sum = (float *)block->sum + row;
        if (block->exact_sum) strip.exact_sum = (float *)block->exact_sum + row;
        take_strip(&strip, row, tiles, count);
    }
}

/* --- Products for backward_step_tpl.h --- */

/* First of whole tiles, then of the rest of them all: that needs other shapes of tiles. */
static void logits_of_bf16x2(const strip_f32 *strips, ptrdiff_t count, const backward_product_f32 *products,
                             int how_many, prefetch_queue *queue)
{
    for (int i = 0; i < 2 * how_many; i++) {
        const backward_product_f32 *p = &products[i % how_many];
        const ptrdiff_t lanes = (p->columns + 1) / 2;
        const amx_product product = {.a = p->a,
                                     .b = p->b,
                                     .a_stride = lanes,
                                     .b_stride = PANEL_f32,
                                     .c = p->c,
                                     .c_stride = AM_FLASH_TILE};
        if (lanes == 0) memset(p->c, 0, (size_t)(p->rows * AM_FLASH_TILE) * sizeof *p->c);
        find_logits(strips, count, lanes, i >= how_many, &product, queue);
    }
}

/* sumᵀ += bᵀ a for panels of columns of a: of P or dS as p_and_ds makes it, and Q or d_out by channel. Rows
 * of a are whole tiles: missing ones become 0. */
static void add_transposed_bf16x2(const strip_f32 *strips, ptrdiff_t count, const backward_product_f32 *p,
                                  prefetch_queue *queue)
{
    enum { LANES_OF_ROWS = AM_FLASH_ROWS / 2, A_STRIDE = 2 * AM_FLASH_TILE };
    float *a = (float *)p->a;
    for (ptrdiff_t two = (p->rows + 1) / 2; two % AMX_TILE_LANES != 0; two++)
        memset(a + two * A_STRIDE, 0, AM_FLASH_TILE * sizeof *a);
    for (const strip_f32 *s = strips; s < strips + count; s++) {
        const ptrdiff_t begin = s->begin / PANEL_f32 * AMX_TILE_LANES,
                        end = (s->end + PANEL_f32 - 1) / PANEL_f32 * AMX_TILE_LANES;
        backward_product_f32 one = *p;
        one.stride = AM_CHANNEL_STRIDE, one.columns = s->rows;
        one.sum = sum_at_f32(&one, 0, s->row);
        if (begin == end) clear_fresh_f32(&one, 0, p->columns);
        for (ptrdiff_t channel = 0; begin < end && channel < p->columns; channel += PANEL_f32) {
            const ptrdiff_t channels = p->columns - channel;
            const float *b = p->b + channel * LANES_OF_ROWS;
            float finite[PANEL_LANES];
            uint16_t rest[2 * PANEL_LANES];
            if (p->live) split_panel(b, finite, rest);
            float *c = (float *)one.sum.sum + channel * AM_CHANNEL_STRIDE;
            const amx_product product = {.a_stride = LANES_OF_ROWS,
                                         .b_stride = A_STRIDE,
                                         .c = c,
                                         .c_stride = AM_CHANNEL_STRIDE,
                                         .add = !p->sum.fresh};
            const amx_span span = {.a = (p->live ? finite : b) + begin,
                                   .b = a + begin * A_STRIDE + s->row,
                                   .lanes = end - begin};
            amx_multiply(&amx_now, channels > AMX_TILE_ROWS ? AMX_ROWS : AMX_TILE_ROWS, s->rows, &product,
                         &span, 1, queue);
            const amx_weights weights = {.data = a + s->row, .row = 1, .two_tokens = A_STRIDE};
            if (p->live) add_rest(s->rows, p->live + s->row, &weights, rest, true, c, AM_CHANNEL_STRIDE);
        }
        add_onto_f32(&one, 0, p->columns);
    }
}

static void add_straight_bf16x2(const strip_f32 *strips, ptrdiff_t count, const backward_product_f32 *p,
                                prefetch_queue *queue)
{
    clear_fresh_f32(p, 0, p->rows);
    const amx_product product = {.a = p->a,
                                 .b = p->b,
                                 .a_stride = AM_FLASH_TILE,
                                 .b_stride = PANEL_f32,
                                 .c = p->sum.sum,
                                 .c_stride = p->stride,
                                 .add = true};
    add_products(strips, count, p->live, &product, p->columns, queue);
    add_onto_f32(p, 0, p->rows);
}

/* The number of chunks in all its products. */
static ptrdiff_t prefetching_products_bf16x2(const am_backward_rows *block, ptrdiff_t strips,
                                             ptrdiff_t columns)
{
    (void)columns;
    return strips * ((3 * block->q.dim + 2 * block->d_out.dim) / AMX_TILE_LANES + 1);
}
