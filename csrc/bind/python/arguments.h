/* arguments.h – converts Python arguments to C, and raises the errors of those that do not fit.
 *
 * Each message names the argument, what was expected and what came. The package's Python functions pass every
 * argument by position, so a table of parameters is all the parsing that is needed. A file has a struct named
 * `arguments`, and each parameter is one of its fields:
 *
 *     typedef struct {
 *         PyArrayObject *g;
 *         bool reverse;
 *     } arguments;
 *     static PyObject *compute(PyObject *module, arguments *a) { … }
 *     AM_FUNCTION(chunk_cumsum, compute(module, a), AM_ARG(g, am_to_array), AM_ARG(reverse, am_to_bool))
 *
 * The type of a field tells what it holds. That is released after the call, also if it fails.
 */
#ifndef AM_BIND_PYTHON_ARGUMENTS_H
#define AM_BIND_PYTHON_ARGUMENTS_H

#include <stddef.h>
#include <stdlib.h>

#include "bind/python/state.h"
#include "bind/request.h"

/* Zeros for as many objects as an array may say, to be freed by `free`; NULL if there is not enough memory.
 * In free-threaded builds Python's own allocator would not say so: it gives more memory than there is. */
#define am_new(type, count) ((type *)calloc((size_t)(count) + 1, sizeof(type)))

/* Converts an object to a field, which is zero before; 0 or -1. */
typedef int am_to(PyObject *object, const char *name, void *dst);
typedef enum { AM_HOLDS_NOTHING, AM_HOLDS_ARRAY, AM_HOLDS_DTYPE, AM_HOLDS_STARTS, AM_HOLDS_OUT } am_holds;
typedef struct {
    const char *name;
    am_to *convert;
    unsigned at; /* bytes before the field */
    am_holds holds;
    void (*release)(void *field); /* of a type that only its file knows; NULL: as `holds` says */
} am_param;
#define AM_HOLDS(field)                                                                                      \
    _Generic(field,                                                                                          \
        PyArrayObject *: AM_HOLDS_ARRAY,                                                                     \
        PyArray_Descr *: AM_HOLDS_DTYPE,                                                                     \
        am_starts: AM_HOLDS_STARTS,                                                                          \
        am_out: AM_HOLDS_OUT,                                                                                \
        default: AM_HOLDS_NOTHING)
#define AM_PARAM(text, to, field)                                                                            \
    {.name = (text),                                                                                         \
     .convert = (to),                                                                                        \
     .at = offsetof(arguments, field),                                                                       \
     .holds = AM_HOLDS(((arguments *)0)->field)}
#define AM_ARG(field, to) AM_PARAM(#field, to, field)

int am_parse(const char *function, PyObject *const *args, Py_ssize_t nargs, const am_param *params,
             Py_ssize_t count, void *arguments);
/* Releases what the fields of these parameters hold. */
void am_release_params(const am_param *params, Py_ssize_t count, void *arguments);

/* Defines a function of these parameters, which returns `result`: an expression of `module` and of `a`, the
 * arguments. */
