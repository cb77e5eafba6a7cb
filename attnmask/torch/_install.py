"""Run PyTorch's own attention on attnmask, on the CPU.

``torch.nn.attention.varlen`` uses ``aten::_flash_attention_forward`` and related operators, which PyTorch implements
only for other devices. ``scaled_dot_product_attention`` on the CPU uses
``aten::_scaled_dot_product_flash_attention_for_cpu`` where it applies, and with more than four axes
``aten::_scaled_dot_product_attention_math``. `install` registers kernels for all of them, in PyTorch's slot for
implementations of flash attention: ``torch.nn.attention.current_flash_attention_impl()`` then returns ``"attnmask"``.
"""

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.nn import attention

from attnmask._attention.batch import broadcasts
from attnmask._attention.flash_attention import flash_attention_bwd, flash_attention_fwd
from attnmask._attention.problem import both_starts
from attnmask._cache.flash_attention_with_kvcache import flash_attention_with_kvcache
from attnmask._common.arguments import as_array, describe, integers
from attnmask._common.types import AnyFunction, Arguments
from attnmask.torch._attention import flash_attention
from attnmask.torch._import import torch
from attnmask.torch._operators import needs_operator
from attnmask.torch._states import to_tensor
from attnmask.torch._types import MaybeTensor

_NAME = "attnmask"
_MATH = "_scaled_dot_product_attention_math"
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _swapped(x: torch.Tensor) -> torch.Tensor:
    """Swap PyTorch's order [B, H, T, D] with [B, T, H, D]."""
    return x.transpose(1, 2)


# scaled_dot_product_attention


def _applies(tensors: Iterable[MaybeTensor], dropout: float) -> bool:
    """Return whether the core can read these in place; a mask among them is a bias."""
    return dropout == 0 and all(
        x is None or (x.dtype in _TYPES and x.layout is torch.strided and not x.is_neg()) for x in tensors
    )


def _or_own(name: str, kernel: AnyFunction, inputs: int) -> AnyFunction:
    """Return `kernel` with PyTorch's own as a fallback. The first `inputs` arguments are tensors."""
    own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def choose(
        keyset: torch._C.DispatchKeySet,
        *arguments: Any,
        attn_mask: MaybeTensor = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, ...]:
        tensors, (dropout, causal) = arguments[:inputs], (*arguments[inputs:], 0.0, False)[:2]
        if not (_active and _applies((*tensors, attn_mask), dropout)):
            return own.call_boxed(keyset, *tensors, dropout, causal, attn_mask=attn_mask, scale=scale)
        shared = {
            "bias": None if attn_mask is None else attn_mask.detach(),
            "causal": causal,
            "causal_offset": 0,
            "softmax_scale": scale,
        }
        return kernel(*(x.detach() for x in tensors), **shared)

    return choose


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any
) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(query)
    query, key, value, into = map(_swapped, (query, key, value, out))
    _, lse = flash_attention_fwd(query, key, value, **more, out=as_array(into, "out"))
    return out, _swapped(_swapped(to_tensor(lse)).contiguous())  # in memory as PyTorch has it


def _sdpa_backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    **more: Any,
) -> tuple[torch.Tensor, ...]:
    query, key, value, out = map(_swapped, (query, key, value, out))
    grads = flash_attention_bwd(_swapped(dout), query, key, value, out, lse, **more)
    return tuple(_swapped(to_tensor(grad)) for grad in grads[:3])


# With more than four axes it asks for `_scaled_dot_product_attention_math`, and takes the first result alone.


def _applies_to_more_axes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: MaybeTensor, gqa: bool
) -> bool:
    """Return whether `flash_attention` computes the same, and PyTorch may use its own flash attention otherwise."""
    tensors = (query, key, value, bias)
    heads, kv_heads = query.shape[-3], key.shape[-3]
    pairs = (*query.shape[:-1], key.shape[-2])
    return (
        _applies(tensors, 0)
        and query.dtype == key.dtype == value.dtype
        and query.shape[:-3] == key.shape[:-3]
        and key.shape[:-1] == value.shape[:-1]
        and query.shape[-1] == key.shape[-1]
        and (heads == kv_heads or (gqa and kv_heads > 0 and heads % kv_heads == 0))
        and (bias is None or (bias.ndim > 0 and broadcasts(bias.shape, pairs)))
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.autograd.forward_ad._current_level < 0
        and not needs_operator(tensors)
    )


def _more_axes() -> AnyFunction:
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
        usual = (
            query.ndim > 4 and query.ndim == key.ndim == value.ndim and not dropout_p and dropout_mask is None
        )
        if not (_active and usual and _applies_to_more_axes(query, key, value, attn_mask, enable_gqa)):
            more = {"scale": scale, "enable_gqa": enable_gqa}
            given = (query, key, value, attn_mask, dropout_p, is_causal, dropout_mask)
            return own.call_boxed(keyset, *given, **more)
        query, key, value = (x.transpose(-3, -2) for x in (query, key, value))
        out = flash_attention(
            query, key, value, bias=attn_mask, causal=is_causal, causal_offset=0, softmax_scale=scale
        )
        return out.transpose(-3, -2), query.new_empty(0)

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
        library, differentiated = (
            torch.library.Library("aten", "IMPL", key) for key in ("CPU", "AutogradCPU")
        )
        sdpa = "_scaled_dot_product_flash_attention_for_cpu"
        own = (
            (sdpa, _or_own(sdpa, _sdpa, 3)),
            (f"{sdpa}_backward", _or_own(f"{sdpa}_backward", _sdpa_backward, 6)),
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name, kernel in own:
                library.impl(name, kernel, with_keyset=True)
            more_axes = _more_axes()
            for each in (library, differentiated):
                each.impl(_MATH, more_axes, with_keyset=True)
        for name, kernel in (
            ("_flash_attention_forward", _varlen),
            ("_flash_attention_forward_no_dropout_inplace", _varlen_into),
            ("_flash_attention_backward", _varlen_backward),
        ):
            library.impl(name, _or_none(name, kernel))
        _registered = (library, differentiated)
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
    tensors, ``torch.nn.functional.scaled_dot_product_attention`` runs on attnmask wherever PyTorch would use its own
    flash attention, and outside of graphs with more than four axes, such as queries ``[B, N, H, T, D]`` and a mask
    ``[B, 1, H, T, T]``. With dropout, or a mask of a call with four axes that needs a gradient, PyTorch still computes
    it. Both keep PyTorch's semantics. Other devices are not affected.

    See Also
    --------
    installed : the same as a context manager.

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
