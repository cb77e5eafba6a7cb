/* terms.c – the logit terms of a call, as all kinds have them. */
#include "core/attention/terms/terms.h"

#include "core/runtime/sizes.h"
#include "core/attention/plan/partition.h"
#include "core/arrays/convert.h"
#include "core/arrays/packed.h"

am_terms_found am_find_terms(const am_attn *attn)
{
    am_terms_found found = {0};
    double sum = 0;
    for (int i = 0; i < attn->terms.count; i++) {
        const am_logit_term *term = &attn->terms.list[i];
        const am_logit_row *row = am_row_of_term(term);
        switch (row->acts) {
        case AM_ADDS_PAIRS: found.bias = term; break;
        case AM_ADDS_BY_POINT: found.points = term; break;
        case AM_ADDS_BY_DISTANCE: found.by_distance = true; break;
        case AM_ADDS_BY_KEY: found.by_key = true; break;
        case AM_CAPS: found.cap = term; break;
        case AM_DROPS: found.dropout = term; break;
        case AM_SINKS: found.sinks = term; break;
        }
        found.nearest_first |= row->first == AM_NEAREST_FIRST;
        sum += row->bound(attn, term);
    }
    found.small = sum < 1e30; /* float32 has room for it times log2 e */
    return found;
}

ptrdiff_t am_row_of_query(const am_places *places, ptrdiff_t b, ptrdiff_t q)
{
    return places->starts ? am_sequence_of(places->starts, places->sequences, q) : b;
}

am_range am_keys_of_row(const am_attn *attn, ptrdiff_t row)
{
    const ptrdiff_t *starts = attn->pages.starts;
    return starts ? (am_range){starts[row], starts[row + 1]} : (am_range){0, attn->keys};
}

am_range am_keys_of_query(const am_attn *attn, ptrdiff_t b, ptrdiff_t q)
{
    return am_keys_of_row(attn, attn->pages.starts ? am_row_of_query(&attn->terms.places, b, q) : 0);
}

ptrdiff_t am_first_key_of_row(const am_attn *attn, ptrdiff_t row)
{
    const ptrdiff_t *starts = attn->pages.starts ? attn->pages.starts : attn->terms.places.key_starts;
    return starts ? starts[row] : 0;
}

am_bias_grid am_bias_grid_of(const am_logit_term *term)
{
    const ptrdiff_t stride = term->integer, rows = term->array.shape.channel / stride;
    return (am_bias_grid){.height = (rows + 1) / 2, .width = (stride + 1) / 2, .stride = stride};
}

/* The queries and the keys of a batch row or sequence. */
static void find_points(const am_attn *attn, ptrdiff_t row, am_row_points points[2])
{
    const am_places *places = &attn->terms.places;
    const am_pages *pages = &attn->pages;
    const ptrdiff_t *starts = places->starts, *key_starts = places->key_starts,
                    first = starts ? starts[row] : 0, end = starts ? starts[row + 1] : attn->queries,
                    keys = pages->lengths ? pages->lengths[row]
                           : key_starts   ? key_starts[row + 1] - key_starts[row]
                                          : attn->keys,
                    point = am_point_of_query(attn, row, first);
    points[0] = (am_row_points){row, true, {point, point + end - first}};
    points[1] = (am_row_points){row, false, {0, keys}};
}

bool am_find_beyond_grid(const am_attn *attn, const am_logit_term *term, am_row_points *found)
{
    const am_places *places = &attn->terms.places;
    const am_bias_grid grid = am_bias_grid_of(term);
    const ptrdiff_t rows = places->starts ? places->sequences : attn->batch;
    am_row_points points[2];
    for (ptrdiff_t row = 0; row < rows; row++) {
        find_points(attn, row, points);
        if (am_length(points[0].points) == 0 || am_length(points[1].points) == 0) continue;
        for (int i = 0; i < 2; i++) {
            *found = points[i];
            if (found->points.begin < 0 || found->points.end > grid.height * grid.width) return true;
        }
    }
    return false;
}

/* Whether the table of a head is that of a grid. */
static bool is_table(const am_logit_term *term)
{
    const ptrdiff_t length = term->array.shape.channel;
    return term->integer > 0 && term->integer % 2 == 1 && length % term->integer == 0 && length % 2 == 1;
}

