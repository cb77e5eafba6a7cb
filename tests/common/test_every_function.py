"""What every public function does alike: made from the right arguments of each (rows_of_functions.py)."""

import copy
import inspect
import itertools
import re
import reprlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from doors import NAMES as OF_FACES
from doors import function_of
from drawing import Arguments
from fuzzer import Before, arrays_in, digest, same
from hostile import INPUTS, LAYOUTS, Index, Subclass, subclass
from rows_of_functions import Target, firsts
from targets import TARGETS

import attnmask

NAMES = [name for name in TARGETS if not name.startswith("XLA ")]  # handlers have no Python objects
FUNCTIONS = [name for name in TARGETS if callable(getattr(attnmask, name, None))]


def right(name: str, given: str = "") -> Iterator[tuple[str, Arguments]]:
    """Right arguments of a function, the first that were found with each of its arguments (and with a given one)."""

    def drawn(seed: int) -> Arguments:
        arguments = TARGETS[name].arguments(np.random.default_rng(seed))
        return arguments if not given or given in arguments else {}

    return firsts(drawn, TARGETS[name].kept)


# The same numbers in another form


def of_framework(library: str):
    def convert(rng, value: np.ndarray):
        module = pytest.importorskip(library)
        narrow = value.dtype == ml_dtypes.bfloat16
        made = module.asarray(value.astype(np.float32) if narrow else np.ascontiguousarray(value))
        if narrow:
            made = made.bfloat16() if library == "torch" else made.astype("bfloat16")
        return made if np.dtype(str(made.dtype).removeprefix("torch.")) == value.dtype else value

    return convert


FORMS = {
    "axes reversed, strided, turned, mapped, subclass, guarded": LAYOUTS,
    "swapped, read-only, misaligned, __array__, interface, DLPack, memoryview": INPUTS,
    "torch": [of_framework("torch")],
    "jax.numpy": [of_framework("jax.numpy")],
}


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_arrays_of_any_form(name, forms):
    """Each array in turn has another layout, another type of memory, or comes from another library."""
    target, library = TARGETS[name], forms in ("torch", "jax.numpy")  # whose arrays are given back
    for argument, arguments in right(name):
        value = arguments[argument]
        kept = argument in target.written or (library and argument in GIVEN_BACK.get(name, ()))
        if not isinstance(value, np.ndarray) or not value.ndim or kept:
            continue
        if library and value.dtype.name.startswith("float8"):  # which they do not make of NumPy's arrays
            continue
        expected = target.call(**right_again(arguments))
        for number, form in enumerate(FORMS[forms]):
            if form is subclass and not target.subclasses:
                continue
            made = form(np.random.default_rng(number), value)
            before = Before(target, arguments)
            result = target.call(**right_again(arguments) | {argument: made})
            assert same(target, expected, result), (argument, number)
            assert not before.changed(True, False), (argument, number)


INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]


def of_other_types(value) -> Iterator:
    """The same numbers as other objects, and in lists."""
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "iu":
        fits = [dtype for dtype in INTEGERS if dtype != value.dtype and (value.astype(dtype) == value).all()]
        yield from map(value.astype, fits)
    if (
        isinstance(value, np.ndarray)
        and value.dtype in (np.int64, np.float64, np.bool_)
        and value.size < 1000
    ):
        yield from [value.tolist(), [*value]] if value.size > 1 else []  # a window of one entry is no list
    if isinstance(value, bool):
        yield np.bool_(value)
    elif isinstance(value, int):
        fits = [dtype for dtype in INTEGERS if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max]
        yield from (dtype.type(value) for dtype in fits)
        yield Index(value)
    elif isinstance(value, float):
        types = (np.float64, np.float32, np.float16, np.longdouble, ml_dtypes.bfloat16, np.array)
        yield from (of_type(value) for of_type in types if float(of_type(value)) == value)
        yield from [int(value), np.array(value, ">f4")] if value.is_integer() else []
    elif isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        yield tuple(value)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("cdiv", "MaskInfo.from_random")])
