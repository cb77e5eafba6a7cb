"""Swin of transformers with the relative position biases of its windows as `grid_bias`, beside that of PyTorch."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("attnmask.torch")

from tiny_models import later  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.swin import modeling_swin  # noqa: E402

import attnmask.torch  # noqa: E402

pytestmark = [
    later,
    pytest.mark.skipif(not hasattr(modeling_swin, "SwinRelativePositionBias"), reason="an earlier Swin"),
]


def attend(module, query, key, value, attention_mask, scaling, **_):
    """Attention with the table of the module; a mask is left of windows that hold several parts of the image."""
    of_module = module.relative_position_bias
    table, side = of_module.relative_position_bias_table, int(query.shape[2] ** 0.5)
    grid = table.T.reshape(-1, 2 * side - 1, 2 * side - 1).flip(1, 2)
    parts = (attention_mask - of_module()).detach()[:, :1]
    tokens = (x.transpose(1, 2) for x in (query, key, value))
    return attnmask.torch.flash_attention(*tokens, bias=parts, grid_bias=grid, softmax_scale=scaling), None


@pytest.mark.parametrize(("size", "window"), [(64, 4), (56, 7)])
def test_swin_gives_what_it_gives_with_its_own_attention(monkeypatch, size, window):
    """With shifted windows; the gradients of all weights, those of the tables included."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "by point", attend)
    torch.manual_seed(0)
    more = {"image_size": size, "patch_size": 4, "num_channels": 3, "embed_dim": 16, "window_size": window}
    more |= {"depths": [2, 2], "num_heads": [2, 4], "drop_path_rate": 0.0}
    config = transformers.SwinConfig(**more)
    model = transformers.SwinModel(config).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("relative_position_bias_table"):
                weight.normal_()
    pixels = torch.randn(2, 3, size, size, dtype=torch.float64)

    def run(implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(pixels).last_hidden_state
        out.square().sum().backward()
        grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
        return out.detach(), grads

    (right, right_grads), (out, grads) = run("sdpa"), run("by point")
    torch.testing.assert_close(out, right, rtol=1e-10, atol=1e-10)
    assert sum(name.endswith("bias_table") for name in grads) == 4
    assert grads.keys() == right_grads.keys()
    for name, grad in grads.items():
        size_of = right_grads[name].abs().max().item()
        torch.testing.assert_close(grad, right_grads[name], rtol=1e-9, atol=1e-10 * (1 + size_of), msg=name)
