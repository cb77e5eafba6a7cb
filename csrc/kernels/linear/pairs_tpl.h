/* pairs_tpl.h – the pairs of tokens in a chunk, of which the later reads what the earlier has left:
 *
 *     P_ij = Σ_c q_ic D_ij k_jc  for j ≤ i          M_ij = Σ_c k_ic D_ij k_jc  for j < i
 *
 * where D_ij is the product of the factors of the tokens j + 1 … i, for each channel c if factors differ by
 * channel. No factor is divided by another, and no sum of decays subtracted from another: D is multiplied up
 * token by token as the state is, and so has its range and its precision.
 *
 * By channel, a chunk is cut into subchunks of SUBCHUNK tokens. Pairs of a subchunk are taken one by one. For
 * a query and an earlier subchunk D is a product of two: of the factors up to the start of the query's
 * subchunk, which is multiplied into the keys, and of those from there on, multiplied into the query. */
#if !defined T || !defined HEIGHT || !defined VECTORS
#    error "pairs_tpl.h needs f32.h or f64.h, HEIGHT and VECTORS (rows and vectors of a tile)"
#endif

#ifndef AM_LINEAR_SUBCHUNK
#    define AM_LINEAR_SUBCHUNK
enum { SUBCHUNK = 16 };
#endif

/* The working memory of a chunk. Strides are those of the shape; matrices have room for whole subchunks. */
typedef struct {
    T *decays;  /* D [tokens][token_stride], or not by channel */
    T *heads;   /* queries and, with beta, keys behind them, times the factors since the chunk's start; not by
                 * channel only backwards, as results take these factors */
    T *since;   /* these factors, by channel [tokens][key_stride]; else [2][token_stride], for queries and for
                 * keys, times what is left of their scale and norms */
    T *tail;    /* keys times the factors that follow up to the chunk's end; not by channel only backwards */
    T *behind;  /* not by channel: those factors, times what is left of keys' scale and norms, [tokens] */
    T *whole;   /* the product of all factors, [key_stride] */
    T *p, *m;   /* [tokens][token_stride] */
    T *turned;  /* a transposed matrix */
    T *x, *u;   /* [2 tokens][value_stride]; [tokens][value_stride] */
    T *coupled; /* -M times beta, a triangular system */
    T *rounded; /* of the factors of a product */
    prefetch_queue *queue;
    T *subchunk_q, *subchunk_k,
        *subchunk_since; /* by channel: times the factors since the subchunk's start, and those */
    struct {
        T *d_rows;  /* gradients of out and, negated, of v */
        T *d_pairs; /* of P, and of M behind it */
        T *d_heads; /* of heads, then of q and of k as the later of a pair */
        T *d_tail;  /* of tail, unless by channel, then of k as the earlier */
        T *carry;   /* by channel: [key_stride] */
        T *left;    /* by channel: gradients of tail */
        T *follow;  /* by channel: the product of the factors behind a token, [key_stride] */
        T *reads;   /* not by channel: gradients of decays from reads of the state, [token_stride] */
        T *across;  /* and from pairs across a token */
    } back;
} FN(work);

/* --- A factor a token --- */

/* What is left to multiply a row by. */
static T FN(scale_of)(const am_linear_shape *s, const T *row, double scale)
{
    if (!s->normalize) return (T)scale;
    return (T)scale / (T)sqrt((double)(FN(dot)(row, row, s->key_stride) + (T)1e-6));
}

/* D, times the scale of each key; NULL: 1. */
static void FN(decays_by_token)(const am_linear_chunk *c, const FN(work) * w, const T *scales)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t stride = s->token_stride;
    for (ptrdiff_t i = 0; i < c->tokens; i++) {
        T *row = w->decays + i * stride;
        const T factor = (T)c->exact[i];
        const V by = VOP(set1)(factor), lost = VOP(set1)((T)(c->exact[i] - (double)factor));
        memset(row, 0, (size_t)stride * sizeof *row);
        for (ptrdiff_t j = 0; j < i; j += LANES) {
            const V before = VOP(load)(row - stride + j);
            VOP(store)(row + j, VOP(fma)(by, before, VOP(mul)(lost, before)));
        }
        row[i] = scales ? scales[i] : 1;
    }
}

