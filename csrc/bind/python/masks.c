/* masks.c – bindings of masks. A mask comes as its shape and a tuple of terms and operators in postfix order:
 *
 *     (batch, heads, queries, keys),
 *     (("equal", q_ids, k_ids, False), ("band", None, 0, 0), "and")
 *
 * The result of mask_prepare for another mask of the same shape may take the place of a term. That mask is
 * not read again, and its summaries are used again.
 */
#include "bind/python/masks.h"

#include "bind/python/arguments.h"
#include "bind/python/mask_arrays.h"
#include "core/runtime/sizes.h"

/* Adds memory or an object to the list that is released with the mask; NULL with the exception set. */
static void *keep(am_mask_arg *arg, void *memory, PyObject *object)
{
    am_kept *kept = am_new(am_kept, 1);
    if (!kept) {
        free(memory);
        Py_XDECREF(object);
        PyErr_NoMemory();
        return NULL;
    }
    *kept = (am_kept){arg->kept, memory, object};
    arg->kept = kept;
    return memory ? memory : object;
}

void am_free_mask(am_mask_arg *arg)
{
    if (arg->mask.nodes) am_mask_release(&arg->mask);
    free(arg->mask.nodes);
    arg->mask.nodes = NULL;
    while (arg->kept) {
        am_kept *next = arg->kept->next;
        free(arg->kept->memory);
        Py_XDECREF(arg->kept->object);
        free(arg->kept);
        arg->kept = next;
    }
}

static int reject(const char *what)
{
    PyErr_Format(PyExc_ValueError, "nodes: %s", what);
    return -1;
}

static ptrdiff_t saturated(int64_t a, int64_t b)
{
    int64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) sum = a < 0 ? -AM_FAR : AM_FAR;
    return sum > AM_FAR ? AM_FAR : sum < -AM_FAR ? -AM_FAR : (ptrdiff_t)sum;
}

/* Converts an integer, or an array of one for each batch row, to ptrdiff_t within ±AM_FAR. */
static ptrdiff_t *per_batch(am_mask_arg *arg, PyObject *object)
{
    ptrdiff_t batch = arg->mask.batch, *values = am_new(ptrdiff_t, batch + 1);
    if (!values) {
        PyErr_NoMemory();
        return NULL;
    }
    if (!keep(arg, values, NULL)) return NULL;
    PyArrayObject *array = (PyArrayObject *)PyArray_FROM_OTF(object, NPY_INT64, NPY_ARRAY_CARRAY_RO);
    if (!array) return NULL;
    npy_intp count = PyArray_SIZE(array);
    if (PyArray_NDIM(array) > 1 || (PyArray_NDIM(array) == 1 && count != batch)) {
        reject("a number for each batch row must be one integer or an array [batch]");
        Py_DECREF(array);
        return NULL;
    }
    const int64_t *data = PyArray_DATA(array);
    for (ptrdiff_t b = 0; b < batch; b++) values[b] = saturated(data[PyArray_NDIM(array) ? b : 0], 0);
    Py_DECREF(array);
    return values;
}

static int check_shifts(const am_mask_arg *arg, const ptrdiff_t *shift, ptrdiff_t slack)
{
    for (ptrdiff_t b = 0; b < arg->mask.batch; b++) {
        if (shift[b] < 0 || shift[b] > slack) return reject("a shift leads out of the array");
    }
    return 0;
}

static int read_chunk(am_mask_arg *arg, am_node *node, PyObject *term)
{
    npy_intp size;
    node->kind = AM_TERM_CHUNK;
    if (am_to_count(PyTuple_GET_ITEM(term, 1), "chunk size", &size) < 0) return -1;
    node->chunk.size = size;
    node->chunk.q_shift = per_batch(arg, PyTuple_GET_ITEM(term, 2));
    node->chunk.k_shift = node->chunk.q_shift ? per_batch(arg, PyTuple_GET_ITEM(term, 3)) : NULL;
    if (!node->chunk.k_shift) return -1;
    return check_shifts(arg, node->chunk.q_shift, AM_FAR) < 0
               ? -1
               : check_shifts(arg, node->chunk.k_shift, AM_FAR);
}

