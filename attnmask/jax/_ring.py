"""`ring_attention` for JAX: collectives of a mesh's devices, and each device's own attention in between.

`_sharded.ring` decides at trace time what is computed and sent. As in PyTorch, keys and values go straight from their
owner to the devices whose queries see them. In round d they go from device s to device s + d, and gradients go back.

All devices run one program, yet each has its own rectangles. Two designs were considered:

* Arrays with a row for each device: where sequences begin, offsets, segment ids. A device takes its own row. The
  program has one call per round. But some masks are no arrays (chunks, windows by head, tiles), and do not fit this
  form.
* ``lax.switch`` over the devices, with a branch for each. A branch knows its device, so it supports any mask, and makes
  the same calls as PyTorch. The program has one for each pair of devices where one sees keys of the other.

This is the second design. With 8 devices it has up to 64 calls. With their gradients, these take one second to trace
and three to compile. In a round, every device sends as much as the one that sends most, because the program fixes the
shapes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from attnmask._attention.arguments import DEFAULTS
from attnmask._common.arguments import describe, wide_dtype
from attnmask._common.types import AnyFunction, Given
from attnmask._sharded.ring import (
    BY_HEAD,
    LEARNED_TERMS,
    OPTIONS,
    Call,
    Described,
    Ring,
    check_whole,
    described,
)
from attnmask.jax import _call as engine
from attnmask.jax._arguments import Spec, check, check_known, is_traced, sinks_of, specify
from attnmask.jax._gradients import differentiable
from attnmask.jax._types import AnyArray, ByName, Results

_KNOWN = ("layout", "cu_seqlens", "attention_mask", "q_segment_ids", "kv_segment_ids", *BY_HEAD)


_Pair: TypeAlias = tuple[jax.Array, jax.Array]  # a result and its logsumexp


@dataclass
class _Task(Described):
    """One call of `ring_attention`."""

    axis_name: str | tuple[str, ...]

    def by_rank(self, branches: Sequence[AnyFunction], *operands: Any) -> Any:
        """Return what this device's branch makes of the operands."""
        return jax.lax.switch(jax.lax.axis_index(self.axis_name), branches, *operands)


# Arguments


def attend(learned: ByName, given: Given, with_lse: bool) -> jax.Array | tuple[jax.Array, ...]:
    """Return `out`, and `lse` if wanted. `learned` are the arrays with gradients, `given` the other arguments."""
    task = _task(learned, given)
    wide = wide_dtype(learned["query"].dtype)
    learned = dict(learned)
    if "softmax_aux" in learned:
        sinks = sinks_of(learned["softmax_aux"])
        sinks = sinks.reshape(-1, sinks.shape[-1]).astype(wide)
        learned["softmax_aux"] = jax.numpy.broadcast_to(sinks, (learned["query"].shape[2], sinks.shape[1]))
    if "relative_bias" in learned:
        learned["relative_bias"] = learned["relative_bias"].astype(wide)
    seed = [given["dropout_seed"]] if is_traced(given["dropout_seed"]) else []
    count, dtype = 1 + with_lse, learned["query"].dtype

    def forward(learned: ByName, seed: list[jax.Array], for_gradients: bool) -> Results:
        out, lse = _forward(task, learned, seed)
        results = (out.astype(dtype), lse)[:count]
        return (*results, out, lse) if for_gradients else results

    def backward(
        learned: ByName, seed: list[jax.Array], wanted: tuple[str, ...], kept: Any, of_results: Any
    ) -> list[jax.Array]:
        grads = _backward(task, learned, seed, kept, tuple(x for x in of_results if x is not None))
        return [grads[name] for name in wanted]

    results = differentiable(forward, backward, count)(learned, seed)
    return results if with_lse else results[0]


