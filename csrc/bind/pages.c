/* pages.c – block tables of paged caches as arguments, and what is appended to a cache. */
#include "bind/pages.h"

#include <stdlib.h>

#include "bind/mask.h"
#include "core/arithmetic.h"
#include "core/kv_append.h"

static int read_array(PyObject *object, const char *name, int type, int ndim, PyArrayObject **array)
{
    if (!PyArray_Check(object) || PyArray_TYPE((PyArrayObject *)object) != type ||
        PyArray_NDIM((PyArrayObject *)object) != ndim || !PyArray_IS_C_CONTIGUOUS((PyArrayObject *)object) ||
        !PyArray_ISALIGNED((PyArrayObject *)object))
        return am_reject(PyExc_TypeError, name, "an aligned, C-contiguous array of its type and axes",
                         object);
    *array = (PyArrayObject *)Py_NewRef(object);
    return 0;
}

static int reject_entry(const am_pages_arg *arg, npy_intp s, npy_intp i, npy_intp pages)
{
    const int32_t page = arg->pages.table[s * arg->pages.table_step + i];
    if (pages == 0) {
        PyErr_SetString(PyExc_IndexError, "block_table must name pages, and the cache has none");
        return -1;
    }
    PyErr_Format(PyExc_IndexError, "block_table must be from 0 to %zd, got %d at index (%zd, %zd)", pages - 1,
                 (int)page, s, i);
    return -1;
}

static int check_entries(const am_pages_arg *arg, npy_intp pages, npy_intp size)
{
    const am_pages *p = &arg->pages;
    const npy_intp *used = PyArray_DATA(arg->used), capacity = am_product(p->table_step, size, 1);
    for (npy_intp s = 0; s < p->sequences; s++) {
        const npy_intp end = p->lengths[s];
        if (end < 0 || end > capacity || end > AM_LONGEST || used[s] < 0) {
            PyErr_Format(PyExc_ValueError, "cache_seqlens must be from 0 to %zd, got %zd at index %zd",
                         capacity, end, s);
            return -1;
        }
        for (npy_intp i = used[s] / p->size; i * p->size < end; i++) {
            const int32_t page = p->table[s * p->table_step + i];
            if (page < 0 || page >= pages) return reject_entry(arg, s, i, pages);
        }
    }
    return 0;
}

/* Reads the scales of a cache; a step of 0 repeats them. */
static int read_scales(PyObject *object, const char *name, npy_intp const *shape, PyArrayObject **array,
                       am_kv_scales *scales)
{
    if (object == Py_None) return 0;
    PyArrayObject *given = PyArray_Check(object) ? (PyArrayObject *)object : NULL;
    if (!given || PyArray_TYPE(given) != NPY_FLOAT32 || PyArray_NDIM(given) != 4 ||
        !PyArray_ISBEHAVED_RO(given))
        return am_reject(PyExc_TypeError, name, "an aligned float32 array of four axes", object);
    *array = (PyArrayObject *)Py_NewRef(object);
    ptrdiff_t steps[4];
    bool fits = true;
    for (int i = 0; i < 4; i++) {
        fits &= PyArray_DIM(given, i) == 1 || PyArray_DIM(given, i) == shape[i];
        steps[i] = PyArray_DIM(given, i) == 1 ? 0 : PyArray_STRIDE(given, i);
    }
    const bool by_channel = PyArray_DIM(given, 0) == 1 && PyArray_DIM(given, 1) == 1 &&
                            (shape[0] != 1 || shape[1] != 1 || PyArray_DIM(given, 3) != 1);
    if (!fits || (!by_channel && PyArray_DIM(given, 3) != 1))
        return am_reject(PyExc_ValueError, name, "[pages, page_size, Hkv, 1] or [1, 1, Hkv, D]", object);
    *scales = (am_kv_scales){PyArray_BYTES(given), by_channel, steps[0], steps[1], steps[2], steps[3]};
    return 0;
}

