"""The operators ``attnmask::flash_attention`` and ``attnmask::flash_attention_backward``, and their rules.

They take what `attnmask.flash_attention` takes, as far as PyTorch has types for it: a `MaskInfo` is a specification and
a list of tensors, a window two integers, and a causal offset a tensor or, where that is None, an integer; neither is
given if the call has none. Both results are always there::

    out, lse = torch.ops.attnmask.flash_attention(query, key, value, ...)
    gradients = torch.ops.attnmask.flash_attention_backward(dout, dlse, out, lse, query, key, value, ..., wanted)

`wanted` says of query, key, value, bias and softmax_aux whether their gradients are to be returned. Where gradients of
types of 16 bits will be, ``attnmask::flash_attention_wide`` is called instead, whose third result is `out` in float32
as it was before it was rounded; the gradients take that as `out`. Compiled calls that
ask for little go to ``attnmask::flash_attention_plain``, which is sooner called and knows no gradient::

    out = torch.ops.attnmask.flash_attention_plain(query, key, value, causal, offset, softmax_scale)
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from attnmask._attention.arguments import ARGUMENTS, ARRAYS, DEFAULTS, LEARNED, NUMBERS, OF_CACHES
from attnmask._attention.flash_attention import flash_attention, flash_attention_bwd, flash_attention_fwd
from attnmask._attention.forward import attend_for_gradients as attend_in_numpy
from attnmask._attention.problem import FlashAttentionGrads, check_layout
from attnmask._attention.terms import TERMS
from attnmask._common.arguments import (
    as_array,
    check_kind_of_tensor,
    describe,
    flag,
    integer,
    real,
    suit_hint,
    window,
)
from attnmask._common.loading import _core
from attnmask._common.types import AnyFunction, Arguments, Array, Given
from attnmask._masks.info import MaskInfo
from attnmask.torch._import import Info, make_autograd_impl, torch
from attnmask.torch._masks import mask_tensors, restored
from attnmask.torch._states import MaskTensors, batch_rows, to_tensor
from attnmask.torch._types import Context, MaybeTensor, Shaped

_ROWS = {row.name: row for row in (*ARGUMENTS, *OF_CACHES)}
_PARAMETERS = ", ".join(
    (
        *(_ROWS[name].of_operator for name in ARRAYS),
        "Tensor[] mask_tensors, str mask_specification, SymInt? offset, SymInt? window_left, SymInt? window_right",
        *(_ROWS[name].of_operator for name in NUMBERS),
    )
)
NAMES = tuple(parameter.split()[-1] for parameter in _PARAMETERS.split(", "))
BACKWARD_NAMES = ("dout", "dlse", "out", "lse", *NAMES, "wanted")
TENSORS = len(ARRAYS)  # the first of them
_forward_ad = torch.autograd.forward_ad
_EARLY = torch._C.DispatchKey.PreDispatch  # where torch.export traces
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OF_NUMPY = (torch.float32, torch.float16, torch.float64)
_TYPES = (*_OF_NUMPY, torch.bfloat16)
NO_FORWARD = "attnmask.torch.{} has no forward-mode derivative: {} must have no tangent"
NO_SECOND = "attnmask.torch.{} has no second derivative"
_ATTENTION = "flash_attention"
_SEEDS = 2**62

_library = torch.library.Library("attnmask", "DEF")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of a logsumexp, and of what is summed, for queries of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


def needs_operator(arguments: Iterable[object]) -> bool:
    """Return whether PyTorch must see a call: it traces, transforms a function, or has other kinds of tensors."""
    return (
        torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._dispatch_tls_is_dispatch_key_included(_EARLY)
        or torch._C._are_functorch_transforms_active()
        or any(isinstance(x, torch.Tensor) and not (type(x) in _PLAIN and x.is_cpu) for x in arguments)
    )


def operand(x: Any) -> Any:
    """Return an operator's argument from any array."""
    return x if x is None or isinstance(x, torch.Tensor) else torch.as_tensor(np.array(x))


def check_no_tangents(names: Iterable[str], tensors: Iterable[object], function: str = _ATTENTION) -> None:
    """Refuse tangents, which the core ignores: results would silently have none."""
    # In the forward pass of a function that brings a derivative of its own, tangents are not asked for.
    if _forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return
    for name, x in zip(names, tensors, strict=False):
        if isinstance(x, torch.Tensor) and _forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(NO_FORWARD.format(function, name))