def test_numbers_of_other_types(name):
    """Results may have the type of a list's or of another array's integers, and the same numbers."""
    target = TARGETS[name]
    for argument, arguments in right(name):
        if argument in target.written or argument in GIVEN_BACK.get(name, ()):
            continue
        for value in of_other_types(arguments[argument]):
            expected, got = (target.call(**right_again(arguments | more)) for more in ({}, {argument: value}))
            for one, other in zip(arrays_in(expected), arrays_in(got), strict=True):
                np.testing.assert_array_equal(one, other, f"{argument} {value!r}")


def right_again(arguments: Arguments) -> Arguments:
    """With copies of the arrays and caches, since a call may write to some."""
    written = (np.ndarray, attnmask.KVCache)
    return {name: copy.deepcopy(x) if isinstance(x, written) else x for name, x in arguments.items()}


# Wrong arguments

NO_INTEGERS = [bool, np.float64, np.float16, ml_dtypes.bfloat16]
NO_FLOATS = [bool, np.int32, np.int64]
OF_FLOATS = {
    "query", "key", "value", "bias", "weight", "decay", "beta", "initial_state", "state", "relative_bias", "table",
    "dout", "dlse", "lse", "outs", "lses", "k_cache", "v_cache", "k_scale", "v_scale",
}  # fmt: skip
MAY_BE_BOOL = {
    "mask", "attention_mask", "q_mask", "kv_mask", "padding_mask", "attn_mask", "blocks", "lengths",
}  # fmt: skip
STARTS = ("cu_seqlens", "cum_seqlens_q", "cu_seqlens_q", "cum_seqlens_k", "cu_seqlens_k_new")
NO_FLAG = [1, 0, "yes", 1.0, np.int64(1), [True], np.array([True]), np.array(True), np.zeros(0)]
NO_INTEGER = [True, np.True_, 2.0, np.float32(2), "2", b"2", 2j]
NO_NUMBER = ["1", b"1", 1j, np.complex64(1), np.timedelta64(1, "s"), {}, object()]
NO_DTYPE = ["nonsense", 3, object(), "\ud800"]
NO_NUMBERS = [object, "S1", "U1", "M8[s]", "m8[s]", complex, "V2", [("x", "f4")]]


# Of what these are, nothing is asked: they are given back, or only their shapes count.
GIVEN_BACK = {
    "identity_dtype_convert": ("x", "g"),
    "pack": ("x",),
    "unpack": ("packed", "fill"),
    "shard_sequence": ("x",),
    "MaskInfo.dynamic_init": ("input_ids", "inputs_embeds"),
    "OperationImpl.get_mode": ("query",),
    "OperationImpl.repeat_kv_heads": ("k", "v"),
    "OperationImpl.handle_kvhead": ("array",),
    "OperationImpl.create_stable_sharding": ("dep",),
    **{f"MaskInfo.{name}": ("other",) for name in ("__and__", "__or__", "__eq__")},  # Python says that
}
ALSO_CALLED = {"d_relative_bias": "dbias", "mask": "attention_mask"}  # by pullbacks, by what is handed on


class Described:
    """Says of itself only what an interface of arrays says."""

    def __init__(self, interface):
        self.__array_interface__ = interface


def wrong(argument: str, value) -> list:
    """What is of another kind than this argument."""
    if isinstance(value, bool):
        return NO_FLAG
    if isinstance(value, int):
        return NO_INTEGER
    if isinstance(value, float):
        return NO_NUMBER
    if isinstance(value, type):
        return NO_DTYPE
    if isinstance(value, np.ndarray) and value.ndim:
        kinds = [
            *NO_NUMBERS,
            *(NO_INTEGERS if value.dtype.kind in "iu" and not MAY_BE_BOOL & {argument} else ()),
            *(NO_FLOATS if argument in OF_FLOATS and value.dtype.kind not in "iu" else ()),
        ]
        return ["x", {}, object(), Described("x"), *(np.zeros(value.shape, dtype) for dtype in kinds)]
    return [object()]


