/* arguments.c – converts what users pass to the types of the core. */
#include "bind/python/arguments.h"

#include <string.h>

#include "core/arrays/convert.h"
#include "core/cache/formats.h"

PyObject *am_describe(void *object) { return am_ask(AM_DESCRIBE, "(O)", object); }

#define AM_OR_NONE(convert)                                                                                  \
    int convert##_or_none(PyObject *object, const char *name, void *dst)                                     \
    {                                                                                                        \
        return object == Py_None ? 0 : convert(object, name, dst);                                           \
    }

static void *field_of(const am_param *param, void *arguments) { return (char *)arguments + param->at; }

/* The array that an argument was converted to; NULL: none. */
static PyArrayObject *converted(const am_param *param, void *arguments)
{
    const bool holds = param->holds == AM_HOLDS_ARRAY || param->holds == AM_HOLDS_STARTS;
    return holds ? *(PyArrayObject **)field_of(param, arguments) : NULL; /* starts begin with it */
}

/* An array that is written to must not share memory with any other argument: neither with the caller's own
 * array, which a converter may have copied, nor with what became of an object of another library. */
static int check_given(PyObject *const *args, const am_param *params, Py_ssize_t count, Py_ssize_t out,
                       void *arguments)
{
    PyArrayObject *written = ((const am_out *)field_of(&params[out], arguments))->array;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i == out || params[i].convert == am_to_object) continue;
        PyArrayObject *input =
            PyArray_Check(args[i]) ? (PyArrayObject *)args[i] : converted(&params[i], arguments);
        if (input && am_check_apart(written, params[out].name, input, params[i].name) < 0) return -1;
    }
    return 0;
}

int am_parse(const char *function, PyObject *const *args, Py_ssize_t nargs, const am_param *params,
             Py_ssize_t count, void *arguments)
{
    if (nargs != count)
        return am_fail(PyExc_TypeError, "%s() takes %zd arguments, got %zd", function, count, nargs);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (params[i].convert(args[i], params[i].name, field_of(&params[i], arguments)) < 0) return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const bool written = params[i].holds == AM_HOLDS_OUT && args[i] != Py_None;
        if (written && check_given(args, params, count, i, arguments) < 0) return -1;
    }
    return 0;
}

void am_release_params(const am_param *params, Py_ssize_t count, void *arguments)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        const am_holds holds = params[i].holds;
        void *field = field_of(&params[i], arguments);
        if (holds == AM_HOLDS_ARRAY || holds == AM_HOLDS_DTYPE) am_release(field);
        if (holds == AM_HOLDS_STARTS) am_free_starts(field);
        if (holds == AM_HOLDS_OUT) am_free_out(field);
        if (params[i].release) params[i].release(field);
    }
}

int am_reject(PyObject *exception, const char *name, const char *expected, void *got)
{
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_MemoryError)) return -1;
    PyErr_Clear(); /* the message below says more */
    am_owned PyObject *what = am_describe(got);
    return what ? am_fail(exception, "%s must be %s, got %U", name, expected, what) : -1;
}

void *am_reject_array(PyObject *exception, const char *name, const char *expected, PyArrayObject *got)
{
    am_reject(exception, name, expected, got);
    return NULL;
}

PyObject *am_position(PyArrayObject *array, npy_intp index)
{
    int ndim = PyArray_NDIM(array);
    npy_intp position[NPY_MAXDIMS];
    for (int i = ndim - 1; i >= 0; i--) {
        position[i] = index % PyArray_DIM(array, i);
        index /= PyArray_DIM(array, i);
    }
    return ndim == 1 ? PyLong_FromSsize_t(position[0]) : PyArray_IntTupleFromIntp(ndim, position);
}

static PyObject *item_of(PyArrayObject *array, npy_intp index)
{
    return PyObject_CallMethod((PyObject *)array, "item", "n", (Py_ssize_t)index);
}

int am_reject_element(const char *name, const char *expected, PyArrayObject *array, npy_intp index,
                      const char *hint)
{
    am_owned PyObject *item = item_of(array, index), *where = item ? am_position(array, index) : NULL;
    if (!where) return -1;
    return am_fail(PyExc_ValueError, "%s must %s, got %S at index %S%s", name, expected, item, where, hint);
}

