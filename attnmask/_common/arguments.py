"""Check arguments where users pass them. Errors name the argument, what it must be and what came."""

import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from attnmask._common.loading import _core
from attnmask._common.types import Array, DType, Given

AxisName: TypeAlias = str | tuple[str, ...] | None  # one axis of a mesh, several, or none

# One offset, or one per batch row. `ArrayLike` would also accept any string, and only "bottom-right" is an offset.
Offsets: TypeAlias = int | np.integer | Sequence[int] | NDArray[np.integer]


class _NotGiven(int):
    """A default that differs from the same number given explicitly."""

    __slots__ = ()


TOP_LEFT = _NotGiven(0)
Limit: TypeAlias = int | NDArray[np.int64] | None  # of all heads, or of each; None for none

# Offsets are added to positions in 64-bit integers. No axis that fits in memory is as long as this.
FARTHEST = 2**59
_BRIEF = 60  # characters
LONG = 256  # bits; messages show the length of longer integers, not their digits


def describe(value: Any) -> str:
    """Return a few words to end an error message with."""
    if isinstance(value, np.ndarray):
        if value.ndim == 0 and value.dtype.kind in "OU":  # np.asarray has wrapped an object or a text
            return describe(value.item())
        return f"{value.dtype} array of shape {value.shape}"
    if isinstance(value, int) and value.bit_length() > LONG:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, str, np.generic)):
        return f"{value!r:.200}"
    if is_tensor(value):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"an object of type {type(value).__name__}"


def check_form(state: object, known: int, what: str) -> None:
    """Refuse the pickle of a later version of the package, by the number of its format."""
    form = state.get("version") if isinstance(state, dict) else None
    if type(form) is not int:
        raise ValueError(f"the pickle of {what} must have a version, got {describe(form)}")
    if form > known:
        raise ValueError(
            f"{what} was pickled by a later version of attnmask, in form {form}; this one reads forms up to {known}: "
            "update attnmask"
        )


def briefly(value: object) -> str:
    """Describe an array or tensor by type and shape, several likewise, and anything else by its `repr`, cut off."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if type(value) is tuple:
        return f"({', '.join(map(briefly, value))}{',' if len(value) == 1 else ''})"
    return repr(value) if len(repr(value)) <= _BRIEF else f"{value!r:.{_BRIEF}}…"


def fields_in_a_line(named: Any) -> str:
    """Return the `repr` of a named tuple of arrays without writing out any array."""
    fields = (f"{name}={briefly(value)}" for name, value in zip(named._fields, named, strict=True))
    return f"{type(named).__name__}({', '.join(fields)})"


def is_of(value: object, package: str, name: str) -> bool:
    """Return whether a value is of a type in a package, which need not be loaded."""
    module = sys.modules.get(package)
    return module is not None and isinstance(value, getattr(module, name, ()))


def is_tensor(value: object) -> bool:
    return is_of(value, "torch", "Tensor")


_IN_TORCH = {  # NumPy code in hints, and the same in PyTorch
    r"\.astype\(np\.": ".to(torch.",
    r"\.astype\(": ".to(",
    r"np\.(where|reshape|broadcast_to)\(": r"torch.\1(",
    r"np\.transpose\((\w+)\)": r"\1.T",
    r"np\.transpose\(": "torch.permute(",
    r"\[:, ::-1, ::-1\]": ".flip(1, 2)",
    r"np\.cumsum\(\[0, \*lengths\]\)": "torch.nn.functional.pad(lengths.cumsum(0), (1, 0))",
    r"np\.append\((\w+), (\d+)\)": r"torch.nn.functional.pad(\1, (0, 1), value=\2)",
}


def suit_hint(error: Exception, given: Given) -> None:
    """Rewrite the hint at the end of a message for PyTorch if the argument that the message is about is a tensor."""
    text, semicolon, hint = str(error).rpartition("; ")
    if is_tensor(given.get(text.partition(" ")[0])):
        for of_arrays, of_tensors in _IN_TORCH.items():
            hint = re.sub(of_arrays, of_tensors, hint)
        error.args = (text + semicolon + hint,)


def frozen(array: Array) -> Array:
    """Make `array`, which nobody else holds, read-only for good: a view cannot become writeable against its owner."""
    owner = array if array.base is None else array.base
    if isinstance(owner, np.ndarray):
        owner.setflags(write=False)
    array.setflags(write=False)
    return array.view()


def read_only(array: Array) -> Array:
    """Return a read-only view of an array."""
    view = array.view()
    view.setflags(write=False)
    return view


def integer(value: Any, name: str, minimum: int | None = None, hint: str = "") -> int:
    """Return any integer except a bool as a Python int. A PyTorch symbol stays one, so that one graph serves all."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = value if type(value) is int or is_of(value, "torch", "SymInt") else operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {describe(value)}{hint}") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {describe(number)}{hint}")
    return number


