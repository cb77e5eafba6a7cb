"""ejKernel, of a version whose registry is known."""

try:
    import ejkernel
except ImportError as _missing:
    raise ImportError(
        f"attnmask.ejkernel needs ejkernel, which cannot be imported: pip install ejkernel ({_missing})"
    ) from _missing

_version = tuple(int(part) for part in ejkernel.__version__.split(".")[:3])
if _version < (0, 0, 31):
    raise ImportError(f"attnmask.ejkernel needs ejkernel 0.0.31 or later, got {ejkernel.__version__}")

from ejkernel import kernels  # noqa: E402

__all__ = ["kernels"]
