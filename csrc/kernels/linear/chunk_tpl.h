/* chunk_tpl.h – a chunk of linear attention by products of matrices. With S the state before the chunk, e_i
 * the product of the factors up to token i, t_i of those behind it, and P and M as in pairs_tpl.h:
 *
 *     W = V - (e K) S - M U          U = beta W, or V without beta
 *     out = (e Q) S + P U            next = e_last S + (t K)ᵀ U
 *
 * Factors that do not differ by channel are multiplied into what comes of Q S and K S, and into U.
 *
 * Gradients go the same way back, from those of out and of the next state to those of everything. Products
 * with a state, and those of values by values, are large, and may round their factors. */
#if !defined T || !defined HEIGHT || !defined VECTORS
#    error "chunk_tpl.h needs f32.h or f64.h, HEIGHT and VECTORS (rows and vectors of a tile)"
#endif

#ifdef ROUNDED
static ptrdiff_t FN(numbers_of_factors)(const am_linear_shape *s) { return rounded_numbers(s); }
static void FN(multiply_large)(const FN(work) * w, const FN(product) * p) { multiply_rounded(p, w->rounded); }
#else
static ptrdiff_t FN(numbers_of_factors)(const am_linear_shape *s)
{
    (void)s;
    return 0;
}
static void FN(multiply_large)(const FN(work) * w, const FN(product) * p)
{
    (void)w;
    FN(multiply)(p);
}
#endif

static ptrdiff_t FN(lay_out_pairs)(FN(work) * w, const am_linear_shape *s, char *memory)
{
    const ptrdiff_t pairs = s->token_stride * s->token_stride, keys = s->token_stride * s->key_stride;
    const bool by_channel = s->decay == AM_DECAY_BY_CHANNEL;
    const FN(buffer) buffers[] = {
        {&w->heads, by_channel ? 2 * keys : 0},
        {&w->since, by_channel ? keys : 2 * s->token_stride},
        {&w->tail, by_channel ? keys : 0},
        {&w->behind, s->token_stride},
        {&w->whole, s->key_stride},
        {&w->p, pairs},
        {&w->m, pairs},
        {&w->subchunk_q, by_channel ? keys : 0},
        {&w->subchunk_k, by_channel ? keys : 0},
        {&w->subchunk_since, by_channel ? keys : 0},
    };
    return FN(lay_out)(buffers, COUNT_OF(buffers), memory);
}

/* For finding pairs. */
static ptrdiff_t FN(lay_out_find)(FN(work) * w, const am_linear_shape *s, char *memory)
{
    const FN(buffer) buffers[] = {{&w->decays, s->token_stride * s->token_stride},
                                  {&w->turned, s->token_stride * s->key_stride}};
    return FN(lay_out)(buffers, COUNT_OF(buffers), memory);
}

static ptrdiff_t FN(lay_out_values)(FN(work) * w, const am_linear_shape *s, char *memory)
{
    const ptrdiff_t values = s->token_stride * s->value_stride;
    const FN(buffer) buffers[] = {{&w->x, 2 * values},
                                  {&w->u, values},
                                  {&w->coupled, s->token_stride * s->token_stride},
                                  {&w->rounded, FN(numbers_of_factors)(s)}};
    return FN(lay_out)(buffers, COUNT_OF(buffers), memory);
}