def tensors_among(given: Given) -> dict[str, torch.Tensor]:
    return {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}


def check_no_gradient(tensors: dict[str, torch.Tensor], function: str, trained: str) -> None:
    check_no_tangents(tensors, tensors.values(), function)
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x.requires_grad:
            raise RuntimeError(
                f"{function} has no gradient, and {name} requires one: "
                f"call it under torch.no_grad(), or train with {trained}"
            )


def check_tensor(x: object, name: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {describe(x)}")
    if x.is_nested or not x.is_meta:
        check_kind_of_tensor(x, name)


def on_meta(given: Given) -> bool:
    """Check tensors, which must be on one device: PyTorch computes no numbers if another one takes part in a call.
    Return whether that is `meta`, where tensors are shapes alone.
    """
    parts = {name: x.tensors if isinstance(x, MaskTensors) else (x,) for name, x in given.items()}
    tensors = [(name, x) for name, several in parts.items() for x in several if isinstance(x, torch.Tensor)]
    for name, x in tensors:
        check_tensor(x, name)
    if not any(x.is_meta for _, x in tensors):
        return False
    check_devices(*zip(*tensors, strict=True))
    return True


def call_operator(operator: AnyFunction, operands: Sequence[object], meta: bool) -> Any:
    """Call an operator; on `meta` with all operands there, also those that were made of arrays."""
    if meta:
        operands = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), operands)
    return operator(*operands)


def _seed(value: object, name: str) -> int:
    """Return the same 64 bits as a signed integer."""
    seed = integer(value, name)
    return seed if -(2**63) <= seed < 2**63 else (seed + 2**63) % 2**64 - 2**63


def seed_of(prob: object, seed: object, in_graph: bool = False) -> Any:
    """Return the seed of dropout, drawn from PyTorch's generator if something is dropped and none is given."""
    if seed is not None or not real(prob, "dropout_prob"):
        return seed
    return torch.ops.attnmask.dropout_seed(torch.empty(0, device="cpu")) if in_graph else _draw()


def _draw(_: object = None) -> int:
    return int(torch.randint(_SEEDS, (), dtype=torch.int64, device="cpu"))


_CHECKS = {"bool": flag, "float": real, "SymInt": integer}


def numbers(given: Given, names: Iterable[str] = NUMBERS) -> Arguments:
    """Return the numbers among arguments as operators take them."""
    found: Arguments = {}
    for name in names:
        value = given.get(name, _ROWS[name].default)
        check = (
            _seed if name == "dropout_seed" else _CHECKS[_ROWS[name].of_operator.partition(" ")[0].strip("?")]
        )
        found[name] = None if value is None and _ROWS[name].default is None else check(value, name)
    return found


def mask_operands(mask: ArrayLike | torch.Tensor | MaskInfo | MaskTensors | None) -> Arguments:
    """Return what an operator takes for a mask."""
    mask = mask_tensors(mask) if isinstance(mask, MaskInfo) else mask
    specification, tensors = mask if isinstance(mask, MaskTensors) else ("", ())
    return {
        "attention_mask": None if isinstance(mask, MaskTensors) else operand(mask),
        "mask_tensors": list(tensors),
        "mask_specification": specification,
    }


def window_operands(sliding_window: object) -> dict[str, int | None]:
    left, right = (None, None) if sliding_window is None else window(sliding_window)
    return {"window_left": left, "window_right": right}


# On the CPU


def in_place(x: torch.Tensor, name: str) -> Array:
    """Return `as_array`, faster for the common case."""
    try:
        if x.dtype in _OF_NUMPY:
            return x.numpy()
    except (RuntimeError, TypeError):  # as_array knows what to do, or to say
        pass
    return as_array(x if torch.is_grad_enabled() else detached(x), name)


def in_arrays(given: Arguments) -> Arguments:
    """Return the same with query, key and value as NumPy arrays, which the core reads faster in plain calls."""
    return with_mask(given) | {name: in_place(given[name], name) for name in LEARNED[:3]}


