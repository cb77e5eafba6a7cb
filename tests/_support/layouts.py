"""Arrays in memory in many ways, and how results are compared."""

import numpy as np

LAYOUTS = ("contiguous", "fortran", "reversed", "strided", "misaligned", "swapped")
CONSTANT = ("constant along 1", "constant along -1")


def arrange(values, layout: str) -> np.ndarray:
    """`values` in memory as `layout` says; a constant layout (a stride of zero) alters them."""
    values = np.asarray(values)
    if layout == "fortran":
        return values.copy(order="F")
    if layout == "reversed":
        backwards = (slice(None, None, -1),) * values.ndim
        return values[backwards].copy()[backwards]
    if layout == "strided":
        buffer = np.empty([2 * length + 2 for length in values.shape], values.dtype)
        buffer.view(np.uint8)[...] = 0xA5
        view = buffer[tuple(slice(1, 1 + 2 * length, 2) for length in values.shape)]
        view[...] = values
        return view
    if layout == "misaligned":
        view = np.empty(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
        view[...] = values
        return view
    if layout == "swapped" and values.dtype.kind != "V":  # NumPy has no byte-swapped bfloat16
        return values.astype(values.dtype.newbyteorder("S"))
    if layout == "constant along 1":
        return np.broadcast_to(values[:, :1], values.shape)
    if layout == "constant along -1":
        return np.broadcast_to(values[..., :1], values.shape)
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