def refused(target: Target, arguments: Arguments, argument: str, value) -> str:
    """What is wrong with how a call refuses a value; nothing is written."""
    case = f"{argument}={reprlib.repr(value)}"
    given = arguments | {argument: value}
    before = Before(target, given)
    try:
        result = target.call(**given)
    except (TypeError, ValueError) as error:
        said = str(error)
        changed = before.changed(False, False)
        named = re.search(rf"\b({argument}|{ALSO_CALLED.get(argument, argument)})\b", said)
        told = named and re.search("must (.*got |share no memory|be array_like)", said, re.S) and not changed
        return "" if told else f"{case}: {error!r}, changed {changed}"
    return f"{case} gave {reprlib.repr(result)}"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_of_a_wrong_kind_is_refused_by_name(name):
    target, problems = TARGETS[name], []
    for argument, arguments in right(name):
        if argument not in GIVEN_BACK.get(name, ()):
            problems += [
                refused(target, arguments, argument, x) for x in wrong(argument, arguments[argument])
            ]
    assert not any(problems), "\n".join(filter(None, problems))


@pytest.mark.levels("once")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", OF_FACES)
def test_jax_refuses_them_too(name, compiled):
    """In eager calls, and where all other arrays are traced."""
    jax = pytest.importorskip("jax")
    import attnmask.jax

    function, problems = function_of(attnmask.jax, name), []
    for argument, arguments in right(name):
        arguments.pop("out", None)

        def call(argument=argument, **given):
            arrays = {key: x for key, x in given.items() if isinstance(x, np.ndarray) and key != argument}
            fixed = {key: x for key, x in given.items() if key not in arrays}
            if not compiled:
                return function(**given)
            return jax.eval_shape(lambda arrays: function(**arrays, **fixed), arrays)

        target = TARGETS[name]._replace(call=call, written=frozenset())
        values = wrong(argument, arguments[argument]) if argument in arguments else ()
        problems += [refused(target, arguments, argument, x) for x in values]
    assert not any(problems), "\n".join(filter(None, problems))


NESTED: list = []
NESTED.append(NESTED)
BAD_STARTS = [
    np.zeros(0, int), [[0, 5]], np.zeros((1, 1), int), 0, [1, 5], [5], [0, 3, 2, 5], [0, -1, 5], [0, 2**63 - 1, 5],
    np.array([0, 255, 5], np.uint8), np.array([0, 5, 2**63], np.uint64), [0.0, 5.0], [False, True], ["0", "5"],
    [0, 2**70], "05", {}, np.array([0, 5], object),
]  # fmt: skip
BAD_SIZES = [0, -1, -4, np.int8(-128), -(2**63), -(2**70), [2], (1, 2), np.array([2, 4])]
BAD_CHANCES = [-0.1, 1.0, 1, 1.5, np.nan, np.inf, "x", [0.5, 0.5], 1j, None]
# Values that no function takes for an argument of this name.
VALUES = {
    **dict.fromkeys(STARTS, BAD_STARTS),
    **dict.fromkeys(("chunk_size", "n", "max_distance", "attention_chunk"), BAD_SIZES),
    **dict.fromkeys(("dropout_prob", "prob"), BAD_CHANCES),
    **dict.fromkeys(("output_dtype", "out_dtype"), (bool, complex, object, "S4", "M8[s]")),
    **dict.fromkeys(("fwd_params", "bwd_params"), ("x", 64, (64, 64))),
    **{f"linear_attention{x} chunk_size": [*BAD_SIZES, 12, 48, 512] for x in ("", "_vjp")},
    "activation": ["gelu", True, 1],
    **dict.fromkeys(("causal", "normalize_output", "return_lse", "return_state"), (None,)),
    **dict.fromkeys(("max_rows", "max_cols", "q_len", "kv_len", "qseq", "num_reps"), (-1,)),
    "block_size": [0, (4, -2), (1, 2, 3), (2, 2.5)],
    "charset": ["utf8", None],
    "softmax_scale": [10**400, [0.5, 0.5]],
    "sliding_window": ["x", 1.5, ("a", 1), (1.5, 1), -1, (-1, 0), (0, -1), (1, 2, 3), (1,), ()],
    "causal_offset": [1.5, None, [0.5, 1.5], object(), "top", [1, 2, 3], [], [[1, 2]], [[1], [1, 2]]],
    "logits_soft_cap": [-1.0, np.nan, -np.inf],
    "precision": ["nonsense", ""],
    "dropout_seed": ["x", 1.5, 1j, object()],
    "mode": ["nonsense", "", 3],
    "reduce_heads": ["nonsense", "", "ALL", None, 0, b"any"],
    "max_segments": [-1, -(2**70)],
    "pad_value": [2**31, -(2**31) - 1, 2**70, np.array([2])],
    "dtype": [None],
    "seed": [1.5, "x", NESTED],
    "shape": ["x", None, (1, 2, 3, 4.5), (1, 2, 3), (1, 1, 1, 1, 1), (1, -1, 2, 2), (2**70, 1, 1, 1)],
    "MaskInfo.neighborhood shape": ["x", None, 5, (), (3, 3, 3, 3), (3, 4.5), (-1, 3), (2**70, 3)],
}