def with_mask(given: Arguments) -> Arguments:
    """Return the same with a `MaskInfo` in place of its tensors."""
    mask = given["attention_mask"]
    return given | {"attention_mask": restored(*mask)} if isinstance(mask, MaskTensors) else given


def kept(x: Any, name: str) -> Any:
    """Keep an argument until the gradient needs it. PyTorch reports a tensor that has changed by then."""
    fixed = x is None or isinstance(x, (torch.Tensor, MaskInfo, MaskTensors, int, str))
    return x if fixed else as_array(x, name).copy()


def _given(arguments: Sequence[object]) -> Arguments:
    """Return the arguments of `attnmask.flash_attention` for an operator's."""
    check_no_tangents(NAMES, arguments)
    given: Arguments = dict(zip(NAMES, arguments, strict=True))
    for name in ARRAYS:
        given[name] = detached(given[name])
    tensors, specification, offset = (
        given.pop(name) for name in ("mask_tensors", "mask_specification", "offset")
    )
    window = given.pop("window_left"), given.pop("window_right")
    if specification:
        given["attention_mask"] = restored(specification, tensors)
    if given["causal_offset"] is None:
        given["causal_offset"] = DEFAULTS["causal_offset"] if offset is None else offset
    return given if window == (None, None) else given | {"sliding_window": window}


def call(given: Arguments, return_lse: bool) -> Any:
    try:
        result = flash_attention(**in_arrays(given), return_lse=return_lse)
    except (TypeError, ValueError) as error:
        suit_hint(error, given)
        raise
    return tuple(map(to_tensor, result)) if isinstance(result, tuple) else to_tensor(result)


