"""Attention as a call of XLA's foreign function interface; its counterpart is ``csrc/bind/xla/xla.c``."""

import struct
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np
from numpy.typing import DTypeLike, NDArray

from attnmask._attention.arguments import LEARNED, MOVED
from attnmask._attention.terms import Term
from attnmask._common.arguments import wide_dtype
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Array
from attnmask._masks.program import Leaf, Program
from attnmask.jax._arguments import Learned, Spec, Wide
from attnmask.jax._types import ByName, Shaped

WORDS = _core.xla_words()  # versions and the bits of flags
WORDS["attention"] |= WORDS.pop("weights")
VERSION = WORDS["attention"]["version"]
_NODES = _core.mask_nodes()  # by their numbers in exported programs
_TERMS = _core.term_names()  # numbered in the same way
_NOTHING, _INTEGER, _NARROW, _WIDE, _ARGUMENT = range(5)

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
                for name, handler in _core.xla_handlers().items():
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


def register() -> tuple[str, ...]:
    """Register the C functions that compiled programs call, and return their names.

    `flash_attention` does this when it is first traced. You need it in two cases: to load a program of `jax.export`
    where nothing was traced, and to tell `jax.export` that a program may call these functions.

    Returns
    -------
    tuple of str

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import attnmask.jax
    >>> x = jnp.ones((1, 3, 1, 8))
    >>> checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in attnmask.jax.register()]
    >>> attend = jax.jit(attnmask.jax.flash_attention)
    >>> jax.export.export(attend, disabled_checks=checks)(x, x, x).call(x, x, x).shape
    (1, 3, 1, 8)
    """
    if not registered():
        raise RuntimeError("JAX refuses the C functions of this build of attnmask")
    return tuple(_core.xla_handlers())


def to_jax(result: Any) -> Any:
    """Hand fresh arrays to JAX: large ones in place, because they are aligned; small ones are copied."""
    if isinstance(result, tuple):
        return tuple(map(to_jax, result))
    return jax.device_put(result) if result.nbytes >= 2**20 else jax.numpy.asarray(result)


def operand_words(value: Any, learned: Sequence[str] = ()) -> tuple[int, int]:
    if value is None:
        return _NOTHING, 0
    if isinstance(value, Learned):
        return _ARGUMENT, learned.index(value.name)
    if isinstance(value, (Leaf, Wide)):
        return (_NARROW if isinstance(value, Leaf) else _WIDE), value.place
    return _INTEGER, int(value)


def flags_of(kind: str, said: Mapping[str, bool]) -> int:
    return sum(WORDS[kind][name] for name, true in said.items() if true)


def first_words(flags: int, scale: float) -> list[int]:
    return [VERSION, flags, *bits_of(scale)]


def bits_of(number: float) -> tuple[int, ...]:
    return struct.unpack("q", struct.pack("d", number))


def term_words(terms: Sequence[Term], learned: Sequence[str] = (), wanted: Sequence[str] = ()) -> list[int]:
    words = [len(terms)]
    for name, array, number, integer in terms:
        words += [_TERMS.index(name), *bits_of(number), *operand_words(integer)]
        words += [*operand_words(array, learned), name in wanted]
    return words


def mask_words(nodes: Program) -> list[int]:
    words: list[int] = []
    for node in nodes:
        kind, *values = (node,) if isinstance(node, str) else node
        words.append(_NODES.index(kind))
        for value in values:
            words += operand_words(value)
    return words


def _words(
    spec: Spec, said: Mapping[str, bool], learned: Sequence[str], wanted: Sequence[str]
) -> NDArray[np.int64]:
    offsets, *starts = spec.places or (None, None, None)
    said = {
        **said,
        "normalize_output": spec.normalize,
        "part": spec.part is not None,
        "places": spec.places is not None,
        "packed": starts[0] is not None,
        "key_starts": starts[1] is not None,
    }
    words: list[int] = []
    if spec.places is not None:
        words += [word for operand in starts if operand is not None for word in operand_words(operand)]
        words += operand_words(offsets)
    words = [*first_words(flags_of("attention", said), spec.scale), len(learned), *(spec.part or ()), *words]
    return np.array(words + term_words(spec.terms, learned, wanted) + mask_words(spec.nodes), np.int64)


def _varying(array: jax.Array) -> frozenset[str]:
    """Return the mesh axes along which an array varies inside `jax.shard_map`."""
    aval = jax.typeof(array)
    found = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if found is None else found.varying)


def alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the arrays as varying along the same mesh axes, as the arrays of one call must."""
    axes = frozenset().union(*map(_varying, arrays))

    def cast(array: jax.Array) -> jax.Array:
        missing = tuple(axes - _varying(array))
        if not missing:
            return array
        pcast = getattr(jax.lax, "pcast", None)
        return pcast(array, missing, to="varying") if pcast else jax.lax.pvary(array, missing)

    return [cast(array) for array in arrays] if axes else list(arrays)


def struct_like(shape: tuple[int, ...], dtype: DTypeLike, array: jax.Array) -> jax.ShapeDtypeStruct:
    """Return a result that varies along the axes along which `array` does."""
    aval = jax.typeof(array)
    if not _varying(array):
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec())
    if not hasattr(aval, "manual_axis_type"):
        return aval.update(shape=shape, dtype=np.dtype(dtype), sharding=sharding, weak_type=False)
    more: Arguments = {"manual_axis_type": aval.manual_axis_type}  # of later versions
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, **more)


def _in_python(
    name: str,
    words: NDArray[np.int64],
    shapes: Sequence[jax.ShapeDtypeStruct],
    written: Mapping[int, int],
    *arrays: jax.Array,
) -> list[Array]:
    """Return the results of a handler that JAX calls back."""
    given = [np.asarray(x, order="C") for x in arrays]
    results = [np.empty(x.shape, x.dtype) for x in shapes]
    for argument, result in written.items():
        results[result][...] = given[argument]
        given[argument] = results[result]
    _core.xla_call(name, words, tuple(given), tuple(results))
    return results


def call_handler(
    name: str,
    words: NDArray[np.int64],
    arrays: Sequence[jax.typing.ArrayLike],
    shapes: Sequence[Shaped],
    no_gradients: str,
    vmap_method: str = "expand_dims",
    written: Mapping[int, int] | None = None,
    callback: bool = False,
) -> tuple[jax.Array, ...]:
    """Return the results of a handler. `written` maps arrays that it writes to, to the results they become.

    With `callback`, or if JAX refuses the handlers, JAX calls back into Python, which calls the handler. `no_gradients`
    is what to say if they are differentiated, or nothing if they cannot be, in a `Map`.
    """
    arrays = alike([jax.numpy.asarray(array) for array in arrays])
    results = tuple(struct_like(shape, dtype, arrays[0]) for shape, dtype in shapes)
    written = written or {}
    more: Arguments = {"input_output_aliases": dict(written)} if written else {}
    by_callback = callback or not registered()

    def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        if by_callback:
            in_python = partial(_in_python, name, words, results, written)
            return tuple(jax.pure_callback(in_python, results, *arrays, vmap_method="sequential"))
        return tuple(jax.ffi.ffi_call(name, results, vmap_method=vmap_method, **more)(*arrays, words=words))

    if not no_gradients:
        return compute(*arrays)
    call = jax.custom_jvp(compute)

    @call.defjvp
    def refuse(*_: object) -> NoReturn:
        raise NotImplementedError(no_gradients)

    found: tuple[jax.Array, ...] = call(*arrays)
    return found


def _call(
    name: str,
    spec: Spec,
    learned: ByName,
    more: Sequence[jax.typing.ArrayLike],
    shapes: Sequence[Shaped],
    wanted: Sequence[str] = (),
    **said: bool,
) -> tuple[jax.Array, ...]:
    of_ring = "attnmask.jax.ring_attention has gradients, but no gradients of these"
    no_gradients = "" if spec.part is None else of_ring
    terms = _learned_terms(spec)
    words = _words(spec, said, (*LEARNED[:3], *terms), wanted)
    arrays = [learned[name] for name in LEARNED[:3]]
    arrays += [learned[name].reshape(shape) for name, shape in terms.items()]
    return call_handler(name, words, [*arrays, *more], shapes, no_gradients, callback=spec.callback)


def _learned_terms(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Return the terms whose arrays have gradients, and the shapes in which the core takes them."""
    arrays: Iterator[object] = (term.array for term in spec.terms)
    return dict(array for array in arrays if isinstance(array, Learned))


def results_like(spec: Spec, learned: ByName) -> list[Shaped]:
    """Return the shapes and types of: the result, the logsumexp of each row, the result before rounding."""
    query, value = learned["query"], learned["value"]
    batch, queries, heads, _ = query.shape
    wide = wide_dtype(query.dtype)
    row = batch, queries, heads, value.shape[3]
    return [(row, query.dtype if spec.part is None else wide), ((batch, heads, queries), wide), (row, wide)]


