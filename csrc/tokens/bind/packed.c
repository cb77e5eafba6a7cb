/* packed.c – bindings of the packed-sequence functions. */
#include "bind/python/arguments.h"
#include "tokens/bind/counts.h"
#include "bind/python/mask_arrays.h"
#include "core/arrays/convert.h"
#include "core/arrays/packed.h"
#include "tokens/quotients.h"

#include <string.h>

typedef struct {
    am_starts cu_seqlens;
    npy_intp chunk_size;
    PyArrayObject *mask, *a, *b;
    PyArray_Descr *out_dtype;
    PyObject *starts; /* of checked_starts, which names them by `name` */
    const char *name;
} arguments;

/* Computes lengths; or if `chunk` is not 0, the offsets of chunks of `chunk` tokens. `type` is AM_INT32 or
 * AM_INT64. Returns false if starts do not begin with 0 or decrease. */
static bool count(PyObject *module, am_dtype type, void *dst, const void *starts, npy_intp sequences,
                  npy_intp chunk)
{
    am_call call;
    bool valid;
    const am_kernels *k = am_enter(&call, module, sequences)->kernels;
    if (type == AM_INT32) {
        valid = chunk ? k->sequences.chunk_offsets_32(dst, starts, sequences, chunk)
                      : k->sequences.lens_32(dst, starts, sequences);
        valid &= *(const int32_t *)starts == 0;
    } else {
        valid = chunk ? k->sequences.chunk_offsets_64(dst, starts, sequences, chunk)
                      : k->sequences.lens_64(dst, starts, sequences);
        valid &= *(const int64_t *)starts == 0;
    }
    return am_leave(&call, AM_OK) == 0 && valid;
}

/* Computes lengths or offsets of contiguous int32 or int64 in one pass. Returns NULL without an exception for
 * other starts, and for those that are not valid. */
static PyObject *quick_counts(PyObject *module, const am_starts *s, npy_intp chunk)
{
    const am_view *starts = &s->entries;
    npy_intp const sequences = starts->shape[0] - 1, entries = sequences + (chunk ? 1 : 0);
    if (starts->type != AM_INT32 && starts->type != AM_INT64) return NULL;
    if (starts->shape[0] > 1 && starts->stride[0] != (npy_intp)am_size_of(starts->type)) return NULL;
    PyArrayObject *counts = am_new_array(1, &entries, s->dtype);
    if (counts && !count(module, starts->type, PyArray_DATA(counts), starts->data, sequences, chunk))
        Py_CLEAR(counts);
    return (PyObject *)counts;
}

/* am_starts *: starts that are not checked yet. */
static int to_raw_starts(PyObject *object, const char *name, void *dst)
{
    return am_read_starts(dst, object, name);
}

/* The lengths of sequences; or the offsets of their chunks, if these have a size. */
static PyObject *prepare_counts(PyObject *module, am_starts *s, npy_intp chunk)
{
    PyObject *result = quick_counts(module, s, chunk);
    if (result || PyErr_Occurred() || am_check_starts(s, "cu_seqlens") < 0) return result;
    npy_intp entries = s->sequences + (chunk ? 1 : 0);
    am_freed ptrdiff_t *counts = am_new(ptrdiff_t, entries);
    if (!counts) return PyErr_NoMemory();
    count(module, AM_INT64, counts, s->starts, s->sequences, chunk);
    return am_counts_as(counts, entries, s->dtype);
}
AM_FUNCTION(prepare_lens, prepare_counts(module, &a->cu_seqlens, 0), AM_ARG(cu_seqlens, to_raw_starts))
AM_FUNCTION(prepare_chunk_offsets, prepare_counts(module, &a->cu_seqlens, a->chunk_size),
            AM_ARG(cu_seqlens, to_raw_starts), AM_ARG(chunk_size, am_to_count))

