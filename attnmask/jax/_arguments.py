"""Arguments of attention when JAX traces some of them.

They are checked like those of eager calls, and divided into what is known at compile time and traced arrays.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from attnmask._attention.arguments import LEARNED
from attnmask._attention.batch import Batch, one_batch
from attnmask._attention.problem import Problem, distances, read_problem
from attnmask._attention.terms import BY_POINT, Term
from attnmask._common.arguments import TOP_LEFT, as_array, flag, is_floating, is_number
from attnmask._common.types import Arguments, Array, Given, Tree
from attnmask._faces.attention import ATTENTION
from attnmask._faces.rows import Argument, Kind, Row
from attnmask._masks.info import MaskInfo
from attnmask._masks.program import LONGEST, Leaf, Program, mapped
from attnmask._masks.terms import GRID, KEY_STARTS, PAIRS, QUERY_STARTS, ROWS, Node, operands
from attnmask.jax._types import AnyArray


class Wide(NamedTuple):
    """A placeholder for a 64-bit array, each number as a pair of int32: by default JAX has no others."""

    place: int


class Learned(NamedTuple):
    """A placeholder for an array that has a gradient."""

    name: str
    shape: tuple[int, ...]  # in which the core takes it


Places: TypeAlias = tuple[AnyArray, AnyArray | None, AnyArray | None]  # as of `Problem`
Operand: TypeAlias = Leaf | Wide | Learned | int | None  # as a `Spec` has it


class Spec(NamedTuple):
    """A call, with a `Leaf`, a `Wide` or a `Learned` for each array. Terms of sequences have one operand more than in
    programs of masks: an offset that is added to both limits.
    """

    nodes: Program
    terms: tuple[Term, ...]
    scale: float
    normalize: bool
    places: tuple[Operand, Operand, Operand] | None  # as of `Problem`; starts of keys if a term needs them
    part: tuple[int, int] | None = None  # as of `Problem`
    callback: bool = False


def is_traced(value: object) -> bool:
    if isinstance(value, MaskInfo):
        return value._held is None and any(isinstance(leaf, jax.core.Tracer) for leaf in _tree(value)[1])
    return isinstance(value, jax.core.Tracer)


_PLAIN = {bool, int, float, str, type(None)}


def check_known(value: object, name: str) -> None:
    if type(value) not in _PLAIN and any(
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)
    ):
        raise TypeError(f"{name} must be known at compile time, got a traced value")


def known_flag(value: object, name: str) -> bool:
    check_known(value, name)
    return flag(value, name)


def _tree(info: MaskInfo) -> Tree:
    """Return the tree that JAX put `info` together from."""
    return info._leaves or ((), ())


# Checks


def check(given: Given) -> tuple[Problem, Batch]:
    """Return what `read_problem` returns, for traced arguments by type and shape. The core checks their values when the
    compiled function runs.
    """
    for name in LEARNED[:3]:
        shape = given[name].shape
        if not all(isinstance(length, int) for length in shape):
            raise ValueError(f"{name} must have a known shape at trace time, got {shape}")
    known = stand_ins(ATTENTION, given)
    if given["causal_offset"] is TOP_LEFT and any(
        is_traced(given[name]) for name in ATTENTION.of(Kind.STARTS)
    ):
        known["causal_offset"] = 0  # whether a sequence has fewer queries than keys is not known
    return read_problem(known)


def stand_ins(row: Row, given: Given) -> Arguments:
    """Return what stands for arguments when types and shapes are checked: they themselves unless they are traced."""

    def tokens_of(name: str) -> int:
        first = "key" if "_k" in name else row.arguments[0].name
        argument, shape = row.argument(first), getattr(given[first], "shape", ())[-4:]
        axes = argument.axes(len(shape)) or []
        if given.get("head_first"):
            axes = axes[:1] + axes[1:3][::-1]
        return next(
            (size for axis, size in zip(axes, shape, strict=False) if axis[0] == "T" or axis == "total"), 0
        )

    def stand_in(argument: Argument, x: Any) -> Any:
        if argument.kind is Kind.STATE and isinstance(x, jax.Array) and not argument.optional:
            return np.zeros(x.shape, x.dtype)  # which may be written to
        if not is_traced(x):
            return as_array(x, argument.name) if isinstance(x, jax.Array) else x
        if isinstance(x, MaskInfo):
            return mask_like(x)
        if argument.kind is Kind.STARTS:
            return starts_like(x, tokens_of(argument.name))
        if argument.kind is Kind.SLOTS and x.dtype.kind in "iu":
            return np.full(x.shape, -1, x.dtype if x.dtype.kind == "i" else None)  # which may occur twice
        if argument.kind is Kind.SEED:
            return np.zeros(x.shape, x.dtype)[()]
        return like(x, int(argument.kind in (Kind.MASK, Kind.STATE)))  # scales are positive

    return {argument.name: stand_in(argument, given.get(argument.name)) for argument in row.problem}


def like(value: AnyArray, number: int = 0) -> Array:
    """Return an array of this type and shape that needs no memory."""
    return np.broadcast_to(np.array(number, value.dtype), value.shape)


def starts_like(value: AnyArray, tokens: int) -> Array:
    """Return starts of so many sequences, of which the last has all tokens."""
    if value.dtype.kind not in "iu":
        return like(value)
    starts = np.zeros(value.shape, np.int64)
    starts[..., -1:] = tokens
    return starts


def mask_like(info: MaskInfo) -> MaskInfo:
    aux, leaves = _tree(info)
    *_, queries, keys, _, _, program = aux
    known = [
        leaf if leaf is None or not hasattr(leaf, "dtype") else np.zeros(leaf.shape, leaf.dtype)
        for leaf in leaves
    ]
    for node in program:
        for field, operand in operands(node):
            if not isinstance(operand, Leaf):
                continue
            leaf = leaves[operand.place]
            if field in (QUERY_STARTS, KEY_STARTS):
                known[operand.place] = starts_like(leaf, queries if field is QUERY_STARTS else keys)
            elif field is GRID:  # of one line that each point sees alone
                known[operand.place] = np.ones(leaf.shape, np.int64)
                known[operand.place][0, 0] = LONGEST
    return MaskInfo.tree_unflatten(aux, tuple(known))


# What is static, and the arrays


class Arrays:
    """The arrays that a call takes besides its first arguments, each once."""

    def __init__(self) -> None:
        self.given: list[AnyArray] = []  # kept, so that an id is its own
        self.taken: list[AnyArray] = []

    def place(self, value: Any) -> Any:
        """Return what stands for `value` in a `Spec`: itself if it is no array."""
        if not isinstance(value, (np.ndarray, jax.Array)):
            return value
        index = next((i for i, other in enumerate(self.given) if other is value), len(self.given))
        if index == len(self.given):
            self.given.append(value)
            self.taken.append(_pairs(value) if _is_wide(value) else value)
        return Wide(index) if _is_wide(value) else Leaf(index)


def _is_wide(value: AnyArray) -> bool:
    return value.dtype == np.uint64 or (isinstance(value, np.ndarray) and value.dtype.itemsize == 8)


def _pairs(value: AnyArray) -> AnyArray:
    if not isinstance(value, np.ndarray):
        return jax.lax.bitcast_convert_type(value, np.int32)
    return np.ascontiguousarray(value).view(np.int32).reshape(*value.shape, 2)


def specify(given: Given, problem: Problem, batch: Batch = (1,)) -> tuple[Spec, list[AnyArray]]:
    """Return the spec of the arguments `given`, which `check` turned into `problem` and batch axes."""
    arrays = Arrays()
    program = tuple(_nodes(given, problem, batch))
    nodes = mapped(program, arrays.place)
    places = _places(given, problem, program)
    spec = Spec(
        nodes,
        term_operands(given, problem.terms, arrays, LEARNED),
        problem.scale,
        problem.normalize,
        None if places is None else tuple(map(arrays.place, places)),
    )
    return spec, arrays.taken


def term_operands(
    given: Given, terms: tuple[Term, ...], arrays: Arrays, learned: tuple[str, ...] = ()
) -> tuple[Term, ...]:
    """Return the terms of the arguments `given` with placeholders for arrays, and for the seed."""

    def operands(term: Term) -> Term:
        value: Any = given[term.name]
        array: Any = term.array
        integer: Any = term.integer
        if term.name == "dropout_prob":
            seed = given["dropout_seed"]
            seed = jax.numpy.reshape(seed, (1,)) if is_traced(seed) else np.array([integer], np.uint64)
            integer = arrays.place(seed)
        if array is not None and term.name in learned and isinstance(value, jax.Array):
            array = Learned(term.name, array.shape)
        elif array is not None and is_traced(value):
            wide = value.dtype == np.float64
            array = arrays.place(value.astype(np.float64 if wide else np.float32).reshape(array.shape))
        else:
            array = arrays.place(array)
        return term._replace(array=array, integer=integer)

    return tuple(map(operands, terms))


def sinks_of(softmax_aux: jax.Array) -> jax.Array:
    """Return sinks as the core takes them: one row shared by all heads has one axis."""
    wide = is_floating(softmax_aux.dtype) and softmax_aux.dtype.itemsize >= 4
    sinks = softmax_aux if wide else softmax_aux.astype(np.float32)
    return sinks[0] if sinks.ndim == 2 and sinks.shape[0] == 1 else sinks


def _places(given: Given, problem: Problem, program: Program) -> Places | None:
    if problem.places is None:
        return None
    offsets, starts, _ = problem.places
    offset = given["causal_offset"]
    if starts is None:
        return jax.numpy.reshape(offset, -1) if is_traced(offset) else offsets, None, None
    sequences: Any = [node for node in program if node[0] == "sequences"][-1]
    _, q_starts, k_starts, _, _, moved = sequences
    if any(map(is_traced, (q_starts, k_starts, offset))):
        offsets = jax.numpy.asarray(k_starts)[:-1] - jax.numpy.asarray(q_starts)[:-1] + moved
    return offsets, q_starts, k_starts if any(term.name in BY_POINT for term in problem.terms) else None


def _nodes(given: Given, problem: Problem, batch: Batch) -> Iterator[Node]:
    """Return the program of `problem` with traced arrays in place of their stand-ins."""
    mask = given["attention_mask"]
    for node in problem.nodes:
        if isinstance(node, str):
            yield node
        elif not isinstance(node, tuple) or node[0] == "dense":
            yield from mask_terms(mask, node, batch or (1,))
        elif node[0] == "equal":
            yield _equal(given, node)
        elif node[0] == "band":
            offset = given["causal_offset"]
            yield (*node[:3], jax.numpy.reshape(offset, -1) if is_traced(offset) else node[3])
        elif node[0] == "sequences":
            yield _sequences(given, node)
        else:
            yield node


def mask_terms(mask: object, node: Node, batch: Batch = (1,)) -> Iterator[Node]:
    """Return the terms of `attention_mask`, which became `node` in a program."""
    if isinstance(mask, MaskInfo):
        yield from _terms_of(mask)
    else:
        found: Any = node[1]
        if isinstance(mask, jax.Array):
            found = one_batch(mask, batch, divides=False, broadcast_to=jax.numpy.broadcast_to)
        yield ("dense", _dense(found), 0, 0)


def _terms_of(info: MaskInfo) -> Iterator[Node]:
    aux, leaves = _tree(info) if is_traced(info) else ((info._state.program,), ())
    for node in aux[-1]:
        if isinstance(node, str):
            yield node
            continue
        terms: list[object] = [node[0]]
        for field, operand in operands(node):
            value = leaves[operand.place] if isinstance(operand, Leaf) else operand
            if field is PAIRS:
                value = _dense(value)
            elif field is ROWS and hasattr(value, "shape"):
                value = value.reshape(-1)
            terms.append(value)
        yield (*terms, 0) if node[0] == "sequences" else tuple(terms)


def _dense(mask: Any) -> AnyArray:
    """Return a 4-D mask of a type that both XLA and the core have."""
    if isinstance(mask, np.ndarray):
        mask = mask != 0 if mask.dtype.itemsize == 8 else mask
    elif not is_number(mask.dtype):
        mask = mask.astype(np.float32 if jax.numpy.issubdtype(mask.dtype, np.floating) else np.int32)
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _equal(given: Given, node: Node) -> Node:
    def ids(name: str, other: str, known: Any) -> AnyArray:
        value = given[other] if given[name] is None else given[name]
        return value.reshape(known.shape) if is_traced(value) else known

    q_ids = ids("q_segment_ids", "kv_segment_ids", node[1])
    same = given["q_segment_ids"] is None or given["kv_segment_ids"] is None
    return ("equal", q_ids, q_ids if same else ids("kv_segment_ids", "q_segment_ids", node[2]), node[3])


def _sequences(given: Given, node: Node) -> Node:
    starts, offset = (given["cum_seqlens_q"], given["cum_seqlens_k"]), given["causal_offset"]
    if not any(map(is_traced, (*starts, offset))):
        return (*node, 0)
    q_starts, k_starts = (
        value if is_traced(value) else known
        for value, known in zip(
            (starts[1] if starts[0] is None else starts[0], starts[0] if starts[1] is None else starts[1]),
            node[1:3],
            strict=True,
        )
    )
    if isinstance(offset, str):
        offset = jax.numpy.diff(k_starts) - jax.numpy.diff(q_starts)
    elif is_traced(offset) or not isinstance(offset, int):
        offset = (jax.numpy if is_traced(offset) else np).asarray(offset).reshape(-1)
    return ("sequences", q_starts, k_starts, *distances(given), offset)
