"""Run Hugging Face transformers models on attnmask.

`register` adds attnmask to the attention implementations that models choose by name: one function computes attention,
another makes masks. Masks stay descriptions: a model holds a ``SymbolicMask``, which has the shape of the usual mask
array and a `MaskInfo` as its attribute ``info``. It is written out only if the model computes with it.

It also replaces the functions of linear attention that models take from other packages by name, and lets
``generate_batch`` take its names.
"""

from typing import Any

import numpy as np

from attnmask._common.arguments import describe
from attnmask._common.types import Arguments, Array
from attnmask.torch import attention_weights, flash_attention
from attnmask.torch._import import torch
from attnmask.transformers import _batching
from attnmask.transformers._cache import PagedCache, PagedTensor, Pages
from attnmask.transformers._linear import first_tokens, put_back, replace, restarts
from attnmask.transformers._masks import SymbolicMask, is_traced, masking_utils, symbolic_mask, transformers

__all__ = ["PagedCache", "attention", "attention_mask", "register", "unregister"]
__dir__ = __all__.copy  # what completion offers

_names: set[str] = set()
try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:  # in the first versions of 5
    _collector = None


def attention_mask(*, batch_size: int, kv_length: int, **given: Any) -> "torch.Tensor | None":
    """Make a mask when transformers asks for one; `register` registers this function.

    Parameters
    ----------
    batch_size, kv_length : int
        The numbers of batch rows and keys.
    **given
        The other arguments of ``transformers.masking_utils.sdpa_mask``, by name. `q_offset` and `kv_offset` are the
        positions of the first query and the first key. `attention_mask` is a padding mask [B, T], or an earlier result
        of this function, which is returned unchanged.

    Returns
    -------
    SymbolicMask
        While a graph is traced, by ``torch.compile`` or otherwise, the result of ``sdpa_mask``.

    Examples
    --------
    >>> import torch
    >>> import attnmask.transformers
    >>> padding = torch.tensor([[False, True, True, True]])
    >>> mask = attnmask.transformers.attention_mask(
    ...     batch_size=1, q_length=2, kv_length=4, q_offset=2, attention_mask=padding
    ... )
    >>> mask.info.attention_mask[0, 0].astype(int)
    array([[0, 1, 1, 0],
           [0, 1, 1, 1]])
    """
    given = {"batch_size": batch_size, "kv_length": kv_length} | given
    tokens = given.get("attention_mask")
    if isinstance(tokens, SymbolicMask):
        return tokens
    if is_traced() or torch.device(given.get("device") or "cpu").type != "cpu":
        return masking_utils.sdpa_mask(**given)
    return symbolic_mask(batch_size, kv_length, given)