int am_read_pages(PyObject *object, npy_intp const *shape, npy_intp value_depth, am_pages_arg *arg)
{
    const npy_intp pages = shape[0], size = shape[1], value_shape[4] = {pages, size, shape[2], value_depth};
    if (object == Py_None) return 0;
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 7)
        return am_reject(PyExc_TypeError, "pages", "a tuple of seven, or None", object);
    if (read_scales(PyTuple_GET_ITEM(object, 5), "k_scale", shape, &arg->scales[0], &arg->k_scales) < 0 ||
        read_scales(PyTuple_GET_ITEM(object, 6), "v_scale", value_shape, &arg->scales[1], &arg->v_scales) < 0)
        return -1;
    if (read_array(PyTuple_GET_ITEM(object, 0), "block_table", NPY_INT32, 2, &arg->table) < 0 ||
        read_array(PyTuple_GET_ITEM(object, 1), "used", NPY_INTP, 1, &arg->used) < 0 ||
        read_array(PyTuple_GET_ITEM(object, 2), "lengths", NPY_INTP, 1, &arg->lengths) < 0)
        return -1;
    PyObject *starts = PyTuple_GET_ITEM(object, 3);
    if (starts != Py_None && read_array(starts, "starts", NPY_INTP, 1, &arg->starts) < 0) return -1;
    arg->keys = PyNumber_AsSsize_t(PyTuple_GET_ITEM(object, 4), PyExc_OverflowError);
    if (arg->keys == -1 && PyErr_Occurred()) return -1;
    const npy_intp sequences = PyArray_DIM(arg->table, 0);
    if (PyArray_DIM(arg->used, 0) != sequences || PyArray_DIM(arg->lengths, 0) != sequences ||
        (arg->starts && PyArray_DIM(arg->starts, 0) != sequences + 1)) {
        PyErr_SetString(PyExc_ValueError, "pages must have a table and lengths of as many sequences");
        return -1;
    }
    arg->pages = (am_pages){
        .table = PyArray_DATA(arg->table),
        .table_step = PyArray_DIM(arg->table, 1),
        .size = size > 0 ? size : 1, /* no sequence has tokens in pages without any */
        .used = PyArray_DATA(arg->used),
        .lengths = PyArray_DATA(arg->lengths),
        .starts = arg->starts ? PyArray_DATA(arg->starts) : NULL,
        .sequences = sequences,
    };
    return check_entries(arg, pages, size);
}

void am_free_pages(am_pages_arg *arg)
{
    Py_XDECREF(arg->table);
    Py_XDECREF(arg->used);
    Py_XDECREF(arg->lengths);
    Py_XDECREF(arg->starts);
    Py_XDECREF(arg->scales[0]);
    Py_XDECREF(arg->scales[1]);
}

/* --- Appending --- */

typedef struct {
    PyArrayObject *cache, *rows, *begins, *starts;
    PyObject *table;
    am_pages_arg pages;
} append_arguments;

static int compare_pages(const void *a, const void *b)
{
    const int32_t *x = a, *y = b;
    return x[0] != y[0] ? (x[0] < y[0] ? -1 : 1) : (x[1] > y[1]) - (x[1] < y[1]);
}

/* No page may be written to for two sequences. */
static int check_writers(const append_arguments *a, const npy_intp *begins)
{
    const am_pages *p = &a->pages.pages;
    npy_intp count = 0;
    for (npy_intp s = 0; s < p->sequences; s++) {
        if (begins[s] < p->lengths[s]) count += (p->lengths[s] - 1) / p->size - begins[s] / p->size + 1;
    }
    int32_t (*written)[2] = calloc((size_t)count + 1, sizeof *written); /* a page and its sequence */
    if (!written) {
        PyErr_NoMemory();
        return -1;
    }
    npy_intp n = 0;
    for (npy_intp s = 0; s < p->sequences; s++) {
        for (npy_intp i = begins[s] / p->size; begins[s] < p->lengths[s] && i * p->size < p->lengths[s];
             i++) {
            written[n][0] = p->table[s * p->table_step + i];
            written[n++][1] = (int32_t)s;
        }
    }
    qsort(written, (size_t)n, sizeof *written, compare_pages);
    int bad = 0;
    for (npy_intp i = 1; i < n && !bad; i++) {
        if (written[i][0] != written[i - 1][0]) continue;
        if (written[i][1] == written[i - 1][1])
            PyErr_Format(
                PyExc_ValueError,
                "block_table must name a page once to write to it, got page %d twice for sequence %d",
                (int)written[i][0], (int)written[i][1]);
        else
            PyErr_Format(PyExc_ValueError,
                         "block_table must give each sequence pages of its own to write to, got page %d for "
                         "sequences %d and %d",
                         (int)written[i][0], (int)written[i - 1][1], (int)written[i][1]);
        bad = -1;
    }
    free(written);
    return bad;
}

static int check_append(const append_arguments *a)
{
    const am_dtype in = am_dtype_of(PyArray_DESCR(a->rows)), out = am_kv_dtype_of(PyArray_DESCR(a->cache));
    const bool quantized = out == AM_INT8 || out == AM_FLOAT8;
    if (PyArray_NDIM(a->cache) != 4 || PyArray_NDIM(a->rows) != 4 || !am_is_floating(in) ||
        (!am_is_floating(out) && !quantized) || PyArray_DIM(a->cache, 2) != PyArray_DIM(a->rows, 2) ||
        PyArray_DIM(a->cache, 3) != PyArray_DIM(a->rows, 3) || !PyArray_ISWRITEABLE(a->cache)) {
        PyErr_SetString(PyExc_ValueError,
                        "rows must have the heads and channels of a cache that is writeable");
        return -1;
    }
    const npy_intp sequences = PyArray_DIM(a->begins, 0), *begins = PyArray_DATA(a->begins),
                   *starts = a->starts ? PyArray_DATA(a->starts) : NULL;
    const ptrdiff_t *lengths = a->pages.pages.lengths;
    bool fits = sequences == a->pages.pages.sequences &&
                (starts ? PyArray_DIM(a->starts, 0) == sequences + 1 && PyArray_DIM(a->rows, 0) == 1 &&
                              starts[0] == 0 && starts[sequences] == PyArray_DIM(a->rows, 1)
                        : PyArray_DIM(a->rows, 0) == sequences);
    for (npy_intp s = 0; fits && s < sequences; s++) {
        const npy_intp count = starts ? starts[s + 1] - starts[s] : PyArray_DIM(a->rows, 1);
        fits = begins[s] >= 0 && count >= 0 && lengths[s] - begins[s] == count;
    }
    if (fits) return check_writers(a, begins);
    PyErr_SetString(PyExc_ValueError, "rows must be as many as lengths grow by");
    return -1;
}

