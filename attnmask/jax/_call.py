"""Attention as a call of XLA's foreign function interface; its counterpart is ``csrc/bind/xla/xla.c``."""

import struct
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax  # type: ignore[import-not-found, unused-ignore]
import numpy as np

from attnmask._attention.arguments import LEARNED
from attnmask._common.arguments import wide_dtype
from attnmask._common.loading import _core
from attnmask._masks.program import Leaf, Program
from attnmask.jax._arguments import Spec, Wide

__all__ = [
    "TARGETS",
    "alike",
    "backward",
    "call_handler",
    "first_words",
    "forward",
    "mask_words",
    "operand_words",
    "registered",
    "struct_like",
]

TARGETS = (  # names of the handlers
    "attnmask_flash_forward",
    "attnmask_flash_backward",
    "attnmask_flash_kvcache",
    "attnmask_linear_forward",
    "attnmask_linear_backward",
    "attnmask_linear_step",
    "attnmask_convolution_forward",
    "attnmask_convolution_backward",
    "attnmask_convolution_step",
)
_VERSION = 1  # of the words
_NORMALIZE, _BIAS, _SINKS, _GRAD_BIAS, _GRAD_SINKS, _GRAD_LSE = (1 << i for i in range(6))
_TABLE, _GRAD_TABLE, _RELATIVE, _PACKED, _PART = (1 << i for i in range(6, 11))
# Terms and operators by the number that the handlers have for them. Exported programs hold these: new ones come last.
_KINDS = (
    "all",
    "band",
    "chunk",
    "keys",
    "equal",
    "sequences",
    "dense",
    "tiles",
    "not",
    "and",
    "or",
    "xor",
    "diagonal",
)
_NOTHING, _INTEGER, _NARROW, _WIDE = range(4)

_lock = threading.Lock()
_accepted: bool | None = None


def registered() -> bool:
    """Return whether XLA accepts the handlers, which are offered to it once."""
    global _accepted
    with _lock:
        if _accepted is None:
            # Before it has started JAX would keep them, and give the whole backend up if one is refused.
            jax.local_devices(backend="cpu")
            try:
                for name, handler in zip(TARGETS, _core.xla_handlers(), strict=True):
                    jax.ffi.register_ffi_target(name, handler, platform="cpu")
                _accepted = True
            except Exception as error:
                warnings.warn(
                    f"attnmask.jax calls back into Python, which is slow: this JAX refuses its handlers ({error})",
                    RuntimeWarning,
                    stacklevel=4,
                )
                _accepted = False
        return _accepted


def operand_words(value: Any) -> tuple[int, int]:
    if value is None:
        return _NOTHING, 0
    if isinstance(value, (Leaf, Wide)):
        return (_NARROW if isinstance(value, Leaf) else _WIDE), value.place
    return _INTEGER, int(value)


def first_words(flags: int, scale: float, cap: float, dropout: float) -> list[int]:
    return [_VERSION, flags, *struct.unpack("3q", struct.pack("3d", scale, cap, dropout))]


def mask_words(nodes: Program) -> list[int]:
    words: list[int] = []
    for node in nodes:
        kind, *values = (node,) if isinstance(node, str) else node
        words.append(_KINDS.index(kind))
        for value in values:
            words += operand_words(value)
    return words


def _words(spec: Spec, flags: int) -> Any:
    relative = spec.relative
    if relative is not None:
        flags |= _RELATIVE | _PACKED * (relative[0] is not None)
    flags |= _PART * (spec.part is not None)
    words = first_words(flags | _NORMALIZE * spec.normalize, spec.scale, spec.cap, spec.dropout)
    words += [*operand_words(spec.seed), *(spec.part or ())]
    for value in () if relative is None else relative[relative[0] is None :]:
        words += operand_words(value)
    return np.array(words + mask_words(spec.nodes), np.int64)


def _varying(array: Any) -> frozenset[Any]:
    """Return the mesh axes along which an array varies inside `jax.shard_map`."""
    aval = jax.typeof(array)
    found = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if found is None else found.varying)