static int read_keys(am_mask_arg *arg, am_node *node, PyObject *term)
{
    node->kind = AM_TERM_KEYS;
    node->keys.begin = per_batch(arg, PyTuple_GET_ITEM(term, 1));
    node->keys.end = node->keys.begin ? per_batch(arg, PyTuple_GET_ITEM(term, 2)) : NULL;
    return node->keys.end ? 0 : -1;
}

/* Ids, or other numbers of tokens, are [batch, tokens] or [batch, heads, tokens], where batch and heads may
 * be 1. They are copied, since other threads may write to the caller's: groups and tiles are found from them
 * and later looked for again. */
static const int32_t *read_ids(am_mask_arg *arg, PyObject *object, ptrdiff_t tokens, ptrdiff_t *batch,
                               ptrdiff_t *head)
{
    PyArrayObject *ids =
        (PyArrayObject *)PyArray_FROM_OTF(object, NPY_INT32, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_ENSURECOPY);
    if (!ids || !keep(arg, NULL, (PyObject *)ids)) return NULL;
    int ndim = PyArray_NDIM(ids);
    npy_intp rows = ndim ? PyArray_DIM(ids, 0) : 0, heads = ndim == 3 ? PyArray_DIM(ids, 1) : 1;
    if ((ndim != 2 && ndim != 3) || PyArray_DIM(ids, ndim - 1) != tokens ||
        (rows != 1 && rows != arg->mask.batch) || (heads != 1 && heads != arg->mask.heads)) {
        reject("ids must be [batch, tokens] or [batch, heads, tokens]");
        return NULL;
    }
    *batch = rows == 1 ? 0 : heads * tokens;
    *head = heads == 1 ? 0 : tokens;
    return PyArray_DATA(ids);
}

static int read_equal(am_mask_arg *arg, am_node *node, PyObject *term)
{
    node->kind = AM_TERM_EQUAL;
    node->equal.q_ids = read_ids(arg, PyTuple_GET_ITEM(term, 1), arg->mask.queries, &node->equal.q_batch,
                                 &node->equal.q_head);
    if (!node->equal.q_ids) return -1;
    node->equal.k_ids =
        read_ids(arg, PyTuple_GET_ITEM(term, 2), arg->mask.keys, &node->equal.k_batch, &node->equal.k_head);
    if (!node->equal.k_ids) return -1;
    bool exclude_zero;
    if (am_to_bool(PyTuple_GET_ITEM(term, 3), "exclude_zero", &exclude_zero) < 0) return -1;
    node->equal.exclude_zero = exclude_zero;
    return 0;
}

/* Converts integers [count] to ptrdiff_t within ±AM_FAR. None becomes `none` everywhere. */
static const ptrdiff_t *read_integers(am_mask_arg *arg, PyObject *object, ptrdiff_t count, ptrdiff_t none)
{
    ptrdiff_t *values = am_new(ptrdiff_t, count + 1);
    if (!values) {
        PyErr_NoMemory();
        return NULL;
    }
    if (!keep(arg, values, NULL)) return NULL;
    for (ptrdiff_t i = 0; i < count; i++) values[i] = none;
    if (object == Py_None) return values;
    PyArrayObject *array = (PyArrayObject *)PyArray_FROM_OTF(object, NPY_INT64, NPY_ARRAY_CARRAY_RO);
    if (!array) return NULL;
    bool fits = PyArray_NDIM(array) == 1 && PyArray_DIM(array, 0) == count;
    const int64_t *data = PyArray_DATA(array);
    for (ptrdiff_t i = 0; fits && i < count; i++) values[i] = saturated(data[i], 0);
    Py_DECREF(array);
    if (!fits) reject("numbers of sequences or of heads must be an array, one for each");
    return fits ? values : NULL;
}

/* A bound of a band, an integer or an array of one for each head, plus the offset of each batch row. None
 * becomes `none` everywhere. */
