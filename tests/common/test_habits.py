"""Habits of other libraries: each row of the table is tried in every function and face that it concerns, with shapes of
real models; and ordinary calls are silent.
"""

import sys
import threading
import warnings
from functools import partial

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


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    """As in a new process: no warning was given yet."""
    monkeypatch.setattr(_warnings, "_given", {})


# Faces


class Numpy:
    name = "numpy"
    module = attnmask

    def of(self, array):
        return array

    def forms(self):
        """The functions that attend, called as `flash_attention` is."""

        def backward(query, key, value, *more, **named):
            out, lse = (
                (
                    zeros(*query.shape[:3], value.shape[3]),
                    zeros(query.shape[0], query.shape[2], query.shape[1]),
                )
                if query.ndim == 4
                else (zeros(*query.shape[:2], value.shape[2]), zeros(query.shape[1], query.shape[0]))
            )
            return attnmask.flash_attention_bwd(out, query, key, value, out, lse, *more, **named)

        def operator(name, query, key, value, attention_mask=None, *more, **named):
            return OperationRegistry.create(name)(query, key, value, attention_mask, *more, **named)

        return {
            "flash_attention": attnmask.flash_attention,
            "flash_attention_fwd": attnmask.flash_attention_fwd,
            "flash_attention_vjp": attnmask.flash_attention_vjp,
            "flash_attention_bwd": backward,
            "flash": partial(operator, "flash"),
            "vanilla": partial(operator, "vanilla"),
        }

    def linear_forms(self):
        return {
            "linear_attention": attnmask.linear_attention,
            "linear_attention_vjp": attnmask.linear_attention_vjp,
        }


class Torch:
    name = "torch"

    def __init__(self):
        self.torch = pytest.importorskip("torch")
        self.module = attnmask.torch

    def of(self, array):
        return self.torch.from_numpy(np.array(array)) if isinstance(array, np.ndarray) else array

    def _forms(self, function):
        def graph(*args, **more):
            self.torch._dynamo.reset()
            return self.torch.compile(partial(function, **more), fullgraph=True, backend="eager")(*args)

        def learning(query, *args, **more):
            return function(query.clone().requires_grad_(), *args, **more)

        return {"eager": function, "gradient": learning, "graph": graph}

    def forms(self):
        return self._forms(attnmask.torch.flash_attention)

    def linear_forms(self):
        return self._forms(attnmask.torch.linear_attention)


class Jax:
    name = "jax"

    def __init__(self):
        self.jax = pytest.importorskip("jax")
        self.module = attnmask.jax

    def of(self, array):
        return self.jax.numpy.asarray(array) if isinstance(array, np.ndarray) else array

    def _forms(self, function):
        def jit(query, *args, **more):
            return self.jax.jit(lambda query: function(query, *args, **more))(query)

        return {"eager": function, "jit": jit}

    def forms(self):
        return self._forms(attnmask.jax.flash_attention)

    def linear_forms(self):
        return self._forms(attnmask.jax.linear_attention)


@pytest.fixture(params=[Numpy, Torch, Jax], ids=lambda face: face.name)
def face(request):
    return request.param()


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
    _warnings._given.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", attnmask.AttnmaskWarning)
        call()
    (warning,) = caught
    for fragment in fragments:
        assert fragment in str(warning.message)
    assert not told(call), "it was told before"


# Attention: for each habit, what the message names, and arguments of calls in every form

LLAMA = zeros(1, 32, 512, 128), zeros(1, 8, 512, 128)  # Llama 3's [B, H, T, D]
SMALL, LONG = zeros(1, 4, 4, 8), zeros(1, 10, 2, 8)
ROWS = zeros(4, 4, 2, 8)  # as many batch rows as tokens
ONE = zeros(2, 1, 4, 8)
FUTURE = np.triu(np.ones((4, 4), bool), 1)
PADDING = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
UNEQUAL = MaskInfo.from_cu_seqlens([0, 2, 5], cu_seqlens_kv=[0, 3, 7], packed=True)
LATER = MaskInfo.from_cu_seqlens([0, 2, 6], cu_seqlens_kv=[0, 2, 9], packed=True)
STARTS = {"cum_seqlens_q": np.array([0, 1, 2]), "cum_seqlens_k": np.array([0, 1, 5])}


def grouped(query, key):
    return query, key, key


