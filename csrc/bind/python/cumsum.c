/* cumsum.c – bindings of the chunked cumulative sums. */
#include "bind/python/arguments.h"
#include "core/sequences/cumsum.h"

/* The arguments of both functions; chunk_global_cumsum leaves chunk_size 0. */
typedef struct {
    PyArrayObject *array;
    am_out out;
    am_starts starts;
    PyArray_Descr *dtype;
    npy_intp chunk_size;
    am_scale scale;
    bool reverse, head_first;
} arguments;

/* Returns 1, 0, or -1 with the exception set, for an integer of any size. */
static int is_power_of_two(PyObject *object)
{
    am_owned PyObject *number = PyNumber_Index(object), *one = PyLong_FromLong(1),
                      *less = number && one ? PyNumber_Subtract(number, one) : NULL,
                      *common = less ? PyNumber_And(number, less) : NULL;
    return common ? PyObject_Not(common) : -1;
}

static int to_chunk_size(PyObject *object, const char *name, void *dst)
{
    if (am_to_count(object, name, dst) < 0) return -1;
    int answer = is_power_of_two(object);
    if (answer == 0) return am_reject(PyExc_ValueError, name, "a power of two", object);
    return answer < 0 ? -1 : 0;
}

/* Checks the array and the arguments that depend on it, and sets the dtype of the result. */
static int check(arguments *a, const char *name)
{
    PyArrayObject *array = a->array;
    am_dtype type = am_dtype_of(PyArray_DESCR(array));
    int ndim = PyArray_NDIM(array);
    if (ndim != 3 && ndim != 4) {
        return am_reject(PyExc_ValueError, name,
                         a->head_first ? "[B, H, T] or [B, H, T, S]" : "[B, T, H] or [B, T, H, S]", array);
    }
    if (type == AM_BOOL)
        return am_reject(PyExc_TypeError, name, "an array of integers or real floating-point numbers", array);
    if (!a->dtype) a->dtype = (PyArray_Descr *)Py_NewRef(PyArray_DESCR(array));
    am_dtype result = am_dtype_of(a->dtype);
    if (result == AM_BOOL || (am_is_floating(type) && am_is_integer(result)))
        return am_fail(PyExc_TypeError, "output_dtype must be %s for %s of %S, got %S",
                       am_is_integer(type) ? "an integer or floating-point type" : "a floating-point type",
                       name, PyArray_DESCR(array), a->dtype);
    if (!a->starts.array) return 0;
    const npy_intp batch = PyArray_DIM(array, 0), time = PyArray_DIM(array, a->head_first ? 2 : 1),
                   end = a->starts.starts[a->starts.sequences];
    if (batch != 1)
        return am_fail(PyExc_ValueError, "%s must have batch size 1 when cu_seqlens is given, got %zd", name,
                       batch);
    return end == time
               ? 0
               : am_fail(PyExc_ValueError, "cu_seqlens must end at the %zd steps of %s, got %zd at index %zd",
                         time, name, end, a->starts.sequences);
}

static PyObject *compute(PyObject *module, arguments *a, const char *name)
{
    if (check(a, name) < 0) return NULL;
    PyArrayObject *array = a->array;
    int ndim = PyArray_NDIM(array), time = a->head_first ? 2 : 1;
    am_owned PyArrayObject *out = am_target(&a->out, ndim, PyArray_DIMS(array), a->dtype);
    if (!out) return NULL;

    ptrdiff_t whole[2] = {0, PyArray_DIM(array, time)};
    am_cumsum job = {
        .src_type = am_dtype_of(PyArray_DESCR(array)),
        .dst_type = am_dtype_of(a->dtype),
        .src = PyArray_BYTES(array),
        .dst = PyArray_BYTES(out),
        .steps = PyArray_DIM(array, time),
        .src_time_stride = PyArray_STRIDE(array, time),
        .dst_time_stride = PyArray_STRIDE(out, time),
        .shape = {1, 1, 1},
        .starts = a->starts.array ? a->starts.starts : whole,
        .sequences = a->starts.array ? a->starts.sequences : 1,
        .chunk = a->chunk_size,
        .reverse = a->reverse,
        .scaled = a->scale.given,
        .scale = a->scale.value,
    };
    for (int i = 0, n = 0; i < ndim; i++) {
        if (i == time) continue;
        job.shape[n] = PyArray_DIM(array, i);
        job.src_stride[n] = PyArray_STRIDE(array, i);
        job.dst_stride[n++] = PyArray_STRIDE(out, i);
    }
    am_call call;
    const am_context *context = am_enter(&call, module, PyArray_SIZE(array));
    const am_status status = am_cumsum_compute(context, &job);
    if (am_leave(&call, status == AM_OVERFLOW ? AM_OK : status) < 0) return NULL;
    if (status == AM_OK) return am_returned(&a->out, out);
    if (am_is_integer(job.dst_type))
        return PyErr_Format(PyExc_OverflowError, "a sum of %s, or what it is scaled to, does not fit %S",
                            name, a->dtype);
    return PyErr_Format(PyExc_OverflowError, "a sum of %s does not fit int64, in which integers are added up",
                        name);
}

static void release(arguments *a)
{
    Py_XDECREF(a->array);
    Py_XDECREF(a->out.array);
    Py_XDECREF(a->dtype);
    am_free_starts(&a->starts);
}

static PyObject *chunk_local_cumsum(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_scoped(release) arguments a = {0};
    const am_param params[] = {
        {"g", am_to_array, &a.array},
        {"chunk_size", to_chunk_size, &a.chunk_size},
        {"reverse", am_to_bool, &a.reverse},
        {"softmax_scale", am_to_scale, &a.scale},
        {"cu_seqlens", am_to_starts_or_none, &a.starts},
        {"head_first", am_to_bool, &a.head_first},
        {"output_dtype", am_to_dtype, &a.dtype},
        {"out", am_to_out, &a.out},
    };
    return am_parse("chunk_local_cumsum", args, nargs, params, 8) < 0 ? NULL : compute(module, &a, "g");
}

static PyObject *chunk_global_cumsum(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_scoped(release) arguments a = {0};
    const am_param params[] = {
        {"s", am_to_array, &a.array},
        {"reverse", am_to_bool, &a.reverse},
        {"cu_seqlens", am_to_starts_or_none, &a.starts},
        {"softmax_scale", am_to_scale, &a.scale},
        {"head_first", am_to_bool, &a.head_first},
        {"output_dtype", am_to_dtype, &a.dtype},
        {"out", am_to_out, &a.out},
    };
    return am_parse("chunk_global_cumsum", args, nargs, params, 7) < 0 ? NULL : compute(module, &a, "s");
}

PyMethodDef am_cumsum_methods[] = {
    AM_METHOD(chunk_local_cumsum,
              "g, chunk_size, reverse, softmax_scale, cu_seqlens, head_first, output_dtype, out"),
    AM_METHOD(chunk_global_cumsum, "s, reverse, cu_seqlens, softmax_scale, head_first, output_dtype, out"),
    {.ml_name = NULL},
};
