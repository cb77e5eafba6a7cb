"""What attention to a cache looked at, beside NumPy: the same bits."""

import numpy as np
import pytest

import attnmask
from attnmask._attention.weights import AttentionStatistics

torch = pytest.importorskip("torch")
import attnmask.torch  # noqa: E402
from attnmask.torch._operators import in_place  # noqa: E402

ALL = ("key_sum", "entropy", "max_logit", ("top_keys", 3))
look = attnmask.torch.attention_statistics_with_kvcache


def same(found: AttentionStatistics, right: AttentionStatistics) -> None:
    for got, expected in zip(found, right, strict=True):
        assert isinstance(got, torch.Tensor)
        assert got.numpy().tobytes() == expected.tobytes()


def drawn(*shape: int) -> "torch.Tensor":
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("more", [
    {}, {"heads": "key", "sliding_window": 3}, {"cache_seqlens": torch.tensor([0, 9])}, {"rotate": True},
    {"attention_mask": drawn(2, 1, 2, 12) < 0.5}, {"logits_soft_cap": 2.0, "softmax_aux": drawn(4, 1)},
    {"block_table": torch.tensor([[1], [0]], dtype=torch.int32), "cache_seqlens": 7},
    {"attention_mask": attnmask.MaskInfo.causal(2, 12, offset="bottom-right")},
    {"query": drawn(4, 4, 16), "cu_seqlens_q": torch.tensor([0, 1, 4], dtype=torch.int32), "cache_seqlens": 8},
], ids=lambda more: "-".join(more))  # fmt: skip
def test_the_same_as_in_numpy(more, dtype):
    given = {"query": drawn(2, 2, 4, 16), "k_cache": drawn(2, 12, 2, 16)} | more
    given |= {name: given[name].to(dtype) for name in ("query", "k_cache")}
    if "cache_seqlens" in given and "block_table" not in given:
        given["k_cache"][:, 9:] = torch.nan
    right = {name: in_place(x, name) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    expected = attnmask.attention_statistics_with_kvcache(**right, of=ALL)
    same(look(**given, of=ALL), expected)
    _, lse = attnmask.torch.flash_attention_with_kvcache(
        **{name: x for name, x in given.items() if name != "heads"}, v_cache=given["k_cache"], return_lse=True
    )
    same(
        look(**given, of=ALL, lse=lse),
        attnmask.attention_statistics_with_kvcache(**right, of=ALL, lse=lse.numpy()),
    )
    mask = given.get("attention_mask")
    if isinstance(mask, attnmask.MaskInfo):
        same(look(**given | {"attention_mask": attnmask.torch.mask_tensors(mask)}, of=ALL), expected)


def test_a_step():
    cache = attnmask.torch.KVCache(2, 32, pages=16, page_size=4, dtype="int4", group=32)
    twin = attnmask.KVCache(2, 32, pages=16, page_size=4, dtype="int4", group=32)
    ids, x = [cache.new_sequence()], torch.randn(6, 2, 32)
    twin.new_sequence()
    with cache.step(ids, 6) as step, twin.step(ids, 6) as right:
        step.attend(0, x, x, x)
        right.attend(0, x.numpy(), x.numpy(), x.numpy())
        same(step.statistics(0, x, of=ALL), right.statistics(0, x.numpy(), of=ALL))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph(backend, dynamic):
    """Key sums end with the longest sequence, which a graph does not know."""
    k_cache, table = drawn(6, 4, 2, 16), torch.tensor([[0, 3, 5], [2, 1, 4]], dtype=torch.int32)

    def tell(query, lengths):
        given = {"block_table": table, "cache_seqlens": lengths, "heads": "key"}
        found = look(query + 1, k_cache, of=ALL, **given)
        only = look(query, k_cache, of="key_sum", **given)
        assert only.entropy is None
        return (*found, only.key_sum * 2)

    compiled = torch.compile(tell, backend=backend, fullgraph=True, dynamic=dynamic)
    for tokens, lengths in ((2, [9, 12]), (2, [5, 0]), (1, [3, 8])):
        given = drawn(2, tokens, 4, 16), torch.tensor(lengths)
        for got, expected in zip(compiled(*given), tell(*given), strict=True):
            assert torch.equal(got, expected)


def test_vmap():
    """Mapped calls may have other longest sequences."""
    queries, k_cache, lengths = (
        drawn(3, 2, 1, 4, 16),
        drawn(2, 12, 2, 16),
        torch.tensor([[3, 0], [12, 5], [7, 7]]),
    )
    tell = lambda query, lengths: look(query, k_cache, of=ALL, cache_seqlens=lengths)  # noqa: E731
    found = torch.func.vmap(tell)(queries, lengths)
    assert found.key_sum.shape == (3, 2, 4, 12)
    for i, of_call in enumerate(map(tell, queries, lengths)):
        longest = of_call.key_sum.shape[-1]
        assert torch.equal(found.key_sum[i, ..., :longest], of_call.key_sum)
        assert not found.key_sum[i, ..., longest:].any()
        assert all(torch.equal(x[i], y) for x, y in zip(found[1:], of_call[1:], strict=True))
    shared = torch.func.vmap(lambda query: tell(query, lengths[1]))(queries)
    assert torch.equal(shared.key_sum[2], tell(queries[2], lengths[1]).key_sum)


def test_without_gradients():
    query, k_cache = torch.randn(1, 1, 2, 16, requires_grad=True), torch.randn(1, 8, 2, 16)
    entropy = look(query, k_cache, of="entropy").entropy
    words = r"torch.attention_statistics_with_kvcache has no gradient: .*\.detach\(\)"
    with pytest.raises(RuntimeError, match=words):
        entropy.sum().backward()
    with pytest.raises(TypeError, match="query must be a tensor"):
        look(np.zeros((1, 1, 2, 16)), k_cache, of="entropy")
    with pytest.raises(TypeError, match="k_cache must be a tensor"):
        look(query, k_cache.numpy(), of="entropy")
    words = "attention_statistics_with_kvcache .*query"
    with pytest.raises(RuntimeError, match=words):
        torch.func.jvp(lambda x: look(x, k_cache, of="entropy").entropy, (query.detach(),), (query.detach(),))


def test_autocast_leaves_caches():
    query, k_cache = drawn(1, 1, 2, 16), drawn(1, 8, 2, 16).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = look(query, k_cache, of=ALL)
    same(found, attnmask.attention_statistics_with_kvcache(
        in_place(query.to(torch.bfloat16), "query"), in_place(k_cache, "k_cache"), of=ALL
    ))  # fmt: skip