OFFSETS = 'causal_offset="bottom-right"', "causal_offset=0"
ATTENTION = {
    "heads before tokens": (
        ("x.swapaxes(1, 2)",),
        {
            "Llama 3": (grouped(*LLAMA), {}),
            "Llama 3, 70B": (grouped(zeros(1, 64, 256, 8), zeros(1, 8, 256, 8)), {}),
            "one key head": (grouped(zeros(2, 16, 100, 8), zeros(2, 1, 100, 8)), {}),
            "as many heads": (grouped(*[zeros(1, 12, 384, 8)] * 2), {}),
            "two heads": (grouped(*[zeros(1, 2, 65, 4)] * 2), {}),
        },
    ),
    "causal": (
        OFFSETS,
        {
            "one query": (grouped(ONE, zeros(2, 9, 2, 8)), {"causal": True}),
            "a chunk": (grouped(SMALL, LONG), {"causal": True}),
            "with a window": (grouped(SMALL, LONG), {"causal": True, "sliding_window": 3}),
            "packed": (grouped(zeros(2, 4, 8), zeros(5, 2, 8)), {"causal": True, **STARTS}),
        },
    ),
    "packed sequences": (
        ("within_segments=True", "apply_causal"),
        {
            "causal": (
                grouped(zeros(1, 5, 4, 8), zeros(1, 7, 2, 8)),
                {"attention_mask": UNEQUAL, "causal": True},
            ),
            "window": (
                grouped(zeros(1, 5, 4, 8), zeros(1, 7, 2, 8)),
                {"attention_mask": UNEQUAL, "sliding_window": (2, 0)},
            ),
        },
    ),
    "inverted mask": (
        ("~attention_mask",),
        {
            "[Q, K]": (grouped(SMALL, zeros(1, 4, 2, 8)), {"attention_mask": FUTURE}),
            "[B, H, Q, K]": (grouped(ROWS, ROWS), {"attention_mask": np.tile(FUTURE, (4, 2, 1, 1))}),
            "a few pairs": (grouped(SMALL, SMALL), {"attention_mask": np.eye(4, k=2, dtype=bool)}),
            "a MaskInfo": (grouped(SMALL, SMALL), {"attention_mask": lambda: MaskInfo(FUTURE[None])}),
            "a MaskInfo without an array": (
                grouped(SMALL, SMALL),
                {"attention_mask": lambda: ~MaskInfo.causal(4)},
            ),
            "a MaskInfo with terms": (
                grouped(SMALL, SMALL),
                {"attention_mask": lambda: MaskInfo(FUTURE[None]) & MaskInfo.from_lengths([3], max_len=4)},
            ),
        },
    ),
    "padding mask": (
        ("attention_mask[:, None, None, :]", "attention_mask[None, None]"),
        {
            "integers": (grouped(ROWS, ROWS), {"attention_mask": PADDING}),
            "bools": (grouped(ROWS, ROWS), {"attention_mask": PADDING > 0}),
            "floats": (grouped(ROWS, ROWS), {"attention_mask": PADDING.astype(np.float32)}),
        },
    ),
    "graded mask": (
        ("`bias`", "!= 0"),
        {"halves": (grouped(SMALL, SMALL), {"attention_mask": np.full((4, 4), 0.5, np.float32)})},
    ),
    "dropout without a seed": (
        ("dropout_seed=0", "every call"),
        {
            "flash_attention": (grouped(SMALL, SMALL), {"dropout_prob": 0.1}),
            "packed": (
                grouped(zeros(4, 2, 8), zeros(4, 2, 8)),
                {"dropout_prob": 0.1, "cum_seqlens_q": [0, 4]},
            ),
        },
    ),
    "sinks": (
        ("softmax_aux[:, None]", "softmax_aux[None, :]"),
        {"[H]": (grouped(SMALL, SMALL), {"softmax_aux": zeros(4)})},
    ),
}
UNTOLD = {"torch": {"dropout without a seed"}}  # PyTorch draws a seed


def native(face, value):
    return [face.of(x) for x in value] if isinstance(value, tuple) else face.of(value)


