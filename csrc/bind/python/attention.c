/* attention.c – bindings of attention. */
#include <math.h>
#include <string.h>

#include "bind/python/arguments.h"
#include "bind/python/attention.h"
#include "bind/python/logit_terms.h"
#include "bind/python/masks.h"
#include "bind/python/weights.h"
#include "bind/testing/schedule.h"
#include "core/runtime/sizes.h"
#include "core/runtime/openmp.h"

typedef struct {
    PyArrayObject *query, *key, *value;
    PyArrayObject *dout, *result, *lse, *dlse; /* what gradients take */
    PyArrayObject *query_tangent, *key_tangent, *value_tangent, *bias_tangent, *sinks_tangent;
    PyObject *wanted;     /* the terms whose gradients are returned; borrowed */
    PyArray_Descr *dtype; /* of the query; owned */
    am_out out;
    PyObject *nodes, *terms, *places, *part; /* borrowed */
    PyArrayObject *term_arrays[AM_LOGIT_KIND_COUNT];
    am_mask_arg mask;
    am_scale softmax_scale;
    bool normalize_output, return_lse, return_wide; /* return_wide: also the result as `wide_result` says */
    PyArrayObject *queries;                         /* whose weights are looked at */
    npy_intp top;
    bool by_key_head;
    int threads;
    uint64_t seed;
    am_scale prob;
    PyObject *shape; /* borrowed */
} arguments;

static int to_seed(PyObject *object, const char *name, void *dst)
{
    am_owned PyObject *number = PyNumber_Index(object);
    if (!number) return am_reject(PyExc_TypeError, name, "an integer", object);
    uint64_t seed = PyLong_AsUnsignedLongLong(number);
    if (seed == UINT64_MAX && PyErr_Occurred()) {
        PyErr_Clear();
        return am_reject(PyExc_ValueError, name, "from 0 to 2**64 - 1", object);
    }
    *(uint64_t *)dst = seed;
    return 0;
}

npy_intp am_attn_work(const am_attn *attn)
{
    const npy_intp rows = am_product(attn->batch, attn->heads, am_max(attn->queries, 1));
    return am_product(rows, am_max(attn->keys, 1), 1 + (attn->head_dim + attn->value_dim) / 2);
}

bool am_heads_seem_first(const am_attn *attn)
{
    return attn->queries > 1 && attn->heads > 64 && attn->heads / 2 >= attn->queries &&
           attn->kv_heads == attn->heads;
}

/* Reads query, key and value; all else looks at what has been read. */
static bool read_inputs(arguments *a)
{
    const am_view q = am_view_of(a->query), k = am_view_of(a->key), v = am_view_of(a->value);
    a->dtype = am_ref(PyArray_DESCR(a->query));
    return am_read_inputs(&a->mask.request, &q, &k, &v);
}

/* Sets the numbers, and where a part of a larger problem begins: None, or a tuple of its first query and its
 * first key. */
static int read_numbers(arguments *a)
{
    am_request *r = &a->mask.request;
    am_places *places = &r->attn.terms.places;
    r->attn.scale = a->softmax_scale.value, r->attn.normalize = a->normalize_output;
    if (a->part != Py_None && !PyTuple_Check(a->part))
        return am_reject(PyExc_TypeError, "part", "a tuple of two, or None", a->part);
    if (a->part != Py_None &&
        !PyArg_ParseTuple(a->part, "nn;part must be two integers", &places->first_query, &places->first_key))
        return -1;
    return am_raise_refused(r, am_check_numbers(r));
}

/* The type of the results: the query's, but of a part, which will be added to others, that of the arithmetic.
 */
static PyArray_Descr *result_dtype(const arguments *a)
{
    PyArray_Descr *dtype = a->dtype;
    const bool widens = a->part != Py_None && am_dtype_of(dtype) != AM_FLOAT64;
    return widens ? PyArray_DescrFromType(NPY_FLOAT32) : am_ref(dtype);
}