def attend(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return call(given, True)


def attend_for_gradients(given: Arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the result, its logsumexp, and what `gradients` takes as the result."""
    try:
        out, lse, wide_out = attend_in_numpy(in_arrays(given))
    except (TypeError, ValueError) as error:
        suit_hint(error, given)
        raise
    same = out.dtype == wide_out.dtype
    rounded = to_tensor(out)
    return rounded, to_tensor(lse), rounded if same else to_tensor(wide_out)


def _on_cpu(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(_given(arguments))


def _wide_on_cpu(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, lse, wide_out = attend_for_gradients(_given(arguments))
    return out, lse, wide_out.clone() if wide_out is out else wide_out


def _plain_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    offset: "int | None",
    scale: "float | None",
) -> torch.Tensor:
    given: Arguments = {"query": query, "key": key, "value": value, "attention_mask": None}
    given |= {} if offset is None else {"causal_offset": offset}
    return call(given | {"causal": causal, "softmax_scale": scale}, False)


# The same in C, which leaves to it what is unusual, or wrong.
plain = _core.tensor_attention(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), _plain_on_cpu)


def _into(*arguments: object, out: torch.Tensor, lse: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments):
        raise RuntimeError("attnmask::flash_attention.out has no gradient: no argument may require one")
    _fake_into(*arguments, out=out, lse=lse)
    _, computed = flash_attention_fwd(**_given(arguments), out=as_array(out, "out"))
    lse.copy_(to_tensor(computed))


def gradients(
    dout: "torch.Tensor | None",
    dlse: "torch.Tensor | None",
    out: torch.Tensor,
    lse: torch.Tensor,
    given: Arguments,
    wanted: Sequence[bool],
) -> FlashAttentionGrads:
    check_no_tangents(("dout", "dlse"), (dout, dlse))
    asked: Arguments = {f"grad_{name}": want for name, want in zip(LEARNED[3:], wanted[3:], strict=True)}
    return flash_attention_bwd(
        torch.zeros_like(out, dtype=given["query"].dtype) if dout is None else detached(dout),
        out=detached(out),
        lse=detached(lse),
        dlse=detached(dlse),
        **with_mask(given),
        **asked,
    )


def _backward_on_cpu(
    dout: MaybeTensor, dlse: MaybeTensor, out: torch.Tensor, lse: torch.Tensor, *more: Any
) -> list[torch.Tensor]:
    *arguments, wanted = more
    grads = gradients(dout, dlse, out, lse, _given(arguments), wanted)
    return [to_tensor(grad) for grad in itertools.compress(grads, wanted)]  # type: ignore[arg-type]


# Of tensors without numbers


def _likes(query: torch.Tensor, value: torch.Tensor) -> tuple[Shaped, ...]:
    """Return shape and type of the result, its logsumexp, and the wide result."""
    wide = wide_dtype(query.dtype)
    *batch, tokens, heads, _ = query.shape
    row = (*batch, tokens, heads, value.shape[-1])
    return (row, query.dtype), ((*batch, heads, tokens), wide), (row, wide)


def check_devices(names: Iterable[str], arguments: Iterable[object]) -> None:
    """Check that all tensors are on one device: PyTorch calls the fake implementation if any is a meta tensor."""
    first: tuple[str, torch.device] | None = None
    for name, x in zip(names, arguments, strict=True):
        for tensor in x if isinstance(x, (list, tuple)) else (x,):
            if not isinstance(tensor, torch.Tensor):
                continue
            first = first or (name, tensor.device)
            if tensor.device != first[1]:
                raise TypeError(
                    f"{name} must be on {first[1]} as {first[0]}, got a tensor on {tensor.device}"
                )


def _check_fakes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: bool) -> None:
    try:
        check_layout((query, key, value), packed, _TYPES.__contains__)
    except (TypeError, ValueError) as error:
        suit_hint(error, {"query": query, "key": key, "value": value})
        raise


def _fake_wide(*arguments: object) -> tuple[torch.Tensor, ...]:
    check_no_tangents(NAMES, arguments)
    check_devices(NAMES, arguments)
    given: Arguments = dict(zip(NAMES, arguments, strict=True))
    query, key, value = (given[name] for name in LEARNED[:3])
    packed = given["cum_seqlens_q"] is not None or given["cum_seqlens_k"] is not None
    _check_fakes(query, key, value, packed)
    return new_results(query, value, 3)


def _fake(*arguments: object) -> tuple[torch.Tensor, ...]:
    return _fake_wide(*arguments)[:2]


def new_results(query: torch.Tensor, value: torch.Tensor, count: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(query.new_empty(shape, dtype=dtype) for shape, dtype in _likes(query, value)[:count])


def _plain_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    check_devices(LEARNED[:3], (query, key, value))
    _check_fakes(query, key, value, False)
    return new_results(query, value)[0]


def _fake_into(*arguments: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
    check_devices(("out", "lse", *NAMES), (out, lse, *arguments))
    query, value = arguments[0], arguments[2]
    for name, x, (shape, dtype) in zip(("out", "lse"), (out, lse), _likes(query, value)[:2], strict=True):
        if x.shape != shape or x.dtype != dtype:
            expected = describe(x.new_empty(shape, dtype=dtype, device="meta"))
            raise ValueError(f"{name} must be a {expected}, got {describe(x)}")


def _backward_fake(
    dout: MaybeTensor, dlse: MaybeTensor, out: torch.Tensor, lse: torch.Tensor, *more: Any
) -> list[torch.Tensor]:
    check_devices(BACKWARD_NAMES, (dout, dlse, out, lse, *more))
    *arguments, wanted = more
    return [
        x.new_empty(x.shape) for x, needed in zip(arguments[: len(LEARNED)], wanted, strict=True) if needed
    ]


# Gradients


def spread(grads: Iterable[torch.Tensor], wanted: Sequence[bool]) -> list[MaybeTensor]:
    """Return the wanted gradients, and None for the others."""
    rest = iter(grads)
    return [next(rest) if needed else None for needed in wanted]


def _keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    out, lse, *wide_out = output
    ctx.mark_non_differentiable(*wide_out)
    ctx.save_for_backward(*wide_out or (out,), lse, *inputs[:TENSORS], *inputs[TENSORS])
    ctx.parts, ctx.more = len(inputs[TENSORS]), inputs[TENSORS + 1 :]
    ctx.set_materialize_grads(False)


def _by(
    operator: AnyFunction, ctx: Context, dout: MaybeTensor, dlse: MaybeTensor, *_: object
) -> list[object]:
    out, lse, *tensors = ctx.saved_tensors
    wanted = [bool(needed) for needed in ctx.needs_input_grad[: len(LEARNED)]]
    grads = operator(dout, dlse, out, lse, *tensors[:TENSORS], tensors[TENSORS:], *ctx.more, wanted)
    return [*spread(grads, wanted), *[None] * (len(NAMES) - len(LEARNED))]


def _backward(ctx: Context, dout: MaybeTensor, dlse: MaybeTensor, *_: object) -> tuple[object, ...]:
    grads = _by(torch.ops.attnmask.flash_attention_backward, ctx, dout, dlse)
    grads[TENSORS] = [None] * ctx.parts
    return tuple(grads)


def autograd_kernel(
    operator: Any, on_cpu: AnyFunction, rules: Info, wide: AnyFunction | None = None
) -> AnyFunction:
    """Return the autograd kernel that `torch.library.register_autograd` would make, with a shortcut for calls without
    gradients, which saves 20 microseconds. `wide` replaces the operator for 16-bit types if there are gradients.
    """
    kernel = make_autograd_impl(operator, rules)

    def autograd(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        learning = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if learning and wide and arguments[0].dtype.itemsize == 2:
            return wide(*arguments)[:2]
        if learning or needs_operator(arguments):
            return kernel(keyset, *arguments)
        return on_cpu(*arguments)

    return autograd


def no_second(function: str) -> AnyFunction:
    def refuse(ctx: object, *_: object) -> NoReturn:
        raise RuntimeError(NO_SECOND.format(function))

    return refuse


# Under torch.vmap

_AXES = {
    **dict.fromkeys(("query", "key", "value", "bias", "attention_mask", "dout", "out"), 4),
    **dict.fromkeys(("lse", "dlse"), 3),
    **dict.fromkeys(("q_segment_ids", "kv_segment_ids"), 2),
    "causal_offset": 1,
}
_OF_HEADS = tuple(name for name in TERMS if name in ARRAYS and name not in _AXES)
_SHARED = ("bias", "attention_mask", "causal_offset")  # one row of which may stand for all batch rows


def _folded(x: torch.Tensor, dim: "int | None", name: str, count: int, rows: int) -> torch.Tensor:
    """Return as one call of all rows what `count` calls of so many batch rows have."""
    x = x[None] if dim is None else x.movedim(dim, 0)
    missing = _AXES[name] + 1 - x.ndim
    x = x.reshape(x.shape[0], *[1] * missing, *x.shape[1:])
    if dim is None and name in _SHARED and x.shape[1] == 1:
        return x[0]
    return x.expand(count, rows, *x.shape[2:]).reshape(count * rows, *x.shape[2:])


def _can_be_folded(given: Arguments, dims: Arguments) -> bool:
    """Return whether every batch row is the same as when called alone."""
    return (
        given["query"].ndim - (dims["query"] is not None) == 4
        and given["cum_seqlens_q"] is None
        and given["cum_seqlens_k"] is None
        and given["dropout_prob"] == 0  # which counts rows
        and all(dims[name] is None for name in _OF_HEADS)
        and all(given[name] is None or given[name].ndim == 1 for name in _OF_HEADS if name not in LEARNED)
        and all(dim is None for dim in dims["mask_tensors"])
        and batch_rows(given["mask_specification"]) == 1
        and not any(given.get("wanted", ())[3:])  # those are summed over the rows
    )


def _in_one_call(given: Arguments, dims: Arguments, count: int) -> tuple[list[object], int] | None:
    if not _can_be_folded(given, dims):
        return None
    query, dim = given["query"], dims["query"]
    rows = query.shape[0] if dim is None else query.movedim(dim, 0).shape[1]
    return [
        _folded(x, dims[name], name, count, rows) if name in _AXES and x is not None else x
        for name, x in given.items()
    ], rows


_InOneCall: TypeAlias = Callable[[Arguments, Arguments, int], tuple[list[object], int] | None]


def chosen(x: Any, dim: Any, index: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [chosen(*pair, index) for pair in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, index)


class Mapped(Protocol):
    """What PyTorch says of a call under `vmap`."""

    batch_size: int


def mapped(
    operator: AnyFunction, names: Sequence[str], tuples: bool = True, in_one_call: _InOneCall = _in_one_call
) -> AnyFunction:
    """Apply `vmap` to an operator: one call of all batch rows where that is equivalent, otherwise one by one.

    `in_one_call` returns the arguments of that call and the rows of each; or None.
    """

    def rule(
        info: Mapped, in_dims: Sequence[object], *arguments: object
    ) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
        given, dims = (dict(zip(names, values, strict=True)) for values in (arguments, in_dims))
        count = info.batch_size
        together = in_one_call(given, dims, count)
        if together:
            operands, rows = together
            results = [x.reshape(count, rows, *x.shape[1:]) for x in operator(*operands)]
        else:
            calls = [operator(*map(chosen, arguments, in_dims, [i] * len(names))) for i in range(count)]
            results = [torch.stack(parts) for parts in zip(*calls, strict=True)]
        kind = tuple if tuples else list
        return kind(results), kind([0] * len(results))

    return rule


class Rules(NamedTuple):
    """What `torch.func` needs to know of an operator and its gradient."""

    function: str
    names: Sequence[str]
    backward_names: Sequence[str]
    forward: Any  # both are operators, or call one
    backward: Any
    keep: Callable[..., None]
    spread: Callable[..., Iterable[object]]  # calls the second operator, given as its first argument
    in_one_call: _InOneCall


def transformed(rules: Rules) -> Any:
    """Return the operator under `torch.func`, which ignores the gradients of operators."""
    function = rules.function

    def no_tangents(ctx: object, *tangents: object) -> NoReturn:
        raise RuntimeError(NO_FORWARD.format(function, "an argument"))

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: object) -> tuple[torch.Tensor, ...]:
            return tuple(rules.backward(*arguments))

        setup_context = staticmethod(_keep_none)
        backward = staticmethod(no_second(function))
        jvp = staticmethod(no_tangents)

        @staticmethod
        def vmap(info: Mapped, in_dims: Sequence[object], *arguments: object) -> object:
            rule = mapped(Backward.apply, rules.backward_names, True, rules.in_one_call)
            return rule(info, in_dims, *arguments)

    class Forward(torch.autograd.Function):
        forward = staticmethod(rules.forward)
        setup_context = staticmethod(rules.keep)
        jvp = staticmethod(no_tangents)

        @staticmethod
        def backward(ctx: Context, *grads: MaybeTensor) -> tuple[object, ...]:
            return tuple(rules.spread(Backward.apply, ctx, *grads))

        @staticmethod
        def vmap(info: Mapped, in_dims: Sequence[object], *arguments: object) -> object:
            return mapped(Forward.apply, rules.names, True, rules.in_one_call)(info, in_dims, *arguments)

    return Forward


def _forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    operators = torch.ops.attnmask
    narrow = arguments[0].dtype.itemsize == 2
    return (operators.flash_attention_wide if narrow else operators.flash_attention)(*arguments)


def is_differentiated() -> bool:
    """Return whether `torch.func` transforms a function whose gradient may be needed."""
    if not torch._C._are_functorch_transforms_active():
        return False
    functorch = torch._C._functorch
    return bool(functorch.peek_interpreter_stack().key() != functorch.TransformType.Functionalize)


# Under torch.autocast


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast as PyTorch's autocast does for its own attention."""
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def without_autocast() -> AbstractContextManager[object]:
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def _cast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: object
) -> tuple[torch.Tensor, ...]:
    with without_autocast():
        return torch.ops.attnmask.flash_attention(*map(autocast, (query, key, value)), *more)


# Registration

# A number that no graph knows. Inductor asks for a tensor, which tells it the device.
_library.define("dropout_seed(Tensor like) -> SymInt", tags=(torch.Tag.nondeterministic_seeded,))
_library.impl("dropout_seed", _draw, "CompositeExplicitAutograd")
torch.library.register_fake(
    "attnmask::dropout_seed", lambda _: torch.library.get_ctx().new_dynamic_size(max=_SEEDS), lib=_library
)

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)  # tensors are read as they lie


