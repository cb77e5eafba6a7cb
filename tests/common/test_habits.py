"""Habits of other libraries: each row of the table is tried in every function and face that it concerns, with shapes of
real models; and ordinary calls are silent.
"""

import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest

import attnmask
from attnmask import MaskInfo
from attnmask._common import warnings as _warnings
from attnmask._faces.habits import HABITS
from attnmask.operations import OperationRegistry

pytestmark = pytest.mark.filterwarnings(
    "error::attnmask.AttnmaskWarning", "ignore:.*torch.jit", "ignore::DeprecationWarning"
)


# Faces


class Face(NamedTuple):
    """The functions of a library, its arrays, and the ways in which its functions are called."""

    name: str
    module: ModuleType
    of: Callable
    ways: dict[str, Callable]

    def forms(self, name: str = "flash_attention") -> dict[str, Callable]:
        if self.name == "numpy":
            return (
                ATTENDING
                if name == "flash_attention"
                else {x: getattr(attnmask, x) for x in (name, f"{name}_vjp")}
            )
        return {way: partial(call, getattr(self.module, name)) for way, call in self.ways.items()}


def backward(query, key, value, *more, **named):
    out = zeros(*query.shape[:-1], value.shape[-1])
    lse = zeros(*query.shape[:-3], query.shape[-2], query.shape[-3])
    return attnmask.flash_attention_bwd(out, query, key, value, out, lse, *more, **named)


def by_operator(name, query, key, value, attention_mask=None, *more, **named):
    return OperationRegistry.create(name)(query, key, value, attention_mask, *more, **named)


ATTENDING = {x: getattr(attnmask, f"flash_attention{x}") for x in ("", "_fwd", "_vjp")} | {"_bwd": backward}
ATTENDING |= {name: partial(by_operator, name) for name in ("flash", "vanilla")}


def eager(function, *args, **more):
    return function(*args, **more)


def of_torch() -> Face:
    torch = pytest.importorskip("torch")

    def graph(function, *args, **more):
        torch._dynamo.reset()
        return torch.compile(partial(function, **more), fullgraph=True, backend="eager")(*args)

    def learning(function, query, *args, **more):
        return function(query.clone().requires_grad_(), *args, **more)

    def of(x):
        return torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x

    return Face("torch", attnmask.torch, of, {"eager": eager, "gradient": learning, "graph": graph})


def of_jax() -> Face:
    jax = pytest.importorskip("jax")

    def jit(function, query, *args, **more):
        return jax.jit(lambda query: function(query, *args, **more))(query)

    def of(x):
        return jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x

    return Face("jax", attnmask.jax, of, {"eager": eager, "jit": jit})


FACES = {"numpy": lambda: Face("numpy", attnmask, lambda x: x, {}), "torch": of_torch, "jax": of_jax}


