/* short_convolution.c – bindings of short convolutions, their gradients and their steps. */
#include "core/linear/short_convolution.h"

#include <string.h>

#include "bind/python/arguments.h"
#include "bind/python/slots.h"

typedef struct {
    PyArrayObject *x, *weight, *bias, *initial, *dout, *dstate;
    PyArrayObject *indices;
    am_starts starts;
    am_out out, state; /* state: of a step, which is updated */
    bool silu, return_state;
    npy_intp channels, width, sequences;
    ptrdiff_t *numbers; /* owned: starts of rows, or places of states */
} arguments;

static void release(arguments *a)
{
    PyArrayObject *const owned[] = {a->x,      a->weight,  a->bias,      a->initial,    a->dout,
                                    a->dstate, a->indices, a->out.array, a->state.array};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) Py_XDECREF(owned[i]);
    am_free_starts(&a->starts);
    free(a->numbers);
}

static int to_array_or_none(PyObject *object, const char *name, void *dst)
{
    return object == Py_None ? 0 : am_to_array(object, name, dst);
}

static am_dtype type_of(PyArrayObject *array) { return am_dtype_of(PyArray_DESCR(array)); }

static int check_floating(PyArrayObject *array, const char *name)
{
    if (am_is_floating(type_of(array))) return 0;
    return am_reject(PyExc_TypeError, name, "a floating-point array", (PyObject *)array);
}

static int check_shape(PyArrayObject *array, const char *name, int ndim, npy_intp const *shape)
{
    if (PyArray_NDIM(array) == ndim && PyArray_CompareLists(PyArray_DIMS(array), shape, ndim)) return 0;
    PyObject *expected = PyArray_IntTupleFromIntp(ndim, shape), *what = am_describe((PyObject *)array);
    if (expected && what)
        PyErr_Format(PyExc_ValueError, "%s must be of shape %R, got %U", name, expected, what);
    Py_XDECREF(expected);
    Py_XDECREF(what);
    return -1;
}

/* Weights are of the type of x, or float32. */
static int check_weight_type(const arguments *a, PyArrayObject *array, const char *name)
{
    if (type_of(array) == type_of(a->x) || type_of(array) == AM_FLOAT32) return 0;
    PyObject *what = am_describe((PyObject *)array);
    if (what)
        PyErr_Format(PyExc_TypeError, "%s must be %S as x, or float32, got %U; write %s.astype(x.dtype)",
                     name, PyArray_DESCR(a->x), what, name);
    Py_XDECREF(what);
    return -1;
}

/* How to write what other libraries take. */
static const char *hint_of(const arguments *a, int ndim)
{
    const npy_intp *x = PyArray_DIMS(a->x), *weight = PyArray_DIMS(a->weight);
    if (PyArray_NDIM(a->weight) == 3 && weight[1] == 1) return "; write weight[:, 0] for [C, 1, W]";
    if (PyArray_NDIM(a->weight) != 2) return "";
    if (weight[1] == a->channels) return "; write weight.T for [W, C]";
    if (ndim == 3 && weight[0] == x[1]) return "; write x.swapaxes(1, 2) for [B, C, T]";
    return "";
}

/* Checks x, weight and bias, and sets their sizes. */
static int check_common(arguments *a, int ndim, const char *layout)
{
    if (PyArray_NDIM(a->x) != ndim) return am_reject(PyExc_ValueError, "x", layout, (PyObject *)a->x);
    if (check_floating(a->x, "x") < 0) return -1;
    a->channels = PyArray_DIM(a->x, ndim - 1);
    if (PyArray_NDIM(a->weight) != 2 || PyArray_DIM(a->weight, 0) != a->channels ||
        PyArray_DIM(a->weight, 1) < 1) {
        PyObject *what = am_describe((PyObject *)a->weight);
        if (what)
            PyErr_Format(PyExc_ValueError,
                         "weight must be [C, W] with the %zd channels of x and W at least 1, got %U%s",
                         a->channels, what, hint_of(a, ndim));
        Py_XDECREF(what);
        return -1;
    }
    a->width = PyArray_DIM(a->weight, 1);
    if (check_weight_type(a, a->weight, "weight") < 0) return -1;
    if (!a->bias) return 0;
    if (check_shape(a->bias, "bias", 1, &a->channels) < 0) return -1;
    return check_weight_type(a, a->bias, "bias");
}

