"""Linear attention in transformers models, which take it by name from flash-linear-attention and others.

Models decorate a PyTorch function with the name of the kernel that replaces it if its package is installed. `replace`
puts this package's functions in place of the decorated ones. Few models pass packed documents on to their layers, so
they are read from the arguments of the model's call: see `Documents`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attnmask._common.types import Activation, AnyFunction, Arguments, Array
from attnmask.torch import linear_attention, linear_attention_step, short_convolution, short_convolution_step
from attnmask.torch._import import torch
from attnmask.transformers._masks import is_traced, transformers

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# Packed documents


def restarts(position_ids: torch.Tensor) -> NDArray[np.bool_] | None:
    """Return where positions [B, T] restart at 0; None if none do, or if others do not increase by one."""
    if position_ids.ndim != 2 or position_ids.shape[1] < 2:
        return None
    positions = position_ids.numpy()
    first: NDArray[np.bool_] = positions == 0
    if not first[:, 1:].any() or (np.diff(positions)[~first[:, 1:]] != 1).any():
        return None
    return first


Results: TypeAlias = torch.Tensor | tuple[torch.Tensor | None, ...]


@dataclass
class Documents:
    """Where documents start, from `cu_seq_lens_q`, document numbers (`seq_idx`) or positions that restart at 0."""

    starts: torch.Tensor | None = None
    numbers: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None

    @functools.cached_property
    def first(self) -> NDArray[np.bool_] | None:
        """True for the first token of each document [B, T]; None if that is unknown."""
        if self.starts is not None:
            starts = np.asarray(self.starts)
            first = np.zeros((1, starts[-1]), bool)
            first[0, starts[:-1][np.diff(starts) > 0]] = True
            return first
        if self.numbers is not None:
            numbers: Array = np.asarray(self.numbers)
            return np.diff(numbers, axis=1, prepend=-1) != 0
        positions = self.position_ids
        if not isinstance(positions, torch.Tensor) or positions.device.type != "cpu":
            return None
        # [axes, B, T] starts with the text axis.
        return restarts(positions[0] if positions.ndim == 3 else positions)


_documents: ContextVar[Documents | None] = ContextVar("attnmask_documents", default=None)


def first_tokens() -> NDArray[np.bool_] | None:
    """Return `Documents.first` of the model that is running."""
    documents = _documents.get()
    return None if documents is None else documents.first


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a model, with its documents set until it returns, and again while checkpoints recompute layers."""
    call = super(transformers.PreTrainedModel, self).__call__
    if is_traced():
        return call(*args, **kwargs)
    kind: Any = type(self)
    given = dict(zip(_parameters(kind), args, strict=False)) | kwargs if args else kwargs
    told = given.get("cu_seq_lens_q"), given.get("seq_idx"), given.get("position_ids")
    if told[0] is None and told[1] is None and told[2] is None:
        return call(*args, **kwargs)
    if self.training and torch.is_grad_enabled():
        for module in self.modules():
            if getattr(module, "gradient_checkpointing", False):
                _carry(module)
    token = _documents.set(Documents(*told))
    try:
        return call(*args, **kwargs)
    finally:
        _documents.reset(token)


def _carry(module: Any) -> None:
    """Let a checkpoint remember the documents."""
    checkpoint = getattr(module, "_gradient_checkpointing_func", None)
    if checkpoint is None or hasattr(checkpoint, "carries_documents"):
        return

    @functools.wraps(checkpoint)
    def carrying(function: AnyFunction, *args: object, **kwargs: object) -> Results:
        documents = _documents.get()

        def again(*args: object, **kwargs: object) -> Results:
            token = _documents.set(documents)
            try:
                return function(*args, **kwargs)
            finally:
                _documents.reset(token)

        return checkpoint(again, *args, **kwargs)

    carrying.carries_documents = True  # type: ignore[attr-defined]
    module._gradient_checkpointing_func = carrying


