/* cache.c – binding of attention over a cache of keys and values. */
#include <math.h>

#include "bind/python/arguments.h"
#include "bind/python/masks.h"
#include "bind/python/tokens.h"
#include "core/runtime/sizes.h"
#include "core/cache/append.h"
#include "core/cache/formats.h"
#include "core/cache/layout.h"

/* The arguments, which are those of the public function. */
enum {
    QUERY,
    K_CACHE,
    V_CACHE,
    KEY,
    VALUE,
    CACHE_SEQLENS,
    BLOCK_TABLE,
    CU_SEQLENS_Q,
    K_SCALE,
    V_SCALE,
    SOFTMAX_SCALE,
    CAUSAL,
    SLIDING_WINDOW,
    LOGITS_SOFT_CAP,
    SOFTMAX_AUX,
    ALIBI_SLOPES,
    ATTENTION_MASK,
    RETURN_LSE,
    OUT,
    ARGUMENTS,
};

typedef struct {
    PyObject *given[ARGUMENTS]; /* borrowed */
    const char *names[ARGUMENTS];
    PyArrayObject *arrays[ARGUMENTS]; /* NULL: not given, or no array */
    PyArrayObject *table;             /* of int32; NULL: the cache is contiguous */
    am_starts starts;                 /* of packed queries */
    am_out out;
    am_kv_cache cache;
    am_kv_limits limits;
    am_pages pages;
    am_kv_scales scales[2];
    am_mask_arg mask;
    PyObject *masks; /* of packed sequences: a list of nodes for each; NULL: none is given */
    double scale, cap;
    bool with_lse;
} arguments;

/* Raises an error that ends with a description of what came. Returns -1. */
static int complain(PyObject *error, void *got, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    PyObject *expected = PyUnicode_FromFormatV(format, values), *what = am_describe(got);
    va_end(values);
    if (expected && what) PyErr_Format(error, "%U, got %U", expected, what);
    Py_XDECREF(expected);
    Py_XDECREF(what);
    return -1;
}

static am_dtype type_of(const arguments *a, int i) { return am_kv_dtype_of(PyArray_DESCR(a->arrays[i])); }
static npy_intp const *shape_of(const arguments *a, int i) { return PyArray_DIMS(a->arrays[i]); }
static bool is_packed(const arguments *a) { return a->starts.array; }

/* [tokens, heads, channels] of queries or new tokens. */
static npy_intp const *token_shape(const arguments *a, int i) { return shape_of(a, i) + !is_packed(a); }

/* --- Queries, keys and values --- */

static int check_axes(const arguments *a, int i)
{
    for (int axis = 0; axis < PyArray_NDIM(a->arrays[i]); axis++) {
        if (shape_of(a, i)[axis] > AM_LONGEST)
            return complain(PyExc_ValueError, a->arrays[i], "%s must be of at most 2**56 along each axis",
                            a->names[i]);
    }
    return 0;
}

static int check_tokens(const arguments *a, int i, const char *axes)
{
    PyArrayObject *array = a->arrays[i];
    const char *name = a->names[i];
    if (!am_is_floating(type_of(a, i)))
        return complain(PyExc_TypeError, array, "%s must be of float16, bfloat16, float32 or float64", name);
    if (PyArray_NDIM(array) != (is_packed(a) ? 3 : 4))
        return complain(PyExc_ValueError, array,
                        is_packed(a) ? "%s must be [total, %s] with cu_seqlens_q" : "%s must be [B, T, %s]",
                        name, axes);
    if (check_axes(a, i) < 0) return -1;
    const npy_intp end = is_packed(a) ? a->starts.starts[a->starts.sequences] : 0, tokens = shape_of(a, i)[0];
    if (!is_packed(a) || end == tokens) return 0;
    PyErr_Format(PyExc_ValueError, "cu_seqlens_q must end at %zd tokens of %s, got %zd", tokens, name, end);
    return -1;
}