def real(value: object, name: str) -> float:
    """Return any real number except a bool or NaN as a Python float."""
    if type(value) is float and value == value:
        return value
    # NumPy's durations are a kind of integers.
    if isinstance(value, Real) and not isinstance(value, (bool, np.timedelta64)):
        try:
            number = float(value)
        except OverflowError:
            raise ValueError(f"{name} must fit float64, got {describe(value)}") from None
    else:
        array = as_array(value, name)
        if array.ndim or array.dtype.kind == "b" or not is_number(array.dtype):
            raise TypeError(f"{name} must be a real number, got {describe(value)}")
        number = float(array)
    if number != number:
        raise ValueError(f"{name} must be a number, got nan")
    return number


def place(value: object, name: str, count: int) -> int:
    """Return the index of one of `count` planes."""
    number = integer(value, name)
    if not 0 <= number < count:
        raise IndexError(
            f"{name} must be from 0 to {count - 1}, got {number}" if count else f"the mask has no {name}"
        )
    return number


def flag(value: object, name: str, hint: str = "") -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {describe(value)}{hint}")
    return bool(value)


def one_of(value: object, name: str, choices: Sequence[str | None]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {describe(value)}")


def as_array(value: object, name: str) -> Array:
    """Return an array of any type, in place if it is one, and readable as it is."""
    try:
        if type(value) is np.ndarray:
            array = value
        elif isinstance(value, np.ndarray):
            array = np.asarray(value)  # a subclass may override any method; the view is of the base class
        else:
            array = _of_a_library(value, name) if hasattr(value, "__dlpack__") else np.asarray(value)
    except ValueError as error:  # for example, the lists in a list differ in length
        raise ValueError(f"{name} must be array_like: {error}") from error
    if not array.dtype.isnative:
        return frozen(array.astype(array.dtype.newbyteorder("=")))
    return array if array.flags.aligned else frozen(array.copy())  # so that nobody writes to a copy


def _of_a_library(value: Any, name: str) -> Array:
    """Return the memory of an array or tensor as a NumPy array."""
    if is_tensor(value):
        return _of_torch(value, name)
    try:
        return np.asarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)
    except TypeError as error:
        jax = sys.modules.get("jax")
        if jax is None or not isinstance(value, jax.core.Tracer):
            raise
        hint = "; attnmask.jax has functions that JAX can trace, such as attnmask.jax.flash_attention"
        raise TypeError(
            f"{name} must be an array that NumPy can read, got a traced value of JAX{hint}"
        ) from error


FLOAT8 = ("float8_e4m3fn", "float8_e5m2")  # of keys and values, by their names in ml_dtypes and PyTorch


def check_kind_of_tensor(tensor: Any, name: str) -> None:
    if not tensor.is_cpu:
        raise TypeError(f"{name} must be on the CPU, got a tensor on {tensor.device}")
    if tensor.is_nested:
        hint = f"; write torch.cat({name}.unbind()) for packed sequences, with cumulative lengths"
        raise TypeError(f"{name} must be a tensor of one shape, got a nested tensor{hint}")


