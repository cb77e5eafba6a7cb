/* packed.c – bindings of the packed-sequence functions. */
#include "bind/args.h"
#include "bind/counts.h"
#include "core/packed.h"

/* The lengths of a native contiguous array in one pass; NULL without an exception where that does not apply.
 */
static PyObject *quick_lens(PyObject *module, PyArrayObject *array)
{
    am_dtype type = am_dtype_of(PyArray_DESCR(array));
    npy_intp count = PyArray_DIM(array, 0) - 1;
    if ((type != AM_INT32 && type != AM_INT64) || !PyArray_IS_C_CONTIGUOUS(array)) return NULL;
    PyArrayObject *lens = am_new_array(1, &count, PyArray_DESCR(array));
    if (!lens) return NULL;
    am_call call;
    bool valid;
    am_enter(&call, module, count);
    if (type == AM_INT32) {
        const int32_t *starts = PyArray_DATA(array);
        valid = call.run.kernels->lens_32(PyArray_DATA(lens), starts, count) && starts[0] == 0;
    } else {
        const int64_t *starts = PyArray_DATA(array);
        valid = call.run.kernels->lens_64(PyArray_DATA(lens), starts, count) && starts[0] == 0;
    }
    am_leave(&call);
    if (!valid) Py_CLEAR(lens);
    return (PyObject *)lens;
}

static PyObject *prepare_lens(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_starts s = {0};
    PyObject *object = NULL, *result = NULL;
    const am_param params[] = {{"cu_seqlens", am_to_object, &object}};
    if (am_parse("prepare_lens", args, nargs, params, 1) < 0) return NULL;
    s.array = am_starts_array(object, "cu_seqlens");
    if (!s.array) goto fail;
    result = quick_lens(module, s.array);
    if (result || PyErr_Occurred()) goto fail;
    if (am_check_starts(&s, "cu_seqlens") < 0) goto fail;
    for (ptrdiff_t i = 0; i < s.sequences; i++) s.starts[i] = s.starts[i + 1] - s.starts[i];
    result = am_counts_as(s.starts, s.sequences, PyArray_DESCR(s.array));
fail:
    am_free_starts(&s);
    return result;
}

/* One fact of every token: shape [total], or [total, 2] for pairs. */
static PyObject *fill_tokens(PyObject *module, am_token_fact fact, const ptrdiff_t *starts,
                             npy_intp sequences, PyArray_Descr *dtype)
{
    npy_intp shape[2] = {starts[sequences], 2};
    if (fact != AM_POSITIONS && shape[0] > 0) {
        npy_intp last = am_sequence_of(starts, sequences, shape[0] - 1);
        if (am_check_fits(last, dtype, "the sequence id") < 0) return NULL;
    }
    PyArrayObject *result = am_new_array_of(fact == AM_PAIRS ? 2 : 1, shape, am_working_type(dtype));
    if (!result) return NULL;
    am_call call;
    am_enter(&call, module, shape[0]);
    am_dtype type = PyArray_TYPE(result) == NPY_INT32 ? AM_INT32 : AM_INT64;
    am_status status = am_fill_tokens(&call.run, fact, type, PyArray_DATA(result), starts, sequences);
    am_leave(&call);
    if (status != AM_OK) {
        Py_DECREF(result);
        return am_raise(status, NULL);
    }
    return am_finish(result, dtype);
}

static PyObject *prepare_tokens(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                const char *function, am_token_fact fact)
{
    am_starts s = {0};
    PyObject *result = NULL;
    const am_param params[] = {{"cu_seqlens", am_to_starts, &s}};
    if (am_parse(function, args, nargs, params, 1) < 0) goto fail;
    result = fill_tokens(module, fact, s.starts, s.sequences, PyArray_DESCR(s.array));
fail:
    am_free_starts(&s);
    return result;
}

static PyObject *prepare_position_ids(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return prepare_tokens(module, args, nargs, "prepare_position_ids", AM_POSITIONS);
}

static PyObject *prepare_sequence_ids(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return prepare_tokens(module, args, nargs, "prepare_sequence_ids", AM_SEQUENCES);
}