def _starts(x: torch.Tensor, more: Arguments, before: int = 0) -> Array | torch.Tensor | None:
    """Return the starts of documents in the rows of `x` [B, T, …], laid end to end.

    Up to `before` tokens may come before those of the model: the end of a state.
    """
    rows, tokens = x.shape[:2]
    starts = more.get("cu_seqlens")
    if starts is None:
        starts = more.get("cu_seq_lens_q")
    numbers = more.get("seq_idx")
    told = starts is not None or numbers is not None
    if is_traced():
        if starts is None and numbers is not None:
            raise NotImplementedError("seq_idx must be None in compiled models; pass cu_seq_lens_q")
        return starts
    first = Documents(starts, numbers).first if told else first_tokens()
    if first is None:
        return None
    extra = tokens - first.shape[1]
    if not 0 <= extra <= before or len(first) not in (1, rows):
        if not told:
            return None  # the model's call was about other tokens
        raise ValueError(
            f"cu_seq_lens_q and seq_idx must be of [{rows}, {tokens}] tokens, got {list(first.shape)}"
        )
    whole = np.zeros((rows, tokens), bool)
    whole[:, extra:] = first
    if extra:
        whole[:, extra] = False  # continues the state
    whole[:, 0] = True
    return np.append(np.flatnonzero(whole), rows * tokens)


# Functions. They get the arguments of those that they replace by name, and return NotImplemented for what is theirs


def _suits(first: object, given: Arguments) -> bool:
    """Return whether tensors are on the CPU and not of a program that is being exported to run elsewhere."""
    for x in given.values():
        if isinstance(x, torch.Tensor) and not x.is_cpu:
            return False
    return (
        isinstance(first, torch.Tensor)
        and first.dtype in _TYPES
        and not torch.compiler.is_exporting()
        and (torch.compiler.is_compiling() or not torch.jit.is_tracing())
    )


def _learns(given: Arguments) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in given.values()
    )


def _values(given: Arguments, names: str) -> list[Any]:
    return [given[name] for name in names.split()]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return torch.nn.functional.softplus(dt) if softplus else dt


