/* module.c – the extension module: its methods, its state, and the choice of kernels at import. */
#define AM_IMPORTS_NUMPY
#include "bind/python/state.h"

#include <stdlib.h>

#include "bind/python/arguments.h"
#include "core/runtime/isa.h"
#include "core/runtime/openmp.h"

#ifdef __clang__
#    define COMPILER "Clang " __clang_version__
#else
#    define COMPILER "GCC " __VERSION__
#endif

/* The names of all levels that run here, best last. */
static const char *level_name(ptrdiff_t level)
{
    const am_kernels *kernels = am_isa_level((int)level);
    return kernels ? kernels->name : NULL;
}
static PyObject *available_levels(void) { return am_names(level_name); }

/* The kernels called `name`; NULL with ValueError if there are none such here. */
static const am_kernels *find_kernels(const char *source, const char *name)
{
    const am_kernels *kernels = am_isa_find(name);
    am_owned PyObject *names = kernels ? NULL : available_levels();
    if (names)
        PyErr_Format(PyExc_ValueError, "%s must be one of %R on this machine, got '%s'", source, names, name);
    return kernels;
}

static PyObject *use_isa(PyObject *module, PyObject *name)
{
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    const am_kernels *kernels = text ? find_kernels("name", text) : NULL;
    if (!kernels) return NULL;
    return PyUnicode_FromString(atomic_exchange(&am_state_of(module)->kernels, kernels)->name);
}

static PyObject *get_num_threads(PyObject *module, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(am_threads(am_state_of(module)));
}

static int to_threads(PyObject *object, const char *name, int *threads)
{
    npy_intp count;
    if (am_to_count(object, name, &count) < 0) return -1;
    *threads = count < AM_MAX_THREADS ? (int)count : AM_MAX_THREADS;
    return 0;
}

static PyObject *set_num_threads(PyObject *module, PyObject *n)
{
    int threads;
    if (to_threads(n, "n", &threads) < 0) return NULL;
    atomic_store(&am_state_of(module)->threads, threads);
    Py_RETURN_NONE;
}

static PyObject *config(PyObject *module, PyObject *unused)
{
    (void)unused;
    static const am_openmp none;
    am_state *state = am_state_of(module);
    const am_openmp *openmp = am_openmp_info() ? am_openmp_info() : &none;
    return Py_BuildValue("{s:s, s:s, s:z, s:z, s:z, s:i, s:s, s:N}", "version", AM_VERSION, "compiler",
                         COMPILER, "openmp", openmp->name, "openmp_library", openmp->library, "openmp_spin",
                         openmp->spin, "threads", am_threads(state), "isa",
                         atomic_load(&state->kernels)->name, "isa_available", available_levels());
}

static PyMethodDef runtime_methods[] = {
    {"config", config, METH_NOARGS, "config($module, /)\n--\n\n"},
    {"get_num_threads", get_num_threads, METH_NOARGS, "get_num_threads($module, /)\n--\n\n"},
    {"set_num_threads", set_num_threads, METH_O, "set_num_threads($module, n, /)\n--\n\n"},
    {"use", (PyCFunction)(void *)am_use, METH_VARARGS | METH_KEYWORDS,
     "use($module, main_thread, /, **helpers)\n--\n\n"},
    {"use_isa", use_isa, METH_O, "use_isa($module, name, /)\n--\n\n"},
    {.ml_name = NULL},
};

static const am_kernels *initial_kernels(void)
{
    am_isa_begin();
    const char *wanted = getenv("ATTNMASK_ISA");
    if (wanted && *wanted) return find_kernels("ATTNMASK_ISA", wanted);
    return am_isa_best();
}

static int initial_threads(int *threads)
{
    const char *wanted = getenv("ATTNMASK_NUM_THREADS");
    *threads = 0;
    if (!wanted || !*wanted) return 0;
    am_owned PyObject *text = PyUnicode_FromString(wanted),
                      *number = text ? PyLong_FromString(wanted, NULL, 10) : NULL;
    if (text && !number && PyErr_ExceptionMatches(PyExc_ValueError))
        am_reject(PyExc_ValueError, "ATTNMASK_NUM_THREADS", "a positive integer", text);
    return number ? to_threads(number, "ATTNMASK_NUM_THREADS", threads) : -1;
}

static int module_exec(PyObject *module)
{
    import_array1(-1);
    am_threads_init();
    am_state *state = am_state_of(module);
    const am_kernels *kernels = initial_kernels();
    int threads;
    if (!kernels || initial_threads(&threads) < 0) return -1;
    atomic_init(&state->kernels, kernels);
    atomic_init(&state->threads, threads);
#define METHODS(topic) , am_##topic##_methods
    PyMethodDef *const topics[] = {runtime_methods AM_EACH_TOPIC_OF_METHODS(METHODS)};
    for (size_t i = 0; i < sizeof topics / sizeof *topics; i++) {
        if (PyModule_AddFunctions(module, topics[i]) < 0) return -1;
    }
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* nor does NumPy */
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "attnmask._core",
    .m_doc =
        "The C core. Its functions take every argument by position; the package's own modules document them.",
    .m_size = sizeof(am_state),
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
