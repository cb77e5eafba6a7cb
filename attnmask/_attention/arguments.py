"""The arguments of attention: one table, from which signatures, schemas of operators and the docs' table follow.

To add one, add its type to the class of options that should have it and its row to `ARGUMENTS`, and run
``python .ci/make_signatures.py``. Its value is checked and used in `attnmask._attention.problem` or ``terms``.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import (
    Generic,
    Literal,
    NoReturn,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    TypeVar,
)

from numpy.typing import ArrayLike, DTypeLike

from attnmask._attention.hints import BwdParams, FwdParams, Precision
from attnmask._common.arguments import Offsets
from attnmask._common.graphs import left_to_python
from attnmask._common.keywords import Keywords, taken, types_of
from attnmask._common.types import AnyFunction, Arguments, Array, Given
from attnmask._faces.rows import Argument, Kind, arguments
from attnmask._masks.info import MaskInfo

_Array = TypeVar("_Array")
_Flag = TypeVar("_Flag", bound=bool)
_Function = TypeVar("_Function", bound=AnyFunction)


class HasArray(Protocol):
    """An array or tensor. `ArrayLike` would also accept any string, and only ``"bottom-right"`` is an offset."""

    def __array__(self) -> Array: ...


Diagonal: TypeAlias = Offsets | HasArray | Literal["bottom-right"]


# The types of keyword arguments, by the functions that take them


class _CommonOptions(TypedDict, total=False):
    """Options of every attention function."""

    softmax_scale: float | None
    causal: bool
    sliding_window: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    softmax_aux: ArrayLike | None
    alibi_slopes: ArrayLike | None
    relative_bias: ArrayLike | None
    relative_low: int
    grid_bias: ArrayLike | None


class CacheOptions(_CommonOptions, total=False):
    """Options of attention to a cache."""

    bias: ArrayLike | None
    attention_chunk: int | None


class CacheArguments(CacheOptions, Generic[_Array], total=False):
    """Arguments by name of `flash_attention_with_kvcache` in PyTorch and JAX, by the kind of array."""

    cache_seqlens: ArrayLike | None
    block_table: ArrayLike | None
    cu_seqlens_q: ArrayLike | None
    cu_seqlens_k_new: ArrayLike | None
    k_scale: _Array | None
    v_scale: _Array | None
    prefix: SupportsIndex
    rotate: bool


class StepOptions(CacheOptions, total=False):
    """Options of `KVCacheStep.attend`."""

    attention_mask: ArrayLike | MaskInfo | None
    out: Array | None
    prefix: SupportsIndex


class StepCall(StepOptions, Generic[_Flag], total=False):
    """The same with `return_lse`, by its type, for overloads."""

    return_lse: _Flag


class RingOptions(_CommonOptions, total=False):
    """Options of ring attention."""

    dropout_prob: float
    dropout_seed: SupportsIndex | None
    q_segment_ids: ArrayLike | None
    kv_segment_ids: ArrayLike | None


class Options(RingOptions, total=False):
    """Options of `flash_attention` in NumPy, PyTorch and JAX."""

    cum_seqlens_q: ArrayLike | None
    cum_seqlens_k: ArrayLike | None
    fwd_params: FwdParams | None
    bwd_params: BwdParams | None
    normalize_output: bool
    precision: Precision | None
    logits_dtype: DTypeLike | None
    causal_offset: Diagonal


class Call(Options, Generic[_Flag], total=False):
    """The same with `return_lse`, by its type, for overloads in PyTorch and JAX."""

    return_lse: _Flag


class Attention(Options, total=False):
    """All optional arguments, for functions that take every one of them by name."""

    attention_mask: ArrayLike | MaskInfo | None
    bias: ArrayLike | None


# The arguments

ARGUMENTS = arguments("""
query : learned [B, Tq, H, D] or [Tq, H, D]
    [B, Tq, H, D], or [Tq, H, D] for packed sequences
key : learned [B, Tk, Hkv, D] or [Tk, Hkv, D]
    [B, Tk, Hkv, D], or [Tk, Hkv, D]
value : learned [B, Tk, Hkv, Dv] or [Tk, Hkv, Dv]
    [B, Tk, Hkv, Dv], or [Tk, Hkv, Dv]
