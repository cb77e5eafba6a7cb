/* linear_bf16x2.c – linear attention of bfloat16 by the processor's own dot products. A lane of float32 holds
 * two bfloat16 (bf16x2), sums are float32.
 *
 * Forward, with a decay per token: queries and keys are multiplied as they are in memory, so P and M lose
 * nothing: scale, norms and decays are factors of rows, which results take. With decays per channel, queries
 * and keys times these are rounded, and scale and norms are factors of rows. The state as it is read, P, U
 * and what is added to the state are rounded to bfloat16; the triangular system, and the state from chunk to
 * chunk, are float32.
 *
 * Gradients: the chunks of float32, whose large products round their factors. */
#include "kernels/linear/linear_f32.h"

#ifdef V_SQUARES
#    define SQUARE vf_fma_square_bf16x2
#endif
#define S float
#define LOAD vf_load
#define FMA vf_fma_one_bf16x2
#define TIMES(one, y) vf_fma_one_bf16x2(one, y, vf_set1(0))
#define FROM(name) name##_bf16x2
#include "kernels/attention/product_of_tpl.h"
#define FROM(name) name##_bf16x2
#define JOINED 2
#include "kernels/linear/multiply_tpl.h"
#undef SQUARE

typedef struct {
    float *heads[2];          /* by channel: queries and keys times the factors since the chunk's start,
                               * [tokens][key_stride / 2] */
    float *turned;            /* lanes of keys, transposed: [key_stride / 2][token_stride] */
    float *keys;              /* each two keys joined, by channel times the factors that follow up to the
                               * chunk's end: [token_stride / 2][key_stride] */
    float *p;                 /* [tokens][token_stride / 2], or by channel float32 [tokens][token_stride] */
    float *products;          /* [tokens][token_stride] */
    float *coupled;           /* -M times beta: [tokens][token_stride] */
    float *q_since, *k_since; /* of a row: its scale, and the factors since the chunk's start */
    float *tail;              /* of a key: its scale, and the factors that follow up to the chunk's end */
    float *whole;             /* the product of all factors, [key_dim] */
    float *state;             /* each two rows joined: [key_stride / 2][value_stride] */
    float *x;                 /* W: [tokens][value_stride] */
    float *u, *tail_u; /* U, and times `tail`; each two rows joined: [token_stride / 2][value_stride] */
} work;

static ptrdiff_t lay_out_pairs(work *w, const am_linear_shape *s, void *memory)
{
    const ptrdiff_t pairs = s->token_stride * s->token_stride;
    const bool by_channel = s->decay == AM_DECAY_BY_CHANNEL;
    const ptrdiff_t keys = by_channel ? s->token_stride * s->key_stride / 2 : 0;
    const buffer_f32 buffers[] = {
        {&w->heads[0], keys},
        {&w->heads[1], keys},
        {&w->keys, keys},
        {&w->p, by_channel ? pairs : pairs / 2},
        {&w->coupled, pairs},
        {&w->q_since, s->token_stride},
        {&w->k_since, s->token_stride},
        {&w->tail, s->token_stride},
        {&w->whole, s->key_stride},
    };
    return lay_out_f32(buffers, COUNT_OF(buffers), memory);
}

/* For finding pairs. */
static ptrdiff_t lay_out_find(work *w, const am_linear_shape *s, void *memory)
{
    const buffer_f32 buffers[] = {{&w->turned, s->token_stride * s->key_stride / 2},
                                  {&w->products, s->token_stride * s->token_stride}};
    return lay_out_f32(buffers, COUNT_OF(buffers), memory);
}

static ptrdiff_t lay_out_values(work *w, const am_linear_shape *s, void *memory)
{
    const ptrdiff_t values = s->token_stride * s->value_stride;
    const buffer_f32 buffers[] = {
        {&w->state, s->key_stride * s->value_stride / 2},
        {&w->x, values},
        {&w->u, values / 2},
        {&w->tail_u, values / 2},
        {&w->keys, s->token_stride * s->key_stride / 2}, /* not by channel */
    };
    return lay_out_f32(buffers, COUNT_OF(buffers) - (s->decay == AM_DECAY_BY_CHANNEL), memory);
}

