/* request_masks.c – the terms and operators of a mask. */
#include <string.h>

#include "bind/request.h"
#include "core/arrays/convert.h"
#include "core/runtime/sizes.h"

static bool reject(am_request *r, const char *what)
{
    return am_refuse(r, AM_WRONG_VALUE, NULL, "mask: %s", what);
}

/* An operand in messages: by its name, or else as what it is. */
static const char *called(const am_operand *o, const char *what) { return o->name ? o->name : what; }

/* "… must be `what`", and the array that came. */
static bool reject_operand(am_request *r, const am_operand *o, const char *usual, const char *what)
{
    return am_refuse(r, AM_WRONG_VALUE, o->kind == AM_ARRAY ? &o->view : NULL, "%s must be %s",
                     called(o, usual), what);
}

static ptrdiff_t saturated(int64_t a, int64_t b)
{
    int64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) sum = a < 0 ? -AM_FAR : AM_FAR;
    return sum > AM_FAR ? AM_FAR : sum < -AM_FAR ? -AM_FAR : (ptrdiff_t)sum;
}

bool am_convert_integers(am_request *r, const am_operand *o, ptrdiff_t count, ptrdiff_t none, ptrdiff_t *to)
{
    const am_view *v = &o->view;
    const ptrdiff_t given = o->kind == AM_ARRAY && v->axes ? v->shape[0] : 1;
    ptrdiff_t one = o->kind == AM_INTEGER ? o->number : none;
    if (o->kind == AM_ARRAY && (v->axes > 1 || (given != 1 && given != count)))
        return reject_operand(r, o, "mask: numbers",
                              "one integer, or an array of one for each row, head or sequence");
    if (o->kind == AM_ARRAY && !am_is_integer(v->type))
        return am_refuse(r, AM_WRONG_TYPE, v, "%s must be integers", called(o, "mask: numbers"));
    if (o->kind == AM_ARRAY) am_widen(v, given == count ? to : &one);
    for (ptrdiff_t i = 0; i < count; i++)
        to[i] = saturated(o->kind == AM_ARRAY && given == count ? to[i] : one, 0);
    return true;
}

ptrdiff_t *am_read_integers(am_request *r, const am_operand *o, ptrdiff_t count, ptrdiff_t none)
{
    ptrdiff_t *numbers = am_keep(r, count, sizeof *numbers);
    return numbers && am_convert_integers(r, o, count, none, numbers) ? numbers : NULL;
}

/* A bound of a band, which may be an array of one for each head, plus the offset of each batch row. */
static const ptrdiff_t *read_bound(am_request *r, const am_operand *bound, ptrdiff_t none, ptrdiff_t heads,
                                   const ptrdiff_t *offset)
{
    const ptrdiff_t *by_head = am_read_integers(r, bound, heads, none);
    const ptrdiff_t count = am_product(r->mask.batch, heads, 1);
    ptrdiff_t *values = by_head ? am_keep(r, count, sizeof *values) : NULL;
    for (ptrdiff_t i = 0; values && i < count; i++)
        values[i] = saturated(by_head[i % heads], bound->kind == AM_NOTHING ? 0 : offset[i / heads]);
    return values;
}

/* low, high, and an offset of each batch row that is added to both */
static bool read_band(am_request *r, am_node *node, const am_operand *o)
{
    const bool by_head = o[0].kind == AM_ARRAY || o[1].kind == AM_ARRAY;
    const ptrdiff_t heads = by_head ? r->mask.heads : 1,
                    *offset = am_read_integers(r, &o[2], r->mask.batch, 0);
    node->band.batch = heads, node->band.head = by_head;
    node->band.low = offset ? read_bound(r, &o[0], -AM_FAR, heads, offset) : NULL;
    node->band.high = node->band.low ? read_bound(r, &o[1], AM_FAR, heads, offset) : NULL;
    return node->band.high;
}

