"""Every format of a cache with every option: paged, packed, with new tokens of other numbers, rotated and latent.

`test_attend.py` has more of the floating formats, and the bits of what is written; here options meet formats.
"""

from dataclasses import dataclass, fields
from itertools import cycle, islice

import ml_dtypes
import numpy as np
import pytest
import reference_kvcache as twin
from flash_cases import BF16, F16, F32, F64, all_pairs
from kvcache_cases import GARBAGE, bits_of_memory

import attnmask
from attnmask import MaskInfo
from attnmask._cache.quantize import rotated

INT8, E4M3, E5M2 = map(np.dtype, ("int8", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
KINDS = (F32, "int4", INT8, E4M3, BF16, E5M2, "int8 by channel", "int4 of float16", F16, F64)
H, HKV, GROUP = 8, 2, 32
CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")
FACTORS = {
    "kind": KINDS,
    "query_type": (F32, BF16, F16),
    "depths": ((64, 32), (128, 64), (64, 64)),
    "queries": (1, 3, 20, 70, (1, 17, 0, 5, 2), (64, 2)),  # of each sequence; several: packed
    "new": (None, "as many", "packed"),
    "page_size": (None, 16, 1, 7, 64),
    "lengths": ((0, 70, 200, 64, 1), (300,), (63, 65)),
    "rotate": (False, True),
    "latent": (False, True),
    "chunk": (None, 50, 1, 64, 2**62),
    "slopes": (False, True),
    "bias": (None, "H", "Tq"),
    "relative": (False, True),
    "soft_cap": (None, 5.0),
    "sinks": (False, True),
    "window": (None, (40, None), (9, 3)),
    "mask": (None, "array", "info"),
    "causal": (True, False),
}


@dataclass(frozen=True, repr=False)
class Case:
    """One call. Its repr, which a failure shows, is enough to repeat it."""

    kind: object = F32
    query_type: np.dtype = F32
    depths: tuple[int, int] = (64, 32)
    queries: int | tuple[int, ...] = 3
    new: str | None = None
    page_size: int | None = None
    lengths: tuple[int, ...] = (0, 70, 200, 64, 1)
    rotate: bool = False
    latent: bool = False
    chunk: int | None = None
    slopes: bool = False
    bias: str | None = None
    relative: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    window: tuple | None = None
    mask: str | None = None
    causal: bool = True
    seed: int = 0

    def __repr__(self) -> str:
        said = (f for f in fields(self) if repr(getattr(self, f.name)) != repr(f.default))
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in said)})"

    @property
    def packed(self) -> bool:
        return isinstance(self.queries, tuple)

    @property
    def counts(self) -> list[int]:
        return list(islice(cycle(self.queries if self.packed else [self.queries]), len(self.lengths)))

    @property
    def new_counts(self) -> list[int]:
        if self.new == "packed":
            return list(islice(cycle((2, 0, 70, 1, 17)), self.seed % 3, self.seed % 3 + len(self.lengths)))
        return self.counts if self.new else [0] * len(self.lengths)

    @property
    def after(self) -> list[int]:
        return [length + count for length, count in zip(self.lengths, self.new_counts, strict=True)]

    @property
    def dtype(self) -> np.dtype:
        """Of queries: float64 goes with float64 alone."""
        return F64 if self.kind == F64 else self.query_type


def cases():
    for seed, levels in enumerate(all_pairs(FACTORS, 0)):
        case = Case(**levels, seed=seed)
        if case.latent and (case.rotate or case.kind == "int8 by channel"):
            case = Case(**levels | {"rotate": False, "kind": INT8}, seed=seed)
        yield case