/* What takes the result in the type of the arithmetic: an array of its own, or `out`. */
static PyArrayObject *wide_result(PyArrayObject *out)
{
    const am_dtype type = am_dtype_of(PyArray_DESCR(out));
    return type == AM_FLOAT16 || type == AM_BFLOAT16 ? am_new_array_of(4, PyArray_DIMS(out), NPY_FLOAT32)
                                                     : am_ref(out);
}

static PyObject *compute(PyObject *module, arguments *a)
{
    am_attn *attn = &a->mask.request.attn;
    am_owned PyArrayObject *lse = NULL, *wide = NULL;
    npy_intp const dims[4] = {attn->batch, attn->queries, attn->heads, attn->value_dim};
    am_owned PyArray_Descr *dtype = result_dtype(a);
    am_owned PyArrayObject *out = dtype ? am_target(&a->out, 4, dims, dtype) : NULL;
    if (!out) return NULL;
    if (a->return_lse) {
        npy_intp const rows[3] = {attn->batch, attn->heads, attn->queries};
        lse = am_new_array_of(3, rows, attn->q.type == AM_FLOAT64 ? NPY_FLOAT64 : NPY_FLOAT32);
        if (!lse) return NULL;
        const am_view v = am_view_of(lse);
        attn->lse = am_stats_of(&v);
    }
    if (a->return_wide && !(wide = wide_result(out))) return NULL;
    attn->out = am_tokens_of_array(out);
    if (wide && wide != out) attn->wide_out = am_tokens_of_array(wide);
    if (!am_computed(module, am_attn_work(attn), am_attn_forward, attn)) return NULL;
    return PyTuple_Pack(wide ? 3 : 2, a->out.given ? a->out.given : (PyObject *)out,
                        lse ? (PyObject *)lse : Py_None, wide);
}

/* The fields of a Problem (attnmask/_attention/problem.py), in their order. */
static const am_param fields[] = {
    AM_ARG(query, am_to_array),           AM_ARG(key, am_to_array),     AM_ARG(value, am_to_array),
    AM_ARG(nodes, am_to_object),          AM_ARG(terms, am_to_object),  AM_ARG(softmax_scale, am_to_scale),
    AM_ARG(normalize_output, am_to_bool), AM_ARG(places, am_to_object), AM_ARG(part, am_to_object),
};
enum { FIELDS = sizeof fields / sizeof *fields };

/* arguments *: reads and checks a Problem. */
static int to_problem(PyObject *object, const char *name, void *dst)
{
    arguments *a = dst;
    am_request *r = &a->mask.request;
    if (!PyTuple_Check(object)) return am_reject(PyExc_TypeError, name, "a Problem", object);
    PyObject *given[FIELDS];
    const Py_ssize_t count = PyTuple_Size(object);
    for (Py_ssize_t i = 0; i < count && i < FIELDS; i++) given[i] = PyTuple_GetItem(object, i);
    return am_parse("Problem", given, count, fields, FIELDS, a) < 0 ||
                   am_raise_refused(r, read_inputs(a)) < 0 || am_read_nodes(&a->mask, a->nodes) < 0 ||
                   am_to_places(r, a->places) < 0 || read_numbers(a) < 0 ||
                   am_to_terms(r, a->terms, a->term_arrays) < 0
               ? -1
               : 0;
}

static void release_problem(void *dst)
{
    arguments *a = dst;
    am_release_params(fields, FIELDS, a);
    am_free_mask(&a->mask);
    for (int i = 0; i < AM_LOGIT_KIND_COUNT; i++) am_release(&a->term_arrays[i]);
    am_release(&a->dtype);
}
#define PROBLEM {.name = "problem", .convert = to_problem, .release = release_problem}

static int check_out_apart(const arguments *a)
{
    static const char *const names[] = {"query", "key", "value"};
    PyArrayObject *const inputs[] = {a->query, a->key, a->value};
    for (int i = 0; a->out.array && i < 3; i++) {
        if (am_check_apart(a->out.array, "out", inputs[i], names[i]) < 0) return -1;
    }
    return 0;
}

