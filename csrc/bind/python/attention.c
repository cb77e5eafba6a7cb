/* attention.c – bindings of attention. */
#include "core/attention/plan/schedule.h"

#include <math.h>

#include "bind/python/arguments.h"
#include "bind/python/attention.h"
#include "bind/python/masks.h"
#include "core/runtime/sizes.h"
#include "core/runtime/openmp.h"

enum { SLOPES, TABLE, OFFSETS, STARTS, RELATIVE_ARRAYS }; /* of the terms by distance */

typedef struct {
    PyArrayObject *query, *key, *value, *bias, *sinks;
    am_view q, k, v;      /* of the first three */
    PyArray_Descr *dtype; /* of the query; owned */
    am_out out;
    PyObject *nodes, *relative, *part;
    PyArrayObject *relative_arrays[RELATIVE_ARRAYS]; /* NULL: not given */
    Py_ssize_t low;                                  /* the distance that the table begins with */
    am_mask_arg mask;
    am_scale scale, cap, dropout;
    bool normalize, return_lse, return_wide; /* return_wide: also the result as `wide_result` says */
    uint64_t seed;
    ptrdiff_t first_query, first_key; /* of a part of a larger problem, their places in it */
} arguments;

static int to_seed(PyObject *object, const char *name, void *dst)
{
    PyObject *number = PyNumber_Index(object);
    if (!number) return am_reject(PyExc_TypeError, name, "an integer", object);
    uint64_t seed = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (seed == UINT64_MAX && PyErr_Occurred()) {
        PyErr_Clear();
        return am_reject(PyExc_ValueError, name, "from 0 to 2**64 - 1", object);
    }
    *(uint64_t *)dst = seed;
    return 0;
}

static int to_array_or_none(PyObject *object, const char *name, void *dst)
{
    return object == Py_None ? 0 : am_to_array(object, name, dst);
}

static int reject_array(PyObject *exception, const char *name, const char *expected, PyArrayObject *got)
{
    return am_reject(exception, name, expected, (PyObject *)got);
}

static const char *const input_names[] = {"query", "key", "value"};

bool am_shapes_fit(const npy_intp *query, const npy_intp *key, const npy_intp *value)
{
    bool fits = key[0] == query[0] && key[3] == query[3] &&
                (key[2] == 0 ? query[2] == 0 : query[2] % key[2] == 0) && PyArray_CompareLists(key, value, 3);
    for (int axis = 0; axis < 3; axis++)
        fits &= query[axis] <= AM_LONGEST && key[axis] <= AM_LONGEST && value[axis] <= AM_LONGEST;
    return fits;
}

bool am_heads_seem_first(const npy_intp *query, const npy_intp *key)
{
    const npy_intp tokens = query[1], heads = query[2];
    return tokens == key[1] && tokens > 1 && heads > 64 && heads / 8 >= tokens;
}

/* Reads query, key and value, of four axes each; all else looks at what has been read. Returns whether they
 * belong together. */
static bool read_inputs(arguments *a)
{
    a->q = am_view_of(a->query), a->k = am_view_of(a->key), a->v = am_view_of(a->value);
    a->dtype = (PyArray_Descr *)Py_NewRef(PyArray_DESCR(a->query));
    const am_dtype type = a->q.type;
    return am_is_floating(type) && a->k.type == type && a->v.type == type &&
           am_shapes_fit(a->q.shape, a->k.shape, a->v.shape);
}

/* Python checks arguments first, with better messages; this only keeps memory accesses within bounds. */
static int check_inputs(arguments *a)
{
    PyArrayObject *const arrays[] = {a->query, a->key, a->value};
    for (int i = 0; i < 3; i++) {
        for (int axis = 0; axis < PyArray_NDIM(arrays[i]); axis++) {
            if (PyArray_DIM(arrays[i], axis) > AM_LONGEST)
                return reject_array(PyExc_ValueError, input_names[i], "of at most 2**56 along each axis",
                                    arrays[i]);
        }
        if (PyArray_NDIM(arrays[i]) != 4)
            return reject_array(PyExc_ValueError, input_names[i], "of four axes", arrays[i]);
    }
    if (read_inputs(a)) return 0;
    PyErr_SetString(PyExc_ValueError, "query, key and value must have one type, and shapes that fit");
    return -1;
}

/* Sets the shape of the mask. */
static void set_shape(arguments *a)
{
    am_mask *mask = &a->mask.request.mask;
    mask->batch = a->q.shape[0], mask->heads = a->q.shape[2];
    mask->queries = a->q.shape[1], mask->keys = a->k.shape[1];
}

static int check_bias(const arguments *a)
{
    if (!a->bias) return 0;
    if (!am_is_floating(am_dtype_of(PyArray_DESCR(a->bias))))
        return reject_array(PyExc_TypeError, "bias", "of a floating-point dtype", a->bias);
    const ptrdiff_t wanted[4] = {a->mask.request.mask.batch, a->mask.request.mask.heads,
                                 a->mask.request.mask.queries, a->mask.request.mask.keys};
    bool fits = PyArray_NDIM(a->bias) == 4;
    for (int i = 0; fits && i < 4; i++)
        fits = PyArray_DIM(a->bias, i) == 1 || PyArray_DIM(a->bias, i) == wanted[i];
    return fits ? 0 : reject_array(PyExc_ValueError, "bias", "broadcastable to [B, H, Tq, Tk]", a->bias);
}

