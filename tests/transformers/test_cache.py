"""attnmask.transformers.PagedCache: the tokens that transformers' own caches give, from pages."""

import copy
import pickle
import runpy
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from environment import ROOT  # noqa: E402
from tiny_models import (  # noqa: E402
    BOTH_SIDES,
    DECODERS,
    TOKENS,
    VOCABULARY,
    assert_close,
    later,
    model_of,
    padding,
    random_ids,
)

import attnmask.transformers  # noqa: E402
from attnmask.transformers import PagedCache, attention  # noqa: E402
from attnmask.transformers import _cache as _transformers_cache  # noqa: E402
from attnmask.transformers._masks import CACHE  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PROMPTS = (5, 11, 3, 1)


@pytest.fixture(autouse=True, scope="module")
def registered():
    attnmask.transformers.register()


def ready(name, **more):
    model = model_of(name, **more)
    model.set_attn_implementation("attnmask")
    return model


def paged(model, **more):
    return PagedCache(model.config, **{"pages": 40, "page_size": 4} | more)


def by_padding(model, cache=None, rows=2):
    """Tokens that are generated behind padding."""
    torch.manual_seed(0)
    mask = padding("left")[:rows]
    return model.generate(random_ids(rows, TOKENS), attention_mask=mask, past_key_values=cache, **GREEDY)


def never_gathered(monkeypatch):
    def fail(*_):
        raise AssertionError("keys are copied")

    monkeypatch.setattr(_transformers_cache.Pages, "gathered", fail)


@pytest.mark.parametrize("name", DECODERS)
def test_generation(name, monkeypatch):
    """Past the window, the first row behind padding; pages are read where they lie, and given back."""
    model = ready(name)
    right = by_padding(model)
    assert len(set(right[0, TOKENS:].tolist())) > 1
    cache = paged(model)
    model.set_attn_implementation("eager")  # which has all keys copied
    assert torch.equal(by_padding(model, cache), right)
    cache.reset()
    never_gathered(monkeypatch)
    model.set_attn_implementation("attnmask")
    assert torch.equal(by_padding(model, cache), right)
    assert cache.get_seq_length() == TOKENS + 9
    assert cache.kv.free_pages == 40 - 2 * 5
    cache.reset()
    assert cache.kv.free_pages == 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_types(dtype):
    """Logits are those of the model, as near as the type is."""
    model, ids = ready("Llama"), random_ids(2, TOKENS)
    cache = paged(model, dtype=dtype)
    assert str(cache.kv.k_pages.dtype) == dtype
    with torch.no_grad():
        right = model(ids).logits
        got = torch.cat(
            [model(part, past_key_values=cache).logits for part in ids.split((4, 6, 1), 1)], dim=1
        )
    error = (got - right).abs().max() / right.abs().max()
    bounds = {"float32": 1e-5, "float16": 0.005, "bfloat16": 0.03, "int8": 0.05, "float8_e4m3fn": 0.2}
    assert error < bounds.get(dtype, 0.4)  # float8_e5m2 rounds twice as coarsely
    assert (error > 1e-4) == (dtype != "float32")


@pytest.mark.parametrize("more", [{}, {"rotate": True}, {"group": 32, "rotate": True}], ids=str)
def test_four_bits(more):
    """Read in place, and copied end to end for what else computes with them."""
    model, ids = ready("Llama", head_dim=64), random_ids(2, TOKENS)
    results = []
    for name in ("attnmask", "eager"):
        model.set_attn_implementation(name)
        cache = paged(model, dtype="int4", **more)
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits for part in ids.split((4, 6, 1), 1)]
        results.append(torch.cat(parts, dim=1))
    assert cache.kv.k_pages.shape[-1] == 32
    assert cache.kv.k_scales.shape[-2] == 64 // more.get("group", 64)
    with torch.no_grad():
        right = model(ids).logits
    error = (results[0] - right).abs().max() / right.abs().max()
    assert 1e-4 < error < 0.4
    assert_close({"logits": results[1]}, {"logits": results[0]}, 1e-4)