# `cu_seqlens` may hold pairs there, or is looked at when it is used.
OF_PAIRS = ("cu_seqlens_to_mask", "qkv_", "unpack", "MaskInfo")


@pytest.mark.parametrize("name", NAMES)
def test_values_that_no_function_takes(name):
    problems = [
        refused(TARGETS[name], arguments, argument, value)
        for argument, arguments in right(name)
        if not (argument in STARTS and name.startswith(OF_PAIRS))
        for value in VALUES.get(f"{name} {argument}", VALUES.get(argument, ()))
    ]
    assert not any(problems), "\n".join(filter(None, problems))


# The other shapes that functions take for an argument: an axis less or more, or one more entry along an axis; "@4": if
# it has four axes.
TAKEN = {
    "a": "less more 0", "alibi_slopes": "more", "attention_mask": "less more", "b": "less more", "bias": "less more 0",
    "block_table": "1", "cache_seqlens": "less", "causal_offset": "less", "cu_seqlens": "0", "cu_seqlens_q": "0",
    "cu_seqlens_kv": "0",
    "decay": "less more", "flash_attention_with_kvcache query": "1",
    "g": "less more 0 1 2 3", "kv_mask": "1", "kv_positions": "more", "kv_segment_ids": "1", "mask": "less 0 1 2 3",
    "outs": "4", "packed": "1", "q_mask": "1", "q_positions": "more", "relative_bias": "1", "s": "less@4 more 0 1 2 3",
    "segment_ids": "less more 0 1 2", "softmax_aux": "less 1", "state": "0", "table": "0 1", "value": "3",
    "weight": "1", "x": "less more 0 1 2 3", "cdiv a": "less more 0 1", "pack x": "1 2 3", "short_convolution x": "0 1",
    "MaskInfo attention_mask": "less 0 1 2 3", "flash_attention_with_kvcache bias": "less 0 3",
    "flash_attention_with_kvcache attention_mask": "less 0 3",
    "attention_statistics_with_kvcache query": "1", "attention_statistics_with_kvcache bias": "less 0 3",
    "attention_statistics_with_kvcache attention_mask": "less 0 3",
    "attention_statistics_with_kvcache k_cache": "0 1",
    "attention_mask_to_padding_segment_ids attention_mask": "less more 0 1 2 3",
    "mask_to_segment_ids mask": "less more 0 1 2 3",
    "MaskInfo q_positions": "more 0", "MaskInfo kv_positions": "more 0", "MaskInfo q_segment_ids": "1",
    "attention_mask_to_qkv_cu_seqlens attention_mask": "less 0 1 2 3",
}  # fmt: skip