static const ptrdiff_t *read_bound(am_mask_arg *arg, PyObject *bound, ptrdiff_t none, ptrdiff_t heads,
                                   const ptrdiff_t *offset)
{
    const ptrdiff_t batch = arg->mask.batch;
    const ptrdiff_t *by_head = NULL;
    Py_ssize_t shared = 0;
    if (PyArray_Check(bound)) {
        by_head = read_integers(arg, bound, heads, none);
        if (!by_head) return NULL;
    } else if (bound != Py_None) {
        shared = PyNumber_AsSsize_t(bound, NULL);
        if (shared == -1 && PyErr_Occurred()) return NULL;
    }
    ptrdiff_t *values = am_new(ptrdiff_t, am_product(batch, heads, 1));
    if (!values) {
        PyErr_NoMemory();
        return NULL;
    }
    if (!keep(arg, values, NULL)) return NULL;
    for (ptrdiff_t i = 0; i < batch * heads; i++)
        values[i] =
            bound == Py_None ? none : saturated(by_head ? by_head[i % heads] : shared, offset[i / heads]);
    return values;
}

/* low, high and an offset of each batch row that is added to both. */
static int read_band(am_mask_arg *arg, am_node *node, PyObject *term)
{
    PyObject *low = PyTuple_GET_ITEM(term, 1), *high = PyTuple_GET_ITEM(term, 2);
    const bool by_head = PyArray_Check(low) || PyArray_Check(high);
    const ptrdiff_t heads = by_head ? arg->mask.heads : 1;
    const ptrdiff_t *offset = per_batch(arg, PyTuple_GET_ITEM(term, 3));
    if (!offset) return -1;
    node->kind = AM_TERM_BAND;
    node->band.batch = heads, node->band.head = by_head;
    node->band.low = read_bound(arg, low, -AM_FAR, heads, offset);
    if (!node->band.low) return -1;
    node->band.high = read_bound(arg, high, AM_FAR, heads, offset);
    return node->band.high ? 0 : -1;
}

/* A band, and where its diagonal is for each query. */
static int read_diagonal(am_mask_arg *arg, am_node *node, PyObject *term)
{
    if (read_band(arg, node, term) < 0) return -1;
    node->kind = AM_TERM_DIAGONAL;
    node->diagonal.at = read_ids(arg, PyTuple_GET_ITEM(term, 4), arg->mask.queries, &node->diagonal.at_batch,
                                 &node->diagonal.at_head);
    return node->diagonal.at ? 0 : -1;
}

static int check_starts(const ptrdiff_t *starts, ptrdiff_t count, ptrdiff_t length)
{
    bool fits = starts[0] == 0 && starts[count] == length;
    for (ptrdiff_t i = 0; i < count; i++) fits &= starts[i] <= starts[i + 1];
    return fits ? 0 : reject("sequences must lead from 0 to the last token, and never back");
}

static int read_sequences(am_mask_arg *arg, am_node *node, PyObject *term)
{
    PyObject *starts = PyTuple_GET_ITEM(term, 1);
    node->kind = AM_TERM_SEQUENCES;
    Py_ssize_t entries = PyObject_Length(starts);
    if (entries < 1) return entries < 0 ? -1 : reject("sequences must begin somewhere");
    ptrdiff_t count = node->sequences.count = entries - 1;
    node->sequences.q_starts = read_integers(arg, starts, entries, 0);
    if (!node->sequences.q_starts) return -1;
    node->sequences.k_starts = read_integers(arg, PyTuple_GET_ITEM(term, 2), entries, 0);
    if (!node->sequences.k_starts) return -1;
    if (check_starts(node->sequences.q_starts, count, arg->mask.queries) < 0) return -1;
    if (check_starts(node->sequences.k_starts, count, arg->mask.keys) < 0) return -1;
    node->sequences.low = read_integers(arg, PyTuple_GET_ITEM(term, 3), count, -AM_FAR);
    if (!node->sequences.low) return -1;
    node->sequences.high = read_integers(arg, PyTuple_GET_ITEM(term, 4), count, AM_FAR);
    return node->sequences.high ? 0 : -1;
}