static int check_caches(const arguments *a)
{
    PyArrayObject *const *arrays = a->arrays;
    for (int i = K_CACHE; i <= V_CACHE; i++) {
        const am_dtype type = type_of(a, i);
        if (!am_kv_format_of(type)) {
            char names[AM_KV_NAMES];
            am_kv_format_names(names);
            return complain(PyExc_TypeError, arrays[i], "%s must be of %s", a->names[i], names);
        }
        if (PyArray_NDIM(arrays[i]) != 4)
            return complain(PyExc_ValueError, arrays[i],
                            "%s must be [B, Tmax, Hkv, D] or [pages, page_size, Hkv, D]", a->names[i]);
        if (check_axes(a, i) < 0) return -1;
    }
    const npy_intp *q = token_shape(a, QUERY), *k = shape_of(a, K_CACHE), *v = shape_of(a, V_CACHE);
    PyArray_Descr *dtype = PyArray_DESCR(arrays[K_CACHE]);
    if (type_of(a, V_CACHE) != type_of(a, K_CACHE))
        return complain(PyExc_TypeError, arrays[V_CACHE], "v_cache must be %S as k_cache", dtype);
    if ((type_of(a, K_CACHE) == AM_FLOAT64) != (type_of(a, QUERY) == AM_FLOAT64))
        return complain(PyExc_TypeError, arrays[QUERY], "query must be %S as k_cache if either is float64",
                        dtype);
    if (!PyArray_CompareLists(k, v, 3))
        return complain(PyExc_ValueError, arrays[V_CACHE],
                        "v_cache must be of shape (%zd, %zd, %zd) and Dv as k_cache", k[0], k[1], k[2]);
    if (k[3] != q[2])
        return complain(PyExc_ValueError, arrays[K_CACHE], "k_cache must have D = %zd as query", q[2]);
    if (k[2] == 0 ? q[1] != 0 : q[1] % k[2] != 0)
        return complain(PyExc_ValueError, arrays[K_CACHE], "k_cache must have heads that divide query's %zd",
                        q[1]);
    return 0;
}

static int check_new_tokens(const arguments *a)
{
    static const char *const axes[] = {"Hkv, D", "Hkv, Dv"};
    if (!a->arrays[KEY] && !a->arrays[VALUE]) return 0;
    for (int side = 0; side < 2; side++) {
        if (a->arrays[KEY + side]) continue;
        PyErr_Format(PyExc_ValueError, "%s must be given with %s, got None", a->names[KEY + side],
                     a->names[VALUE - side]);
        return -1;
    }
    for (int side = 0; side < 2; side++) {
        const int i = KEY + side;
        if (check_tokens(a, i, axes[side]) < 0) return -1;
        const npy_intp batch = a->cache.sequences, *cache = shape_of(a, K_CACHE + side);
        if (!is_packed(a) && shape_of(a, i)[0] != batch)
            return complain(PyExc_ValueError, a->arrays[i], "%s must have batch size %zd as query",
                            a->names[i], batch);
        if (!PyArray_CompareLists(token_shape(a, i) + 1, cache + 2, 2))
            return complain(PyExc_ValueError, a->arrays[i],
                            "%s must have %zd heads of %zd channels as its cache", a->names[i], cache[2],
                            cache[3]);
    }
    const npy_intp tokens = token_shape(a, KEY)[0];
    return token_shape(a, VALUE)[0] == tokens
               ? 0
               : complain(PyExc_ValueError, a->arrays[VALUE], "value must have %zd tokens as key", tokens);
}

/* --- Scales --- */

static bool is_by_channel(npy_intp const *scale, npy_intp const *cache)
{
    return scale[0] == 1 && scale[1] == 1 && (cache[0] != 1 || cache[1] != 1 || scale[3] != 1);
}

/* The scales of a quantized cache; a step of 0 repeats them. */
static int read_scales(arguments *a, int side)
{
    PyArrayObject *array = a->arrays[K_SCALE + side];
    const char *name = a->names[K_SCALE + side];
    npy_intp const *cache = shape_of(a, K_CACHE + side);
    PyArray_Descr *dtype = PyArray_DESCR(a->arrays[K_CACHE + side]);
    const bool scaled = am_kv_is_scaled(type_of(a, K_CACHE + side));
    if (!array && !scaled) return 0;
    if (!array) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be given for a cache of %S, got None; write %s=np.ones((1, 1, %zd, %zd), "
                     "np.float32) for scales of 1",
                     name, dtype, name, cache[2], cache[3]);
        return -1;
    }
    if (!scaled) return complain(PyExc_ValueError, array, "%s must be None for a cache of %S", name, dtype);
    if (PyArray_TYPE(array) != NPY_FLOAT32)
        return complain(PyExc_TypeError, array, "%s must be float32", name);
    bool fits = PyArray_NDIM(array) == 4;
    ptrdiff_t steps[4];
    for (int i = 0; fits && i < 4; i++) {
        const npy_intp length = PyArray_DIM(array, i);
        fits = length == 1 || length == cache[i];
        steps[i] = length == 1 ? 0 : PyArray_STRIDE(array, i);
    }
    const bool by_channel = fits && is_by_channel(PyArray_DIMS(array), cache);
    if (!fits || (PyArray_DIM(array, 3) != 1 && !by_channel))
        return complain(PyExc_ValueError, array, "%s must be of shape (%zd, %zd, %zd, 1) or (1, 1, %zd, %zd)",
                        name, cache[0], cache[1], cache[2], cache[2], cache[3]);
    if (a->arrays[KEY] && !by_channel && !PyArray_CompareLists(PyArray_DIMS(array), cache, 3))
        return complain(PyExc_ValueError, array, "%s must be of shape (%zd, %zd, %zd, 1) to take new tokens",
                        name, cache[0], cache[1], cache[2]);
    a->scales[side] =
        (am_kv_scales){PyArray_BYTES(array), by_channel, steps[0], steps[1], steps[2], steps[3]};
    const float *wrong = by_channel ? am_kv_wrong_scale(&a->scales[side], cache[2], cache[3]) : NULL;
    if (!wrong) return 0;
    PyObject *number = PyFloat_FromDouble((double)*wrong);
    if (number)
        PyErr_Format(PyExc_ValueError, "%s must be finite and positive for each channel, got %R", name,
                     number);
    Py_XDECREF(number);
    return -1;
}

