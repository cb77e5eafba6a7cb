/* linear_attention.c – bindings of linear attention, its gradients, and one token of it. */
#include <math.h>

#include "bind/python/arguments.h"
#include "bind/python/slots.h"
#include "bind/python/masks.h"
#include "core/runtime/sizes.h"
#include "core/linear/linear.h"

enum { QUERY, KEY, VALUE, DECAY, BETA, STATE, INPUTS };
static const char *const names[INPUTS] = {"query", "key", "value", "decay", "beta", "initial_state"};

typedef struct {
    PyArrayObject *arrays[INPUTS]; /* owned; NULL: not given */
    am_scale scale;
    am_starts starts;
    bool normalize, with_state;
    npy_intp chunk;
    am_out out;
    am_linear linear;
    npy_intp batch;
} arguments;

static int to_array_or_none(PyObject *object, const char *name, void *dst)
{
    return object == Py_None ? 0 : am_to_array(object, name, dst);
}

static int to_chunk_size(PyObject *object, const char *name, void *dst)
{
    npy_intp *chunk = dst;
    if (am_to_count(object, name, dst) < 0) return -1;
    if (*chunk >= 16 && *chunk <= 256 && (*chunk & (*chunk - 1)) == 0) return 0;
    return am_reject(PyExc_ValueError, name, "a power of two from 16 to 256", object);
}

static void release(arguments *a)
{
    for (int i = 0; i < INPUTS; i++) Py_CLEAR(a->arrays[i]);
    Py_CLEAR(a->out.array);
    am_free_starts(&a->starts);
}

/* Raises an error that says which shape an array must have. Returns -1. */
static int reject_shape(PyArrayObject *array, const char *name, const char *axes, int ndim,
                        npy_intp const *shape)
{
    PyObject *expected = PyArray_IntTupleFromIntp(ndim, shape), *what = am_describe((PyObject *)array);
    if (expected && what)
        PyErr_Format(PyExc_ValueError, "%s must be %s of shape %S, got %U", name, axes, expected, what);
    Py_XDECREF(expected);
    Py_XDECREF(what);
    return -1;
}

static bool has_shape(PyArrayObject *array, int ndim, npy_intp const *shape)
{
    return PyArray_NDIM(array) == ndim && PyArray_CompareLists(PyArray_DIMS(array), shape, ndim);
}

static am_dtype type_of(PyArrayObject *array) { return am_dtype_of(PyArray_DESCR(array)); }
static bool is_double(const arguments *a) { return type_of(a->arrays[QUERY]) == AM_FLOAT64; }
static int wide_type(const arguments *a) { return is_double(a) ? NPY_DOUBLE : NPY_FLOAT; }

static int reject_type(PyArrayObject *array, const char *name, const char *expected)
{
    return am_reject(PyExc_TypeError, name, expected, (PyObject *)array);
}

static int reject_gate(PyArrayObject *array, const char *name)
{
    PyObject *what = am_describe((PyObject *)array);
    if (what)
        PyErr_Format(PyExc_TypeError,
                     "%s must be float32, or of the dtype of query, got %U; write %s.astype(query.dtype)",
                     name, what, name);
    Py_XDECREF(what);
    return -1;
}

static int check_types(const arguments *a)
{
    PyArrayObject *const *arrays = a->arrays;
    const am_dtype type = type_of(arrays[QUERY]);
    if (!am_is_floating(type))
        return reject_type(arrays[QUERY], "query", "of float16, bfloat16, float32 or float64");
    for (int i = KEY; i <= VALUE; i++) {
        if (type_of(arrays[i]) != type) return reject_type(arrays[i], names[i], "of the dtype of query");
    }
    for (int i = DECAY; i <= BETA; i++) {
        if (arrays[i] && type_of(arrays[i]) != type && type_of(arrays[i]) != AM_FLOAT32)
            return reject_gate(arrays[i], names[i]);
    }
    if (arrays[STATE] && type_of(arrays[STATE]) != am_linear_type(&a->linear))
        return reject_type(arrays[STATE], "initial_state", is_double(a) ? "float64" : "float32");
    return 0;
}

