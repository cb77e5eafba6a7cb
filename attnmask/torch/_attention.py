"""Attention, attention to caches, and writes to these, for PyTorch."""

from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike

from attnmask._attention.arguments import (
    DEFAULTS,
    LEARNED,
    OPTIONS,
    CacheArguments,
    Call,
    cache_keywords,
)
from attnmask._cache.attend import as_attention, without_gradients
from attnmask._common.arguments import describe, flag, integer_array
from attnmask._common.keywords import taken
from attnmask._common.loading import _core
from attnmask._common.types import Arguments
from attnmask._faces.attention import ATTENTION, CACHE, WRITE
from attnmask._masks.info import MaskInfo
from attnmask.torch import _operators as operators
from attnmask.torch._faces import torch_function
from attnmask.torch._import import torch
from attnmask.torch._masks import mask_tensors, restored
from attnmask.torch._operators import check_tensor, needs_operator, with_tangents
from attnmask.torch._states import MaskTensors

_attend, _attend_to_cache, _write = map(torch_function, (ATTENTION, CACHE, WRITE))

# Plain calls, which ask for little: their operators are sooner called, and know no gradient.


def _plain_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    offset: "int | None",
    scale: "float | None",
    mask: "MaskInfo | MaskTensors | None" = None,
) -> torch.Tensor:
    given: Arguments = {"query": query, "key": key, "value": value, "causal": causal, "softmax_scale": scale}
    tensors = {name: given[name] for name in LEARNED[:3]}
    if mask is not None:
        given["attention_mask"] = mask
    more = {} if offset is None else {"causal_offset": offset}
    result: torch.Tensor = _attend.compute(given | more, False, tensors)
    return result


def _plain_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    operators.check_devices(LEARNED[:3], (query, key, value))
    (shape, _), *_ = _attend.likes({"query": query, "key": key, "value": value})
    return query.new_empty(shape)


def _masked_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask_tensors: list[torch.Tensor],
    mask_specification: str,
    causal: bool,
    offset: "int | None",
    scale: "float | None",
) -> torch.Tensor:
    mask = restored(mask_specification, mask_tensors)
    return _plain_on_cpu(query, key, value, causal, offset, scale, mask)


def _masked_fake(*operands: Any) -> torch.Tensor:
    operators.check_devices((*LEARNED[:3], "mask_tensors"), operands[:4])
    return _plain_fake(*operands)


# `_plain_on_cpu` in C, which leaves to it what is unusual, or wrong.
_plain = _core.tensor_attention(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), _plain_on_cpu)
_plain_operator = operators.register(
    "flash_attention_plain",
    "Tensor query, Tensor key, Tensor value, bool causal, SymInt? offset, float? softmax_scale",
    "Tensor",
    _plain,
    _plain_fake,
)
_masked_operator = operators.register(
    "flash_attention_masked",
    "Tensor query, Tensor key, Tensor value, Tensor[] mask_tensors, str mask_specification, "
    "bool causal, SymInt? offset, float? softmax_scale",
    "Tensor",
    _masked_on_cpu,
    _masked_fake,
)

# Compiled calls look again at every global name and attribute that was read to compile them: these are few.
_Tensor = torch.Tensor
_is_compiling = torch.compiler.is_dynamo_compiling
_is_exporting = torch.compiler.is_exporting
_is_autocast_enabled = torch.is_autocast_enabled
_are_transforms_active = operators.are_transforms_active
_PLAIN_OPTIONS = {"causal", "causal_offset", "softmax_scale"}


def _is_plain(tensors: Sequence[Any], mask: object, bias: object, more: Arguments) -> bool:
    """Return whether an operator of plain calls can answer a call."""
    for x in tensors:
        if not (isinstance(x, _Tensor) and x.is_cpu):
            return False
    if bias is not None or not (mask is None or isinstance(mask, MaskInfo)):
        return False
    for name, x in more.items():
        if name == "causal":
            usual = x is True or x is False
        elif name == "causal_offset":
            usual = type(x) is int
        else:
            usual = x is None or (name == "softmax_scale" and type(x) is float)
        if not usual:
            return False
    query, key, value = tensors
    learning = query.requires_grad or key.requires_grad or value.requires_grad
    return not (
        (learning and torch.is_grad_enabled())
        or _is_autocast_enabled("cpu")
        or _are_transforms_active()
        or _is_exporting()  # into a program that may be trained
    )


