"""NATTEN's functions, for tensors on the CPU: neighborhood attention by `attnmask.MaskInfo.neighborhood`.

Import it in place of ``natten``::

    from attnmask.natten import na2d

    out = na2d(query, key, value, kernel_size=7)  # [batch, height, width, heads, head_dim]

or call `install` before a program imports ``natten``.
"""

from collections.abc import Sequence
from functools import lru_cache
from operator import index
from typing import Any, TypeAlias

from attnmask._common.arguments import describe
from attnmask._common.importable import Importable
from attnmask._masks.info import MaskInfo
from attnmask._masks.neighborhood import of_neighborhood
from attnmask.torch._attention import flash_attention
from attnmask.torch._import import torch

__all__ = ["install", "na1d", "na2d", "na3d", "uninstall"]
__dir__ = __all__.copy  # what completion offers

PerAxis: TypeAlias = int | Sequence[int]
FlagPerAxis: TypeAlias = bool | Sequence[bool]


@lru_cache(64, typed=True)
def _made(shape: tuple[int, ...], *by_axis: object) -> MaskInfo:
    names = ("kernel_size", "stride", "dilation", "is_causal")
    return MaskInfo._of(of_neighborhood({"shape": shape, **dict(zip(names, by_axis, strict=True))}, 1))


def _mask(*given: Any) -> MaskInfo:
    try:
        return _made(*given)
    except TypeError:  # of what has no hash: its error names the argument
        return _made.__wrapped__(*given)


_mask._dynamo_marked_constant = True  # type: ignore[attr-defined]  # by assume_constant_result, which imports Dynamo


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    axes: int,
    scale: float | None,
    *by_axis: object,
) -> torch.Tensor:
    """Attend in a grid of `axes`; `by_axis` are the values of each axis, or one for all."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {describe(x)}")
        if x.ndim != axes + 3:
            raise ValueError(f"{name} must have {axes + 3} axes, {_LAYOUTS[axes]}, got {describe(x)}")
        if x.shape[1:-2] != query.shape[1:-2]:
            raise ValueError(
                f"{name} must have the points of query, {tuple(query.shape[1:-2])}, got {describe(x)}"
            )
    # A graph is of one shape: `index` makes numbers of symbols.
    shape = tuple(index(length) for length in query.shape[1:-2])
    mask = _mask(shape, *(tuple(x) if isinstance(x, list) else x for x in by_axis))
    query, key, value = (x.flatten(1, axes) for x in (query, key, value))
    return flash_attention(query, key, value, mask, softmax_scale=scale).unflatten(1, shape)


_LAYOUTS = {
    1: "[batch, length, heads, head_dim]",
    2: "[batch, height, width, heads, head_dim]",
    3: "[batch, depth, height, width, heads, head_dim]",
}


def na1d(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kernel_size: PerAxis,
    stride: PerAxis = 1,
    dilation: PerAxis = 1,
    is_causal: FlagPerAxis = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Apply neighborhood attention to sequences; it has gradients.

    Parameters
    ----------
    query, key, value : Tensor, shape [batch, length, heads, head_dim]
        There may be fewer key heads than heads, and another head_dim of values.
    kernel_size : int or tuple
        How many points each query sees: odd, unless causal.
    stride : int or tuple
        So many neighboring queries share the window of the one in their middle.
    dilation : int or tuple
        The distance between the keys of a window.
    is_causal : bool or tuple
        True hides the points after a query.
    scale : float, optional
        Defaults to ``1 / sqrt(head_dim)``.

    Returns
    -------
    Tensor
        The shape of `query`, with the head_dim of `value`.

    See Also
    --------
    attnmask.MaskInfo.neighborhood : the mask, which can be joined with others.

    Examples
    --------
    >>> import torch
    >>> from attnmask.natten import na1d
    >>> query, value = torch.zeros(1, 4, 1, 8), torch.arange(4.0).reshape(1, 4, 1, 1)
    >>> na1d(query, query, value, kernel_size=3).flatten().tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    return _attend(query, key, value, 1, scale, kernel_size, stride, dilation, is_causal)


def na2d(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kernel_size: PerAxis,
    stride: PerAxis = 1,
    dilation: PerAxis = 1,
    is_causal: FlagPerAxis = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Apply neighborhood attention to images ``[batch, height, width, heads, head_dim]``: see `na1d`.

    Tuples have one entry for each axis.

    Examples
    --------
    >>> import torch
    >>> from attnmask.natten import na2d
    >>> image = torch.randn(1, 8, 9, 2, 16)
    >>> na2d(image, image, image, kernel_size=(3, 5), dilation=(2, 1)).shape
    torch.Size([1, 8, 9, 2, 16])
    """
    return _attend(query, key, value, 2, scale, kernel_size, stride, dilation, is_causal)


def na3d(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kernel_size: PerAxis,
    stride: PerAxis = 1,
    dilation: PerAxis = 1,
    is_causal: FlagPerAxis = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Apply neighborhood attention to videos ``[batch, depth, height, width, heads, head_dim]``: see `na1d`.

    Tuples have one entry for each axis.

    Examples
    --------
    >>> import torch
    >>> from attnmask.natten import na3d
    >>> video = torch.randn(1, 4, 5, 6, 2, 8)
    >>> na3d(video, video, video, kernel_size=3, is_causal=(True, False, False)).shape  # causal in time
    torch.Size([1, 4, 5, 6, 2, 8])
    """
    return _attend(query, key, value, 3, scale, kernel_size, stride, dilation, is_causal)


_FUNCTIONS = (na1d, na2d, na3d)
_library = Importable("natten", "0.20.0", "attnmask.natten", {"": _FUNCTIONS, ".functional": _FUNCTIONS})


def install() -> None:
    """Make ``import natten`` import these functions, where NATTEN is not installed, until `uninstall`.

    There are then ``natten``, with a ``__version__`` of 0.20, and ``natten.functional``. Installing again has no
    effect.

    Raises
    ------
    RuntimeError
        If there is another ``natten``, which stays.

    Examples
    --------
    >>> import torch
    >>> import attnmask.natten
    >>> attnmask.natten.install()
    >>> from natten import na2d
    >>> na2d(*torch.zeros(3, 1, 5, 6, 2, 8), kernel_size=3).shape
    torch.Size([1, 5, 6, 2, 8])
    >>> attnmask.natten.uninstall()
    """
    _library.install()


def uninstall() -> None:
    """Undo `install`. What was imported from ``natten`` meanwhile still works.

    Examples
    --------
    >>> import attnmask.natten
    >>> attnmask.natten.install()
    >>> attnmask.natten.uninstall()
    """
    _library.uninstall()