def _of_torch(tensor: Any, name: str) -> Array:
    if not tensor.is_cpu:
        check_kind_of_tensor(tensor, name)
    if tensor.requires_grad:
        raise TypeError(
            f"{name} must be a tensor that needs no gradient, got one that does: detach() it, or use attnmask.torch"
        )
    torch = sys.modules["torch"]
    try:
        if tensor.dtype is torch.bfloat16:
            halves: Array = tensor.view(torch.int16).numpy()
            return halves.view(bfloat16(name))
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind in FLOAT8:
            octets: Array = tensor.view(torch.uint8).numpy()
            return octets.view(of_ml_dtypes(kind, name))
        array: Array = tensor.numpy()
        return array
    except (RuntimeError, TypeError) as error:
        check_kind_of_tensor(tensor, name)
        if tensor.is_neg() or tensor._is_zerotensor():  # a bit of the tensor changes what its memory says
            return frozen(_of_torch(tensor.clone(), name))
        # It is sparse; or it stands for other tensors, or for one that will be there.
        hint = ""
        if tensor.layout is torch.strided:
            hint = "; attnmask.torch has functions that PyTorch can trace, such as attnmask.torch.flash_attention"
        raise TypeError(f"{name} must be a tensor whose memory NumPy can read: {error}{hint}") from error


def bfloat16(name: str) -> DType:
    return of_ml_dtypes("bfloat16", name)