/* What comes of all factors: up to a token, times the scales of its query and key; behind it, times that of
 * its key; and of the chunk. The two products do not wait for each other. D is no longer needed. */
static void FN(multiply_factors)(const am_linear_chunk *c, const FN(work) * w, T *of_q, T *of_k)
{
    T *restrict behind = w->behind, *restrict up_to = w->decays;
    const ptrdiff_t n = c->tokens;
    double since = 1, follow = 1;
    for (ptrdiff_t i = 0; i < n; i++) {
        behind[n - 1 - i] = (T)follow;
        follow *= c->exact[n - 1 - i];
        since *= c->exact[i];
        up_to[i] = (T)since;
    }
    for (ptrdiff_t i = 0; i < n; i++) {
        behind[i] *= of_k[i];
        of_q[i] *= up_to[i], of_k[i] *= up_to[i];
    }
    for (ptrdiff_t r = 0; r < c->shape->key_stride; r++) w->whole[r] = (T)since;
}

/* Multiplies the lower triangle of a matrix by D and by the scale of each row (NULL: 1), and makes the rest
 * 0; of the diagonal, too, if `strict`. */
static void FN(decay_pairs)(const am_linear_chunk *c, const FN(work) * w, T *pairs, const T *scales,
                            bool strict)
{
    const ptrdiff_t stride = c->shape->token_stride;
    for (ptrdiff_t i = 0; i < c->tokens; i++) {
        T *row = pairs + i * stride;
        const V scale = VOP(set1)(scales ? scales[i] : 1);
        for (ptrdiff_t j = 0; j <= i; j += LANES) {
            const V decay = VOP(mul)(scale, VOP(load)(w->decays + i * stride + j));
            VOP(store)(row + j, VOP(mul)(decay, VOP(load)(row + j)));
        }
        const ptrdiff_t end = i + !strict;
        memset(row + end, 0, (size_t)(stride - end) * sizeof *row);
    }
}

/* to = factor x, of rows of keys */
static void FN(scale_row)(T *to, const T *x, T factor, ptrdiff_t count)
{
    const V by = VOP(set1)(factor);
    for (ptrdiff_t r = 0; r < count; r += LANES) VOP(store)(to + r, VOP(mul)(by, VOP(load)(x + r)));
}

static void FN(multiply_row)(T *to, const T *x, const T *factor, ptrdiff_t count)
{
    for (ptrdiff_t r = 0; r < count; r += LANES)
        VOP(store)(to + r, VOP(mul)(VOP(load)(factor + r), VOP(load)(x + r)));
}

static void FN(pairs_by_token)(const am_linear_chunk *c, const FN(work) * w)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, stride = s->key_stride;
    const T *q = c->q, *k = c->k;
    FN(turn)(w->turned, s->token_stride, k, stride, n, s->key_dim);
    prefetch_queue queue;
    prefetch_between(&queue, c->prefetch, s->delta ? n : n / 2, s->key_dim / 2, s->token_stride);
    FN(product)
    product = {.c = w->p,
               .a = {.at = q, .row = stride, .column = 1},
               .b = {.at = w->turned, .row = s->token_stride, .column = 1},
               .c_stride = s->token_stride,
               .m = n,
               .n = s->token_stride,
               .depth = s->key_dim,
               .triangle = LOWER_RESULT,
               .queue = &queue};
    FN(multiply)(&product);
    T *of_q = w->since, *of_k = w->since + s->token_stride;
    for (ptrdiff_t i = 0; i < n; i++) {
        of_q[i] = FN(scale_of)(s, q + i * stride, s->scale);
        of_k[i] = FN(scale_of)(s, k + i * stride, 1);
    }
    FN(decays_by_token)(c, w, of_k);
    FN(decay_pairs)(c, w, w->p, of_q, false);
    if (s->delta) {
        product.c = w->m, product.a.at = k;
        FN(multiply)(&product);
        FN(decay_pairs)(c, w, w->m, of_k, true);
    }
    FN(multiply_factors)(c, w, of_q, of_k);
}

