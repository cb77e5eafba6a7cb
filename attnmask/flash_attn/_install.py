"""Make this package importable as ``flash_attn``."""

from attnmask._common.importable import Importable
from attnmask.flash_attn import _functions, bert_padding

_FUNCTIONS = [x for name, x in vars(_functions).items() if name.startswith("flash_attn")]
_PADDING = [getattr(bert_padding, name) for name in bert_padding.__all__]
_PARTS = {"": _FUNCTIONS, ".flash_attn_interface": _FUNCTIONS, ".bert_padding": _PADDING}
# The version whose functions these are.
_library = Importable("flash_attn", "2.8.3", "attnmask.flash_attn", _PARTS)


def install() -> None:
    """Make ``import flash_attn`` import this package, where FlashAttention is not installed, until `uninstall`.

    There are then ``flash_attn``, with a ``__version__`` of 2.8, ``flash_attn.flash_attn_interface`` and
    ``flash_attn.bert_padding``. Installing again has no effect.

    Raises
    ------
    RuntimeError
        If there is another ``flash_attn``, which stays.

    Examples
    --------
    >>> import torch
    >>> import attnmask.flash_attn
    >>> attnmask.flash_attn.install()
    >>> from flash_attn import flash_attn_func
    >>> flash_attn_func(*torch.zeros(3, 1, 5, 2, 8), causal=True).shape
    torch.Size([1, 5, 2, 8])
    >>> attnmask.flash_attn.uninstall()
    """
    _library.install()


def uninstall() -> None:
    """Undo `install`. What was imported from ``flash_attn`` meanwhile still works.

    Examples
    --------
    >>> import attnmask.flash_attn
    >>> attnmask.flash_attn.install()
    >>> attnmask.flash_attn.uninstall()
    """
    _library.uninstall()