static PyObject *prepare_token_indices(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return prepare_tokens(module, args, nargs, "prepare_token_indices", AM_PAIRS);
}

/* Chunks are to the sequences' offsets what tokens are to their starts. */
static PyObject *prepare_chunks(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                const char *function, bool offsets_only)
{
    am_starts s = {0};
    npy_intp chunk_size;
    ptrdiff_t *offsets = NULL;
    PyObject *result = NULL;
    const am_param params[] = {{"cu_seqlens", am_to_starts, &s}, {"chunk_size", am_to_count, &chunk_size}};
    if (am_parse(function, args, nargs, params, 2) < 0) goto fail;
    offsets = PyMem_Malloc((size_t)(s.sequences + 1) * sizeof *offsets);
    if (!offsets) {
        PyErr_NoMemory();
        goto fail;
    }
    am_chunk_offsets(offsets, s.starts, s.sequences, chunk_size);
    PyArray_Descr *dtype = PyArray_DESCR(s.array);
    if (offsets_only)
        result = am_counts_as(offsets, s.sequences + 1, dtype);
    else
        result = fill_tokens(module, AM_PAIRS, offsets, s.sequences, dtype);
fail:
    PyMem_Free(offsets);
    am_free_starts(&s);
    return result;
}

static PyObject *prepare_chunk_indices(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return prepare_chunks(module, args, nargs, "prepare_chunk_indices", false);
}

static PyObject *prepare_chunk_offsets(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return prepare_chunks(module, args, nargs, "prepare_chunk_offsets", true);
}

/* The lengths of the rows of a 2-D mask as int64. */
static PyArrayObject *count_mask(PyObject *module, PyArrayObject *mask)
{
    if (PyArray_NDIM(mask) != 2) {
        am_reject(PyExc_ValueError, "mask", "a 2-D array [batch, length]", (PyObject *)mask);
        return NULL;
    }
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
    am_call call;
    am_enter(&call, module, PyArray_SIZE(mask));
    am_status status = am_count_rows(&call.run, &job);
    am_leave(&call);
    if (status != AM_OK) {
        am_raise(status, NULL);
        Py_CLEAR(lens);
    }
    return lens;
}

static PyObject *prepare_lens_from_mask(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyArrayObject *mask = NULL, *lens = NULL;
    PyArray_Descr *dtype = PyArray_DescrFromType(NPY_INT32);
    PyObject *result = NULL;
    const am_param params[] = {{"mask", am_to_array, &mask}};
    if (am_parse("prepare_lens_from_mask", args, nargs, params, 1) < 0) goto fail;
    lens = count_mask(module, mask);
    if (!lens) goto fail;
    const int64_t *values = PyArray_DATA(lens);
    for (npy_intp i = 0; i < PyArray_DIM(lens, 0); i++) {
        if (am_check_fits((npy_intp)values[i], dtype, "the length") < 0) goto fail;
    }
    result = am_finish(lens, dtype);
    lens = NULL;
fail:
    Py_XDECREF(lens);
    Py_XDECREF(mask);
    Py_DECREF(dtype);
    return result;
}

static PyObject *prepare_cu_seqlens_from_mask(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyArrayObject *mask = NULL, *lens = NULL, *starts = NULL;
    PyArray_Descr *dtype = NULL;
    PyObject *result = NULL;
    const am_param params[] = {{"mask", am_to_array, &mask}, {"out_dtype", am_to_integer_dtype, &dtype}};
    if (am_parse("prepare_cu_seqlens_from_mask", args, nargs, params, 2) < 0) goto fail;
    lens = count_mask(module, mask);
    if (!lens) goto fail;
    npy_intp rows = PyArray_DIM(lens, 0), entries = rows + 1;
    starts = am_new_array_of(1, &entries, NPY_INT64);
    if (!starts) goto fail;
    const int64_t *values = PyArray_DATA(lens);
    int64_t *sums = PyArray_DATA(starts);
    sums[0] = 0;
    /* A mask of zero stride may have more ones than int64 counts. */
    for (npy_intp i = 0; i < rows; i++) {
        if (__builtin_add_overflow(sums[i], values[i], &sums[i + 1])) {
            PyErr_SetString(PyExc_OverflowError, "the total length does not fit int64");
            goto fail;
        }
    }
    if (am_check_fits((npy_intp)sums[rows], dtype, "the total length") < 0) goto fail;
    result = am_finish(starts, dtype);
    starts = NULL;
fail:
    Py_XDECREF(starts);
    Py_XDECREF(lens);
    Py_XDECREF(mask);
    Py_XDECREF(dtype);
    return result;
}