/* A shift of each batch row, of at most `slack`, unless that is negative. */
static const ptrdiff_t *read_shift(am_request *r, const am_operand *o, ptrdiff_t slack)
{
    const ptrdiff_t *shift = am_read_integers(r, o, r->mask.batch, 0);
    for (ptrdiff_t b = 0; shift && slack >= 0 && b < r->mask.batch; b++) {
        if (shift[b] >= 0 && shift[b] <= slack) continue;
        am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be from 0 to %td, got %td", called(o, "mask: a shift"),
                  slack, shift[b]);
        return NULL;
    }
    return shift;
}

static bool read_size(am_request *r, const am_operand *o, ptrdiff_t *size)
{
    *size = o->number;
    return (o->kind == AM_INTEGER && *size >= 1) ||
           am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be a positive integer, got %s%td",
                     called(o, "mask: a size"), o->kind == AM_INTEGER ? "" : "no integer, but ", *size);
}

/* size, shifts of the queries and of the keys */
static bool read_chunk(am_request *r, am_node *node, const am_operand *o)
{
    if (!read_size(r, &o[0], &node->chunk.size)) return false;
    node->chunk.q_shift = read_shift(r, &o[1], AM_FAR);
    node->chunk.k_shift = node->chunk.q_shift ? read_shift(r, &o[2], AM_FAR) : NULL;
    return node->chunk.k_shift;
}

/* begin, end */
static bool read_keys(am_request *r, am_node *node, const am_operand *o)
{
    node->keys.begin = am_read_integers(r, &o[0], r->mask.batch, 0);
    node->keys.end = node->keys.begin ? am_read_integers(r, &o[1], r->mask.batch, 0) : NULL;
    return node->keys.end;
}

/* Copies the numbers of one row of tokens; negative ones of other types than int32 become -1. */
static bool copy_row(am_request *r, const char *name, int32_t *to, const char *from, const am_view *v,
                     ptrdiff_t tokens)
{
    const ptrdiff_t stride = v->stride[v->axes - 1];
    if (v->type == AM_INT32 && stride == sizeof *to) {
        if (tokens) memcpy(to, from, (size_t)tokens * sizeof *to);
        return true;
    }
    for (ptrdiff_t i = 0; i < tokens; i++) {
        int64_t number;
        if (!am_convert(NULL, AM_INT64, &number, v->type, from + i * stride, 1)) number = INT64_MAX;
        if (number > INT32_MAX)
            return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be below 2**31, got %lld", name,
                             (long long)number);
        to[i] = v->type == AM_INT32 || number >= 0 ? (int32_t)number : -1;
    }
    return true;
}

/* Ids, or other numbers of tokens, are [batch, tokens] or [batch, heads, tokens], where batch and heads may
 * be 1. They are copied, since other threads may write to the caller's: sections and tiles are found from
 * them and later looked for again. */
static bool read_ids(am_request *r, const am_operand *o, ptrdiff_t tokens, am_token_ids *to)
{
    const am_view *v = &o->view;
    const ptrdiff_t rows = v->shape[0], heads = v->axes == 3 ? v->shape[1] : 1;
    if (o->kind != AM_ARRAY || (v->axes != 2 && v->axes != 3) || v->shape[v->axes - 1] != tokens ||
        (rows != 1 && rows != r->mask.batch) || (heads != 1 && heads != r->mask.heads))
        return am_refuse(r, AM_WRONG_VALUE, o->kind == AM_ARRAY ? v : NULL,
                         "%s must be [B, %td] or [B, H, %td]", called(o, "mask: segment ids"), tokens,
                         tokens);
    const char *name = called(o, "segment ids");
    if (!am_is_integer(v->type)) return am_refuse(r, AM_WRONG_TYPE, v, "%s must be integers", name);
    int32_t *ids = am_keep(r, am_product(rows, heads, tokens), sizeof *ids);
    for (ptrdiff_t i = 0; ids && tokens && i < rows * heads; i++) {
        const char *from = v->data + i / heads * v->stride[0] + (v->axes == 3 ? i % heads * v->stride[1] : 0);
        if (!copy_row(r, name, ids + i * tokens, from, v, tokens)) return false;
    }
    *to =
        (am_token_ids){.ids = ids, .batch = rows == 1 ? 0 : heads * tokens, .head = heads == 1 ? 0 : tokens};
    return ids;
}

