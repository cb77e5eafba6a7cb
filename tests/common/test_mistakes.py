"""Mistakes that beginners make: the error says what to write instead, and that works; or a warning does, once."""

import functools
import inspect
import math
import sys
import threading
import warnings

import numpy as np
import pytest
from flash_bad_input import DV, GOOD, HKV, PACKED, TK, TQ, B, D, H, zeros

import attnmask
from attnmask import MaskInfo, flash_attention
from attnmask._common import keywords as _keywords
from attnmask._common import warnings as _warnings
from attnmask.operations import OperationRegistry

FUNCTIONS = ("flash_attention", "flash_attention_fwd", "flash_attention_bwd", "flash_attention_vjp")
OPERATORS = ("flash", "vanilla")

# Errors

query, key, value = GOOD.values()
attend = functools.partial(flash_attention, query, key, value)
tokens = zeros(9, H, D)  # packed: of 3, 2 and 4 tokens
pack = functools.partial(flash_attention, tokens, tokens, tokens)
mask = np.ones((B, TK), bool)
padding = np.ones((B, TQ), bool)
live = np.tri(TQ, TK) > 0
heads_first = [x.swapaxes(1, 2) for x in (query, key, value)]
flat = [x[0] for x in (query, key, value)]

UNEQUAL = MaskInfo.from_cu_seqlens([0, 2, 5], cu_seqlens_kv=[0, 3, 7], packed=True)

