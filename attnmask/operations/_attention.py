"""Softmax attention twice: with this package's kernels, and in NumPy, for reading and comparing."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.arguments import DEFAULTS
from attnmask._attention.batch import unfolded
from attnmask._attention.flash_attention import flash_attention_fwd
from attnmask._attention.forward import dropout_keep_mask
from attnmask._attention.problem import Problem, read_problem
from attnmask._common.arguments import allocate, as_array, is_floating, wide_dtype
from attnmask._common.keywords import advice
from attnmask._common.types import Arguments, Array
from attnmask._masks.info import MaskInfo
from attnmask._masks.program import fill
from attnmask.operations._base import OperationImpl, OperationOutput
from attnmask.operations._registry import OperationRegistry

_PAIRS = 2**22  # that NumPy computes at once, during which signals have to wait
_MORE = DEFAULTS.keys() - {"attention_mask", "bias", "causal"}


class _Attention(OperationImpl):
    """The arguments that both operators share."""

    @abstractmethod
    def _result(self, given: Arguments) -> OperationOutput:
        """Compute the result, given all arguments of `flash_attention_fwd` except `out`."""

    def forward_native(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        mask: ArrayLike | MaskInfo | None = None,
        bias: ArrayLike | None = None,
        causal: bool = False,
        **more: object,
    ) -> OperationOutput:
        for name in more:
            if name not in _MORE:
                known, hint = ", ".join(sorted(_MORE)), advice(name, _MORE | {"mask", "bias", "causal"})
                raise TypeError(f"more must be of {known}, got {name!r}{hint}")
        arrays = {
            name: self._converted(as_array(array, name))
            for name, array in (("query", query), ("key", key), ("value", value))
        }
        heads = [array.shape[-2] if array.ndim >= 3 else 0 for array in (arrays["query"], arrays["key"])]
        given = {
            "attention_mask": mask if isinstance(mask, MaskInfo) else self._fitted(mask, "mask", *heads),
            "bias": self._fitted(bias, "bias", *heads),
            "causal": causal,
            "softmax_scale": self.metadata.softmax_scale,
            "dropout_prob": self.metadata.dropout_prob,
            "logits_dtype": self.metadata.runtime_softmax_dtype,
        }
        return self._result(DEFAULTS | arrays | given | more)

    def _converted(self, array: Array) -> Array:
        dtype = self.metadata.runtime_dtype
        if dtype is None or not is_floating(array.dtype):
            return array
        with np.errstate(over="ignore", invalid="ignore"):
            return array.astype(dtype, copy=False)

    def _fitted(self, value: ArrayLike | None, name: str, q_heads: int, kv_heads: int) -> Array | None:
        if value is None:
            return None
        array = as_array(value, name)
        if array.ndim == 4 and array.shape[1] == kv_heads and kv_heads and q_heads % kv_heads == 0:
            return self.handle_kvhead(array, q_heads, kv_heads)
        return array


@OperationRegistry.register
class FlashAttention(_Attention):
    """`attnmask.flash_attention` as the operator ``"flash"``.

    A mask or bias array may have as many heads as the keys; each then applies to the query heads that share it. By
    name, a call takes all other arguments of `flash_attention` except `out` and `return_lse`. `mask` is its
    `attention_mask`, and errors call it that.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> from attnmask.operations import OperationRegistry
    >>> query, value = np.zeros((1, 3, 1, 8)), np.arange(3.0).reshape(1, 3, 1, 1)
    >>> mask = attnmask.MaskInfo.from_segments([[0, 0, 1]])
    >>> result = OperationRegistry.create("flash")(query, query, value, mask, sliding_window=1)
    >>> result.attention_outputs.ravel(), np.exp(result.lse).round(6)
    (array([0.5, 0.5, 2. ]), array([[[2., 2., 1.]]]))
    """

    @classmethod
    def get_impl_name(cls) -> str:
        return "flash"

    def _result(self, given: Arguments) -> OperationOutput:
        out, lse = flash_attention_fwd(**given)
        return OperationOutput(out, lse=lse)


def _weighted_sums(weights: Array, values: Array, live: NDArray[np.bool_]) -> Array:
    """Return ``weights @ values`` without masked pairs: their weight is 0, and 0 × NaN is NaN."""
    sums: Array
    if np.isfinite(values).all():
        sums = weights @ values
        return sums
    sums = np.empty((*weights.shape[:2], values.shape[2]), values.dtype)
    for row in np.ndindex(*sums.shape[:2]):
        keys = live[row]
        sums[row] = weights[row][keys] @ values[row[0]][keys]
    return sums


def _attend(
    q: Array,
    k: Array,
    v: Array,
    live: NDArray[np.bool_],
    bias: Array | None,
    kept: NDArray[np.bool_] | None,
    problem: Problem,
) -> tuple[Array, Array, Array]:
    """Return the results, weights and logsumexp of some queries of one batch row, heads first."""
    logits = q @ k.swapaxes(1, 2) * problem.scale
    if bias is not None:
        live = live & (bias != -np.inf)
        logits += bias
    cap, dropout, sinks = (problem.term(name) for name in ("logits_soft_cap", "dropout_prob", "softmax_aux"))
    if cap:
        logits = cap.number * np.tanh(logits / cap.number)
    logits = np.where(live, logits, -np.inf)

    aux = np.zeros((1, 1, 0)) if sinks is None or sinks.array is None else sinks.array[0]
    aux = aux.astype(q.dtype)
    top = np.maximum(
        logits.max(axis=2, keepdims=True, initial=-np.inf), aux.max(axis=2, keepdims=True, initial=-np.inf)
    )
    top = np.where(top == -np.inf, 0, top)
    weights = np.exp(logits - top)
    total = weights.sum(axis=2, keepdims=True) + np.exp(aux - top).sum(axis=2, keepdims=True)
    lse = (top + np.log(total))[..., 0]
    if problem.normalize:
        weights /= np.where(total == 0, 1, total)
    if kept is not None and dropout:
        weights = np.where(kept, weights / (1 - dropout.number), 0)
    return _weighted_sums(weights, v, live), weights, lse


@OperationRegistry.register
class VanillaAttention(_Attention):
    """The same in plain NumPy as the operator ``"vanilla"``, which also returns the weights.

    It takes the arguments of `FlashAttention`, computes all pairs, and returns the same results up to rounding.

    Examples
    --------
    >>> import numpy as np
    >>> from attnmask.operations import OperationRegistry
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 4, 8))
    >>> ops = [OperationRegistry.create(name) for name in ("flash", "vanilla")]
    >>> flash, vanilla = (op(x, x, x, causal=True) for op in ops)
    >>> bool(np.allclose(flash.attention_outputs, vanilla.attention_outputs))
    True
    >>> vanilla.attention_weights.shape
    (2, 4, 5, 5)
    """

    @classmethod
    def get_impl_name(cls) -> str:
        return "vanilla"

    def _result(self, given: Arguments) -> OperationOutput:
        problem, axes = read_problem(given)
        batch, queries, heads, _ = problem.query.shape
        keys, kv_heads = problem.key.shape[1:3]
        shape = (batch, heads, queries, keys)

        dtype = problem.query.dtype
        lse_dtype = wide_dtype(dtype)
        wide = np.result_type(lse_dtype, given["logits_dtype"] or lse_dtype)
        out = allocate((batch, heads, queries, problem.value.shape[3]), dtype, "query and value")
        weights = allocate(shape, dtype, "query and key")
        lse = allocate(shape[:3], lse_dtype, "query")
        live = fill(shape, problem.nodes, np.dtype(bool), True, False)
        added, dropout = problem.term("bias"), problem.term("dropout_prob")
        kept = dropout_keep_mask(dropout.integer, dropout.number, shape) if dropout else None
        rows = max(1, _PAIRS // max(1, heads * keys))
        with np.errstate(all="ignore"):
            shared = self.repeat_kv_heads(problem.key, problem.value, heads // max(kv_heads, 1))
            q, k, v = (array.swapaxes(1, 2) for array in (problem.query, *shared))
            bias = None
            if added is not None and added.array is not None:
                biases, each = len(added.array), added.array
                if biases not in (1, batch):  # neighbours share them
                    each = np.repeat(each, batch // biases, axis=0)
                bias = np.broadcast_to(each, shape)
            for row in range(batch):
                row_k, row_v = k[row].astype(wide), v[row].astype(wide)
                for begin in range(0, queries, rows):
                    part = np.s_[row, :, begin : begin + rows]
                    out[part], weights[part], lse[part] = _attend(
                        q[part].astype(wide),
                        row_k,
                        row_v,
                        live[part],
                        None if bias is None else bias[part].astype(wide),
                        None if kept is None else kept[part],
                        problem,
                    )
        results = np.ascontiguousarray(out.swapaxes(1, 2)), weights, lse
        return OperationOutput(*(unfolded(result, axes) for result in results))
