"""attnmask.transformers: linear attention in models gives what their own PyTorch functions give."""

import subprocess
import sys
import types
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")

if not hasattr(hub_kernels, "use_kernel_func_from_hub_with_fallback"):
    pytest.skip("functions have no names in this version of transformers", allow_module_level=True)

import attnmask.transformers  # noqa: E402
from attnmask.transformers import _linear  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")

VOCABULARY, TOKENS = 40, 70
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse"]}
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
MODELS = {
    "Qwen3Next": EXPERTS | HYBRID | {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        "head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 16,
    },
    "KimiLinear": EXPERTS | HYBRID | {
        "linear_num_heads": 2, "linear_head_dim": 16, "num_local_experts": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1,
    },
    "Mamba2": {
        "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 32,
    },
    "Mamba": {"num_hidden_layers": 2, "state_size": 8},
    "GraniteMoeHybrid": {
        "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8,
        "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 16,
    },
    "Lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
}  # fmt: skip
FULL = ("Qwen3Next", "KimiLinear", "Mamba2")


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnmask.transformers.register()
    yield
    attnmask.transformers.unregister()


@contextmanager
def their_own():
    """Models use their own functions."""
    attnmask.transformers.unregister()
    try:
        yield
    finally:
        attnmask.transformers.register()


def model_of(name, **more):
    """With random weights, the same ones each time, of which convolutions and decays matter."""
    config = getattr(transformers, f"{name}Config")(**SHAPE | MODELS[name] | more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5 if "conv" in name else parameter.shape[-1] ** -0.5)
    return model.eval()


def random_ids(*shape):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(2))


def logits_and_gradients(model, ids, begin=0, **more):
    """Gradients of sums of the logits with weights of their own, the first of which is that of token `begin`."""
    logits = model(input_ids=ids, **{"use_cache": False} | more).logits
    weights = torch.randn(len(ids), 2 * TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    (logits * weights[:, begin : begin + ids.shape[1]]).sum().backward()
    return logits.detach(), take_gradients(model)


def take_gradients(model):
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def assert_close(actual, expected, tolerance=2e-5):
    """Decays may be so strong that their gradients are small: they are near to the largest of all gradients."""
    np.testing.assert_allclose(
        actual[0], expected[0], rtol=0, atol=tolerance * expected[0].abs().max().item()
    )
    assert actual[1].keys() == expected[1].keys()
    largest = max((x.abs().max().item() for x in expected[1].values()), default=0)
    for name, x in expected[1].items():
        decays = name.endswith(("A_log", "dt_bias"))
        size = max(x.abs().max().item(), (1 if decays else 0.01) * largest)
        np.testing.assert_allclose(actual[1][name], x, rtol=0, atol=tolerance * size, err_msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name):
    model, ids = model_of(name).train(), random_ids(2, TOKENS)
    actual = logits_and_gradients(model, ids)
    with their_own():
        assert_close(actual, logits_and_gradients(model, ids))


LENGTHS = (5, 1, 40, 24)  # a chunk begins in the third


@pytest.mark.parametrize("told", ["positions", "cu_seq_lens", "seq_idx", "positions of two rows"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_training(name, told):
    """Documents in one row are trained on as each for itself, though Mamba's layers are told nothing."""
    if told == "seq_idx" and "Mamba" not in name:
        pytest.skip("attention is told otherwise")
    model, ids = model_of(name).train(), random_ids(2, TOKENS)
    model.set_attn_implementation("attnmask")
    starts = np.cumsum([0, *LENGTHS])
    rows = [LENGTHS] if told != "positions of two rows" else [LENGTHS, LENGTHS[::-1]]
    expected = []
    for row, lengths in zip(ids, rows, strict=False):
        ends = np.cumsum(lengths)
        parts = [
            logits_and_gradients(model, row[None, end - length : end], end - length)
            for length, end in zip(lengths, ends, strict=True)
        ]
        expected.append(
            (torch.cat([x for x, _ in parts], 1), {n: sum(g[n] for _, g in parts) for n in parts[0][1]})
        )
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    cu = torch.from_numpy(starts).int()
    more = {
        "cu_seq_lens": {
            "cu_seq_lens_q": cu,
            "cu_seq_lens_k": cu,
            "max_length_q": 40,
            "max_length_k": 40,
            "position_ids": positions,
        },
        "seq_idx": {"seq_idx": torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None].int()},
    }.get(told, {"position_ids": positions})
    if len(rows) == 1:
        assert_close(logits_and_gradients(model, ids[:1], **more), expected[0])
        return
    logits, _ = logits_and_gradients(model, ids, **more)
    for row, (x, _) in zip(logits, expected, strict=True):
        assert_close((row, {}), (x[0], {}))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_know_the_documents(reentrant):
    """Layers are computed again after the model has returned."""
    model, ids = model_of("Mamba2").train(), random_ids(1, TOKENS)
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None]
    expected = logits_and_gradients(model, ids, position_ids=positions)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):
        assert_close(logits_and_gradients(model, ids, position_ids=positions), expected, 1e-6)
    first, _ = logits_and_gradients(model, ids[:, :30])
    assert_close((first, {}), (expected[0][:, :30], {}))


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("name", MODELS)
def test_generation(name, tokens, monkeypatch):
    """The prompts are of two lengths, and may be shorter than a convolution."""
    model, ids = model_of(name), random_ids(2, tokens)
    mask = torch.ones_like(ids)
    mask[0, : tokens // 2] = 0

    def generate():
        return model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)

    with their_own():
        expected = generate()
    names = ["short_convolution_step"] + ["linear_attention_step"] * (name not in ("Mamba", "Lfm2"))
    counted = {name: mock.Mock(wraps=getattr(_linear, name)) for name in names}
    for function, wrapper in counted.items():
        monkeypatch.setattr(_linear, function, wrapper)
    np.testing.assert_array_equal(generate(), expected)
    layers = 1 if "attention" in str(MODELS[name].get("layer_types")) else 2
    assert [x.call_count for x in counted.values()] == [5 * layers] * len(names)