def test_rotated_pages(monkeypatch):
    """In steps, and in batches beside beams; the logits are those of pages that are not rotated."""
    never_gathered(monkeypatch)
    model = ready("Llama")
    prompts = [random_ids(length) for length in PROMPTS]
    assert generate(model, paged(model, rotate=True), prompts) == one_by_one(model, prompts)
    cache = paged(model, rotate=True)
    assert torch.equal(by_padding(model, cache), by_padding(model))
    assert cache.kv.rotate
    with pytest.raises(ValueError, match="head_dim must be a power of two to be rotated, got 6"):
        paged(ready("Llama", head_dim=6), rotate=True)


def test_the_type_of_the_model():
    model = ready("Llama").bfloat16()
    cache = paged(model, dtype=torch.int8)
    assert cache.kv.k_pages.dtype == np.int8
    model.config.dtype = torch.bfloat16
    assert str(paged(model).kv.k_pages.dtype) == "bfloat16"
    assert torch.equal(by_padding(model, paged(model)), by_padding(model))


# Sequences without padding


def generate(model, cache, prompts, count=10, together=2):
    """Tokens of each prompt; one more begins with each step, and ends are freed."""
    waiting, running, tokens = list(range(len(prompts))), {}, [[] for _ in prompts]
    while waiting or running:
        if waiting and len(running) < together:
            running[waiting.pop(0)] = cache.kv.new_sequence()
        new = [torch.tensor(tokens[i][-1:]) if tokens[i] else prompts[i] for i in running]
        lengths = [len(part) for part in new]
        with torch.no_grad(), cache.step(list(running.values()), lengths) as inputs:
            logits = model(torch.cat(new)[None], **inputs).logits[0]
        for i, end in zip(list(running), np.cumsum(lengths) - 1, strict=True):
            tokens[i].append(int(logits[end].argmax()))
            if len(tokens[i]) == count:
                cache.kv.free(running.pop(i))
    return tokens


def one_by_one(model, prompts):
    return [model.generate(prompt[None], **GREEDY)[0, len(prompt) :].tolist() for prompt in prompts]


@pytest.mark.parametrize("name", DECODERS)
def test_steps(name, monkeypatch):
    """Prompts of several lengths begin while others go on."""
    never_gathered(monkeypatch)
    model = ready(name)
    prompts = [random_ids(length) for length in PROMPTS]
    cache = paged(model, pages=16)
    assert generate(model, cache, prompts, together=3) == one_by_one(model, prompts)
    assert cache.kv.free_pages == 16


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_steps_of_other_types(dtype):
    """A sequence has the same tokens alone and among others."""
    model = ready("Mistral")
    prompts = [random_ids(length) for length in PROMPTS]
    many = generate(model, paged(model, dtype=dtype), prompts, together=4)
    alone = [generate(model, paged(model, dtype=dtype), [prompt])[0] for prompt in prompts]
    assert many == alone


def test_forks_and_drafts():
    """Two answers share the pages of a prompt, and tokens are taken back."""
    model, prompt = ready("Llama"), random_ids(9)
    cache = paged(model, pages=8)
    first = cache.kv.new_sequence()

    def logits(ids, *parts):
        with torch.no_grad(), cache.step(ids, [len(part) for part in parts]) as inputs:
            return model(torch.cat(parts)[None], **inputs).logits[0]

    logits([first], prompt)
    second = cache.kv.fork(first)
    tokens = random_ids(2, 3)
    got = logits([second, first], *tokens)
    for row, begin in zip(tokens, (0, 3), strict=True):
        right = model(torch.cat([prompt, row])[None]).logits[0, -3:].detach()
        assert_close({"logits": got[begin : begin + 3]}, {"logits": right})
    cache.kv.truncate(first, 10)
    again = logits([first], tokens[1, 1:])
    assert_close({"logits": again}, {"logits": got[4:6]})


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_evicted_tokens(name):
    """The next token has its position, and attends to what is kept; windows are refused."""
    model, (*prompt, last) = ready(name), random_ids(10)
    cache, own = paged(model), transformers.DynamicCache()
    a, heads = cache.kv.new_sequence(), cache.kv.k_pages.shape[3]
    with torch.no_grad(), cache.step([a], 9) as inputs:
        model(torch.stack(prompt)[None], **inputs)
    keep = torch.rand(len(cache.layers), heads, 9).argsort(-1)[..., :5].sort(-1).values
    cache.kv.evict(a, keep)

    def next_token():
        with torch.no_grad(), cache.step([a], 1) as inputs:
            assert inputs["position_ids"].tolist() == [[9]]
            return model(last[None, None], **inputs).logits

    if name == "Mistral":
        with pytest.raises(
            ValueError, match="sliding_window must be None after tokens of a sequence were evicted"
        ):
            next_token()
        return
    with torch.no_grad():
        model(torch.stack(prompt)[None], past_key_values=own)
        for layer, kept in zip(own.layers, keep, strict=True):
            for side in ("keys", "values"):
                held = getattr(layer, side)
                setattr(layer, side, held.gather(2, kept[None, ..., None].expand(-1, -1, -1, held.shape[3])))
        right = model(last[None, None], past_key_values=own, position_ids=torch.tensor([[9]])).logits
    assert_close({"logits": next_token()}, {"logits": right})


