/* masks.c – the mask of a call: terms and operators of `words`, as mask.c reads them from Python. */
#include "bind/xla/buffers.h"
#include "core/arrays/additive.h"
#include "core/runtime/sizes.h"

static ptrdiff_t saturated(int64_t a, int64_t b)
{
    int64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) sum = a < 0 ? -AM_FAR : AM_FAR;
    return sum > AM_FAR ? AM_FAR : sum < -AM_FAR ? -AM_FAR : (ptrdiff_t)sum;
}

ptrdiff_t *am_xla_integers(am_xla_call *c, const am_xla_operand *o, bool by_row, ptrdiff_t count,
                           ptrdiff_t none)
{
    const int64_t *numbers = NULL;
    ptrdiff_t given = count;
    if (o->buffer) {
        am_xla_view v;
        if (!am_xla_look(c, o->buffer, by_row, &v)) return NULL;
        numbers = am_xla_whole_numbers(c, &v, o->kind == AM_XLA_WIDE, &given);
        if (!numbers) return NULL;
    }
    const ptrdiff_t one = o->kind == AM_XLA_NOTHING ? none : saturated(o->number, 0);
    ptrdiff_t *values = am_xla_keep(c, count, sizeof *values);
    for (ptrdiff_t i = 0; values && i < count; i++)
        values[i] = numbers ? saturated(numbers[given == 1 ? 0 : i], 0) : one;
    return values;
}

static ptrdiff_t *next_integers(am_xla_call *c, bool by_row, ptrdiff_t count)
{
    am_xla_operand o;
    return am_xla_next_operand(c, &o) ? am_xla_integers(c, &o, by_row, count, 0) : NULL;
}

/* low, high and an offset that is added to both. */
typedef struct {
    am_xla_operand low, high, offset;
} limits;

static bool next_limits(am_xla_call *c, limits *l)
{
    return am_xla_next_operand(c, &l->low) && am_xla_next_operand(c, &l->high) &&
           am_xla_next_operand(c, &l->offset);
}

/* A limit of a band, which may be an array of one for each head, plus the offset of each batch row. */
static const ptrdiff_t *read_bound(am_xla_call *c, const am_xla_operand *bound, ptrdiff_t none,
                                   ptrdiff_t heads, const ptrdiff_t *offset)
{
    const ptrdiff_t *by_head = am_xla_integers(c, bound, false, heads, none);
    const ptrdiff_t count = am_product(c->mask.batch, heads, 1);
    ptrdiff_t *values = by_head ? am_xla_keep(c, count, sizeof *values) : NULL;
    for (ptrdiff_t i = 0; values && i < count; i++) {
        const ptrdiff_t moved = bound->kind == AM_XLA_NOTHING ? 0 : offset[i / heads];
        values[i] = saturated(by_head[i % heads], moved);
    }
    return values;
}

static bool read_band(am_xla_call *c, am_node *node)
{
    limits l;
    if (!next_limits(c, &l)) return false;
    const bool by_head = l.low.buffer || l.high.buffer;
    const ptrdiff_t heads = by_head ? c->mask.heads : 1,
                    *offset = am_xla_integers(c, &l.offset, true, c->mask.batch, 0);
    node->band.batch = heads, node->band.head = by_head;
    node->band.low = offset ? read_bound(c, &l.low, -AM_FAR, heads, offset) : NULL;
    node->band.high = node->band.low ? read_bound(c, &l.high, AM_FAR, heads, offset) : NULL;
    return node->band.high;
}

/* shifts of the queries and of the keys, which may not lead further than said */
static bool read_shifts(am_xla_call *c, const ptrdiff_t slack[2], const ptrdiff_t **q_shift,
                        const ptrdiff_t **k_shift)
{
    for (int i = 0; i < 2; i++) {
        const ptrdiff_t *shift = next_integers(c, true, c->mask.batch);
        if (!shift) return false;
        for (ptrdiff_t b = 0; slack[i] >= 0 && b < c->mask.batch; b++) {
            if (shift[b] < 0 || shift[b] > slack[i]) return am_xla_fail(c, "a shift leads out of the array");
        }
        *(i == 0 ? q_shift : k_shift) = shift;
    }
    return true;
}

/* size, q_shift, k_shift */
static bool read_chunk(am_xla_call *c, am_node *node)
{
    static const ptrdiff_t far[2] = {AM_FAR, AM_FAR};
    am_xla_operand size;
    if (!am_xla_next_operand(c, &size)) return false;
    if (size.kind != AM_XLA_INTEGER || size.number < 1) return am_xla_fail(c, "a chunk has no size");
    node->chunk.size = size.number;
    return read_shifts(c, far, &node->chunk.q_shift, &node->chunk.k_shift);
}