@overload
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: "ArrayLike | MaskInfo | MaskTensors | None" = None,
    bias: "ArrayLike | None" = None,
    **more: Unpack[Call[Literal[False]]],
) -> torch.Tensor: ...
@overload
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: "ArrayLike | MaskInfo | MaskTensors | None" = None,
    bias: "ArrayLike | None" = None,
    **more: Unpack[Call[Literal[True]]],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: "ArrayLike | MaskInfo | MaskTensors | None" = None,
    bias: "ArrayLike | None" = None,
    **more: Unpack[Call[bool]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@OPTIONS
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: "ArrayLike | MaskInfo | MaskTensors | None" = None,
    bias: "ArrayLike | None" = None,
    *,
    return_lse: bool = False,
    **more: object,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Apply `attnmask.flash_attention` to CPU tensors, without copying them.

    `query`, `key`, `value`, `bias`, `softmax_aux`, `relative_bias` and `grid_bias` have gradients, and so has the
    logsumexp with `return_lse`. In forward mode (``torch.func.jvp``, ``jacfwd``, ``torch.autograd.forward_ad``) all of
    these but `relative_bias` and `grid_bias` may have tangents. `query`, `key` and `value` have second derivatives:
    gradients of gradients (``create_graph=True``), tangents of gradients (``torch.func.hessian``) and gradients of
    tangents. ``torch.autocast`` casts `query`, `key` and `value` as for ``scaled_dot_product_attention``, and nothing
    else. ``torch.compile``, ``torch.export`` and other tracers see one operator; ``torch.func`` can transform it. With
    dropout and no `dropout_seed`, PyTorch's generator draws the seed, which ``torch.manual_seed`` decides.

    Parameters
    ----------
    query, key, value : Tensor, shape [B, Tq, H, D], [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv]
        Without B if `cum_seqlens_q` or `cum_seqlens_k` is given; or with several batch axes in place of B.
    attention_mask : Tensor, array_like, MaskInfo or MaskTensors, optional
        As in `attnmask.flash_attention`; `mask_tensors` makes MaskTensors.
    bias : Tensor or array_like, optional
        Added to the logits.
    return_lse : bool
        Also return the logsumexp of each row.
    **more
        The other arguments of `attnmask.flash_attention` by name, except `out`. Arrays may be tensors.

    Returns
    -------
    Tensor, or tuple of two Tensors if `return_lse`

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> query = torch.zeros(1, 3, 1, 8, requires_grad=True)
    >>> value = torch.arange(3.0).reshape(1, 3, 1, 1).requires_grad_()
    >>> out = attnmask.torch.flash_attention(query, query, value, causal=True)
    >>> out.flatten().tolist()
    [0.0, 0.5, 1.0]
    >>> out.sum().backward()
    >>> [round(x, 3) for x in value.grad.flatten().tolist()]
    [1.833, 0.833, 0.333]
    """
    compiling = _is_compiling()
    tensors = query, key, value
    if return_lse is False and _is_plain(tensors, attention_mask, bias, more):
        options: Any = more.get("causal", False), more.get("causal_offset"), more.get("softmax_scale")
        mask: Any = attention_mask
        if compiling:
            if mask is None:
                return _plain_operator(*tensors, *options)
            described = mask_tensors(mask)
            return _masked_operator(*tensors, list(described.tensors), described.specification, *options)
        moved = with_tangents(LEARNED, tensors)
        if more.keys() <= _PLAIN_OPTIONS and not moved and not needs_operator(tensors):
            if mask is None:
                return _plain(*tensors, *options)
            causal, offset, scale = options
            return _plain_on_cpu(query, key, value, causal, offset, scale, mask)
    for name, x in zip(LEARNED, tensors, strict=False):
        check_tensor(x, name)
    if not more.keys() <= DEFAULTS.keys():
        more = taken("flash_attention", more, (*DEFAULTS, "return_lse"))
    slopes = more.get("alibi_slopes")
    if isinstance(slopes, torch.Tensor) and slopes.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "attnmask.torch.flash_attention has no gradient of alibi_slopes: write alibi_slopes.detach(), or train a "
            "relative_bias"
        )
    given: Arguments = {"query": query, "key": key, "value": value}
    given |= {"attention_mask": attention_mask, "bias": bias, **more}
    return _attend(given, flag(return_lse, "return_lse"))


# Caches

_Flag = TypeVar("_Flag", bound=bool)
_KEYWORDS = cache_keywords("torch.Tensor")


class _CacheCall(CacheArguments[torch.Tensor], Generic[_Flag], total=False):
    attention_mask: "ArrayLike | MaskInfo | MaskTensors | None"
    return_lse: _Flag
    out: "torch.Tensor | None"


def _learns(query: object, k_cache: object, v_cache: object) -> bool:
    """Return whether derivatives of a call may be needed."""
    if torch.is_grad_enabled() and (
        getattr(query, "requires_grad", False)
        or getattr(k_cache, "requires_grad", False)
        or getattr(v_cache, "requires_grad", False)
    ):
        return True
    return bool(operators.transforms() or with_tangents(LEARNED, (query, k_cache, v_cache)))


def _has_gradients(given: Arguments) -> bool:
    tensors = [given[name] for name in ("query", "k_cache", "v_cache")]
    lengths = given["cache_seqlens"]
    return (
        all(isinstance(x, torch.Tensor) and x.ndim == 4 and x.is_floating_point() for x in tensors)
        and not without_gradients(given)
        and (lengths is None or type(lengths) is int or not torch.compiler.is_compiling())
    )  # graphs cannot check lengths


def _seen_of_cache(given: Arguments) -> Arguments:
    """Return the arguments of `flash_attention` that have the same result."""
    seen, (batch, queries, *_), tokens = as_attention(given), given["query"].shape, given["k_cache"].shape[1]
    lengths = tokens if given["cache_seqlens"] is None else given["cache_seqlens"]
    if type(lengths) is not int and not isinstance(lengths, torch.Tensor):
        lengths = torch.as_tensor(np.array(integer_array(lengths, "cache_seqlens")))
    if isinstance(lengths, torch.Tensor) and lengths.dtype == torch.uint8:
        lengths = lengths.int()  # uint8 would wrap below 0 in causal_offset
    within = (lengths >= 0) & (lengths <= tokens)
    if not (within if type(lengths) is int else within.all()):
        raise ValueError(f"cache_seqlens must be from 0 to {tokens}, the tokens of k_cache, got {lengths}")
    seen["causal_offset"] = lengths - queries
    if type(lengths) is int:
        return seen | {name: seen[name][:, :lengths] for name in ("key", "value")}
    keys = torch.arange(tokens) < lengths.expand(batch)[:, None]
    seen["kv_segment_ids"] = keys.int() - 1
    return seen | {"q_segment_ids": torch.zeros(batch, queries, dtype=torch.int32)}


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

    Where nothing is written to a contiguous cache of floats, `query`, `k_cache` and `v_cache` have the derivatives that
    they have in `flash_attention`. All else has no gradient: with grad mode on, tensors that require one are an error.
    ``torch.autocast`` casts `query`, `key` and `value`, but not the caches. ``torch.compile`` and ``torch.export`` see
    one operator, which declares that it writes to the caches and their scales.

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
    own: Arguments = {"query": query, "k_cache": k_cache, "v_cache": v_cache, "key": key, "value": value}
    own |= {"attention_mask": attention_mask, "out": out}
    given = _KEYWORDS.complete(flash_attention_with_kvcache, own, more)
    if _learns(query, k_cache, v_cache) and _has_gradients(given):
        return flash_attention(**_seen_of_cache(given), return_lse=return_lse)
    if isinstance(out, torch.Tensor) or out is None:
        return _attend_to_cache(given, flag(return_lse, "return_lse"))
    raise TypeError(f"out must be a tensor, got {describe(out)}")


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
        "rotate": rotate,
    }
    _write(given)
