/* i4_part.h – what products with keys and with values of four bits have in common. */

enum { CHUNK_I4 = 128, QUARTER_I4 = 32, MOST_I4 = 127 * 256 + 127 };

/* Channels of the chunk that begins at a channel: the last chunk may have fewer, and its other lanes
 * are 0. */
static inline ptrdiff_t width_i4(ptrdiff_t channels, ptrdiff_t begin)
{
    return channels - begin < CHUNK_I4 ? channels - begin : CHUNK_I4;
}

/* P of some rows times the scales of some groups, as i16x2, their units, and the sums of P times offsets. */
typedef struct {
    _Alignas(64) float p[4][4][AM_FLASH_TILE / 2]; /* [row][group] */
    float units[4][4], offsets[4][4];              /* [group][row] */
} weights_i4;

/* A part of a step: rows of a block from `row` on, keys begin … end - 1 of a tile, and a chunk of channels.
 */
typedef struct {
    const am_flash_rows *block;
    const am_flash_tile *tile;
    ptrdiff_t row, begin, end, channel, width;
    const weights_i4 *weights; /* of values */
} part_i4;

/* The group of a channel: their length is a power of two. */
static inline ptrdiff_t group_of_i4(ptrdiff_t channel, ptrdiff_t group)
{
    return channel >> __builtin_ctzll((unsigned long long)group);
}

static inline part_i4 part_of_i4(const am_flash_rows *block, const am_flash_tile *tile, ptrdiff_t channel,
                                 ptrdiff_t channels)
{
    part_i4 at = {.block = block, .tile = tile, .channel = channel};
    find_live(block, tile, &at.begin, &at.end);
    at.width = width_i4(channels, channel);
    return at;
}

static inline float number_i4(const uint8_t *row, ptrdiff_t channel)
{
    return (float)(row[channel / 2] >> channel % 2 * 4 & 15);
}

/* How many of the remaining rows are multiplied at once. */
static inline ptrdiff_t some_rows_i4(ptrdiff_t left) { return left >= 4 ? 4 : left >= 2 ? 2 : left; }

/* Lines that a loop prefetches without a test. */
typedef struct {
    const char *at;
    ptrdiff_t stride, early;
    bool near;
} straight_i4;

/* Takes so many lines for a loop; if they do not lie one behind the other, prefetches them at once instead.
 */
static inline straight_i4 take_lines_i4(prefetch_lines *lines, ptrdiff_t count)
{
    straight_i4 straight = {.at = (const char *)lines->at,
                            .stride = lines->stride,
                            .early = (ptrdiff_t)lines->early,
                            .near = lines->near};
    if (lines->left > count) {
        lines->at += (uintptr_t)(count * lines->stride), lines->left -= count;
        return straight;
    }
    prefetch_some(lines, count, true);
    straight.stride = straight.early = 0;
    return straight;
}

/* Prefetches some from a line on; returns the next one. */
INLINE const char *prefetch_straight_i4(const straight_i4 *lines, const char *line, const int count)
{
    UNROLL(4)
    for (int i = 0; i < count; i++, line += lines->stride) {
        if (lines->near)
            prefetch_two(line + lines->early, line, true);
        else
            prefetch_two(line + lines->early, line, false);
    }
    return line;
}

/* Scales of keys or of values of the next tile, which a step prefetches line by line between its products: if
 * it prefetched all at once, it would wait for them, and memory for its products. */
typedef struct {
    prefetch_lines lines;
    const am_prefetch_rows *next, *end; /* the runs after these */
    ptrdiff_t fours;                    /* of lines, for each row of queries */
} next_scales_i4;

/* Begins with a run; returns how many lines it has. */
static inline ptrdiff_t begin_scales_i4(next_scales_i4 *scales, const am_prefetch_rows *run)
{
    scales->lines = prefetch_lines_of((uintptr_t)run->at, run->stride, run->length, run->rows, 0);
    return scales->lines.count;
}

/* Those of a plan from `place` on, if it has some. `rows` rows of queries prefetch them. */
static inline next_scales_i4 next_scales_of_i4(const am_prefetch_plan *plan, int place, ptrdiff_t rows)
{
    static const am_prefetch_rows none[AM_PREFETCH_RUNS];
    const am_prefetch_rows *first = plan && plan->count > place ? plan->rows + place : none;
    next_scales_i4 scales = {.next = first + 1, .end = first + AM_PREFETCH_RUNS};
    ptrdiff_t count = 0;
    for (int i = AM_PREFETCH_RUNS - 1; i >= 0; i--) count += begin_scales_i4(&scales, first + i);
    scales.fours = (count + 4 * rows - 1) / (4 * rows);
    return scales;
}

/* Four lines of runs that may end. */
APART void prefetch_each_i4(next_scales_i4 *scales)
{
    for (int i = 0; i < 4; i++) {
        while (scales->lines.count == 0) {
            if (scales->next == scales->end) return;
            begin_scales_i4(scales, scales->next++);
        }
        prefetch_one(&scales->lines, false);
        scales->lines.count--;
    }
}

/* Prefetches the share of one row of queries. */
static inline void prefetch_scales_i4(next_scales_i4 *scales)
{
    prefetch_lines *lines = &scales->lines;
    for (ptrdiff_t i = 0; i < scales->fours; i++) {
        const char *at = (const char *)lines->at;
        if (lines->left <= 4 || lines->count < 4) {
            prefetch_each_i4(scales);
            continue;
        }
        UNROLL(4)
        for (int j = 0; j < 4; j++) __builtin_prefetch(at + j * CACHE_LINE);
        lines->at += 4 * CACHE_LINE, lines->left -= 4, lines->count -= 4;
    }
}