/* begin, end */
static bool read_keys(am_xla_call *c, am_node *node)
{
    node->keys.begin = next_integers(c, true, c->mask.batch);
    node->keys.end = node->keys.begin ? next_integers(c, true, c->mask.batch) : NULL;
    return node->keys.end;
}

/* An array that is int32 already, as it is. */
static const int32_t *small_numbers(am_xla_call *c, const am_xla_view *v)
{
    if (v->type == AM_INT32) return (const int32_t *)v->data;
    am_xla_view flat = {.data = v->data, .type = v->type, .axes = 1, .shape = {1}};
    for (int i = 0; i < v->axes; i++) flat.shape[0] *= v->shape[i];
    ptrdiff_t count = -1;
    const int64_t *numbers = am_xla_whole_numbers(c, &flat, false, &count);
    int32_t *small = numbers ? am_xla_keep(c, count, sizeof *small) : NULL;
    for (ptrdiff_t i = 0; small && i < count; i++) {
        if (numbers[i] > INT32_MAX) {
            am_xla_fail(c, "segment ids must be below 2**31, got %lld", (long long)numbers[i]);
            return NULL;
        }
        small[i] = (int32_t)(numbers[i] < 0 ? -1 : numbers[i]);
    }
    return small;
}

/* Numbers of tokens, [batch, tokens] or [batch, heads, tokens]. */
static bool look_at_tokens(am_xla_call *c, ptrdiff_t length, am_xla_view *v, ptrdiff_t *batch,
                           ptrdiff_t *head)
{
    am_xla_operand o;
    if (!am_xla_next_operand(c, &o)) return false;
    if (!o.buffer) return am_xla_fail(c, "segment ids must be an array");
    if (!am_xla_look(c, o.buffer, true, v)) return false;
    const ptrdiff_t rows = v->shape[0], heads = v->axes == 3 ? v->shape[1] : 1;
    if ((v->axes != 2 && v->axes != 3) || v->shape[v->axes - 1] != length ||
        (rows != 1 && rows != c->mask.batch) || (heads != 1 && heads != c->mask.heads))
        return am_xla_fail(c, "segment ids have a shape that does not fit");
    *batch = rows == 1 ? 0 : heads * length;
    *head = heads == 1 ? 0 : length;
    return true;
}

static bool read_ids(am_xla_call *c, ptrdiff_t length, const int32_t **ids, ptrdiff_t *batch, ptrdiff_t *head)
{
    am_xla_view v;
    if (!look_at_tokens(c, length, &v, batch, head)) return false;
    *ids = small_numbers(c, &v);
    return *ids;
}

/* low, high, offset and the diagonal of each query */
static bool read_diagonal(am_xla_call *c, am_node *node)
{
    am_xla_view v;
    if (!read_band(c, node) ||
        !look_at_tokens(c, c->mask.queries, &v, &node->diagonal.at_batch, &node->diagonal.at_head))
        return false;
    if (v.type != AM_INT32) return am_xla_fail(c, "the diagonals of queries must be int32");
    node->diagonal.at = (const int32_t *)v.data;
    return true;
}

/* q_ids, k_ids, exclude_zero */
static bool read_equal(am_xla_call *c, am_node *node)
{
    am_xla_operand zero;
    if (!read_ids(c, c->mask.queries, &node->equal.q_ids, &node->equal.q_batch, &node->equal.q_head) ||
        !read_ids(c, c->mask.keys, &node->equal.k_ids, &node->equal.k_batch, &node->equal.k_head) ||
        !am_xla_next_operand(c, &zero))
        return false;
    node->equal.exclude_zero = zero.number != 0;
    return true;
}

