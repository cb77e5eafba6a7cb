"""NATTEN's functions beside dense attention in float64."""

import numpy as np
import pytest
from environment import import_paths, python
from reference_masks import neighborhood

torch = pytest.importorskip("torch")
natten = pytest.importorskip("attnmask.natten")

CASES = [
    ((1,), {"kernel_size": 1}),
    ((9,), {"kernel_size": 3, "stride": 2}),
    ((70,), {"kernel_size": (4,), "is_causal": True, "scale": 0.3}),
    ((5, 7), {"kernel_size": 3}),
    ((8, 12), {"kernel_size": [3, 5], "stride": [2, 1], "dilation": [2, 1]}),
    ((14, 14), {"kernel_size": 7, "is_causal": (True, False)}),
    ((3, 4, 5), {"kernel_size": (3, 3, 1), "stride": (1, 2, 1)}),
]
FUNCTIONS = {1: natten.na1d, 2: natten.na2d, 3: natten.na3d}


def tensors(shape, heads=4, kv_heads=4, value_dim=8, dtype=torch.float64):
    torch.manual_seed(0)
    dims = ((heads, 8), (kv_heads, 8), (kv_heads, value_dim))
    return [torch.randn(2, *shape, *dim, dtype=dtype, requires_grad=True) for dim in dims]


def dense(query, key, value, shape, kernel_size, stride=1, dilation=1, is_causal=False, scale=None):
    pairs = torch.from_numpy(neighborhood(shape, kernel_size, stride, dilation, is_causal))
    group = query.shape[-2] // key.shape[-2]
    query, key, value = (x.flatten(1, len(shape)) for x in (query, key, value))
    key, value = (x.repeat_interleave(group, 2) for x in (key, value))
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) * (scale or query.shape[-1] ** -0.5)
    weights = logits.masked_fill(~pairs, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value).unflatten(1, shape)


@pytest.mark.parametrize(("kv_heads", "value_dim"), [(4, 8), (2, 8), (1, 3)])
@pytest.mark.parametrize(("shape", "given"), CASES, ids=str)
def test_values_and_gradients(shape, given, kv_heads, value_dim):
    inputs = tensors(shape, kv_heads=kv_heads, value_dim=value_dim)
    out = FUNCTIONS[len(shape)](*inputs, **given)
    expected = dense(*inputs, shape, **given)
    torch.testing.assert_close(out, expected)
    weights = torch.cos(expected.detach())
    found, right = (torch.autograd.grad(x, inputs, weights) for x in (out, expected))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype):
    inputs = tensors((8, 9), dtype=dtype)
    out = natten.na2d(*inputs, 5)
    assert out.dtype == dtype
    expected = dense(*(x.double() for x in inputs), (8, 9), 5)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_graphs():
    """One graph for each shape, and gradients in it."""

    def model(query, key, value):
        return natten.na2d(query * 2, key, value, 3, dilation=(2, 1)).sin()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for shape in ((6, 8), (7, 8), (9, 10)):
        inputs = tensors(shape, kv_heads=2)
        results = []
        for function in (model, compiled):
            out = function(*inputs)
            results.append((out, *torch.autograd.grad(out.sum(), inputs)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


def test_strides_of_tensors():
    """Heads before points, as models permute them."""
    inputs = [x.detach().permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4) for x in tensors((5, 7))]
    torch.testing.assert_close(natten.na2d(*inputs, 3), dense(*inputs, (5, 7), 3))


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (ValueError, "kernel_size must be at most 5, the length of axis 0, got 7", {"kernel_size": 7}),
        (ValueError, "kernel_size must be odd for axis 1", {"kernel_size": (3, 4)}),
        (ValueError, "stride must be at most 3, the kernel_size of axis 0, got 5", {"stride": 5}),
        (ValueError, "dilation must be at most 1 for axis 0, .* got 2", {"dilation": 2}),
        (TypeError, "kernel_size must be an integer, got", {"kernel_size": np.array([3, 3])}),
        (TypeError, "stride must be an integer, got", {"stride": {1: 2}}),
        (TypeError, "is_causal must be True or False, got 1", {"is_causal": 1}),
        (ValueError, "kernel_size must be one value, or one for each of the 2 axes", {"kernel_size": (3,) * 3}),
        (ValueError, r"key must have the points of query, \(5, 7\)", {"key": torch.zeros(2, 5, 8, 4, 8)}),
        (ValueError, r"value must have 5 axes, \[batch, height, width", {"value": torch.zeros(2, 35, 4, 8)}),
        (TypeError, "query must be a tensor", {"query": np.zeros((2, 5, 7, 4, 8))}),
        (TypeError, "additional_keys", {"additional_keys": None}),
        (TypeError, "backend", {"backend": "flex"}),
    ],
)  # fmt: skip
def test_bad_input(error, words, change):
    query, key, value = tensors((5, 7))
    given = {"query": query, "key": key, "value": value, "kernel_size": 3}
    natten.na2d(**given)
    with pytest.raises(error, match=words):
        natten.na2d(**given | change)


def test_install():
    result = python(
        """
import importlib.util, sys
import attnmask.natten as ours
for _ in range(2):
    ours.install()
    ours.install()
    import natten
    from natten import na1d, na2d, na3d
    from natten.functional import na2d as functional
    assert functional is na2d is ours.na2d
    assert natten.__version__.startswith("0.20")
    assert sorted(natten.__all__) == sorted(natten.functional.__all__) == ["na1d", "na2d", "na3d"]
    for name in ("natten", "natten.functional"):
        assert importlib.util.find_spec(name) is sys.modules[name].__spec__
    assert importlib.util.find_spec("natten.backends") is None
    ours.uninstall()
    ours.uninstall()
    assert importlib.util.find_spec("natten") is None
sys.modules["natten"] = other = type(sys)("natten")
try:
    ours.install()
except RuntimeError as error:
    print(error)
ours.uninstall()
assert sys.modules["natten"] is other
""",
        **import_paths(),
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "natten is installed, and stays: call the functions of attnmask.natten\n"
