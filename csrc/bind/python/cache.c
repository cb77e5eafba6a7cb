/* cache.c – binding of attention over a cache of keys and values. */
#include <math.h>
#include <string.h>

#include "bind/python/arguments.h"
#include "bind/python/attention.h"
#include "bind/python/logit_terms.h"
#include "bind/python/masks.h"
#include "bind/python/weights.h"
#include "bind/request_cache.h"
#include "core/arrays/convert.h"

/* The arguments, which are those of the public function. */
enum {
    QUERY,
    K_CACHE,
    V_CACHE,
    KEY,
    VALUE,
    CACHE_SEQLENS, /* by name from here on */
    BLOCK_TABLE,
    CU_SEQLENS_Q,
    CU_SEQLENS_K_NEW,
    K_SCALE,
    V_SCALE,
    ATTENTION_MASK,
    RETURN_LSE,
    OUT,
    PREFIX,
    SOFTMAX_SCALE,
    CAUSAL,
    SLIDING_WINDOW,
    OTHERS, /* Python reads all that follow: most become terms of the logits, up to two arguments per term */
    ARGUMENTS = OTHERS + 2 * AM_LOGIT_KIND_COUNT,
};

/* The arguments, as two tuples of names and defaults say them; all borrowed. */
typedef struct {
    PyObject *names, *defaults, *name[ARGUMENTS], *initial[ARGUMENTS];
    const char *text[ARGUMENTS];
    am_param params[ARGUMENTS];
    int count;
} argument_rows;

typedef struct {
    argument_rows *own_rows;    /* owned */
    PyObject *given[ARGUMENTS]; /* borrowed */
    const char *const *names;
    int count;                        /* of arguments */
    PyArrayObject *arrays[ARGUMENTS]; /* NULL: not given, or no array */
    PyArrayObject *slot_mapping;      /* of write_kvcache */
    am_starts starts, new_starts;     /* of packed queries and new tokens */
    am_out out;
    am_cached cached;
    am_mask_arg mask;
    PyObject *table; /* owned; what was converted */
    PyObject *terms; /* owned; NULL: none */
    PyArrayObject *term_arrays[AM_LOGIT_KIND_COUNT];
    double scale;
    bool with_lse;
    bool looks;  /* at weights */
    bool beyond; /* one from SLIDING_WINDOW on is not its default */
    npy_intp prefix;
} arguments;

/* [tokens, heads, channels] of the queries. */
static const ptrdiff_t *q_shape(const arguments *a) { return am_cached_tokens(&a->cached.query); }
static bool is_packed(const arguments *a) { return a->cached.q_starts; }

/* --- Tables and lengths --- */

/* Lets Python convert a table of any type but int32 and int64. */
static int read_table(arguments *a)
{
    PyArrayObject *table = a->arrays[BLOCK_TABLE];
    am_view *v = &a->cached.table;
    *v = am_view_of(table);
    if (!table || v->type == AM_INT32 || v->type == AM_INT64) return 0;
    a->table = am_ask(AM_TABLE, "(OO)", table, a->given[BLOCK_TABLE]);
    if (!a->table) return -1;
    *v = am_view_of((PyArrayObject *)a->table);
    v->object = table;
    return 0;
}

/* Whether these are usual numbers of tokens: none, one, or an array of one for each sequence. */
static bool is_usual_length(PyObject *given, ptrdiff_t sequences, am_operand *o)
{
    if (given == Py_None) return true;
    if (PyArray_Check(given)) {
        PyArrayObject *array = (PyArrayObject *)given;
        *o = (am_operand){.kind = AM_ARRAY};
        return PyArray_ISBEHAVED_RO(array) && am_entries_of(array, &o->view) &&
               o->view.shape[0] == sequences && (o->view.type == AM_INT32 || o->view.type == AM_INT64);
    }
    if (!PyLong_CheckExact(given)) return false;
    *o = (am_operand){.kind = AM_INTEGER, .number = PyNumber_AsSsize_t(given, NULL)};
    return o->number >= 0 && o->number <= AM_LONGEST;
}

/* Reads the tokens that each sequence has. Python converts unusual numbers. */
static int read_lengths(arguments *a)
{
    PyObject *given = a->given[CACHE_SEQLENS];
    am_owned PyObject *array = NULL;
    const ptrdiff_t sequences = a->cached.sequences;
    am_operand lengths = {0};
    if (!is_usual_length(given, sequences, &lengths)) {
        array = am_ask(AM_TOKENS_BEFORE, "(On)", given, sequences);
        if (!array) return -1;
        lengths = (am_operand){.kind = AM_ARRAY, .view = am_view_of((PyArrayObject *)array)};
    }
    am_request *r = &a->mask.request;
    return am_raise_refused(r, am_cached_read_lengths(r, &a->cached, &lengths));
}