static int check_state(const arguments *a, PyArrayObject *state, const char *name)
{
    npy_intp const shape[] = {a->sequences, a->channels, a->width - 1};
    if (check_shape(state, name, 3, shape) < 0 || check_floating(state, name) < 0) return -1;
    if (type_of(state) == type_of(a->x)) return 0;
    PyObject *what = am_describe((PyObject *)state);
    if (what) PyErr_Format(PyExc_TypeError, "%s must be %S as x, got %U", name, PyArray_DESCR(a->x), what);
    Py_XDECREF(what);
    return -1;
}

/* Checks all arguments of a convolution or of its gradients. */
static int check_sequences(arguments *a)
{
    if (check_common(a, 3, "[B, T, C]") < 0) return -1;
    const npy_intp batch = PyArray_DIM(a->x, 0), tokens = PyArray_DIM(a->x, 1);
    a->sequences = a->starts.array ? a->starts.sequences : batch;
    if (a->starts.array && batch != 1) {
        PyErr_Format(PyExc_ValueError, "x must have batch size 1 when cu_seqlens is given, got %zd", batch);
        return -1;
    }
    if (a->starts.array && a->starts.starts[a->sequences] != tokens) {
        PyErr_Format(PyExc_ValueError, "cu_seqlens must end at the %zd tokens of x, got %zd at index %zd",
                     tokens, a->starts.starts[a->sequences], a->sequences);
        return -1;
    }
    if (a->initial && check_state(a, a->initial, "initial_state") < 0) return -1;
    if (a->dout &&
        (check_shape(a->dout, "dout", 3, PyArray_DIMS(a->x)) < 0 || check_floating(a->dout, "dout") < 0))
        return -1;
    npy_intp const state[] = {a->sequences, a->channels, a->width - 1};
    if (a->dstate &&
        (check_shape(a->dstate, "dstate", 3, state) < 0 || check_floating(a->dstate, "dstate") < 0))
        return -1;
    if (!a->out.given) return 0;
    PyArrayObject *const inputs[] = {a->x, a->weight, a->bias, a->initial};
    const char *const names[] = {"x", "weight", "bias", "initial_state"};
    return am_check_out(a->out.array, "out", 3, PyArray_DIMS(a->x), PyArray_DESCR(a->x), inputs, names, 4);
}

/* The starts of rows, which are sequences. */
static int find_starts(arguments *a)
{
    if (a->starts.array) return 0;
    const npy_intp tokens = PyArray_DIM(a->x, 1);
    a->numbers = am_new(ptrdiff_t, a->sequences);
    if (!a->numbers) {
        PyErr_NoMemory();
        return -1;
    }
    for (npy_intp i = 0; i < a->sequences; i++) a->numbers[i + 1] = a->numbers[i] + tokens;
    return 0;
}

/* An array whose axes are these, of which -1 says that it has no such axis. */
static am_conv_array rows_of(PyArrayObject *array, int sequence, int token, int channel)
{
    if (!array) return (am_conv_array){0};
    return (am_conv_array){
        .data = PyArray_BYTES(array),
        .type = type_of(array),
        .sequence = sequence < 0 ? 0 : PyArray_STRIDE(array, sequence),
        .token = token < 0 ? 0 : PyArray_STRIDE(array, token),
        .channel = PyArray_STRIDE(array, channel),
    };
}

static am_conv_array tokens_of(const arguments *a, PyArrayObject *array)
{
    am_conv_array rows = rows_of(array, 0, 1, 2);
    rows.packed = a->starts.array != NULL;
    if (rows.packed) rows.sequence = 0;
    return rows;
}

static am_short_conv conv_of(const arguments *a)
{
    return (am_short_conv){
        .type = type_of(a->x) == AM_FLOAT64 ? AM_FLOAT64 : AM_FLOAT32,
        .channels = a->channels,
        .width = a->width,
        .sequences = a->sequences,
        .starts = a->starts.array ? a->starts.starts : a->numbers,
        .silu = a->silu,
        .x = tokens_of(a, a->x),
        .weight = rows_of(a->weight, -1, 1, 0),
        .bias = rows_of(a->bias, -1, -1, 0),
        .before = rows_of(a->initial, 0, 2, 1),
    };
}

static PyArrayObject *new_state(const arguments *a)
{
    npy_intp const shape[] = {a->sequences, a->channels, a->width - 1};
    return am_new_array(3, shape, PyArray_DESCR(a->x));
}