static am_linear_scratch scratch_bf16x2(const am_linear_shape *s)
{
    work w;
    return (am_linear_scratch){.pairs = lay_out_pairs(&w, s, NULL),
                               .find = lay_out_find(&w, s, NULL),
                               .forward = lay_out_values(&w, s, NULL)};
}

/* What a row is multiplied by. */
static float scale_of(const am_linear_shape *s, const float *row, double scale)
{
    vf sum = vf_set1(0);
    if (!s->normalize) return (float)scale;
    for (ptrdiff_t i = 0; i < s->key_stride / 2; i += VF_LANES)
        sum = vf_fma_bf16x2(vf_load(row + i), vf_load(row + i), sum);
    return (float)scale / sqrtf(vf_total(sum) + 1e-6f);
}

/* The pairs of a row, from its products: P, and -M beta. `decays`: D, times the scale of keys; `count` are
 * not 0. */
static void pair_row(const am_linear_chunk *c, const work *w, ptrdiff_t i, float q_scale, float k_scale)
{
    const am_linear_shape *s = c->shape;
    const float *beta = c->beta;
    const float *products = w->products + i * s->token_stride;
    const bool by_channel = s->decay == AM_DECAY_BY_CHANNEL;
    float *coupled = w->coupled + i * s->token_stride;
    float *p = w->p + i * s->token_stride / (by_channel ? 1 : 2);
    const vf of_q = vf_set1(q_scale), of_k = vf_set1(-k_scale), zero = vf_set1(0);
    for (ptrdiff_t j = 0; j < s->token_stride; j += 2 * VF_LANES) {
        vf pairs[2];
        UNROLL(2)
        for (int v = 0; v < 2; v++) {
            const ptrdiff_t at = j + v * VF_LANES, left = i + 1 - at;
            const vf decays = vf_load(w->tail + at);
            const uint64_t some = left <= 0 ? 0 : left >= VF_LANES ? UINT64_MAX : (UINT64_C(1) << left) - 1;
            pairs[v] = vf_select(some, vf_mul(vf_mul(of_q, decays), vf_load(products + at)), zero);
            if (beta && left > 0)
                vf_store(coupled + at,
                         vf_mul(vf_mul(of_k, vf_mul(decays, vf_load(beta + at))), vf_load(coupled + at)));
        }
        if (by_channel)
            vf_store(p + j, pairs[0]), vf_store(p + j + VF_LANES, pairs[1]);
        else
            vf_store(p + j / 2, vf_narrow_bf16x2(pairs[0], pairs[1]));
    }
}

/* The products of queries, and of keys, with keys. */
static void products_by_token(const am_linear_chunk *c, const work *w)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, stride = s->key_stride / 2;
    const float *k = c->k;
    turn_f32(w->turned, s->token_stride, k, stride, n, stride);
    prefetch_queue queue;
    prefetch_between(&queue, c->prefetch, s->delta ? n : n / 2, s->key_dim / 2, s->token_stride);
    product_f32 product = {.c = w->products,
                           .a = {.at = c->q, .row = stride, .column = 1},
                           .b = {.at = w->turned, .row = s->token_stride, .column = 1},
                           .c_stride = s->token_stride,
                           .m = n,
                           .n = s->token_stride,
                           .depth = (s->key_dim + 1) / 2,
                           .triangle = LOWER_RESULT,
                           .queue = &queue};
    multiply_bf16x2(&product);
    product.c = w->coupled, product.a.at = k;
    if (s->delta) multiply_bf16x2(&product);
}

/* With decays per channel a chunk is halved again and again. For a query of the second half and a key of the
 * first D is a product of two: of the factors from the middle on, which is multiplied into the query, and of
 * those up to there, into the key. Pairs of the last few tokens are taken one by one. */
enum { LEAF = 8 };