def _gated(out: torch.Tensor, skipped: torch.Tensor | None, z: torch.Tensor | None) -> torch.Tensor:
    out = out if skipped is None else out + skipped
    return out if z is None else out * torch.nn.functional.silu(z)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    starts: Array | torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to packed documents in any number of rows. States belong to rows: to their first and last documents."""
    rows, tokens = value.shape[:2]
    given |= {"query": query, "key": key, "value": value, "return_state": True}
    if starts is None:
        out, state = linear_attention(**given, initial_state=initial_state)
        return out, state if output_final_state else None
    first = [0] if rows == 1 else np.searchsorted(starts, tokens * np.arange(rows)).tolist()
    if initial_state is not None:
        there = initial_state
        initial_state = there.new_zeros(len(starts) - 1, *there.shape[1:])
        initial_state = initial_state.index_copy(0, torch.tensor(first), there)
    flat: Arguments = {
        name: x.reshape(1, rows * tokens, *x.shape[2:]) if isinstance(x, torch.Tensor) else x
        for name, x in given.items()
    }
    out, state = linear_attention(**flat, initial_state=initial_state, cu_seqlens=starts)
    last = [*(i - 1 for i in first[1:]), -1]
    return out.reshape(value.shape), state[last] if output_final_state else None


def _gated_delta_rule(given: Arguments) -> Results:
    query, key, value, state = _values(given, "query key value initial_state")
    key, value = key.to(query.dtype), value.to(query.dtype)
    state = None if state is None else _wide(state)
    options = {
        "decay": _wide(given["g"]),
        "beta": _wide(given["beta"]),
        "normalize_qk": given["use_qk_l2norm_in_kernel"],
    }
    final = given["output_final_state"]
    if value.shape[1] == 1 and state is not None and final and not _learns(given):
        token = {name: x[:, 0] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        out = linear_attention_step(query[:, 0], key[:, 0], value[:, 0], state, **token)
        return out[:, None], state
    starts = _starts(value, given)
    return _attend(query, key, value, **options, initial_state=state, output_final_state=final, starts=starts)


def _chunk_scan(given: Arguments) -> Results:
    """Mamba-2: queries are C, keys B, values ``dt * x``, decays ``dt * A``. States are [B, H, V, K]."""
    hidden_states, dt, A, B, C, D, state = _values(given, "hidden_states dt A B C D initial_states")
    if given.get("z") is not None:
        return NotImplemented
    dt = _time_steps(dt, given["dt_bias"], given["dt_softplus"])
    x, dt = _wide(hidden_states), _wide(dt.clamp(*given["dt_limit"]))
    out, state = _attend(
        C.to(x.dtype),
        B.to(x.dtype),
        x * dt[..., None],
        decay=A.to(x.dtype) * dt,
        scale=1.0,
        initial_state=None if state is None else state.to(x.dtype).transpose(2, 3),
        output_final_state=given["return_final_states"],
        starts=_starts(x, given),
    )
    out = _gated(out, None if D is None else x * D[..., None], None)
    return (out, state.transpose(2, 3)) if state is not None else out


def _state_update(given: Arguments) -> Results:
    """One token of Mamba-2: one decay per head, expanded with stride 0. Mamba, whose decays differ, is left alone."""
    state, hidden_states, dt, A, B, C = _values(given, "state hidden_states dt A B C")
    D, dt_bias, z = _values(given, "D dt_bias z")
    if state.ndim != 4 or _learns(given):
        return NotImplemented
    wide = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
    repeated = A.stride()[1:] == (0, 0) and dt.stride(-1) == 0
    if state.dtype != wide or not repeated or (dt_bias is not None and dt_bias.stride(-1) != 0):
        return NotImplemented
    bias = None if dt_bias is None else dt_bias[..., 0]
    x, dt = hidden_states.to(wide), _time_steps(dt[..., 0], bias, given["dt_softplus"]).to(wide)
    out = linear_attention_step(
        C.to(wide),
        B.to(wide),
        x * dt[..., None],
        state.transpose(2, 3),
        decay=dt * A[:, 0, 0].to(wide),
        scale=1.0,
    )
    return _gated(out, None if D is None else x * D, z).to(hidden_states.dtype)


def _selective_scan(given: Arguments) -> Results:
    """Mamba: arrays are [B, H, T] and [B, K, T], and each channel is a head with V = 1 and its own decays."""
    hidden_states, dt, A, B, C, D, bias = _values(given, "hidden_states dt A B C D delta_bias")
    dt = _time_steps(dt, None if bias is None else bias[..., None], given["delta_softplus"])
    x, dt = _wide(hidden_states).transpose(1, 2), _wide(dt).transpose(1, 2)
    out, state = _attend(
        C.to(x.dtype).transpose(1, 2)[:, :, None],
        B.to(x.dtype).transpose(1, 2)[:, :, None],
        (x * dt)[..., None],
        decay=A.to(x.dtype) * dt[..., None],
        scale=1.0,
        initial_state=None,
        output_final_state=given["return_last_state"],
        starts=_starts(x, given),
    )
    out = out[..., 0].transpose(1, 2).to(hidden_states.dtype)
    out = _gated(out, None if D is None else hidden_states * D[:, None], given["z"])
    return out if state is None else (out, state[..., 0])


def _nothing(given: Arguments) -> None:
    """Return None in place of a kernel for a whole layer, so that models call the functions above."""


def _convolution(given: Arguments, dtype: torch.dtype) -> tuple[Any, Any, Activation, AnyFunction]:
    """Return weights and biases, the activation that the core has, and another one."""
    weight, bias, activation = _values(given, "weight bias activation")
    weight, bias = (
        x if x is None or x.dtype in (dtype, torch.float32) else x.to(dtype) for x in (weight, bias)
    )
    silu = activation in ("silu", "swish")
    other = (lambda x: x) if silu or activation is None else transformers.activations.ACT2FN[activation]
    return weight, bias, "silu" if silu else None, other


def _conv1d(given: Arguments) -> Results:
    """Convolve [B, C, T]."""
    x = given["hidden_states"].transpose(1, 2)
    weight, bias, activation, other = _convolution(given, x.dtype)
    starts = _starts(x, given, before=weight.shape[1])
    rows = x if starts is None else x.reshape(1, -1, x.shape[2])
    out = short_convolution(rows, weight, bias, activation=activation, cu_seqlens=starts)
    return other(out.reshape(x.shape).transpose(1, 2))


def _conv1d_update(given: Arguments) -> Results:
    """Convolve one token [B, C, 1]. The state [B, C, W] holds one token more than is needed."""
    hidden_states, state = _values(given, "hidden_states conv_state")
    spare = state.shape[-1] - given["weight"].shape[-1] + 1
    same = hidden_states.dtype == state.dtype
    if _learns(given) or hidden_states.shape[2] != 1 or not same or spare < 0:
        return NotImplemented
    if spare:
        state[..., :spare].copy_(state[..., 1 : spare + 1].clone())
    weight, bias, activation, other = _convolution(given, state.dtype)
    x, state = hidden_states[..., 0], state[..., spare:]
    return other(short_convolution_step(x, weight, state, bias, activation=activation)[..., None])


class _Kernel(NamedTuple):
    compute: Callable[[Arguments], Results]
    parameters: str = ""  # of the functions that it can replace, in their order; none: of any


_DELTA_RULE = "query key value g beta{} initial_state output_final_state use_qk_l2norm_in_kernel"
_CHUNKS, _TOKENS = (
    _Kernel(_gated_delta_rule, _DELTA_RULE.format(chunk_size)) for chunk_size in (" chunk_size", "")
)
_KERNELS = {  # by the names of those that they replace
    "chunk_gated_delta_rule": _CHUNKS,
    "fused_recurrent_gated_delta_rule": _TOKENS,
    "chunk_kda": _CHUNKS,
    "fused_recurrent_kda": _TOKENS,
    "mamba_chunk_scan_combined": _Kernel(
        _chunk_scan,
        "hidden_states dt A B C chunk_size D dt_bias initial_states dt_softplus dt_limit return_final_states",
    ),
    "mamba_split_conv1d_scan_combined": _Kernel(_nothing),
    "mamba_inner_fn": _Kernel(_nothing),
    "selective_scan_fn": _Kernel(
        _selective_scan,
        "hidden_states dt A B C D z delta_bias delta_softplus return_last_state use_mambapy use_associative_scan",
    ),
    "selective_state_update": _Kernel(_state_update, "state hidden_states dt A B C D dt_bias dt_softplus z"),
    "causal_conv1d_fn": _Kernel(_conv1d, "hidden_states weight bias activation"),
    "causal_conv1d_update": _Kernel(_conv1d_update, "hidden_states conv_state weight bias activation"),
}


# Replacing


def _adapted(original: AnyFunction, kernel: _Kernel) -> AnyFunction | None:
    """Return what calls the kernel, if it knows the parameters of `original`."""
    rows = inspect.signature(original).parameters.values()
    names = [row.name for row in rows if row.kind is row.POSITIONAL_OR_KEYWORD]
    if kernel.parameters and names != kernel.parameters.split():
        return None
    defaults = {row.name: row.default for row in rows if row.default is not row.empty}

    @functools.wraps(original)
    def adapted(*args: object, **kwargs: object) -> Results:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        out = kernel.compute(given) if _suits(given.get(names[0]), given) else NotImplemented
        return original(*args, **kwargs) if out is NotImplemented else out

    adapted.attnmask_replaces = original  # type: ignore[attr-defined]
    return adapted


def _name_in_package(function: Any) -> str | None:
    """Return the name given to the decorator of transformers, or None if `function` is not decorated."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "func_name" not in names or getattr(function, "__module__", None) is None:
        return None
    name = function.__closure__[names.index("func_name")].cell_contents
    return name if isinstance(name, str) else None


