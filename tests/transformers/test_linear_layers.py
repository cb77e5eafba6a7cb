"""The layers of examples/linear_layers.py: weights of transformers' layers give their results and gradients."""

import importlib.util

import pytest
from environment import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
mamba = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")

PATH = ROOT / "examples" / "linear_layers.py"
pytestmark = [
    pytest.mark.skipif(not PATH.exists(), reason="the tests run without the examples"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def layers():
    spec = importlib.util.spec_from_file_location("linear_layers", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def delta_net(layers):
    config = transformers.Qwen3NextConfig(
        hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=8, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    return qwen.Qwen3NextGatedDeltaNet(config, 0), layers.GatedDeltaNet(32, 2, 4, 16, 8)


def mamba_2(layers):
    config = transformers.Mamba2Config(
        hidden_size=32, num_heads=8, head_dim=8, n_groups=2, state_size=16, chunk_size=32, expand=2,
        num_hidden_layers=1,
    )  # fmt: skip
    return mamba.Mamba2Mixer(config, 0), layers.Mamba2(32, 8, 8, 16, groups=2)


@pytest.mark.parametrize("make", [delta_net, mamba_2])
def test_weights_of_transformers(layers, make):
    torch.manual_seed(0)
    theirs, ours = make(layers)
    for name, parameter in theirs.named_parameters():  # no two heads and channels alike
        if parameter.ndim == 1 and "A_log" not in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 50, 32)
    expected, (out, _) = theirs.eval()(x), ours(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(out)
    for layer, result in ((theirs, expected), (ours, out)):
        (result * weights).sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())
    for name, parameter in ours.named_parameters():
        right = theirs.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, right, rtol=1e-3, atol=1e-4 * right.abs().max().item())


@pytest.mark.parametrize("make", [delta_net, mamba_2])
def test_documents_and_tokens(layers, make):
    _, layer = make(layers)
    x = torch.randn(1, 60, 32)
    with torch.no_grad():
        packed, (before, after) = layer(x, cu_seqlens=[0, 25, 60])
        for row, (begin, end) in enumerate(((0, 25), (25, 60))):
            out, state = layer(x[:, begin:end])
            torch.testing.assert_close(packed[:, begin:end], out)
            torch.testing.assert_close(before[row], state[0][0])
            torch.testing.assert_close(after[row], state[1][0])
        out, state = layer(x[:, :40])
        tokens = [out]
        for t in range(40, 60):
            out, state = layer(x[:, t : t + 1], state=state)
            tokens.append(out)
        torch.testing.assert_close(torch.cat(tokens, 1), layer(x)[0], rtol=1e-4, atol=1e-5)
