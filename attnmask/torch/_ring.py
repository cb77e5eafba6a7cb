"""`ring_attention` for PyTorch: messages of a process group, and each process's own attention in between.

`_sharded.ring` decides what is computed and sent. A call begins with one small all-to-all message, which tells the
processes how long the sequence is and whether their arguments are valid and agree; otherwise all raise an error. If one
process breaks later, gloo raises an error in the others, at the latest after the timeout of the group.
"""

import itertools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from attnmask._attention.arguments import DEFAULTS
from attnmask._attention.backward import like_argument
from attnmask._attention.problem import Problem, read_problem
from attnmask._attention.terms import Sizes, numbers_of, terms_of
from attnmask._common.arguments import as_array, describe, flag, is_floating, is_number
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Given
from attnmask._masks.info import MaskInfo
from attnmask._sharded.plan import ShardPlan
from attnmask._sharded.ring import (
    BY_HEAD,
    KEYWORDS,
    LEARNED_TERMS,
    OPTIONS,
    Call,
    Described,
    RingArguments,
    arguments_of,
    check_whole,
    described,
)
from attnmask.torch import _operators as operators
from attnmask.torch._import import torch
from attnmask.torch._states import to_tensor
from attnmask.torch._types import Context, MaybeTensor

if torch.distributed.is_available() and not torch.distributed.is_initialized():
    # Otherwise the first optimizer imports it. Its functions have the default group as a default argument: one that is
    # there already would be kept for ever. Its threads would go on while Python ends, and at times abort the process.
    import_module("torch.distributed.nn.functional")


_Group: TypeAlias = "torch.distributed.ProcessGroup | None"


@dataclass
class _Task(Described):
    """One call of `ring_attention` in this process."""

    group: _Group
    rank: int

    def calls(self, step: "_Step", heads: int) -> Iterator[Call]:
        """Return the calls with a step's keys, of `heads` heads; with others' keys, of few queries each."""
        if step.source == self.rank:
            yield from self.ring.calls(self.rank, step.source, self.batch)
            return
        most = _QUERIES * heads // max(1, step.keys.shape[1])
        for call in self.ring.calls(self.rank, step.source, self.batch, step.keys.tokens):
            yield from call.in_blocks(most)


# The beginning of a call

_ARRAYS = ("cu_seqlens", "q_segment_ids", "kv_segment_ids", *BY_HEAD)


def _digest(given: Given) -> int:
    """Return a number for the arguments that must agree in all processes, as far as they can be compared quickly."""
    said: list[object] = []
    for name, value in sorted(given.items()):
        if isinstance(value, MaskInfo):
            said.append((name, value.shape, value.heads))
        elif isinstance(value, ShardPlan):
            said.append((name, value.world, value.starts.tobytes(), value.owners.tobytes()))
        elif name in _ARRAYS and value is not None:
            array = as_array(value, name)
            wide = np.float64 if is_floating(array.dtype) else np.int64
            numbers = array.astype(wide).tobytes() if is_number(array.dtype) else repr(value)
            said.append((name, array.shape, numbers))
        else:
            said.append((name, repr(value)))
    return zlib.crc32(repr(said).encode())


_NUMBERS = 9  # tokens, a seed, batch rows, heads, channels, heads of keys, channels of values, type, digest
_TYPES = {dtype: number for number, dtype in enumerate(operators.TYPES)}


def _agreed(group: _Group, numbers: list[int] | None) -> tuple[list[int], int]:
    """Return how many tokens each process has, and the seed of the first, if all have the same `numbers` except for
    these two, with which they begin; None if the arguments of this process are refused.
    """
    rank = torch.distributed.get_rank(group)
    mine = torch.tensor([0] * (1 + _NUMBERS) if numbers is None else [1, *numbers])
    all_of_them = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(all_of_them, mine, group=group)
    if numbers is None:
        return [], 0
    rows = [of_one.tolist() for of_one in all_of_them]
    for other, row in enumerate(rows):
        if not row[0]:
            raise RuntimeError(
                f"ring_attention was refused in process {other} of the group; see the error there"
            )
    for other, row in enumerate(rows):
        if row[3:] != rows[rank][3:]:
            raise ValueError(
                f"all arguments must be alike in all processes, but process {other} of the group has other shapes, "
                f"types or arguments than process {rank}"
            )
    return [row[1] for row in rows], rows[0][2]