const ptrdiff_t *am_xla_read_starts(am_xla_call *c, const char *name, ptrdiff_t length, ptrdiff_t *count)
{
    am_xla_operand o;
    am_xla_view v;
    if (!am_xla_next_operand(c, &o) || (o.buffer && !am_xla_look(c, o.buffer, false, &v))) return NULL;
    if (o.buffer && *count < 0) *count = v.shape[0] - 1;
    const ptrdiff_t entries = *count + 1;
    if (!o.buffer || v.axes < 1 || v.shape[0] != entries || entries < 1) {
        am_xla_fail(c, "%s has a shape that does not fit", name);
        return NULL;
    }
    const ptrdiff_t *starts = am_xla_integers(c, &o, false, entries, 0);
    if (!starts) return NULL;
    if (starts[0] != 0) am_xla_fail(c, "%s must start at 0, got %td at index 0", name, starts[0]);
    for (ptrdiff_t i = 0; starts[0] == 0 && i < *count; i++) {
        if (starts[i] <= starts[i + 1]) continue;
        am_xla_fail(c, "%s must never decrease, got %td after %td at index %td", name, starts[i + 1],
                    starts[i], i + 1);
        return NULL;
    }
    if (starts[0] == 0 && starts[*count] != length)
        am_xla_fail(c, "%s must end at %td tokens, got %td at index %td", name, length, starts[*count],
                    *count);
    return starts[0] == 0 && starts[*count] == length ? starts : NULL;
}

/* A limit of each sequence, plus its offset. */
static const ptrdiff_t *read_limit(am_xla_call *c, const am_xla_operand *limit, ptrdiff_t none,
                                   ptrdiff_t count, const ptrdiff_t *offset)
{
    ptrdiff_t *values = am_xla_integers(c, limit, false, count, none);
    for (ptrdiff_t i = 0; values && limit->kind != AM_XLA_NOTHING && i < count; i++)
        values[i] = saturated(values[i], offset[i]);
    return values;
}

/* q_starts, k_starts, low, high, offset */
static bool read_sequences(am_xla_call *c, am_node *node)
{
    ptrdiff_t count = -1;
    node->sequences.q_starts = am_xla_read_starts(c, "cum_seqlens_q", c->mask.queries, &count);
    if (!node->sequences.q_starts) return false;
    node->sequences.k_starts = am_xla_read_starts(c, "cum_seqlens_k", c->mask.keys, &count);
    if (!node->sequences.k_starts) return false;
    node->sequences.count = count;
    limits l;
    if (!next_limits(c, &l)) return false;
    const ptrdiff_t *offset = am_xla_integers(c, &l.offset, false, count, 0);
    node->sequences.low = offset ? read_limit(c, &l.low, -AM_FAR, count, offset) : NULL;
    node->sequences.high = node->sequences.low ? read_limit(c, &l.high, AM_FAR, count, offset) : NULL;
    return node->sequences.high;
}

static bool check_additive(am_xla_call *c, const am_xla_view *v)
{
    if (!am_is_floating(v->type)) return true;
    const ptrdiff_t strides[4] = {am_xla_step_of(v, 0), am_xla_step_of(v, 1), am_xla_step_of(v, 2),
                                  am_xla_step_of(v, 3)};
    const am_numbers numbers = {
        .data = v->data, .type = v->type, .axes = 4, .shape = v->shape, .strides = strides};
    ptrdiff_t index;
    if (!am_xla_fail_status(c, am_find_additive(&c->context, &numbers, &index))) return false;
    return index < 0
               ? true
               : am_xla_fail(
                     c, "attention_mask must be zero for what is masked out and positive for the rest; if it "
                        "is to be added to logits, pass it as `bias`");
}

/* array, q_shift, k_shift */
static bool read_dense(am_xla_call *c, am_node *node)
{
    const am_mask *mask = &c->mask;
    const ptrdiff_t wanted[4] = {mask->batch, mask->heads, mask->queries, mask->keys};
    ptrdiff_t strides[4], slack[2] = {-1, -1}; /* an axis that is shared is never followed */
    am_xla_operand o;
    am_xla_view v;
    if (!am_xla_next_operand(c, &o)) return false;
    if (!o.buffer) return am_xla_fail(c, "attention_mask must be an array");
    if (!am_xla_look(c, o.buffer, true, &v)) return false;
    if (v.type == AM_FLOAT8) return am_xla_fail(c, "attention_mask has a type that does not fit");
    for (int i = 0; i < 4; i++) {
        const bool fits =
            v.axes == 4 && (v.shape[i] == 1 || (i < 2 ? v.shape[i] == wanted[i] : v.shape[i] >= wanted[i]));
        if (!fits) return am_xla_fail(c, "attention_mask has a shape that does not fit");
        strides[i] = am_xla_shared_step_of(&v, i);
        if (i >= 2 && v.shape[i] != 1) slack[i - 2] = v.shape[i] - wanted[i];
    }
    if (!check_additive(c, &v)) return false;
    node->dense.data = v.data;
    node->dense.type = v.type;
    node->dense.batch = strides[0], node->dense.head = strides[1];
    node->dense.row = strides[2], node->dense.column = strides[3];
    return read_shifts(c, slack, &node->dense.q_shift, &node->dense.k_shift);
}