/* Reads the terms that follow from the distance of a pair: None, or a tuple of slopes, table, offsets and
 * starts, each of which may be None, and the distance that the table begins with. */
static int read_relative(arguments *a)
{
    static const char *const names[] = {"alibi_slopes", "relative_bias", "offsets", "starts"};
    static const int types[] = {NPY_FLOAT64, NPY_FLOAT64, NPY_INTP, NPY_INTP}, ndims[] = {2, 2, 1, 1};
    if (a->relative == Py_None) return 0;
    if (!PyTuple_Check(a->relative) || PyTuple_GET_SIZE(a->relative) != 5)
        return am_reject(PyExc_TypeError, "relative", "a tuple of five, or None", a->relative);
    a->low = PyNumber_AsSsize_t(PyTuple_GET_ITEM(a->relative, 4), PyExc_OverflowError);
    if (a->low == -1 && PyErr_Occurred()) return -1;
    for (int i = 0; i < RELATIVE_ARRAYS; i++) {
        PyObject *given = PyTuple_GET_ITEM(a->relative, i);
        if (given == Py_None) continue;
        PyArrayObject *array = PyArray_Check(given) ? (PyArrayObject *)given : NULL;
        if (!array || PyArray_TYPE(array) != types[i] || PyArray_NDIM(array) != ndims[i] ||
            !PyArray_IS_C_CONTIGUOUS(array) || !PyArray_ISALIGNED(array))
            return am_reject(PyExc_TypeError, names[i], "an aligned, C-contiguous array of its type and axes",
                             given);
        a->relative_arrays[i] = (PyArrayObject *)Py_NewRef(given);
    }
    const am_mask *mask = &a->mask.request.mask;
    PyArrayObject *slopes = a->relative_arrays[SLOPES], *table = a->relative_arrays[TABLE],
                  *offsets = a->relative_arrays[OFFSETS], *starts = a->relative_arrays[STARTS];
    const npy_intp rows = starts ? PyArray_DIM(starts, 0) - 1 : mask->batch;
    if (!offsets || (PyArray_DIM(offsets, 0) != 1 && PyArray_DIM(offsets, 0) != rows))
        return am_reject(PyExc_ValueError, names[OFFSETS], "one number, or one for each row or sequence",
                         offsets ? (PyObject *)offsets : Py_None);
    if (slopes && (PyArray_DIM(slopes, 1) != mask->heads ||
                   (PyArray_DIM(slopes, 0) != 1 && PyArray_DIM(slopes, 0) != rows)))
        return reject_array(PyExc_ValueError, names[SLOPES], "[H], [B, H] or [sequences, H]", slopes);
    if (table && (PyArray_DIM(table, 0) != mask->heads || PyArray_DIM(table, 1) == 0))
        return reject_array(PyExc_ValueError, names[TABLE], "[H, L]", table);
    if (!starts) return 0;
    const npy_intp *begin = PyArray_DATA(starts);
    bool fits = rows > 0 && begin[0] == 0 && begin[rows] == mask->queries && mask->batch == 1;
    for (npy_intp i = 0; i < rows; i++) fits &= begin[i] <= begin[i + 1];
    return fits ? 0
                : reject_array(PyExc_ValueError, names[STARTS], "from 0 to all queries, in order", starts);
}

static am_relative relative_of(const arguments *a)
{
    PyArrayObject *const slopes = a->relative_arrays[SLOPES], *const table = a->relative_arrays[TABLE],
                         *const offsets = a->relative_arrays[OFFSETS],
                         *const starts = a->relative_arrays[STARTS];
    am_relative relative = {.low = a->low};
    if (slopes)
        relative.slopes = PyArray_DATA(slopes),
        relative.slope_step = PyArray_DIM(slopes, 0) == 1 ? 0 : PyArray_DIM(slopes, 1);
    if (table) relative.table = PyArray_DATA(table), relative.length = PyArray_DIM(table, 1);
    if (offsets) relative.offsets = PyArray_DATA(offsets), relative.offset_step = PyArray_DIM(offsets, 0) > 1;
    if (starts) relative.q_starts = PyArray_DATA(starts), relative.sequences = PyArray_DIM(starts, 0) - 1;
    return relative;
}

static int check_sinks(const arguments *a)
{
    if (!a->sinks) return 0;
    if (PyArray_NDIM(a->sinks) != 2 || PyArray_TYPE(a->sinks) != NPY_FLOAT64 ||
        !PyArray_IS_C_CONTIGUOUS(a->sinks) || PyArray_DIM(a->sinks, 0) != a->mask.request.mask.heads)
        return reject_array(PyExc_ValueError, "softmax_aux", "a float64 array [H, S]", a->sinks);
    return 0;
}

/* Reads where a part of a larger problem begins: None, or a tuple of its first query and its first key. */
static int read_part(arguments *a)
{
    if (a->part == Py_None) return 0;
    if (!PyTuple_Check(a->part))
        return am_reject(PyExc_TypeError, "part", "a tuple of two, or None", a->part);
    if (!PyArg_ParseTuple(a->part, "nn;part must be two integers", &a->first_query, &a->first_key)) return -1;
    if (a->first_query >= 0 && a->first_query <= AM_LONGEST && a->first_key >= 0 &&
        a->first_key <= AM_LONGEST)
        return 0;
    return am_reject(PyExc_ValueError, "part", "two places from 0 to 2**56", a->part);
}