static am_tokens tokens_of(PyArrayObject *array)
{
    return (am_tokens){PyArray_BYTES(array),     am_kv_dtype_of(PyArray_DESCR(array)),
                       PyArray_STRIDE(array, 0), PyArray_STRIDE(array, 1),
                       PyArray_STRIDE(array, 2), PyArray_STRIDE(array, 3)};
}

static PyObject *kv_append(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    append_arguments a = {0};
    PyObject *pages, *begins, *starts, *result = NULL;
    const am_param params[] = {
        {"cache", am_to_array, &a.cache},  {"rows", am_to_array, &a.rows},    {"pages", am_to_object, &pages},
        {"begins", am_to_object, &begins}, {"starts", am_to_object, &starts},
    };
    if (am_parse("kv_append", args, nargs, params, 5) < 0) goto fail;
    if (PyArray_NDIM(a.cache) != 4 || pages == Py_None) {
        PyErr_SetString(PyExc_ValueError, "cache must have four axes, and pages");
        goto fail;
    }
    if (read_array(begins, "begins", NPY_INTP, 1, &a.begins) < 0) goto fail;
    if (starts != Py_None && read_array(starts, "starts", NPY_INTP, 1, &a.starts) < 0) goto fail;
    if (am_read_pages(pages, PyArray_DIMS(a.cache), 0, &a.pages) < 0) goto fail;
    if (check_append(&a) < 0) goto fail;
    const am_kv_append append = {
        .cache = tokens_of(a.cache),
        .rows = tokens_of(a.rows),
        .kv_heads = PyArray_DIM(a.cache, 2),
        .depth = PyArray_DIM(a.cache, 3),
        .pages = a.pages.pages,
        .begins = PyArray_DATA(a.begins),
        .starts = a.starts ? PyArray_DATA(a.starts) : NULL,
        .scales = a.pages.k_scales,
    };
    if (append.scales.data && !append.scales.by_channel &&
        (PyArray_NDIM(a.pages.scales[0]) != 4 || !PyArray_ISWRITEABLE(a.pages.scales[0]) ||
         !PyArray_CompareLists(PyArray_DIMS(a.pages.scales[0]), PyArray_DIMS(a.cache), 3))) {
        PyErr_SetString(PyExc_ValueError, "scales must be writeable, one a token and head");
        goto fail;
    }
    am_call call;
    am_enter(&call, module, PyArray_SIZE(a.rows));
    const am_status status = am_kv_append_rows(&call.run, &append);
    am_leave(&call);
    result = status == AM_OK ? Py_NewRef(Py_None) : am_raise(status, NULL);
fail:
    Py_XDECREF(a.cache);
    Py_XDECREF(a.rows);
    Py_XDECREF(a.begins);
    Py_XDECREF(a.starts);
    am_free_pages(&a.pages);
    return result;
}

/* Checks what am_read_pages does, before anything is written. */
static PyObject *check_pages(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyArrayObject *cache = NULL;
    PyObject *pages, *result = NULL;
    am_pages_arg arg = {0};
    const am_param params[] = {{"cache", am_to_array, &cache}, {"pages", am_to_object, &pages}};
    (void)module;
    if (am_parse("check_pages", args, nargs, params, 2) == 0) {
        if (PyArray_NDIM(cache) != 4)
            PyErr_SetString(PyExc_ValueError, "cache must have four axes");
        else if (am_read_pages(pages, PyArray_DIMS(cache), 0, &arg) == 0)
            result = Py_NewRef(Py_None);
    }
    Py_XDECREF(cache);
    am_free_pages(&arg);
    return result;
}

PyMethodDef am_pages_methods[] = {
    {"check_pages", (PyCFunction)(void *)check_pages, METH_FASTCALL,
     "check_pages($module, cache, pages, /)\n--\n\n"},
    {"kv_append", (PyCFunction)(void *)kv_append, METH_FASTCALL,
     "kv_append($module, cache, rows, pages, begins, starts, /)\n--\n\n"},
    {.ml_name = NULL},
};
