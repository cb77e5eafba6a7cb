"""`flash_attention` for PyTorch: tensors in and out, with gradients from the package's own backward pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnmask._attention.problem import ARRAYS, LEARNED, TOP_LEFT, check_hints
from attnmask._common.arguments import flag, integer, is_bottom_right, real, window
from attnmask._masks.info import MaskInfo
from attnmask.torch import _operators as operators
from attnmask.torch._cache import flash_attention_with_kvcache
from attnmask.torch._import import torch
from attnmask.torch._install import install, installed, uninstall
from attnmask.torch._linear import (
    linear_attention,
    linear_attention_step,
    short_convolution,
    short_convolution_step,
)
from attnmask.torch._masks import MaskTensors, mask_tensors, to_tensor
from attnmask.torch._merge import merge_attention_states
from attnmask.torch._operators import (
    check_no_tangents,
    check_tensor,
    detached,
    needs_operator,
    operand,
    plain_operator,
)
from attnmask.torch._ring import ring_attention

__all__ = [
    "MaskTensors",
    "flash_attention",
    "flash_attention_with_kvcache",
    "install",
    "installed",
    "linear_attention",
    "linear_attention_step",
    "mask_tensors",
    "merge_attention_states",
    "ring_attention",
    "short_convolution",
    "short_convolution_step",
    "uninstall",
]


class _FlashAttention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Call the operator without PyTorch's dispatcher, which takes longer than a short call. It takes the arguments that
    have gradients, and all others.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *learned, more = inputs
        arguments = dict(zip(LEARNED, learned, strict=True)) | more
        given = {name: detached(x) for name, x in arguments.items()}
        out, lse, kept = operators.attend_for_gradients(given)
        mask = arguments["attention_mask"]
        parts: tuple[torch.Tensor, ...] = ()
        if isinstance(mask, MaskTensors):
            arguments["attention_mask"], parts = mask.specification, mask.tensors
        tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        ctx.names, ctx.parts = tuple(tensors), len(parts)
        ctx.others = {name: x for name, x in arguments.items() if name not in tensors}
        ctx.save_for_backward(*parts, *tensors.values(), kept, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: "torch.Tensor | None", dlse: "torch.Tensor | None") -> tuple[Any, ...]:
        if torch.compiler.is_dynamo_compiling():  # where gradients are compiled, too
            return torch.compiler.disable(_FlashAttention.backward)(ctx, dout, dlse)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]
        *tensors, out, lse = ctx.saved_tensors
        given = ctx.others | dict(zip(ctx.names, tensors[ctx.parts :], strict=True))
        if isinstance(given["attention_mask"], str):
            given["attention_mask"] = MaskTensors(given["attention_mask"], tuple(tensors[: ctx.parts]))
        wanted = ctx.needs_input_grad[: len(LEARNED)]
        if needs_operator((dout, dlse, *tensors)):
            grads = torch.ops.attnmask.flash_attention_backward(
                dout, dlse, out, lse, *_operands(**given), wanted
            )
            return *operators.spread(grads, wanted), None
        if torch.is_grad_enabled():
            raise RuntimeError(f"{operators.NO_SECOND.format('flash_attention')}: create_graph must be False")
        given = {name: detached(x) for name, x in given.items()}
        grads = operators.gradients(dout, dlse, out, lse, given, wanted)
        pairs: Any = zip(grads, wanted, strict=True)
        return *(to_tensor(grad) if needed else None for grad, needed in pairs), None


def _seed(dropout_seed: Any) -> "int | None":
    """Return the same 64 bits as a signed integer."""
    if dropout_seed is None:
        return None
    seed = integer(dropout_seed, "dropout_seed")
    return seed if -(2**63) <= seed < 2**63 else (seed + 2**63) % 2**64 - 2**63


def _operands(
    *,
    attention_mask: Any,
    softmax_scale: Any = None,
    dropout_prob: Any = 0.0,
    causal: Any = False,
    dropout_seed: Any = None,
    sliding_window: Any = None,
    fwd_params: Any = None,
    bwd_params: Any = None,
    logits_soft_cap: Any = None,
    normalize_output: Any = True,
    precision: Any = None,
    logits_dtype: Any = None,
    causal_offset: Any = 0,
    relative_low: Any = 0,
    **arrays: Any,
) -> tuple[Any, ...]:
    """Return the operator's operands for arguments of `attnmask.flash_attention`."""
    for name in arrays:
        if name not in ARRAYS:
            raise TypeError(f"flash_attention() of tensors got an unexpected keyword argument {name!r}")
    check_hints(
        {
            "fwd_params": fwd_params,
            "bwd_params": bwd_params,
            "precision": precision,
            "logits_dtype": logits_dtype,
        }
    )
    mask = mask_tensors(attention_mask) if isinstance(attention_mask, MaskInfo) else attention_mask
    specification, tensors = mask if isinstance(mask, MaskTensors) else ("", ())
    starts = [arrays.get(name) for name in ("cum_seqlens_q", "cum_seqlens_k")]
    if is_bottom_right(causal_offset, "causal_offset"):
        if starts == [None, None]:
            causal_offset = arrays["key"].shape[1] - arrays["query"].shape[1]
        else:
            q_lengths, k_lengths = (
                torch.diff(operand(x if x is not None else y)) for x, y in (starts, starts[::-1])
            )
            causal_offset = k_lengths - q_lengths
    is_number = isinstance(causal_offset, (int, torch.SymInt, np.integer))
    left, right = (None, None) if sliding_window is None else window(sliding_window)
    return (
        *(operand(arrays.get(name)) for name in LEARNED),
        None if isinstance(mask, MaskTensors) else operand(mask),
        *(operand(arrays.get(name)) for name in ARRAYS[len(LEARNED) + 1 : -1]),
        None if is_number else operand(causal_offset),
        list(tensors),
        specification,
        causal_offset if is_number else 0,
        left,
        right,
        flag(causal, "causal"),
        None if softmax_scale is None else real(softmax_scale, "softmax_scale"),
        None if logits_soft_cap is None else real(logits_soft_cap, "logits_soft_cap"),
        flag(normalize_output, "normalize_output"),
        real(dropout_prob, "dropout_prob"),
        _seed(dropout_seed),
        integer(relative_low, "relative_low"),
    )


