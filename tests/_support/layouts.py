"""Arrays in memory in many ways, and how results are compared."""

import numpy as np

LAYOUTS = ("contiguous", "fortran", "reversed", "strided", "misaligned", "swapped")
CONSTANT = ("constant along 1", "constant along -1")


def between(values: np.ndarray, begin: int, step: int, fill: int) -> np.ndarray:
    """In a larger array of these bytes, along each axis from a place on."""
    buffer = np.empty([step * length + 3 - step % 2 for length in values.shape], values.dtype)
    buffer.view(np.uint8)[...] = fill
    view = buffer[tuple(slice(begin, begin + step * length, step) for length in values.shape)]
    view[...] = values
    return view


def exchanged(values: np.ndarray, one: int, other: int) -> np.ndarray:
    """With two axes in the other order in memory."""
    return np.ascontiguousarray(values.swapaxes(one, other)).swapaxes(one, other)


def arrange(values, layout: str) -> np.ndarray:
    """`values` in memory as `layout` says; a constant layout (a stride of zero) alters them.

    Memory between elements holds NaN where they are "sliced".
    """
    values = np.asarray(values)
    backwards = (slice(None, None, -1),) * values.ndim
    if layout == "fortran":
        return values.copy(order="F")
    if layout == "reversed":
        return values[backwards].copy()[backwards]
    if layout == "strided":
        return between(values, 1, 2, 0xA5)
    if layout == "sliced":
        return between(values, 1, 1, 0xFF)
    if layout == "heads first":
        return exchanged(values, -3, -2)
    if layout == "transposed":
        return exchanged(values, -1, -2)
    if layout == "backwards":
        return exchanged(values[backwards], -1, -2)[backwards]
    if layout == "misaligned":
        view = np.empty(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
        view[...] = values
        return view
    if layout == "swapped" and values.dtype.kind != "V":  # NumPy has no byte-swapped bfloat16
        return values.astype(values.dtype.newbyteorder("S"))
    if layout.startswith("constant"):
        axis = int(layout.split()[-1])
        if -values.ndim <= axis < values.ndim and values.shape[axis]:
            return np.broadcast_to(np.take(values, [0], axis), values.shape)
    return values.copy()


def assert_same(got, expected, case) -> None:
    """Equal in type, dtype, shape and every value; and a new C-contiguous array, as all results are."""
    assert type(got) is np.ndarray, case
    assert got.dtype == expected.dtype, (got.dtype, expected.dtype, case)
    assert got.shape == expected.shape, (got.shape, expected.shape, case)
    assert got.flags.c_contiguous, (got.strides, case)
    assert got.flags.writeable, case
    np.testing.assert_array_equal(got, expected, err_msg=repr(case))


def outcome(function, *args, **kwargs):
    """The result of a call, or the type of the arithmetic error that it raised."""
    try:
        return function(*args, **kwargs)
    except OverflowError:
        return OverflowError
