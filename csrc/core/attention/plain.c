/* plain.c – all of attention in plain C. Read this first: the rest of core/attention computes the same by
 * tiles. The level `plain` runs it, and tests compare the other levels with it.
 *
 * Query q of a head, and the keys k that it sees, each with its value v:
 *
 *     logit = q·k scale + added terms,  then cap tanh(logit / cap)
 *     p = e^(logit - highest),   sum = Σ p + Σ e^(sink - highest),   lse = highest + log sum
 *     out = Σ p v / sum
 *
 * Backward, with p = e^(logit - lse):
 *
 *     ds = p (d_out·v - d_out·out + d_lse),  times the slope of the cap
 *     d_v += p d_out,   d_term += ds,   d_q += ds scale k,   d_k += ds scale q
 *
 * The tangent of a result, with that of each logit, dl = (dq·k + q·dk) scale + dbias, times the same slope:
 *
 *     d_lse = Σ p dl,   d_out = Σ p ((dl - d_lse) v + dv)
 *
 * The tangents of gradients, where d_out and d_lse stay as they are:
 *
 *     dp = p (dl - d_lse),   dds = dp (d_out·v - …) + p (d_out·dv - d_out·(tangent of out)),
 *     of d_v += dp d_out,   of d_q += scale (dds k + ds dk),   of d_k += scale (dds q + ds dq)
 *
 * Dropout makes p 0 where it multiplies v or d_out, and d_out·v, or else divides them by 1 - dropout. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/arrays/convert.h"
#include "core/attention/base.h"
#include "core/attention/terms/logit_terms.h"
#include "core/cache/formats.h"
#include "core/arrays/packed.h"
#include "kernels/vec/half.h"

typedef struct {
    const am_attn *f;
    const am_attn_gradients *g; /* backward; NULL: not that */
    const am_attn_weights *w;   /* what weights tell; NULL: not that */
    const am_attn_tangents *t;  /* tangents, of gradients if there are some; NULL: not that */
    const am_kernels *kernels;
    am_terms_found terms;
    double *d_bias; /* sums of the gradient of the bias */
    am_workspaces workspaces;
} plain;

/* A query of a head. */
typedef struct {
    ptrdiff_t b, head, kv_head, q;
    double *query, *out, *number; /* number: a key or a value */
    double *logits, *slopes;      /* of each key; slopes are those of the cap */
    uint64_t *live, *kept;        /* a bit for each key */
    double highest, sum, own;     /* own: the part of the sum that is of keys */
    double equal;                 /* how many logits and sinks are as great as the highest */
    double *d_out, *d_q;          /* gradients */
    struct {
        double *q, *out, *number; /* number: of a key or a value */
        double lse;
    } tangent;
    double *d_k, *d_v; /* of all rows of the key head: [keys][head_dim], [keys][value_dim] */
} row;

/* --- Numbers in memory --- */

static double read_number(am_dtype type, const char *from)
{
    double wide;
    float number;
    uint16_t half;
    switch (type) {
    case AM_FLOAT64: return memcpy(&wide, from, sizeof wide), wide;
    case AM_FLOAT32: return memcpy(&number, from, sizeof number), (double)number;
    case AM_FLOAT16: return memcpy(&half, from, sizeof half), (double)am_widen_one_f16(half);
    case AM_BFLOAT16: return memcpy(&half, from, sizeof half), (double)am_widen_one_bf16(half);
    default: return am_kv_format_of(type)->widen(&number, from, NULL, 0, 1), (double)number;
    }
}

static void write_number(const plain *p, am_dtype type, char *to, double x)
{
    const float number = (float)x;
    if (type == AM_FLOAT64)
        memcpy(to, &x, sizeof x);
    else
        am_convert(p->kernels, type, to, AM_FLOAT32, &number, 1);
}

static void read_row(const am_array *t, const char *from, ptrdiff_t count, double *to)
{
    for (ptrdiff_t i = 0; i < count; i++) to[i] = read_number(t->type, from + i * t->stride.channel);
}

