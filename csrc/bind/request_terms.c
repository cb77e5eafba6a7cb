/* request_terms.c – the terms of the logits, and where queries are among the keys. */
#include <math.h>
#include <string.h>

#include "bind/request.h"
#include "core/attention/terms/terms.h"
#include "core/runtime/sizes.h"
#include "core/arrays/convert.h"

static const char *name_of(const am_logit_term *term) { return am_words_of_door.terms[term->kind]; }

/* Says what a term must be, by its row. */
static bool reject(am_request *r, const am_logit_term *term, const am_term_given *given)
{
    static const char *const lengths[] = {
        [AM_AXIS_1] = "1",    [AM_AXIS_B] = "B",  [AM_AXIS_R] = "B or N", [AM_AXIS_H] = "H",
        [AM_AXIS_KV] = "Hkv", [AM_AXIS_Q] = "Tq", [AM_AXIS_K] = "Tk",     [AM_AXIS_N] = "L",
    };
    const am_logit_row *row = am_row_of_term(term);
    const am_axis *axes = row->axes;
    const am_view *got = given->array.kind == AM_ARRAY ? &given->array.view : NULL;
    const char *above = row->acts == AM_DROPS ? "between 0 and 1" : "above 0";
    if (axes[0] == AM_NO_AXIS && got)
        return am_refuse(r, AM_WRONG_VALUE, got, "%s must be a number %s", name_of(term), above);
    if (axes[0] == AM_NO_AXIS)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be a number %s, got %g", name_of(term), above,
                         given->number);
    return am_refuse(r, AM_WRONG_VALUE, got,
                     "%s must be an array [%s, %s, %s, %s] of %s, axes 1 if shared%s%s", name_of(term),
                     lengths[axes[0]], lengths[axes[1]], lengths[axes[2]], lengths[axes[3]],
                     row->acts == AM_ADDS_PAIRS ? "floating-point numbers" : "float32 or float64",
                     am_abs(term->integer) > AM_FAR  ? ", and its integer from -2**60 to 2**60"
                     : row->acts == AM_ADDS_BY_POINT ? ", with an odd integer that divides its odd length L"
                                                     : "",
                     got ? "" : ", got no array");
}

/* Copies numbers of four axes as contiguous ones of a type. */
static bool copy_numbers(am_request *r, am_dtype type, am_view *v)
{
    const ptrdiff_t size = (ptrdiff_t)am_size_of(type);
    const ptrdiff_t rows = am_product(v->shape[0], v->shape[1], v->shape[2]), count = v->shape[3];
    char *to = am_keep(r, am_product(rows, count, 1) + AM_POINTS_SPARE, (size_t)size), *next = to;
    for (ptrdiff_t row = 0; to && row < rows; row++) {
        const char *from = v->data + row % v->shape[2] * v->stride[2] +
                           row / v->shape[2] % v->shape[1] * v->stride[1] +
                           row / v->shape[2] / v->shape[1] * v->stride[0];
        for (ptrdiff_t i = 0; i < count; i++, from += v->stride[3], next += size) {
            const double number =
                v->type == AM_FLOAT64 ? *(const double *)from : (double)*(const float *)from;
            if (type == AM_FLOAT64)
                *(double *)next = number;
            else
                *(float *)next = (float)number;
        }
    }
    v->data = to, v->type = type;
    ptrdiff_t stride = size;
    for (int axis = 3; axis >= 0; stride *= v->shape[axis--]) v->stride[axis] = stride;
    return to;
}

/* The array of a term: a bias in place, a grid bias in the type of the arithmetic, others as doubles that are
 * contiguous along the last axis. */
static bool read_array(am_request *r, const am_term_given *given, am_logit_term *term)
{
    const am_logit_row *row = am_row_of_term(term);
    am_view v = given->array.view;
    if (given->array.kind != AM_ARRAY) return true;
    if (v.axes != 4) return reject(r, term, given);
    if (row->acts != AM_ADDS_PAIRS) {
        if (v.type != AM_FLOAT32 && v.type != AM_FLOAT64) return reject(r, term, given);
        const bool by_point = row->acts == AM_ADDS_BY_POINT,
                   in_place = !by_point && v.type == AM_FLOAT64 &&
                              (v.shape[3] == 1 || v.stride[3] == sizeof(double));
        const am_dtype type = by_point ? am_wide_type(r->attn.q.type) : AM_FLOAT64;
        if (!in_place && !copy_numbers(r, type, &v)) return false;
    }
    v = am_shared(v);
    term->array = am_array_of(&v, AM_HEADS_FIRST);
    return true;
}