def _check(tensors: Arguments, given: Given) -> None:
    """Refuse what `attnmask.flash_attention` refuses, for arguments that do not depend on the whole sequence.
    Afterwards `tensors` holds tensors, in the types used for computing.
    """
    for name in ("query", "key", "value"):
        operators.check_tensor(tensors[name], name)
        if tensors[name].ndim != 4:
            raise ValueError(f"{name} must be [B, T, H, D], got {describe(tensors[name])}")
        if torch.is_autocast_enabled("cpu"):
            tensors[name] = operators.autocast(tensors[name])
    for name in LEARNED_TERMS:
        if tensors[name] is not None and not isinstance(tensors[name], torch.Tensor):
            tensors[name] = to_tensor(as_array(tensors[name], name).copy())
    query, key = tensors["query"], tensors["key"]
    if key.shape[1] != query.shape[1]:
        raise ValueError(f"key must have {query.shape[1]} tokens as query, got {describe(key)}")
    names = (*OPTIONS, "causal", "sliding_window")
    arguments = {name: operators.detached(x) for name, x in tensors.items()}
    read_problem(DEFAULTS | arguments | {name: given[name] for name in names})
    check_whole(given, query.shape[0])


def _task(tensors: Arguments, given: Arguments, group: _Group) -> _Task:
    """Return the call with these arguments, once all processes know each other's."""
    world, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    given, said = (
        given | {"dropout_seed": operators.seed_of(given["dropout_prob"], given["dropout_seed"])},
        given,
    )
    drawn = given["dropout_seed"] is not said["dropout_seed"]
    try:
        _check(tensors, given)
        query = tensors["query"]
        shapes = [*query.shape[0:1], *query.shape[2:], *tensors["value"].shape[2:]]
        seed = given["dropout_seed"] if drawn else 0
        numbers = [query.shape[1], seed, *shapes, _TYPES[query.dtype], _digest(said)]
    except BaseException:
        _agreed(group, None)
        raise
    lengths, seed = _agreed(group, numbers)
    given |= {"dropout_seed": seed} if drawn else {}
    length, batch, heads = sum(lengths), query.shape[0], query.shape[2]
    relative = tensors["relative_bias"] is not None
    task = _Task(**vars(described(given, (batch, heads, length), world, relative)), group=group, rank=rank)
    expected = task.ring.shards.lengths.tolist()
    if expected != lengths:
        raise ValueError(
            f"query must have the tokens of shard_sequence, {expected} in the processes of the group, got {lengths}"
        )
    return task


# Messages