/* places, q_size, k_size, bits, q_shift, k_shift */
static bool read_tiles(am_xla_call *c, am_node *node)
{
    static const ptrdiff_t unchecked[2] = {-1, -1};
    am_xla_operand places, q_size, k_size, bits;
    am_xla_view p, b;
    if (!am_xla_next_operand(c, &places) || !am_xla_next_operand(c, &q_size) ||
        !am_xla_next_operand(c, &k_size) || !am_xla_next_operand(c, &bits))
        return false;
    if (!places.buffer || !bits.buffer || q_size.number < 1 || k_size.number < 1)
        return am_xla_fail(c, "words: tiles lack an operand");
    if (!am_xla_look(c, places.buffer, true, &p) || !am_xla_look(c, bits.buffer, false, &b)) return false;
    if (p.type != AM_INT32 || p.axes != 4 || b.type != AM_UINT8 || b.axes != 3 ||
        b.shape[1] != AM_TILE_ROWS || b.shape[2] != AM_TILE_COLUMNS / 8)
        return am_xla_fail(c, "the tiles of the mask have types or shapes that do not fit");
    node->tiles.places = (const int32_t *)p.data;
    node->tiles.bits = b.shape[0] ? (const void *)b.data : NULL;
    node->tiles.q_size = q_size.number, node->tiles.k_size = k_size.number;
    if (!read_shifts(c, unchecked, &node->tiles.q_shift, &node->tiles.k_shift)) return false;
    if (!am_mask_set_tiles(&c->mask, node, p.shape, b.shape[0]))
        return am_xla_fail(c, "the tiles of the mask do not cover it, or some are mixed and have no bits");
    return true;
}

static bool read_all(am_xla_call *c, am_node *node)
{
    (void)c, (void)node;
    return true;
}

typedef bool read_term(am_xla_call *c, am_node *node);
static read_term *const terms[AM_TERM_KINDS] = {
    [AM_TERM_ALL] = read_all,     [AM_TERM_BAND] = read_band,   [AM_TERM_CHUNK] = read_chunk,
    [AM_TERM_KEYS] = read_keys,   [AM_TERM_EQUAL] = read_equal, [AM_TERM_SEQUENCES] = read_sequences,
    [AM_TERM_DENSE] = read_dense, [AM_TERM_TILES] = read_tiles, [AM_TERM_DIAGONAL] = read_diagonal,
};

/* What words say of terms and operators: by the numbers of exported programs, so new kinds come last. */
static const am_node_kind kinds[] = {
    AM_TERM_ALL,   AM_TERM_BAND, AM_TERM_CHUNK, AM_TERM_KEYS, AM_TERM_EQUAL, AM_TERM_SEQUENCES, AM_TERM_DENSE,
    AM_TERM_TILES, AM_NOT,       AM_AND,        AM_OR,        AM_XOR,        AM_TERM_DIAGONAL,
};

bool am_xla_read_mask(am_xla_call *c, const am_node *more, int more_count)
{
    int waiting = 0; /* operands of an operator */
    const bool given = c->words < c->words_end || more_count == 0;
    c->mask.nodes = am_xla_keep(c, c->words_end - c->words + 2 * more_count, sizeof *c->mask.nodes);
    if (!c->mask.nodes) return false;
    while (c->words < c->words_end) {
        const int64_t word = *c->words++;
        if (word < 0 || (size_t)word >= sizeof kinds / sizeof *kinds)
            return am_xla_fail(c, "words: the mask is no expression");
        const am_node_kind kind = kinds[word];
        am_node *node = &c->mask.nodes[c->mask.node_count];
        const int taken = kind < AM_TERM_KINDS ? 0 : kind == AM_NOT ? 1 : 2;
        if (waiting < taken || (taken == 0 && waiting == AM_MASK_DEPTH))
            return am_xla_fail(c, "words: the mask is no expression");
        waiting += 1 - taken;
        node->kind = kind;
        if (taken == 0 && !terms[kind](c, node)) return false;
        c->mask.node_count++;
    }
    if (given && waiting != 1) return am_xla_fail(c, "words: the mask is no expression");
    for (int i = 0; i < more_count; i++) {
        c->mask.nodes[c->mask.node_count++] = more[i];
        if (given || i > 0) c->mask.nodes[c->mask.node_count++] = (am_node){.kind = AM_AND};
    }
    return true;
}
