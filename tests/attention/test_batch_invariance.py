"""The result, lse and gradients of a sequence have the same bits, whatever it is computed together with."""

import numpy as np
import pytest
import random_masks
from batch_cases import DEPTHS, HEADS, KINDS, MASKS, MORE, Config, differences, unlike_results
from environment import ISA_LEVELS, SANITIZED
from flash_cases import BF16, FLOATS, all_pairs

import attnmask
from attnmask import MaskInfo, _core

# Some random masks seldom mean what they say.
pytestmark = pytest.mark.filterwarnings("ignore::attnmask.AttnmaskWarning")
AVAILABLE = attnmask.show_config(mode="dict")["isa_available"]
LEVELS = [
    (isa, dtype)
    for isa in ISA_LEVELS
    if isa in AVAILABLE
    for dtype in FLOATS
    if isa != "amx" or dtype == BF16
]
LENGTHS = (0, 1, 12, 16, 20, 64, 65, 300, 1000, 5000)
DECODED = (40, 700, 1000, 1500, 2000, 3000)


def of_self(*lengths: int) -> tuple[tuple[int, int], ...]:
    return tuple((length, length) for length in lengths)


GROUPS = (  # numbers of queries and keys of the sequences of a configuration
    of_self(0, 1, 12, 16, 20, 64, 65, 300),
    of_self(16, 12, 16, 20, 64),
    of_self(1000, 64, 12, 1),
    of_self(5000, 16, 300),
    of_self(1500, 1000),
    of_self(300, 20, 0, 300, 65),
    ((17, 40), (16, 700), (64, 2000), (8, 3000)),
    ((1, 40), (3, 700), (4, 1000), (31, 1500), (1, 2000)),
    ((1, 3000), (1, 40), (1, 700), (1, 1500)),
    ((31, 1500), (5, 1500)),
    ((20, 1000), (12, 1500), (28, 2000), (300, 300)),
    ((0, 40), (5, 0), (16, 16), (300, 65)),
)


def one(rng: np.random.Generator, levels):
    return levels[rng.integers(len(levels))]


def drawn(rng: np.random.Generator, seed: int) -> Config:
    """A configuration with a random level of each factor."""
    count, kind = int(rng.integers(1, 8)), int(rng.integers(3))
    lengths = one(rng, GROUPS)
    if kind == 1:
        lengths = of_self(*rng.choice(LENGTHS, count).tolist())
    elif kind == 2:
        lengths = tuple((int(rng.integers(1, 65)), one(rng, DECODED)) for _ in range(count))
    more = {name: value for options in MORE if rng.random() < 0.2 for name, value in options.items()}
    (isa, dtype), mask = one(rng, LEVELS), one(rng, tuple(MASKS))
    return Config(lengths, isa, dtype, one(rng, HEADS), one(rng, DEPTHS), mask, tuple(more.items()), seed)


def always_run() -> list[Config]:
    """Configurations in which any two levels of any two factors occur together, and some random ones."""
    factors = {
        "level": tuple(LEVELS), "lengths": GROUPS, "heads": HEADS, "depths": DEPTHS, "mask": tuple(MASKS), "more": MORE,
    }  # fmt: skip
    configs = []
    for seed, row in enumerate(all_pairs(factors, 0)):
        (isa, dtype), more = row.pop("level"), row.pop("more")
        configs.append(Config(isa=isa, dtype=dtype, more=tuple(more.items()), seed=seed, **row))
    rng = np.random.default_rng(0)
    configs += [drawn(rng, len(configs) + number) for number in range(100)]
    return [config.within(5e8) for config in configs[:: 8 if SANITIZED else 1]]


@pytest.mark.repeats
@pytest.mark.parametrize("config", always_run(), ids=str)
def test_a_sequence_gets_the_bits_that_it_gets_alone(config):
    kinds = np.random.default_rng(config.seed).choice(len(KINDS), 7, replace=False)
    found = [message for kind in sorted(kinds) for message in differences(config, KINDS[kind])]
    assert not found, "\n".join([f"{len(found)} differ of {config}", *found])


# Any mask: what lies behind its last live pair, and what else is in the call, changes nothing.