/* The type of the results: the query's, but of a part, which will be added to others, that of the arithmetic.
 */
static PyArray_Descr *result_dtype(const arguments *a)
{
    PyArray_Descr *dtype = a->dtype;
    const bool widens = a->part != Py_None && am_dtype_of(dtype) != AM_FLOAT64;
    return widens ? PyArray_DescrFromType(NPY_FLOAT32) : (PyArray_Descr *)Py_NewRef(dtype);
}

static int check_keys_of_dropout(const char *name, npy_intp keys)
{
    if (keys <= AM_MOST_KEYS_OF_DROPOUT) return 0;
    PyErr_Format(PyExc_ValueError, "%s: dropout takes up to 2**32 keys, got %zd; compute without it", name,
                 keys);
    return -1;
}

static int check_numbers(const arguments *a)
{
    if (isnan(a->scale.value) || isnan(a->cap.value) || a->cap.value < 0) {
        PyErr_SetString(PyExc_ValueError,
                        "softmax_scale and logits_soft_cap must be numbers, the cap not negative");
        return -1;
    }
    if (!(a->dropout.value >= 0 && a->dropout.value < 1)) {
        PyErr_SetString(PyExc_ValueError, "dropout_prob must be at least 0 and less than 1");
        return -1;
    }
    return a->dropout.value > 0 ? check_keys_of_dropout("dropout_prob", a->first_key + a->k.shape[1]) : 0;
}

/* The stride of an axis in bytes, 0 where the bias is broadcast. */
static ptrdiff_t bias_step(PyArrayObject *bias, int axis)
{
    return PyArray_DIM(bias, axis) == 1 ? 0 : PyArray_STRIDE(bias, axis);
}

/* Describes the problem to the core, without its results. */
static am_attn flash_of(arguments *a)
{
    const am_mask *mask = &a->mask.request.mask;
    am_attn flash = {
        .batch = mask->batch,
        .heads = mask->heads,
        .kv_heads = a->k.shape[2],
        .queries = mask->queries,
        .keys = mask->keys,
        .head_dim = a->q.shape[3],
        .value_dim = a->v.shape[3],
        .q = am_tokens_of(&a->q),
        .k = am_tokens_of(&a->k),
        .v = am_tokens_of(&a->v),
        .mask = &a->mask.request.mask,
        .scale = a->scale.value,
        .cap = a->cap.value,
        .sinks = a->sinks ? PyArray_DATA(a->sinks) : NULL,
        .sink_count = a->sinks ? PyArray_DIM(a->sinks, 1) : 0,
        .relative = relative_of(a),
        .normalize = a->normalize,
        .dropout = a->dropout.value,
        .seed = a->seed,
        .first_query = a->first_query,
        .first_key = a->first_key,
    };
    if (a->bias) {
        flash.bias = PyArray_BYTES(a->bias);
        flash.bias_type = am_dtype_of(PyArray_DESCR(a->bias));
        flash.bias_batch = bias_step(a->bias, 0), flash.bias_head = bias_step(a->bias, 1);
        flash.bias_row = bias_step(a->bias, 2), flash.bias_column = bias_step(a->bias, 3);
    }
    return flash;
}

/* What takes the result in the type of the arithmetic: an array of its own, or `out`. */
static PyArrayObject *wide_result(PyArrayObject *out)
{
    const am_dtype type = am_dtype_of(PyArray_DESCR(out));
    return type == AM_FLOAT16 || type == AM_BFLOAT16 ? am_new_array_of(4, PyArray_DIMS(out), NPY_FLOAT32)
                                                     : (PyArrayObject *)Py_NewRef(out);
}

static PyObject *compute(PyObject *module, arguments *a)
{
    const am_mask *mask = &a->mask.request.mask;
    PyArrayObject *lse = NULL, *wide = NULL;
    PyObject *result = NULL;
    npy_intp const dims[4] = {mask->batch, mask->queries, mask->heads, a->v.shape[3]};
    PyArray_Descr *dtype = result_dtype(a);
    PyArrayObject *out = dtype ? am_target(&a->out, 4, dims, dtype) : NULL;
    if (!out) goto fail;
    if (a->out.given && am_check_out(out, "out", 4, dims, dtype, NULL, NULL, 0) < 0) goto fail;
    if (a->return_lse) {
        npy_intp const rows[3] = {mask->batch, mask->heads, mask->queries};
        lse = am_new_array_of(3, rows, a->q.type == AM_FLOAT64 ? NPY_FLOAT64 : NPY_FLOAT32);
        if (!lse) goto fail;
    }
    if (a->return_wide && !(wide = wide_result(out))) goto fail;
    am_attn flash = flash_of(a);
    flash.out = am_tokens_of_array(out);
    if (wide && wide != out) flash.wide_out = am_tokens_of_array(wide);
    flash.lse = lse ? PyArray_DATA(lse) : NULL;
    am_call call;
    am_enter(&call, module, NPY_MAX_INTP);
    am_status status = am_mask_prepare(&call.context, &a->mask.request.mask);
    if (status == AM_OK) status = am_attn_forward(&call.context, &flash);
    am_leave(&call);
    if (status == AM_OK)
        result = PyTuple_Pack(wide ? 3 : 2, a->out.given ? a->out.given : (PyObject *)out,
                              lse ? (PyObject *)lse : Py_None, wide);
    else
        am_raise(status, NULL);
fail:
    Py_XDECREF(dtype);
    Py_XDECREF(out);
    Py_XDECREF(lse);
    Py_XDECREF(wide);
    return result;
}

