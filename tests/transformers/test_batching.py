"""Continuous batching: each prompt gets the tokens that `generate` gives it alone."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("psutil")  # by which transformers knows how much memory there is

from tiny_models import DECODERS, model_of, random_ids  # noqa: E402
from transformers.generation import continuous_batching  # noqa: E402

import attnmask.torch  # noqa: E402
import attnmask.transformers  # noqa: E402
from attnmask.torch import _install as _torch_install  # noqa: E402
from attnmask.transformers import _batching  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),
    pytest.mark.skipif(
        not hasattr(transformers, "ContinuousBatchingConfig")
        or not hasattr(
            continuous_batching.continuous_api.ContinuousBatchingManager, "switch_to_cb_friendly_attn"
        ),
        reason="transformers is one of the first versions of 5, whose windows are wrong on the CPU",
    ),
]
LENGTHS, NEW = (5, 21, 3, 1, 12), 10
NAMES = [name for name in DECODERS if name != "Llama4"]  # transformers has no pages for chunks


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnmask.transformers.register()


@pytest.fixture
def in_place(monkeypatch):
    """How many sequences each call attends to in their pages."""
    counted, function = [], _batching.attend_to_pages

    @torch.compiler.disable
    def count(query, *rest):
        counted.append(query.shape[2])
        return function(query, *rest)

    monkeypatch.setattr(_batching, "attend_to_pages", count)
    return counted


def alone(model, prompts):
    model.set_attn_implementation("eager")
    given = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(x[None], **given)[0, len(x) :].tolist() for x in prompts]


def together(model, prompts, implementation, context=contextlib.nullcontext, **more):
    """Tokens of all prompts; some are read in pieces, beside others that go on."""
    model.set_attn_implementation(implementation)
    settings = {
        "num_blocks": 64,
        "page_size": 4,
        "max_batch_tokens": 16,
        "auto_switch_to_flash": False,
    } | more
    known = transformers.ContinuousBatchingConfig.__dataclass_fields__
    config = transformers.ContinuousBatchingConfig(**{key: x for key, x in settings.items() if key in known})
    greedy = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    with context():
        outputs = model.generate_batch(
            [x.tolist() for x in prompts],
            generation_config=greedy,
            continuous_batching_config=config,
            progress_bar=False,
        )
    assert [x.error for x in outputs.values()] == [None] * len(prompts)
    return [x.generated_tokens for x in outputs.values()]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_its_own(name, in_place):
    """Layers without windows read their pages in place; softcaps and sinks too, which "sdpa" refuses."""
    model, prompts = model_of(name), [random_ids(length) for length in LENGTHS]
    expected = alone(model, prompts)
    assert together(model, prompts, "attnmask") == expected
    assert len(set(expected[0])) > 1
    assert model.config._attn_implementation == "attnmask"
    windows = "sliding_attention" in continuous_batching.cache.group_layers_by_attn_type(model.config)
    later = _batching.PREFIX is None
    assert bool(in_place) == (later and not windows)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT2"])
@pytest.mark.parametrize("implementation", ["sdpa", "paged|sdpa"])
def test_as_sdpa(name, implementation, monkeypatch):
    calls, function = [], _torch_install.flash_attention_fwd

    def count(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    model, prompts = model_of(name), [random_ids(length) for length in LENGTHS]
    expected = alone(model, prompts)
    monkeypatch.setattr(_torch_install, "flash_attention_fwd", count)
    assert together(model, prompts, implementation, attnmask.torch.installed) == expected
    assert len(calls) >= 2 * NEW


@pytest.mark.long
@pytest.mark.parametrize(("name", "more"), [("Llama", {"num_hidden_layers": 1}), ("Gemma3", {})])
def test_compiled(name, more, in_place):
    """Batches are padded, so that few shapes are compiled: three sequences to four."""
    model, prompts = model_of(name, **more), [random_ids(length) for length in LENGTHS[:3]]
    expected = alone(model, prompts)
    graph = transformers.CompileConfig(backend="eager", mode=None, fullgraph=False)
    graphs = {"varlen_compile_config": graph, "decode_compile_config": graph}
    assert together(model, prompts, "attnmask", max_requests_per_batch=4, **graphs) == expected
    torch._dynamo.reset()  # other tests compile the same functions
    assert in_place.count(4) > 3 or name == "Gemma3" or _batching.PREFIX


@pytest.mark.parametrize("blocks", [64, 11])
def test_shared_and_full_pages(blocks, in_place):
    """Prompts that begin alike share pages; without room for all, some wait or are read again."""
    model, prompts = model_of("Llama"), [random_ids(length) for length in (3, 5, 2, 4)]
    first = random_ids(14)
    prompts = [torch.cat([first, prompt]) for prompt in prompts]
    expected = alone(model, prompts)
    for sharing in (True, False):
        more = {"num_blocks": blocks, "allow_block_sharing": sharing}
        assert together(model, prompts, "attnmask", **more) == expected


def test_types(in_place):
    """In bfloat16, the tokens of a prompt are the same alone and among others."""
    model, prompts = model_of("Qwen3").bfloat16(), [random_ids(length) for length in LENGTHS]
    expected = [together(model, [prompt], "attnmask")[0] for prompt in prompts]
    assert together(model, prompts, "attnmask") == expected


def test_pages_beyond_the_table(in_place):
    """Sequences with more pages than the table has columns are copied."""
    model, prompts = model_of("Llama"), [random_ids(length) for length in (5, 20)]
    expected = alone(model, prompts)
    assert together(model, prompts, "attnmask", max_blocks_per_request=2) == expected
    assert together(model, prompts, "attnmask", max_blocks_per_request=6) == expected


def test_names():
    """Only registered names are let through, and transformers' functions are put back with the last one."""
    manager = continuous_batching.continuous_api.ContinuousBatchingManager
    model, prompts = model_of("Llama"), [random_ids(3)]
    expected = alone(model, prompts)
    widened = manager.switch_to_cb_friendly_attn
    try:
        attnmask.transformers.register("another")
        assert manager.switch_to_cb_friendly_attn is widened
        assert together(model, prompts, "another") == expected
        attnmask.transformers.unregister("another")
        attnmask.transformers.unregister()
        if _batching.PREFIX is None:
            assert manager.switch_to_cb_friendly_attn is widened.attnmask_replaces
            with pytest.raises(ValueError, match="another is not supported for continuous batching"):
                together_as_it_is(model, prompts)
        assert together(model, prompts, "eager") == expected
    finally:
        attnmask.transformers.register()
    assert together(model, prompts, "attnmask") == expected


def together_as_it_is(model, prompts):
    config = transformers.ContinuousBatchingConfig(num_blocks=8, auto_switch_to_flash=False)
    model.generate_batch([x.tolist() for x in prompts], continuous_batching_config=config)