def forward(
    spec: Spec, learned: ByName, others: Sequence[jax.typing.ArrayLike], results: int
) -> tuple[jax.Array, ...]:
    """Return the first of: the result, the logsumexp of each row, the result before it is rounded to 16 bits."""
    shapes = results_like(spec, learned)[:results]
    return _call("attnmask_flash_forward", spec, learned, others, shapes)


def backward(
    spec: Spec,
    learned: ByName,
    others: Sequence[jax.typing.ArrayLike],
    wanted: Sequence[str],
    of_result: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """Return the gradients of the learned arrays that are `wanted`.

    `of_result` are the gradient of the result; the result, if possible before rounding; its logsumexp; and if it has
    one, the gradient of the logsumexp.
    """
    narrow = spec.part is not None and learned["query"].dtype != np.float64
    terms = _learned_terms(spec)
    names = [*LEARNED[:3], *(name for name in terms if name in wanted)]
    shapes = [
        (terms.get(name, learned[name].shape), np.float32 if narrow else learned[name].dtype)
        for name in names
    ]
    arrays, dlse = [*others, *of_result], len(of_result) == 4
    gradients = _call("attnmask_flash_backward", spec, learned, arrays, shapes, wanted, dlse=dlse)
    found = dict(zip(names, gradients, strict=True))
    return tuple(
        found[name].reshape(learned[name].shape) if name in found else jax.numpy.zeros_like(learned[name])
        for name in wanted
    )


def _tangents(spec: Spec, learned: ByName, tangents: ByName) -> tuple[list[jax.Array], dict[str, bool]]:
    """Return the tangents of learned arrays as handlers take them, and the flags that name them."""
    terms, heads = _learned_terms(spec), learned["query"].shape[2]
    found = []
    for name in (name for name in MOVED if name in tangents):
        x = tangents[name]
        if name == "softmax_aux":
            x = jax.numpy.broadcast_to(x, (heads, x.shape[-1]))
        found.append(x.reshape(terms["bias"]) if name == "bias" else x)
    return found, {f"{name}_tangent": name in tangents for name in MOVED}


def jvp(
    spec: Spec, learned: ByName, others: Sequence[jax.typing.ArrayLike], tangents: ByName
) -> tuple[jax.Array, ...]:
    """Return the tangents of the result and of its logsumexp."""
    given, said = _tangents(spec, learned, tangents)
    shapes = results_like(spec, learned)[:2]
    return _call("attnmask_flash_jvp", spec, learned, [*others, *given], shapes, (), **said)


def backward_vjp(
    spec: Spec,
    learned: ByName,
    others: Sequence[jax.typing.ArrayLike],
    of_result: Sequence[jax.Array],
    cotangents: ByName,
) -> ByName:
    """Return the second derivatives by query, key, value, dout and dlse. `cotangents` are those of the gradients of
    query, key and value; one that is missing is zero. `of_result` is as in `backward`.
    """
    given, said = _tangents(spec, learned, cotangents)
    _, of_lse, of_out = results_like(spec, learned)
    shapes = [*((learned[name].shape, learned[name].dtype) for name in LEARNED[:3]), of_out, of_lse]
    arrays, said["dlse"] = [*others, *of_result, *given], len(of_result) == 4
    found = _call("attnmask_flash_backward_vjp", spec, learned, arrays, shapes, (), **said)
    return dict(zip((*LEARNED[:3], "dout", "dlse"), found, strict=True))


def weigh(
    spec: Spec,
    arrays: ByName,
    others: Sequence[jax.typing.ArrayLike],
    queries: NDArray[np.int32],
    shapes: Mapping[str, Shaped],
    by_key_head: bool,
) -> tuple[jax.Array, ...]:
    """Return what the weights of chosen queries tell, as `shapes` names it. `arrays` are the learned ones, and lse."""
    lse = [arrays[name] for name in ("lse",) if name in arrays]
    said = {name: True for name in shapes if name != "top_weights"}
    with_axes = [((*shape, *[1] * (4 - len(shape))), dtype) for shape, dtype in shapes.values()]
    more = [*others, queries, *lse]
    said |= {"lse": bool(lse), "by_key_head": by_key_head}
    found = _call("attnmask_flash_weights", spec, arrays, more, with_axes, (), **said)
    return tuple(x.reshape(shape) for x, (shape, _) in zip(found, shapes.values(), strict=True))