/* --- Tables and lengths --- */

/* Sets the table; what is not int32 is for Python to convert. */
static int read_table(arguments *a)
{
    const npy_intp batch = a->cache.sequences, rows = shape_of(a, K_CACHE)[0];
    PyArrayObject *given = a->arrays[BLOCK_TABLE];
    if (!given && rows != batch) {
        const char *hint = rows < batch ? "" : "; write block_table= if they are pages";
        PyObject *what = am_describe((PyObject *)a->arrays[K_CACHE]);
        if (what)
            PyErr_Format(PyExc_ValueError, "k_cache must have %zd rows, one a sequence, got %U%s", batch,
                         what, hint);
        Py_XDECREF(what);
        return -1;
    }
    if (!given) return 0;
    if (PyArray_TYPE(given) == NPY_INT32) {
        a->table = (PyArrayObject *)Py_NewRef(given);
    } else {
        a->table = (PyArrayObject *)am_ask(AM_INT32_TABLE, "(OO)", given, a->given[BLOCK_TABLE]);
        if (!a->table) return -1;
    }
    if (PyArray_NDIM(given) == 2 && PyArray_DIM(given, 0) == batch) return 0;
    return complain(PyExc_ValueError, given, "block_table must be of shape (%zd, max_pages)", batch);
}

/* The usual numbers of tokens: one, or an array of one for each. False if they are for Python to convert. */
static bool read_usual_lengths(const arguments *a, ptrdiff_t *before)
{
    const npy_intp batch = a->cache.sequences;
    PyObject *given = a->given[CACHE_SEQLENS];
    PyArrayObject *array = PyArray_Check(given) ? (PyArrayObject *)given : NULL;
    bool fits = true;
    if (array) {
        am_view entries;
        if (!PyArray_ISBEHAVED_RO(array) || !am_entries_of(array, &entries) || entries.shape[0] != batch ||
            (entries.type != AM_INT32 && entries.type != AM_INT64))
            return false;
        am_widen(&entries, before);
    } else {
        if (given != Py_None && !PyLong_CheckExact(given)) return false;
        const Py_ssize_t one = given == Py_None ? shape_of(a, K_CACHE)[1] : PyLong_AsSsize_t(given);
        if (one == -1) PyErr_Clear();
        for (npy_intp s = 0; s < batch; s++) before[s] = one;
        fits = one >= 0 && one <= AM_LONGEST;
    }
    for (npy_intp s = 0; s < batch; s++) fits &= before[s] >= 0 && before[s] <= AM_LONGEST;
    return fits;
}

/* The tokens that each sequence has. */
static int read_lengths(arguments *a)
{
    if (a->given[CACHE_SEQLENS] == Py_None && a->table) {
        PyErr_SetString(PyExc_ValueError, "cache_seqlens must be given with block_table, got None");
        return -1;
    }
    if (read_usual_lengths(a, a->cache.before)) return 0;
    PyObject *array = am_ask(AM_TOKENS_BEFORE, "(On)", a->given[CACHE_SEQLENS], a->cache.sequences);
    am_view entries;
    if (!array) return -1;
    if (am_entries_of((PyArrayObject *)array, &entries)) am_widen(&entries, a->cache.before);
    Py_DECREF(array);
    return 0;
}