/* Cuts off the tokens that all sequences share. */
static int cut_prefix(arguments *a)
{
    if (a->prefix == 0) return 0;
    if (a->given[ATTENTION_MASK] != Py_None)
        return am_reject(PyExc_ValueError, "attention_mask", "None with prefix", a->given[ATTENTION_MASK]);
    am_request *r = &a->mask.request;
    return am_raise_refused(r, am_cached_cut(r, &a->cached, a->prefix));
}

/* --- Numbers and masks --- */

static bool is_flag(PyObject *object) { return object == Py_True || object == Py_False; }

/* Sets the scale, the terms of the logits, limits and whether the logsumexp is wanted. Python looks at all
 * but the usual values. */
static int read_options(arguments *a)
{
    PyObject *const *given = a->given;
    const npy_intp *q = q_shape(a);
    const am_mask *mask = &a->mask.request.mask;
    PyObject *scale = given[SOFTMAX_SCALE];
    const double number = PyFloat_CheckExact(scale) ? PyFloat_AsDouble(scale) : 0;
    const bool usual = !a->beyond && is_flag(given[CAUSAL]) && is_flag(given[RETURN_LSE]) &&
                       (scale == Py_None || (PyFloat_CheckExact(scale) && fabs(number) < 1e30));
    a->scale = scale != Py_None ? number : q[2] > 0 ? 1 / sqrt((double)q[2]) : 1;
    if (usual) {
        a->cached.limits.has_high = given[CAUSAL] == Py_True;
        a->with_lse = given[RETURN_LSE] == Py_True;
        return 0;
    }
    int lse;
    Py_ssize_t chunk;
    am_owned PyObject *by_name = PyDict_New(), *options = NULL;
    for (int i = RETURN_LSE; by_name && i < a->count; i++) {
        if (PyDict_SetItemString(by_name, a->names[i], given[i]) < 0) Py_CLEAR(by_name);
    }
    if (!by_name) return -1;
    PyObject *low, *high, *terms;
    options = am_ask(AM_OPTIONS, "(O(nnnn)nnO)", a->arrays[QUERY], mask->batch, mask->heads, mask->queries,
                     a->cached.layout.longest, a->cached.sequences, q[2], by_name);
    if (!options || !PyArg_ParseTuple(options, "dOOOnp", &a->scale, &terms, &low, &high, &chunk, &lse))
        return -1;
    a->terms = Py_NewRef(terms);
    a->cached.limits = (am_kv_limits){.has_low = low != Py_None,
                                      .has_high = high != Py_None,
                                      .low = low == Py_None ? 0 : PyLong_AsSsize_t(low),
                                      .high = high == Py_None ? 0 : PyLong_AsSsize_t(high),
                                      .chunk = chunk};
    a->with_lse = lse;
    return PyErr_Occurred() ? -1 : 0;
}

/* True if packed queries are computed sequence by sequence: a mask, or key sums, count the keys of each
 * from 0. */
static bool is_one_by_one(const arguments *a)
{
    return is_packed(a) && (a->looks || a->given[ATTENTION_MASK] != Py_None);
}

static int read_mask(arguments *a)
{
    am_mask *mask = &a->mask.request.mask;
    PyObject *given = a->given[ATTENTION_MASK];
    am_owned PyObject *nodes = NULL;
    am_node terms[AM_KV_TERMS];
    if (is_one_by_one(a)) mask->keys = a->cached.layout.longest;
    if (given != Py_None) {
        nodes =
            am_ask(AM_MASK_PROGRAM, "(Onnnn)", given, mask->batch, mask->heads, mask->queries, mask->keys);
        if (!nodes) return -1;
    }
    int count = is_one_by_one(a) ? 0 : am_cached_terms(&a->cached, nodes, terms);
    if (count == 0 && !nodes) terms[count++] = (am_node){.kind = AM_TERM_ALL};
    return am_read_nodes_and(&a->mask, nodes, terms, count);
}

/* --- What is written --- */