/* Backwards, what not by channel are heads and tail. */
static void FN(decay_keys)(const am_linear_chunk *c, const FN(work) * w)
{
    const ptrdiff_t n = c->tokens, stride = c->shape->key_stride;
    const T *q = c->q, *k = c->k;
    for (ptrdiff_t i = 0; i < n; i++) {
        FN(scale_row)(w->heads + i * stride, q + i * stride, w->since[i], stride);
        if (c->beta) FN(scale_row)(w->heads + (n + i) * stride, k + i * stride, w->since[i], stride);
        FN(scale_row)(w->tail + i * stride, k + i * stride, w->behind[i], stride);
    }
}

/* The gradients of decays are those of all exponents in which they stand, each of which is added once: those
 * of the state, of reads of it, of what is left in the next one, and of pairs. Nothing is subtracted, as
 * decays may be so strong that hardly anything is left of what their neighbors add up to. A factor of 0 ends
 * all sums. */
static void FN(back_to_decays)(const am_linear_chunk *c, const am_linear_gradients *g, const FN(work) * w)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, stride = s->key_stride, pairs = s->token_stride, sides = s->delta ? 2 : 1;
    const T *q = c->q, *k = c->k, *factor = c->factor, *state = c->state, *d_next = g->d_next;
    T *d_decay = g->d_decay, *across = w->back.across, before = 0, after = 0;
    for (ptrdiff_t r = 0; w->whole[0] != 0 && r < s->key_dim; r++)
        before += FN(dot)(state + r * s->value_stride, d_next + r * s->value_stride, s->value_stride);
    before *= w->whole[0];
    for (ptrdiff_t i = 0; i < n; i++) {
        const T since = w->since[i];
        w->back.reads[i] = since * FN(dot)(q + i * stride, w->back.d_heads + i * stride, stride);
        if (s->delta)
            w->back.reads[i] += since * FN(dot)(k + i * stride, w->back.d_heads + (n + i) * stride, stride);
        if (factor[i] == 0) before = 0;
        d_decay[i] = before;
        before += FN(dot)(w->tail + i * stride, w->back.d_tail + i * stride, stride);
    }
    memset(across, 0, (size_t)pairs * sizeof *across);
    for (ptrdiff_t i = n - 1; i >= 0; i--) {
        V sum = VOP(set1)(0);
        for (ptrdiff_t j = 0; j < i; j += LANES) {
            V found = VOP(load)(across + j);
            for (ptrdiff_t side = 0; side < sides; side++) {
                const ptrdiff_t at = i * pairs + j;
                found = VOP(fma)(VOP(load)((side ? w->m : w->p) + at),
                                 VOP(load)(w->back.d_pairs + side * n * pairs + at), found);
            }
            VOP(store)(across + j, found);
        }
        for (ptrdiff_t j = i; j < pairs && j < i + LANES; j++) across[j] = 0; /* not before token i */
        for (ptrdiff_t j = 0; j < i; j += LANES) sum = VOP(add)(sum, VOP(load)(across + j));
        after += w->back.reads[i];
        if (factor[i] == 0) {
            after = d_decay[i] = 0;
            memset(across, 0, (size_t)pairs * sizeof *across);
        } else {
            d_decay[i] += after + VOP(total)(sum);
        }
    }
}