/* Types of ml_dtypes, which may not be installed, are recognized by their names. */
static bool is_of_ml_dtypes(PyArray_Descr *dtype, const char *wanted, npy_intp size)
{
    if (dtype->type_num < NPY_USERDEF || PyDataType_ELSIZE(dtype) != size) return false;
    am_owned PyObject *name = PyType_GetName(dtype->typeobj);
    if (!name) PyErr_Clear();
    return name && PyUnicode_CompareWithASCIIString(name, wanted) == 0;
}

PyObject *am_names(const char *name_of(ptrdiff_t i))
{
    PyObject *names = PyList_New(0);
    const char *text;
    for (ptrdiff_t i = 0; names && (text = name_of(i)); i++) {
        am_owned PyObject *name = PyUnicode_FromString(text);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
    }
    return names;
}

am_dtype am_dtype_of(PyArray_Descr *dtype)
{
    int size = (int)PyDataType_ELSIZE(dtype);
    if (dtype->type_num == NPY_BOOL) return AM_BOOL;
    if (PyTypeNum_ISINTEGER(dtype->type_num)) {
        bool is_signed = PyTypeNum_ISSIGNED(dtype->type_num);
        switch (size) {
        case 1: return is_signed ? AM_INT8 : AM_UINT8;
        case 2: return is_signed ? AM_INT16 : AM_UINT16;
        case 4: return is_signed ? AM_INT32 : AM_UINT32;
        case 8: return is_signed ? AM_INT64 : AM_UINT64;
        default: return AM_OTHER;
        }
    }
    switch (dtype->type_num) {
    case NPY_HALF: return AM_FLOAT16;
    case NPY_FLOAT: return AM_FLOAT32;
    case NPY_DOUBLE: return AM_FLOAT64;
    default: return is_of_ml_dtypes(dtype, "bfloat16", 2) ? AM_BFLOAT16 : AM_OTHER;
    }
}

am_dtype am_kv_dtype_of(PyArray_Descr *dtype)
{
    const am_dtype type = am_dtype_of(dtype);
    const am_kv_format *format;
    for (int i = 0; type == AM_OTHER && (format = am_kv_format_at(i)); i++) {
        if (is_of_ml_dtypes(dtype, format->name, (npy_intp)am_size_of(format->type))) return format->type;
    }
    return type;
}

/* Whether addresses of elements are multiples of their size, as typed pointers and the kernels require. */
static bool is_aligned(PyArrayObject *array)
{
    size_t size = am_size_of(am_dtype_of(PyArray_DESCR(array)));
    if (size <= 1 || PyArray_SIZE(array) == 0) return true;
    uintptr_t bits = (uintptr_t)PyArray_DATA(array);
    for (int i = 0; i < PyArray_NDIM(array); i++) {
        if (PyArray_DIM(array, i) > 1) bits |= (uintptr_t)PyArray_STRIDE(array, i);
    }
    return bits % size == 0;
}

static PyArrayObject *plain_view(PyArrayObject *array)
{
    return (PyArrayObject *)PyArray_View(array, NULL, &PyArray_Type);
}

/* NumPy converts lists and numbers. Arrays of other libraries, and what NumPy rejects, go to as_array, whose
 * errors say more. */
static PyArrayObject *convert_array_like(PyObject *object, const char *name)
{
    if (!PyObject_HasAttrString(object, "__dlpack__")) {
        PyArrayObject *array = (PyArrayObject *)PyArray_FROM_O(object);
        if (array || !PyErr_ExceptionMatches(PyExc_ValueError)) return array;
        PyErr_Clear();
    }
    return (PyArrayObject *)am_ask(AM_AS_ARRAY, "(Os)", object, name);
}