static int check_in_place(const arguments *a, int i)
{
    PyArrayObject *array = a->arrays[i];
    PyObject *given = a->given[i];
    if (!PyArray_ISWRITEABLE(array))
        return am_fail(PyExc_ValueError, "%s must be writeable to take new tokens, got a read-only array",
                       a->names[i]);
    const bool in_place = PyArray_Check(given) ? PyArray_DATA((PyArrayObject *)given) == PyArray_DATA(array)
                                               : PyObject_HasAttrString(given, "__dlpack__");
    if (in_place || PyArray_SIZE(array) == 0) return am_check_no_overlap(array, a->names[i]);
    return am_reject(PyExc_ValueError, a->names[i],
                     "an aligned array in native byte order to take new tokens", given);
}

/* Checks that an array to write to shares no memory with those of the terms. */
static int check_apart_from_terms(const arguments *a, PyArrayObject *written, const char *name)
{
    const am_terms *terms = &a->mask.request.attn.terms;
    for (int i = 0; i < terms->count; i++) {
        const char *other = am_row_of_term(&terms->list[i])->name;
        if (a->term_arrays[i] && am_check_apart(written, name, a->term_arrays[i], other) < 0) return -1;
    }
    return 0;
}

/* Checks the memory that is written to when there are new tokens. */
static int check_written(arguments *a)
{
    /* Scales of channels are only read, and yet may not lie where tokens or other scales are. */
    static const int which[] = {K_CACHE, V_CACHE, K_SCALE, V_SCALE, QUERY, KEY, VALUE, BLOCK_TABLE};
    PyArrayObject *arrays[AM_MOST_WRITTEN];
    const char *names[AM_MOST_WRITTEN];
    for (int i = 0; i < AM_MOST_WRITTEN; i++) arrays[i] = a->arrays[which[i]], names[i] = a->names[which[i]];
    if (!a->arrays[VALUE]) arrays[1] = arrays[3] = NULL; /* channels of k_cache, and k_scale */
    if (am_check_written(arrays, names, 4, AM_MOST_WRITTEN) < 0) return -1;
    for (int i = 0; i < 4; i++) {
        if (arrays[i] && check_apart_from_terms(a, arrays[i], names[i]) < 0) return -1;
    }
    for (int side = 0; side < 2 && a->arrays[KEY + side]; side++) {
        const bool by_token = a->arrays[K_SCALE + side] && !a->cached.scales[side].by_channel;
        if (check_in_place(a, K_CACHE + side) < 0 || (by_token && check_in_place(a, K_SCALE + side) < 0))
            return -1;
    }
    return 0;
}

/* Checks `out`, which comes in the shape of the queries. */
static int check_result(const arguments *a, npy_intp const *shape)
{
    PyArrayObject *out = a->out.array;
    const int axes = is_packed(a) ? 3 : 4;
    if (!out) return 0;
    if (am_check_out(out, "out", axes, shape, PyArray_DESCR(a->arrays[QUERY])) < 0) return -1;
    if (check_apart_from_terms(a, out, "out") < 0) return -1;
    return am_check_apart_from_mask(out, &a->mask, "attention_mask");
}

/* --- The call --- */

/* Keeps the object as it is; am_parse compares its memory with that of `out`. */
static int to_given(PyObject *object, const char *name, void *dst)
{
    (void)object, (void)name, (void)dst;
    return 0;
}

static void look_at_caches(arguments *a)
{
    am_cached *c = &a->cached;
    c->query = am_view_of(a->arrays[QUERY]);
    for (int side = 0; side < 2; side++) {
        c->caches[side] = am_view_of(a->arrays[K_CACHE + side]),
        c->rows[side] = am_view_of(a->arrays[KEY + side]);
        c->scale_arrays[side] = am_view_of(a->arrays[K_SCALE + side]);
    }
}

static int place(arguments *a)
{
    am_cached *c = &a->cached;
    am_request *r = &a->mask.request;
    if (cut_prefix(a) < 0 || am_raise_refused(r, am_cached_place(r, c)) < 0) return -1;
    return am_raise_refused(r, am_cached_check_prefix(r, c));
}

/* Checks all but what depends on pages and the mask; and if `only_check`, on lengths. */
static int check_all(arguments *a, bool only_check)
{
    am_cached *c = &a->cached;
    am_request *r = &a->mask.request;
    c->q_starts = a->starts.starts, c->sequences = a->starts.sequences;
    c->new_starts = a->new_starts.starts, c->new_sequences = a->new_starts.sequences;
    look_at_caches(a);
    if (read_table(a) < 0 || am_raise_refused(r, am_cached_check(r, c)) < 0) return -1;
    if (read_lengths(a) < 0 || (!only_check && place(a) < 0)) return -1;
    return read_options(a);
}

