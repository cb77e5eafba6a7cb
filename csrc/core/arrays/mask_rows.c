/* mask_rows.c – reads rows of a mask. Rows whose elements are not contiguous are copied piece by piece. */
#include "core/arrays/mask_rows.h"

#include "core/arrays/convert.h"
#include "core/runtime/sizes.h"

/* Elements of a piece: a multiple of 64, so that pieces fill whole words of bits. */
enum { PIECE = 512 };

static am_axis axis_of(ptrdiff_t length, ptrdiff_t stride)
{
    am_axis axis = {.length = length, .count = stride == 0 ? 1 : length, .backwards = stride < 0};
    axis.stride = stride < 0 ? -stride : stride;
    return axis;
}

am_mask_rows am_mask_rows_of(const am_kernels *kernels, const am_array *mask)
{
    const am_by_axis *shape = &mask->shape, *stride = &mask->stride;
    am_axis queries = axis_of(shape->token, stride->token), keys = axis_of(shape->channel, stride->channel);
    am_mask_rows mask_rows = {
        .kernels = kernels,
        .data = mask->data,
        .batch = stride->batch ? shape->batch : 1,
        .heads = stride->head ? shape->head : 1,
        .batch_stride = stride->batch,
        .head_stride = stride->head,
        .transposed = keys.count == 1 || (queries.count > 1 && queries.stride < keys.stride),
        .size = (ptrdiff_t)am_size_of(mask->type),
        .lane = am_lane_of(mask->type),
    };
    if (queries.backwards) mask_rows.data += (shape->token - 1) * stride->token;
    if (keys.backwards) mask_rows.data += (shape->channel - 1) * stride->channel;
    mask_rows.rows = mask_rows.transposed ? keys : queries;
    mask_rows.columns = mask_rows.transposed ? queries : keys;
    if (mask_rows.columns.count == 1) mask_rows.columns.stride = mask_rows.size;
    return mask_rows;
}

/* How many elements of a row are read at once. */
static ptrdiff_t most_of(const am_mask_rows *mask_rows)
{
    return mask_rows->columns.stride == mask_rows->size ? PTRDIFF_MAX : PIECE;
}

/* So many elements of a row: where they lie, or copied to `piece`. */
static const void *piece_of(const am_mask_rows *mask_rows, uint64_t piece[PIECE], const char *row,
                            ptrdiff_t begin, ptrdiff_t count)
{
    const ptrdiff_t stride = mask_rows->columns.stride, size = mask_rows->size;
    if (stride == size) return row + begin * size;
    am_copy_2d((char *)piece, 0, size, row + begin * stride, 0, stride, 1, count, (size_t)size);
    return piece;
}

void am_mask_rows_pack(const am_mask_rows *mask_rows, uint64_t *dst, const char *row, ptrdiff_t begin,
                       ptrdiff_t count)
{
    am_pack_bits *pack = mask_rows->kernels->masks.pack[mask_rows->lane];
    uint64_t piece[PIECE];
    for (ptrdiff_t done = 0, length; done < count; done += length) {
        length = am_min(most_of(mask_rows), count - done);
        pack(dst + done / 64, piece_of(mask_rows, piece, row, begin + done, length), length);
    }
}

ptrdiff_t am_mask_rows_first(const am_mask_rows *mask_rows, const char *row, ptrdiff_t begin, ptrdiff_t end)
{
    am_find_nonzero *first = mask_rows->kernels->masks.first[mask_rows->lane];
    uint64_t piece[PIECE];
    for (ptrdiff_t length; begin < end; begin += length) {
        length = am_min(most_of(mask_rows), end - begin);
        ptrdiff_t found = first(piece_of(mask_rows, piece, row, begin, length), length);
        if (found >= 0) return begin + found;
    }
    return end;
}

ptrdiff_t am_mask_rows_last(const am_mask_rows *mask_rows, const char *row, ptrdiff_t begin, ptrdiff_t end)
{
    am_find_nonzero *last = mask_rows->kernels->masks.last[mask_rows->lane];
    uint64_t piece[PIECE];
    for (ptrdiff_t length; begin < end; end -= length) {
        length = am_min(most_of(mask_rows), end - begin);
        ptrdiff_t found = last(piece_of(mask_rows, piece, row, end - length, length), length);
        if (found >= 0) return end - length + found + 1;
    }
    return begin;
}

bool am_mask_rows_collect(const am_mask_rows *mask_rows, void *seen, const char *row, ptrdiff_t begin,
                          ptrdiff_t count)
{
    am_collect_nonzero *collect = mask_rows->kernels->masks.collect[mask_rows->lane];
    uint64_t piece[PIECE];
    bool any = false;
    for (ptrdiff_t done = 0, length; done < count; done += length) {
        length = am_min(most_of(mask_rows), count - done);
        any |= collect((char *)seen + done * mask_rows->size,
                       piece_of(mask_rows, piece, row, begin + done, length), length);
    }
    return any;
}