#define AM_FUNCTION(function, result, ...)                                                                   \
    static PyObject *function(PyObject *module, PyObject *const *args, Py_ssize_t nargs)                     \
    {                                                                                                        \
        static const am_param params_[] = {__VA_ARGS__};                                                     \
        const Py_ssize_t count_ = sizeof params_ / sizeof *params_;                                          \
        arguments given_ = {0}, *const a = &given_;                                                          \
        const bool fits_ = am_parse(#function, args, nargs, params_, count_, a) == 0;                        \
        (void)module;                                                                                        \
        PyObject *result_ = fits_ ? (result) : NULL;                                                         \
        am_release_params(params_, count_, a);                                                               \
        return result_;                                                                                      \
    }

/* Returns a new list of name_of(0), name_of(1), … up to the first that is NULL. */
PyObject *am_names(const char *name_of(ptrdiff_t i));

am_dtype am_dtype_of(PyArray_Descr *dtype);
am_dtype am_kv_dtype_of(PyArray_Descr *dtype); /* of keys and values: knows float8, too */

/* PyArrayObject **: any array-like, as an array that can be read in place: aligned and in native byte order.
 * It is a new view of the base class. Another thread may change the shape, strides or dtype of the caller's
 * object at any time, and a subclass may override methods; neither affects the view. */
am_to am_to_array;
am_to am_to_array_or_none; /* leaves NULL for None */
/* PyArrayObject **: such an array of any dtype. */
am_to am_to_readable, am_to_readable_or_none;
/* PyArrayObject **: such an array as a mask: floating-point types that the core does not know become bool.
 * Call am_check_mask on it. */
am_to am_to_mask;
/* am_out *: the array that results are written to; both fields stay NULL for None. */
typedef struct {
    PyObject *given;      /* borrowed; the function returns it */
    PyArrayObject *array; /* owned; a view as above, which is checked and written to */
} am_out;
static inline void am_free_out(am_out *out) { Py_CLEAR(out->array); }
am_to am_to_out;
/* am_out *: an array that is read and written to, maybe one of another library. */
am_to am_to_state;
/* Returns a new reference to the array that results are written to: a new one, or the caller's, which is
 * checked. Returns NULL with the exception set. */
PyArrayObject *am_target(const am_out *out, int ndim, npy_intp const *shape, PyArray_Descr *dtype);
/* Returns a new reference to the result of a function once `target` is filled; NULL for NULL. */
PyObject *am_returned(const am_out *out, PyArrayObject *target);
/* Returns a tuple of new arrays like those of `of`, or None where that has none, and its items in `made`. */
PyObject *am_new_like(int count, PyArrayObject *const *of, PyArrayObject **made);
/* bool *: a bool of Python or NumPy. */
am_to am_to_bool;
/* An integer within a range, which includes its end; 0 or -1. */
int am_to_integer(PyObject *object, const char *name, am_range range, const char *expected, npy_intp *dst);
/* npy_intp *: a positive integer; one that exceeds npy_intp becomes its largest value. */
am_to am_to_count;
/* npy_intp *: a positive integer or zero; one that exceeds npy_intp becomes its largest value. */
am_to am_to_length;
/* am_scale *: a real number or None. */
typedef struct {
    bool given;
    double value;
} am_scale;
am_to am_to_scale;
/* PyArray_Descr **: a dtype, or NULL for None; am_to_integer_dtype requires an integer type. */
am_to am_to_dtype, am_to_integer_dtype;
/* PyObject **: any object, borrowed. */
am_to am_to_object;
/* const char **: the text of a string, borrowed. */
am_to am_to_text;
/* The view keeps no reference; NULL becomes one without data. */
am_view am_view_of(PyArrayObject *array);
am_array am_tokens_of_array(PyArrayObject *array);
/* Looks at a 1-D array of integers; false for other arrays. */
bool am_entries_of(PyArrayObject *array, am_view *entries);

/* Returns the result, once the request is freed. */
PyObject *am_ended(am_request *r, PyObject *result);

/* 0 if `done`; else raises what the request says, and returns -1. */
int am_raise_refused(const am_request *r, bool done);

/* am_starts *: the starts of sequences: 1-D integers that begin with 0 and never decrease;
 * am_to_starts_or_none leaves `array` NULL for None. */
typedef struct {
    PyArrayObject *array; /* the caller's own, which keeps the entries alive */
    am_view entries;
    PyArray_Descr *dtype; /* owned */
    ptrdiff_t *starts;    /* owned; NULL until am_check_starts */
    ptrdiff_t sequences;
    ptrdiff_t beyond; /* the first entry that exceeds ptrdiff_t, which became its largest value; -1: none */
} am_starts;
am_to am_to_starts, am_to_starts_or_none;
void am_free_starts(am_starts *starts);

/* The first half of am_to_starts: checks that the object is a 1-D integer array with at least one entry. */
int am_read_starts(am_starts *starts, PyObject *object, const char *name);
/* The second half: checks and converts the entries. */
int am_check_starts(am_starts *starts, const char *name);

/* A text such as "int32 array of shape (2, 3)" to end a message with; a new reference. */
PyObject *am_describe(void *object);

/* Raises "`name` must be `expected`, got …" with a description of `got`. Returns -1, or the next one NULL. */
int am_reject(PyObject *exception, const char *name, const char *expected, void *got);
void *am_reject_array(PyObject *exception, const char *name, const char *expected, PyArrayObject *got);

/* The position of element `index` in C order: an int for a 1-D array, else a tuple; a new reference. */
PyObject *am_position(PyArrayObject *array, npy_intp index);

/* Raises ValueError for such an element: "`name` must `expected`, got … at index …`hint`". Returns -1. */
int am_reject_element(const char *name, const char *expected, PyArrayObject *array, npy_intp index,
                      const char *hint);

/* Checks that `out` shares no memory with `input`; 0 or -1. */
int am_check_apart(PyArrayObject *out, const char *name, PyArrayObject *input, const char *input_name);

/* Checks that each of the first `written` arrays shares memory with no other one of `count`, of which any may
 * be NULL; 0 or -1. */
enum { AM_MOST_WRITTEN = 8 };
int am_check_written(PyArrayObject *const *arrays, const char *const *names, int written, int count);

/* Checks that no two elements of `array` are the same memory; 0 or -1. */
int am_check_no_overlap(PyArrayObject *array, const char *name);

/* Checks that `out` has the shape and dtype of the result, and can be written to; 0 or -1. That it shares no
 * memory with other arguments has been checked by am_parse. */
int am_check_out(PyArrayObject *out, const char *name, int ndim, npy_intp const *shape, PyArray_Descr *dtype);

#endif
