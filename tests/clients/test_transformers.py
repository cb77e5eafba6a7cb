"""Models of transformers with their flash_attention_2, on attnmask.flash_attn, beside their eager path."""

from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("attnmask.torch")

from model_packages import DOORS  # noqa: E402
from tiny_models import TOKENS, assert_close, later, model_of, padding, random_ids  # noqa: E402
from transformers import modeling_flash_attention_utils as utils  # noqa: E402

import attnmask.flash_attn  # noqa: E402

pytestmark = later


@pytest.fixture
def flash_attention(monkeypatch):
    """`flash_attn` is there, and transformers believes that this machine can run it: it asks for a GPU otherwise."""
    kept = [
        name
        for name in vars(utils)
        if name.startswith(("_flash_", "_pad_fn", "_unpad_fn", "_process_", "_loaded"))
    ]
    for name in kept:
        monkeypatch.setattr(utils, name, None if name == "_loaded_implementation" else getattr(utils, name))
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: True)
    row = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    monkeypatch.setitem(row, "general_availability_check", lambda: True)
    monkeypatch.setitem(row, "supported_devices", ((lambda: True, "cpu"),))
    attnmask.flash_attn.install()
    yield
    attnmask.flash_attn.uninstall()


def packed():
    """Two sequences in one row, told by their positions."""
    places = torch.cat((torch.arange(4), torch.arange(TOKENS - 4)))[None]
    return {"input_ids": random_ids(1, TOKENS), "position_ids": places}


def whole():
    return {"input_ids": random_ids(2, TOKENS)}


def padded(side):
    return lambda: {"input_ids": random_ids(2, TOKENS), "attention_mask": padding(side)}


def frames():
    """Patches of two images, whose tokens see their own image."""
    return {
        "hidden_states": torch.randn(4 * 6 + 2 * 4, 3 * 2 * 2 * 2),
        "grid_thw": torch.tensor([[1, 4, 6], [1, 2, 4]]),
    }


class Client(NamedTuple):
    name: str
    inputs: Any
    calls: int = 2


CLIENTS = [
    Client("Llama", whole),
    Client("Llama", padded("right")),
    Client("Llama", padded("left")),
    Client("Llama", packed),
    Client("Mistral", padded("left")),
    Client("Mistral", packed),
    Client("Qwen3", padded("right")),
    Client("Gemma2", padded("right")),  # with a soft cap
    Client("Gemma3", padded("left")),
    Client("Bert", padded("right")),
    Client("ModernBert", padded("right")),
    Client("ModernBert", whole),
    Client("Qwen2VLVision", frames),
]


def made(name):
    if name != "Qwen2VLVision":
        return model_of(name)
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = Qwen2VLVisionConfig(
        depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=2, initializer_range=0.3
    )
    torch.manual_seed(0)
    return Qwen2VisionTransformerPretrainedModel._from_config(config, attn_implementation="eager").eval()


def results(model, given):
    found = model(**given)
    out = found.logits if hasattr(found, "logits") else found.last_hidden_state
    mask = given.get("attention_mask")
    out = out if mask is None else out * mask[..., None]
    torch.manual_seed(3)
    model.zero_grad()
    (out * torch.randn_like(out)).sum().backward()
    return {"out": out.detach()} | {
        name: x.grad for name, x in model.named_parameters() if x.grad is not None
    }


def name_of(client):
    return f"{client.name}-{client.inputs.__qualname__.split('.')[0]}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("client", CLIENTS, ids=name_of)
def test_beside_eager(client, flash_attention, served):
    model = made(client.name)
    model.config.use_cache = False
    torch.manual_seed(2)
    given = client.inputs()
    expected = results(model, given)
    assert served == dict.fromkeys(DOORS, 0)
    model.set_attn_implementation("flash_attention_2")
    actual = results(model, given)
    assert served == dict.fromkeys(DOORS, 0) | {"flash_attn": client.calls}
    assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_generate(name, flash_attention, served):
    """With a cache of tensors, and padding at the left."""
    model = model_of(name)
    torch.manual_seed(2)
    given = padded("left")() | {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**given)
    model.set_attn_implementation("flash_attention_2")
    assert model.generate(**given).tolist() == expected.tolist()
    assert served["flash_attn"] == 6 * 2