/* Returns checked starts as a new array of int64. */
static PyObject *check_starts(PyObject *object, const char *name)
{
    am_scoped(am_free_starts) am_starts s = {0};
    if (am_to_starts(object, name, &s) < 0) return NULL;
    npy_intp const entries = s.sequences + 1;
    PyArrayObject *result = am_new_array_of(1, &entries, NPY_INT64);
    if (result) memcpy(PyArray_DATA(result), s.starts, (size_t)PyArray_NBYTES(result));
    return (PyObject *)result;
}
AM_FUNCTION(checked_starts, check_starts(a->starts, a->name), AM_PARAM("cu_seqlens", am_to_object, starts),
            AM_ARG(name, am_to_text))

/* Returns an array over all tokens: [total], or [total, 2] for pairs. */
static PyObject *fill_tokens(PyObject *module, am_token_kind kind, const ptrdiff_t *starts,
                             npy_intp sequences, PyArray_Descr *dtype)
{
    npy_intp shape[2] = {starts[sequences], 2};
    if (kind != AM_POSITIONS && shape[0] > 0) {
        npy_intp last = am_sequence_of(starts, sequences, shape[0] - 1);
        if (am_check_fits(last, dtype, "cu_seqlens", "a last sequence id") < 0) return NULL;
    }
    am_owned PyArrayObject *result = am_new_array_of(kind == AM_PAIRS ? 2 : 1, shape, am_working_type(dtype));
    if (!result) return NULL;
    const am_dtype type = am_dtype_of(PyArray_DESCR(result));
    void *const dst = PyArray_DATA(result);
    return am_computed(module, shape[0], am_fill_tokens, kind, type, dst, starts, sequences)
               ? am_finish(result, dtype)
               : NULL;
}

static PyObject *prepare_tokens(PyObject *module, am_token_kind kind, const am_starts *s)
{
    return fill_tokens(module, kind, s->starts, s->sequences, s->dtype);
}
AM_FUNCTION(prepare_position_ids, prepare_tokens(module, AM_POSITIONS, &a->cu_seqlens),
            AM_ARG(cu_seqlens, am_to_starts))
AM_FUNCTION(prepare_sequence_ids, prepare_tokens(module, AM_SEQUENCES, &a->cu_seqlens),
            AM_ARG(cu_seqlens, am_to_starts))
AM_FUNCTION(prepare_token_indices, prepare_tokens(module, AM_PAIRS, &a->cu_seqlens),
            AM_ARG(cu_seqlens, am_to_starts))

/* The offsets of chunks have the form of starts: the chunks of a sequence take the place of its tokens. */
static PyObject *number_chunks(PyObject *module, const am_starts *s, npy_intp chunk)
{
    am_freed ptrdiff_t *offsets = am_new(ptrdiff_t, s->sequences + 1);
    if (!offsets) return PyErr_NoMemory();
    count(module, AM_INT64, offsets, s->starts, s->sequences, chunk);
    return fill_tokens(module, AM_PAIRS, offsets, s->sequences, s->dtype);
}
AM_FUNCTION(prepare_chunk_indices, number_chunks(module, &a->cu_seqlens, a->chunk_size),
            AM_ARG(cu_seqlens, am_to_starts), AM_ARG(chunk_size, am_to_count))

/* Returns the number of live tokens in each row of a 2-D mask, as int64. */
static PyArrayObject *count_mask(PyObject *module, PyArrayObject *mask)
{
    if (PyArray_NDIM(mask) != 2)
        return am_reject_array(PyExc_ValueError, "mask", "a 2-D array [batch, length]", mask);
    if (am_check_mask(module, mask, "mask") < 0) return NULL;
    PyArrayObject *lens = am_new_array_of(1, PyArray_DIMS(mask), NPY_INT64);
    if (!lens) return NULL;
    am_mask_lens job = {
        .mask = PyArray_BYTES(mask),
        .type = am_dtype_of(PyArray_DESCR(mask)),
        .rows = PyArray_DIM(mask, 0),
        .columns = PyArray_DIM(mask, 1),
        .row_stride = PyArray_STRIDE(mask, 0),
        .column_stride = PyArray_STRIDE(mask, 1),
        .lens = PyArray_DATA(lens),
    };
    if (!am_computed(module, PyArray_SIZE(mask) + job.rows, am_count_rows, &job)) Py_CLEAR(lens);
    return lens;
}