def test_batches_need_all_tokens():
    model = ready("Llama")
    cache = paged(model)
    with torch.no_grad():
        model(random_ids(2, 5), past_key_values=cache)
        cache.kv.evict(1, [0, 4])
        with pytest.raises(
            ValueError, match="sequences with evicted tokens must be in a step, not rows of a batch"
        ):
            model(random_ids(2, 1), past_key_values=cache)


def test_a_step_that_fails_changes_nothing():
    model, prompt = ready("Llama"), random_ids(5)
    cache = paged(model, pages=4)
    a = cache.kv.new_sequence()

    def refused(error, words, call, count=5):
        with pytest.raises(error, match=words), torch.no_grad(), cache.step([a], count) as inputs:
            call(inputs)
        assert (cache.kv.lengths([a])[0], cache.kv.free_pages) == (0, 4)

    def call(inputs, **more):
        model(**{"input_ids": prompt[None]} | inputs | more)

    def divide(inputs):
        call(inputs)
        raise ZeroDivisionError

    refused(ZeroDivisionError, None, divide)
    refused(MemoryError, "this step needs 5 pages and 4 of 4 are free", call, 17)
    refused(
        RuntimeError,
        r"the model must be called in a step, .*: 0 of 2 layers have appended",
        lambda inputs: None,
    )
    refused(RuntimeError, ": 1 of 2 layers", lambda inputs: cache.update(*torch.randn(2, 1, 2, 5, 8), 0))
    refused(RuntimeError, "the model must be called once", lambda inputs: [call(inputs), call(inputs)])
    words = "the sequences of a batch cannot be changed inside a step"
    refused(RuntimeError, words, lambda inputs: cache.reset())
    refused(RuntimeError, words, lambda inputs: cache.step([a], 1).__enter__())
    for error, words, more in (
        (ValueError, r"tokens must be \[1, total\] in a step, got 2 rows", {"input_ids": prompt[None].expand(2, -1)}),
        (ValueError, r"key must be \[5, heads, head_dim\] or", {"input_ids": prompt[None, :4]}),
        (NotImplementedError, "attention_mask must be causal, a window or chunks",
         {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}),
        (NotImplementedError, "attention_mask must be the model's own",
         {"attention_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}),
    ):  # fmt: skip
        more |= {"position_ids": None} if "input_ids" in more else {}
        refused(error, words, lambda inputs, more=more: call(inputs, **more))
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    refused(NotImplementedError, "attention must have no dropout in a step", call)
    model.eval().set_attn_implementation("sdpa")
    refused(
        RuntimeError, 'the model must have attn_implementation="attnmask" in a step of a PagedCache', call
    )


# What transformers does with caches


@pytest.mark.long
def test_compiled():
    """The cache is outside of the graphs."""
    model, ids = ready("Llama", num_hidden_layers=1), random_ids(2, 6)
    cache = paged(model)
    torch._dynamo.reset()
    with torch.no_grad():
        right = model(ids).logits
        compiled = torch.compile(model, backend="eager")
        got = [compiled(part, past_key_values=cache).logits for part in ids.split((4, 2), 1)]
    assert_close({"logits": torch.cat(got, dim=1)}, {"logits": right})
    assert cache.get_seq_length() == 6


def test_a_chat_goes_on():
    """Several new tokens behind those in a cache, and tokens that are taken back."""
    model, ids = ready("Mistral"), random_ids(2, TOKENS)
    for cache in (transformers.DynamicCache(), paged(model)):
        with torch.no_grad():
            right = model(ids).logits
            model(ids[:, :5], past_key_values=cache)
            cache.crop(-2)
            assert cache.get_seq_length() == 3
            got = model(ids[:, 3:], past_key_values=cache).logits
        assert_close({"logits": got}, {"logits": right[:, 3:]})
    cache.crop(4)
    assert cache.get_seq_length() == 4
    cache.crop(-9)
    assert cache.get_seq_length() == 0
    assert cache.kv.free_pages == 40


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_beams(name):
    """Beams share the pages of their prompt."""
    model, ids = ready(name), random_ids(2, TOKENS)
    more = GREEDY | {"num_beams": 3, "attention_mask": padding("left")}
    right = model.generate(ids, **more)
    cache = paged(model)
    assert torch.equal(model.generate(ids, past_key_values=cache, **more), right)


def test_rows_are_chosen():
    model, ids = ready("Llama"), random_ids(2, TOKENS)
    cache = paged(model)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 1]))
        got = model(ids[[1, 0, 0], -1:], past_key_values=cache).logits
        right = model(ids).logits[[1, 0, 0], -1:]
    assert_close({"logits": got}, {"logits": right})
    cache.batch_select_indices(torch.tensor([False, True, False]))
    assert cache.kv.free_pages == 40 - 3