static PyObject *forward(PyObject *module, arguments *a)
{
    return check_out_apart(a) < 0 ? NULL : compute(module, a);
}
AM_FUNCTION(flash_forward, forward(module, a), PROBLEM, AM_ARG(return_lse, am_to_bool),
            AM_ARG(out, am_to_out))

/* For gradients: with the logsumexp, and the result in the type of the arithmetic, which rounding to a
 * narrower type would make the largest error of the gradients. */
static PyObject *forward_vjp(PyObject *module, arguments *a)
{
    a->return_lse = a->return_wide = true;
    return compute(module, a);
}
AM_FUNCTION(flash_forward_vjp, forward_vjp(module, a), PROBLEM)

/* --- Usual calls --- */

/* Whether an array can be taken as it is; it gets a reference. */
static bool usual_tokens(PyObject *object, PyArrayObject **array)
{
    if (!PyArray_CheckExact(object)) return false;
    *array = (PyArrayObject *)Py_NewRef(object);
    return PyArray_NDIM(*array) == 4 && PyArray_ISBEHAVED_RO(*array);
}

bool am_usual_scale(PyObject *object, npy_intp head_dim, double *scale)
{
    *scale = object != Py_None ? PyFloat_CheckExact(object) ? PyFloat_AsDouble(object) : INFINITY
             : head_dim > 0    ? 1 / sqrt((double)head_dim)
                               : 1;
    return fabs(*scale) < 1e30;
}

bool am_usual_diagonal(PyObject *offset, bool causal, const am_attn *attn, npy_intp *diagonal)
{
    const bool warns = causal && attn->queries > 0 && attn->queries < attn->keys; /* of the default */
    *diagonal = 0;
    if (!offset) return !warns;
    if (PyUnicode_Check(offset)) {
        *diagonal = attn->keys - attn->queries;
        return PyUnicode_CompareWithASCIIString(offset, "bottom-right") == 0;
    }
    if (!PyLong_Check(offset) || PyBool_Check(offset)) return false;
    *diagonal = PyLong_AsSsize_t(offset);
    if (*diagonal == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    return am_abs(*diagonal) < AM_FAR / 2 && (PyLong_CheckExact(offset) || !warns);
}

/* The arguments that a usual call may have; all others are None. */
enum { QUERY, KEY, VALUE, SCALE, CAUSAL, OFFSET, OUT, RETURN_LSE, NORMALIZE, DROPOUT, LOW, USUAL };
static const char *const usual_names[USUAL] = {"query",         "key",         "value",
                                               "softmax_scale", "causal",      "causal_offset",
                                               "out",           "return_lse",  "normalize_output",
                                               "dropout_prob",  "relative_low"};

/* Python interns the names in calls and in tables, so that they are the same objects. */
static bool is_one_of(PyObject *names, PyObject *name)
{
    const Py_ssize_t count = PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyTuple_GetItem(names, i) == name) return true;
    }
    return false;
}

/* Takes an argument, unless it is unusual. */
static bool take_usual(PyObject *name, PyObject *value, PyObject **taken)
{
    for (int i = 0; i < USUAL; i++) {
        if (PyUnicode_CompareWithASCIIString(name, usual_names[i]) != 0) continue;
        if (taken[i]) return false;
        taken[i] = value;
        return true;
    }
    return value == Py_None;
}

/* Finds the arguments of a call by their names; false if one is missing or unusual. */
static bool find_usual(PyObject *names, PyObject *args, PyObject *given, PyObject **taken)
{
    PyObject *name, *value;
    const Py_ssize_t by_place = PyTuple_Size(args);
    if (by_place > PyTuple_Size(names)) return false;
    for (Py_ssize_t i = 0; i < by_place; i++) {
        if (!take_usual(PyTuple_GetItem(names, i), PyTuple_GetItem(args, i), taken)) return false;
    }
    for (Py_ssize_t i = 0; PyDict_Next(given, &i, &name, &value);) {
        if (!is_one_of(names, name) || !take_usual(name, value, taken)) return false;
    }
    return taken[QUERY] && taken[KEY] && taken[VALUE];
}

