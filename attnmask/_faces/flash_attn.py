"""The rows of FlashAttention's functions, under the names that it has for them and for their arguments."""

from attnmask._attention.flash_attention import flash_attention
from attnmask._cache.flash_attention_with_kvcache import flash_attention_with_kvcache
from attnmask._faces.rows import Argument, Result, Row, arguments

_STARTS = """
cu_seqlens{0} : starts [sequences + 1]
    Where each sequence starts among the {1}, and the end of the last.
"""
_LENGTHS = """
max_seqlen{0} : size
    Without effect: lengths follow from where sequences start.
"""
_DROPOUT = """
dropout_p : chance = 0.0
    The probability that a weight is dropped. PyTorch's generator draws the seed.
"""
_SCALE = """
softmax_scale : scale = None
    Defaults to ``1 / sqrt(D)``.
causal : flag = False
    Hide keys that come after their query. The last query is at the last key.
window_size : hint tuple[int, int] = (-1, -1)
    The number of keys to the left and to the right that a query sees; -1 means all.
softcap : number = 0.0
    ``c`` of ``c · tanh(logit / c)``; 0 means no cap.
"""
_ALIBI = """
alibi_slopes : data [H] or [B, H] = None
    ALiBi: adds ``-slope · |i + Tk - Tq - j|`` to the logit of query i and key j. Not together with `softcap`.
"""
_LAST = """
deterministic : flag = False
    Without effect: results are the same bits in every run.
return_attn_probs : all = False
    If True, `softmax_lse` and `S_dmask` are returned too.
"""
_PAGES = """
block_table : slots [sequences, max_pages] = None
    The pages of the keys of each sequence, in order. `k` and `v` are then ``[pages, page_size, Hkv, D]``.
"""
_WITH_KVCACHE = f"""
q : learned [B, Tq, H, D]
k_cache : state [B, Tmax, Hkv, D] or [pages, page_size, Hkv, D]
v_cache : state [B, Tmax, Hkv, Dv] or [pages, page_size, Hkv, Dv]
k : learned [B, Tnew, Hkv, D] = None
    Written to the cache first, after `cache_seqlens` tokens.
v : learned [B, Tnew, Hkv, Dv] = None
rotary_cos, rotary_sin : learned [T, R / 2] = None
    Rotary embeddings of the first R channels of `k`, and of `q`: at the positions of `k` if `causal` or a window is
    given, otherwise all at the first.
cache_seqlens : hint int | torch.Tensor = None
    The number of tokens in the cache before the call: one, or one per sequence. Defaults to all.
cache_batch_idx : slots [B] = None
    The row of the cache for each sequence.
cache_leftpad : slots [B] = None
    How many tokens each sequence begins with that are padding.
block_table : slots [B, max_pages] = None
    The pages of each sequence, in order.
{_SCALE}
rotary_interleaved : flag = True
    Rotate channels 2i and 2i + 1 together, rather than i and i + R / 2.
{_ALIBI}
num_splits : size = 0
    Without effect.
return_softmax_lse : all = False
    If True, `softmax_lse` is returned too.
"""


def _arguments(text: str) -> tuple[Argument, ...]:
    return arguments("\n".join(line for line in text.splitlines() if line))


def _row(name: str, example: str, inputs: str, lengths: str = "", last: str = "") -> Row:
    """Return a row of attention. `inputs` have {0} tokens, {1} queries and {2} keys, packed if `lengths` are given."""
    tokens, queries, keys = ("total", "total_q", "total_k") if lengths else ("B, T", "B, Tq", "B, Tk")
    parts = inputs.format(tokens, queries, keys), lengths, _DROPOUT, _SCALE, _ALIBI, _LAST, last
    given = _arguments("".join(parts))
    results = (
        Result("out", f"[{queries}, H, Dv]"),
        Result("softmax_lse", "[H, total_q]" if lengths else "[B, H, Tq]", wide=True),
        Result("S_dmask", "[B, H, Tq, Tk]", wide=True),
    )
    examples = {"flash_attn": example}
    return Row(name, given, results, places=len(given), entry=flash_attention, examples=examples)


