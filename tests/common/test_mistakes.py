"""Mistakes that beginners make: the error says what to write instead, and that works. test_habits.py has warnings."""

import functools
import inspect
import math

import numpy as np
import pytest
from flash_bad_input import DV, GOOD, PACKED, TK, TQ, B, D, H, zeros

import attnmask
from attnmask import MaskInfo, flash_attention
from attnmask._common import keywords as _keywords

FUNCTIONS = (
    "flash_attention", "flash_attention_fwd", "flash_attention_bwd", "flash_attention_vjp", "flash_attention_jvp"
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("error")

# Errors

query, key, value = GOOD.values()
tokens = zeros(9, H, D)  # packed: of 3, 2 and 4 tokens
mask = np.ones((B, TK), bool)
padding = np.ones((B, TQ), bool)
live = np.tri(TQ, TK) > 0
heads_first = [x.swapaxes(1, 2) for x in (query, key, value)]
flat = [x[0] for x in (query, key, value)]

UNEQUAL = MaskInfo.from_cu_seqlens([0, 2, 5], cu_seqlens_kv=[0, 3, 7], packed=True)


def call(function, *arrays, **given):
    return lambda: function(*arrays, **given)


def ids(*tokens, batch=B):
    return MaskInfo.from_segments(*(np.zeros((batch, count), int) for count in tokens))


attend, pack = (functools.partial(call, flash_attention, *x) for x in ((query, key, value), (tokens,) * 3))
AXES, PAIRS = "axes are [batch, tokens, heads, head_dim]: write x.swapaxes(1, 2)", np.ones((B, TQ, TK))
LENGTHS, BIAS, FUNCTION = (
    "write np.cumsum([0, *lengths]) for lengths",
    np.where(live, 0, -np.inf),
    MaskInfo.from_function,
)
CACHED = functools.partial(call, attnmask.flash_attention_with_kvcache, query, key, value, cache_seqlens=TK)
ENDS, BOTTOM, CUT = (
    {"cum_seqlens_q": [0, TQ], "cum_seqlens_k": [0, TK]},
    "bottom-right",
    [x[0] for x in heads_first],
)
# For each mistake the call, its error, what the message says, and a call that does so.
MISTAKES = {
    "heads before tokens": (call(flash_attention, *heads_first), ValueError, AXES, attend()),
    "heads before tokens, packed": (call(flash_attention, *CUT, **ENDS), ValueError,
        "axes are [tokens, heads, head_dim]: write x.swapaxes(0, 1)", call(flash_attention, *flat, **ENDS)),
    "heads before tokens in value": (call(flash_attention, query, key, value.swapaxes(1, 2)), ValueError,
        "write x.swapaxes(1, 2)", attend()),
    "heads before tokens with a MaskInfo": (call(flash_attention, *[query.swapaxes(1, 2)] * 3, ids(TQ)), ValueError,
        "write x.swapaxes(1, 2)", call(flash_attention, *[query] * 3, ids(TQ))),
    "heads before tokens with an array": (
        call(flash_attention, *[query.swapaxes(1, 2)] * 3, padding[:, None, None]), ValueError,
        "write x.swapaxes(1, 2)", call(flash_attention, *[query] * 3, padding[:, None, None])),
    "heads before tokens with a bias": (
        call(flash_attention, *[query.swapaxes(1, 2)] * 3, bias=np.zeros((TQ, TQ), np.float32)), ValueError,
        "write x.swapaxes(1, 2)", call(flash_attention, *[query] * 3, bias=np.zeros((TQ, TQ), np.float32))),
    "heads before tokens with segment ids": (
        call(flash_attention, *[query.swapaxes(1, 2)] * 3, q_segment_ids=np.zeros((B, TQ), int)), ValueError,
        "write x.swapaxes(1, 2)", call(flash_attention, *[query] * 3, q_segment_ids=np.zeros((B, TQ), int))),
    "integers": (call(flash_attention, query.astype(int), key, value), TypeError, "write query.astype(np.float32)",
        call(flash_attention, query.astype(int).astype(np.float32), key, value)),
    "two types": (call(flash_attention, query, key.astype(np.float64), value), TypeError,
        "write key.astype(query.dtype)", attend()),
    "no heads and no batch": (call(flash_attention, *(x[0, :, 0] for x in GOOD.values())), ValueError,
        "write query[None, :, None] for [Tq, D]",
        call(flash_attention, *(x[0, :, 0][None, :, None] for x in GOOD.values()))),
    "no batch": (call(flash_attention, *flat), ValueError,
        "write query[None] for [Tq, H, D], query[:, :, None] for [B, Tq, D], or cum_seqlens_q=",
        call(flash_attention, *(x[None] for x in flat))),
    "what is added, as a mask": (attend(attention_mask=BIAS), ValueError,
        "if it is to be added to logits, pass it as `bias`", attend(bias=BIAS)),
    "a mask as a bias": (attend(bias=live), TypeError, "write attention_mask= for a mask of allowed pairs",
        attend(attention_mask=live)),
    "integers as a bias": (attend(bias=live.astype(int)), TypeError, "or bias.astype(np.float32)",
        attend(bias=live.astype(int).astype(np.float32))),
    "a MaskInfo as a bias": (attend(bias=MaskInfo(live[None])), TypeError, "write attention_mask=",
        attend(attention_mask=MaskInfo(live[None]))),
    "a mask of the keys": (attend(attention_mask=mask), ValueError, "write attention_mask[:, None, None, :]",
        attend(attention_mask=mask[:, None, None, :])),
    "a mask of the queries": (attend(attention_mask=padding), ValueError, "write attention_mask[:, None, :, None]",
        attend(attention_mask=padding[:, None, :, None])),
    "a mask without heads": (attend(attention_mask=PAIRS), ValueError, "write attention_mask[:, None]",
        attend(attention_mask=PAIRS[:, None])),
    "a mask with keys before queries": (attend(attention_mask=live.T), ValueError,
        "write np.transpose(attention_mask, (1, 0))", attend(attention_mask=np.transpose(live.T, (1, 0)))),
    "a bias with heads at the end": (attend(bias=np.zeros((B, TQ, TK, H))), ValueError,
        "write np.transpose(bias, (0, 3, 1, 2))", attend(bias=np.transpose(np.zeros((B, TQ, TK, H)), (0, 3, 1, 2)))),
    "a MaskInfo of the queries alone": (attend(attention_mask=ids(TQ)), ValueError,
        f"make it for {TQ} queries and {TK} keys: MaskInfo.from_segments(q_segment_ids, kv_segment_ids)",
        attend(attention_mask=ids(TQ, TK))),
    "a MaskInfo of another batch": (attend(attention_mask=ids(TQ, TK, batch=B + 1)), ValueError,
        f"got a MaskInfo of shape ({B + 1}, 1, {TQ}, {TK}); its batch rows must be {B}, or 1 for all, got {B + 1}",
        attend(attention_mask=ids(TQ, TK, batch=1))),
    "a MaskInfo of other heads": (attend(attention_mask=MaskInfo(np.ones((1, H + 1, TQ, TK), bool))), ValueError,
        f"its heads must be {H}, or 1 for all, got {H + 1}",
        attend(attention_mask=MaskInfo(np.ones((1, H, TQ, TK), bool)))),
    "a MaskInfo of a batch for packed queries": (pack(cum_seqlens_q=[0, 9], attention_mask=ids(9)), ValueError,
        f"its batch rows must be 1, got {B}", pack(cum_seqlens_q=[0, 9], attention_mask=ids(9, batch=1))),
    "a padding mask as segment ids": (attend(q_segment_ids=padding, kv_segment_ids=mask), TypeError,
        "write np.where(mask, 0, -1) for a padding mask",
        attend(q_segment_ids=np.where(padding, 0, -1), kv_segment_ids=np.where(mask, 0, -1))),
    "segment ids of the queries alone": (attend(q_segment_ids=np.zeros((B, TQ), int)), ValueError,
        f"kv_segment_ids must be given for {TQ} queries and {TK} keys",
        attend(q_segment_ids=np.zeros((B, TQ), int), kv_segment_ids=np.zeros((B, TK), int))),
    "lengths": (pack(cum_seqlens_q=[3, 2, 4]), ValueError, LENGTHS, pack(cum_seqlens_q=np.cumsum([0, *[3, 2, 4]]))),
    "lengths elsewhere": (call(attnmask.prepare_position_ids, [3, 2, 4]), ValueError, LENGTHS,
        call(attnmask.prepare_position_ids, np.cumsum([0, *[3, 2, 4]]))),
    "pairs of start and end": (pack(cum_seqlens_q=[0, 3, 1, 3, 0, 4]), ValueError,
        "or pairs_to_cu_seqlens(pairs) for pairs of start and end",
        pack(cum_seqlens_q=attnmask.pairs_to_cu_seqlens([0, 3, 1, 3, 0, 4]))),
    "starts as pairs": (call(MaskInfo.from_cu_seqlens, [0, 3, 9]), ValueError,
        "write packed=True for cu_seqlens that start at 0", call(MaskInfo.from_cu_seqlens, [0, 3, 9], packed=True)),
    "starts of an even number as pairs": (call(MaskInfo.from_cu_seqlens, [0, 3, 5, 9]), TypeError,
        "max_q_len must be given unless packed=True", call(MaskInfo.from_cu_seqlens, [0, 3, 5, 9], packed=True)),
    "starts of the keys as pairs": (call(MaskInfo.from_cu_seqlens, [0, 3], max_q_len=3, cu_seqlens_kv=[0, 3, 9]),
        ValueError, "cu_seqlens_kv must be pairs of start and end",
        call(MaskInfo.from_cu_seqlens, [0, 3, 3], cu_seqlens_kv=[0, 3, 9], packed=True)),
    "padding behind packed sequences": (pack(cum_seqlens_q=[0, 3, 5]), ValueError,
        "write np.append(cum_seqlens_q, 9) if the rest is padding", pack(cum_seqlens_q=np.append([0, 3, 5], 9))),
    "starts of the queries alone": (
        call(flash_attention, *(PACKED[name] for name in GOOD), cum_seqlens_q=PACKED["cum_seqlens_q"]), ValueError,
        f"cum_seqlens_k must be given for {TQ} queries and {TK} keys", call(flash_attention, **PACKED)),
    "a batch that is not packed": (call(flash_attention, *[query] * 3, cum_seqlens_q=[0, TQ]), ValueError,
        "pack the rows into one, as query[mask] does with a padding mask [B, Tq]",
        call(flash_attention, *[query[padding]] * 3, cum_seqlens_q=attnmask.prepare_cu_seqlens_from_mask(padding))),
    "no limit of a window": (attend(sliding_window=(-1, 0)), ValueError,
        "sliding_window[0] must be at least 0, got -1; write None for no limit", attend(sliding_window=(None, 0))),
    "a mask and another": (lambda: UNEQUAL and UNEQUAL, TypeError, "use & | ~", lambda: UNEQUAL & UNEQUAL),
    "not a mask": (lambda: not UNEQUAL, TypeError, "use & | ~", lambda: ~UNEQUAL),
    "whether there is a mask": (lambda: UNEQUAL or None, TypeError, "`is None`", lambda: UNEQUAL is None),
    "rows of a mask": (lambda: list(UNEQUAL), TypeError, "not iterable", lambda: [UNEQUAL[0, ...]]),
    "queries and keys of a mask": (lambda: UNEQUAL[2:, 2:], ValueError,
        "the index must be mask[rows, heads, queries, keys], got 2 entries; write ...", lambda: UNEQUAL[..., 2:, 2:]),
    "a part of a mask among processes": (call(attnmask.shard_sequence, UNEQUAL, 2, 0), ValueError,
        "write mask[:, :, begin:end, :]", lambda: UNEQUAL[:, :, 1:3, :]),
    "the dropout of FlashAttention": (attend(0.0), ValueError,
        "attention_mask must have axes, got 0.0; write None for no mask, and dropout_prob= for dropout",
        attend(None, dropout_prob=0.0)),
    "True as a mask": (attend(True), ValueError, "got True; write None for no mask", attend()),
    "a chance as the mask of a cache": (CACHED(attention_mask=0.1), ValueError, "attention_mask must have axes",
        CACHED()),
    "a function with `and`": (call(FUNCTION, lambda b, h, q, k: q >= k and q - k < 3, 9, 9), ValueError,
        "<lambda> failed: The truth value of an array with more than one element is ambiguous. Use a.any() or a.all(); "
        "f(b, h, q, k) gets index arrays; write & and |, np.abs",
        call(FUNCTION, lambda b, h, q, k: (q >= k) & (q - k < 3), 9, 9)),
    "a function of scalars": (call(FUNCTION, lambda b, h, q, k: math.fabs(q - k) < 3, 9, 9), TypeError,
        "f(b, h, q, k) gets index arrays; write & and |, np.abs",
        call(FUNCTION, lambda b, h, q, k: np.abs(q - k) < 3, 9, 9)),
    "dropout of everything": (attend(dropout_prob=1), ValueError,
        "dropout_prob must be at least 0 and below 1, got 1.0; write 0.1 to drop one weight of ten",
        attend(dropout_prob=0.1, dropout_seed=0)),
    "the place of the diagonal as causal": (attend(causal="top-left"), TypeError,
        'write causal=True, and causal_offset="bottom-right" if the last query sees the last key',
        attend(causal=True, causal_offset=BOTTOM)),
    "the default by a name": (attend(causal=True, causal_offset="top-left"), ValueError, "write 0 for top-left",
        attend(causal=True, causal_offset=0)),
    "the offset with another hyphen": (attend(causal=True, causal_offset="bottom_right"), ValueError,
        "must be an integer or 'bottom-right', got 'bottom_right'; did you mean 'bottom-right'?",
        attend(causal=True, causal_offset=BOTTOM)),
    "the offset as PyTorch calls it": (attend(causal=True, causal_offset="LOWER_RIGHT"), ValueError,
        "got 'LOWER_RIGHT'; did you mean 'bottom-right'?", attend(causal=True, causal_offset=BOTTOM)),
    "an array for the logsumexp": (attend(return_lse=True, out=(zeros(B, TQ, H, DV), zeros(B, H, TQ))), TypeError,
        "it takes only the result; the logsumexp is returned as a new array",
        attend(return_lse=True, out=zeros(B, TQ, H, DV))),
    "sinks with heads at the end": (attend(softmax_aux=zeros(3, H)), ValueError,
        "write np.transpose(softmax_aux) for [S, H]", attend(softmax_aux=np.transpose(zeros(3, H)))),
    "sinks of too many axes": (attend(softmax_aux=zeros(1, H, 1, 1)), ValueError,
        f"write np.reshape(softmax_aux, ({H}, 1)) for one sink per head",
        attend(softmax_aux=np.reshape(zeros(1, H, 1, 1), (H, 1)))),
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
    others = {name for name, own in _keywords._OTHERS.items() if not taken.keys().isdisjoint(own)}
    for name in {*_keywords._WRITE, *_keywords._LEAVE_OUT} - taken.keys() - others:
        with pytest.raises(
            TypeError, match=rf"^{function}\(\) got an unexpected keyword argument '{name}'"
        ) as raised:
            call(**right, **{name: None})
        instead = str(raised.value).partition("; write ")[2].partition("=")[0]
        known = [each.partition("=")[0] for each in _keywords._WRITE.get(name, "").split(" | ")]
        assert instead in taken or (not instead and taken.keys().isdisjoint(known))


@pytest.mark.parametrize(("name", "advice"), [
    ("attn_mask", "write attention_mask= for a mask of allowed pairs, or bias= for what is added"),
    ("window_size", "write sliding_window=, with None instead of -1"),
    ("enable_gqa", "leave it out, as key and value may have fewer heads than query"),
    ("grad_bias", "leave it out: flash_attention_vjp takes it"),
    ("attention_maks", "write attention_mask="),
    ("nothing_like_it", None),
])  # fmt: skip
def test_what_to_write_instead_of_a_keyword(name, advice):
    with pytest.raises(TypeError) as raised:
        flash_attention(**GOOD, **{name: 1})
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
