/* numpy.h – includes Python.h and NumPy's C API for this folder and for module.c, which imports it. */
#ifndef AM_BIND_PYTHON_NUMPY_H
#define AM_BIND_PYTHON_NUMPY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define PY_ARRAY_UNIQUE_SYMBOL am_numpy_api
#ifndef AM_IMPORTS_NUMPY
#    define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#endif
