"""The rows of attention, of caches and of writes to them, as PyTorch and JAX have them."""

from collections.abc import Sequence
from typing import Any

from attnmask._attention.arguments import (
    ARGUMENTS,
    ATTENTION_STATISTICS,
    ATTENTION_STATISTICS_WITH_KVCACHE,
    ATTENTION_WEIGHTS,
    CACHE_DEFAULTS,
    KVCACHE_DEFAULTS,
    KVCACHE_NAMES,
    LEARNED,
    MOVED,
    OF_CACHES,
    Function,
)
from attnmask._attention.batch import Batch
from attnmask._attention.flash_attention import (
    attention_statistics,
    attention_weights,
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
)
from attnmask._attention.forward import Results, attend_for_gradients
from attnmask._attention.jvp import second_gradients
from attnmask._attention.problem import FlashAttentionGrads, check_layout
from attnmask._cache.attend import without_gradients
from attnmask._cache.flash_attention_with_kvcache import (
    attention_statistics_with_kvcache,
    flash_attention_with_kvcache,
)
from attnmask._cache.write_kvcache import write_kvcache
from attnmask._common.arguments import describe, integer_array
from attnmask._common.loading import _core
from attnmask._common.types import AnyFunction, Arguments, Array, Given
from attnmask._faces.rows import Argument, Kind, Result, Row, arguments


def _keep(**given: Any) -> tuple[tuple[Array, Array], Array, Array]:
    """Return the results, and what gradients take in their place."""
    results: Results = attend_for_gradients(given)
    out, lse, wide_out = results
    return (out, lse), wide_out, lse


def _second(**given: Any) -> tuple[Array, ...]:
    dout, query, key, value, dlse = second_gradients((), given)
    return dout, dlse, query, key, value


def _fits_cache(given: Arguments, _: AnyFunction) -> None:
    packed = given["cu_seqlens_q"] is not None
    if given["query"].ndim != (3 if packed else 4):
        expected = "[total, H, D] with cu_seqlens_q" if packed else "[B, T, H, D]"
        raise ValueError(f"query must be {expected}, got {describe(given['query'])}")


def _check_cache(*, rotate: bool, prefix: int, **given: Any) -> None:
    # The bias and the prefix are checked later: they depend on lengths and pages.
    _core.check_kvcache(KVCACHE_NAMES, KVCACHE_DEFAULTS, (), given | {"bias": None})


def _check_write(*, rotate: bool, slot_mapping: Any, **given: Any) -> None:
    _core.check_write_kvcache(*given.values(), integer_array(slot_mapping, "slot_mapping"))


def _fits(given: Arguments, is_floating: AnyFunction) -> Batch:
    packed = given.get("cum_seqlens_q") is not None or given.get("cum_seqlens_k") is not None
    return check_layout([given[name] for name in LEARNED[:3]], packed, is_floating)


ATTENTION = Row(
    "flash_attention",
    (*ARGUMENTS, Argument("return_lse", Kind.ALL, "", False, "")),
    (
        Result("out", "[B, Tq, H, Dv] or [Tq, H, Dv]"),
        Result("lse", "[B, H, Tq] or [H, Tq]", wide=True),
    ),
    places=5,
    entry=flash_attention,
    keep=_keep,
    backward=flash_attention_bwd,
    grads=FlashAttentionGrads,
    jvp=flash_attention_jvp,
    moved=MOVED,
    second=_second,
    cast=LEARNED[:3],
    by_name=True,
    saved=("out", "lse"),
    fits=_fits,
    examples={
        "jax": """
>>> query, value = jnp.zeros((1, 3, 1, 8)), jnp.arange(3.0).reshape(1, 3, 1, 1)
>>> attend = jax.jit(lambda value: attnmask.jax.flash_attention(query, query, value, causal=True))
>>> attend(value).ravel().tolist()
[0.0, 0.5, 1.0]
>>> [round(x, 3) for x in jax.grad(lambda value: attend(value).sum())(value).ravel().tolist()]
[1.833, 0.833, 0.333]
""",
    },
)

_OF_WEIGHTS = arguments("""
of : statistics
queries : queries [n] = None
heads : choice ("query", "key") = "query"
lse : data [B, H, Tq] or [H, Tq] = None
""")


def _fits_pair(given: Arguments, is_floating: AnyFunction) -> Batch:
    return _fits(given | {"value": given["key"]}, is_floating)


def _of_weights(
    function: Function,
    entry: AnyFunction,
    known: Sequence[Argument],
    examples: Given,
    results: Sequence[Result],
    fits: AnyFunction = _fits_pair,
) -> Row:
    """Return the row of a function of the weights. Its gradient is an error, which faces raise."""
    of_name = {x.name: x for x in (*known, *_OF_WEIGHTS)}
    return Row(
        function.name,
        [of_name[name] for name in function.names],
        results,
        places=function.places,
        entry=entry,
        backward=entry,
        cast=[name for name in LEARNED[:2] if name in function.names],
        by_name=True,
        fits=fits,
        examples=examples,
    )


