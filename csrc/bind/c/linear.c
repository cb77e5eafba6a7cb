/* linear.c – linear attention from C. */
#include <string.h>

#include "bind/c/call.h"
#include "bind/request_linear.h"
#include "core/arrays/convert.h"
#include "core/runtime/sizes.h"

enum { USUAL_CHUNK = 64 };

/* A call whose inputs were looked at. */
typedef struct {
    attnmask_linear_attention given;
    am_view inputs[AM_LINEAR_INPUTS];
    am_linear linear;
} problem;

static const char *const names[AM_LINEAR_INPUTS] = {"query", "key",  "value",
                                                    "decay", "beta", "initial_state"};

static bool look_at_inputs(am_c_call *c, problem *p)
{
    const attnmask_linear_attention *g = &p->given;
    const attnmask_array *const arrays[] = {&g->query, &g->key,  &g->value,
                                            &g->decay, &g->beta, &g->initial_state};
    for (int i = 0; i < AM_LINEAR_INPUTS; i++) {
        if (!(i <= AM_VALUE ? am_c_need : am_c_look)(c, arrays[i], names[i], &p->inputs[i])) return false;
    }
    return true;
}

static bool read_chunk(am_c_call *c, int64_t given, ptrdiff_t *chunk)
{
    *chunk = given ? given : USUAL_CHUNK;
    return (*chunk >= AM_LINEAR_LEAST_CHUNK && *chunk <= AM_LINEAR_MOST_CHUNK && !(*chunk & (*chunk - 1))) ||
           am_refuse(&c->request, AM_WRONG_VALUE, NULL,
                     "chunk must be a power of two from %d to %d, got %lld", (int)AM_LINEAR_LEAST_CHUNK,
                     (int)AM_LINEAR_MOST_CHUNK, (long long)given);
}

/* Reads a call; the states of a step are left out. */
static bool read_call(am_c_call *c, const attnmask_linear_attention *from, bool step, problem *p)
{
    am_linear *l = &p->linear;
    *p = (problem){0};
    l->sequences = -1;
    if (!am_c_read(c, &p->given, from, "call") || !look_at_inputs(c, p) ||
        !am_c_read_starts(c, &p->given.cum_seqlens, "cum_seqlens", p->inputs[AM_QUERY].shape[1], &l->starts,
                          &l->sequences))
        return false;
    if (step) p->inputs[AM_STATE] = (am_view){0};
    l->normalize = p->given.normalize_qk != 0;
    return am_read_linear(&c->request, p->inputs, false, l) && read_chunk(c, p->given.chunk, &l->chunk) &&
           am_c_scale(c, p->given.scale, l->key_dim, &l->scale);
}

static am_view states_of(const problem *p, ptrdiff_t count)
{
    const am_linear *l = &p->linear;
    return (am_view){.type = am_wide_type(p->inputs[AM_QUERY].type),
                     .axes = 4,
                     .shape = {count, l->heads, l->key_dim, l->value_dim, 1}};
}

static bool look_at_out(am_c_call *c, const problem *p, const attnmask_array *array, const char *name,
                        am_view *v)
{
    am_view like = p->inputs[AM_VALUE];
    like.type = p->inputs[AM_QUERY].type;
    return am_c_need(c, array, name, v) && am_c_is_like(c, v, name, &like);
}

static bool look_at_state(am_c_call *c, const problem *p, const attnmask_array *array, const char *name,
                          am_view *v)
{
    const am_view like = states_of(p, p->linear.sequences);
    return am_c_look(c, array, name, v) && (!v->data || am_c_is_like(c, v, name, &like));
}

static bool look_at_kept(am_c_call *c, const problem *p, void **kept)
{
    am_view v, like = {.type = am_wide_type(p->inputs[AM_QUERY].type), .axes = 2, .shape = {0, 0, 1, 1, 1}};
    if (!am_linear_kept(&p->linear, &like.shape[0], &like.shape[1]))
        return am_refuse_status(&c->request, AM_NO_MEMORY);
    if (!am_c_look_in_order(c, &p->given.kept, "kept", &v) || !am_c_is_like(c, &v, "kept", &like))
        return false;
    *kept = v.data;
    return true;
}

attnmask_status attnmask_linear_kept(const attnmask_linear_attention *call, int64_t shape[2],
                                     attnmask_message *message)
{
    am_c_call c;
    problem p;
    ptrdiff_t found[2];
    bool done = am_c_begin(&c) && read_call(&c, call, false, &p);
    if (done && !shape) done = am_refuse(&c.request, AM_WRONG_VALUE, NULL, "shape must be given, got NULL");
    if (done && !am_linear_kept(&p.linear, &found[0], &found[1]))
        done = am_refuse_status(&c.request, AM_NO_MEMORY);
    if (done) shape[0] = found[0], shape[1] = found[1];
    return am_c_end(&c, done, message);
}