/* As am_to_readable, but with `allow_same` the result may be the caller's own object. */
static int to_readable(PyObject *object, const char *name, bool allow_same, PyArrayObject **dst)
{
    am_owned PyArrayObject *array =
        PyArray_Check(object) ? (PyArrayObject *)Py_NewRef(object) : convert_array_like(object, name);
    /* A new array has one reference: nobody else can change it. */
    if (array && (!PyArray_CheckExact(array) || (!allow_same && Py_REFCNT((PyObject *)array) > 1)))
        am_replace(&array, plain_view(array));
    if (!array) return -1;
    if (!PyArray_ISNOTSWAPPED(array) || !is_aligned(array)) {
        PyArray_Descr *native = PyArray_DescrNewByteorder(PyArray_DESCR(array), NPY_NATIVE);
        PyArrayObject *copy =
            native ? am_of_memory(PyArray_NewLikeArray(array, NPY_KEEPORDER, native, 0)) : NULL;
        if (copy && PyArray_CopyInto(copy, array) < 0) Py_CLEAR(copy);
        am_replace(&array, copy);
    }
    if (!array) return -1;
    *dst = am_ref(array);
    return 0;
}

/* As am_to_array, but with `allow_same` the result may be the caller's own object. */
static int to_array(PyObject *object, const char *name, bool allow_same, PyArrayObject **dst)
{
    am_owned PyArrayObject *array = NULL;
    if (to_readable(object, name, allow_same, &array) < 0) return -1;
    if (am_dtype_of(PyArray_DESCR(array)) == AM_OTHER)
        return am_reject(PyExc_TypeError, name, "an array of bool, integers or real floating-point numbers",
                         array);
    *dst = am_ref(array);
    return 0;
}

int am_to_readable(PyObject *object, const char *name, void *dst)
{
    return to_readable(object, name, false, dst);
}

AM_OR_NONE(am_to_readable)

int am_to_array(PyObject *object, const char *name, void *dst) { return to_array(object, name, false, dst); }

AM_OR_NONE(am_to_array)

int am_to_mask(PyObject *object, const char *name, void *dst)
{
    am_owned PyArrayObject *array =
        PyArray_Check(object) ? plain_view((PyArrayObject *)object) : convert_array_like(object, name);
    if (!array) return -1;
    if (PyArray_DESCR(array)->kind == 'f' && am_dtype_of(PyArray_DESCR(array)) == AM_OTHER)
        am_replace(&array, am_ask(AM_MASK_ARRAY, "(Os)", array, name));
    return array ? am_to_array((PyObject *)array, name, dst) : -1;
}

int am_to_out(PyObject *object, const char *name, void *dst)
{
    if (object == Py_None) return 0;
    if (!PyArray_Check(object)) return am_reject(PyExc_TypeError, name, "a NumPy array or None", object);
    am_out *out = dst;
    out->given = object;
    out->array = plain_view((PyArrayObject *)object);
    return out->array ? 0 : -1;
}

int am_to_state(PyObject *object, const char *name, void *dst)
{
    am_out *state = dst;
    if (PyArray_Check(object) || !PyObject_HasAttrString(object, "__dlpack__"))
        return am_to_out(object, name, dst);
    state->given = object;
    state->array = (PyArrayObject *)am_ask(AM_AS_ARRAY, "(Os)", object, name);
    return state->array ? 0 : -1;
}

PyArrayObject *am_target(const am_out *out, int ndim, npy_intp const *shape, PyArray_Descr *dtype)
{
    if (!out->given) return am_new_array(ndim, shape, dtype);
    return am_check_out(out->array, "out", ndim, shape, dtype) < 0 ? NULL : am_ref(out->array);
}

PyObject *am_returned(const am_out *out, PyArrayObject *target)
{
    return target ? Py_NewRef(out->given ? out->given : (PyObject *)target) : NULL;
}

PyObject *am_new_like(int count, PyArrayObject *const *of, PyArrayObject **made)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        made[i] = of[i] ? am_new_array(PyArray_NDIM(of[i]), PyArray_DIMS(of[i]), PyArray_DESCR(of[i])) : NULL;
        PyTuple_SetItem(tuple, i, of[i] ? (PyObject *)made[i] : Py_NewRef(Py_None));
        if (of[i] && !made[i]) Py_CLEAR(tuple);
    }
    return tuple;
}

int am_to_bool(PyObject *object, const char *name, void *dst)
{
    if (!PyBool_Check(object) && !PyArray_IsScalar(object, Bool))
        return am_reject(PyExc_TypeError, name, "a bool", object);
    *(bool *)dst = PyObject_IsTrue(object) == 1;
    return 0;
}