_QKV = """
qkv : learned [{0}, 3, H, D]
"""
_KV = """
q : learned [{1}, H, D]
kv : learned [{2}, 2, Hkv, D]
"""
_Q_K_V = """
q : learned [{1}, H, D]
k : learned [{2}, Hkv, D]
v : learned [{2}, Hkv, Dv]
"""
_OF_ONE = _STARTS.format("", "tokens") + _LENGTHS.format("")
_OF_BOTH = (
    _STARTS.format("_q", "queries") + _STARTS.format("_k", "keys") + _LENGTHS.format("_q, max_seqlen_k")
)

_STARTING = """
>>> starts = torch.tensor([0, 2, 5], dtype=torch.int32)
"""

ATTENTION = (
    _row(
        "flash_attn_func",
        """
>>> q, k = torch.zeros(1, 2, 1, 8), torch.zeros(1, 4, 1, 8)  # all keys weigh the same
>>> v = torch.arange(4.0).reshape(1, 4, 1, 1)
>>> flash_attn_func(q, k, v, causal=True).flatten().tolist()
[1.0, 1.5]
""",
        _Q_K_V,
    ),
    _row(
        "flash_attn_kvpacked_func",
        """
>>> q, kv = torch.zeros(1, 3, 4, 8), torch.zeros(1, 5, 2, 1, 8)  # four heads, one of keys
>>> flash_attn_kvpacked_func(q, kv, causal=True).shape
torch.Size([1, 3, 4, 8])
""",
        _KV,
    ),
    _row(
        "flash_attn_qkvpacked_func",
        """
>>> qkv = torch.zeros(1, 5, 3, 4, 8)
>>> flash_attn_qkvpacked_func(qkv, window_size=(2, 0)).shape
torch.Size([1, 5, 4, 8])
""",
        _QKV,
    ),
    _row(
        "flash_attn_varlen_func",
        _STARTING
        + """
>>> q, v = torch.zeros(5, 1, 8), torch.arange(5.0).reshape(5, 1, 1)
>>> flash_attn_varlen_func(q, q, v, starts, starts, 3, 3, causal=True).flatten().tolist()
[0.0, 0.5, 2.0, 2.5, 3.0]
""",
        _Q_K_V,
        _OF_BOTH,
        _PAGES,
    ),
    _row(
        "flash_attn_varlen_kvpacked_func",
        _STARTING
        + """
>>> q, kv = torch.zeros(5, 4, 8), torch.zeros(5, 2, 1, 8)
>>> flash_attn_varlen_kvpacked_func(q, kv, starts, starts, 3, 3).shape
torch.Size([5, 4, 8])
""",
        _KV,
        _OF_BOTH,
    ),
    _row(
        "flash_attn_varlen_qkvpacked_func",
        _STARTING
        + """
>>> qkv = torch.zeros(5, 3, 4, 8)
>>> flash_attn_varlen_qkvpacked_func(qkv, starts, 3, causal=True).shape
torch.Size([5, 4, 8])
""",
        _QKV,
        _OF_ONE,
    ),
)
_OF_CACHE = _arguments(_WITH_KVCACHE)
CACHE = Row(
    "flash_attn_with_kvcache",
    _OF_CACHE,
    (Result("out", "[B, Tq, H, Dv]"), Result("softmax_lse", "[B, H, Tq]", wide=True)),
    places=len(_OF_CACHE),
    entry=flash_attention_with_kvcache,
    examples={
        "flash_attn": """
>>> k_cache, v_cache = torch.zeros(1, 16, 1, 8), torch.zeros(1, 16, 1, 1)
>>> k, v = torch.zeros(1, 3, 1, 8), torch.arange(3.0).reshape(1, 3, 1, 1)
>>> flash_attn_with_kvcache(k, k_cache, v_cache, k, v, cache_seqlens=0, causal=True).flatten().tolist()
[0.0, 0.5, 1.0]
""",
    },
)
