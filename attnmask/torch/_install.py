"""Run PyTorch's own attention on attnmask, on the CPU.

``torch.nn.attention.varlen`` uses ``aten::_flash_attention_forward`` and related operators, which PyTorch implements
only for other devices. ``scaled_dot_product_attention`` on the CPU uses
``aten::_scaled_dot_product_flash_attention_for_cpu`` where it applies, and otherwise its formula,
``aten::_scaled_dot_product_attention_math``. `install` registers kernels for all of them, in PyTorch's slot for
implementations of flash attention: ``torch.nn.attention.current_flash_attention_impl()`` then returns ``"attnmask"``.

First derivatives are those that PyTorch has of its operators, and `_Learning` for calls of the formula. For tangents
and second derivatives, which the operators do not have, kernels before these call `flash_attention`.
"""

import itertools
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.nn import attention

from attnmask._attention.arguments import LEARNED
from attnmask._attention.flash_attention import flash_attention_bwd, flash_attention_fwd
from attnmask._attention.forward import attend_for_gradients, dropout_keep_mask
from attnmask._attention.problem import both_starts
from attnmask._cache.flash_attention_with_kvcache import flash_attention_with_kvcache
from attnmask._common.arguments import as_array, describe, integers
from attnmask._common.types import AnyFunction, Arguments
from attnmask.torch import _operators as operators
from attnmask.torch._attention import _attend, flash_attention
from attnmask.torch._gradients import spread
from attnmask.torch._handed_back import SERVED, TRANSFORM, TYPE, counts, readable, reason_of
from attnmask.torch._import import torch
from attnmask.torch._operators import in_place, needs_operator
from attnmask.torch._states import to_tensor
from attnmask.torch._types import MaybeTensor

_NAME = "attnmask"
_SDPA, _MATH = "scaled_dot_product_attention", "_scaled_dot_product_attention_math"
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_FUNCTORCH = "FuncTorchDynamicLayerFrontMode"  # where PyTorch begins to transform


# Where PyTorch would use its own flash attention: with four axes, no dropout, and a mask that needs no gradient


def _or_own(name: str, key: str, inputs: int, choose: AnyFunction) -> AnyFunction:
    """Return the kernel that `choose` returns for tensors, with PyTorch's own for this dispatch key as a fallback. The
    first `inputs` arguments are tensors.
    """
    own = torch.library.get_kernel(f"aten::{name}", key)

    def kernel(
        keyset: torch._C.DispatchKeySet,
        *arguments: Any,
        attn_mask: MaybeTensor = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, ...]:
        tensors, (dropout, causal) = arguments[:inputs], (*arguments[inputs:], 0.0, False)[:2]
        given = (*tensors, attn_mask)
        chosen = choose(given) if _active and dropout == 0 and readable(given) else None
        if chosen is None:
            if _active and key == "CPU" and name == _FLASH:
                counts[TYPE] += 1
            return own.call_boxed(keyset, *tensors, dropout, causal, attn_mask=attn_mask, scale=scale)
        return chosen(*given, causal=causal, causal_offset=0, softmax_scale=scale)

    return kernel


def _array(x: MaybeTensor) -> Any:
    return None if x is None else in_place(x.detach() if x.requires_grad else x, "a tensor")


def _tokens_first(tensors: Iterable[torch.Tensor], axes: int, bias: MaybeTensor) -> list[Any]:
    """Return [..., H, T, D] as [B, T, H, D]. There is one batch axis, unless the bias may have several."""
    if axes == 4 or (axes > 4 and bias is not None and bias.ndim > 3):
        return [_array(x).swapaxes(-3, -2) for x in tensors]
    return [x.reshape(prod(x.shape[:-3]), *x.shape[-3:]).swapaxes(1, 2) for x in map(_array, tensors)]


def _heads_first(array: Any, batch: Sequence[int]) -> Any:
    array = array.swapaxes(-3, -2)
    return array if array.ndim == 3 + len(batch) else array.reshape(*batch, *array.shape[1:])


def _attend_into(out: torch.Tensor, tensors: Sequence[Any], more: Arguments) -> Any:
    """Write the result to `out` and return the logsumexp."""
    *inputs, bias = tensors
    query, key, value, into = _tokens_first((*inputs, out), out.ndim, bias)
    counts[SERVED] += 1
    return flash_attention_fwd(query, key, value, bias=_array(bias), **more, out=into)[1]


