"""Linear attention and short convolutions for PyTorch, with gradients, and their steps, which write to states.

Each function is two operators, and its step a third::

    out, state = torch.ops.attnmask.linear_attention(query, key, value, ...)
    gradients = torch.ops.attnmask.linear_attention_backward(dout, dstate, query, key, value, ..., wanted)
    out = torch.ops.attnmask.linear_attention_step(query, key, value, state, ...)

Both results are always there. Gradients take nothing but the arguments, from which they compute again what they need:
its size depends on the lengths of sequences, which a graph does not know. `wanted` says of the arguments that have
gradients whether they are to be returned. Plain calls go to C without an operator, and keep what gradients need.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, Unpack, overload

from attnmask._common.arguments import describe, flag, integer, one_of, real, suit_hint
from attnmask._common.loading import _core
from attnmask._common.types import AnyFunction, Arguments, Array
from attnmask._linear import attention
from attnmask._linear import short_convolution as convolution
from attnmask._linear.options import (
    PROBLEM,
    ConvolutionCall,
    ConvolutionOptions,
    ConvolutionStepOptions,
    LinearCall,
    LinearOptions,
    LinearStepOptions,
    keywords,
)
from attnmask.torch import _operators as operators
from attnmask.torch._import import torch
from attnmask.torch._operators import check_no_tangents, check_tensor, needs_operator, operand, tensors_among
from attnmask.torch._states import to_tensor
from attnmask.torch._types import Context, MaybeTensor, Shaped

_INTEGERS = ("cu_seqlens", "state_indices")  # which may be lists and arrays


def _activation(value: object, name: str) -> object:
    one_of(value, name, (None, "silu"))
    return value


# How arguments that are not tensors are checked, by their types in schemas.
_CHECKS: dict[str, AnyFunction] = {"float": real, "bool": flag, "SymInt": integer, "str": _activation}


class _Parameters:
    """The parameters of an operator."""

    def __init__(self, schema: str) -> None:
        kinds = {name: kind for kind, name in (parameter.split() for parameter in schema.split(", "))}
        self.names = tuple(kinds)
        self.optional = {name for name, kind in kinds.items() if kind.endswith("?")}
        self.written = {name for name, kind in kinds.items() if "!" in kind}
        checks = {name: _CHECKS.get(kind.strip("?"), check_tensor) for name, kind in kinds.items()}
        self.tensors = [name for name in kinds if checks[name] is check_tensor and name not in _INTEGERS]
        self.numbers = {name: check for name, check in checks.items() if check is not check_tensor}

    def learn(self, given: Arguments) -> bool:
        return any(x is not None and x.requires_grad for x in map(given.get, self.tensors))

    def prepared(self, given: Arguments, cast: Sequence[str]) -> Arguments:
        """Return checked arguments. Under autocast, cast tensors named in `cast`, and those of 16-bit types
        that are not written to.
        """
        for name in self.tensors:
            x = given[name]
            if x is not None or name not in self.optional:
                check_tensor(x, name)
        for name, check in self.numbers.items():
            x = given[name]
            if x is not None or name not in self.optional:
                given[name] = check(x, name)
        if not torch.is_autocast_enabled("cpu"):
            return given
        return given | {
            name: operators.autocast(x)
            for name, x in tensors_among(given).items()
            if name in cast or (x.dtype.itemsize == 2 and name not in self.written)
        }


def _call(function: AnyFunction, given: Arguments, **more: object) -> Any:
    """Call a function of arrays with tensors, in place."""
    try:
        for name, x in given.items():
            more[name] = operators.in_place(x, name) if isinstance(x, torch.Tensor) else x
        return function(**more)
    except (TypeError, ValueError) as error:
        suit_hint(error, given)
        raise


def _check_axes(given: Arguments, **layouts: str) -> None:
    for name, layout in layouts.items():
        if given[name].ndim != layout.count(",") + 1:
            raise ValueError(f"{name} must be {layout}, got {describe(given[name])}")


def _operands(names: Sequence[str], given: Arguments) -> list[object]:
    return [operand(given[name]) if name in _INTEGERS else given[name] for name in names]


class _Function:
    """A differentiable function of sequences that returns a result and the final states.

    Parameters that have gradients come first, then cu_seqlens, then those that are not tensors.
    """

    def __init__(
        self,
        name: str,
        parameters: str,
        *,
        function: AnyFunction,
        remember: AnyFunction,
        gradients: AnyFunction,
        likes: Callable[[Arguments], tuple[Shaped, ...]],
        cast: Sequence[str],
    ) -> None:
        self.name, self.parameters = name, _Parameters(parameters)
        self.names = self.parameters.names
        self.learned = self.names.index("cu_seqlens")
        self.function, self.remember, self.gradients = function, remember, gradients
        self.likes, self.cast = likes, cast
        backward = f"{name}_backward"
        operators.register(name, parameters, self.on_cpu, self.fake, results="(Tensor out, Tensor state)")
        operators.register(
            backward,
            f"Tensor? dout, Tensor? dstate, {parameters}, bool[] wanted",
            self.backward_on_cpu,
            self.backward_fake,
            results="Tensor[]",
        )
        self.operator = getattr(torch.ops.attnmask, name).default
        self.backward = getattr(torch.ops.attnmask, backward).default
        rules = operators.Rules(
            name,
            self.names,
            ("dout", "dstate", *self.names, "wanted"),
            self.operator,
            self.backward,
            self.keep,
            self.spread,
            _in_one_call,
        )
        self.transformed = operators.transformed(rules)
        operators.register_rules(rules, self.on_cpu, self.backward_on_cpu)

    def compute(self, given: Arguments, with_state: bool) -> Any:
        result = _call(self.function, given, return_state=with_state)
        return tuple(map(to_tensor, result)) if with_state else to_tensor(result)

    def on_cpu(self, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        check_no_tangents(self.names, arguments, self.name)
        return self.compute(dict(zip(self.names, arguments, strict=True)), True)

    def differentiate(
        self, dout: MaybeTensor, dstate: MaybeTensor, arguments: Sequence[object], kept: MaybeTensor = None
    ) -> tuple[Array, ...]:
        check_no_tangents(("dout", "dstate", *self.names), (dout, dstate, *arguments), self.name)
        given = dict(zip(self.names, arguments, strict=True))
        if dout is None:
            shape, dtype = self.likes(given)[0]
            dout = torch.zeros(shape, dtype=dtype)
        return _call(self.gradients, {"dout": dout, "dstate": dstate, "kept": kept, **given})

    def backward_on_cpu(self, dout: MaybeTensor, dstate: MaybeTensor, *more: Any) -> list[torch.Tensor]:
        *arguments, wanted = more
        grads = self.differentiate(dout, dstate, arguments)
        return list(map(to_tensor, itertools.compress(grads, wanted)))

    def fake(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        check_no_tangents(self.names, arguments, self.name)
        operators.check_devices(self.names, arguments)
        likes = self.likes(dict(zip(self.names, arguments, strict=True)))
        return tuple(arguments[0].new_empty(shape, dtype=dtype) for shape, dtype in likes)

    def backward_fake(self, dout: MaybeTensor, dstate: MaybeTensor, *more: Any) -> list[torch.Tensor]:
        *arguments, wanted = more
        operators.check_devices(("dout", "dstate", *self.names), (dout, dstate, *arguments))
        return [x.new_empty(x.shape) for x in itertools.compress(arguments, wanted)]

    def keep(self, ctx: Context, inputs: tuple[Any, ...], output: object) -> None:
        tensors = self.learned + 1
        ctx.save_for_backward(*inputs[:tensors])
        ctx.more = inputs[tensors:]
        ctx.set_materialize_grads(False)

    def spread(
        self, operator: AnyFunction, ctx: Context, dout: MaybeTensor, dstate: MaybeTensor
    ) -> tuple[MaybeTensor, ...]:
        wanted = [bool(needed) for needed in ctx.needs_input_grad[: self.learned]]
        grads = operator(dout, dstate, *ctx.saved_tensors, *ctx.more, wanted)
        return *operators.spread(grads, wanted), *[None] * (len(self.names) - self.learned)

    def __call__(self, given: Arguments, return_state: bool) -> Any:
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling and torch._C._are_functorch_transforms_active():
            # Operators have no gradients for torch.func.
            return torch.compiler.disable(self.__call__)(given, return_state)
        with_state = flag(return_state, "return_state")
        given = self.parameters.prepared(given, self.cast)
        if not compiling:
            check_no_tangents(given, given.values(), self.name)
        traced = compiling or needs_operator(given.values())
        if traced:
            meta = operators.on_meta(given)
            operator = self.transformed.apply if operators.is_differentiated() else self.operator
            results = operators.call_operator(operator, _operands(self.names, given), meta)
        elif torch.is_grad_enabled() and self.parameters.learn(given):
            results = _Learning.apply(self, *_operands(self.names, given))
        else:
            return self.compute(given, with_state)
        return results if with_state else results[0]


class _Learned(Context, Protocol):
    function: _Function


class _Learning(torch.autograd.Function):
    """A function called without an operator, which keeps what the gradient needs."""

    @staticmethod
    def forward(ctx: _Learned, function: _Function, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = dict(zip(function.names, arguments, strict=True))
        out, state, *kept = map(to_tensor, _call(function.remember, given))
        count = function.learned + 1
        ctx.function, ctx.more = function, arguments[count:]
        ctx.save_for_backward(*arguments[:count], *kept)
        ctx.set_materialize_grads(False)
        return out, state

    @staticmethod
    def backward(ctx: _Learned, dout: MaybeTensor, dstate: MaybeTensor) -> tuple[MaybeTensor, ...]:
        if torch.compiler.is_dynamo_compiling():  # where gradients are compiled, too
            return torch.compiler.disable(_Learning.backward)(ctx, dout, dstate)
        function, tensors = ctx.function, ctx.saved_tensors
        count = function.learned + 1
        arguments = *tensors[:count], *ctx.more
        wanted = [bool(needed) for needed in ctx.needs_input_grad[1:count]]
        if torch.is_grad_enabled() or needs_operator((dout, dstate, *tensors)):
            grads = operators.spread(function.backward(dout, dstate, *arguments, wanted), wanted)
        else:
            found = function.differentiate(dout, dstate, arguments, *tensors[count:])
            grads = [to_tensor(grad) if needed else None for grad, needed in zip(found, wanted, strict=True)]
        return None, *grads, *[None] * (len(function.names) - function.learned)


def _in_one_call(given: Arguments, dims: Arguments, count: int) -> tuple[list[object], int] | None:
    """Fold mapped rows into the batch. Arrays with an entry for each batch row are those of three or more axes."""
    tensors = tensors_among(given)
    by_row = {name for name, x in tensors.items() if x.ndim - (dims[name] is not None) > 2}
    summed = (name not in by_row for name in itertools.compress(tuple(given)[2:], given.get("wanted", ())))
    if given["cu_seqlens"] is not None or any(dims[name] is not None for name in tensors.keys() - by_row):
        return None
    if any(summed):  # a gradient over the rows of each call
        return None
    folded, rows = dict(given), 0
    for name in by_row:
        x, dim = tensors[name], dims[name]
        x = x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
        rows = x.shape[1]
        folded[name] = x.flatten(0, 1)
    return list(folded.values()), rows


class _Step:
    """One token of each sequence: a function that writes to `state`, and has no gradient."""

    def __init__(
        self,
        name: str,
        parameters: str,
        *,
        function: AnyFunction,
        like: Callable[[Arguments], Shaped],
        cast: Sequence[str],
    ) -> None:
        self.name, self.parameters = name, _Parameters(parameters)
        self.names = self.parameters.names
        self.function, self.like, self.cast = function, like, cast
        operators.register(
            name,
            parameters,
            self.on_cpu,
            self.fake,
            results="Tensor",
            autograd=operators.without_gradient(name, self.names, name.removesuffix("_step")),
            vmap=self.mapped,
        )
        self.operator = getattr(torch.ops.attnmask, name).default

    def check_no_gradient(self, given: Arguments) -> None:
        operators.check_no_gradient(tensors_among(given), self.name, self.name.removesuffix("_step"))

    def compute(self, given: Arguments) -> torch.Tensor:
        out = _call(self.function, given)
        if not given["state"].is_inference():
            torch.autograd.graph.increment_version(given["state"])
        return to_tensor(out)

    def on_cpu(self, *arguments: object) -> torch.Tensor:
        return self.compute(dict(zip(self.names, arguments, strict=True)))

    def fake(self, *arguments: Any) -> torch.Tensor:
        operators.check_devices(self.names, arguments)
        shape, dtype = self.like(dict(zip(self.names, arguments, strict=True)))
        return arguments[0].new_empty(shape, dtype=dtype)

    def mapped(
        self, info: operators.Mapped, in_dims: Sequence[object], *arguments: object
    ) -> tuple[torch.Tensor, int]:
        if in_dims[self.names.index("state")] is None:
            raise RuntimeError(
                f"state must be mapped in {self.name} under vmap: all calls would write to the same one"
            )
        count, size = len(self.names), info.batch_size
        calls = [self.operator(*map(operators.chosen, arguments, in_dims, [i] * count)) for i in range(size)]
        return torch.stack(calls), 0

    def __call__(self, given: Arguments) -> torch.Tensor:
        given = self.parameters.prepared(given, self.cast)
        compiling = torch.compiler.is_dynamo_compiling()
        if not compiling:
            self.check_no_gradient(given)
        if compiling or needs_operator(given.values()):
            meta = operators.on_meta(given)
            return operators.call_operator(self.operator, _operands(self.names, given), meta)
        return self.compute(given)


# Short convolutions


def _convolution_likes(given: Arguments) -> tuple[Shaped, ...]:
    _check_axes(given, x="[B, T, C]", weight="[C, W]")
    x, weight, starts = given["x"], given["weight"], given["cu_seqlens"]
    count = x.shape[0] if starts is None else starts.numel() - 1
    return (x.shape, x.dtype), ((count, weight.shape[0], weight.shape[1] - 1), x.dtype)


def _convolution_gradients(
    *, dout: Array, dstate: Array | None, kept: None, activation: str | None, **given: Any
) -> tuple[Array | None, ...]:
    arrays = (given[name] for name in ("x", "weight", "bias"))
    others = given["cu_seqlens"], given["initial_state"], dout, dstate
    core: AnyFunction = _core.short_convolution_backward
    return core(*arrays, activation is not None, *others)


def _step_like(given: Arguments) -> Shaped:
    _check_axes(given, x="[B, C]", weight="[C, W]", state="[slots, C, W - 1]")
    return given["x"].shape, given["x"].dtype


_short_convolution = _Function(
    "short_convolution",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, str? activation",
    function=convolution.short_convolution,
    remember=functools.partial(convolution.short_convolution, return_state=True),
    gradients=_convolution_gradients,
    likes=_convolution_likes,
    cast=("x", "initial_state"),
)
_short_convolution_step = _Step(
    "short_convolution_step",
    "Tensor x, Tensor weight, Tensor(a!) state, Tensor? bias, Tensor? state_indices, str? activation",
    function=convolution.short_convolution_step,
    like=_step_like,
    cast=("x",),
)


_CONVOLUTION = keywords(convolution.short_convolution, ConvolutionOptions, "torch.Tensor")
_CONVOLUTION_STEP = keywords(convolution.short_convolution_step, ConvolutionStepOptions, "torch.Tensor")


@overload
def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    **more: Unpack[ConvolutionCall[torch.Tensor, Literal[False]]],
) -> torch.Tensor: ...
@overload
def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    **more: Unpack[ConvolutionCall[torch.Tensor, Literal[True]]],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    **more: Unpack[ConvolutionCall[torch.Tensor, bool]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@_CONVOLUTION
def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    return_state: bool = False,
    **more: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Apply `attnmask.short_convolution` to CPU tensors, with gradients of all of them and of the state.

    ``torch.autocast`` casts `x` and `initial_state`.

    Parameters
    ----------
    x : Tensor, shape [B, T, C]
    weight : Tensor, shape [C, W]
    bias : Tensor, shape [C], optional
    cu_seqlens : Tensor or array_like of integers, shape [N + 1], optional
    initial_state : Tensor, shape [N, C, W - 1], optional
    activation, return_state
        All of these as in `attnmask.short_convolution`.

    Returns
    -------
    Tensor, or tuple of two Tensors if `return_state`

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> x = torch.arange(1.0, 6).reshape(1, 5, 1)
    >>> weight = torch.tensor([[100.0, 10, 1]], requires_grad=True)
    >>> out = attnmask.torch.short_convolution(x, weight, cu_seqlens=[0, 2, 5])
    >>> out.flatten().tolist()
    [1.0, 12.0, 3.0, 34.0, 345.0]
    >>> out.sum().backward()
    >>> weight.grad.tolist()
    [[3.0, 8.0, 15.0]]
    """
    own = {"x": x, "weight": weight, "bias": bias}
    return _short_convolution(_CONVOLUTION.complete(short_convolution, own, more), return_state)