/* The arguments that describe the problem, which come first in each function. */
enum { PROBLEM_PARAMS = 13 };
#define PROBLEM(a)                                                                                           \
    {"query", am_to_array, &(a).query}, {"key", am_to_array, &(a).key}, {"value", am_to_array, &(a).value},  \
        {"nodes", am_to_object, &(a).nodes}, {"bias", to_array_or_none, &(a).bias},                          \
        {"softmax_scale", am_to_scale, &(a).scale}, {"logits_soft_cap", am_to_scale, &(a).cap},              \
        {"softmax_aux", to_array_or_none, &(a).sinks}, {"normalize_output", am_to_bool, &(a).normalize},     \
        {"dropout_prob", am_to_scale, &(a).dropout}, {"dropout_seed", to_seed, &(a).seed},                   \
        {"relative", am_to_object, &(a).relative},                                                           \
    {                                                                                                        \
        "part", am_to_object, &(a).part                                                                      \
    }

/* Checks these arguments after they are parsed, and reads the mask. */
static int check_problem(arguments *a)
{
    if (check_inputs(a) < 0) return -1;
    set_shape(a);
    const int bad = am_read_nodes(&a->mask, a->nodes);
    return bad < 0 || read_relative(a) < 0 || read_part(a) < 0 || check_bias(a) < 0 || check_sinks(a) < 0 ||
                   check_numbers(a) < 0
               ? -1
               : 0;
}

static void release(arguments *a)
{
    am_free_mask(&a->mask);
    Py_XDECREF(a->query);
    Py_XDECREF(a->key);
    Py_XDECREF(a->value);
    Py_XDECREF(a->bias);
    Py_XDECREF(a->sinks);
    for (int i = 0; i < RELATIVE_ARRAYS; i++) Py_XDECREF(a->relative_arrays[i]);
    Py_XDECREF(a->out.array);
    Py_XDECREF(a->dtype);
}

static PyObject *flash_forward(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    arguments a = {0};
    const am_param params[] = {
        PROBLEM(a),
        {"return_lse", am_to_bool, &a.return_lse},
        {"out", am_to_out, &a.out},
    };
    PyObject *result = NULL;
    if (am_parse("flash_forward", args, nargs, params, PROBLEM_PARAMS + 2) == 0 && check_problem(&a) == 0)
        result = compute(module, &a);
    release(&a);
    return result;
}

/* The same for gradients: with the logsumexp, and the result in the type of the arithmetic, which rounding to
 * a narrower type would make the largest error of the gradients. */
static PyObject *flash_forward_vjp(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    arguments a = {.return_lse = true, .return_wide = true};
    const am_param params[] = {PROBLEM(a)};
    PyObject *result = NULL;
    if (am_parse("flash_forward_vjp", args, nargs, params, PROBLEM_PARAMS) == 0 && check_problem(&a) == 0)
        result = compute(module, &a);
    release(&a);
    return result;
}

/* --- Usual calls --- */

/* Whether an array can be taken as it is; it gets a reference. */
static bool usual_tokens(PyObject *object, PyArrayObject **array)
{
    if (!PyArray_CheckExact(object)) return false;
    *array = (PyArrayObject *)Py_NewRef(object);
    return PyArray_NDIM(*array) == 4 && PyArray_ISBEHAVED_RO(*array);
}

bool am_usual_scale(PyObject *object, npy_intp head_dim, double *scale)
{
    *scale = object != Py_None ? PyFloat_CheckExact(object) ? PyFloat_AS_DOUBLE(object) : INFINITY
             : head_dim > 0    ? 1 / sqrt((double)head_dim)
                               : 1;
    return fabs(*scale) < 1e30;
}

