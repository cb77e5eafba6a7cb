/* quantize.c – binding of the numbers of quantize_kv. */
#include "bind/python/arguments.h"
#include "core/cache/quantize.h"

_Static_assert(NPY_MAXDIMS <= AM_QUANTIZED_AXES, "an array has more axes");

typedef struct {
    PyArrayObject *x, *values, *scales;
} arguments;

/* Describes arrays whose shapes fit: those of values and scales are made for it. */
static bool describe(am_quantization *q, const arguments *a)
{
    PyArrayObject *const x = a->x, *const values = a->values, *const scales = a->scales;
    const int axes = PyArray_NDIM(x), last = axes - 1;
    q->format = am_kv_format_of(am_kv_type_of(am_kv_dtype_of(PyArray_DESCR(values))));
    q->type = am_dtype_of(PyArray_DESCR(x));
    if (axes == 0 || !q->format || q->format->scales == AM_SCALES_NONE || !am_is_floating(q->type) ||
        PyArray_TYPE(scales) != NPY_FLOAT32 || !PyArray_ISCARRAY(values) || !PyArray_ISCARRAY(scales))
        return false;
    const bool grouped = q->format->scales == AM_SCALES_OF_GROUPS;
    if (PyArray_NDIM(values) != axes || PyArray_NDIM(scales) != axes + grouped) return false;
    const npy_intp of_row = PyArray_DIM(x, last), groups = PyArray_DIM(scales, last);
    q->from = PyArray_BYTES(x), q->to = PyArray_BYTES(values), q->scales = PyArray_BYTES(scales);
    q->group = grouped && groups > 0 ? of_row / groups : 0;
    q->axes = axes;
    for (int i = 0; i < axes; i++) {
        if (PyArray_DIM(values, i) * (i == last ? am_numbers_of(q->format->type) : 1) != PyArray_DIM(x, i) ||
            (i < last && PyArray_DIM(scales, i) != PyArray_DIM(x, i)))
            return false;
        q->axis[i] = (am_quantized_axis){.length = PyArray_DIM(x, i),
                                         .from = PyArray_STRIDE(x, i),
                                         .to = PyArray_STRIDE(values, i),
                                         .scale = PyArray_STRIDE(scales, i)};
    }
    if (!grouped) return groups == 1;
    return am_kv_is_group(q->group) && q->group * groups == of_row && PyArray_DIM(scales, axes) == 2;
}

/* Fills C-contiguous values and scales: one scale per row along the last axis, or a scale and an offset per
 * group. */
static PyObject *fill(PyObject *module, arguments *a)
{
    am_quantization q = {0};
    if (!describe(&q, a))
        return am_reject_array(PyExc_ValueError, "values", "made for x and scales", a->values);
    return am_computed(module, PyArray_SIZE(a->x), am_quantize, &q) ? Py_NewRef(Py_None) : NULL;
}
AM_FUNCTION(quantize, fill(module, a), AM_ARG(x, am_to_array), AM_ARG(values, am_to_readable),
            AM_ARG(scales, am_to_array))

PyMethodDef am_quantize_methods[] = {AM_METHOD(quantize, "x, values, scales"), {.ml_name = NULL}};
