/* short_convolution.c – bindings of short convolutions, their gradients and their steps. */
#include "bind/python/arguments.h"
#include "bind/request_linear.h"
#include "core/runtime/sizes.h"

typedef struct {
    PyArrayObject *x, *weight, *bias, *initial_state, *dout, *dstate;
    PyArrayObject *state_indices;
    am_starts cu_seqlens;
    am_out out, state; /* state: of a step, which is updated */
    bool activation, return_state;
    am_request request;
    am_short_conv conv;
    const ptrdiff_t *slots; /* of a step; NULL: each row has its own */
} arguments;

/* bool *: whether there is an activation. */
static int to_silu(PyObject *object, const char *name, void *dst)
{
    bool *silu = dst;
    *silu = PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, "silu") == 0;
    return *silu || object == Py_None ? 0 : am_reject(PyExc_ValueError, name, "one of None, 'silu'", object);
}

static am_array tokens_of(PyArrayObject *array) { return am_conv_tokens_of(am_view_of(array)); }

/* Checks x, weight and bias. */
static int check_common(arguments *a, const am_view *x, bool step)
{
    const am_view weight = am_view_of(a->weight), bias = am_view_of(a->bias);
    a->conv.silu = a->activation;
    return am_raise_refused(&a->request, am_read_conv(&a->request, x, &weight, &bias, step, &a->conv));
}

/* Checks what a convolution takes beside, and what its gradients take. */
static bool check_others(arguments *a, const am_view *x)
{
    am_request *r = &a->request;
    const am_view before = am_view_of(a->initial_state), d_out = am_view_of(a->dout),
                  d_after = am_view_of(a->dstate);
    const ptrdiff_t rows = a->cu_seqlens.array ? a->cu_seqlens.sequences : x->shape[0];
    a->conv.sequences = rows, a->conv.starts = a->cu_seqlens.starts, a->conv.tokens = x->shape[1];
    if (!am_check_packed(r, "x", x, a->cu_seqlens.starts, rows) ||
        (before.data && !am_check_tail(r, &before, "initial_state", &a->conv, rows, x)) ||
        (d_out.data && !am_check_shape(r, &d_out, "dout", "", 3, x->shape, false)))
        return false;
    if (d_out.data && !am_is_floating(d_out.type))
        return am_refuse(r, AM_WRONG_TYPE, &d_out, "dout must be a floating-point array");
    return !d_after.data || am_check_tail(r, &d_after, "dstate", &a->conv, rows, NULL);
}

/* Checks all arguments of a convolution or of its gradients. */
static int check_sequences(arguments *a)
{
    const am_view x = am_view_of(a->x);
    if (check_common(a, &x, false) < 0 || am_raise_refused(&a->request, check_others(a, &x)) < 0) return -1;
    a->conv.x = tokens_of(a->x), a->conv.before = am_conv_states_of(am_view_of(a->initial_state));
    return 0;
}

static PyArrayObject *new_state(const arguments *a)
{
    npy_intp const shape[] = {a->conv.sequences, a->conv.channels, a->conv.width - 1};
    return am_new_array(3, shape, PyArray_DESCR(a->x));
}

/* About how many products a call takes: also of the weights alone, whose gradients are there without tokens.
 */
static npy_intp work_of(const arguments *a)
{
    return am_product(am_max(PyArray_SIZE(a->x), a->conv.channels), a->conv.width, 1);
}

static PyObject *compute(PyObject *module, arguments *a)
{
    am_owned PyArrayObject *out = am_target(&a->out, 3, PyArray_DIMS(a->x), PyArray_DESCR(a->x)),
                           *state = out && a->return_state ? new_state(a) : NULL;
    if (!out || (a->return_state && !state)) return NULL;
    if (PyArray_SIZE(a->x) > 0 || (state && PyArray_SIZE(state) > 0)) {
        a->conv.out = tokens_of(out);
        a->conv.after = am_conv_states_of(am_view_of(state));
        if (!am_computed(module, work_of(a), am_short_conv_forward, &a->conv)) return NULL;
    }
    am_owned PyObject *result = am_returned(&a->out, out);
    return state ? PyTuple_Pack(2, result, state) : Py_NewRef(result);
}

