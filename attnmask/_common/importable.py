"""Make functions importable under the name of another library, as programs that were written for it import them."""

import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class Importable:
    """A library's name, and the functions of its modules: ``""`` is the library itself, ``".part"`` a module in it."""

    def __init__(self, name: str, version: str, own: str, parts: Mapping[str, Iterable[Any]]) -> None:
        self.name = name
        self.version = version
        self.own = own
        self.parts = parts
        self._installed: dict[str, ModuleType] = {}

    def _module(self, part: str, offered: Iterable[Any]) -> ModuleType:
        name, public = self.name + part, {x.__name__: x for x in offered}
        made = ModuleType(name, f"{self.own} under the name {self.name}.")
        made.__spec__ = ModuleSpec(name, None, origin=sys.modules[self.own].__file__, is_package=not part)
        made.__package__ = self.name
        vars(made).update(public, __all__=list(public), __version__=self.version)
        if not part:
            made.__path__ = []  # so that it is a package, without other parts
        return made

    def install(self) -> None:
        """Make it importable, unless it is already or another library has the name, which is an error."""
        if self._installed:
            return
        if sys.modules.get(self.name) is not None or find_spec(self.name) is not None:
            raise RuntimeError(f"{self.name} is installed, and stays: call the functions of {self.own}")
        made = {part: self._module(part, offered) for part, offered in self.parts.items()}
        for part, module in made.items():
            if part:
                setattr(made[""], part[1:], module)
        self._installed.update({self.name + part: module for part, module in made.items()})
        sys.modules.update(self._installed)

    def uninstall(self) -> None:
        """Undo `install`."""
        for name, module in self._installed.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        self._installed.clear()
