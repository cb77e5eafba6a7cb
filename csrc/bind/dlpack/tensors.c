/* tensors.c – attention of tensors of a library that has DLPack's table of functions, such as PyTorch. They
 * are read and made without Python's methods, which take longer than a short call, and without that library's
 * headers. */
#include <stdalign.h>

#include "bind/python/arguments.h"
#include "bind/dlpack/dlpack.h"
#include "bind/python/attention.h"
#include "core/runtime/sizes.h"
#include "core/attention/base.h"
#include "core/arrays/convert.h"

static const char TABLE[] = "dlpack_exchange_api"; /* what DLPack calls the capsule */

static am_dtype dtype_of(am_dl_type type)
{
    if (type.lanes != 1) return AM_OTHER;
    if (type.kind == AM_DL_BFLOAT) return type.bits == 16 ? AM_BFLOAT16 : AM_OTHER;
    if (type.kind != AM_DL_FLOAT) return AM_OTHER;
    return type.bits == 64   ? AM_FLOAT64
           : type.bits == 32 ? AM_FLOAT32
           : type.bits == 16 ? AM_FLOAT16
                             : AM_OTHER;
}

/* Of a tensor of four axes. */
static am_view view_of(const am_dl_tensor *t)
{
    static alignas(double) char nothing[1]; /* of empty tensors */
    const am_dtype type = dtype_of(t->type);
    const ptrdiff_t size = type == AM_OTHER ? 1 : (ptrdiff_t)am_size_of(type);
    am_view v = {.data = t->data ? (char *)t->data + t->byte_offset : nothing, .type = type, .axes = 4};
    for (int i = 0; i < 4; i++) v.shape[i] = t->shape[i], v.stride[i] = t->strides[i] * size;
    return v;
}

enum { MODULE, EXCHANGE, OTHER, GRADIENT, NEGATIVE }; /* what the function returned below holds */

/* `answer` is that of a tensor, which this takes: false if it is False. */
static bool unless_false(PyObject *answer)
{
    Py_XDECREF(answer);
    return answer != Py_False;
}

/* Whether a tensor wants a gradient, or its numbers are to be negated when they are read, which the table
 * does not tell; also true, with an exception, if it does not say. */
static bool is_more_than_memory(PyObject *bound, PyObject *object)
{
    return unless_false(PyObject_GetAttr(object, PyTuple_GetItem(bound, GRADIENT))) ||
           unless_false(PyObject_CallMethodObjArgs(object, PyTuple_GetItem(bound, NEGATIVE), NULL));
}

/* False, and maybe with an exception, unless the tensor can be taken as it is. */
static bool look(const am_dl_exchange *exchange, PyObject *object, am_view *v, am_dl_type *type)
{
    am_dl_tensor t;
    if (exchange->look(object, &t) < 0) return false;
    /* Before DLPack 1.2 a compact tensor may have no strides. */
    if (t.device.kind != AM_DL_CPU || t.axes != 4 || !t.strides) return false;
    *v = view_of(&t), *type = t.type;
    const bool empty = !v->shape[0] || !v->shape[1] || !v->shape[2] || !v->shape[3];
    if (!t.data && !empty) return false; /* zeros that PyTorch has no memory of */
    return am_is_floating(v->type) && (uintptr_t)v->data % am_size_of(v->type) == 0;
}

/* --- Results --- */

/* A tensor that is owned from outside, and its memory. */
typedef struct {
    am_dl_managed managed;
    ptrdiff_t bytes; /* of all */
    int64_t shape[4], strides[4];
    alignas(64) char data[];
} result;

static void release(am_dl_managed *managed) { am_free_aligned(managed, ((result *)managed)->bytes); }

/* NULL if there is no memory. */
static result *new_result(const npy_intp shape[4], am_dl_type type)
{
    const ptrdiff_t rows = am_product(shape[0], shape[1], shape[2]),
                    row = am_product(shape[3], type.bits / 8, 1);
    const ptrdiff_t bytes = am_product(rows, row, 1);
    if (rows == PTRDIFF_MAX || bytes > PTRDIFF_MAX - (ptrdiff_t)sizeof(result)) return NULL;
    result *r = am_alloc_aligned((ptrdiff_t)sizeof *r + bytes);
    if (!r) return NULL;
    r->bytes = (ptrdiff_t)sizeof *r + bytes;
    r->managed = (am_dl_managed){
        .version = {AM_DL_MAJOR, AM_DL_MINOR},
        .release = release,
        .tensor = {.data = r->data,
                   .device = {AM_DL_CPU, 0},
                   .axes = 4,
                   .type = type,
                   .shape = r->shape,
                   .strides = r->strides},
    };
    for (int i = 3; i >= 0; i--) {
        r->shape[i] = shape[i];
        r->strides[i] = i == 3 ? 1 : am_product(r->strides[i + 1], am_max(r->shape[i + 1], 1), 1);
    }
    return r;
}

/* --- Calls --- */

enum { QUERY, KEY, VALUE, CAUSAL, OFFSET, SCALE, OPERANDS };

/* What is read of a call. */
typedef struct {
    am_request request;
    am_dl_type type;
    bool causal;
    npy_intp diagonal;
} call;

