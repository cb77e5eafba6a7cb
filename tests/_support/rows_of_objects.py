"""Right arguments of masks, caches and operators: of what makes them, their methods and properties."""

import contextlib
import copy
import itertools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from drawing import (
    FLAG,
    FLOATS,
    Arguments,
    Rng,
    any_mask,
    draw,
    floats,
    ids_of,
    integers,
    made,
    mask_of,
    maybe,
    one,
    reals,
    starts_of,
    zeros,
)
from rows_of_functions import OPTIONS, SIZES, TK, attention_arguments, row, target

from attnmask import KVCache, MaskInfo, operations

# Caches


def used_cache(dtype: Any = np.float32) -> KVCache:
    """Sequence 0 of six tokens, 1 a fork of it, and 2 that was freed."""
    cache = KVCache(
        SIZES["Hkv"], SIZES["D"], layers=2, pages=8, page_size=4, dtype=dtype, value_head_dim=SIZES["Dv"]
    )
    first = cache.new_sequence()
    with cache.step([first], [6]) as step:
        for layer in range(2):
            step.attend(layer, **step_tokens(np.random.default_rng(layer), 6))
    cache.fork(first)
    cache.free(cache.new_sequence())
    return cache


STEP_TOKENS = {"query": reals("T, H, D"), "key": reals("T, Hkv, D"), "value": reals("T, Hkv, Dv")}


def step_tokens(rng: Rng, total: int) -> Arguments:
    return draw(rng, STEP_TOKENS, T=total, **SIZES)


def contents(cache: KVCache) -> Any:
    """What a cache says of itself, which an error must not have changed."""
    return cache.free_pages, cache.lengths([0, 1]), cache.block_table([0, 1])


def contents_of_new(cache: KVCache) -> Any:
    number = cache.new_sequence()
    return cache.lengths([number]), cache.block_table([number]), cache.free_pages


def step_attend(cache: KVCache, ids: Any, counts: Any, **arguments: Any) -> Any:
    before = contents(cache)
    try:
        with cache.step(ids, counts) as step:
            out = step.attend(**arguments)
            for layer in {0, 1} - step._attended:
                step.attend(layer, **step_tokens(np.random.default_rng(0), sum(step._counts)))
    except Exception:
        for old, new in zip(before, contents(cache), strict=True):
            np.testing.assert_array_equal(old, new)
        raise
    return out, contents(cache)


row(
    "KVCache",
    one(
        {"head_dim": 8, "dtype": one(np.float32, np.int8, "bfloat16"), "value_head_dim": one(None, 3)},
        {"head_dim": 64, "dtype": "int4", "group": 32, "rotate": True},
        {"head_dim": 8, "dtype": np.float16, "value_head_dim": 3, "latent": True},
    ),
    kv_heads=2,
    layers=2,
    pages=4,
    page_size=4,
    call=lambda **a: contents_of_new(KVCache(**a)),
)
for _name, _row in {
    "block_table": {"ids": one([0, 1], integers(1), [0, 0])},
    "lengths": {"ids": one([0, 1], integers(1, dtype=np.int8), [])},
    "positions": {"ids": one([0, 1], integers(1), [])},
    "fork": {"id": one(0, 1)},
    "free": {"id": one(0, 1)},
    "truncate": {"id": one(0, 1), "length": one(0, 3, 6)},
    "evict": {"id": one(0, 1), "keep": one([1, 5], integers(4, 0, 2), [])},
}.items():
    target(
        f"KVCache.{_name}",
        lambda rng, row=_row: {"cache": used_cache()} | draw(rng, row),
        lambda cache, name=_name, **a: (getattr(cache, name)(**a), cache.free_pages),
        kept=frozenset({"cache"}),
    )
OF_STEPS = ("softmax_scale", "sliding_window", "logits_soft_cap", "softmax_aux", "alibi_slopes")
STEP_OPTIONS = {name: maybe(OPTIONS[name]) for name in OF_STEPS}
STEP_OPTIONS |= {"causal": maybe(False), "return_lse": maybe(True)}
STEP = {"ids": integers(1, 0), "counts": integers(2, 3), "layer": one(0, 1)}
target(
    "KVCache.step",
    lambda rng: {"cache": used_cache()} | draw(rng, STEP, STEP_TOKENS, STEP_OPTIONS, T=5, **SIZES),
    step_attend,
    kept=frozenset({"cache"}),
)

# Masks: constructors, whose result is looked at in every way; and methods of masks of two rows