static void write_row(const plain *p, const am_array *t, const char *to, ptrdiff_t count, const double *from)
{
    for (ptrdiff_t i = 0; i < count; i++)
        write_number(p, t->type, (char *)to + i * t->stride.channel, from[i]);
}

/* Where a key or value is, or its scale: in its page, if there are pages. */
static const char *key_at(const am_attn *f, const am_array *t, const row *r, ptrdiff_t k)
{
    const am_pages *x = &f->pages;
    if (!x->table) return am_token(t, r->b, r->kv_head, k);
    const ptrdiff_t s = x->starts ? am_sequence_of(x->starts, x->sequences, k) : r->b,
                    token = k - (x->starts ? x->starts[s] : 0);
    return am_token(t, x->table[s * x->table_stride + token / x->size], r->kv_head, token % x->size);
}

/* Reads a key or a value, times its scales. */
static const double *read_key(const am_attn *f, const row *r, bool value, ptrdiff_t k)
{
    const am_array *t = value ? &f->v : &f->k;
    const am_kv_scales *s = value ? &f->v_scales : &f->k_scales;
    const ptrdiff_t count = value ? f->value_dim : f->head_dim,
                    stride = s->by_channel ? s->array.stride.channel : 0;
    if (s->group) {
        const am_kv_widening w = am_kv_widening_of(am_kv_format_of(t->type)->widen, sizeof(float), t, s);
        am_kv_widen_row(&w, (char *)r->number, key_at(f, t, r, k), key_at(f, &s->array, r, k), count);
        for (ptrdiff_t i = count; i-- > 0;) /* in place */
            r->number[i] = read_number(AM_FLOAT32, (const char *)r->number + i * (ptrdiff_t)sizeof(float));
        return r->number;
    }
    read_row(t, key_at(f, t, r, k), count, r->number);
    if (!s->array.data) return r->number;
    const char *at = s->by_channel ? am_token(&s->array, 0, r->kv_head, 0) : key_at(f, &s->array, r, k);
    for (ptrdiff_t i = 0; i < count; i++) r->number[i] *= read_number(AM_FLOAT32, at + i * stride);
    return r->number;
}

