"""FlashAttention's functions that take padding out of a batch, and put it back."""

from attnmask.torch._import import torch

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]
__dir__ = __all__.copy  # what completion offers


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return ``input[indices]``, with a gradient.

    Examples
    --------
    >>> import torch
    >>> from attnmask.flash_attn.bert_padding import index_first_axis
    >>> index_first_axis(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 2])).flatten().tolist()
    [1.0, 3.0]
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Return zeros, `first_axis_dim` of them along the first axis, with `values` at `indices`; with a gradient.

    Examples
    --------
    >>> import torch
    >>> from attnmask.flash_attn.bert_padding import index_put_first_axis
    >>> index_put_first_axis(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 2]), 4).flatten().tolist()
    [1.0, 0.0, 3.0, 0.0]
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Pack the tokens that a mask allows, for the functions with ``varlen`` in their names.

    Parameters
    ----------
    hidden_states : Tensor, shape [B, T, ...]
    attention_mask : Tensor of bool or integers, shape [B, T]
        1 for tokens, 0 for padding.
    unused_mask : Tensor of bool or integers, shape [B, T], optional
        1 for tokens that are packed too, but not used.

    Returns
    -------
    hidden_states : Tensor, shape [total, ...]
    indices : Tensor of int64, shape [total]
        Their places in the flattened batch, for `pad_input`.
    cu_seqlens : Tensor of int32, shape [B + 1]
    max_seqlen_in_batch : int
    seqused : Tensor of int32, shape [B]
        The number of tokens of each row in `attention_mask` alone.

    Examples
    --------
    >>> import torch
    >>> from attnmask.flash_attn.bert_padding import unpad_input
    >>> x, mask = torch.arange(6.0).reshape(2, 3, 1), torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> packed, indices, cu_seqlens, longest, _ = unpad_input(x, mask)
    >>> packed.flatten().tolist(), indices.tolist(), cu_seqlens.tolist(), longest
    ([0.0, 1.0, 3.0], [0, 1, 3], [0, 2, 3], 2)
    """
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = (x.sum(-1, dtype=torch.int32) for x in (packed, attention_mask))
    indices = packed.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Undo `unpad_input`: return [batch, seqlen, ...], zeros where there is padding.

    Examples
    --------
    >>> import torch
    >>> from attnmask.flash_attn.bert_padding import pad_input
    >>> pad_input(torch.tensor([[5.0], [6.0], [7.0]]), torch.tensor([0, 1, 3]), 2, 3).squeeze(-1).tolist()
    [[5.0, 6.0, 0.0], [7.0, 0.0, 0.0]]
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