def _gradients(*tensors: Any, **more: Any) -> tuple[MaybeTensor, ...]:
    """Return the gradients of query, key, value and bias."""
    *inputs, lse, bias = tensors
    dout, query, key, value, out = _tokens_first(inputs, inputs[0].ndim, bias)
    found = flash_attention_bwd(dout, query, key, value, out, _array(lse), bias=_array(bias), **more)
    grads = (to_tensor(_heads_first(grad, inputs[0].shape[:-3])) for grad in found[:3])
    return *grads, None if found.bias is None else to_tensor(found.bias)


def _sdpa(*tensors: Any, **more: Any) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(tensors[0])
    lse = _attend_into(out, tensors, more)
    return out, to_tensor(np.ascontiguousarray(lse.swapaxes(1, 2)).swapaxes(1, 2))  # as PyTorch has it


def _sdpa_backward(*tensors: Any, **more: Any) -> tuple[MaybeTensor, ...]:
    return _gradients(*tensors, **more)[:3]


# What PyTorch has no derivatives for, before it refuses them


def _moved(tensors: Sequence[MaybeTensor]) -> bool:
    return bool(operators.with_tangents(LEARNED, tensors)) and not needs_operator(tensors)


def _sdpa_moved(tensors: Sequence[MaybeTensor]) -> AnyFunction | None:
    return _sdpa_with_tangents if _moved(tensors) else None


def _sdpa_backward_moved(tensors: Sequence[MaybeTensor]) -> AnyFunction | None:
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return _sdpa_backward_again if _moved(tensors) or (learns and not needs_operator(tensors)) else None


def _swapped(x: torch.Tensor) -> torch.Tensor:
    """Swap PyTorch's order [..., H, T, D] with [..., T, H, D]."""
    return x.transpose(-3, -2)


def _sdpa_with_tangents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: MaybeTensor, **more: Any
) -> tuple[torch.Tensor, ...]:
    query, key, value = map(_swapped, (query, key, value))
    counts[SERVED] += 1
    out, lse = flash_attention(query, key, value, bias=bias, return_lse=True, **more)
    return _swapped(out), lse


def _sdpa_backward_again(dout: torch.Tensor, *tensors: Any, **more: Any) -> tuple[torch.Tensor, ...]:
    *inputs, out, lse, bias = tensors
    given = dict(zip(LEARNED, (*map(_swapped, inputs), bias), strict=False)) | {"attention_mask": None}
    wanted = [name in LEARNED[:3] for name in _attend.learned]
    # PyTorch's own node does not know that it got no gradient of a result.
    results = _swapped(dout), None, _swapped(out.detach()), lse.detach().reshape(out.shape[:-1])
    return tuple(map(_swapped, _attend.learn_backward(*results, *_attend.operands.of(given | more), wanted)))


# PyTorch sends all other calls to its formula, `_scaled_dot_product_attention_math`, and uses the first result.


class _Learning(torch.autograd.Function):
    """A call whose gradients attnmask computes, and the formula gradients of these where attnmask has none."""

    @staticmethod
    def forward(ctx: Any, gqa: bool, more: Arguments, *tensors: Any) -> torch.Tensor:
        *inputs, bias = tensors
        given = dict(zip(LEARNED, (*_tokens_first(inputs, inputs[0].ndim, bias), _array(bias)), strict=False))
        counts[SERVED] += 1
        result, lse, wide = attend_for_gradients(given | {"attention_mask": None} | more)
        batch = inputs[0].shape[:-3]
        out = to_tensor(np.ascontiguousarray(_heads_first(result, batch)))
        kept = out if wide is result else to_tensor(_heads_first(wide, batch))
        ctx.gqa, ctx.more = gqa, more
        ctx.save_for_backward(*inputs, kept, to_tensor(lse), bias)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[MaybeTensor, ...]:
        if torch.compiler.is_dynamo_compiling():  # where gradients are compiled, too
            return torch.compiler.disable(_Learning.backward)(ctx, dout)
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]
        batched = torch._C._functorch.is_legacy_batchedtensor(
            dout
        )  # by is_grads_batched, for which no operator has rules
        again = torch.is_grad_enabled() or operators.in_forward_mode() or needs_operator((dout, *saved))
        if batched or (again and (wanted[3] or dout.ndim == 3)):
            return None, None, *_by_formula(dout, (*saved[:3], saved[-1]), wanted, ctx.gqa, ctx.more)
        if again:
            return None, None, *_sdpa_backward_again(dout, *saved, **ctx.more), None
        return None, None, *_gradients(dout, *saved, **ctx.more, grad_bias=wanted[3])