PROPERTIES = sorted(
    name for name in dir(MaskInfo) if name[0] != "_" and isinstance(getattr(MaskInfo, name), property)
)


def look_at(info: MaskInfo) -> Any:
    """All that can be asked of a mask without an argument."""
    seen: list[Any] = [info.shape, info.heads, repr(info)]
    if np.prod([float(size) for size in (*info.shape[:1], info.heads or 1, *info.shape[1:])]) > 1e5:
        return seen
    seen += [str(info), info.density(), info._repr_html_(), info.is_self_attention()]
    if all(info.shape) and info.heads:
        seen.append(info.visualize(return_str=True))
    for name in PROPERTIES:
        try:
            seen.append(getattr(info, name))
        except (ValueError, OverflowError) as error:  # no ids reproduce some masks
            seen.append(str(error))
    seen.append(info == MaskInfo.tree_unflatten(*reversed(info.tree_flatten())))
    with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):
        seen.append(pickle.loads(pickle.dumps(info)) == info)
    seen.append(copy.copy(info) == info)
    return seen


def constructor(name: str, *rows: Any, **arguments: Any) -> None:
    call = lambda **a: look_at(getattr(MaskInfo, name)(**a))  # noqa: E731
    row(f"MaskInfo.{name}", *rows, call=call, **arguments)


POSITIONS = {
    "q_positions": maybe(made(lambda rng: np.arange(5)[None].repeat(2, 0))),
    "kv_positions": maybe(made(lambda rng: np.arange(7, dtype=np.int32)[None].repeat(2, 0))),
    "batch_axis_name": maybe(("dp", "fsdp")),
    "qheads_axis_name": maybe("tp"),
    "kvheads_axis_name": maybe(None),
    "sequence_axis_name": maybe("sp"),
}
MASK, IDS = mask_of("2, 1, 5, 7"), {"q_segment_ids": ids_of("2, 5"), "kv_segment_ids": ids_of("2, 7")}
PAIRS = {"cu_seqlens_q": integers(0, 3, 5, 8), "max_q_len": 9}
PAIRS_BEFORE = made(
    lambda rng: np.tril(rng.random((2, 1, 5, 7)) < 0.7)
)  # of which flags say that they are causal
INPUT_IDS = made(lambda rng: rng.integers(0, 9, (2, 5)))


def mask_row(batch: int = 2, queries: int = 5, keys: int = 7) -> Any:
    return made(lambda rng: any_mask(rng, batch, queries, keys))


row(
    "MaskInfo",
    one(
        {"attention_mask": MASK},
        IDS,
        {
            "attention_mask": mask_of("1, 1, 5, 7"),
            "cu_seqlens_q": starts_of(5),
            "cu_seqlens_kv": maybe(starts_of(7)),
        },
        {"attention_mask": PAIRS_BEFORE}
        | {
            f"{name}_baked_in": maybe(True, 0.5)
            for name in ("causal_mask", "sliding_window", "chunked_mask", "token_type_ids")
        },
    ),
    POSITIONS,
    call=lambda **a: look_at(MaskInfo(**a)),
)
constructor("full", q_len=5, kv_len=maybe(7), batch=maybe(2))
constructor(
    "causal", q_len=5, batch=2, kv_len=maybe(7), offset=maybe(one(-2, "bottom-right", integers(1, 2)))
)
constructor(
    "from_lengths", lengths=made(lambda rng: rng.integers(0, 6, int(rng.integers(4)))), max_len=maybe(6)
)
constructor("from_padding_mask", padding_mask=mask_of("2, 5"))
constructor("from_segments", IDS, POSITIONS, is_attn_mask=maybe(False))
constructor(
    "from_attention_mask",
    POSITIONS,
    attention_mask=mask_of("2, 1, 5, 7", "2, 5, 7", "2, 3, 5, 7"),
    mask_is_valid=maybe(True),
)
constructor(
    "from_cu_seqlens",
    one(
        {"cu_seqlens_q": starts_of(9), "packed": True, "max_q_len": maybe(12, 0.5)},
        PAIRS | {"packed": False},
        PAIRS | {"cu_seqlens_kv": integers(0, 3, 2, 8), "max_kv_len": 8, "packed": None},
    ),
)
constructor("from_random", POSITIONS, batch_size=2, q_len=5, kv_len=7, sparsity=0.3, seed=[1])
constructor(
    "dynamic_init",
    one(
        {"mask_info": mask_row(keys=5)},
        {"input_ids": INPUT_IDS},
        {"inputs_embeds": reals("2, 5, 3")},
        {"input_ids": INPUT_IDS, "attention_mask": mask_of("2, 5")},
    ),
)
constructor(
    "neighborhood",
    shape=one((3, 4), [3, 3, 4]),
    kernel=3,
    stride=maybe(1),
    dilation=maybe(1),
    causal=maybe(True),
    batch=2,
)
constructor("from_blocks", blocks=mask_of("2, 1, 2, 3"), block_size=one(4, (3, 5)), q_len=6, kv_len=11)