@pytest.mark.parametrize(
    ("habit", "case"), [(habit, case) for habit, (_, cases) in ATTENTION.items() for case in cases]
)
def test_attention(face, habit, case):
    fragments, cases = ATTENTION[habit]
    arrays = native(face, cases[case][0])
    for name, form in face.forms().items():
        more = {
            key: x() if callable(x) else face.of(x) for key, x in cases[case][1].items()
        }  # masks are asked once
        if (name == "jit" and case == "packed") or (name == "vanilla" and case == "Llama 3"):
            continue
        if habit in UNTOLD.get(face.name, ()):
            form(*arrays, **more)
        else:
            told_once(lambda form=form, more=more: form(*arrays, **more), *fragments)


ERRORS = {
    "mask of zeros": {
        "[Q, K]": (grouped(SMALL, SMALL), {"attention_mask": zeros(4, 4)}, ("`bias`", "a bool mask")),
        "float64": (
            grouped(SMALL, SMALL),
            {"attention_mask": zeros(1, 1, 4, 4, dtype=np.float64)},
            ("`bias`", "a bool mask"),
        ),
        "negative zeros": (grouped(SMALL, SMALL), {"attention_mask": -zeros(4, 4)}, ("`bias`",)),
    },
    "dropout as a bias": {
        "0.1": (grouped(SMALL, SMALL), {"bias": 0.1}, ("bias must have axes", "dropout_prob=")),
        "an array": (grouped(SMALL, SMALL), {"bias": np.array(0.1, np.float32)}, ("dropout_prob=",)),
    },
    "dropout as a mask": {
        "0.0": (
            grouped(SMALL, SMALL),
            {"attention_mask": 0.0},
            ("attention_mask must have axes", "dropout_prob="),
        ),
    },
}


@pytest.mark.parametrize(
    ("habit", "case"), [(habit, case) for habit, cases in ERRORS.items() for case in cases]
)
def test_attention_that_is_refused(face, habit, case):
    arrays, more, fragments = ERRORS[habit][case]
    for form in face.forms().values():
        with pytest.raises(Exception, match=r"(?s).*") as raised:
            form(*native(face, arrays), **{name: face.of(x) for name, x in more.items()})
        for fragment in fragments:
            assert fragment in str(raised.value)


def test_each_call_of_torch_drops_other_weights():
    """As ``torch.manual_seed`` says, in graphs too; the generator stays where nothing is drawn."""
    torch = Torch().torch
    torch._dynamo.reset()
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

LINEAR = {
    "heads before tokens": (
        ("x.swapaxes(1, 2)",),
        {
            "a head each": (([zeros(1, 16, 300, 8)] * 3), {}),
            "as many heads": (([zeros(2, 32, 65, 4)] * 3), {}),
        },
    ),
    "decay": (
        ("logarithm", "np.log(decay)"),
        {
            "a head": ([zeros(1, 5, 2, 4)] * 3, {"decay": np.array([0.9, 0.5], np.float32)}),
            "a token": ([zeros(1, 5, 2, 4)] * 3, {"decay": np.full((1, 5, 2), 0.9, np.float32)}),
        },
    ),
}