def _task(learned: ByName, given: Given) -> _Task:
    query, value = learned["query"], learned["value"]
    try:
        world = jax.lax.psum(1, given["axis_name"])
    except NameError as error:
        raise ValueError(
            f"axis_name must be an axis of the mesh of jax.shard_map, got {given['axis_name']!r:.200}"
        ) from error
    for name in ("query", "key", "value"):
        if learned[name].ndim != 4:
            raise ValueError(f"{name} must be [B, T, H, D], got {describe(learned[name])}")
    for name in _KNOWN:
        check_known(given[name], name)
    (batch, tokens, heads, _), length = query.shape, query.shape[1] * world
    if value.shape[1] != tokens:
        raise ValueError(f"value must have {tokens} tokens as query, got {describe(value)}")
    names = (*OPTIONS, "causal", "sliding_window")
    check(DEFAULTS | dict(learned) | {name: given[name] for name in names})
    check_whole(given, batch)
    whole = described(given, (batch, heads, length), world, "relative_bias" in learned)
    lengths = whole.ring.shards.lengths
    if (lengths != tokens).any():
        raise ValueError(
            f"query must have shards of equal length, got {length} tokens divided into {lengths.tolist()}; pad it to a "
            f"multiple of {2 * world} with segment id -1, and pass segment ids instead of cu_seqlens"
        )
    return _Task(**vars(whole), axis_name=given["axis_name"])


# Rounds


class _Round(NamedTuple):
    """A round in which some device has something to compute."""

    distance: int
    places: list[NDArray[np.int64]]  # of each device, the ranges of its tokens that it sends
    longest: int  # how many tokens a message has

    @property
    def prefixes(self) -> bool:
        """Return whether each device sends its first tokens, so that they can be sent as they are."""
        return all(len(ranges) == 0 or (len(ranges) == 1 and ranges[0, 0] == 0) for ranges in self.places)


def _rounds(ring: Ring) -> list[_Round]:
    rounds = []
    for distance in range(ring.shards.world):
        pairs = [(rank, (rank - distance) % ring.shards.world) for rank in range(ring.shards.world)]
        if not any(len(ring.rectangles(*pair)) for pair in pairs):
            continue
        places = {source: ring.sent_places(rank, source) for rank, source in pairs}
        count = max(int((ranges[:, 1] - ranges[:, 0]).sum()) for ranges in places.values())
        rounds.append(_Round(distance, [places[rank] for rank in range(ring.shards.world)], count))
    return rounds


def _moved(task: _Task, round: _Round, x: jax.Array, back: bool = False) -> jax.Array:
    """Send from each device to the one that needs it, or back."""
    pairs = [
        (source, (source + round.distance) % task.world)
        for source in range(task.world)
        if len(round.places[source])
    ]
    return jax.lax.ppermute(x, task.axis_name, [pair[::-1] for pair in pairs] if back else pairs)


def _sent(task: _Task, round: _Round, x: jax.Array, never: jax.Array | bool) -> jax.Array:
    """Return the tokens this device needs in a round, followed by meaningless ones."""
    if round.distance == 0:
        return x

    def take(ranges: NDArray[np.int64], x: jax.Array) -> jax.Array:
        parts = [x[:, begin:end] for begin, end in ranges.tolist()]
        missing = round.longest - int((ranges[:, 1] - ranges[:, 0]).sum())
        return jax.numpy.concatenate([*parts, jax.numpy.zeros_like(x[:, :missing])], axis=1)

    if round.prefixes:
        taken = x[:, : round.longest]
    else:
        taken = task.by_rank([partial(take, ranges) for ranges in round.places], x)
    return _moved(task, round, jax.numpy.where(never, 0, taken))


def _added(round: _Round, rank: int, totals: ByName, arrived: ByName) -> ByName:
    """Add to `totals`, of a device's tokens, what has come back for those it sent in a round."""
    if round.distance == 0:
        return {name: total + arrived[name] for name, total in totals.items()}
    totals, before = dict(totals), 0
    for begin, end in round.places[rank].tolist():
        for name, total in totals.items():
            totals[name] = total.at[:, begin:end].add(arrived[name][:, before : before + end - begin])
        before += end - begin
    return totals