/* Adds to the gradients of q, and of k on both sides of a pair, what comes from P and M. */
static void FN(pairs_by_token_back)(const am_linear_chunk *c, const FN(work) * w)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, stride = s->key_stride;
    T *d_pairs[] = {w->back.d_pairs, w->back.d_pairs + n * s->token_stride};
    for (ptrdiff_t i = 0; i < n; i++) {
        for (int side = 0; side < 1 + s->delta; side++) {
            T *head = w->back.d_heads + (side * n + i) * stride;
            FN(scale_row)(head, head, w->since[i], stride);
        }
        T *tail = w->back.d_tail + i * stride;
        FN(scale_row)(tail, tail, w->behind[i], stride);
    }
    for (int side = 0; side < 1 + s->delta; side++) {
        T *heads = w->back.d_heads + side * n * stride;
        FN(decay_pairs)(c, w, d_pairs[side], NULL, side == 1);
        FN(product)
        product = {.c = heads,
                   .start = heads,
                   .a = {.at = d_pairs[side], .row = s->token_stride, .column = 1},
                   .b = {.at = c->k, .row = stride, .column = 1},
                   .c_stride = stride,
                   .m = n,
                   .n = stride,
                   .depth = n,
                   .triangle = LOWER_LEFT};
        FN(multiply)(&product);
        product.c = w->back.d_tail, product.start = w->back.d_tail;
        product.a = (FN(matrix)){.at = d_pairs[side], .row = 1, .column = s->token_stride};
        product.b.at = side ? c->k : c->q;
        product.triangle = UPPER_LEFT;
        FN(multiply)(&product);
    }
}

/* --- Factors by channel --- */

/* Keys of a subchunk's earlier tokens, `from` … i - 1, take the factors of token i. Sums of their products
 * with q and k go to rows of P and M. */
static void FN(pair_row)(const am_linear_chunk *c, const FN(work) * w, ptrdiff_t from, ptrdiff_t i)
{
    enum { ABREAST = 4 };
    const am_linear_shape *s = c->shape;
    const ptrdiff_t stride = s->key_stride;
    const T *q = (const T *)c->q + i * stride, *k = (const T *)c->k + i * stride;
    const T *factor = (const T *)c->factor + i * stride;
    V p[SUBCHUNK], m[SUBCHUNK];
    for (int j = 0; j < SUBCHUNK; j++) p[j] = m[j] = VOP(set1)(0);
    for (ptrdiff_t j = 0; from + j < i; j += ABREAST) {
        V p_sums[ABREAST], m_sums[ABREAST];
        T *keys = w->tail + (from + j) * stride;
        UNROLL(16)
        for (int a = 0; a < ABREAST; a++) p_sums[a] = m_sums[a] = VOP(set1)(0);
        for (ptrdiff_t r = 0; r < stride; r += LANES) {
            const V by = VOP(load)(factor + r), left = VOP(load)(q + r), other = VOP(load)(k + r);
            UNROLL(16)
            for (int a = 0; a < ABREAST; a++) {
                const V decayed = VOP(mul)(by, VOP(load)(keys + a * stride + r));
                VOP(store)(keys + a * stride + r, decayed);
                p_sums[a] = VOP(fma)(left, decayed, p_sums[a]);
                m_sums[a] = VOP(fma)(other, decayed, m_sums[a]);
            }
        }
        for (int a = 0; a < ABREAST; a++) p[j + a] = p_sums[a], m[j + a] = m_sums[a];
    }
    memcpy(w->tail + i * stride, k, (size_t)stride * sizeof *k);
    T *p_row = w->p + i * s->token_stride, *m_row = w->m + i * s->token_stride;
    for (int j = 0; j < SUBCHUNK; j += LANES) {
        VOP(store)(p_row + from + j, VOP(totals)(p + j));
        VOP(store)(m_row + from + j, VOP(totals)(m + j));
    }
    memset(p_row + i, 0, (size_t)(s->token_stride - i) * sizeof *p_row);
    memset(m_row + i, 0, (size_t)(s->token_stride - i) * sizeof *m_row);
    p_row[i] = FN(dot)(q, k, stride);
}

