"""What attention to a cache looked at, beside NumPy: the same bits."""

import numpy as np
import pytest

import attnmask
from attnmask._attention.weights import AttentionStatistics

torch = pytest.importorskip("torch")
import attnmask.torch  # noqa: E402

ALL = ("key_sum", "entropy", "max_logit", ("top_keys", 3))
look = attnmask.torch.attention_statistics_with_kvcache


def in_numpy(x):
    return x.numpy() if isinstance(x, torch.Tensor) else x


def same(found: AttentionStatistics, right: AttentionStatistics) -> None:
    for got, expected in zip(found, right, strict=True):
        assert isinstance(got, torch.Tensor)
        assert got.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("more", [
    {}, {"heads": "key", "sliding_window": 3}, {"cache_seqlens": torch.tensor([5, 9])},
    {"attention_mask": torch.rand(2, 1, 2, 12) < 0.5}, {"lse": torch.randn(2, 4, 2)}, {"rotate": True},
    {"block_table": torch.tensor([[1], [0]], dtype=torch.int32), "cache_seqlens": 7},
    {"attention_mask": attnmask.MaskInfo.causal(2, 12, offset="bottom-right")},
], ids=lambda more: "-".join(more))  # fmt: skip
def test_the_same_as_in_numpy(more):
    query, k_cache = torch.randn(2, 2, 4, 16), torch.randn(2, 12, 2, 16)
    right = {name: in_numpy(x) for name, x in more.items()}
    expected = attnmask.attention_statistics_with_kvcache(query.numpy(), k_cache.numpy(), of=ALL, **right)
    same(look(query, k_cache, of=ALL, **more), expected)
    mask = more.get("attention_mask")
    if isinstance(mask, attnmask.MaskInfo):
        same(look(query, k_cache, of=ALL, attention_mask=attnmask.torch.mask_tensors(mask)), expected)


def test_a_step():
    cache = attnmask.torch.KVCache(2, 32, pages=16, page_size=4, dtype="int4", group=32)
    twin = attnmask.KVCache(2, 32, pages=16, page_size=4, dtype="int4", group=32)
    ids, x = [cache.new_sequence()], torch.randn(6, 2, 32)
    twin.new_sequence()
    with cache.step(ids, 6) as step, twin.step(ids, 6) as right:
        step.attend(0, x, x, x)
        right.attend(0, x.numpy(), x.numpy(), x.numpy())
        same(step.statistics(0, x, of=ALL), right.statistics(0, x.numpy(), of=ALL))


def test_between_two_graphs_and_without_gradients():
    query, k_cache = torch.randn(1, 1, 2, 16), torch.randn(1, 8, 2, 16)

    def twice(query):
        return look(query + 1, k_cache, of="entropy").entropy * 2

    assert torch.equal(torch.compile(twice, backend="aot_eager")(query), twice(query))
    query.requires_grad_()
    with pytest.raises(
        RuntimeError, match="attention_statistics_with_kvcache has no gradient, and query requires one"
    ):
        look(query, k_cache, of="entropy")
    with torch.no_grad():
        look(query, k_cache, of="entropy")
    with pytest.raises(TypeError, match="query must be a tensor"):
        look(np.zeros((1, 1, 2, 16)), k_cache, of="entropy")
    with pytest.raises(RuntimeError, match=r"is not supported|forward"):
        torch.func.jvp(lambda x: look(x, k_cache, of="entropy").entropy, (query.detach(),), (query.detach(),))