/* Whether what may be left out, or given as it is then, is so. */
static bool has_usual_options(PyObject *const *taken)
{
    PyObject *const dropout = taken[DROPOUT], *const low = taken[LOW];
    return (!taken[NORMALIZE] || taken[NORMALIZE] == Py_True) &&
           (!taken[CAUSAL] || PyBool_Check(taken[CAUSAL])) &&
           (!taken[RETURN_LSE] || PyBool_Check(taken[RETURN_LSE])) &&
           (!dropout || (PyFloat_CheckExact(dropout) && PyFloat_AsDouble(dropout) == 0)) &&
           (!low || (PyLong_CheckExact(low) && PyObject_Not(low)));
}

/* Reads the arguments of flash_usual; false, and maybe with an exception, if it does not apply. */
static bool read_usual(PyObject *const *taken, arguments *a, ptrdiff_t *high)
{
    am_attn *attn = &a->mask.request.attn;
    if (!has_usual_options(taken) || !usual_tokens(taken[QUERY], &a->query) ||
        !usual_tokens(taken[KEY], &a->key) || !usual_tokens(taken[VALUE], &a->value) || !read_inputs(a) ||
        am_heads_seem_first(attn))
        return false;
    const bool causal = taken[CAUSAL] == Py_True;
    attn->normalize = true;
    if (!am_usual_scale(taken[SCALE] ? taken[SCALE] : Py_None, attn->head_dim, &attn->scale)) return false;
    if (!am_usual_diagonal(taken[OFFSET], causal, attn, high)) return false;
    PyObject *const out = taken[OUT];
    if (!out || out == Py_None) return true;
    if (!PyArray_CheckExact(out) || am_to_out(out, "out", &a->out) < 0) return false;
    return check_out_apart(a) == 0;
}

static void release_usual(arguments *a)
{
    release_problem(a);
    am_free_out(&a->out);
}

/* Attention without Python's checks, which take longer than a short call: of arrays that can be read as they
 * are, with a causal mask or none. Returns NotImplemented if anything is unusual, or wrong. */
static PyObject *attend_usual(PyObject *module, PyObject *const *args, Py_ssize_t nargs, bool return_lse,
                              bool return_wide)
{
    am_node node = {.kind = AM_TERM_ALL};
    am_scoped(release_usual) arguments a = {.part = Py_None, .return_wide = return_wide};
    am_mask *mask = &a.mask.request.mask;
    PyObject *taken[USUAL] = {NULL};
    if (nargs != 3 || !PyTuple_Check(args[0]) || !PyTuple_Check(args[1]) || !PyDict_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "expected names, a tuple of arguments and a dict of others");
    if (!find_usual(args[0], args[1], args[2], taken)) Py_RETURN_NOTIMPLEMENTED;
    const ptrdiff_t low = -AM_FAR;
    ptrdiff_t high = 0;
    a.return_lse = return_lse || taken[RETURN_LSE] == Py_True;
    if (!read_usual(taken, &a, &high)) return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
    if (taken[CAUSAL] == Py_True) node = (am_node){.kind = AM_TERM_BAND, .band = {&low, &high, 0, 0}};
    mask->nodes = &node, mask->node_count = 1;
    return compute(module, &a);
}

AM_VARIANT(flash_usual, attend_usual, false, false)
AM_VARIANT(flash_usual_fwd, attend_usual, true, false)

/* A usual call that returns what flash_forward_vjp does. */
AM_VARIANT(flash_usual_vjp, attend_usual, true, true)

/* --- Backward --- */

static int read_gradients(arguments *a, am_attn_gradients *problem)
{
    am_request *r = &a->mask.request;
    const am_gradients_given given = {.d_out = am_view_of(a->dout),
                                      .out = am_view_of(a->result),
                                      .lse = am_view_of(a->lse),
                                      .d_lse = am_view_of(a->dlse)};
    return am_raise_refused(r, am_read_gradients(r, &given, problem));
}