/* Products of the queries (and keys) of a subchunk with the keys of earlier ones. */
static void FN(pairs_across_subchunks)(const am_linear_chunk *c, const FN(work) * w, ptrdiff_t from,
                                       ptrdiff_t count)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t stride = s->key_stride;
    FN(turn)(w->turned, s->token_stride, w->tail, stride, from, s->key_dim);
    FN(product)
    product = {.c = w->p + from * s->token_stride,
               .a = {.at = w->subchunk_q + from * stride, .row = stride, .column = 1},
               .b = {.at = w->turned, .row = s->token_stride, .column = 1},
               .c_stride = s->token_stride,
               .m = count,
               .n = from,
               .depth = s->key_dim};
    FN(multiply)(&product);
    product.c = w->m + from * s->token_stride, product.a.at = w->subchunk_k + from * stride;
    if (s->delta) FN(multiply)(&product);
}

static ptrdiff_t FN(subchunk_end)(const am_linear_chunk *c, ptrdiff_t from)
{
    return c->tokens - from < SUBCHUNK ? c->tokens : from + SUBCHUNK;
}

static void FN(pairs_by_channel)(const am_linear_chunk *c, const FN(work) * w)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, stride = s->key_stride;
    const T *q = c->q, *k = c->k, *factor = c->factor;
    for (ptrdiff_t i = 0; i < n; i++) {
        const ptrdiff_t row = i * stride;
        T *since = w->since + row, *subchunk_since = w->subchunk_since + row;
        const T *by = factor + row;
        if (i == 0)
            memcpy(since, by, (size_t)stride * sizeof *by);
        else
            FN(multiply_row)(since, since - stride, by, stride);
        if (i % SUBCHUNK == 0)
            memcpy(subchunk_since, by, (size_t)stride * sizeof *by);
        else
            FN(multiply_row)(subchunk_since, subchunk_since - stride, by, stride);
        FN(multiply_row)(w->heads + row, q + row, since, stride);
        FN(multiply_row)(w->subchunk_q + row, q + row, subchunk_since, stride);
        FN(multiply_row)(w->subchunk_k + row, k + row, subchunk_since, stride);
        if (s->delta) FN(multiply_row)(w->heads + n * stride + row, k + row, since, stride);
    }
    memcpy(w->whole, c->whole, (size_t)stride * sizeof *k);
    for (ptrdiff_t from = 0; from < n; from += SUBCHUNK) {
        const ptrdiff_t end = FN(subchunk_end)(c, from);
        if (from > 0) FN(pairs_across_subchunks)(c, w, from, end - from);
        for (ptrdiff_t i = from; i < end; i++) FN(pair_row)(c, w, from, i);
        for (ptrdiff_t j = 0; j < from; j++) {
            T *row = w->tail + j * stride;
            FN(multiply_row)(row, row, w->subchunk_since + (end - 1) * stride, stride);
        }
    }
}

/* The later tokens of pairs of two tokens, subchunk by subchunk as above. The gradients of a subchunk's
 * queries are first those of the queries times subchunk_since. */