def test_assisted_generation():
    """Drafts of a smaller model, which are taken back where they are wrong."""
    model, ids = ready("Llama"), random_ids(1, TOKENS)
    assistant = ready("Llama", num_hidden_layers=1)
    right = model.generate(ids, **GREEDY)
    got = model.generate(ids, assistant_model=assistant, past_key_values=paged(model), **GREEDY)
    assert torch.equal(got, right)


def test_a_decoder_with_an_encoder():
    model = ready("Bart")
    ids = random_ids(2, TOKENS)
    more = {"max_new_tokens": 8, "do_sample": False}
    right = model.generate(ids, **more)
    own = PagedCache(model.config, pages=40, page_size=4)
    cache = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
    assert torch.equal(model.generate(ids, past_key_values=cache, **more), right)
    assert own.kv.free_pages < 40


def with_biases(name, **more):
    """A model whose bias by distance is large, that of layers of its own in UMT5."""
    given = BOTH_SIDES["T5"] | more
    config = getattr(transformers, f"{name}Config")(**given)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(config)
    for module in model.modules():
        if getattr(module, "has_relative_attention_bias", False):
            torch.nn.init.normal_(module.relative_attention_bias.weight, std=3.0)
    model.lm_head = torch.nn.Linear(32, VOCABULARY, bias=False)  # that of embeddings would repeat tokens
    model.set_attn_implementation("attnmask")
    return model.eval()