static ptrdiff_t FN(lay_out_gradients)(FN(work) * w, const am_linear_shape *s, char *memory)
{
    const ptrdiff_t pairs = s->token_stride * s->token_stride, keys = s->token_stride * s->key_stride;
    const ptrdiff_t values = s->token_stride * s->value_stride, state = s->key_stride * s->value_stride;
    const ptrdiff_t rows = keys > values ? keys : values;
    const bool by_channel = s->decay == AM_DECAY_BY_CHANNEL;
    const FN(buffer) buffers[] = {
        {&w->turned, state > rows ? state : rows},
        {&w->back.d_rows, 2 * values},
        {&w->back.d_pairs, 2 * pairs},
        {&w->back.d_heads, 2 * keys},
        {&w->back.d_tail, keys},
        {&w->back.carry, by_channel ? s->key_stride : 0},
        {&w->back.left, by_channel ? keys : 0},
        {&w->back.follow, by_channel ? s->key_stride : 0},
        {&w->back.reads, by_channel ? 0 : s->token_stride},
        {&w->back.across, by_channel ? 0 : s->token_stride},
        {&w->decays, pairs}, /* from here on not by channel */
        {&w->heads, 2 * keys},
        {&w->tail, keys},
    };
    return FN(lay_out)(buffers, COUNT_OF(buffers) - (by_channel ? 3 : 0), memory);
}

static am_linear_scratch FN(scratch)(const am_linear_shape *s)
{
    FN(work) w;
    const ptrdiff_t of_token = 2 * s->key_stride * (ptrdiff_t)sizeof(T),
                    forward = FN(lay_out_values)(&w, s, NULL);
    return (am_linear_scratch){.pairs = FN(lay_out_pairs)(&w, s, NULL),
                               .find = FN(lay_out_find)(&w, s, NULL),
                               .forward = forward > of_token ? forward : of_token,
                               .backward = forward + FN(lay_out_gradients)(&w, s, NULL),
                               .backward_tokens = FN(token_work_numbers)(s) * (ptrdiff_t)sizeof(T)};
}

/* The work of a chunk whose pairs are known. */
static FN(work)
    FN(work_of)(const am_linear_shape *s, void *pairs, void *scratch, prefetch_queue *queue, bool backward)
{
    FN(work) w = {.queue = queue};
    FN(lay_out_pairs)(&w, s, pairs);
    const ptrdiff_t values = FN(lay_out_values)(&w, s, scratch);
    if (backward) FN(lay_out_gradients)(&w, s, (char *)scratch + values);
    return w;
}

/* c = a b for rows of keys and a state. */
static void FN(apply_state)(const am_linear_chunk *c, const FN(work) * w, T *to, const T *rows,
                            const T *state, ptrdiff_t count)
{
    const am_linear_shape *s = c->shape;
    const FN(product) product = {.c = to,
                                 .a = {.at = rows, .row = s->key_stride, .column = 1},
                                 .b = {.at = state, .row = s->value_stride, .column = 1},
                                 .c_stride = s->value_stride,
                                 .m = count,
                                 .n = s->value_stride,
                                 .depth = s->key_dim,
                                 .queue = w->queue};
    FN(multiply_large)(w, &product);
}

/* to = whole from + aᵀ b of `count` rows of keys and of values. */
static void FN(move_state)(const am_linear_chunk *c, const FN(work) * w, T *to, const T *from, const T *a,
                           const T *b, ptrdiff_t count)
{
    const am_linear_shape *s = c->shape;
    const FN(product) product = {.c = to,
                                 .start = from,
                                 .factor = w->whole,
                                 .a = {.at = a, .row = 1, .column = s->key_stride},
                                 .b = {.at = b, .row = s->value_stride, .column = 1},
                                 .c_stride = s->value_stride,
                                 .m = s->key_dim,
                                 .n = s->value_stride,
                                 .depth = count,
                                 .queue = w->queue};
    FN(multiply_large)(w, &product);
}

/* coupled_ij = -M_ij beta_i or -M_ij beta_j */
static void FN(couple)(const am_linear_chunk *c, const FN(work) * w, bool by_row)
{
    const ptrdiff_t stride = c->shape->token_stride;
    const T *beta = c->beta;
    for (ptrdiff_t i = 0; i < c->tokens; i++) {
        const V of_row = VOP(set1)(-beta[i]), zero = VOP(set1)(0);
        for (ptrdiff_t j = 0; j < i; j += LANES) {
            const V by = by_row ? of_row : VOP(sub)(zero, VOP(load)(beta + j));
            VOP(store)(w->coupled + i * stride + j, VOP(mul)(by, VOP(load)(w->m + i * stride + j)));
        }
    }
}

