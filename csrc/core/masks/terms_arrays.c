/* terms_arrays.c – the terms that are told by arrays over pairs: dense ones, and tiles. */
#include <stdlib.h>
#include <string.h>

#include "core/runtime/sizes.h"
#include "core/arrays/convert.h"
#include "core/arrays/mask_rows.h"
#include "core/masks/terms.h"

enum { BLOCK = AM_TILE_COLUMNS };

/* --- A dense array --- */

static void dense_bits(const am_mask *mask, const am_node *node, const am_region *p, uint64_t *bits)
{
    ptrdiff_t size = (ptrdiff_t)am_size_of(node->dense.type);
    ptrdiff_t q = p->q + node->dense.map.q_shift[p->b], k = p->k + node->dense.map.k_shift[p->b];
    const char *data = node->dense.data + p->b * node->dense.batch + p->h * node->dense.head +
                       q * node->dense.row + k * node->dense.column;
    am_nonzero_bits *nonzero = mask->kernels->masks.nonzero_bits[am_lane_of(node->dense.type)];
    uint64_t gathered[AM_TILE_COLUMNS]; /* elements of the widest type fit */
    for (ptrdiff_t r = 0; r < p->rows; r++) {
        const char *row = data + r * node->dense.row;
        if (r > 0 && node->dense.row == 0) {
            bits[r] = bits[0];
            continue;
        }
        if (node->dense.column != size) {
            am_copy_2d((char *)gathered, 0, size, row, 0, node->dense.column, 1, p->columns, (size_t)size);
            row = (const char *)gathered;
        }
        bits[r] = nonzero(row, p->columns);
    }
}

typedef struct {
    const am_mask *mask;
    const am_node *node;
    int32_t *places;
    ptrdiff_t queries, keys; /* the rows and columns of the array that some batch row reads */
    ptrdiff_t q_blocks;
} dense_job;

/* Finds the kind of each 64 × 64 tile in one row of tiles. Each element is read once, in the order of
 * memory. */
static am_status dense_task(void *arg, ptrdiff_t index, am_team *team)
{
    enum { WORDS = 64 }; /* words read from a row before the next row; one word where elements lie apart */
    const dense_job *job = arg;
    const am_node *node = job->node;
    const ptrdiff_t heads = node->dense.head ? job->mask->heads : 1, plane = index / job->q_blocks,
                    first = index % job->q_blocks * BLOCK, last = am_min(first + BLOCK, job->queries);
    /* Tiles are those of the array: the shift of a batch row is added when they are read. */
    const char *data =
        node->dense.data + plane / heads * node->dense.batch + plane % heads * node->dense.head;
    const am_mask_rows mask_rows = {
        .kernels = job->mask->kernels,
        .columns.stride = node->dense.column,
        .size = (ptrdiff_t)am_size_of(node->dense.type),
        .lane = am_lane_of(node->dense.type),
    };
    const ptrdiff_t most = mask_rows.columns.stride == mask_rows.size ? WORDS * BLOCK : BLOCK;
    for (ptrdiff_t k = 0; k < job->keys; k += most) {
        const ptrdiff_t columns = am_min(most, job->keys - k), words = am_ceil_div(columns, BLOCK);
        uint64_t bits[WORDS], any[WORDS] = {0}, dead[WORDS] = {0};
        for (ptrdiff_t q = first; q < last; q++) {
            am_mask_rows_pack(&mask_rows, bits, data + q * node->dense.row, k, columns);
            for (ptrdiff_t i = 0; i < words; i++) any[i] |= bits[i], dead[i] |= ~bits[i];
        }
        for (ptrdiff_t i = 0; i < words; i++) {
            bool full = !(dead[i] & am_low_bits(am_min(BLOCK, columns - i * BLOCK)));
            am_tile tile = !any[i] ? AM_DEAD : full ? AM_FULL : AM_MIXED;
            job->places[index * node->dense.map.row + k / BLOCK + i] = (int32_t)tile;
        }
    }
    return am_checkpoint(team);
}