def alike(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays as varying along the same mesh axes, as the arrays of one call must."""
    axes = frozenset().union(*map(_varying, arrays))

    def cast(array: Any) -> Any:
        missing = tuple(axes - _varying(array))
        if not missing:
            return array
        pcast = getattr(jax.lax, "pcast", None)
        return pcast(array, missing, to="varying") if pcast else jax.lax.pvary(array, missing)

    return [cast(array) for array in arrays] if axes else list(arrays)


def struct_like(shape: tuple[int, ...], dtype: Any, array: Any) -> Any:
    """Return a result that varies along the axes along which `array` does."""
    aval = jax.typeof(array)
    if not _varying(array):
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec())
    if not hasattr(aval, "manual_axis_type"):
        return aval.update(shape=shape, dtype=np.dtype(dtype), sharding=sharding, weak_type=False)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=aval.manual_axis_type)


def call_handler(
    name: str,
    words: Any,
    arrays: Sequence[Any],
    shapes: Sequence[Any],
    no_gradients: str,
    vmap_method: str = "expand_dims",
    written: Mapping[int, int] | None = None,
) -> tuple[Any, ...]:
    """Return the results of a handler. `written` maps arrays that it writes to, to the results they become."""
    arrays = alike([jax.numpy.asarray(array) for array in arrays])
    results = tuple(struct_like(shape, dtype, arrays[0]) for shape, dtype in shapes)
    more = {"input_output_aliases": dict(written)} if written else {}

    @jax.custom_jvp  # type: ignore[untyped-decorator, unused-ignore]
    def call(*arrays: Any) -> tuple[Any, ...]:
        return tuple(jax.ffi.ffi_call(name, results, vmap_method=vmap_method, **more)(*arrays, words=words))

    @call.defjvp  # type: ignore[untyped-decorator, unused-ignore]
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(no_gradients)

    found: tuple[Any, ...] = call(*arrays)
    return found


def _call(name: str, spec: Spec, flags: int, arrays: Sequence[Any], shapes: Sequence[Any]) -> tuple[Any, ...]:
    no_gradients = "attnmask.jax.flash_attention has gradients, but no gradients of these"
    return call_handler(name, _words(spec, flags), arrays, shapes, no_gradients)


def _split(learned: dict[str, Any]) -> tuple[list[Any], int]:
    flags = (
        _BIAS * ("bias" in learned)
        | _SINKS * ("softmax_aux" in learned)
        | _TABLE * ("relative_bias" in learned)
    )
    return [learned[name] for name in LEARNED if name in learned], flags  # trees sort names


def forward(spec: Spec, learned: dict[str, Any], others: Sequence[Any], results: int) -> tuple[Any, ...]:
    """Return the first of: the result, the logsumexp of each row, the result before it is rounded to 16 bits."""
    arrays, flags = _split(learned)
    query, value = learned["query"], learned["value"]
    batch, queries, heads, _ = query.shape
    wide = wide_dtype(query.dtype)
    row = batch, queries, heads, value.shape[3]
    shapes = [(row, query.dtype if spec.part is None else wide), ((batch, heads, queries), wide), (row, wide)]
    return _call(TARGETS[0], spec, flags, [*arrays, *others], shapes[:results])


def backward(
    spec: Spec,
    learned: dict[str, Any],
    others: Sequence[Any],
    wanted: Sequence[str],
    of_result: Sequence[Any],
) -> tuple[Any, ...]:
    """The gradients of those that are `wanted`, by the result, which may be that before rounding, its logsumexp and the
    gradients of both; that of the logsumexp may be missing.
    """
    arrays, flags = _split(learned)
    flags |= _GRAD_BIAS * ("bias" in wanted) | _GRAD_SINKS * ("softmax_aux" in wanted)
    flags |= _GRAD_TABLE * ("relative_bias" in wanted)
    flags |= _GRAD_LSE * (len(of_result) == 4)
    names = [*LEARNED[:3], *(name for name in LEARNED[3:] if name in wanted)]
    narrow = spec.part is not None and learned["query"].dtype != np.float64
    shapes = [(learned[name].shape, np.float32 if narrow else learned[name].dtype) for name in names]

    gradients = _call(TARGETS[1], spec, flags, [*arrays, *others, *of_result], shapes)
    found = dict(zip(names, gradients, strict=True))
    return tuple(found[name] for name in wanted)
