/* tokens_tpl.h – linear attention token by token, as it is defined:
 *
 *     S ← factor S          u ← v, or beta (v - Sᵀ k)          S ← S + k uᵀ          out = Sᵀ q
 *
 * A state goes through the first-level cache in panels of columns, and so comes from further away once. */
#if !defined T || !defined HEIGHT || !defined VECTORS
#    error "tokens_tpl.h needs f32.h or f64.h, HEIGHT and VECTORS (rows and vectors of a tile)"
#endif

/* One token. */
typedef struct {
    const T *q, *k, *v, *beta; /* beta: NULL without the delta rule */
    const T *factor, *decayed; /* of each row of the state; and times the key */
    T *state, *out;
    ptrdiff_t key_dim, value_stride;
} FN(token);

INLINE void FN(token_panel)(const FN(token) * t, ptrdiff_t column, const int vectors)
{
    const ptrdiff_t stride = t->value_stride;
    V u[2 * VECTORS], out[2 * VECTORS];
    UNROLL(16)
    for (int j = 0; j < vectors; j++) u[j] = out[j] = VOP(set1)(0);
    if (t->beta) {
        const T *state = t->state + column, *decayed = t->decayed;
        for (ptrdiff_t r = 0; r < t->key_dim; r++, state += stride) {
            const V k = VOP(set1)(decayed[r]);
            UNROLL(16)
            for (int j = 0; j < vectors; j++) u[j] = VOP(fma)(k, VOP(load)(state + j * LANES), u[j]);
        }
    }
    const V beta = VOP(set1)(t->beta ? *t->beta : 1);
    UNROLL(16)
    for (int j = 0; j < vectors; j++)
        u[j] = VOP(mul)(beta, VOP(sub)(VOP(load)(t->v + column + j * LANES), u[j]));
    T *restrict state = t->state + column;
    const T *keys = t->k, *queries = t->q, *factors = t->factor;
    for (ptrdiff_t r = 0; r < t->key_dim; r++, state += stride) {
        const V k = VOP(set1)(keys[r]), q = VOP(set1)(queries[r]), factor = VOP(set1)(factors[r]);
        UNROLL(16)
        for (int j = 0; j < vectors; j++) {
            const V s = VOP(fma)(k, u[j], VOP(mul)(factor, VOP(load)(state + j * LANES)));
            VOP(store)(state + j * LANES, s);
            out[j] = VOP(fma)(q, s, out[j]);
        }
    }
    UNROLL(16)
    for (int j = 0; j < vectors; j++) VOP(store)(t->out + column + j * LANES, out[j]);
}

static void FN(take_token)(const FN(token) * t)
{
    enum { WIDE = 2 * VECTORS };
    ptrdiff_t column = 0;
    for (; column + WIDE * LANES <= t->value_stride; column += WIDE * LANES) FN(token_panel)(t, column, WIDE);
    for (; column + 4 * LANES <= t->value_stride; column += 4 * LANES) FN(token_panel)(t, column, 4);
    for (; column < t->value_stride; column += LANES) FN(token_panel)(t, column, 1);
}

/* Forgets the rows of a state whose decay is -inf, also if they hold NaN, which 0 times it would not. */
static void FN(forget)(const am_linear_chunk *c, ptrdiff_t token, T *state)
{
    const am_linear_shape *s = c->shape;
    if (!c->reset) return;
    const bool by_channel = s->decay == AM_DECAY_BY_CHANNEL;
    const bool *reset = (const bool *)c->reset + (by_channel ? token * s->key_stride : token);
    for (ptrdiff_t r = 0; r < s->key_dim; r++) {
        if (reset[by_channel ? r : 0])
            memset(state + r * s->value_stride, 0, (size_t)s->value_stride * sizeof *state);
    }
}

/* `rows` has room for two rows of keys. */
static FN(token) FN(token_of)(const am_linear_chunk *c, ptrdiff_t i, T *state, T *rows)
{
    const am_linear_shape *s = c->shape;
    const bool by_channel = s->decay == AM_DECAY_BY_CHANNEL;
    const T *k = (const T *)c->k + i * s->key_stride, *factors = c->factor;
    T *decayed = rows + s->key_stride;
    for (ptrdiff_t r = 0; r < s->key_stride; r += LANES) {
        const V factor = by_channel ? VOP(load)(factors + i * s->key_stride + r) : VOP(set1)(factors[i]);
        VOP(store)(rows + r, factor);
        VOP(store)(decayed + r, VOP(mul)(factor, VOP(load)(k + r)));
    }
    return (FN(token)){
        .q = (const T *)c->q + i * s->key_stride,
        .k = k,
        .v = (const T *)c->v + i * c->v_stride,
        .beta = c->beta ? (const T *)c->beta + i : NULL,
        .factor = rows,
        .decayed = decayed,
        .state = state,
        .out = (T *)c->out + i * s->value_stride,
        .key_dim = s->key_dim,
        .value_stride = s->value_stride,
    };
}