def random_call(rng: np.random.Generator, batch: int, queries: int, keys: int) -> tuple[str, int, list, dict]:
    """A level, the number of heads, query, key, value and dout of a random type, and more arguments."""
    (isa, dtype), (heads, kv_heads) = one(rng, LEVELS), one(rng, HEADS)
    depth, value_depth = one(rng, ((16, 16), (64, 64), (33, 24), (128, 128)))
    q, k = (queries, heads), (keys, kv_heads)
    sizes = ((*q, depth), (*k, depth), (*k, value_depth), (*q, value_depth))
    more = (
        {},
        {"normalize_output": False},
        {"softmax_aux": rng.standard_normal((heads, 2))},
        {"logits_soft_cap": 5.0},
        {"alibi_slopes": rng.random(heads)},
        {"causal": True, "causal_offset": 0},
        {"sliding_window": (20, 9)},
    )
    return isa, heads, [rng.standard_normal((batch, *size)).astype(dtype) for size in sizes], one(rng, more)


def computed(isa: str, query, key, value, dout, **arguments) -> dict[str, np.ndarray]:
    previous = _core.use_isa(isa)
    try:
        (out, lse), vjp = attnmask.flash_attention_vjp(query, key, value, return_lse=True, **arguments)
        grads = vjp(dout)
    finally:
        _core.use_isa(previous)
    return {"out": out, "lse": lse, "dq": grads.query, "dk": grads.key, "dv": grads.value}


def part_of(results: dict[str, np.ndarray], row: slice, queries: slice, keys: slice) -> dict[str, np.ndarray]:
    """The results of some tokens of a batch row."""
    part = {name: results[name][row, queries] for name in ("out", "dq")}
    part |= {name: results[name][row, keys] for name in ("dk", "dv")}
    return part | {"lse": results["lse"][row, :, queries]}


def check_row_of_random_mask(kind: str, rng: np.random.Generator) -> None:
    """Compares a batch row with the same row cut behind its last live pair, or somewhere behind that."""
    batch, queries, keys = int(rng.integers(1, 4)), *rng.choice(random_masks.LENGTHS, 2).tolist()
    isa, heads, arrays, more = random_call(rng, batch, queries, keys)
    shape, row = (batch, heads, queries, keys), int(rng.integers(batch))
    mask = random_masks.with_terms(rng, random_masks.KINDS[kind](rng, shape), shape)
    array = np.broadcast_to(np.asarray(mask.attention_mask), shape)
    as_array, (q_end, k_end) = rng.random() < 0.3, random_masks.ends(mask, row)
    ends = (q_end, k_end, k_end, q_end)
    for x, end in zip(arrays, ends, strict=True):
        x[row, end:] *= np.nan if rng.random() < 0.2 else 1
    cuts = slice(one(rng, (q_end, rng.integers(q_end, queries + 1)))), slice(rng.integers(k_end, keys + 1))
    place = (slice(row, row + 1), *cuts)
    own = [x[place[0], cuts[side]] for x, side in zip(arrays, (0, 1, 1, 0), strict=True)]
    whole = computed(isa, *arrays, attention_mask=array if as_array else mask, **more)
    alone = computed(isa, *own, attention_mask=(array if as_array else mask)[place[0], :, *cuts], **more)
    unlike = unlike_results(part_of(whole, *place), alone)
    told = "an array" if as_array else mask
    assert not unlike, f"{place} of {shape}, live up to {q_end} × {k_end}, {isa}, {more}, {told}: {unlike}"


@pytest.mark.parametrize("kind", random_masks.KINDS)
def test_what_is_behind_the_last_live_pair_changes_nothing(kind):
    for seed in range(5 if SANITIZED else 40):
        check_row_of_random_mask(kind, np.random.default_rng((seed, len(kind))))


