/* mask_arrays.c – dense masks as arguments and as results of bindings. */
#include "bind/python/mask_arrays.h"

#include <string.h>

#include "core/arrays/additive.h"

int am_check_mask(PyObject *module, PyArrayObject *array, const char *name)
{
    const am_numbers numbers = {
        .data = PyArray_BYTES(array),
        .type = am_dtype_of(PyArray_DESCR(array)),
        .axes = PyArray_NDIM(array),
        .shape = PyArray_DIMS(array),
        .strides = PyArray_STRIDES(array),
    };
    if (!am_is_floating(numbers.type)) return 0;
    am_additive found;
    if (!am_computed(module, PyArray_SIZE(array), am_find_additive, &numbers, &found)) return -1;
    if (found.index >= 0)
        return am_reject_element(name, "be zero for what is masked out and positive for the rest", array,
                                 found.index, "; if it is to be added to logits, pass it as `bias`");
    return found.none_allowed || found.graded ? am_habit("(sis)", "floating mask", found.none_allowed, name)
                                              : 0;
}

int am_to_dense(PyObject *module, PyArrayObject *array, const char *name, int low, am_array *dense)
{
    int ndim = PyArray_NDIM(array);
    if (ndim < low || ndim > 4) {
        const char *expected = low == 2 ? "[Q, K], [B, Q, K] or [B, H, Q, K]" : "[B, Q, K] or [B, H, Q, K]";
        return am_reject(PyExc_ValueError, name, expected, array);
    }
    const am_view v = am_view_of(array);
    *dense = am_array_of(&v, (am_by_axis){.batch = ndim > 2 ? 0 : -1,
                                          .head = ndim == 4 ? 1 : -1,
                                          .token = ndim - 2,
                                          .channel = ndim - 1});
    return am_check_mask(module, array, name);
}

int am_to_mask_dtype(PyObject *object, const char *name, void *dst)
{
    if (object == Py_None) return am_reject(PyExc_TypeError, name, "a dtype", object);
    return am_to_dtype(object, name, dst);
}

int am_bytes_of(PyObject *number, PyArray_Descr *dtype, uint64_t *bytes)
{
    am_owned PyArrayObject *scalar = (PyArrayObject *)PyArray_FromAny(
        number, am_ref(dtype), 0, 0, NPY_ARRAY_CARRAY | NPY_ARRAY_FORCECAST, NULL);
    if (!scalar) return -1;
    *bytes = 0;
    memcpy(bytes, PyArray_DATA(scalar), (size_t)PyArray_ITEMSIZE(scalar));
    return 0;
}