static uint64_t ceil_unsigned(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }

/* On magnitudes, since neither -a nor a + b - 1 need fit; a magnitude of 2**63 is negated before it is
 * signed. */
static int64_t ceil_signed(int64_t a, uint64_t b)
{
    return (int64_t)(a > 0 ? ceil_unsigned((uint64_t)a, b) : 0 - (0 - (uint64_t)a) / b);
}

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
    return (PyArrayObject *)PyArray_FromArray(array, wide, NPY_ARRAY_CARRAY_RO);
}

/* NumPy's rule: a Python integer takes the type of the array that it meets. */
static PyArray_Descr *cdiv_type(PyArrayObject *a, bool a_is_int, PyArrayObject *b, bool b_is_int)
{
    PyArray_Descr *dtype = NULL;
    if (a_is_int || b_is_int) {
        dtype = PyArray_DESCR(b_is_int ? a : b);
        Py_INCREF(dtype);
        return dtype;
    }
    dtype = PyArray_PromoteTypes(PyArray_DESCR(a), PyArray_DESCR(b));
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
        return am_reject_element("b", "positive", b, i, values[i]);
    }
    return 0;
}

/* The quotients as int64 or uint64. */
static PyArrayObject *divide(PyArrayObject *a, PyArrayObject *b)
{
    PyArrayObject *result = NULL;
    PyArrayMultiIterObject *pairs = (PyArrayMultiIterObject *)PyArray_MultiIterNew(2, a, b);
    if (!pairs) {
        PyErr_Clear();
        PyObject *what_a = am_describe((PyObject *)a), *what_b = am_describe((PyObject *)b);
        if (what_a && what_b)
            PyErr_Format(PyExc_ValueError, "a and b must broadcast, got %U and %U", what_a, what_b);
        Py_XDECREF(what_a);
        Py_XDECREF(what_b);
        return NULL;
    }
    result = am_new_array_of(pairs->nd, pairs->dimensions, PyArray_TYPE(a));
    if (result) {
        bool is_signed = PyArray_ISSIGNED(a);
        uint64_t *quotient = PyArray_DATA(result);
        while (PyArray_MultiIter_NOTDONE(pairs)) {
            uint64_t n = *(const uint64_t *)PyArray_MultiIter_DATA(pairs, 0);
            uint64_t d = *(const uint64_t *)PyArray_MultiIter_DATA(pairs, 1);
            *quotient++ = is_signed ? (uint64_t)ceil_signed((int64_t)n, d) : ceil_unsigned(n, d);
            PyArray_MultiIter_NEXT(pairs);
        }
    }
    Py_DECREF(pairs);
    return result;
}

/* Rounded up for b > 0: a - 1/2 is never a multiple of b, and so far from one that no rounding error reaches
 * it. C truncates, which is up for a negative quotient and one too few for a positive one. */
static int32_t ceil_32(int32_t a, double inverse) { return (int32_t)((a - 0.5) * inverse) + (a > 0); }

static void divide_all_32(int32_t *dst, const int32_t *a, npy_intp count, int64_t b)
{
    double inverse = 1.0 / (double)b;
    for (npy_intp i = 0; i < count; i++) dst[i] = ceil_32(a[i], inverse);
}

/* By a product, which takes half as long as a division. With 2^(s - 1) < b <= 2^s and m = 2^(63 + s) / b
 * rounded up, which is below 2^64, n / b = n m / 2^(63 + s), both rounded down, for all n <= 2^63. For n one
 * below a that is one too few; for n = -a, where a is not positive, it is the negative: q becomes (q ^ flip)
 * + 1 in both. */
