"""Calls a handler of XLA on dense arrays, as XLA has them."""

from typing import Any

import ml_dtypes
import numpy as np

from attnmask import _core

LARGEST = 1 << 24  # bytes of an array, which is copied where it is not dense
TYPES = {np.dtype(letter) for letter in "?bhilBHILefd"} | {
    np.dtype(dtype) for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn)
}


def _dense(value: Any, name: str) -> np.ndarray:
    """The array, or a copy, as XLA has arrays."""
    try:
        if isinstance(value, np.ndarray):
            plain = np.ndarray.view(value, np.ndarray)
        else:
            plain = np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
        plain = plain.astype(plain.dtype.newbyteorder("="), copy=False)
    except Exception:
        raise TypeError(f"{name} must be an array") from None
    if plain.dtype not in TYPES or plain.nbytes > LARGEST:
        raise ValueError(f"{name} must be a small array of a type that XLA has")
    return np.require(plain, requirements="CA")


def call_handler(
    name: str, words: Any, arguments: dict[str, Any], results: dict[str, Any]
) -> list[np.ndarray]:
    """Call the handler of this name, which writes to `results`. An argument that is a result is written to in place."""
    dense = {name: _dense(value, name) for name, value in (arguments | results).items()}
    for name_of, value in results.items():
        if not isinstance(value, np.ndarray) or not np.ndarray.flags.__get__(value).writeable:
            raise TypeError(f"{name_of} must be an array to write to")
        dense[name_of] = dense[name_of].copy()  # XLA lets it share no memory with the rest
    given, made = (tuple(dense[name] for name in names) for names in (arguments, results))
    _core.xla_call(f"attnmask_{name}", _dense(words, "words"), given, made)
    for name_of, value in results.items():
        np.ndarray.__setitem__(value, ..., dense[name_of])
    return list(made)
