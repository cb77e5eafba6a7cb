"""The functions that attnmask.torch and attnmask.jax have, too, and their right arguments (rows_of_functions.py)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from drawing import Arguments
from rows_of_functions import firsts
from targets import TARGETS

import attnmask

WITH_GRADIENTS = (
    "flash_attention", "linear_attention", "merge_attention_states", "short_convolution", "chunk_local_cumsum",
    "chunk_local_cumsum_scalar", "chunk_local_cumsum_vector", "chunk_global_cumsum", "chunk_global_cumsum_scalar",
    "chunk_global_cumsum_vector",
)  # fmt: skip
NAMES = (
    *WITH_GRADIENTS, "flash_attention_with_kvcache", "flash_attention_with_kvcache of four bits",
    "linear_attention_step", "short_convolution_step", "write_kvcache", "write_kvcache of four bits",
)  # fmt: skip
LOOKING = ("attention_weights", "attention_statistics")
KNOWN = ("queries",)  # when JAX compiles a function
WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale", "state")
STATES = dict.fromkeys(WITH_GRADIENTS) | {
    "flash_attention": "return_lse", "linear_attention": "return_state", "short_convolution": "return_state"
}  # fmt: skip


def drawn(name: str, seed: int) -> Arguments:
    arguments = TARGETS[name].arguments(np.random.default_rng(seed))
    return {key: x for key, x in arguments.items() if key != "out"}


def right(name: str) -> Iterator[tuple[str, Arguments]]:
    """The first arguments that were found with each of them."""
    return firsts(partial(drawn, name))


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim > 0


def changed(arguments: Arguments, change: Callable[[np.ndarray], Any]) -> Arguments:
    """With what becomes of each array."""
    several = {name: x for name, x in arguments.items() if isinstance(x, list) and is_array(x[0])}
    return {name: change(x) if is_array(x) else x for name, x in arguments.items()} | {
        name: [change(part) for part in x] for name, x in several.items()
    }


def function_of(module: Any, name: str) -> Callable[..., Any]:
    function = getattr(module, name.partition(" of ")[0])
    if "cumsum" not in name or name.endswith("_vjp"):
        return function
    return lambda *args, **given: (function(*args, **given),)  # like those with two results


def learned_of(name: str, arguments: Arguments) -> list[str]:
    """The arguments that have gradients, of a function that has any."""
    grads = attnmask.FlashAttentionGrads, attnmask.LinearAttentionGrads, attnmask.ShortConvolutionGrads
    fields = (
        {"outs", "lses", "g", "s"}.union(*(kind._fields for kind in grads))
        if name in WITH_GRADIENTS
        else set()
    )
    return [key for key, x in arguments.items() if key in fields and x is not None]


def with_both_results(name: str, arguments: Arguments) -> Arguments:
    return arguments | ({STATES[name]: True} if STATES.get(name) else {})
