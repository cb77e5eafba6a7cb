"""`flash_attention` for PyTorch: tensors in and out, with gradients from the package's own backward pass."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike

from attnmask._attention.arguments import ARRAYS, DEFAULTS, HINTS, LEARNED, OPTIONS, Call
from attnmask._attention.hints import check_hints
from attnmask._common.arguments import flag, is_bottom_right
from attnmask._common.keywords import reject_unknown
from attnmask._common.types import Arguments
from attnmask._masks.info import MaskInfo
from attnmask.torch import _operators as operators
from attnmask.torch._cache import flash_attention_with_kvcache, write_kvcache
from attnmask.torch._import import torch
from attnmask.torch._install import install, installed, uninstall
from attnmask.torch._linear import (
    linear_attention,
    linear_attention_step,
    short_convolution,
    short_convolution_step,
)
from attnmask.torch._masks import mask_tensors
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
from attnmask.torch._states import MaskTensors, to_tensor
from attnmask.torch._types import Context, MaybeTensor

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
    "write_kvcache",
]
__dir__ = __all__.copy  # what completion offers


class _FlashAttention(torch.autograd.Function):
    """Call the operator without PyTorch's dispatcher, which takes longer than a short call. It takes the arguments that
    have gradients, and all others.
    """

    @staticmethod
    def forward(ctx: Context, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
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
    def backward(ctx: Context, dout: MaybeTensor, dlse: MaybeTensor) -> tuple[MaybeTensor, ...]:
        if torch.compiler.is_dynamo_compiling():  # where gradients are compiled, too
            return torch.compiler.disable(_FlashAttention.backward)(ctx, dout, dlse)
        *tensors, out, lse = ctx.saved_tensors
        given = ctx.others | dict(zip(ctx.names, tensors[ctx.parts :], strict=True))
        if isinstance(given["attention_mask"], str):
            given["attention_mask"] = MaskTensors(given["attention_mask"], tuple(tensors[: ctx.parts]))
        wanted = ctx.needs_input_grad[: len(LEARNED)]
        if needs_operator((dout, dlse, *tensors)):
            grads = torch.ops.attnmask.flash_attention_backward(
                dout, dlse, out, lse, *_operands(given), wanted
            )
            return *operators.spread(grads, wanted), None
        if torch.is_grad_enabled():
            raise RuntimeError(f"{operators.NO_SECOND.format('flash_attention')}: create_graph must be False")
        given = {name: detached(x) for name, x in given.items()}
        grads = operators.gradients(dout, dlse, out, lse, given, wanted)
        pairs: Any = zip(grads, wanted, strict=True)
        return *(to_tensor(grad) if needed else None for grad, needed in pairs), None


def _operands(given: Arguments) -> tuple[object, ...]:
    """Return the operator's operands for arguments of `attnmask.flash_attention`."""
    check_hints({name: given.get(name) for name in HINTS})
    offset = given.get("causal_offset")
    starts = [given.get(name) for name in ("cum_seqlens_q", "cum_seqlens_k")]
    if is_bottom_right(offset, "causal_offset"):
        if starts == [None, None]:
            offset = given["key"].shape[1] - given["query"].shape[1]
        else:
            q_lengths, k_lengths = (
                torch.diff(operand(x if x is not None else y)) for x, y in (starts, starts[::-1])
            )
            offset = k_lengths - q_lengths
    is_number = offset is None or isinstance(offset, (int, torch.SymInt, np.integer))
    operands = {
        **{
            name: operand(given.get(name))
            for name in ARRAYS
            if name not in ("attention_mask", "causal_offset")
        },
        **operators.mask_operands(given["attention_mask"]),
        "causal_offset": None if is_number else operand(offset),
        "offset": offset if is_number else None,
        **operators.window_operands(given.get("sliding_window")),
        **operators.numbers(given),
    }
    return tuple(operands[name] for name in operators.NAMES)


# Compiled calls look again at every global name and attribute that was read to compile them: these are few.
_Tensor = torch.Tensor
_is_compiling = torch.compiler.is_dynamo_compiling
_is_exporting = torch.compiler.is_exporting
_is_autocast_enabled = torch.is_autocast_enabled
_are_transforms_active = torch._C._are_functorch_transforms_active
_PLAIN_OPTIONS = {"causal", "causal_offset", "softmax_scale"}


def _is_plain(tensors: Sequence[Any], others: Sequence[object], more: Arguments) -> bool:
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

    `query`, `key`, `value`, `bias`, `softmax_aux` and `relative_bias` have gradients, and so has the logsumexp with
    `return_lse`. Higher-order gradients and forward mode are not supported. ``torch.autocast`` casts `query`, `key` and
    `value` as for ``scaled_dot_product_attention``, and nothing else. ``torch.compile``, ``torch.export`` and other
    tracers see one operator; ``torch.func`` can transform it. With dropout and no `dropout_seed`, PyTorch's generator
    draws the seed, which ``torch.manual_seed`` decides.

    Parameters
    ----------
    query, key, value : Tensor, shape [B, Tq, H, D], [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv]
        Without B if `cum_seqlens_q` or `cum_seqlens_k` is given.
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
    if return_lse is False and _is_plain(tensors, (attention_mask, bias), more):
        causal, scale = more.get("causal", False), more.get("softmax_scale")
        if compiling:
            return plain_operator(*tensors, causal, more.get("causal_offset"), scale)
        check_no_tangents(LEARNED, tensors)
        if more.keys() <= _PLAIN_OPTIONS and not needs_operator(tensors):
            return operators.plain(*tensors, causal, more.get("causal_offset"), scale)
    for name, x in zip(LEARNED, tensors, strict=False):
        check_tensor(x, name)
    with_lse = flag(return_lse, "return_lse")
    given: Arguments = dict(zip(LEARNED, tensors, strict=False))
    given |= {"attention_mask": attention_mask, "bias": bias, **more}
    if compiling and torch._C._are_functorch_transforms_active():
        # Operators have no gradients for torch.func.
        return torch.compiler.disable(flash_attention)(**given, return_lse=return_lse)
    if not compiling:
        check_no_tangents(given, given.values())
    in_graph = compiling or needs_operator(given.values())
    if "dropout_prob" in more:
        given["dropout_seed"] = operators.seed_of(more["dropout_prob"], more.get("dropout_seed"), in_graph)
    if in_graph:
        meta = operators.on_meta(given)
        if not more.keys() <= DEFAULTS.keys():
            reject_unknown(
                "flash_attention", [name for name in more if name not in DEFAULTS], (*DEFAULTS, "return_lse")
            )
        operator = (
            operators.Transformed.apply
            if operators.is_differentiated()
            else torch.ops.attnmask.flash_attention
        )
        results = operators.call_operator(operator, _operands(given), meta)
        return results[:2] if with_lse else results[0]
    if "out" in more:  # the other names are checked where arrays are
        reject_unknown("flash_attention", ["out"], DEFAULTS)
    if torch.is_autocast_enabled("cpu"):
        given |= {name: operators.autocast(given[name]) for name in LEARNED[:3]}
    wanting = [name for name, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad]
    learning = torch.is_grad_enabled() and any(name in LEARNED for name in wanting)
    for name in wanting:
        if not (learning and name in LEARNED):
            given[name] = given[name].detach()
    if learning:
        given |= {name: operators.kept(x, name) for name, x in given.items() if name in ARRAYS}
        inputs = [given.pop(name, None) for name in LEARNED]
        both = _FlashAttention.apply(*inputs, given)
        return both if with_lse else both[0]
    return operators.call(given, with_lse)