static int check_axes(PyArrayObject *array, const char *name)
{
    for (int i = 0; i < PyArray_NDIM(array); i++) {
        if (PyArray_DIM(array, i) > AM_LONGEST)
            return am_reject(PyExc_ValueError, name, "of at most 2**56 along each axis", (PyObject *)array);
    }
    return 0;
}

/* Reads shapes of queries, keys and values, of `axes` axes: 4, or 3 for one token. */
static int check_tokens(arguments *a, int axes)
{
    PyArrayObject *const *arrays = a->arrays;
    static const char *const layouts[] = {"[B, Hk, K]", "[B, T, Hk, K]", "[B, H, V]", "[B, T, H, V]"};
    for (int i = QUERY; i <= VALUE; i++) {
        const char *layout = layouts[(i == VALUE) * 2 + axes - 3];
        if (PyArray_NDIM(arrays[i]) != axes)
            return am_reject(PyExc_ValueError, names[i], layout, (PyObject *)arrays[i]);
        if (check_axes(arrays[i], names[i]) < 0) return -1;
    }
    npy_intp const *q = PyArray_DIMS(arrays[QUERY]), *v = PyArray_DIMS(arrays[VALUE]);
    if (!has_shape(arrays[KEY], axes, q)) return reject_shape(arrays[KEY], "key", "an array", axes, q);
    npy_intp expected[4] = {q[0], q[1], v[axes - 2], v[axes - 1]};
    if (axes == 3) expected[1] = v[1], expected[2] = v[2];
    if (!has_shape(arrays[VALUE], axes, expected))
        return reject_shape(arrays[VALUE], "value", "an array", axes, expected);
    const npy_intp heads = v[axes - 2], key_heads = q[axes - 2];
    if (key_heads == 0 ? heads != 0 : heads % key_heads != 0) {
        PyErr_Format(PyExc_ValueError, "value must have a multiple of the %zd heads of key, got %zd",
                     key_heads, heads);
        return -1;
    }
    a->batch = q[0];
    a->linear.heads = heads, a->linear.key_heads = key_heads;
    a->linear.rows = q[axes - 1], a->linear.channels = v[axes - 1];
    a->linear.tokens = axes == 4 ? q[1] : 1;
    return 0;
}

/* decay and beta; `axes` of queries. */
static int check_gates(arguments *a, int axes)
{
    PyArrayObject *decay = a->arrays[DECAY], *beta = a->arrays[BETA];
    npy_intp shape[4] = {a->batch, a->linear.tokens, a->linear.heads, a->linear.rows};
    if (axes == 3) shape[1] = shape[2], shape[2] = shape[3];
    const char *gate = axes == 4 ? "[B, T, H]" : "[B, H]";
    if (decay && !has_shape(decay, 1, &shape[axes - 2]) && !has_shape(decay, axes - 1, shape) &&
        !has_shape(decay, axes, shape))
        return reject_shape(decay, "decay",
                            axes == 4 ? "[H], [B, T, H], or [B, T, H, K]" : "[H], [B, H], or [B, H, K]", axes,
                            shape);
    if (beta && !has_shape(beta, axes - 1, shape)) return reject_shape(beta, "beta", gate, axes - 1, shape);
    a->linear.by_channel = decay && PyArray_NDIM(decay) == axes;
    return 0;
}

static int check_sequences(arguments *a)
{
    am_linear *linear = &a->linear;
    linear->sequences = a->batch;
    if (a->starts.array) {
        const npy_intp end = a->starts.starts[a->starts.sequences];
        if (a->batch != 1) {
            PyErr_Format(PyExc_ValueError, "query must have batch size 1 when cu_seqlens is given, got %zd",
                         a->batch);
            return -1;
        }
        if (end != linear->tokens) {
            PyErr_Format(PyExc_ValueError, "cu_seqlens must end at the %zd tokens of query, got %zd",
                         linear->tokens, end);
            return -1;
        }
        linear->starts = a->starts.starts;
        linear->sequences = a->starts.sequences;
    }
    npy_intp const shape[] = {linear->sequences, linear->heads, linear->rows, linear->channels};
    PyArrayObject *state = a->arrays[STATE];
    if (state && !has_shape(state, 4, shape))
        return reject_shape(state, "initial_state", "[N, H, K, V]", 4, shape);
    return 0;
}