@later
@pytest.mark.parametrize("name", ["T5", "UMT5"])
def test_generation_with_biases(name, monkeypatch):
    """Tokens and logits are those of transformers' own cache; the pages are read where they lie."""
    model, ids = with_biases(name), random_ids(2, TOKENS)
    more = {"max_new_tokens": 10, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    right = model.generate(ids, **more)
    assert len(set(right.sequences[0].tolist())) > 3
    own = paged(model)
    model.set_attn_implementation("eager")  # which has all keys copied
    cache = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
    assert torch.equal(model.generate(ids, past_key_values=cache, **more).sequences, right.sequences)
    never_gathered(monkeypatch)
    model.set_attn_implementation("attnmask")
    for beams in (1, 3):
        right = model.generate(ids, num_beams=beams, **more)
        own.reset()
        cache = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
        got = model.generate(ids, num_beams=beams, past_key_values=cache, **more)
        assert torch.equal(got.sequences, right.sequences)
        logits = ({"logits": torch.stack(x.logits)} for x in (got, right))
        assert_close(*logits)


@later
def test_biases_of_several_tokens(monkeypatch):
    """Behind those in the cache, with padding, and in steps of sequences of any lengths."""
    never_gathered(monkeypatch)
    model = with_biases("T5", num_decoder_layers=3)
    ids, decoder, sources = random_ids(2, TOKENS), model.decoder, torch.randn(2, 7, 32)
    cache = transformers.EncoderDecoderCache(paged(model), transformers.DynamicCache())
    with torch.no_grad():
        for mask in (None, padding("left")):
            cache = transformers.EncoderDecoderCache(paged(model), transformers.DynamicCache())
            more = {"encoder_hidden_states": sources}
            right = decoder(ids, attention_mask=mask, **more).last_hidden_state
            got = []
            for begin, end in ((0, 4), (4, 10), (10, 11)):
                part = None if mask is None else mask[:, :end]
                inputs = {CACHE: cache, "attention_mask": part} | more
                got.append(decoder(ids[:, begin:end], **inputs).last_hidden_state)
            kept = torch.ones(2, TOKENS, dtype=torch.bool) if mask is None else mask.bool()
            assert_close({"out": torch.cat(got, 1)[kept]}, {"out": right[kept]})


@later
@pytest.mark.parametrize("name", ["T5", "UMT5"])
def test_biases_in_steps(name, monkeypatch):
    """Sequences that are longer than all tokens of a step, and shorter; the decoder alone, of three layers."""
    never_gathered(monkeypatch)
    model = with_biases(name, num_decoder_layers=3)
    decoder, cache = model.decoder, paged(model)
    prompts = [random_ids(length) for length in (TOKENS, 7, 70)]
    ids = [cache.kv.new_sequence() for _ in prompts]
    found = [[] for _ in prompts]
    with torch.no_grad():
        for begin, end in ((0, 2), (2, 5), (5, 6), (6, 70)):
            parts = [prompt[begin:end] for prompt in prompts]
            with cache.step(ids, [len(part) for part in parts]) as inputs:
                out = decoder(torch.cat(parts)[None], **inputs).last_hidden_state[0]
            for each, part in zip(found, out.split([len(part) for part in parts]), strict=True):
                each.append(part)
        for prompt, parts in zip(prompts, found, strict=True):
            right = decoder(prompt[None]).last_hidden_state[0]
            assert_close({"out": torch.cat(parts)}, {"out": right})


@later
@pytest.mark.long
def test_compiled_with_biases(monkeypatch):
    """In batches and steps; the cache is outside of the graphs."""
    never_gathered(monkeypatch)
    model, ids = with_biases("T5", num_decoder_layers=1), random_ids(2, TOKENS)
    torch._dynamo.reset()
    decoder, cache = torch.compile(model.decoder, backend="eager"), paged(model)
    with torch.no_grad():
        right = model.decoder(ids).last_hidden_state
        got = [decoder(part, **{CACHE: cache}).last_hidden_state for part in ids.split((4, 6, 1), 1)]
        assert_close({"out": torch.cat(got, dim=1)}, {"out": right})
        cache = paged(model)
        sequences = [cache.kv.new_sequence() for _ in ids]
        with cache.step(sequences, TOKENS) as inputs:
            out = decoder(ids.reshape(1, -1), **inputs).last_hidden_state
        assert_close({"out": out.reshape(right.shape)}, {"out": right})


@later
def test_biases_that_a_step_cannot_have():
    """What depends on more than distances, or comes from elsewhere; a batch takes it."""
    model = with_biases("T5")
    layer = model.decoder.block[0].layer[0].SelfAttention
    cache, query = paged(model), torch.randn(1, 4, 5, 8)
    bias = torch.randn(1, 4, 5, 5)
    words = (
        "position_bias must be one that its layer computes by distance, as in T5, in a step of a PagedCache"
    )
    with torch.no_grad():
        for module in (layer, torch.nn.Identity()):
            ids = [cache.kv.new_sequence()]
            with pytest.raises(NotImplementedError, match=words), cache.step(ids, 5):
                attention(module, query, *cache.update(query, query, 0), None, position_bias=bias)
            assert cache.kv.lengths(ids) == [0]
        keys = cache.update(query, query, 0)
        got, _ = attention(layer, query, *keys, None, position_bias=bias)
        right = torch.nn.functional.scaled_dot_product_attention(
            query, query, query, bias + torch.full((5, 5), -torch.inf).triu(1)
        )
    assert_close({"out": got.transpose(1, 2)}, {"out": right})


def test_masks_that_are_added():
    """A mask of floats is a bias of the pages."""
    model = ready("Llama")
    cache, x, mask = paged(model), torch.randn(2, 2, 5, 8), torch.randn(2, 1, 3, 8)
    with torch.no_grad():
        cache.update(x, x, 0)
        cache.update(x, x, 1)
        more = torch.randn(2, 2, 3, 8)
        keys = cache.update(more, more, 0)
        got, _ = attention(torch.nn.Identity(), more, *keys, mask)
        whole = torch.cat([x, more], dim=2)
        right = torch.nn.functional.scaled_dot_product_attention(more, whole, whole, mask)
    assert_close({"out": got.transpose(1, 2)}, {"out": right})


def test_a_copy_is_another_cache():
    model, ids = ready("Llama"), random_ids(1, TOKENS)
    cache = paged(model)
    with torch.no_grad():
        model(ids[:, :-2], past_key_values=cache)
        other = copy.deepcopy(cache)
        right = model(ids[:, -2:], past_key_values=cache).logits
        got = model(ids[:, -2:], past_key_values=other).logits
    assert torch.equal(got, right)


def test_a_copy_has_keys_that_nothing_has_attended_to():
    cache = paged(model_of("Llama"), dtype="float32", pages=8)
    sides = torch.randn(2, 1, 2, 5, 8)
    for layer in range(2):
        cache.update(*sides, layer)
    for make in (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))):
        other = make(cache)
        keys, _ = other.update(*torch.randn(2, 1, 2, 1, 8), 0)
        assert torch.equal(keys.clone()[:, :, :5], sides[0])
        assert (cache.get_seq_length(), cache.kv.free_pages) == (5, 6)


