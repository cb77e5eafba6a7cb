/* kernels.c – which kernels a level has, and a type gets. */
#include "bind/python/state.h"
#include "conv/short_convolution_rows.h"
#include "core/attention/base.h"
#include "core/linear/chunks.h"
#include "core/runtime/isa.h"

/* The place of a level among those that this build has; -1 with ValueError. */
static int built_level(const char *name)
{
    const am_kernels *kernels;
    for (int level = 0; (kernels = am_isa_built(level)); level++)
        if (strcmp(kernels->name, name) == 0) return level;
    return PyErr_Format(PyExc_ValueError, "this build has no level %s", name), -1;
}

/* Where the kernels of a level are, laid out as kernels/table.h says, and the size of their table. */
static PyObject *kernel_table(PyObject *module, PyObject *name)
{
    (void)module;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    const int level = text ? built_level(text) : -1;
    if (level < 0) return NULL;
    const am_kernels *kernels = am_isa_built(level);
    return Py_BuildValue("Nn", PyLong_FromVoidPtr((void *)kernels), (Py_ssize_t)sizeof *kernels);
}

static PyObject *chosen_kernels(PyObject *module, PyObject *args)
{
    const char *name;
    int query, key;
    (void)module;
    if (!PyArg_ParseTuple(args, "sii:chosen_kernels", &name, &query, &key)) return NULL;
    const int level = built_level(name);
    if (level < 0) return NULL;
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

PyMethodDef am_kernel_methods[] = {
    {"best_isa", best_isa, METH_VARARGS,
     "best_isa($module, highest, intel, /)\n--\n\nThe level that is chosen where `highest` is the last that "
     "runs"},
    {"chosen_kernels", chosen_kernels, METH_VARARGS,
     "chosen_kernels($module, level, query, key, /)\n--\n\nThe kernels for these types at a level that this "
     "build has, by use: the topic and the level for which it is compiled"},
    {"kernel_table", kernel_table, METH_O, "kernel_table($module, name, /)\n--\n\n"},
    {.ml_name = NULL},
};
