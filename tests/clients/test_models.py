"""Models of other packages, unchanged, on attnmask: beside their own slow path, forward and backward."""

import contextlib
import importlib
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from model_packages import DOORS, packages

torch = pytest.importorskip("torch")
pytest.importorskip("attnmask.torch")

import attnmask.flash_attn  # noqa: E402
import attnmask.natten  # noqa: E402
import attnmask.torch  # noqa: E402


class Client(NamedTuple):
    name: str
    module: str  # the file of the model
    door: str
    calls: int  # of attention, forward
    make: Any  # (module, fast) -> model; slow ones have PyTorch's formula or their own
    inputs: Any  # () -> tensors and what else the model is called with
    call: Any = lambda model, *inputs: model(*inputs)
    lazy: str = ""  # see model_packages
    absent: str = ""
    dtype: Any = torch.float64
    tolerance: float = 1e-10
    calls_without_gradient: int | None = None  # if others than `calls`


def ids(*shape):
    return torch.randint(3, 40, shape)


def padding(length, tokens=11):
    """Of two rows, the second of which is shorter."""
    return torch.arange(tokens) < torch.tensor([[tokens], [length]])


STARTS = torch.tensor([0, 4, 11, 15, 22], dtype=torch.int32)  # of the documents in two rows of eleven tokens


def olmo(module, fast, kv_heads=4, window=None):
    """Without a GPU it chooses PyTorch by itself, so its own class for FlashAttention is set."""
    names = module.AttentionBackendName
    model = module.Attention(
        d_model=32, n_heads=4, n_kv_heads=kv_heads, window_size=window, backend=names.torch
    )
    if fast:
        limits = (-1, -1) if window is None else (window - 1, 0)
        model.backend = names.flash_2.build(head_dim=8, n_heads=4, n_kv_heads=kv_heads, window_size=limits)
    return model


def olmo_backend(module, fast):
    names = module.AttentionBackendName
    return (names.flash_2 if fast else names.torch).build(head_dim=8, n_heads=4)


def of_packed(backend, qkv):
    """One that reads [B, T, 3, H, D], and one that does not."""
    return backend(qkv) if "Flash" in type(backend).__name__ else backend(qkv.unbind(2))


def of_documents(model, x):
    """One that takes the documents of all rows in one call, and one by one."""
    if "Flash" in type(model.backend).__name__:
        return model(x, cu_doc_lens=STARTS, max_doc_len=7)
    rows, starts = x.flatten(0, 1)[None], STARTS.tolist()
    parts = [model(rows[:, start:end]) for start, end in pairwise(starts)]
    return torch.cat(parts, 1).view_as(x)


def diffusion(module, fast):
    model = module.Attention(32, 24, heads=4, dim_head=8, bias=True, norm_num_groups=None)
    processors = importlib.import_module("diffusers.models.attention_processor")
    model.set_processor(processors.AttnProcessor2_0() if fast else processors.AttnProcessor())
    return model


def timm(of, **more):
    def make(module, fast):
        model = getattr(module, of)(**more)
        for part in model.modules():
            if hasattr(part, "fused_attn"):
                part.fused_attn = fast
        return model

    return make


def stable_audio(module, fast):
    """It attends in float16, whatever it is of: its slow path reads the same rounded numbers."""
    if not fast:

        def dense(q, k, v, causal, window_size):
            wide = (x.double().transpose(1, 2) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=bool(causal))
            return out.transpose(1, 2).half()

        module.flash_attn_func = dense
    return module.ContinuousTransformer(64, 2, dim_heads=32, cross_attend=True, cond_token_dim=64)


def na_vit(module, fast):
    return module.NaViT(
        image_size=16, patch_size=4, num_classes=5, dim=32, depth=2, heads=4, dim_head=8, mlp_dim=32
    )


def x_transformer(module, fast, kind="Decoder", **more):
    layers = getattr(module, kind)(dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash=fast, **more)
    return module.TransformerWrapper(num_tokens=40, max_seq_len=16, attn_layers=layers)