/* Queries and keys of tokens times the factors since `from`. */
static void decay_heads(const am_linear_chunk *c, const work *w, ptrdiff_t from, ptrdiff_t to)
{
    const ptrdiff_t stride = c->shape->key_stride;
    const uint16_t *const rows[] = {c->q, c->k};
    for (ptrdiff_t r = 0; r < stride; r += 2 * VF_LANES) {
        vf since[] = {vf_set1(1), vf_set1(1)};
        for (ptrdiff_t at = from * stride + r; at < to * stride; at += stride) {
            const float *factor = (const float *)c->factor + at;
            since[0] = vf_mul(since[0], vf_load(factor));
            since[1] = vf_mul(since[1], vf_load(factor + VF_LANES));
            for (int side = 0; side < 1 + c->shape->delta; side++) {
                const vf left = vf_mul(since[0], vf_load_bf16(rows[side] + at));
                const vf right = vf_mul(since[1], vf_load_bf16(rows[side] + at + VF_LANES));
                vf_store(w->heads[side] + at / 2, vf_narrow_bf16x2(left, right));
            }
        }
    }
}

/* Keys of tokens times the factors that follow before `to`: rows of numbers side by side, or each two joined.
 */
static void decay_tails(const am_linear_chunk *c, const work *w, ptrdiff_t from, ptrdiff_t to, bool join)
{
    const ptrdiff_t stride = c->shape->key_stride;
    for (ptrdiff_t r = 0; r < stride; r += 2 * VF_LANES) {
        vf follow[] = {vf_set1(1), vf_set1(1)}, odd[] = {vf_set1(0), vf_set1(0)}, key[2];
        for (ptrdiff_t j = to - 1; j >= from; j--) {
            const ptrdiff_t at = j * stride + r;
            UNROLL(2)
            for (int v = 0; v < 2; v++) {
                key[v] = vf_mul(follow[v], vf_load_bf16((const uint16_t *)c->k + at + v * VF_LANES));
                follow[v] = vf_mul(follow[v], vf_load((const float *)c->factor + at + v * VF_LANES));
                if (join && j % 2 == 0)
                    vf_store(w->keys + j / 2 * stride + r + v * VF_LANES, vf_join_bf16x2(key[v], odd[v]));
                odd[v] = key[v];
            }
            if (!join) vf_store(w->keys + at / 2, vf_narrow_bf16x2(key[0], key[1]));
        }
    }
}

static void pairs_of_halves(const am_linear_chunk *c, const work *w, ptrdiff_t middle, ptrdiff_t half)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t stride = s->key_stride / 2, begin = middle - half;
    const ptrdiff_t end = middle + half < c->tokens ? middle + half : c->tokens;
    decay_heads(c, w, middle, end);
    decay_tails(c, w, begin, middle, false);
    turn_f32(w->turned, s->token_stride, w->keys + begin * stride, stride, half, stride);
    product_f32 product = {.c = w->products + middle * s->token_stride + begin,
                           .a = {.at = w->heads[0] + middle * stride, .row = stride, .column = 1},
                           .b = {.at = w->turned, .row = s->token_stride, .column = 1},
                           .c_stride = s->token_stride,
                           .m = end - middle,
                           .n = half < VF_LANES ? VF_LANES : half,
                           .depth = (s->key_dim + 1) / 2};
    multiply_bf16x2(&product);
    product.c = w->coupled + middle * s->token_stride + begin, product.a.at = w->heads[1] + middle * stride;
    if (s->delta) multiply_bf16x2(&product);
}

