/* cumsum.c – bindings of the chunked cumulative sums. */
#include "bind/python/arguments.h"
#include "tokens/cumsum.h"

/* The arguments of both functions; chunk_global_cumsum leaves chunk_size 0. */
typedef struct {
    PyArrayObject *array;
    am_out out;
    am_starts cu_seqlens;
    PyArray_Descr *output_dtype;
    npy_intp chunk_size;
    am_scale softmax_scale;
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
    if (!a->output_dtype) a->output_dtype = am_ref(PyArray_DESCR(array));
    am_dtype result = am_dtype_of(a->output_dtype);
    if (result == AM_BOOL || (am_is_floating(type) && am_is_integer(result)))
        return am_fail(PyExc_TypeError, "output_dtype must be %s for %s of %S, got %S",
                       am_is_integer(type) ? "an integer or floating-point type" : "a floating-point type",
                       name, PyArray_DESCR(array), a->output_dtype);
    if (!a->cu_seqlens.array) return 0;
    const npy_intp batch = PyArray_DIM(array, 0), time = PyArray_DIM(array, a->head_first ? 2 : 1),
                   end = a->cu_seqlens.starts[a->cu_seqlens.sequences];
    if (batch != 1)
        return am_fail(PyExc_ValueError, "%s must have batch size 1 when cu_seqlens is given, got %zd", name,
                       batch);
    return end == time
               ? 0
               : am_fail(PyExc_ValueError, "cu_seqlens must end at the %zd steps of %s, got %zd at index %zd",
                         time, name, end, a->cu_seqlens.sequences);
}

static PyObject *compute(PyObject *module, arguments *a)
{
    const char *name = a->chunk_size ? "g" : "s";
    if (check(a, name) < 0) return NULL;
    PyArrayObject *array = a->array;
    am_owned PyArrayObject *out =
        am_target(&a->out, PyArray_NDIM(array), PyArray_DIMS(array), a->output_dtype);
    if (!out) return NULL;
    const am_view src = am_view_of(array), dst = am_view_of(out);
    ptrdiff_t whole[2] = {0, src.shape[a->head_first ? 2 : 1]};
    am_cumsum job = {
        .src = am_array_of(&src, a->head_first ? AM_HEADS_FIRST : AM_TOKENS_FIRST),
        .dst = am_array_of(&dst, a->head_first ? AM_HEADS_FIRST : AM_TOKENS_FIRST),
        .starts = a->cu_seqlens.array ? a->cu_seqlens.starts : whole,
        .sequences = a->cu_seqlens.array ? a->cu_seqlens.sequences : 1,
        .chunk = a->chunk_size,
        .reverse = a->reverse,
        .scaled = a->softmax_scale.given,
        .scale = a->softmax_scale.value,
    };
    am_call call;
    const am_context *context = am_enter(&call, module, PyArray_SIZE(array));
    const am_status status = am_cumsum_compute(context, &job);
    if (am_leave(&call, status == AM_OVERFLOW ? AM_OK : status) < 0) return NULL;
    if (status == AM_OK) return am_returned(&a->out, out);
    if (am_is_integer(job.dst.type))
        return PyErr_Format(PyExc_OverflowError, "a sum of %s, or what it is scaled to, does not fit %S",
                            name, a->output_dtype);
    return PyErr_Format(PyExc_OverflowError, "a sum of %s does not fit int64, in which integers are added up",
                        name);
}

static PyObject *checked(arguments *a, const char *name)
{
    return check(a, name) < 0 ? NULL : Py_NewRef(Py_None);
}

#define LOCAL                                                                                                \
    AM_PARAM("g", am_to_array, array), AM_ARG(chunk_size, to_chunk_size), AM_ARG(reverse, am_to_bool),       \
        AM_ARG(softmax_scale, am_to_scale), AM_ARG(cu_seqlens, am_to_starts_or_none),                        \
        AM_ARG(head_first, am_to_bool), AM_ARG(output_dtype, am_to_dtype), AM_ARG(out, am_to_out)
#define GLOBAL                                                                                               \
    AM_PARAM("s", am_to_array, array), AM_ARG(reverse, am_to_bool),                                          \
        AM_ARG(cu_seqlens, am_to_starts_or_none), AM_ARG(softmax_scale, am_to_scale),                        \
        AM_ARG(head_first, am_to_bool), AM_ARG(output_dtype, am_to_dtype), AM_ARG(out, am_to_out)
AM_FUNCTION(chunk_local_cumsum, compute(module, a), LOCAL)
AM_FUNCTION(check_chunk_local_cumsum, checked(a, "g"), LOCAL)
AM_FUNCTION(chunk_global_cumsum, compute(module, a), GLOBAL)
AM_FUNCTION(check_chunk_global_cumsum, checked(a, "s"), GLOBAL)

PyMethodDef am_cumsum_methods[] = {
    AM_METHOD(chunk_local_cumsum,
              "g, chunk_size, reverse, softmax_scale, cu_seqlens, head_first, output_dtype, out"),
    AM_METHOD(chunk_global_cumsum, "s, reverse, cu_seqlens, softmax_scale, head_first, output_dtype, out"),
    AM_ENTRY(check_chunk_local_cumsum),
    AM_ENTRY(check_chunk_global_cumsum),
    {.ml_name = NULL},
};