static void FN(find_pairs)(const am_linear_chunk *c, void *pairs, void *scratch)
{
    FN(work) w;
    FN(lay_out_pairs)(&w, c->shape, pairs);
    FN(lay_out_find)(&w, c->shape, scratch);
    if (c->shape->decay == AM_DECAY_BY_CHANNEL)
        FN(pairs_by_channel)(c, &w);
    else
        FN(pairs_by_token)(c, &w);
}

/* W and U. `x` becomes W. */
static void FN(solve_delta)(const am_linear_chunk *c, const FN(work) * w, T *x)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t stride = s->value_stride;
    const bool by_channel = s->decay == AM_DECAY_BY_CHANNEL;
    FN(apply_state)(c, w, x, by_channel ? w->heads + c->tokens * s->key_stride : c->k, c->state, c->tokens);
    for (ptrdiff_t i = 0; i < c->tokens; i++) {
        const V since = VOP(set1)(by_channel ? -1 : -w->since[s->token_stride + i]);
        const T *v = (const T *)c->v + i * c->v_stride;
        T *row = x + i * stride;
        for (ptrdiff_t j = 0; j < stride; j += LANES)
            VOP(store)(row + j, VOP(fma)(since, VOP(load)(row + j), VOP(load)(v + j)));
    }
    FN(couple)(c, w, false);
    FN(solve)(x, stride, (FN(matrix)){.at = w->coupled, .row = s->token_stride, .column = 1}, c->tokens,
              stride);
    for (ptrdiff_t i = 0; i < c->tokens; i++)
        FN(scale_row)(w->u + i * stride, x + i * stride, ((const T *)c->beta)[i], stride);
}

static bool FN(forward)(const am_linear_chunk *c, void *pairs, void *scratch)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, stride = s->value_stride;
    const bool by_channel = s->decay == AM_DECAY_BY_CHANNEL;
    prefetch_queue queue;
    prefetch_between(&queue, c->prefetch, (s->delta ? 3 : 2) * n, s->key_dim / 2, stride);
    const FN(work) w = FN(work_of)(s, pairs, scratch, &queue, false);
    FN(apply_state)(c, &w, w.x, by_channel ? w.heads : c->q, c->state, n);
    if (s->delta) FN(solve_delta)(c, &w, w.x + n * stride);
    const T *u = s->delta ? w.u : c->v;
    const FN(product) product = {.c = c->out,
                                 .start = w.x,
                                 .factor = by_channel ? NULL : w.since,
                                 .a = {.at = w.p, .row = s->token_stride, .column = 1},
                                 .b = {.at = u, .row = stride, .column = 1},
                                 .c_stride = stride,
                                 .m = n,
                                 .n = stride,
                                 .depth = n,
                                 .triangle = LOWER_LEFT,
                                 .queue = &queue};
    FN(multiply)(&product);
    for (ptrdiff_t i = 0; i < n && !by_channel; i++)
        FN(scale_row)(w.u + i * stride, u + i * stride, w.behind[i], stride);
    if (by_channel)
        FN(move_state)(c, &w, c->next, c->state, w.tail, u, n);
    else
        FN(move_state)(c, &w, c->next, c->state, c->k, w.u, n);
    return FN(all_finite)(c->out, n * stride) && FN(all_finite)(c->next, s->key_dim * stride);
}

/* --- Gradients --- */