# Compiled calls look again at every global name and attribute that was read to compile them: these are few.
_Tensor = torch.Tensor
_is_compiling = torch.compiler.is_dynamo_compiling
_is_exporting = torch.compiler.is_exporting
_is_autocast_enabled = torch.is_autocast_enabled
_are_transforms_active = torch._C._are_functorch_transforms_active
_PLAIN_OPTIONS = {"causal", "causal_offset", "softmax_scale"}


def _is_plain(tensors: Sequence[Any], others: Sequence[Any], more: dict[str, Any]) -> bool:
    """Return whether ``attnmask::flash_attention_plain`` can answer a call; `others` must be None."""
    for x in tensors:
        if not (isinstance(x, _Tensor) and x.is_cpu):
            return False
    for x in others:
        if x is not None:
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


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    bias: Any = None,
    *,
    softmax_aux: Any = None,
    relative_bias: Any = None,
    return_lse: bool = False,
    **more: Any,
) -> Any:
    """Apply `attnmask.flash_attention` to CPU tensors, without copying them.

    `query`, `key`, `value`, `bias`, `softmax_aux` and `relative_bias` have gradients, and so has the logsumexp with
    `return_lse`. Higher-order gradients and forward mode are not supported. ``torch.autocast`` casts `query`, `key` and
    `value` as for ``scaled_dot_product_attention``, and nothing else. ``torch.compile``, ``torch.export`` and other
    tracers see one operator; ``torch.func`` can transform it.

    Parameters
    ----------
    query, key, value : Tensor, shape [B, Tq, H, D], [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv]
        Without B if `cum_seqlens_q` or `cum_seqlens_k` is given.
    attention_mask : Tensor, array_like, MaskInfo or MaskTensors, optional
    bias, softmax_aux, relative_bias : Tensor or array_like, optional
    return_lse : bool
    **more
        The other arguments of `attnmask.flash_attention` by name, except `out`.

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
    if return_lse is False and _is_plain(tensors, (attention_mask, bias, softmax_aux, relative_bias), more):
        causal, scale = more.get("causal", False), more.get("softmax_scale")
        if compiling:
            return plain_operator(*tensors, causal, more.get("causal_offset", 0), scale)
        check_no_tangents(LEARNED, tensors)
        if more.keys() <= _PLAIN_OPTIONS and not needs_operator(tensors):
            return operators.plain(*tensors, causal, more.get("causal_offset", TOP_LEFT), scale)
    for name, x in zip(LEARNED, tensors, strict=False):
        check_tensor(x, name)
    with_lse = flag(return_lse, "return_lse")
    given = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "softmax_aux": softmax_aux,
        "relative_bias": relative_bias,
        "attention_mask": attention_mask,
        **more,
    }
    if compiling and torch._C._are_functorch_transforms_active():
        # Operators have no gradients for torch.func.
        return torch.compiler.disable(flash_attention)(**given, return_lse=return_lse)  # type: ignore[no-untyped-call, unused-ignore]
    if not compiling:
        check_no_tangents(given, given.values())
    if compiling or needs_operator(given.values()):
        operators.check_tensors(given)
        operator = (
            operators.Transformed.apply
            if operators.is_differentiated()
            else torch.ops.attnmask.flash_attention
        )
        results = operator(*_operands(**given))
        return results[:2] if with_lse else results[0]
    if "out" in more:
        raise TypeError("flash_attention() of tensors got an unexpected keyword argument 'out'")
    if torch.is_autocast_enabled("cpu"):
        given |= {name: operators.autocast(given[name]) for name in LEARNED[:3]}
    wanting = [name for name, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad]
    learning = torch.is_grad_enabled() and any(name in LEARNED for name in wanting)
    for name in wanting:
        if not (learning and name in LEARNED):
            given[name] = given[name].detach()
    if learning:
        given |= {name: operators.kept(x, name) for name, x in given.items() if name in ARRAYS}
        inputs = [given.pop(name) for name in LEARNED]
        both = _FlashAttention.apply(*inputs, given)  # type: ignore[no-untyped-call, unused-ignore]
        return both if with_lse else both[0]
    return operators.call(given, with_lse)