@pytest.mark.parametrize(
    ("habit", "case"), [(habit, case) for habit, (_, cases) in LINEAR.items() for case in cases]
)
def test_linear_attention(face, habit, case):
    fragments, cases = LINEAR[habit]
    arrays, more = cases[case]
    arrays, more = [face.of(x) for x in arrays], {name: face.of(x) for name, x in more.items()}
    for name, form in face.linear_forms().items():
        told_once(lambda form=form, name=name: form(*arrays, **more), *fragments)


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
    "causal": (
        ('offset="bottom-right"', "offset=0"),
        {
            "causal": lambda: MaskInfo.causal(4, 10),
            "apply_causal": lambda: MaskInfo.full(4, 10).apply_causal(),
            "one query": lambda: MaskInfo.full(1, 10).apply_causal(),
            "packed": lambda: UNEQUAL.apply_causal(within_segments=True),
            "segments": lambda: MaskInfo.from_segments([[0, 0]], [[0, 0, 0]]).apply_causal(
                within_segments=True
            ),
            "packed, with later lengths": lambda: LATER.apply_causal(),
        },
    ),
    "packed sequences": (
        ("within_segments=True",),
        {
            "causal": lambda: UNEQUAL.apply_causal(),
            "bottom-right": lambda: UNEQUAL.apply_causal("bottom-right"),
            "window": lambda: UNEQUAL.apply_sliding_window((2, 0)),
            "chunks": lambda: UNEQUAL.apply_chunked(5),
            "a second term": lambda: UNEQUAL.apply_prefix(1).apply_causal(),
            "padded": lambda: MaskInfo.from_cu_seqlens(
                [0, 2, 5], cu_seqlens_kv=[0, 3, 7], packed=True, max_q_len=6, max_kv_len=9
            ).apply_causal(),
        },
    ),
    "pairs": (
        ("pairs of start and end", "packed=True"),
        {
            "from_cu_seqlens": lambda: MaskInfo.from_cu_seqlens([0, 3, 5, 9], max_q_len=9),
            "cu_seqlens_to_mask": lambda: attnmask.cu_seqlens_to_mask(np.array([0, 3, 5, 9]), 9),
            "qkv_cu_seqlens_to_attention_mask": lambda: attnmask.qkv_cu_seqlens_to_attention_mask(
                [0, 3, 5, 9], max_q_len=9
            ),
            "qkv_cu_seqlens_to_qkv_masks": lambda: attnmask.qkv_cu_seqlens_to_qkv_masks(
                [0, 3, 5, 9], max_q_len=9, cu_seqlens_kv=[0, 2, 4, 9]
            ),
        },
    ),
    "mask of pairs": (
        ("[B, T]", "attention_mask[None, None]", "from_padding_mask"),
        {
            "np.tri": lambda: MaskInfo.from_attention_mask(TRI),
            "integers": lambda: MaskInfo.from_attention_mask(TRI.astype(int)),
            "not valid": lambda: MaskInfo.from_attention_mask(1 - TRI, mask_is_valid=False),
            "dynamic_init": lambda: MaskInfo.dynamic_init(attention_mask=TRI),
            "a window": lambda: MaskInfo.from_attention_mask(np.eye(5)),
            "padding": lambda: MaskInfo.from_attention_mask(PADDING),
        },
    ),
    "graded mask": (
        ("`bias`",),
        {
            "MaskInfo": lambda: MaskInfo(np.full((1, 2, 3), 0.5)),
            "from_padding_mask": lambda: MaskInfo.from_padding_mask([[1.0, 0.5]]),
            "mask_to_segment_ids": lambda: attnmask.mask_to_segment_ids(np.array([[1.0, 2.0]])),
        },
    ),
}


@pytest.mark.parametrize(
    ("habit", "case"), [(habit, case) for habit, (_, cases) in TRAPS.items() for case in cases]
)
def test_masks(habit, case):
    fragments, cases = TRAPS[habit]
    told_once(cases[case], *fragments)


def square(mask, x=SMALL):
    return attnmask.flash_attention(x, x, x, mask)


REFUSED = {
    "mask of zeros": {
        "MaskInfo": (lambda: MaskInfo(zeros(1, 2, 3)), ValueError, "`bias`"),
        "from_attention_mask": (
            lambda: MaskInfo.from_attention_mask(zeros(1, 2, 3)),
            ValueError,
            "a bool mask",
        ),
        "from_padding_mask": (lambda: MaskInfo.from_padding_mask(zeros(1, 2)), ValueError, "`bias`"),
        "replace": (lambda: MaskInfo.full(3).replace(attention_mask=zeros(1, 3, 3)), ValueError, "`bias`"),
        "mask_to_segment_ids": (
            lambda: attnmask.mask_to_segment_ids(zeros(2, 3)),
            ValueError,
            "mask must not be",
        ),
        "lengths": (lambda: attnmask.prepare_lens_from_mask(zeros(2, 3)), ValueError, "`bias`"),
    },
    "comparison with an array": {
        "==": (lambda: MaskInfo.full(3) == np.ones((3, 3)), TypeError, "np.array_equal(mask, array)"),
        "!=": (lambda: MaskInfo.full(3) != np.ones((3, 3)), TypeError, "np.array_equal(mask, array)"),
        "from the left": (
            lambda: np.ones((3, 3)) == MaskInfo.full(3),
            TypeError,
            "np.array_equal(mask, array)",
        ),
    },
    "constructor of a mask": {
        "causal": (lambda: MaskInfo.full(9).causal(9), TypeError, "apply_causal"),
        "full": (lambda: MaskInfo.full(9).full(9), TypeError, "MaskInfo.full"),
        "from_lengths": (lambda: MaskInfo.full(9).from_lengths([9]), TypeError, "MaskInfo.from_lengths"),
    },
    "packed tokens": {
        "the first is longer": (lambda: attnmask.shard_sequence(zeros(8, 4, 32), 2, 0), ValueError, "axis=0"),
        "ends": (
            lambda: attnmask.shard_sequence(zeros(8, 16, 32), 2, 0, cu_seqlens=[0, 3, 8]),
            ValueError,
            "write axis=0",
        ),
    },
}


