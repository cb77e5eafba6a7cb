"""KVCache: what it holds after any series of calls, compared with a dictionary of arrays; its errors."""

import contextlib
import copy
import pickle
import xml.etree.ElementTree as ET

import ml_dtypes
import numpy as np
import pytest
import reference_flash as ref
import reference_kvcache as twin
from environment import SANITIZED

from attnmask import attention_statistics_with_kvcache, flash_attention_with_kvcache
from attnmask._cache.pages import KVCache
from attnmask._cache.quantize import quantize_kv, rotated

FLOATS = tuple(map(np.dtype, ("float16", ml_dtypes.bfloat16, "float32", "float64")))
# Errors of attention over numbers of about 1; queries are of the cache's type, or of float32 if it has scales.
ERROR = dict(zip(FLOATS, (4e-3, 3e-2, 1e-5, 1e-13), strict=True))
HEADS, KV_HEADS, DEPTH, VALUE_DEPTH, LAYERS, PAGE_SIZE = 2, 2, 8, 3, 2, 4
HALVES = {"dtype": "int4", "head_dim": 64, "value_head_dim": 32}
KINDS = {str(dtype): {"dtype": dtype} for dtype in (*FLOATS, *twin.QUANTIZED)} | {
    "int4": HALVES | {"value_head_dim": 128},
    "int4, rotated": HALVES | {"group": 32, "rotate": True},
    **{f"latent, {dtype}": {"dtype": dtype, "latent": True} for dtype in ("float32", "int8")},
    "latent, int4": HALVES | {"group": 32, "latent": True},
}


def cache_of(kind="float32", pages=24) -> KVCache:
    sizes = {"head_dim": DEPTH, "value_head_dim": VALUE_DEPTH} | KINDS[kind]
    return KVCache(KV_HEADS, pages=pages, layers=LAYERS, page_size=PAGE_SIZE, **sizes)


def depths_of(cache: KVCache) -> list[int]:
    return [
        pages.shape[-1] * (2 if pages.dtype == np.uint8 else 1) for pages in (cache.k_pages, cache.v_pages)
    ]


def new_tokens(rng, cache: KVCache, *counts: int) -> list[np.ndarray]:
    """A query, a key and, unless the cache is latent, a value for each."""
    (depth, value_head_dim), dtype = depths_of(cache), cache.k_pages.dtype
    sizes = [(HEADS, depth), (KV_HEADS, depth), (KV_HEADS, value_head_dim)][: 2 if cache.latent else 3]
    dtype = dtype if dtype in FLOATS else np.float32
    return [rng.standard_normal((*counts, *size)).astype(dtype) for size in sizes]


def fill(step) -> None:
    """Let every layer attend, with tokens of zeros."""
    cache = step._cache
    tokens = [np.zeros_like(x) for x in new_tokens(np.random.default_rng(0), cache, sum(step._counts))]
    for layer in range(len(cache.k_pages)):
        step.attend(layer, *tokens)


def grown(cache: KVCache, *lengths: int) -> list[int]:
    """Sequences with as many tokens of zeros."""
    ids = [cache.new_sequence() for _ in lengths]
    with cache.step(ids, lengths) as step:
        fill(step)
    return ids


def as_held(cache: KVCache, key, value=None) -> list[np.ndarray]:
    """The numbers, in float64, that a cache stands for once it holds keys and values."""
    held = []
    for x in (key,) if cache.latent else (key, value):
        x = rotated(x) if cache.rotate else x
        if cache.k_scales is None:
            held.append(x.astype(np.float64))
        elif cache.group:
            held.append(twin.of_halves(*quantize_kv(x, "int4", group=cache.group)))
        else:
            numbers, scale = quantize_kv(x, cache.k_pages.dtype, axis=-1)
            held.append(numbers.astype(np.float64) * scale)
    return [held[0], held[0][..., : depths_of(cache)[1]]] if cache.latent else held


# The model


