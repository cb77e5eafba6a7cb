/* plain.c – all of linear attention in plain C. Read this first: the rest of core/linear computes the same by
 * chunks. The level `plain` runs it, and tests compare the other levels with it.
 *
 * Each token of a value head, with the state S [K, V] that the tokens before it leave, and f = e^decay of
 * each row of S:
 *
 *     S' = f S                              row by row; f = 0 forgets NaN, too
 *     u = v,  or with beta  u = beta error,  error = v - S'ᵀ k
 *     S = S' + k uᵀ
 *     out = scale Sᵀ q
 *
 * Backward, from the last token to the first, with dS of what comes behind it:
 *
 *     dq = scale S d_out,   dS += scale q d_outᵀ
 *     dk = dS u,            du = dSᵀ k
 *     dv = du,              or with beta:  d_beta = du·error,  dv = beta du,  dk -= S' dv,  dS -= k dvᵀ
 *     d_decay = dS·S'       row by row, 0 where f is
 *     dS = f dS
 *
 * The states of a chunk are computed again for that, from the one before it. */
#include <math.h>
#include <string.h>

#include "core/linear/plain.h"
#include "core/runtime/workspaces.h"

/* A call: of `to`, `back` and `step`, the one that is not NULL says what is computed. */
typedef struct {
    const am_linear *l;
    const am_kernels *kernels;
    const am_linear_results *to;
    const am_linear_back *back;
    const am_linear_step *step;
    ptrdiff_t sequences;       /* that have tokens or states */
    ptrdiff_t longest, shared; /* the most tokens of a sequence; value heads of a key head */
    am_workspaces workspaces;
} plain;

/* A token of a value head, and the memory for its sequence. */
typedef struct {
    ptrdiff_t b, first, t, head, key_head; /* first: of its sequence */
    double *q, *k, *v, *factor;            /* factor: of each row of the state */
    double beta, q_inverse, k_inverse;
    double *decayed, *error, *u, *out; /* decayed: the state, then the token's */
    double *states;                    /* before each token of a chunk, and behind the last */
    double *kept;                      /* before each chunk */
    double *d_state, *d_out, *d_v, *row;
    double *d_q, *d_k; /* of each token, summed over the value heads of a key head */
    double *d_decay;   /* of each of these heads, summed over all tokens */
} token;

/* --- Numbers in memory --- */

static void read_rows(const plain *p, const am_array *a, const char *first, ptrdiff_t tokens, double *to)
{
    const am_array rows = am_rows_from(a, first, tokens);
    am_gather(p->kernels, AM_FLOAT64, to, a->shape.channel, &rows);
}

static void write_rows(const plain *p, const am_array *a, const char *first, ptrdiff_t tokens,
                       const double *from)
{
    const am_array rows = am_rows_from(a, first, tokens);
    am_scatter(p->kernels, &rows, AM_FLOAT64, from, a->shape.channel);
}

/* Those of a token, of a head or of its key head. */
static void read_row(const plain *p, const am_array *a, const token *x, ptrdiff_t head, double *to)
{
    read_rows(p, a, am_token(a, x->b, head, x->t), 1, to);
}

static void write_row(const plain *p, const am_array *a, const token *x, ptrdiff_t head, const double *from)
{
    if (a->data) write_rows(p, a, am_token(a, x->b, head, x->t), 1, from);
}

/* Reads a state, or zeros if the call has none. */
static void read_state(const plain *p, const am_array *a, ptrdiff_t sequence, ptrdiff_t head, double *to)
{
    if (a->data)
        read_rows(p, a, am_token(a, sequence, head, 0), p->l->key_dim, to);
    else
        memset(to, 0, (size_t)(p->l->key_dim * p->l->value_dim) * sizeof *to);
}

static void write_state(const plain *p, const am_array *a, ptrdiff_t sequence, ptrdiff_t head,
                        const double *from)
{
    if (a->data) write_rows(p, a, am_token(a, sequence, head, 0), p->l->key_dim, from);
}