static PyArrayObject *like(const arguments *a, PyArrayObject *array)
{
    am_owned PyArray_Descr *dtype = result_dtype(a);
    return dtype ? am_new_array(PyArray_NDIM(array), PyArray_DIMS(array), dtype) : NULL;
}

/* Makes an array for the gradient of a term, and puts it into a dict under its name if that is wanted. */
static int add_term_gradient(const arguments *a, int i, am_logit_term *term, PyObject *made)
{
    am_owned PyObject *name = PyUnicode_FromString(am_row_of_term(term)->name);
    const int wanted = name ? PySequence_Contains(a->wanted, name) : -1;
    if (wanted <= 0 || !am_can_learn(term)) return wanted < 0 ? -1 : 0;
    const am_by_axis *own = &term->array.shape;
    npy_intp shape[4] = {own->batch, own->head, own->token, own->channel};
    const bool pairs = am_row_of_term(term)->acts == AM_ADDS_PAIRS;
    if (!pairs) shape[1] = a->mask.request.attn.heads;
    PyArray_Descr *dtype = PyArray_DESCR(a->term_arrays[i]);
    am_owned PyArrayObject *array =
        am_dtype_of(dtype) == (pairs ? term->array.type : AM_FLOAT64) ? am_new_array(4, shape, dtype) : NULL;
    if (!array) return -1;
    term->gradient = PyArray_DATA(array);
    return PyDict_SetItem(made, name, (PyObject *)array);
}

/* Makes arrays for the gradients of all terms that are wanted, by name; those that there are none of have
 * none. */
static PyObject *new_term_gradients(const arguments *a, am_terms *terms)
{
    PyObject *made = PyDict_New();
    for (int i = 0; made && i < terms->count; i++) {
        if (add_term_gradient(a, i, &terms->list[i], made) < 0) Py_CLEAR(made);
    }
    return made;
}

static PyObject *backward(PyObject *module, arguments *a)
{
    am_attn_gradients problem;
    if (!PyTuple_Check(a->wanted)) {
        am_reject(PyExc_TypeError, "wanted", "a tuple of names", a->wanted);
        return NULL;
    }
    if (read_gradients(a, &problem) < 0) return NULL;
    am_array *const places[] = {&problem.d_q, &problem.d_k, &problem.d_v};
    am_owned PyObject *of_terms = new_term_gradients(a, &problem.forward.terms);
    if (!of_terms) return NULL;
    am_owned PyArrayObject *d_q = like(a, a->query), *d_k = d_q ? like(a, a->key) : NULL,
                           *d_v = d_k ? like(a, a->value) : NULL;
    if (!d_v) return NULL;
    PyArrayObject *const made[] = {d_q, d_k, d_v};
    for (int i = 0; i < 3; i++) *places[i] = am_tokens_of_array(made[i]);
    const bool done = am_computed(module, am_attn_work(&problem.forward), am_attn_backward, &problem);
    return done ? PyTuple_Pack(4, d_q, d_k, d_v, of_terms) : NULL;
}

AM_FUNCTION(flash_backward, backward(module, a), PROBLEM, AM_ARG(dout, am_to_array),
            AM_PARAM("out", am_to_array, result), AM_ARG(lse, am_to_array), AM_ARG(dlse, am_to_array_or_none),
            AM_ARG(wanted, am_to_object))

/* --- Tangents --- */

/* Reads the tangent of the input `of`, whose name is given: an array of its type and shape, or None. */
static int to_tangent(am_request *r, PyArrayObject *array, PyArrayObject *of, const char *name,
                      const char *kind, am_array *to)
{
    if (!array) return 0;
    const am_view v = am_view_of(array), own = am_view_of(of);
    if (v.type != own.type || v.axes != own.axes ||
        memcmp(PyArray_DIMS(array), PyArray_DIMS(of), sizeof(npy_intp) * (size_t)own.axes) != 0)
        return am_raise_refused(r, am_refuse(r, AM_WRONG_VALUE, &v,
                                             "%s_%s must have the type and shape of %s", name, kind, name));
    *to = am_tokens_of(&v);
    return 0;
}