class Nearest(torch.nn.Module):
    """The modules of `physicsnemo` make neighborhoods; slow is one mask for all pairs of points."""

    def __init__(self, module, fast):
        super().__init__()
        self.block = module.DiTBlock(32, 4, attention_backend="natten2d", attn_kernel=3, qk_norm=True)
        self.module, self.fast = module, fast

    def forward(self, x, c, shape):
        scale = {"attn_kwargs": {"latent_hw": shape}}
        with contextlib.nullcontext() if self.fast else pytest.MonkeyPatch.context() as patch:
            if not self.fast:
                patch.setattr(self.module, "_na2d_func", dense_neighborhood)
            return self.block(x, c, **scale)


def dense_neighborhood(q, k, v, kernel_size):
    """NATTEN's definition: the window of a point is moved inside at borders."""
    near = []
    for length in q.shape[1:3]:
        start = (torch.arange(length) - kernel_size // 2).clamp(0, length - kernel_size)
        offset = torch.arange(length) - start[:, None]
        near.append((offset >= 0) & (offset < kernel_size))
    mask = (near[0][:, None, :, None] & near[1][None, :, None, :]).flatten(2).flatten(0, 1)
    tokens = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*tokens, attn_mask=mask)
    return out.transpose(1, 2).unflatten(1, q.shape[1:3])


def encoder(module, fast):
    layer = module.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    return module.TransformerEncoder(layer, 2, enable_nested_tensor=False)