WEIGHTS = _of_weights(
    ATTENTION_WEIGHTS,
    attention_weights,
    ARGUMENTS,
    {
        "torch": """
>>> query, key = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8)  # all keys weigh the same
>>> attnmask.torch.attention_weights(query, key, causal=True, queries=-1)
tensor([[[[0.2500, 0.2500, 0.2500, 0.2500]]]])
""",
        "jax": """
>>> query = key = jnp.zeros((1, 4, 1, 8))  # all keys weigh the same
>>> look = jax.jit(lambda query, key: attnmask.jax.attention_weights(query, key, causal=True, queries=-1))
>>> look(query, key).tolist()
[[[[0.25, 0.25, 0.25, 0.25]]]]
""",
    },
    [Result("weights", "[B, H, n, Tk] or [H, n, Tk]", wide=True)],
)
_TOLD = (
    Result("key_sum", "[B, H, Tk] or [H, Tk]", wide=True),
    Result("entropy", "[B, H, n] or [H, n]", wide=True),
    Result("max_logit", "[B, H, n] or [H, n]", wide=True),
    Result("top_keys", "[B, H, n, top] or [H, n, top]"),
    Result("top_weights", "[B, H, n, top] or [H, n, top]", wide=True),
)
STATISTICS = _of_weights(
    ATTENTION_STATISTICS,
    attention_statistics,
    ARGUMENTS,
    {
        "torch": """
>>> query, key = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8)  # all keys weigh the same
>>> attnmask.torch.attention_statistics(query, key, causal=True, of="key_sum").key_sum
tensor([[[2.0833, 1.0833, 0.5833, 0.2500]]])
""",
        "jax": """
>>> query = key = jnp.zeros((1, 4, 1, 8))  # all keys weigh the same
>>> look = jax.jit(lambda query, key: attnmask.jax.attention_statistics(query, key, of="key_sum"))
>>> look(query, key).key_sum.tolist()
[[[1.0, 1.0, 1.0, 1.0]]]
""",
    },
    _TOLD,
)

CACHE = Row(
    "flash_attention_with_kvcache",
    (
        *arguments("""
query : learned [B, Tq, H, D] or [total, H, D]
k_cache : state [B, Tmax, Hkv, D] or [pages, page_size, Hkv, D]
v_cache : state [B, Tmax, Hkv, Dv] or [pages, page_size, Hkv, Dv]
key : learned [B, Tnew, Hkv, D] or [total, Hkv, D] = None
value : learned [B, Tnew, Hkv, Dv] or [total, Hkv, Dv] = None
cache_seqlens : lengths [B] = None
block_table : slots [B, max_pages] = None
cu_seqlens_q, cu_seqlens_k_new : starts [B + 1] = None
k_scale, v_scale : state = None
"""),
        *(
            row._replace(
                default=CACHE_DEFAULTS.get(row.name), kind=Kind.DATA if row.kind is Kind.TERM else row.kind
            )
            for row in (*ARGUMENTS, *OF_CACHES)
            if row.name in CACHE_DEFAULTS or row.kind is Kind.MASK
        ),
        *arguments("""
prefix : size = 0
rotate : flag = False
return_lse : all = False
out : out = None
"""),
    ),
    (
        Result("out", "[B, Tq, H, Dv] or [total, H, Dv]"),
        Result("lse", "[B, H, Tq] or [H, total]", wide=True),
    ),
    places=5,
    entry=flash_attention_with_kvcache,
    check=_check_cache,
    cast=LEARNED[:3],
    handler="attnmask_flash_kvcache",
    by_name=True,
    trained="flash_attention",
    without=without_gradients,
    fits=_fits_cache,
    examples={
        "jax": """
>>> from functools import partial
>>> @partial(jax.jit, donate_argnums=0)
... def step(caches, token, length):
...     result = attnmask.jax.flash_attention_with_kvcache(token, *caches, token, token, cache_seqlens=length)
...     return (result.k_cache, result.v_cache), result.out
>>> caches = jnp.zeros((1, 64, 1, 8)), jnp.zeros((1, 64, 1, 8))
>>> for length in range(3):
...     caches, out = step(caches, jnp.full((1, 1, 1, 8), length, jnp.float32), length)
>>> caches[0][0, :4, 0, 0].tolist()
[0.0, 1.0, 2.0, 0.0]
""",
    },
)
_READ = {"k_cache": Kind.LEARNED, "k_scale": Kind.DATA}
CACHE_STATISTICS = _of_weights(
    ATTENTION_STATISTICS_WITH_KVCACHE,
    attention_statistics_with_kvcache,
    [x._replace(kind=_READ.get(x.name, x.kind)) for x in CACHE.arguments],
    {
        "torch": """
>>> query, k_cache = torch.zeros(2, 1, 1, 8), torch.zeros(2, 4, 1, 8)  # all keys weigh the same
>>> look = attnmask.torch.attention_statistics_with_kvcache
>>> look(query, k_cache, of="key_sum", cache_seqlens=[2, 4]).key_sum
tensor([[[0.5000, 0.5000, 0.0000, 0.0000]],
<BLANKLINE>
        [[0.2500, 0.2500, 0.2500, 0.2500]]])
""",
    },
    _TOLD,
    _fits_cache,
)
WRITE = Row(
    "write_kvcache",
    """
k_cache : state [B, Tmax, Hkv, D] or [pages, page_size, Hkv, D]
v_cache : state [B, Tmax, Hkv, Dv] or [pages, page_size, Hkv, Dv]
key : learned [total, Hkv, D] with slot_mapping
value : learned [total, Hkv, Dv] or None
slot_mapping : slots [total]
k_scale, v_scale : state = None
rotate : flag = False
""",
    (),
    places=5,
    entry=write_kvcache,
    check=_check_write,
    handler="attnmask_write_kvcache",
    by_name=True,
    trained="flash_attention",
    examples={
        "jax": """
>>> from functools import partial
>>> @partial(jax.jit, donate_argnums=0)
... def write(caches, tokens, slots):
...     return attnmask.jax.write_kvcache(*caches, tokens, tokens, slots)[:2]
>>> caches = jnp.zeros((2, 4, 1, 8)), jnp.zeros((2, 4, 1, 8))
>>> caches = write(caches, jnp.ones((2, 1, 8)), jnp.array([5, -1]))
>>> caches[0][:, :, 0, 0].tolist()
[[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
""",
    },
)