bool am_usual_diagonal(PyObject *offset, bool causal, npy_intp queries, npy_intp keys, npy_intp *diagonal)
{
    if (PyUnicode_Check(offset)) {
        *diagonal = keys - queries;
        return PyUnicode_CompareWithASCIIString(offset, "bottom-right") == 0;
    }
    if (!PyLong_Check(offset) || PyBool_Check(offset)) return false;
    *diagonal = PyLong_AsSsize_t(offset);
    if (*diagonal == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    const bool warns = causal && !PyLong_CheckExact(offset) && queries == 1 && keys > 1; /* of the default */
    return am_abs(*diagonal) < AM_FAR / 2 && !warns;
}

/* The arguments that a usual call may have; all others are None. */
enum { QUERY, KEY, VALUE, SCALE, CAUSAL, OFFSET, OUT, RETURN_LSE, NORMALIZE, DROPOUT, LOW, USUAL };
static const char *const usual_names[USUAL] = {"query",         "key",         "value",
                                               "softmax_scale", "causal",      "causal_offset",
                                               "out",           "return_lse",  "normalize_output",
                                               "dropout_prob",  "relative_low"};

/* Takes an argument, unless it is unusual. Python interns the names in calls and in tables, so that they are
 * the same objects. */
static bool take_usual(PyObject *name, PyObject *value, PyObject *names, PyObject **taken)
{
    Py_ssize_t at = 0;
    while (at < PyTuple_GET_SIZE(names) && PyTuple_GET_ITEM(names, at) != name) at++;
    if (at == PyTuple_GET_SIZE(names)) return false;
    for (int i = 0; i < USUAL; i++) {
        if (PyUnicode_CompareWithASCIIString(name, usual_names[i]) != 0) continue;
        if (taken[i]) return false;
        taken[i] = value;
        return true;
    }
    return value == Py_None;
}

/* Finds the arguments of a call by their names; false if one is missing or unusual. */
static bool find_usual(PyObject *names, PyObject *args, PyObject *given, PyObject **taken)
{
    PyObject *name, *value;
    if (PyTuple_GET_SIZE(args) > PyTuple_GET_SIZE(names)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        if (!take_usual(PyTuple_GET_ITEM(names, i), PyTuple_GET_ITEM(args, i), names, taken)) return false;
    }
    for (Py_ssize_t i = 0; PyDict_Next(given, &i, &name, &value);) {
        if (!take_usual(name, value, names, taken)) return false;
    }
    return taken[QUERY] && taken[KEY] && taken[VALUE];
}

/* Whether what may be left out, or given as it is then, is so. */
static bool has_usual_options(PyObject *const *taken)
{
    PyObject *const dropout = taken[DROPOUT], *const low = taken[LOW];
    return (!taken[NORMALIZE] || taken[NORMALIZE] == Py_True) &&
           (!taken[CAUSAL] || PyBool_Check(taken[CAUSAL])) &&
           (!taken[RETURN_LSE] || PyBool_Check(taken[RETURN_LSE])) &&
           (!dropout || (PyFloat_CheckExact(dropout) && PyFloat_AS_DOUBLE(dropout) == 0)) &&
           (!low || (PyLong_CheckExact(low) && PyObject_Not(low)));
}

/* Reads the arguments of flash_usual; false, and maybe with an exception, if it does not apply. */
static bool read_usual(PyObject *const *taken, arguments *a, ptrdiff_t *high)
{
    if (!has_usual_options(taken) || !usual_tokens(taken[QUERY], &a->query) ||
        !usual_tokens(taken[KEY], &a->key) || !usual_tokens(taken[VALUE], &a->value) || !read_inputs(a) ||
        am_heads_seem_first(a->q.shape, a->k.shape))
        return false;
    const npy_intp queries = a->q.shape[1], keys = a->k.shape[1];
    const bool causal = taken[CAUSAL] == Py_True;
    if (!am_usual_scale(taken[SCALE] ? taken[SCALE] : Py_None, a->q.shape[3], &a->scale.value)) return false;
    if (taken[OFFSET] ? !am_usual_diagonal(taken[OFFSET], causal, queries, keys, high)
                      : causal && queries == 1 && keys > 1) /* of which Python warns */
        return false;
    PyObject *const out = taken[OUT];
    if (!out || out == Py_None) return true;
    if (!PyArray_CheckExact(out) || am_to_out(out, "out", &a->out) < 0) return false;
    PyArrayObject *const inputs[] = {a->query, a->key, a->value};
    for (int i = 0; i < 3; i++) {
        if (am_check_apart(a->out.array, "out", inputs[i], input_names[i]) < 0) return false;
    }
    return true;
}

/* Attention without Python's checks, which take longer than a short call: of arrays that can be read as they
 * are, with a causal mask or none. Returns NotImplemented if anything is unusual, or wrong. */
static PyObject *attend_usual(PyObject *module, PyObject *const *args, Py_ssize_t nargs, arguments a)
{
    PyObject *taken[USUAL] = {NULL}, *result = NULL;
    if (nargs != 3 || !PyTuple_Check(args[0]) || !PyTuple_Check(args[1]) || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "expected names, a tuple of arguments and a dict of others");
        return NULL;
    }
    if (!find_usual(args[0], args[1], args[2], taken)) Py_RETURN_NOTIMPLEMENTED;
    const ptrdiff_t low = -AM_FAR;
    ptrdiff_t high = 0;
    a.return_lse |= taken[RETURN_LSE] == Py_True;
    if (read_usual(taken, &a, &high)) {
        am_node node = {.kind = AM_TERM_ALL};
        if (taken[CAUSAL] == Py_True) node = (am_node){.kind = AM_TERM_BAND, .band = {&low, &high, 0, 0}};
        set_shape(&a);
        if (am_read_nodes_and(&a.mask, NULL, &node, 1) == 0) result = compute(module, &a);
    } else if (!PyErr_Occurred()) {
        result = Py_NewRef(Py_NotImplemented);
    }
    release(&a);
    return result;
}

static PyObject *flash_usual(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return attend_usual(module, args, nargs, (arguments){.part = Py_None, .normalize = true});
}

static PyObject *flash_usual_fwd(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return attend_usual(module, args, nargs,
                        (arguments){.part = Py_None, .normalize = true, .return_lse = true});
}

/* The same with the results of flash_forward_vjp. */
static PyObject *flash_usual_vjp(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return attend_usual(
        module, args, nargs,
        (arguments){.part = Py_None, .normalize = true, .return_lse = true, .return_wide = true});
}