/* An array of which the first axis is of batch rows, and the last `ndim - skip` ones lie behind heads. */
static am_linear_array array_of(PyArrayObject *array)
{
    am_linear_array to = {.data = PyArray_BYTES(array), .type = type_of(array)};
    const int ndim = PyArray_NDIM(array);
    if (ndim == 1) {
        to.stride[2] = PyArray_STRIDE(array, 0);
        return to;
    }
    for (int i = 0; i < ndim; i++) to.stride[i] = PyArray_STRIDE(array, i);
    return to;
}

/* Of arrays without an axis of tokens. */
static am_linear_array token_array_of(PyArrayObject *array)
{
    am_linear_array to = array_of(array);
    if (PyArray_NDIM(array) == 1) return to;
    to.stride[3] = to.stride[2], to.stride[2] = to.stride[1], to.stride[1] = 0;
    return to;
}

static int finish(arguments *a, am_linear_array (*of)(PyArrayObject *))
{
    am_linear *linear = &a->linear;
    am_linear_array *const places[] = {&linear->query, &linear->key, &linear->value, &linear->decay,
                                       &linear->beta};
    for (int i = QUERY; i <= BETA; i++) {
        if (a->arrays[i]) *places[i] = of(a->arrays[i]);
    }
    if (isnan(a->scale.value)) {
        PyErr_SetString(PyExc_ValueError, "scale must be a number, got nan");
        return -1;
    }
    linear->scale = a->scale.given ? a->scale.value : 1 / sqrt((double)am_max(linear->rows, 1));
    linear->normalize = a->normalize;
    linear->chunk = a->chunk;
    return 0;
}

static int check(arguments *a)
{
    a->linear.query.type = type_of(a->arrays[QUERY]);
    if (check_types(a) < 0 || check_tokens(a, 4) < 0 || check_gates(a, 4) < 0 || check_sequences(a) < 0)
        return -1;
    if (finish(a, array_of) < 0) return -1;
    if (a->arrays[STATE]) a->linear.state = array_of(a->arrays[STATE]);
    return 0;
}

#define PROBLEM(a)                                                                                           \
    {"query", am_to_array, &(a)->arrays[QUERY]}, {"key", am_to_array, &(a)->arrays[KEY]},                    \
        {"value", am_to_array, &(a)->arrays[VALUE]}, {"decay", to_array_or_none, &(a)->arrays[DECAY]},       \
        {"beta", to_array_or_none, &(a)->arrays[BETA]}, {"scale", am_to_scale, &(a)->scale},                 \
        {"initial_state", to_array_or_none, &(a)->arrays[STATE]},                                            \
        {"cu_seqlens", am_to_starts_or_none, &(a)->starts}, {"normalize_qk", am_to_bool, &(a)->normalize},   \
    {                                                                                                        \
        "chunk_size", to_chunk_size, &(a)->chunk                                                             \
    }

enum { PROBLEM_PARAMS = 10 };