/* q_ids, k_ids, exclude_zero */
static bool read_equal(am_request *r, am_node *node, const am_operand *o)
{
    node->equal.exclude_zero = o[2].number != 0;
    return read_ids(r, &o[0], r->mask.queries, &node->equal.q) &&
           read_ids(r, &o[1], r->mask.keys, &node->equal.k);
}

/* A band, and where its diagonal is for each query */
static bool read_diagonal(am_request *r, am_node *node, const am_operand *o)
{
    if (!read_band(r, node, o)) return false;
    if (o[3].kind == AM_ARRAY && o[3].view.type != AM_INT32)
        return am_refuse(r, AM_WRONG_TYPE, &o[3].view, "%s must be int32",
                         called(&o[3], "the diagonals of queries"));
    return read_ids(r, &o[3], r->mask.queries, &node->diagonal.at);
}

const ptrdiff_t *am_read_starts_of(am_request *r, const char *name, const am_operand *o, ptrdiff_t tokens,
                                   ptrdiff_t *count)
{
    const am_view *v = &o->view;
    if (o->kind == AM_ARRAY && v->axes == 1 && *count < 0) *count = v->shape[0] - 1;
    const ptrdiff_t entries = *count + 1;
    if (o->kind != AM_ARRAY || v->axes != 1 || v->shape[0] != entries || entries < 1) {
        am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be an array, of one entry more than sequences", name);
        return NULL;
    }
    const ptrdiff_t *starts = am_read_integers(r, o, entries, 0);
    if (!starts) return NULL;
    for (ptrdiff_t i = 0; i < *count; i++) {
        if (starts[i] <= starts[i + 1]) continue;
        am_refuse(r, AM_WRONG_VALUE, NULL, "%s must never decrease, got %td after %td at index %td", name,
                  starts[i + 1], starts[i], i + 1);
        return NULL;
    }
    if (starts[0] != 0)
        am_refuse(r, AM_WRONG_VALUE, NULL, "%s must start at 0, got %td at index 0", name, starts[0]);
    else if (starts[*count] != tokens)
        am_refuse(r, AM_WRONG_VALUE, NULL, "%s must end at %td tokens, got %td at index %td", name, tokens,
                  starts[*count], *count);
    return starts[0] == 0 && starts[*count] == tokens ? starts : NULL;
}

/* A limit of each sequence, plus its offset. */
static const ptrdiff_t *read_limit(am_request *r, const am_operand *limit, ptrdiff_t none, ptrdiff_t count,
                                   const ptrdiff_t *offset)
{
    ptrdiff_t *values = am_read_integers(r, limit, count, none);
    for (ptrdiff_t i = 0; values && limit->kind != AM_NOTHING && i < count; i++)
        values[i] = saturated(values[i], offset[i]);
    return values;
}

/* q_starts, k_starts, low, high, and an offset of each sequence that is added to both */
static bool read_sequences(am_request *r, am_node *node, const am_operand *o)
{
    ptrdiff_t count = -1;
    node->sequences.q_starts = am_read_starts_of(r, "cum_seqlens_q", &o[0], r->mask.queries, &count);
    if (!node->sequences.q_starts) return false;
    node->sequences.k_starts = am_read_starts_of(r, "cum_seqlens_k", &o[1], r->mask.keys, &count);
    if (!node->sequences.k_starts) return false;
    node->sequences.count = count;
    const ptrdiff_t *offset = am_read_integers(r, &o[4], count, 0);
    node->sequences.low = offset ? read_limit(r, &o[2], -AM_FAR, count, offset) : NULL;
    node->sequences.high = node->sequences.low ? read_limit(r, &o[3], AM_FAR, count, offset) : NULL;
    return node->sequences.high;
}

