/* mask_rows.c – reads rows of a mask. Rows whose elements are not contiguous are copied piece by piece. */
#include "core/arrays/mask_rows.h"

#include "core/arrays/convert.h"

/* Elements of a piece: a multiple of 64, so that pieces fill whole words of bits. */
enum { PIECE = 512 };

static am_axis axis_of(ptrdiff_t length, ptrdiff_t stride)
{
    am_axis axis = {.length = length, .count = stride == 0 ? 1 : length, .backwards = stride < 0};
    axis.stride = stride < 0 ? -stride : stride;
    return axis;
}

am_mask_rows am_mask_rows_of(const am_kernels *kernels, const am_dense *mask)
{
    am_axis queries = axis_of(mask->queries, mask->query_stride),
            keys = axis_of(mask->keys, mask->key_stride);
    am_mask_rows mask_rows = {
        .kernels = kernels,
        .data = mask->data,
        .transposed = keys.count == 1 || (queries.count > 1 && queries.stride < keys.stride),
        .size = (ptrdiff_t)am_size_of(mask->type),
        .lane = am_lane_of(mask->type),
    };
    if (queries.backwards) mask_rows.data += (mask->queries - 1) * mask->query_stride;
    if (keys.backwards) mask_rows.data += (mask->keys - 1) * mask->key_stride;
    mask_rows.rows = mask_rows.transposed ? keys : queries;
    mask_rows.columns = mask_rows.transposed ? queries : keys;
    if (mask_rows.columns.count == 1) mask_rows.columns.stride = mask_rows.size;
    return mask_rows;
}

static bool is_contiguous(const am_mask_rows *mask_rows)
{
    return mask_rows->columns.stride == mask_rows->size;
}

static void copy_piece(const am_mask_rows *mask_rows, uint64_t *piece, const char *row, ptrdiff_t begin,
                       ptrdiff_t count)
{
    am_copy_2d((char *)piece, 0, mask_rows->size, row + begin * mask_rows->columns.stride, 0,
               mask_rows->columns.stride, 1, count, (size_t)mask_rows->size);
}

void am_mask_rows_pack(const am_mask_rows *mask_rows, uint64_t *dst, const char *row, ptrdiff_t begin,
                       ptrdiff_t count)
{
    am_pack_bits *pack = mask_rows->kernels->masks.pack[mask_rows->lane];
    if (is_contiguous(mask_rows)) {
        pack(dst, row + begin * mask_rows->size, count);
        return;
    }
    uint64_t piece[PIECE];
    for (ptrdiff_t done = 0; done < count; done += PIECE) {
        ptrdiff_t length = count - done < PIECE ? count - done : PIECE;
        copy_piece(mask_rows, piece, row, begin + done, length);
        pack(dst + done / 64, piece, length);
    }
}

ptrdiff_t am_mask_rows_first(const am_mask_rows *mask_rows, const char *row, ptrdiff_t begin, ptrdiff_t end)
{
    am_find_nonzero *first = mask_rows->kernels->masks.first[mask_rows->lane];
    if (is_contiguous(mask_rows)) {
        ptrdiff_t found = first(row + begin * mask_rows->size, end - begin);
        return found < 0 ? end : begin + found;
    }
    uint64_t piece[PIECE];
    for (ptrdiff_t length; begin < end; begin += length) {
        length = end - begin < PIECE ? end - begin : PIECE;
        copy_piece(mask_rows, piece, row, begin, length);
        ptrdiff_t found = first(piece, length);
        if (found >= 0) return begin + found;
    }
    return end;
}

ptrdiff_t am_mask_rows_last(const am_mask_rows *mask_rows, const char *row, ptrdiff_t begin, ptrdiff_t end)
{
    am_find_nonzero *last = mask_rows->kernels->masks.last[mask_rows->lane];
    if (is_contiguous(mask_rows)) return begin + last(row + begin * mask_rows->size, end - begin) + 1;
    uint64_t piece[PIECE];
    for (ptrdiff_t length; begin < end; end -= length) {
        length = end - begin < PIECE ? end - begin : PIECE;
        copy_piece(mask_rows, piece, row, end - length, length);
        ptrdiff_t found = last(piece, length);
        if (found >= 0) return end - length + found + 1;
    }
    return begin;
}

bool am_mask_rows_collect(const am_mask_rows *mask_rows, void *seen, const char *row, ptrdiff_t begin,
                          ptrdiff_t count)
{
    am_collect_nonzero *collect = mask_rows->kernels->masks.collect[mask_rows->lane];
    if (is_contiguous(mask_rows)) return collect(seen, row + begin * mask_rows->size, count);
    uint64_t piece[PIECE];
    bool any = false;
    for (ptrdiff_t done = 0; done < count; done += PIECE) {
        ptrdiff_t length = count - done < PIECE ? count - done : PIECE;
        copy_piece(mask_rows, piece, row, begin + done, length);
        any |= collect((char *)seen + done * mask_rows->size, piece, length);
    }
    return any;
}