static int read_dense(am_mask_arg *arg, am_node *node, PyObject *term)
{
    PyArrayObject *array = NULL;
    node->kind = AM_TERM_DENSE;
    if (am_to_array(PyTuple_GET_ITEM(term, 1), "attention_mask", &array) < 0) return -1;
    if (!keep(arg, NULL, (PyObject *)array)) return -1;
    node->dense.q_shift = per_batch(arg, PyTuple_GET_ITEM(term, 2));
    node->dense.k_shift = node->dense.q_shift ? per_batch(arg, PyTuple_GET_ITEM(term, 3)) : NULL;
    if (!node->dense.k_shift) return -1;
    const am_mask *mask = &arg->mask;
    if (PyArray_NDIM(array) != 4) return reject("a dense array must have four axes");
    const ptrdiff_t expected[4] = {mask->batch, mask->heads, mask->queries, mask->keys};
    ptrdiff_t strides[4];
    for (int i = 0; i < 4; i++) {
        npy_intp length = PyArray_DIM(array, i);
        bool fits = length == 1 || (i < 2 ? length == expected[i] : length >= expected[i]);
        if (!fits) return reject("a dense array must broadcast to the mask's shape");
        strides[i] = length <= 1 ? 0 : PyArray_STRIDE(array, i); /* an empty axis has no elements */
        if (i == 2 && length > 1 && check_shifts(arg, node->dense.q_shift, length - expected[i]) < 0)
            return -1;
        if (i == 3 && length > 1 && check_shifts(arg, node->dense.k_shift, length - expected[i]) < 0)
            return -1;
    }
    node->dense.data = PyArray_BYTES(array);
    node->dense.type = am_dtype_of(PyArray_DESCR(array));
    node->dense.batch = strides[0], node->dense.head = strides[1];
    node->dense.row = strides[2], node->dense.column = strides[3];
    return 0;
}

/* places, q_size, k_size, bits, q_shift and k_shift. */
static int read_tiles(am_mask_arg *arg, am_node *node, PyObject *term)
{
    const am_mask *mask = &arg->mask;
    npy_intp q_size, k_size;
    node->kind = AM_TERM_TILES;
    PyArrayObject *places =
        (PyArrayObject *)PyArray_FROM_OTF(PyTuple_GET_ITEM(term, 1), NPY_INT32, NPY_ARRAY_CARRAY_RO);
    if (!places || !keep(arg, NULL, (PyObject *)places)) return -1;
    if (am_to_count(PyTuple_GET_ITEM(term, 2), "tile size", &q_size) < 0) return -1;
    if (am_to_count(PyTuple_GET_ITEM(term, 3), "tile size", &k_size) < 0) return -1;
    PyArrayObject *bits =
        (PyArrayObject *)PyArray_FROM_OTF(PyTuple_GET_ITEM(term, 4), NPY_UINT8, NPY_ARRAY_CARRAY_RO);
    if (!bits || !keep(arg, NULL, (PyObject *)bits)) return -1;
    node->tiles.q_shift = per_batch(arg, PyTuple_GET_ITEM(term, 5));
    node->tiles.k_shift = node->tiles.q_shift ? per_batch(arg, PyTuple_GET_ITEM(term, 6)) : NULL;
    if (!node->tiles.k_shift) return -1;
    if (PyArray_NDIM(places) != 4 || PyArray_NDIM(bits) != 3 || PyArray_DIM(bits, 1) != AM_TILE_ROWS ||
        PyArray_DIM(bits, 2) != AM_TILE_COLUMNS / 8)
        return reject("tiles must be places of four axes, and bits of 64 × 8 bytes");
    node->tiles.places = PyArray_DATA(places);
    node->tiles.bits = PyArray_DIM(bits, 0) ? PyArray_DATA(bits) : NULL;
    node->tiles.q_size = q_size, node->tiles.k_size = k_size;
    return am_mask_set_tiles(mask, node, PyArray_DIMS(places), PyArray_DIM(bits, 0))
               ? 0
               : reject("tiles must cover the mask, and have bits where they are mixed");
}