static PyObject *compute(PyObject *module, arguments *a)
{
    PyArrayObject *out = am_target(&a->out, 3, PyArray_DIMS(a->x), PyArray_DESCR(a->x));
    PyArrayObject *state = out && a->return_state ? new_state(a) : NULL;
    PyObject *result = NULL;
    if (!out || (a->return_state && !state)) goto fail;
    if (PyArray_SIZE(a->x) > 0 || (state && PyArray_SIZE(state) > 0)) {
        if (find_starts(a) < 0) goto fail;
        am_short_conv conv = conv_of(a);
        conv.out = tokens_of(a, out);
        conv.after = rows_of(state, 0, 2, 1);
        am_call call;
        am_enter(&call, module, PyArray_SIZE(a->x));
        am_status status = am_short_conv_forward(&call.context, &conv);
        am_leave(&call);
        if (status != AM_OK) {
            am_raise(status, NULL);
            goto fail;
        }
    }
    result = am_returned(&a->out, out);
    out = NULL;
    if (a->return_state) Py_SETREF(result, PyTuple_Pack(2, result, state));
fail:
    Py_XDECREF(out);
    Py_XDECREF(state);
    return result;
}

typedef PyObject *computation(PyObject *module, arguments *a);

/* `compute_it` is NULL where the arguments are only checked. */
static PyObject *convolve(PyObject *module, PyObject *const *args, Py_ssize_t nargs, const char *name,
                          computation *compute_it)
{
    arguments a = {0};
    PyObject *result = NULL;
    const am_param params[] = {
        {"x", am_to_array, &a.x},
        {"weight", am_to_array, &a.weight},
        {"bias", to_array_or_none, &a.bias},
        {"silu", am_to_bool, &a.silu},
        {"cu_seqlens", am_to_starts_or_none, &a.starts},
        {"initial_state", to_array_or_none, &a.initial},
        {"return_state", am_to_bool, &a.return_state},
        {"out", am_to_out, &a.out},
    };
    if (am_parse(name, args, nargs, params, 8) == 0 && check_sequences(&a) == 0)
        result = compute_it ? compute_it(module, &a) : Py_NewRef(Py_None);
    release(&a);
    return result;
}

static PyObject *short_convolution(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return convolve(module, args, nargs, "short_convolution", compute);
}

static PyObject *check_short_convolution(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return convolve(module, args, nargs, "check_short_convolution", NULL);
}

/* A new array like `array`; NULL for NULL. */
static PyArrayObject *like(PyArrayObject *array)
{
    return array ? am_new_array(PyArray_NDIM(array), PyArray_DIMS(array), PyArray_DESCR(array)) : NULL;
}

static PyObject *compute_gradients(PyObject *module, arguments *a)
{
    PyArrayObject *const of[] = {a->x, a->weight, a->bias, a->initial};
    PyArrayObject *grads[4] = {NULL};
    PyObject *result = NULL;
    for (int i = 0; i < 4; i++) {
        grads[i] = like(of[i]);
        if (of[i] && !grads[i]) goto fail;
    }
    if (PyArray_SIZE(a->weight) > 0) {
        if (find_starts(a) < 0) goto fail;
        am_short_conv_gradients job = {.conv = conv_of(a),
                                       .d_x = tokens_of(a, grads[0]),
                                       .d_weight = rows_of(grads[1], -1, 1, 0),
                                       .d_bias = rows_of(grads[2], -1, -1, 0),
                                       .d_before = rows_of(grads[3], 0, 2, 1)};
        job.conv.out = tokens_of(a, a->dout);
        job.conv.after = rows_of(a->dstate, 0, 2, 1);
        am_call call;
        am_enter(&call, module, PyArray_SIZE(a->x));
        am_status status = am_short_conv_backward(&call.context, &job);
        am_leave(&call);
        if (status != AM_OK) {
            am_raise(status, NULL);
            goto fail;
        }
    }
    result = PyTuple_New(4);
    for (int i = 0; result && i < 4; i++) {
        PyTuple_SET_ITEM(result, i, grads[i] ? (PyObject *)grads[i] : Py_NewRef(Py_None));
        grads[i] = NULL;
    }
fail:
    for (int i = 0; i < 4; i++) Py_XDECREF(grads[i]);
    return result;
}

static PyObject *short_convolution_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    arguments a = {0};
    PyObject *result = NULL;
    const am_param params[] = {
        {"x", am_to_array, &a.x},
        {"weight", am_to_array, &a.weight},
        {"bias", to_array_or_none, &a.bias},
        {"silu", am_to_bool, &a.silu},
        {"cu_seqlens", am_to_starts_or_none, &a.starts},
        {"initial_state", to_array_or_none, &a.initial},
        {"dout", am_to_array, &a.dout},
        {"dstate", to_array_or_none, &a.dstate},
    };
    if (am_parse("short_convolution_backward", args, nargs, params, 8) == 0 && check_sequences(&a) == 0)
        result = compute_gradients(module, &a);
    release(&a);
    return result;
}