/* Token i of a leaf and up to `most` before it, whose keys take its factors. */
INLINE void leaf_row(const am_linear_chunk *c, const work *w, ptrdiff_t from, ptrdiff_t i, const int most)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t stride = s->key_stride, own = i - from;
    vf p[LEAF], m[LEAF], itself = vf_set1(0), sums[2 * LEAF];
    UNROLL(8)
    for (int j = 0; j < LEAF; j++) p[j] = m[j] = vf_set1(0);
    for (ptrdiff_t r = 0; r < stride; r += VF_LANES) {
        const ptrdiff_t at = i * stride + r;
        const vf q = vf_load_bf16((const uint16_t *)c->q + at), k = vf_load_bf16((const uint16_t *)c->k + at);
        const vf factor = vf_load((const float *)c->factor + at);
        float *keys = w->turned + r;
        UNROLL(8)
        for (int j = 0; j < most; j++) {
            const vf key = vf_mul(factor, vf_load(keys + j * stride));
            vf_store(keys + j * stride, key);
            p[j] = vf_fma(q, key, p[j]), m[j] = vf_fma(k, key, m[j]);
        }
        itself = vf_fma(q, k, itself);
        vf_store(keys + own * stride, k);
    }
    UNROLL(8)
    for (int j = 0; j < LEAF; j++) sums[j] = p[j], sums[LEAF + j] = m[j];
    sums[own] = itself;
    float totals[2 * LEAF];
    for (int j = 0; j < 2 * LEAF; j += VF_LANES) vf_store(totals + j, vf_totals(sums + j));
    memcpy(w->products + i * s->token_stride + from, totals, sizeof totals / 2);
    memcpy(w->coupled + i * s->token_stride + from, totals + LEAF, sizeof totals / 2);
}

static void products_by_channel(const am_linear_chunk *c, const work *w)
{
    const ptrdiff_t n = c->tokens;
    for (ptrdiff_t half = LEAF; half < n; half *= 2)
        for (ptrdiff_t middle = half; middle < n; middle += 2 * half) pairs_of_halves(c, w, middle, half);
    for (ptrdiff_t i = 0; i < n; i++) {
        const ptrdiff_t from = i / LEAF * LEAF;
        if (i == from) memset(w->turned, 0, (size_t)(LEAF * c->shape->key_stride) * sizeof *w->turned);
        if (i - from <= LEAF / 2)
            leaf_row(c, w, from, i, LEAF / 2);
        else
            leaf_row(c, w, from, i, LEAF - 1);
    }
    decay_heads(c, w, 0, n);
    decay_tails(c, w, 0, n, true);
}

static void find_pairs_bf16x2(const am_linear_chunk *c, void *pairs, void *scratch)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t stride = s->key_stride / 2;
    const bool by_channel = s->decay == AM_DECAY_BY_CHANNEL;
    work w;
    lay_out_pairs(&w, s, pairs);
    lay_out_find(&w, s, scratch);
    if (by_channel)
        products_by_channel(c, &w);
    else
        products_by_token(c, &w);
    double whole = 1;
    memset(w.tail, 0, (size_t)s->token_stride * sizeof *w.tail);
    for (ptrdiff_t i = 0; i < c->tokens; i++) {
        const float q_scale = scale_of(s, (const float *)c->q + i * stride, s->scale);
        const float k_scale = scale_of(s, (const float *)c->k + i * stride, 1);
        const float factor = by_channel ? 1 : ((const float *)c->factor)[i];
        whole *= by_channel ? 1 : c->exact[i];
        const float since = (float)whole;
        w.q_since[i] = since * q_scale, w.k_since[i] = since * k_scale;
        for (ptrdiff_t j = 0; j < i && !by_channel; j += VF_LANES)
            vf_store(w.tail + j, vf_mul(vf_set1(factor), vf_load(w.tail + j)));
        w.tail[i] = k_scale;
        pair_row(c, &w, i, q_scale, k_scale);
    }
    for (ptrdiff_t r = 0; r < s->key_dim; r++)
        w.whole[r] = by_channel ? ((const float *)c->whole)[r] : (float)whole;
}

/* Rounds two rows of channels to one of bf16x2; there may be no second. */
static void join_rows(float *to, const float *even, const float *odd, ptrdiff_t count)
{
    for (ptrdiff_t j = 0; j < count; j += VF_LANES)
        vf_store(to + j, vf_join_bf16x2(vf_load(even + j), odd ? vf_load(odd + j) : vf_set1(0)));
}

