/* dense.c – lines of a mask, copied a little at a time where their elements lie apart. */
#include "core/dense.h"

#include "core/convert.h"

/* Elements that are copied at once: whole words of bits. */
enum { PIECE = 512 };

static am_axis axis_of(ptrdiff_t length, ptrdiff_t stride)
{
    am_axis axis = {.length = length, .count = stride == 0 ? 1 : length, .backwards = stride < 0};
    axis.stride = stride < 0 ? -stride : stride;
    return axis;
}

am_lines am_lines_of(const am_kernels *kernels, const am_dense *mask)
{
    am_axis queries = axis_of(mask->queries, mask->query_stride),
            keys = axis_of(mask->keys, mask->key_stride);
    am_lines lines = {
        .kernels = kernels,
        .data = mask->data,
        .transposed = keys.count == 1 || (queries.count > 1 && queries.stride < keys.stride),
        .size = (ptrdiff_t)am_size_of(mask->type),
        .lane = am_lane_of(mask->type),
    };
    if (queries.backwards) lines.data += (mask->queries - 1) * mask->query_stride;
    if (keys.backwards) lines.data += (mask->keys - 1) * mask->key_stride;
    lines.rows = lines.transposed ? keys : queries;
    lines.columns = lines.transposed ? queries : keys;
    if (lines.columns.count == 1) lines.columns.stride = lines.size;
    return lines;
}

static bool side_by_side(const am_lines *lines) { return lines->columns.stride == lines->size; }

static void copy_piece(const am_lines *lines, uint64_t *piece, const char *row, ptrdiff_t begin,
                       ptrdiff_t count)
{
    am_copy_2d((char *)piece, 0, lines->size, row + begin * lines->columns.stride, 0, lines->columns.stride,
               1, count, (size_t)lines->size);
}

void am_lines_pack(const am_lines *lines, uint64_t *dst, const char *row, ptrdiff_t begin, ptrdiff_t count)
{
    am_pack_bits *pack = lines->kernels->pack[lines->lane];
    if (side_by_side(lines)) {
        pack(dst, row + begin * lines->size, count);
        return;
    }
    uint64_t piece[PIECE];
    for (ptrdiff_t done = 0; done < count; done += PIECE) {
        ptrdiff_t some = count - done < PIECE ? count - done : PIECE;
        copy_piece(lines, piece, row, begin + done, some);
        pack(dst + done / 64, piece, some);
    }
}

ptrdiff_t am_lines_first(const am_lines *lines, const char *row, ptrdiff_t begin, ptrdiff_t end)
{
    am_find_nonzero *first = lines->kernels->first[lines->lane];
    if (side_by_side(lines)) {
        ptrdiff_t found = first(row + begin * lines->size, end - begin);
        return found < 0 ? end : begin + found;
    }
    uint64_t piece[PIECE];
    for (ptrdiff_t some; begin < end; begin += some) {
        some = end - begin < PIECE ? end - begin : PIECE;
        copy_piece(lines, piece, row, begin, some);
        ptrdiff_t found = first(piece, some);
        if (found >= 0) return begin + found;
    }
    return end;
}

ptrdiff_t am_lines_last(const am_lines *lines, const char *row, ptrdiff_t begin, ptrdiff_t end)
{
    am_find_nonzero *last = lines->kernels->last[lines->lane];
    if (side_by_side(lines)) return begin + last(row + begin * lines->size, end - begin) + 1;
    uint64_t piece[PIECE];
    for (ptrdiff_t some; begin < end; end -= some) {
        some = end - begin < PIECE ? end - begin : PIECE;
        copy_piece(lines, piece, row, end - some, some);
        ptrdiff_t found = last(piece, some);
        if (found >= 0) return end - some + found + 1;
    }
    return begin;
}

bool am_lines_collect(const am_lines *lines, void *seen, const char *row, ptrdiff_t begin, ptrdiff_t count)
{
    am_collect_nonzero *collect = lines->kernels->collect[lines->lane];
    if (side_by_side(lines)) return collect(seen, row + begin * lines->size, count);
    uint64_t piece[PIECE];
    bool any = false;
    for (ptrdiff_t done = 0; done < count; done += PIECE) {
        ptrdiff_t some = count - done < PIECE ? count - done : PIECE;
        copy_piece(lines, piece, row, begin + done, some);
        any |= collect((char *)seen + done * lines->size, piece, some);
    }
    return any;
}