static void FN(later_by_channel_back)(const am_linear_chunk *c, const FN(work) * w, int side)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, stride = s->key_stride;
    const T *k = c->k, *factor = c->factor, *d_pairs = w->back.d_pairs + side * n * s->token_stride;
    T *keys = w->tail;
    for (ptrdiff_t from = 0; from < n; from += SUBCHUNK) {
        const ptrdiff_t end = FN(subchunk_end)(c, from);
        T *d_subchunk = w->turned;
        const FN(product)
            product = {.c = d_subchunk,
                       .a = {.at = d_pairs + from * s->token_stride, .row = s->token_stride, .column = 1},
                       .b = {.at = keys, .row = stride, .column = 1},
                       .c_stride = stride,
                       .m = end - from,
                       .n = stride,
                       .depth = from};
        FN(multiply)(&product);
        for (ptrdiff_t i = from; i < end; i++) {
            T *to = w->back.d_heads + (side * n + i) * stride;
            const T *since = w->since + i * stride, *subchunk_since = w->subchunk_since + i * stride;
            const T *by = factor + i * stride, *of_subchunk = d_subchunk + (i - from) * stride;
            memcpy(keys + i * stride, k + i * stride, (size_t)stride * sizeof *k);
            for (ptrdiff_t r = 0; r < stride; r += LANES) {
                V sum = VOP(mul)(VOP(load)(since + r), VOP(load)(to + r));
                sum = VOP(fma)(VOP(load)(subchunk_since + r), VOP(load)(of_subchunk + r), sum);
                for (ptrdiff_t j = from; j < i; j++) {
                    T *key = keys + j * stride + r;
                    const V decayed = VOP(mul)(VOP(load)(by + r), VOP(load)(key));
                    VOP(store)(key, decayed);
                    sum = VOP(fma)(VOP(set1)(d_pairs[i * s->token_stride + j]), decayed, sum);
                }
                VOP(store)(to + r, sum);
            }
        }
        for (ptrdiff_t j = 0; j < from; j++)
            FN(multiply_row)(keys + j * stride, keys + j * stride, w->subchunk_since + (end - 1) * stride,
                             stride);
    }
}

/* The earlier tokens of pairs, from the last subchunk to the first: d_tail holds gradients of keys that have
 * taken the factors up to the end of the subchunk. */
static void FN(earlier_by_channel_back)(const am_linear_chunk *c, const FN(work) * w)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, stride = s->key_stride;
    const T *q = c->q, *k = c->k, *factor = c->factor, *d_p = w->back.d_pairs,
            *d_m = d_p + n * s->token_stride;
    for (ptrdiff_t from = (n - 1) / SUBCHUNK * SUBCHUNK; from >= 0; from -= SUBCHUNK) {
        const ptrdiff_t end = FN(subchunk_end)(c, from);
        for (ptrdiff_t i = end - 1; i >= from; i--) {
            const T *by = factor + i * stride;
            for (ptrdiff_t j = from; j < i; j++) {
                T *to = w->back.d_tail + j * stride;
                const ptrdiff_t pair = i * s->token_stride + j;
                const V p = VOP(set1)(d_p[pair]), m = VOP(set1)(s->delta ? d_m[pair] : 0);
                for (ptrdiff_t r = 0; r < stride; r += LANES) {
                    V sum = VOP(fma)(p, VOP(load)(q + i * stride + r), VOP(load)(to + r));
                    if (s->delta) sum = VOP(fma)(m, VOP(load)(k + i * stride + r), sum);
                    VOP(store)(to + r, VOP(mul)(VOP(load)(by + r), sum));
                }
            }
        }
        for (ptrdiff_t j = 0; j < from; j++) {
            T *to = w->back.d_tail + j * stride;
            FN(multiply_row)(to, to, w->subchunk_since + (end - 1) * stride, stride);
        }
        for (int side = 0; side < 1 + s->delta && from > 0; side++) {
            const FN(product) product = {
                .c = w->back.d_tail,
                .start = w->back.d_tail,
                .a = {.at = (side ? d_m : d_p) + from * s->token_stride, .row = 1, .column = s->token_stride},
                .b = {.at = (side ? w->subchunk_k : w->subchunk_q) + from * stride,
                      .row = stride,
                      .column = 1},
                .c_stride = stride,
                .m = from,
                .n = stride,
                .depth = end - from};
            FN(multiply)(&product);
        }
    }
}

/* Gradients of pairs above the diagonal become 0, which the products leave undefined. */
static void FN(keep_lower)(const am_linear_chunk *c, T *pairs, bool strict)
{
    const ptrdiff_t stride = c->shape->token_stride;
    for (ptrdiff_t i = 0; i < c->tokens; i++) {
        const ptrdiff_t end = i + !strict;
        memset(pairs + i * stride + end, 0, (size_t)(stride - end) * sizeof *pairs);
    }
}