static void join_keys(const am_linear_chunk *c, const work *w)
{
    const ptrdiff_t stride = c->shape->key_stride / 2;
    for (ptrdiff_t i = 0; i < c->tokens; i += 2) {
        const float *k = (const float *)c->k + i * stride;
        for (ptrdiff_t j = 0; j < stride; j += VF_LANES) {
            float *to = w->keys + i * stride + 2 * j;
            const vf odd = i + 1 < c->tokens ? vf_load(k + stride + j) : vf_set1(0);
            vf first, second;
            vf_interleave_bf16x2(vf_load(k + j), odd, &first, &second);
            vf_store(to, first), vf_store(to + VF_LANES, second);
        }
    }
}

/* W, with the delta rule, from K S in its place. */
static void find_w(const am_linear_chunk *c, const work *w)
{
    const am_linear_shape *s = c->shape;
    for (ptrdiff_t i = 0; i < c->tokens; i++) {
        float *x = w->x + i * s->value_stride;
        const vf since = vf_set1(-w->k_since[i]);
        for (ptrdiff_t j = 0; j < s->value_stride; j += VF_LANES)
            vf_store(x + j, vf_fma(since, vf_load(x + j),
                                   vf_load_bf16((const uint16_t *)c->v + i * c->v_stride + j)));
    }
    const matrix_f32 coupled = {.at = w->coupled, .row = s->token_stride, .column = 1};
    solve_f32(w->x, s->value_stride, coupled, c->tokens, s->value_stride);
}

static vf u_of(const am_linear_chunk *c, const work *w, ptrdiff_t token, ptrdiff_t channel)
{
    if (token >= c->tokens) return vf_set1(0);
    if (!c->beta) return vf_load_bf16((const uint16_t *)c->v + token * c->v_stride + channel);
    const vf beta = vf_set1(((const float *)c->beta)[token]);
    return vf_mul(beta, vf_load(w->x + token * c->shape->value_stride + channel));
}

static void find_u(const am_linear_chunk *c, const work *w)
{
    const ptrdiff_t stride = c->shape->value_stride;
    for (ptrdiff_t i = 0; i < c->tokens; i += 2) {
        const vf tail[] = {vf_set1(w->tail[i]), vf_set1(w->tail[i + 1])};
        for (ptrdiff_t j = 0; j < stride; j += VF_LANES) {
            const vf even = u_of(c, w, i, j), odd = u_of(c, w, i + 1, j);
            if (c->shape->decay == AM_DECAY_BY_CHANNEL) {
                vf_store(w->x + i * stride + j, even);
                if (i + 1 < c->tokens) vf_store(w->x + (i + 1) * stride + j, odd);
            } else {
                vf_store(w->u + i / 2 * stride + j, vf_join_bf16x2(even, odd));
            }
            vf_store(w->tail_u + i / 2 * stride + j,
                     vf_join_bf16x2(vf_mul(tail[0], even), vf_mul(tail[1], odd)));
        }
    }
}