static am_status dense_prepare(const am_context *context, const am_mask *mask, am_node *node)
{
    static const ptrdiff_t ALL = (ptrdiff_t)1 << 60; /* beyond every shifted position */
    am_tile_map *map = &node->dense.map;
    ptrdiff_t most_q_shift = 0, most_k_shift = 0;
    for (ptrdiff_t b = 0; b < mask->batch; b++) {
        most_q_shift = am_max(most_q_shift, map->q_shift[b]);
        most_k_shift = am_max(most_k_shift, map->k_shift[b]);
    }
    dense_job job = {
        .mask = mask,
        .node = node,
        .queries = node->dense.row ? mask->queries + most_q_shift : am_min(mask->queries, 1),
        .keys = node->dense.column ? mask->keys + most_k_shift : am_min(mask->keys, 1),
    };
    job.q_blocks = am_ceil_div(job.queries, BLOCK);
    map->q_size = node->dense.row ? BLOCK : ALL, map->k_size = node->dense.column ? BLOCK : ALL;
    map->row = am_ceil_div(job.keys, BLOCK);
    map->head = node->dense.head ? job.q_blocks * map->row : 0;
    map->batch = node->dense.batch ? (node->dense.head ? mask->heads : 1) * job.q_blocks * map->row : 0;
    ptrdiff_t rows = am_distinct_rows(mask, node->dense.batch, node->dense.head) * job.q_blocks;
    /* No question is asked about an empty mask, whose arrays may have no elements. */
    if (mask->batch == 0 || mask->heads == 0 || mask->queries == 0 || mask->keys == 0) rows = 0;
    map->places = job.places = malloc((size_t)am_max(rows * map->row, 1) * sizeof *job.places);
    return job.places ? am_parallel(context, rows, 1, dense_task, &job) : AM_NO_MEMORY;
}

static void dense_release(am_node *node)
{
    free((void *)node->dense.map.places);
    node->dense.map.places = NULL;
}

/* --- Where tiles are: of an array, or of a term of tiles --- */

/* The tiles of one (b, h) from that of shifted query q on. */
static const int32_t *tiles_of(const am_tile_map *map, const am_region *p, ptrdiff_t q)
{
    return map->places + p->b * map->batch + p->h * map->head + q / map->q_size * map->row;
}

/* The tiles that cover a region; of all keys if it has no columns. */
typedef struct {
    const int32_t *places; /* the first one */
    ptrdiff_t rows, columns;
    ptrdiff_t first_column; /* of the first one, among all tiles */
} tile_view;

static tile_view tiles_that_cover(const am_tile_map *map, const am_region *p, ptrdiff_t k, ptrdiff_t columns)
{
    const ptrdiff_t q = p->q + map->q_shift[p->b], q_size = map->q_size, k_size = map->k_size;
    k += map->k_shift[p->b];
    return (tile_view){
        .places = tiles_of(map, p, q) + k / k_size,
        .rows = (q + p->rows - 1) / q_size - q / q_size + 1,
        .columns = (k + columns - 1) / k_size - k / k_size + 1,
        .first_column = k / k_size,
    };
}

static bool column_is_dead(const am_tile_map *map, const tile_view *view, ptrdiff_t column)
{
    for (ptrdiff_t r = 0; r < view->rows; r++) {
        if (view->places[r * map->row + column] != AM_DEAD) return false;
    }
    return true;
}

static am_range map_keys(const am_mask *mask, const am_node *node, const am_region *p)
{
    const am_tile_map *map = &node->tiles.map;
    const tile_view view = tiles_that_cover(map, p, 0, mask->keys);
    const ptrdiff_t k_size = map->k_size, k_shift = map->k_shift[p->b];
    ptrdiff_t begin = 0, end = view.columns;
    while (begin < end && column_is_dead(map, &view, begin)) begin++;
    while (begin < end && column_is_dead(map, &view, end - 1)) end--;
    if (begin == end) return (am_range){0, 0};
    begin += view.first_column, end += view.first_column;
    /* The last tile may end beyond all positions. */
    const ptrdiff_t last = end > PTRDIFF_MAX / k_size ? PTRDIFF_MAX : end * k_size;
    return (am_range){am_max(begin * k_size - k_shift, 0), am_min(last - k_shift, mask->keys)};
}

static am_tile map_tile(const am_mask *mask, const am_node *node, const am_region *p)
{
    (void)mask;
    const am_tile_map *map = &node->tiles.map;
    const tile_view view = tiles_that_cover(map, p, p->k, p->columns);
    const int32_t first = am_read_once(view.places);
    if (first != AM_DEAD && first != AM_FULL) return AM_MIXED;
    for (ptrdiff_t r = 0; r < view.rows; r++) {
        for (ptrdiff_t c = 0; c < view.columns; c++) {
            if (view.places[r * map->row + c] != first) return AM_MIXED;
        }
    }
    return (am_tile)first;
}