@_CONVOLUTION_STEP
def short_convolution_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    bias: torch.Tensor | None = None,
    **more: Unpack[ConvolutionStepOptions],
) -> torch.Tensor:
    """Apply `attnmask.short_convolution_step` to CPU tensors: one token of each sequence, `state` updated in place.

    It has no gradient: with grad mode on, tensors that require one are an error. In graphs it is one operator, which
    declares that it writes to `state`. ``torch.autocast`` casts `x`, but not `state`.

    Parameters
    ----------
    x : Tensor, shape [B, C]
    weight : Tensor, shape [C, W]
    state : Tensor, shape [slots, C, W - 1]
    bias : Tensor, shape [C], optional
    state_indices : Tensor or array_like of integers, shape [B], optional
    activation
        All of these as in `attnmask.short_convolution_step`.

    Returns
    -------
    Tensor, shape [B, C]

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> weight, state = torch.tensor([[100.0, 10, 1]]), torch.zeros(1, 1, 2)
    >>> [
    ...     attnmask.torch.short_convolution_step(torch.tensor([[token]]), weight, state).item()
    ...     for token in (1.0, 2.0, 3.0)
    ... ]
    [1.0, 12.0, 123.0]
    >>> state
    tensor([[[2., 3.]]])
    """
    own = {"x": x, "weight": weight, "state": state, "bias": bias}
    return _short_convolution_step(_CONVOLUTION_STEP.complete(short_convolution_step, own, more))