@pytest.mark.parametrize("name", FULL)
def test_states_are_updated_in_place(name):
    model, ids = model_of(name), random_ids(2, 20)
    with torch.no_grad():
        cache = model(ids[:, :19], use_cache=True).cache
        layer = cache.layers[0]
        states = layer.conv_states[0], layer.recurrent_states[0]
        before = [x.clone() for x in states]
        logits = model(ids[:, 19:], cache=cache).logits
        assert layer.conv_states[0] is states[0]
        assert layer.recurrent_states[0] is states[1]
        assert not any(torch.equal(x, y) for x, y in zip(states, before, strict=True))
        full = model(ids, use_cache=True)
        assert_close((logits, {}), (full.logits[:, 19:], {}))
        for x, y in zip(
            states, (full.cache.layers[0].conv_states, full.cache.layers[0].recurrent_states), strict=True
        ):
            np.testing.assert_allclose(x, y[0], rtol=0, atol=1e-5 * y[0].abs().max().item())


@pytest.mark.parametrize("name", FULL)
def test_a_prompt_in_parts(name):
    """The second part goes on with the states of the first, of its last document."""
    model, ids = model_of(name), random_ids(1, TOKENS)
    model.set_attn_implementation("attnmask")
    positions = torch.cat([torch.arange(25), torch.arange(45)])[None]
    with torch.no_grad():
        expected = model(ids[:, 25:]).logits[:, 25:]
        first = model(ids[:, 25:50], use_cache=True)
        actual = model(ids[:, 50:], cache=first.cache).logits
        assert_close((actual, {}), (expected, {}))
        if name == "Mamba2":  # attention sees all keys of its cache
            packed = model(ids[:, :50], position_ids=positions[:, :50], use_cache=True)
            actual = model(ids[:, 50:], position_ids=positions[:, 50:], cache=packed.cache).logits
            assert_close((actual, {}), (expected, {}))


@pytest.mark.parametrize("name", FULL)
def test_bfloat16(name):
    """As near to float32 as the models' own functions are."""
    model, ids = model_of(name), random_ids(2, TOKENS)
    with torch.no_grad():
        exact = model(ids).logits
        model.bfloat16()
        ours = (model(ids).logits.float() - exact).abs().mean().item()
        with their_own():
            theirs = (model(ids).logits.float() - exact).abs().mean().item()
    assert 0 < ours < 1.25 * theirs


@pytest.mark.long
@pytest.mark.parametrize("name", FULL)
def test_compiled(name):
    """In one graph, with documents that `cu_seq_lens_q` tells."""
    model, ids = model_of(name), random_ids(1, TOKENS)
    cu = torch.tensor([0, 30, TOKENS], dtype=torch.int32)
    module = sys.modules[type(model).__module__]
    inner = model.get_submodule("backbone" if name == "Mamba2" else "model")  # which hands it to its layers
    more = {"cu_seq_lens_q": cu, "use_cache": False}
    with torch.no_grad():
        if name != "Mamba2":
            more |= {"position_ids": torch.cat([torch.arange(30), torch.arange(40)])[None]}
        expected = inner(input_ids=ids, **more)[0]
        assert module is sys.modules[type(inner).__module__]
        compiled = torch.compile(inner, backend="eager", fullgraph=True)
        assert_close((compiled(input_ids=ids, **more)[0], {}), (expected, {}))