/* Reads the tangents of a bias, whose axes are those of the bias, and of sinks: [heads][sinks]. */
static int to_term_tangents(arguments *a, am_attn_tangents *problem)
{
    am_request *r = &a->mask.request;
    const am_terms_found terms = am_find_terms(&r->attn);
    if (a->bias_tangent) {
        const am_view v = am_view_of(a->bias_tangent);
        const am_by_axis *own = terms.bias ? &terms.bias->array.shape : NULL;
        const bool fits = own && v.axes == 4 && v.type == terms.bias->array.type &&
                          v.shape[0] == own->batch && v.shape[1] == own->head && v.shape[2] == own->token &&
                          v.shape[3] == own->channel;
        if (!fits)
            return am_raise_refused(
                r, am_refuse(r, AM_WRONG_VALUE, &v, "bias_tangent must have the type and axes of bias"));
        const am_view shared = am_shared(v);
        problem->d_bias = am_array_of(&shared, AM_HEADS_FIRST);
    }
    if (a->sinks_tangent) {
        const am_view v = am_view_of(a->sinks_tangent);
        const bool fits = v.axes == 2 && v.type == AM_FLOAT64 && v.shape[0] == r->attn.heads &&
                          v.shape[1] == am_sink_count(&terms) && PyArray_IS_C_CONTIGUOUS(a->sinks_tangent);
        if (!fits)
            return am_raise_refused(r,
                                    am_refuse(r, AM_WRONG_VALUE, &v, "softmax_aux_tangent must be [H, S]"));
        problem->d_sinks = PyArray_DATA(a->sinks_tangent);
    }
    return 0;
}

static PyObject *jvp(PyObject *module, arguments *a)
{
    am_request *r = &a->mask.request;
    am_attn *attn = &r->attn;
    am_attn_tangents problem = {0};
    if (to_tangent(r, a->query_tangent, a->query, "query", "tangent", &problem.d_q) < 0 ||
        to_tangent(r, a->key_tangent, a->key, "key", "tangent", &problem.d_k) < 0 ||
        to_tangent(r, a->value_tangent, a->value, "value", "tangent", &problem.d_v) < 0 ||
        to_term_tangents(a, &problem) < 0)
        return NULL;
    npy_intp const dims[4] = {attn->batch, attn->queries, attn->heads, attn->value_dim},
                   rows[3] = {attn->batch, attn->heads, attn->queries};
    const int wide = attn->q.type == AM_FLOAT64 ? NPY_FLOAT64 : NPY_FLOAT32;
    am_owned PyArrayObject *out = am_new_array(4, dims, a->dtype), *d_out = am_new_array(4, dims, a->dtype),
                           *lse = am_new_array_of(3, rows, wide), *d_lse = am_new_array_of(3, rows, wide);
    if (!out || !d_out || !lse || !d_lse) return NULL;
    const am_view stats = am_view_of(lse), d_stats = am_view_of(d_lse);
    attn->out = am_tokens_of_array(out), attn->lse = am_stats_of(&stats);
    problem.d_out = am_tokens_of_array(d_out), problem.d_lse = am_stats_of(&d_stats);
    problem.forward = *attn;
    return am_computed(module, 3 * am_attn_work(attn), am_attn_jvp, &problem)
               ? PyTuple_Pack(4, out, lse, d_out, d_lse)
               : NULL;
}
AM_FUNCTION(flash_jvp, jvp(module, a), PROBLEM, AM_ARG(query_tangent, am_to_array_or_none),
            AM_ARG(key_tangent, am_to_array_or_none), AM_ARG(value_tangent, am_to_array_or_none),
            AM_ARG(bias_tangent, am_to_array_or_none),
            AM_PARAM("softmax_aux_tangent", am_to_array_or_none, sinks_tangent))