/* About how many products a call takes. */
static npy_intp work_of(const am_linear *linear, npy_intp batch)
{
    return am_product(am_product(batch, linear->tokens, linear->heads), am_max(linear->rows, 1),
                      am_max(linear->channels, 1));
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
static PyArrayObject *compute(PyObject *module, arguments *a, PyArrayObject *state, PyArrayObject *kept)
{
    npy_intp const *shape = PyArray_DIMS(a->arrays[VALUE]);
    PyArrayObject *const inputs[] = {a->arrays[QUERY], a->arrays[KEY],  a->arrays[VALUE],
                                     a->arrays[DECAY], a->arrays[BETA], a->arrays[STATE]};
    if (a->out.given && am_check_out(a->out.array, "out", 4, shape, PyArray_DESCR(a->arrays[QUERY]), inputs,
                                     names, INPUTS) < 0)
        return NULL;
    PyArrayObject *out = am_target(&a->out, 4, shape, PyArray_DESCR(a->arrays[QUERY]));
    if (!out) return NULL;
    am_linear_results results = {.out = array_of(out), .kept = kept ? PyArray_DATA(kept) : NULL};
    if (state) results.state = array_of(state);
    am_status status = AM_OK;
    if (PyArray_SIZE(out) || (state && PyArray_SIZE(state)) || (kept && PyArray_SIZE(kept))) {
        am_call call;
        am_enter(&call, module, work_of(&a->linear, a->batch));
        status = am_linear_forward_all(&call.context, &a->linear, &results);
        am_leave(&call);
    }
    if (status == AM_OK) return out;
    Py_DECREF(out);
    am_raise(status, NULL);
    return NULL;
}

static PyObject *linear_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    arguments a = {0};
    PyArrayObject *state = NULL, *out;
    PyObject *result = NULL;
    const am_param params[] = {
        PROBLEM(&a), {"return_state", am_to_bool, &a.with_state}, {"out", am_to_out, &a.out}};
    if (am_parse("linear_attention", args, nargs, params, PROBLEM_PARAMS + 2) < 0 || check(&a) < 0) goto fail;
    if (a.with_state && !(state = new_states(&a))) goto fail;
    out = compute(module, &a, state, NULL);
    if (!out) goto fail;
    result = am_returned(&a.out, out);
    if (state) result = Py_BuildValue("NN", result, Py_NewRef(state));
fail:
    Py_XDECREF(state);
    release(&a);
    return result;
}

/* Checks the arguments alone; returns the shape of what linear_forward_vjp keeps. */
static PyObject *check_linear_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    arguments a = {0};
    ptrdiff_t states, numbers;
    PyObject *result = NULL;
    const am_param params[] = {PROBLEM(&a)};
    (void)module;
    if (am_parse("check_linear_attention", args, nargs, params, PROBLEM_PARAMS) == 0 && check(&a) == 0) {
        if (am_linear_kept(&a.linear, &states, &numbers))
            result = Py_BuildValue("nn", states, numbers);
        else
            PyErr_NoMemory();
    }
    release(&a);
    return result;
}

static PyObject *linear_forward_vjp(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    arguments a = {0};
    PyArrayObject *state = NULL, *kept = NULL, *out;
    PyObject *result = NULL;
    const am_param params[] = {PROBLEM(&a), {"out", am_to_out, &a.out}};
    if (am_parse("linear_forward_vjp", args, nargs, params, PROBLEM_PARAMS + 1) < 0 || check(&a) < 0)
        goto fail;
    state = new_states(&a);
    kept = state ? new_kept(&a) : NULL;
    out = kept ? compute(module, &a, state, kept) : NULL;
    if (!out) goto fail;
    result = Py_BuildValue("NOO", am_returned(&a.out, out), state, kept);
fail:
    Py_XDECREF(state);
    Py_XDECREF(kept);
    release(&a);
    return result;
}

/* --- Gradients --- */

typedef struct {
    arguments a;
    PyArrayObject *kept, *d_out, *d_state;
    PyArrayObject *results[INPUTS]; /* owned; NULL: not given */
} gradients;