static bool read_call(const am_dl_exchange *exchange, PyObject *bound, PyObject *const *args,
                      Py_ssize_t nargs, call *c)
{
    am_view v[3];
    am_attn *attn = &c->request.attn;
    if (nargs != OPERANDS || (args[CAUSAL] != Py_True && args[CAUSAL] != Py_False)) return false;
    for (int i = 0; i < 3; i++) { /* before any pointer is read: this may run code of a subclass */
        if (is_more_than_memory(bound, args[i])) return false;
    }
    /* From here on no Python code runs: the table's functions read a tensor's fields, and the rest of the
     * arguments must be plain numbers. */
    for (int i = 0; i < 3; i++) {
        if (!look(exchange, args[i], &v[i], &c->type)) return false;
    }
    c->causal = args[CAUSAL] == Py_True;
    attn->normalize = true;
    return am_read_inputs(&c->request, &v[QUERY], &v[KEY], &v[VALUE]) && !am_heads_seem_first(attn) &&
           am_usual_diagonal(args[OFFSET] == Py_None ? NULL : args[OFFSET], c->causal, attn, &c->diagonal) &&
           am_usual_scale(args[SCALE], attn->head_dim, &attn->scale);
}

static bool compute(PyObject *module, call *c, result *r)
{
    const ptrdiff_t low = -AM_FAR, high = c->diagonal;
    const am_view out = view_of(&r->managed.tensor);
    am_attn *attn = &c->request.attn;
    am_node node = {.kind = AM_TERM_ALL};
    if (c->causal) node = (am_node){.kind = AM_TERM_BAND, .band = {&low, &high, 0, 0}};
    attn->mask->nodes = &node, attn->mask->node_count = 1;
    attn->out = am_tokens_of(&out);
    const bool done = am_computed(module, am_attn_work(attn), am_attn_forward, attn);
    am_request_free(&c->request);
    return done;
}

static PyObject *attend(PyObject *bound, PyObject *const *args, Py_ssize_t nargs)
{
    const am_dl_exchange *exchange = PyCapsule_GetPointer(PyTuple_GetItem(bound, EXCHANGE), TABLE);
    call c = {0};
    if (!exchange) return NULL;
    if (!read_call(exchange, bound, args, nargs, &c)) {
        PyErr_Clear(); /* the other function says what is wrong */
        am_owned PyObject *all = PyTuple_New(nargs);
        for (Py_ssize_t i = 0; all && i < nargs; i++) PyTuple_SetItem(all, i, Py_NewRef(args[i]));
        return all ? PyObject_CallObject(PyTuple_GetItem(bound, OTHER), all) : NULL;
    }
    const am_attn *attn = &c.request.attn;
    result *r = new_result((npy_intp[]){attn->batch, attn->queries, attn->heads, attn->value_dim}, c.type);
    void *tensor = NULL;
    if (!r) return PyErr_NoMemory();
    if (compute(PyTuple_GetItem(bound, MODULE), &c, r))
        return exchange->to_object(&r->managed, &tensor) < 0 ? NULL : tensor;
    release(&r->managed);
    return NULL;
}

static PyMethodDef attend_method = {"attend", (PyCFunction)(void *)attend, METH_FASTCALL, NULL};

typedef struct {
    PyObject *exchange, *other; /* borrowed */
} arguments;

/* The other function itself if there is no table, or one of a version that is not known. */
static PyObject *bind(PyObject *module, const arguments *a)
{
    if (!PyCapsule_IsValid(a->exchange, TABLE)) return Py_NewRef(a->other);
    const am_dl_exchange *exchange = PyCapsule_GetPointer(a->exchange, TABLE);
    if (exchange->version.major != AM_DL_MAJOR || !exchange->look) return Py_NewRef(a->other);
    am_owned PyObject *bound =
        Py_BuildValue("OOONN", module, a->exchange, a->other, PyUnicode_InternFromString("requires_grad"),
                      PyUnicode_InternFromString("is_neg"));
    return bound ? PyCFunction_New(&attend_method, bound) : NULL;
}
AM_FUNCTION(tensor_attention, bind(module, a), AM_ARG(exchange, am_to_object), AM_ARG(other, am_to_object))

/* --- Properties for PyTorch's compiler --- */

static PyObject *call_one(PyObject *function, PyObject *object)
{
    return PyObject_CallFunctionObjArgs(function, object, NULL);
}

static PyMethodDef call_method = {"call", call_one, METH_O, NULL};

static PyObject *built_in(PyObject *module, PyObject *function)
{
    (void)module;
    return PyCFunction_New(&call_method, function);
}

PyMethodDef am_tensors_methods[] = {
    {"built_in", built_in, METH_O,
     "built_in($module, function, /)\n--\n\n"
     "A built-in function of one argument that calls `function`. torch.compile reads a property of such, "
     "each\n"
     "time that it looks whether a graph does for a call, and does not look into it."},
    AM_METHOD(tensor_attention, "exchange, other",
              "A function (query, key, value, causal, offset, scale) of tensors, by the table `exchange` "
              "that DLPack\nhas their class offer. It calls `other` where anything is unusual, or wrong; "
              "without a table it is `other`."),
    {.ml_name = NULL},
};