int am_to_integer(PyObject *object, const char *name, am_range range, const char *expected, npy_intp *dst)
{
    if (PyBool_Check(object) || !PyIndex_Check(object))
        return am_reject(PyExc_TypeError, name, expected, object);
    Py_ssize_t value = PyNumber_AsSsize_t(object, NULL);        /* clips */
    if (value == -1 && PyErr_ExceptionMatches(PyExc_TypeError)) /* an array of several integers, say */
        return am_reject(PyExc_TypeError, name, expected, object);
    if (value == -1 && PyErr_Occurred()) return -1;
    if (value < range.begin || value > range.end) return am_reject(PyExc_ValueError, name, expected, object);
    *dst = value;
    return 0;
}

int am_to_count(PyObject *object, const char *name, void *dst)
{
    return am_to_integer(object, name, (am_range){1, NPY_MAX_INTP}, "a positive integer", dst);
}

int am_to_length(PyObject *object, const char *name, void *dst)
{
    return am_to_integer(object, name, (am_range){0, NPY_MAX_INTP}, "a non-negative integer", dst);
}

int am_to_scale(PyObject *object, const char *name, void *dst)
{
    am_scale *scale = dst;
    am_owned PyArrayObject *array = NULL; /* of one number, if the object is not a number itself */
    if (object == Py_None) return 0;
    bool number = PyFloat_Check(object) || (PyLong_Check(object) && !PyBool_Check(object)) ||
                  PyArray_IsScalar(object, Floating) ||
                  (PyArray_IsScalar(object, Integer) && !PyArray_IsScalar(object, Timedelta));
    if (!number && am_to_array(object, name, &array) < 0 && !PyErr_ExceptionMatches(PyExc_TypeError))
        return -1;
    if (array) number = PyArray_NDIM(array) == 0 && am_dtype_of(PyArray_DESCR(array)) != AM_BOOL;
    if (number) scale->value = PyFloat_AsDouble(array ? (PyObject *)array : object);
    if (!number) return am_reject(PyExc_TypeError, name, "a real number or None", object);
    if (scale->value == -1 && PyErr_Occurred()) /* an int that exceeds all floats */
        return am_reject(PyExc_ValueError, name, "a number that fits float64", object);
    scale->given = true;
    return 0;
}

int am_to_dtype(PyObject *object, const char *name, void *dst)
{
    if (object == Py_None) return 0;
    am_owned PyArray_Descr *dtype = NULL;
    if (!PyArray_DescrConverter(object, &dtype)) {
        /* NumPy raises ValueError for text that is not UTF-8. */
        if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError))
            am_reject(PyExc_TypeError, name, "a dtype", object);
        return -1;
    }
    if (am_dtype_of(dtype) == AM_OTHER || !PyArray_ISNBO(dtype->byteorder))
        return am_fail(PyExc_TypeError,
                       "%s must be a dtype of bool, integers or real numbers in native byte order, got %R",
                       name, dtype);
    *(PyArray_Descr **)dst = am_ref(dtype);
    return 0;
}

int am_to_integer_dtype(PyObject *object, const char *name, void *dst)
{
    PyArray_Descr **dtype = dst;
    if (am_to_dtype(object, name, dst) < 0) return -1;
    if (*dtype && am_is_integer(am_dtype_of(*dtype))) return 0;
    return am_reject(PyExc_TypeError, name, "an integer dtype", object);
}

int am_to_object(PyObject *object, const char *name, void *dst)
{
    (void)name;
    *(PyObject **)dst = object;
    return 0;
}

int am_to_text(PyObject *object, const char *name, void *dst)
{
    const char **text = dst;
    *text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, NULL) : NULL;
    if (*text) return 0;
    return PyErr_Occurred() ? -1 : am_reject(PyExc_TypeError, name, "a string", object);
}

am_view am_view_of(PyArrayObject *array)
{
    if (!array) return (am_view){0};
    am_view v = {.data = PyArray_BYTES(array),
                 .type = am_kv_dtype_of(PyArray_DESCR(array)),
                 .axes = PyArray_NDIM(array),
                 .shape = {1, 1, 1, 1, 1},
                 .object = array};
    for (int i = 0; i < v.axes && i < AM_MOST_AXES; i++)
        v.shape[i] = PyArray_DIM(array, i), v.stride[i] = PyArray_STRIDE(array, i);
    return v;
}

