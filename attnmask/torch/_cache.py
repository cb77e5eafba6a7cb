"""`flash_attention_with_kvcache` and `write_kvcache` for PyTorch, and the operators of these names.

The first operator takes the arguments of `attnmask.flash_attention_with_kvcache`, a `MaskInfo` and a window as
`flash_attention` does, and ``cache_seqlens`` as a tensor or, if that is None, as an integer. Both declare that they
write to the caches and their scales. The first returns both results, the second nothing.
"""

from collections.abc import Iterable
from typing import Generic, Literal, TypeVar, Unpack, overload

from numpy.typing import ArrayLike

from attnmask._attention.arguments import (
    ARGUMENTS,
    ARRAYS,
    CACHE_DEFAULTS,
    NUMBERS,
    OF_CACHES,
    CacheArguments,
    cache_keywords,
)
from attnmask._cache.flash_attention_with_kvcache import flash_attention_with_kvcache as attend_in_numpy
from attnmask._cache.write_kvcache import write_kvcache as write_in_numpy
from attnmask._common.arguments import describe, flag, integer, suit_hint
from attnmask._common.types import Arguments
from attnmask._masks.info import MaskInfo
from attnmask.torch import _operators as operators
from attnmask.torch._import import torch
from attnmask.torch._masks import restored
from attnmask.torch._operators import check_tensor, detached, needs_operator, operand, tensors_among
from attnmask.torch._states import MaskTensors, to_tensor

_ROWS = {row.name: row for row in (*ARGUMENTS, *OF_CACHES) if row.name in CACHE_DEFAULTS}
_ARRAYS = tuple(name for name in _ROWS if name in ARRAYS)
_NUMBERS = tuple(name for name in _ROWS if name in (*NUMBERS, *(row.name for row in OF_CACHES)))
_PARAMETERS = ", ".join(
    (
        "Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? key, Tensor? value, Tensor? cache_seqlens, "
        "Tensor? block_table, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k_new, Tensor(c!)? k_scale, "
        "Tensor(d!)? v_scale, Tensor? attention_mask",
        *(_ROWS[name].of_operator for name in _ARRAYS),
        "Tensor[] mask_tensors, str mask_specification, SymInt? cache_length, SymInt? window_left, "
        "SymInt? window_right",
        *(_ROWS[name].of_operator for name in _NUMBERS),
        "bool rotate",
    )
)
_NAMES = tuple(parameter.split()[-1] for parameter in _PARAMETERS.split(", "))
_KEYWORDS = cache_keywords("torch.Tensor")
_WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale")
_MUST_BE_TENSORS = ("query", *_WRITTEN, "key", "value", "out")
_REQUIRED = {
    "flash_attention_with_kvcache": ("query", "k_cache", "v_cache"),
    "write_kvcache": ("k_cache", "v_cache", "key"),
}


def check_no_gradient(
    tensors: dict[str, torch.Tensor], function: str = "flash_attention_with_kvcache"
) -> None:
    operators.check_no_gradient(tensors, function, "flash_attention")


def _ways(
    given: Arguments, must_be_tensors: Iterable[str], function: str
) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the tensors among checked arguments, and whether the operator must be called."""
    tensors = tensors_among(given)
    for name in must_be_tensors:
        if name not in tensors and (given[name] is not None or name in _REQUIRED[function]):
            check_tensor(given[name], name)
    for name, x in tensors.items():
        check_tensor(x, name)
    compiling = torch.compiler.is_dynamo_compiling()
    if not compiling:
        check_no_gradient(tensors, function)
    return tensors, compiling or needs_operator(tensors.values())


def _tell_written(tensors: dict[str, torch.Tensor], names: Iterable[str]) -> None:
    """Tell autograd what was written to, as any in-place operator does."""
    written = [tensors[name] for name in names if name in tensors and not tensors[name].is_inference()]
    torch.autograd.graph.increment_version(written)


def _attend(
    given: Arguments, tensors: dict[str, torch.Tensor], with_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attend on the CPU."""
    arrays = {name: operators.in_place(detached(x), name) for name, x in tensors.items()}
    try:
        result = attend_in_numpy(**given | arrays, return_lse=with_lse)
    except (TypeError, ValueError) as error:
        suit_hint(error, tensors)
        raise
    _tell_written(tensors, (*(() if given["key"] is None else _WRITTEN), "out"))
    out, lse = result if isinstance(result, tuple) else (result, None)
    returned = tensors["out"] if "out" in tensors else to_tensor(out)
    return returned if lse is None else (returned, to_tensor(lse))