def _replace_in(module: ModuleType) -> None:
    for name, original in list(vars(module).items()):
        kernel = _KERNELS.get(_name_in_package(original) or "")
        adapted = None if kernel is None else _adapted(original, kernel)
        if adapted is not None:
            setattr(module, name, adapted)


def _modules() -> list[ModuleType]:
    """Return the modules that use the decorator."""
    decorator = "use_kernel_func_from_hub_with_fallback"
    return [module for module in list(sys.modules.values()) if decorator in getattr(module, "__dict__", ())]


def replace() -> None:
    """Put this package's functions into all models, including those imported later."""
    base: Any = transformers.PreTrainedModel
    if hasattr(base.__init__, "attnmask_replaces"):
        return

    def init(self: Any, *args: object, **kwargs: object) -> None:
        for kind in type(self).__mro__:
            if issubclass(kind, base) and kind.__module__ in sys.modules:
                _replace_in(sys.modules[kind.__module__])
        original(self, *args, **kwargs)

    original = base.__init__
    base.__init__ = functools.wraps(original)(init)
    base.__init__.attnmask_replaces = original
    base.__call__ = _call
    for module in _modules():
        _replace_in(module)


def put_back() -> None:
    """Undo `replace`."""
    base: Any = transformers.PreTrainedModel
    if not hasattr(base.__init__, "attnmask_replaces"):
        return
    base.__init__ = base.__init__.attnmask_replaces
    del base.__call__
    for module in _modules():
        for name, function in list(vars(module).items()):
            if hasattr(function, "attnmask_replaces"):
                setattr(module, name, function.attnmask_replaces)