/* --- The schedule as data --- */

static PyObject *section_data(const am_scheduled *g)
{
    return Py_BuildValue("{s:n,s:(nn),s:(nn),s:n,s:s,s:n,s:n,s:n,s:n}", "row", g->section.b, "queries",
                         g->section.queries.begin, g->section.queries.end, "keys", g->section.keys.begin,
                         g->section.keys.end, "tiles", am_length(g->section.tiles), "strategy",
                         am_strategy_name(g->shape.strategy), "block_rows", g->shape.rows, "items", g->items,
                         "splits", g->shape.splits, "task_items", g->task_items);
}

/* The index of a task's section, and the rows and the number of tiles of each of its items. */
static PyObject *task_data(const am_attn_base *base, const am_sections *sections, const am_schedule *s,
                           ptrdiff_t task)
{
    const am_scheduled *g = am_scheduled_of(s, task);
    const am_task_items task_items = am_items_of(g, task);
    PyObject *items = PyList_New(0);
    for (ptrdiff_t i = task_items.first; items && i < task_items.first + task_items.count; i++) {
        const am_attn_place at = am_item_place(base, sections, g, i);
        const am_range seen = am_block_tiles(base, sections, g, &at);
        ptrdiff_t tiles = 0;
        for (ptrdiff_t split = 0; split < g->shape.splits; split++) {
            if (!s->splits_apart || split == task_items.split)
                tiles += am_max(0, am_length(am_split_tiles(g, seen, split)));
        }
        PyObject *item = Py_BuildValue("(nn)", at.rows, tiles);
        if (!item || PyList_Append(items, item) < 0) Py_CLEAR(items);
        Py_XDECREF(item);
    }
    return items ? Py_BuildValue("(nN)", (Py_ssize_t)(g - s->sections), items) : NULL;
}

/* A schedule and what it was made from, for the functions that list it as plain data. */
typedef struct {
    const am_attn_base *base;
    const am_sections *sections;
    const am_schedule *schedule;
} schedule_view;

static PyObject *section_at(const schedule_view *view, ptrdiff_t i)
{
    return section_data(&view->schedule->sections[i]);
}
static PyObject *task_at(const schedule_view *view, ptrdiff_t i)
{
    return task_data(view->base, view->sections, view->schedule, am_task_at(view->schedule, i));
}