static PyObject *compute(PyObject *module, arguments *a, npy_intp const *shape)
{
    const bool packed = is_packed(a);
    const npy_intp *q = q_shape(a),
                   rows[3] = {packed ? q[1] : a->cached.sequences, packed ? q[0] : q[1], q[0]};
    am_owned PyArrayObject *lse = NULL, *out = a->out.given ? am_ref(a->out.array)
                                                            : am_new_array(packed ? 3 : 4, shape,
                                                                           PyArray_DESCR(a->arrays[QUERY]));
    if (!out) return NULL;
    if (a->with_lse) {
        lse = am_new_array_of(packed ? 2 : 3, rows,
                              a->cached.query.type == AM_FLOAT64 ? NPY_FLOAT64 : NPY_FLOAT32);
        if (!lse) return NULL;
    }
    am_request *r = &a->mask.request;
    r->attn.out = am_tokens_of_array(out);
    const am_view v = am_view_of(lse);
    r->attn.lse = am_stats_of(&v);
    const npy_intp work = is_one_by_one(a) ? NPY_MAX_INTP : am_attn_work(&r->attn);
    if (a->cached.prefix ? !am_computed(module, NPY_MAX_INTP, am_cached_attend_prefix, r, &a->cached)
                         : !am_computed(module, work, am_cached_attend, r, &a->cached, is_one_by_one(a)))
        return NULL;
    PyObject *result = a->out.given ? a->out.given : (PyObject *)out;
    return lse ? PyTuple_Pack(2, result, lse) : Py_NewRef(result);
}

#define ARRAY(text, to, i) AM_PARAM(text, to, arrays[i])
static const am_param own_params[OTHERS] = {
    [QUERY] = ARRAY("query", am_to_readable, QUERY),
    [K_CACHE] = ARRAY("k_cache", am_to_readable, K_CACHE),
    [V_CACHE] = ARRAY("v_cache", am_to_readable, V_CACHE),
    [KEY] = ARRAY("key", am_to_readable_or_none, KEY),
    [VALUE] = ARRAY("value", am_to_readable_or_none, VALUE),
    [CACHE_SEQLENS] = {.name = "cache_seqlens", .convert = to_given},
    [BLOCK_TABLE] = ARRAY("block_table", am_to_readable_or_none, BLOCK_TABLE),
    [CU_SEQLENS_Q] = AM_PARAM("cu_seqlens_q", am_to_starts_or_none, starts),
    [CU_SEQLENS_K_NEW] = AM_PARAM("cu_seqlens_k_new", am_to_starts_or_none, new_starts),
    [K_SCALE] = ARRAY("k_scale", am_to_readable_or_none, K_SCALE),
    [V_SCALE] = ARRAY("v_scale", am_to_readable_or_none, V_SCALE),
    [SOFTMAX_SCALE] = {.name = "softmax_scale", .convert = to_given},
    [CAUSAL] = {.name = "causal", .convert = to_given},
    [SLIDING_WINDOW] = {.name = "sliding_window", .convert = to_given},
    [ATTENTION_MASK] = {.name = "attention_mask", .convert = to_given},
    [RETURN_LSE] = {.name = "return_lse", .convert = to_given},
    [OUT] = AM_ARG(out, am_to_out),
    [PREFIX] = AM_ARG(prefix, am_to_length),
};

/* False with the exception set, if these are not names and defaults. */
static bool fill_rows(argument_rows *t, PyObject *names, PyObject *defaults)
{
    const Py_ssize_t count = PyTuple_Check(names) ? PyTuple_Size(names) : -1;
    if (count < OTHERS || count > ARGUMENTS || !PyTuple_Check(defaults) || PyTuple_Size(defaults) != count)
        return am_fail(PyExc_TypeError, "expected names, defaults, a tuple of arguments and a dict") == 0;
    *t = (argument_rows){.names = names, .defaults = defaults, .count = (int)count};
    for (int i = 0; i < count; i++) {
        t->name[i] = PyTuple_GetItem(names, i), t->initial[i] = PyTuple_GetItem(defaults, i);
        t->text[i] = PyUnicode_AsUTF8AndSize(t->name[i], NULL);
        if (!t->text[i]) return false;
        t->params[i] = i < OTHERS ? own_params[i] : (am_param){.name = t->text[i], .convert = to_given};
    }
    return true;
}

