/* counts.c – integer results in the type that the caller wants. */
#include "tokens/bind/counts.h"

/* The largest value of an integer type, or of npy_intp if that is smaller. */
static npy_intp largest(am_dtype type)
{
    switch (type) {
    case AM_INT8: return INT8_MAX;
    case AM_UINT8: return UINT8_MAX;
    case AM_INT16: return INT16_MAX;
    case AM_UINT16: return UINT16_MAX;
    case AM_INT32: return INT32_MAX;
    case AM_UINT32: return UINT32_MAX;
    default: return NPY_MAX_INTP;
    }
}

int am_check_fits(npy_intp value, PyArray_Descr *dtype, const char *name, const char *what)
{
    if (value <= largest(am_dtype_of(dtype))) return 0;
    return am_fail(PyExc_OverflowError, "%s must have %s that fits %S, got %zd", name, what, dtype, value);
}

int am_working_type(PyArray_Descr *dtype) { return am_dtype_of(dtype) == AM_INT32 ? NPY_INT32 : NPY_INT64; }

PyObject *am_finish(PyArrayObject *result, PyArray_Descr *dtype)
{
    if (PyArray_EquivTypes(PyArray_DESCR(result), dtype)) return (PyObject *)am_ref(result);
    return PyArray_CastToType(result, am_ref(dtype), 0);
}

PyObject *am_counts_as(const ptrdiff_t *counts, npy_intp count, PyArray_Descr *dtype)
{
    am_owned PyArrayObject *result = am_new_array_of(1, &count, am_working_type(dtype));
    if (!result) return NULL;
    if (PyArray_TYPE(result) == NPY_INT32) {
        for (npy_intp i = 0; i < count; i++) ((int32_t *)PyArray_DATA(result))[i] = (int32_t)counts[i];
    } else {
        for (npy_intp i = 0; i < count; i++) ((int64_t *)PyArray_DATA(result))[i] = counts[i];
    }
    return am_finish(result, dtype);
}
