/* slots.c – reads and checks state_indices. */
#include "bind/python/slots.h"

#include "bind/python/arguments.h"

/* Notes a slot in the bits of `taken`; 0, or -1 with the exception set. */
static int take_slot(unsigned char *taken, ptrdiff_t slot, npy_intp slots, npy_intp index)
{
    if (slot < -1 || slot >= slots) {
        PyErr_Format(PyExc_IndexError, "state_indices must be from -1 to %zd, got %zd at index %zd",
                     slots - 1, slot, index);
        return -1;
    }
    if (slot < 0) return 0;
    const unsigned char bit = (unsigned char)(1 << slot % 8);
    if (taken[slot / 8] & bit) {
        PyErr_Format(PyExc_ValueError, "state_indices must name each slot once, got %zd again at index %zd",
                     slot, index);
        return -1;
    }
    taken[slot / 8] |= bit;
    return 0;
}

ptrdiff_t *am_read_slots(PyArrayObject *indices, npy_intp rows, npy_intp slots)
{
    am_view entries;
    const bool is_row = PyArray_NDIM(indices) == 1;
    if (is_row && PyArray_DIM(indices, 0) != rows) {
        PyErr_Format(PyExc_ValueError, "state_indices must be of shape (%zd,), got %zd entries", rows,
                     PyArray_DIM(indices, 0));
        return NULL;
    }
    if (!am_entries_of(indices, &entries) && !(is_row && rows == 0)) {
        am_reject(is_row ? PyExc_TypeError : PyExc_ValueError, "state_indices", "a 1-D array of integers",
                  (PyObject *)indices);
        return NULL;
    }
    ptrdiff_t *read = am_new(ptrdiff_t, rows);
    unsigned char *taken = read ? am_new(unsigned char, slots / 8 + 1) : NULL;
    int status = taken ? 0 : -1;
    if (!taken) PyErr_NoMemory();
    if (status == 0 && rows > 0) am_widen(&entries, read);
    for (npy_intp i = 0; status == 0 && i < rows; i++) status = take_slot(taken, read[i], slots, i);
    free(taken);
    if (status == 0) return read;
    free(read);
    return NULL;
}