/* The names and defaults of arguments, as C reads them. Those of the first call, which are the package's own,
 * are kept for good. */
static const argument_rows *rows_of(arguments *a, PyObject *names, PyObject *defaults)
{
    static _Atomic(argument_rows *) kept;
    argument_rows *first = atomic_load_explicit(&kept, memory_order_acquire), *own;
    if (first && first->names == names && first->defaults == defaults) return first;
    own = malloc(sizeof *own);
    if (!own) return PyErr_NoMemory(), NULL;
    if (!fill_rows(own, names, defaults)) return free(own), NULL;
    if (first || !atomic_compare_exchange_strong(&kept, &first, own)) return a->own_rows = own;
    Py_INCREF(names), Py_INCREF(defaults);
    return own;
}

/* Takes a call's arguments: their names in the order above, their defaults, a tuple of those by place, a dict
 * of the others. Names in calls and in Python's table are interned, so that they are the same objects. */
static int take(arguments *a, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *name, *value;
    if (nargs != 4 || !PyTuple_Check(args[2]) || PyTuple_Size(args[2]) > CACHE_SEQLENS ||
        !PyDict_Check(args[3]))
        return am_fail(PyExc_TypeError, "expected names, defaults, a tuple of arguments and a dict");
    const argument_rows *t = rows_of(a, args[0], args[1]);
    if (!t) return -1;
    const int by_place = (int)PyTuple_Size(args[2]), count = a->count = t->count;
    memcpy(a->given, t->initial, (size_t)count * sizeof *a->given);
    a->names = t->text;
    for (int i = 0; i < by_place; i++) a->given[i] = PyTuple_GetItem(args[2], i);
    for (Py_ssize_t n = 0; PyDict_Next(args[3], &n, &name, &value);) {
        int i = by_place;
        while (i < count && t->name[i] != name) i++;
        if (i == count) { /* a name that is not interned */
            i = by_place;
            while (i < count && PyUnicode_Compare(t->name[i], name) != 0) i++;
        }
        if (i == count) return am_fail(PyExc_TypeError, "unexpected argument '%S'", name);
        a->beyond |= i >= SLIDING_WINDOW && value != t->initial[i];
        a->given[i] = value;
    }
    return am_parse("flash_kvcache", a->given, count, t->params, count, a);
}

static void release(arguments *a)
{
    free(a->own_rows);
    am_free_mask(&a->mask);
    am_release(&a->terms);
    for (int i = 0; i < AM_LOGIT_KIND_COUNT; i++) am_release(&a->term_arrays[i]);
    am_free_starts(&a->starts);
    am_free_starts(&a->new_starts);
    am_cached_free(&a->cached);
    am_release(&a->table);
    am_release(&a->slot_mapping);
    am_free_out(&a->out);
    for (int i = 0; i < ARGUMENTS; i++) am_release(&a->arrays[i]);
}

/* Takes the arguments, checks them, and reads the mask and the terms; if `only_check`, it does only what
 * check_all does. */
static int prepare(arguments *a, PyObject *const *args, Py_ssize_t nargs, bool only_check)
{
    am_request *r = &a->mask.request;
    if (take(a, args, nargs) < 0 || check_all(a, only_check) < 0) return -1;
    if (only_check) return 0;
    if (am_raise_refused(r, am_cached_limit(r, &a->cached)) < 0 || read_mask(a) < 0) return -1;
    am_cached_describe(r, &a->cached);
    r->attn.scale = a->scale;
    return a->terms ? am_to_terms(r, a->terms, a->term_arrays) : 0;
}

/* Computes, or checks only what check_all does. */
static PyObject *call(PyObject *module, PyObject *const *args, Py_ssize_t nargs, bool only_check)
{
    am_scoped(release) arguments a = {0};
    if (prepare(&a, args, nargs, only_check) < 0) return NULL;
    if (only_check) Py_RETURN_NONE;
    am_request *r = &a.mask.request;
    npy_intp shape[4];
    memcpy(shape, a.cached.query.shape, sizeof shape);
    shape[is_packed(&a) ? 2 : 3] = am_cached_channels(&a.cached.caches[1]);
    if (check_result(&a, shape) < 0) return NULL;
    if (a.arrays[KEY] &&
        (check_written(&a) < 0 || am_raise_refused(r, am_cached_check_pages(r, &a.cached)) < 0))
        return NULL;
    return compute(module, &a, shape);
}