static bool forward_bf16x2(const am_linear_chunk *c, void *pairs, void *scratch)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, stride = s->value_stride;
    const bool by_channel = s->decay == AM_DECAY_BY_CHANNEL;
    const float *state = c->state;
    work w;
    lay_out_pairs(&w, s, pairs);
    lay_out_values(&w, s, scratch);
    for (ptrdiff_t r = 0; r < s->key_dim; r += 2)
        join_rows(w.state + r / 2 * stride, state + r * stride,
                  r + 1 < s->key_dim ? state + (r + 1) * stride : NULL, stride);
    prefetch_queue queue;
    prefetch_between(&queue, c->prefetch, (s->delta ? 3 : 2) * n, s->key_dim / 2, stride);
    product_f32 product = {.c = w.x,
                           .a = {.at = by_channel ? w.heads[1] : c->k, .row = s->key_stride / 2, .column = 1},
                           .b = {.at = w.state, .row = stride, .column = 1},
                           .c_stride = stride,
                           .m = n,
                           .n = stride,
                           .depth = (s->key_dim + 1) / 2,
                           .queue = &queue};
    if (s->delta) {
        multiply_bf16x2(&product);
        find_w(c, &w);
    }
    product.c = c->out, product.a.at = by_channel ? w.heads[0] : c->q;
    multiply_bf16x2(&product);
    find_u(c, &w);
    product.start = product.c, product.factor = w.q_since;
    product.a.at = w.p, product.triangle = LOWER_LEFT;
    if (by_channel) {
        product.a.row = s->token_stride, product.b.at = w.x, product.depth = n;
        multiply_f32(&product);
    } else {
        product.a.row = s->token_stride / 2, product.b.at = w.u, product.depth = (n + 1) / 2;
        multiply_bf16x2(&product);
        join_keys(c, &w);
    }
    product.depth = (n + 1) / 2, product.c = c->next, product.start = state, product.factor = w.whole;
    product.a = (matrix_f32){.at = w.keys, .row = 1, .column = s->key_stride};
    product.b.at = w.tail_u, product.m = s->key_dim, product.triangle = ALL;
    multiply_bf16x2(&product);
    return all_finite_f32(c->out, n * stride) && all_finite_f32(c->next, s->key_dim * stride);
}

static const am_linear_kernels kernels = {
    .type = AM_BFLOAT16,
    .scratch = scratch_bf16x2,
    .find_pairs = find_pairs_bf16x2,
    .forward = forward_bf16x2,
};

/* --- Chunks of float32 whose large products round their factors --- */

/* Numbers of scratch for the rounded factors of a product. */
static ptrdiff_t rounded_numbers(const am_linear_shape *s)
{
    ptrdiff_t widest = s->key_stride > s->value_stride ? s->key_stride : s->value_stride;
    if (widest < s->token_stride) widest = s->token_stride;
    return (2 * s->token_stride + widest) * widest;
}

static void multiply_rounded(const product_f32 *p, float *memory)
{
    const ptrdiff_t depth = (p->depth + 1) / 2;
    product_f32 rounded = *p;
    float *a = memory, *b;
    rounded.depth = depth, rounded.b.row = p->n;
    if (p->a.column == 1) { /* rows; what lies behind them in memory is 0 */
        rounded.a.row = (depth + VF_LANES - 1) / VF_LANES * VF_LANES;
        for (ptrdiff_t i = 0; i < p->m; i++) {
            const float *row = p->a.at + i * p->a.row;
            for (ptrdiff_t j = 0; j < p->depth; j += 2 * VF_LANES) {
                const vf right = j + VF_LANES < p->depth ? vf_load(row + j + VF_LANES) : vf_set1(0);
                vf_store(a + i * rounded.a.row + j / 2, vf_narrow_bf16x2(vf_load(row + j), right));
            }
        }
        b = a + p->m * rounded.a.row;
    } else { /* columns */
        for (ptrdiff_t j = 0; j < depth; j++) {
            const float *column = p->a.at + 2 * j * p->a.column;
            join_rows(a + j * p->a.column, column, 2 * j + 1 < p->depth ? column + p->a.column : NULL, p->m);
        }
        b = a + depth * p->a.column;
    }
    for (ptrdiff_t j = 0; j < depth; j++) {
        const float *row = p->b.at + 2 * j * p->b.row;
        join_rows(b + j * p->n, row, 2 * j + 1 < p->depth ? row + p->b.row : NULL, p->n);
    }
    rounded.a.at = a, rounded.b.at = b;
    multiply_bf16x2(&rounded);
}

#define ROUNDED
#include "kernels/linear/tokens_tpl.h"
#include "kernels/linear/pairs_tpl.h"
#include "kernels/linear/chunk_tpl.h"

const am_kernels TABLE(linear_bf16x2) = {
    .flash_bf16x2 = {.linear_forward = &kernels, .linear_backward = &kernels_f32},
};