class _Messages:
    """Messages in flight. Tensors that are sent must not change until they are `finished`."""

    def __init__(self, group: _Group) -> None:
        self.group = group
        self.incoming: list[Any] = []
        self.outgoing: list[tuple[Any, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        work = torch.distributed.isend(tensor, group=self.group, group_dst=peer, tag=tag)
        self.outgoing.append((work, tensor))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> torch.Tensor:
        """Return `tensor`, which is filled once `arrived` has returned."""
        self.incoming.append(torch.distributed.irecv(tensor, group=self.group, group_src=peer, tag=tag))
        return tensor

    def arrived(self) -> None:
        while self.incoming:
            self.incoming.pop().wait()

    def finished(self) -> None:
        self.arrived()
        while self.outgoing:
            self.outgoing.pop()[0].wait()


class _Part(NamedTuple):
    """Part of the keys that one process sends another."""

    tokens: slice
    heads: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens.stop - self.tokens.start, self.heads.stop - self.heads.start


_NOTHING = _Part(slice(0, 0), slice(0, 0))


class _Step(NamedTuple):
    """Part of a round: what this process computes with, and what it sends meanwhile."""

    source: int  # the process whose keys and values they are
    to: int  # the process that gets those of this one
    keys: _Part
    sent: NDArray[np.int64]  # ranges of tokens of this process
    sent_heads: slice

    @property
    def sent_shape(self) -> tuple[int, int]:
        return _count(self.sent), self.sent_heads.stop - self.sent_heads.start


# Parts of a round, forward and backward. With half as many a process takes a tenth more memory.
_PARTS = 8, 16
_KEYS = 256  # of a part with all heads, at least
# With all heads, of a call with the keys of others: results take memory until they are added up.
_QUERIES = 2048


def _steps(task: _Task, key: torch.Tensor, parts: int) -> list[_Step]:
    """Return the steps of a call, at most `parts` per round. Each step sends a part as large as the one it computes
    with, so that all processes take about the same time and none waits for messages.
    """
    tokens, heads = key.shape[1:3]
    everything = _Part(slice(0, tokens), slice(0, heads))
    steps = [_Step(task.rank, task.rank, everything, np.zeros((0, 2), np.int64), _NOTHING.heads)]
    # Which entries are dropped depends on the index of the head.
    groups = 1 if task.options["dropout_prob"] else heads
    for distance in range(1, task.world):
        to, source = (task.rank + distance) % task.world, (task.rank - distance) % task.world
        places = task.ring.sent_places(to, task.rank)
        counts = _count(task.ring.sent(task.rank, source)), _count(places)
        both = (_parts(count, heads, parts, groups) for count in counts)
        for keys, sent in itertools.zip_longest(*both, fillvalue=_NOTHING):
            steps.append(_Step(source, to, keys, _part_of(places, sent.tokens), sent.heads))
    return steps


def _parts(count: int, heads: int, most: int, most_groups: int) -> list[_Part]:
    """Divide keys and heads into equal parts, with few heads each: kernels take longer with few keys."""
    number = min(most, -(-count // _KEYS))
    groups = min(most_groups, number)
    if groups == 0:
        return []
    cuts = [
        [size * i // pieces for i in range(pieces + 1)]
        for size, pieces in ((heads, groups), (count, number // groups))
    ]
    heads_of, tokens_of = ([slice(*ends) for ends in itertools.pairwise(cut)] for cut in cuts)
    return [_Part(tokens, of_part) for of_part in heads_of for tokens in tokens_of]


def _part_of(ranges: NDArray[np.int64], part: slice) -> NDArray[np.int64]:
    """Select some tokens, counted over the tokens of all ranges."""
    lengths = ranges[:, 1] - ranges[:, 0]
    before = (np.cumsum(lengths) - lengths)[:, None]
    parts: NDArray[np.int64] = (
        np.clip(ranges - ranges[:, :1] + before, part.start, part.stop) - before + ranges[:, :1]
    )
    return parts[parts[:, 0] < parts[:, 1]]


def _travel(
    task: _Task, steps: list[_Step], own: list[torch.Tensor]
) -> Iterator[tuple[_Step, list[torch.Tensor]]]:
    """Each step with its keys and values, or none. What comes next, up to the next that there is, travels meanwhile.
    What was sent before is let go first: parts of the heads are copies.
    """
    largest = max((math.prod(step.keys.shape) for step in steps[1:]), default=0)
    memory = itertools.cycle([[_Buffer(x, x.dtype, largest) for x in own] for _ in range(2)])
    on_the_way: list[tuple[list[torch.Tensor], _Messages]] = [(own, _Messages(task.group))]
    for index, step in enumerate(steps):
        on_the_way[index][1].finished()
        while len(on_the_way) < len(steps) and not any(tensors for tensors, _ in on_the_way[index + 1 :]):
            on_the_way.append(_exchange(task, steps[len(on_the_way)], own, memory))
        yield step, on_the_way[index][0]


def _exchange(
    task: _Task, step: _Step, own: list[torch.Tensor], memory: "Iterator[list[_Buffer]]"
) -> tuple[list[torch.Tensor], _Messages]:
    """Start sending and receiving the keys and values of a step."""
    messages = _Messages(task.group)
    received: list[torch.Tensor] = []
    if step.keys != _NOTHING:
        received = [buffer.of(*step.keys.shape) for buffer in next(memory)]
    for tag, tensor in enumerate(received):
        messages.receive(tensor, step.source, tag)
    if len(step.sent):
        for tag, x in enumerate(own):
            messages.send(_taken(x[:, :, step.sent_heads], step.sent), step.to, tag)
    return received, messages


class _Buffer:
    """Memory of messages that come one after the other, like a tensor but for their tokens and heads, of which
    there are at most so many pairs.
    """

    def __init__(self, like: torch.Tensor, dtype: torch.dtype, largest: int) -> None:
        self.batch, self.channels = like.shape[0], like.shape[3]
        self.memory = torch.empty(self.batch * largest * self.channels, dtype=dtype)

    def of(self, tokens: int, heads: int) -> torch.Tensor:
        shape = self.batch, tokens, heads, self.channels
        return self.memory[: math.prod(shape)].view(shape)


def _count(ranges: NDArray[np.int64]) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _taken(tensor: torch.Tensor, ranges: NDArray[np.int64]) -> torch.Tensor:
    """Return the tokens of these ranges in one piece of memory."""
    parts = [tensor[:, begin:end] for begin, end in ranges.tolist()]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)


# One process


def _problem(
    task: _Task, call: Call, heads: slice, query: torch.Tensor, keys: list[torch.Tensor], table: MaybeTensor
) -> Problem:
    """Return a call for the core, with some query heads, and tensors whose batch rows lie as in the call."""
    key, value = (x[:, call.keys] for x in keys)
    arguments = (
        task.options | call.arguments | {"query": query[:, call.queries, heads], "key": key, "value": value}
    )
    arguments |= {name: numbers[call.rows] for name, numbers in task.by_row.items()}
    arguments |= {name: arguments[name][:, heads] for name in BY_HEAD if name in arguments}
    if table is not None:
        arguments["relative_bias"] = table[heads]
    mask = arguments.get("attention_mask")
    if mask is not None and mask._state.shape("attend by it")[1] > 1:
        arguments["attention_mask"] = mask[:, heads, ...]
    problem, _ = read_problem(DEFAULTS | arguments)
    return problem._replace(part=call.place or (0, 0))


class _Merged:
    """Attention over parts of the keys, merged as they come. It begins with the sinks, which have no value; or is the
    first part.
    """

    def __init__(self, query: torch.Tensor, channels: int, sinks: "torch.Tensor | None") -> None:
        self.shape, self.dtype, self.sinks = (
            (*query.shape[:3], channels),
            operators.wide_dtype(query.dtype),
            sinks,
        )
        self.results: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, queries: slice, heads: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        first = self.results is None and self.sinks is None
        if first and out.shape == self.shape and out.dtype == self.dtype:
            self.results = out, lse
            return
        total, total_lse = self.total()
        old = total_lse[:, heads, queries]
        both = torch.logaddexp(old, lse)
        kept, added = (
            torch.where(x == -math.inf, 0.0, torch.exp(x - both)).transpose(1, 2)[..., None]
            for x in (old, lse)
        )
        total[:, queries, heads].mul_(kept).addcmul_(out, added)
        old.copy_(both)

    def total(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.results is None:
            batch, tokens, heads, _ = self.shape
            lse = torch.full((batch, heads, tokens), -math.inf, dtype=self.dtype)
            if self.sinks is not None:
                lse[:] = torch.logsumexp(self.sinks, dim=1)[:, None]
            self.results = torch.zeros(self.shape, dtype=self.dtype), lse
        return self.results


class _Sum:
    """A sum of tensors, each for some of the tokens and heads. The first may become the sum without a copy."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self.tensor: torch.Tensor | None = None

    def add(self, tokens: slice, heads: slice, part: torch.Tensor) -> None:
        if self.tensor is None and part.shape == self.like.shape:
            self.tensor = part
        else:
            self.total()[:, tokens, heads] += part

    def total(self) -> torch.Tensor:
        if self.tensor is None:
            self.tensor = torch.zeros_like(self.like, dtype=operators.wide_dtype(self.like.dtype))
        return self.tensor


def _forward(
    task: _Task, given: list[torch.Tensor], sinks: "torch.Tensor | None", table: "torch.Tensor | None"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` in the type of the arithmetic, and `lse`."""
    query, *own = given
    row = task.in_row(query)
    merged = _Merged(row, own[1].shape[3], sinks)
    for step, tensors in _travel(task, _steps(task, own[0], _PARTS[0]), own):
        keys, heads = [task.in_row(x) for x in tensors], _of_queries(step.keys.heads, query, own[0])
        for call in task.calls(step, own[0].shape[2]):
            out, lse = _core.flash_forward(_problem(task, call, heads, row, keys, table), True, None)
            merged.add(call.queries, heads, to_tensor(out), to_tensor(lse))  # type: ignore[arg-type]
    total, sums = merged.total()
    return total.view(*query.shape[:3], own[1].shape[3]), task.stats(sums).contiguous()


def _backward(
    task: _Task,
    given: list[torch.Tensor],
    table: "torch.Tensor | None",
    results: tuple[torch.Tensor, torch.Tensor],
    gradients: "tuple[torch.Tensor, torch.Tensor | None]",
    table_wanted: bool,
) -> tuple[list[torch.Tensor], NDArray[np.float64] | None]:
    """Return the gradients of query, key and value, and this process's part of the table's if wanted."""
    query, *own = given
    row = task.in_row(query)
    of_row = [task.in_row(x) for x in (gradients[0], results[0])]
    stats = [None if x is None else task.stats_in_row(x) for x in (results[1], gradients[1])]
    d_query, d_own = _Sum(row), [_Sum(x) for x in own]
    d_table = np.zeros(table.shape) if table is not None and table_wanted else None
    steps = _steps(task, own[0], _PARTS[1])
    returning = _Returning(task, d_own, steps)
    for step, tensors in _travel(task, steps, own):
        keys, heads = [task.in_row(x) for x in tensors], _of_queries(step.keys.heads, query, own[0])
        d_keys = [_Sum(x) for x in keys]
        for call in task.calls(step, own[0].shape[2]):
            queries = call.queries
            dout, out = (as_array(x[:, queries, heads], "out") for x in of_row)
            lse, dlse = (None if x is None else as_array(x[:, heads, queries], "lse") for x in stats)
            problem = _problem(task, call, heads, row, keys, table)
            names = ("relative_bias",) if d_table is not None else ()
            *grads, of_terms = _core.flash_backward(problem, dout, out, lse, dlse, names)  # type: ignore[arg-type]
            d_query.add(queries, heads, to_tensor(grads[0]))
            for d_key, grad in zip(d_keys, grads[1:], strict=True):
                d_key.add(call.keys, slice(None), to_tensor(grad))
            if d_table is not None:
                d_table[heads] += of_terms["relative_bias"][0, :, 0]
        returning.next(step, [d_key.total().view(x.shape) for d_key, x in zip(d_keys, tensors, strict=True)])
    returning.finish()
    return [d_query.total().view(query.shape), *(x.total() for x in d_own)], d_table


def _of_queries(heads: slice, query: torch.Tensor, key: torch.Tensor) -> slice:
    """Return the query heads that share these key heads."""
    group = query.shape[2] // max(1, key.shape[2])
    return slice(group * heads.start, group * heads.stop)


class _Returning:
    """Gradients of keys and values on their way to the process that has them, and those of this one added up."""

    def __init__(self, task: _Task, totals: list[_Sum], steps: list[_Step]) -> None:
        self.task, self.totals = task, totals
        largest = max(math.prod(step.sent_shape) for step in steps)
        self.memory = [
            _Buffer(total.like, operators.wide_dtype(total.like.dtype), largest) for total in totals
        ]
        self.messages = _Messages(task.group)
        self.arriving: list[torch.Tensor] = []
        self.of = steps[0]  # the step whose gradients arrive

    def next(self, step: _Step, gradients: list[torch.Tensor]) -> None:
        """Those of one round; meanwhile those of the round before have come."""
        self.finish()
        if step.source == self.task.rank:
            for total, gradient in zip(self.totals, gradients, strict=True):
                total.add(*step.keys, gradient)
            return
        self.messages = _Messages(self.task.group)
        for tag, gradient in enumerate(gradients, len(self.totals)):
            self.messages.send(gradient, step.source, tag)
        self.of = step
        if len(step.sent):
            for tag, buffer in enumerate(self.memory, len(self.totals)):
                tensor = buffer.of(*step.sent_shape)
                self.arriving.append(self.messages.receive(tensor, step.to, tag))

    def finish(self) -> None:
        self.messages.finished()
        for total, part in zip(self.totals, self.arriving, strict=False):
            before = 0
            for begin, end in self.of.sent.tolist():
                total.add(slice(begin, end), self.of.sent_heads, part[:, before : before + end - begin])
                before += end - begin
        self.arriving = []


def _d_sinks(
    sinks: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor],
    gradients: "tuple[torch.Tensor, torch.Tensor | None]",
) -> NDArray[np.float64]:
    """Return the sinks' gradient [H, S]: a sink's weight adds nothing to the result but reduces all other weights."""
    (out, lse), (dout, dlse) = results, gradients
    lost = -(dout.to(lse.dtype) * out).sum(dim=-1).transpose(1, 2)  # [B, H, T]
    if dlse is not None:
        lost = lost + dlse
    grads = torch.zeros(sinks.shape, dtype=torch.float64)
    for i, sink in enumerate(sinks.T):
        live = (sink != -math.inf)[:, None] & (lse != -math.inf)
        weights = torch.where(live, lost * torch.exp(sink[:, None] - lse), 0.0)
        grads[:, i] = weights.sum(dim=(0, 2), dtype=torch.float64)
    of_heads: NDArray[np.float64] = grads.numpy()
    return of_heads


# The function


class _Kept(Context, Protocol):
    task: "_Task | None"  # None on `meta`


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *tensors, task = inputs
        query, key, value, softmax_aux, table = map(operators.detached, tensors)
        if task is None:
            batch, tokens, heads, _ = query.shape
            kept = query.new_empty((batch, tokens, heads, value.shape[-1]))
            lse = query.new_empty((batch, heads, tokens), dtype=operators.wide_dtype(query.dtype))
        else:
            sinks = _sinks(softmax_aux, query)
            kept, lse = _forward(task, [query, key, value], sinks, table)
        out = kept.to(query.dtype)  # rounded, it would be the largest error of gradients
        ctx.task = task
        ctx.save_for_backward(*tensors, kept, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: _Kept, dout: MaybeTensor, dlse: MaybeTensor) -> tuple[MaybeTensor, ...]:
        *tensors, softmax_aux, table, out, lse = map(operators.detached, ctx.saved_tensors)
        wanted = ctx.needs_input_grad
        if ctx.task is None:
            return *(x if x is None else torch.empty_like(x) for x in (*tensors, softmax_aux, table)), None
        given = torch.zeros_like(out, dtype=tensors[0].dtype) if dout is None else dout, dlse
        grads, d_table = _backward(ctx.task, tensors, table, (out, lse), given, wanted[4])
        d_sinks: MaybeTensor = None
        d_relative: MaybeTensor = None
        if wanted[3]:
            sinks = _sinks(softmax_aux, out)
            of_heads = None if sinks is None else _d_sinks(sinks, (out, lse), given)
            d_sinks = to_tensor(like_argument(of_heads, as_array(softmax_aux, "softmax_aux")))
        if wanted[4]:
            d_relative = to_tensor(like_argument(d_table, as_array(table, "relative_bias")))
        typed = (grad.to(x.dtype) for grad, x in zip(grads, tensors, strict=True))
        return *typed, d_sinks, d_relative, None


def _sinks(softmax_aux: ArrayLike | torch.Tensor | None, query: torch.Tensor) -> "torch.Tensor | None":
    wide = torch.empty(0, dtype=operators.wide_dtype(query.dtype))
    heads, numbers = query.shape[2], numbers_of(wide.numpy().dtype)
    for term in terms_of({"softmax_aux": softmax_aux}, Sizes((1, heads, 1, 1), (1,), "B", numbers)):
        assert term.array is not None
        return torch.from_numpy(term.array[0, :, 0]).to(wide.dtype).expand(heads, -1)
    return None


_Flag = TypeVar("_Flag", bound=bool)


class _RingCall(RingArguments, Generic[_Flag], total=False):
    group: "torch.distributed.ProcessGroup | DeviceMesh | None"
    return_lse: _Flag


@overload
def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Unpack[_RingCall[Literal[False]]]
) -> torch.Tensor: ...
@overload
def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Unpack[_RingCall[Literal[True]]]
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Unpack[_RingCall[bool]]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@KEYWORDS
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: "torch.distributed.ProcessGroup | DeviceMesh | None" = None,
    return_lse: bool = False,
    **more: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend over a sequence that is divided among the processes of a group.

    All processes of the group call it together, each with its shard as made by `attnmask.shard_sequence`. Each gets its
    shard of the result of `flash_attention` on the whole sequence, merged in float32. Keys and values travel in the
    background, only to processes whose queries see them; the arguments alone decide which. `query`, `key` and `value`
    have gradients if the call is differentiated in all processes. For `softmax_aux` and `relative_bias`, each process
    gets its part of the gradient: sum them over the group, like the gradients of other parameters.

    If arguments disagree between processes, or one process refuses them, all raise an error. If a process fails or
    hangs, the others raise an error, at the latest after the timeout of the group.

    Parameters
    ----------
    query, key, value : Tensor, shape [B, T of the shard, H, D], [B, T of the shard, Hkv, D (Dv)]
        On the CPU.
    group : ProcessGroup or DeviceMesh of one dimension, optional
        The processes that share the sequence, in the order of its shards; of ``torch.distributed``, with gloo. Defaults
        to all processes.
    layout : {"zigzag", "contiguous"} or ShardPlan
        As in `attnmask.shard_sequence`.
    cu_seqlens : array_like of integers, shape [sequences + 1], optional
        Starts of packed sequences in the whole sequence, the same in each process.
    attention_mask : MaskInfo, optional
        The mask of the whole sequence, the same in each process. Only the parts that this process needs are read.
    return_lse : bool
        Also return the logsumexp of each row.
    **more
        As in `attnmask.flash_attention`, for the whole sequence and the same in each process: segment ids are of shape
        [B, T of the whole sequence], slopes with `cu_seqlens` [sequences, H], and sinks count once.

    Returns
    -------
    Tensor, or tuple of two Tensors if `return_lse`
        Shapes [B, T of the shard, H, Dv] and [B, H, T of the shard].

    Examples
    --------
    A group of one process; ``torchrun`` starts more:

    >>> import torch
    >>> import attnmask.torch
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> query, value = torch.zeros(1, 3, 1, 8), torch.arange(3.0).reshape(1, 3, 1, 1)
    >>> attnmask.torch.ring_attention(query, query, value, causal=True).flatten().tolist()
    [0.0, 0.5, 1.0]
    >>> torch.distributed.destroy_process_group()
    """
    terms, given = arguments_of(ring_attention, {}, more)
    tensors = {"query": query, "key": key, "value": value} | terms
    if torch.compiler.is_dynamo_compiling():  # messages do not go into a graph
        results = torch.compiler.disable(_attend)(tensors, given, group)
    else:
        results = _attend(tensors, given, group)
    return results if flag(return_lse, "return_lse") else results[0]


def _attend(
    tensors: Arguments, given: Arguments, group: "_Group | DeviceMesh"
) -> tuple[torch.Tensor, torch.Tensor]:
    if operators.on_meta(tensors):  # shapes alone, which need no message
        return _RingAttention.apply(*map(operators.operand, tensors.values()), None)
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    if torch.distributed.get_rank(group) < 0:
        raise ValueError("group must be one that this process is in")
    task = _task(tensors, given, group)
    return _RingAttention.apply(*tensors.values(), task)