/* array, shifts of the queries and of the keys */
static bool read_dense(am_request *r, am_node *node, const am_operand *o)
{
    const am_view *v = &o[0].view;
    const ptrdiff_t wanted[4] = {r->mask.batch, r->mask.heads, r->mask.queries, r->mask.keys};
    ptrdiff_t slack[2] = {-1, -1}; /* an axis that is shared is never followed */
    const char *name = am_words_of_door.pairs;
    if (o[0].kind != AM_ARRAY) return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be an array", name);
    if (v->type > AM_FLOAT64) return am_refuse(r, AM_WRONG_TYPE, v, "%s must be bool or numbers", name);
    bool fits = v->axes == 4;
    for (int i = 0; i < 4; i++) {
        fits = fits && (v->shape[i] == 1 || (i < 2 ? v->shape[i] == wanted[i] : v->shape[i] >= wanted[i]));
        if (i >= 2 && v->shape[i] > 1) slack[i - 2] = v->shape[i] - wanted[i];
    }
    if (!fits) return am_refuse(r, AM_WRONG_VALUE, v, "%s must broadcast to [B, H, Tq, Tk]", name);
    node->dense.data = v->data, node->dense.type = v->type;
    node->dense.batch = am_shared_stride(v, 0), node->dense.head = am_shared_stride(v, 1);
    node->dense.row = am_shared_stride(v, 2), node->dense.column = am_shared_stride(v, 3);
    node->dense.map.q_shift = read_shift(r, &o[1], slack[0]);
    node->dense.map.k_shift = node->dense.map.q_shift ? read_shift(r, &o[2], slack[1]) : NULL;
    return node->dense.map.k_shift;
}

/* The elements in C order: in place if they are so already, else a copy. */
static const void *contiguous(am_request *r, const am_view *v)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(v->type);
    ptrdiff_t count = 1;
    bool is = true;
    for (int i = AM_MOST_AXES - 1; i >= 0; count *= v->shape[i--])
        is = is && (v->shape[i] <= 1 || v->stride[i] == count * size);
    if (is || count == 0) return v->data;
    char *copy = am_keep(r, count, (size_t)size);
    for (ptrdiff_t i = 0; copy && i < count; i++) {
        const char *from = v->data;
        ptrdiff_t rest = i;
        for (int axis = AM_MOST_AXES - 1; axis >= 0; rest /= v->shape[axis--])
            from += rest % v->shape[axis] * v->stride[axis];
        memcpy(copy + i * size, from, (size_t)size);
    }
    return copy;
}

/* places, q_size, k_size, bits, shifts of the queries and of the keys */
static bool read_tiles(am_request *r, am_node *node, const am_operand *o)
{
    const am_view *places = &o[0].view, *bits = &o[3].view;
    if (o[0].kind != AM_ARRAY || places->type != AM_INT32 || places->axes != 4 || o[3].kind != AM_ARRAY ||
        bits->type != AM_UINT8 || bits->axes != 3 || bits->shape[1] != AM_TILE_ROWS ||
        bits->shape[2] != AM_TILE_COLUMNS / 8)
        return reject(r, "places must be int32 [B, H, tiles, tiles], and bits uint8 [patterns, 64, 8]");
    if (!read_size(r, &o[1], &node->tiles.map.q_size) || !read_size(r, &o[2], &node->tiles.map.k_size))
        return false;
    node->tiles.map.places = contiguous(r, places);
    node->tiles.bits = bits->shape[0] ? contiguous(r, bits) : NULL;
    if (!node->tiles.map.places || (bits->shape[0] && !node->tiles.bits)) return false;
    node->tiles.map.q_shift = read_shift(r, &o[4], -1);
    node->tiles.map.k_shift = node->tiles.map.q_shift ? read_shift(r, &o[5], -1) : NULL;
    if (!node->tiles.map.k_shift) return false;
    return am_mask_set_tiles(&r->mask, node, places->shape, bits->shape[0]) ||
           reject(r, "places must cover the mask, and be 0, 1, or 2 + i for pattern i of bits");
}