static PyObject *compute_gradients(PyObject *module, arguments *a)
{
    PyArrayObject *const of[] = {a->x, a->weight, a->bias, a->initial_state};
    PyArrayObject *grads[4];
    am_owned PyObject *result = am_new_like(4, of, grads);
    if (!result) return NULL;
    if (PyArray_SIZE(a->weight) > 0) {
        am_short_conv_gradients job = {.conv = a->conv,
                                       .d_x = tokens_of(grads[0]),
                                       .d_weight = am_conv_weights_of(am_view_of(grads[1])),
                                       .d_bias = am_conv_weights_of(am_view_of(grads[2])),
                                       .d_before = am_conv_states_of(am_view_of(grads[3]))};
        job.conv.out = tokens_of(a->dout);
        job.conv.after = am_conv_states_of(am_view_of(a->dstate));
        if (!am_computed(module, work_of(a), am_short_conv_backward, &job)) return NULL;
    }
    return Py_NewRef(result);
}

#define CONVOLUTION                                                                                          \
    AM_ARG(x, am_to_array), AM_ARG(weight, am_to_array), AM_ARG(bias, am_to_array_or_none),                  \
        AM_ARG(activation, to_silu), AM_ARG(cu_seqlens, am_to_starts_or_none),                               \
        AM_ARG(initial_state, am_to_array_or_none)
#define CHECKED(check, computed) am_ended(&a->request, check < 0 ? NULL : computed)
AM_FUNCTION(short_convolution, CHECKED(check_sequences(a), compute(module, a)), CONVOLUTION,
            AM_ARG(return_state, am_to_bool), AM_ARG(out, am_to_out))
AM_FUNCTION(check_short_convolution, CHECKED(check_sequences(a), Py_NewRef(Py_None)), CONVOLUTION)
AM_FUNCTION(short_convolution_backward, CHECKED(check_sequences(a), compute_gradients(module, a)),
            CONVOLUTION, AM_ARG(dout, am_to_array), AM_ARG(dstate, am_to_array_or_none))

static int check_step(arguments *a)
{
    const am_view x = am_with_token(am_view_of(a->x)), indices = am_view_of(a->state_indices);
    am_request *r = &a->request;
    if (check_common(a, &x, true) < 0) return -1;
    if (!a->state.given) return am_reject(PyExc_TypeError, "state", "a NumPy array", Py_None);
    PyArrayObject *array = a->state.array;
    const am_view state = am_view_of(array);
    const ptrdiff_t rows = a->conv.sequences = x.shape[0],
                    slots = a->state_indices && state.axes == 3 ? state.shape[0] : rows;
    if (am_raise_refused(r, am_check_tail(r, &state, "state", &a->conv, slots, &x)) < 0) return -1;
    if (am_check_out(array, "state", 3, PyArray_DIMS(array), PyArray_DESCR(a->x)) < 0) return -1;
    a->conv.x = am_conv_tokens_of(x), a->conv.before = am_conv_states_of(state);
    if (a->state_indices) a->slots = am_read_slots(r, &indices, rows, slots);
    return am_raise_refused(r, !a->state_indices || a->slots);
}

static PyObject *compute_step(PyObject *module, arguments *a)
{
    am_owned PyArrayObject *out = am_target(&a->out, 2, PyArray_DIMS(a->x), PyArray_DESCR(a->x));
    if (!out) return NULL;
    if (PyArray_SIZE(a->x) > 0) {
        a->conv.out = am_conv_tokens_of(am_with_token(am_view_of(out)));
        if (!am_computed(module, work_of(a), am_short_conv_step, &a->conv, a->slots)) return NULL;
    }
    return am_returned(&a->out, out);
}

#define STEP                                                                                                 \
    AM_ARG(x, am_to_array), AM_ARG(weight, am_to_array), AM_ARG(state, am_to_state),                         \
        AM_ARG(bias, am_to_array_or_none), AM_ARG(activation, to_silu),                                      \
        AM_ARG(state_indices, am_to_array_or_none)
AM_FUNCTION(short_convolution_step, CHECKED(check_step(a), compute_step(module, a)), STEP,
            AM_ARG(out, am_to_out))
AM_FUNCTION(check_short_convolution_step, CHECKED(check_step(a), Py_NewRef(Py_None)), STEP)

PyMethodDef am_short_convolution_methods[] = {
    AM_ENTRY(short_convolution),
    AM_ENTRY(short_convolution_backward),
    AM_ENTRY(short_convolution_step),
    AM_ENTRY(check_short_convolution),
    AM_ENTRY(check_short_convolution_step),
    {.ml_name = NULL},
};