# For each mistake the call, its error, what the message says, and a call that does so.
MISTAKES = {
    "heads before tokens": (
        lambda: flash_attention(*heads_first),
        ValueError, "axes are [batch, tokens, heads, head_dim]: write x.swapaxes(1, 2)",
        lambda: flash_attention(*(x.swapaxes(1, 2) for x in heads_first))),
    "heads before tokens, packed": (
        lambda: flash_attention(*(x[0] for x in heads_first), cum_seqlens_q=[0, TQ], cum_seqlens_k=[0, TK]),
        ValueError, "axes are [tokens, heads, head_dim]: write x.swapaxes(0, 1)",
        lambda: flash_attention(*flat, cum_seqlens_q=[0, TQ], cum_seqlens_k=[0, TK])),
    "heads before tokens in value": (
        lambda: flash_attention(query, key, value.swapaxes(1, 2)),
        ValueError, "write x.swapaxes(1, 2)",
        attend),
    "integers": (
        lambda: flash_attention(query.astype(int), key, value),
        TypeError, "write query.astype(np.float32)",
        lambda: flash_attention(query.astype(int).astype(np.float32), key, value)),
    "two types": (
        lambda: flash_attention(query, key.astype(np.float64), value),
        TypeError, "write key.astype(query.dtype)",
        lambda: flash_attention(query, key.astype(np.float64).astype(query.dtype), value)),
    "no heads and no batch": (
        lambda: flash_attention(query[0, :, 0], key[0, :, 0], value[0, :, 0]),
        ValueError, "write query[None, :, None] for [Tq, D]",
        lambda: flash_attention(*(x[0, :, 0][None, :, None] for x in (query, key, value)))),
    "no batch": (
        lambda: flash_attention(*flat),
        ValueError, "write query[None] for [Tq, H, D], query[:, :, None] for [B, Tq, D], or cum_seqlens_q=",
        lambda: flash_attention(*(x[None] for x in flat))),
    "what is added, as a mask": (
        lambda: attend(attention_mask=np.where(live, 0, -np.inf)),
        ValueError, "if it is to be added to logits, pass it as `bias`",
        lambda: attend(bias=np.where(live, 0, -np.inf))),
    "a mask as a bias": (
        lambda: attend(bias=live),
        TypeError, "write attention_mask= for a mask of allowed pairs",
        lambda: attend(attention_mask=live)),
    "integers as a bias": (
        lambda: attend(bias=live.astype(int)),
        TypeError, "or bias.astype(np.float32)",
        lambda: attend(bias=live.astype(int).astype(np.float32))),
    "a MaskInfo as a bias": (
        lambda: attend(bias=MaskInfo.from_attention_mask(live[None])),
        TypeError, "write attention_mask=",
        lambda: attend(attention_mask=MaskInfo.from_attention_mask(live[None]))),
    "a mask of the keys": (
        lambda: attend(attention_mask=mask),
        ValueError, "write attention_mask[:, None, None, :]",
        lambda: attend(attention_mask=mask[:, None, None, :])),
    "a mask of the queries": (
        lambda: attend(attention_mask=padding),
        ValueError, "write attention_mask[:, None, :, None]",
        lambda: attend(attention_mask=padding[:, None, :, None])),
    "a mask without heads": (
        lambda: attend(attention_mask=np.ones((B, TQ, TK))),
        ValueError, "write attention_mask[:, None]",
        lambda: attend(attention_mask=np.ones((B, TQ, TK))[:, None])),
    "a mask with keys before queries": (
        lambda: attend(attention_mask=live.T),
        ValueError, "write np.transpose(attention_mask, (1, 0))",
        lambda: attend(attention_mask=np.transpose(live.T, (1, 0)))),
    "a bias with heads at the end": (
        lambda: attend(bias=np.zeros((B, TQ, TK, H))),
        ValueError, "write np.transpose(bias, (0, 3, 1, 2))",
        lambda: attend(bias=np.transpose(np.zeros((B, TQ, TK, H)), (0, 3, 1, 2)))),
    "a MaskInfo of the queries alone": (
        lambda: attend(attention_mask=MaskInfo.from_segments(np.zeros((B, TQ), int))),
        ValueError, f"make it for {TQ} queries and {TK} keys: MaskInfo.from_segments(q_segment_ids, kv_segment_ids)",
        lambda: attend(attention_mask=MaskInfo.from_segments(np.zeros((B, TQ), int), np.zeros((B, TK), int)))),
    "a MaskInfo of another batch": (
        lambda: attend(attention_mask=MaskInfo.from_segments(*(np.zeros((B + 1, t), int) for t in (TQ, TK)))),
        ValueError,
        f"got a MaskInfo of shape ({B + 1}, 1, {TQ}, {TK}); its batch rows must be {B}, or 1 for all, got {B + 1}",
        lambda: attend(attention_mask=MaskInfo.from_segments(*(np.zeros((1, t), int) for t in (TQ, TK))))),
    "a MaskInfo of other heads": (
        lambda: attend(attention_mask=MaskInfo(np.ones((1, H + 1, TQ, TK), bool))),
        ValueError, f"its heads must be {H}, or 1 for all, got {H + 1}",
        lambda: attend(attention_mask=MaskInfo(np.ones((1, H, TQ, TK), bool)))),
    "a MaskInfo of a batch for packed queries": (
        lambda: pack(cum_seqlens_q=[0, 9], attention_mask=MaskInfo.from_segments(np.zeros((B, 9), int))),
        ValueError, f"its batch rows must be 1, got {B}",
        lambda: pack(cum_seqlens_q=[0, 9], attention_mask=MaskInfo.from_segments(np.zeros((1, 9), int)))),
    "a padding mask as segment ids": (
        lambda: attend(q_segment_ids=padding, kv_segment_ids=mask),
        TypeError, "write np.where(mask, 0, -1) for a padding mask",
        lambda: attend(q_segment_ids=np.where(padding, 0, -1), kv_segment_ids=np.where(mask, 0, -1))),
    "segment ids of the queries alone": (
        lambda: attend(q_segment_ids=np.zeros((B, TQ), int)),
        ValueError, f"kv_segment_ids must be given for {TQ} queries and {TK} keys",
        lambda: attend(q_segment_ids=np.zeros((B, TQ), int), kv_segment_ids=np.zeros((B, TK), int))),
    "lengths": (
        lambda: pack(cum_seqlens_q=[3, 2, 4]),
        ValueError, "write np.cumsum([0, *lengths]) for lengths",
        lambda: pack(cum_seqlens_q=np.cumsum([0, *[3, 2, 4]]))),
    "lengths elsewhere": (
        lambda: attnmask.prepare_position_ids([3, 2, 4]),
        ValueError, "write np.cumsum([0, *lengths]) for lengths",
        lambda: attnmask.prepare_position_ids(np.cumsum([0, *[3, 2, 4]]))),
    "pairs of start and end": (
        lambda: pack(cum_seqlens_q=[0, 3, 1, 3, 0, 4]),
        ValueError, "or pairs_to_cu_seqlens(pairs) for pairs of start and end",
        lambda: pack(cum_seqlens_q=attnmask.pairs_to_cu_seqlens([0, 3, 1, 3, 0, 4]))),
    "starts as pairs": (
        lambda: MaskInfo.from_cu_seqlens([0, 3, 9]),
        ValueError, "write packed=True for cu_seqlens that start at 0",
        lambda: MaskInfo.from_cu_seqlens([0, 3, 9], packed=True)),
    "starts of an even number as pairs": (
        lambda: MaskInfo.from_cu_seqlens([0, 3, 5, 9]),
        TypeError, "max_q_len must be given unless packed=True",
        lambda: MaskInfo.from_cu_seqlens([0, 3, 5, 9], packed=True)),
    "starts of the keys as pairs": (
        lambda: MaskInfo.from_cu_seqlens([0, 3], max_q_len=3, cu_seqlens_kv=[0, 3, 9]),
        ValueError, "cu_seqlens_kv must be pairs of start and end",
        lambda: MaskInfo.from_cu_seqlens([0, 3, 3], cu_seqlens_kv=[0, 3, 9], packed=True)),
    "padding behind packed sequences": (
        lambda: pack(cum_seqlens_q=[0, 3, 5]),
        ValueError, "write np.append(cum_seqlens_q, 9) if the rest is padding",
        lambda: pack(cum_seqlens_q=np.append([0, 3, 5], 9))),
    "starts of the queries alone": (
        lambda: flash_attention(*(PACKED[name] for name in GOOD), cum_seqlens_q=PACKED["cum_seqlens_q"]),
        ValueError, f"cum_seqlens_k must be given for {TQ} queries and {TK} keys",
        lambda: flash_attention(**PACKED)),
    "a batch that is not packed": (
        lambda: flash_attention(query, query, query, cum_seqlens_q=[0, TQ]),
        ValueError, "pack the rows into one, as query[mask] does with a padding mask [B, Tq]",
        lambda: flash_attention(*[query[padding]] * 3, cum_seqlens_q=attnmask.prepare_cu_seqlens_from_mask(padding))),
    "no limit of a window": (
        lambda: attend(sliding_window=(-1, 0)),
        ValueError, "sliding_window[0] must be at least 0, got -1; write None for no limit",
        lambda: attend(sliding_window=(None, 0))),
    "a mask and another": (
        lambda: UNEQUAL and UNEQUAL,
        TypeError, "use & | ~",
        lambda: UNEQUAL & UNEQUAL),
    "not a mask": (
        lambda: not UNEQUAL,
        TypeError, "use & | ~",
        lambda: ~UNEQUAL),
    "whether there is a mask": (
        lambda: attend(attention_mask=MaskInfo.from_attention_mask(live[None]) or None),
        TypeError, "`is None`",
        lambda: attend(attention_mask=MaskInfo.from_attention_mask(live[None]))),
    "rows of a mask": (
        lambda: list(UNEQUAL),
        TypeError, "not iterable",
        lambda: [UNEQUAL[row, ...] for row in range(1)]),
    "queries and keys of a mask": (
        lambda: UNEQUAL[2:, 2:],
        ValueError, "the index must be mask[rows, heads, queries, keys], got 2 entries; write ...",
        lambda: UNEQUAL[..., 2:, 2:]),
    "a part of a mask among processes": (
        lambda: attnmask.shard_sequence(UNEQUAL, 2, 0),
        ValueError, "write mask[:, :, begin:end, :]",
        lambda: UNEQUAL[:, :, 1:3, :]),
    "the dropout of FlashAttention": (
        lambda: attend(0.0),
        ValueError, "attention_mask must have axes, got 0.0; write None for no mask, and dropout_prob= for dropout",
        lambda: attend(None, dropout_prob=0.0)),
    "True as a mask": (
        lambda: attend(True),
        ValueError, "got True; write None for no mask",
        lambda: attend()),
    "a chance as the mask of a cache": (
        lambda: attnmask.flash_attention_with_kvcache(query, key, value, cache_seqlens=TK, attention_mask=0.1),
        ValueError, "attention_mask must have axes",
        lambda: attnmask.flash_attention_with_kvcache(query, key, value, cache_seqlens=TK)),
    "a function with `and`": (
        lambda: MaskInfo.from_function(lambda b, h, q, k: q >= k and q - k < 3, 9, 9),
        ValueError,
        "<lambda> failed: The truth value of an array with more than one element is ambiguous. Use a.any() or a.all(); "
        "f(b, h, q, k) gets index arrays; write & and |, np.abs",
        lambda: MaskInfo.from_function(lambda b, h, q, k: (q >= k) & (q - k < 3), 9, 9),
    ),
    "a function of scalars": (
        lambda: MaskInfo.from_function(lambda b, h, q, k: math.fabs(q - k) < 3, 9, 9),
        TypeError, "f(b, h, q, k) gets index arrays; write & and |, np.abs",
        lambda: MaskInfo.from_function(lambda b, h, q, k: np.abs(q - k) < 3, 9, 9)),
    "dropout of everything": (
        lambda: attend(dropout_prob=1),
        ValueError, "dropout_prob must be at least 0 and below 1, got 1.0; write 0.1 to drop one weight of ten",
        lambda: attend(dropout_prob=0.1)),
    "the place of the diagonal as causal": (
        lambda: attend(causal="top-left"),
        TypeError, 'write causal=True, and causal_offset="bottom-right" if the last query sees the last key',
        lambda: attend(causal=True, causal_offset="bottom-right")),
    "the default by a name": (
        lambda: attend(causal=True, causal_offset="top-left"),
        ValueError, "write 0 for top-left",
        lambda: attend(causal=True, causal_offset=0)),
    "the offset with another hyphen": (
        lambda: attend(causal=True, causal_offset="bottom_right"),
        ValueError, "must be an integer or 'bottom-right', got 'bottom_right'; did you mean 'bottom-right'?",
        lambda: attend(causal=True, causal_offset="bottom-right")),
    "the offset as PyTorch calls it": (
        lambda: attend(causal=True, causal_offset="LOWER_RIGHT"),
        ValueError, "got 'LOWER_RIGHT'; did you mean 'bottom-right'?",
        lambda: attend(causal=True, causal_offset="bottom-right")),
    "an array for the logsumexp": (
        lambda: attend(return_lse=True, out=(zeros(B, TQ, H, DV), zeros(B, H, TQ))),
        TypeError, "it takes only the result; the logsumexp is returned as a new array",
        lambda: attend(return_lse=True, out=zeros(B, TQ, H, DV))),
    "sinks with heads at the end": (
        lambda: attend(softmax_aux=zeros(3, H)),
        ValueError, "write np.transpose(softmax_aux) for [S, H]",
        lambda: attend(softmax_aux=np.transpose(zeros(3, H)))),
    "sinks of too many axes": (
        lambda: attend(softmax_aux=zeros(1, H, 1, 1)),
        ValueError, f"write np.reshape(softmax_aux, ({H}, 1)) for one sink per head",
        lambda: attend(softmax_aux=np.reshape(zeros(1, H, 1, 1), (H, 1)))),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_say_what_to_write_instead(mistake):
    wrong, error, advice, right = MISTAKES[mistake]
    with pytest.raises(error) as raised:
        wrong()
    assert advice in str(raised.value)
    right()


def test_pairs_end_to_end_mean_the_same():
    """``[0, 3, 3, 5]`` is legal in both forms: pairs without gaps are starts with sequences of no tokens between."""
    x = np.random.default_rng(0).standard_normal((5, H, D))
    one, other = (flash_attention(x, x, x, cum_seqlens_q=starts) for starts in ([0, 3, 3, 5], [0, 3, 5]))
    np.testing.assert_array_equal(one, other)


# Keywords of other libraries


def arguments(function: str) -> dict:
    if function != "flash_attention_bwd":
        return GOOD
    out, lse = attnmask.flash_attention_fwd(**GOOD)
    return GOOD | {"dout": out, "out": out, "lse": lse}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_keywords_of_other_libraries(function):
    """Each is refused as Python does it, with what to write, which the function takes."""
    call, right = getattr(attnmask, function), arguments(function)
    taken = inspect.signature(call).parameters
    for name in {*_keywords._WRITE, *_keywords._LEAVE_OUT} - taken.keys():
        with pytest.raises(
            TypeError, match=rf"^{function}\(\) got an unexpected keyword argument '{name}'"
        ) as raised:
            call(**right, **{name: None})
        instead = str(raised.value).partition("; write ")[2].partition("=")[0]
        assert instead in taken or (
            not instead and (name in _keywords._LEAVE_OUT or function != "flash_attention")
        )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("is_causal", "write causal="),
        ("attn_mask", "write attention_mask= for a mask of allowed pairs, or bias= for what is added"),
        ("scale", "write softmax_scale="),
        ("dropout_p", "write dropout_prob="),
        ("window_size", "write sliding_window=, with None instead of -1"),
        ("cu_seqlens_q", "write cum_seqlens_q="),
        ("enable_gqa", "leave it out, as key and value may have fewer heads than query"),
        ("attention_maks", "write attention_mask="),
        ("nothing_like_it", None),
    ],
)
def test_what_to_write_instead_of_a_keyword(name, advice):
    with pytest.raises(TypeError) as raised:
        attend(**{name: 1})
    hint = "" if advice is None else f"; {advice}"
    assert str(raised.value).startswith(
        f"flash_attention() got an unexpected keyword argument '{name}'{hint}"
    )
    assert advice or str(raised.value).endswith(f"'{name}'")


