/* logit_terms.c – terms of the logits as Python gives them. Python checks arguments first, with better
 * messages; this only keeps memory accesses within bounds. */
#include "bind/python/logit_terms.h"

#include <string.h>

static const char *name_of(ptrdiff_t kind)
{
    return kind < AM_LOGIT_KIND_COUNT ? am_logit_rows[kind].name : NULL;
}
PyObject *am_term_names(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return am_names(name_of);
}

static int to_term(am_request *r, PyObject *tuple, PyArrayObject **array)
{
    const char *name;
    PyObject *object, *integer;
    am_term_given given = {0};
    if (!PyArg_ParseTuple(tuple, "sOdO!;a term must be a name, an array, a number and an integer", &name,
                          &object, &given.number, &PyLong_Type, &integer))
        return -1;
    while (given.kind < AM_LOGIT_KIND_COUNT && strcmp(am_logit_rows[given.kind].name, name) != 0)
        given.kind++;
    if (given.kind == AM_LOGIT_KIND_COUNT || r->attn.terms.count == AM_LOGIT_KIND_COUNT)
        return am_reject(PyExc_ValueError, "terms", "tuples that begin with their names, each once", tuple);
    given.integer.number = (int64_t)PyLong_AsUnsignedLongLongMask(integer);
    if (PyErr_Occurred()) return -1;
    if (object != Py_None) {
        if (am_to_array(object, name, array) < 0) return -1;
        given.array = (am_operand){.kind = AM_ARRAY, .view = am_view_of(*array)};
    }
    return am_raise_refused(r, am_read_term(r, &given));
}

int am_to_terms(am_request *r, PyObject *terms, PyArrayObject *arrays[AM_LOGIT_KIND_COUNT])
{
    if (!PyTuple_Check(terms)) return am_reject(PyExc_TypeError, "terms", "a tuple", terms);
    for (Py_ssize_t i = 0; i < PyTuple_Size(terms); i++) {
        PyObject *term = PyTuple_GetItem(terms, i);
        if (!PyTuple_Check(term)) return am_reject(PyExc_TypeError, "terms", "a tuple of tuples", term);
        if (to_term(r, term, &arrays[i]) < 0) return -1;
    }
    return 0;
}

int am_to_places(am_request *r, PyObject *places)
{
    PyObject *objects[3];
    am_owned PyArrayObject *offsets = NULL, *starts = NULL, *key_starts = NULL;
    PyArrayObject **const arrays[3] = {&offsets, &starts, &key_starts};
    am_operand operands[3] = {{0}};
    if (places == Py_None) return 0;
    if (!PyTuple_Check(places))
        return am_reject(PyExc_TypeError, "places", "a tuple of three, or None", places);
    if (!PyArg_ParseTuple(places, "OOO;places must be offsets and starts", &objects[0], &objects[1],
                          &objects[2]))
        return -1;
    for (int i = 0; i < 3; i++) {
        if (objects[i] == Py_None) continue;
        if (am_to_array(objects[i], "places", arrays[i]) < 0) return -1;
        operands[i] = (am_operand){.kind = AM_ARRAY, .view = am_view_of(*arrays[i])};
    }
    return am_raise_refused(r, am_read_places(r, &operands[1], &operands[2], &operands[0]));
}