attnmask_status attnmask_linear_forward(const attnmask_linear_attention *call, attnmask_message *message)
{
    am_c_call c;
    problem p;
    am_view out, state;
    am_linear_results results = {0};
    bool done = am_c_begin(&c) && read_call(&c, call, false, &p) &&
                look_at_out(&c, &p, &p.given.out, "out", &out) &&
                look_at_state(&c, &p, &p.given.state, "state", &state) &&
                (!p.given.kept.data || look_at_kept(&c, &p, &results.kept));
    if (done) {
        results.out = am_linear_array_of(out), results.state = am_linear_states_of(state);
        if (am_has_numbers(&out) || am_has_numbers(&state) || results.kept)
            done = am_refuse_status(&c.request, am_linear_forward_all(&c.context, &p.linear, &results));
    }
    return am_c_end(&c, done, message);
}

static bool read_gradients(am_c_call *c, const attnmask_linear_gradients *from, problem *p,
                           am_linear_back *back)
{
    attnmask_linear_gradients given;
    am_view d_out, d_state, results[AM_LINEAR_INPUTS];
    void *kept;
    if (!am_c_read(c, &given, from, "gradients") || !read_call(c, given.call, false, p) ||
        !look_at_kept(c, p, &kept) || !look_at_out(c, p, &given.d_out, "d_out", &d_out) ||
        !look_at_state(c, p, &given.d_state, "d_state", &d_state))
        return false;
    static const char *const gradients[] = {"d_query", "d_key",  "d_value",
                                            "d_decay", "d_beta", "d_initial_state"};
    const attnmask_array *const arrays[] = {&given.d_query, &given.d_key,  &given.d_value,
                                            &given.d_decay, &given.d_beta, &given.d_initial_state};
    for (int i = 0; i < AM_LINEAR_INPUTS; i++) {
        if (!am_c_look(c, arrays[i], gradients[i], &results[i])) return false;
        if (!results[i].data) continue;
        if (!p->inputs[i].data)
            return am_refuse(&c->request, AM_WRONG_VALUE, NULL, "%s must come with %s", gradients[i],
                             names[i]);
        if (!am_c_is_like(c, &results[i], gradients[i], &p->inputs[i])) return false;
    }
    *back = (am_linear_back){
        .kept = kept, .d_out = am_linear_array_of(d_out), .d_state = am_linear_states_of(d_state)};
    return !am_set_linear_gradients(back, results) ||
           am_refuse_status(&c->request, am_linear_backward_all(&c->context, &p->linear, back));
}

attnmask_status attnmask_linear_backward(const attnmask_linear_gradients *gradients,
                                         attnmask_message *message)
{
    am_c_call c;
    problem p;
    am_linear_back back;
    return am_c_end(&c, am_c_begin(&c) && read_gradients(&c, gradients, &p, &back), message);
}

static bool step(am_c_call *c, const attnmask_linear_attention *from, const attnmask_array *state_indices,
                 problem *p)
{
    static const attnmask_array none;
    am_request *r = &c->request;
    am_view out, state, index;
    const ptrdiff_t *slots = NULL;
    if (!read_call(c, from, true, p)) return false;
    const ptrdiff_t batch = p->inputs[AM_QUERY].shape[0];
    if (p->linear.tokens != 1 || p->linear.starts)
        return am_refuse(r, AM_WRONG_VALUE, NULL, "query must have one token for each batch row, got %td%s",
                         p->linear.tokens, p->linear.starts ? ", and cum_seqlens" : "");
    if (!am_c_need(c, &p->given.initial_state, "initial_state", &state)) return false;
    const am_view like = states_of(p, state.shape[0]);
    if (!am_c_is_like(c, &state, "initial_state", &like) ||
        !am_c_look(c, state_indices ? state_indices : &none, "state_indices", &index) ||
        !look_at_out(c, p, &p->given.out, "out", &out))
        return false;
    if (index.data && !(slots = am_read_slots(r, &index, batch, state.shape[0]))) return false;
    if (!index.data && state.shape[0] != batch)
        return am_refuse(
            r, AM_WRONG_VALUE, NULL,
            "initial_state must have %td slots as query has batch rows, or state_indices must be "
            "given, got %td slots",
            batch, state.shape[0]);
    const am_linear_step todo = {am_linear_array_of(out), am_linear_states_of(state), slots};
    return !am_has_numbers(&out) || am_refuse_status(r, am_linear_step_all(&c->context, &p->linear, &todo));
}

attnmask_status attnmask_linear_step(const attnmask_linear_attention *call,
                                     const attnmask_array *state_indices, attnmask_message *message)
{
    am_c_call c;
    problem p;
    return am_c_end(&c, am_c_begin(&c) && step(&c, call, state_indices, &p), message);
}
