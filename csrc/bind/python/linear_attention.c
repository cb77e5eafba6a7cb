/* linear_attention.c – bindings of linear attention, its gradients, and one token of it. */
#include <math.h>
#include <string.h>

#include "bind/python/arguments.h"
#include "bind/request_linear.h"
#include "core/runtime/sizes.h"

/* Behind the inputs: what linear_forward_vjp has kept, gradients of the results, and the slots of a step. */
enum { KEPT = AM_LINEAR_INPUTS, D_OUT, D_STATE, INDICES, ARRAYS };

typedef struct {
    PyArrayObject *arrays[ARRAYS]; /* owned; NULL: not given */
    am_scale scale;
    am_starts cu_seqlens;
    bool normalize_qk, return_state;
    npy_intp chunk_size; /* not of a step */
    am_out out, state;   /* state: of a step, which is updated */
    am_request request;
    am_linear linear;
    const ptrdiff_t *slots; /* of a step; NULL: each row has its own */
} arguments;

static int to_chunk_size(PyObject *object, const char *name, void *dst)
{
    npy_intp *chunk = dst;
    if (am_to_count(object, name, dst) < 0) return -1;
    if (*chunk < 1 || *chunk > AM_LINEAR_MOST_CHUNK || (*chunk & (*chunk - 1)))
        return am_reject(PyExc_ValueError, name, "a power of two up to 256", object);
    *chunk = am_max(*chunk, AM_LINEAR_LEAST_CHUNK);
    return 0;
}

static int wide_type(const arguments *a)
{
    return am_linear_type(&a->linear) == AM_FLOAT64 ? NPY_DOUBLE : NPY_FLOAT;
}

/* As signed integers, floating-point numbers above zero are so too. */
static bool begins_above_zero(PyArrayObject *array)
{
    const void *number = PyArray_DATA(array);
    int16_t half;
    int32_t single;
    int64_t whole;
    switch (PyArray_ITEMSIZE(array)) {
    case 2: return memcpy(&half, number, sizeof half), half > 0;
    case 4: return memcpy(&single, number, sizeof single), single > 0;
    default: return memcpy(&whole, number, sizeof whole), whole > 0;
    }
}

/* Asks for habits of other libraries, where there may be one: [B, H, T, D], and decays that are not
 * logarithms. */
static int look_for_habits(const arguments *a, bool step)
{
    const am_linear *linear = &a->linear;
    PyArrayObject *decay = a->arrays[AM_DECAY];
    const ptrdiff_t tokens = step ? 1 : linear->tokens, heads = linear->heads;
    if (tokens > 1 && heads > 64 && heads / 2 >= tokens && !linear->starts &&
        am_habit("(s(nn)(nn)i)", "tokens", tokens, heads, tokens, linear->key_heads, 0) < 0)
        return -1;
    return decay && PyArray_SIZE(decay) && begins_above_zero(decay) ? am_habit("(sO)", "decay", decay) : 0;
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
    linear->starts = a->cu_seqlens.starts, linear->sequences = a->cu_seqlens.sequences;
    if (am_raise_refused(&a->request, am_read_linear(&a->request, inputs, step, linear)) < 0) return -1;
    if (isnan(a->scale.value)) return am_fail(PyExc_ValueError, "scale must be a number, got nan");
    linear->scale = a->scale.given ? a->scale.value : 1 / sqrt((double)am_max(linear->key_dim, 1));
    linear->normalize = a->normalize_qk;
    linear->chunk = step ? 16 : a->chunk_size;
    return look_for_habits(a, step);
}

/* The arguments of all but a step. */
#define INPUT(name, to, i) AM_PARAM(#name, to, arrays[i])
#define QKV                                                                                                  \
    INPUT(query, am_to_array, AM_QUERY), INPUT(key, am_to_array, AM_KEY), INPUT(value, am_to_array, AM_VALUE)
#define GATES INPUT(decay, am_to_array_or_none, AM_DECAY), INPUT(beta, am_to_array_or_none, AM_BETA)
#define PROBLEM                                                                                              \
    QKV, GATES, AM_ARG(scale, am_to_scale), INPUT(initial_state, am_to_array_or_none, AM_STATE),             \
        AM_ARG(cu_seqlens, am_to_starts_or_none), AM_ARG(normalize_qk, am_to_bool),                          \
        AM_ARG(chunk_size, to_chunk_size)
#define CHECKED(check, computed) am_ended(&a->request, check < 0 ? NULL : computed)