static PyObject *lens_of_mask(PyObject *module, PyArrayObject *mask)
{
    am_owned PyArray_Descr *dtype = PyArray_DescrFromType(NPY_INT32);
    am_owned PyArrayObject *lens = count_mask(module, mask);
    if (!lens) return NULL;
    const int64_t *values = PyArray_DATA(lens);
    npy_intp longest = 0;
    for (npy_intp i = 0; i < PyArray_DIM(lens, 0); i++) longest = values[i] > longest ? values[i] : longest;
    return am_check_fits(longest, dtype, "mask", "a length") < 0 ? NULL : am_finish(lens, dtype);
}
AM_FUNCTION(prepare_lens_from_mask, lens_of_mask(module, a->mask), AM_ARG(mask, am_to_mask))

static PyObject *starts_of_mask(PyObject *module, PyArrayObject *mask, PyArray_Descr *dtype)
{
    am_owned PyArrayObject *lens = count_mask(module, mask), *starts = NULL;
    if (!lens) return NULL;
    npy_intp rows = PyArray_DIM(lens, 0), entries = rows + 1;
    starts = am_new_array_of(1, &entries, NPY_INT64);
    if (!starts) return NULL;
    const int64_t *values = PyArray_DATA(lens);
    int64_t *sums = PyArray_DATA(starts);
    sums[0] = 0;
    /* A mask with a stride of zero may have more live tokens than int64 holds. */
    for (npy_intp i = 0; i < rows; i++) {
        if (__builtin_add_overflow(sums[i], values[i], &sums[i + 1]))
            return PyErr_Format(PyExc_OverflowError,
                                "mask must have a total length that fits int64, got more");
    }
    return am_check_fits((npy_intp)sums[rows], dtype, "mask", "a total length") < 0
               ? NULL
               : am_finish(starts, dtype);
}
AM_FUNCTION(prepare_cu_seqlens_from_mask, starts_of_mask(module, a->mask, a->out_dtype),
            AM_ARG(mask, am_to_mask), AM_ARG(out_dtype, am_to_integer_dtype))

static int to_integers(PyObject *object, const char *name, void *dst)
{
    PyArrayObject **array = dst;
    if (!PyBool_Check(object) && am_to_array(object, name, array) < 0) return -1;
    if (*array && am_is_integer(am_dtype_of(PyArray_DESCR(*array)))) return 0;
    return am_reject(PyExc_TypeError, name, "an integer or an array of integers",
                     *array ? (PyObject *)*array : object);
}

static PyArrayObject *widened(PyArrayObject *array)
{
    PyArray_Descr *wide = PyArray_DescrFromType(PyArray_ISSIGNED(array) ? NPY_INT64 : NPY_UINT64);
    return am_of_memory(PyArray_FromArray(array, wide, NPY_ARRAY_CARRAY_RO));
}

/* NumPy's rule: a Python integer takes the dtype of the array that it meets. */
static PyArray_Descr *cdiv_type(PyArrayObject *a, bool a_is_int, PyArrayObject *b, bool b_is_int)
{
    if (a_is_int || b_is_int) return am_ref(PyArray_DESCR(b_is_int ? a : b));
    PyArray_Descr *dtype = PyArray_PromoteTypes(PyArray_DESCR(a), PyArray_DESCR(b));
    if (dtype && !PyTypeNum_ISINTEGER(dtype->type_num)) {
        PyErr_Format(PyExc_TypeError, "a and b must have a common integer type, got %S and %S",
                     PyArray_DESCR(a), PyArray_DESCR(b));
        Py_CLEAR(dtype);
    }
    return dtype;
}

static int check_divisors(PyArrayObject *b)
{
    const int64_t *values = PyArray_DATA(b);
    bool is_signed = PyArray_ISSIGNED(b);
    for (npy_intp i = 0; i < PyArray_SIZE(b); i++) {
        if (is_signed ? values[i] > 0 : values[i] != 0) continue;
        return am_reject_element("b", "be positive", b, i, "");
    }
    return 0;
}

static int reject_broadcast(PyArrayObject *a, PyArrayObject *b)
{
    am_owned PyObject *what_a = am_describe(a), *what_b = am_describe(b);
    if (!what_a || !what_b) return -1;
    return am_fail(PyExc_ValueError, "a and b must broadcast, got %U and %U", what_a, what_b);
}