def test_exported_programs_are_theirs():
    model, ids = model_of("Mamba2"), random_ids(1, 20)
    program = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
    assert "attnmask" not in str(program.graph)


# Putting in, and putting back


def functions_of(module):
    return {name: x for name, x in vars(module).items() if isinstance(x, types.FunctionType)}


def test_all_is_put_back():
    model, ids = model_of("Qwen3Next"), random_ids(1, 8)
    base, module = transformers.PreTrainedModel, sys.modules[type(model).__module__]
    attnmask.transformers.register()  # which changes nothing
    ours = functions_of(module)
    replaced = [name for name, x in ours.items() if hasattr(x, "attnmask_replaces")]
    assert len(replaced) == 4
    attnmask.transformers.register("another name")
    attnmask.transformers.unregister("another name")
    assert "another name" not in transformers.AttentionInterface()
    assert functions_of(module) == ours
    with their_own():
        assert not any(hasattr(x, "attnmask_replaces") for x in functions_of(module).values())
        assert functions_of(module) == ours | {name: ours[name].attnmask_replaces for name in replaced}
        assert "__call__" not in vars(base)
        assert base.__init__.__module__ == "transformers.modeling_utils"
        assert not hasattr(base.__init__, "attnmask_replaces")
        assert "attnmask" not in transformers.AttentionInterface()
        assert "attnmask" not in transformers.AttentionMaskInterface()
        attnmask.transformers.unregister()  # which changes nothing
        with pytest.raises(ValueError, match="packed sequences"):
            model(ids, cu_seq_lens_q=torch.tensor([0, 3, 8]), use_cache=False)
    assert functions_of(module).keys() == ours.keys()
    assert hasattr(functions_of(module)[replaced[0]], "attnmask_replaces")


def test_models_that_are_imported_later():
    code = """
import sys, torch, transformers, attnmask.transformers
attnmask.transformers.register()
assert "transformers.models.mamba2.modeling_mamba2" not in sys.modules
config = transformers.Mamba2Config(
    vocab_size=9, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=8, n_groups=1
)
model = transformers.Mamba2ForCausalLM(config)
ids = torch.arange(8)[None]
out = model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])).logits
assert torch.allclose(out[:, 3:], model(ids[:, 3:]).logits, atol=1e-5)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_functions_of_other_arguments_are_left_alone():
    decorator = hub_kernels.use_kernel_func_from_hub_with_fallback
    module = types.ModuleType("other_models")

    def chunk_kda(query, key, value, g, beta, dt_bias):
        return None

    def chunk_unknown(query, key, value):
        return None

    module.first = decorator("chunk_kda", "fla")(chunk_kda)
    module.second = decorator("chunk_unknown", "fla")(chunk_unknown)
    before = dict(vars(module))
    _linear._replace_in(module)
    assert vars(module) == before


def test_what_is_not_for_this_library_goes_to_theirs():
    """Tensors of other devices, states of other types, several tokens at once."""
    from transformers.models.mamba2 import modeling_mamba2 as module

    model_of("Mamba2")  # the functions of its module are replaced then

    def same(function, *arguments, **more):
        ours, theirs = ([x.clone() for x in arguments] for _ in range(2))
        actual, expected = function(*ours, **more), function.attnmask_replaces(*theirs, **more)
        torch.testing.assert_close([actual, *ours], [expected, *theirs])  # states are among them

    x = torch.zeros(1, 4, 3, device="meta")
    assert module.causal_conv1d_fn(x, torch.zeros(4, 2, device="meta")).device.type == "meta"
    x, state, weight = torch.randn(2, 4, 3), torch.randn(2, 4, 2), torch.randn(4, 2)
    same(module.causal_conv1d_update, x, state, weight, activation="gelu")
    same(module.causal_conv1d_update, x[..., :1], state, weight, activation="gelu")
    same(module.causal_conv1d_fn, x, weight, activation="gelu")
    state, x, dt = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8), torch.rand(2, 4, 8)
    A, B = -torch.rand(4, 8, 16), torch.randn(2, 2, 16)  # decays of channels
    same(module.mamba2_selective_state_update, state, x, dt, A, B, B)


def test_documents_of_another_length():
    model, ids = model_of("KimiLinear"), random_ids(1, 8)
    with pytest.raises(
        ValueError, match=r"cu_seq_lens_q and seq_idx must be of \[1, 8\] tokens, got \[1, 9\]"
    ):
        model(ids, cu_seq_lens_q=torch.tensor([0, 3, 9]), use_cache=False)