static int place_tokens(arguments *a)
{
    am_kv_cache *cache = &a->cache;
    const npy_intp size = shape_of(a, K_CACHE)[1], columns = a->table ? PyArray_DIM(a->table, 1) : 1,
                   more = a->arrays[KEY] ? token_shape(a, KEY)[0] : 0,
                   capacity = am_min(am_product(columns, size, 1), AM_LONGEST);
    cache->q_starts = a->starts.starts, cache->queries = token_shape(a, QUERY)[0];
    const ptrdiff_t wrong = am_kv_cache_place(cache, more, capacity, &a->limits);
    if (wrong >= 0) {
        const npy_intp added =
            !more || !is_packed(a) ? more : cache->q_starts[wrong + 1] - cache->q_starts[wrong];
        PyObject *new_ones = added ? PyUnicode_FromFormat(" and %zd new ones", added) : PyUnicode_New(0, 0);
        if (new_ones)
            PyErr_Format(PyExc_ValueError,
                         "cache_seqlens must be tokens that the cache has room for, %zd a sequence, got "
                         "%zd%U at index %zd",
                         capacity, cache->before[wrong], new_ones, wrong);
        Py_XDECREF(new_ones);
        return -1;
    }
    return 0;
}

static int reject_entry(const arguments *a, const am_kv_entry *wrong)
{
    PyArrayObject *given = a->arrays[BLOCK_TABLE];
    const npy_intp pages = shape_of(a, K_CACHE)[0], s = wrong->sequence, i = wrong->index;
    PyObject *entry =
        PyArray_TYPE(given) == NPY_INT32
            ? PyLong_FromLong(wrong->page)
            : PyArray_GETITEM(given, PyArray_GETPTR2(given, s, i)); /* it may have been clipped */
    if (entry && pages == 0)
        PyErr_Format(PyExc_IndexError,
                     "block_table must name pages of k_cache, which has none, got %S at index (%zd, %zd)",
                     entry, s, i);
    else if (entry)
        PyErr_Format(PyExc_IndexError, "block_table must be from 0 to %zd, got %S at index (%zd, %zd)",
                     pages - 1, entry, s, i);
    Py_XDECREF(entry);
    return -1;
}

static int read_pages(arguments *a)
{
    const npy_intp size = am_max(1, shape_of(a, K_CACHE)[1]);
    if (a->table) {
        const am_kv_table table = {PyArray_BYTES(a->table), PyArray_STRIDE(a->table, 0),
                                   PyArray_STRIDE(a->table, 1), size};
        am_kv_entry wrong;
        const am_status status = am_kv_cache_read_table(&a->cache, &table, shape_of(a, K_CACHE)[0], &wrong);
        if (status != AM_OK) {
            am_raise(status, NULL);
            return -1;
        }
        if (wrong.sequence >= 0) return reject_entry(a, &wrong);
    }
    a->pages = am_kv_cache_pages(&a->cache, size);
    return 0;
}

/* --- Numbers and masks --- */

static bool is_flag(PyObject *object) { return object == Py_True || object == Py_False; }

/* Sets the scale, the cap, sinks, slopes, limits and whether the logsumexp is wanted. Python looks at all but
 * the usual values. */
static int read_options(arguments *a)
{
    PyObject *const *given = a->given;
    const npy_intp *q = token_shape(a, QUERY);
    PyObject *scale = given[SOFTMAX_SCALE];
    const double number = PyFloat_CheckExact(scale) ? PyFloat_AS_DOUBLE(scale) : 0;
    a->scale = scale != Py_None ? number : q[2] > 0 ? 1 / sqrt((double)q[2]) : 1;
    if (is_flag(given[CAUSAL]) && is_flag(given[RETURN_LSE]) &&
        (scale == Py_None || (PyFloat_CheckExact(scale) && fabs(number) < 1e30)) &&
        given[SLIDING_WINDOW] == Py_None && given[LOGITS_SOFT_CAP] == Py_None &&
        given[SOFTMAX_AUX] == Py_None && given[ALIBI_SLOPES] == Py_None) {
        a->limits.has_high = given[CAUSAL] == Py_True;
        a->with_lse = given[RETURN_LSE] == Py_True;
        return 0;
    }
    PyObject *low, *high, *sinks, *slopes,
        *options = am_ask(AM_OPTIONS, "(OOOOOOOOnnn)", a->arrays[QUERY], scale, given[CAUSAL],
                          given[SLIDING_WINDOW], given[LOGITS_SOFT_CAP], given[SOFTMAX_AUX],
                          given[ALIBI_SLOPES], given[RETURN_LSE], a->cache.sequences, q[1], q[2]);
    int lse, bad = -1;
    if (options &&
        PyArg_ParseTuple(options, "ddOOOOp", &a->scale, &a->cap, &sinks, &slopes, &low, &high, &lse)) {
        a->limits =
            (am_kv_limits){low != Py_None, high != Py_None, low == Py_None ? 0 : PyLong_AsSsize_t(low),
                           high == Py_None ? 0 : PyLong_AsSsize_t(high)};
        a->with_lse = lse;
        Py_CLEAR(a->arrays[SOFTMAX_AUX]);
        Py_CLEAR(a->arrays[ALIBI_SLOPES]);
        if (sinks != Py_None) a->arrays[SOFTMAX_AUX] = (PyArrayObject *)Py_NewRef(sinks);
        if (slopes != Py_None) a->arrays[ALIBI_SLOPES] = (PyArrayObject *)Py_NewRef(slopes);
        bad = PyErr_Occurred() ? -1 : 0;
    }
    Py_XDECREF(options);
    return bad;
}

