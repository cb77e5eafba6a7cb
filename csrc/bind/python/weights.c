/* weights.c – see weights.h. */
#include "bind/python/weights.h"

#include "bind/python/arguments.h"

/* Makes an array for a result if it is among those that are wanted; *made stays NULL if it is not. */
static int new_if_wanted(const am_asked *asked, const char *name, int ndim, npy_intp const *dims, int type,
                         PyArrayObject **made, void *to)
{
    am_owned PyObject *text = PyUnicode_FromString(name);
    const int wanted = text ? PySequence_Contains(asked->wanted, text) : -1;
    if (wanted <= 0) return wanted;
    *made = am_new_array_of(ndim, dims, type);
    if (*made) *(void **)to = PyArray_DATA(*made);
    return *made ? 0 : -1;
}

PyObject *am_weights_of(PyObject *module, am_request *r, const am_asked *asked, am_weigh_call *call,
                        void *arg)
{
    const am_attn *attn = &r->attn;
    if (!PyTuple_Check(asked->wanted)) return PyErr_Format(PyExc_TypeError, "wanted must be a tuple");
    if (asked->top > 0 && attn->q.type != AM_FLOAT64 && attn->keys > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "of: top_keys takes up to 2**31 - 1 keys, got %zd", attn->keys);
    am_attn_weights problem = {.attn = *attn,
                               .finds_lse = !asked->lse,
                               .queries = asked->queries,
                               .count = asked->count,
                               .by_key_head = asked->by_key_head,
                               .rows = asked->count,
                               .sums = asked->keys,
                               .top = asked->top};
    const npy_intp heads = asked->by_key_head ? attn->kv_heads : attn->heads,
                   rows[4] = {attn->batch, attn->heads, asked->count, attn->keys},
                   sums[3] = {asked->sequences, heads, asked->keys},
                   top[4] = {attn->batch, attn->heads, asked->count, asked->top};
    const int wide = attn->q.type == AM_FLOAT64 ? NPY_FLOAT64 : NPY_FLOAT32;
    am_owned PyArrayObject *lse = asked->lse ? am_ref(asked->lse) : am_new_array_of(3, rows, wide);
    if (!lse) return NULL;
    const am_view stats = am_view_of(lse);
    if (stats.axes != 3 || stats.type != (wide == NPY_FLOAT64 ? AM_FLOAT64 : AM_FLOAT32) ||
        memcmp(PyArray_DIMS(lse), rows, 3 * sizeof *rows) != 0)
        return am_raise_refused(r, am_refuse(r, AM_WRONG_VALUE, &stats, "lse must be [B, H, n]")), NULL;
    problem.lse = am_stats_of(&stats);
    PyArrayObject *made[6] = {NULL};
    PyObject *result = NULL;
    if (new_if_wanted(asked, "weights", 4, rows, wide, &made[0], &problem.weights) == 0 &&
        new_if_wanted(asked, "key_sum", 3, sums, wide, &made[1], &problem.key_sum) == 0 &&
        new_if_wanted(asked, "entropy", 3, rows, wide, &made[2], &problem.entropy) == 0 &&
        new_if_wanted(asked, "max_logit", 3, rows, wide, &made[3], &problem.max_logit) == 0 &&
        new_if_wanted(asked, "top_keys", 4, top, NPY_INT64, &made[4], &problem.top_keys) == 0 &&
        new_if_wanted(asked, "top_keys", 4, top, wide, &made[5], &problem.top_weights) == 0 &&
        call(module, arg, &problem)) {
        result = PyTuple_New(6);
        for (int i = 0; result && i < 6; i++)
            PyTuple_SetItem(result, i, Py_NewRef(made[i] ? (PyObject *)made[i] : Py_None));
    }
    for (int i = 0; i < 6; i++) am_release(&made[i]);
    return result;
}