def caches_of(case: Case, rng) -> dict:
    """Caches without tokens, as bad as can be, and a table of their pages."""
    room = max(case.after) + case.seed % 2 * 5
    given, shape = {}, (len(case.lengths), room)
    if case.page_size:
        per_row = -(-room // case.page_size)
        shape = len(case.lengths) * per_row + 3, case.page_size
        pages = rng.permutation(shape[0])[: len(case.lengths) * per_row].reshape(-1, per_row)
        used = -(-np.array(case.after) // case.page_size)
        garbage = rng.choice(GARBAGE, pages.shape)
        given["block_table"] = np.where(np.arange(per_row) < used[:, None], pages, garbage).astype(np.int32)
    halves = isinstance(case.kind, str) and case.kind.startswith("int4")
    dtype = np.uint8 if halves else INT8 if isinstance(case.kind, str) else case.kind
    for side, depth in zip("kv", case.depths, strict=True):
        worst = 255 if halves else 127 if dtype == INT8 else np.nan
        given[f"{side}_cache"] = np.full((*shape, HKV, depth // (1 + halves)), worst, F32).astype(dtype)
        if halves:
            scale_dtype = F16 if "float16" in case.kind else F32
            given[f"{side}_scale"] = np.full((*shape, HKV, depth // GROUP, 2), np.nan, scale_dtype)
        elif case.kind == "int8 by channel":
            given[f"{side}_scale"] = rng.uniform(0.02, 0.04, (1, 1, HKV, depth)).astype(F32)
        elif dtype.name in twin.LARGEST:
            given[f"{side}_scale"] = np.full((*shape, HKV, 1), np.nan, F32)
    return given


def first_of_values(case: Case) -> int:
    """The first channel of the keys that is a value, in a latent cache."""
    return (case.depths[0] - case.depths[1]) // GROUP * GROUP


def as_latent(case: Case, given: dict) -> dict:
    """The same with values that are a view of the keys, and no scales of their own."""
    cache, first = given["k_cache"], first_of_values(case)
    less = case.depths[0] // cache.shape[-1]  # channels in an element
    view = cache[..., first // less : (first + case.depths[1]) // less]
    return {name: x for name, x in given.items() if name != "v_scale"} | {"v_cache": view}


def scale_of_values(case: Case, given: dict):
    """What the twin takes for the scales of such a view."""
    scale, first = given.get("k_scale"), first_of_values(case)
    if scale is None or scale.ndim == 4:
        return scale
    return scale[..., first // GROUP : (first + case.depths[1]) // GROUP, :]


def fill(case: Case, given: dict, before, tokens) -> None:
    """Lets the twin append the tokens of each sequence."""
    for side, of_sequences in zip("kv", tokens, strict=True):
        if side == "v" and case.latent:
            continue
        for row, (length, new) in enumerate(zip(before, of_sequences, strict=True)):
            twin.append(
                given[f"{side}_cache"], given.get(f"{side}_scale"), given.get("block_table"), row, length, new
            )


def options_of(case: Case, rng) -> dict:
    total = sum(case.counts) if case.packed else case.counts[0]
    keys, batch = max(case.after) + case.seed % 3 * 4, 1 if case.packed else len(case.lengths)
    options = {"causal": case.causal, "sliding_window": case.window, "attention_chunk": case.chunk}
    options |= {"logits_soft_cap": case.soft_cap, "softmax_scale": (None, 0.1)[case.seed % 2]}
    if case.slopes:
        options["alibi_slopes"] = np.linspace(0.02, 0.5, H)
    if case.sinks:
        options["softmax_aux"] = rng.standard_normal((H, 2)).astype(F32)
    if case.bias:
        shape = (1, H, 1, keys) if case.bias == "H" else (batch, 1, total, keys)
        options["bias"] = rng.standard_normal(shape).astype(case.dtype)
    if case.relative:
        options |= {"relative_bias": rng.standard_normal((H, 90)).astype(F32), "relative_low": -80}
    if case.mask:
        mask = rng.random((batch, 1, total, keys)) < 0.8
        options["attention_mask"] = mask if case.mask == "array" else MaskInfo.from_attention_mask(mask)
    return options


def tokens_of(case: Case, counts, rng, depth, heads, dtype):
    """Of each sequence."""
    return [rng.standard_normal((count, heads, depth)).astype(dtype) for count in counts]


def joined(case: Case, tokens, packed: bool):
    return np.concatenate(tokens) if packed else np.stack(tokens)


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: str(case.seed))
def test_by_the_twin(isa, set_threads, case):
    rng = np.random.default_rng(case.seed)
    set_threads(1 + case.seed % 3)
    turn = rotated if case.rotate else lambda x: x
    caches, options = caches_of(case, rng), options_of(case, rng)
    old, new = (
        [tokens_of(case, counts, rng, depth, HKV, dtype) for depth in case.depths]
        for counts, dtype in ((case.lengths, F32), (case.new_counts, case.dtype))
    )
    query = joined(case, tokens_of(case, case.counts, rng, case.depths[0], H, case.dtype), case.packed)
    fill(case, caches, [0] * len(case.lengths), [[turn(x) for x in each] for each in old])
    mine = {name: x.copy() for name, x in caches.items()}
    fill(case, caches, case.lengths, [[turn(x) for x in each] for each in new])

    if case.packed:
        options["cu_seqlens_q"] = np.cumsum([0, *case.counts])
    given = as_latent(case, mine) if case.latent else mine
    call = given | options | {"cache_seqlens": np.array(case.lengths), "rotate": case.rotate}
    if case.new:
        packed = case.packed or case.new == "packed"
        call["key"] = joined(case, new[0], packed)
        if not case.latent:
            call["value"] = joined(case, new[1], packed)
    if case.new == "packed":
        call["cu_seqlens_k_new"] = np.cumsum([0, *case.new_counts])
    out, lse = attnmask.flash_attention_with_kvcache(query, **call, return_lse=True)

    held = (
        caches | as_latent(case, caches) | {"v_scale": scale_of_values(case, caches)}
        if case.latent
        else caches
    )
    plain = {"query": turn(query), "key": None, "value": None, "cu_seqlens_q": None} | options
    names = ("alibi_slopes", "attention_mask", "block_table", "k_scale", "v_scale", "softmax_aux")
    plain = dict.fromkeys(names) | held | plain | {"cache_seqlens": np.array(case.after)}
    expected = twin.attention(**plain)
    error = {8: 1e-9, 4: 2e-4, 2: 3e-2}[case.dtype.itemsize]
    np.testing.assert_allclose(
        out.astype(F64), turn(expected.out), rtol=error, atol=2 * error, err_msg=repr(case)
    )
    np.testing.assert_allclose(lse, expected.lse, rtol=error, atol=error, err_msg=repr(case))
    for name in CACHES if not case.latent else ("k_cache", "k_scale"):
        if name in mine:
            assert mine[name].tobytes() == caches[name].tobytes(), (name, case)


# Bad input of every format: nothing is written


def good(kind, rotate) -> dict:
    """A call of two sequences that appends tokens of other numbers to pages."""
    case = Case(kind=kind, page_size=16, lengths=(30, 7), new="packed", queries=2)
    rng = np.random.default_rng(0)
    given = caches_of(case, rng)
    given["block_table"] = np.array([[0, 1, 2], [5, 4, 3]], np.int32)
    given |= {
        "query": np.ones((2, 2, H, 64), case.dtype),
        "cache_seqlens": np.array([30, 7]),
        "rotate": rotate,
    }
    given |= {"key": np.ones((5, HKV, 64), case.dtype), "value": np.ones((5, HKV, 32), case.dtype)}
    given["out"] = np.full((2, 2, H, 32), 77, case.dtype)
    return given | {"cu_seqlens_k_new": np.array([0, 4, 5])}


WRONG = [
    ({"cache_seqlens": [45, 7]}, ValueError, "cache_seqlens must be tokens .* got 45 and 4 new ones at index 0"),
    ({"cache_seqlens": [30, -1]}, ValueError, "cache_seqlens must be at least 0"),
    ({"block_table": [[0, 1, 9], [5, 4, 3]]}, IndexError, r"block_table must be from 0 to 6, got 9 at index \(0, 2\)"),
    ({"block_table": [[0, 1, 5], [5, 4, 3]]}, ValueError, "block_table must give each sequence pages of its own"),
    ({"cu_seqlens_k_new": [0, 3, 4]}, ValueError, "cu_seqlens_k_new must end at 5 tokens of key"),
    ({"cu_seqlens_k_new": [0, 6, 5]}, ValueError, "cu_seqlens_k_new"),
    ({"cu_seqlens_k_new": [0, 5]}, ValueError, "cu_seqlens_k_new must have 3 entries"),
    ({"attention_chunk": 0}, ValueError, "attention_chunk must be at least 1, got 0"),
    ({"attention_chunk": 2.0}, TypeError, "attention_chunk must be an integer, got 2.0"),
    ({"bias": np.zeros((1, H, 2, 33), F32)}, ValueError, "bias must broadcast"),
    ({"bias": np.zeros((2, 34), int)}, TypeError, "bias must be float16"),
    ({"relative_bias": np.zeros((H - 1, 9), F32)}, ValueError, r"relative_bias must be \[H, L\] with H = 8"),
    ({"relative_low": 3}, ValueError, "relative_low must be 0 without relative_bias"),
    ({"alibi_slopes": np.ones(H + 1)}, ValueError, "alibi_slopes must be"),
    ({"attention_mask": np.ones((2, 33), bool)}, ValueError, "attention_mask must broadcast"),
    ({"sliding_window": (-1, 0)}, ValueError, "sliding_window"),
    ({"logits_soft_cap": np.nan}, ValueError, "logits_soft_cap must"),
    ({"softmax_aux": np.ones((3, 2))}, ValueError, "softmax_aux must be"),
    ({"value": None}, ValueError, "value must be given with key"),
    ({"key": None}, ValueError, "key must be given with (value|cu_seqlens_k_new)"),
    ({"key": np.ones((5, HKV, 32), F32)}, ValueError, "key must have 2 heads of 64 channels"),
    ({"value": np.ones((4, HKV, 32), F32)}, ValueError, "cu_seqlens_k_new must end at 4 tokens of value, got 5"),
    ({"return_lse": 1}, TypeError, "return_lse must be"),
    ({"out": np.zeros((2, 2, H, 32), np.int8)}, ValueError, "out must be"),
]  # fmt: skip


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bad_input_writes_nothing(kind, rotate):
    for wrong, error, words in WRONG:
        arguments = good(kind, rotate) | wrong
        before = bits_of_memory(arguments)
        with pytest.raises(error, match=words):
            attnmask.flash_attention_with_kvcache(**arguments)
        assert bits_of_memory(arguments) == before, words
    attnmask.flash_attention_with_kvcache(**good(kind, rotate))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("written", ["out", *CACHES])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_tokens_that_share_memory_with_what_is_written(name, written, rotate):
    arguments = good(INT8, rotate)
    place, token = arguments[written], arguments[name]
    memory = np.zeros(place.nbytes + token.nbytes + 64, np.uint8)
    arguments[written] = memory[: place.nbytes].view(place.dtype).reshape(place.shape)
    arguments[name] = memory[place.nbytes - 32 :][: token.nbytes].view(token.dtype).reshape(token.shape)
    before = bits_of_memory(arguments)
    with pytest.raises(ValueError, match=f"{written} must share no memory with {name}"):
        attnmask.flash_attention_with_kvcache(**arguments)
    if written != "out" and name != "query":
        tokens = {each: arguments[each] for each in (*CACHES, "key", "value")}
        with pytest.raises(ValueError, match=f"{written} must share no memory with {name}"):
            attnmask.write_kvcache(**tokens, slot_mapping=[1, 2, 3, 4, 5], rotate=rotate)
    assert bits_of_memory(arguments) == before


def test_latent_caches_are_not_rotated():
    """Some channels of rotated keys are no rotated values; all of them are."""
    rng = np.random.default_rng(0)
    x, cache = (rng.standard_normal((2, 5, heads, 64)).astype(F32) for heads in (H, HKV))
    words = "rotate must be False where v_cache is channels of k_cache, which are rotated together"
    for values in (np.s_[..., :32], np.s_[..., 32:]):
        for new in ({}, {"key": np.ones((2, 1, HKV, 64), F32), "cache_seqlens": 3}):
            before = cache.tobytes()
            with pytest.raises(ValueError, match=words):
                attnmask.flash_attention_with_kvcache(x, cache, cache[values], **new, rotate=True)
            assert cache.tobytes() == before
    got = attnmask.flash_attention_with_kvcache(x, cache, cache, rotate=True)
    wide = rotated(cache)
    right = twin.flash_attention_with_kvcache(x, wide, wide)
    np.testing.assert_allclose(got, right, atol=1e-5)
    both = np.stack([cache, cache[..., ::-1]], axis=1)[..., :64]  # keys beside values, of fewer channels
    k_cache, v_cache = both[:, 0], both[:, 1, ..., :32]
    attnmask.flash_attention_with_kvcache(x, k_cache, v_cache, rotate=True)


SLOTS_WRONG = [
    (
        {"slot_mapping": [0, 1, 2, 3, 112]},
        IndexError,
        "slot_mapping must be from -1 to 111, got 112 at index 4",
    ),
    (
        {"slot_mapping": [0, 1, -2, 3, 4]},
        IndexError,
        "slot_mapping must be from -1 to 111, got -2 at index 2",
    ),
    (
        {"slot_mapping": [0, 7, 2, 7, 4]},
        ValueError,
        "slot_mapping must give each token a slot of its own, got 7",
    ),
    ({"slot_mapping": [0, 1, 2, 3]}, ValueError, r"slot_mapping must be of shape \(5,\)"),
    ({"slot_mapping": [0.0] * 5}, TypeError, "slot_mapping must be integers"),
    ({"key": np.ones((5, HKV, 32), F32)}, ValueError, "key must have 2 heads of 64 channels"),
    ({"value": None}, ValueError, "value must be given with key"),
    ({"value": np.ones((5, HKV, 32), int)}, TypeError, "value must be of float16"),
]


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bad_slots_write_nothing(kind, rotate):
    names = (*CACHES, "key", "value", "rotate")
    for wrong, error, words in SLOTS_WRONG:
        arguments = {name: x for name, x in good(kind, rotate).items() if name in names}
        arguments |= {"slot_mapping": [5, 1, -1, 3, 111]} | wrong
        before = bits_of_memory(arguments)
        with pytest.raises(error, match=words):
            attnmask.write_kvcache(**arguments)
        assert bits_of_memory(arguments) == before, words
    attnmask.write_kvcache(**{**arguments, **{name: good(kind, rotate)[name] for name in ("key", "value")}})