class Function:
    """A mask as a function of places, whose result can be of any kind."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) if self.result is None else self.result


row(
    "MaskInfo.from_function",
    f=None,
    q_len=5,
    kv_len=7,
    batch=2,
    heads=one(1, 2),
    call=lambda f=None, **a: look_at(MaskInfo.from_function(f if callable(f) else Function(f), **a)),
)


def method(
    names: str, *rows: Any, label: str = "", called: Callable[..., Any] | None = None, **arguments: Any
) -> None:
    for name in names.split("; "):

        def call(info: MaskInfo, name: str = name, **a: Any) -> Any:
            result = called(info, *a.values()) if called else getattr(info, name)(**a)
            return look_at(result) if isinstance(result, MaskInfo) else result

        def right(rng: Rng) -> Arguments:
            info = any_mask(rng, 2, 5, 7)
            drawn = draw(rng, *rows, arguments)
            if not info._state.labels.complete:  # there are no segments to count in
                drawn.pop("within_segments", None)
            return {"info": info} | drawn

        target(f"MaskInfo.{name}{label}", right, call, kept=frozenset({"info"}))


NUMBERS = one(np.bool_, np.int8)
method("apply_causal", offset=one(0, 2, integers(1, -1), "bottom-right"), within_segments=FLAG)
method(
    "apply_sliding_window",
    sliding_window=one(2, (1, None), integers(2), (None, np.array([1]))),
    offset=one(0, integers(1, -1), "bottom-right"),
    mode=one(None, "default"),
    within_segments=FLAG,
)
method(
    "apply_sliding_window",
    label=", mode",
    sliding_window=2,
    mode=one("decode", "prefill"),
    index=integers(3, 4),
)
method("apply_chunked", chunk_size=3, offset=one(0, integers(1, -2)), within_segments=FLAG)
method("apply_prefix", lengths=integers(1, 3))
method("apply_kv_lengths", kv_lengths=integers(3, 7), q_len=maybe(2), sliding_window=maybe(3))
method(
    "apply_token_type_ids",
    token_type_ids=made(lambda rng: tuple(draw(rng, IDS).values())),
    combine=one("union", "intersect", "replace"),
    zero_policy=one("q", "kv", "both", "none"),
    update_segment_ids=one(True, True, True, False),
)
method(
    "__getitem__",
    index=one(
        ..., (0, ...), (slice(None), 0, ...), (0, 0, slice(1, 4), slice(2, None)), (..., slice(-3, None))
    ),
    called=operator.getitem,
)
method("__and__", other=mask_row(), called=operator.and_)
method("__or__", other=mask_row(), called=operator.or_)
method("__eq__", other=mask_row())
method("__invert__; get_or_compute_positions; is_self_attention; density; tree_flatten")
method("__reduce__; __repr__; _repr_html_")
method("create_bias", dtype=one(*FLOATS))
method("create_bias", label=", out", dtype=np.float32, out=zeros("2, 1, 5, 7", "f4"))
method("get_or_compute_attention_mask", dtype=one(np.bool_, np.int8, np.float16))
method("get_or_compute_attention_mask", label=", out", dtype=np.bool_, out=zeros("2, 1, 5, 7"))
method("get_or_compute_segment_ids; materialize_segment_ids", per_head=FLAG)
method("get_or_compute_qkv_cu_seqlens", out_dtype=np.int64, max_segments=one(None, 99))
method("get_qkv_masks; materialize_attention_mask", dtype=NUMBERS)
method("to_dtype", dtype=one(np.bool_, np.float32))
method("get_shardings", sequence_parallel=FLAG, mesh={"dp": 2, "tp": 1, "sp": 1, "fsdp": 1})
method("grid", batch=1, head=0, q_cell=2, k_cell=3)
method("labels", batch=1, head=0)
for _name in PROPERTIES:
    method(_name, called=operator.attrgetter(_name))
method(
    "replace",
    one(
        {"attention_mask": MASK},
        IDS,
        {"q_positions": made(lambda rng: np.arange(10).reshape(2, 5)), "batch_axis_name": "dp"},
        {"attention_mask": PAIRS_BEFORE, "causal_mask_baked_in": True},
    ),
)
method(
    "visualize",
    block_size=one(2, (1, 3)),
    batch=1,
    head=0,
    fit_in_screen=FLAG,
    max_rows=4,
    max_cols=4,
    charset=one("unicode", "ascii"),
    show_segments=FLAG,
    return_str=True,
)
row(
    "MaskInfo.create_chunked_attention_mask",
    chunk_size=3,
    q_len=5,
    kv_len=7,
    offset=1,
    dtype=np.bool_,
    out=maybe(zeros("5, 7")),
    call=MaskInfo.create_chunked_attention_mask,
)
row("MaskInfo.get_empty_sharding", call=MaskInfo.get_empty_sharding)
target(
    "MaskInfo.tree_unflatten",
    lambda rng: dict(zip(("children", "aux_data"), any_mask(rng, 2, 5, 7).tree_flatten(), strict=True)),
    lambda children, aux_data: look_at(MaskInfo.tree_unflatten(aux_data, children)),
)

# Operators

REGISTRY, OPERATION = operations.OperationRegistry, operations.FlashAttention()


def operator_arguments(rng: Rng) -> Arguments:
    found = {name: x for name, x in attention_arguments(rng).items() if name in ("query", "key", "value")}
    batch, tokens = found["query"].shape[:2]
    options = {name: maybe(OPTIONS[name]) for name in ("sliding_window", "softmax_aux", "causal")}
    options |= {"mask": maybe(OPTIONS["attention_mask"]), "bias": maybe(reals("1, H, Tq, Tk"))}
    more = draw(rng, options, B=batch, Tq=tokens, Tk=TK, **SIZES)
    if "bias" in more:
        more["bias"] = more["bias"].astype(found["query"].dtype)
    return found | more


def by_metadata(query: Any, **metadata: Any) -> Any:
    return REGISTRY.create("vanilla", operations.OperationMetadata(**metadata))(query, query, query)


for _name in ("flash", "vanilla"):
    target(f"operations.{_name}", operator_arguments, lambda name=_name, **a: REGISTRY.create(name)(**a))
METADATA = dict.fromkeys(("runtime_softmax_dtype", "backend", "mesh")) | {
    "softmax_scale": 0.5,
    "dropout_prob": 0.0,
}
METADATA |= {"runtime_dtype": one(None, np.float32)}
target(
    "OperationMetadata",
    lambda rng: draw(rng, METADATA) | {"query": floats(rng, 1, 3, 2, 4)},
    by_metadata,
    kept=frozenset({"query"}),
)
row("OperationRegistry.get", impl_name="flash", call=REGISTRY.get)
row("OperationRegistry.list", call=REGISTRY.list)
row("OperationRegistry.create", impl_name="flash", metadata=None, call=lambda **a: type(REGISTRY.create(**a)))
_numbers = itertools.count()


def new_operation(rng: Rng) -> type:
    name = f"own {next(_numbers)}"
    return type("Own", (operations.FlashAttention,), {"get_impl_name": staticmethod(lambda: name)})


row(
    "OperationRegistry.register",
    operation=made(new_operation),
    call=lambda operation: REGISTRY.register(operation) is operation,
)
for _name, _row in {
    "get_mode": {"query": reals("2, 1, 3, 4"), "BTHD": FLAG},
    "split_attention_mask": {"attn_mask": mask_of("2, 1, 5, 7", "2, 5, 7")},
    "combine_query_kv_masks": {"q_mask": mask_of("2, 5"), "kv_mask": mask_of("2, 7")},
    "create_causal_mask": {"qseq": 5},
    "repeat_kv_heads": {"k": reals("2, 5, 2, 3"), "v": reals("2, 5, 2, 4"), "num_reps": 2},
    "handle_kvhead": {"array": one(None, reals("2, 2, 5, 7")), "num_q_heads": 4, "num_kv_heads": 2},
    "create_stable_sharding": {
        "state_ps": ("dp", None, "tp"), "preserved_indices": [0, 2], "clone_ps": None, "dep": True,
    },
}.items():  # fmt: skip
    row(f"OperationImpl.{_name}", _row, call=getattr(OPERATION, _name))