attention_mask : mask [B?, H?, Tq?, Tk?] = None
    a `MaskInfo`, or an array: the pairs that are allowed
bias : term [B?, H?, Tq?, Tk?] = None
    added to logits; broadcasts to [B, H, Tq, Tk]
softmax_scale : scale = None
    multiplied into logits; 1/√D if not given
dropout_prob : chance = 0.0
    the probability that a weight is dropped
causal : flag = False
    keys after a query are masked out
dropout_seed : seed = None
    the seed of dropout; not given, 0, or drawn by PyTorch's generator in PyTorch
cum_seqlens_q : starts [sequences + 1] = None
    where packed sequences of queries start
cum_seqlens_k : starts [sequences + 1] = None
    where packed sequences of keys start
sliding_window : window = None
    the number of keys to the left and right that a query sees
fwd_params : hint FwdParams = None
    block sizes
bwd_params : hint BwdParams = None
    block sizes of gradients
logits_soft_cap : number = None
    c of c·tanh(logit / c)
softmax_aux : term [H, S] or [S] = None
    sinks: logits without a value; [S], or [H, S]
normalize_output : flag = True
    divide by the sum of the weights
precision : hint Precision = None
    accepted without effect
logits_dtype : hint DTypeLike = None
    accepted without effect
q_segment_ids : data [B, Tq] = None
    tokens attend to tokens with the same id; [B, Tq]
kv_segment_ids : data [B, Tk] = None
    the ids of keys; [B, Tk]
causal_offset : diagonal [B?] = TOP_LEFT
    moves the diagonal of `causal` and the window
alibi_slopes : data [B, H] or [H] = None
    ALiBi; [H] or [B, H]
relative_bias : term [H, L] = None
    added by distance; [H, L]
relative_low : size = 0
    the distance that relative_bias begins with
grid_bias : term [H, 2h-1, 2w-1] = None
    added by how far key and query are from each other in a grid of h x w tokens; [H, 2h-1, 2w-1]
""")  # in the order of signatures
OF_CACHES = arguments("""
attention_chunk : size = None
    the number of tokens in a chunk; queries see their own
