/* linear_attention.c – bindings of linear attention, its gradients, and one token of it. */
#include <math.h>

#include "bind/python/arguments.h"
#include "bind/request_linear.h"
#include "core/runtime/sizes.h"

typedef struct {
    PyArrayObject *arrays[AM_LINEAR_INPUTS]; /* owned; NULL: not given */
    am_scale scale;
    am_starts starts;
    bool normalize, with_state;
    npy_intp chunk;
    am_out out;
    am_request request;
    am_linear linear;
} arguments;

static int to_chunk_size(PyObject *object, const char *name, void *dst)
{
    npy_intp *chunk = dst;
    if (am_to_count(object, name, dst) < 0) return -1;
    if (*chunk >= 16 && *chunk <= 256 && (*chunk & (*chunk - 1)) == 0) return 0;
    return am_reject(PyExc_ValueError, name, "a power of two from 16 to 256", object);
}

static void release(arguments *a)
{
    for (int i = 0; i < AM_LINEAR_INPUTS; i++) Py_CLEAR(a->arrays[i]);
    Py_CLEAR(a->out.array);
    am_free_starts(&a->starts);
    am_request_free(&a->request);
}

static int wide_type(const arguments *a)
{
    return am_linear_type(&a->linear) == AM_FLOAT64 ? NPY_DOUBLE : NPY_FLOAT;
}

static am_linear_array array_of(PyArrayObject *array)
{
    const am_view v = am_view_of(array);
    return am_linear_array_of(&v);
}

/* Checks the inputs. Those of a step have no axis of tokens. */
static int check(arguments *a, bool step)
{
    am_view inputs[AM_LINEAR_INPUTS];
    am_linear *linear = &a->linear;
    for (int i = 0; i < AM_LINEAR_INPUTS; i++) {
        inputs[i] = am_view_of(a->arrays[i]);
        if (step) inputs[i] = am_with_token(inputs[i]);
    }
    linear->starts = a->starts.starts, linear->sequences = a->starts.sequences;
    if (am_raise_refused(&a->request, am_read_linear(&a->request, inputs, step, linear)) < 0) return -1;
    if (isnan(a->scale.value)) return am_fail(PyExc_ValueError, "scale must be a number, got nan");
    linear->scale = a->scale.given ? a->scale.value : 1 / sqrt((double)am_max(linear->rows, 1));
    linear->normalize = a->normalize;
    linear->chunk = a->chunk;
    return 0;
}

#define PROBLEM(a)                                                                                           \
    {"query", am_to_array, &(a)->arrays[AM_QUERY]}, {"key", am_to_array, &(a)->arrays[AM_KEY]},              \
        {"value", am_to_array, &(a)->arrays[AM_VALUE]},                                                      \
        {"decay", am_to_array_or_none, &(a)->arrays[AM_DECAY]},                                              \
        {"beta", am_to_array_or_none, &(a)->arrays[AM_BETA]}, {"scale", am_to_scale, &(a)->scale},           \
        {"initial_state", am_to_array_or_none, &(a)->arrays[AM_STATE]},                                      \
        {"cu_seqlens", am_to_starts_or_none, &(a)->starts}, {"normalize_qk", am_to_bool, &(a)->normalize},   \
    {                                                                                                        \
        "chunk_size", to_chunk_size, &(a)->chunk                                                             \
    }

enum { PROBLEM_PARAMS = 10 };

/* About how many products a call takes. */
static npy_intp work_of(const arguments *a)
{
    const am_linear *linear = &a->linear;
    return am_product(am_product(PyArray_DIM(a->arrays[AM_QUERY], 0), linear->tokens, linear->heads),
                      am_max(linear->rows, 1), am_max(linear->channels, 1));
}

static PyArrayObject *new_states(const arguments *a)
{
    const am_linear *linear = &a->linear;
    npy_intp const shape[] = {linear->sequences, linear->heads, linear->rows, linear->channels};
    return am_new_array_of(4, shape, wide_type(a));
}

/* The states that gradients need. */
static PyArrayObject *new_kept(const arguments *a)
{
    npy_intp shape[2];
    if (am_linear_kept(&a->linear, &shape[0], &shape[1])) return am_new_array_of(2, shape, wide_type(a));
    PyErr_NoMemory();
    return NULL;
}

/* Computes the result; and unless NULL, the state and what gradients need. */
static PyObject *compute(PyObject *module, arguments *a, PyArrayObject *state, PyArrayObject *kept)
{
    am_owned PyArrayObject *out =
        am_target(&a->out, 4, PyArray_DIMS(a->arrays[AM_VALUE]), PyArray_DESCR(a->arrays[AM_QUERY]));
    if (!out) return NULL;
    am_linear_results results = {.out = array_of(out), .kept = kept ? PyArray_DATA(kept) : NULL};
    if (state) results.state = array_of(state);
    if (PyArray_SIZE(out) || (state && PyArray_SIZE(state)) || (kept && PyArray_SIZE(kept))) {
        if (!am_computed(module, work_of(a), am_linear_forward_all, &a->linear, &results)) return NULL;
    }
    return am_returned(&a->out, out);
}