/* Of U, from the output and the next state. */
static void FN(back_to_u)(const am_linear_chunk *c, const am_linear_gradients *g, const FN(work) * w)
{
    const am_linear_shape *s = c->shape;
    FN(apply_state)(c, w, g->d_u, w->tail, g->d_next, c->tokens);
    const FN(product) product = {.c = g->d_u,
                                 .start = g->d_u,
                                 .a = {.at = w->p, .row = 1, .column = s->token_stride},
                                 .b = {.at = g->d_out, .row = s->value_stride, .column = 1},
                                 .c_stride = s->value_stride,
                                 .m = c->tokens,
                                 .n = s->value_stride,
                                 .depth = c->tokens,
                                 .triangle = UPPER_LEFT};
    FN(multiply)(&product);
}

/* With the delta rule, of U in all that it leads to. */
static void FN(back_to_all_u)(const am_linear_chunk *c, const am_linear_gradients *g, const FN(work) * w)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, stride = s->value_stride, last = n - 1;
    FN(couple)(c, w, true);
    const FN(matrix)
        backwards = {.at = w->coupled + last * (s->token_stride + 1), .row = -1, .column = -s->token_stride};
    FN(solve)((T *)g->d_u + last * stride, -stride, backwards, n, stride);
}

/* Of the output, and of W, negated, behind it. */
static void FN(back_to_rows)(const am_linear_chunk *c, const am_linear_gradients *g, const FN(work) * w)
{
    const ptrdiff_t n = c->tokens, stride = c->shape->value_stride;
    memcpy(w->back.d_rows, g->d_out, (size_t)(n * stride) * sizeof(T));
    for (ptrdiff_t i = 0; c->beta && i < n; i++)
        FN(scale_row)(w->back.d_rows + (n + i) * stride, (const T *)g->d_u + i * stride,
                      -((const T *)c->beta)[i], stride);
}

/* Of the state before the chunk. */
static void FN(back_to_state)(const am_linear_chunk *c, const am_linear_gradients *g, const FN(work) * w)
{
    const am_linear_shape *s = c->shape;
    if (!g->known) {
        FN(back_to_u)(c, g, w);
        if (s->delta) FN(back_to_all_u)(c, g, w);
    }
    FN(back_to_rows)(c, g, w);
    if (!g->known)
        FN(move_state)(c, w, g->d_state, g->d_next, w->heads, w->back.d_rows,
                       s->delta ? 2 * c->tokens : c->tokens);
}

/* Of v and beta. */
static void FN(back_to_v)(const am_linear_chunk *c, const am_linear_gradients *g, const FN(work) * w)
{
    const ptrdiff_t n = c->tokens, stride = c->shape->value_stride;
    const T *beta = c->beta;
    T *d_v = g->d_v, *d_beta = g->d_beta;
    for (ptrdiff_t i = 0; i < n; i++) {
        const T *d_u = (const T *)g->d_u + i * stride;
        FN(scale_row)(d_v + i * stride, d_u, beta ? beta[i] : 1, stride);
        if (beta) d_beta[i] = FN(dot)(d_u, w->x + (n + i) * stride, stride);
    }
}

/* The gradients of P and M, of heads and tail. */
static void FN(back_to_pairs)(const am_linear_chunk *c, const am_linear_gradients *g, const FN(work) * w,
                              const T *u)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, sides = s->delta ? 2 : 1, stride = s->value_stride;
    FN(turn)(w->turned, s->token_stride, u, stride, n, s->value_dim);
    FN(product)
    product = {.a = {.at = NULL, .row = stride, .column = 1},
               .b = {.at = w->turned, .row = s->token_stride, .column = 1},
               .c_stride = s->token_stride,
               .m = n,
               .n = s->token_stride,
               .depth = s->value_dim,
               .triangle = LOWER_RESULT};
    for (ptrdiff_t side = 0; side < sides; side++) {
        product.c = w->back.d_pairs + side * n * s->token_stride,
        product.a.at = w->back.d_rows + side * n * stride;
        FN(multiply_large)(w, &product);
    }
    FN(turn)(w->turned, s->key_stride, c->state, stride, s->key_dim, s->value_dim);
    product.c = w->back.d_heads, product.a.at = w->back.d_rows;
    product.c_stride = product.b.row = product.n = s->key_stride;
    product.m = sides * n, product.triangle = ALL;
    FN(multiply_large)(w, &product);
    FN(turn)(w->turned, s->key_stride, g->d_next, stride, s->key_dim, s->value_dim);
    product.c = s->decay == AM_DECAY_BY_CHANNEL ? w->back.left : w->back.d_tail;
    product.a.at = u, product.m = n;
    FN(multiply_large)(w, &product);
}

