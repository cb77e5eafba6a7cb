"""attnmask.torch.pack, unpack, shard_sequence and unshard_sequence: NumPy's numbers, in graphs too."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import attnmask.torch  # noqa: E402

STARTS, PLAN = torch.tensor([0, 5, 5, 12]), attnmask.ShardPlan([0, 3, 4, 12], [1, 0, 1], world=2)
ROWS = {"x": (3, 12, 2)}
SHARDS = {"one": (2, 6, 3), "other": (2, 6, 3)}


def divided(**more):
    return lambda one, other, of: of.unshard_sequence([one, other], **more)


CASES = {  # shapes of what has gradients, and a call
    "pack by lengths": (ROWS, lambda x, of: of.pack(x, torch.tensor([3, 0, 12]))[0]),
    "pack by a list": (ROWS, lambda x, of: of.pack(x, [3, 0, 12])[0]),
    "pack by a mask": (ROWS, lambda x, of: of.pack(x, torch.arange(36).reshape(3, 12) % 3 > 0)[0]),
    "unpack": ({"x": (12, 2)}, lambda x, of: of.unpack(x, STARTS, 9, fill=-1.5)),
    "unpack nothing": ({"x": (0, 2)}, lambda x, of: of.unpack(x, torch.tensor([0, 0]), 3)),
    "zigzag": (ROWS, lambda x, of: of.shard_sequence(x, 5, 3, axis=1)),
    "contiguous": ({"x": (12,)}, lambda x, of: of.shard_sequence(x, 5, 2, "contiguous")),
    "starts": (ROWS, lambda x, of: of.shard_sequence(x, 2, 1, cu_seqlens=STARTS, axis=-2)),
    "plan": (ROWS, lambda x, of: of.shard_sequence(x, 2, 1, PLAN, axis=1)),
    "zigzag back": (SHARDS, divided()),
    "starts back": (SHARDS, divided(layout="contiguous", cu_seqlens=torch.tensor([0, 6, 12]))),
    "plan back": ({"one": (2, 1, 3), "other": (2, 11, 3)}, divided(layout=PLAN)),
}


def results_of(run, shapes, of):
    """The result, and gradients of its squares."""
    torch.manual_seed(0)
    given = [torch.randn(*shape, requires_grad=True) for shape in shapes.values()]
    out = run(*given, of)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in given)]


@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize("name", CASES)
def test_like_numpy(name, dynamic):
    shapes, call = CASES[name]
    expected = results_of(call, shapes, attnmask)
    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for run in (call, compiled):
        for one, other in zip(results_of(run, shapes, attnmask.torch), expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_one_graph_for_all_lengths_and_plans():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def run(x, lengths, plan):
        packed, starts = attnmask.torch.pack(x, lengths)
        return packed, starts, attnmask.torch.shard_sequence(x, 2, 0, plan)

    x = torch.arange(24).reshape(2, 12)
    for lengths, cut in (([12, 3], 2), ([1, 0], 5), ([7, 7], 11)):
        plan = attnmask.ShardPlan([0, cut, 12], [0, 1], 2)
        packed, starts, shard = run(x, torch.tensor(lengths), plan)
        np.testing.assert_array_equal(packed, attnmask.pack(x.numpy(), lengths)[0])
        np.testing.assert_array_equal(starts, attnmask.pack(x.numpy(), lengths)[1])
        np.testing.assert_array_equal(shard, x[:, :cut])
    assert len(graphs) == 1
    with pytest.raises(ValueError, match=r"lengths must be at most 12.* got 13"):
        run(x, torch.tensor([13, 0]), plan)


X = torch.zeros(2, 4, 3)


@pytest.mark.parametrize(("error", "message", "call"), [
    (TypeError, "x must be a tensor", lambda of: of.pack(X.numpy(), [4, 4])),
    (ValueError, r"x must be \[B, T, ...\]", lambda of: of.pack(X[0, 0], [4])),
    (ValueError, r"packed must be \[total, ...\]", lambda of: of.unpack(X.sum(), [0, 1], 1)),
    (ValueError, "fill must be a number that int64 holds", lambda of: of.unpack(X[0].long(), [0, 4], 4, 1.5)),
    (ValueError, "max_len must be at least 2", lambda of: of.unpack(X[0, :2], [0, 2], 1)),
    (ValueError, "cu_seqlens must end at 4", lambda of: of.shard_sequence(X, 2, 0, cu_seqlens=[0, 3], axis=1)),
    (ValueError, "layout must be a plan for 3 processes", lambda of: of.shard_sequence(X, 3, 0, PLAN, axis=1)),
    (IndexError, "axis must be from -3 to 2", lambda of: of.shard_sequence(X, 2, 0, axis=3)),
    (TypeError, r"shards\[1\] must be a tensor", lambda of: of.unshard_sequence([X, X.numpy()], axis=1)),
    (ValueError, r"shards\[1\] must be a .*like shards\[0\]", lambda of: of.unshard_sequence([X, X.long()], axis=1)),
])  # fmt: skip
def test_wrong_arguments(error, message, call):
    with pytest.raises(error, match=message):
        call(attnmask.torch)
    with pytest.raises(Exception, match=message):  # PyTorch wraps what is raised while it traces
        torch.compile(call, backend="eager")(attnmask.torch)
