/* logit_terms.h – terms of the logits, and where queries are among the keys, as Python gives them: a tuple of
 * Terms, and Places or None (attnmask/_attention/terms.py). */
#ifndef AM_BIND_PYTHON_LOGIT_TERMS_H
#define AM_BIND_PYTHON_LOGIT_TERMS_H

#include "bind/python/arguments.h"
#include "core/attention/terms/terms.h"

/* The names of all kinds, in the order of am_logit_kind. */
PyObject *am_term_names(PyObject *module, PyObject *unused);

/* Reads the terms of a request whose places and other numbers are known; 0 or -1. The caller owns their
 * arrays, also after a failure; NULL for terms that have none. */
int am_to_terms(am_request *r, PyObject *terms, PyArrayObject *arrays[AM_LOGIT_KIND_COUNT]);

/* Reads the places of a request whose shapes are known; 0 or -1. */
int am_to_places(am_request *r, PyObject *places);

#endif