/* The shape that a and b broadcast to, and the strides of both in it. NumPy's iterator allows 32 axes, but
 * arrays may have 64. */
typedef struct {
    int axes;
    npy_intp shape[NPY_MAXDIMS], a_strides[NPY_MAXDIMS], b_strides[NPY_MAXDIMS];
} broadcast;

static int broadcast_both(PyArrayObject *a, PyArrayObject *b, broadcast *both)
{
    const int a_axes = PyArray_NDIM(a), b_axes = PyArray_NDIM(b);
    both->axes = a_axes > b_axes ? a_axes : b_axes;
    for (int axis = 0; axis < both->axes; axis++) {
        const int in_a = axis - both->axes + a_axes, in_b = axis - both->axes + b_axes;
        const npy_intp a_length = in_a < 0 ? 1 : PyArray_DIM(a, in_a),
                       b_length = in_b < 0 ? 1 : PyArray_DIM(b, in_b);
        if (a_length != b_length && a_length != 1 && b_length != 1) return reject_broadcast(a, b);
        both->shape[axis] = a_length == 1 ? b_length : a_length;
        both->a_strides[axis] = a_length == 1 ? 0 : PyArray_STRIDE(a, in_a);
        both->b_strides[axis] = b_length == 1 ? 0 : PyArray_STRIDE(b, in_b);
    }
    return 0;
}

/* Returns the quotients as int64 or uint64. */
static PyArrayObject *divide(PyObject *module, PyArrayObject *a, PyArrayObject *b)
{
    broadcast both;
    if (broadcast_both(a, b, &both) < 0) return NULL;
    PyArrayObject *result = am_new_array_of(both.axes, both.shape, PyArray_TYPE(a));
    if (!result) return NULL;
    const am_broadcast arrays = {
        .axes = both.axes,
        .shape = both.shape,
        .a_strides = both.a_strides,
        .b_strides = both.b_strides,
        .a = PyArray_BYTES(a),
        .b = PyArray_BYTES(b),
        .is_signed = PyArray_ISSIGNED(a),
        .quotients = PyArray_DATA(result),
    };
    if (!am_computed(module, PyArray_SIZE(result), am_divide_broadcast, &arrays)) Py_CLEAR(result);
    return result;
}

/* Divides a contiguous array of int32 or int64 by one number, or by an array of the same shape and type if
 * `b` is not NULL. Returns NULL without an exception where it does not apply. */
static PyObject *quick_quotients(PyObject *module, PyArrayObject *a, PyArrayObject *b, int64_t divisor)
{
    am_dtype type = am_dtype_of(PyArray_DESCR(a));
    if ((type != AM_INT32 && type != AM_INT64) || PyArray_NDIM(a) == 0 || !PyArray_ISCARRAY_RO(a))
        return NULL;
    if (b ? am_dtype_of(PyArray_DESCR(b)) != type || !PyArray_ISCARRAY_RO(b) || !PyArray_SAMESHAPE(a, b)
          : divisor <= 0)
        return NULL;
    PyArrayObject *result = am_new_array(PyArray_NDIM(a), PyArray_DIMS(a), PyArray_DESCR(a));
    if (!result) return NULL;
    npy_intp size = PyArray_SIZE(result);
    void *dst = PyArray_DATA(result), *dividends = PyArray_DATA(a), *divisors = b ? PyArray_DATA(b) : NULL;
    bool valid = true;
    am_call call;
    const am_kernels *kernels = am_enter(&call, module, size)->kernels;
    if (b)
        valid = am_divide_each(type, dst, dividends, divisors, size);
    else if (type == AM_INT32)
        kernels->sequences.divide_32(dst, dividends, size, divisor);
    else
        kernels->sequences.divide_64(dst, dividends, size, divisor);
    if (am_leave(&call, AM_OK) < 0 || !valid) Py_CLEAR(result);
    return (PyObject *)result;
}

/* Converts quotients to `dtype`. Those of two arrays always fit; if one operand was a Python integer, they
 * may not. */