/* Whether the sequences of packed queries are computed one by one, as the mask counts the keys of each. */
static bool is_one_by_one(const arguments *a) { return is_packed(a) && a->given[ATTENTION_MASK] != Py_None; }

/* Where the queries of each packed sequence begin and end, and its number of keys. */
static PyObject *list_sequences(const am_kv_cache *cache)
{
    PyObject *list = PyList_New(cache->sequences);
    for (ptrdiff_t s = 0; list && s < cache->sequences; s++) {
        PyObject *one = Py_BuildValue("(nnn)", cache->q_starts[s], cache->q_starts[s + 1], cache->lengths[s]);
        if (one)
            PyList_SET_ITEM(list, s, one);
        else
            Py_CLEAR(list);
    }
    return list;
}

/* Reads the masks of all packed sequences at once, and the mask of all queries and the longest one's keys. */
static int read_masks(arguments *a)
{
    const npy_intp *q = token_shape(a, QUERY);
    PyObject *nodes, *sequences = list_sequences(&a->cache);
    PyObject *masks = sequences ? am_ask(AM_MASK_PROGRAMS, "(OOnnn)", a->given[ATTENTION_MASK], sequences,
                                         q[1], q[0], a->cache.longest)
                                : NULL;
    int bad = -1;
    a->mask.request.mask = (am_mask){.batch = 1, .heads = q[1], .queries = q[0], .keys = a->cache.longest};
    if (masks && PyArg_ParseTuple(masks, "OO", &nodes, &a->masks)) {
        Py_INCREF(a->masks);
        bad = am_read_nodes(&a->mask, nodes);
    }
    Py_XDECREF(sequences);
    Py_XDECREF(masks);
    return bad;
}

static int read_whole_mask(arguments *a)
{
    if (is_one_by_one(a)) return read_masks(a);
    const npy_intp *q = token_shape(a, QUERY), batch = is_packed(a) ? 1 : a->cache.sequences;
    PyObject *given = a->given[ATTENTION_MASK], *nodes = NULL;
    am_node terms[2] = {{.kind = AM_TERM_ALL}};
    a->mask.request.mask = (am_mask){.batch = batch, .heads = q[1], .queries = q[0], .keys = a->cache.keys};
    if (given != Py_None) {
        nodes = am_ask(AM_MASK_PROGRAM, "(Onnnn)", given, batch, q[1], q[0], a->cache.keys);
        if (!nodes) return -1;
    }
    const int count = am_kv_cache_terms(&a->cache, &a->limits, terms),
              bad = am_read_nodes_and(&a->mask, nodes, terms, nodes ? count : (count ? count : 1));
    Py_XDECREF(nodes);
    return bad;
}

/* --- What is written --- */

static int check_in_place(const arguments *a, int i)
{
    PyArrayObject *array = a->arrays[i];
    PyObject *given = a->given[i];
    if (!PyArray_ISWRITEABLE(array)) {
        PyErr_Format(PyExc_ValueError, "%s must be writeable to take new tokens, got a read-only array",
                     a->names[i]);
        return -1;
    }
    const bool in_place = PyArray_Check(given) ? PyArray_DATA((PyArrayObject *)given) == PyArray_DATA(array)
                                               : PyObject_HasAttrString(given, "__dlpack__");
    if (in_place || PyArray_SIZE(array) == 0) return am_check_no_overlap(array, a->names[i]);
    return complain(PyExc_ValueError, given,
                    "%s must be an aligned array in native byte order to take new tokens", a->names[i]);
}

