/* segments.c – converts, checks and counts segment ids, a block of tokens at a time, and numbers the tokens
 * of segments, span by span. */
#include "tokens/segments.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/runtime/sizes.h"

enum {
    WORD = 64,
    BLOCK = 512, /* ids converted at once */
    TASK_TOKENS = 1 << 15,
};

static ptrdiff_t rows_of(const am_array *ids) { return ids->shape.batch * ids->shape.head; }
static ptrdiff_t tokens_of(const am_array *ids) { return ids->shape.token; }

static const char *row_of(const am_array *ids, ptrdiff_t row)
{
    return am_token(ids, row / ids->shape.head, row % ids->shape.head, 0);
}

/* Converts ids of one row to int64; ids above its range become INT64_MAX. */
static void widen(const am_kernels *kernels, const am_array *ids, ptrdiff_t row, ptrdiff_t begin,
                  ptrdiff_t count, int64_t *wide)
{
    const ptrdiff_t stride = ids->stride.token;
    const am_array from = am_one_row(row_of(ids, row) + begin * stride, ids->type, stride, count);
    const bool fits = am_gather(kernels, AM_INT64, wide, count, &from);
    for (ptrdiff_t i = 0; i < count && !fits; i++) wide[i] = wide[i] < 0 ? INT64_MAX : wide[i];
}

/* --- Conversion: a row is divided into pieces unless its results depend on earlier tokens --- */

typedef struct {
    const am_kernels *kernels;
    const am_array *ids;
    ptrdiff_t row_pieces; /* tasks per row */
    am_id_result what;
    int32_t pad;
    int32_t *dst;
    atomic_ptrdiff_t large; /* the first index of an id that is too large, or PTRDIFF_MAX */
} row_job;

/* Converts ids to int32. Returns the index of the first one that does not fit, or `count`. */
static ptrdiff_t narrow(const row_job *job, const int64_t *wide, ptrdiff_t count, int32_t *dst)
{
    if (am_converter(AM_INT64, AM_INT32)(job->kernels, dst, wide, count)) return count;
    const int64_t lowest = job->what == AM_TO_INTEGERS ? INT32_MIN : INT64_MIN;
    ptrdiff_t i = 0;
    for (; i < count && wide[i] <= INT32_MAX && wide[i] >= lowest; i++)
        dst[i] = wide[i] < INT32_MIN ? INT32_MIN : (int32_t)wide[i];
    return i;
}

/* Copies contiguous int32 ids as they are. */
static am_status copy_piece(const row_job *job, ptrdiff_t row, ptrdiff_t begin, ptrdiff_t end, am_team *team)
{
    const am_array *ids = job->ids;
    const char *from = row_of(ids, row) + begin * (ptrdiff_t)sizeof(int32_t);
    memcpy(job->dst + row * tokens_of(ids) + begin, from, (size_t)(end - begin) * sizeof(int32_t));
    return am_checkpoint(team);
}