static int check_step(arguments *a)
{
    if (check_common(a, 2, "[B, C]") < 0) return -1;
    if (!a->state.given) return am_reject(PyExc_TypeError, "state", "a NumPy array", Py_None);
    PyArrayObject *state = a->state.array;
    const npy_intp rows = PyArray_DIM(a->x, 0),
                   slots = PyArray_NDIM(state) == 3 ? PyArray_DIM(state, 0) : rows;
    a->sequences = a->indices ? slots : rows;
    if (check_state(a, state, "state") < 0) return -1;
    PyArrayObject *const inputs[] = {a->x, a->weight, a->bias, a->indices, a->out.array};
    const char *const names[] = {"x", "weight", "bias", "state_indices", "out"};
    if (am_check_out(state, "state", 3, PyArray_DIMS(state), PyArray_DESCR(a->x), inputs, names, 5) < 0)
        return -1;
    if (a->out.given &&
        am_check_out(a->out.array, "out", 2, PyArray_DIMS(a->x), PyArray_DESCR(a->x), inputs, names, 4) < 0)
        return -1;
    a->sequences = rows;
    if (a->indices) a->numbers = am_read_slots(a->indices, rows, slots);
    return a->indices && !a->numbers ? -1 : 0;
}

static PyObject *compute_step(PyObject *module, arguments *a)
{
    PyArrayObject *out = am_target(&a->out, 2, PyArray_DIMS(a->x), PyArray_DESCR(a->x));
    if (!out) return NULL;
    am_status status = AM_OK;
    if (PyArray_SIZE(a->x) > 0) {
        am_short_conv conv = {
            .type = type_of(a->x) == AM_FLOAT64 ? AM_FLOAT64 : AM_FLOAT32,
            .channels = a->channels,
            .width = a->width,
            .sequences = a->sequences,
            .silu = a->silu,
            .x = rows_of(a->x, 0, -1, 1),
            .weight = rows_of(a->weight, -1, 1, 0),
            .bias = rows_of(a->bias, -1, -1, 0),
            .before = rows_of(a->state.array, 0, 2, 1),
            .out = rows_of(out, 0, -1, 1),
        };
        am_call call;
        am_enter(&call, module, PyArray_SIZE(a->x));
        status = am_short_conv_step(&call.context, &conv, a->indices ? a->numbers : NULL);
        am_leave(&call);
    }
    if (status == AM_OK) return am_returned(&a->out, out);
    Py_DECREF(out);
    return am_raise(status, NULL);
}

static PyObject *take_step(PyObject *module, PyObject *const *args, Py_ssize_t nargs, const char *name,
                           computation *compute_it)
{
    arguments a = {0};
    PyObject *result = NULL;
    const am_param params[] = {
        {"x", am_to_array, &a.x},       {"weight", am_to_array, &a.weight},
        {"state", am_to_out, &a.state}, {"bias", to_array_or_none, &a.bias},
        {"silu", am_to_bool, &a.silu},  {"state_indices", to_array_or_none, &a.indices},
        {"out", am_to_out, &a.out},
    };
    if (am_parse(name, args, nargs, params, 7) == 0 && check_step(&a) == 0)
        result = compute_it ? compute_it(module, &a) : Py_NewRef(Py_None);
    release(&a);
    return result;
}

static PyObject *short_convolution_step(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return take_step(module, args, nargs, "short_convolution_step", compute_step);
}

static PyObject *check_short_convolution_step(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return take_step(module, args, nargs, "check_short_convolution_step", NULL);
}

PyMethodDef am_short_convolution_methods[] = {
    AM_METHOD(short_convolution, "x, weight, bias, silu, cu_seqlens, initial_state, return_state, out"),
    AM_METHOD(short_convolution_backward, "x, weight, bias, silu, cu_seqlens, initial_state, dout, dstate"),
    AM_METHOD(short_convolution_step, "x, weight, state, bias, silu, state_indices, out"),
    AM_METHOD(check_short_convolution, "x, weight, bias, silu, cu_seqlens, initial_state, return_state, out"),
    AM_METHOD(check_short_convolution_step, "x, weight, state, bias, silu, state_indices, out"),
    {.ml_name = NULL},
};
