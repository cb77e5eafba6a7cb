"""Assisted decoding from pages: drafts are taken back where they are wrong, and the tokens stay those of the model."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import DECODERS, TOKENS, model_of, random_ids  # noqa: E402

import attnmask.transformers  # noqa: E402
from attnmask.transformers import PagedCache  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),
    pytest.mark.skipif(
        tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20),
        reason="assistants with windows fail in transformers itself, with every attention",
    ),
]
NEW = 24
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnmask.transformers.register()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def ready(name, noise=0.0):
    """A model, or one that is almost the same: its drafts are often right."""
    model = model_of(name)
    model.set_attn_implementation("attnmask")
    with torch.no_grad():
        for parameter in model.parameters() if noise else ():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


def prompt():
    """Tokens that repeat, as the lookup in the prompt needs them; longer than windows."""
    return random_ids(4).repeat(4)[None]


def ways(name):
    noise = 0.1 if name.startswith("Gemma") else 0.02
    return {"assistant": {"assistant_model": ready(name, noise)}, "lookup": {"prompt_lookup_num_tokens": 4}}


def recorded(monkeypatch, model):
    """How many tokens each call of the model gets, and how many each crop removes."""
    calls, crops, crop = [], [], PagedCache.crop

    def count(_, args, kwargs):
        calls.append((args[0] if args else next(x for x in kwargs.values() if x is not None)).shape[1])

    def counted(self, tokens):
        crops.append(tokens)
        return crop(self, tokens)

    model.register_forward_pre_hook(count, with_kwargs=True)
    monkeypatch.setattr(PagedCache, "crop", counted)
    return calls, crops


@pytest.mark.parametrize("way", ["assistant", "lookup"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name, way, monkeypatch):
    """Windows and chunks too: all tokens are in the pages, so nothing is lost when drafts are taken back."""
    model, ids = ready(name), prompt()
    right = model.generate(ids, **GREEDY)
    cache = PagedCache(model.config, pages=20, page_size=4)
    calls, crops = recorded(monkeypatch, model)
    got = model.generate(ids, past_key_values=cache, **ways(name)[way], **GREEDY)
    assert torch.equal(got, right)
    assert any(crops)  # some drafts were wrong
    assert way == "lookup" or len(calls) < NEW  # and some right
    assert cache.get_seq_length() == ids.shape[1] + NEW - 1
    assert cache.kv.free_pages == 20 - 10


@pytest.mark.parametrize("way", ["assistant", "lookup"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_types(dtype, way):
    """Tokens that are written again where others were taken back have scales of their own."""
    name, more = "Mistral", {"pages": 20, "page_size": 4, "dtype": dtype}
    model, ids = ready(name), prompt()
    right = model.generate(ids, past_key_values=PagedCache(model.config, **more), **GREEDY)
    got = model.generate(ids, past_key_values=PagedCache(model.config, **more), **ways(name)[way], **GREEDY)
    assert torch.equal(got, right)


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_a_decoder_with_an_encoder(name):
    """transformers takes drafts back from its own caches alone, if there are two."""
    model, ids = ready(name), random_ids(1, TOKENS)
    own = PagedCache(model.config, pages=20, page_size=4)
    cache = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
    with pytest.raises(TypeError, match="`crop` is only defined for dynamic cache, got PagedCache"):
        model.generate(ids, past_key_values=cache, assistant_model=ready(name, 0.02), **GREEDY)


def test_more_of_the_same():
    """A conversation goes on with the same cache, without drafts."""
    model, ids = ready("Gemma2"), prompt()
    cache = PagedCache(model.config, pages=40, page_size=4)
    first = model.generate(ids, prompt_lookup_num_tokens=4, past_key_values=cache, **GREEDY)
    longer = torch.cat([first, random_ids(1, 5)], dim=1)
    right = model.generate(longer, **GREEDY)
    assert torch.equal(model.generate(longer, past_key_values=cache, **GREEDY), right)


def test_early_exit():
    """The first layer makes the drafts of both."""
    model, ids = ready("Llama"), prompt()
    right = model.generate(ids, **GREEDY)
    cache = PagedCache(model.config, pages=20, page_size=4)
    assert torch.equal(model.generate(ids, past_key_values=cache, assistant_early_exit=1, **GREEDY), right)


def test_an_assistant_with_pages():
    """The assistant has a cache of its own, whatever the model's is."""
    model, ids, assistant = ready("Llama"), prompt(), ready("Qwen3", 0.02)
    right = model.generate(ids, **GREEDY)
    cache = PagedCache(model.config, pages=20, page_size=4)
    got = model.generate(ids, past_key_values=cache, assistant_model=assistant, **GREEDY)
    assert torch.equal(got, right)


def test_bad_use():
    model, ids = ready("Llama"), prompt()
    cache = PagedCache(model.config, pages=40, page_size=4)
    with pytest.raises(ValueError, match="only supported for batch_size = 1"):
        model.generate(ids.repeat(2, 1), past_key_values=cache, prompt_lookup_num_tokens=4, **GREEDY)
    sequence = cache.kv.new_sequence()
    with (
        pytest.raises(RuntimeError, match="cannot be changed inside a step"),
        cache.step([sequence], [1]),
    ):
        cache.crop(-1)
    small = PagedCache(model.config, pages=5, page_size=4)
    with pytest.raises(MemoryError, match="the cache is full"):
        model.generate(ids, past_key_values=small, prompt_lookup_num_tokens=4, **GREEDY)