static am_status piece_task(void *arg, ptrdiff_t index, am_team *team)
{
    row_job *job = arg;
    const bool positions = job->what == AM_TO_POSITIONS;
    const ptrdiff_t tokens = tokens_of(job->ids), row = index / job->row_pieces;
    const ptrdiff_t first = index % job->row_pieces * TASK_TOKENS;
    /* A position depends on all earlier tokens of its row, so one task takes the whole row. */
    const ptrdiff_t end = positions ? tokens : am_min(first + TASK_TOKENS, tokens);
    if (!positions && job->ids->type == AM_INT32 && job->ids->stride.token == sizeof(int32_t))
        return copy_piece(job, row, first, end, team);
    int64_t previous = -1;
    int32_t position = 0;
    for (ptrdiff_t begin = first; begin < end; begin += BLOCK) {
        int64_t wide[BLOCK];
        ptrdiff_t count = am_min(BLOCK, end - begin);
        int32_t *dst = job->dst + row * tokens + begin;
        widen(job->kernels, job->ids, row, begin, count, wide);
        ptrdiff_t fit = narrow(job, wide, count, dst);
        if (fit < count) {
            am_lower_to(&job->large, row * tokens + begin + fit);
            return AM_OK;
        }
        for (ptrdiff_t i = 0; i < count && positions; i++) {
            int64_t id = wide[i];
            if (id == previous && position == INT32_MAX) return AM_OVERFLOW;
            position = id == previous ? position + 1 : 0;
            previous = id;
            dst[i] = id < 0 ? job->pad : position;
        }
        am_status status = am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

am_status am_convert_ids(const am_context *context, const am_array *ids, am_id_result what, int32_t pad,
                         int32_t *dst, ptrdiff_t *large)
{
    const ptrdiff_t tokens = tokens_of(ids), rows = tokens > 0 ? rows_of(ids) : 0,
                    pieces = what == AM_TO_POSITIONS ? 1 : am_max(1, am_ceil_div(tokens, TASK_TOKENS));
    row_job job = {
        .kernels = context->kernels, .ids = ids, .row_pieces = pieces, .what = what, .pad = pad, .dst = dst};
    atomic_init(&job.large, PTRDIFF_MAX);
    am_status status = am_parallel(context, rows * pieces, TASK_TOKENS / am_max(tokens, 1), piece_task, &job);
    *large = atomic_load(&job.large) == PTRDIFF_MAX ? -1 : atomic_load(&job.large);
    return status;
}

typedef struct {
    am_expand_bits *expand;
    const int32_t *ids;
    char *dst;
    ptrdiff_t count, size;
    uint64_t one;
} valid_job;

static am_status valid_task(void *arg, ptrdiff_t index, am_team *team)
{
    const valid_job *job = arg;
    ptrdiff_t end = am_min((index + 1) * TASK_TOKENS, job->count);
    for (ptrdiff_t begin = index * TASK_TOKENS; begin < end; begin += WORD) {
        uint64_t bits = 0;
        ptrdiff_t count = am_min(WORD, end - begin);
        for (ptrdiff_t i = 0; i < count; i++) bits |= (uint64_t)(job->ids[begin + i] >= 0) << i;
        job->expand(job->dst + begin * job->size, bits, count, job->one, 0);
    }
    return am_checkpoint(team);
}

am_status am_mark_valid(const am_context *context, const int32_t *ids, ptrdiff_t count, void *dst,
                        ptrdiff_t size, uint64_t one)
{
    valid_job job = {.ids = ids, .dst = dst, .count = count, .size = size, .one = one};
    job.expand = context->kernels->masks.expand_bits[am_lane_of_size(size)];
    return am_parallel(context, am_ceil_div(count, TASK_TOKENS), 1, valid_task, &job);
}

/* --- Counts --- */

typedef struct {
    const am_kernels *kernels;
    const am_array *ids;
    ptrdiff_t limit, *counts;
    ptrdiff_t capacity, segments;
    ptrdiff_t *large;
} count_job;

/* calloc zeroes the memory, and pages where no id is counted take up none. */
static am_status grow(count_job *job, ptrdiff_t segments)
{
    if (segments > PTRDIFF_MAX / 16) return AM_NO_MEMORY;
    ptrdiff_t capacity = am_max(job->capacity, 128);
    while (capacity < segments) capacity *= 2;
    ptrdiff_t *counts = calloc((size_t)capacity, sizeof *counts);
    if (!counts) return AM_NO_MEMORY;
    if (job->segments) memcpy(counts, job->counts, (size_t)job->segments * sizeof *counts);
    free(job->counts);
    job->counts = counts;
    job->capacity = capacity;
    return AM_OK;
}

/* Equal ids of packed sequences follow each other, so a whole span is counted at once. */
static am_status count_block(count_job *job, const int64_t *ids, ptrdiff_t count, ptrdiff_t index)
{
    for (ptrdiff_t i = 0, end; i < count; i = end) {
        int64_t id = ids[i];
        for (end = i + 1; end < count && ids[end] == id;) end++;
        if (id < 0) continue;
        if (id >= job->limit) {
            *job->large = index + i;
            return AM_OK;
        }
        if (id >= job->capacity) {
            am_status status = id < PTRDIFF_MAX ? grow(job, (ptrdiff_t)id + 1) : AM_NO_MEMORY;
            if (status != AM_OK) return status;
        }
        if (id >= job->segments) job->segments = (ptrdiff_t)id + 1;
        job->counts[id] += end - i;
    }
    return AM_OK;
}

static am_status count_task(void *arg, ptrdiff_t index, am_team *team)
{
    (void)index; /* there is only one task */
    count_job *job = arg;
    ptrdiff_t tokens = tokens_of(job->ids);
    for (ptrdiff_t row = 0; tokens > 0 && row < rows_of(job->ids) && *job->large < 0; row++) {
        for (ptrdiff_t begin = 0; begin < tokens && *job->large < 0; begin += BLOCK) {
            int64_t wide[BLOCK];
            ptrdiff_t count = am_min(BLOCK, tokens - begin);
            widen(job->kernels, job->ids, row, begin, count, wide);
            am_status status = count_block(job, wide, count, row * tokens + begin);
            if (status == AM_OK) status = am_checkpoint(team);
            if (status != AM_OK) return status;
        }
    }
    return AM_OK;
}

am_status am_count_segments(const am_context *context, const am_array *ids, ptrdiff_t limit,
                            ptrdiff_t **counts, ptrdiff_t *segments, ptrdiff_t *large)
{
    *large = -1;
    count_job job = {.kernels = context->kernels, .ids = ids, .limit = limit, .large = large};
    am_status status = am_parallel(context, 1, 1, count_task, &job);
    if (status != AM_OK) {
        free(job.counts);
        return status;
    }
    *counts = job.counts;
    *segments = job.segments;
    return AM_OK;
}

/* --- Numbers of tokens --- */

enum { FIRST_SPANS = 64, DIGIT = 8, DIGITS = 1 << DIGIT };

/* A span of equal ids, or of padding, which has the largest id and so comes last. */
typedef struct {
    uint32_t id;
    bool of_keys;
    ptrdiff_t begin, length;
} id_span;

typedef struct {
    id_span *spans;
    ptrdiff_t count, capacity;
    bool ordered; /* by id */
} span_list;

static am_status push(span_list *list, id_span span)
{
    if (list->count == list->capacity) {
        const ptrdiff_t capacity = am_max(2 * list->capacity, FIRST_SPANS);
        id_span *spans = realloc(list->spans, (size_t)capacity * sizeof *spans);
        if (!spans) return AM_NO_MEMORY;
        list->spans = spans;
        list->capacity = capacity;
    }
    list->ordered &= list->count == 0 || list->spans[list->count - 1].id <= span.id;
    list->spans[list->count++] = span;
    return AM_OK;
}

/* Adds the spans of one row of ids. */
static am_status find_spans(const am_array *ids, ptrdiff_t row, bool of_keys, span_list *list, am_team *team)
{
    const char *const from = row_of(ids, row);
    const ptrdiff_t stride = ids->stride.token, tokens = tokens_of(ids), first = list->count;
    for (ptrdiff_t i = 0; i < tokens;) {
        const int32_t id = *(const int32_t *)(from + i * stride);
        const ptrdiff_t begin = i, end = am_min(am_floor_to(i, TASK_TOKENS) + TASK_TOKENS, tokens);
        do {
            i++;
        } while (i < end && *(const int32_t *)(from + i * stride) == id);
        const id_span span = {.id = id < 0 ? UINT32_MAX : (uint32_t)id,
                              .of_keys = of_keys,
                              .begin = begin,
                              .length = i - begin};
        am_status status = AM_OK;
        if (list->count > first && list->spans[list->count - 1].id == span.id)
            list->spans[list->count - 1].length += span.length;
        else
            status = push(list, span);
        if (status == AM_OK && i == end) status = am_checkpoint(team);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

/* Sorts spans by id, digit by digit; those of an id stay in order. */
static am_status sort_spans(span_list *list, am_team *team)
{
    am_status status = AM_OK;
    if (list->ordered) return AM_OK;
    id_span *other = malloc((size_t)list->count * sizeof *other);
    if (!other) return AM_NO_MEMORY;
    for (int shift = 0; shift < 32 && status == AM_OK; shift += DIGIT) {
        ptrdiff_t places[DIGITS] = {0}, sum = 0;
        for (ptrdiff_t i = 0; i < list->count; i++) places[list->spans[i].id >> shift & (DIGITS - 1)]++;
        if (places[list->spans[0].id >> shift & (DIGITS - 1)] == list->count)
            continue; /* all have this digit */
        for (int digit = 0; digit < DIGITS; digit++) {
            const ptrdiff_t count = places[digit];
            places[digit] = sum;
            sum += count;
        }
        for (ptrdiff_t i = 0; i < list->count; i++)
            other[places[list->spans[i].id >> shift & (DIGITS - 1)]++] = list->spans[i];
        id_span *sorted = other;
        other = list->spans;
        list->spans = sorted;
        status = am_checkpoint(team);
    }
    free(other);
    return status;
}

/* Where the numbers of a row go, and its next chunk. */
typedef struct {
    int32_t *dst[2];
    ptrdiff_t shift, chunk;
} numbered_row;

typedef struct {
    const am_numbering *numbering;
    atomic_bool moved;
} number_job;

static am_status count_up(const numbered_row *row, const id_span *span, ptrdiff_t first)
{
    int32_t *dst = row->dst[0] + span->begin;
    if (first + span->length - 1 > INT32_MAX) return AM_OVERFLOW;
    for (ptrdiff_t i = 0; i < span->length; i++) dst[i] = (int32_t)(first + i);
    return AM_OK;
}

/* Writes the chunks of a span, whose segment has `count` of them. */
static void write_chunks(const numbered_row *row, const id_span *span, ptrdiff_t size, ptrdiff_t count)
{
    const ptrdiff_t shift = span->of_keys ? 0 : row->shift, before = am_floor_to(shift, size);
    int32_t *dst = row->dst[span->of_keys] + span->begin;
    ptrdiff_t chunk = before / size, end = before + size - shift;
    for (ptrdiff_t i = 0; i < span->length; chunk++, end += size) {
        const int32_t number = chunk >= 0 && chunk < count ? (int32_t)(row->chunk + chunk) : -1;
        for (const ptrdiff_t stop = am_min(end, span->length); i < stop; i++) dst[i] = number;
    }
}

static am_status number_chunks(numbered_row *row, const id_span *spans, ptrdiff_t count, ptrdiff_t size)
{
    ptrdiff_t chunks = 0;
    for (ptrdiff_t i = 0; i < count; i++) chunks = am_max(chunks, am_ceil_div(spans[i].length, size));
    if (row->chunk + chunks - 1 > INT32_MAX) return AM_OVERFLOW;
    for (ptrdiff_t i = 0; i < count; i++) write_chunks(row, &spans[i], size, chunks);
    row->chunk += chunks;
    return AM_OK;
}

/* The first or last token of consecutive spans. */
static ptrdiff_t token_of(am_token_number what, const id_span *spans, ptrdiff_t count)
{
    return what == AM_SAME_FIRST_TOKEN ? spans->begin : spans[count - 1].begin + spans[count - 1].length - 1;
}

/* Numbers the tokens of an id, of which there are so many spans: those of queries first, each side's in
 * order. */
static am_status number_segment(number_job *job, numbered_row *row, const id_span *spans, ptrdiff_t count)
{
    const am_token_number what = job->numbering->what;
    const bool padding = spans->id == UINT32_MAX, in_segment = what == AM_EARLIER_TOKENS || what == AM_CHUNKS;
    if (padding && in_segment) {
        for (ptrdiff_t i = 0; i < count; i++)
            memset(row->dst[spans[i].of_keys] + spans[i].begin, 0xff,
                   (size_t)spans[i].length * sizeof(int32_t));
        return AM_OK;
    }
    if (what == AM_CHUNKS) return number_chunks(row, spans, count, job->numbering->size);
    ptrdiff_t queries = 0, earlier = 0, moved = 0;
    while (queries < count && !spans[queries].of_keys) queries++;
    if (!in_segment && !padding && queries > 0 && queries < count)
        moved = token_of(what, spans + queries, count - queries) - token_of(what, spans, queries);
    if (moved) atomic_store(&job->moved, true);
    for (ptrdiff_t i = 0; i < queries; earlier += spans[i++].length) {
        am_status status = count_up(row, &spans[i], in_segment ? earlier : spans[i].begin + moved);
        if (status != AM_OK) return status;
    }
    return AM_OK;
}

static am_status number_row(number_job *job, ptrdiff_t index, span_list *list, am_team *team)
{
    const am_numbering *n = job->numbering;
    const char *shift = n->shifts + index / n->ids[0].shape.head * n->shift_stride;
    numbered_row row = {.shift = (ptrdiff_t)*(const int64_t *)shift, .chunk = 1};
    am_status status = AM_OK;
    for (int side = 0; side < 2 && status == AM_OK; side++) {
        if (n->dst[side]) row.dst[side] = n->dst[side] + index * tokens_of(&n->ids[side]);
        status = find_spans(&n->ids[side], index, side == 1, list, team);
    }
    if (status == AM_OK) status = sort_spans(list, team);
    for (ptrdiff_t i = 0, end; i < list->count && status == AM_OK; i = end) {
        for (end = i + 1; end < list->count && list->spans[end].id == list->spans[i].id;) end++;
        status = number_segment(job, &row, list->spans + i, end - i);
        if (status == AM_OK && i / BLOCK != end / BLOCK) status = am_checkpoint(team);
    }
    return status;
}

static am_status number_task(void *arg, ptrdiff_t index, am_team *team)
{
    span_list list = {.ordered = true};
    const am_status status = number_row(arg, index, &list, team);
    free(list.spans);
    return status;
}

am_status am_number_tokens(const am_context *context, am_numbering *numbering)
{
    number_job job = {.numbering = numbering};
    const ptrdiff_t tokens = tokens_of(&numbering->ids[0]) + tokens_of(&numbering->ids[1]);
    const ptrdiff_t rows = tokens > 0 ? rows_of(&numbering->ids[0]) : 0;
    atomic_init(&job.moved, false);
    am_status status =
        am_parallel_bytes(context, rows, 2 * (ptrdiff_t)sizeof(int32_t) * tokens, number_task, &job);
    numbering->moved = atomic_load(&job.moved);
    return status;
}