def _sequences(position_ids: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> "Array | None":
    """Return the packed sequences of each row, if positions restart at 0 at each of them.

    Layers that are told no positions have those that the model was called with.
    """
    if query.shape[2] != key.shape[2]:
        return None
    first = restarts(position_ids) if isinstance(position_ids, torch.Tensor) else first_tokens()
    if first is None or first.shape[1] != query.shape[2] or len(first) not in (1, len(query)):
        return None
    return np.broadcast_to(first.cumsum(axis=1), (len(query), query.shape[2]))


def _limits(mask: SymbolicMask) -> dict[str, Any]:
    """Return how far a query sees from its own position, and the size of its chunk, if that is all the mask says."""
    lows: list[int] = []
    highs: list[int] = []
    chunks: list[int] = []
    for node in mask.info._state.program:
        if isinstance(node, tuple) and node[0] == "chunk" and not np.any(node[2:]) and not chunks:
            chunks.append(node[1])
        elif isinstance(node, tuple) and node[0] == "band" and node[3] == 0:
            lows += [] if node[1] is None else [node[1]]
            highs += [] if node[2] is None else [node[2]]
        elif node not in ("and", ("all",)):
            raise NotImplementedError(
                f"attention_mask must be causal, a window or chunks in a step of a PagedCache, got one of {node[0]}"
            )
    window = (-max(lows) if lows else None), min(highs, default=None)
    return {"causal": False, "sliding_window": window, "attention_chunk": chunks[0] if chunks else None}


def _by_distance(bias: torch.Tensor, queries: int, keys: int) -> "torch.Tensor | None":
    """Return a bias [1, H, Tq, Tk] by the distance k - q, from 1 - Tq on, if it depends on nothing else.

    Layers share one bias, so the answer is kept with it until something writes to it.
    """
    if bias.shape[2:] != (queries, keys) or bias.shape[0] != 1 or queries == 1 or is_traced():
        return None
    asked = bias._version, bias.requires_grad and torch.is_grad_enabled()
    kept: Any = getattr(bias, "_attnmask_by_distance", None)
    if kept is not None and kept[0] == asked:
        return kept[1]
    numbers = None
    if torch.equal(bias[:, :, 1:, 1:], bias[:, :, :-1, :-1]):
        numbers = torch.cat([bias[0, :, 1:, 0].flip(-1), bias[0, :, 0]], dim=-1)
    bias._attnmask_by_distance = asked, numbers  # type: ignore[attr-defined, unused-ignore]
    return numbers


@torch.compiler.disable
def _by_layer(module: torch.nn.Module, bias: torch.Tensor, longest: int) -> torch.Tensor:
    """Return the bias of a step by distance, from 1 - longest to 0.

    Models make it for the packed tokens, as if these were one sequence. So the layer that has made it is asked for more
    distances; the next layers share the tensor, and what is kept with it.
    """
    kept: Any = getattr(bias, "_attnmask_in_step", None)
    if kept is not None and kept[0] == bias._version:
        return kept[1]
    tokens = bias.shape[2]
    compute: Any = getattr(module, "compute_bias", None)
    told = getattr(module, "has_relative_attention_bias", False) and compute is not None
    if not told or not torch.equal(bias, compute(tokens, tokens)):
        raise NotImplementedError(
            "position_bias must be one that its layer computes by distance, as in T5, in a step of a PagedCache; "
            "call the model with a batch of rows instead"
        )
    numbers = compute(1, longest, past_seen_tokens=longest - 1)[0, :, 0]
    bias._attnmask_in_step = bias._version, numbers  # type: ignore[attr-defined, unused-ignore]
    return numbers


@torch.compiler.disable
def _pages_of(key: torch.Tensor, value: torch.Tensor) -> "Pages | None":
    """Return the pages that hold both, if a paged cache does."""
    if isinstance(key, PagedTensor) and isinstance(value, PagedTensor) and key.pages is value.pages:
        return key.pages
    return None


def _wants_weights(more: Arguments) -> bool:
    """Return whether the model collects the weights of attention, which not all tell their layers."""
    if more.get("output_attentions") or _collector is None:
        return bool(more.get("output_attentions"))
    collected = _collector.global_var if torch.compiler.is_dynamo_compiling() else _collector.get()
    return any("attentions" in key for key in collected or ())


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: "torch.Tensor | None",
    dropout: float = 0.0,
    scaling: "float | None" = None,
    *,
    is_causal: "bool | None" = None,
    sliding_window: "int | None" = None,
    softcap: "float | None" = None,
    s_aux: "torch.Tensor | None" = None,
    position_bias: "torch.Tensor | None" = None,
    position_ids: "torch.Tensor | None" = None,
    cu_seq_lens_q: "torch.Tensor | None" = None,
    cu_seq_lens_k: "torch.Tensor | None" = None,
    **more: object,
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """Attend as transformers models call it; `register` registers this function.

    Parameters
    ----------
    module : torch.nn.Module
        Its attribute ``is_causal`` applies if `is_causal` is not given.
    query, key, value : Tensor, shape [B, H, Tq, D], [B, Hkv, Tk, D] and [B, Hkv, Tk, Dv]
        Read in place, whatever their strides.
    attention_mask : SymbolicMask or Tensor, optional
        Everything but packed sequences. Without it, `is_causal` and `sliding_window` apply. A tensor of floats is added
        to the logits.
    dropout : float
        Seeded by PyTorch's generator.
    scaling : float, optional
    is_causal : bool, optional
    sliding_window : int, optional
        The number of keys that a query sees, including its own; to either side if not causal.
    softcap : float, optional
    s_aux : Tensor, shape [H], optional
        One sink per head.
    position_bias : Tensor, broadcasts to [B, H, Tq, Tk], optional
        Added to the logits. T5's bias depends only on distances and is read as one number per distance.
    position_ids : Tensor, shape [B, T], optional
        Positions that restart at 0 mark packed sequences, in causal attention of a whole sequence without padding.
    cu_seq_lens_q, cu_seq_lens_k : Tensor, shape [sequences + 1], optional
        Starts of packed sequences in the one batch row.
    **more
        Ignored, but for `output_attentions`, which asks for the weights, and what ``generate_batch`` says of its pages:
        `block_table`, `k_cache` and `v_cache`.

    Returns
    -------
    out : Tensor, shape [B, Tq, H, Dv]
    weights : Tensor, shape [B, H, Tq, Tk], or None
        In the dtype of `query`. None unless `output_attentions` or the model asks for them.

    Examples
    --------
    >>> import torch
    >>> import attnmask.transformers
    >>> query, value = torch.zeros(1, 1, 3, 8), torch.arange(3.0).reshape(1, 1, 3, 1)
    >>> out, _ = attnmask.transformers.attention(torch.nn.Identity(), query, query, value, None)
    >>> out.flatten().tolist()
    [0.0, 0.5, 1.0]
    """
    batching = "read_index" in more  # of `generate_batch`
    if batching:
        attention_mask = None  # some versions make one, as if the tokens were one sequence
    if batching and more.get("cache") is not None:
        key, value, cu_seq_lens_k, more = _batching.updated(module, key, value, cu_seq_lens_k, more)
    wants_weights = _wants_weights(more)
    pages = _pages_of(key, value) if isinstance(key, PagedTensor) else None
    if wants_weights and pages is not None:
        raise NotImplementedError(
            "output_attentions must be False with a PagedCache: use a cache of transformers"
        )
    in_step = pages is not None and pages.step.packed
    continued = in_step or (pages is not None and query.shape[2] != pages.step.longest)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    packed = cu_seq_lens_q is not None or cu_seq_lens_k is not None
    bias, complete = position_bias, False
    given: Arguments = {}
    if bias is not None and not packed:
        longest = key.shape[2] if pages is None else pages.step.longest
        by_distance = (
            _by_layer(module, bias, longest) if in_step else _by_distance(bias, query.shape[2], key.shape[2])
        )
        if by_distance is not None:
            bias, given["relative_bias"] = None, by_distance
            # With pages, the last query has the place of the last key.
            given["relative_low"] = 1 - (query.shape[2] if pages is None else longest)
    if isinstance(attention_mask, SymbolicMask) and in_step:
        given |= _limits(attention_mask)
    elif attention_mask is not None and in_step:
        raise NotImplementedError(
            "attention_mask must be the model's own in a step of a PagedCache, got a tensor"
        )
    elif isinstance(attention_mask, SymbolicMask):
        given["attention_mask"], complete = attention_mask.info, attention_mask.complete
    elif attention_mask is None:
        given["causal"] = causal
        if sliding_window is not None:
            given["sliding_window"] = (sliding_window - 1, sliding_window - 1)
        # One is the last of its sequence; several are the first.
        given["causal_offset"] = "bottom-right" if query.shape[2] == 1 or packed else 0
    elif attention_mask.is_floating_point():
        bias = attention_mask if bias is None else bias + attention_mask
    else:
        given["attention_mask"] = attention_mask
    in_pages = more.get("block_table") is not None
    if packed:
        starts = {"cum_seqlens_q": cu_seq_lens_q, "cum_seqlens_k": cu_seq_lens_k}
        if batching and not in_pages:  # it pads what it compiles
            ends = _batching.to_the_end
            starts = {"cum_seqlens_q": ends(cu_seq_lens_q, query), "cum_seqlens_k": ends(cu_seq_lens_k, key)}
        given |= starts
    elif causal and not complete and not continued and not is_traced():
        given["q_segment_ids"] = _sequences(position_ids, query, key)
    if dropout:
        given["dropout_prob"] = dropout
    given |= {
        "softmax_scale": scaling,
        "logits_soft_cap": softcap,
        "softmax_aux": None if s_aux is None else s_aux[:, None],
    }
    if pages is not None and not dropout and not packed and given.get("q_segment_ids") is None:
        return pages.attend(query, bias=bias, **given), None
    if in_pages:
        return _batching.attend_to_pages(query, key, value, more, given), None
    if in_step:
        raise NotImplementedError(
            "attention must have no dropout in a step of a PagedCache; call model.eval()"
        )
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = flash_attention(query, key, value, bias=bias, **given)
    if not wants_weights:
        return out, None
    given.pop("dropout_prob", None)
    return out, attention_weights(query, key, bias=bias, **given).to(query.dtype)


def _rows(name: str) -> list[tuple[Any, str, Any]]:
    """Return what is registered for a name: the interfaces of transformers, names and functions."""
    rows = [
        (transformers.AttentionInterface, name, attention),
        (transformers.AttentionMaskInterface, name, attention_mask),
    ]
    if _batching.PREFIX is not None:
        rows.append((transformers.AttentionInterface, _batching.PREFIX + name, attention))
    return rows


def register(name: str = "attnmask") -> None:
    """Register attnmask as an attention implementation of transformers.

    Then ``from_pretrained(…, attn_implementation=name)``, ``from_config`` and ``model.set_attn_implementation(name)``
    accept the name, and ``model.generate_batch`` accepts such models. Registering it again has no effect. Linear
    attention needs no name: all models use attnmask for what they would take from flash-linear-attention, causal-conv1d
    and mamba-ssm.

    Parameters
    ----------
    name : str
        A name no other implementation has. transformers reserves names with "flash" for its own implementations, and
        names with "/" or "|" for others.

    Examples
    --------
    >>> import attnmask.transformers
    >>> attnmask.transformers.register()
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
    ... )
    >>> model = LlamaForCausalLM._from_config(config, attn_implementation="attnmask")
    >>> model.config._attn_implementation
    'attnmask'
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {describe(name)}")
    if not name or any(part in name for part in ("flash", "/", "|")):
        raise ValueError(f"name must not be empty or contain 'flash', '/' or '|', got {name!r:.200}")
    for interface, key, function in _rows(name):
        if interface().get(key, function) is not function:
            raise ValueError(
                f"name must not be taken by another implementation in transformers, got {name!r:.200}"
            )
    for interface, key, function in _rows(name):
        interface.register(key, function)
    _names.add(name)
    replace()
    _batching.let_through(_names)


def unregister(name: str = "attnmask") -> None:
    """Undo `register`. Models whose attention is still `name` fail when they are called.

    The functions of linear attention are put back when no name is registered any longer.

    Parameters
    ----------
    name : str
        What was given to `register`; otherwise there is no effect.

    Examples
    --------
    >>> import attnmask.transformers
    >>> attnmask.transformers.register("linear")
    >>> attnmask.transformers.unregister("linear")
    """
    if name in _names:
        _names.remove(name)
        for interface, key, _ in _rows(name):
            interface._global_mapping.pop(key, None)
    if not _names:
        put_back()
        _batching.put_back()
