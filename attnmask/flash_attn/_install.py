"""Make this package importable as ``flash_attn``."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from attnmask.flash_attn import _functions, bert_padding

_NAME = "flash_attn"
_PARTS = {"": _functions, ".flash_attn_interface": _functions, ".bert_padding": bert_padding}
_VERSION = "2.8.3"  # whose functions these are

_installed: dict[str, ModuleType] = {}


def _module(name: str, source: ModuleType) -> ModuleType:
    made = ModuleType(name, f"attnmask.flash_attn under FlashAttention's name. {source.__doc__}")
    made.__spec__ = ModuleSpec(name, None, origin=source.__file__, is_package=name == _NAME)
    made.__package__ = _NAME
    public = getattr(source, "__all__", [x for x in vars(source) if x.startswith(_NAME)])
    vars(made).update({x: getattr(source, x) for x in public}, __all__=public, __version__=_VERSION)
    return made


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
    if _installed:
        return
    if sys.modules.get(_NAME) is not None or find_spec(_NAME) is not None:
        raise RuntimeError("flash_attn is installed, and stays: call the functions of attnmask.flash_attn")
    _installed.update({_NAME + part: _module(_NAME + part, source) for part, source in _PARTS.items()})
    package = _installed[_NAME]
    package.__path__ = []  # so that it is one, without other parts
    for part in _PARTS:
        if part:
            setattr(package, part[1:], _installed[_NAME + part])
    sys.modules.update(_installed)


def uninstall() -> None:
    """Undo `install`. What was imported from ``flash_attn`` meanwhile still works.

    Examples
    --------
    >>> import attnmask.flash_attn
    >>> attnmask.flash_attn.install()
    >>> attnmask.flash_attn.uninstall()
    """
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _installed.clear()