@pytest.mark.parametrize(
    ("habit", "case"), [(habit, case) for habit, cases in REFUSED.items() for case in cases]
)
def test_what_is_refused(habit, case):
    call, error, fragment = REFUSED[habit][case]
    with pytest.raises(error) as raised:
        call()
    assert fragment in str(raised.value)


def test_the_table_is_tried():
    """Each row is, in one of the tables above."""
    tried = {*ATTENTION, *ERRORS, *LINEAR, *TRAPS, *REFUSED}
    assert {habit.name for habit in HABITS} == tried


# Keywords

KEYWORDS = [
    ("flash_attention", "is_causal", "causal="),
    ("flash_attention", "attn_mask", "attention_mask="),
    ("flash_attention", "dropout_p", "dropout_prob="),
    ("flash_attention", "p", "dropout_prob="),
    ("flash_attention", "window_size", "sliding_window="),
    ("flash_attention", "cu_seqlens_q", "cum_seqlens_q="),
    ("flash_attention", "return_residual", "return_lse="),
    ("flash_attention", "max_seqlen_q", "leave it out"),
    ("flash_attention_with_kvcache", "page_table", "block_table="),
    ("flash_attention_with_kvcache", "softcap", "logits_soft_cap="),
    ("flash_attention_with_kvcache", "k_descale", "k_scale="),
    ("linear_attention", "g", "decay="),
    ("linear_attention", "output_final_state", "return_state="),
    ("linear_attention", "use_qk_l2norm_in_kernel", "normalize_qk="),
    ("linear_attention", "head_first", "x.swapaxes(1, 2)"),
    ("linear_attention", "softmax_scale", "scale="),
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
        ("head_dim", "depth="),
        ("num_key_value_heads", "kv_heads="),
        ("num_blocks", "pages="),
    ],
)
def test_keywords_of_a_cache(keyword, instead):
    for more in ({}, {"kv_heads": 1, "depth": 8, "pages": 4, "dtype": "float32"}):
        with pytest.raises(TypeError, match=rf"KVCache\(\) got .* '{keyword}'; write {instead}"):
            attnmask.KVCache(**more, **{keyword: 1})


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
    ones = np.ones((4, 4), bool)
    for mask in (
        *(
            TRI,
            TRI.astype(int),
            ones,
            np.zeros((4, 4), int),
            np.tril(np.ones((4, 4)), -1),
            np.tril(np.triu(TRI, -1)),
        ),
        *(
            PADDING[:, None, None],
            PADDING[None, None],
            ~MaskInfo(FUTURE[None]),
            MaskInfo.full(4) & MaskInfo(TRI[None]),
        ),
        *(
            MaskInfo.from_padding_mask(PADDING),
            MaskInfo.from_lengths([4, 3, 2, 1]),
            MaskInfo(np.zeros((1, 4, 4), bool)),
        ),
        *(
            MaskInfo.from_segments([[-1] * 4]),
            ~MaskInfo.full(4),
            MaskInfo.from_attention_mask(FUTURE[None], mask_is_valid=False),
        ),
    ):
        attnmask.flash_attention(ROWS, ROWS, ROWS, mask)
    for tokens in (
        np.tri(1),
        np.tri(3, 4),
        np.tri(4, 3),
        np.ones((3, 3)),
        np.zeros((2, 2), bool),
        np.zeros((0, 0)),
    ):
        MaskInfo.from_attention_mask(tokens)
    MaskInfo(zeros(1, 0, 3))  # no number is zero
    MaskInfo.from_attention_mask(TRI[None, None])
    MaskInfo.from_attention_mask(TRI[None])
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
    for shape, axis in (
        ((8, 4, 32), 0),
        ((8, 4, 32), 1),
        ((2, 8, 32), None),
        ((8, 4), None),
        ((8, 2, 4, 3), None),
    ):
        attnmask.shard_sequence(zeros(*shape), 2, 0, axis=axis)


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