OLMO_FILE = "olmo_core.nn.attention"
OLMO = {
    "lazy": "olmo_core olmo_core.nn",
    "absent": "cached_path bettermap importlib_resources pandas",
    "inputs": lambda: (torch.randn(2, 11, 32),),
}
TIMM = {"lazy": "timm timm.layers timm.data timm.models", "absent": "torchvision"}
VIT = {"embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
X = {
    "inputs": lambda: (ids(2, 11), padding(7)),
    "call": lambda model, x, mask: model(x, mask=mask) * mask[..., None],
    "dtype": torch.float32,  # as its own softmax is, whatever the rest
    "tolerance": 2e-5,
}
AUDIO = {"lazy": "stable_audio_tools stable_audio_tools.models"}
PHYSICS = (
    "physicsnemo physicsnemo.core physicsnemo.nn physicsnemo.nn.module physicsnemo.nn.functional "
    "physicsnemo.nn.module.hpx timm timm.layers timm.data timm.models"
)
PROTEINS = "zstd biotite brotli pandas msgpack msgpack_numpy cloudpathlib Bio sklearn tenacity"

CLIENTS = [
    Client("olmo-gqa", OLMO_FILE, "flash_attn", 1, lambda m, f: olmo(m, f, kv_heads=2), **OLMO),
    Client("olmo-window", OLMO_FILE, "flash_attn", 1, lambda m, f: olmo(m, f, window=4), **OLMO),
    Client("olmo-documents", OLMO_FILE, "flash_attn", 1, olmo, **OLMO, call=of_documents),
    Client(
        "olmo-packed",
        OLMO_FILE,
        "flash_attn",
        1,
        olmo_backend,
        **OLMO | {"inputs": lambda: (torch.randn(2, 11, 3, 4, 8),)},
        call=of_packed,
    ),
    Client(
        "stable-audio",
        "stable_audio_tools.models.transformer",
        "flash_attn",
        4,  # 2 layers, each with cross attention
        stable_audio,
        lambda: (torch.randn(2, 9, 64), torch.randn(2, 5, 64)),
        lambda model, x, context: model(x, context=context, use_checkpointing=False),
        **AUDIO,
        tolerance=5e-3,
    ),
    Client(
        "k-diffusion",
        "k_diffusion.models.image_transformer_v1",
        "flash_attn",
        2,
        lambda m, _: m.ImageTransformerDenoiserModelV1(2, 128, 64, 3, 3, (4, 4)),
        lambda: (torch.randn(2, 3, 12, 16), torch.rand(2) + 0.5),
        lazy="k_diffusion k_diffusion.models",
        absent="dctorch torchvision torchdiffeq torchsde",
    ),
    Client(
        "physicsnemo",
        "physicsnemo.nn.module.dit_layers",
        "natten",
        1,
        Nearest,
        lambda: (torch.randn(2, 35, 32), torch.randn(2, 32), (5, 7)),
        lazy=PHYSICS,
        absent="torchvision warp s3fs",
    ),
    Client(
        "esmc",
        "esm.models.esmc",
        "sdpa",
        2,
        lambda m, _: m.ESMC(32, 4, 2, None, use_flash_attn=False),
        lambda: (ids(2, 11), padding(7)),
        lambda model, x, mask: model(x, mask).sequence_logits,
        lazy="esm esm.sdk",
        absent=PROTEINS,
    ),
    Client(
        "timm-vit",
        "timm.models.vision_transformer",
        "sdpa",
        2,
        timm("VisionTransformer", img_size=16, patch_size=4, qk_norm=True, **VIT),
        lambda: (torch.randn(2, 3, 16, 16),),
        **TIMM,
    ),
    Client(
        "timm-eva",
        "timm.models.eva",
        "sdpa",
        2,
        timm("Eva", img_size=16, patch_size=4, use_rot_pos_emb=True, **VIT),
        lambda: (torch.randn(2, 3, 16, 16),),
        **TIMM,
    ),
    Client(
        "timm-beit",
        "timm.models.beit",
        "sdpa",
        2,  # with a learned bias
        timm("Beit", img_size=16, patch_size=4, use_rel_pos_bias=True, **VIT),
        lambda: (torch.randn(2, 3, 16, 16),),
        **TIMM,
    ),
    Client(
        "diffusers",
        "diffusers.models.attention_processor",
        "sdpa",
        1,
        diffusion,
        lambda: (torch.randn(2, 9, 32), torch.randn(2, 5, 24), padding(3, 5)[:, None]),
        lambda model, x, context, mask: model(x, context, torch.where(mask, 0.0, -1e4).to(x.dtype)),
    ),
    Client("x-transformers-causal", "x_transformers", "sdpa", 2, x_transformer, **X),
    Client(
        "x-transformers-alibi",
        "x_transformers",
        "sdpa",
        2,
        lambda m, f: x_transformer(m, f, alibi_pos_bias=True),
        **X,
    ),
    Client(
        "x-transformers-rotary",
        "x_transformers",
        "sdpa",
        2,
        lambda m, f: x_transformer(m, f, "Encoder", rotary_pos_emb=True, attn_kv_heads=2),
        **X,
    ),
    Client(
        "na-vit",
        "vit_pytorch.na_vit",
        "sdpa",
        3,  # one pools
        na_vit,
        lambda: ([torch.randn(3, 8, 16), torch.randn(3, 12, 8), torch.randn(3, 16, 16)],),
        lambda model, images: model(images, group_images=True, group_max_seq_len=20),
        lazy="vit_pytorch",
    ),
    Client(
        "torch-encoder",
        "torch.nn",
        "sdpa",
        2,
        encoder,
        lambda: (torch.randn(2, 11, 32), padding(7)),
        lambda model, x, mask: model(x, src_key_padding_mask=~mask) * mask[..., None],
        calls_without_gradient=0,  # then a layer is one operation of PyTorch
    ),
]


@contextlib.contextmanager
def installed(door):
    if door == "sdpa":
        with attnmask.torch.installed():
            yield
        return
    own = getattr(attnmask, door)
    own.install()
    try:
        yield
    finally:
        own.uninstall()


def made(client, fast):
    """The model with random weights, the same ones each time."""
    with packages(client.lazy.split(), client.absent.split()):
        pytest.importorskip(client.module.partition(".")[0])
        module = importlib.import_module(client.module)
        torch.manual_seed(0)
        model = client.make(module, fast).to(client.dtype).eval()
        generator = torch.Generator().manual_seed(1)
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += 0.2 * noise.to(parameter.dtype)
        return model


def called(client, model):
    """What it computes, and its inputs."""
    torch.manual_seed(2)

    def ready(x):
        if isinstance(x, list):
            return list(map(ready, x))
        floats = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(client.dtype).requires_grad_() if floats else x

    inputs = [ready(x) for x in client.inputs()]
    return client.call(model, *inputs), inputs


def results(client, model):
    """And the gradients of inputs and weights."""
    out, inputs = called(client, model)
    torch.manual_seed(3)
    (out * torch.randn_like(out)).sum().backward()
    flat = [y for x in inputs for y in (x if isinstance(x, list) else [x])]
    found = {"out": out} | {f"input {i}": x.grad for i, x in enumerate(flat) if isinstance(x, torch.Tensor)}
    found |= {name: x.grad for name, x in model.named_parameters()}
    return {name: x.detach() for name, x in found.items() if x is not None}


def assert_close(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    largest = max(x.abs().max().item() for x in expected.values())
    for name, x in expected.items():
        size = max(x.abs().max().item(), 0.01 * largest)
        torch.testing.assert_close(
            actual[name], x, rtol=0, atol=tolerance * size, msg=lambda s, n=name: f"{n}: {s}"
        )


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
def test_beside_the_slow_path(client, served, monkeypatch):
    monkeypatch.setenv("K_DIFFUSION_USE_COMPILE", "0")
    with installed(client.door):
        model = made(client, True)
        actual = results(client, model)
        assert served == dict.fromkeys(DOORS, 0) | {client.door: client.calls}
        served[client.door] = 0
        with torch.no_grad():
            out = called(client, model)[0]
        once = client.calls if client.calls_without_gradient is None else client.calls_without_gradient
        assert served[client.door] == once
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = results(client, made(client, False))
    assert served[client.door] == once
    assert_close(actual, expected, client.tolerance)
    assert_close({"out": out}, {"out": expected["out"]}, client.tolerance)


@pytest.mark.filterwarnings("ignore")
def test_dropout_of_flash_attn(served):
    """Its random numbers are others than those of a formula: the gradient belongs to what forward drew."""
    row = next(client for client in CLIENTS if client.name == "olmo-gqa")
    with installed("flash_attn"):
        model = made(row, True)
        model.backend.dropout_p = 0.4
    x, step = torch.randn(2, 2, 11, 32, dtype=torch.float64)

    def loss(x, seed):
        torch.manual_seed(seed)
        return model(x).square().sum()

    x.requires_grad_()
    value = loss(x, 5)
    assert torch.equal(loss(x, 5), value)
    assert not torch.equal(loss(x, 6), value)
    (gradient,) = torch.autograd.grad(value, x)
    with torch.no_grad():
        slope = (loss(x + 1e-5 * step, 5) - loss(x - 1e-5 * step, 5)) / 2e-5
    torch.testing.assert_close((gradient * step).sum(), slope, rtol=1e-7, atol=0)
    assert served["flash_attn"] == 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["x-transformers-causal", "timm-vit"])
def test_dropout_of_sdpa(name, served):
    """Its random numbers are others than PyTorch's, and the same for the same seed."""
    row = next(client for client in CLIENTS if client.name == name)
    model = made(row, True).train()
    for part in model.modules():
        if hasattr(part, "sdp_context_manager"):
            part.dropout = 0.4
        if hasattr(part, "fused_attn"):
            part.attn_drop.p = 0.4
    found = []
    with installed("sdpa"):
        for _ in range(2):
            found.append(results(row, model))
            model.zero_grad()
    assert served["sdpa"] == 2 * row.calls
    one, other = found
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(results(row, model.eval())["out"], one["out"])