static bool dense_is_by_head(const am_node *node) { return node->dense.head != 0; }

const am_term_kind am_dense_term = {
    .prepare = dense_prepare,
    .release = dense_release,
    .keys = map_keys,
    .tile = map_tile,
    .bits = dense_bits,
    .is_by_head = dense_is_by_head,
};

/* --- Tiles --- */

/* Whether `tiles` of `size` cover `length` positions after each shift. */
static bool tiles_cover(const am_mask *mask, const ptrdiff_t *shift, ptrdiff_t tiles, ptrdiff_t size,
                        ptrdiff_t length)
{
    const ptrdiff_t covered = am_product(tiles, size, 1);
    bool cover = true;
    for (ptrdiff_t b = 0; b < mask->batch; b++) cover &= shift[b] >= 0 && shift[b] <= covered - length;
    return cover && covered >= length;
}

bool am_mask_set_tiles(const am_mask *mask, am_node *node, const ptrdiff_t shape[4], ptrdiff_t count)
{
    am_tile_map *map = &node->tiles.map;
    const bool by_row = shape[0] != 1, by_head = shape[1] != 1;
    if ((by_row && shape[0] != mask->batch) || (by_head && shape[1] != mask->heads)) return false;
    if (count && (map->q_size != AM_TILE_ROWS || map->k_size != AM_TILE_COLUMNS)) return false;
    if (!tiles_cover(mask, map->q_shift, shape[2], map->q_size, mask->queries) ||
        !tiles_cover(mask, map->k_shift, shape[3], map->k_size, mask->keys))
        return false;
    node->tiles.patterns = count;
    map->row = shape[3];
    map->head = by_head ? shape[2] * shape[3] : 0;
    map->batch = by_row ? shape[1] * shape[2] * shape[3] : 0;
    const ptrdiff_t places = shape[0] * shape[1] * shape[2] * shape[3];
    uint32_t most = 0; /* negative places are the largest */
    for (ptrdiff_t i = 0; i < places; i++) {
        const uint32_t place = (uint32_t)map->places[i];
        most = place > most ? place : most;
    }
    return most < (uint64_t)AM_MIXED + (uint64_t)count;
}

/* Goes from tile to tile. Those that have bits are of AM_TILE_ROWS × AM_TILE_COLUMNS pairs. */
static void tiles_bits(const am_mask *mask, const am_node *node, const am_region *p, uint64_t *bits)
{
    (void)mask;
    const am_tile_map *map = &node->tiles.map;
    const ptrdiff_t first = p->q + map->q_shift[p->b], k = p->k + map->k_shift[p->b];
    memset(bits, 0, (size_t)p->rows * sizeof *bits);
    for (ptrdiff_t rows, r = 0; r < p->rows; r += rows) {
        const ptrdiff_t q = (first + r) % map->q_size;
        const int32_t *places = tiles_of(map, p, first + r);
        rows = am_min(map->q_size - q, p->rows - r);
        for (ptrdiff_t columns, c = 0; c < p->columns; c += columns) {
            const ptrdiff_t inside = (k + c) % map->k_size;
            const int32_t place = am_read_once(&places[(k + c) / map->k_size]);
            const bool has_bits = place >= AM_MIXED && place - AM_MIXED < node->tiles.patterns;
            columns = am_min(map->k_size - inside, p->columns - c);
            uint64_t row = place == AM_DEAD ? 0 : UINT64_MAX;
            for (ptrdiff_t i = 0; i < rows; i++) {
                if (has_bits) {
                    memcpy(&row, node->tiles.bits[place - AM_MIXED][q + i], sizeof row);
                    row >>= inside;
                }
                bits[r + i] |= (row & am_low_bits(columns)) << c;
            }
        }
    }
}

static uint64_t tiles_boundaries(const am_node *node, ptrdiff_t b, am_side side, ptrdiff_t begin,
                                 ptrdiff_t count)
{
    const bool queries = side == AM_QUERIES;
    return am_multiples(queries ? node->tiles.map.q_size : node->tiles.map.k_size,
                        begin + (queries ? node->tiles.map.q_shift : node->tiles.map.k_shift)[b], count);
}

static bool tiles_is_by_head(const am_node *node) { return node->tiles.map.head != 0; }

const am_term_kind am_tiles_term = {
    .keys = map_keys,
    .tile = map_tile,
    .bits = tiles_bits,
    .boundaries = tiles_boundaries,
    .is_by_head = tiles_is_by_head,
};
