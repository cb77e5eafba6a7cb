"""What the package offers."""

import importlib.util
import inspect
import pkgutil
import warnings
from types import FunctionType

import attnmask

NEEDS = {
    "jax": ("jax",),
    "natten": ("torch",),
    "torch": ("torch",),
    "flash_attn": ("torch",),
    "flash_attn.bert_padding": ("torch",),
    "transformers": ("torch", "transformers"),
    "ejkernel": ("jax", "ejkernel", "triton"),
}
NOT_HERE = (
    "attnmask.__main__",
    *(
        f"attnmask.{mark}{name}"
        for name, needed in NEEDS.items()
        if not all(map(importlib.util.find_spec, needed))
        for mark in ("", "_")
    ),
)
# Beside what `attnmask` itself does.
OFFERED = {"attnmask.operations"} | {f"attnmask.{name}" for name in NEEDS}
MEMBERS = FunctionType, classmethod, staticmethod, property


def modules():
    names = [info.name for info in pkgutil.walk_packages(attnmask.__path__, "attnmask.")]
    with warnings.catch_warnings(action="ignore"):  # ejKernel warns of itself
        return [attnmask, *(importlib.import_module(name) for name in names if not name.startswith(NOT_HERE))]


def public_modules():
    return [attnmask, *(module for module in modules() if module.__name__ in OFFERED)]


def public():
    """What the package offers: by module, its functions and classes, and what these offer in turn, but not what they
    inherit from another package.
    """
    for module in public_modules():
        for name in module.__all__:
            thing = getattr(module, name)
            if isinstance(thing, str):
                continue
            yield module, name, thing
            bases = [base for base in getattr(thing, "__mro__", ()) if base.__module__.startswith("attnmask")]
            own = set().union(*map(vars, bases)) if inspect.isclass(thing) else set()
            for member, held in inspect.getmembers_static(thing) if own else ():
                inherited = member not in own or hasattr(tuple, member)
                if isinstance(held, MEMBERS) and not member.startswith("_") and not inherited:
                    yield module, f"{name}.{member}", getattr(thing, member)