static PyArrayObject *narrowed(PyArrayObject *quotients, PyArray_Descr *dtype)
{
    am_owned PyArrayObject *narrow = (PyArrayObject *)PyArray_CastToType(quotients, am_ref(dtype), 0),
                           *again = narrow ? widened(narrow) : NULL;
    if (!again) return NULL;
    const int64_t *wanted = PyArray_DATA(quotients), *got = PyArray_DATA(again);
    bool same_sign = PyArray_ISSIGNED(again) == PyArray_ISSIGNED(quotients);
    for (npy_intp i = 0; i < PyArray_SIZE(quotients); i++) {
        if (wanted[i] == got[i] && (same_sign || wanted[i] >= 0)) continue;
        am_owned PyObject *quotient = PyArray_GETITEM(quotients, (char *)&wanted[i]);
        if (quotient)
            PyErr_Format(PyExc_OverflowError, "a and b must have quotients that fit %S, got %S at index %zd",
                         dtype, quotient, i);
        return NULL;
    }
    return am_ref(narrow);
}

/* Divides integers of any kind; is_int: whether each was an integer of Python. */
static PyObject *divide_any(PyObject *module, PyArrayObject *a, PyArrayObject *b, const bool is_int[2])
{
    am_owned PyArrayObject *wide_a = NULL, *wide_b = NULL, *quotients = NULL;
    am_owned PyArray_Descr *dtype = cdiv_type(a, is_int[0], b, is_int[1]);
    if (!dtype) return NULL;
    bool one = PyArray_NDIM(b) == 0;
    if (one && !(wide_b = widened(b))) return NULL;
    /* A divisor of uint64 above the range of int64 turns negative, which quick_quotients does not take. */
    int64_t divisor = one ? *(const int64_t *)PyArray_DATA(wide_b) : 0;
    if (am_dtype_of(PyArray_DESCR(a)) == am_dtype_of(dtype)) {
        PyObject *result = quick_quotients(module, a, one ? NULL : b, divisor);
        if (result || PyErr_Occurred()) return result;
    }
    wide_a = widened(a);
    if (!one) wide_b = widened(b);
    if (!wide_a || !wide_b || check_divisors(wide_b) < 0) return NULL;
    quotients = (PyArrayObject *)quick_quotients(module, wide_a, one ? NULL : wide_b, divisor);
    if (!quotients && !PyErr_Occurred()) quotients = divide(module, wide_a, wide_b);
    return quotients ? PyArray_Return(narrowed(quotients, dtype)) : NULL;
}

static PyObject *cdiv(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    static const am_param params[] = {AM_ARG(a, to_integers), AM_ARG(b, to_integers)};
    arguments given = {0};
    PyObject *result = NULL;
    if (nargs == 2 && PyArray_Check(args[0]) && PyLong_CheckExact(args[1])) {
        int overflow; /* then the divisor is -1, which quick_quotients does not take */
        int64_t divisor = PyLong_AsLongLongAndOverflow(args[1], &overflow);
        result = quick_quotients(module, (PyArrayObject *)args[0], NULL, divisor);
        if (result || PyErr_Occurred()) return result;
    }
    if (am_parse("cdiv", args, nargs, params, 2, &given) == 0)
        result = divide_any(module, given.a, given.b,
                            (bool[]){PyLong_CheckExact(args[0]), PyLong_CheckExact(args[1])});
    am_release_params(params, 2, &given);
    return result;
}

PyMethodDef am_packed_methods[] = {
    AM_METHOD(cdiv, "a, b"),
    AM_METHOD(prepare_lens, "cu_seqlens"),
    AM_METHOD(prepare_lens_from_mask, "mask"),
    AM_METHOD(prepare_cu_seqlens_from_mask, "mask, out_dtype"),
    AM_METHOD(prepare_position_ids, "cu_seqlens"),
    AM_METHOD(prepare_sequence_ids, "cu_seqlens"),
    AM_METHOD(prepare_token_indices, "cu_seqlens"),
    AM_METHOD(prepare_chunk_indices, "cu_seqlens, chunk_size"),
    AM_METHOD(prepare_chunk_offsets, "cu_seqlens, chunk_size"),
    AM_METHOD(checked_starts, "cu_seqlens, name"),
    {.ml_name = NULL},
};