# Linear attention


def _attention_likes(given: Arguments) -> tuple[Shaped, ...]:
    _check_axes(given, query="[B, T, Hk, K]", key="[B, T, Hk, K]", value="[B, T, H, V]")
    query, value, starts = given["query"], given["value"], given["cu_seqlens"]
    count = value.shape[0] if starts is None else starts.numel() - 1
    wide = operators.wide_dtype(query.dtype)
    return (value.shape, query.dtype), ((count, value.shape[2], query.shape[3], value.shape[3]), wide)


def _attention_remember(**given: object) -> tuple[Array, ...]:
    core: AnyFunction = _core.linear_forward_vjp
    return core(*(given[name] for name in PROBLEM), None)


def _attention_gradients(
    *, dout: Array, dstate: Array | None, kept: Array | None, **given: object
) -> tuple[Array | None, ...]:
    if kept is None:
        _, _, kept = _attention_remember(**given)
    core: AnyFunction = _core.linear_backward
    return core(*(given[name] for name in PROBLEM), kept, dout, dstate)


def _attention_step_like(given: Arguments) -> Shaped:
    _check_axes(given, query="[B, Hk, K]", key="[B, Hk, K]", value="[B, H, V]", state="[slots, H, K, V]")
    return given["value"].shape, given["query"].dtype