static size_t FN(state_bytes)(const am_linear_shape *s)
{
    return (size_t)(s->key_dim * s->value_stride) * sizeof(T);
}

static void FN(forward_tokens)(const am_linear_chunk *c, void *scratch)
{
    T *state = c->next;
    if (c->state != c->next) memcpy(state, c->state, FN(state_bytes)(c->shape));
    for (ptrdiff_t i = 0; i < c->tokens; i++) {
        const FN(token) token = FN(token_of)(c, i, state, scratch);
        FN(forget)(c, i, state);
        FN(take_token)(&token);
    }
}

static void FN(keep_finite)(const am_linear_shape *s, ptrdiff_t tokens, void *const to[2],
                            const void *const from[2])
{
    const ptrdiff_t rows[2] = {tokens, s->key_dim}, stride = s->value_stride;
    for (ptrdiff_t block = 0; block < stride; block += AM_LINEAR_PAD) {
        bool finite = true;
        for (int m = 0; m < 2; m++)
            for (ptrdiff_t r = 0; r < rows[m] && finite; r++)
                finite = FN(all_finite)((const T *)from[m] + r * stride + block, AM_LINEAR_PAD);
        for (int m = 0; m < 2 && finite; m++)
            for (ptrdiff_t r = 0; r < rows[m]; r++)
                memcpy((T *)to[m] + r * stride + block, (const T *)from[m] + r * stride + block,
                       AM_LINEAR_PAD * sizeof(T));
    }
}

static void FN(scale_rows)(void *x, void *inverse, double scale, ptrdiff_t rows, ptrdiff_t stride)
{
    for (ptrdiff_t r = 0; r < rows; r++) {
        T *row = (T *)x + r * stride, factor = (T)scale;
        if (inverse) {
            const T one = 1 / (T)sqrt((double)(FN(dot)(row, row, stride) + (T)1e-6));
            ((T *)inverse)[r] = one;
            factor *= one;
        }
        const V by = VOP(set1)(factor);
        for (ptrdiff_t i = 0; i < stride; i += LANES) VOP(store)(row + i, VOP(mul)(by, VOP(load)(row + i)));
    }
}

/* --- Gradients --- */

static void FN(scale_rows_back)(void *d, const void *x, const void *inverse, double scale, ptrdiff_t rows,
                                ptrdiff_t stride)
{
    for (ptrdiff_t r = 0; r < rows; r++) {
        T *row = (T *)d + r * stride, factor = (T)scale, along = 0;
        const T *result = (const T *)x + r * stride;
        if (inverse) {
            const T one = ((const T *)inverse)[r];
            factor *= one;
            along = scale == 0 ? 0 : one / (T)scale * FN(dot)(row, result, stride);
        }
        const V by = VOP(set1)(factor), less = VOP(set1)(-along);
        for (ptrdiff_t i = 0; i < stride; i += LANES) {
            const V scaled = VOP(mul)(by, VOP(load)(row + i));
            VOP(store)(row + i, inverse ? VOP(fma)(less, VOP(load)(result + i), scaled) : scaled);
        }
    }
}

/* to = a b of a matrix [rows][stride] and a vector. */
static void FN(times_vector)(T *to, const T *a, const T *b, ptrdiff_t rows, ptrdiff_t stride)
{
    for (ptrdiff_t r = 0; r < rows; r++) to[r] = FN(dot)(a + r * stride, b, stride);
}

/* a += factor x yᵀ */
static void FN(add_outer)(T *a, T factor, const T *x, const T *y, ptrdiff_t rows, ptrdiff_t stride)
{
    for (ptrdiff_t r = 0; r < rows; r++) {
        T *restrict row = a + r * stride;
        const T left = factor * x[r];
        for (ptrdiff_t j = 0; j < stride; j++) row[j] += left * y[j];
    }
}

typedef struct {
    T *states;  /* before each token, and after the last one */
    T *rows;    /* of a token, two */
    T *u, *w;   /* of a token: what is added for its key, with and without beta */
    T *decayed; /* the state that a token finds */
} FN(token_work);

