"""The functions for tensors and for JAX's arrays do what NumPy's do with the same arguments (rows_of_functions.py)."""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from doors import (
    KNOWN,
    LOOKING,
    NAMES,
    STATES,
    WITH_GRADIENTS,
    WRITTEN,
    changed,
    drawn,
    function_of,
    is_array,
    learned_of,
    right,
    with_both_results,
)
from drawing import Arguments
from fuzzer import arrays_in, digest
from kvcache_cases import CASES, Case, arguments_of
from random_masks import every_mask
from tensors import tensor

import attnmask
from attnmask import MaskInfo
from attnmask._common.arguments import as_array

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::attnmask.AttnmaskWarning"),  # of other shapes
]

# Each takes a function's name, and gives a function of arguments in NumPy that gives bits.


def by_numpy(name: str) -> Callable[[Arguments], Any]:
    def call(arguments: Arguments) -> Any:
        result = function_of(attnmask, name)(**arguments)
        return digest([*arrays_in(result), *(arguments[key] for key in WRITTEN if key in arguments)])

    return call


def by_torch(name: str, compiled: bool = False) -> Callable[[Arguments], Any]:
    torch = pytest.importorskip("torch")
    import attnmask.torch

    def call(arguments: Arguments) -> Any:
        given = changed(arguments, lambda x: tensor(torch, x))
        function = function_of(attnmask.torch, name)
        result = (in_graph("aot_eager")(function) if compiled else function)(**given)
        made = result if isinstance(result, tuple) else (result,)
        made = tuple(x for x in made if x is not None)
        assert all(type(x) is torch.Tensor and x.is_contiguous() and not x.requires_grad for x in made)
        made += tuple(given[key] for key in WRITTEN if key in given)
        return digest([as_array(x, "x") for x in made])

    return call


def in_jax(arguments: Arguments) -> Any:
    """JAX has numbers of 64 bits if that is asked for."""
    jax = pytest.importorskip("jax")
    dtypes = [x.dtype for x in arrays_in([*arguments.values()])] + [arguments.get("output_dtype", np.int8)]
    return jax.enable_x64(any(np.dtype(dtype).itemsize == 8 for dtype in dtypes))


def traced(arguments: Arguments) -> tuple[Arguments, Arguments]:
    parts = {name for name, x in arguments.items() if isinstance(x, list) and x and is_array(x[0])}
    some = {
        name: x
        for name, x in arguments.items()
        if (is_array(x) and name not in KNOWN) or isinstance(x, MaskInfo) or name in parts
    }
    return some, {name: x for name, x in arguments.items() if name not in some}


def digest_of_jax(name: str, results: Any) -> Any:
    made = [np.asarray(x) for x in results if x is not None]
    narrow = name in LOOKING  # whose keys have 64 bits only if JAX is asked for them
    return digest([x.astype(np.int64) if narrow and x.dtype.kind == "i" else x for x in made])


def by_jax(name: str, compiled: bool = False, known: bool = False) -> Callable[[Arguments], Any]:
    """Of all arrays, or of the first alone, where the others are known when the function is compiled."""
    jax = pytest.importorskip("jax")
    import attnmask.jax

    def call(arguments: Arguments) -> Any:
        with in_jax(arguments):
            arrays, fixed = traced(changed(arguments, np.asarray if compiled else jax.numpy.asarray))
            fixed |= {key: arrays.pop(key) for key in [*arrays][1:]} if known else {}
            run = lambda some: function_of(attnmask.jax, name)(**some, **fixed)  # noqa: E731
            result = jax.block_until_ready((jax.jit(run) if compiled else run)(arrays))
        return digest_of_jax(name, result if isinstance(result, tuple) else (result,))

    return call


DOORS = {"torch": by_torch, "jax": by_jax, "jax.jit": lambda name: by_jax(name, True)}
EACH = [(door, name) for door in DOORS for name in (*NAMES, *LOOKING)]
DOORS["torch.compile"] = lambda name: by_torch(name, True)
DOORS["jax.jit, known"] = lambda name: by_jax(name, True, True)
NO_GRADIENTS = [
    name for name in (*NAMES, *LOOKING) if name not in WITH_GRADIENTS
]  # the others are compiled below
COMPILED = [(door, name) for door in ("torch.compile", "jax.jit, known") for name in NO_GRADIENTS]


@pytest.mark.parametrize(("door", "name"), EACH + COMPILED)
def test_the_bits_of_numpy(door, name):
    call = DOORS[door](name)
    for seed in range(16 if (door, name) in EACH else 6):
        arguments = drawn(name, seed)
        assert call(changed(arguments, np.copy)) == by_numpy(name)(changed(arguments, np.copy)), seed