""")


def of_kinds(*kinds: Kind) -> tuple[str, ...]:
    """Return the names of the arguments of these kinds, in the order of the table."""
    return tuple(row.name for row in ARGUMENTS if row.kind in kinds)


def type_of(row: Argument) -> str:
    """Return the annotation of an argument."""
    known = (Attention.__annotations__ | CacheOptions.__annotations__).get(row.name)
    return "ArrayLike" if known is None else known.__forward_arg__


LEARNED = of_kinds(Kind.LEARNED, Kind.TERM)
MOVED = LEARNED[:5]  # what may have a tangent: inputs, the bias and sinks
ARRAYS = (*LEARNED, *of_kinds(Kind.MASK, Kind.DATA, Kind.STARTS, Kind.DIAGONAL))
TRACED = (*ARRAYS, *of_kinds(Kind.SEED))
NUMBERS = of_kinds(Kind.SCALE, Kind.NUMBER, Kind.CHANCE, Kind.SEED, Kind.SIZE, Kind.FLAG)
HINTS = of_kinds(Kind.HINT)
DEFAULTS = {row.name: row.default for row in ARGUMENTS if row.default is not Parameter.empty}
CACHE_DEFAULTS = {
    name: (DEFAULTS | {row.name: row.default for row in OF_CACHES})[name]
    for name in CacheOptions.__annotations__
}
CACHE_DEFAULTS["causal"] = True
STEP_DEFAULTS = {"attention_mask": None, **CACHE_DEFAULTS, "out": None, "prefix": 0}
RING_DEFAULTS = {name: default for name, default in DEFAULTS.items() if name in RingOptions.__annotations__}
_RESULTS = "tuple[Array, Array]"


class Function:
    """The signature of a function of NumPy arrays: its argument names, positional ones first, and their defaults."""

    def __init__(
        self, name: str, result: str, rows: Mapping[str, tuple[str, object]], last_by_place: str
    ) -> None:
        """`rows` maps each argument to its type and default."""
        self.name = name
        self.in_torch = name if "k_cache" in rows else "flash_attention"
        self.names = tuple(rows)
        self.places = self.names.index(last_by_place) + 1
        self.required = {key for key, (_, default) in rows.items() if default is Parameter.empty}
        self.defaults = {key: default for key, (_, default) in rows.items() if key not in self.required}
        kinds = [Parameter.POSITIONAL_OR_KEYWORD] * self.places + [Parameter.KEYWORD_ONLY] * len(rows)
        self.signature = Signature(
            [
                Parameter(key, kind, default=default, annotation=annotation)
                for (key, (annotation, default)), kind in zip(rows.items(), kinds, strict=False)
            ],
            return_annotation=result,
        )

    def __call__(self, function: _Function) -> _Function:
        """Show the signature of a function that is defined with ``(*args, **given)``."""
        shown = self.signature
        function.__signature__ = shown  # type: ignore[attr-defined]
        function.__annotations__ = {key: row.annotation for key, row in shown.parameters.items()}
        function.__annotations__["return"] = shown.return_annotation
        left_to_python(function, f"call attnmask.torch.{self.in_torch}, which goes into graphs")
        return function

    def bind(self, args: tuple[object, ...], given: Arguments) -> Arguments:
        """Return all arguments of a call by name. Raise what Python would raise for a call that does not fit."""
        passed = dict(zip(self.names, args, strict=False)) | given
        whole = self.defaults | passed
        if (
            len(passed) != len(args) + len(given)
            or len(whole) != len(self.names)
            or len(args) > self.places
            or (len(args) < len(self.required) and not whole.keys() >= self.required)
        ):
            if not given.keys() <= set(self.names):
                return self.bind(args, taken(self.name, given, self.names))
            self._refuse(args, given)
        return whole

    def _refuse(self, args: tuple[object, ...], given: Given) -> NoReturn:
        if len(args) > self.places:
            raise TypeError(
                f"{self.name}() takes up to {self.places} positional arguments but {len(args)} were given"
            )
        for key in self.names[: len(args)]:
            if key in given:
                raise TypeError(f"{self.name}() got multiple values for argument {key!r}")
        missing = [key for key in self.names[len(args) :] if key not in self.defaults | dict(given)]
        raise TypeError(f"{self.name}() missing required arguments: {', '.join(map(repr, missing))}")


_TYPES = {row.name: type_of(row) for row in (*ARGUMENTS, *OF_CACHES)}
_TYPES |= {"out": "Array | None", "prefix": "SupportsIndex"}
OPTIONS, STEP = Keywords(DEFAULTS, _TYPES), Keywords(STEP_DEFAULTS, _TYPES)

_FLAG = ("bool", False)
_OPTIONAL = ("ArrayLike | None", None)
_OUT = ("Array | None", None)
_ARRAY = ("ArrayLike", Parameter.empty)
_INPUTS = dict.fromkeys(LEARNED[:3], _ARRAY)
_GRADS = {f"grad_{name}": _FLAG for name in LEARNED[3:]}
_ATTENTION = {row.name: (type_of(row), row.default) for row in ARGUMENTS}
_EITHER = f"Array | {_RESULTS}"

FLASH_ATTENTION = Function(
    "flash_attention", _EITHER, _ATTENTION | {"return_lse": _FLAG, "out": _OUT}, "logits_dtype"
)
FOR_GRADIENTS = Function("flash_attention", _RESULTS, _ATTENTION, "logits_dtype")
FLASH_ATTENTION_FWD = Function("flash_attention_fwd", _RESULTS, _ATTENTION | {"out": _OUT}, "logits_dtype")
FLASH_ATTENTION_VJP = Function(
    "flash_attention_vjp",
    f"tuple[{_EITHER}, Vjp]",
    _ATTENTION | {"return_lse": _FLAG} | _GRADS,
    "logits_dtype",
)
FLASH_ATTENTION_BWD = Function(
    "flash_attention_bwd",
    "FlashAttentionGrads",
    {"dout": _ARRAY} | _INPUTS | {"out": _ARRAY, "lse": _ARRAY} | _ATTENTION | _GRADS | {"dlse": _OPTIONAL},
    "logits_dtype",
)
_TANGENTS = [(f"{name}_tangent", _OPTIONAL) for name in MOVED]
FLASH_ATTENTION_JVP = Function(
    "flash_attention_jvp",
    f"tuple[{_EITHER}, {_EITHER}]",
    _INPUTS | dict(_TANGENTS[:3]) | _ATTENTION | {"return_lse": _FLAG} | dict(_TANGENTS[3:]),
    "logits_dtype",
)
_COTANGENTS = {f"{name}_cotangent": _OPTIONAL for name in LEARNED[:3]}
FLASH_ATTENTION_BWD_VJP = Function(
    "flash_attention_bwd_vjp",
    "FlashAttentionSecondGrads",
    {"dout": _ARRAY}
    | _INPUTS
    | {"out": _ARRAY, "lse": _ARRAY}
    | _COTANGENTS
    | _ATTENTION
    | {"dlse": _OPTIONAL},
    "logits_dtype",
)
_OF_LOGITS = {  # what attention takes to find its weights
    name: row
    for name, row in _ATTENTION.items()
    if name not in (*LEARNED[:3], *of_kinds(Kind.CHANCE, Kind.SEED, Kind.HINT), "normalize_output")
}
_LOOKED = dict(list(_INPUTS.items())[:2]) | {"attention_mask": _OF_LOGITS["attention_mask"]}
_QUERIES = {"queries": ("Queries", None)}
ATTENTION_WEIGHTS = Function("attention_weights", "Array", _LOOKED | _QUERIES | _OF_LOGITS, "attention_mask")
_OF = {"of": ("Statistic | Sequence[Statistic]", Parameter.empty)}
_BY_HEADS = {"heads": ('Literal["query", "key"]', "query"), "lse": _OPTIONAL}
ATTENTION_STATISTICS = Function(
    "attention_statistics",
    "AttentionStatistics",
    _LOOKED | _OF | _QUERIES | _BY_HEADS | _OF_LOGITS,
    "attention_mask",
)
FLASH_ATTENTION_WITH_KVCACHE = Function(  # in the order of the core
    "flash_attention_with_kvcache",
    _EITHER,
    {
        "query": _ARRAY,
        "k_cache": ("Array", Parameter.empty),
        "v_cache": ("Array", Parameter.empty),
        "key": _OPTIONAL,
        "value": _OPTIONAL,
        "cache_seqlens": _OPTIONAL,
        "block_table": _OPTIONAL,
        "cu_seqlens_q": _OPTIONAL,
        "cu_seqlens_k_new": _OPTIONAL,
        "k_scale": ("NDArray[np.float32] | None", None),
        "v_scale": ("NDArray[np.float32] | None", None),
        "attention_mask": _ATTENTION["attention_mask"],
        "return_lse": _FLAG,
        "out": _OUT,
        "prefix": (_TYPES["prefix"], 0),
        **{name: (_TYPES[name], default) for name, default in CACHE_DEFAULTS.items()},
        "rotate": _FLAG,  # not the core's
    },
    "value",
)
KVCACHE_NAMES = FLASH_ATTENTION_WITH_KVCACHE.names[:-1]
_OF_CACHE = dict(
    zip(
        FLASH_ATTENTION_WITH_KVCACHE.names,
        FLASH_ATTENTION_WITH_KVCACHE.signature.parameters.values(),
        strict=True,
    )
)
ATTENTION_STATISTICS_WITH_KVCACHE = Function(
    "attention_statistics_with_kvcache",
    "AttentionStatistics",
    {"query": _ARRAY, "k_cache": ("Array", Parameter.empty)}
    | _OF
    | _BY_HEADS
    | {
        name: (row.annotation, row.default)
        for name, row in _OF_CACHE.items()
        if row.kind is Parameter.KEYWORD_ONLY
        and name not in ("cu_seqlens_k_new", "v_scale", "return_lse", "out", "prefix")
    },
    "k_cache",
)
KVCACHE_DEFAULTS = tuple(map(FLASH_ATTENTION_WITH_KVCACHE.defaults.get, KVCACHE_NAMES))  # None if required


def cache_keywords(array: str) -> Keywords:
    """Return the arguments by name of attention to a cache, for a kind of array."""
    types = types_of(CacheArguments, array)
    defaults = FLASH_ATTENTION_WITH_KVCACHE.defaults.items()
    return Keywords({name: default for name, default in defaults if name in types}, types)