am_line am_line_of(const am_attn *attn, const am_logit_term *term, ptrdiff_t row, ptrdiff_t head,
                   ptrdiff_t at)
{
    const am_logit_row *kind = am_row_of_term(term);
    const am_array *array = &term->array;
    if (kind->axes[1] == AM_AXIS_KV) head /= attn->heads / attn->kv_heads;
    if (kind->acts == AM_ADDS_BY_KEY) at -= am_keys_of_row(attn, row).begin;
    if (kind->acts == AM_ADDS_BY_KEY && kind->axes[3] != AM_AXIS_K) at += attn->terms.places.first_key;
    return (am_line){
        .term = term,
        .numbers = (const double *)am_token(array, row, head, 0),
        .length = term->array.shape.channel,
        .factor = 1,
        .first = at,
        .count = 1,
    };
}

double *am_line_sums_in(am_line_sums *s, am_range wanted)
{
    if (s->filled.begin == s->filled.end) s->filled = (am_range){wanted.begin, wanted.begin};
    for (; s->filled.end < wanted.end; s->filled.end++) s->sums[s->filled.end] = 0;
    for (; s->filled.begin > wanted.begin; s->filled.begin--) s->sums[s->filled.begin - 1] = 0;
    return s->sums;
}

/* Whether so many keys are those of the mask; for sequences in pages, as many as the longest has, or more. */
static bool is_key_count(const am_attn *attn, ptrdiff_t length)
{
    const am_pages *pages = &attn->pages;
    if (!pages->table) return length == attn->keys;
    if (!pages->starts) return length >= attn->keys;
    ptrdiff_t longest = 0;
    for (ptrdiff_t s = 0; s < pages->sequences; s++) longest = am_max(longest, pages->lengths[s]);
    return length >= longest;
}

/* Whether an axis has the length that its letter stands for, or 1. Along the batch it may also divide that:
 * then neighbouring batch rows share a row of the array. */
static bool is_length(const am_attn *attn, am_axis axis, ptrdiff_t length)
{
    const am_places *places = &attn->terms.places;
    if (length == 1) return true;
    switch (axis) {
    case AM_AXIS_B: return length == attn->batch || (length > 0 && attn->batch % length == 0);
    case AM_AXIS_R: return length == (places->starts ? places->sequences : attn->batch);
    case AM_AXIS_H: return length == attn->heads;
    case AM_AXIS_KV: return length == attn->kv_heads;
    case AM_AXIS_Q: return length == attn->queries;
    case AM_AXIS_K: return is_key_count(attn, length);
    case AM_AXIS_N: return length > 0;
    case AM_AXIS_1:
    case AM_NO_AXIS: return false;
    }
    return false;
}

bool am_term_fits(const am_attn *attn, const am_logit_term *term)
{
    const am_logit_row *row = am_row_of_term(term);
    const am_array *array = &term->array;
    if (row->acts == AM_CAPS && !(term->number > 0)) return false;
    if (row->acts == AM_DROPS && !(term->number > 0 && term->number < 1)) return false;
    if (row->axes[0] == AM_NO_AXIS) return !array->data;
    const am_dtype type = row->acts == AM_ADDS_BY_POINT ? am_wide_type(attn->q.type) : AM_FLOAT64;
    const bool fits = row->acts == AM_ADDS_PAIRS
                          ? am_is_floating(array->type)
                          : array->type == type && (array->shape.channel == 1 ||
                                                    array->stride.channel == (ptrdiff_t)am_size_of(type));
    if (!array->data || !fits) return false;
    const ptrdiff_t shape[] = {array->shape.batch, array->shape.head, array->shape.token,
                               array->shape.channel};
    for (int axis = 0; axis < 4; axis++) {
        if (!is_length(attn, row->axes[axis], shape[axis])) return false;
    }
    const am_places *places = &attn->terms.places;
    if (row->acts == AM_ADDS_BY_POINT && (!places->offsets || !is_table(term))) return false;
    return row->acts != AM_ADDS_BY_DISTANCE || (places->offsets && am_abs(term->integer) <= AM_FAR);
}