static int check_gradients(const gradients *g)
{
    const arguments *a = &g->a;
    const am_linear *linear = &a->linear;
    npy_intp const *shape = PyArray_DIMS(a->arrays[VALUE]);
    npy_intp const states[] = {linear->sequences, linear->heads, linear->rows, linear->channels};
    npy_intp kept[2];
    if (!am_is_floating(type_of(g->d_out))) return reject_type(g->d_out, "dout", "floating-point");
    if (!has_shape(g->d_out, 4, shape)) return reject_shape(g->d_out, "dout", "[B, T, H, V]", 4, shape);
    if (g->d_state && !am_is_floating(type_of(g->d_state)))
        return reject_type(g->d_state, "dstate", "floating-point");
    if (g->d_state && !has_shape(g->d_state, 4, states))
        return reject_shape(g->d_state, "dstate", "[N, H, K, V]", 4, states);
    if (am_linear_kept(linear, &kept[0], &kept[1]) && has_shape(g->kept, 2, kept) &&
        PyArray_TYPE(g->kept) == wide_type(a) && PyArray_IS_C_CONTIGUOUS(g->kept))
        return 0;
    return am_reject(PyExc_ValueError, "kept", "what linear_forward_vjp has returned", (PyObject *)g->kept);
}

static int make_results(gradients *g)
{
    for (int i = 0; i < INPUTS; i++) {
        PyArrayObject *array = g->a.arrays[i];
        if (!array) continue;
        g->results[i] = am_new_array(PyArray_NDIM(array), PyArray_DIMS(array), PyArray_DESCR(array));
        if (!g->results[i]) return -1;
    }
    return 0;
}

static PyObject *compute_gradients(PyObject *module, gradients *g)
{
    arguments *a = &g->a;
    am_linear_back back = {.d_out = array_of(g->d_out), .kept = PyArray_DATA(g->kept)};
    if (g->d_state) back.d_state = array_of(g->d_state);
    am_linear_array *const places[] = {&back.query, &back.key,  &back.value,
                                       &back.decay, &back.beta, &back.state};
    npy_intp size = 0;
    for (int i = 0; i < INPUTS; i++) {
        if (!g->results[i]) continue;
        *places[i] = array_of(g->results[i]);
        size |= PyArray_SIZE(g->results[i]);
    }
    back.decay_of_heads = g->results[DECAY] && PyArray_NDIM(g->results[DECAY]) == 1;
    am_status status = AM_OK;
    if (size) {
        am_call call;
        am_enter(&call, module, work_of(&a->linear, a->batch));
        status = am_linear_backward_all(&call.context, &a->linear, &back);
        am_leave(&call);
    }
    if (status != AM_OK) return am_raise(status, NULL);
    PyObject *result = PyTuple_New(INPUTS);
    for (int i = 0; result && i < INPUTS; i++)
        PyTuple_SET_ITEM(result, i, Py_NewRef(g->results[i] ? (PyObject *)g->results[i] : Py_None));
    return result;
}

static PyObject *linear_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    gradients g = {0};
    PyObject *result = NULL;
    const am_param params[] = {PROBLEM(&g.a),
                               {"kept", am_to_array, &g.kept},
                               {"dout", am_to_array, &g.d_out},
                               {"dstate", to_array_or_none, &g.d_state}};
    if (am_parse("linear_backward", args, nargs, params, PROBLEM_PARAMS + 3) == 0 && check(&g.a) == 0 &&
        check_gradients(&g) == 0 && make_results(&g) == 0)
        result = compute_gradients(module, &g);
    for (int i = 0; i < INPUTS; i++) Py_XDECREF(g.results[i]);
    Py_XDECREF(g.kept);
    Py_XDECREF(g.d_out);
    Py_XDECREF(g.d_state);
    release(&g.a);
    return result;
}

/* --- One token --- */

typedef struct {
    arguments a;
    am_out state;
    PyArrayObject *indices;
    ptrdiff_t *slots; /* owned; NULL: each row has its own */
} token_step;

static int to_state(PyObject *object, const char *name, void *dst)
{
    if (object == Py_None) return am_reject(PyExc_TypeError, name, "a NumPy array", object);
    return am_to_out(object, name, dst);
}