/* Checks all that is written to when new tokens are appended. */
static int check_written(const arguments *a)
{
    /* Scales of channels are only read, and yet may not lie where tokens or other scales are. */
    static const int which[] = {K_CACHE, V_CACHE, K_SCALE, V_SCALE, QUERY, KEY, VALUE, BLOCK_TABLE};
    PyArrayObject *arrays[AM_MOST_WRITTEN];
    const char *names[AM_MOST_WRITTEN];
    for (int i = 0; i < AM_MOST_WRITTEN; i++) arrays[i] = a->arrays[which[i]], names[i] = a->names[which[i]];
    if (am_check_written(arrays, names, 4, AM_MOST_WRITTEN) < 0) return -1;
    for (int side = 0; side < 2; side++) {
        const bool by_token = a->arrays[K_SCALE + side] && !a->scales[side].by_channel;
        if (check_in_place(a, K_CACHE + side) < 0 || (by_token && check_in_place(a, K_SCALE + side) < 0))
            return -1;
    }
    am_kv_writers found;
    const am_status status = am_kv_find_writers(&a->pages, a->cache.before, &found);
    if (status != AM_OK) {
        am_raise(status, NULL);
        return -1;
    }
    if (found.page < 0) return 0;
    if (found.sequence == found.other)
        PyErr_Format(PyExc_ValueError,
                     "block_table must name a page once to write to it, got page %d twice for sequence %d",
                     (int)found.page, (int)found.sequence);
    else
        PyErr_Format(PyExc_ValueError,
                     "block_table must give each sequence pages of its own to write to, got page %d for "
                     "sequences %d and %d",
                     (int)found.page, (int)found.sequence, (int)found.other);
    return -1;
}

/* Checks `out`, which comes in the shape of the queries. */
static int check_result(const arguments *a, npy_intp const *shape)
{
    PyArrayObject *out = a->out.array;
    const int axes = is_packed(a) ? 3 : 4;
    if (!out) return 0;
    if (am_check_out(out, "out", axes, shape, PyArray_DESCR(a->arrays[QUERY]), a->arrays, a->names, OUT) < 0)
        return -1;
    return am_check_apart_from_mask(out, &a->mask, "attention_mask");
}

/* --- The call --- */

static int to_readable(PyObject *object, const char *name, void *dst)
{
    return object == Py_None ? 0 : am_to_readable(object, name, dst);
}

/* Keeps the object as it is; am_parse compares its memory with that of `out`. */
static int to_given(PyObject *object, const char *name, void *dst)
{
    (void)object, (void)name, (void)dst;
    return 0;
}

/* Checks all but what depends on lengths and pages. */
static int check_all(arguments *a)
{
    if (check_tokens(a, QUERY, "H, D") < 0 || check_caches(a) < 0 || read_scales(a, 0) < 0 ||
        read_scales(a, 1) < 0)
        return -1;
    const npy_intp batch = is_packed(a) ? a->starts.sequences : shape_of(a, QUERY)[0];
    const am_status status = am_kv_cache_make(&a->cache, batch);
    if (status != AM_OK) {
        am_raise(status, NULL);
        return -1;
    }
    return check_new_tokens(a) < 0 || read_table(a) < 0 || read_lengths(a) < 0 || read_options(a) < 0 ? -1
                                                                                                      : 0;
}

static am_attn problem_of(arguments *a, PyArrayObject *out, PyArrayObject *lse)
{
    const npy_intp *q = token_shape(a, QUERY);
    PyArrayObject *slopes = a->arrays[ALIBI_SLOPES], *sinks = a->arrays[SOFTMAX_AUX];
    am_attn attn = {
        .batch = a->mask.request.mask.batch,
        .heads = q[1],
        .kv_heads = shape_of(a, K_CACHE)[2],
        .queries = q[0],
        .keys = a->mask.request.mask.keys,
        .head_dim = q[2],
        .value_dim = shape_of(a, V_CACHE)[3],
        .q = am_tokens_of(a->arrays[QUERY]),
        .k = am_tokens_of(a->arrays[K_CACHE]),
        .v = am_tokens_of(a->arrays[V_CACHE]),
        .out = am_tokens_of(out),
        .mask = &a->mask.request.mask,
        .scale = a->scale,
        .cap = a->cap,
        .sinks = sinks ? PyArray_DATA(sinks) : NULL,
        .sink_count = sinks ? PyArray_DIM(sinks, 1) : 0,
        .pages = a->pages,
        .k_scales = a->scales[0],
        .v_scales = a->scales[1],
        .normalize = true,
        .lse = lse ? PyArray_DATA(lse) : NULL,
    };
    if (slopes && a->cache.sequences > 0)
        attn.relative = (am_relative){.slopes = PyArray_DATA(slopes),
                                      .slope_step = PyArray_DIM(slopes, 0) == 1 ? 0 : q[1],
                                      .offsets = a->cache.moved,
                                      .offset_step = 1,
                                      .q_starts = a->cache.q_starts,
                                      .sequences = is_packed(a) ? a->cache.sequences : 0};
    return attn;
}