/* Gradients of decays as `back_to_decays`, of what is left in the next state and of the state itself. */
static void FN(left_by_channel_back)(const am_linear_chunk *c, const am_linear_gradients *g,
                                     const FN(work) * w)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, stride = s->key_stride;
    const T *factor = c->factor;
    T *d_decay = g->d_decay, *carry = w->back.carry;
    const V none = VOP(set1)(0);
    for (ptrdiff_t r = 0; r < stride; r++) {
        const T *state = (const T *)c->state + r * s->value_stride;
        const T *d_next = (const T *)g->d_next + r * s->value_stride;
        carry[r] =
            r < s->key_dim && w->whole[r] != 0 ? w->whole[r] * FN(dot)(state, d_next, s->value_stride) : 0;
    }
    for (ptrdiff_t row = 0; row < n * stride; row += stride) {
        for (ptrdiff_t r = 0; r < stride; r += LANES) {
            const ptrdiff_t at = row + r;
            const V before = VOP(pick_equal)(VOP(load)(factor + at), none, none, VOP(load)(carry + r));
            VOP(store)(d_decay + at, before);
            VOP(store)(carry + r, VOP(fma)(VOP(load)(w->tail + at), VOP(load)(w->back.left + at), before));
        }
    }
}

/* And of what later tokens read, less what earlier ones of pairs wrote. The gradients of q and k get what is
 * left, and pairs of a token with itself. */
static void FN(join_by_channel)(const am_linear_chunk *c, const am_linear_gradients *g, const FN(work) * w)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, stride = s->key_stride;
    const T *q = c->q, *k = c->k, *factor = c->factor, *later = w->back.d_heads + n * stride;
    T *d_decay = g->d_decay, *d_q = g->d_q, *d_k = g->d_k, *carry = w->back.carry, *follow = w->back.follow;
    const V none = VOP(set1)(0);
    for (ptrdiff_t r = 0; r < stride; r++) carry[r] = 0, follow[r] = 1;
    for (ptrdiff_t i = n - 1; i >= 0; i--) {
        const V itself = VOP(set1)(w->back.d_pairs[i * (s->token_stride + 1)]);
        for (ptrdiff_t r = 0; r < stride; r += LANES) {
            const ptrdiff_t at = i * stride + r;
            const V query = VOP(load)(q + at), key = VOP(load)(k + at), by = VOP(load)(factor + at);
            const V head = VOP(load)(w->back.d_heads + at), behind = VOP(load)(follow + r);
            V tail = VOP(load)(w->back.d_tail + at), other = none, sum = VOP(load)(carry + r);
            if (s->delta) other = VOP(load)(later + at);
            sum = VOP(fma)(query, head, VOP(fma)(key, VOP(sub)(other, tail), sum));
            sum = VOP(pick_equal)(by, none, none, sum);
            VOP(store)(carry + r, sum);
            VOP(store)(d_decay + at, VOP(add)(VOP(load)(d_decay + at), sum));
            VOP(store)(d_q + at, VOP(fma)(itself, key, head));
            tail = VOP(fma)(behind, VOP(load)(w->back.left + at), VOP(add)(tail, other));
            VOP(store)(d_k + at, VOP(fma)(itself, query, tail));
            VOP(store)(follow + r, VOP(mul)(behind, by));
        }
    }
}

static void FN(pairs_by_channel_back)(const am_linear_chunk *c, const am_linear_gradients *g,
                                      const FN(work) * w)
{
    FN(left_by_channel_back)(c, g, w);
    memset(w->back.d_tail, 0, (size_t)(c->tokens * c->shape->key_stride) * sizeof(T));
    for (int side = 0; side < 1 + c->shape->delta; side++) {
        FN(keep_lower)(c, w->back.d_pairs + side * c->tokens * c->shape->token_stride, side == 1);
        FN(later_by_channel_back)(c, w, side);
    }
    FN(earlier_by_channel_back)(c, w);
    FN(join_by_channel)(c, g, w);
}