am_array am_tokens_of_array(PyArrayObject *array)
{
    const am_view v = am_view_of(array);
    return am_tokens_of(&v);
}

bool am_entries_of(PyArrayObject *array, am_view *entries)
{
    *entries = am_view_of(array);
    return entries->axes == 1 && am_is_integer(entries->type);
}

PyObject *am_ended(am_request *r, PyObject *result)
{
    am_request_free(r);
    return result;
}

int am_raise_refused(const am_request *r, bool done)
{
    PyObject *const errors[] = {PyExc_ValueError, PyExc_TypeError, PyExc_IndexError};
    if (done) return 0;
    if (r->status != AM_OK) return am_raise(r->status);
    const am_refusal *said = r->refusal;
    if (!said->got.data) return am_fail(errors[said->wrong], "%s%s", said->words, said->hint);
    am_owned PyObject *what = am_describe(said->got.object);
    if (!what) return -1;
    return am_fail(errors[said->wrong], "%s, got %U%s", said->words, what, said->hint);
}

int am_read_starts(am_starts *s, PyObject *object, const char *name)
{
    /* A view, which takes 40 ns, is not needed: the array is looked at once. */
    if (to_array(object, name, true, &s->array) < 0) return -1;
    s->dtype = am_ref(PyArray_DESCR(s->array));
    if (am_entries_of(s->array, &s->entries) && s->entries.shape[0] > 0) return 0;
    /* An empty list becomes float64, but its length is what is wrong with it. */
    const bool wrong_shape = PyArray_NDIM(s->array) != 1 || PyArray_SIZE(s->array) == 0;
    return am_reject(wrong_shape ? PyExc_ValueError : PyExc_TypeError, name,
                     "a 1-D array of integers with at least one entry", (PyObject *)s->array);
}

static const char other_forms[] = "; write np.cumsum([0, *lengths]) for lengths, "
                                  "or pairs_to_cu_seqlens(pairs) for pairs of start and end";

static int reject_decrease(const am_starts *s, const char *name, npy_intp index)
{
    am_owned PyObject *start = item_of(s->array, index),
                      *before = start ? item_of(s->array, index - 1) : NULL;
    if (!before) return -1;
    return am_fail(PyExc_ValueError, "%s must never decrease, got %S after %S at index %zd%s", name, start,
                   before, index, other_forms);
}

int am_check_starts(am_starts *s, const char *name)
{
    const npy_intp count = s->entries.shape[0];
    s->sequences = count - 1;
    s->starts = am_new(ptrdiff_t, count);
    if (!s->starts) return am_raise(AM_NO_MEMORY);
    s->beyond = am_widen(&s->entries, s->starts);
    if (s->starts[0] != 0) return am_reject_element(name, "start at 0", s->array, 0, other_forms);
    bool decreases = false; /* the compiler vectorizes a loop that has no exit */
    for (npy_intp i = 1; i < count; i++) decreases |= s->starts[i] < s->starts[i - 1];
    for (npy_intp i = 1; decreases; i++) {
        if (s->starts[i] < s->starts[i - 1]) return reject_decrease(s, name, i);
    }
    return s->beyond < 0 ? 0 : am_reject_element(name, "hold values below 2**63", s->array, s->beyond, "");
}

int am_to_starts(PyObject *object, const char *name, void *dst)
{
    return am_read_starts(dst, object, name) < 0 ? -1 : am_check_starts(dst, name);
}

AM_OR_NONE(am_to_starts)

void am_free_starts(am_starts *s)
{
    Py_CLEAR(s->array);
    Py_CLEAR(s->dtype);
    free(s->starts);
    s->starts = NULL;
}

/* The bytes that an array may touch: low … high - 1. */
typedef struct {
    const char *low, *high;
} extent;

static extent extent_of(PyArrayObject *array)
{
    extent e = {PyArray_BYTES(array), PyArray_BYTES(array)};
    if (PyArray_SIZE(array) == 0) return e;
    for (int i = 0; i < PyArray_NDIM(array); i++) {
        npy_intp reach = (PyArray_DIM(array, i) - 1) * PyArray_STRIDE(array, i);
        if (reach < 0)
            e.low += reach;
        else
            e.high += reach;
    }
    e.high += PyArray_ITEMSIZE(array);
    return e;
}