static void divide_all_64(int64_t *dst, const int64_t *a, npy_intp count, int64_t b)
{
    if (b == 1) {
        memcpy(dst, a, (size_t)count * sizeof *dst);
        return;
    }
    int s = 64 - __builtin_clzll((unsigned long long)b - 1);
    uint64_t m = (uint64_t)((((unsigned __int128)1 << (63 + s)) + (uint64_t)b - 1) / (uint64_t)b);
    for (npy_intp i = 0; i < count; i++) {
        uint64_t flip = a[i] > 0 ? 0 : UINT64_MAX;
        uint64_t n = ((uint64_t)a[i] - 1) ^ flip;
        uint64_t high = (uint64_t)((unsigned __int128)n * m >> 64);
        dst[i] = (int64_t)(((high >> (s - 1)) ^ flip) + 1);
    }
}

/* False for a divisor that is not positive. */
static bool divide_each_32(int32_t *dst, const int32_t *a, const int32_t *b, npy_intp count)
{
    int32_t lowest = INT32_MAX;
    for (npy_intp i = 0; i < count; i++) lowest = b[i] < lowest ? b[i] : lowest;
    if (lowest <= 0) return false;
    for (npy_intp i = 0; i < count; i++) dst[i] = (int32_t)((a[i] - 0.5) / b[i]) + (a[i] > 0);
    return true;
}

static bool divide_each_64(int64_t *dst, const int64_t *a, const int64_t *b, npy_intp count)
{
    for (npy_intp i = 0; i < count; i++) {
        int64_t divisor = b[i]; /* read once: other threads may write a zero */
        if (divisor <= 0) return false;
        dst[i] = a[i] / divisor + (a[i] % divisor > 0);
    }
    return true;
}

/* The quotients of a native contiguous array by one number, or by an array of its kind; NULL without an
 * exception where that does not apply. */
static PyArrayObject *quick_quotients(PyObject *module, PyArrayObject *a, PyArrayObject *b,
                                      PyArray_Descr *dtype)
{
    am_dtype type = am_dtype_of(dtype);
    bool one = PyArray_NDIM(b) == 0;
    int64_t divisor = 1;
    if ((type != AM_INT32 && type != AM_INT64) || am_dtype_of(PyArray_DESCR(a)) != type) return NULL;
    if (PyArray_NDIM(a) == 0 || !PyArray_IS_C_CONTIGUOUS(a)) return NULL;
    if (one) {
        PyArrayObject *wide = widened(b);
        if (!wide) return NULL;
        divisor = *(const int64_t *)PyArray_DATA(wide); /* of uint64, one that is too large turns negative */
        Py_DECREF(wide);
    } else if (am_dtype_of(PyArray_DESCR(b)) != type || !PyArray_IS_C_CONTIGUOUS(b) ||
               !PyArray_SAMESHAPE(a, b)) {
        return NULL;
    }
    if (divisor <= 0) return NULL;
    PyArrayObject *result = am_new_array(PyArray_NDIM(a), PyArray_DIMS(a), dtype);
    if (!result) return NULL;
    npy_intp count = PyArray_SIZE(a);
    void *dst = PyArray_DATA(result), *dividends = PyArray_DATA(a), *divisors = PyArray_DATA(b);
    bool valid = true;
    am_call call;
    am_enter(&call, module, count);
    if (one && type == AM_INT32)
        divide_all_32(dst, dividends, count, divisor);
    else if (one)
        divide_all_64(dst, dividends, count, divisor);
    else if (type == AM_INT32)
        valid = divide_each_32(dst, dividends, divisors, count);
    else
        valid = divide_each_64(dst, dividends, divisors, count);
    am_leave(&call);
    if (!valid) Py_CLEAR(result);
    return result;
}

/* A Python integer may give a quotient that the array's type cannot hold; a quotient of two arrays always
 * fits. */
