"""A `MaskInfo` as tensors and a specification, and back."""

from collections.abc import Sequence

from attnmask._common.arguments import describe
from attnmask._masks.info import MaskInfo
from attnmask.torch._import import torch
from attnmask.torch._states import MaskTensors, restored_state, tensors_of


def mask_tensors(mask: MaskInfo) -> MaskTensors:
    """Return a mask as an argument for compiled and exported functions.

    `attnmask.torch.flash_attention` takes the result as a mask. ``torch.export`` accepts tensors and strings but no
    `MaskInfo`; ``torch.compile`` converts a `MaskInfo` by itself. Masks that differ only in the contents of their
    arrays have the same specification, so they do not recompile.

    Parameters
    ----------
    mask : MaskInfo

    Returns
    -------
    MaskTensors

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> info = attnmask.MaskInfo.from_segments([[0, 0, 1]]).apply_causal()
    >>> mask = attnmask.torch.mask_tensors(info)
    >>> mask.tensors
    (tensor([[0, 0, 1]], dtype=torch.int32),)
    >>> query, value = torch.zeros(1, 3, 1, 8), torch.arange(3.0).reshape(1, 3, 1, 1)
    >>> attnmask.torch.flash_attention(query, query, value, mask).flatten().tolist()
    [0.0, 0.5, 2.0]
    """
    if not isinstance(mask, MaskInfo):
        raise TypeError(f"mask must be a MaskInfo, got {describe(mask)}")
    if torch.compiler.is_dynamo_compiling() and mask._tensors is not None:
        return mask._tensors
    return tensors_of(mask._state)


def restored(specification: str, tensors: Sequence[torch.Tensor]) -> MaskInfo:
    """Rebuild the mask of `mask_tensors` from tensors that may be others by now; they are checked."""
    return MaskInfo._of(restored_state(specification, tensors))