_linear_attention = _Function(
    "linear_attention",
    "Tensor query, Tensor key, Tensor value, Tensor? decay, Tensor? beta, Tensor? initial_state, "
    "Tensor? cu_seqlens, float? scale, bool normalize_qk, SymInt chunk_size",
    function=attention.linear_attention,
    remember=_attention_remember,
    gradients=_attention_gradients,
    likes=_attention_likes,
    cast=("query", "key", "value"),
)
_linear_attention_step = _Step(
    "linear_attention_step",
    "Tensor query, Tensor key, Tensor value, Tensor(a!) state, Tensor? decay, Tensor? beta, "
    "Tensor? state_indices, float? scale, bool normalize_qk",
    function=attention.linear_attention_step,
    like=_attention_step_like,
    cast=("query", "key", "value"),
)


_ATTENTION = keywords(attention.linear_attention, LinearOptions, "torch.Tensor")
_ATTENTION_STEP = keywords(attention.linear_attention_step, LinearStepOptions, "torch.Tensor")


@overload
def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **more: Unpack[LinearCall[torch.Tensor, Literal[False]]],
) -> torch.Tensor: ...
@overload
def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **more: Unpack[LinearCall[torch.Tensor, Literal[True]]],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **more: Unpack[LinearCall[torch.Tensor, bool]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@_ATTENTION
def linear_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, return_state: bool = False, **more: object
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Apply `attnmask.linear_attention` to CPU tensors, with gradients of all of them and of the state.

    ``torch.autocast`` casts `query`, `key` and `value`.

    Parameters
    ----------
    query, key : Tensor, shape [B, T, Hk, K]
    value : Tensor, shape [B, T, H, V]
    decay : Tensor, shape [H], [B, T, H] or [B, T, H, K], optional
    beta : Tensor, shape [B, T, H], optional
    initial_state : Tensor, shape [N, H, K, V], optional
    cu_seqlens : Tensor or array_like of integers, shape [N + 1], optional
    scale, normalize_qk, chunk_size, return_state
        All of these as in `attnmask.linear_attention`.

    Returns
    -------
    Tensor, or tuple of two Tensors if `return_state`

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> query = torch.ones(1, 3, 1, 1)
    >>> value = torch.tensor([10.0, 20.0, 30.0]).reshape(1, 3, 1, 1).requires_grad_()
    >>> decay = torch.tensor([0.5]).log()
    >>> out = attnmask.torch.linear_attention(query, query, value, decay=decay)
    >>> [round(x, 3) for x in out.flatten().tolist()]
    [10.0, 25.0, 42.5]
    >>> out.sum().backward()
    >>> [round(x, 3) for x in value.grad.flatten().tolist()]
    [1.75, 1.5, 1.0]
    """
    own = {"query": query, "key": key, "value": value}
    return _linear_attention(_ATTENTION.complete(linear_attention, own, more), return_state)


@_ATTENTION_STEP
def linear_attention_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    **more: Unpack[LinearStepOptions[torch.Tensor]],
) -> torch.Tensor:
    """Apply `attnmask.linear_attention_step` to CPU tensors: one token of each sequence, `state` updated in place.

    It has no gradient: with grad mode on, tensors that require one are an error. In graphs it is one operator, which
    declares that it writes to `state`. ``torch.autocast`` casts `query`, `key` and `value`, but not `state`.

    Parameters
    ----------
    query, key : Tensor, shape [B, Hk, K]
    value : Tensor, shape [B, H, V]
    state : Tensor, shape [slots, H, K, V]
    decay : Tensor, shape [H], [B, H] or [B, H, K], optional
    beta : Tensor, shape [B, H], optional
    state_indices : Tensor or array_like of integers, shape [B], optional
    scale, normalize_qk
        All of these as in `attnmask.linear_attention_step`.

    Returns
    -------
    Tensor, shape [B, H, V]

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> state = torch.zeros(1, 1, 2, 1)
    >>> key = torch.tensor([[[1.0, 0.0]]])
    >>> for number in (10.0, 20.0):
    ...     value = torch.full((1, 1, 1), number)
    ...     out = attnmask.torch.linear_attention_step(key, key, value, state, scale=1.0)
    >>> out.item(), state.flatten().tolist()
    (30.0, [30.0, 0.0])
    """
    own = {"query": query, "key": key, "value": value, "state": state}
    return _linear_attention_step(_ATTENTION_STEP.complete(linear_attention_step, own, more))