/* Reads the cotangents of gradients, which are the tangents along which gradients are differentiated. */
static int to_along(arguments *a, am_attn_tangents *to)
{
    am_request *r = &a->mask.request;
    PyArrayObject *const given[] = {a->query_tangent, a->key_tangent, a->value_tangent};
    PyArrayObject *const of[] = {a->query, a->key, a->value};
    static const char *const names[] = {"query", "key", "value"};
    am_array *const tangents[] = {&to->d_q, &to->d_k, &to->d_v};
    for (int i = 0; i < 3; i++) {
        if (to_tangent(r, given[i], of[i], names[i], "cotangent", tangents[i]) < 0) return -1;
    }
    to->forward = r->attn;
    return 0;
}

static PyObject *backward_vjp(PyObject *module, arguments *a)
{
    const am_attn *attn = &a->mask.request.attn;
    am_attn_gradients problem;
    am_attn_tangents along = {0};
    if (read_gradients(a, &problem) < 0 || to_along(a, &along) < 0) return NULL;
    npy_intp const dims[4] = {attn->batch, attn->queries, attn->heads, attn->value_dim},
                   rows[3] = {attn->batch, attn->heads, attn->queries};
    const int wide = attn->q.type == AM_FLOAT64 ? NPY_FLOAT64 : NPY_FLOAT32;
    am_owned PyArrayObject *d_q = like(a, a->query), *d_k = like(a, a->key), *d_v = like(a, a->value),
                           *d_out = am_new_array_of(4, dims, wide), *d_lse = am_new_array_of(3, rows, wide);
    if (!d_q || !d_k || !d_v || !d_out || !d_lse) return NULL;
    const am_view stats = am_view_of(d_lse);
    problem.d_q = am_tokens_of_array(d_q), problem.d_k = am_tokens_of_array(d_k);
    problem.d_v = am_tokens_of_array(d_v);
    along.d_out = am_tokens_of_array(d_out), along.d_lse = am_stats_of(&stats);
    return am_computed(module, 8 * am_attn_work(attn), am_attn_backward_tangents, &problem, &along)
               ? PyTuple_Pack(5, d_out, d_q, d_k, d_v, d_lse)
               : NULL;
}
AM_FUNCTION(flash_backward_vjp, backward_vjp(module, a), PROBLEM, AM_ARG(dout, am_to_array),
            AM_PARAM("out", am_to_array, result), AM_ARG(lse, am_to_array), AM_ARG(dlse, am_to_array_or_none),
            AM_PARAM("query_cotangent", am_to_array_or_none, query_tangent),
            AM_PARAM("key_cotangent", am_to_array_or_none, key_tangent),
            AM_PARAM("value_cotangent", am_to_array_or_none, value_tangent))

static bool weigh(PyObject *module, void *arg, const am_attn_weights *problem)
{
    (void)arg;
    return am_computed(module, am_attn_work(&problem->attn), am_attn_weigh, problem);
}

static PyObject *weights(PyObject *module, arguments *a)
{
    am_request *r = &a->mask.request;
    const am_view chosen = am_view_of(a->queries);
    if (chosen.axes != 1 || PyArray_TYPE(a->queries) != NPY_INT64 || !PyArray_IS_C_CONTIGUOUS(a->queries))
        return PyErr_Format(PyExc_TypeError, "queries must be int64 in rising order");
    const am_asked asked = {.lse = a->lse,
                            .queries = PyArray_DATA(a->queries),
                            .count = chosen.shape[0],
                            .top = a->top,
                            .wanted = a->wanted,
                            .by_key_head = a->by_key_head,
                            .sequences = r->attn.batch,
                            .keys = r->attn.keys};
    return am_weights_of(module, r, &asked, weigh, NULL);
}
AM_FUNCTION(flash_weights, weights(module, a), PROBLEM, AM_ARG(lse, am_to_array_or_none),
            AM_ARG(queries, am_to_array), AM_ARG(wanted, am_to_object), AM_ARG(top, am_to_length),
            AM_ARG(by_key_head, am_to_bool))