static bool meet(const extent *a, const extent *b) { return b->low < a->high && a->low < b->high; }

/* Returns 1, 0, or -1 with the exception set. NumPy decides for views whose ranges of bytes overlap. */
static int shares_memory(PyArrayObject *a, PyArrayObject *b)
{
    const extent a_extent = extent_of(a), b_extent = extent_of(b);
    if (!meet(&a_extent, &b_extent)) return 0;
    am_owned PyArrayObject *plain_a = plain_view(a), *plain_b = plain_a ? plain_view(b) : NULL;
    am_owned PyObject *answer = plain_b ? am_ask(AM_SHARE_MEMORY, "OO", plain_a, plain_b) : NULL;
    return answer ? PyObject_IsTrue(answer) : -1;
}

/* Whether two elements of `array` may have the same address: an axis may not reach beyond the next larger
 * stride. */
static bool overlaps_itself(PyArrayObject *array)
{
    if (PyArray_IS_C_CONTIGUOUS(array)) return false;
    npy_intp size = PyArray_ITEMSIZE(array), span = size;
    bool used[NPY_MAXDIMS] = {false};
    for (int n = 0; n < PyArray_NDIM(array); n++) {
        int next = -1;
        for (int i = 0; i < PyArray_NDIM(array); i++) {
            if (used[i] || PyArray_DIM(array, i) < 2) continue;
            if (next < 0 || Py_ABS(PyArray_STRIDE(array, i)) < Py_ABS(PyArray_STRIDE(array, next))) next = i;
        }
        if (next < 0) return false;
        used[next] = true;
        npy_intp stride = Py_ABS(PyArray_STRIDE(array, next));
        if (stride < span) return true;
        span += stride * (PyArray_DIM(array, next) - 1);
    }
    return false;
}

int am_check_apart(PyArrayObject *out, const char *name, PyArrayObject *input, const char *input_name)
{
    int shared = shares_memory(out, input);
    if (shared > 0) PyErr_Format(PyExc_ValueError, "%s must share no memory with %s", name, input_name);
    return shared ? -1 : 0;
}

int am_check_written(PyArrayObject *const *arrays, const char *const *names, int written, int count)
{
    extent extents[AM_MOST_WRITTEN];
    for (int i = 0; i < count; i++) {
        if (arrays[i]) extents[i] = extent_of(arrays[i]);
        for (int j = 0; arrays[i] && j < i && j < written; j++) {
            if (arrays[j] && meet(&extents[j], &extents[i]) &&
                am_check_apart(arrays[j], names[j], arrays[i], names[i]) < 0)
                return -1;
        }
    }
    return 0;
}

int am_check_no_overlap(PyArrayObject *array, const char *name)
{
    if (PyArray_SIZE(array) == 0 || !overlaps_itself(array)) return 0;
    return am_fail(PyExc_ValueError, "%s must not overlap itself, got strides that lead to one element twice",
                   name);
}

int am_check_out(PyArrayObject *out, const char *name, int ndim, npy_intp const *shape, PyArray_Descr *dtype)
{
    if (PyArray_NDIM(out) != ndim || !PyArray_CompareLists(PyArray_DIMS(out), shape, ndim) ||
        am_dtype_of(PyArray_DESCR(out)) != am_dtype_of(dtype)) {
        am_owned PyObject *expected = PyArray_IntTupleFromIntp(ndim, shape), *what = am_describe(out);
        if (!expected || !what) return -1;
        return am_fail(PyExc_ValueError, "%s must be an array of %S of shape %R, got %U", name, dtype,
                       expected, what);
    }
    if (!PyArray_ISWRITEABLE(out))
        return am_fail(PyExc_ValueError, "%s must be writeable, got a read-only array", name);
    if (!PyArray_ISNOTSWAPPED(out) || !is_aligned(out))
        return am_fail(PyExc_ValueError, "%s must be aligned and in native byte order, got %R", name,
                       PyArray_DESCR(out));
    return am_check_no_overlap(out, name);
}