static PyArrayObject *narrowed(PyArrayObject *quotients, PyArray_Descr *dtype)
{
    Py_INCREF(dtype);
    PyArrayObject *narrow = (PyArrayObject *)PyArray_CastToType(quotients, dtype, 0);
    PyArrayObject *again = narrow ? widened(narrow) : NULL;
    if (!again) {
        Py_XDECREF(narrow);
        return NULL;
    }
    const int64_t *wanted = PyArray_DATA(quotients), *got = PyArray_DATA(again);
    bool same_sign = PyArray_ISSIGNED(again) == PyArray_ISSIGNED(quotients);
    for (npy_intp i = 0; i < PyArray_SIZE(quotients); i++) {
        if (wanted[i] == got[i] && (same_sign || wanted[i] >= 0)) continue;
        PyErr_Format(PyExc_OverflowError, "the quotient at index %zd does not fit %S", i, dtype);
        Py_CLEAR(narrow);
        break;
    }
    Py_DECREF(again);
    return narrow;
}

static PyObject *cdiv(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyArrayObject *a = NULL, *b = NULL, *wide_a = NULL, *wide_b = NULL, *quotients = NULL;
    PyArray_Descr *dtype = NULL;
    PyObject *result = NULL;
    const am_param params[] = {{"a", to_integers, &a}, {"b", to_integers, &b}};
    if (am_parse("cdiv", args, nargs, params, 2) < 0) goto fail;
    dtype = cdiv_type(a, PyLong_CheckExact(args[0]), b, PyLong_CheckExact(args[1]));
    if (!dtype) goto fail;
    result = (PyObject *)quick_quotients(module, a, b, dtype);
    if (result || PyErr_Occurred()) goto fail;
    wide_a = widened(a);
    wide_b = widened(b);
    if (!wide_a || !wide_b || check_divisors(wide_b) < 0) goto fail;
    quotients = divide(wide_a, wide_b);
    if (!quotients) goto fail;
    result = PyArray_Return(narrowed(quotients, dtype));
fail:
    Py_XDECREF(quotients);
    Py_XDECREF(wide_a);
    Py_XDECREF(wide_b);
    Py_XDECREF(dtype);
    Py_XDECREF(a);
    Py_XDECREF(b);
    return result;
}

PyMethodDef am_packed_methods[] = {
    {"cdiv", (PyCFunction)(void *)cdiv, METH_FASTCALL, "cdiv($module, a, b, /)\n--\n\n"},
    {"prepare_lens", (PyCFunction)(void *)prepare_lens, METH_FASTCALL,
     "prepare_lens($module, cu_seqlens, /)\n--\n\n"},
    {"prepare_lens_from_mask", (PyCFunction)(void *)prepare_lens_from_mask, METH_FASTCALL,
     "prepare_lens_from_mask($module, mask, /)\n--\n\n"},
    {"prepare_cu_seqlens_from_mask", (PyCFunction)(void *)prepare_cu_seqlens_from_mask, METH_FASTCALL,
     "prepare_cu_seqlens_from_mask($module, mask, out_dtype, /)\n--\n\n"},
    {"prepare_position_ids", (PyCFunction)(void *)prepare_position_ids, METH_FASTCALL,
     "prepare_position_ids($module, cu_seqlens, /)\n--\n\n"},
    {"prepare_sequence_ids", (PyCFunction)(void *)prepare_sequence_ids, METH_FASTCALL,
     "prepare_sequence_ids($module, cu_seqlens, /)\n--\n\n"},
    {"prepare_token_indices", (PyCFunction)(void *)prepare_token_indices, METH_FASTCALL,
     "prepare_token_indices($module, cu_seqlens, /)\n--\n\n"},
    {"prepare_chunk_indices", (PyCFunction)(void *)prepare_chunk_indices, METH_FASTCALL,
     "prepare_chunk_indices($module, cu_seqlens, chunk_size, /)\n--\n\n"},
    {"prepare_chunk_offsets", (PyCFunction)(void *)prepare_chunk_offsets, METH_FASTCALL,
     "prepare_chunk_offsets($module, cu_seqlens, chunk_size, /)\n--\n\n"},
    {.ml_name = NULL},
};