static PyObject *linear_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_scoped(release) arguments a = {0};
    am_owned PyArrayObject *state = NULL;
    const am_param params[] = {
        PROBLEM(&a), {"return_state", am_to_bool, &a.with_state}, {"out", am_to_out, &a.out}};
    if (am_parse("linear_attention", args, nargs, params, PROBLEM_PARAMS + 2) < 0 || check(&a, false) < 0 ||
        (a.with_state && !(state = new_states(&a))))
        return NULL;
    am_owned PyObject *out = compute(module, &a, state, NULL);
    return out && state ? PyTuple_Pack(2, out, state) : Py_XNewRef(out);
}

/* Checks the arguments alone; returns the shape of what linear_forward_vjp keeps. */
static PyObject *check_linear_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_scoped(release) arguments a = {0};
    ptrdiff_t states, numbers;
    const am_param params[] = {PROBLEM(&a)};
    (void)module;
    if (am_parse("check_linear_attention", args, nargs, params, PROBLEM_PARAMS) < 0 || check(&a, false) < 0)
        return NULL;
    return am_linear_kept(&a.linear, &states, &numbers) ? Py_BuildValue("nn", states, numbers)
                                                        : PyErr_NoMemory();
}

static PyObject *linear_forward_vjp(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_scoped(release) arguments a = {0};
    const am_param params[] = {PROBLEM(&a), {"out", am_to_out, &a.out}};
    if (am_parse("linear_forward_vjp", args, nargs, params, PROBLEM_PARAMS + 1) < 0 || check(&a, false) < 0)
        return NULL;
    am_owned PyArrayObject *state = new_states(&a), *kept = state ? new_kept(&a) : NULL;
    am_owned PyObject *out = kept ? compute(module, &a, state, kept) : NULL;
    return out ? PyTuple_Pack(3, out, state, kept) : NULL;
}

/* --- Gradients --- */

typedef struct {
    arguments a;
    PyArrayObject *kept, *d_out, *d_state;
} gradients;

static void release_gradients(gradients *g)
{
    Py_XDECREF(g->kept);
    Py_XDECREF(g->d_out);
    Py_XDECREF(g->d_state);
    release(&g->a);
}

static bool check_gradient(am_request *r, PyArrayObject *array, const char *name, const char *words,
                           const ptrdiff_t shape[4])
{
    const am_view v = am_view_of(array);
    if (!array) return true;
    return am_is_floating(v.type) ? am_check_shape(r, &v, name, words, 4, shape, false)
                                  : am_refuse(r, AM_WRONG_TYPE, &v, "%s must be floating-point", name);
}

static int check_gradients(gradients *g)
{
    am_request *r = &g->a.request;
    const am_linear *linear = &g->a.linear;
    const ptrdiff_t states[] = {linear->sequences, linear->heads, linear->rows, linear->channels};
    npy_intp kept[2];
    if (!check_gradient(r, g->d_out, "dout", "[B, T, H, V] ", PyArray_DIMS(g->a.arrays[AM_VALUE])) ||
        !check_gradient(r, g->d_state, "dstate", "[N, H, K, V] ", states))
        return am_raise_refused(r, false);
    if (am_linear_kept(linear, &kept[0], &kept[1]) && PyArray_NDIM(g->kept) == 2 &&
        PyArray_CompareLists(PyArray_DIMS(g->kept), kept, 2) && PyArray_TYPE(g->kept) == wide_type(&g->a) &&
        PyArray_IS_C_CONTIGUOUS(g->kept))
        return 0;
    return am_reject(PyExc_ValueError, "kept", "what linear_forward_vjp has returned", g->kept);
}

static PyObject *compute_gradients(PyObject *module, gradients *g)
{
    arguments *a = &g->a;
    am_linear_back back = {.d_out = array_of(g->d_out), .kept = PyArray_DATA(g->kept)};
    if (g->d_state) back.d_state = array_of(g->d_state);
    PyArrayObject *made[AM_LINEAR_INPUTS];
    am_view results[AM_LINEAR_INPUTS];
    am_owned PyObject *result = am_new_like(AM_LINEAR_INPUTS, a->arrays, made);
    if (!result) return NULL;
    for (int i = 0; i < AM_LINEAR_INPUTS; i++) results[i] = am_view_of(made[i]);
    if (am_set_linear_gradients(&back, results)) {
        if (!am_computed(module, work_of(a), am_linear_backward_all, &a->linear, &back)) return NULL;
    }
    return Py_NewRef(result);
}

static PyObject *linear_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_scoped(release_gradients) gradients g = {0};
    const am_param params[] = {PROBLEM(&g.a),
                               {"kept", am_to_array, &g.kept},
                               {"dout", am_to_array, &g.d_out},
                               {"dstate", am_to_array_or_none, &g.d_state}};
    if (am_parse("linear_backward", args, nargs, params, PROBLEM_PARAMS + 3) < 0 || check(&g.a, false) < 0 ||
        check_gradients(&g) < 0)
        return NULL;
    return compute_gradients(module, &g);
}

/* --- One token --- */

