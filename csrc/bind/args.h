/* args.h – one set of converters from Python arguments to C, and the errors they raise.
 *
 * Every message names the argument, says what was expected and what came. The Python functions above call
 * with every argument in its place, so a converter table is all the parsing there is:
 *
 *     PyArrayObject *g = NULL;
 *     bool reverse;
 *     const am_param params[] = {{"g", am_to_array, &g}, {"reverse", am_to_bool, &reverse}};
 *     if (am_parse("chunk_cumsum", args, nargs, params, 2) < 0) goto fail;
 *
 * What a converter stores is owned by the caller, also after a failure: start from zero, release at `fail:`.
 */
#ifndef AM_ARGS_H
#define AM_ARGS_H

#include "bind/state.h"

typedef int am_to(PyObject *object, const char *name, void *dst);
typedef struct {
    const char *name;
    am_to *convert;
    void *dst;
} am_param;

int am_parse(const char *function, PyObject *const *args, Py_ssize_t nargs, const am_param *params,
             Py_ssize_t count);

am_dtype am_dtype_of(PyArray_Descr *dtype);

/* PyArrayObject **: any array-like as an array that can be read in place: aligned, in native byte order. It
 * is a view of the base class that nobody else holds: a caller's object may change its shape, its strides and
 * its type at any time, and a subclass answers for itself; a view does neither. */
am_to am_to_array;
/* The same for a mask: floating-point types that the core does not know become bool. am_check_mask is due. */
am_to am_to_mask;
/* am_out *: an array that results go to, or NULL twice for None. */
typedef struct {
    PyObject *given;      /* borrowed: what is returned in the end */
    PyArrayObject *array; /* owned: a view of it as above, which is what is checked and written to */
} am_out;
am_to am_to_out;
/* A new reference to the array that results go to: a new one where none was given. NULL with the exception
 * set. */
PyArrayObject *am_target(const am_out *out, int ndim, npy_intp const *shape, PyArray_Descr *dtype);
/* What a function returns once `target` is filled, a reference to which it takes. */
PyObject *am_returned(const am_out *out, PyArrayObject *target);
/* bool *: a bool, Python's or NumPy's. */
am_to am_to_bool;
/* npy_intp *: a positive integer; what exceeds npy_intp becomes its largest value. */
am_to am_to_count;
/* npy_intp *: the same, or zero. */
am_to am_to_length;
/* am_scale *: a real number or None. */
typedef struct {
    bool given;
    double value;
} am_scale;
am_to am_to_scale;
/* PyArray_Descr **: a dtype, or NULL for None; or one of an integer. */
am_to am_to_dtype, am_to_integer_dtype;
/* PyObject **: whatever it is, borrowed. */
am_to am_to_object;
/* const char **: a string's text, borrowed. */
am_to am_to_text;
/* am_starts *: sequence starts, checked: 1-D integers from 0 that never fall; or `array` NULL for None. */
typedef struct {
    PyArrayObject *array; /* as it came */
    ptrdiff_t *starts;    /* owned; NULL where the checks were left to the caller */
    ptrdiff_t sequences;
} am_starts;
am_to am_to_starts, am_to_starts_or_none;
void am_free_starts(am_starts *starts);

/* The first half of am_to_starts: a 1-D integer array with an entry at least. */
PyArrayObject *am_starts_array(PyObject *object, const char *name);
/* The second half. */
int am_check_starts(am_starts *starts, const char *name);

/* Entries of a 1-D array of integers. What exceeds ptrdiff_t becomes its largest value; the index of the
 * first such entry, or -1. */
npy_intp am_widen_entries(PyArrayObject *array, ptrdiff_t *to);

/* A (borrowed) text such as "int32 array of shape (2, 3)" to end a message with; a new reference. */
PyObject *am_describe(PyObject *object);

/* Raises "`name` must …, got …" with what came described. Returns -1. */
int am_reject(PyObject *exception, const char *name, const char *expected, PyObject *got);

/* Where element `index` is, counted in C order: an index or a tuple of them, a new reference. */
PyObject *am_position(PyArrayObject *array, npy_intp index);

/* As am_reject for such an element; ValueError. */
int am_reject_element(const char *name, const char *expected, PyArrayObject *array, npy_intp index,
                      long long value);

/* The part of the next that concerns one input; 0 or -1. */
int am_check_apart(PyArrayObject *out, const char *name, PyArrayObject *input, const char *input_name);

/* Checks `out` against what will be written to it and read meanwhile; 0 or -1. */
int am_check_out(PyArrayObject *out, const char *name, int ndim, npy_intp const *shape, PyArray_Descr *dtype,
                 PyArrayObject *const *inputs, const char *const *input_names, int input_count);

#endif