def register(
    name: str,
    parameters: str,
    on_cpu: AnyFunction,
    fake: AnyFunction,
    *,
    autograd: AnyFunction | None = None,
    results: str = "(Tensor out, Tensor lse)",
    autocast: AnyFunction | None = None,
    vmap: AnyFunction | None = None,
) -> None:
    """Register an operator, with the rules for it."""
    _library.define(f"{name}({parameters}) -> {results}", tags=_TAGS)
    _library.impl(name, on_cpu, "CPU")
    torch.library.register_fake(f"attnmask::{name}", fake, lib=_library)
    if autograd:
        _library.impl(name, autograd, "Autograd", with_keyset=True)
    if autocast:
        _library.impl(name, autocast, "AutocastCPU")
    if vmap:
        torch.library.register_vmap(f"attnmask::{name}", vmap, lib=_library)


def _differentiate(
    operator: Any,
    names: Sequence[str],
    on_cpu: AnyFunction,
    info: Info,
    in_one_call: _InOneCall = _in_one_call,
    wide: AnyFunction | None = None,
) -> None:
    """Register the gradient of an operator, and how `vmap` calls it."""
    name = operator._opname
    kernel = autograd_kernel(operator, on_cpu, info, wide)
    _library.impl(name, kernel, "Autograd", with_keyset=True)
    rule = mapped(operator, names, not name.endswith("_backward"), in_one_call)
    torch.library.register_vmap(f"attnmask::{name}", rule, lib=_library)