typedef int read_term(am_mask_arg *arg, am_node *node, PyObject *term);
static const struct {
    const char *name;
    Py_ssize_t size;
    read_term *read;
} terms[] = {
    {"band", 4, read_band},   {"chunk", 4, read_chunk},       {"keys", 3, read_keys},
    {"equal", 4, read_equal}, {"dense", 4, read_dense},       {"sequences", 5, read_sequences},
    {"tiles", 7, read_tiles}, {"diagonal", 5, read_diagonal},
};
static const struct {
    const char *name;
    am_node_kind kind;
    int operands;
} operators[] = {{"not", AM_NOT, 1}, {"and", AM_AND, 2}, {"or", AM_OR, 2}, {"xor", AM_XOR, 2}};

/* Reads one node when the stack has `depth` operands. Returns the number of operands after it, or -1 with the
 * exception set. */
static int read_node(am_mask_arg *arg, am_node *node, PyObject *object, int depth)
{
    if (PyUnicode_Check(object)) {
        for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
            if (PyUnicode_CompareWithASCIIString(object, operators[i].name) != 0) continue;
            if (depth < operators[i].operands) return reject("an operator lacks operands");
            node->kind = operators[i].kind;
            return depth - operators[i].operands + 1;
        }
        return reject("unknown operator");
    }
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) < 1) return reject("a term must be a tuple");
    if (depth == AM_MASK_DEPTH) return reject("too many operands wait at once");
    PyObject *name = PyTuple_GET_ITEM(object, 0);
    if (!PyUnicode_Check(name)) return reject("a term must begin with its name");
    if (PyUnicode_CompareWithASCIIString(name, "all") == 0) {
        node->kind = AM_TERM_ALL;
        return depth + 1;
    }
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++) {
        if (PyUnicode_CompareWithASCIIString(name, terms[i].name) != 0) continue;
        if (PyTuple_GET_SIZE(object) != terms[i].size) return reject("a term has too many or too few parts");
        return terms[i].read(arg, node, object) < 0 ? -1 : depth + 1;
    }
    return reject("unknown term");
}

static int to_shape(PyObject *object, const char *name, void *dst)
{
    am_mask *mask = dst;
    ptrdiff_t *const lengths[4] = {&mask->batch, &mask->heads, &mask->queries, &mask->keys};
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 4)
        return am_reject(PyExc_TypeError, name, "a tuple of four integers", object);
    for (int i = 0; i < 4; i++) {
        Py_ssize_t length = PyNumber_AsSsize_t(PyTuple_GET_ITEM(object, i), NULL);
        if (length == -1 && PyErr_Occurred()) return -1;
        if (length < 0 || length > AM_LONGEST)
            return am_reject(PyExc_ValueError, name, "from 0 to 2**56 along each axis", object);
        *lengths[i] = length;
    }
    return 0;
}

/* --- Prepared masks --- */

static const char PREPARED[] = "attnmask.mask";

/* Copies the nodes of a prepared mask to this one. Takes and returns a depth like read_node. */
static int copy_nodes(am_mask_arg *arg, am_node *nodes, PyObject *capsule, int depth)
{
    const am_mask_arg *prepared = PyCapsule_GetPointer(capsule, PREPARED);
    if (!prepared || !keep(arg, NULL, Py_NewRef(capsule))) return -1;
    const am_mask *own = &arg->mask, *other = &prepared->mask;
    if (own->batch != other->batch || own->heads != other->heads || own->queries != other->queries ||
        own->keys != other->keys)
        return reject("a prepared mask must have the mask's shape");
    int most_depth = 0, own_depth = 0;
    for (ptrdiff_t i = 0; i < other->node_count; i++) {
        nodes[i] = other->nodes[i];
        nodes[i].borrowed = true;
        own_depth += nodes[i].kind < AM_TERM_KINDS ? 1 : nodes[i].kind == AM_NOT ? 0 : -1;
        most_depth = own_depth > most_depth ? own_depth : most_depth;
    }
    arg->mask.node_count += other->node_count;
    return depth + most_depth > AM_MASK_DEPTH ? reject("too many operands wait at once") : depth + 1;
}

/* The number of nodes that an object stands for. */
static ptrdiff_t count_nodes(PyObject *object)
{
    if (!PyCapsule_IsValid(object, PREPARED)) return 1;
    const am_mask_arg *prepared = PyCapsule_GetPointer(object, PREPARED);
    return prepared->mask.node_count;
}