class _Travel:
    """Rounds with their keys and values. Only the next round travels meanwhile: more would take memory."""

    def __init__(self, task: _Task, own: ByName) -> None:
        self.task, self.own = task, own
        self.never: jax.Array | bool = False  # which is known once a round is computed

    def __iter__(self) -> Iterator[tuple[_Round, ByName]]:
        rounds = _rounds(self.task.ring)
        keys = [self._sent(round) for round in rounds[:1]]
        for round, coming in zip_longest(rounds, rounds[1:]):
            keys += [] if coming is None else [self._sent(coming)]
            yield round, keys.pop(0)

    def _sent(self, round: _Round) -> ByName:
        return {name: _sent(self.task, round, x, self.never) for name, x in self.own.items()}

    def after(self, results: Any) -> Any:
        """Return the results of a round, and make what is sent later wait for them. XLA would send everything at once
        and ignores its own barriers here, so later messages depend on a number of the results.
        """
        one = jax.tree.leaves(results)[0]
        self.never = one[(0,) * one.ndim] > np.inf
        return results


# Calls


def _calls(task: _Task, rank: int, round: _Round) -> tuple[list[Call], int]:
    """Return the calls of a device in a round, and the number of keys."""
    source = (rank - round.distance) % task.world
    ranges = task.ring.shards.ranges(rank) if rank == source else task.ring.sent(rank, source)
    calls = task.ring.calls(rank, source, 1 if task.ring.conditions.one_by_one else task.batch)
    return calls, int((ranges[:, 1] - ranges[:, 0]).sum())


def _problem(
    task: _Task, call: Call, arrays: ByName, seed: list[jax.Array]
) -> tuple[Spec, ByName, list[AnyArray]]:
    """Return the arguments of `engine.forward`, for arrays whose batch rows lie as in the call."""
    learned = {
        name: x[:, call.queries if name == "query" else call.keys] if x.ndim == 4 else x
        for name, x in arrays.items()
    }
    arguments = DEFAULTS | task.options | call.arguments | learned
    arguments |= {name: numbers[call.rows] for name, numbers in task.by_row.items()}
    if seed:
        arguments["dropout_seed"] = seed[0]
    problem, _ = check(arguments)
    spec, others = specify(arguments, problem)
    return spec._replace(part=call.place or (0, 0)), learned, others


def _merge(one: _Pair, other: _Pair) -> _Pair:
    """Merge results and logsumexps of attention over different keys."""
    lse = jax.numpy.logaddexp(one[1], other[1])
    out: Any = sum(
        x * jax.numpy.where(part == -np.inf, 0.0, jax.numpy.exp(part - lse)).swapaxes(1, 2)[..., None]
        for x, part in (one, other)
    )
    return out, lse


def _forward(task: _Task, learned: ByName, seed: list[jax.Array]) -> _Pair:
    """Return [B, T, H, Dv] in the query's type, and [B, H, T]."""
    sinks, table = map(learned.get, LEARNED_TERMS)
    query, value = task.in_row(learned["query"]), learned["value"]
    rows, tokens, heads, _ = query.shape
    wide = wide_dtype(query.dtype)
    lse = jax.numpy.full((rows, heads, tokens), -np.inf, wide)
    if sinks is not None:
        lse = jax.numpy.broadcast_to(jax.scipy.special.logsumexp(sinks, axis=1)[:, None], lse.shape)
    out = jax.numpy.zeros((rows, tokens, heads, value.shape[3]), wide)

    def compute(
        rank: int,
        round: _Round,
        results: _Pair,
        query: jax.Array,
        keys: ByName,
        table: ByName,
        seed: list[jax.Array],
    ) -> _Pair:
        calls, count = _calls(task, rank, round)
        arrays = {"query": query} | {name: task.in_row(x[:, :count]) for name, x in keys.items()} | table
        for call in calls:
            spec, part, others = _problem(task, call, arrays, seed)
            found = engine.forward(spec, part, others, 2)
            out, lse = results
            here = call.queries
            merged = _merge((out[:, here], lse[:, :, here]), (found[0], found[1]))
            results = out.at[:, here].set(merged[0]), lse.at[:, :, here].set(merged[1])
        return results

    results = tuple(engine.alike([out, lse, query])[:2])
    own = {name: learned[name] for name in ("key", "value")}
    tables = {} if table is None else {"relative_bias": table}
    travel = _Travel(task, own)
    for round, keys in travel:
        branches = [partial(compute, rank, round) for rank in range(task.world)]
        results = travel.after(task.by_rank(branches, results, query, keys, tables, seed))
    out, lse = results
    shape = (*learned["query"].shape[:3], value.shape[3])
    return out.reshape(shape), task.stats(lse)