def of_other_shapes(x, taken: str) -> Iterator[np.ndarray]:
    if isinstance(x, np.ndarray) and x.ndim:
        forms = {"more": x[None]} | ({"less": x[0, ...]} if len(x) else {})
        forms |= {str(a): np.concatenate([x, x.take([-1], a)], a) for a in range(x.ndim) if x.shape[a]}
        yield from (form for name, form in forms.items() if not {name, f"{name}@{x.ndim}"} & {*taken.split()})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_shapes_are_refused(name):
    """By the name of one of the arguments that do not fit each other; and nothing is written."""
    for argument, arguments in right(name):
        taken = TAKEN.get(f"{name} {argument}", TAKEN.get(argument, ""))
        for x in of_other_shapes(arguments[argument], taken):
            given = right_again(arguments) | {argument: x}
            before = Before(TARGETS[name], given)
            with pytest.raises((TypeError, ValueError), match=r"(?s) must .*got ") as error:
                TARGETS[name].call(**given)
            assert not before.changed(False, False), (argument, x.shape)
            said = set(re.findall(r"\w+", str(error.value)))
            assert said & {*arguments, *ALSO_CALLED.values(), "shape"}, (argument, x.shape, error.value)


TAKEN_BY_HANDLERS = {
    "words": "more 0", "kept": "1", "state": "0", "cu_seqlens": "0", "cache_seqlens": "less", "block_table": "1",
    "alibi_slopes": "0", "XLA attention_statistics query": "1",  # of which some are chosen
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in NAMES])
def test_buffers_of_other_shapes_are_refused(name):
    """By handlers of XLA, as where a program was changed after its export: none reads beyond a buffer."""
    for seed in range(12):
        arguments = TARGETS[name].arguments(np.random.default_rng(seed))
        if max(x.ndim for x in arguments.values()) == 5:  # two calls at once
            continue
        for argument in arguments:
            taken = TAKEN_BY_HANDLERS.get(f"{name} {argument}", TAKEN_BY_HANDLERS.get(argument, ""))
            for x in of_other_shapes(arguments[argument], taken):
                with pytest.raises(ValueError, match=r"must|fit|too few|differ"):
                    TARGETS[name].call(**right_again(arguments) | {argument: x})


class Angry:
    def __array__(self, dtype=None, copy=None):
        raise ZeroDivisionError("not today")


@pytest.mark.parametrize("name", NAMES)
def test_an_array_that_raises(name):
    for argument, arguments in right(name):
        value = arguments[argument]
        asked = argument not in GIVEN_BACK.get(name, ()) and argument not in TARGETS[name].written
        if isinstance(value, np.ndarray) and value.ndim and asked:
            with pytest.raises(ZeroDivisionError, match="not today"):
                TARGETS[name].call(**right_again(arguments) | {argument: Angry()})


def public(name: str) -> list:
    return list(inspect.signature(getattr(attnmask, name)).parameters.values())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_missing_unknown_and_surplus_arguments(name):
    """And the arguments that a function has are those of the table's rows for it."""
    function, drawn = getattr(attnmask, name), list(right(name))
    _, arguments = drawn[0] if drawn else ("", {})
    own = {parameter.name for parameter in public(name)}
    rows = [row for row in NAMES if row.partition(",")[0].partition(" of ")[0] == name]
    found = {argument for row in rows for argument, _ in right(row)}
    assert found - OF_PULLBACKS <= own <= found | NOT_DRAWN.get(name, set()), own ^ found
    given = {argument: x for argument, x in arguments.items() if argument in own}
    with pytest.raises(TypeError, match="nonsense"):
        function(**given, nonsense=1)
    with pytest.raises(TypeError):
        function(*given.values(), *range(60))
    for parameter in public(name):
        if parameter.default is parameter.empty and parameter.name in given:
            with pytest.raises(TypeError, match=parameter.name):
                function(**{argument: x for argument, x in given.items() if argument != parameter.name})