/* [axes, 5]: length, kernel, stride, dilation and whether it is causal, of each axis. They are copied. */
static const am_grid *read_grid(am_request *r, const am_view *v, ptrdiff_t *points)
{
    am_grid *grid = am_keep(r, 1, sizeof *grid);
    bool fits =
        grid && v->axes == 2 && v->shape[0] >= 1 && v->shape[0] <= AM_MOST_GRID_AXES && v->shape[1] == 5;
    *points = 1;
    for (int i = fits ? (int)v->shape[0] - 1 : -1; i >= 0; i--) {
        am_grid_axis *a = &grid->axis[i];
        int64_t numbers[5];
        for (int n = 0; n < 5; n++) {
            const char *from = v->data + i * v->stride[0] + n * v->stride[1];
            if (!am_convert(NULL, AM_INT64, &numbers[n], v->type, from, 1)) numbers[n] = -1;
        }
        *a = (am_grid_axis){.length = numbers[0],
                            .kernel = numbers[1],
                            .stride = numbers[2],
                            .dilation = numbers[3],
                            .causal = numbers[4] != 0,
                            .step = *points};
        fits = fits && a->length >= 1 && a->length <= AM_LONGEST / *points && a->stride >= 1 &&
               a->stride <= a->kernel && a->dilation >= 1 && a->kernel <= a->length / a->dilation;
        if (fits) *points *= a->length;
    }
    if (grid) grid->axes = (int)v->shape[0];
    if (grid && !fits)
        reject(r, "grid must be [axes, 5] of lengths, kernels, strides, dilations and causal, which fit each "
                  "other");
    return fits ? grid : NULL;
}

/* grid, shifts of the queries and of the keys */
static bool read_neighborhood(am_request *r, am_node *node, const am_operand *o)
{
    ptrdiff_t points;
    if (o[0].kind != AM_ARRAY || !am_is_integer(o[0].view.type))
        return reject_operand(r, &o[0], "mask: a grid", "integers");
    node->neighborhood.grid = read_grid(r, &o[0].view, &points);
    if (!node->neighborhood.grid) return false;
    if (r->mask.queries > points || r->mask.keys > points)
        return reject(r, "grid must have a point for each query and key");
    node->neighborhood.q_shift = read_shift(r, &o[1], points - r->mask.queries);
    node->neighborhood.k_shift =
        node->neighborhood.q_shift ? read_shift(r, &o[2], points - r->mask.keys) : NULL;
    return node->neighborhood.k_shift;
}

static bool read_all(am_request *r, am_node *node, const am_operand *o)
{
    (void)r, (void)node, (void)o;
    return true;
}

/* Exported programs hold the places of these rows: new ones come last. */
static const am_node_row rows[] = {
    {.name = "all", .kind = AM_TERM_ALL, .operands = "", .read = read_all},
    {.name = "band", .kind = AM_TERM_BAND, .operands = "ssb", .read = read_band},
    {.name = "chunk", .kind = AM_TERM_CHUNK, .operands = "sbb", .read = read_chunk},
    {.name = "keys", .kind = AM_TERM_KEYS, .operands = "bb", .read = read_keys},
    {.name = "equal", .kind = AM_TERM_EQUAL, .operands = "bbs", .read = read_equal},
    {.name = "sequences", .kind = AM_TERM_SEQUENCES, .operands = "sssss", .read = read_sequences},
    {.name = "dense", .kind = AM_TERM_DENSE, .operands = "bbb", .read = read_dense},
    {.name = "tiles", .kind = AM_TERM_TILES, .operands = "bsssbb", .read = read_tiles},
    {.name = "not", .kind = AM_NOT},
    {.name = "and", .kind = AM_AND},
    {.name = "or", .kind = AM_OR},
    {.name = "xor", .kind = AM_XOR},
    {.name = "diagonal", .kind = AM_TERM_DIAGONAL, .operands = "ssbb", .read = read_diagonal},
    {.name = "neighborhood", .kind = AM_TERM_NEIGHBORHOOD, .operands = "sbb", .read = read_neighborhood},
};
enum { ROWS = sizeof rows / sizeof *rows };