def register_rules(rules: Rules, on_cpu: AnyFunction, backward_on_cpu: AnyFunction) -> None:
    """Register the gradient of an operator, and how `vmap` calls both."""

    def backward(ctx: Context, *grads: MaybeTensor) -> tuple[object, ...]:
        return tuple(rules.spread(rules.backward, ctx, *grads))

    no_more = Info(no_second(rules.function), _keep_none)
    for operator, names, compute, info in (
        (rules.forward, rules.names, on_cpu, Info(backward, rules.keep)),
        (rules.backward, rules.backward_names, backward_on_cpu, no_more),
    ):
        _differentiate(operator, names, compute, info, rules.in_one_call)


def without_gradient(name: str, names: Sequence[str], trained: str) -> AnyFunction:
    """Return the autograd kernel of an operator that has no gradient, as `trained` has."""

    def autograd(keyset: torch._C.DispatchKeySet, *arguments: object) -> Any:
        check_no_gradient(tensors_among(dict(zip(names, arguments, strict=True))), name, trained)
        with torch._C._AutoDispatchBelowAutograd():
            operator = getattr(torch.ops.attnmask, name).default
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return autograd


def _keep_none(ctx: object, inputs: object, output: object) -> None:
    """Keep nothing for a second derivative, which there is not."""