def test_signatures_do_not_show_what_is_refused():
    for function in FUNCTIONS:
        kinds = {
            parameter.kind for parameter in inspect.signature(getattr(attnmask, function)).parameters.values()
        }
        assert inspect.Parameter.VAR_KEYWORD not in kinds
    window = inspect.signature(MaskInfo.apply_sliding_window).parameters
    assert list(window) == ["self", "sliding_window", "offset", "mode", "index", "within_segments"]


# Warnings

one, cache = zeros(B, 1, H, D), zeros(B, TK, HKV, D)


def told(call) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return caught


def told_once(call, *fragments: str) -> None:
    """One warning, which shows a line of this file, the first time; then it is forgotten."""
    (warning,) = told(call)
    assert warning.category is attnmask.AttnmaskWarning
    assert warning.filename == __file__
    for fragment in fragments:
        assert fragment in str(warning.message)
    assert not told(call), "it was told before"
    _warnings.forget()


def backward(**more):
    out = attnmask.flash_attention(one, cache, cache, **more | {"causal": False, "softmax_aux": None})
    lse = zeros(B, H, 1)
    return attnmask.flash_attention_bwd(out, one, cache, cache, out, lse, **more)


CALLS = {
    "flash_attention": lambda **more: flash_attention(one, cache, cache, **more),
    "flash_attention_fwd": lambda **more: attnmask.flash_attention_fwd(one, cache, cache, **more),
    "flash_attention_bwd": backward,
    "flash_attention_vjp": lambda **more: attnmask.flash_attention_vjp(one, cache, cache, **more),
    "flash": lambda **more: OperationRegistry.create("flash")(one, cache, cache, **more),
    "vanilla": lambda **more: OperationRegistry.create("vanilla")(one, cache, cache, **more),
    "packed": lambda **more: flash_attention(
        one[:, 0],
        zeros(TK, HKV, D),
        zeros(TK, HKV, D),
        cum_seqlens_q=[0, 1, 2],
        cum_seqlens_k=[0, 4, TK],
        **more,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_single_query_that_sees_the_first_key_alone(name):
    call = CALLS[name]
    told_once(lambda: call(causal=True), 'causal_offset="bottom-right"', "causal_offset=0")


@pytest.mark.parametrize("name", CALLS)
def test_sinks_that_look_like_one_a_head(name):
    call, sinks = CALLS[name], zeros(H)
    told_once(lambda: call(softmax_aux=sinks), "softmax_aux[:, None]", "softmax_aux[None, :]")


def test_pairs_that_could_be_starts():
    """``[0, 3, 5, 9]`` is a batch of two rows, or three sequences in one."""

    def call(**more):
        return MaskInfo.from_cu_seqlens([0, 3, 5, 9], max_q_len=9, **more)

    told_once(call, "packed=True", "packed=False")
    assert call(packed=True).shape == (1, 9, 9)
    assert call(packed=False).shape == (2, 9, 9)
    MaskInfo.from_cu_seqlens([0, 3], max_q_len=9)  # one pair, or one sequence
    MaskInfo.from_cu_seqlens([1, 3, 5, 9], max_q_len=9)
    MaskInfo.from_cu_seqlens([0, 3, 0, 9], max_q_len=9)
    MaskInfo.from_cu_seqlens([0, 3, 5, 9], max_q_len=9, cu_seqlens_kv=[0, 3, 0, 9])
    MaskInfo.from_cu_seqlens([], max_q_len=9)


def test_a_causal_array_as_padding():
    """Of two axes, which `flash_attention` reads as queries and keys."""
    for tokens in (2, 3, 70):
        for call in (
            lambda tri: MaskInfo.from_attention_mask(tri),
            lambda tri: MaskInfo.from_attention_mask(1 - tri, mask_is_valid=False),
            lambda tri: MaskInfo.dynamic_init(attention_mask=tri),
        ):
            tri = np.tri(tokens)
            told_once(lambda call=call, tri=tri: call(tri), "[B, T]", "attention_mask[None, None]")
        MaskInfo.from_attention_mask(tri[None, None])
        MaskInfo.from_attention_mask(tri[None])
        assert MaskInfo(tri[None, None]).apply_causal() == MaskInfo(tri[None, None])
    for padding in (
        np.tri(1),
        np.tri(3, 4),
        np.tri(4, 3),
        np.tri(3)[::-1],
        np.tri(3, k=1),
        np.tri(3, k=-1),
        np.eye(2),
    ):
        MaskInfo.from_attention_mask(padding)
    MaskInfo.from_attention_mask(np.zeros((0, 0)))


LAYOUTS = {
    name: lambda x, name=name, **more: getattr(attnmask, name)(x, x, x, **more)
    for name in ("flash_attention", "flash_attention_fwd", "flash_attention_vjp")
} | {name: lambda x, name=name, **more: OperationRegistry.create(name)(x, x, x, **more) for name in OPERATORS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_that_seem_to_lie_before_tokens(name):
    """[B, H, T, D] as [B, T, H, D]: as many keys as queries, and many times as many heads."""
    call = LAYOUTS[name]
    for shape in ((1, 2, 65, 4), (2, 9, 72, 4)):
        x = zeros(*shape)
        told_once(lambda x=x: call(x), "x.swapaxes(1, 2)")
        assert not told(lambda x=x: call(x.swapaxes(1, 2)))
    for shape in ((1, 1, 65, 4), (1, 2, 64, 4), (1, 9, 71, 4), (1, 65, 2, 4)):
        call(zeros(*shape))


def test_many_heads_that_leave_no_doubt():
    many = zeros(1, 2, 65, 4)
    flash_attention(many, zeros(1, 3, 65, 4), zeros(1, 3, 65, 4))  # other lengths
    flash_attention(many[0], many[0], many[0], cum_seqlens_q=[0, 1, 2])  # packed


UNEQUAL_DIAGONALS = {
    "causal": lambda mask, **more: mask.apply_causal(**more),
    "bottom-right": lambda mask, **more: mask.apply_causal("bottom-right", **more),
    "window": lambda mask, **more: mask.apply_sliding_window((2, 0), **more),
    "chunks": lambda mask, **more: mask.apply_chunked(5, **more),
    "the second term": lambda mask, **more: mask.apply_prefix(1).apply_causal(**more),
}


@pytest.mark.parametrize("name", UNEQUAL_DIAGONALS)
def test_packed_sequences_that_begin_at_other_places_among_the_keys(name):
    """The diagonal of the row leaves later queries with few keys, or none."""
    call = UNEQUAL_DIAGONALS[name]
    padded = MaskInfo.from_cu_seqlens(
        [0, 2, 5], cu_seqlens_kv=[0, 3, 7], packed=True, max_q_len=6, max_kv_len=9
    )
    for mask in (UNEQUAL, padded)[: 1 if name == "the second term" else 2]:
        told_once(lambda mask=mask: call(mask), "within_segments=True")
        assert call(mask, within_segments=True)[:, :, 4, 3:7].density() >= 0.75
    call(MaskInfo.from_cu_seqlens([0, 2, 5], cu_seqlens_kv=[0, 2, 7], packed=True))  # both begin at 2
    call(MaskInfo.from_cu_seqlens([0, 2, 0, 5], max_q_len=5, cu_seqlens_kv=[0, 3, 0, 7], max_kv_len=7))
    call(MaskInfo.from_segments([[0, 0, 1, 1, 1]], [[0, 0, 0, 1, 1, 1, 1]]))


@pytest.mark.parametrize("limits", [{"causal": True}, {"sliding_window": (2, 0)}], ids=str)
def test_a_diagonal_beside_a_mask_of_packed_sequences(limits):
    """As the mask's own methods; the argument that counts from each sequence is theirs alone."""
    x, keys = zeros(1, 5, H, D), zeros(1, 7, HKV, D)

    def call(mask, **more):
        flash_attention(x, keys, keys, mask, **more)

    told_once(lambda: call(UNEQUAL, **limits), "within_segments=True", "apply_causal")
    call(UNEQUAL)
    call(UNEQUAL.apply_causal(within_segments=True))
    call(MaskInfo.from_cu_seqlens([0, 2, 5], cu_seqlens_kv=[0, 2, 7], packed=True), **limits)


def test_the_line_that_is_shown():
    def call():
        return attnmask.flash_attention_vjp(one, cache, cache, causal=True)

    (warning,) = told(call)
    assert warning.lineno == call.__code__.co_firstlineno + 1


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_say_what_they_mean(name):
    """Nor is anything told where there is nothing to mistake. Warnings are errors here."""
    for more in (
        {},
        {"causal": True, "causal_offset": 0},
        {"causal": True, "causal_offset": "bottom-right"},
        {"causal": True, "causal_offset": [0, 0]},
        {"softmax_aux": zeros(H)[:, None]},
        {"softmax_aux": zeros(H)[None, :]},
        {"softmax_aux": zeros(H + 1)},
    ):
        CALLS[name](**more)


def test_shapes_that_leave_no_doubt():
    flash_attention(query, key, value, causal=True)
    flash_attention(one, cache[:, :1], cache[:, :1], causal=True)
    one_head = zeros(B, TQ, 1, D)
    flash_attention(one_head, one_head, one_head, softmax_aux=zeros(1))
    packed = zeros(TQ, H, D)
    flash_attention(packed, packed, packed, cum_seqlens_q=[0, 1, TQ], causal=True)
    flash_attention(
        zeros(2, H, D), packed, packed, cum_seqlens_q=[0, 2, 2], cum_seqlens_k=[0, 3, TQ], causal=True
    )


def test_as_errors_they_are_raised_each_time():
    for _ in range(2):
        with pytest.raises(attnmask.AttnmaskWarning):
            flash_attention(one, cache, cache, causal=True)


def test_many_threads_are_told_once():
    barrier = threading.Barrier(8)

    def call():
        barrier.wait()
        flash_attention(one, cache, cache, causal=True)

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