def packed_ids(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Ids within a sequence: in runs or in disorder, with padding before, between or behind them."""
    ids = rng.integers(0, rng.choice([1, 2, 3, 10]), tokens)
    if rng.random() < 0.5:
        ids.sort()
    ids[: rng.choice([0, 0, 1, 10])] = -1
    ids[rng.random(tokens) < rng.choice([0, 0.2])] = -1
    ids[tokens - rng.choice([0, 0, 1, 10]) :] = -1
    return ids[None]


@pytest.mark.parametrize("seed", range(5 if SANITIZED else 60))
def test_ids_within_packed_sequences(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.choice(random_masks.LENGTHS, (4, 1)).repeat(2, axis=1)
    lengths[:, 1] = np.where(rng.random(4) < 0.6, lengths[:, 1], rng.choice(random_masks.LENGTHS, 4))
    starts = np.cumsum([(0, 0), *lengths], axis=0)
    ids = [[packed_ids(rng, tokens) for tokens in pair] for pair in lengths]
    isa, _, arrays, more = random_call(rng, 1, *starts[-1])
    q_ids, k_ids = (np.concatenate(side, axis=1) for side in zip(*ids, strict=True))
    more |= {"causal_offset": int(rng.choice([0, 0, -20, 20]))}
    given = {"q_segment_ids": q_ids, "kv_segment_ids": k_ids}
    given |= {"cum_seqlens_q": starts[:, 0], "cum_seqlens_k": starts[:, 1]}
    packed = computed(isa, *arrays, **given, **more)
    for begin, end, (q_own, k_own) in zip(starts[:-1], starts[1:], ids, strict=True):
        tokens = [slice(*side) for side in zip(begin, end, strict=True)]
        own = [x[:, tokens[side]] for x, side in zip(arrays, (0, 1, 1, 0), strict=True)]
        alone = computed(isa, *own, q_segment_ids=q_own, kv_segment_ids=k_own, **more)
        unlike = unlike_results(part_of(packed, slice(None), *tokens), alone)
        assert not unlike, f"{tokens} of {lengths.tolist()}, {isa}, {more}: {unlike}"


def in_order(
    order: np.ndarray, parts: list[np.ndarray], padding: list[int]
) -> tuple[np.ndarray, dict[int, slice]]:
    """Ids one behind the other in an order, each behind some padding, and where each lies."""
    ids, places, end = [], {}, 0
    for i in order.tolist():
        ids += [np.full((1, padding[i]), -1), parts[i]]
        places[i] = slice(end + padding[i], end + padding[i] + parts[i].shape[1])
        end = places[i].stop
    return np.concatenate(ids, axis=1), places


@pytest.mark.parametrize("seed", range(10 if SANITIZED else 120))
def test_keys_of_sequences_in_another_order(seed):
    """Sequences told by ids, whose queries lie in one order and whose keys in another; some have only one side."""
    rng = np.random.default_rng(seed)
    count, rows = int(rng.integers(1, 7)), int(rng.integers(1, 3))
    lengths = rng.choice((0, 1, 5, 16, 20, 64, 65, 100, 200), (2, count))
    runs = rng.random() < 0.5
    more = one(rng, (None, {"causal": True}, {"sliding_window": (20, 9)})) if runs else None
    if runs:
        ids = [[np.full((1, tokens), i) for i, tokens in enumerate(side)] for side in lengths]
    else:
        ids = [[packed_ids(rng, tokens) for tokens in side] for side in lengths]
        ids = [[np.where(own < 0, -1, own + 100 * i) for i, own in enumerate(side)] for side in ids]
    orders = [rng.permutation(count), rng.permutation(count)]
    if rng.random() < 0.3:
        orders[1] = orders[0][::-1]
    padding = [one(rng, ([0] * count, rng.choice((0, 1, 40), count).tolist())) for _ in range(2)]
    (q_ids, q_at), (k_ids, k_at) = (in_order(*side) for side in zip(orders, ids, padding, strict=True))
    if 0 in (q_ids.size, k_ids.size):
        return
    isa, _, arrays, _ = random_call(rng, rows, q_ids.shape[1], k_ids.shape[1])

    def attend(arrays, q_ids, k_ids):
        mask = MaskInfo.from_segments(
            q_ids.repeat(len(arrays[0]), axis=0), k_ids.repeat(len(arrays[0]), axis=0)
        )
        if more:
            mask = mask.apply_causal(within_segments=True)
        if more and "sliding_window" in more:
            mask = mask.apply_sliding_window(more["sliding_window"], within_segments=True)
        return computed(isa, *arrays, attention_mask=mask)

    packed = attend(arrays, q_ids, k_ids)
    for i in range(count):
        tokens, row = (q_at[i], k_at[i]), slice(0, 1)
        own = [x[row, tokens[side]] for x, side in zip(arrays, (0, 1, 1, 0), strict=True)]
        unlike = unlike_results(part_of(packed, row, *tokens), attend(own, ids[0][i], ids[1][i]))
        assert not unlike, f"{i}: {tokens} of {lengths.tolist()}, {orders}, {isa}, {more}: {unlike}"


@pytest.mark.parametrize("seed", range(10 if SANITIZED else 120))
def test_rows_of_a_cache_under_any_mask(seed):
    """Beside longer rows, in a longer cache and under a larger mask."""
    rng = np.random.default_rng(seed)
    batch, queries = int(rng.integers(1, 5)), one(rng, (1, 4, 16, 18, 40, 65))
    lengths = rng.choice((5, 20, 64, 65, 129, 257, 700), batch)
    capacity = int(lengths.max() + rng.integers(20))
    isa, heads, (q, k, v, _), _ = random_call(rng, batch, queries, capacity)
    shape = (batch, heads, queries, capacity)
    kind = one(rng, ("ids in disorder", "ids in disorder", *random_masks.KINDS))
    mask = random_masks.with_terms(rng, random_masks.KINDS[kind](rng, shape), shape)
    options = {"causal": bool(rng.random() < 0.3), "sliding_window": one(rng, (None, (20, 9), (5, 6)))}

    def attend(rows: slice, keys: slice) -> dict[str, np.ndarray]:
        out, lse = attnmask.flash_attention_with_kvcache(
            *(q[rows], k[rows, keys], v[rows, keys]),
            cache_seqlens=lengths[rows],
            attention_mask=mask[rows, :, :, keys],
            return_lse=True,
            **options,
        )
        return {"out": out, "lse": lse}

    previous = _core.use_isa(isa)
    try:
        whole = attend(slice(None), slice(None))
        for row, length in enumerate(lengths):
            own = slice(row, row + 1)
            alone = attend(own, slice(rng.integers(length, capacity + 1)))
            unlike = unlike_results({name: array[own] for name, array in whole.items()}, alone)
            assert not unlike, f"row {row} of {lengths} in {shape}, {isa}, {options}, {mask}: {unlike}"
    finally:
        _core.use_isa(previous)


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(3, 1, 1, 1), (1, 1, 1, 1), (1, 4, 1, 1), (1, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("lengths", [(300, 65, 20), (130, 130, 130), (128, 256), (385,)], ids=str)
@pytest.mark.parametrize("told_by", ["ids", "an array"])
def test_the_gradient_of_a_bias_alters_no_other(dtype, shape, lengths, told_by):
    """Batch rows of other lengths, that end with padding, share the bias or not; 0 stands for all queries."""
    rng = np.random.default_rng(1)
    tokens = sum(lengths) + 15
    ids = np.full((3, tokens), -1, np.int32)
    for row, order in enumerate((lengths, lengths[::-1], lengths[:1])):
        ids[row, : sum(order)] = np.repeat(np.arange(len(order)), order)
    q, k, v, dout = (rng.standard_normal((3, tokens, heads, 24)).astype(dtype) for heads in (4, 2, 2, 4))
    bias = rng.standard_normal([*shape[:2], tokens if shape[2] == 0 else 1, tokens]).astype(dtype)

    limits = {"q_segment_ids": ids, "kv_segment_ids": ids}
    if told_by == "an array":
        limits = {"attention_mask": np.asarray(MaskInfo.from_segments(ids).attention_mask)}

    def gradients(**more):
        return attnmask.flash_attention_vjp(q, k, v, bias=bias, causal=True, **limits, **more)[1](dout)

    plain, more = gradients(), gradients(grad_bias=True)
    assert more.bias.shape == bias.shape
    for name in ("query", "key", "value"):
        assert getattr(plain, name).tobytes() == getattr(more, name).tobytes(), name