@pytest.fixture(params=FACES)
def face(request):
    return FACES[request.param]()


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def told(call) -> list[str]:
    """Return the warnings of a call, each of which shows a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", attnmask.AttnmaskWarning)
        call()
    return [str(warning.message) for warning in caught]


def told_once(call, *fragments: str) -> None:
    """Expect one warning the first time, and none later."""
    _warnings.forget()
    (message,) = told(call)
    for fragment in fragments:
        assert fragment in message
    assert not told(call), "it was told before"


# Attention: for each habit, what the message names, and arguments of calls in every form

SMALL, LONG = zeros(1, 4, 4, 8), zeros(1, 10, 2, 8)
ROWS = zeros(4, 4, 2, 8)  # as many batch rows as tokens
ONE = zeros(2, 1, 4, 8)
FUTURE = np.triu(np.ones((4, 4), bool), 1)
PADDING = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
UNEQUAL = MaskInfo.from_cu_seqlens([0, 2, 5], cu_seqlens_kv=[0, 3, 7], packed=True)
LATER = MaskInfo.from_cu_seqlens([0, 2, 6], cu_seqlens_kv=[0, 2, 9], packed=True)
STARTS = {"cum_seqlens_q": np.array([0, 1, 2]), "cum_seqlens_k": np.array([0, 1, 5])}
FIVE, SEVEN = zeros(1, 5, 4, 8), zeros(1, 7, 2, 8)
HEADS_FIRST = "heads before tokens"
ATTENTION = {
    HEADS_FIRST: ("x.swapaxes(1, 2)",),
    "causal": ('causal_offset="bottom-right"', "causal_offset=0"),
    "packed sequences": ("within_segments=True", "apply_causal"),
    "inverted mask": ("~attention_mask",),
    "padding mask": ("attention_mask[:, None, None, :]", "attention_mask[None, None]"),
    "graded mask": ("`bias`", "!= 0"),
    "dropout without a seed": ("dropout_seed=0", "every call"),
    "sinks": ("softmax_aux[:, None]", "softmax_aux[None, :]"),
}
CALLS = [  # query, key and value, and what else is given, a mask at times as a function that makes it
    (HEADS_FIRST, "Llama 3", zeros(1, 32, 512, 128), zeros(1, 8, 512, 128), {}),
    (HEADS_FIRST, "Llama 3, 70B", zeros(1, 64, 256, 8), zeros(1, 8, 256, 8), {}),
    (HEADS_FIRST, "one key head", zeros(2, 16, 100, 8), zeros(2, 1, 100, 8), {}),
    (HEADS_FIRST, "as many heads", *[zeros(1, 12, 384, 8)] * 2, {}),
    (HEADS_FIRST, "two heads", *[zeros(1, 2, 65, 4)] * 2, {}),
    ("causal", "one query", ONE, zeros(2, 9, 2, 8), {"causal": True}),
    ("causal", "a chunk", SMALL, LONG, {"causal": True}),
    ("causal", "with a window", SMALL, LONG, {"causal": True, "sliding_window": 3}),
    ("causal", "packed", zeros(2, 4, 8), zeros(5, 2, 8), {"causal": True, **STARTS}),
    ("packed sequences", "causal", FIVE, SEVEN, {"attention_mask": UNEQUAL, "causal": True}),
    ("packed sequences", "window", FIVE, SEVEN, {"attention_mask": UNEQUAL, "sliding_window": (2, 0)}),
    ("inverted mask", "[Q, K]", SMALL, zeros(1, 4, 2, 8), {"attention_mask": FUTURE}),
    ("inverted mask", "[B, H, Q, K]", ROWS, ROWS, {"attention_mask": np.tile(FUTURE, (4, 2, 1, 1))}),
    ("inverted mask", "a few pairs", SMALL, SMALL, {"attention_mask": np.eye(4, k=2, dtype=bool)}),
    ("inverted mask", "a MaskInfo", SMALL, SMALL, {"attention_mask": lambda: MaskInfo(FUTURE[None])}),
    ("inverted mask", "a MaskInfo without an array", SMALL, SMALL, {"attention_mask": lambda: ~MaskInfo.causal(4)}),
    ("inverted mask", "a MaskInfo with terms", SMALL, SMALL,
     {"attention_mask": lambda: MaskInfo(FUTURE[None]) & MaskInfo.from_lengths([3], max_len=4)}),
    ("padding mask", "integers", ROWS, ROWS, {"attention_mask": PADDING}),
    ("padding mask", "bools", ROWS, ROWS, {"attention_mask": PADDING > 0}),
    ("padding mask", "floats", ROWS, ROWS, {"attention_mask": PADDING.astype(np.float32)}),
    ("graded mask", "halves", SMALL, SMALL, {"attention_mask": np.full((4, 4), 0.5, np.float32)}),
    ("dropout without a seed", "flash_attention", SMALL, SMALL, {"dropout_prob": 0.1}),
    ("dropout without a seed", "packed", *[zeros(4, 2, 8)] * 2, {"dropout_prob": 0.1, "cum_seqlens_q": [0, 4]}),
    ("sinks", "[H]", SMALL, SMALL, {"softmax_aux": zeros(4)}),
]  # fmt: skip
UNTOLD = {"torch": {"dropout without a seed"}}  # PyTorch draws a seed


@pytest.mark.parametrize(
    ("habit", "case", "query", "key", "more"), CALLS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_attention(face, habit, case, query, key, more):
    arrays = [face.of(x) for x in (query, key, key)]
    for name, form in face.forms().items():
        given = {key: x() if callable(x) else face.of(x) for key, x in more.items()}  # masks are asked once
        if (name == "jit" and case == "packed") or (name == "vanilla" and case == "Llama 3"):
            continue
        if habit in UNTOLD.get(face.name, ()):
            form(*arrays, **given)
        else:
            told_once(partial(form, *arrays, **given), *ATTENTION[habit])


ERRORS = [
    ("mask of zeros", {"attention_mask": zeros(4, 4)}, ("`bias`", "a bool mask")),
    ("mask of zeros", {"attention_mask": zeros(1, 1, 4, 4, dtype=np.float64)}, ("`bias`", "a bool mask")),
    ("mask of zeros", {"attention_mask": -zeros(4, 4)}, ("`bias`",)),
    ("dropout as a bias", {"bias": 0.1}, ("bias must have axes", "dropout_prob=")),
    ("dropout as a bias", {"bias": np.array(0.1, np.float32)}, ("dropout_prob=",)),
    ("dropout as a mask", {"attention_mask": 0.0}, ("attention_mask must have axes", "dropout_prob=")),
]


@pytest.mark.parametrize(("habit", "more", "fragments"), ERRORS, ids=range(len(ERRORS)))
def test_attention_that_is_refused(face, habit, more, fragments):
    arrays, given = [face.of(SMALL)] * 3, {name: face.of(x) for name, x in more.items()}
    for form in face.forms().values():
        with pytest.raises(Exception, match=r"(?s).*") as raised:
            form(*arrays, **given)
        for fragment in fragments:
            assert fragment in str(raised.value)


def test_each_call_of_torch_drops_other_weights(torch):
    """As ``torch.manual_seed`` says, in graphs too; the generator stays where nothing is drawn."""
    x, attend = torch.randn(1, 9, 2, 8), partial(attnmask.torch.flash_attention, dropout_prob=0.5)
    graph = torch.compile(lambda x: attend(x, x, x), fullgraph=True, backend="aot_eager")
    results = []
    for call in (lambda x: attend(x, x, x), graph):
        torch.manual_seed(5)
        results += [call(x), call(x)]
        y = x.clone().requires_grad_()
        torch.manual_seed(5)
        call(y).sum().backward()
        results.append(y.grad)
    for one, other in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(*results[:2])
    before = torch.get_rng_state()
    attend(x, x, x, dropout_seed=3)
    attnmask.torch.flash_attention(x, x, x, dropout_prob=0.0)
    assert torch.equal(torch.get_rng_state(), before)


# Caches


def attend_to_cache(face, tokens, mask, **more):
    query, cache = (face.of(zeros(1, n, 2, 8)) for n in (tokens, 9))
    return face.module.flash_attention_with_kvcache(
        query, cache, cache + 0, cache_seqlens=tokens, attention_mask=face.of(mask), **more
    )


def test_caches(face):
    """Their queries are the last tokens, so that `causal` leaves no doubt."""
    told_once(lambda: attend_to_cache(face, 4, FUTURE), "~attention_mask")
    told_once(lambda: attend_to_cache(face, 4, MaskInfo(FUTURE[None])), "~attention_mask")
    with pytest.raises(ValueError, match="`bias`"):
        attend_to_cache(face, 4, zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match="dropout_prob="):
        attend_to_cache(face, 4, None, bias=0.1)
    query, cache = face.of(zeros(1, 1, 2, 8)), face.of(zeros(1, 9, 2, 8))
    face.module.flash_attention_with_kvcache(query, cache, cache + 0, causal=True)
    attend_to_cache(face, 4, np.tri(4, dtype=bool))


# Linear attention

LINEAR = {HEADS_FIRST: ("x.swapaxes(1, 2)",), "decay": ("logarithm", "np.log(decay)")}


@pytest.mark.parametrize(("habit", "x", "more"), [
    (HEADS_FIRST, zeros(1, 16, 300, 8), {}),
    (HEADS_FIRST, zeros(2, 32, 65, 4), {}),
    ("decay", zeros(1, 5, 2, 4), {"decay": np.array([0.9, 0.5], np.float32)}),
    ("decay", zeros(1, 5, 2, 4), {"decay": np.full((1, 5, 2), 0.9, np.float32)}),
], ids=["a head each", "as many heads", "of a head", "of a token"])  # fmt: skip
def test_linear_attention(face, habit, x, more):
    arrays, given = [face.of(x)] * 3, {name: face.of(x) for name, x in more.items()}
    for form in face.forms("linear_attention").values():
        told_once(partial(form, *arrays, **given), *LINEAR[habit])


def test_a_step_of_linear_attention(face):
    token, state, decay = (
        face.of(x) for x in (zeros(1, 2, 4), zeros(1, 2, 4, 4), np.full(2, 0.9, np.float32))
    )
    told_once(lambda: face.module.linear_attention_step(token, token, token, state, decay=decay), "logarithm")
    face.module.linear_attention_step(token, token, token, state, decay=-decay)
    many = face.of(zeros(9, 128, 4))
    face.module.linear_attention_step(many, many, many, face.of(zeros(9, 128, 4, 4)))


# Masks

TRI = np.tri(4)
TRAPS = {
    "causal": ('offset="bottom-right"', "offset=0"),
    "packed sequences": ("within_segments=True",),
    "pairs": ("pairs of start and end", "packed=True"),
    "mask of pairs": ("[B, T]", "attention_mask[None, None]", "from_padding_mask"),
    "graded mask": ("`bias`",),
}
PAIRS = [0, 3, 5, 9]
TRAPPED = [
    ("causal", lambda: MaskInfo.causal(4, 10)),
    ("causal", lambda: MaskInfo.full(4, 10).apply_causal()),
    ("causal", lambda: MaskInfo.full(1, 10).apply_causal()),
    ("causal", lambda: UNEQUAL.apply_causal(within_segments=True)),
    ("causal", lambda: MaskInfo.from_segments([[0, 0]], [[0, 0, 0]]).apply_causal(within_segments=True)),
    ("causal", lambda: LATER.apply_causal()),  # later sequences have other lengths
    ("packed sequences", lambda: UNEQUAL.apply_causal()),
    ("packed sequences", lambda: UNEQUAL.apply_causal("bottom-right")),
    ("packed sequences", lambda: UNEQUAL.apply_sliding_window((2, 0))),
    ("packed sequences", lambda: UNEQUAL.apply_chunked(5)),
    ("packed sequences", lambda: UNEQUAL.apply_prefix(1).apply_causal()),
    ("packed sequences", lambda: MaskInfo.from_cu_seqlens(
        [0, 2, 5], cu_seqlens_kv=[0, 3, 7], packed=True, max_q_len=6, max_kv_len=9).apply_causal()),
    ("pairs", lambda: MaskInfo.from_cu_seqlens(PAIRS, max_q_len=9)),
    ("pairs", lambda: attnmask.cu_seqlens_to_mask(np.array(PAIRS), 9)),
    ("pairs", lambda: attnmask.qkv_cu_seqlens_to_attention_mask(PAIRS, max_q_len=9)),
    ("pairs", lambda: attnmask.qkv_cu_seqlens_to_qkv_masks(PAIRS, max_q_len=9, cu_seqlens_kv=[0, 2, 4, 9])),
    ("mask of pairs", lambda: MaskInfo.from_attention_mask(TRI)),
    ("mask of pairs", lambda: MaskInfo.from_attention_mask(TRI.astype(int))),
    ("mask of pairs", lambda: MaskInfo.from_attention_mask(1 - TRI, mask_is_valid=False)),
    ("mask of pairs", lambda: MaskInfo.dynamic_init(attention_mask=TRI)),
    ("mask of pairs", lambda: MaskInfo.from_attention_mask(np.eye(5))),
    ("mask of pairs", lambda: MaskInfo.from_attention_mask(PADDING)),
    ("graded mask", lambda: MaskInfo(np.full((1, 2, 3), 0.5))),
    ("graded mask", lambda: MaskInfo.from_padding_mask([[1.0, 0.5]])),
    ("graded mask", lambda: attnmask.mask_to_segment_ids(np.array([[1.0, 2.0]]))),
]  # fmt: skip


@pytest.mark.parametrize(("habit", "call"), TRAPPED, ids=range(len(TRAPPED)))
def test_masks(habit, call):
    told_once(call, *TRAPS[habit])


def shard(*shape, **more):
    return attnmask.shard_sequence(zeros(*shape), 2, 0, **more)


FULL = MaskInfo.full(9)
REFUSED = [
    ("mask of zeros", lambda: MaskInfo(zeros(1, 2, 3)), ValueError, "`bias`"),
    ("mask of zeros", lambda: MaskInfo.from_attention_mask(zeros(1, 2, 3)), ValueError, "a bool mask"),
    ("mask of zeros", lambda: MaskInfo.from_padding_mask(zeros(1, 2)), ValueError, "`bias`"),
    ("mask of zeros", lambda: MaskInfo.full(3).replace(attention_mask=zeros(1, 3, 3)), ValueError, "`bias`"),
    ("mask of zeros", lambda: attnmask.mask_to_segment_ids(zeros(2, 3)), ValueError, "mask must not be"),
    ("mask of zeros", lambda: attnmask.prepare_lens_from_mask(zeros(2, 3)), ValueError, "`bias`"),
    ("comparison with an array", lambda: np.ones((9, 9)) == FULL, TypeError, "np.array_equal(mask, array)"),
    ("comparison with an array", lambda: np.ones((9, 9)) != FULL, TypeError, "np.array_equal(mask, array)"),
    ("comparison with an array", lambda: np.ones((9, 9)) == FULL, TypeError, "np.array_equal(mask, array)"),
    ("constructor of a mask", lambda: FULL.causal(9), TypeError, "apply_causal"),
    ("constructor of a mask", lambda: FULL.full(9), TypeError, "MaskInfo.full"),
    ("constructor of a mask", lambda: FULL.from_lengths([9]), TypeError, "MaskInfo.from_lengths"),
    ("packed tokens", lambda: shard(8, 4, 32), ValueError, "axis=0"),
    ("packed tokens", lambda: shard(8, 16, 32, cu_seqlens=[0, 3, 8]), ValueError, "write axis=0"),
]


@pytest.mark.parametrize(("habit", "call", "error", "fragment"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(habit, call, error, fragment):
    with pytest.raises(error) as raised:
        call()
    assert fragment in str(raised.value)


def test_the_table_is_tried():
    """Each row is, in one of the tables above."""
    tried = {row[0] for row in (*CALLS, *ERRORS, *TRAPPED, *REFUSED)} | {*LINEAR}
    assert {habit.name for habit in HABITS} == tried


# Keywords

KEYWORDS = [
    ("flash_attention", "is_causal", "causal="),
    ("flash_attention", "attn_mask", "attention_mask="),
    ("flash_attention", "dropout_p", "dropout_prob="),
    ("flash_attention", "p", "dropout_prob="),
    ("flash_attention", "window_size", "sliding_window="),
    ("flash_attention", "return_residual", "return_lse="),
    ("flash_attention", "max_seqlen_q", "leave it out"),
    ("flash_attention_with_kvcache", "page_table", "block_table="),
    ("flash_attention_with_kvcache", "softcap", "logits_soft_cap="),
    ("flash_attention_with_kvcache", "k_descale", "k_scale="),
    ("linear_attention", "g", "decay="),
    ("linear_attention", "output_final_state", "return_state="),
    ("linear_attention", "use_qk_l2norm_in_kernel", "normalize_qk="),
    ("linear_attention", "head_first", "x.swapaxes(1, 2)"),
    ("linear_attention", "cu_seq_lens_q", "cu_seqlens="),
    ("linear_attention_step", "g", "decay="),
    ("linear_attention_step", "ssm_state_indices", "state_indices="),
    ("short_convolution", "output_final_state", "return_state="),
    ("short_convolution", "initial_states", "initial_state="),
    ("short_convolution", "seq_idx", "cu_seqlens="),
    ("short_convolution_step", "conv_state_indices", "state_indices="),
]
POSITIONAL = {"flash_attention_with_kvcache": 3, "linear_attention_step": 4, "short_convolution": 2}


@pytest.mark.parametrize(("function", "keyword", "instead"), KEYWORDS)
def test_keywords(face, function, keyword, instead):
    call = getattr(face.module, function)
    arrays = [face.of(zeros(1, 2, 2, 8))] * POSITIONAL.get(function, 3)
    with pytest.raises(TypeError) as raised:
        call(*arrays, **{keyword: None})
    assert str(raised.value).startswith(f"{function}() got an unexpected keyword argument {keyword!r}; ")
    assert instead in str(raised.value)


@pytest.mark.parametrize(
    ("keyword", "instead"),
    [
        ("num_layers", "layers="),
        ("head_size", "head_dim="),
        ("v_head_dim", "value_head_dim="),
        ("num_key_value_heads", "kv_heads="),
        ("num_blocks", "pages="),
    ],
)
def test_keywords_of_a_cache(keyword, instead):
    for more in ({}, {"kv_heads": 1, "head_dim": 8, "pages": 4, "dtype": "float32"}):
        with pytest.raises(TypeError, match=rf"KVCache\(\) got .* '{keyword}'; write {instead}"):
            attnmask.KVCache(**more, **{keyword: 1})


SPELLINGS = [  # the function, what is given, and its own name
    ("flash_attention", {"scale": 0.3}, "softmax_scale"),
    ("flash_attention", {"cu_seqlens_q": [0, 1, 2], "cu_seqlens_k": [0, 1, 2]}, "cum_seqlens_q"),
    ("flash_attention_with_kvcache", {"scale": 0.3}, "softmax_scale"),
    ("attention_weights", {"scale": 0.3}, "softmax_scale"),
    ("linear_attention", {"softmax_scale": 0.3}, "scale"),
]


@pytest.mark.parametrize(("function", "given", "own"), SPELLINGS)
def test_other_spellings(face, function, given, own):
    """They mean the same, and a warning says what the function calls it; both at once are an error."""
    call = getattr(face.module, function)
    rng = np.random.default_rng(0)
    inputs = [face.of(rng.standard_normal((1, 2, 2, 8)).astype(np.float32)) for _ in range(3)]
    inputs = inputs[: 2 if function == "attention_weights" else 3]
    places = {"scale": "softmax_scale", "softmax_scale": "scale"}
    usual = {places.get(name, name.replace("cu_", "cum_")): value for name, value in given.items()}
    expected = call(*inputs, **usual)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = call(*inputs, **given)
    assert any(f" as {own!r}: write {own}=" in str(x.message) for x in said)
    assert len(said) == len(given)
    if isinstance(found, tuple):  # JAX returns caches as well
        found, expected = found[0], expected[0]
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    with pytest.raises(TypeError, match="by two names"):
        call(*inputs, **usual, **given)


def test_other_spellings_of_a_cache():
    given = {"kv_heads": 1, "pages": 4, "dtype": "float32"}
    with pytest.warns(
        attnmask.AttnmaskWarning, match=r"KVCache\(\) takes 'depth' as 'head_dim': write head_dim="
    ):
        cache = attnmask.KVCache(**given, depth=8, value_head_dim=3)
    assert repr(cache) == repr(attnmask.KVCache(1, 8, pages=4, dtype="float32", value_head_dim=3))
    with pytest.raises(TypeError, match=r"KVCache\(\) got 'head_dim' by two names"):
        attnmask.KVCache(**given, depth=8, head_dim=8)
    ids, x = [cache.new_sequence()], np.ones((1, 1, 8), np.float32)
    with (
        cache.step(ids, 1) as step,
        pytest.warns(attnmask.AttnmaskWarning, match="'scale' as 'softmax_scale'"),
    ):
        step.attend(0, x, x, x[..., :3], scale=0.5)


def test_keywords_of_a_paged_cache():
    pytest.importorskip("transformers")
    for keyword in ("num_layers", "head_dim", "num_key_value_heads"):
        with pytest.raises(TypeError, match=rf"PagedCache\(\) got .* '{keyword}'; write config="):
            attnmask.transformers.PagedCache(pages=4, **{keyword: 1})


# Ordinary calls

MODELS = {  # query heads, key heads, head_dim
    "GPT-2": (12, 12, 64), "Llama 2": (32, 32, 128), "Llama 3": (32, 8, 128), "Llama 3, 70B": (64, 8, 128),
    "Llama 3, 405B": (128, 8, 128), "Mistral": (32, 8, 128), "Qwen 3": (64, 4, 128), "Gemma 2": (16, 8, 256),
    "Falcon": (71, 1, 64), "DeepSeek V3": (128, 128, 192), "DeepSeek V3, absorbed": (128, 1, 576),
    "GPT-3": (96, 96, 128), "gpt-oss": (64, 8, 64), "Whisper": (20, 20, 64),
}  # fmt: skip


def ordinary(of, heads, kv_heads, channels):
    """Arguments of calls that mean what they say, by what they do. With as many heads on both sides, a prompt is long
    enough that it is no row of heads."""
    tokens = 9 if kv_heads < heads or heads <= 64 else heads // 2 + 1

    def x(n, heads, batch=1):
        return of(np.broadcast_to(np.float32(0), (batch, n, heads, channels)).copy())

    q, k, one, longer = x(tokens, heads), x(tokens, kv_heads), x(1, heads), x(tokens + 31, kv_heads)
    batch = [x(tokens, n, 2) for n in (heads, kv_heads, kv_heads)]
    padding = np.arange(tokens) < np.array([tokens, 3])[:, None]
    tri = np.tri(tokens, dtype=bool)
    starts = np.array([0, 2, 2, tokens])
    return {
        "prompt": ((q, k, k), {"causal": True}),
        "encoder": ((q, k, k), {}),
        "window": ((q, k, k), {"causal": True, "sliding_window": (4, 0)}),
        "decode": ((one, longer, longer), {}),
        "decode, causal": ((one, longer, longer), {"causal": True, "causal_offset": "bottom-right"}),
        "first token": ((one, longer, longer), {"causal": True, "causal_offset": 0}),
        "one token": ((one, x(1, kv_heads), x(1, kv_heads)), {"causal": True}),
        "cross-attention": ((q, longer, longer), {}),
        "more queries": ((x(tokens + 31, heads), k, k), {"causal": True}),
        "padding": (batch, {"attention_mask": of(padding[:, None, None])}),
        "padding only": (batch, {"attention_mask": of((padding & [[True], [False]])[:, None, None])}),
        "no pair": ((q, k, k), {"attention_mask": of(np.zeros((tokens, tokens), bool))}),
        "no pair, integers": ((q, k, k), {"attention_mask": of(np.zeros((tokens, tokens), np.int32))}),
        "np.tri": ((q, k, k), {"attention_mask": of(tri)}),
        "np.tri, padded": (batch, {"attention_mask": of(tri & padding[:, None, None])}),
        "left padding": (batch, {"attention_mask": of(tri & padding[:, None, None, ::-1])}),
        "floats": ((q, k, k), {"attention_mask": of(tri.astype(np.float32))}),
        "all ones": ((q, k, k), {"attention_mask": of(np.ones((tokens, tokens), np.float32))}),
        "upper triangle": ((q, k, k), {"attention_mask": of(tri.T)}),
        "packed": ((q[0], k[0], k[0]), {"cum_seqlens_q": of(starts), "causal": True}),
        "segments": ((q, k, k), {"q_segment_ids": of((np.arange(tokens) // 4)[None].astype(np.int32))}),
        "MaskInfo": ((q, k, k), {"attention_mask": MaskInfo.causal(tokens)}),
        "lengths": (
            batch,
            {"attention_mask": MaskInfo.from_lengths([tokens, 3], max_len=tokens).apply_causal()},
        ),
        "sinks": ((q, k, k), {"softmax_aux": of(zeros(heads, 1)), "causal": True}),
        "bias": ((q, k, k), {"bias": of(np.where(tri, 0, -np.inf).astype(np.float32))}),
        "dropout": ((q, k, k), {"dropout_prob": 0.1, "dropout_seed": 3}),
        "no dropout": ((q, k, k), {"dropout_prob": 0.0}),
    }


@pytest.mark.parametrize("model", MODELS)
def test_ordinary_calls(face, model):
    """More than 300 in NumPy; warnings are errors here."""
    if face.name != "numpy" and model not in ("Llama 3", "DeepSeek V3", "gpt-oss"):
        pytest.skip("tried in NumPy")
    for arrays, more in ordinary(face.of, *MODELS[model]).values():
        face.module.flash_attention(*arrays, **more)
    heads, kv_heads, channels = MODELS[model]
    query, cache = face.of(zeros(2, 1, heads, channels)), face.of(zeros(2, 40, kv_heads, channels))
    for count in (3, 39):
        face.module.flash_attention_with_kvcache(query, cache, cache + 0, cache_seqlens=count)
    token = face.of(zeros(2, 5, kv_heads, 8))
    value = face.of(zeros(2, 5, heads, 8))
    if kv_heads < 65:
        face.module.linear_attention(token, token, value, decay=face.of(-np.ones(heads, np.float32)))


def test_ordinary_masks():
    ones, band = np.ones((4, 4), bool), np.tril(np.triu(TRI, -1))
    for mask in (
        TRI, TRI.astype(int), ones, np.zeros((4, 4), int), np.tril(np.ones((4, 4)), -1), band,
        PADDING[:, None, None], PADDING[None, None], ~MaskInfo(FUTURE[None]), MaskInfo.full(4) & MaskInfo(TRI[None]),
        MaskInfo.from_padding_mask(PADDING), MaskInfo.from_lengths([4, 3, 2, 1]), MaskInfo(np.zeros((1, 4, 4), bool)),
        MaskInfo.from_segments([[-1] * 4]), ~MaskInfo.full(4),
        MaskInfo.from_attention_mask(FUTURE[None], mask_is_valid=False),
    ):  # fmt: skip
        attnmask.flash_attention(ROWS, ROWS, ROWS, mask)
    tokens = np.tri(1), np.tri(3, 4), np.tri(4, 3), np.ones((3, 3)), np.zeros((2, 2), bool), np.zeros((0, 0))
    for mask in (*tokens, TRI[None, None], TRI[None]):
        MaskInfo.from_attention_mask(mask)
    MaskInfo(zeros(1, 0, 3))  # no number is zero
    for q_len, kv_len in ((4, 4), (10, 4), (0, 4), (1, 1)):
        MaskInfo.causal(q_len, kv_len)
    for offset in (0, 6, "bottom-right", [0]):
        MaskInfo.causal(4, 10, offset)
        MaskInfo.full(4, 10).apply_causal(offset)
    MaskInfo.full(4, 10).apply_sliding_window((2, 0)).apply_chunked(3)
    LATER.apply_causal(0)
    UNEQUAL.apply_causal(0, within_segments=True)
    UNEQUAL.apply_causal("bottom-right", within_segments=True)
    for pairs in ([0, 3], [1, 3, 5, 9], [0, 3, 0, 9], []):
        MaskInfo.from_cu_seqlens(pairs, max_q_len=9)
        attnmask.cu_seqlens_to_mask(np.array(pairs, int), 9)
    for packed in (True, False):
        MaskInfo.from_cu_seqlens([0, 3, 5, 9], max_q_len=9, packed=packed)
    assert MaskInfo.full(3) == MaskInfo.full(3)
    assert all(MaskInfo.full(3) != other for other in (None, 1, "mask", np.ndarray))
    shapes = (8, 4, 32), (8, 4, 32), (2, 8, 32), (8, 4), (8, 2, 4, 3)
    for shape, axis in zip(shapes, (0, 1, None, None, None), strict=True):
        shard(*shape, axis=axis)


def test_ordinary_decays():
    x = zeros(1, 5, 2, 4)
    for decay in (
        zeros(2),
        np.array([-0.1, 0.2], np.float32),
        np.full(2, np.nan, np.float32),
        -np.ones((1, 5, 2, 4), np.float32),
    ):
        attnmask.linear_attention(x, x, x, decay=decay)
    many = zeros(1, 9, 72, 4)
    attnmask.linear_attention(many, many, many, cu_seqlens=[0, 4, 9])  # packed


# Warnings


def test_the_line_that_is_shown():
    def call():
        return attnmask.flash_attention_vjp(ONE, zeros(2, 9, 2, 8), zeros(2, 9, 2, 8), causal=True)

    with pytest.warns(attnmask.AttnmaskWarning) as caught:
        call()
    assert [(warning.filename, warning.lineno) for warning in caught] == [
        (__file__, call.__code__.co_firstlineno + 1)
    ]


def test_as_errors_they_are_raised_each_time():
    for _ in range(2):
        with pytest.raises(attnmask.AttnmaskWarning):
            MaskInfo.causal(4, 10)


def test_many_threads_are_told_once():
    barrier = threading.Barrier(8)

    def call():
        barrier.wait()
        MaskInfo.causal(4, 10)

    def start():
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert len(told(start)) == 1
    finally:
        sys.setswitchinterval(interval)