static am_status append(arguments *a, const am_context *context)
{
    am_status status = AM_OK;
    for (int side = 0; status == AM_OK && a->arrays[KEY] && side < 2; side++) {
        const am_kv_append rows = {
            .cache = am_tokens_of(a->arrays[K_CACHE + side]),
            .rows = am_tokens_of(a->arrays[KEY + side]),
            .kv_heads = shape_of(a, K_CACHE + side)[2],
            .head_dim = shape_of(a, K_CACHE + side)[3],
            .pages = a->pages,
            .begins = a->cache.before,
            .starts = a->cache.q_starts,
            .scales = a->scales[side],
        };
        status = am_kv_append_rows(context, &rows);
    }
    return status;
}

static am_status attend(PyObject *module, arguments *a, const am_attn *attn, bool first)
{
    am_call call;
    am_enter(&call, module, NPY_MAX_INTP);
    am_status status = first ? append(a, &call.context) : AM_OK;
    if (status == AM_OK && attn) status = am_mask_prepare(&call.context, attn->mask);
    if (status == AM_OK && attn) status = am_attn_forward(&call.context, attn);
    am_leave(&call);
    return status;
}

/* Attends with the queries of one packed sequence. The logsumexp of `attn` is that of all. */
static int attend_one(PyObject *module, arguments *a, const am_attn *all, ptrdiff_t s)
{
    const am_kv_cache *cache = &a->cache;
    const am_range queries = {cache->q_starts[s], cache->q_starts[s + 1]};
    const ptrdiff_t count = queries.end - queries.begin,
                    size = all->q.type == AM_FLOAT64 ? sizeof(double) : sizeof(float);
    const am_kv_cache own = {.sequences = 1,
                             .keys = cache->lengths[s],
                             .lengths = cache->lengths + s,
                             .low = cache->low + s,
                             .high = cache->high + s};
    am_mask_arg mask = {
        .request.mask = {.batch = 1, .heads = all->heads, .queries = count, .keys = cache->lengths[s]}};
    am_node terms[2];
    const int term_count = am_kv_cache_terms(&own, &a->limits, terms);
    char *lse = all->lse ? malloc((size_t)(all->heads * count * size) + 1) : NULL;
    int bad = -1;
    if (all->lse && !lse) {
        PyErr_NoMemory();
        goto fail;
    }
    if (am_read_nodes_and(&mask, PyList_GET_ITEM(a->masks, s), terms, term_count) < 0) goto fail;
    am_attn one = *all;
    one.batch = 1, one.queries = count, one.keys = cache->lengths[s], one.mask = &mask.request.mask,
    one.lse = lse;
    one.q.data += queries.begin * one.q.token, one.out.data += queries.begin * one.out.token;
    one.pages.table += s * one.pages.table_step, one.pages.used += s, one.pages.lengths += s;
    one.pages.starts = NULL, one.pages.sequences = 1;
    if (one.relative.slopes) {
        one.relative.slopes += s * one.relative.slope_step;
        one.relative.offsets = cache->offsets + s, one.relative.q_starts = NULL;
    }
    const am_status status = attend(module, a, &one, false);
    if (status != AM_OK) {
        am_raise(status, NULL);
        goto fail;
    }
    for (ptrdiff_t h = 0; lse && h < all->heads; h++)
        memcpy((char *)all->lse + (h * all->queries + queries.begin) * size, lse + h * count * size,
               (size_t)(count * size));
    bad = 0;
fail:
    am_free_mask(&mask);
    free(lse);
    return bad;
}

static PyObject *compute(PyObject *module, arguments *a, npy_intp const *shape)
{
    const bool packed = is_packed(a);
    const npy_intp *q = token_shape(a, QUERY),
                   rows[3] = {packed ? q[1] : a->cache.sequences, packed ? q[0] : q[1], q[0]};
    PyArrayObject *lse = NULL,
                  *out = am_target(&a->out, packed ? 3 : 4, shape, PyArray_DESCR(a->arrays[QUERY]));
    PyObject *result = NULL;
    if (!out) return NULL;
    if (a->with_lse) {
        lse = am_new_array_of(packed ? 2 : 3, rows,
                              type_of(a, QUERY) == AM_FLOAT64 ? NPY_FLOAT64 : NPY_FLOAT32);
        if (!lse) goto fail;
    }
    const am_attn attn = problem_of(a, out, lse);
    const am_status status = attend(module, a, is_one_by_one(a) ? NULL : &attn, true);
    if (status != AM_OK) {
        am_raise(status, NULL);
        goto fail;
    }
    for (ptrdiff_t s = 0; is_one_by_one(a) && s < a->cache.sequences; s++) {
        if (attend_one(module, a, &attn, s) < 0) goto fail;
    }
    result = a->out.given ? a->out.given : (PyObject *)out;
    result = lse ? PyTuple_Pack(2, result, lse) : Py_NewRef(result);
fail:
    Py_XDECREF(lse);
    Py_DECREF(out);
    return result;
}