/* About how many products a call takes. */
static npy_intp work_of(const arguments *a)
{
    const am_linear *linear = &a->linear;
    return am_product(am_product(PyArray_DIM(a->arrays[AM_QUERY], 0), linear->tokens, linear->heads),
                      am_max(linear->key_dim, 1), am_max(linear->value_dim, 1));
}

static PyArrayObject *new_states(const arguments *a)
{
    const am_linear *linear = &a->linear;
    npy_intp const shape[] = {linear->sequences, linear->heads, linear->key_dim, linear->value_dim};
    return am_new_array_of(4, shape, wide_type(a));
}

/* The states that gradients need. */
static PyArrayObject *new_kept(const arguments *a)
{
    npy_intp shape[2];
    return am_linear_kept(&a->linear, &shape[0], &shape[1]) ? am_new_array_of(2, shape, wide_type(a))
                                                            : (PyArrayObject *)PyErr_NoMemory();
}

/* Computes the result; and unless NULL, the state and what gradients need. */
static PyObject *compute(PyObject *module, arguments *a, PyArrayObject *state, PyArrayObject *kept)
{
    am_owned PyArrayObject *out =
        am_target(&a->out, 4, PyArray_DIMS(a->arrays[AM_VALUE]), PyArray_DESCR(a->arrays[AM_QUERY]));
    if (!out) return NULL;
    const am_linear_results results = {.out = am_linear_array_of(am_view_of(out)),
                                       .state = am_linear_states_of(am_view_of(state)),
                                       .kept = kept ? PyArray_DATA(kept) : NULL};
    const bool empty = !PyArray_SIZE(out) && !(state && PyArray_SIZE(state)) && !(kept && PyArray_SIZE(kept));
    return empty || am_computed(module, work_of(a), am_linear_forward_all, &a->linear, &results)
               ? am_returned(&a->out, out)
               : NULL;
}

/* Returns the result, and the state if it is wanted; and behind them what gradients need, if that is. */
static PyObject *forward(PyObject *module, arguments *a, bool keep)
{
    am_owned PyArrayObject *state = a->return_state ? new_states(a) : NULL, *kept = NULL;
    if ((a->return_state && !state) || (keep && !(kept = new_kept(a)))) return NULL;
    am_owned PyObject *out = compute(module, a, state, kept);
    if (!out) return NULL;
    if (keep) return state ? Py_BuildValue("(OO)O", out, state, kept) : PyTuple_Pack(2, out, kept);
    return state ? PyTuple_Pack(2, out, state) : Py_NewRef(out);
}
#define RESULTS AM_ARG(return_state, am_to_bool), AM_ARG(out, am_to_out)
AM_FUNCTION(linear_attention, CHECKED(check(a, false), forward(module, a, false)), PROBLEM, RESULTS)
AM_FUNCTION(linear_forward_vjp, CHECKED(check(a, false), forward(module, a, true)), PROBLEM, RESULTS)

/* The shape of what linear_forward_vjp keeps. */
static PyObject *kept_shape(const arguments *a)
{
    ptrdiff_t states, numbers;
    return am_linear_kept(&a->linear, &states, &numbers) ? Py_BuildValue("nn", states, numbers)
                                                         : PyErr_NoMemory();
}
AM_FUNCTION(check_linear_attention, CHECKED(check(a, false), kept_shape(a)), PROBLEM)

/* --- Gradients --- */

static bool check_gradient(am_request *r, PyArrayObject *array, const char *name, const char *words,
                           const ptrdiff_t shape[4])
{
    const am_view v = am_view_of(array);
    if (!array) return true;
    return am_is_floating(v.type) ? am_check_shape(r, &v, name, words, 4, shape, false)
                                  : am_refuse(r, AM_WRONG_TYPE, &v, "%s must be floating-point", name);
}

static int check_gradients(arguments *a)
{
    am_request *r = &a->request;
    const am_linear *linear = &a->linear;
    const ptrdiff_t states[] = {linear->sequences, linear->heads, linear->key_dim, linear->value_dim};
    PyArrayObject *kept = a->arrays[KEPT];
    npy_intp shape[2];
    if (!check_gradient(r, a->arrays[D_OUT], "dout", "[B, T, H, V] ", PyArray_DIMS(a->arrays[AM_VALUE])) ||
        !check_gradient(r, a->arrays[D_STATE], "dstate", "[N, H, K, V] ", states))
        return am_raise_refused(r, false);
    if (am_linear_kept(linear, &shape[0], &shape[1]) && PyArray_NDIM(kept) == 2 &&
        PyArray_CompareLists(PyArray_DIMS(kept), shape, 2) && PyArray_TYPE(kept) == wide_type(a) &&
        PyArray_IS_C_CONTIGUOUS(kept))
        return 0;
    return am_reject(PyExc_ValueError, "kept", "what linear_forward_vjp has returned", kept);
}

