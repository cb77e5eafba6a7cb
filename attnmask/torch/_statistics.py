"""Statistics of the weights of attention to a cache, for PyTorch."""

from collections.abc import Sequence
from typing import Any

from attnmask._attention.weights import AttentionStatistics, Statistic
from attnmask._cache.flash_attention_with_kvcache import attention_statistics_with_kvcache as in_numpy
from attnmask._common.types import Arguments
from attnmask.torch import _operators as operators
from attnmask.torch._import import between_graphs, torch
from attnmask.torch._masks import restored
from attnmask.torch._states import MaskTensors, to_tensor


def attention_statistics_with_kvcache(
    query: torch.Tensor, k_cache: torch.Tensor, *, of: Statistic | Sequence[Statistic], **more: Any
) -> AttentionStatistics:
    """Apply `attnmask.attention_statistics_with_kvcache` to CPU tensors, without copying them.

    It has no gradient: with grad mode on, tensors that require one are an error. Compiled functions call it between two
    graphs, as the shape of `key_sum` depends on lengths.

    Parameters
    ----------
    query, k_cache : Tensor
    of : str, tuple, or sequence of these
    **more
        The other arguments of `attnmask.attention_statistics_with_kvcache` by name; all mean the same.

    Returns
    -------
    AttentionStatistics
        Its fields are tensors.

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> query, k_cache = torch.zeros(2, 1, 1, 8), torch.zeros(2, 4, 1, 8)  # all keys weigh the same
    >>> look = attnmask.torch.attention_statistics_with_kvcache
    >>> look(query, k_cache, of="key_sum", cache_seqlens=[2, 4]).key_sum
    tensor([[[0.5000, 0.5000, 0.0000, 0.0000]],
    <BLANKLINE>
            [[0.2500, 0.2500, 0.2500, 0.2500]]])
    """
    operators.check_tensor(query, "query")
    operators.check_tensor(k_cache, "k_cache")
    given: Arguments = {"query": query, "k_cache": k_cache, "of": of, **more}
    tensors = operators.tensors_among(given)
    operators.check_no_gradient(tensors, "attention_statistics_with_kvcache", "attention_statistics")
    given |= {name: operators.in_place(x, name) for name, x in tensors.items()}
    mask = given.get("attention_mask")
    if isinstance(mask, MaskTensors):
        given["attention_mask"] = restored(*mask)
    found = in_numpy(**given)
    return AttentionStatistics(*(None if x is None else to_tensor(x) for x in found))


between_graphs(
    attention_statistics_with_kvcache,
    "the shape of key_sum depends on lengths; compile without fullgraph=True, or call it outside of the graph",
)