NOT_DRAWN = {f"{name}_vjp": {"return_state"} for name in ("linear_attention", "short_convolution")} | {
    "flash_attention_vjp": {"return_lse"}, "flash_attention_bwd": {"softmax_aux", "grad_softmax_aux"},
    "flash_attention_bwd_vjp": {"softmax_aux"},
}  # fmt: skip
OF_PULLBACKS = {"dout", "dlse", "d_relative_bias", "x", "g"}
ENTRIES = [([3, 5], 0, 3), ([-7, 5], 0, -7), ([0, 4, 2, 5], 2, 2), ([0, 4, 2, 1], 2, 2), ([0, -3, -4], 1, -3)]
ENTRIES += [([*range(70_001), 69_990, 80_000, 12], 70_001, 69_990)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_first_bad_entry_of_starts_is_told(name):
    for argument, arguments in right(name):
        if argument in STARTS and not name.startswith(OF_PAIRS):
            for starts, index, value in ENTRIES:
                for dtype in (np.int32, np.int64):
                    with pytest.raises(ValueError, match=rf"\b{argument} must ") as error:
                        TARGETS[name].call(**right_again(arguments) | {argument: np.array(starts, dtype)})
                    numbers = re.findall(r"-?\d+", str(error.value).replace(",", ""))
                    assert {str(index), str(value)} <= set(numbers), (error.value, index, value)


# Results


@pytest.mark.repeats
@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if "_num_" not in name and name != "show_config"]
)
def test_any_number_of_threads_gives_the_same_bits(name, set_threads):
    for seed in range(5):
        digests = []
        for threads in (1, 2, 5):
            set_threads(threads)
            arguments = TARGETS[name].arguments(np.random.default_rng(seed))
            digests.append(digest(TARGETS[name].call(**arguments)))
        assert digests.count(digests[0]) == 3, seed


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name[0].islower()])
def test_results_are_new_arrays_in_one_piece(name):
    """Also of arguments that are not: a result shares no memory with what it was made of, but for `out`."""
    for _, arguments in right(name):
        given = {
            argument: np.asfortranarray(x) if isinstance(x, np.ndarray) and argument != "out" else x
            for argument, x in right_again(arguments).items()
        }
        results = arrays_in(TARGETS[name].call(**given))
        for result in results:
            assert type(result) is np.ndarray
            assert result is given.get("out") or result.flags.c_contiguous
            inputs = [x for argument, x in given.items() if argument not in TARGETS[name].written]
            assert not any(np.shares_memory(result, x) for x in arrays_in(inputs))


WITH_OUT = [name for name in NAMES if "out" in TARGETS[name].written and any(right(name, "out"))]


@pytest.mark.parametrize("name", WITH_OUT)
def test_out_is_filled_or_refused(name):
    """It is filled and returned, whatever its strides; what it cannot be is refused, and nothing is written."""
    target = TARGETS[name]
    _, arguments = next(right(name, "out"))
    out = arguments["out"]
    expected = target.call(**right_again(arguments) | {"out": out})
    assert any(result is out for result in arrays_in(expected))
    expected = out.copy()
    wide = np.ones([2 * size + 2 for size in out.shape], out.dtype)
    places = tuple(slice(1, 1 + 2 * size, 2) for size in out.shape)
    strided, around = wide[places], np.ones(wide.shape, bool)
    around[places] = False
    for form in (np.asfortranarray(out), out[..., ::-1], strided):
        form[...] = 0
        assert any(
            result is form for result in arrays_in(target.call(**right_again(arguments) | {"out": form}))
        )
        assert same(target, [expected], [form])
    assert (wide[around] == 1).all()
    read_only = out.copy()
    read_only.flags.writeable = False
    other = np.float64 if out.dtype != np.float64 else np.float32
    bad = [
        *(out[None], out[..., :-1], out.astype(other)),
        *([out.astype(out.dtype.newbyteorder("S"))] if out.itemsize > 1 else []),
        *(read_only, np.lib.stride_tricks.as_strided(out, strides=(0,) * out.ndim)),
        *([[1.0]], "x", 1.0, True, (1, 2), memoryview(b"abcd")),
    ]
    problems = [refused(target, arguments, "out", value) for value in bad]
    own = ("out", "dout", "dlse", "dstate")  # those of gradients come later
    for argument, arguments in right(name, "out"):
        x = arguments[argument]
        if isinstance(x, np.ndarray) and x.nbytes and argument not in own:
            problems += [
                shared(target, arguments, argument, "out"),
                shared(target, arguments, "out", argument),
            ]
    assert not any(problems), "\n".join(filter(None, problems))