static PyObject *compute_gradients(PyObject *module, arguments *a)
{
    if (check_gradients(a) < 0) return NULL;
    am_linear_back back = {.d_out = am_linear_array_of(am_view_of(a->arrays[D_OUT])),
                           .d_state = am_linear_states_of(am_view_of(a->arrays[D_STATE])),
                           .kept = PyArray_DATA(a->arrays[KEPT])};
    PyArrayObject *made[AM_LINEAR_INPUTS];
    am_view results[AM_LINEAR_INPUTS];
    am_owned PyObject *result = am_new_like(AM_LINEAR_INPUTS, a->arrays, made);
    if (!result) return NULL;
    for (int i = 0; i < AM_LINEAR_INPUTS; i++) results[i] = am_view_of(made[i]);
    if (am_set_linear_gradients(&back, results) &&
        !am_computed(module, work_of(a), am_linear_backward_all, &a->linear, &back))
        return NULL;
    return Py_NewRef(result);
}
AM_FUNCTION(linear_backward, CHECKED(check(a, false), compute_gradients(module, a)), PROBLEM,
            INPUT(kept, am_to_array, KEPT), INPUT(dout, am_to_array, D_OUT),
            INPUT(dstate, am_to_array_or_none, D_STATE))

/* --- One token --- */

static bool read_slots(arguments *a)
{
    am_request *r = &a->request;
    const npy_intp batch = a->linear.sequences, count = PyArray_DIM(a->state.array, 0);
    const am_view indices = am_view_of(a->arrays[INDICES]);
    if (indices.data) return (a->slots = am_read_slots(r, &indices, batch, count));
    return count == batch || am_refuse(r, AM_WRONG_VALUE, NULL,
                                       "state must have %td slots as query has batch rows, or state_indices "
                                       "must be given, got %td slots",
                                       batch, count);
}

static int check_step(arguments *a)
{
    PyArrayObject *state = a->state.array;
    if (check(a, true) < 0) return -1;
    if (!state) return am_reject(PyExc_TypeError, "state", "a NumPy array", Py_None);
    if (PyArray_NDIM(state) != 4)
        return am_reject(PyExc_ValueError, "state", "[slots, H, K, V]", a->state.given);
    npy_intp const shape[] = {PyArray_DIM(state, 0), a->linear.heads, a->linear.key_dim, a->linear.value_dim};
    am_owned PyArray_Descr *dtype = PyArray_DescrFromType(wide_type(a));
    if (am_check_out(state, "state", 4, shape, dtype) < 0) return -1;
    return am_raise_refused(&a->request, read_slots(a));
}

static PyObject *compute_step(PyObject *module, arguments *a)
{
    am_owned PyArrayObject *out =
        am_target(&a->out, 3, PyArray_DIMS(a->arrays[AM_VALUE]), PyArray_DESCR(a->arrays[AM_QUERY]));
    if (!out) return NULL;
    if (PyArray_SIZE(out)) {
        const am_linear_step step = {.out = am_linear_array_of(am_with_token(am_view_of(out))),
                                     .state = am_linear_states_of(am_view_of(a->state.array)),
                                     .slots = a->slots};
        if (!am_computed(module, work_of(a), am_linear_step_all, &a->linear, &step)) return NULL;
    }
    return am_returned(&a->out, out);
}

#define STEP                                                                                                 \
    QKV, AM_ARG(state, am_to_state), GATES, AM_ARG(scale, am_to_scale), AM_ARG(normalize_qk, am_to_bool),    \
        INPUT(state_indices, am_to_array_or_none, INDICES)
AM_FUNCTION(linear_attention_step, CHECKED(check_step(a), compute_step(module, a)), STEP,
            AM_ARG(out, am_to_out))
AM_FUNCTION(check_linear_attention_step, CHECKED(check_step(a), Py_NewRef(Py_None)), STEP)

PyMethodDef am_linear_attention_methods[] = {
    AM_ENTRY(linear_attention), AM_ENTRY(check_linear_attention), AM_ENTRY(linear_forward_vjp),
    AM_ENTRY(linear_backward),  AM_ENTRY(linear_attention_step),  AM_ENTRY(check_linear_attention_step),
    {.ml_name = NULL},
};