/* Computes, or checks only what check_all does. */
static PyObject *call(PyObject *module, const char *function, PyObject *const *args, Py_ssize_t nargs,
                      bool only_check)
{
    arguments a = {0};
    PyObject *result = NULL;
    const am_param params[ARGUMENTS] = {
        [QUERY] = {"query", am_to_readable, &a.arrays[QUERY]},
        [K_CACHE] = {"k_cache", am_to_readable, &a.arrays[K_CACHE]},
        [V_CACHE] = {"v_cache", am_to_readable, &a.arrays[V_CACHE]},
        [KEY] = {"key", to_readable, &a.arrays[KEY]},
        [VALUE] = {"value", to_readable, &a.arrays[VALUE]},
        [CACHE_SEQLENS] = {"cache_seqlens", to_given, NULL},
        [BLOCK_TABLE] = {"block_table", to_readable, &a.arrays[BLOCK_TABLE]},
        [CU_SEQLENS_Q] = {"cu_seqlens_q", am_to_starts_or_none, &a.starts},
        [K_SCALE] = {"k_scale", to_readable, &a.arrays[K_SCALE]},
        [V_SCALE] = {"v_scale", to_readable, &a.arrays[V_SCALE]},
        [SOFTMAX_SCALE] = {"softmax_scale", to_given, NULL},
        [CAUSAL] = {"causal", to_given, NULL},
        [SLIDING_WINDOW] = {"sliding_window", to_given, NULL},
        [LOGITS_SOFT_CAP] = {"logits_soft_cap", to_given, NULL},
        [SOFTMAX_AUX] = {"softmax_aux", to_readable, &a.arrays[SOFTMAX_AUX]},
        [ALIBI_SLOPES] = {"alibi_slopes", to_readable, &a.arrays[ALIBI_SLOPES]},
        [ATTENTION_MASK] = {"attention_mask", to_given, NULL},
        [RETURN_LSE] = {"return_lse", to_given, NULL},
        [OUT] = {"out", am_to_out, &a.out},
    };
    for (Py_ssize_t i = 0; i < ARGUMENTS && i < nargs; i++) a.given[i] = args[i], a.names[i] = params[i].name;
    if (am_parse(function, args, nargs, params, ARGUMENTS) < 0 || check_all(&a) < 0) goto fail;
    if (only_check) {
        result = Py_NewRef(Py_None);
        goto fail;
    }
    const npy_intp *q = token_shape(&a, QUERY), *whole = shape_of(&a, QUERY),
                   head_dim = shape_of(&a, V_CACHE)[3];
    npy_intp const shape[4] = {whole[0], is_packed(&a) ? q[1] : q[0], is_packed(&a) ? head_dim : q[1],
                               head_dim};
    if (place_tokens(&a) < 0 || read_whole_mask(&a) < 0 || read_pages(&a) < 0 ||
        check_result(&a, shape) < 0 || (a.arrays[KEY] && check_written(&a) < 0))
        goto fail;
    result = compute(module, &a, shape);
fail:
    am_free_mask(&a.mask);
    am_free_starts(&a.starts);
    am_kv_cache_free(&a.cache);
    Py_XDECREF(a.masks);
    Py_XDECREF(a.table);
    Py_XDECREF(a.out.array);
    for (int i = 0; i < ARGUMENTS; i++) Py_XDECREF(a.arrays[i]);
    return result;
}

static PyObject *flash_kvcache(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return call(module, "flash_kvcache", args, nargs, false);
}

static PyObject *check_kvcache(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return call(module, "check_kvcache", args, nargs, true);
}

#define PARAMETERS                                                                                           \
    "($module, query, k_cache, v_cache, key, value, cache_seqlens, block_table, cu_seqlens_q, k_scale, "     \
    "v_scale, softmax_scale, causal, sliding_window, logits_soft_cap, softmax_aux, alibi_slopes, "           \
    "attention_mask, return_lse, out, /)\n--\n\n"

PyMethodDef am_kvcache_methods[] = {
    {"flash_kvcache", (PyCFunction)(void *)flash_kvcache, METH_FASTCALL, "flash_kvcache" PARAMETERS},
    {"check_kvcache", (PyCFunction)(void *)check_kvcache, METH_FASTCALL,
     "check_kvcache" PARAMETERS
     "Check arguments of flash_kvcache, but for what depends on lengths, pages and the mask."},
    {.ml_name = NULL},
};