def test_pickles_have_a_version():
    cache = paged(model_of("Llama"), dtype="float32", pages=8)
    cache.update(*torch.randn(2, 1, 2, 5, 8), 0)
    cache.update(*torch.randn(2, 1, 2, 5, 8), 1)
    state = cache.__getstate__()
    made = copy.copy(cache)
    made.__setstate__(state)
    assert (repr(made), vars(made).keys()) == (repr(cache), vars(cache).keys())
    names = pickle.dumps(cache).replace(b"attnmask.transformers", b"")
    assert b"attnmask." not in names  # private modules may move
    for version, message in (
        (9, "the PagedCache was pickled by a later version"),
        (None, "must have a version"),
    ):
        with pytest.raises(ValueError, match=message):
            made.__setstate__(state | {"version": version})


def test_layers_that_read_the_keys_of_others():
    """They have no pages of their own, and no step waits for them."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=[32] * 4, num_hidden_layers=4, num_kv_shared_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8, laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    model = transformers.Gemma3nForCausalLM._from_config(config, attn_implementation="attnmask").eval()
    cache, ids = paged(model), random_ids(1, TOKENS)
    assert len(cache.kv.k_pages) == 2
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), model.generate(ids, **GREEDY))
    a = cache.kv.new_sequence()
    with torch.no_grad(), cache.step([a], TOKENS) as inputs:
        got = model(ids, **inputs).logits
        assert torch.equal(got, model(ids).logits)
    assert cache.kv.lengths([a]) == TOKENS


def test_no_copies_inside_a_step():
    model = ready("Llama")
    cache = paged(model)
    with torch.no_grad(), cache.step([cache.kv.new_sequence()], 5) as inputs:
        with pytest.raises(RuntimeError, match="cannot be changed inside a step"):
            copy.deepcopy(cache)
        model(random_ids(1, 5), **inputs)


def test_keys_that_nothing_has_attended_to():
    """They are appended all the same, before anything else is done with their pages."""
    cache = paged(model_of("Llama"), dtype="float32", pages=8)
    sides = torch.randn(2, 1, 2, 5, 8)
    more = torch.randn(2, 1, 2, 1, 8)

    def update(tokens):
        return [cache.update(*tokens, layer)[0] for layer in range(2)][-1]

    update(sides)
    assert torch.equal(update(more).clone(), torch.cat([sides[0], more[0]], dim=2))
    cache.reset()
    assert not cache.kv.k_pages[:, 2:].any()
    update(sides)
    cache.batch_repeat_interleave(2)
    keys = update(more.expand(2, 2, 2, 1, 8).contiguous()).clone()
    assert torch.equal(keys, torch.cat([sides[0], more[0]], dim=2).expand(2, -1, -1, -1))
    cache.reset()
    update(sides)
    cache.crop(-1)
    assert torch.equal(update(more).clone(), torch.cat([sides[0][:, :, :-1], more[0]], dim=2))
    cache.reset()
    update(sides)
    cache.reset()
    other, before = cache.kv.new_sequence(), None
    x = np.ones((8, 2, 8), np.float32)
    with cache.kv.step([other], 8) as step:
        for layer in range(2):
            step.attend(layer, x, x, x)
    before = cache.kv.k_pages.copy()
    update(sides)
    table = cache.kv.block_table([other])[0]
    assert np.array_equal(cache.kv.k_pages[:, table], before[:, table])


def test_documents_in_one_row():
    """Positions that begin again tell documents apart, as with other caches."""
    model, ids = ready("Llama"), random_ids(1, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    with torch.no_grad():
        right = model(ids, position_ids=positions, past_key_values=transformers.DynamicCache()).logits
        got = model(ids, position_ids=positions, past_key_values=paged(model)).logits
    assert torch.equal(got, right)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks_of_users(kind):
    """Of four axes, they take the place of the model's."""
    model, ids = model_of("Llama"), random_ids(2, TOKENS)
    live = (torch.rand(2, 1, TOKENS, TOKENS) < 0.5) | torch.eye(TOKENS, dtype=torch.bool)
    added = torch.where(live, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        right = model(ids, attention_mask=added).logits
        model.set_attn_implementation("attnmask")
        for cache in (transformers.DynamicCache(), paged(model)):
            mask = live if kind == torch.bool else added
            got = model(ids, attention_mask=mask, past_key_values=cache).logits
            assert_close({"logits": got}, {"logits": right})


# Tensors that stand for pages


def test_paged_tensors():
    model, ids = ready("Llama"), random_ids(2, 5)
    cache, plain = paged(model, dtype="float32"), transformers.DynamicCache()
    key, value = torch.randn(2, 2, 2, 5, 8)
    for _ in range(2):
        for layer in range(2):
            got = cache.update(key, value, layer)
            right = plain.update(key, value, layer)
            for one, other in zip(got, right, strict=True):
                assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
                assert torch.equal(one.clone(), other)
                assert torch.equal(one[:, :, -3:].sum(-1), other[:, :, -3:].sum(-1))
                assert one.detach().pages is one.pages
    assert repr(got[0]) == "PagedTensor(k, shape=(2, 2, 10, 8), dtype=torch.float32)"
    for write in (lambda: got[0].__setitem__(0, 0.0), lambda: got[0].zero_()):
        with pytest.raises(TypeError, match="a PagedTensor cannot be written to"):
            write()
    assert not cache.is_compileable
    assert len(cache) == 2
    assert ids.shape == (2, 5)


# Bad input


def test_no_gradient():
    model, ids = ready("Llama"), random_ids(1, 5)
    cache = paged(model)
    with pytest.raises(RuntimeError, match="flash_attention_with_kvcache has no gradient, and key requires"):
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert cache.kv.free_pages == 40


def test_calls_that_fail():
    model, ids = ready("Llama"), random_ids(2, 5)
    cache = paged(model, pages=4)

    def call(ids):
        with torch.no_grad():
            return model(ids, past_key_values=cache)

    with pytest.raises(MemoryError, match="this step needs 6 pages and 4 of 4 are free"):
        call(random_ids(2, 9))
    assert (cache.get_seq_length(), cache.kv.free_pages) == (0, 4)
    call(ids)
    with pytest.raises(ValueError, match="the cache has 2 rows, not 1: call reset"):
        call(ids[:1])
    call(ids[:, :1])  # which goes on
    assert cache.get_seq_length() == 6

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[0].mlp.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        call(ids[:, :1])
    handle.remove()
    words = r"the last call of the model has appended to 1 of 2 layers: reset\(\) the cache"
    for again in (lambda: call(ids[:, :1]), lambda: cache.crop(-1), lambda: cache.step([0], 1).__enter__()):
        with pytest.raises(RuntimeError, match=words):
            again()
    cache.reset()
    assert cache.kv.free_pages == 4
    assert torch.equal(call(ids).logits, model(ids).logits)


def test_keys_of_another_shape():
    model = ready("Llama")
    cache = paged(model)
    key = torch.zeros(1, 2, 3, 8)
    for bad, words in (
        ((key[:, :1], key), "key must have 2 heads of 8 channels as its cache"),
        ((key[..., :4], key), "key must have 2 heads of 8 channels as its cache"),
        ((key, key[..., :4]), "value must have 2 heads of 8 channels as its cache"),
        ((key, key[:, :, :2]), r"value must be \[3, heads, head_dim\] or \[1, 3, heads, head_dim\]"),
    ):
        with pytest.raises(ValueError, match=words):
            cache.update(*bad, 0)
        assert cache.kv.free_pages == 40
    with pytest.raises(TypeError, match="key must be on the CPU, got a tensor on meta"):
        cache.update(key.to("meta"), key, 0)


def test_configs():
    llama = model_of("Llama").config
    for config, more, error, words in (
        (None, {}, TypeError, "config must be a model's config, got None"),
        (llama, {"dtype": "int5"}, TypeError, r"dtype must be float16, .*, got 'int5'"),
        (llama, {"dtype": "int4"}, ValueError, "head_dim must be a multiple of group=64, got 8"),
        (llama, {"dtype": torch.int32}, TypeError, r"dtype must be float16, .*, got 'int32'"),
        (llama, {"pages": 0}, ValueError, "pages must be at least 1, got 0"),
        (llama, {"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
        (transformers.DeepseekV3Config(), {}, ValueError, "config must have keys per head, got latent attention"),
        (transformers.Qwen3NextConfig(num_hidden_layers=4), {}, ValueError,
         "config must have only attention layers, got 'linear_attention'"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            PagedCache(config, **{"pages": 3} | more)


EXAMPLE = ROOT / "examples" / "serve_tiny.py"


@pytest.mark.long
@pytest.mark.skipif(not EXAMPLE.exists(), reason="the tests run without the examples")
def test_the_example():
    """It compares tokens itself, before it measures."""
    module, lines = runpy.run_path(str(EXAMPLE)), []
    speeds = module["serve"](requests=4, new_tokens=5, report=lines.append)
    assert set(speeds) == {"one by one", "padded", *module["CACHES"]}
    assert all(speed > 0 for speed in speeds.values())
    assert sum("tokens/s" in line for line in lines) == len(speeds)


def test_few_calls_in_python():
    """What the cache fixed when it was made is not asked again for each token."""
    model, package = ready("Llama"), str(ROOT / "attnmask")

    def calls(tokens):
        seen, cache, ids = [], paged(model), random_ids(1, 8)
        sys.setprofile(lambda frame, event, _: event == "call" and seen.append(frame.f_code.co_filename))
        try:
            model.generate(ids, past_key_values=cache, **GREEDY | {"max_new_tokens": tokens})
        finally:
            sys.setprofile(None)
        return sum(name.startswith(package) for name in seen)

    assert 0 < calls(14) - calls(4) <= 10 * 130  # in two layers