AM_VARIANT(flash_kvcache, call, false)
AM_VARIANT(check_kvcache, call, true)

static bool weigh(PyObject *module, void *arg, const am_attn_weights *problem)
{
    arguments *a = arg;
    return am_computed(module, NPY_MAX_INTP, am_cached_weigh, &a->mask.request, &a->cached, problem,
                       is_one_by_one(a));
}

/* Looks at the weights of all queries: arguments as of flash_kvcache, then lse, the names of results, the
 * number of top keys, and whether sums are by key head. Packed sequences are one batch row, but in sums. */
static PyObject *kvcache_weights(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { ASKED = 4 };
    am_scoped(release) arguments a = {0};
    if (nargs != 2 * ASKED) return PyErr_Format(PyExc_TypeError, "expected eight arguments");
    a.looks = true;
    if (prepare(&a, args, ASKED, false) < 0) return NULL;
    am_request *r = &a.mask.request;
    am_asked asked = {.lse = args[4] == Py_None ? NULL : (PyArrayObject *)args[4],
                      .count = r->attn.queries,
                      .wanted = args[5],
                      .top = PyLong_AsSsize_t(args[6]),
                      .by_key_head = PyObject_IsTrue(args[7]),
                      .sequences = a.cached.sequences,
                      .keys = a.cached.layout.longest};
    if (PyErr_Occurred()) return NULL;
    if (asked.lse && !PyArray_Check((PyObject *)asked.lse))
        return PyErr_Format(PyExc_TypeError, "lse must be an array or None");
    int64_t *all = am_keep(r, asked.count, sizeof *all);
    if (!all) return am_raise_refused(r, false), NULL;
    for (npy_intp i = 0; i < asked.count; i++) all[i] = i;
    asked.queries = all;
    return am_weights_of(module, r, &asked, weigh, &a);
}

/* Writes, or checks only what does not depend on memory. */
static PyObject *write_slots(PyObject *module, PyObject *const *args, Py_ssize_t nargs, bool only_check)
{
    static const int which[] = {K_CACHE, V_CACHE, KEY, VALUE, K_SCALE, V_SCALE};
    enum { ARRAYS = sizeof which / sizeof *which };
    enum { PARAMS = ARRAYS + 1 }; /* slot_mapping is the last */
    am_scoped(release) arguments a = {0};
    am_request *r = &a.mask.request;
    static const am_param params[PARAMS] = {
        ARRAY("k_cache", am_to_readable, K_CACHE),
        ARRAY("v_cache", am_to_readable, V_CACHE),
        ARRAY("key", am_to_readable, KEY),
        ARRAY("value", am_to_readable_or_none, VALUE),
        ARRAY("k_scale", am_to_readable_or_none, K_SCALE),
        ARRAY("v_scale", am_to_readable_or_none, V_SCALE),
        AM_ARG(slot_mapping, am_to_readable),
    };
    if (am_parse("write_kvcache", args, nargs, params, PARAMS, &a) < 0) return NULL;
    const char *names[ARGUMENTS] = {NULL};
    for (int i = 0; i < ARRAYS; i++) a.given[which[i]] = args[i], names[which[i]] = params[i].name;
    a.names = names;
    const am_view view = am_view_of(a.slot_mapping);
    look_at_caches(&a);
    if (am_raise_refused(r, am_cached_check_slots(r, &a.cached, &view)) < 0) return NULL;
    if (!only_check &&
        (check_written(&a) < 0 || !am_computed(module, NPY_MAX_INTP, am_cached_append, &a.cached)))
        return NULL;
    Py_RETURN_NONE;
}

AM_VARIANT(write_kvcache, write_slots, false)
AM_VARIANT(check_write_kvcache, write_slots, true)

PyMethodDef am_kvcache_methods[] = {
    AM_METHOD(flash_kvcache, "names, defaults, args, given"),
    AM_METHOD(check_kvcache, "names, defaults, args, given",
              "Check arguments of flash_kvcache, but for what depends on lengths, pages and the mask."),
    AM_METHOD(kvcache_weights, "names, defaults, args, given, lse, wanted, top, by_key_head"),
    AM_METHOD(write_kvcache, "k_cache, v_cache, key, value, k_scale, v_scale, slot_mapping"),
    AM_ENTRY(check_write_kvcache), /* but for the memory that is written to */
    {.ml_name = NULL},
};