static int read_slots(token_step *s)
{
    const npy_intp batch = s->a.batch, count = PyArray_DIM(s->state.array, 0);
    if (s->indices) {
        s->slots = am_read_slots(s->indices, batch, count);
        return s->slots ? 0 : -1;
    }
    if (count != batch) {
        PyErr_Format(PyExc_ValueError,
                     "state must have %zd slots as query has batch rows, or state_indices "
                     "must be given, got %zd slots",
                     batch, count);
        return -1;
    }
    return 0;
}

static int check_step(token_step *s)
{
    arguments *a = &s->a;
    a->linear.query.type = type_of(a->arrays[QUERY]);
    if (check_types(a) < 0 || check_tokens(a, 3) < 0 || check_gates(a, 3) < 0 ||
        finish(a, token_array_of) < 0)
        return -1;
    a->linear.sequences = a->batch;
    if (PyArray_NDIM(s->state.array) != 4)
        return am_reject(PyExc_ValueError, "state", "[slots, H, K, V]", s->state.given);
    npy_intp const slots = PyArray_DIM(s->state.array, 0);
    npy_intp const shape[] = {slots, a->linear.heads, a->linear.rows, a->linear.channels};
    PyArray_Descr *dtype = PyArray_DescrFromType(wide_type(a));
    int status = am_check_out(s->state.array, "state", 4, shape, dtype, a->arrays, names, INPUTS);
    Py_DECREF(dtype);
    if (status < 0 || read_slots(s) < 0) return -1;
    if (!a->out.given) return 0;
    if (am_check_apart(a->out.array, "out", s->state.array, "state") < 0) return -1;
    return am_check_out(a->out.array, "out", 3, PyArray_DIMS(a->arrays[VALUE]),
                        PyArray_DESCR(a->arrays[QUERY]), a->arrays, names, INPUTS);
}

static PyObject *compute_step(PyObject *module, token_step *s)
{
    arguments *a = &s->a;
    PyArrayObject *out =
        am_target(&a->out, 3, PyArray_DIMS(a->arrays[VALUE]), PyArray_DESCR(a->arrays[QUERY]));
    if (!out) return NULL;
    am_status status = AM_OK;
    if (PyArray_SIZE(out)) {
        const am_linear_step step = {token_array_of(out), array_of(s->state.array), s->slots};
        am_call call;
        am_enter(&call, module, work_of(&a->linear, a->batch));
        status = am_linear_step_all(&call.context, &a->linear, &step);
        am_leave(&call);
    }
    if (status == AM_OK) return am_returned(&a->out, out);
    Py_DECREF(out);
    return am_raise(status, NULL);
}

/* `compute_it` is NULL where the arguments are only checked. */
static PyObject *take_step(PyObject *module, PyObject *const *args, Py_ssize_t nargs, const char *name,
                           PyObject *(*compute_it)(PyObject *, token_step *))
{
    token_step s = {.a.chunk = 16};
    PyObject *result = NULL;
    const am_param params[] = {
        {"query", am_to_array, &s.a.arrays[QUERY]},
        {"key", am_to_array, &s.a.arrays[KEY]},
        {"value", am_to_array, &s.a.arrays[VALUE]},
        {"state", to_state, &s.state},
        {"decay", to_array_or_none, &s.a.arrays[DECAY]},
        {"beta", to_array_or_none, &s.a.arrays[BETA]},
        {"scale", am_to_scale, &s.a.scale},
        {"normalize_qk", am_to_bool, &s.a.normalize},
        {"state_indices", to_array_or_none, &s.indices},
        {"out", am_to_out, &s.a.out},
    };
    if (am_parse(name, args, nargs, params, 10) == 0 && check_step(&s) == 0)
        result = compute_it ? compute_it(module, &s) : Py_NewRef(Py_None);
    Py_XDECREF(s.state.array);
    Py_XDECREF(s.indices);
    free(s.slots);
    release(&s.a);
    return result;
}

static PyObject *linear_attention_step(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return take_step(module, args, nargs, "linear_attention_step", compute_step);
}

static PyObject *check_linear_attention_step(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return take_step(module, args, nargs, "check_linear_attention_step", NULL);
}

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