static bool read_integer(am_request *r, const am_operand *o, am_logit_term *term)
{
    term->integer = o->number;
    if (o->kind != AM_ARRAY) return true;
    ptrdiff_t number;
    if (o->view.axes > 1 || o->view.shape[0] != 1 || !am_is_integer(o->view.type) ||
        am_widen(&o->view, &number) >= 0)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must come with an integer below 2**63", name_of(term));
    term->integer = number;
    return true;
}

static bool is_finite(am_request *r, const am_logit_term *term)
{
    const am_array *array = &term->array;
    for (ptrdiff_t row = 0; row < term->array.shape.batch; row++) {
        for (ptrdiff_t head = 0; head < term->array.shape.head; head++) {
            const double *number = (const double *)am_token(array, row, head, 0);
            for (ptrdiff_t i = 0; i < term->array.shape.channel; i++) {
                if (!isfinite(number[i]))
                    return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be finite, got %g", name_of(term),
                                     number[i]);
            }
        }
    }
    return true;
}

/* Refuses a grid that has too few points. */
static bool check_grid(am_request *r, const am_logit_term *term)
{
    const am_bias_grid grid = am_bias_grid_of(term);
    am_row_points found;
    return !am_find_beyond_grid(&r->attn, term, &found) ||
           am_refuse(r, AM_WRONG_VALUE, NULL,
                     "%s must have a point of its grid for each query and key, got %td × %td points, and %s "
                     "from %td to %td in row or sequence %td",
                     name_of(term), grid.height, grid.width, found.are_queries ? "queries" : "keys",
                     found.points.begin, found.points.end - 1, found.row);
}

bool am_read_term(am_request *r, const am_term_given *given)
{
    am_attn *attn = &r->attn;
    am_terms *terms = &attn->terms;
    am_logit_term term = {.kind = given->kind, .number = given->number};
    for (int i = 0; i < terms->count; i++) {
        if (terms->list[i].kind == term.kind)
            return am_refuse(r, AM_WRONG_VALUE, NULL, "%s must be given once, got it again", name_of(&term));
    }
    if (!read_integer(r, &given->integer, &term) || !read_array(r, given, &term)) return false;
    if (!am_term_fits(attn, &term)) return reject(r, &term, given);
    if (am_row_of_term(&term)->finite && term.array.data && !is_finite(r, &term)) return false;
    if (am_row_of_term(&term)->acts == AM_ADDS_BY_POINT && !check_grid(r, &term)) return false;
    terms->list[terms->count++] = term;
    const ptrdiff_t keys = terms->places.first_key + attn->keys;
    return am_row_of_term(&term)->acts != AM_DROPS || keys <= AM_MOST_KEYS_OF_DROPOUT ||
           am_refuse(r, AM_WRONG_VALUE, NULL,
                     "%s: dropout takes up to 2**32 keys, got %td; compute without it", name_of(&term), keys);
}

bool am_read_places(am_request *r, const am_operand *starts, const am_operand *key_starts,
                    const am_operand *offsets)
{
    const am_attn *attn = &r->attn;
    am_places *places = &r->attn.terms.places;
    ptrdiff_t rows = attn->batch;
    if (starts->kind == AM_ARRAY) {
        rows = -1;
        places->starts = am_read_starts_of(r, "cum_seqlens_q", starts, attn->queries, &rows);
        if (!places->starts) return false;
        if (rows < 1 || attn->batch != 1)
            return am_refuse(r, AM_WRONG_VALUE, NULL, "sequences must be those of one batch row");
        places->sequences = rows;
        if (key_starts->kind == AM_ARRAY) {
            places->key_starts = am_read_starts_of(r, "cum_seqlens_k", key_starts, attn->keys, &rows);
            if (!places->key_starts) return false;
        }
    }
    places->offsets = am_read_integers(r, offsets, rows, 0);
    places->offset_stride = 1;
    return places->offsets;
}