def _check_out(out: torch.Tensor, query: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Check what a graph copies the result to, before it writes to the caches."""
    dtype, channels = query.dtype, v_cache.shape[-1] * (1 + (v_cache.dtype == torch.uint8))
    if torch.is_autocast_enabled("cpu") and dtype != torch.float64:
        dtype = torch.get_autocast_dtype("cpu")
    if out.dtype != dtype or out.shape != (*query.shape[:-1], channels):
        name = str(dtype).removeprefix("torch.")
        expected = f"a tensor of {name} of shape {(*query.shape[:-1], channels)}"
        raise ValueError(f"out must be {expected}, got {describe(out)}")


# The operator


def _operands(given: Arguments) -> list[object]:
    length = given["cache_seqlens"]
    is_number = isinstance(length, (int, torch.SymInt)) and not isinstance(length, bool)
    operands = {
        **given,
        **operators.mask_operands(given["attention_mask"]),
        **operators.window_operands(given["sliding_window"]),
        **operators.numbers(given, _NUMBERS),
        "cache_seqlens": None if is_number else operand(length),
        "cache_length": integer(length, "cache_seqlens", 0) if is_number else None,
        "rotate": flag(given["rotate"], "rotate"),
    }
    for name in ("block_table", "cu_seqlens_q", "cu_seqlens_k_new", *_ARRAYS):
        operands[name] = operand(given[name])
    return [operands[name] for name in _NAMES]


def _on_cpu(*arguments: object) -> torch.Tensor | tuple[torch.Tensor, ...]:
    given: Arguments = dict(zip(_NAMES, arguments, strict=True))
    tensors, specification, length = (
        given.pop(name) for name in ("mask_tensors", "mask_specification", "cache_length")
    )
    sides = given.pop("window_left"), given.pop("window_right")
    if specification:
        given["attention_mask"] = restored(specification, tensors)
    if length is not None:
        given["cache_seqlens"] = length
    given["sliding_window"] = None if sides == (None, None) else sides
    return _attend(given, tensors_among(given), True)


def _check_caches(given: Arguments) -> None:
    for name in ("k_cache", "v_cache"):
        if given[name].ndim != 4:
            expected = "[B, Tmax, Hkv, D] or [pages, page_size, Hkv, D]"
            raise ValueError(f"{name} must be {expected}, got {describe(given[name])}")


def _fake(*arguments: object) -> tuple[torch.Tensor, ...]:
    """Return results for tensors without data."""
    operators.check_devices(_NAMES, arguments)
    given: Arguments = dict(zip(_NAMES, arguments, strict=True))
    query, packed = given["query"], given["cu_seqlens_q"] is not None
    expected = "[total, H, D] with cu_seqlens_q" if packed else "[B, T, H, D]"
    if query.ndim != (3 if packed else 4):
        raise ValueError(f"query must be {expected}, got {describe(query)}")
    _check_caches(given)
    v_cache = given["v_cache"]
    # A byte of a four-bit cache holds two channels.
    value = torch.cat([v_cache, v_cache], -1) if v_cache.dtype == torch.uint8 else v_cache
    return operators.new_results(query, value)


def _autocast(*arguments: object) -> tuple[torch.Tensor, ...]:
    given: Arguments = dict(zip(_NAMES, arguments, strict=True))
    with operators.without_autocast():
        return torch.ops.attnmask.flash_attention_with_kvcache(*_cast(given).values())


def _cast(given: Arguments) -> Arguments:
    tokens = ((name, given[name]) for name in ("query", "key", "value"))
    return given | {name: x if x is None else operators.autocast(x) for name, x in tokens}


operators.register(
    "flash_attention_with_kvcache",
    _PARAMETERS,
    _on_cpu,
    _fake,
    autograd=operators.without_gradient("flash_attention_with_kvcache", _NAMES, "flash_attention"),
    autocast=_autocast,
)


# The function

_Flag = TypeVar("_Flag", bound=bool)


class _CacheCall(CacheArguments[torch.Tensor], Generic[_Flag], total=False):
    attention_mask: "ArrayLike | MaskInfo | MaskTensors | None"
    return_lse: _Flag
    out: "torch.Tensor | None"


@overload
def flash_attention_with_kvcache(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: "torch.Tensor | None" = None,
    value: "torch.Tensor | None" = None,
    **more: Unpack[_CacheCall[Literal[False]]],
) -> torch.Tensor: ...
@overload
def flash_attention_with_kvcache(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: "torch.Tensor | None" = None,
    value: "torch.Tensor | None" = None,
    **more: Unpack[_CacheCall[Literal[True]]],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attention_with_kvcache(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: "torch.Tensor | None" = None,
    value: "torch.Tensor | None" = None,
    **more: Unpack[_CacheCall[bool]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@_KEYWORDS
def flash_attention_with_kvcache(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: "torch.Tensor | None" = None,
    value: "torch.Tensor | None" = None,
    *,
    attention_mask: "ArrayLike | MaskInfo | MaskTensors | None" = None,
    return_lse: bool = False,
    out: "torch.Tensor | None" = None,
    **more: object,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Apply `attnmask.flash_attention_with_kvcache` to CPU tensors: append new keys and values, and attend.

    It has no gradient: with grad mode on, tensors that require one are an error. ``torch.autocast`` casts `query`,
    `key` and `value`, but not the caches. ``torch.compile`` and ``torch.export`` see one operator, which declares that
    it writes to the caches and their scales.

    Parameters
    ----------
    query, key, value : Tensor
        As in `attnmask.flash_attention_with_kvcache`, like all arguments without a description here.
    k_cache, v_cache : Tensor
        float16, bfloat16, float32, float64, int8, float8_e4m3fn, float8_e5m2, or uint8 for four bits.
    k_scale, v_scale : Tensor of float32, optional
        For four bits, float16 as well.
    cache_seqlens : int, Tensor or array_like, optional
    block_table, cu_seqlens_q, cu_seqlens_k_new : Tensor or array_like, optional
    attention_mask : Tensor, array_like, MaskInfo or MaskTensors, optional
    return_lse : bool
    out : Tensor, optional
        Write the result here, and return it. A graph copies the result to it.
    rotate : bool
    **more
        The other arguments of `attnmask.flash_attention_with_kvcache` by name; all mean the same.

    Returns
    -------
    Tensor, or tuple of two Tensors if `return_lse`

    See Also
    --------
    attnmask.transformers.PagedCache : pages for transformers models.

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> k_cache, v_cache = torch.zeros(1, 16, 1, 8), torch.zeros(1, 16, 1, 1)
    >>> key, value = torch.zeros(1, 3, 1, 8), torch.arange(3.0).reshape(1, 3, 1, 1)
    >>> out = attnmask.torch.flash_attention_with_kvcache(
    ...     key, k_cache, v_cache, key, value, cache_seqlens=0
    ... )
    >>> out.flatten().tolist(), v_cache.flatten()[:4].tolist()
    ([0.0, 0.5, 1.0], [0.0, 1.0, 2.0, 0.0])
    """
    with_lse = flag(return_lse, "return_lse")
    own: Arguments = {"query": query, "k_cache": k_cache, "v_cache": v_cache, "key": key, "value": value}
    own |= {"attention_mask": attention_mask, "out": out}
    given = _KEYWORDS.complete(flash_attention_with_kvcache, own, more)
    tensors, in_graph = _ways(given, _MUST_BE_TENSORS, "flash_attention_with_kvcache")
    if in_graph:
        meta = operators.on_meta(given)
        if out is not None:
            _check_out(out, query, v_cache)
        operator = torch.ops.attnmask.flash_attention_with_kvcache
        result, lse = operators.call_operator(operator, _operands(given), meta)
        result = result if out is None else out.copy_(result)
        return (result, lse) if with_lse else result
    if isinstance(attention_mask, MaskTensors):
        given["attention_mask"] = restored(*attention_mask)
    if torch.is_autocast_enabled("cpu"):
        given = _cast(given)
        tensors = tensors_among(given)
    return _attend(given, tensors, with_lse)


# Writes to slots

_WRITE_PARAMETERS = (
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor key, Tensor? value, Tensor slot_mapping, Tensor(c!)? k_scale, "
    "Tensor(d!)? v_scale, bool rotate"
)
_WRITE_NAMES = tuple(parameter.split()[-1] for parameter in _WRITE_PARAMETERS.split(", "))


def _write(given: Arguments, tensors: dict[str, torch.Tensor]) -> None:
    arrays = {name: operators.in_place(detached(x), name) for name, x in tensors.items()}
    try:
        write_in_numpy(**given | arrays)
    except (TypeError, ValueError) as error:
        suit_hint(error, tensors)
        raise
    _tell_written(tensors, _WRITTEN)


def _write_on_cpu(*arguments: object) -> None:
    given: Arguments = dict(zip(_WRITE_NAMES, arguments, strict=True))
    _write(given, tensors_among(given))


def _write_fake(*arguments: object) -> None:
    operators.check_devices(_WRITE_NAMES, arguments)
    given: Arguments = dict(zip(_WRITE_NAMES, arguments, strict=True))
    _check_caches(given)
    for name in ("key", "value"):
        if given[name] is not None and given[name].ndim != 3:
            raise ValueError(f"{name} must be [total, Hkv, D] with slot_mapping, got {describe(given[name])}")


operators.register(
    "write_kvcache",
    _WRITE_PARAMETERS,
    _write_on_cpu,
    _write_fake,
    autograd=operators.without_gradient("write_kvcache", _WRITE_NAMES, "flash_attention"),
    results="()",
)


def write_kvcache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: torch.Tensor,
    value: "torch.Tensor | None",
    slot_mapping: "ArrayLike",
    *,
    k_scale: "torch.Tensor | None" = None,
    v_scale: "torch.Tensor | None" = None,
    rotate: bool = False,
) -> None:
    """Apply `attnmask.write_kvcache` to CPU tensors: write keys and values to given slots of a cache.

    It has no gradient: with grad mode on, tensors that require one are an error. ``torch.compile`` and ``torch.export``
    see one operator, which declares that it writes to the caches and their scales.

    Parameters
    ----------
    k_cache, v_cache, key, value : Tensor
        As in `attnmask.write_kvcache`, like all arguments.
    slot_mapping : Tensor or array_like
    k_scale, v_scale : Tensor, optional
    rotate : bool

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> k_cache, v_cache = torch.zeros(2, 3, 4, 1, 1)
    >>> tokens = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    >>> attnmask.torch.write_kvcache(k_cache, v_cache, tokens, 10 * tokens, torch.tensor([10, -1, 3]))
    >>> v_cache.reshape(3, 4).tolist()
    [[0.0, 0.0, 0.0, 30.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 10.0, 0.0]]
    """
    given: Arguments = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "key": key,
        "value": value,
        "slot_mapping": slot_mapping,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "rotate": flag(rotate, "rotate"),
    }
    tensors, in_graph = _ways(given, (*_WRITTEN, "key", "value"), "write_kvcache")
    if in_graph:
        meta = operators.on_meta(given)
        given["slot_mapping"] = operand(slot_mapping)
        operators.call_operator(torch.ops.attnmask.write_kvcache, [*given.values()], meta)
    else:
        _write(given, tensors)
