"""Import files of models from large packages, without what other parts of these packages need."""

import ast
import contextlib
import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

# The functions that call the core for each door: a module and names in it.
DOORS = {
    "flash_attn": ("attnmask.flash_attn._compute", "flash_attention"),
    "natten": ("attnmask.natten", "flash_attention"),
    "sdpa": ("attnmask.torch._install", "_attend_into", "attend_for_gradients"),
}


class _Lazy(ModuleType):
    """A package whose own code is not run: it imports each name when it is asked for, from where its code would."""

    def __getattr__(self, name):
        own = self.__dict__.get("_places", {})
        stars = () if name.startswith("__") else self._stars
        for source, there in [own[name]] if name in own else [(star, name) for star in stars]:
            if hasattr(found := importlib.import_module(source, self.__name__), there):
                return getattr(found, there)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _Absent(ModuleType):
    """A library that the models do not use: any name of it is a class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Import(Loader):
    def __init__(self, kind, code=""):
        self.kind, self.code = kind, code

    def create_module(self, spec):
        return self.kind(spec.name)

    def exec_module(self, module):
        module._places, module._stars = {}, []
        for node in ast.walk(ast.parse(self.code)):
            if isinstance(node, ast.ImportFrom) and node.module:
                source = "." * node.level + node.module
                for alias in node.names:
                    if alias.name == "*":
                        module._stars.append(source)
                    module._places[alias.asname or alias.name] = (source, alias.name)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                vars(module).update({x.id: node.value.value for x in node.targets if isinstance(x, ast.Name)})


class _Finder(MetaPathFinder):
    def __init__(self, lazy, absent):
        self.lazy, self.absent = lazy, absent

    def find_spec(self, name, path=None, target=None):
        if name in self.lazy and (found := PathFinder.find_spec(name, path)) and found.origin:
            code = Path(found.origin).read_text(encoding="utf-8")
            spec = ModuleSpec(name, _Import(_Lazy, code), origin=found.origin, is_package=True)
            spec.submodule_search_locations = found.submodule_search_locations
            return spec
        if name.partition(".")[0] in self.absent and PathFinder.find_spec(name.partition(".")[0]) is None:
            return ModuleSpec(name, _Import(_Absent), is_package=True)
        return None


@contextlib.contextmanager
def packages(lazy=(), absent=()):
    """Have the packages `lazy` imported without their own code, and libraries `absent` that are not installed.

    The modules that came are gone from `sys.modules` afterwards, so that no other test meets them.
    """
    finder, before = _Finder(lazy, absent), set(sys.modules)
    tops = {name.partition(".")[0] for name in (*lazy, *absent)}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in tops:
                del sys.modules[name]