class Model:
    """A KVCache, and what it has to hold: by id, keys and values of each layer, in float64."""

    def __init__(self, kind: str, pages: int) -> None:
        self.cache, self.pages = cache_of(kind, pages), pages
        self.error = ERROR.get(self.cache.k_pages.dtype, 3e-2)
        # A quotient that is rounded may lie on another side of the middle of two quantized numbers.
        self.slack = 0.08 * (self.cache.k_scales is not None)
        self.held: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.evicted: dict[int, int] = {}
        self.made: list[int] = []

    def new(self) -> None:
        number = self.cache.new_sequence()
        self.held[number] = tuple(np.zeros((LAYERS, 0, KV_HEADS, depth)) for depth in depths_of(self.cache))
        self.evicted[number] = 0
        self.made.append(number)

    def fork(self, number: int) -> None:
        self.made.append(self.cache.fork(number))
        self.held[self.made[-1]] = self.held[number]
        self.evicted[self.made[-1]] = self.evicted[number]

    def truncate(self, number: int, length: int) -> None:
        self.cache.truncate(number, length)
        self.held[number] = tuple(numbers[:, :length] for numbers in self.held[number])

    def free(self, number: int) -> None:
        self.cache.free(number)
        del self.held[number]

    def evict(self, number: int, keep: np.ndarray) -> str:
        """Evict, and say whether there were pages for it."""
        kept = np.broadcast_to(np.sort(keep), (LAYERS, KV_HEADS, keep.shape[-1]))
        stays = set()
        for begin in range(0, kept.shape[-1], PAGE_SIZE):
            rows = kept[..., begin : begin + PAGE_SIZE]
            if (rows == rows[0, 0, 0] + np.arange(rows.shape[-1])).all() and rows[0, 0, 0] % PAGE_SIZE == 0:
                stays.add(rows[0, 0, 0] // PAGE_SIZE)
        tables = self.tables()
        places = dict(enumerate(tables[number]))
        own = [
            place for place, page in places.items() if sum(page in table for table in tables.values()) == 1
        ]
        needed = -(-kept.shape[-1] // PAGE_SIZE) - len(stays) - len(set(own) - stays)
        try:
            self.cache.evict(number, keep)
        except MemoryError as error:
            assert needed > self.cache.free_pages
            assert str(error).startswith(f"the cache is full: evict needs {needed} pages and ")  # noqa: PT017
            return "out of pages to evict"
        assert needed <= self.pages - len({page for table in tables.values() for page in table})
        assert {places[place] for place in stays} <= set(self.tables()[number])
        self.evicted[number] += self.length(number) - kept.shape[-1]
        by_token = kept.transpose(0, 2, 1)[..., None]
        self.held[number] = tuple(np.take_along_axis(x, by_token, axis=1) for x in self.held[number])
        return "evict"

    def length(self, number: int) -> int:
        return self.held[number][0].shape[1]

    def tables(self) -> dict[int, list[int]]:
        ids = list(self.held)
        return {
            number: row[row >= 0].tolist()
            for number, row in zip(ids, self.cache.block_table(ids), strict=True)
        }

    def tokens(self, number: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The first tokens in the pages of a sequence, as they are held."""
        cache = self.cache
        where = slice(None), *twin.places(cache.k_pages[0], cache.block_table([number]), 0, 0, length)
        keys, values = cache.k_pages[where], cache.v_pages[where]
        if cache.k_scales is None:
            return keys.astype(np.float64), values.astype(np.float64)
        k_scales, v_scales = cache.k_scales[where], cache.v_scales[where]
        if cache.group:
            groups = depths_of(cache)[1] // cache.group
            return twin.of_halves(keys, k_scales), twin.of_halves(values, v_scales[..., :groups, :])
        return keys.astype(np.float64) * k_scales, values.astype(np.float64) * v_scales

    def pages_needed(self, ids, counts) -> int:
        """Pages that a step takes: those behind the last ones, and copies for all owners of a page but one."""
        tables, needed, writers = self.tables(), 0, {}
        for number, count in zip(ids, counts, strict=True):
            end = self.length(number) + count
            needed += -(-end // PAGE_SIZE) - len(tables[number])
            if count and self.length(number) % PAGE_SIZE:
                writers.setdefault(tables[number][-1], []).append(number)
        for page, those in writers.items():
            owners = sum(page in table for table in tables.values())
            needed += min(len(those), owners - 1)
        return needed

    def check(self) -> None:
        """The cache holds what it has to, and nothing else: free pages are filled with NaN."""
        ids = list(self.held)
        assert self.cache.lengths(ids).tolist() == [self.length(number) for number in ids]
        positions = [self.length(number) + self.evicted[number] for number in ids]
        assert self.cache.positions(ids).tolist() == positions
        tables = self.tables()
        used = {page for table in tables.values() for page in table}
        assert self.cache.free_pages == self.pages - len(used)
        for number, table in tables.items():
            assert len(table) == -(-self.length(number) // PAGE_SIZE)
            for got, expected in zip(
                self.tokens(number, self.length(number)), self.held[number], strict=True
            ):
                assert np.array_equal(got, expected), number
        assert len(set(self.made)) == len(self.made)
        self.spoil([page for page in range(self.pages) if page not in used])

    def spoil(self, pages: list[int]) -> None:
        cache = self.cache
        for held in (cache.k_pages, cache.v_pages, cache.k_scales, cache.v_scales):
            if held is not None and held.dtype.kind not in "iu":
                held[:, pages] = np.nan

    def attend(self, step, layer, ids, spans, tokens) -> None:
        """One layer of a step, compared with attention over what is held and the new tokens."""
        got, turn = step.attend(layer, *tokens).astype(np.float64), self.cache.rotate
        assert got.shape == (*tokens[0].shape[:-1], depths_of(self.cache)[1])
        got, query, *new = (array.reshape(-1, *array.shape[-2:]) for array in (got, *tokens))
        for number, span in zip(ids, spans, strict=True):
            key, value = (
                np.concatenate([held[layer], those])[None]
                for held, those in zip(
                    self.held[number], as_held(self.cache, *(x[span] for x in new)), strict=True
                )
            )
            rows = {"query": (rotated(query) if turn else query)[None, span], "key": key, "value": value}
            right = ref.flash_attention(**rows, causal=True, causal_offset="bottom-right").out[0]
            right = rotated(right) if turn else right
            np.testing.assert_allclose(got[span], right, rtol=0, atol=4 * self.error)

    def commit(self, ids, spans, written) -> None:
        """What the pages hold of the new tokens of all layers has to stay there."""
        new = [np.stack(layers) for layers in list(zip(*written, strict=True))[1:]]
        new = [array.reshape(LAYERS, -1, *array.shape[-2:]) for array in new]
        for number, span in zip(ids, spans, strict=True):
            before = self.length(number)
            after = before + span.stop - span.start
            added = [held[:, before:] for held in self.tokens(number, after)]
            for got, those in zip(added, as_held(self.cache, *(x[:, span] for x in new)), strict=True):
                np.testing.assert_allclose(got, those, rtol=self.slack, atol=self.slack / 2)
            self.held[number] = tuple(
                np.concatenate(both, axis=1) for both in zip(self.held[number], added, strict=True)
            )


class Stopped(Exception):
    """What a block raises."""


@contextlib.contextmanager
def stopped(step):
    """A step whose block raises at its end."""
    with contextlib.suppress(Stopped), step:
        yield step
        raise Stopped


def spans_of(counts) -> list[slice]:
    ends = np.cumsum(counts).tolist()
    return [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]


def random_step(model: Model, rng) -> str:
    """A step of some sequences, and what became of it."""
    ids = rng.permutation(list(model.held))[: rng.integers(1, 5)].tolist()
    batched = bool(rng.integers(2))
    counts = [int(rng.integers(7))] * len(ids) if batched else rng.integers(0, 7, len(ids)).tolist()
    shape, spans = (len(ids), counts[0]) if batched else (sum(counts),), spans_of(counts)
    own = np.random.default_rng(rng.integers(2**32))  # so that caches of all kinds take the same steps
    written = [new_tokens(own, model.cache, *shape) for _ in range(LAYERS)]
    missing = model.pages_needed(ids, counts) - model.cache.free_pages
    layers = rng.permutation(LAYERS)[: None if rng.integers(4) else rng.integers(LAYERS + 1)].tolist()
    stops = not rng.integers(4)
    others = [number for number in model.held if number not in ids]
    try:
        with model.cache.step(ids, counts[0] if batched else counts) as step:
            assert missing <= 0
            for layer in [*layers, *layers[: rng.integers(2)]]:  # at times one of them twice
                model.attend(step, layer, ids, spans, written[layer])
                if others and not rng.integers(8):
                    model.fork(others[0])
                if others and not rng.integers(8):
                    model.free(others.pop())
            if stops:
                raise Stopped
        assert len(layers) == LAYERS or not sum(counts)
    except MemoryError as error:
        words = f"the cache is full: this step needs {missing + model.cache.free_pages} pages and "
        assert str(error).startswith(words)  # noqa: PT017
        return "out of pages"
    except RuntimeError as error:
        missing = sorted({*range(LAYERS)} - {*layers})
        which = ", ".join(map(str, missing))
        words = f"{len(missing)} of {LAYERS} were not (layer{'s' * (len(missing) > 1)} {which})"
        assert words in str(error)  # noqa: PT017
        return "incomplete"
    except Stopped:
        return "stopped"
    if sum(counts):
        model.commit(ids, spans, written)
    return "done"


def random_keep(rng, length: int) -> np.ndarray:
    """Some of the tokens, for all or by head or layer and head, in any order: at times whole pages and some others."""
    shape = (LAYERS, KV_HEADS)[rng.integers(3) :]
    keep = rng.permuted(np.broadcast_to(np.arange(length), (*shape, length)), axis=-1)
    pages = np.flatnonzero(rng.random(length // PAGE_SIZE + 1) < rng.choice([0, 0.5, 0.9]))
    others = np.argsort(~np.isin(keep // PAGE_SIZE, pages), axis=-1, kind="stable")
    count = np.isin(np.arange(length) // PAGE_SIZE, pages).sum()
    return np.take_along_axis(keep, others, axis=-1)[
        ..., : rng.integers(count, rng.choice([count, length]) + 1)
    ]


CALLS = ("new", "fork", "truncate", "free", "evict", *["step"] * 7)


@pytest.mark.parametrize("kind", KINDS)
def test_any_series_of_calls(kind):
    rng, model, seen = np.random.default_rng(5), Model(kind, pages=24), []
    calls = 2000 if kind == "float32" and not SANITIZED else 150
    model.new()
    for _ in range(calls):
        call, number = rng.choice(CALLS), int(rng.choice(list(model.held)))
        if call == "new" or (call == "free" and len(model.held) == 1):
            model.new()
        elif call == "fork":
            model.fork(number)
        elif call == "truncate":
            model.truncate(number, int(rng.integers(model.length(number) + 1)))
        elif call == "evict":
            call = model.evict(number, random_keep(rng, model.length(number)))
        elif call == "free" or len(model.held) > 8:
            model.free(number)
        else:
            call = random_step(model, rng)
        seen.append(call)
        model.check()
    ends = ("out of pages", "stopped", "incomplete", "done")
    assert min(seen.count(call) for call in ("fork", "evict", *ends)) > calls / 50
    assert calls < 2000 or "out of pages to evict" in seen
    for number in list(model.held):
        model.free(number)
    model.check()
    assert model.cache.free_pages == model.pages


@pytest.mark.parametrize("turned", [False, True])
def test_a_block_that_raises_leaves_what_was_shared(turned):
    """The shorter one of two sequences that share their last page would write over a token of the longer one."""
    model, rng = Model("float32", 24), np.random.default_rng(0)
    model.new()
    tokens = [new_tokens(rng, model.cache, 7) for _ in range(LAYERS)]
    with model.cache.step([0], 7) as step:
        for layer in range(LAYERS):
            step.attend(layer, *tokens[layer])
    model.commit([0], spans_of([7]), tokens)
    model.fork(0)
    model.truncate(1, 5)
    model.check()
    ids = [1, 0] if turned else [0, 1]
    with stopped(model.cache.step(ids, 3)) as step:
        for layer in range(LAYERS):
            step.attend(layer, *new_tokens(rng, model.cache, 2, 3))
    model.check()


# Layers that are left out


def test_an_error_of_a_layer_counts_as_left_out():
    cache, rng = cache_of(), np.random.default_rng(0)
    (a,) = grown(cache, 3)
    tokens = new_tokens(rng, cache, 1)

    def incomplete():
        with cache.step([a], 1) as step:
            step.attend(0, *tokens)
            with pytest.raises(TypeError, match="causal must be True or False"):
                step.attend(1, *tokens, causal="yes")

    with pytest.raises(RuntimeError, match=r"1 of 2 were not \(layer 1\)"):
        incomplete()
    assert cache.lengths([a]).tolist() == [3]


# Copies of the cache, and what it says of itself


def test_shallow_copies_are_refused():
    """They would share pages, and each give them to other sequences."""
    cache = cache_of()
    with pytest.raises(TypeError, match=r"copy.deepcopy\(cache\) makes an independent one, cache.fork"):
        copy.copy(cache)


@pytest.mark.parametrize("kind", ["float32", "int8", "int4, rotated", "latent, float32", "latent, int4"])
@pytest.mark.parametrize("make", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_independent(make, kind):
    cache, rng = cache_of(kind), np.random.default_rng(0)
    a, b = grown(cache, 6, 3)
    cache.free(grown(cache, 9)[0])
    with cache.step([a, b], 3) as step:
        for layer in range(LAYERS):
            step.attend(layer, *new_tokens(rng, cache, 6))
    c = cache.fork(a)
    other = make(cache)
    assert repr(other) == repr(cache)
    for each in (cache, other):
        assert np.shares_memory(each.v_pages, each.k_pages) == cache.latent
        assert (each.v_scales is each.k_scales) == (cache.latent or cache.k_scales is None)
    for name in ("k_pages", "v_pages", "k_scales", "v_scales"):
        one, two = getattr(cache, name), getattr(other, name)
        assert (one is None) == (two is None)
        if one is not None:
            assert one.tobytes() == two.tobytes()
            assert two.ctypes.data % 64 == 0
            assert not np.shares_memory(one, two)
    tables = cache.block_table([a, b, c])
    np.testing.assert_array_equal(other.block_table([a, b, c]), tables)
    tokens = [new_tokens(rng, cache, 6) for _ in range(LAYERS)]
    results = []
    for each in (cache, other):
        with each.step([c, each.new_sequence()], [2, 4]) as step:
            results.append([step.attend(layer, *tokens[layer]) for layer in range(LAYERS)])
    np.testing.assert_array_equal(*results)
    other.free(b)
    other.truncate(a, 1)
    assert cache.lengths([a, b, c, c + 1]).tolist() == [9, 6, 11, 4]
    np.testing.assert_array_equal(cache.block_table([a, b]), tables[:2])


def test_no_copies_in_a_step():
    cache = cache_of()
    (a,) = grown(cache, 3)
    with cache.step([a], 1) as step:
        for make in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match="a step of this cache is open"):
                make(cache)
            with pytest.raises(TypeError, match="a step cannot be copied or pickled"):
                make(step)
        with pytest.raises(TypeError, match="a step cannot be copied or pickled"):
            copy.copy(step)
        fill(step)
    assert copy.deepcopy(cache).lengths([a]).tolist() == [4]


def test_repr():
    cache = cache_of("int8")
    a, b = grown(cache, 5, 1)
    assert repr(cache) == (
        "KVCache(kv_heads=2, head_dim=8, value_head_dim=3, layers=2, pages=24, page_size=4, dtype=int8, sequences=2, "
        "free_pages=21, nbytes=7296)"
    )
    assert repr(KVCache(1, 2, pages=3, dtype="float64")) == (
        "KVCache(kv_heads=1, head_dim=2, layers=1, pages=3, page_size=64, dtype=float64, sequences=0, "
        "free_pages=3, nbytes=6144)"
    )
    given = HALVES | {"group": 32, "rotate": True, "layers": 2, "pages": 12, "page_size": 4}
    assert repr(KVCache(2, **given)) == (
        "KVCache(kv_heads=2, head_dim=64, value_head_dim=32, layers=2, pages=12, page_size=4, dtype=int4, group=32, "
        "rotate=True, sequences=0, free_pages=12, nbytes=13824)"
    )
    assert "latent=True" in repr(cache_of("latent, float32"))
    assert f"nbytes={cache_of('latent, float32').k_pages.nbytes}" in repr(cache_of("latent, float32"))
    step = cache.step([b, a], [2, 3])
    assert repr(step) == "KVCacheStep(sequences=2, tokens=5, not begun, 0 of 2 layers attended)"
    with step:
        step.attend(1, *new_tokens(np.random.default_rng(0), cache, 5))
        assert repr(step) == "KVCacheStep(sequences=2, tokens=5, open, 1 of 2 layers attended)"
        fill(step)
    assert repr(step) == "KVCacheStep(sequences=2, tokens=5, ended, 2 of 2 layers attended)"


# What attend passes on


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("batched", [False, True])
def test_options(dtype, batched):
    """Those of the function, which gives the same over the pages."""
    cache, rng = cache_of(dtype), np.random.default_rng(0)
    ids, options = grown(cache, 3, 6), {"sliding_window": 2, "softmax_scale": 0.3, "return_lse": True}
    tokens = new_tokens(rng, cache, *([2, 3] if batched else [6]))
    with cache.step(ids, [3, 3]) as step:
        results = [step.attend(layer, *tokens, **options) for layer in range(LAYERS)]
    options |= {"cache_seqlens": cache.lengths(ids), "block_table": cache.block_table(ids)}
    options |= {} if batched else {"cu_seqlens_q": [0, 3, 6]}
    for layer, result in enumerate(results):
        scales = [None if x is None else x[layer] for x in (cache.k_scales, cache.v_scales)]
        pages = cache.k_pages[layer], cache.v_pages[layer]
        expected = flash_attention_with_kvcache(
            tokens[0], *pages, k_scale=scales[0], v_scale=scales[1], **options
        )
        for one, other in zip(result, expected, strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("kind", ["float32", "int8", "int4, rotated", "latent, float32"])
@pytest.mark.parametrize("batched", [False, True])
def test_statistics_of_a_step(kind, batched):
    """They count the new tokens; what is not asked of the layer's own tokens is an error."""
    cache, rng = cache_of(kind), np.random.default_rng(0)
    ids, options = grown(cache, 30, 6), {"sliding_window": 20, "of": ("key_sum", "entropy"), "heads": "key"}
    tokens = new_tokens(rng, cache, *([2, 3] if batched else [6]))
    with cache.step(ids, [3, 3]) as step:
        words = "step.statistics must follow step.attend of layer 1, which appends its keys"
        with pytest.raises(RuntimeError, match=words):
            step.statistics(1, tokens[0], **options)
        fill(step)
        found = [step.statistics(layer, tokens[0], **options) for layer in range(LAYERS)]
        for name, words in (
            ("rotate", "unexpected keyword argument 'rotate'"), ("window", "write sliding_window="),
            ("return_lse", "unexpected keyword argument 'return_lse'"),
        ):  # fmt: skip
            with pytest.raises(TypeError, match=words):
                step.statistics(0, tokens[0], of="entropy", **{name: True})
    with pytest.raises(RuntimeError, match=r"step.statistics must be called inside the with block"):
        step.statistics(0, tokens[0], of="entropy")
    options |= {"cache_seqlens": cache.lengths(ids), "block_table": cache.block_table(ids)}
    options |= {} if batched else {"cu_seqlens_q": [0, 3, 6]}
    for layer, got in enumerate(found):
        scale = None if cache.k_scales is None else cache.k_scales[layer]
        right = attention_statistics_with_kvcache(
            tokens[0], cache.k_pages[layer], k_scale=scale, rotate=cache.rotate, **options
        )
        assert got.key_sum.tobytes() == right.key_sum.tobytes()
        assert got.entropy.tobytes() == right.entropy.tobytes()
        np.testing.assert_allclose(got.key_sum.sum(axis=2).sum(), got.entropy.size, rtol=1e-4)


def test_a_step_of_no_tokens_or_of_no_sequences():
    cache, rng = cache_of(), np.random.default_rng(0)
    ids = grown(cache, 5, 0)
    steps = (ids, 0, (0,)), (ids, 0, (2, 0)), ([], 1, (0,)), ([], 1, (0, 1)), ([], [], (0,))
    for some, counts, shape in steps:
        with cache.step(some, counts) as step:
            out = step.attend(0, *new_tokens(rng, cache, *shape))
        assert out.shape == (*shape, HEADS, VALUE_DEPTH)
    assert cache.lengths(ids).tolist() == [5, 0]
    assert cache.block_table([]).shape == (0, 0)
    assert cache.lengths([]).dtype == np.int32


@pytest.mark.parametrize("dtype", [*FLOATS, *twin.QUANTIZED], ids=str)
def test_arrays(dtype):
    cache = KVCache(2, 8, layers=3, pages=5, page_size=7, dtype=dtype, value_head_dim=6)
    assert (cache.k_pages.shape, cache.v_pages.shape) == ((3, 5, 7, 2, 8), (3, 5, 7, 2, 6))
    assert cache.k_pages.dtype == cache.v_pages.dtype == dtype
    if dtype in FLOATS:
        assert cache.k_scales is cache.v_scales is None
    else:
        assert cache.k_scales.shape == cache.v_scales.shape == (3, 5, 7, 2, 1)
        assert cache.k_scales.dtype == cache.v_scales.dtype == np.float32
    held = (cache.k_pages, cache.v_pages, cache.k_scales, cache.v_scales)
    assert all(x.ctypes.data % 64 == 0 and not x.any() for x in held if x is not None)
    assert (cache.page_size, cache.free_pages) == (7, 5)
    assert KVCache(1, 2, pages=1, dtype=dtype.name).k_pages.shape == (1, 1, 64, 1, 2)


# Errors


@pytest.mark.parametrize(("more", "error", "message"), [
    ({"kv_heads": 0}, ValueError, "kv_heads must be at least 1, got 0"),
    ({"pages": -1}, ValueError, "pages must be at least 1, got -1"),
    ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
    ({"value_head_dim": 0}, ValueError, "value_head_dim must be at least 1, got 0"),
    ({"pages": 2**27, "page_size": 16}, ValueError, r"pages \* page_size must be at most 2147483647"),
    ({"pages": 2**500}, ValueError, r"pages \* page_size .* got an integer of"),
    ({"head_dim": 2**62}, MemoryError, "layers, pages, page_size, kv_heads and head_dim"),
    ({"dtype": "int32"}, TypeError, "dtype must be float16, .* or int4, got 'int32'"),
    ({"dtype": None}, TypeError, "dtype must be float16, .* got None"),
    ({"dtype": "nonsense"}, TypeError, "dtype must be float16, .* got 'nonsense'"),
    ({"dtype": ml_dtypes.float8_e4m3b11fnuz}, TypeError, "dtype must be float16"),
    ({"dtype": "uint8"}, TypeError, "dtype must be float16, .* or int4, got 'uint8'"),
    ({"dtype": "int8", "group": 64}, ValueError, "group must be None for int8, got 64"),
    (HALVES | {"group": 48}, ValueError, "group must be 32, 64 or 128, got 48"),
    (HALVES | {"group": 64.0}, TypeError, "group must be an integer, got 64.0"),
    (HALVES | {"group": 128}, ValueError, "head_dim must be a multiple of group=128, got 64"),
    (HALVES | {"value_head_dim": 96}, ValueError, "value_head_dim must be a multiple of group=64, got 96"),
    (HALVES | {"rotate": 1, "group": 32}, TypeError, "rotate must be"),
    (HALVES | {"rotate": True, "value_head_dim": 192}, ValueError, "value_head_dim must be a power of two"),
    (HALVES | {"rotate": True, "latent": True, "group": 32}, ValueError, "rotate must be False if latent"),
    ({"latent": True, "value_head_dim": 9}, ValueError, "value_head_dim must be at most head_dim, 8, if latent, got 9"),
    ({"latent": "yes"}, TypeError, "latent must be"),
], ids=repr)  # fmt: skip
def test_caches_that_cannot_be(more, error, message):
    arguments = {"kv_heads": 2, "head_dim": 8, "pages": 4, "dtype": "float32"} | more
    with pytest.raises(error, match=message):
        KVCache(**arguments)


@pytest.mark.parametrize("number", [7, -1, 2**60, "freed"])
@pytest.mark.parametrize(
    "method", ["fork", "truncate", "evict", "free", "lengths", "positions", "block_table", "step"]
)
def test_ids_of_no_sequence(method, number):
    cache = cache_of()
    grown(cache, 3)
    if number == "freed":
        number = cache.new_sequence()
        cache.free(number)
    calls = {
        "truncate": lambda: cache.truncate(number, 0),
        "evict": lambda: cache.evict(number, []),
        "positions": lambda: cache.positions([0, number]),
        "lengths": lambda: cache.lengths([0, number]),
        "block_table": lambda: cache.block_table([0, number]),
        "step": lambda: cache.step([0, number], 1).__enter__(),
    }
    call = calls.get(method, lambda: getattr(cache, method)(number))
    with pytest.raises(KeyError, match=f"id must be the id of an existing sequence, got {number}"):
        call()
    assert cache.lengths([0]).tolist() == [3]


@pytest.mark.parametrize(("ids", "counts", "error", "message"), [
    ([0, 1, 0], 1, ValueError, "ids must be distinct, got 0 more than once"),
    (0, 1, ValueError, r"ids must be \[n\], got"),
    ([[0, 1]], 1, ValueError, r"ids must be \[n\], got int64 array of shape \(1, 2\)"),
    ([0, 1], -1, ValueError, "counts must be at least 0, got -1"),
    ([0, 1], [1, -2], ValueError, "counts must be at least 0, got -2 at index 1"),
    ([0, 1], [1, 1, 1], ValueError, r"counts must be an integer or of shape \(2,\)"),
    ([0, 1], [1], ValueError, r"counts must be .* of shape \(2,\), got .*; write counts\[0\] for one number for all"),
], ids=repr)  # fmt: skip
def test_steps_that_cannot_be(ids, counts, error, message):
    cache = cache_of()
    grown(cache, 3, 4)
    with pytest.raises(error, match=message):
        cache.step(ids, counts)


def test_out_of_pages():
    cache = cache_of(pages=4)
    a, b = grown(cache, 5, 3)
    c = cache.fork(a)
    table = cache.block_table([a, b, c])
    with (
        pytest.raises(MemoryError, match=r"^the cache is full: this step needs 4 pages and 1 of 4 is free$"),
        cache.step([a, b, c], [3, 6, 5]),
    ):
        pass
    with pytest.raises(MemoryError, match="the cache is full"), cache.step([a], 2**59):
        pass
    np.testing.assert_array_equal(cache.block_table([a, b, c]), table)
    assert cache.lengths([a, b, c]).tolist() == [5, 3, 5]
    assert cache.free_pages == 1
    with cache.step([a, b, c], [3, 1, 3]) as step:
        assert cache.free_pages == 0  # of the two that share a page, one takes the last free one
        fill(step)
    with (
        pytest.raises(MemoryError, match=r"^the cache is full: this step needs 2 pages and 0 of 4 are free$"),
        cache.step([a], 5),
    ):
        pass


def test_nested_steps():
    cache = cache_of()
    a, b = grown(cache, 1, 1)
    early, words = cache.step([b], 1), "a step of this cache is open; wait until its with block ends"
    with cache.step([a], 1) as step:
        with pytest.raises(RuntimeError, match=words):
            cache.step([b], 1)
        with pytest.raises(RuntimeError, match=words), early:
            pass
        fill(step)
    with early:
        fill(early)
    assert cache.lengths([a, b]).tolist() == [2, 2]


def test_steps_outside_their_blocks():
    cache = cache_of()
    (a,) = grown(cache, 1)
    tokens = new_tokens(np.random.default_rng(0), cache, 1)
    step, words = cache.step([a], 1), "step.attend must be called inside the with block of its step"
    with pytest.raises(RuntimeError, match=words):
        step.attend(0, *tokens)
    with step:
        fill(step)
    with pytest.raises(RuntimeError, match=words):
        step.attend(0, *tokens)
    with cache.step([a], 1) as other:
        with pytest.raises(RuntimeError, match=words):
            step.attend(0, *tokens)
        fill(other)
    with pytest.raises(RuntimeError, match=r"a step can be used once; write another cache\.step"), step:
        pass
    assert cache.lengths([a]).tolist() == [3]


def test_other_calls_in_a_block():
    cache = cache_of()
    a, b = grown(cache, 3, 3)
    with cache.step([a], 1) as step:
        refused = (
            lambda: cache.free(a), lambda: cache.truncate(a, 0), lambda: cache.evict(a, []), lambda: cache.fork(a)
        )  # fmt: skip
        for call in refused:
            with pytest.raises(RuntimeError, match=f"id must not be in the open step, got {a}; wait until"):
                call()
        cache.evict(b, [1])
        c, d = cache.fork(b), cache.new_sequence()
        cache.free(b)
        assert cache.lengths([a, c, d]).tolist() == [3, 1, 0]
        assert cache.block_table([a]).shape == (1, 1)
        fill(step)
    assert cache.lengths([a, c, d]).tolist() == [4, 1, 0]


@pytest.mark.parametrize(("length", "message"), [
    (6, "length must be at most the sequence's 5 tokens, got 6"),
    (-1, "length must be at least 0, got -1"),
])  # fmt: skip
def test_lengths_and_layers_that_are_not_there(length, message):
    cache = cache_of()
    (a,) = grown(cache, 5)
    with pytest.raises(ValueError, match=message):
        cache.truncate(a, length)
    assert cache.lengths([a]).tolist() == [5]
    layer, tokens = min(length, LAYERS), new_tokens(np.random.default_rng(0), cache, 1)
    words = f"layer must be from 0 to 1, got {layer}"
    with pytest.raises(IndexError, match=words), cache.step([a], 1) as step:
        step.attend(layer, *tokens)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(("counts", "shape", "wrong", "expected"), [
    ([2, 3], (5,), (4,), r"\[5, heads, head_dim\]"),
    ([2, 3], (5,), (2, 3), r"\[5, heads, head_dim\]"),
    (2, (4,), (5,), r"\[4, heads, head_dim\] or \[2, 2, heads, head_dim\]"),
    ([2, 2], (2, 2), (1, 4), r"\[4, heads, head_dim\] or \[2, 2, heads, head_dim\]"),
    (2, (4,), (), r"\[4, heads, head_dim\] or \[2, 2, heads, head_dim\]"),
])  # fmt: skip
def test_tokens_that_do_not_fit(place, counts, shape, wrong, expected):
    cache, rng = cache_of(), np.random.default_rng(0)
    ids = grown(cache, 5, 1)
    tokens = new_tokens(rng, cache, *shape)
    tokens[place] = new_tokens(rng, cache, *wrong)[place]
    name, before = ("query", "key", "value")[place], cache.k_pages.copy()
    with (
        pytest.raises(ValueError, match=f"{name} must be {expected}, got float32 array of shape"),
        cache.step(ids, counts) as step,
    ):
        step.attend(0, *tokens)
    np.testing.assert_array_equal(cache.k_pages, before)


# How it is shown

SVG = "{http://www.w3.org/2000/svg}"


def drawn_cache():
    """Two sequences and a fork, of pages of four tokens."""
    cache, x = KVCache(1, 8, pages=6, page_size=4, dtype="float32"), np.ones((9, 1, 8), np.float32)
    a, b = cache.new_sequence(), cache.new_sequence()
    with cache.step([a, b], [6, 3]) as step:
        step.attend(0, x, x, x)
    cache.fork(a)
    return cache


def titles(cache):
    return [element.text for element in ET.fromstring(cache._repr_html_()).iter(f"{SVG}title")]


def test_picture_of_pages():
    cache = drawn_cache()
    assert titles(cache) == [
        "KVCache: 1 layer, 1 head, 6 pages of 4 tokens, 3 free, 3 sequences",
        "page 0: sequences 0, 2; 4 of 4 tokens",
        "page 1: sequences 0, 2; 2 of 4 tokens",
        "page 2: sequence 1; 3 of 4 tokens",
        *(f"page {page}: free" for page in (3, 4, 5)),
    ]
    texts = [element.text for element in ET.fromstring(cache._repr_html_()).iter(f"{SVG}text")]
    assert texts[-5:] == ["sequence 0", "sequence 1", "sequence 2", "several sequences", "free"]


def test_picture_of_an_open_step():
    cache, x = drawn_cache(), np.ones((2, 1, 8), np.float32)
    with cache.step([1], 2) as step:
        assert titles(cache)[4] == "page 3: the open step; 0 of 4 tokens"
        step.attend(0, x, x, x)
    assert titles(cache)[4] == "page 3: sequence 1; 1 of 4 tokens"


def test_pictures_of_large_and_of_empty_caches():
    cache = KVCache(1, 1, pages=5000, page_size=16, dtype="int8")
    assert len(titles(cache)) == 1 + 250
    ids, x = [cache.new_sequence() for _ in range(900)], np.ones((900, 50, 1, 1), np.float32)
    with cache.step(ids, 50) as step:
        step.attend(0, x, x, x)
    shown = titles(cache)
    assert shown[1] == "pages 0–19: sequences 0, 1, 2, 3, 4; 250 of 320 tokens"
    assert shown[-1] == "pages 4980–4999: free"
    assert len(cache._repr_html_()) < 40_000
    many = KVCache(1, 1, pages=1, page_size=16, dtype="int8")
    first = many.new_sequence()
    with many.step([first], 1) as step:
        step.attend(0, x[0, :1], x[0, :1], x[0, :1])
    for _ in range(20):
        many.fork(first)
    assert titles(many)[1] == "page 0: sequences 0, 1, 2, 3, 4, 5, 6, 14 more; 1 of 16 tokens"


# Versions of pickles


@pytest.mark.parametrize("name", [
    "k_cache", "cache_seqlens", "block_table", "cu_seqlens_q", "cu_seqlens_k_new", "k_scale", "rotate",
])  # fmt: skip
def test_what_a_step_knows_is_not_given(name):
    """It would write other tokens than the step counts. Nothing is written."""
    cache = KVCache(1, 8, pages=4, page_size=4, dtype="float32")
    ids, x = [cache.new_sequence(), cache.new_sequence()], np.ones((4, 1, 8), np.float32)
    words = f"unexpected keyword argument '{name}'; leave it out, as the cache and the step have it"
    with pytest.raises(TypeError, match=words), cache.step(ids, [1, 3]) as step:
        step.attend(0, x, x, x, **{name: np.array([0, 3, 4])})
    words = "unexpected keyword argument 'window'; write sliding_window="
    with pytest.raises(TypeError, match=words), cache.step(ids, [1, 3]) as step:
        step.attend(0, x, x, x, window=2)
    assert not cache.k_pages.any()
    assert cache.lengths(ids).tolist() == [0, 0]