const am_node_row *am_node_row_at(ptrdiff_t number)
{
    return 0 <= number && number < ROWS ? &rows[number] : NULL;
}

const am_node_row *am_node_row_named(const char *name)
{
    for (int i = 0; i < ROWS; i++) {
        if (strcmp(rows[i].name, name) == 0) return &rows[i];
    }
    return NULL;
}

/* --- Expressions --- */

bool am_mask_begin(am_request *r, ptrdiff_t most_nodes)
{
    const ptrdiff_t lengths[4] = {r->mask.batch, r->mask.heads, r->mask.queries, r->mask.keys};
    for (int i = 0; i < 4; i++) {
        if (lengths[i] > AM_LONGEST)
            return am_refuse(r, AM_WRONG_VALUE, NULL,
                             "shape must be from 0 to 2**56 along each axis, got %td", lengths[i]);
    }
    r->waiting = 0, r->mask.node_count = 0;
    r->mask.nodes = am_keep(r, most_nodes, sizeof *r->mask.nodes);
    return r->mask.nodes;
}

static bool waits(am_request *r, int more)
{
    r->waiting += more;
    return r->waiting <= AM_MASK_DEPTH ||
           am_refuse(r, AM_WRONG_VALUE, NULL, "mask: too many operands wait at once, more than %d",
                     AM_MASK_DEPTH);
}

bool am_mask_add(am_request *r, const am_node_row *term, const am_operand *operands)
{
    am_node *node = &r->mask.nodes[r->mask.node_count];
    node->kind = term->kind;
    if (!waits(r, 1) || !term->read(r, node, operands)) return false;
    r->mask.node_count++;
    return true;
}

bool am_mask_join(am_request *r, am_node_kind operator)
{
    const int taken = operator == AM_NOT ? 1 : 2;
    if (r->waiting < taken)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "mask: an operator must have %d masks before it, got %d",
                         taken, r->waiting);
    r->waiting += 1 - taken;
    r->mask.nodes[r->mask.node_count++].kind = operator;
    return true;
}

bool am_mask_include(am_request *r, const am_mask *other)
{
    const am_mask *own = &r->mask;
    if (own->batch != other->batch || own->heads != other->heads || own->queries != other->queries ||
        own->keys != other->keys)
        return reject(r, "a prepared mask must have the mask's shape");
    for (ptrdiff_t i = 0; i < other->node_count; i++) {
        am_node *node = &r->mask.nodes[r->mask.node_count++];
        *node = other->nodes[i];
        node->borrowed = true;
        if (!waits(r, node->kind < AM_TERM_KINDS ? 1 : node->kind == AM_NOT ? 0 : -1)) return false;
    }
    return true;
}

bool am_mask_end(am_request *r, const am_node *more, int more_count)
{
    const bool given = r->mask.node_count > 0;
    am_node *next = &r->mask.nodes[r->mask.node_count];
    if (r->waiting != (given || more_count == 0)) return reject(r, "an expression must come to one mask");
    for (int i = 0; i < more_count; i++) {
        *next++ = more[i];
        if (given || i > 0) *next++ = (am_node){.kind = AM_AND};
    }
    r->mask.node_count = next - r->mask.nodes;
    return true;
}

/* --- Parts of a mask --- */

/* Moves a bound. Where there is no bound, none is made. */
static ptrdiff_t moved(ptrdiff_t bound, ptrdiff_t by)
{
    return bound == -AM_FAR || bound == AM_FAR ? bound : saturated(bound, by);
}

/* New numbers: these, moved, and within limits. */
static const ptrdiff_t *all_moved(am_request *r, const ptrdiff_t *from, ptrdiff_t count, ptrdiff_t by,
                                  am_range limits)
{
    ptrdiff_t *to = am_keep(r, count, sizeof *to);
    for (ptrdiff_t i = 0; to && i < count; i++)
        to[i] = am_min(am_max(moved(from[i], by), limits.begin), limits.end);
    return to;
}