int am_read_nodes_and(am_mask_arg *arg, PyObject *nodes, const am_node *more, int more_count)
{
    const am_mask *mask = &arg->mask;
    const ptrdiff_t lengths[4] = {mask->batch, mask->heads, mask->queries, mask->keys};
    for (int i = 0; i < 4; i++) {
        if (lengths[i] <= AM_LONGEST) continue;
        PyErr_Format(PyExc_ValueError, "shape must be from 0 to 2**56 along each axis, got %zd", lengths[i]);
        return -1;
    }
    if (nodes && !PyTuple_Check(nodes)) return am_reject(PyExc_TypeError, "nodes", "a tuple", nodes);
    const Py_ssize_t count = nodes ? PyTuple_GET_SIZE(nodes) : 0;
    ptrdiff_t capacity = 1 + 2 * more_count;
    for (Py_ssize_t i = 0; i < count; i++) capacity += count_nodes(PyTuple_GET_ITEM(nodes, i));
    arg->mask.nodes = am_new(am_node, capacity);
    if (!arg->mask.nodes) {
        PyErr_NoMemory();
        return -1;
    }
    int depth = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PyTuple_GET_ITEM(nodes, i);
        am_node *next = &arg->mask.nodes[arg->mask.node_count];
        if (PyCapsule_IsValid(object, PREPARED)) {
            depth = copy_nodes(arg, next, object, depth);
            if (depth < 0) return -1;
            continue;
        }
        depth = read_node(arg, next, object, depth);
        if (depth < 0) return -1;
        arg->mask.node_count++;
    }
    if (nodes && depth != 1) return reject("an expression must come to one mask");
    am_node *next = &arg->mask.nodes[arg->mask.node_count];
    for (int i = 0; i < more_count; i++) {
        *next++ = more[i];
        if (nodes || i > 0) *next++ = (am_node){.kind = AM_AND};
    }
    if (!nodes && more_count == 0) *next++ = (am_node){.kind = AM_TERM_ALL};
    arg->mask.node_count = next - arg->mask.nodes;
    return 0;
}

int am_read_nodes(am_mask_arg *arg, PyObject *nodes) { return am_read_nodes_and(arg, nodes, NULL, 0); }

static int read_mask(am_mask_arg *arg, PyObject *shape, PyObject *nodes)
{
    return to_shape(shape, "shape", &arg->mask) < 0 ? -1 : am_read_nodes(arg, nodes);
}

int am_check_apart_from_mask(PyArrayObject *out, const am_mask_arg *mask, const char *name)
{
    for (const am_kept *kept = mask->kept; kept; kept = kept->next) {
        PyObject *object = kept->object;
        int bad = 0;
        if (object && PyArray_Check(object))
            bad = am_check_apart(out, "out", (PyArrayObject *)object, name);
        else if (object && PyCapsule_IsValid(object, PREPARED))
            bad = am_check_apart_from_mask(out, PyCapsule_GetPointer(object, PREPARED), name);
        if (bad) return -1;
    }
    return 0;
}

/* --- Methods --- */

/* Releases the GIL and prepares the mask. Call am_leave afterwards in any case. */
static am_status enter(am_call *call, PyObject *module, am_mask_arg *arg)
{
    /* The number of pairs to compute is not known before, so the call always counts as large. */
    am_enter(call, module, NPY_MAX_INTP);
    return am_mask_prepare(&call->context, &arg->mask);
}

static int check_out(PyArrayObject *out, npy_intp const *dims, PyArray_Descr *dtype, const am_mask_arg *mask)
{
    if (am_check_out(out, "out", 4, dims, dtype, NULL, NULL, 0) < 0) return -1;
    return am_check_apart_from_mask(out, mask, "the mask's arrays");
}