def _register() -> None:
    forward, wide, backward = "flash_attention", "flash_attention_wide", "flash_attention_backward"
    of_results = f"Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {_PARAMETERS}, bool[] wanted"
    plain_parameters = (
        "Tensor query, Tensor key, Tensor value, bool causal, SymInt? offset, float? softmax_scale"
    )
    into = f"{_PARAMETERS}, *, Tensor(a!) out, Tensor(b!) lse"
    wide_results = "(Tensor out, Tensor lse, Tensor wide_out)"
    register(forward, _PARAMETERS, _on_cpu, _fake, autocast=_cast)
    register(wide, _PARAMETERS, _wide_on_cpu, _fake_wide, results=wide_results)
    # Without Tag.out: Inductor would take it, and fail where sizes are symbols (PyTorch 2.13).
    register(f"{forward}.out", into, _into, _fake_into, results="()")
    register(backward, of_results, _backward_on_cpu, _backward_fake, results="Tensor[]")
    register(f"{forward}_plain", plain_parameters, plain, _plain_fake, results="Tensor")
    packet, info = torch.ops.attnmask, Info(_backward, _keep)
    in_wide = packet.flash_attention_wide.default
    _differentiate(packet.flash_attention.default, NAMES, _on_cpu, info, wide=in_wide)
    _differentiate(in_wide, NAMES, _wide_on_cpu, info)
    no_more = Info(no_second(_ATTENTION), _keep_none)
    _differentiate(packet.flash_attention_backward.default, BACKWARD_NAMES, _backward_on_cpu, no_more)


_register()
Transformed = transformed(
    Rules(
        _ATTENTION,
        NAMES,
        BACKWARD_NAMES,
        _forward,
        lambda *arguments: torch.ops.attnmask.flash_attention_backward(*arguments),
        _keep,
        _by,
        _in_one_call,
    )
)
plain_operator = torch.ops.attnmask.flash_attention_plain.default