typedef struct {
    arguments a;
    am_out state;
    PyArrayObject *indices;
    const ptrdiff_t *slots; /* NULL: each row has its own */
} token_stride;

static void release_step(token_stride *s)
{
    Py_XDECREF(s->state.array);
    Py_XDECREF(s->indices);
    release(&s->a);
}

static int read_slots(token_stride *s)
{
    am_request *r = &s->a.request;
    const npy_intp batch = s->a.linear.sequences, count = PyArray_DIM(s->state.array, 0);
    const am_view indices = am_view_of(s->indices);
    if (s->indices) {
        s->slots = am_read_slots(r, &indices, batch, count);
        return am_raise_refused(r, s->slots);
    }
    return am_raise_refused(
        r, count == batch || am_refuse(r, AM_WRONG_VALUE, NULL,
                                       "state must have %td slots as query has batch rows, or state_indices "
                                       "must be given, got %td slots",
                                       batch, count));
}

static int check_step(token_stride *s)
{
    arguments *a = &s->a;
    if (check(a, true) < 0) return -1;
    if (!s->state.given) return am_reject(PyExc_TypeError, "state", "a NumPy array", Py_None);
    if (PyArray_NDIM(s->state.array) != 4)
        return am_reject(PyExc_ValueError, "state", "[slots, H, K, V]", s->state.given);
    npy_intp const slots = PyArray_DIM(s->state.array, 0);
    npy_intp const shape[] = {slots, a->linear.heads, a->linear.rows, a->linear.channels};
    am_owned PyArray_Descr *dtype = PyArray_DescrFromType(wide_type(a));
    if (am_check_out(s->state.array, "state", 4, shape, dtype) < 0 || read_slots(s) < 0) return -1;
    if (!a->out.given) return 0;
    return am_check_out(a->out.array, "out", 3, PyArray_DIMS(a->arrays[AM_VALUE]),
                        PyArray_DESCR(a->arrays[AM_QUERY]));
}

static PyObject *compute_step(PyObject *module, token_stride *s)
{
    arguments *a = &s->a;
    am_owned PyArrayObject *out =
        am_target(&a->out, 3, PyArray_DIMS(a->arrays[AM_VALUE]), PyArray_DESCR(a->arrays[AM_QUERY]));
    if (!out) return NULL;
    if (PyArray_SIZE(out)) {
        const am_view tokens = am_with_token(am_view_of(out));
        const am_linear_step step = {am_linear_array_of(&tokens), array_of(s->state.array), s->slots};
        if (!am_computed(module, work_of(a), am_linear_step_all, &a->linear, &step)) return NULL;
    }
    return am_returned(&a->out, out);
}

/* `compute_it` is NULL where the arguments are only checked. */
static PyObject *take_step(PyObject *module, PyObject *const *args, Py_ssize_t nargs, const char *name,
                           PyObject *(*compute_it)(PyObject *, token_stride *))
{
    am_scoped(release_step) token_stride s = {.a.chunk = 16};
    const am_param params[] = {
        {"query", am_to_array, &s.a.arrays[AM_QUERY]},
        {"key", am_to_array, &s.a.arrays[AM_KEY]},
        {"value", am_to_array, &s.a.arrays[AM_VALUE]},
        {"state", am_to_out, &s.state},
        {"decay", am_to_array_or_none, &s.a.arrays[AM_DECAY]},
        {"beta", am_to_array_or_none, &s.a.arrays[AM_BETA]},
        {"scale", am_to_scale, &s.a.scale},
        {"normalize_qk", am_to_bool, &s.a.normalize},
        {"state_indices", am_to_array_or_none, &s.indices},
        {"out", am_to_out, &s.a.out},
    };
    if (am_parse(name, args, nargs, params, 10) < 0 || check_step(&s) < 0) return NULL;
    return compute_it ? compute_it(module, &s) : Py_NewRef(Py_None);
}

AM_VARIANT(linear_attention_step, take_step, "linear_attention_step", compute_step)
AM_VARIANT(check_linear_attention_step, take_step, "check_linear_attention_step", NULL)

PyMethodDef am_linear_attention_methods[] = {
    AM_METHOD(linear_attention, "query, key, value, decay, beta, scale, initial_state, cu_seqlens, "
                                "normalize_qk, chunk_size, return_state, out"),
    AM_METHOD(check_linear_attention,
              "query, key, value, decay, beta, scale, initial_state, cu_seqlens, normalize_qk, chunk_size"),
    AM_METHOD(
        linear_forward_vjp,
        "query, key, value, decay, beta, scale, initial_state, cu_seqlens, normalize_qk, chunk_size, out"),
    AM_METHOD(linear_backward, "query, key, value, decay, beta, scale, initial_state, cu_seqlens, "
                               "normalize_qk, chunk_size, kept, dout, dstate"),
    AM_METHOD(linear_attention_step,
              "query, key, value, state, decay, beta, scale, normalize_qk, state_indices, out"),
    AM_METHOD(check_linear_attention_step,
              "query, key, value, state, decay, beta, scale, normalize_qk, state_indices, out"),
    {.ml_name = NULL},
};