static double dot(const double *a, const double *b, ptrdiff_t count)
{
    double sum = 0;
    for (ptrdiff_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

static void add(double *to, double factor, const double *from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) to[i] += factor * from[i];
}

/* --- Logits --- */

static bool has(const uint64_t *bits, ptrdiff_t k) { return bits[k / 64] >> k % 64 & 1; }

/* The number that a term adds along a line to one pair. */
static am_line line_of(const am_attn *f, const am_logit_term *term, const row *r, ptrdiff_t k)
{
    const am_places *places = &f->terms.places;
    const ptrdiff_t x = am_row_of_query(places, r->b, r->q);
    const bool by_key = am_row_of_term(term)->acts == AM_ADDS_BY_KEY;
    return am_line_of(f, term, x, r->head, by_key ? k : k - r->q - am_offset_of_row(places, x));
}

/* Where a term by point has the number of a pair. */
static ptrdiff_t point_index_of(const am_attn *f, const am_logit_term *term, const row *r, ptrdiff_t k)
{
    const am_bias_grid grid = am_bias_grid_of(term);
    const ptrdiff_t x = am_row_of_query(&f->terms.places, r->b, r->q);
    return am_point_index(&grid, am_point_of_query(f, x, r->q), k - am_first_key_of_row(f, x));
}

/* What is added to the product of a pair. -INFINITY makes it dead. */
static double terms_of(const am_attn *f, const row *r, ptrdiff_t k)
{
    double sum = 0;
    for (int i = 0; i < f->terms.count && sum != -INFINITY; i++) {
        const am_logit_term *term = &f->terms.list[i];
        const am_array *array = &term->array;
        if (am_row_of_term(term)->acts == AM_ADDS_PAIRS) {
            const ptrdiff_t key = k - am_keys_of_query(f, r->b, r->q).begin;
            const ptrdiff_t b = r->b / am_bias_sharers(f, term);
            sum += read_number(array->type, am_token(array, b, r->head, r->q) + key * array->stride.channel);
        } else if (am_row_of_term(term)->acts == AM_ADDS_BY_POINT) {
            sum += read_number(array->type, am_token(array, 0, r->head, 0) +
                                                point_index_of(f, term, r, k) * array->stride.channel);
        } else if (am_row_of_term(term)->add) {
            const am_line line = line_of(f, term, r, k);
            am_row_of_term(term)->add(&line, &sum);
        }
    }
    return sum;
}

static double sink_of(const plain *p, const row *r, ptrdiff_t i)
{
    return am_sink_logit(p->terms.sinks, p->f->q.type == AM_FLOAT64, r->head, i);
}

static double power_of(double logit, double reference)
{
    return logit == -INFINITY ? 0 : exp(logit - reference);
}

/* Finds the keys that a query sees and that dropout keeps, its logits and their sum. */
static void find_logits(const plain *p, row *r)
{
    const am_attn *f = p->f;
    const am_logit_term *dropout = p->terms.dropout;
    const uint32_t threshold = dropout ? am_threshold_of(dropout->number) : 0;
    const uint64_t seed = dropout ? (uint64_t)dropout->integer : 0,
                   key = am_dropout_row_key(seed, r->b, r->head, f->terms.places.first_query + r->q);
    const double cap = am_cap_of(&p->terms);
    const ptrdiff_t sinks = am_sink_count(&p->terms);
    read_row(&f->q, am_token(&f->q, r->b, r->head, r->q), f->head_dim, r->query);
    r->highest = -INFINITY, r->own = r->equal = 0;
    for (ptrdiff_t k = 0; k < f->keys; k += 64) {
        r->live[k / 64] = am_mask_row(f->mask, r->b, r->head, r->q, k, am_min(64, f->keys - k));
        r->kept[k / 64] = UINT64_MAX;
        if (threshold)
            r->kept[k / 64] =
                p->kernels->masks.keep_bits(key, (uint32_t)(k + f->terms.places.first_key), threshold);
    }
    for (ptrdiff_t k = 0; k < f->keys; k++) {
        if (!has(r->live, k)) continue;
        const double terms = terms_of(f, r, k);
        double logit = dot(r->query, read_key(f, r, false, k), f->head_dim) * f->scale + terms, bent = 0;
        if (cap > 0) bent = tanh(logit / cap), logit = cap * bent;
        r->logits[k] = logit, r->slopes[k] = 1 - bent * bent;
        if (terms == -INFINITY)
            r->live[k / 64] &= ~((uint64_t)1 << k % 64);
        else
            r->highest = fmax(r->highest, logit);
    }
    for (ptrdiff_t i = 0; i < sinks; i++) r->highest = fmax(r->highest, sink_of(p, r, i));
    for (ptrdiff_t k = 0; k < f->keys; k++) {
        if (!has(r->live, k)) continue;
        r->own += power_of(r->logits[k], r->highest);
        r->equal += r->logits[k] == r->highest;
    }
    r->sum = r->own;
    for (ptrdiff_t i = 0; i < sinks; i++) {
        const double sink = sink_of(p, r, i);
        r->sum += sink == r->highest ? 1 : power_of(sink, r->highest);
        r->equal += sink == r->highest;
    }
}

static double lse_of(const row *r) { return r->sum == 0 ? -INFINITY : r->highest + log(r->sum); }

/* --- Forward --- */

static void forward_row(const plain *p, row *r)
{
    const am_attn *f = p->f;
    memset(r->out, 0, (size_t)f->value_dim * sizeof *r->out);
    for (ptrdiff_t k = 0; k < f->keys; k++) {
        if (!has(r->live, k)) continue;
        const double power = has(r->kept, k) ? power_of(r->logits[k], r->highest) : 0;
        add(r->out, power, read_key(f, r, true, k), f->value_dim);
    }
    const double factor = (r->own == 0 ? 0 : f->normalize ? 1 / r->sum : 1) / (1 - am_dropout_of(&p->terms));
    for (ptrdiff_t i = 0; i < f->value_dim; i++) r->out[i] *= factor;
    if (f->out.data) write_row(p, &f->out, am_token(&f->out, r->b, r->head, r->q), f->value_dim, r->out);
    if (f->wide_out.data)
        write_row(p, &f->wide_out, am_token(&f->wide_out, r->b, r->head, r->q), f->value_dim, r->out);
    if (f->lse.data) write_number(p, f->lse.type, am_token(&f->lse, r->b, r->head, r->q), lse_of(r));
}

/* --- Tangents --- */

static const double *read_tangent(const am_array *t, const row *r, ptrdiff_t k)
{
    read_row(t, am_token(t, r->b, r->kv_head, k), t->shape.channel, r->tangent.number);
    return r->tangent.number;
}

/* The tangent of the logit of a pair. */
static double tangent_of(const plain *p, const row *r, ptrdiff_t k)
{
    const am_attn *f = p->f;
    const am_attn_tangents *t = p->t;
    double sum = 0;
    if (t->d_q.data) sum += dot(r->tangent.q, read_key(f, r, false, k), f->head_dim);
    if (t->d_k.data) sum += dot(r->query, read_tangent(&t->d_k, r, k), f->head_dim);
    sum *= f->scale;
    if (t->d_bias.data) { /* its axes are those of the bias */
        const ptrdiff_t b = r->b / am_bias_sharers(f, p->terms.bias);
        sum += read_number(t->d_bias.type,
                           am_token(&t->d_bias, b, r->head, r->q) + k * t->d_bias.stride.channel);
    }
    return sum * r->slopes[k];
}

/* Writes the tangents of a row's results, which forward_row has written. */
static void tangent_row(const plain *p, row *r)
{
    const am_attn *f = p->f;
    const am_attn_tangents *t = p->t;
    const double lse = lse_of(r), scale = 1 / (1 - am_dropout_of(&p->terms));
    const ptrdiff_t sinks = t->d_sinks ? am_sink_count(&p->terms) : 0;
    double d_lse = 0;
    if (t->d_q.data) read_row(&t->d_q, am_token(&t->d_q, r->b, r->head, r->q), f->head_dim, r->tangent.q);
    memset(r->tangent.out, 0, (size_t)f->value_dim * sizeof *r->tangent.out);
    for (ptrdiff_t k = 0; k < f->keys; k++)
        if (has(r->live, k)) d_lse += power_of(r->logits[k], lse) * tangent_of(p, r, k);
    for (ptrdiff_t i = 0; i < sinks; i++)
        d_lse += power_of(sink_of(p, r, i), lse) * t->d_sinks[r->head * sinks + i];
    for (ptrdiff_t k = 0; k < f->keys; k++) {
        if (!has(r->live, k) || !has(r->kept, k)) continue;
        const double power = power_of(r->logits[k], lse) * scale, more = tangent_of(p, r, k) - d_lse;
        add(r->tangent.out, power * more, read_key(f, r, true, k), f->value_dim);
        if (t->d_v.data) add(r->tangent.out, power, read_tangent(&t->d_v, r, k), f->value_dim);
    }
    write_row(p, &t->d_out, am_token(&t->d_out, r->b, r->head, r->q), f->value_dim, r->tangent.out);
    if (t->d_lse.data) write_number(p, t->d_lse.type, am_token(&t->d_lse, r->b, r->head, r->q), d_lse);
    r->tangent.lse = d_lse;
}

/* --- Backward --- */

static double given(const am_array *stats, const row *r)
{
    return read_number(stats->type, am_token(stats, r->b, r->head, r->q));
}

/* What the gradient of a row is made of: p = e^(logit - reference), ds = p (d_out·v + shift) - share. */
typedef struct {
    double reference, shift, share; /* share: of the highest logits, if results are not normalized */
} row_gradient;

/* The lse may be of other keys, too. If it is that of these, it is taken before it was rounded. */
static row_gradient row_gradient_of(const plain *p, const row *r)
{
    const am_attn *f = p->f;
    const double epsilon = f->q.type == AM_FLOAT64 ? DBL_EPSILON : FLT_EPSILON;
    double lse = given(&p->g->lse, r), d_lse = 0, delta = 0;
    if (p->g->d_lse.data) d_lse = given(&p->g->d_lse, r);
    if (!(fabs(lse - lse_of(r)) > 4 * epsilon * fabs(lse))) lse = lse_of(r);
    for (ptrdiff_t i = 0; i < f->value_dim; i++) delta += r->out[i] == 0 ? 0 : r->out[i] * r->d_out[i];
    if (f->normalize) return (row_gradient){.reference = lse, .shift = d_lse - delta};
    return (row_gradient){
        .reference = r->highest, .shift = d_lse * exp(r->highest - lse), .share = delta / fmax(r->equal, 1)};
}

/* Adds the gradient of the logit of a pair to those of terms. */
static void learn(const plain *p, const row *r, ptrdiff_t k, double ds)
{
    const am_terms *terms = &p->f->terms;
    for (int i = 0; i < terms->count; i++) {
        const am_logit_term *term = &terms->list[i];
        const ptrdiff_t length = term->array.shape.channel;
        if (!term->gradient) continue;
        if (term == p->terms.bias) {
            p->d_bias[am_bias_index(p->f, term, r->b, r->head, r->q, k)] += ds;
        } else if (am_row_of_term(term)->acts == AM_ADDS_BY_POINT) {
            ((double *)term->gradient)[r->head * length + point_index_of(p->f, term, r, k)] += ds;
        } else if (am_row_of_term(term)->learn) {
            const am_line line = line_of(p->f, term, r, k);
            am_line_sums sums = {{0, length}, (double *)term->gradient + r->head * length};
            am_row_of_term(term)->learn(&line, &ds, &sums);
        }
    }
}

/* Adds what a row contributes to all gradients, and writes its d_q. */
static void backward_row(const plain *p, row *r)
{
    const am_attn *f = p->f;
    const am_attn_gradients *g = p->g;
    read_row(&f->out, am_token(&f->out, r->b, r->head, r->q), f->value_dim, r->out);
    read_row(&g->d_out, am_token(&g->d_out, r->b, r->head, r->q), f->value_dim, r->d_out);
    memset(r->d_q, 0, (size_t)f->head_dim * sizeof *r->d_q);
    const row_gradient x = row_gradient_of(p, r);
    for (ptrdiff_t k = 0; k < f->keys; k++) {
        if (!has(r->live, k)) continue;
        const double power = power_of(r->logits[k], x.reference),
                     factor = has(r->kept, k) ? 1 / (1 - am_dropout_of(&p->terms)) : 0,
                     product = dot(r->d_out, read_key(f, r, true, k), f->value_dim),
                     dp = factor == 0 ? 0 : product * factor,
                     share = r->logits[k] == r->highest ? x.share : 0,
                     ds = (power * (dp + x.shift) - share) * r->slopes[k];
        add(r->d_v + k * f->value_dim, power * factor, r->d_out, f->value_dim);
        add(r->d_k + k * f->head_dim, ds * f->scale, r->query, f->head_dim);
        add(r->d_q, ds * f->scale, read_key(f, r, false, k), f->head_dim);
        learn(p, r, k, ds);
    }
    const ptrdiff_t sinks = am_is_learned(p->terms.sinks) ? am_sink_count(&p->terms) : 0;
    for (ptrdiff_t i = 0; i < sinks; i++) {
        const double sink = sink_of(p, r, i), share = sink == r->highest ? x.share : 0;
        if (sink == -INFINITY) continue;
        ((double *)p->terms.sinks->gradient)[r->head * sinks + i] +=
            exp(sink - x.reference) * x.shift - share;
    }
    write_row(p, &g->d_q, am_token(&g->d_q, r->b, r->head, r->q), f->head_dim, r->d_q);
}

/* Adds what a row contributes to the tangents of all gradients, and writes that of its d_q. */
static void gradient_tangent_row(const plain *p, row *r)
{
    const am_attn *f = p->f;
    const am_attn_gradients *g = p->g;
    const am_attn_tangents *t = p->t;
    const double cap = am_cap_of(&p->terms);
    read_row(&f->out, am_token(&f->out, r->b, r->head, r->q), f->value_dim, r->out);
    read_row(&g->d_out, am_token(&g->d_out, r->b, r->head, r->q), f->value_dim, r->d_out);
    memset(r->d_q, 0, (size_t)f->head_dim * sizeof *r->d_q);
    const row_gradient x = row_gradient_of(p, r);
    const double moved = r->own > 0 ? dot(r->d_out, r->tangent.out, f->value_dim) : 0;
    for (ptrdiff_t k = 0; k < f->keys; k++) {
        if (!has(r->live, k)) continue;
        const bool kept = has(r->kept, k);
        const double factor = kept ? 1 / (1 - am_dropout_of(&p->terms)) : 0,
                     dp = kept ? dot(r->d_out, read_key(f, r, true, k), f->value_dim) * factor : 0,
                     of_dp = kept && t->d_v.data
                                 ? dot(r->d_out, read_tangent(&t->d_v, r, k), f->value_dim) * factor
                                 : 0,
                     slope = r->slopes[k], power = power_of(r->logits[k], x.reference),
                     of_logit = tangent_of(p, r, k), of_power = power * (of_logit - r->tangent.lse),
                     of_slope = cap > 0 ? -2 * r->logits[k] / (cap * cap) * of_logit : 0,
                     ds = power * (dp + x.shift),
                     of_ds = (of_power * (dp + x.shift) + power * (of_dp - moved)) * slope + ds * of_slope;
        add(r->d_v + k * f->value_dim, of_power * factor, r->d_out, f->value_dim);
        add(r->d_k + k * f->head_dim, of_ds * f->scale, r->query, f->head_dim);
        add(r->d_q, of_ds * f->scale, read_key(f, r, false, k), f->head_dim);
        if (t->d_q.data) add(r->d_k + k * f->head_dim, ds * slope * f->scale, r->tangent.q, f->head_dim);
        if (t->d_k.data) add(r->d_q, ds * slope * f->scale, read_tangent(&t->d_k, r, k), f->head_dim);
    }
    write_row(p, &g->d_q, am_token(&g->d_q, r->b, r->head, r->q), f->head_dim, r->d_q);
}

/* --- Weights --- */

/* Puts a key among those of the greatest weights of a row. */
static void rank_key(const plain *p, ptrdiff_t result, ptrdiff_t k, double weight)
{
    const am_attn_weights *w = p->w;
    int64_t *keys = w->top_keys + result * w->top;
    ptrdiff_t place = w->top;
    const am_dtype type = w->lse.type;
    char *weights = (char *)w->top_weights + result * w->top * (ptrdiff_t)am_size_of(type);
    const ptrdiff_t size = (ptrdiff_t)am_size_of(type);
    while (place > 0 && (keys[place - 1] < 0 || weight > read_number(type, weights + (place - 1) * size)))
        place--;
    for (ptrdiff_t i = w->top - 1; i > place; i--) {
        keys[i] = keys[i - 1];
        memcpy(weights + i * size, weights + (i - 1) * size, (size_t)size);
    }
    if (place == w->top) return;
    keys[place] = k;
    write_number(p, type, weights + place * size, weight);
}

/* Writes what the weights of the chosen query of a row tell. */
static void weights_row(const plain *p, const row *r, ptrdiff_t chosen)
{
    const am_attn *f = p->f;
    const am_attn_weights *w = p->w;
    const am_dtype type = w->lse.type;
    const ptrdiff_t size = (ptrdiff_t)am_size_of(type), result = am_weights_row(w, r->b, r->head, chosen),
                    sums = am_weights_sums(w, r->b, r->head);
    char *of_row = am_token(&w->lse, r->b, r->head, chosen);
    if (w->finds_lse) write_number(p, type, of_row, lse_of(r));
    const double lse = w->finds_lse ? lse_of(r) : read_number(type, of_row);
    double entropy = 0, highest = -INFINITY;
    for (ptrdiff_t i = 0; i < w->top; i++) {
        w->top_keys[result * w->top + i] = -1;
        write_number(p, type, (char *)w->top_weights + (result * w->top + i) * size, 0);
    }
    for (ptrdiff_t k = 0; k < f->keys; k++) {
        if (!has(r->live, k)) continue;
        const double weight = power_of(r->logits[k], lse);
        highest = fmax(highest, r->logits[k]);
        if (weight > 0) entropy += weight * (lse - r->logits[k]);
        if (w->weights) write_number(p, type, (char *)w->weights + (result * f->keys + k) * size, weight);
        if (w->key_sum) {
            char *sum = (char *)w->key_sum + (sums + k) * size;
            write_number(p, type, sum, read_number(type, sum) + weight);
        }
        if (w->top_keys) rank_key(p, result, k, weight);
    }
    if (w->entropy) write_number(p, type, (char *)w->entropy + result * size, entropy);
    if (w->max_logit) write_number(p, type, (char *)w->max_logit + result * size, highest);
}

static int compare_queries(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Where a query is among the chosen ones, or NULL. */
static const int64_t *chosen_query(const am_attn_weights *w, int64_t q)
{
    return bsearch(&q, w->queries, (size_t)w->count, sizeof q, compare_queries);
}

/* --- Calls --- */

/* Lays out the memory of a key head. */
static ptrdiff_t lay_out(const void *job, char *memory, void *parts)
{
    const plain *p = job;
    const am_attn *f = p->f;
    row *r = parts;
    const ptrdiff_t size = sizeof(double), key = f->head_dim * size, value = f->value_dim * size,
                    words = am_ceil_div(f->keys, 64) * (ptrdiff_t)sizeof *r->live;
    ptrdiff_t used = 0;
    r->query = (double *)am_take(memory, &used, key);
    r->out = (double *)am_take(memory, &used, value);
    r->number = (double *)am_take(memory, &used, am_max(key, value));
    r->logits = (double *)am_take(memory, &used, f->keys * size);
    r->slopes = (double *)am_take(memory, &used, f->keys * size);
    r->live = (uint64_t *)am_take(memory, &used, words);
    r->kept = (uint64_t *)am_take(memory, &used, words);
    if (!p->g && !p->t) return used;
    r->d_out = (double *)am_take(memory, &used, value);
    r->d_q = (double *)am_take(memory, &used, key);
    r->tangent.out = (double *)am_take(memory, &used, value);
    r->tangent.q = (double *)am_take(memory, &used, key);
    r->tangent.number = (double *)am_take(memory, &used, am_max(key, value));
    if (!p->g) return used;
    r->d_k = (double *)am_take(memory, &used, f->keys * key);
    r->d_v = (double *)am_take(memory, &used, f->keys * value);
    return used;
}

/* Takes all rows of a key head. */
static am_status head_task(void *arg, ptrdiff_t index, am_team *team)
{
    const plain *p = arg;
    const am_attn *f = p->f;
    const ptrdiff_t rows = f->heads / f->kv_heads * f->queries;
    row r = *(const row *)am_workspace(&p->workspaces);
    am_status status = AM_OK;
    r.b = index / f->kv_heads, r.kv_head = index % f->kv_heads;
    if (p->g) memset(r.d_k, 0, (size_t)(f->keys * f->head_dim) * sizeof *r.d_k);
    if (p->g) memset(r.d_v, 0, (size_t)(f->keys * f->value_dim) * sizeof *r.d_v);
    for (ptrdiff_t i = r.kv_head * rows; status == AM_OK && i < (r.kv_head + 1) * rows; i++) {
        r.head = i / f->queries, r.q = i % f->queries;
        const int64_t *chosen = p->w ? chosen_query(p->w, r.q) : NULL;
        if (p->w && !chosen) continue;
        find_logits(p, &r);
        if (p->w) {
            weights_row(p, &r, chosen - p->w->queries);
            status = am_checkpoint(team);
            continue;
        }
        if (p->t) tangent_row(p, &r);
        if (p->g && p->t)
            gradient_tangent_row(p, &r);
        else if (p->g)
            backward_row(p, &r);
        else
            forward_row(p, &r);
        status = am_checkpoint(team);
    }
    for (ptrdiff_t k = 0; p->g && status == AM_OK && k < f->keys; k++) {
        const am_array *d_k = &p->g->d_k, *d_v = &p->g->d_v;
        write_row(p, d_k, am_token(d_k, r.b, r.kv_head, k), f->head_dim, r.d_k + k * f->head_dim);
        write_row(p, d_v, am_token(d_v, r.b, r.kv_head, k), f->value_dim, r.d_v + k * f->value_dim);
    }
    return status;
}

static am_status take_heads(const am_context *context, plain *p)
{
    am_status status = am_workspaces_make(&p->workspaces, context->threads, lay_out, p, sizeof(row));
    if (status == AM_OK) status = am_parallel(context, p->f->batch * p->f->kv_heads, 1, head_task, p);
    am_workspaces_free(&p->workspaces);
    return status;
}

am_status am_plain_forward(const am_context *context, const am_attn *attn)
{
    return take_heads(context,
                      &(plain){.f = attn, .kernels = context->kernels, .terms = am_find_terms(attn)});
}

am_status am_plain_weigh(const am_context *context, const am_attn_weights *w)
{
    const am_attn *f = &w->attn;
    return take_heads(context,
                      &(plain){.f = f, .w = w, .kernels = context->kernels, .terms = am_find_terms(f)});
}

am_status am_plain_jvp(const am_context *context, const am_attn_tangents *t)
{
    const am_attn *f = &t->forward;
    return take_heads(context,
                      &(plain){.f = f, .t = t, .kernels = context->kernels, .terms = am_find_terms(f)});
}

am_status am_plain_backward_tangents(const am_context *context, const am_attn_gradients *g,
                                     const am_attn_tangents *t)
{
    const am_attn *f = &g->forward;
    return take_heads(
        context, &(plain){.f = f, .g = g, .t = t, .kernels = context->kernels, .terms = am_find_terms(f)});
}

am_status am_plain_backward(const am_context *context, const am_attn_gradients *g)
{
    const am_attn *f = &g->forward;
    plain p = {.f = f, .g = g, .kernels = context->kernels, .terms = am_find_terms(f)};
    const am_logit_term *bias = am_is_learned(p.terms.bias) ? p.terms.bias : NULL;
    const am_by_axis *shape = bias ? &bias->array.shape : &(am_by_axis){0};
    const ptrdiff_t count = am_product(shape->batch * shape->head, shape->token, shape->channel);
    am_context one_thread = *context; /* heads may add to the same gradients */
    one_thread.threads = 1;
    p.d_bias = calloc((size_t)am_max(count, 1), sizeof *p.d_bias);
    if (!p.d_bias) return AM_NO_MEMORY;
    for (int i = 0; i < f->terms.count; i++) {
        const am_logit_term *term = &f->terms.list[i];
        if (term->gradient && term != bias)
            memset(term->gradient, 0, (size_t)(f->heads * term->array.shape.channel) * sizeof(double));
    }
    const am_status status = take_heads(&one_thread, &p);
    for (ptrdiff_t i = 0; status == AM_OK && i < count; i++) {
        const am_dtype type = bias->array.type;
        write_number(&p, type, (char *)bias->gradient + i * (ptrdiff_t)am_size_of(type), p.d_bias[i]);
    }
    free(p.d_bias);
    return status;
}