static PyObject *mask_fill(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_mask_arg mask = {0};
    PyObject *shape, *nodes, *live, *dead, *result = NULL;
    PyArray_Descr *dtype = NULL;
    PyArrayObject *out = NULL;
    am_out given = {0};
    const am_param params[] = {
        {"shape", am_to_object, &shape}, {"nodes", am_to_object, &nodes}, {"dtype", am_to_dtype, &dtype},
        {"live", am_to_object, &live},   {"dead", am_to_object, &dead},   {"out", am_to_out, &given},
    };
    if (am_parse("mask_fill", args, nargs, params, 6) < 0) goto fail;
    if (read_mask(&mask, shape, nodes) < 0) goto fail;
    npy_intp const dims[4] = {mask.mask.batch, mask.mask.heads, mask.mask.queries, mask.mask.keys};
    am_mask_target target = {.size = dtype ? PyDataType_ELSIZE(dtype) : 0};
    if (!dtype) {
        PyErr_SetString(PyExc_TypeError, "dtype must be a dtype, got None");
        goto fail;
    }
    if (am_bytes_of(live, dtype, &target.live) < 0 || am_bytes_of(dead, dtype, &target.dead) < 0) goto fail;
    if (given.given && check_out(given.array, dims, dtype, &mask) < 0) goto fail;
    out = am_target(&given, 4, dims, dtype);
    if (!out) goto fail;
    target.data = PyArray_BYTES(out);
    target.batch = PyArray_STRIDE(out, 0), target.head = PyArray_STRIDE(out, 1);
    target.row = PyArray_STRIDE(out, 2), target.column = PyArray_STRIDE(out, 3);
    am_call call;
    am_status status = enter(&call, module, &mask);
    if (status == AM_OK) status = am_mask_fill(&call.context, &mask.mask, &target);
    am_leave(&call);
    if (status == AM_OK)
        result = am_returned(&given, (PyArrayObject *)Py_NewRef(out));
    else
        am_raise(status, NULL);
fail:
    am_free_mask(&mask);
    Py_XDECREF(out);
    Py_XDECREF(given.array);
    Py_XDECREF(dtype);
    return result;
}

static PyObject *mask_count(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_mask_arg mask = {0};
    PyObject *shape, *nodes;
    PyArrayObject *counts = NULL;
    const am_param params[] = {{"shape", am_to_object, &shape}, {"nodes", am_to_object, &nodes}};
    if (am_parse("mask_count", args, nargs, params, 2) < 0 || read_mask(&mask, shape, nodes) < 0) goto fail;
    npy_intp const dims[2] = {mask.mask.batch, mask.mask.heads};
    counts = am_new_array_of(2, dims, NPY_INT64);
    if (!counts) goto fail;
    am_call call;
    am_status status = enter(&call, module, &mask);
    if (status == AM_OK) status = am_mask_count(&call.context, &mask.mask, PyArray_DATA(counts));
    am_leave(&call);
    if (status != AM_OK) {
        am_raise(status, NULL);
        Py_CLEAR(counts);
    }
fail:
    am_free_mask(&mask);
    return (PyObject *)counts;
}

static PyObject *mask_any(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_mask_arg mask = {0};
    PyObject *shape, *nodes, *result = NULL;
    PyArrayObject *queries = NULL, *keys = NULL;
    const am_param params[] = {{"shape", am_to_object, &shape}, {"nodes", am_to_object, &nodes}};
    if (am_parse("mask_any", args, nargs, params, 2) < 0 || read_mask(&mask, shape, nodes) < 0) goto fail;
    npy_intp const q_dims[3] = {mask.mask.batch, mask.mask.heads, mask.mask.queries};
    npy_intp const k_dims[3] = {mask.mask.batch, mask.mask.heads, mask.mask.keys};
    queries = am_new_array_of(3, q_dims, NPY_BOOL);
    keys = queries ? am_new_array_of(3, k_dims, NPY_BOOL) : NULL;
    if (!keys) goto fail;
    am_call call;
    am_status status = enter(&call, module, &mask);
    if (status == AM_OK)
        status = am_mask_any(&call.context, &mask.mask, PyArray_DATA(queries), PyArray_DATA(keys));
    am_leave(&call);
    if (status == AM_OK)
        result = PyTuple_Pack(2, queries, keys);
    else
        am_raise(status, NULL);
fail:
    am_free_mask(&mask);
    Py_XDECREF(queries);
    Py_XDECREF(keys);
    return result;
}