def shared(target: Target, arguments: Arguments, first: str, second: str) -> str:
    """The second begins with the last number of the first, which is in native byte order or, beside `out`, not."""
    written = second if second in target.written else first
    for swapped in (False, True) if written == "out" != first else (False,):
        x, other = arguments[first], arguments[second]
        x = x.astype(x.dtype.newbyteorder("S")) if swapped else x
        start = x.nbytes - x.itemsize
        memory = np.zeros(start + max(other.nbytes, x.itemsize) + other.itemsize, np.uint8)
        start += -start % other.itemsize
        if start >= x.nbytes:
            continue
        views = memory[: x.nbytes].view(x.dtype), memory[start : start + other.nbytes].view(other.dtype)
        given = {first: views[0].reshape(x.shape), second: views[1].reshape(other.shape)}
        for name, array in {written: arguments[written], first: x, second: other}.items():
            if name != written:  # so the number that they share is its own
                given[name][...] = array
        lying = {name: array.view(Subclass) for name, array in given.items()}
        for one in (given, lying) if target.subclasses else (given,):
            if problem := refused(target, arguments | one, written, one[written]):
                return f"{second} shared with {first}: {problem}"
    return ""


@pytest.mark.parametrize("name", [name for name in NAMES if TARGETS[name].written - {"out"}])
def test_what_is_written_shares_no_memory(name):
    """States and caches, with tokens and with each other; what is small has been read before."""
    target, problems = TARGETS[name], []
    for _, arguments in right(name):
        if "attention_with_kvcache" in name and "key" not in arguments:
            continue  # nothing is written
        arrays = [
            *target.written & arguments.keys() - {"out"},
            *{"query", "key", "value", "x"} & arguments.keys(),
        ]
        for first, second in itertools.permutations(arrays, 2):
            if {first, second} & target.written and arguments[first].nbytes and arguments[second].nbytes:
                problems.append(shared(target, right_again(arguments), first, second))
    assert not any(problems), "\n".join(filter(None, problems))


@pytest.mark.parametrize("name", WITH_OUT)
def test_a_subclass_is_asked_nothing(name):
    """Not even where an input and `out` lie between each other, so that NumPy has to search for what they share."""
    target = TARGETS[name]
    _, arguments = next(right(name, "out"))
    out = arguments["out"]
    target.call(**right_again(arguments) | {"out": out})
    for argument, x in right_again(arguments).items():
        if not isinstance(x, np.ndarray) or argument in target.written or x.itemsize != out.itemsize:
            continue
        cells = np.zeros((max(x.size, out.size), 2), f"V{x.itemsize}")
        mine, other = cells[: x.size, 0].view(x.dtype), cells[: out.size, 1].view(out.dtype)
        mine[...], other[...] = x.reshape(-1), 0
        lying = other.reshape(out.shape).view(Subclass)
        given = right_again(arguments) | {argument: mine.reshape(x.shape).view(Subclass), "out": lying}
        result = target.call(**given)
        assert any(each is lying for each in (result if isinstance(result, tuple) else [result])), argument
        assert same(target, [out], [other.reshape(out.shape)]), argument
        assert mine.tobytes() == x.tobytes(), argument