def cache_rows() -> Iterator[Arguments]:
    """All pairs of arguments, masks of every kind, no length, and sequences that are empty."""
    for case in CASES[::2]:
        yield arguments_of(case) | {"return_lse": case.return_lse}
    rng = np.random.default_rng(0)
    masks: list[Any] = []
    for keys in (70, 96):  # more than tokens, and more than the cache has room for
        dense = rng.random((2, 4, 3, keys)) < 0.7
        masks += [dense, dense[:1, :1, :1].astype(np.float32), dense[..., :1]]
        masks.append(MaskInfo.from_attention_mask(dense[:, :1]).apply_sliding_window((50, 20)))
    ids = np.sort(rng.integers(-1, 3, (2, 3))), np.sort(rng.integers(-1, 3, (2, 70)))
    masks += [MaskInfo.from_segments(*ids), MaskInfo.from_segments(*(x[:1] for x in ids)).apply_causal(40)]
    of_packed = [*every_mask(40, 100, batch=1).values()]  # whose sequences count from their own starts
    of_packed += [rng.random((1, heads, 40, keys)) < 0.7 for heads in (1, 4) for keys in (1, 100)]
    for page_size in (None, 16):
        case = Case(queries=3, lengths=(65, 20), new="as many", page_size=page_size)
        yield from (arguments_of(case) | {"attention_mask": mask} for mask in masks)
        several = {"queries": (17, 1, 0, 20, 2), "lengths": (65, 0, 20, 3, 71)}
        packed = replace(case, **several, window=(60, 0), sinks="[S]")
        more = {"return_lse": True, "causal": False}
        yield from (arguments_of(packed) | more | {"attention_mask": mask} for mask in of_packed)
    x, cache = np.ones((2, 1, 4, 8), np.float32), rng.random((2, 9, 2, 8), np.float32)
    for length in (None, 9, np.int8(9), np.array(9), np.array([9, 9])):
        yield {"query": x, "k_cache": cache, "v_cache": cache.copy(), "cache_seqlens": length}
    for lengths, count in (((), 1), ((0, 0), 0), ((5, 0), 0)):
        x, cache = (
            np.ones((len(lengths), count, 4, 8), np.float32),
            np.ones((len(lengths), 9, 2, 8), np.float32),
        )
        given = {
            "query": x,
            "k_cache": cache,
            "v_cache": cache.copy(),
            "key": x[:, :, :2],
            "value": x[:, :, :2],
        }
        yield given | {"cache_seqlens": np.array(lengths, np.int32), "return_lse": True}


@pytest.mark.long
@pytest.mark.parametrize("door", ["torch", "jax", "jax.jit", "jax.jit, known"])
def test_rows_of_caches(door):
    name = "flash_attention_with_kvcache"
    call = DOORS[door](name)
    for number, row in enumerate(cache_rows()):
        arguments = {key: x for key, x in row.items() if x is not None}
        mask, table = row.get("attention_mask"), row.get("block_table")
        room = row["k_cache"].shape[1] * (1 if table is None else table.shape[1])
        if door == "jax.jit" and isinstance(mask, MaskInfo) and mask.kv_len > room:  # must be known
            continue
        expected = by_numpy(name)(changed(arguments, np.copy))
        assert call(changed(arguments, np.copy)) == expected, (number, arguments.keys())


def other_forms(argument: str, x: np.ndarray) -> Iterator[np.ndarray]:
    """Of another shape, type, or with other numbers."""
    yield x[None]
    yield from [x[0]] if len(x) else []
    yield from (np.concatenate([x, x.take([-1], axis)], axis) for axis in range(x.ndim) if x.shape[axis])
    if x.dtype.kind != "b":
        others = {np.dtype(t) for t in (np.int32, np.float32, np.float64, np.float16, np.complex64, bool)}
        yield from (x.astype(dtype) for dtype in others - {x.dtype})
    numbers = {
        "f": (np.inf, -np.inf, np.nan, 0, -1),
        "V": (np.inf, 0, -1),
        "i": (99, 2, 1, 0),
        "u": (99, 2, 0),
    }
    places = (0,) if "mask" in argument else (0, -1)  # the end of a cache's mask may be that of no token
    for place, number in itertools.product(places, numbers.get(x.dtype.kind, ()) if x.size else ()):
        other = x.copy()
        other.flat[place] = number
        yield other