/* Converts an index of the batch, or of the heads. */
static int to_index(PyObject *object, const char *name, ptrdiff_t count, ptrdiff_t *result)
{
    Py_ssize_t index = PyNumber_AsSsize_t(object, PyExc_IndexError);
    if (index == -1 && PyErr_Occurred()) return -1;
    if (index < 0 || index >= count) {
        PyErr_Format(PyExc_IndexError, "%s must be from 0 to %zd, got %zd", name, count - 1, index);
        return -1;
    }
    *result = index;
    return 0;
}

static PyObject *mask_grid(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    am_mask_arg mask = {0};
    PyObject *shape, *nodes, *batch, *head;
    PyArrayObject *counts = NULL;
    npy_intp q_cell, k_cell;
    ptrdiff_t b, h;
    const am_param params[] = {
        {"shape", am_to_object, &shape}, {"nodes", am_to_object, &nodes},  {"batch", am_to_object, &batch},
        {"head", am_to_object, &head},   {"q_cell", am_to_count, &q_cell}, {"k_cell", am_to_count, &k_cell},
    };
    if (am_parse("mask_grid", args, nargs, params, 6) < 0 || read_mask(&mask, shape, nodes) < 0) goto fail;
    if (to_index(batch, "batch", mask.mask.batch, &b) < 0 || to_index(head, "head", mask.mask.heads, &h) < 0)
        goto fail;
    npy_intp q = mask.mask.queries, k = mask.mask.keys;
    q_cell = q_cell < q ? q_cell : q + (q == 0), k_cell = k_cell < k ? k_cell : k + (k == 0);
    npy_intp const dims[2] = {(q + q_cell - 1) / q_cell, (k + k_cell - 1) / k_cell};
    counts = am_new_array_of(2, dims, NPY_INT64);
    if (!counts) goto fail;
    am_call call;
    am_status status = enter(&call, module, &mask);
    if (status == AM_OK)
        status = am_mask_grid(&call.context, &mask.mask, b, h, q_cell, k_cell, PyArray_DATA(counts));
    am_leave(&call);
    if (status != AM_OK) {
        am_raise(status, NULL);
        Py_CLEAR(counts);
    }
fail:
    am_free_mask(&mask);
    return (PyObject *)counts;
}

static void free_prepared(PyObject *capsule)
{
    am_mask_arg *prepared = PyCapsule_GetPointer(capsule, PREPARED);
    am_free_mask(prepared);
    free(prepared);
}

static PyObject *mask_prepare(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *shape, *nodes, *result = NULL;
    am_mask_arg *mask = am_new(am_mask_arg, 1);
    if (!mask) return PyErr_NoMemory();
    const am_param params[] = {{"shape", am_to_object, &shape}, {"nodes", am_to_object, &nodes}};
    if (am_parse("mask_prepare", args, nargs, params, 2) < 0 || read_mask(mask, shape, nodes) < 0) goto fail;
    am_call call;
    am_status status = enter(&call, module, mask);
    am_leave(&call);
    if (status == AM_OK)
        result = PyCapsule_New(mask, PREPARED, free_prepared);
    else
        am_raise(status, NULL);
fail:
    if (!result) {
        am_free_mask(mask);
        free(mask);
    }
    return result;
}

PyMethodDef am_mask_methods[] = {
    {"mask_prepare", (PyCFunction)(void *)mask_prepare, METH_FASTCALL,
     "mask_prepare($module, shape, nodes, /)\n--\n\nReads a mask once, so that it can be a term of other "
     "masks "
     "of the same shape."},
    {"mask_fill", (PyCFunction)(void *)mask_fill, METH_FASTCALL,
     "mask_fill($module, shape, nodes, dtype, live, dead, out, /)\n--\n\n"},
    {"mask_count", (PyCFunction)(void *)mask_count, METH_FASTCALL,
     "mask_count($module, shape, nodes, /)\n--\n\n"},
    {"mask_any", (PyCFunction)(void *)mask_any, METH_FASTCALL, "mask_any($module, shape, nodes, /)\n--\n\n"},
    {"mask_grid", (PyCFunction)(void *)mask_grid, METH_FASTCALL,
     "mask_grid($module, shape, nodes, batch, head, q_cell, k_cell, /)\n--\n\n"},
    {.ml_name = NULL},
};