static PyObject *list_of(const schedule_view *view, ptrdiff_t count,
                         PyObject *(*make)(const schedule_view *, ptrdiff_t))
{
    PyObject *list = PyList_New(0);
    for (ptrdiff_t i = 0; list && i < count; i++) {
        PyObject *item = make(view, i);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* The number of tasks in each parallel loop, and how many of them one thread takes in order if it can. */
static PyObject *wave_list(const schedule_view *view)
{
    PyObject *list = PyList_New(0);
    for (ptrdiff_t task = 0; list && task < view->schedule->tasks;) {
        const am_wave wave = am_next_wave(view->schedule, view->base, task);
        PyObject *item = Py_BuildValue("(nn)", wave.tasks, wave.row_tasks);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
        task += wave.tasks;
    }
    return list;
}

static int to_threads(PyObject *object, const char *name, void *dst)
{
    npy_intp count = 0;
    if (am_to_count(object, name, &count) < 0 && !PyErr_ExceptionMatches(PyExc_ValueError)) return -1;
    _Static_assert(AM_MAX_THREADS == 1024, "as the message says");
    if (count < 1 || count > AM_MAX_THREADS)
        return am_reject(PyExc_ValueError, name, "from 1 to 1024", object);
    *(int *)dst = (int)count;
    return 0;
}

static PyObject *attention_schedule(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    arguments a = {0};
    am_sections sections = {0};
    am_schedule schedule = {0};
    PyObject *result = NULL;
    int threads;
    const am_param params[] = {PROBLEM(a), {"threads", to_threads, &threads}};
    if (am_parse("attention_schedule", args, nargs, params, PROBLEM_PARAMS + 1) < 0) goto fail;
    if (check_problem(&a) < 0) goto fail;
    const am_attn attn = flash_of(&a);
    am_call call;
    am_enter(&call, module, 0);
    const am_attn_base base = am_attn_base_of(&call.context, &attn);
    am_status status = am_mask_prepare(&call.context, &a.mask.request.mask);
    if (status == AM_OK) status = am_sections_make(&sections, attn.mask, true);
    if (status == AM_OK) status = am_schedule_make(&schedule, &base, &sections, threads);
    am_leave(&call);
    if (status != AM_OK) {
        am_raise(status, NULL);
        goto fail;
    }
    const schedule_view view = {&base, &sections, &schedule};
    result = Py_BuildValue("{s:N,s:N,s:N,s:n}", "sections", list_of(&view, schedule.count, section_at),
                           "tasks", list_of(&view, schedule.tasks, task_at), "waves", wave_list(&view),
                           "scratch", am_attn_scratch(&base, &schedule, threads));
fail:
    am_schedule_free(&schedule);
    am_sections_free(&sections);
    release(&a);
    return result;
}

/* --- Backward --- */

typedef struct {
    arguments a;
    PyArrayObject *d_out, *out, *lse, *d_lse;
    bool want_bias, want_sinks, want_table;
} backward_arguments;

static int check_shape(PyArrayObject *array, const char *name, int ndim, const npy_intp *dims,
                       const char *expected)
{
    if (PyArray_NDIM(array) == ndim && PyArray_CompareLists(PyArray_DIMS(array), dims, ndim)) return 0;
    return reject_array(PyExc_ValueError, name, expected, array);
}

static int check_backward(const backward_arguments *g)
{
    const am_mask *mask = &g->a.mask.request.mask;
    am_dtype type = g->a.q.type;
    npy_intp const rows[3] = {mask->batch, mask->heads, mask->queries};
    npy_intp const tokens_[4] = {mask->batch, mask->queries, mask->heads, g->a.v.shape[3]};
    PyArrayObject *const results[] = {g->d_out, g->out}, *const row_stats[] = {g->lse, g->d_lse};
    static const char *const result_names[] = {"dout", "out"}, *const stat_names[] = {"lse", "dlse"};
    am_dtype stat_type = type == AM_FLOAT64 ? AM_FLOAT64 : AM_FLOAT32;
    for (int i = 0; i < 2; i++) {
        const am_dtype given = am_dtype_of(PyArray_DESCR(results[i]));
        if (given != type && !(results[i] == g->out && given == stat_type))
            return reject_array(PyExc_TypeError, result_names[i], "of the query's dtype", results[i]);
        if (check_shape(results[i], result_names[i], 4, tokens_, "[B, Tq, H, Dv] like the result") < 0)
            return -1;
    }
    for (int i = 0; i < 2; i++) {
        if (!row_stats[i]) continue;
        if (am_dtype_of(PyArray_DESCR(row_stats[i])) != stat_type)
            return reject_array(PyExc_TypeError, stat_names[i], "of float32, or float64 for float64 inputs",
                                row_stats[i]);
        if (check_shape(row_stats[i], stat_names[i], 3, rows, "[B, H, Tq]") < 0) return -1;
    }
    if (g->want_bias && !g->a.bias) {
        PyErr_SetString(PyExc_ValueError, "grad_bias needs a bias");
        return -1;
    }
    if (g->want_sinks && !g->a.sinks) {
        PyErr_SetString(PyExc_ValueError, "grad_softmax_aux needs softmax_aux");
        return -1;
    }
    if (g->want_table && !g->a.relative_arrays[TABLE]) {
        PyErr_SetString(PyExc_ValueError, "grad_relative_bias needs relative_bias");
        return -1;
    }
    return 0;
}

static am_row_stats row_stats(PyArrayObject *array)
{
    if (!array) return (am_row_stats){0};
    return (am_row_stats){PyArray_BYTES(array), PyArray_STRIDE(array, 0), PyArray_STRIDE(array, 1),
                          PyArray_STRIDE(array, 2)};
}

enum { RESULTS = 6 }; /* query, key, value, bias, sinks, relative bias */

static PyObject *compute_backward(PyObject *module, backward_arguments *g)
{
    arguments *a = &g->a;
    PyArrayObject *const like[RESULTS] = {a->query,
                                          a->key,
                                          a->value,
                                          g->want_bias ? a->bias : NULL,
                                          g->want_sinks ? a->sinks : NULL,
                                          g->want_table ? a->relative_arrays[TABLE] : NULL};
    PyObject *result = NULL;
    PyArrayObject *made[RESULTS] = {NULL};
    for (int i = 0; i < RESULTS; i++) {
        if (!like[i]) continue;
        PyArray_Descr *dtype = i < 3 ? result_dtype(a) : (PyArray_Descr *)Py_NewRef(PyArray_DESCR(like[i]));
        if (dtype) made[i] = am_new_array(PyArray_NDIM(like[i]), PyArray_DIMS(like[i]), dtype);
        Py_XDECREF(dtype);
        if (!made[i]) goto fail;
    }
    am_attn_gradients problem = {
        .forward = flash_of(a),
        .lse = row_stats(g->lse),
        .d_lse = row_stats(g->d_lse),
        .d_out = am_tokens_of_array(g->d_out),
        .d_q = am_tokens_of_array(made[0]),
        .d_k = am_tokens_of_array(made[1]),
        .d_v = am_tokens_of_array(made[2]),
        .d_sinks = made[4] ? PyArray_DATA(made[4]) : NULL,
        .d_table = made[5] ? PyArray_DATA(made[5]) : NULL,
    };
    problem.forward.out = am_tokens_of_array(g->out);
    if (made[3]) {
        problem.d_bias = PyArray_BYTES(made[3]);
        for (int i = 0; i < 4; i++) problem.bias_shape[i] = PyArray_DIM(made[3], i);
    }
    am_call call;
    am_enter(&call, module, NPY_MAX_INTP);
    am_status status = am_mask_prepare(&call.context, &a->mask.request.mask);
    if (status == AM_OK) status = am_attn_backward(&call.context, &problem);
    am_leave(&call);
    if (status == AM_OK)
        result =
            Py_BuildValue("(OOOOOO)", made[0], made[1], made[2], made[3] ? (PyObject *)made[3] : Py_None,
                          made[4] ? (PyObject *)made[4] : Py_None, made[5] ? (PyObject *)made[5] : Py_None);
    else
        am_raise(status, NULL);
fail:
    for (int i = 0; i < RESULTS; i++) Py_XDECREF(made[i]);
    return result;
}

static PyObject *flash_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    backward_arguments g = {0};
    const am_param params[] = {
        PROBLEM(g.a),
        {"dout", am_to_array, &g.d_out},
        {"out", am_to_array, &g.out},
        {"lse", am_to_array, &g.lse},
        {"dlse", to_array_or_none, &g.d_lse},
        {"grad_bias", am_to_bool, &g.want_bias},
        {"grad_softmax_aux", am_to_bool, &g.want_sinks},
        {"grad_relative_bias", am_to_bool, &g.want_table},
    };
    PyObject *result = NULL;
    if (am_parse("flash_backward", args, nargs, params, PROBLEM_PARAMS + 7) == 0 &&
        check_problem(&g.a) == 0 && check_backward(&g) == 0)
        result = compute_backward(module, &g);
    release(&g.a);
    Py_XDECREF(g.d_out);
    Py_XDECREF(g.out);
    Py_XDECREF(g.lse);
    Py_XDECREF(g.d_lse);
    return result;
}

static PyObject *dropout_keep_mask(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t seed;
    am_scale probability;
    PyObject *shape, *result = NULL;
    am_out out = {0};
    PyArray_Descr *dtype = PyArray_DescrFromType(NPY_BOOL);
    PyArrayObject *target = NULL;
    const am_param params[] = {
        {"seed", to_seed, &seed},
        {"prob", am_to_scale, &probability},
        {"shape", am_to_object, &shape},
        {"out", am_to_out, &out},
    };
    if (am_parse("dropout_keep_mask", args, nargs, params, 4) < 0) goto fail;
    npy_intp dims[4];
    if (!PyArg_ParseTuple(shape, "nnnn;shape must be four integers", &dims[0], &dims[1], &dims[2], &dims[3]))
        goto fail;
    if (!(probability.value >= 0 && probability.value < 1)) {
        PyErr_SetString(PyExc_ValueError, "prob must be at least 0 and less than 1");
        goto fail;
    }
    if (check_keys_of_dropout("shape", dims[3]) < 0) goto fail;
    if (out.given && am_check_out(out.array, "out", 4, dims, dtype, NULL, NULL, 0) < 0) goto fail;
    target = am_target(&out, 4, dims, dtype);
    if (!target) goto fail;
    am_call call;
    am_enter(&call, module, PyArray_SIZE(target));
    am_status status = am_dropout_keep_mask(&call.context, seed, probability.value, dims,
                                            PyArray_STRIDES(target), PyArray_DATA(target));
    am_leave(&call);
    if (status == AM_OK)
        result = am_returned(&out, (PyArrayObject *)Py_NewRef(target));
    else
        am_raise(status, NULL);
fail:
    Py_XDECREF(target);
    Py_XDECREF(out.array);
    Py_DECREF(dtype);
    return result;
}

PyMethodDef am_flash_methods[] = {
    {"flash_forward", (PyCFunction)(void *)flash_forward, METH_FASTCALL,
     "flash_forward($module, query, key, value, nodes, bias, scale, cap, sinks, normalize, dropout, seed, "
     "relative, part, return_lse, out, /)\n--\n\n"},
    {"flash_forward_vjp", (PyCFunction)(void *)flash_forward_vjp, METH_FASTCALL,
     "flash_forward_vjp($module, query, key, value, nodes, bias, scale, cap, sinks, normalize, dropout, "
     "seed, relative, part, /)\n--\n\nReturns the result, its logsumexp, and what flash_backward takes as "
     "out."},
    {"flash_usual", (PyCFunction)(void *)flash_usual, METH_FASTCALL,
     "flash_usual($module, names, args, given, /)\n--\n\n"},
    {"flash_usual_fwd", (PyCFunction)(void *)flash_usual_fwd, METH_FASTCALL,
     "flash_usual_fwd($module, names, args, given, /)\n--\n\n"},
    {"flash_usual_vjp", (PyCFunction)(void *)flash_usual_vjp, METH_FASTCALL,
     "flash_usual_vjp($module, names, args, given, /)\n--\n\n"},
    {"attention_schedule", (PyCFunction)(void *)attention_schedule, METH_FASTCALL,
     "attention_schedule($module, query, key, value, nodes, bias, scale, cap, sinks, normalize, dropout, "
     "seed, relative, part, threads, /)\n--\n\nHow attention forward divides its work for that many "
     "threads:\n\n"
     "sections   a dict for each section of queries: its queries, keys, strategy\n"
     "tasks    (index of the section, [(rows, tiles) of each item])\n"
     "waves    (tasks, tasks that one thread takes in order) of each parallel loop\n"
     "scratch  bytes of memory in addition to the results"},
    {"flash_backward", (PyCFunction)(void *)flash_backward, METH_FASTCALL,
     "flash_backward($module, query, key, value, nodes, bias, scale, cap, sinks, normalize, dropout, seed, "
     "relative, part, dout, out, lse, dlse, want_bias, want_sinks, want_table, /)\n--\n\n"},
    {"dropout_keep_mask", (PyCFunction)(void *)dropout_keep_mask, METH_FASTCALL,
     "dropout_keep_mask($module, seed, prob, shape, out, /)\n--\n\n"},
    {.ml_name = NULL},
};