static bool FN(backward)(const am_linear_chunk *c, const am_linear_gradients *g, void *pairs, void *scratch)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t n = c->tokens, keys = n * s->key_stride, values = n * s->value_stride;
    prefetch_queue queue;
    prefetch_between(&queue, c->prefetch, (s->delta ? 3 : 2) * n, s->key_dim / 2, s->value_stride);
    const FN(work) w = FN(work_of)(s, pairs, scratch, &queue, true);
    if (s->decay != AM_DECAY_BY_CHANNEL) {
        FN(decays_by_token)(c, &w, NULL);
        FN(decay_keys)(c, &w);
    }
    if (s->delta) FN(solve_delta)(c, &w, w.x + values);
    const T *u = s->delta ? w.u : c->v;
    FN(back_to_state)(c, g, &w);
    FN(back_to_v)(c, g, &w);
    FN(back_to_pairs)(c, g, &w, u);
    if (s->decay == AM_DECAY_BY_CHANNEL) {
        FN(pairs_by_channel_back)(c, g, &w);
    } else {
        FN(back_to_decays)(c, g, &w);
        FN(pairs_by_token_back)(c, &w);
        memcpy(g->d_k, w.back.d_tail, (size_t)keys * sizeof(T));
        T *d_k = g->d_k, *later = w.back.d_heads + keys;
        for (ptrdiff_t i = 0; s->delta && i < keys; i += LANES)
            VOP(store)(d_k + i, VOP(add)(VOP(load)(d_k + i), VOP(load)(later + i)));
        memcpy(g->d_q, w.back.d_heads, (size_t)keys * sizeof(T));
    }
    return FN(all_finite)(g->d_q, keys) && FN(all_finite)(g->d_k, keys) && FN(all_finite)(g->d_v, values) &&
           (g->known || FN(all_finite)(g->d_state, s->key_dim * s->value_stride));
}

static bool FN(backward_state)(const am_linear_chunk *c, const am_linear_gradients *g, void *pairs,
                               void *scratch)
{
    const am_linear_shape *s = c->shape;
    prefetch_queue queue;
    prefetch_between(&queue, c->prefetch, 2 * c->tokens, s->key_dim / 2, s->value_stride);
    const FN(work) w = FN(work_of)(s, pairs, scratch, &queue, true);
    if (s->decay != AM_DECAY_BY_CHANNEL) FN(decay_keys)(c, &w);
    FN(back_to_state)(c, g, &w);
    return FN(all_finite)(g->d_state, s->key_dim * s->value_stride);
}

static const am_linear_kernels FN(kernels) = {
    .type = sizeof(T) == sizeof(double) ? AM_FLOAT64 : AM_FLOAT32,
    .scratch = FN(scratch),
    .find_pairs = FN(find_pairs),
    .forward = FN(forward),
    .forward_tokens = FN(forward_tokens),
    .backward = FN(backward),
    .backward_state = FN(backward_state),
    .backward_tokens = FN(backward_tokens),
    .keep_finite = FN(keep_finite),
    .factors = FN(factors),
    .exp_of_sums = FN(exp_of_sums),
    .scale_rows = FN(scale_rows),
    .scale_rows_back = FN(scale_rows_back),
};

#undef T
#undef V
#undef VOP
#undef FN
#undef LANES
#undef STRIP
#undef GREATEST
#undef EPSILON
#undef MIN_POWER
#undef ROUNDER