/* a token backwards; `d` is the gradient of the state. */
static void FN(token_back)(const am_linear_chunk *c, const am_linear_gradients *g, const FN(token_work) * w,
                           ptrdiff_t i, T *d)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t rows = s->key_dim, stride = s->value_stride, size = rows * stride;
    T *before = w->decayed;
    const T *after = w->states + (i + 1) * size, *d_out = (const T *)g->d_out + i * stride;
    const FN(token) t = FN(token_of)(c, i, before, w->rows);
    T *d_q = (T *)g->d_q + i * s->key_stride, *d_k = (T *)g->d_k + i * s->key_stride;
    T *d_v = (T *)g->d_v + i * stride, *d_decay = (T *)g->d_decay;
    memset(d_q, 0, (size_t)s->key_stride * sizeof *d_q);
    memset(d_k, 0, (size_t)s->key_stride * sizeof *d_k);
    FN(times_vector)(d_q, after, d_out, rows, stride);
    FN(add_outer)(d, 1, t.q, d_out, rows, stride);
    memcpy(before, after - size, FN(state_bytes)(s));
    FN(forget)(c, i, before);
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t j = 0; j < stride; j++) before[r * stride + j] *= t.factor[r];
    for (ptrdiff_t j = 0; j < stride; j++) w->w[j] = t.v[j], d_v[j] = 0;
    for (ptrdiff_t r = 0; r < rows; r++) {
        for (ptrdiff_t j = 0; j < stride; j++) {
            if (t.beta) w->w[j] -= t.k[r] * before[r * stride + j];
            d_v[j] += t.k[r] * d[r * stride + j];
        }
    }
    for (ptrdiff_t j = 0; j < stride; j++) w->u[j] = t.beta ? *t.beta * w->w[j] : w->w[j];
    FN(times_vector)(d_k, d, w->u, rows, stride);
    if (t.beta) {
        ((T *)g->d_beta)[i] = FN(dot)(d_v, w->w, stride);
        for (ptrdiff_t j = 0; j < stride; j++) d_v[j] *= *t.beta;
        for (ptrdiff_t r = 0; r < rows; r++) d_k[r] -= FN(dot)(before + r * stride, d_v, stride);
        FN(add_outer)(d, -1, t.k, d_v, rows, stride);
    }
    T sum = 0;
    const bool by_channel = s->decay == AM_DECAY_BY_CHANNEL;
    const bool *reset = c->reset ? (const bool *)c->reset + (by_channel ? i * s->key_stride : i) : NULL;
    for (ptrdiff_t r = 0; r < rows; r++) {
        const T dot =
            reset && reset[by_channel ? r : 0] ? 0 : FN(dot)(d + r * stride, before + r * stride, stride);
        if (by_channel) d_decay[i * s->key_stride + r] = dot;
        sum += dot;
    }
    if (!by_channel) d_decay[i] = sum;
    FN(forget)(c, i, d);
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t j = 0; j < stride; j++) d[r * stride + j] *= t.factor[r];
}

static ptrdiff_t FN(token_work_numbers)(const am_linear_shape *s)
{
    return (s->tokens + 2) * s->key_dim * s->value_stride + 2 * s->key_stride + 3 * s->value_stride;
}

static void FN(backward_tokens)(const am_linear_chunk *c, const am_linear_gradients *g, void *scratch)
{
    const am_linear_shape *s = c->shape;
    const ptrdiff_t size = s->key_dim * s->value_stride;
    FN(token_work) w = {.states = scratch};
    w.decayed = w.states + (s->tokens + 1) * size;
    w.rows = w.decayed + size;
    w.u = w.rows + 2 * s->key_stride;
    w.w = w.u + s->value_stride;
    T *out = w.w + s->value_stride;
    memcpy(w.states, c->state, FN(state_bytes)(s));
    for (ptrdiff_t i = 0; i < c->tokens; i++) {
        T *state = w.states + (i + 1) * size;
        memcpy(state, state - size, FN(state_bytes)(s));
        FN(token) token = FN(token_of)(c, i, state, w.rows);
        token.out = out;
        FN(forget)(c, i, state);
        FN(take_token)(&token);
    }
    if (g->d_state != g->d_next) memcpy(g->d_state, g->d_next, FN(state_bytes)(s));
    for (ptrdiff_t i = c->tokens - 1; i >= 0; i--) FN(token_back)(c, g, &w, i, g->d_state);
}