def _backward(
    task: _Task, learned: ByName, seed: list[jax.Array], results: _Pair, given: tuple[jax.Array, ...]
) -> ByName:
    """Return the gradients of all learned arrays, from those of the results that are `given`."""
    table = learned.get("relative_bias")
    query = task.in_row(learned["query"])
    own = {name: learned[name] for name in ("key", "value")}
    wide = wide_dtype(query.dtype)
    of_rows = [task.in_row(given[0]), task.in_row(results[0])]
    stats = [task.stats_in_row(x) for x in (results[1], *given[1:])]
    tables = {} if table is None else {"relative_bias": table}
    wanted = ("query", "key", "value", *tables)

    def compute(
        rank: int, round: _Round, last: _Round | None, d_query: jax.Array, d_own: ByName, d_tables: ByName,
        arrived: ByName, query: jax.Array, keys: ByName, tables: ByName, seed: list[jax.Array],
        of_rows: list[jax.Array], stats: list[jax.Array],
    ) -> tuple[jax.Array, ByName, ByName, ByName]:  # fmt: skip
        # Here, as XLA would add them all up at the end.
        d_own = d_own if last is None else _added(last, rank, d_own, arrived)
        calls, count = _calls(task, rank, round)
        rows = {name: task.in_row(x[:, :count]) for name, x in keys.items()}
        d_rows = {name: jax.numpy.zeros_like(x, wide) for name, x in rows.items()}
        for call in calls:
            spec, part, others = _problem(task, call, {"query": query} | rows | tables, seed)
            here = call.queries
            of_result = [x[:, here] for x in of_rows] + [x[:, :, here] for x in stats]
            found = engine.backward(spec, part, others, wanted, of_result)
            grads = dict(zip(wanted, found, strict=True))
            d_query = d_query.at[:, here].add(grads["query"])
            d_rows = {name: x.at[:, call.keys].add(grads[name]) for name, x in d_rows.items()}
            d_tables = {name: x + grads[name] for name, x in d_tables.items()}
        d_keys = {}
        for name, x in keys.items():
            whole = jax.numpy.zeros_like(x, wide)
            d_keys[name] = whole.at[:, :count].set(d_rows[name].reshape(whole[:, :count].shape))
        return d_query, d_own, d_tables, d_keys

    d_query, d_own, d_tables = jax.tree.map(lambda x: jax.numpy.zeros_like(x, wide), (query, own, tables))
    travel = _Travel(task, own)
    last: _Round | None = None
    arrived: ByName = {}
    for round, keys in travel:
        branches = [partial(compute, rank, round, last) for rank in range(task.world)]
        operands = arrived, query, keys, tables, seed, of_rows, stats
        d_query, d_own, d_tables, d_keys = travel.after(
            task.by_rank(branches, d_query, d_own, d_tables, *operands)
        )
        last, arrived = round, d_keys
        if round.distance:
            arrived = {name: _moved(task, round, x, back=True) for name, x in d_keys.items()}
    if last is not None:
        d_own = task.by_rank([partial(_added, last, rank) for rank in range(task.world)], d_own, arrived)
    grads = {"query": d_query.reshape(learned["query"].shape)} | d_own | d_tables
    if "softmax_aux" in learned:
        grads["softmax_aux"] = _d_sinks(learned["softmax_aux"], results, given)
    return {name: grad.astype(learned[name].dtype) for name, grad in grads.items()}


def _d_sinks(sinks: jax.Array, results: _Pair, given: tuple[jax.Array, ...]) -> jax.Array:
    """Return the sinks' gradient [H, S]: a sink's weight adds nothing to the result but reduces all other weights."""
    out, lse = results
    lost = -(given[0].astype(lse.dtype) * out).sum(axis=-1).swapaxes(1, 2)  # [B, H, T]
    if len(given) > 1:
        lost = lost + given[1]
    weights = jax.numpy.exp(sinks[:, None] - lse[..., None])  # [B, H, T, S]
    live = (sinks[:, None] != -np.inf) & (lse[..., None] != -np.inf)
    return jax.numpy.where(live, lost[..., None] * weights, 0.0).sum(axis=(0, 2))
