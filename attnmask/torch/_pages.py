"""`attnmask.KVCache` of tensors."""

from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from attnmask._cache import pages
from attnmask._cache.step import Tokens
from attnmask.torch._attention import flash_attention_with_kvcache
from attnmask.torch._import import torch
from attnmask.torch._operators import check_tensor
from attnmask.torch._states import to_tensor
from attnmask.torch._weights import attention_statistics_with_kvcache


def _tensor(x: Any, name: str) -> torch.Tensor:
    check_tensor(x, name)
    tensor: torch.Tensor = x
    return tensor


class KVCacheStep(Tokens[torch.Tensor, torch.Tensor]):
    """The next tokens of some sequences, as returned by `KVCache.step`: `attend` takes and returns tensors."""

    __slots__ = ()
    _given = staticmethod(_tensor)
    _with_pages = staticmethod(flash_attention_with_kvcache)
    _look = staticmethod(attention_statistics_with_kvcache)


class KVCache(pages.KVCache):
    """`attnmask.KVCache` of CPU tensors, which share its memory.

    Parameters, attributes and methods are those of `attnmask.KVCache`; `dtype` may be one of PyTorch's. Pages, lengths
    and tables are tensors, and so are the tokens that a step takes and returns. Steps have no gradient. A function that
    ``torch.compile`` compiles may take a step as an argument and call ``step.attend``.

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> cache = attnmask.torch.KVCache(2, 8, pages=16, page_size=4, dtype=torch.bfloat16)
    >>> prompt, x = cache.new_sequence(), torch.ones(6, 2, 8)
    >>> with cache.step([prompt], 6) as step:
    ...     out = step.attend(0, x, x, x)
    >>> out.shape, cache.lengths([prompt]), cache.k_pages.dtype
    (torch.Size([6, 2, 8]), tensor([6], dtype=torch.int32), torch.bfloat16)
    """

    _result: Any = staticmethod(to_tensor)
    _step_kind: Any = KVCacheStep

    __module__ = "attnmask.torch"  # for pickles

    if TYPE_CHECKING:
        k_pages: torch.Tensor  # type: ignore[assignment, unused-ignore]
        v_pages: torch.Tensor  # type: ignore[assignment, unused-ignore]
        k_scales: torch.Tensor | None  # type: ignore[assignment, unused-ignore]
        v_scales: torch.Tensor | None  # type: ignore[assignment, unused-ignore]

        def lengths(self, ids: ArrayLike) -> torch.Tensor: ...  # type: ignore[override, unused-ignore]
        def positions(self, ids: ArrayLike) -> torch.Tensor: ...  # type: ignore[override, unused-ignore]
        def block_table(self, ids: ArrayLike) -> torch.Tensor: ...  # type: ignore[override, unused-ignore]
        def step(self, ids: ArrayLike, counts: ArrayLike) -> KVCacheStep: ...  # type: ignore[override, unused-ignore]