def of_ml_dtypes(dtype: str, name: str) -> DType:
    """Return a type that NumPy knows only through an optional package."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"{name} is of {dtype}, for which NumPy needs ml_dtypes: pip install ml_dtypes"
        ) from error
    known: DType = np.dtype(getattr(ml_dtypes, dtype))
    return known


def _check_rank(array: Array, name: str, layouts: Sequence[str]) -> None:
    if array.ndim not in [layout.count(",") + 1 for layout in layouts]:
        raise ValueError(f"{name} must be {' or '.join(layouts)}, got {describe(array)}")


def integer_array(value: object, name: str, hint: str = "") -> Array:
    """Return an array of any integer type, in place if it is one."""
    array = as_array(value, name)
    if array.dtype.kind in "iu":
        return array
    if array.size or isinstance(value, np.ndarray):
        raise TypeError(f"{name} must be integers, got {describe(array)}{hint}")
    return array.astype(np.int32)  # NumPy makes an array of floats from an empty list


def integers(value: object, name: str, layouts: Sequence[str], hint: str = "") -> NDArray[np.int32]:
    """Return a read-only int32 copy of an integer array of one of the layouts (such as ``"[B, Q]"``)."""
    array = integer_array(value, name, hint)
    _check_rank(array, name, layouts)
    return frozen(_core.int32_copy(array, name) if array.size else allocate(array.shape, np.int32, name))


def shared_integers(value: object, name: str, layouts: Sequence[str]) -> NDArray[np.int32]:
    """Return the same without a copy if nobody writes to the array."""
    array = as_array(value, name)
    if array.dtype == np.int32 and array.flags.c_contiguous and not array.flags.writeable:
        _check_rank(array, name, layouts)
        return array
    return integers(array, name, layouts)


def per_row(
    value: object,
    name: str,
    rows: int | tuple[int, ...],
    minimum: int = -FARTHEST,
    row: str = "batch row",
    broadcast: bool = True,
    maximum: int = FARTHEST,
) -> int | NDArray[np.int64]:
    """Return one integer for all rows, or an array of one per row, which may have several axes; one entry serves all
    rows if it may `broadcast`.
    """
    if type(value) is int and minimum <= value <= maximum:
        return value  # the usual case, where making an array would take a microsecond
    array = as_array(value, name)
    large = array.dtype.kind == "O" and array.ndim == 0 and hasattr(array.item(), "__index__")
    if array.ndim == 0 and (array.dtype.kind in "iu" or large):
        number = integer(value, name, minimum)
        if number > maximum:
            raise ValueError(f"{name} must be at most {maximum}, got {describe(number)}")
        return number
    if array.dtype.kind not in "iu" and (array.size or isinstance(value, np.ndarray)):
        came = describe(array if array.ndim else value)
        raise TypeError(f"{name} must be an integer or one per {row}, got {came}")
    shape = rows if isinstance(rows, tuple) else (rows,)
    if array.shape != shape and (array.shape != (1,) or not broadcast):
        hint = f"; write {name}[0] for one number for all" if array.shape == (1,) else ""
        raise ValueError(f"{name} must be an integer or of shape {shape}, got {describe(array)}{hint}")
    array = array.reshape(-1)
    outside = (array < minimum) | (array > maximum)
    if outside.any():
        index = int(outside.argmax())
        limit = f"at least {minimum}" if array[index] < minimum else f"at most {maximum}"
        raise ValueError(f"{name} must be {limit}, got {array[index]} at index {index}")
    return int(array[0]) if len(array) == 1 else frozen(array.astype(np.int64))


def is_bottom_right(offset: object, name: str) -> bool:
    """Return whether an offset is ``"bottom-right"``; refuse any other string."""
    if not isinstance(offset, str):
        return False
    if offset != "bottom-right":
        from difflib import get_close_matches  # takes a millisecond, which most programs do not need

        close = get_close_matches(offset.lower(), ("bottom-right", "lower-right"))
        hint = "did you mean 'bottom-right'?" if close else "write 0 for top-left"
        raise ValueError(f"{name} must be an integer or 'bottom-right', got {offset!r:.200}; {hint}")
    return True


_NO_LIMIT = "; write None for no limit"


def window(sliding_window: object) -> tuple[int | None, int | None]:
    """Return how far a window reaches to the left and to the right; None means no limit."""
    if isinstance(sliding_window, np.ndarray) and sliding_window.ndim:
        hint = "; MaskInfo.apply_sliding_window takes a window per head"
        raise TypeError(f"sliding_window must be an integer or a pair, got {describe(sliding_window)}{hint}")
    left, right = (_side(side, name) for side, name in _sides(sliding_window))
    return left, right


def windows(sliding_window: object, heads: int) -> tuple[Limit, Limit]:
    """Return the same, where each may be an array with one number per head (any number of heads if `heads` is 1)."""
    left, right = (
        _side(side, name) if side is None or as_array(side, name).ndim == 0 else _by_head(side, name, heads)
        for side, name in _sides(sliding_window)
    )
    return left, right


def _sides(sliding_window: object) -> list[tuple[object, str]]:
    if not isinstance(sliding_window, (tuple, list)):
        return [(sliding_window, "sliding_window")] * 2
    if len(sliding_window) != 2:
        raise ValueError(f"sliding_window must be an integer or a pair, got {len(sliding_window)} entries")
    return [(side, f"sliding_window[{i}]") for i, side in enumerate(sliding_window)]


def _side(side: object, name: str) -> int | None:
    if side is None and name != "sliding_window":
        return None
    length = integer(side, name, 0, _NO_LIMIT)
    return None if length > FARTHEST else length


def _by_head(side: object, name: str, heads: int) -> int | NDArray[np.int64]:
    lengths = integer_array(side, name)
    if lengths.ndim != 1 or not len(lengths) or (heads != 1 and len(lengths) not in (1, heads)):
        expected = "[H]" if heads == 1 else f"of shape ({heads},), one per head"
        raise ValueError(f"{name} must be an integer or {expected}, got {describe(lengths)}")
    # Comes first: NumPy would look at any number of entries.
    clipped = allocate(lengths.shape, np.int64, name)
    if lengths.size and lengths.min() < 0:
        index = int((lengths < 0).argmax())
        raise ValueError(f"{name} must be at least 0, got {lengths[index]} at index {index}")
    clipped[:] = np.minimum(lengths.astype(np.uint64), FARTHEST)
    return int(clipped[0]) if len(clipped) == 1 else frozen(clipped)


def axis_name(value: object, name: str) -> AxisName:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise TypeError(f"{name} must be a name, a tuple of names or None, got {describe(value)}")


def is_number(dtype: DType) -> bool:
    """Return whether the core knows this bool, integer or floating-point type."""
    return dtype.kind in "biu" or is_floating(dtype)


def is_floating(dtype: DType) -> bool:
    """Return whether the core knows this floating-point type."""
    return dtype.char in "efd" or dtype.type.__name__ == "bfloat16"  # `dtype.name` takes a microsecond


def check_mask_type(array: Array, name: str) -> None:
    if array.dtype.kind != "f" and not is_number(array.dtype):
        raise TypeError(f"{name} must be bool, integers or floats, got {describe(array)}")


def mask_array(value: object, name: str, layouts: Sequence[str] | None = None) -> Array:
    """Return an array of bool or numbers as it is; nonzero means yes. What looks like a bias is refused."""
    array = as_array(value, name)
    check_mask_type(array, name)
    if layouts is not None:
        _check_rank(array, name, layouts)
    if not is_number(array.dtype):  # the core knows neither long double nor floats of eight bits
        limits = np.finfo(np.float64)
        with np.errstate(all="ignore"):
            wide = array.astype(np.float64)
        wide = np.where(np.isfinite(array), wide.clip(limits.min, limits.max), wide)
        _core.check_mask(np.where(array < 0, np.minimum(wide, -limits.smallest_subnormal), wide), name)
        live: NDArray[np.bool_] = np.asarray(array != 0)  # of an array without axes, a scalar
        return live
    if is_floating(array.dtype):
        _core.check_mask(array, name)
    return read_only(array)


def dtype_of(value: DTypeLike, name: str, expected: str, fits: Callable[[DType], bool]) -> DType:
    """Return a dtype in native byte order that `fits`."""
    try:
        dtype = None if value is None else np.dtype(value)  # np.dtype(None) is float64
    except (TypeError, ValueError):  # text that is not UTF-8 raises ValueError
        dtype = None
    if dtype is None or not fits(dtype):
        raise TypeError(f"{name} must be {expected}, got {value!r:.200}")
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def share_memory(a: Array, b: Array) -> bool:
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]
    except RuntimeError:  # NumPy gave up, so they may
        return True


def check_apart(out: object, given: Iterable[tuple[str, object]], written: str = "out") -> None:
    """Check that `out` shares no memory with the `given` arguments. The core compares it only with the arrays that it
    gets, which may be copies. `written` is its name.
    """
    if not isinstance(out, np.ndarray):
        return  # None, or an error that the core raises
    target = np.asarray(out)  # a subclass may override what NumPy calls below
    for name, value in given:
        if value is None or isinstance(value, str):
            continue
        array = np.asarray(value) if isinstance(value, np.ndarray) else as_array(value, name)
        if share_memory(target, array):
            raise ValueError(f"{written} must share no memory with {name}")


def number_dtype(value: DTypeLike, name: str = "dtype") -> DType:
    """Return a dtype that a mask can have."""
    return dtype_of(value, name, "bool, an integer or a floating-point type", is_number)


def floating_dtype(value: DTypeLike, name: str) -> DType:
    """Return a floating-point dtype that the core knows, for an argument that may be None."""
    expected = "None, float16, bfloat16, float32 or float64"
    dtype = dtype_of(value, name, expected, lambda _: True)
    if not is_floating(dtype):
        raise ValueError(f"{name} must be {expected}, got {dtype}")
    return dtype


def wide_dtype(dtype: DTypeLike) -> DType:
    """Return the type of a logsumexp, and of what is summed, for queries of this type."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def block_sizes(block_size: object) -> tuple[int, int]:
    """Return how many queries and keys a block has."""
    sizes = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2:
        raise ValueError(f"block_size must be an integer or a pair, got {len(sizes)} entries")
    return integer(sizes[0], "block_size", 1), integer(sizes[1], "block_size", 1)


def allocate(
    shape: tuple[int, ...], dtype: DTypeLike, names: str, make: Callable[..., Array] = np.empty
) -> Array:
    """Allocate an array, empty or filled by `make`; its sizes come from the arguments `names`."""
    try:
        return make(shape, dtype)
    except (MemoryError, ValueError, OverflowError):  # the last two say that a size does not fit 64 bits
        raise MemoryError(f"an array of shape {shape} does not fit in memory: {names}") from None