def outcome(call: Callable[[Arguments], Any], arguments: Arguments) -> Any:
    """Bits, or the error, in text."""
    try:
        return call(changed(arguments, np.copy))
    except (TypeError, ValueError, IndexError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    except RuntimeError as error:  # of a compiled function of JAX, as it runs
        return re.search(r"(\w+ must .*)", str(error))[1]


def told_alike(one: str, other: str) -> bool:
    """The same words, or the same argument."""
    names = [re.search(r"\b([a-z_]+)\b[^a-z]* must\b", text) for text in (one, other)]
    same = one.partition(", got")[0] == other.partition(", got")[0]
    return same or (None not in names and (len({x[1] for x in names} - {"lses"}) <= 1))  # of two, either


# A state that PyTorch may hold in 16 bits.
NARROW_STATES = {("linear_attention_step", "state")}


@pytest.mark.long
@pytest.mark.parametrize(("door", "name"), EACH)
def test_what_numpy_refuses(door, name):
    """And what it takes in another form has the same bits."""
    call, unlike = DOORS[door](name), []
    for argument, arguments in right(name):
        for x in other_forms(argument, arguments[argument]) if is_array(arguments[argument]) else ():
            if door == "torch" and (name, argument) in NARROW_STATES and x.dtype.itemsize == 2:
                continue
            given = arguments | {argument: x}
            with np.errstate(all="ignore"):
                expected, got = outcome(by_numpy(name), given), outcome(call, given)
            alike = (
                told_alike(expected, got)
                if isinstance(expected, str) and isinstance(got, str)
                else expected == got
            )
            unlike += [] if alike else [f"{argument} of {x.dtype} {x.shape}: {expected!s:.200}, {got!s:.200}"]
    assert not unlike, "\n".join(unlike)


# Gradients


def gradients_by_numpy(name: str, arguments: Arguments) -> Any:
    """Results, and gradients of the sum of their squares by four."""
    own = [
        key
        for key in ("bias", "softmax_aux", "relative_bias", "grid_bias")
        if name == "flash_attention" and key in arguments
    ]
    more = with_both_results(name, arguments) | {f"grad_{key}": True for key in own}
    of_any_rank = re.sub("_(scalar|vector)$", "", name)
    results, vjp = function_of(attnmask, f"{of_any_rank}_vjp")(**more)
    results = results if isinstance(results, tuple) else (results,)
    grads = vjp(*(x * x.dtype.type(0.5) for x in results))
    if isinstance(grads, np.ndarray):
        grads = dict.fromkeys(("g", "s"), grads)
    else:
        names = getattr(grads, "_fields", ("outs", "lses"))
        grads = dict(zip(names, grads, strict=True))
    return digest([*results, *arrays_in([grads[key] for key in learned_of(name, arguments)])])


def in_graph(backend: str) -> Callable[[Any], Any]:
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    return torch.compile(backend=backend, fullgraph=True)


def in_checkpoints(function: Any, reentrant: bool = False) -> Any:
    from torch.utils.checkpoint import checkpoint

    def call(**given: Any) -> Any:
        again = lambda *values: function(**dict(zip(given, values, strict=True)))  # noqa: E731
        return checkpoint(again, *given.values(), use_reentrant=reentrant)

    return call


def saved_elsewhere(function: Any) -> Any:
    from torch.autograd.graph import saved_tensors_hooks

    def call(**given: Any) -> Any:
        kept: list[Any] = []
        with saved_tensors_hooks(
            lambda x: kept.append(x.clone()) or len(kept) - 1, lambda i: kept[i].clone()
        ):
            return function(**given)

    return call


def gradients_by_torch(name: str, arguments: Arguments, change: Callable[[Any], Any] = lambda f: f) -> Any:
    torch = pytest.importorskip("torch")
    import attnmask.torch

    given = changed(arguments, lambda x: tensor(torch, x))
    learned = torch.utils._pytree.tree_flatten([given[key] for key in learned_of(name, arguments)])[0]
    for x in learned:
        x.requires_grad_()
    results = change(function_of(attnmask.torch, name))(**with_both_results(name, given))
    torch.autograd.backward(results, [0.5 * x.detach() for x in results])
    return digest([as_array(x.detach(), "x") for x in (*results, *(x.grad for x in learned))])


def with_gradients(
    module: Any, vjp_of: Callable[..., Any], name: str, learned: list[str], fixed: Arguments
) -> Any:
    """A function of a dict of arrays that gives results, and gradients if there are any."""

    def run(arrays: Arguments) -> Any:
        others = {key: x for key, x in arrays.items() if key not in learned}

        def call(some: Arguments) -> Any:
            return function_of(module, name)(**some, **others, **with_both_results(name, fixed))

        if not learned:
            return call({})
        results, vjp = vjp_of(call, {key: arrays[key] for key in learned})
        return results, vjp(tuple(0.5 * x for x in results))[0]

    return run


def gradients_by_jax(name: str, arguments: Arguments, compiled: bool = False) -> Any:
    jax = pytest.importorskip("jax")
    import attnmask.jax

    with in_jax(arguments):
        arrays, fixed = traced(arguments)
        run = with_gradients(attnmask.jax, jax.vjp, name, learned_of(name, arguments), fixed)
        results, grads = (jax.jit(run) if compiled else run)(arrays)
        of_arrays = [grads[key] for key in learned_of(name, arguments)]
        return digest([np.asarray(x) for x in jax.tree.leaves((results, of_arrays))])


GRADIENTS = {
    "torch": (gradients_by_torch, 16),
    "torch.compile": (lambda *case: gradients_by_torch(*case, in_graph("aot_eager")), 6),
    "torch.compile by inductor": (lambda *case: gradients_by_torch(*case, in_graph("inductor")), 1),
    "torch, saved elsewhere": (lambda *case: gradients_by_torch(*case, saved_elsewhere), 8),
    "torch, in checkpoints": (lambda *case: gradients_by_torch(*case, in_checkpoints), 8),
    "torch, in reentrant checkpoints": (
        lambda *case: gradients_by_torch(*case, lambda f: in_checkpoints(f, True)),
        8,
    ),
    "torch.compile, in checkpoints": (
        lambda *case: gradients_by_torch(*case, lambda f: in_graph("aot_eager")(in_checkpoints(f))),
        2,
    ),
    "jax": (gradients_by_jax, 6),
    "jax.jit": (lambda *case: gradients_by_jax(*case, True), 12),
}


LEARNING = [(door, name) for door in GRADIENTS for name in WITH_GRADIENTS]


@pytest.mark.parametrize(("door", "name"), LEARNING)
def test_gradients(door, name):
    gradients, seeds = GRADIENTS[door]
    for seed in range(seeds):
        arguments = drawn(name, seed)
        assert gradients(name, changed(arguments, np.copy)) == gradients_by_numpy(name, arguments), seed


def attention_rows() -> Iterator[Arguments]:
    """What is seldom or never drawn: masks of every kind, biases and sinks of any shape, starts, axes of length 0."""
    rng = np.random.default_rng(1)

    def row(batch: int = 2, queries: int = 7, keys: int = 9, heads: int = 4, **more: Any) -> Arguments:
        shapes = (queries, heads, 8), (keys, heads // 2, 8), (keys, heads // 2, 5)
        names = ("query", "key", "value")
        return {
            x: rng.standard_normal((batch, *s), np.float32) for x, s in zip(names, shapes, strict=True)
        } | more

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    for mask in every_mask(7, 9).values():
        yield row(attention_mask=mask, sliding_window=(None, 5))
    for bias in (normal(2, 4, 7, 9), normal(1, 4, 7, 9), normal(7, 9), normal(2, 1, 1, 9), normal(9)):
        for sinks in (normal(3), normal(1, 3), normal(4, 2), normal(4, 0)):
            yield row(bias=bias, softmax_aux=sinks, causal=True)
    starts = {"cum_seqlens_q": np.array([0, 2, 2, 7]), "cum_seqlens_k": np.array([0, 4, 5, 9], np.uint8)}
    offsets = (0, "bottom-right", np.array([1, 0, -2]), np.array(1))
    for offset, more in itertools.product(offsets, ({}, {"causal": True}, {"sliding_window": (2, None)})):
        packed = row(1, **starts, causal_offset=offset, **more)
        yield packed
        yield packed | {name: packed[name][0] for name in ("query", "key", "value")}
    ids = np.sort(rng.integers(-1, 3, (1, 9)), axis=-1).astype(np.int32)
    for one in ({"cum_seqlens_q": np.array([0, 4, 5, 9])}, {"q_segment_ids": ids}, {"kv_segment_ids": ids}):
        yield row(1, 9, causal=True, **one)  # for both sides
    for empty in ({"batch": 0}, {"queries": 0}, {"keys": 0}, {"heads": 0}):
        sizes = {"batch": 2, "queries": 7, "keys": 9, "heads": 4} | empty
        yield row(**sizes, bias=normal(1, 1, 1, sizes["keys"]), softmax_aux=normal(3), causal=True)


def linear_rows() -> Iterator[Arguments]:
    for batch, tokens, heads, channels in ((0, 4, 4, 6), (2, 0, 4, 6), (2, 4, 4, 0), (2, 4, 0, 6)):
        query = np.ones((batch, tokens, heads // 2, 5), np.float32)
        yield {"query": query, "key": query, "value": np.ones((batch, tokens, heads, channels), np.float32)}


def convolution_rows() -> Iterator[Arguments]:
    for shape in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        yield {"x": np.ones(shape, np.float32), "weight": np.ones((shape[2], 4), np.float32)}


ROWS = {
    "flash_attention": attention_rows,
    "linear_attention": linear_rows,
    "short_convolution": convolution_rows,
}
STEPS = {"torch": 1, "jax.jit": 1, "torch.compile": 6, "torch.compile by inductor": 25}


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("door", STEPS)
def test_rows(door, name):
    for number, arguments in enumerate(itertools.islice(ROWS[name](), 0, None, STEPS[door])):
        got = GRADIENTS[door][0](name, changed(arguments, np.copy))
        assert got == gradients_by_numpy(name, arguments), (number, arguments.keys())


# vmap


def another(name: str, x: np.ndarray) -> np.ndarray:
    """Numbers that are as right."""
    if x.dtype.kind == "b" or "segment" in name or "mask" in name:
        return np.roll(x, 1, -1)
    return x if x.dtype.kind in "iu" else (x * x.dtype.type(0.75)).astype(x.dtype)


def mapped_in(door: str, name: str, learned: list[str], fixed: Arguments) -> tuple[Any, Any]:
    """A function of arrays that gives arrays, and the same of many calls with given axes."""
    library = pytest.importorskip(door)
    if door == "torch":
        import attnmask.torch

        vjp, vmap, flatten = library.func.vjp, library.func.vmap, library.utils._pytree.tree_leaves
        convert, revert = lambda x: tensor(library, x.copy()), lambda x: as_array(x.contiguous(), "x")
    else:
        import attnmask.jax

        vjp, vmap, flatten = library.vjp, lambda *a: library.jit(library.vmap(*a)), library.tree.leaves
        convert, revert = library.numpy.asarray, np.asarray
    run = with_gradients(getattr(attnmask, door), vjp, name, learned, fixed)

    def call(function: Any, arrays: Arguments) -> Any:
        return [revert(x) for x in flatten(function(changed(arrays, convert)))]

    return partial(call, run), lambda arrays, axes: call(vmap(run, (axes,)), arrays)


MAPPED = [("torch", name) for name in WITH_GRADIENTS if STATES[name]]
MAPPED += [("jax", name) for name in (*NAMES, *LOOKING)]


@pytest.mark.long
@pytest.mark.parametrize(("door", "name"), MAPPED)
def test_vmap(door, name):
    """Over all arrays at once and over each alone, with gradients: the bits of calls one by one."""
    for seed in range(1 if "cache" in name else 3):
        arguments = drawn(name, seed)
        arrays = {key: x for key, x in arguments.items() if is_array(x) and key not in KNOWN}
        fixed = {key: x for key, x in arguments.items() if key not in arrays}
        calls = [arrays, {key: another(key, x) for key, x in arrays.items()}]
        with contextlib.nullcontext() if door == "torch" else in_jax(arguments):
            run, run_mapped = mapped_in(door, name, learned_of(name, arguments), fixed)
            for mapped in [{*arrays}, *({key} for key in arrays)]:
                many = {
                    key: np.stack([call[key] for call in calls]) if key in mapped else x
                    for key, x in arrays.items()
                }
                got = run_mapped(many, {key: 0 if key in mapped else None for key in arrays})
                for i, call in enumerate(calls):
                    right = run(arrays | {key: call[key] for key in mapped})
                    assert digest([np.ascontiguousarray(x[i]) for x in got]) == digest(right), (seed, mapped)


# Exported programs


def exported_by_torch(name: str, arrays: Arguments, fixed: Arguments) -> Any:
    torch = pytest.importorskip("torch")
    import attnmask.torch

    class Module(torch.nn.Module):
        def forward(self, arrays: Arguments) -> Any:
            return function_of(attnmask.torch, name)(**arrays, **fixed)

    def convert(arrays: Arguments) -> Arguments:
        return changed(arrays, lambda x: tensor(torch, x.copy()))

    program, given = torch.export.export(Module(), (convert(arrays),)).module(), convert(arrays)
    made = torch.utils._pytree.tree_flatten(program(given))[0]
    made = [x for x in made if x is not None] + [given[key] for key in WRITTEN if key in given]
    return digest([as_array(x, "x") for x in made])


def exported_by_jax(name: str, arrays: Arguments, fixed: Arguments) -> Any:
    jax = pytest.importorskip("jax")
    import attnmask.jax

    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in attnmask.jax.register()]
    with in_jax(arrays | fixed):
        run = jax.jit(
            lambda arrays: tuple(jax.tree.leaves(function_of(attnmask.jax, name)(**arrays, **fixed)))
        )
        program = jax.export.export(run, disabled_checks=checks)(arrays)
        return digest_of_jax(name, jax.export.deserialize(program.serialize()).call(arrays))


@pytest.mark.long
@pytest.mark.parametrize(("door", "name"), [(door, name) for door, name in EACH if door != "jax"])
def test_exported(door, name):
    export = exported_by_torch if door == "torch" else exported_by_jax
    for seed in range(2):
        arguments = drawn(name, seed)
        known = KNOWN if door != "torch" else ()
        arrays = {
            key: x
            for key, x in arguments.items()
            if arrays_in(x) and not isinstance(x, MaskInfo) and key not in known
        }
        fixed = {key: x for key, x in arguments.items() if key not in arrays}
        assert export(name, arrays, fixed) == by_numpy(name)(changed(arguments, np.copy)), seed


# What there is not


HAVE_SECOND = {"flash_attention", "merge_attention_states"}  # {torch,jax}/test_*derivatives.py


@pytest.mark.parametrize("name", sorted({*WITH_GRADIENTS} - HAVE_SECOND))
@pytest.mark.parametrize("door", ["torch", "jax"])
def test_no_second_derivatives(door, name):
    needed = ("chunk_size",) if name.startswith("chunk_local_cumsum") else ()
    arguments = {key: x for key, x in drawn(name, 0).items() if arrays_in(x) or key in needed}
    learned = learned_of(name, arguments)
    if door == "jax":
        jax = pytest.importorskip("jax")
        import attnmask.jax

        with in_jax(arguments):
            run = with_gradients(attnmask.jax, jax.vjp, name, learned, {})

            def slope(some: Arguments) -> Any:
                return sum(x.sum() for x in run(arguments | some)[1].values())

            with pytest.raises(NotImplementedError, match=r"ha(s|ve) gradients, but no gradients of these"):
                jax.grad(slope)({key: jax.numpy.asarray(arguments[key]) for key in learned})
    else:
        torch = pytest.importorskip("torch")
        import attnmask.torch

        given = changed(arguments, lambda x: tensor(torch, x.copy()))
        tensors = torch.utils._pytree.tree_flatten([given[key] for key in learned])[0]
        for x in tensors:
            x.requires_grad_()
        results = torch.utils._pytree.tree_flatten(function_of(attnmask.torch, name)(**given))[0]
        with pytest.raises(RuntimeError, match=rf"{name}.* has no second derivative"):
            torch.autograd.grad(sum(x.sum() for x in results), tensors, create_graph=True)[0].sum().backward()


ALSO_ARRAYS = {
    "alibi_slopes", "attention_mask", "block_table", "cache_seqlens", "causal_offset", "grid_bias",
    "relative_bias", "slot_mapping", "softmax_aux", "state_indices",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_tensors_elsewhere(name):
    """They are on one device; and some arguments must be tensors."""
    torch = pytest.importorskip("torch")
    import attnmask.torch

    for argument, arguments in right(name):
        if not is_array(arguments[argument]):
            continue
        given = changed(arguments, lambda x: tensor(torch, x.copy()))
        function = function_of(attnmask.torch, name)
        shapes = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), given)
        alone = sum(map(is_array, arguments.values())) == 1
        for one, others in () if alone else ((shapes, given), (given, shapes)):
            with pytest.raises(
                TypeError, match=r"^\w+ must be on (cpu|meta) as \w+, got a tensor on (cpu|meta)"
            ):
                function(**others | {argument: one[argument]})
        also = ALSO_ARRAYS | ({"bias"} if name.startswith("flash") else set())
        if argument not in also and "seqlens" not in argument and "segment" not in argument:
            with pytest.raises(
                TypeError, match=rf"^{argument}\b.* must be a (sequence of tensors|tensor), got"
            ):
                function(**given | {argument: arguments[argument]})