def _by_formula(
    dout: torch.Tensor, tensors: tuple[Any, ...], wanted: Sequence[bool], gqa: bool, more: Arguments
) -> list[MaybeTensor]:
    """Return gradients as PyTorch computes them, with the dropout of the forward pass."""
    query, key, value, _ = tensors
    pairs = (*query.shape[:-1], key.shape[-2])
    chance, seed = more.get("dropout_prob", 0.0), more.get("dropout_seed", 0)
    kept = dropout_keep_mask(seed, chance, (prod(pairs[:-3]), *pairs[-3:]))
    keeps = torch.from_numpy(kept).reshape(pairs)
    formula, options = getattr(torch.ops.aten, _MATH), (0.0, more["causal"], keeps)
    with torch.enable_grad():
        _, weights = formula(*tensors, *options, scale=more["softmax_scale"], enable_gqa=gqa)
        shared = value.repeat_interleave(query.shape[-3] // max(value.shape[-3], 1), -3)
        out = (weights * keeps / (1 - chance)) @ shared
    learned = itertools.compress(tensors, wanted)
    return spread(torch.autograd.grad(out, learned, dout, create_graph=torch.is_grad_enabled()), wanted)


def _formula() -> AnyFunction:
    own = torch.library.get_kernel(f"aten::{_MATH}", "CPU")

    def attend(
        keyset: torch._C.DispatchKeySet,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: MaybeTensor = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        dropout_mask: MaybeTensor = None,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        tensors, options = (query, key, value, attn_mask), (dropout_p, is_causal, dropout_mask)
        reason = reason_of(tensors, dropout_p, dropout_mask, enable_gqa) if _active else SERVED
        if reason is not None:
            counts[reason] += _active
            return own.call_boxed(keyset, *tensors, *options, scale=scale, enable_gqa=enable_gqa)
        more: Arguments = {"causal": is_causal, "causal_offset": 0, "softmax_scale": scale}
        if dropout_p:
            more |= {"dropout_prob": dropout_p, "dropout_seed": operators.seed_of(dropout_p, None)}
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            out = _Learning.apply(enable_gqa, more, *tensors)
        else:
            out = query.new_empty((*query.shape[:-1], value.shape[-1]))
            _attend_into(out, tensors, more)
        return out, query.new_empty(0)

    return attend


# `torch.func` calls `scaled_dot_product_attention` itself before its parts.


def _derives_again() -> bool:
    """Return whether `torch.func` asks for tangents, or for gradients of gradients."""
    found = operators.transforms()
    return len(found) > 1 or torch._C._functorch.TransformType.Jvp in found


def _transformed() -> AnyFunction:
    own = torch.library.get_kernel(f"aten::{_SDPA}", _FUNCTORCH)

    def attend(
        keyset: torch._C.DispatchKeySet,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: MaybeTensor = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        usual = (
            _active
            and _derives_again()
            and query.ndim > 3
            and not dropout_p
            and (attn_mask is None or not (is_causal or attn_mask.requires_grad))
        )
        bias = attn_mask
        if usual and bias is not None and bias.dtype == torch.bool:
            bias = torch.where(bias, 0.0, -inf).to(query.dtype)
        if not (usual and reason_of((query, key, value, bias), 0.0, None, enable_gqa) == TRANSFORM):
            given = (query, key, value, attn_mask, dropout_p, is_causal)
            return own.call_boxed(keyset, *given, scale=scale, enable_gqa=enable_gqa)
        options: Arguments = {"causal": is_causal, "causal_offset": 0, "softmax_scale": scale}
        return _sdpa_with_tangents(query, key, value, bias, **options)[0]

    return attend


# torch.nn.attention.varlen. Its operators get their arguments by name, with the defaults of their schemas.


def _places(given: Arguments) -> Arguments:
    """Return what the operators' arguments say of the mask. FlashAttention counts from the bottom right."""
    if given["dropout_p"]:
        raise NotImplementedError(
            f"dropout_p must be 0 while attnmask is installed, got {given['dropout_p']}"
        )
    ends = (given["window_size_left"], given["window_size_right"])
    window = tuple(None if end is None or end < 0 else end for end in ends)  # -1 means no limit
    return {
        "causal": given["is_causal"],
        "sliding_window": None if window == (None, None) else window,
        "softmax_scale": given["scale"],
    }


def _packed(given: Arguments) -> Arguments:
    starts = {"cum_seqlens_q": given["cum_seq_q"], "cum_seqlens_k": given["cum_seq_k"]}
    return _places(given) | starts | {"causal_offset": "bottom-right"}


def _used(seqused_k: torch.Tensor, room: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return how many of each sequence's keys are used."""
    used = integers(seqused_k, "seqused_k", ("[sequences]",))
    if used.shape != room.shape:
        raise ValueError(f"seqused_k must be of shape {room.shape}, got {describe(used)}")
    wrong = (used < 0) | (used > room)
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(
            f"seqused_k must be from 0 to {room[index]}, the keys of its sequence, got {used[index]} at index {index}"
        )
    return used


def _first_keys(given: Arguments) -> Arguments:
    """Use only the first keys of each sequence; the last of them is at the bottom right."""
    queries, keys = len(given["query"]), len(given["key"])
    shape = (1, given["query"].shape[1], queries, keys)
    q_starts, k_starts = both_starts(given["cum_seq_q"], given["cum_seq_k"], shape)
    room = np.diff(k_starts)
    used = _used(given["seqused_k"], room)
    places = np.arange(keys) - np.repeat(k_starts[:-1], room)
    return {
        "causal_offset": used - np.diff(q_starts),
        "q_segment_ids": np.zeros((1, queries), np.int32),
        "kv_segment_ids": np.where(places < np.repeat(used, room), 0, -1).astype(np.int32)[None],
    }


def _of_pages(given: Arguments) -> Arguments:
    if given["seqused_k"] is None:
        raise ValueError("seqused_k must be given with block_table, got None")
    starts, table = given["cum_seq_q"], given["block_table"]
    room = np.full(max(starts.numel() - 1, 0), table.shape[-1] * given["key"].shape[1], np.int64)
    used = _used(given["seqused_k"], room)
    return {"cache_seqlens": used, "block_table": table, "cu_seqlens_q": starts, "return_lse": True}


def _varlen_into(given: Arguments) -> torch.Tensor:
    """Write the result to `out` and return the logsumexp. `num_splits` has no effect: results are batch-invariant."""
    tensors = query, key, value = [given[name] for name in ("query", "key", "value")]
    if (
        given["alibi_slopes"] is not None
        and torch.is_grad_enabled()
        and any(x.requires_grad for x in tensors)
    ):
        raise NotImplementedError("alibi_slopes have no gradients in PyTorch: call it under torch.no_grad()")
    options = {"alibi_slopes": given["alibi_slopes"], "out": as_array(given["out"].detach(), "out")}
    attend: AnyFunction = flash_attention_fwd
    if given["block_table"] is not None:
        attend = flash_attention_with_kvcache  # in place, whatever the kind of array
        options |= _places(given) | _of_pages(given)
    else:
        options |= _packed(given) | ({} if given["seqused_k"] is None else _first_keys(given))
    _, lse = attend(query.detach(), key.detach(), value.detach(), **options)
    return to_tensor(lse).masked_fill_(to_tensor(lse) == -inf, inf)  # of rows without a live pair


def _varlen(given: Arguments) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(given["query"])
    lse = _varlen_into(given | {"out": out})
    state = torch.zeros(2, dtype=torch.uint64)  # of the random numbers, of which there are none
    return out, lse, state, torch.empty(0), torch.empty(0)


def _varlen_backward(given: Arguments) -> tuple[torch.Tensor, ...]:
    lse = given["logsumexp"]
    given["logsumexp"] = lse.masked_fill(lse == inf, -inf)
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    grads = flash_attention_bwd(*(given[name].detach() for name in names), **_packed(given))
    return tuple(map(to_tensor, grads[:3]))


# Registration

_lock = threading.RLock()
_registered: tuple[torch.library.Library, ...] = ()  # the libraries of kernels, once they have been needed
_active = False
_contexts: set[object] = set()  # those of `installed` that are open, if the first of them has installed


def _or_none(name: str, kernel: AnyFunction) -> AnyFunction:
    """Return `kernel` where PyTorch has none for the CPU."""
    rows = getattr(torch.ops.aten, name).default._schema.arguments
    names = [row.name for row in rows]
    defaults = {row.name: row.default_value for row in rows if row.has_default_value()}

    def run(*arguments: object, **more: object) -> Any:
        if not _active:
            raise NotImplementedError(
                f"aten::{name} is not supported on the CPU unless attnmask.torch.install() was called"
            )
        return kernel({**defaults, **dict(zip(names, arguments, strict=False)), **more})

    return run


class _Handle:
    """Called by PyTorch when another implementation replaces this one.

    Kernels stay registered: another thread may be on its way to one of them, and PyTorch would free it meanwhile.
    """

    def remove(self) -> None:
        global _active
        _active = False
        _contexts.clear()


def _register() -> _Handle:
    global _registered, _active
    if not _registered:
        library, differentiated, transformed = (
            torch.library.Library("aten", "IMPL", key) for key in ("CPU", "AutogradCPU", _FUNCTORCH)
        )
        own = (
            (library, "CPU", _FLASH, 3, lambda _: _sdpa),
            (library, "CPU", f"{_FLASH}_backward", 6, lambda _: _sdpa_backward),
            (differentiated, "AutogradCPU", _FLASH, 3, _sdpa_moved),
            (differentiated, "AutogradCPU", f"{_FLASH}_backward", 6, _sdpa_backward_moved),
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for each, key, name, inputs, choose in own:
                each.impl(name, _or_own(name, key, inputs, choose), with_keyset=True)
            transformed.impl(_SDPA, _transformed(), with_keyset=True)
            formula = _formula()
            for each in (library, differentiated):
                each.impl(_MATH, formula, with_keyset=True)
        for name, kernel in (
            ("_flash_attention_forward", _varlen),
            ("_flash_attention_forward_no_dropout_inplace", _varlen_into),
            ("_flash_attention_backward", _varlen_backward),
        ):
            library.impl(name, _or_none(name, kernel))
        _registered = (library, differentiated, transformed)
    counts.update(dict.fromkeys(counts, 0))
    _active = True
    return _Handle()


def _install() -> None:
    current = attention.current_flash_attention_impl()
    if current == _NAME:
        return
    if current is not None:
        raise RuntimeError(
            f"{current} is active: call torch.nn.attention.restore_flash_attention_impl() first"
        )
    attention.register_flash_attention_impl(_NAME, register_fn=_register)
    attention.activate_flash_attention_impl(_NAME)


def install() -> None:
    """Run PyTorch's own attention on attnmask on the CPU, until `uninstall`. Installing again has no effect.

    ``torch.nn.attention.varlen.varlen_attn``, which PyTorch supports only on GPUs, then runs on the CPU. For CPU
    tensors, ``torch.nn.functional.scaled_dot_product_attention`` runs on attnmask: with three axes or more, such as
    queries ``[B, N, H, T, D]`` and a mask ``[B, 1, H, T, T]``, with masks that need a gradient, and with dropout, whose
    seed PyTorch's generator draws. Graphs have it where PyTorch would use its own flash attention. `install_report`
    tells what PyTorch still computes. Both keep PyTorch's semantics. Other devices are not affected.

    ``scaled_dot_product_attention`` then has tangents and second derivatives, for which PyTorch itself needs its
    formula (``SDPBackend.MATH``).

    See Also
    --------
    installed : the same as a context manager.
    install_report : what ran on attnmask, and why other calls did not.

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> from torch.nn.attention.varlen import varlen_attn
    >>> query, value = torch.zeros(3, 1, 8), torch.arange(3.0).reshape(3, 1, 1).expand(3, 1, 8)
    >>> starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    >>> attnmask.torch.install()
    >>> varlen_attn(query, query, value, starts, starts, 2, 2, window_size=(-1, 0))[:, 0, 0].tolist()
    [0.0, 0.5, 2.0]
    >>> attnmask.torch.uninstall()
    """
    with _lock:
        _install()
        _contexts.clear()  # it stays when they end


def uninstall() -> None:
    """Undo `install`.

    ``scaled_dot_product_attention`` is PyTorch's own again, at a few microseconds more per call than before the first
    `install`: other threads may be using what PyTorch would free.

    Examples
    --------
    >>> import attnmask.torch
    >>> attnmask.torch.install()
    >>> attnmask.torch.uninstall()
    """
    with _lock:
        if attention.current_flash_attention_impl() != _NAME:
            raise RuntimeError("attnmask must be installed: call attnmask.torch.install() first")
        attention.restore_flash_attention_impl()


@contextmanager
def installed() -> Iterator[None]:
    """Apply `install` within a ``with`` block, for all threads. If already installed, it stays installed.

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> with attnmask.torch.installed():
    ...     torch.nn.attention.current_flash_attention_impl()
    'attnmask'
    >>> torch.nn.attention.current_flash_attention_impl() is None
    True
    """
    context = object()
    with _lock:
        if _contexts or attention.current_flash_attention_impl() != _NAME:
            _install()
            _contexts.add(context)
    try:
        yield
    finally:
        with _lock:
            if _contexts == {context}:  # the last one
                uninstall()
            _contexts.discard(context)