static double dot(const double *a, const double *b, ptrdiff_t count)
{
    double sum = 0;
    for (ptrdiff_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

static void scale_row(double *row, ptrdiff_t count, double factor)
{
    for (ptrdiff_t i = 0; i < count; i++) row[i] *= factor;
}

/* Returns what a row is multiplied by to be normalized. */
static double inverse_norm(const plain *p, const double *row)
{
    return p->l->normalize ? 1 / sqrt(dot(row, row, p->l->key_dim) + 1e-6) : 1;
}

/* Reads a token, with queries and keys normalized. */
static void read_token(const plain *p, token *x, ptrdiff_t t)
{
    const am_linear *l = p->l;
    x->t = t;
    read_row(p, &l->query, x, x->key_head, x->q);
    read_row(p, &l->key, x, x->key_head, x->k);
    read_row(p, &l->value, x, x->head, x->v);
    scale_row(x->q, l->key_dim, x->q_inverse = inverse_norm(p, x->q));
    scale_row(x->k, l->key_dim, x->k_inverse = inverse_norm(p, x->k));
    x->beta = 1;
    if (l->beta.data) read_row(p, &l->beta, x, x->head, &x->beta);
    memset(x->factor, 0, (size_t)l->key_dim * sizeof *x->factor);
    if (l->decay.data && l->key_dim > 0) read_row(p, &l->decay, x, x->head, x->factor);
    for (ptrdiff_t i = 0; i < l->key_dim; i++)
        x->factor[i] = i == 0 || l->by_channel ? exp(x->factor[i]) : x->factor[0];
}

/* --- The recurrence --- */

/* Takes a token to the state behind it; both may be the same. */
static void advance(const plain *p, token *x, const double *state, double *next)
{
    const ptrdiff_t rows = p->l->key_dim, channels = p->l->value_dim;
    for (ptrdiff_t i = 0; i < rows * channels; i++)
        x->decayed[i] = x->factor[i / channels] == 0 ? 0 : x->factor[i / channels] * state[i];
    for (ptrdiff_t j = 0; j < channels; j++) {
        double known = 0;
        for (ptrdiff_t i = 0; p->l->beta.data && i < rows; i++)
            known += x->k[i] * x->decayed[i * channels + j];
        x->error[j] = x->v[j] - known;
        x->u[j] = x->beta * x->error[j];
    }
    for (ptrdiff_t i = 0; i < rows * channels; i++)
        next[i] = x->decayed[i] + x->k[i / channels] * x->u[i % channels];
}

/* Takes a token, and reads its result from the state. */
static void forward_token(const plain *p, token *x, ptrdiff_t t, double *state)
{
    const ptrdiff_t channels = p->l->value_dim;
    read_token(p, x, t);
    advance(p, x, state, state);
    for (ptrdiff_t j = 0; j < channels; j++) {
        x->out[j] = 0;
        for (ptrdiff_t i = 0; i < p->l->key_dim; i++) x->out[j] += x->q[i] * state[i * channels + j];
        x->out[j] *= p->l->scale;
    }
}

/* The gradients of a token, from those of the state behind it to those of the state before it. */
static void backward_token(const plain *p, token *x, const double *state)
{
    const am_linear *l = p->l;
    const am_linear_back *g = p->back;
    const ptrdiff_t rows = l->key_dim, channels = l->value_dim;
    double *d_q = x->d_q + (x->t - x->first) * rows, *d_k = x->d_k + (x->t - x->first) * rows, d_beta;
    read_row(p, &g->d_out, x, x->head, x->d_out);
    scale_row(x->d_out, channels, l->scale);
    for (ptrdiff_t i = 0; i < rows; i++) {
        const double *next = state + i * channels;
        double *d = x->d_state + i * channels;
        d_q[i] += dot(next, x->d_out, channels);
        for (ptrdiff_t j = 0; j < channels; j++) d[j] += x->q[i] * x->d_out[j];
        d_k[i] += dot(d, x->u, channels);
    }
    for (ptrdiff_t j = 0; j < channels; j++) {
        x->d_v[j] = 0;
        for (ptrdiff_t i = 0; i < rows; i++) x->d_v[j] += x->k[i] * x->d_state[i * channels + j];
    }
    if (l->beta.data) {
        d_beta = dot(x->d_v, x->error, channels);
        write_row(p, &g->beta, x, x->head, &d_beta);
        scale_row(x->d_v, channels, x->beta);
    }
    write_row(p, &g->value, x, x->head, x->d_v);
    for (ptrdiff_t i = 0; i < rows; i++) {
        double *d = x->d_state + i * channels;
        const double *decayed = x->decayed + i * channels;
        if (l->beta.data) {
            d_k[i] -= dot(decayed, x->d_v, channels);
            for (ptrdiff_t j = 0; j < channels; j++) d[j] -= x->k[i] * x->d_v[j];
        }
        x->row[i] = x->factor[i] == 0 ? 0 : dot(d, decayed, channels);
        for (ptrdiff_t j = 0; j < channels; j++) d[j] = x->factor[i] == 0 ? 0 : x->factor[i] * d[j];
    }
}

/* Writes the gradient of a decay, that of its rows by channel or their sum. */
static void write_decay(const plain *p, const token *x)
{
    double sum = 0;
    for (ptrdiff_t i = 0; i < p->l->key_dim; i++) sum += x->row[i];
    if (p->l->by_channel)
        write_row(p, &p->back->decay, x, x->head, x->row);
    else if (p->back->decay_of_heads)
        x->d_decay[x->head - x->key_head * p->shared] += sum;
    else
        write_row(p, &p->back->decay, x, x->head, &sum);
}

/* --- Sequences of a value head --- */

static am_status forward_sequence(const plain *p, token *x, ptrdiff_t sequence, ptrdiff_t count,
                                  am_team *team)
{
    am_status status = am_checkpoint(team);
    read_state(p, &p->l->state, sequence, x->head, x->states);
    for (ptrdiff_t i = 0; status == AM_OK && i < count; i++, status = am_checkpoint(team)) {
        forward_token(p, x, x->first + i, x->states);
        write_row(p, &p->to->out, x, x->head, x->out);
    }
    if (status == AM_OK) write_state(p, &p->to->state, sequence, x->head, x->states);
    return status;
}

static am_status backward_sequence(const plain *p, token *x, ptrdiff_t sequence, ptrdiff_t count,
                                   am_team *team)
{
    const ptrdiff_t size = p->l->key_dim * p->l->value_dim, chunk = p->l->chunk;
    const size_t bytes = (size_t)size * sizeof *x->states;
    am_status status = am_checkpoint(team);
    read_state(p, &p->l->state, sequence, x->head, x->states);
    for (ptrdiff_t i = 0; status == AM_OK && i < count; i++, status = am_checkpoint(team)) {
        if (i % chunk == 0) memcpy(x->kept + i / chunk * size, x->states, bytes);
        read_token(p, x, x->first + i);
        advance(p, x, x->states, x->states);
    }
    read_state(p, &p->back->d_state, sequence, x->head, x->d_state);
    for (ptrdiff_t c = am_ceil_div(count, chunk) - 1; status == AM_OK && c >= 0; c--) {
        const ptrdiff_t tokens = am_min(chunk, count - c * chunk);
        memcpy(x->states, x->kept + c * size, bytes);
        for (ptrdiff_t i = 0; i < tokens; i++) {
            read_token(p, x, x->first + c * chunk + i);
            advance(p, x, x->states + i * size, x->states + (i + 1) * size);
        }
        for (ptrdiff_t i = tokens; status == AM_OK && i-- > 0; status = am_checkpoint(team)) {
            read_token(p, x, x->first + c * chunk + i);
            advance(p, x, x->states + i * size, x->states + (i + 1) * size);
            backward_token(p, x, x->states + (i + 1) * size);
            if (p->back->decay.data) write_decay(p, x);
        }
    }
    if (status == AM_OK) write_state(p, &p->back->state, sequence, x->head, x->d_state);
    return status;
}

static void step_sequence(const plain *p, token *x, ptrdiff_t sequence)
{
    const ptrdiff_t slot = p->step->slots ? p->step->slots[sequence] : sequence;
    memset(x->out, 0, (size_t)p->l->value_dim * sizeof *x->out);
    if (slot >= 0) {
        read_state(p, &p->step->state, slot, x->head, x->states);
        forward_token(p, x, 0, x->states);
        write_state(p, &p->step->state, slot, x->head, x->states);
    }
    x->t = 0;
    write_row(p, &p->step->out, x, x->head, x->out);
}

/* --- Key heads --- */

/* Writes the gradients of the queries and keys of a sequence: those of their normalized rows so far. */
static void write_keys(const plain *p, token *x, ptrdiff_t count)
{
    const ptrdiff_t rows = p->l->key_dim;
    for (ptrdiff_t i = 0; i < count; i++) {
        double *d_q = x->d_q + i * rows, *d_k = x->d_k + i * rows;
        x->t = x->first + i;
        read_row(p, &p->l->query, x, x->key_head, x->q);
        read_row(p, &p->l->key, x, x->key_head, x->k);
        const double q_inverse = inverse_norm(p, x->q), k_inverse = inverse_norm(p, x->k),
                     q_part = p->l->normalize ? q_inverse * q_inverse * dot(x->q, d_q, rows) : 0,
                     k_part = p->l->normalize ? k_inverse * k_inverse * dot(x->k, d_k, rows) : 0;
        for (ptrdiff_t r = 0; r < rows; r++) {
            d_q[r] = q_inverse * (d_q[r] - x->q[r] * q_part);
            d_k[r] = k_inverse * (d_k[r] - x->k[r] * k_part);
        }
        write_row(p, &p->back->query, x, x->key_head, d_q);
        write_row(p, &p->back->key, x, x->key_head, d_k);
    }
}

static am_status take_sequence(const plain *p, token *x, ptrdiff_t sequence, am_team *team)
{
    const am_linear *l = p->l;
    const ptrdiff_t count = l->starts ? l->starts[sequence + 1] - l->starts[sequence] : l->tokens;
    const size_t bytes = (size_t)(count * l->key_dim) * sizeof *x->d_q;
    am_status status = AM_OK;
    x->b = l->starts ? 0 : sequence, x->first = l->starts ? l->starts[sequence] : 0;
    if (p->back) memset(x->d_q, 0, bytes), memset(x->d_k, 0, bytes);
    for (ptrdiff_t i = 0; status == AM_OK && i < p->shared; i++) {
        x->head = x->key_head * p->shared + i;
        if (p->step)
            step_sequence(p, x, sequence);
        else
            status = (p->back ? backward_sequence : forward_sequence)(p, x, sequence, count, team);
    }
    if (p->back && status == AM_OK) write_keys(p, x, count);
    return status == AM_OK ? am_checkpoint(team) : status;
}

static am_status head_task(void *arg, ptrdiff_t index, am_team *team)
{
    const plain *p = arg;
    token x = *(const token *)am_workspace(&p->workspaces);
    am_status status = AM_OK;
    x.key_head = index;
    if (p->back) memset(x.d_decay, 0, (size_t)p->shared * sizeof *x.d_decay);
    for (ptrdiff_t s = 0; status == AM_OK && s < p->sequences; s++) status = take_sequence(p, &x, s, team);
    x.b = x.t = 0;
    for (ptrdiff_t i = 0; status == AM_OK && p->back && p->back->decay_of_heads && i < p->shared; i++)
        write_row(p, &p->back->decay, &x, index * p->shared + i, &x.d_decay[i]);
    return status;
}

/* Lays out the memory of a token and its sequence. */
static ptrdiff_t lay_out(const void *job, char *memory, void *parts)
{
    const plain *p = job;
    const ptrdiff_t rows = p->l->key_dim, channels = p->l->value_dim, size = am_product(rows, channels, 1),
                    keys = p->back ? am_product(p->longest, rows, 1) : 0,
                    chunks = p->back ? am_ceil_div(p->longest, p->l->chunk) : 0;
    token *x = parts;
    const struct {
        double **place;
        ptrdiff_t count;
    } list[] = {
        {&x->q, rows},
        {&x->k, rows},
        {&x->factor, rows},
        {&x->row, rows},
        {&x->v, channels},
        {&x->u, channels},
        {&x->error, channels},
        {&x->out, channels},
        {&x->d_out, channels},
        {&x->d_v, channels},
        {&x->decayed, size},
        {&x->d_state, size},
        {&x->d_q, keys},
        {&x->d_k, keys},
        {&x->d_decay, p->shared},
        {&x->kept, am_product(chunks, size, 1)},
        {&x->states, am_product(p->back ? p->l->chunk + 1 : 1, size, 1)},
    };
    ptrdiff_t used = 0;
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        *list[i].place = (double *)am_take(memory, &used, am_product(list[i].count, sizeof(double), 1));
    return used;
}

am_status am_plain_linear(const am_context *context, const am_linear *linear, const am_linear_results *to,
                          const am_linear_back *back, const am_linear_step *step)
{
    const bool states = (to && to->state.data) || (back && back->state.data);
    if (linear->key_heads == 0) return AM_OK;
    plain p = {.l = linear, .kernels = context->kernels, .to = to, .back = back, .step = step};
    p.sequences = linear->starts || linear->tokens > 0 || states ? linear->sequences : 0;
    p.shared = linear->heads / linear->key_heads;
    p.longest = linear->starts ? 0 : linear->tokens;
    for (ptrdiff_t s = 0; linear->starts && s < linear->sequences; s++)
        p.longest = am_max(p.longest, linear->starts[s + 1] - linear->starts[s]);
    am_status status = am_workspaces_make(&p.workspaces, context->threads, lay_out, &p, sizeof(token));
    if (status == AM_OK) status = am_parallel(context, linear->key_heads, 1, head_task, &p);
    am_workspaces_free(&p.workspaces);
    return status;
}