/* Lets both be counted from `begin` on in the sequence that has begun before it. */
static bool cut_sequences(am_request *r, am_node *node, const am_mask *part, ptrdiff_t begin)
{
    const ptrdiff_t count = node->sequences.count, *starts = node->sequences.q_starts;
    ptrdiff_t *numbers = am_keep(r, 3 * count, sizeof *numbers);
    for (ptrdiff_t s = 0; numbers && s < count; s++) {
        const ptrdiff_t before = am_min(am_max(0, begin - starts[s]), starts[s + 1] - starts[s]);
        numbers[s] = moved(node->sequences.low[s], before);
        numbers[count + s] = moved(node->sequences.high[s], before);
        numbers[2 * count + s] = node->sequences.size ? node->sequences.offsets[s] + before : 0;
    }
    node->sequences.low = numbers;
    if (!numbers) return false;
    node->sequences.high = numbers + count, node->sequences.offsets = numbers + 2 * count;
    node->sequences.q_starts = all_moved(r, starts, count + 1, -begin, (am_range){0, part->queries});
    node->sequences.k_starts =
        all_moved(r, node->sequences.k_starts, count + 1, 0, (am_range){0, part->keys});
    return node->sequences.q_starts && node->sequences.k_starts;
}

/* Lets the node of a mask of one batch row begin with a query. */
static bool cut_node(am_request *r, am_node *node, const am_mask *part, ptrdiff_t begin)
{
    const am_range bounds = {-AM_FAR, AM_FAR}, shifts = {0, AM_FAR};
    node->borrowed = false; /* summaries are made again */
    switch (node->kind) {
    case AM_TERM_BAND:
        node->band.low = all_moved(r, node->band.low, node->band.batch, begin, bounds);
        node->band.high =
            node->band.low ? all_moved(r, node->band.high, node->band.batch, begin, bounds) : NULL;
        return node->band.high;
    case AM_TERM_CHUNK:
        node->chunk.q_shift = all_moved(r, node->chunk.q_shift, 1, begin, shifts);
        return node->chunk.q_shift;
    case AM_TERM_TILES:
        node->tiles.map.q_shift = all_moved(r, node->tiles.map.q_shift, 1, begin, shifts);
        return node->tiles.map.q_shift;
    case AM_TERM_NEIGHBORHOOD:
        node->neighborhood.q_shift = all_moved(r, node->neighborhood.q_shift, 1, begin, shifts);
        return node->neighborhood.q_shift;
    case AM_TERM_SEQUENCES: return cut_sequences(r, node, part, begin);
    case AM_TERM_EQUAL:
        node->equal.q.ids += begin;
        node->equal.q.blocks = node->equal.k.blocks = node->equal.k_wide_blocks = NULL;
        return true;
    case AM_TERM_DIAGONAL:
        node->diagonal.at.ids += begin;
        node->diagonal.at.blocks = NULL;
        return true;
    case AM_TERM_DENSE:
        node->dense.data += begin * node->dense.row;
        node->dense.map.places = NULL;
        return true;
    default: return true;
    }
}

bool am_mask_cut(am_request *r, ptrdiff_t begin, am_mask *part, const am_node *more, int more_count)
{
    const am_mask *whole = &r->mask;
    part->nodes = am_keep(r, whole->node_count + 2 * more_count, sizeof *part->nodes);
    if (!part->nodes) return false;
    memcpy(part->nodes, whole->nodes, (size_t)whole->node_count * sizeof *part->nodes);
    for (ptrdiff_t i = 0; i < whole->node_count; i++) {
        if (!cut_node(r, &part->nodes[i], part, begin)) return false;
    }
    part->node_count = whole->node_count;
    for (int i = 0; i < more_count; i++) {
        part->nodes[part->node_count++] = more[i];
        part->nodes[part->node_count++] = (am_node){.kind = AM_AND};
    }
    return true;
}
