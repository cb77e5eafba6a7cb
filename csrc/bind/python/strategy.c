/* strategy.c – the choice of a strategy, and of kernels, as plain data, for tests. */
#include "bind/python/state.h"
#include "core/attention/base.h"
#include "core/attention/plan/strategy.h"
#include "core/cache/formats.h"
#include "core/linear/chunks.h"
#include "conv/short_convolution_rows.h"
#include "core/runtime/isa.h"

typedef enum { COUNT, NUMBER, FLAG, TYPE } kind;

#define FIELD(is, field) {.name = #field, .kind = (is), .offset = offsetof(am_work, field)}
static const struct {
    const char *name;
    kind kind;
    size_t offset;
} fields[] = {FIELD(COUNT, queries),
              FIELD(COUNT, q_blocks),
              FIELD(COUNT, tiles),
              FIELD(COUNT, kv_heads),
              FIELD(COUNT, heads_per_kv),
              FIELD(COUNT, head_dim),
              FIELD(COUNT, value_dim),
              FIELD(TYPE, type),
              FIELD(TYPE, k_type),
              FIELD(COUNT, panel),
              FIELD(COUNT, size),
              FIELD(NUMBER, factor),
              FIELD(COUNT, width),
              FIELD(FLAG, packed_alone),
              FIELD(FLAG, products_alone),
              FIELD(FLAG, packs_rounded),
              FIELD(FLAG, queries_readable),
              FIELD(FLAG, values_readable)};

static int read_type(PyObject *value, am_dtype *type)
{
    const char *name = PyUnicode_AsUTF8(value);
    const am_kv_format *format;
    for (int i = 0; name && (format = am_kv_format_at(i)); i++) {
        if (strcmp(name, format->name) == 0) return *type = format->type, 0;
    }
    if (name) PyErr_Format(PyExc_ValueError, "%R is no type of keys", value);
    return -1;
}

/* One number of a dict, which has to be there. */
static int read_field(PyObject *numbers, size_t i, am_work *work)
{
    void *to = (char *)work + fields[i].offset;
    PyObject *value = PyDict_GetItemString(numbers, fields[i].name);
    if (!value) return PyErr_Format(PyExc_KeyError, "%s", fields[i].name), -1;
    switch (fields[i].kind) {
    case COUNT: *(ptrdiff_t *)to = PyLong_AsSsize_t(value); break;
    case NUMBER: *(double *)to = PyFloat_AsDouble(value); break;
    case FLAG: *(bool *)to = PyObject_IsTrue(value) == 1; break;
    case TYPE: return read_type(value, to);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *attention_strategy(PyObject *module, PyObject *args)
{
    PyObject *numbers;
    Py_ssize_t all, most;
    am_work work;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!nn:attention_strategy", &PyDict_Type, &numbers, &all, &most)) return NULL;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (read_field(numbers, i, &work) < 0) return NULL;
    }
    if (work.queries < 1 || work.heads_per_kv < 1 || work.panel < 2)
        return PyErr_Format(PyExc_ValueError, "queries, heads_per_kv and panel must be positive");
    am_shape h = am_choose_shape(&work);
    const bool counts = am_counts_tiles(&work, &h);
    am_choose_splits(&work, &h, counts ? all : work.tiles, counts ? most : work.tiles);
    return Py_BuildValue(
        "{s:s,s:n,s:n,s:n,s:n,s:n,s:O,s:O,s:O,s:O,s:O}", "strategy", am_strategy_name(h.strategy), "rows",
        h.rows, "block_heads", h.block_heads, "head_blocks", h.head_blocks, "splits", h.splits, "split_tiles",
        h.split_tiles, "scales_keys", h.scales_keys ? Py_True : Py_False, "queries_direct",
        h.queries_direct ? Py_True : Py_False, "values_unpacked", h.values_unpacked ? Py_True : Py_False,
        "widens_rows", h.widens_rows ? Py_True : Py_False, "float_weights",
        h.float_weights ? Py_True : Py_False);
}

/* The place of a level among those that this build has; -1 with ValueError. */
static int built_level(const char *name)
{
    const am_kernels *kernels;
    for (int level = 0; (kernels = am_isa_built(level)); level++)
        if (strcmp(kernels->name, name) == 0) return level;
    return PyErr_Format(PyExc_ValueError, "this build has no level %s", name), -1;
}

static PyObject *chosen_kernels(PyObject *module, PyObject *args)
{
    const char *name;
    PyObject *types[2];
    am_dtype query, key;
    (void)module;
    if (!PyArg_ParseTuple(args, "sOO:chosen_kernels", &name, &types[0], &types[1])) return NULL;
    const int level = built_level(name);
    if (level < 0 || read_type(types[0], &query) < 0 || read_type(types[1], &key) < 0) return NULL;
    const am_kernels *kernels = am_isa_built(level);
    const am_context context = {.kernels = kernels};
    const am_attn attn = {.q.type = query, .k.type = key, .head_dim = 64};
    const am_attn_base base = am_attn_base_of(&context, &attn);
    const am_linear linear = {.query.type = query, .key.type = query, .value.type = query};
    const struct {
        const char *use;
        const void *word;
    } rows[] = {
        {"attention", &base.arithmetic->step},
        {"attention, gradients", &base.arithmetic->backward},
        {"attention, packed keys", &base.kv->pack_keys},
        {"attention, rows of keys", &base.kv_rows->step_unpacked},
        {"linear attention", am_linear_chosen(kernels, &linear, AM_LINEAR_FORWARD)},
        {"linear attention, gradients", am_linear_chosen(kernels, &linear, AM_LINEAR_BACKWARD)},
        {"linear attention, a token", am_linear_chosen(kernels, &linear, AM_LINEAR_STEP)},
        {"short convolution", &am_conv_kernels_of(kernels, query)->forward[query]},
    };
    am_owned PyObject *chosen = PyDict_New();
    for (size_t i = 0; chosen && i < sizeof rows / sizeof *rows; i++) {
        const char *origin = am_isa_origin(kernels, rows[i].word);
        am_owned PyObject *text = Py_BuildValue("z", origin);
        if (!text || PyDict_SetItemString(chosen, rows[i].use, text) < 0) return NULL;
    }
    return Py_XNewRef(chosen);
}

static PyObject *best_isa(PyObject *module, PyObject *args)
{
    const char *name;
    int intel;
    (void)module;
    if (!PyArg_ParseTuple(args, "sp:best_isa", &name, &intel)) return NULL;
    const int level = built_level(name);
    if (level < 0) return NULL;
    return PyUnicode_FromString(am_isa_built(am_isa_best_of(level, intel ? AM_INTEL : AM_ANY_VENDOR))->name);
}

PyMethodDef am_strategy_methods[] = {
    {"attention_strategy", attention_strategy, METH_VARARGS,
     "attention_strategy($module, numbers, all, most, /)\n--\n\nHow a section of these numbers is computed, "
     "whose blocks "
     "see `all` tiles together, and `most` at most"},
    {"best_isa", best_isa, METH_VARARGS,
     "best_isa($module, highest, intel, /)\n--\n\nThe level that is chosen where `highest` is the last that "
     "runs"},
    {"chosen_kernels", chosen_kernels, METH_VARARGS,
     "chosen_kernels($module, level, query, key, /)\n--\n\nThe kernels for these types at a level that this "
     "build has, by use: the topic and the level for which it is compiled"},
    {.ml_name = NULL},
};
