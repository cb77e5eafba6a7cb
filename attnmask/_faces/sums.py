"""The rows of cumulative sums over time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnmask._common.arguments import as_array, flag
from attnmask._common.loading import _core
from attnmask._common.types import AnyFunction, Array
from attnmask._faces.arrays import with_gradient
from attnmask._faces.rows import Result, Row, arguments

_SHARED = {
    x.name: x
    for x in arguments("""
chunk_size : size
    A power of two. The last chunk of a sequence may be shorter.
reverse : flag = False
    Sum from the end of each chunk or sequence to its start.
softmax_scale : number = None
    Multiply the sums by this.
cu_seqlens : starts [sequences + 1] = None
    The batch is one row of packed sequences, and sums restart at each. From 0 to T, never decreasing.
head_first : flag = False
    Time is the third axis instead of the second.
output_dtype : dtype = None
    dtype of the result; defaults to the input's. float16 and bfloat16 are summed in float32, integers in int64. A
    result that does not fit is an OverflowError, and `out` then holds some of the sums.
out : out = None
    Takes the result, and is returned. It must have the result's shape and type, and share no memory with the inputs.
""")
}
_ARRAY = "{} : learned [B, T, H] or [B, T, H, S]\n    Read in place, whatever its strides."
_SHARED |= {name: arguments(_ARRAY.format(name))[0] for name in ("g", "s")}


_IN_TORCH = """
>>> {first} = torch.ones({shape}, requires_grad=True)
>>> out = attnmask.torch.{name}({given})
>>> out.flatten().tolist()
[1.0, 2.0, 3.0, 4.0]
>>> out.sum().backward()
>>> {first}.grad.flatten().tolist()
[4.0, 3.0, 2.0, 1.0]
"""
_IN_JAX = """
>>> {first} = jnp.ones({shape})
>>> add_up = jax.jit(lambda {first}: attnmask.jax.{name}({given}))
>>> add_up({first}).ravel().tolist()
[1.0, 2.0, 3.0, 4.0]
>>> jax.grad(lambda {first}: add_up({first}).sum())({first}).ravel().tolist()
[4.0, 3.0, 2.0, 1.0]
"""


def _floating(value: Any, name: str) -> Array:
    """Return an array of a type that has gradients."""
    array = as_array(value, name)
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be floating-point for gradients, got {array.dtype}")
    return array


def _sums(name: str, order: str, core: AnyFunction, check: AnyFunction) -> Row:
    """Return the row of sums whose gradients are sums in the other direction. Arguments have this order; those after
    the star are given by keyword alone.
    """
    places = len(order.partition(" * ")[0].split())
    first, *others = order.replace("* ", "").split()

    def keep(*values: Any) -> tuple[Array]:
        _floating(values[0], first)
        return (core(*values),)

    def backward(primal: Any, *values: Any) -> tuple[Array]:
        *problem, dout = values
        given = dict(zip(others, problem, strict=False))
        primal, dout = as_array(primal, first), _floating(dout, "dout")
        if dout.shape != primal.shape:
            raise ValueError(f"dout must have the shape {primal.shape} of {first}, got {dout.shape}")
        given |= {"reverse": not given["reverse"], "output_dtype": primal.dtype.newbyteorder("=")}
        return (core(dout, *given.values(), None),)

    shape = (1, 4, 1, 1) if name.endswith("vector") else (1, 4, 1)
    given = "g, chunk_size=4" if first == "g" else "s"
    examples = {"torch": _IN_TORCH, "jax": _IN_JAX}
    return Row(
        name,
        [_SHARED[x] for x in (first, *others)],
        (Result("out", "[B, T, H] or [B, T, H, S]"),),
        places=places,
        entry=core,
        check=lambda *values: check(*values, None),
        keep=keep,
        backward=backward,
        grads=lambda grad: grad,
        handler="attnmask_cumsum",
        examples={
            library: text.format(name=name, first=first, shape=shape, given=given)
            for library, text in examples.items()
        },
    )


def _check_rank(array: Any, name: str, rank: int, head_first: object) -> None:
    # A subclass may override what np.ndim asks it for.
    ndim = np.ndarray.ndim.__get__(array) if isinstance(array, np.ndarray) else as_array(array, name).ndim
    if ndim != rank and ndim in (3, 4):  # the core refuses all other ranks
        axes = ("B, H, T" if flag(head_first, "head_first") else "B, T, H") + ", S" * (rank == 4)
        raise ValueError(f"{name} must be [{axes}], got {ndim} dimensions")


def _local_of(rank: int, core: AnyFunction) -> AnyFunction:
    def compute(
        g: Any, chunk: Any, reverse: Any, scale: Any, head_first: Any, dtype: Any, starts: Any, out: Any
    ) -> Any:
        _check_rank(g, "g", rank, head_first)
        return core(g, chunk, reverse, scale, starts, head_first, dtype, out)

    return compute


def _global_of(rank: int, core: AnyFunction) -> AnyFunction:
    def compute(s: Any, reverse: Any, starts: Any, scale: Any, head_first: Any, dtype: Any, out: Any) -> Any:
        _check_rank(s, "s", rank, head_first)
        return core(s, reverse, starts, scale, head_first, dtype, out)

    return compute


_LOCAL = "g chunk_size reverse softmax_scale cu_seqlens head_first output_dtype * out"
_LOCAL_OF = "g chunk_size reverse softmax_scale head_first output_dtype * cu_seqlens out"
_GLOBAL = "s reverse cu_seqlens softmax_scale head_first output_dtype * out"
_IN_CORE = _core.chunk_local_cumsum, _core.check_chunk_local_cumsum
_IN_CORE_GLOBAL = _core.chunk_global_cumsum, _core.check_chunk_global_cumsum


def _of_rank(name: str, order: str, make: AnyFunction, rank: int, functions: Sequence[AnyFunction]) -> Row:
    return _sums(name, order, *(make(rank, function) for function in functions))


CHUNK_LOCAL_CUMSUM = _sums("chunk_local_cumsum", _LOCAL, *_IN_CORE)
CHUNK_LOCAL_CUMSUM_SCALAR = _of_rank("chunk_local_cumsum_scalar", _LOCAL_OF, _local_of, 3, _IN_CORE)
CHUNK_LOCAL_CUMSUM_VECTOR = _of_rank("chunk_local_cumsum_vector", _LOCAL_OF, _local_of, 4, _IN_CORE)
CHUNK_LOCAL_CUMSUM_VJP = with_gradient(CHUNK_LOCAL_CUMSUM)
CHUNK_GLOBAL_CUMSUM = _sums("chunk_global_cumsum", _GLOBAL, *_IN_CORE_GLOBAL)
CHUNK_GLOBAL_CUMSUM_SCALAR = _of_rank("chunk_global_cumsum_scalar", _GLOBAL, _global_of, 3, _IN_CORE_GLOBAL)
CHUNK_GLOBAL_CUMSUM_VECTOR = _of_rank("chunk_global_cumsum_vector", _GLOBAL, _global_of, 4, _IN_CORE_GLOBAL)
CHUNK_GLOBAL_CUMSUM_VJP = with_gradient(CHUNK_GLOBAL_CUMSUM)