static PyObject *keep_mask(PyObject *module, const arguments *a)
{
    npy_intp dims[4];
    const double probability = a->prob.value;
    if (!PyArg_ParseTuple(a->shape, "nnnn;shape must be four integers", &dims[0], &dims[1], &dims[2],
                          &dims[3]))
        return NULL;
    if (!(probability >= 0 && probability < 1))
        return PyErr_Format(PyExc_ValueError, "prob must be at least 0 and less than 1");
    if (dims[3] > AM_MOST_KEYS_OF_DROPOUT)
        return PyErr_Format(PyExc_ValueError,
                            "shape: dropout takes up to 2**32 keys, got %zd; compute without it", dims[3]);
    am_owned PyArray_Descr *dtype = PyArray_DescrFromType(NPY_BOOL);
    am_owned PyArrayObject *target = am_target(&a->out, 4, dims, dtype);
    if (!target) return NULL;
    const am_view v = am_view_of(target);
    const am_array kept = am_array_of(&v, AM_HEADS_FIRST);
    return am_computed(module, PyArray_SIZE(target), am_dropout_keep_mask, a->seed, probability, &kept)
               ? am_returned(&a->out, target)
               : NULL;
}
AM_FUNCTION(dropout_keep_mask, keep_mask(module, a), AM_ARG(seed, to_seed), AM_ARG(prob, am_to_scale),
            AM_ARG(shape, am_to_object), AM_ARG(out, am_to_out))

PyMethodDef am_flash_methods[] = {
    AM_METHOD(flash_forward, "problem, return_lse, out"),
    AM_METHOD(flash_forward_vjp, "problem",
              "Returns the result, its logsumexp, and what flash_backward takes as out."),
    AM_METHOD(flash_usual, "names, args, given"),
    AM_METHOD(flash_usual_fwd, "names, args, given"),
    AM_METHOD(flash_usual_vjp, "names, args, given"),
    AM_METHOD(flash_backward, "problem, dout, out, lse, dlse, wanted"),
    AM_METHOD(flash_jvp,
              "problem, query_tangent, key_tangent, value_tangent, bias_tangent, softmax_aux_tangent",
              "Returns the result, its logsumexp, and the tangents of both."),
    AM_METHOD(flash_backward_vjp,
              "problem, dout, out, lse, dlse, query_cotangent, key_cotangent, value_cotangent",
              "Returns the gradients of dout, query, key, value and dlse; that of dout is wide."),
    AM_METHOD(flash_weights, "problem, lse, queries, wanted, top, by_key_head",
              "Returns weights, key_sum, entropy, max_logit, top_keys and top_weights; None if not wanted."),
    {"term_names", am_term_names, METH_NOARGS,
     "term_names($module, /)\n--\n\nThe names of all kinds of logit terms, in the order of their numbers."},
    AM_METHOD(dropout_keep_mask, "seed, prob, shape, out"),
    {.ml_name = NULL},
};

/* --- The schedule as data, for tests --- */

#ifdef AM_FOR_TESTS
static int to_threads(PyObject *object, const char *name, void *dst)
{
    npy_intp count;
    _Static_assert(AM_MAX_THREADS == 1024, "as the message says");
    if (am_to_integer(object, name, (am_range){1, AM_MAX_THREADS}, "from 1 to 1024", &count) < 0) return -1;
    *(int *)dst = (int)count;
    return 0;
}

AM_FUNCTION(attention_schedule, am_attention_schedule(module, &a->mask.request.attn, a->threads), PROBLEM,
            AM_ARG(threads, to_threads))
AM_FUNCTION(backward_schedule, am_backward_schedule(module, &a->mask.request.attn, a->threads), PROBLEM,
            AM_ARG(threads, to_threads))

PyMethodDef am_schedule_methods[] = {
    AM_METHOD(attention_schedule, "problem, threads"),
    AM_METHOD(backward_schedule, "problem, threads"),
    {.ml_name = NULL},
};
#endif
